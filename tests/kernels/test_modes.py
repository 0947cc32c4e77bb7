"""Every way to decode KV elements, on every target that has it: ragged lengths, every fp8 byte, several scales."""

from functools import cache

import pytest
import torch
from harness import ALIKE, DISTINCT, MODES, RAGGED, REPORTS, SHAPE, Builder, Mode, check, code_of, make_plans

from mla_codegen.check.reference import make_case
from mla_codegen.render.templates import _kernel_text
from mla_codegen.runtime.formats import ELEMENTS

FP8_MODES = [mode for mode in MODES if mode.kv.startswith("fp8")]


def each(modes: list[Mode]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("mode", modes, ids=str)


@cache
def code(mode: Mode) -> list[str]:
    """Of its kernels, for one query token and for several."""
    shapes = [SHAPE, {"batch": 2, "q_len": 4, "kv_len": 64, "splits": 2, "block_h": 16}]
    plan = make_plans(mode.spec(heads=4, shapes=shapes))
    return [code_of(_kernel_text(f"{kernel.family}/kernel.py.jinja", kernel)) for kernel in plan.kernels]


@each(ALIKE)
def test_other_targets_have_the_same_code(mode: Mode) -> None:
    """Else the mode belongs in MODES: its kernels are held by nothing else."""
    assert any(code(other) == code(mode) for other in DISTINCT if other.kv == mode.kv)


@each(MODES)
def test_ragged_lengths(build: Builder, mode: Mode) -> None:
    """The shape's own kernel: empty and one-row requests, lengths around tiles, a split without rows."""
    kernels = build(mode.spec())
    case = make_case(RAGGED, kv_dtype=mode.kv)
    check(kernels.run(kernels.shaped.name, case), case, bound=mode.bound, lse_bound=mode.lse_bound)


@each(MODES)
def test_general_kernels(build: Builder, mode: Mode) -> None:
    kernels = build(mode.spec())
    case = make_case([33, 0, 80], q_lens=[2, 1, 1], kv_dtype=mode.kv, seed=1)
    for got in (
        kernels.run(kernels.general(direct=True), case),
        kernels.run(kernels.general(direct=False), case, splits=2),
    ):
        check(got, case, bound=mode.bound, lse_bound=mode.lse_bound)


@each(FP8_MODES)
def test_every_byte_counts_as_its_value(build: Builder, mode: Mode) -> None:
    """A KV row that is read alone comes out as it is: each byte that is a number, in every column of a word."""
    kernels = build(mode.spec())
    values = torch.arange(256, dtype=torch.uint8).view(torch_dtype(mode)).float()
    numbers = (~values.isnan()).nonzero().flatten()
    case = make_case([1] * 4, kv_dtype=mode.kv, kv_scale=None, guard=0)
    bytes_of = [numbers.roll(row).repeat(3)[:576] for row in range(4)]
    case.kv.view(torch.uint8)[:] = torch.stack(bytes_of).to(torch.uint8)
    got = kernels.run(kernels.general(direct=True), case)
    want = values[torch.stack(bytes_of)][:, None, :512].expand(4, 16, 512)
    rows, _, columns = (got[0].float() != want).nonzero(as_tuple=True)
    assert not len(rows), f"bytes {torch.stack(bytes_of)[rows, columns].unique()[:16].tolist()}, ..."
    check(got, case, bound=mode.bound, lse_bound=10 * mode.lse_bound)  # rope columns; scores of up to a hundred


def torch_dtype(mode: Mode) -> torch.dtype:
    return ELEMENTS[mode.kv].dtype


@each([mode for mode in FP8_MODES if mode.options == ("packed_fp8",) or mode.target == "gfx942"])
def test_kv_scale(build: Builder, mode: Mode) -> None:
    """sm_scale undoes kv_scale in the scores, so that out alone follows it."""
    kernels = build(mode.spec())
    case = make_case([40], kv_dtype=mode.kv, kv_scale=None, seed=2)
    sm_scale = case.sm_scale
    for scale in REPORTS["fp8-scale"]["kv_scale"]:
        case.kv_scale = None if scale is None else torch.tensor([scale])
        case.sm_scale = sm_scale / (scale or 1.0)
        check(kernels.run(kernels.general(direct=True), case), case, bound=mode.bound, lse_bound=mode.lse_bound)
