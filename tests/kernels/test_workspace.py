"""A caller's workspace in every kind of kernel: NaN beforehand, just large enough, and nothing behind it written."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from emulated import Emulated
from harness import BF16, PORTABLE_FP8, Builder, Got, Kernels, Mode, check, make_spec

from mla_codegen.check.reference import Case, make_case
from mla_codegen.runtime.scratch import size_of

GUARD = 64  # bytes behind the workspace, which must stay as they are
LENS, Q_LENS = [130, 0, 17, 64], [1, 2, 1, 3]
Run = Callable[[torch.Tensor | None], Got]


def held_to(size: int, device: torch.device, run: Run) -> Got:
    """The result of `run` with a workspace of `size` bytes; with one less it must be refused."""
    memory = torch.full((size + GUARD,), 0xFF, dtype=torch.uint8, device=device)  # NaN, seen as fp32
    with pytest.raises(ValueError, match=f"workspace has {size - 1:,} bytes .* needs {size:,} contiguous bytes"):
        run(memory[: size - 1])
    got = run(memory[:size])
    assert (memory[size:] == 0xFF).all()
    assert not (memory[:size] == 0xFF).all()
    return got


@pytest.mark.parametrize("part", ["shaped", "any", "any_direct"])
@pytest.mark.parametrize("mode", [BF16, PORTABLE_FP8], ids=str)
def test_plain_triton(build: Builder, mode: Mode, part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without an LSE for the caller, so that direct kernels need scratch too. Nothing else is allocated."""
    kernels = build(mode.spec(heads=2))
    name = {"shaped": kernels.shaped.name, "any": kernels.general(False), "any_direct": kernels.general(True)}[part]
    splits = (3,) if part == "any" else ()
    case = make_case(LENS, q_lens=Q_LENS, heads=2, kv_dtype=mode.kv)
    on = case.to(kernels.device)
    rows = case.q.shape[0]
    out = torch.full((rows, 2, 512), float("nan"), dtype=torch.bfloat16, device=kernels.device)
    module = kernels.module(name)
    args = (on.q, on.kv, on.qo_indptr, on.kv_indptr, None, on.kv_scale, on.sm_scale, out, None, *splits)

    def run(workspace: torch.Tensor | None) -> Got:
        with monkeypatch.context() as patch:
            patch.setattr(torch, "empty", lambda *_, **__: pytest.fail("allocated"))
            module.run(*args, workspace)
        return out.cpu(), torch.empty(0)

    got, _ = held_to(size_of(module.scratch(rows, *splits)), kernels.device, run)
    _, lse = kernels.run(name, case, *splits)
    check((got, lse), case, bound=mode.bound, lse_bound=mode.lse_bound)


def gluon_spec(family: str, target: str, kv: str) -> dict[str, Any]:
    spec = make_spec(target, kv=[kv], optimizations=["exp2"])
    spec["defaults"] = {"family": family, "optimizations": ["exp2"] if family == "hopper" else []}
    spec["shapes"] = [{"batch": 2, "kv_len": 256, "splits": 3}]
    return spec


@pytest.mark.parametrize("part", ["b2_kv256", "any", "any_direct"])
@pytest.mark.parametrize(
    ("family", "target", "kv"),
    [
        ("hopper", "sm_90", "fp8_e4m3fn"), ("hopper", "sm_90", "bf16"), ("cdna3", "gfx942", "fp8_e4m3fn"),
        ("cdna3", "gfx942", "bf16"), ("cdna4", "gfx950", "fp8_e4m3fn"), ("cdna4", "gfx950", "bf16"),
    ],
)  # fmt: skip
def test_gluon(family: str, target: str, kv: str, part: str, tmp_path: Path) -> None:
    kernels = Emulated(gluon_spec(family, target, kv), tmp_path, f"workspace_{family}_{kv}_{part}")
    splits = 2 if part == "any" else None
    case = make_case([70, 3], q_lens=[1, 2], kv_dtype=kv)
    want = kernels.run(part, case, splits)
    if part == "any_direct":  # the LSE is the caller's: no scratch at all
        got = kernels.run(part, case, splits, workspace=torch.empty(0, dtype=torch.uint8))
    else:
        numbers = kernels.module(part).scratch(3, *([splits] if splits else []))
        got = held_to(size_of(numbers), torch.device("cpu"), lambda w: kernels.run(part, case, splits, workspace=w))
    assert torch.equal(got[0].view(torch.int16), want[0].view(torch.int16))
    assert torch.equal(got[1].view(torch.int32), want[1].view(torch.int32))
    check(got, case, lse_bound=5e-3)


