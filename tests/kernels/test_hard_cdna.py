"""Hard numbers in the CDNA families, emulated: NaN and infinity, sinks, strides. See `hard_numbers`."""

from collections.abc import Callable
from pathlib import Path

import hard_compiled
import pytest
import torch
from emulated import Emulated
from hard_numbers import Run, hold_non_finite, hold_ones, hold_sinks
from harness import EXACT, FP8
from test_cdna import (
    CDNA3_BF16,
    CDNA4_BF16,
    CDNA4_FP8,
    EXACT_FP8,
    FORMS,
    ONE_FP8,
    OWN,
    TILE64,
    Build,
    Form,
    build,
    case_of,
)  # fmt: skip

from mla_codegen.check.emulate.errors import EmulatorError
from mla_codegen.check.workers import Workers

__all__ = ["build"]
each_form = pytest.mark.parametrize("form", FORMS, ids=str)


def runner(kernels: Emulated, splits: int | None = None) -> Run:
    return lambda case: kernels.run("any_direct" if splits is None else "any", case, splits)


@pytest.mark.parametrize("splits", [None, 3], ids=["direct", "splits"])
@each_form
def test_what_is_not_finite_stays_where_it_is_read(form: Form, splits: int | None, build: Build) -> None:
    hold_non_finite(runner(build(form), splits), form.kv, form.block_n)


@pytest.mark.parametrize("form", [ONE_FP8, EXACT_FP8, TILE64, CDNA4_BF16], ids=str)
def test_what_is_not_finite_with_other_numbers_of_heads_and_columns(form: Form, build: Build) -> None:
    hold_non_finite(runner(build(form, latent=256), 2), form.kv, form.block_n, latent=256)
    hold_non_finite(runner(build(form, heads=20), 2), form.kv, form.block_n, heads=20)


@pytest.mark.parametrize("byte", [0x7F, 0xFF])
@pytest.mark.parametrize("form", [ONE_FP8, EXACT_FP8, CDNA4_FP8, TILE64], ids=str)
def test_nan_bytes_of_every_column(form: Form, byte: int, build: Build) -> None:
    """One row a request, one NaN in it, in each of a few hundred columns and each of a tile's rows."""
    columns = [*range(0, 512, 37), *range(508, 516), 575]
    lens = [form.block_n + 5] * len(columns)
    case = case_of(form, lens)
    for request, column in enumerate(columns):
        row = int(case.kv_indptr[request]) + (7 * request) % lens[0]
        case.kv.view(torch.uint8)[row, column] = byte
    out, lse = build(form).run("any_direct", case)
    assert out.isnan().all() and lse.isnan().all()


@each_form
def test_ones(form: Form, build: Build) -> None:
    hold_ones(runner(build(form)), form.kv)


@each_form
def test_sinks(form: Form, build: Build) -> None:
    """bf16 weights reach as far down as scores do; fp8 ones end where their subnormals do, 10 nats down."""
    one = form.bound == FP8
    hold_sinks(runner(build(form)), form.kv, FP8 if one else EXACT, 0.1 if one else 5e-3, most=10.0 if one else 18.0)


@pytest.mark.parametrize("form", OWN, ids=str)
def test_heads_far_apart(form: Form, build: Build) -> None:
    """Head 15 lies 15 * 2^28 numbers behind head 0. No memory stands behind it: the address is read off the refusal."""
    case = case_of(form, [3])
    module = build(form).module("any_direct")
    given = {
        "q": case.q, "kv": case.kv, "out": torch.empty(1, 16, 512, dtype=torch.bfloat16), "lse": torch.empty(1, 16),
        "qo_indptr": case.qo_indptr, "kv_indptr": case.kv_indptr, "kv_visible": None, "kv_scale": case.kv_scale,
        "sm_scale": 0.1, "batch": 1, "q_len": 1, "stride_qt": 16 * 576, "stride_qh": 1 << 28,
    }  # fmt: skip
    planned = build(form).kernel("any_direct")
    with pytest.raises(EmulatorError, match=f"load outside argument q.* to {15 * (1 << 28) + 511}\\)"):
        module.stage1[(1,)](*[given[name] for name in module.stage1.arg_names], num_warps=planned.num_warps)


@pytest.mark.parametrize(("spec", "kv"), [("mi300", "fp8_e4m3fn"), ("mi355x", "bf16")])
def test_compiled_kernels(spec: str, kv: str, tmp_path: Path) -> None:
    """The same of the machine code: conversions, maxima and MMAs as the instructions have them."""
    path = Path(__file__).parents[2] / "specs" / f"{spec}.yaml"
    with Workers(1, {"TRITON_INTERPRET": "0", "OMP_NUM_THREADS": "1"}) as workers:
        ((_, outcome),) = workers.run(hard_compiled.hold, [(str(path), kv, str(tmp_path))], 900.0)
    assert not outcome.failure, outcome.failure
    assert outcome.value == []


Hold = Callable[[Run, Form], None]


def non_finite(run: Run, form: Form) -> None:
    hold_non_finite(run, form.kv, form.block_n)


def first_row(run: Run, form: Form) -> None:
    """NaN in the first of three tiles."""
    case = case_of(form, [3 * form.block_n])
    case.kv.view(torch.uint8)[int(case.kv_indptr[0]), 5] = 0x7F
    assert run(case)[0].isnan().all()


def ones(run: Run, form: Form) -> None:
    hold_ones(run, form.kv)


def sinks(run: Run, form: Form) -> None:
    hold_sinks(run, form.kv, EXACT, 5e-3)


FAULTS: dict[str, tuple[Form, Hold, str, str]] = {
    "infinity below": (CDNA4_BF16, non_finite, "gl.exp2(below) + below * 0.0", "gl.exp2(below)"),
    "masked rows not finite": (CDNA3_BF16, non_finite, "gl.constexpr(-3.0e38)", 'gl.constexpr(float("-inf"))'),
    "bytes of NaN as numbers": (ONE_FP8, non_finite, "found != 0", "found != found"),
    "NaN of the last tile alone": (EXACT_FP8, first_row, "latent_nan |=", "latent_nan ="),
    "NaN of the rope columns": (ONE_FP8, non_finite, "rope_nan |= nan_bytes", "_ = nan_bytes"),
    "ones that are not": (ONE_FP8, ones, "ONE = gl.constexpr(0x40)", "ONE = gl.constexpr(0x41)"),
    "weights in fp8": (
        CDNA4_FP8,
        sinks,
        "weights_of(scores - m_new[:, None]).to(gl.bfloat16)",
        "weights_of(scores - m_new[:, None]).to(FP8).to(gl.bfloat16)",
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_caught(fault: str, build: Build) -> None:
    form, hold, old, new = FAULTS[fault]
    kernels = build(form)
    with pytest.raises(AssertionError):
        hold(lambda case: kernels.run_changed("any_direct", old, new, case), form)
