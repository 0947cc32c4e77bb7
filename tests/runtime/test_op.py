"""The operators of torch.library: opcheck, torch.compile without a graph break, and the same bits as the plain call."""

import importlib
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from builds import build, plan_of

from mla_codegen.check.modules import import_file
from mla_codegen.check.reference import Case, make_case, reference, relative_l2

HEADS, LATENT, ROPE = 2, 64, 32
SPEC = {
    "target": "portable",
    "model": {"num_heads": HEADS, "kv_lora_rank": LATENT, "qk_rope_head_dim": ROPE},
    "dtypes": {"kv": ["bf16", "fp8_e4m3fn"]},
    "defaults": {"block_n": 32, "num_stages": 1, "optimizations": ["exp2", "peeled_tail", "direct_out", "packed_fp8"]},
    "shapes": [{"batch": 2, "kv_len": 64, "splits": 2}],
}
PACKAGE = "operator_build"
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """The generated package's dispatcher, its operators, and the function over them."""
    folder = tmp_path_factory.mktemp("operators")
    build([plan_of(SPEC, "spec.yaml")], folder / PACKAGE)
    sys.path.insert(0, str(folder))
    return SimpleNamespace(
        mla_decode=importlib.import_module(f"{PACKAGE}.op").mla_decode,
        plain=importlib.import_module(f"{PACKAGE}.dispatch").mla_decode,
        ops=importlib.import_module(f"{PACKAGE}.op").operators,
        folder=folder,
    )


def given(case: Case) -> dict[str, Any]:
    return {"sm_scale": case.sm_scale, "kv_scale": case.kv_scale}


def make(kv: str, device: str, lens: list[int] | None = None, q_lens: list[int] | int = 1) -> Case:
    if device == "cpu" and torch.cuda.is_available():
        pytest.skip("kernels are compiled for the GPU here, not interpreted")
    return make_case(
        lens or [40, 3], q_lens=q_lens, heads=HEADS, latent=LATENT, rope=ROPE, kv_dtype=kv
    ).to(device)  # fmt: skip


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kv", ["bf16", "fp8_e4m3fn"])
def test_opcheck(package: SimpleNamespace, device: str, kv: str) -> None:
    """Schema, fake implementation and dispatch, with static and with symbolic shapes."""
    case = make(kv, device)
    tensors = (case.q, case.kv.view(torch.uint8) if kv != "bf16" else case.kv, case.qo_indptr, case.kv_indptr)
    torch.library.opcheck(package.ops.mla_decode.default, (*tensors, case.sm_scale, case.kv_scale))
    out = torch.empty(case.q.shape[0], HEADS, LATENT, dtype=torch.bfloat16, device=device)
    lse = torch.empty(case.q.shape[:2], device=device)
    visible = torch.tensor([3, 2], dtype=torch.int32, device=device)
    arguments = (*tensors, out, lse, case.sm_scale, case.kv_scale, visible, 40)
    torch.library.opcheck(package.ops.mla_decode_into.default, arguments)
    workspace = torch.zeros(4096, dtype=torch.float32, device=device)  # zeros: opcheck compares, and NaN is not NaN
    torch.library.opcheck(
        package.ops.mla_decode_into.default, (*arguments, None, None, None, 2, False, None, None, None, workspace)
    )


def test_the_schema_declares_what_is_written(package: SimpleNamespace) -> None:
    written = {
        name: [argument.name for argument in getattr(package.ops, name).default._schema.arguments if argument.is_write]
        for name in ("mla_decode", "mla_decode_into")
    }
    assert written == {"mla_decode": [], "mla_decode_into": ["out", "lse", "workspace"]}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_without_a_break_it_gives_the_same_bits(package: SimpleNamespace, device: str, backend: str) -> None:
    workspace = torch.empty(1 << 16, dtype=torch.uint8, device=device)

    def step(q: torch.Tensor, case: Case, out: torch.Tensor) -> tuple[torch.Tensor, ...]:
        new, lse = package.mla_decode(
            q * 2, case.kv, case.qo_indptr, case.kv_indptr, return_lse=True, **given(case)
        )  # fmt: skip
        package.mla_decode(q, case.kv, case.qo_indptr, case.kv_indptr, out=out, **given(case))
        third = package.mla_decode(
            out[:, :, :1] + q, case.kv, case.qo_indptr, case.kv_indptr, workspace=workspace, **given(case)
        )  # fmt: skip
        fourth = package.mla_decode(
            q, case.kv, case.qo_indptr, case.kv_indptr, workspace=workspace, **given(case)
        )  # fmt: skip
        return new + 1, lse, out * 2, third - fourth

    compiled = torch.compile(step, fullgraph=True, backend=backend)
    for lens, q_lens in (([40, 3], 1), ([7, 50, 0], [1, 3, 2])):  # the second call has other shapes
        case = make("bf16", device, lens, q_lens)
        want_out = torch.zeros(case.q.shape[0], HEADS, LATENT, dtype=torch.bfloat16, device=device)
        got_out = want_out.clone()
        want = step(case.q, case, want_out)
        got = compiled(case.q, case, got_out)
        for one, other in zip([*got, got_out], [*want, want_out], strict=True):
            assert torch.equal(one, other)


