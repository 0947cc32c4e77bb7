"""The Hopper family: in the emulator against float64, what the plan refuses, what the compiler makes, who may call."""

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
from emulated import Emulated
from harness import EXACT, Kernels, check, make_plans, make_spec

from mla_codegen.check.emulate.errors import EmulatorError
from mla_codegen.check.reference import Case, make_case
from mla_codegen.inspect import Compiled, compile_jobs
from mla_codegen.inspect.plans import subjects_of
from mla_codegen.plan.resolve import PlanError


@dataclass(frozen=True)
class Form:
    """A KV element type and a tile; the bound of LSE is for scores of a few units."""

    kv: str
    settings: dict[str, int] = field(default_factory=dict)
    lse_bound: float = 1e-4

    def __str__(self) -> str:
        return "-".join([self.kv, *(f"{name}{value}" for name, value in self.settings.items())])


FP8, BF16 = Form("fp8_e4m3fn", {}, 5e-3), Form("bf16")
FORMS = [FP8, Form("fp8_e4m3fn", {"block_n": 128}, 5e-3), BF16, Form("bf16", {"num_stages": 1})]
each_form = pytest.mark.parametrize("form", FORMS, ids=str)
each_kv = pytest.mark.parametrize("form", [FP8, BF16], ids=str)
Build = Callable[..., Emulated]


def spec_of(form: Form, splits: int = 3, **model: Any) -> dict[str, Any]:
    """A spec of this form alone; `model` as in `make_spec`."""
    spec = make_spec("sm_90", kv=[form.kv], optimizations=["exp2"], **model)
    spec["defaults"] = {"family": "hopper", "optimizations": ["exp2"], **form.settings}
    spec["shapes"] = [{"batch": 2, "kv_len": 256, "splits": splits}]
    return spec


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> Build:
    """The kernels of a form, built once for each set of settings."""
    folder = tmp_path_factory.mktemp("hopper")
    built: dict[str, Emulated] = {}

    def build_once(form: Form, splits: int = 3, **model: Any) -> Emulated:
        key = f"{form} {splits} {model}"
        if key not in built:
            built[key] = Emulated(spec_of(form, splits, **model), folder, f"hopper_{len(built)}")
        return built[key]

    return build_once


def held(got: tuple[torch.Tensor, torch.Tensor], case: Case, form: Form) -> None:
    check(got, case, bound=EXACT, lse_bound=form.lse_bound)


@each_form
def test_ragged_lengths(build: Build, form: Form) -> None:
    """Empty and one-row requests, lengths around tiles and splits, splits without rows, NaN before and behind."""
    kernels = build(form)
    tile = kernels.kernel("b2_kv256").block_n
    case = make_case([0, 1, tile - 1, tile, tile + 1, 3 * tile + 1, 300], kv_dtype=form.kv)
    held(kernels.run("b2_kv256", case), case, form)


@each_form
def test_direct_with_several_query_rows(build: Build, form: Form) -> None:
    """The causal rule, int64 ranges, requests that the guess misses, no scale."""
    case = make_case([70, 3, 0, 129], q_lens=[3, 5, 1, 0], kv_scale=None, kv_dtype=form.kv, index=torch.int64, seed=1)
    held(build(form).run("any_direct", case), case, form)


@each_kv
def test_splits_at_run_time(build: Build, form: Form) -> None:
    kernels = build(form, heads=4)
    case = make_case([200, 0, 65], q_lens=[1, 1, 2], heads=4, kv_dtype=form.kv, seed=2)
    for splits in (2, 5):
        held(kernels.run("any", case, splits), case, form)


@each_kv
def test_balanced(build: Build, form: Form) -> None:
    """Long beside short and empty requests, several query rows that the guess misses, rows of no request."""
    kernels = build(form, heads=20)
    case = make_case([700, 0, 1, 65, 130], q_lens=[1, 1, 3, 1, 2], heads=20, kv_dtype=form.kv, seed=9)
    held(kernels.run("balanced", case), case, form)


@each_kv
def test_balanced_sees_what_it_is_told(build: Build, form: Form) -> None:
    """`kv_visible`, int64 ranges, no scale; a query row behind the last request's gives 0 and -inf."""
    kernels = build(form)
    case = make_case([300, 80, 7], kv_scale=None, kv_dtype=form.kv, index=torch.int64, seed=10)
    owned = Case(case.q[:2], case.kv, case.qo_indptr[:3], case.kv_indptr[:3], case.sm_scale, None)
    rest = Case(case.q, case.kv, case.qo_indptr[:3], case.kv_indptr[:3], case.sm_scale, None)
    visible = torch.tensor([1000, 80, 5], dtype=torch.int32)
    out, lse = kernels.run("balanced", rest, kv_visible=visible)
    held((out[:2], lse[:2]), owned, form)
    assert (out[2] == 0).all() and (lse[2] == float("-inf")).all()


