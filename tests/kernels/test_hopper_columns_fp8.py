"""Hopper kernels of blocks of 32 and of 64 columns with fp8 KV, in the emulator against float64.

What they share with those of bf16 KV, the tests of these hold; here is what is fp8's own, and every path of its code.
"""

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from emulated import Emulated
from hard_numbers import hold_non_finite, hold_ones, hold_sinks
from harness import EXACT, Got, check, make_plans
from pages import run as run_paged
from test_hopper_columns import shaped, spec_of
from test_query_blocks import LENS, Q_LENS, close, seen_alone

from mla_codegen.check.emulate.errors import EmulatorError
from mla_codegen.check.reference import Case, in_pages, make_case
from mla_codegen.inspect import Compiled, compile_jobs
from mla_codegen.inspect.plans import subjects_of

KV = "fp8_e4m3fn"
LATENT = 256  # the least that they serve
Build = Callable[..., Emulated]
each_width = pytest.mark.parametrize("width", [32, 64])


def fp8_spec(**settings: Any) -> dict[str, Any]:
    spec = spec_of(**{"latent": LATENT, **settings})
    spec["dtypes"]["kv"] = [KV]
    return spec


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> Build:
    """The kernels of a spec, built once for each set of arguments of `fp8_spec`."""
    folder = tmp_path_factory.mktemp("hopper_columns_fp8")
    built: dict[str, Emulated] = {}

    def build_once(**settings: Any) -> Emulated:
        key = str(settings)
        if key not in built:
            built[key] = Emulated(fp8_spec(**settings), folder, f"hopper_columns_fp8_{len(built)}")
        return built[key]

    return build_once


def mixed(heads: int, lens: list[int] = LENS, q_lens: list[int] = Q_LENS, **settings: Any) -> Case:
    return make_case(lens, q_lens=q_lens, heads=heads, **{"latent": LATENT, "rope": 64, "kv_dtype": KV, **settings})


def held(got: Got, case: Case) -> None:
    check(got, case, bound=EXACT, lse_bound=5e-3)


@pytest.mark.parametrize(
    ("heads", "q_len", "width", "columns"),
    [
        (16, 2, 32, "queries"),
        (16, 4, 64, "queries"),
        (20, 3, 64, "queries"),
        (96, 1, 64, "heads"),
        (20, 1, 32, "heads"),
    ],
)
def test_every_mix_of_lengths(build: Build, heads: int, q_len: int, width: int, columns: str) -> None:
    """Splits and none, none of no rows, of one, of a tile; query tokens from none to more than a block has."""
    kernels = build(heads=heads, q_len=q_len, block_h=width)
    kernel = kernels.plan.kernels[0]
    assert (kernel.block_h, kernel.columns) == (width, columns)
    case = mixed(heads, [300, 0, 1, 65], [2, 1, 3, 5]) if heads > 16 else mixed(heads, [300, 0, 1, 65, 64, 33])
    held(kernels.run(shaped(kernels), case), case)
    part = f"any_q{q_len}" if kernel.packed else "any"
    held(kernels.run(f"{part}_direct", case), case)
    if heads <= 16:
        held(kernels.run(part, case, 7), case)


@each_width
def test_ranks_of_deepseek(build: Build, width: int) -> None:
    """With rows of q and KV that belong to no request."""
    kernels = build(latent=512, block_h=width)
    case = mixed(16, [400, 70], [3, 2], latent=512, index=torch.int64)
    q = torch.full((12, *case.q.shape[1:]), float("nan"), dtype=case.q.dtype)
    q[3:8] = case.q
    out, lse = kernels.run(shaped(kernels), replace(case, q=q, qo_indptr=case.qo_indptr + 3))
    held((out[3:8], lse[3:8]), case)
    assert (out[[0, 1, 2, 8, 11]] == 0).all() and (lse[[0, 1, 2, 8, 11]] == float("-inf")).all()


def test_balanced(build: Build) -> None:
    kernels = build(heads=96, q_len=1)
    case = mixed(96, [700, 0, 1, 130], [1, 2, 1, 1])
    held(kernels.run("balanced", case), case)


@each_width
@pytest.mark.parametrize("splits", [None, 3], ids=["direct", "splits"])
def test_each_column_has_its_own_limit(build: Build, splits: int | None, width: int) -> None:
    """`kv_visible` in any order: none, all, more than there are; rows past a request's greatest limit are NaN."""
    kernels = build(heads=4, block_h=width)
    case = mixed(4)
    visible = torch.tensor([5, 100, 1000, 0, 65, 1, 64, 0, 2, 1, 0, 33, 2, 5, 31], dtype=torch.int32)
    poisoned = replace(case, kv=case.kv.clone())
    first = case.kv_indptr.tolist()
    for request, rows in enumerate(visible.split(Q_LENS)):
        most = int(rows.max()) if len(rows) else 0
        poisoned.kv[first[request] + min(most, LENS[request]) : first[request + 1]] = float("nan")
    part = "any_q4" if splits else "any_q4_direct"
    close(kernels.run(part, poisoned, splits, kv_visible=visible), seen_alone(case, visible, LATENT))


