"""The CDNA families in the emulator against float64: each form of their kernels, awkward inputs, planted faults."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from emulated import Emulated
from harness import EXACT, FP8, check, make_plans, make_spec

from mla_codegen.check.emulate.errors import EmulatorError
from mla_codegen.check.reference import Case, make_case
from mla_codegen.plan.resolve import PlanError


@dataclass(frozen=True)
class Form:
    """One way to compute a tile; bounds of the output's relative L2 and of LSE for scores of a few units."""

    family: str
    kv: str
    options: tuple[str, ...]
    kind: str
    block_n: int
    bound: float = EXACT
    lse_bound: float = 5e-3

    def __str__(self) -> str:
        return "-".join([self.family, self.kv, *self.options])


FORMS = [
    Form("cdna3", "fp8_e4m3fn", ("fp8_mma",), "fp8", 64, FP8, 0.15),
    Form("cdna3", "fp8_e4m3fn", (), "fp8_exact", 64),
    Form("cdna3", "fp8_e4m3fnuz", ("fp8_mma",), "fp8", 64, FP8, 0.15),
    Form("cdna3", "bf16", ("xcd_remap", "streaming_loads"), "bf16", 32),
    Form("cdna4", "fp8_e4m3fn", (), "fp8", 128),
    Form("cdna4", "fp8_e4m3fn", ("fp8_mma", "xcd_remap"), "fp8_tile64", 64, FP8, 0.15),
    Form("cdna4", "bf16", ("streaming_loads",), "bf16", 64),
]
ONE_FP8, EXACT_FP8, FNUZ, CDNA3_BF16, CDNA4_FP8, TILE64, CDNA4_BF16 = FORMS
OWN = [form for form in FORMS if form is not FNUZ]  # that is ONE_FP8 without the repair
TARGETS = {"cdna3": "gfx942", "cdna4": "gfx950"}
Build = Callable[..., Emulated]


def spec_of(form: Form, **settings: Any) -> dict[str, Any]:
    """A spec of this form alone. What `make_spec` sets for plain Triton is left to the family."""
    spec = make_spec(TARGETS[form.family], kv=[form.kv], optimizations=list(form.options), **settings)
    spec["defaults"] = {"family": form.family, "optimizations": list(form.options)} | {
        name: value for name, value in settings.items() if name in ("block_h", "num_warps")
    }
    return spec


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> Build:
    """The kernels of a form, built once for each set of settings."""
    folder = tmp_path_factory.mktemp("cdna")
    built: dict[str, Emulated] = {}

    def build_once(form: Form, **settings: Any) -> Emulated:
        key = f"{form} {settings}"
        if key not in built:
            built[key] = Emulated(spec_of(form, **settings), folder, f"cdna_{len(built)}")
        return built[key]

    return build_once


def case_of(form: Form, lens: list[int], **given: Any) -> Case:
    return make_case(lens, kv_dtype=form.kv, **given)


def hold(form: Form, got: tuple[torch.Tensor, torch.Tensor], case: Case) -> None:
    check(got, case, bound=form.bound, lse_bound=form.lse_bound)


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_lengths_around_tiles(form: Form, build: Build) -> None:
    n = form.block_n
    kernels = build(form)
    assert kernels.kernel("any").details.kind == form.kind
    assert kernels.kernel("any").block_n == n
    case = case_of(form, [0, 1, n - 1, n, n + 1, 2 * n + 3])
    hold(form, kernels.run("any_direct", case), case)
    case = case_of(form, [0, 1, n + 1, 3 * n, 3 * n + 1, 4 * n + 5], seed=1)
    hold(form, kernels.run("any", case, 3), case)


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_ragged_query_rows_without_scale(form: Form, build: Build) -> None:
    """Requests of 0 to 4 query rows, int64 ranges, a wrong guess of q_len, rows that see nothing."""
    case = case_of(form, [form.block_n + 3, 2, 0, 40, 7], q_lens=[1, 4, 1, 0, 2], kv_scale=None, index=torch.int64)
    hold(form, build(form).run("any_direct", case), case)
    hold(form, build(form).run("any", case, 2), case)