@each_kv
@pytest.mark.parametrize("heads", [1, 20, 48])
def test_head_counts(build: Build, form: Form, heads: int) -> None:
    kernels = build(form, 2, heads=heads)
    case = make_case([70, 9], heads=heads, kv_dtype=form.kv, seed=3)
    held(kernels.run("b2_kv256", case), case, form)
    held(kernels.run("any_direct", case), case, form)


@each_kv
@pytest.mark.parametrize(("latent", "rope"), [(128, 32), (256, 64), (512, 128)])
def test_ranks(build: Build, form: Form, latent: int, rope: int) -> None:
    kernels = build(form, 2, heads=16, latent=latent, rope=rope)
    case = make_case([70, 130], latent=latent, rope=rope, kv_dtype=form.kv, seed=4)
    held(kernels.run("b2_kv256", case), case, form)


@each_kv
def test_the_neighbours_rows_may_hold_nan(build: Build, form: Form) -> None:
    """The last tile of a request reaches into the next one, whose rows must not come to a product."""
    kernels = build(form)
    case = make_case([70, 100, 30], kv_dtype=form.kv, seed=5)
    begin, end = case.kv_indptr[1:3].tolist()
    case.kv[begin:end] = float("nan")
    out, lse = kernels.run("b2_kv256", case)
    assert out[[0, 2]].isfinite().all() and lse[[0, 2]].isfinite().all()


@each_kv
def test_an_empty_pool(build: Build, form: Form) -> None:
    case = make_case([0, 0], guard=0, kv_dtype=form.kv)
    assert case.kv.shape[0] == 0
    for part in ("b2_kv256", "any_direct"):
        held(build(form).run(part, case), case, form)


@each_kv
def test_rows_seen_are_given(build: Build, form: Form) -> None:
    """`kv_visible` takes the place of the causal rule: more than there are, none, and one tile and one row."""
    kernels = build(form)
    case = make_case([100, 80], q_lens=[2, 1], kv_dtype=form.kv, seed=6)
    visible = torch.tensor([65, 1000, 0], dtype=torch.int32)
    out, lse = kernels.run("any_direct", case, kv_visible=visible)
    first = case.kv_indptr[:1].tolist()[0]
    alone = Case(case.q[:2], case.kv, torch.tensor([0, 1, 2]), torch.tensor([0, 0, 0]), case.sm_scale, case.kv_scale)
    for row, rows in ((0, 65), (1, 100)):
        seen = Case(
            alone.q[row : row + 1], case.kv, torch.tensor([0, 1]), torch.tensor([first, first + rows]),
            case.sm_scale, case.kv_scale,
        )  # fmt: skip
        held((out[row : row + 1], lse[row : row + 1]), seen, form)
    assert (out[2] == 0).all() and (lse[2] == float("-inf")).all()


@each_kv
@pytest.mark.parametrize(("offset", "columns"), [(0, 640), (0, 584), (3, 640)], ids=["strided", "unfit", "unaligned"])
def test_q_of_any_strides(build: Build, form: Form, offset: int, columns: int) -> None:
    """Strides and addresses that copies of 16 bytes cannot take are copied first."""
    kernels = build(form)
    case = make_case([70, 9], kv_dtype=form.kv, seed=7)
    pool = torch.full((2, 19, columns + offset), float("nan"), dtype=torch.bfloat16)
    pool[:, :16, offset : offset + 576] = case.q
    case.q = pool[:, :16, offset : offset + 576]
    held(kernels.run("any_direct", case), case, form)


def test_large_q_does_not_overflow(build: Build) -> None:
    """Each head of q is scaled to fp8's range."""
    case = make_case([70, 9], kv_dtype=FP8.kv, seed=8)
    factor = 2.0**40
    case.q, case.sm_scale = case.q * factor, case.sm_scale / factor
    held(build(FP8).run("any_direct", case), case, FP8)


