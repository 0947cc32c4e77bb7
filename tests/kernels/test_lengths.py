"""Requests of any length: empty, shorter than a tile or a split, among rows that hold NaN, with several query rows."""

from typing import Any

import pytest
import torch
from harness import BF16, MODES, PORTABLE, PORTABLE_FP8, REPORTS, Builder, Mode, check

from mla_codegen.check.reference import Case, make_case, reference

# One mode of each way to mask and merge; the AMD one rounds to fp8 and repairs bytes.
WAYS = [BF16, PORTABLE_FP8, next(m for m in MODES if str(m) == "gfx942-fp8_e4m3fn-packed_fp8-fp8_mma")]
each_way = pytest.mark.parametrize("mode", WAYS, ids=str)
CASES = ["empty-request", "all-empty", "empty-last-padding", "stale-scratch", "nan-around-ranges"]


def case_of(report: dict[str, Any], mode: Mode, **changes: Any) -> Case:
    """The report's inputs; the KV rows of its `nan_requests`, which no query row sees, hold NaN."""
    given = {"lens": report["lens"], "q_lens": report.get("q_lens", 1), "guard": report.get("guard", 3), **changes}
    case = make_case(kv_dtype=mode.kv, **given)
    for request in report.get("nan_requests", ()):
        case.kv[case.kv_indptr[request] : case.kv_indptr[request + 1]] = float("nan")
    return case


def test_the_cases_of_this_file_are_reports() -> None:
    assert set(CASES) <= set(REPORTS)


@each_way
@pytest.mark.parametrize("name", CASES)
def test_reported_lengths(build: Builder, mode: Mode, name: str) -> None:
    """By the call, by the shape's kernel and by both general ones."""
    kernels = build(mode.spec())
    case = case_of(REPORTS[name], mode)
    for got in (
        kernels.decode(case),
        kernels.run(kernels.shaped.name, case),
        kernels.run(kernels.general(direct=True), case),
        kernels.run(kernels.general(direct=False), case, splits=5),
    ):
        check(got, case, bound=mode.bound, lse_bound=mode.lse_bound)


@each_way
@pytest.mark.parametrize("q_len", REPORTS["q-len-not-power-of-two"]["each_q_len"])
def test_query_rows_of_a_request_see_their_own_prefix(build: Builder, mode: Mode, q_len: int) -> None:
    kernels = build(mode.spec())
    case = case_of(REPORTS["q-len-not-power-of-two"], mode, q_lens=q_len)
    case.q[:] = case.q[:1]  # the mask alone tells the rows apart
    got = kernels.run(kernels.general(direct=True), case)
    check(got, case, bound=mode.bound, lse_bound=mode.lse_bound)
    assert len(got[1][:, 0].unique()) == 2 * q_len


@each_way
@pytest.mark.parametrize("q_len", REPORTS["causal-future-rows"]["each_q_len"])
def test_rows_of_the_future_have_no_weight(build: Builder, mode: Mode, q_len: int) -> None:
    """Each request's last q_len - 1 rows hold a huge number: its first query row sees none of them."""
    report = REPORTS["causal-future-rows"]
    kernels = build(mode.spec())
    case = case_of(report, mode, q_lens=q_len)
    huge = min(report["future"], torch.finfo(case.kv.dtype).max)
    for end in case.kv_indptr[1:].tolist():
        case.kv[end - q_len + 1 : end] = torch.full((), huge).to(case.kv.dtype)
    out, lse = kernels.run(kernels.shaped.name, case)
    want, want_lse = reference(case, 512)
    first = case.qo_indptr[:-1].long()
    assert (out[first].double() - want[first]).norm() <= mode.bound * want[first].norm()
    assert (lse[first] - want_lse[first]).abs().max() <= mode.lse_bound


@pytest.mark.parametrize("mode", [BF16, WAYS[2]], ids=str)
@pytest.mark.parametrize("splits", [None, 3], ids=["direct", "splits"])
def test_ragged_query_rows(build: Builder, mode: Mode, splits: int | None) -> None:
    """Requests of 0 to 5 query rows: the guess of a row's request is wrong, and the search must find it."""
    kernels = build(mode.spec())
    case = make_case([40, 7, 0, 65, 3, 2], q_lens=[0, 5, 2, 0, 1, 4], kv_dtype=mode.kv, seed=3)
    got = kernels.run(kernels.general(direct=splits is None), case, splits)
    check(got, case, bound=mode.bound, lse_bound=mode.lse_bound)


@pytest.mark.parametrize("splits", [None, 2], ids=["direct", "splits"])
def test_rows_of_no_request_see_nothing(build: Builder, splits: int | None) -> None:
    """Query rows before the first request and after the last, as in a batch padded for a captured graph."""
    kernels = build(BF16.spec())
    case = make_case([40, 9], q_lens=[2, 3], seed=4)
    ahead, behind = 3, 4
    case.q = torch.cat([torch.full_like(case.q[:ahead], float("nan")), case.q, case.q[:behind]])
    case.qo_indptr += ahead
    got = kernels.run(kernels.general(direct=splits is None), case, splits)
    alone = torch.zeros(case.q.shape[0], dtype=torch.bool)
    alone[:ahead] = alone[-behind:] = True
    assert (got[0][alone] == 0).all()
    assert (got[1][alone] == float("-inf")).all()
    case.q[:ahead] = 0
    check(got, case)


@pytest.mark.parametrize("mode", PORTABLE, ids=str)
def test_more_query_rows_than_kv_rows(build: Builder, mode: Mode) -> None:
    """The first of them see nothing."""
    kernels = build(mode.spec())
    case = make_case([3, 1], q_lens=[5, 4], kv_dtype=mode.kv, seed=5)
    got = kernels.run(kernels.general(direct=True), case)
    check(got, case, bound=mode.bound, lse_bound=mode.lse_bound)
    assert (got[1][:, 0] == float("-inf")).tolist() == [True, True, False, False, False, True, True, True, False]