@pytest.mark.parametrize(
    ("heads", "form"),
    [(8, EXACT_FP8), (8, CDNA4_BF16), *((20, form) for form in OWN), (128, ONE_FP8), (128, CDNA4_BF16)],
    ids=str,
)
def test_heads(heads: int, form: Form, build: Build) -> None:
    kernels = build(form, heads=heads)
    planned = kernels.kernel("any_direct")
    assert planned.head_blocks == -(-heads // planned.block_h)
    case = case_of(form, [form.block_n + 5] if heads == 128 else [form.block_n + 5, 3], heads=heads)
    hold(form, kernels.run("any_direct" if heads == 128 else "any", case, None if heads == 128 else 2), case)


@pytest.mark.parametrize("form", OWN, ids=str)
def test_latent_of_256_columns(form: Form, build: Build) -> None:
    case = case_of(form, [form.block_n * 2 + 5, 3], latent=256)
    hold(form, build(form, latent=256).run("any", case, 2), case)


@pytest.mark.parametrize("form", [ONE_FP8, EXACT_FP8, CDNA4_FP8, CDNA3_BF16], ids=str)
def test_visible_rows_given(form: Form, build: Build) -> None:
    """`kv_visible` says how many KV rows count: as many as there are, fewer, none, and more than there are."""
    lens, visible = [100, 100, 50, 70], [100, 33, 0, 1000]
    case = case_of(form, lens)
    out, lse = build(form).run("any", case, 2, kv_visible=torch.tensor(visible, dtype=torch.int32))
    for request, (length, seen) in enumerate(zip(lens, visible, strict=True)):
        begin = int(case.kv_indptr[request])
        rows = torch.tensor([begin, begin + min(length, seen)], dtype=torch.int32)
        alone = replace(case, q=case.q[request : request + 1], qo_indptr=torch.tensor([0, 1]), kv_indptr=rows)
        hold(form, (out[request : request + 1], lse[request : request + 1]), alone)


@pytest.mark.parametrize("form", [ONE_FP8, CDNA4_FP8, CDNA4_BF16], ids=str)
def test_query_rows_of_no_request_and_strides(form: Form, build: Build) -> None:
    case = case_of(form, [70, 9])
    wide = torch.full((5, 20, 640), float("nan"), dtype=torch.bfloat16)
    wide[:, :16, :576] = 1.0
    wide[2:4, :16, :576] = case.q
    given = replace(case, q=wide[:, :16, :576], qo_indptr=case.qo_indptr + 2)
    out, lse = build(form).run("any_direct", given)
    hold(form, (out[2:4], lse[2:4]), case)
    for row in (0, 1, 4):
        assert (out[row] == 0).all() and (lse[row] == float("-inf")).all()


@pytest.mark.parametrize("form", [EXACT_FP8, CDNA3_BF16, CDNA4_FP8], ids=str)
def test_a_call_without_kv_rows(form: Form, build: Build) -> None:
    case = case_of(form, [0, 0], guard=0)
    for part, splits in (("any_direct", None), ("any", 2)):
        out, lse = build(form).run(part, case, splits)
        assert (out == 0).all() and (lse == float("-inf")).all()


@pytest.mark.parametrize("form", [ONE_FP8, EXACT_FP8, CDNA4_FP8, TILE64], ids=str)
def test_queries_of_any_size(form: Form, build: Build) -> None:
    """q far over and under fp8's range, head by head; one head of zeros."""
    case = case_of(form, [90])
    size = torch.logspace(-6, 6, 16)[None, :, None]
    case = replace(case, q=(case.q * size).to(torch.bfloat16), sm_scale=case.sm_scale * 1e-6)
    case.q[:, 7] = 0
    hold(form, build(form).run("any_direct", case), case)


@pytest.mark.parametrize("form", [ONE_FP8, EXACT_FP8, CDNA4_FP8, TILE64], ids=str)
def test_every_byte(form: Form, build: Build) -> None:
    """All bytes of e4m3fn but its two NaNs, -0 (0x80) among them, and rows of nothing but -0."""
    case = case_of(form, [80, 3])
    bytes_ = torch.tensor([byte for byte in range(256) if byte & 0x7F != 0x7F], dtype=torch.uint8)
    rows = case.kv.view(torch.uint8)
    rows[3:83] = bytes_[torch.randperm(80 * 576, generator=torch.Generator().manual_seed(1)) % len(bytes_)].view(
        80, 576
    )
    rows[40:44] = 0x80
    rows[83:86] = 0x80
    case = replace(case, sm_scale=case.sm_scale * 0.1)
    out, lse = build(form).run("any_direct", case)
    assert (out[1] == 0).all() and torch.isfinite(lse[1]).all()
    hold(form, (out, lse), case)


REPAIR = "latent.store(without_minus_zero(next_latent))"
NOT_FINITE, OFF = "rows that are not finite", "off by more than"
LSE_OFF, OUTSIDE = "LSE off", "load outside argument kv"
FAULTS = {
    "-0 taken for NaN": (ONE_FP8, REPAIR, "latent.store(next_latent)", NOT_FINITE),
    "-0 of the rope columns": (
        ONE_FP8,
        "rope.store(without_minus_zero(next_rope))",
        "rope.store(next_rope)",
        NOT_FINITE,
    ),
    "e4m3fnuz at its own value": (ONE_FP8, "KV_SCALE = gl.constexpr(2.0)", "KV_SCALE = gl.constexpr(1.0)", OFF),
    "octets halved the other way": (ONE_FP8, "(octets >> 32).to(gl.uint32)", "octets.to(gl.uint32)", OFF),
    "two columns swapped": (ONE_FP8, "0x07030602", "0x03070602", OFF),
    "columns left as the MMA has them": (
        EXACT_FP8,
        "[0, 2, 1]), [BLOCK_H, LATENT]",
        "[0, 1, 2]), [BLOCK_H, LATENT]",
        OFF,
    ),
    "q's second number forgotten": (
        EXACT_FP8,
        "return rounded, (x - rounded.to(gl.float32))",
        "return rounded, (x - x)",
        OFF,
    ),
    "rows past the end not clamped": (
        CDNA4_FP8,
        "SliceLayout(1, LATENT_LOAD)), visible - 1)",
        "SliceLayout(1, LATENT_LOAD)), visible + 8)",
        OUTSIDE,
    ),
    "repeated rows counted twice": (
        CDNA4_FP8,
        "(kv_row >= whole) & ",
        "",
        OFF,
    ),
    "rows past the end counted": (CDNA3_BF16, " & (kv_row < end)", "", OFF),
    "weights' shift left in LSE": (TILE64, "gl.log2(weight_sum) - P_SHIFT", "gl.log2(weight_sum)", LSE_OFF),
    "rope against the wrong part of q": (CDNA4_FP8, "[2, 0, 1]), [2 * ROPE", "[0, 2, 1]), [2 * ROPE", OFF),
    "scale forgotten in the result": (CDNA4_FP8, "(scale / weight_sum)", "(1.0 / weight_sum)", OFF),
    "sums not rescaled": (CDNA4_BF16, "acc * alpha[:, None]", "acc", OFF),
    "words of the wrong rows": (
        CDNA3_BF16,
        "byte_select(row1, row0, 0x05040100)",
        "byte_select(row0, row1, 0x05040100)",
        OFF,
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_caught(fault: str, build: Build) -> None:
    form, old, new, message = FAULTS[fault]
    case = case_of(form, [5 * form.block_n + 3, 2])
    with pytest.raises((AssertionError, EmulatorError), match=message):
        hold(form, build(form).run_changed("any", old, new, case, 2), case)


REFUSED: dict[str, tuple[Form, dict[str, Any], dict[str, Any], str]] = {
    "rope": (ONE_FP8, {"rope": 32}, {}, r"latent dims of 256 and 512 with a rope dim of 64, not 512 \+ 32"),
    "latent": (CDNA4_BF16, {"latent": 128}, {}, "not 128"),
    "q": (CDNA4_FP8, {"q": "fp16"}, {}, "q and out are bf16"),
    "heads of a program": (ONE_FP8, {}, {"block_h": 64}, "block_h is 16 or 32 in it, not 64"),
    "heads of two numbers": (EXACT_FP8, {}, {"block_h": 32}, "block_h is 16 in it, not 32"),
    "tile": (CDNA4_FP8, {}, {"block_n": 64}, "block_n is 128 in it for fp8_e4m3fn KV without fp8_mma, not 64"),
    "tile of fp8_mma": (TILE64, {}, {"block_n": 128}, "block_n is 64 in it for fp8_e4m3fn KV with fp8_mma, not 128"),
    "tile of bf16": (CDNA3_BF16, {}, {"block_n": 64}, "block_n is 32 in it for bf16 KV, not 64"),
    "waves": (ONE_FP8, {}, {"num_warps": 8}, "num_warps 8: 4 split 16 heads"),
    "stages": (CDNA4_FP8, {}, {"num_stages": 3}, "num_stages 3: one tile is in LDS"),
    "occupancy": (CDNA4_FP8, {}, {"waves_per_eu": 3}, "waves_per_eu 3: the kernels need more than 170 registers"),
    "another fp8": (replace(TILE64, kv="fp8_e4m3fnuz"), {}, {}, "not of fp8_e4m3fnuz"),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_refused(what: str) -> None:
    form, model, settings, message = REFUSED[what]
    spec = spec_of(form, **model)
    spec["defaults"] |= settings
    with pytest.raises(PlanError, match=message):
        make_plans(spec)


def test_portable_kernels_stay_within_reach() -> None:
    """What the family cannot do is left to plain Triton, which says why."""
    spec = spec_of(CDNA3_BF16, rope=32)
    del spec["defaults"]["family"]
    kernel = make_plans(spec).kernels[0]
    assert kernel.family == "triton"
    assert any(line.startswith("family cdna3: it serves latent dims of") for line in kernel.not_taken)