@each_kv
@pytest.mark.parametrize(
    ("old", "new", "what"),
    [
        ("if left < BLOCK_N:", "if left < 0:", "finite"),
        ("        mbarrier.wait(full.index(slot), tile // STAGES & 1)\n", "", "wait"),
        ("    fence_async_shared()  # wgmma reads q through the async proxy\n", "", "fence"),
        ("tile + STAGES < tiles", "tile + STAGES <= tiles", "on its way"),
    ],
    ids=["tail", "wait", "fence", "refill"],
)
def test_planted_faults_are_caught(build: Build, form: Form, old: str, new: str, what: str) -> None:
    case = make_case([200], kv_dtype=form.kv, seed=9)
    # A fault shows as a wrong result or stops the emulator; the kernel's text is loaded alone, without its package.
    kernels = build(form)
    name = kernels.kernel("any_direct").name
    path = kernels.folder / kernels.plan.name / f"{name}.py"
    text = path.read_text(encoding="utf-8")
    assert old in text
    path.write_text(text.replace(old, new), encoding="utf-8")
    kernels._modules.pop(name, None)
    try:
        with pytest.raises((EmulatorError, AssertionError), match=what):
            held(kernels.run("any_direct", case), case, form)
    finally:
        path.write_text(text, encoding="utf-8")
        kernels._modules.pop(name, None)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"kv": ["fp8_e4m3fnuz"]}, "fp8_e4m3fnuz"),
        ({"q": "fp16", "out": "fp16"}, "bf16"),
        ({"latent": 1024}, "1024"),
        ({"block_n": 32}, "block_n"),
    ],
    ids=["kv", "q", "rank", "tile"],
)
def test_what_it_cannot_serve_goes_to_plain_triton(changes: dict[str, Any], reason: str) -> None:
    spec = make_spec("sm_90", **{"kv": ["bf16"], "optimizations": ["exp2", "packed_fp8"], **changes})
    tile = {"block_n": changes["block_n"]} if "block_n" in changes else {}
    spec["defaults"] = {"optimizations": ["exp2", "packed_fp8"], **tile}
    for kernel in make_plans(spec).kernels:
        assert kernel.family == "triton"
        (line,) = (line for line in kernel.not_taken if line.startswith("family hopper:"))
        assert reason in line


@pytest.mark.parametrize(
    ("settings", "what"),
    [({"num_warps": 8}, "num_warps 8"), ({"num_stages": 4}, "shared memory"), ({"family": "triton"}, "column_blocks")],
)
def test_settings_that_cannot_work(settings: dict[str, Any], what: str) -> None:
    spec = spec_of(BF16)
    spec["defaults"] |= settings
    spec["shapes"][0]["column_blocks"] = 2
    with pytest.raises(PlanError, match=what):
        make_plans(spec)


def test_no_line_is_too_long(build: Build) -> None:
    for form in FORMS:
        for path, text in build(form).files.items():
            if path.startswith("spec/"):
                assert max(map(len, text.splitlines())) <= 120, path


@pytest.fixture(scope="module")
def compiled() -> dict[str, Compiled]:
    """Stage 1 of the fp8 kernels with few and many warps, and of the bf16 kernel, compiled for sm_90."""
    plans = [make_plans(spec_of(form)) for form in FORMS[:3]]
    found = [subject for plan in plans for subject in subjects_of([(plan, plan.kernels[:1])])]
    jobs = [subject.case.job for subject in found if subject.stage.kernel == "stage1" and not subject.large]
    outcomes = compile_jobs(jobs, parallel=2)
    assert all(isinstance(outcome, Compiled) for outcome in outcomes), outcomes
    return dict(zip(map(str, FORMS), outcomes, strict=False))


def test_nothing_spills(compiled: dict[str, Compiled]) -> None:
    assert len(compiled) == 3
    for outcome in compiled.values():
        assert not re.search(r"\b(LDL|STL)\b", outcome.sass)


def test_only_what_was_packed_is_widened(compiled: dict[str, Compiled]) -> None:
    """ptxas 12.8 has been seen to widen registers to which no fp8 numbers were written."""
    for name in map(str, FORMS[:2]):
        written: dict[str, str] = {}
        widened = 0
        for line in compiled[name].sass.splitlines():
            found = re.search(r"([A-Z][A-Z0-9_.]+) (R\d+), (?:(R\d+))?", line)
            if not found:
                continue
            opcode, target, source = found.groups()
            if "UNPACK_B" in opcode:
                widened += 1
                assert written.get(source, "").startswith(("F2FP", "PRMT", "LDS", "MOV", "IMAD.MOV")), line
            if not opcode.startswith(("ST", "BAR")):
                written[target] = opcode
        assert widened > 64


def test_who_may_call(tmp_path: Path) -> None:
    """On a CPU Gluon builds are passed over, with the reason."""
    if not triton.knobs.runtime.interpret:
        pytest.skip("the dispatcher takes calls on a CPU only where Triton interprets")
    kernels = Kernels(spec_of(BF16), tmp_path, "gluon_only", torch.device("cpu"))
    case = make_case([9], seed=10)
    with pytest.raises(ValueError, match="mla-codegen verify"):
        kernels.decode(case)