@each_width
@pytest.mark.parametrize("part", ["any_q4_direct", "any_q4"])
def test_what_is_not_finite_stays_where_it_is_read(build: Build, part: str, width: int) -> None:
    kernels = build(heads=4, block_h=width)
    splits = None if part.endswith("direct") else 3
    hold_non_finite(lambda case: kernels.run(part, case, splits), KV, 64, heads=4, latent=LATENT, rope=64)


@each_width
def test_sinks(build: Build, width: int) -> None:
    """Scores far above the rest: small weights must survive f16."""
    kernels = build(latent=512, block_h=width)
    hold_ones(lambda case: kernels.run("any_direct", case), KV)
    hold_sinks(lambda case: kernels.run("any_direct", case), KV, 2 * EXACT, 5e-3)


@each_width
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_rising_scores(build: Build, sign: float, width: int) -> None:
    """Scores that rise along the rows move references in nearly every tile, of both warpgroups."""
    case = mixed(4, [300, 65], [2, 4])
    rising = torch.linspace(0.1, 30.0, len(case.kv))[:, None]
    case = replace(
        case, kv=(case.kv.float() * rising).clamp(-448, 448).to(case.kv.dtype), sm_scale=sign * case.sm_scale
    )
    held(build(heads=4, block_h=width).run("any_q4", case, 2), case)


@each_width
def test_q_is_not_rounded(build: Build, width: int) -> None:
    """Every score is one product of q's 8 significant bits: the LSE shows each of them."""
    case = mixed(4, [70], [1], kv_scale=None)
    values = torch.zeros(len(case.kv), LATENT + 64)
    values[int(case.kv_indptr[0]) + torch.arange(70), torch.arange(70)] = 16.0
    q = torch.zeros_like(case.q)
    q[0, :, :70] = torch.linspace(1, 2, 4 * 70).view(4, 70).to(q.dtype)
    case = replace(case, q=q, kv=values.to(case.kv.dtype), sm_scale=1.0)
    check(build(heads=4, block_h=width).run("any_direct", case), case, bound=EXACT, lse_bound=1e-5)


@each_width
@pytest.mark.parametrize("page_size", [16, 128])
def test_pages(build: Build, page_size: int, width: int) -> None:
    """Of a part of a tile, of two; what lies behind a request in its last page is NaN."""
    kernels = build(heads=4, page_size=page_size, block_h=width)
    case = mixed(4)
    paged = in_pages(case, page_size)
    for form in ("table", "list"):
        held(run_paged(kernels.module("any_q4_direct"), kernels.kernel("any_q4_direct"), paged, form), case)


@pytest.mark.parametrize(
    ("old", "new", "what"),
    [
        ("        mbarrier.wait(full.index(slot), tile // STAGES & 1)\n", "", "landed|never written"),
        ("        fence_async_shared()  # wgmma reads the weights through the async proxy\n", "", "fence"),
        ("            clean(W, word_ring.index(slot))\n", "            pass\n", "finite"),
        ("        mbarrier.wait(empty.index(slot), (tile // STAGES & 1) ^ 1)\n", "", "barrier|still|read"),
        ("    mbarrier.arrive(sums_full.index(W))\n", "", "deadlock"),
    ],
    ids=["wait", "fence", "tail", "refill", "deadlock"],
)
def test_planted_faults_are_caught(build: Build, old: str, new: str, what: str) -> None:
    case = mixed(4, [400, 500], [4, 3])
    case.kv[-1] = float("nan")
    with pytest.raises((EmulatorError, AssertionError), match=what):
        held(build(heads=4, block_h=64).run_changed("any_q4_direct", old, new, case), case)


@pytest.fixture(scope="module")
def compiled() -> list[Compiled]:
    plans = [make_plans(fp8_spec(latent=512, block_h=width)) for width in (32, 64)]
    found = subjects_of([(plan, plan.kernels[:1]) for plan in plans])
    jobs = [subject.case.job for subject in found if subject.stage.kernel == "stage1" and not subject.large]
    outcomes = compile_jobs(jobs, parallel=2)
    assert len(outcomes) == 2 and all(isinstance(outcome, Compiled) for outcome in outcomes), outcomes
    return outcomes


def test_nothing_spills(compiled: list[Compiled]) -> None:
    for outcome in compiled:
        assert not re.search(r"\b(LDL|STL)\b", outcome.sass)
