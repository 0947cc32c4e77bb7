"""gfx942 and gfx950: buffer accesses, asynchronous copies to LDS, and what MFMA takes."""

from __future__ import annotations

import pytest
import torch

from mla_codegen.check import emulate

HEAD = """
import triton.experimental.gluon.language as gl
from triton.experimental import gluon
from triton.experimental.gluon.language.amd import AMDMFMALayout, cdna3, cdna4


@gluon.jit
def kernel(x, y, n):
    L: gl.constexpr = gl.BlockedLayout([1, 4], [4, 16], [4, 1], [1, 0])
    SHARED: gl.constexpr = gl.SwizzledSharedLayout(4, 1, 8, [1, 0])
    MMA: gl.constexpr = AMDMFMALayout({version}, [16, 16, 32], True, [1, 4])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, MMA, 8)
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, MMA, 8)
    row = gl.arange(0, 16, gl.SliceLayout(1, L))[:, None]
    offsets = row * 64 + gl.arange(0, 64, gl.SliceLayout(0, L))[None, :]
    smem = gl.allocate_shared_memory(gl.float32, [16, 64], SHARED)
"""


def run(body: str, version: int = 4, n: int = 16, elements: int = 1024) -> tuple[torch.Tensor, torch.Tensor]:
    lines = "".join(f"    {line}\n" for line in body.strip().splitlines())
    module = emulate.load(
        HEAD.replace("{version}", str(version)) + lines, "amd", arch="gfx942" if version == 3 else "gfx950"
    )
    x, y = torch.randn(elements, generator=torch.Generator().manual_seed(0)), emulate.poison(torch.zeros(1024))
    module.kernel[(1,)](x, y, n)
    return x, y


COPY = "cdna4.async_copy.buffer_load_to_shared(smem, x, offsets)\ncdna4.async_copy.commit_group()\n"
WAIT = "cdna4.async_copy.wait_group(0)\n"
OUT = "cdna4.buffer_store(smem.load(L), y, offsets)\n"


def test_copy_wait_load() -> None:
    x, y = run(COPY + WAIT + OUT)
    assert torch.equal(x, y)


def test_masked_elements() -> None:
    """buffer loads answer zero, `other` wins, a global load to LDS leaves what is there."""
    mask = ", mask=row < n"
    x, y = run(COPY.replace("offsets)", f"offsets{mask})") + WAIT + OUT, n=5)
    assert torch.equal(y[:320], x[:320])
    assert not y[320:].any()
    _, y = run(COPY.replace("offsets)", f"offsets{mask}, other=2.5)") + WAIT + OUT, n=5)
    assert set(y[320:].tolist()) == {2.5}
    kept = "smem.store(gl.full([16, 64], 7.0, gl.float32, L))\n" + COPY.replace(
        "buffer_load_to_shared", "global_load_to_shared"
    )
    _, y = run(kept.replace("x, offsets)", f"x + offsets{mask})") + WAIT + OUT, n=5)
    assert set(y[320:].tolist()) == {7.0}
    _, y = run(f"cdna4.buffer_store(cdna4.buffer_load(x, offsets{mask}), y, offsets)", n=5)
    assert not y[320:].any()


