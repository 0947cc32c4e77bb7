"""The emulator against a Hopper GPU: compiled and emulated kernels give the same numbers within rounding."""

from __future__ import annotations

import types

import pytest
import torch
import triton.language as tl
from emulate_decode import BLOCK, KERNELS, SM_SCALE, SPLITS, case, error, merge, scratch, truth
from test_emulate_faults import TILES, tma_map
from test_emulate_kernels import launch

from mla_codegen.check import emulate
from mla_codegen.check.modules import import_file

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9,
        reason="no sm_90 GPU to compare with",
    ),
]


def compiled(name: str) -> types.ModuleType:
    """The kernels of `kernels/NAME.py` through Triton itself."""
    return import_file(KERNELS / f"{name}.py", f"compiled_{name}")


@pytest.mark.parametrize("lens", [[130, 1, 0, 64, 65], [1000, 333]])
@pytest.mark.parametrize("name", ["hopper_pairs", "hopper_wgmma"])
def test_decode_kernels_equal_the_gpu(name: str, lens: list[int]) -> None:
    c = case(lens)
    module = compiled(name)
    q, kv, indptr, scale = (x.cuda() for x in (c.q, c.kv, c.indptr, c.scale))
    partial, lse = scratch(c, "cuda")
    views = (kv.view(torch.int16), partial)
    if name == "hopper_wgmma":
        views = (*module.descriptors(kv, BLOCK), partial.view(torch.int64))
    module.stage1[(c.slots,)](q, *views, lse, indptr, scale, SM_SCALE, SPLITS=SPLITS, BLOCK=BLOCK, num_warps=4)
    emulated, emulated_lse = launch(name, c)
    # the fp8 wgmma of the hardware adds with fewer bits than float32
    tolerance = 4e-3 if name == "hopper_wgmma" else 1e-5
    torch.testing.assert_close(emulated_lse, lse.cpu(), rtol=0, atol=tolerance)
    seen = (emulated_lse > float("-inf"))[..., None].expand_as(emulated)
    assert error(emulated[seen], partial.cpu()[seen].double()) < 1e-3
    assert error(merge(partial.cpu(), lse.cpu())[0], truth(c)[0]) < 2e-3


@pytest.mark.parametrize("kernel", ["ring", "bulk", "product", "product_from_registers", "scaled", "specialised"])
def test_small_kernels_are_right_on_the_gpu(kernel: str) -> None:
    """What the fault tests break is valid Gluon to begin with."""
    module = compiled("small")
    x = torch.randn(TILES * 16, 64, device="cuda")
    y = torch.full_like(x, float("nan"))
    if kernel == "ring":
        module.ring[(1,)](x, y, TILES, num_warps=4)
        assert torch.equal(x, y)
    elif kernel == "bulk":
        module.bulk[(1,)](tma_map(x), tma_map(y), TILES, num_warps=4)
        assert torch.equal(2 * x, y)
    elif kernel == "specialised":
        module.specialised[(1,)](tma_map(x), y, TILES, num_warps=4)
        assert torch.equal(x, y)
    elif kernel.startswith("product"):
        a, b, c = (
            torch.randn(64, 64).half().cuda(),
            torch.randn(32, 64).half().cuda(),
            torch.empty(64, 32, device="cuda"),
        )
        getattr(module, kernel)[(1,)](a, b, c, num_warps=4)
        torch.testing.assert_close(c, a.float() @ b.float().T, rtol=1e-3, atol=1e-3)
    else:
        out = torch.zeros(129, device="cuda")
        module.scaled[(1,)](x.view(-1), out, 100, num_warps=4)
        assert torch.equal(out[:100], 2 * x.view(-1)[:100])


def both(
    kernel: str, grid: int, x: torch.Tensor, outputs: int, **constants: object
) -> tuple[torch.Tensor, torch.Tensor]:
    """int32 results of `kernels/language.py` emulated and compiled."""
    emulated = torch.zeros(outputs, dtype=torch.int32)
    gpu = torch.zeros(outputs, dtype=torch.int32, device="cuda")
    getattr(emulate.load(KERNELS / "language.py", "language"), kernel)[(grid,)](x, emulated, **constants)
    getattr(compiled("language"), kernel)[(grid,)](x.cuda(), gpu, **constants)
    return emulated, gpu.cpu()


EVERY_BF16 = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)


@pytest.mark.parametrize("target", [tl.float8e4nv, tl.float8e5, tl.float32, tl.float16])
def test_all_bf16_values_convert_as_on_the_gpu(target: tl.dtype) -> None:
    emulated, gpu = both("convert", 256, EVERY_BF16, 65536, SIZE=256, TO=target)
    real = ~torch.isnan(EVERY_BF16.float())
    assert torch.equal(emulated[real], gpu[real])


@pytest.mark.parametrize("target", [tl.float8e4nv, tl.float8e5, tl.bfloat16, tl.float16, tl.int32])
def test_float32_values_convert_as_on_the_gpu(target: tl.dtype) -> None:
    draw = torch.Generator().manual_seed(0)
    scale = torch.randint(-24, 20, (65536,), generator=draw).double().exp2()
    x = (torch.randn(65536, generator=draw, dtype=torch.float64) * scale).float()
    x[:6] = torch.tensor([0.0, -0.0, float("inf"), float("-inf"), 1e38, -1e38])
    emulated, gpu = both("convert", 256, x, 65536, SIZE=256, TO=target)
    assert torch.equal(emulated, gpu)


@pytest.mark.parametrize("source", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_all_fp8_values_convert_as_on_the_gpu(source: torch.dtype) -> None:
    x = torch.arange(256, dtype=torch.uint8).view(source)
    emulated, gpu = both("convert", 1, x, 256, SIZE=256, TO=tl.float32)
    real = ~torch.isnan(x.float())
    assert torch.equal(emulated[real], gpu[real])


def test_integer_expressions_equal_the_gpu() -> None:
    x = torch.randint(-(2**31), 2**31, (512,), generator=torch.Generator().manual_seed(0), dtype=torch.int64).int()
    x[:128] = torch.arange(-64, 64)
    x[256:384] = torch.tensor([-7, 3, 1, -1] * 32)
    emulated, gpu = both("integers", 1, x, 4096, SIZE=256)
    names = [i // 256 for i in torch.nonzero(emulated != gpu)[:, 0].tolist()]
    assert not names, sorted(set(names))


def test_float_expressions_equal_the_gpu() -> None:
    x = torch.randn(512, generator=torch.Generator().manual_seed(0)) * 4
    emulated, gpu = both("floats", 1, x, 4096, SIZE=256)
    names = [i // 256 for i in torch.nonzero(emulated != gpu)[:, 0].tolist()]
    assert not names, sorted(set(names))
