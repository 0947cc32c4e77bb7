"""The operators of torch.library: opcheck, torch.compile without a graph break, and the same bits as the plain call."""

import importlib
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml

from mla_codegen.check.reference import Case, make_case
from mla_codegen.plan.resolve import make_plan
from mla_codegen.publish.write import fresh_build, publish
from mla_codegen.spec.load import parse_spec

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
    plan = make_plan(parse_spec(yaml.safe_dump(SPEC), "spec.yaml").spec, "spec.yaml")
    publish(fresh_build([plan], folder / PACKAGE), folder / PACKAGE, {plan.name})
    sys.path.insert(0, str(folder))
    return SimpleNamespace(
        mla_decode=importlib.import_module(f"{PACKAGE}.op").mla_decode,
        plain=importlib.import_module(f"{PACKAGE}.dispatch").mla_decode,
        ops=getattr(torch.ops, PACKAGE),
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
    torch.library.opcheck(package.ops.mla_decode_into.default, (*arguments, None, None, None, workspace))


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


def test_errors_are_those_of_the_plain_call(package: SimpleNamespace) -> None:
    case = make("bf16", "cuda" if torch.cuda.is_available() else "cpu")
    with pytest.raises(TypeError, match=r"kv is torch\.float32"):
        package.mla_decode(case.q, case.kv.float(), case.qo_indptr, case.kv_indptr, sm_scale=1.0)
    with pytest.raises(ValueError, match="no kernel for 3 heads"):
        package.mla_decode(case.q[:, :1].expand(-1, 3, -1), case.kv, case.qo_indptr, case.kv_indptr, sm_scale=1.0)