def test_scaled_product_equals_its_definition() -> None:
    body = """
LS: gl.constexpr = cdna4.get_mfma_scale_layout(gl.DotOperandLayout(0, WIDE, 16), [16, 4])
RS: gl.constexpr = cdna4.get_mfma_scale_layout(gl.DotOperandLayout(1, WIDE, 16), [64, 4])
k = gl.arange(0, 128, gl.SliceLayout(0, gl.DotOperandLayout(0, WIDE, 16)))[None, :]
m = gl.arange(0, 16, gl.SliceLayout(1, gl.DotOperandLayout(0, WIDE, 16)))[:, None]
a = ((m + k) % 7).to(gl.float32).to(gl.float8e4nv)
k = gl.arange(0, 128, gl.SliceLayout(1, gl.DotOperandLayout(1, WIDE, 16)))[:, None]
j = gl.arange(0, 64, gl.SliceLayout(0, gl.DotOperandLayout(1, WIDE, 16)))[None, :]
b = ((j + 2 * k) % 5).to(gl.float32).to(gl.float8e4nv)
scale = (126 + gl.arange(0, 4, gl.SliceLayout(0, LS))[None, :] + 0 * gl.arange(0, 16, gl.SliceLayout(1, LS))[:, None])
acc = cdna4.mfma_scaled(a, scale.to(gl.uint8), "e4m3", b, None, "e4m3", gl.zeros([16, 64], gl.float32, WIDE))
r = gl.arange(0, 16, gl.SliceLayout(1, WIDE))[:, None]
gl.store(y + r * 64 + gl.arange(0, 64, gl.SliceLayout(0, WIDE))[None, :], acc)
"""
    _, y = run("WIDE: gl.constexpr = AMDMFMALayout(4, [16, 16, 128], True, [1, 4])\n" + body)
    m, k, j = torch.arange(16.0)[:, None], torch.arange(128.0), torch.arange(64.0)
    a = (m + k) % 7 * 2.0 ** (k // 32 - 1)
    b = (j[None, :] + 2 * k[:, None]) % 5
    assert torch.equal(y.view(16, 64), a @ b)


LOAD8 = """
m = gl.arange(0, 16, gl.SliceLayout(1, LEFT))[:, None]
a = gl.load(x + m * 64 + gl.arange(0, 64, gl.SliceLayout(0, LEFT))[None, :])
"""


@pytest.mark.parametrize(
    ("body", "version", "message"),
    [
        (COPY + OUT, 4, "before buffer_load_to_shared issued at .* has landed"),
        (COPY + "cdna4.async_copy.wait_group(1)\n" + OUT, 4, "small enough number of outstanding"),
        (
            COPY.replace("cdna4.async_copy.commit_group()\n", "") + "cdna4.async_copy.wait_group(1)\n" + OUT,
            4,
            "never committed",
        ),
        (COPY + "smem.store(gl.zeros([16, 64], gl.float32, L))\n", 4, "still on its way there"),
        (OUT, 4, "was never written"),
        (
            COPY.replace(
                "buffer_load_to_shared(smem, x, offsets)", "global_load_to_shared(smem, x + offsets, mask=row < 5)"
            )
            + WAIT
            + OUT,
            4,
            r"element \[5, 0\] was never written",
        ),
        (
            "NARROW: gl.constexpr = gl.BlockedLayout([1, 2], [2, 32], [4, 1], [1, 0])\n"
            "cdna4.async_copy.buffer_load_to_shared(smem, x, gl.convert_layout(offsets, NARROW))",
            4,
            "64 bits a thread",
        ),
        ("v = cdna4.buffer_load(x, offsets - 1)", 4, r"outside \[0, 2\^31\)"),
        ("v = cdna4.buffer_load(x + 1, offsets)", 4, r"load outside argument x \[1024\]"),
        ("v = cdna4.buffer_load(x, offsets.to(gl.int64))", 4, "takes a tensor of int32 offsets"),
        ("v = cdna4.buffer_load(x + offsets, offsets)", 4, "takes a scalar base pointer"),
        (
            LOAD8 + "a = a.to(gl.float8e4nv)\nb = gl.zeros([64, 16], gl.float8e4nv, RIGHT)\n"
            "c = cdna3.mfma(a, b, gl.zeros([16, 16], gl.float32, MMA))",
            3,
            "mfma on gfx942 with fp8e4nv operands",
        ),
        (
            LOAD8 + "a = a.to(gl.float8e4b8)\nb = gl.zeros([64, 16], gl.float8e4b8, RIGHT)\n"
            "c = cdna4.mfma(a, b, gl.zeros([16, 16], gl.float32, MMA))",
            4,
            "mfma on gfx950 with fp8e4b8 operands",
        ),
        (
            LOAD8
            + "b = gl.zeros([64, 16], gl.float32, LEFT)\nc = cdna3.mfma(a, b, gl.zeros([16, 16], gl.float32, MMA))",
            3,
            "it must have DotOperandLayout\\(1",
        ),
        (
            LOAD8 + "b = gl.zeros([64, 16], gl.float32, gl.DotOperandLayout(1, MMA, 4))\n"
            "c = cdna3.mfma(a, b, gl.zeros([16, 16], gl.float32, MMA))",
            3,
            "k_width 8 of a against 4 of b",
        ),
        (
            "v = smem._reinterpret(gl.int8, [16, 256], gl.SwizzledSharedLayout(4, 1, 8, [1, 0]))",
            4,
            "place bytes differently",
        ),
        (
            "v = gl.zeros([32], gl.float32, gl.BlockedLayout([1], [32], [4], [0]))",
            4,
            "32 threads a warp, this target has 64",
        ),
    ],
)
def test_fault_is_caught(body: str, version: int, message: str) -> None:
    with pytest.raises(emulate.EmulatorError, match=f"(?s){message}"):
        run(body, version)