def decode(kernels: Kernels, case: Case, **options: Any) -> torch.Tensor:
    on = case.to(kernels.device)
    given = {"sm_scale": on.sm_scale, "kv_scale": on.kv_scale, **options}
    return kernels.dispatcher.mla_decode(on.q, on.kv, on.qo_indptr, on.kv_indptr, **given)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32, torch.bfloat16, torch.int64])
def test_mla_decode_takes_a_workspace_of_any_type_and_shape(build: Builder, dtype: torch.dtype) -> None:
    kernels = build(BF16.spec(heads=2))
    case = make_case([130, 17], heads=2)
    workspace = torch.full((4, 1 << 18), 0xFF, dtype=torch.uint8, device=kernels.device).view(dtype)
    out = decode(kernels, case, workspace=workspace)
    assert torch.equal(out, decode(kernels, case))


def test_a_workspace_that_will_not_do(build: Builder) -> None:
    kernels = build(BF16.spec(heads=2))
    case = make_case([130, 17], heads=2)
    memory = torch.zeros(1 << 20, dtype=torch.uint8, device=kernels.device)
    wrong = {
        r"1 bytes after a multiple of 16": memory[1:],
        r"strides \(2,\)": memory[::2],
        r"workspace has 0 bytes": memory[:0],
    }
    for message, workspace in wrong.items():
        with pytest.raises(ValueError, match=message):
            decode(kernels, case, max_kv_len=130, workspace=workspace)


@pytest.mark.gpu
@pytest.mark.parametrize("kv", ["fp8_e4m3fn", "bf16"])
def test_nothing_is_allocated_on_a_gpu(kv: str, tmp_path: Path) -> None:
    """With out, lse and workspace given; and `workspace_bytes` is enough for each call."""
    from mla_codegen.runtime.builds import target_of
    from mla_codegen.runtime.workspace import workspace_bytes

    device = torch.device("cuda", 0)
    target = target_of(device) if target_of(device) in ("sm_90", "gfx942", "gfx950") else "portable"
    spec = make_spec(target, kv=[kv], optimizations=["exp2"], shapes=[{"batch": 4, "kv_len": 256, "splits": 3}])
    spec["defaults"] = {"optimizations": ["exp2"]}
    kernels = Kernels(spec, tmp_path, f"allocation_{kv}", device)
    workspace = torch.empty(workspace_bytes(kernels.dispatcher, 8), dtype=torch.uint8, device=device)
    for lens in ([256, 255, 100, 0], [9000, 3], [5] * 8, [300, 20, 1]):
        case = make_case(lens, kv_dtype=kv)
        on = case.to(device)
        out = torch.empty(len(lens), 16, 512, dtype=torch.bfloat16, device=device)
        lse = torch.empty(len(lens), 16, device=device)

        tensors = (on.q, on.kv, on.qo_indptr, on.kv_indptr)
        given = {"sm_scale": on.sm_scale, "kv_scale": on.kv_scale, "max_kv_len": max(lens), "out": out, "lse": lse}
        kernels.dispatcher.mla_decode(*tensors, workspace=workspace.fill_(0xFF), **given)
        before = torch.cuda.memory_stats(device)["allocation.all.allocated"]
        kernels.dispatcher.mla_decode(*tensors, workspace=workspace.fill_(0xFF), **given)
        assert torch.cuda.memory_stats(device)["allocation.all.allocated"] == before
        check((out.cpu(), lse.cpu()), case, lse_bound=5e-3)