@pytest.mark.parametrize("device", DEVICES)
def test_it_takes_what_the_plain_call_takes(package: SimpleNamespace, device: str) -> None:
    case = make("fp8_e4m3fn", device, [33, 5], [1, 2])
    tensors = (case.q, case.kv, case.qo_indptr, case.kv_indptr)
    want, want_lse = package.plain(*tensors, return_lse=True, **given(case))
    assert torch.equal(package.mla_decode(*tensors, **given(case)), want)
    out, lse = torch.empty_like(want), torch.empty_like(want_lse)
    with pytest.raises(ValueError, match=r"lse is torch\.float16"):
        package.mla_decode(*tensors, **given(case), lse=want_lse.half())
    for options in ({"out": out}, {"lse": lse}, {"out": out, "lse": lse}):
        out.fill_(7)
        lse.fill_(7)
        got, got_lse = package.mla_decode(*tensors, return_lse=True, **options, **given(case))
        assert torch.equal(got, want) and torch.equal(got_lse, want_lse)
        assert got is out if "out" in options else got is not out
        assert got_lse is lse if "lse" in options else got_lse is not lse


def fill(case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    """out and LSE to write into."""
    out = torch.full((*case.q.shape[:2], LATENT), float("nan"), dtype=torch.bfloat16, device=case.q.device)
    return out, torch.full(case.q.shape[:2], float("nan"), device=case.q.device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("needs", ["q", "kv", "kv_scale"])
def test_a_backward_says_decode_only(package: SimpleNamespace, device: str, needs: str) -> None:
    """Of each result, new or written into; the values are those of a call without grad."""
    case = make("bf16", device)
    tensors = {"q": case.q, "kv": case.kv, "kv_scale": torch.ones(1, device=device)}
    tensors[needs] = tensors[needs].clone().requires_grad_()
    given = (tensors["q"], tensors["kv"], case.qo_indptr, case.kv_indptr)
    options = {"sm_scale": case.sm_scale, "kv_scale": tensors["kv_scale"]}
    with torch.no_grad():
        want = package.mla_decode(*given, return_lse=True, **options)
    assert not any(one.requires_grad for one in want)
    out, lse = fill(case)
    for results in (
        package.mla_decode(*given, return_lse=True, **options),
        package.mla_decode(*given, return_lse=True, out=out, lse=lse, **options),
        package.ops.mla_decode(*given, case.sm_scale, tensors["kv_scale"]),
    ):
        for result, right in zip(results, want, strict=True):
            assert result.requires_grad and torch.equal(result, right)
            with pytest.raises(RuntimeError, match=r"decode only.*torch\.no_grad"):
                result.float().sum().backward(retain_graph=True)
    assert out.requires_grad and lse.requires_grad
    assert tensors[needs].grad is None


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("into", [False, True])
def test_a_compiled_backward_says_decode_only(package: SimpleNamespace, device: str, backend: str, into: bool) -> None:
    """torch.compile traces the backward with the forward, so it says so at once. Without grad it compiles."""
    case = make("bf16", device)

    def step(q: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
        return package.mla_decode(q * 2, case.kv, case.qo_indptr, case.kv_indptr, out=out, **given(case)) * 2

    q, out = case.q.clone().requires_grad_(), fill(case)[0] if into else None
    compiled = torch.compile(step, fullgraph=True, backend=backend)
    with torch.no_grad():
        assert torch.equal(compiled(q, out), step(q, out))
    with pytest.raises(Exception, match="decode only"):
        compiled(q, fill(case)[0] if into else None).sum().backward()


@pytest.mark.parametrize("device", DEVICES)
def test_opcheck_with_grad(package: SimpleNamespace, device: str) -> None:
    case = make("bf16", device)
    q = case.q.clone().requires_grad_()
    tensors, tests = (case.kv, case.qo_indptr, case.kv_indptr), ("test_schema", "test_autograd_registration")
    torch.library.opcheck(package.ops.mla_decode.default, (q, *tensors, case.sm_scale), test_utils=tests)
    torch.library.opcheck(package.ops.mla_decode_into.default, (q, *tensors, *fill(case), 0.1), test_utils=tests)


def test_plain_results_claim_no_grad(package: SimpleNamespace) -> None:
    case = make("bf16", "cuda" if torch.cuda.is_available() else "cpu")
    q = case.q.clone().requires_grad_()
    for result in package.plain(q, case.kv, case.qo_indptr, case.kv_indptr, return_lse=True, **given(case)):
        assert not result.requires_grad


def load(folder: Path, name: str) -> SimpleNamespace:
    """A build as a package of that name."""
    for old in [one for one in sys.modules if one == name or one.startswith(f"{name}.")]:
        del sys.modules[old]
    import_file(folder / "__init__.py", name)
    return SimpleNamespace(
        op=importlib.import_module(f"{name}.op"), dispatch=importlib.import_module(f"{name}.dispatch")
    )


def compiles(module: SimpleNamespace, case: Case) -> torch.Tensor:
    """What a call gives, plain, by its operator and compiled alike, and as float64 has it."""
    tensors = (case.q, case.kv, case.qo_indptr, case.kv_indptr)
    want: torch.Tensor = module.dispatch.mla_decode(*tensors, sm_scale=case.sm_scale)
    assert relative_l2(want, reference(case, want.shape[-1])[0]) < 3e-3
    torch._dynamo.reset()
    compiled = torch.compile(module.op.mla_decode, fullgraph=True, backend="aot_eager")
    for got in (
        module.op.mla_decode(*tensors, sm_scale=case.sm_scale),
        compiled(*tensors, sm_scale=case.sm_scale),
        module.op.operators.mla_decode(*tensors, case.sm_scale)[0],
    ):
        assert torch.equal(got, want)
    return want


def test_builds_of_one_name(tmp_path: Path) -> None:
    """Two folders `same`, of different models: as packages of two names, and one after the other under one name."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    latents = {"one": 64, "two": 128}
    cases, folders = {}, {}
    for name, latent in latents.items():
        spec = {**SPEC, "model": {**SPEC["model"], "kv_lora_rank": latent}}
        plan = plan_of(spec, "spec.yaml")
        folders[name] = tmp_path / name / "same"
        build([plan], folders[name])
        cases[name] = make_case([40, 3], heads=HEADS, latent=latent, rope=ROPE, kv_dtype="bf16").to(device)
    by_name = {name: load(folders[name], f"{name}_same") for name in latents}
    in_turn = {name: load(folders[name], "same") for name in latents}
    for name, latent in latents.items():
        for module in (by_name[name], in_turn[name]):
            assert compiles(module, cases[name]).shape[-1] == latent
    spaces = [module.op.operators.name for module in (*by_name.values(), *in_turn.values())]
    assert spaces[:3] == ["one_same", "two_same", "same"]
    assert re.fullmatch(r"same_[0-9a-f]{8}", spaces[3])


def test_a_package_that_is_imported_again(tmp_path: Path) -> None:
    """importlib.reload of each module, and an import after all were forgotten: operators and compiled calls go on."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    plan = plan_of(SPEC, "spec.yaml")
    folder = tmp_path / "reloaded"
    build([plan], folder)
    case = make_case([40, 3], heads=HEADS, latent=LATENT, rope=ROPE, kv_dtype="bf16").to(device)
    first = load(folder, "reloaded_build")
    compiled = torch.compile(first.op.mla_decode, fullgraph=True, backend="aot_eager")
    tensors = (case.q, case.kv, case.qo_indptr, case.kv_indptr)
    want = compiled(*tensors, sm_scale=case.sm_scale)
    for module in ("runtime.op", "dispatch", "op", "runtime.calls", "dispatch", "op"):
        importlib.reload(sys.modules[f"reloaded_build.{module}"])
        compiles(first, case)
    again = load(folder, "reloaded_build")
    assert again.op.operators is first.op.operators
    compiles(again, case)
    compiles(first, case)
    assert torch.equal(compiled(*tensors, sm_scale=case.sm_scale), want)


def test_a_namespace_of_others(tmp_path: Path) -> None:
    """Operators of somebody else under the package's name."""
    others = torch.library.Library("taken_by_others", "DEF")
    others.define("mla_decode(Tensor q) -> Tensor")
    plan = plan_of(SPEC, "spec.yaml")
    build([plan], tmp_path / "taken")
    module = load(tmp_path / "taken", "taken_by_others")
    assert module.op.operators.name.startswith("taken_by_others_")
    compiles(module, make("bf16", "cuda" if torch.cuda.is_available() else "cpu"))


def test_errors_are_those_of_the_plain_call(package: SimpleNamespace) -> None:
    case = make("bf16", "cuda" if torch.cuda.is_available() else "cpu")
    with pytest.raises(TypeError, match=r"kv is torch\.float32"):
        package.mla_decode(case.q, case.kv.float(), case.qo_indptr, case.kv_indptr, sm_scale=1.0)
    with pytest.raises(ValueError, match="no kernel for 3 heads"):
        package.mla_decode(case.q[:, :1].expand(-1, 3, -1), case.kv, case.qo_indptr, case.kv_indptr, sm_scale=1.0)
