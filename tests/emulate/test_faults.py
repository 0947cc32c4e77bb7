"""Planted faults: each breaks one line of a correct small kernel and must be reported with its line and cause."""

from __future__ import annotations

import re
import types

import pytest
import torch
from decode import KERNELS
from triton.experimental.gluon.language import NVMMASharedLayout
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from mla_codegen import emulate

SOURCE = (KERNELS / "small.py").read_text()
TILES = 5


def tma_map(x: torch.Tensor) -> TensorDescriptor:
    return TensorDescriptor.from_tensor(x, [16, 64], NVMMASharedLayout(128, 32, 2))


def run(kernel: str, module: types.ModuleType) -> None:
    """Launch `kernel` and check its result."""
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(TILES * 16, 64, generator=draw)
    y = emulate.poison(torch.empty_like(x))
    if kernel == "ring":
        module.ring[(1,)](x, y, TILES)
        assert torch.equal(x, y)
    elif kernel == "bulk":
        module.bulk[(1,)](tma_map(x), tma_map(y), TILES)
        assert torch.equal(2 * x, y)
    elif kernel == "product":
        a, b = torch.randn(64, 64, generator=draw).half(), torch.randn(32, 64, generator=draw).half()
        c = emulate.poison(torch.empty(64, 32))
        module.product[(1,)](a, b, c, num_warps=4)
        torch.testing.assert_close(c, a.float() @ b.float().T)
    elif kernel == "specialised":
        module.specialised[(1,)](tma_map(x), y, TILES)
        assert torch.equal(x, y)
    else:
        out = emulate.poison(torch.empty(129))
        module.scaled[(1,)](x.view(-1)[:100], out, 100)
        assert torch.equal(out[:100], 2 * x.view(-1)[:100])
        torch.testing.assert_close(out[128], x.view(-1)[:100].sum())
        assert emulate.unwritten(out).tolist() == [False] * 100 + [True] * 28 + [False]


@pytest.mark.parametrize("kernel", ["ring", "bulk", "product", "scaled", "specialised"])
def test_the_kernels_are_right_unbroken(kernel: str) -> None:
    run(kernel, emulate.load(SOURCE, "small"))


FAULTS = {
    "copy-not-waited": ("ring", "        async_copy.wait_group(1)\n", "", "before async_copy_global_to_shared issued at"),
    "wait-too-lax": ("ring", "wait_group(1)", "wait_group(2)", "wait_group with a small enough number"),
    "never-committed": (
        "ring",
        "        async_copy.commit_group()\n        async_copy.wait_group(1)",
        "        async_copy.wait_group(0)",
        "never committed|was never written|still on its way",
    ),
    "stage-refilled-in-flight": ("ring", "stages.index((i + 1) % 2)", "stages.index(i % 2)", "is still on its way there"),
    "stage-index-outside": ("ring", "stages.index((i + 1) % 2)", "stages.index(i + 1)", "index 2 of shared fp32"),
    "stage-never-filled": ("ring", "stages.index(0), x", "stages.index(1), x", "while|was never written"),
    "read-past-the-end": ("ring", "gl.minimum(i + 1, tiles - 1)", "i + 1", r"outside argument x \[80, 64\] float32: element"),
    "write-before-the-start": ("ring", "y + i * 1024", "y + (i - 1) * 1024", "store outside argument y"),
    "offset-wraps": ("ring", "y + i * 1024", "y + (i + 2147483647) * 1024", "store outside argument y"),
    "wait-missing": ("bulk", "        mbarrier.wait(bar, i & 1)\n", "", "mbarrier.wait on its barrier"),
    "wrong-phase": ("bulk", "mbarrier.wait(bar, i & 1)", "mbarrier.wait(bar, 1)", "asked for parity 1"),
    "phase-not-flipped": ("bulk", "mbarrier.wait(bar, i & 1)", "mbarrier.wait(bar, 0)", "asked for parity 0"),
    "too-few-bytes": ("bulk", "16 * 64 * 4", "16 * 64 * 2", "deadlock.*2048 bytes are expected.*bring 4096"),
    "nothing-issued": ("bulk", "expect(bar, 16 * 64 * 4)", "expect(bar, 16 * 64 * 4, pred=False)", "deadlock"),
    "not-initialised": ("bulk", "    mbarrier.init(bar, count=1)\n", "", "never initialised"),
    "init-count": ("bulk", "init(bar, count=1)", "init(bar, count=2)", "deadlock.*awaits 1 of 2 arrivals"),
    "fence-before-tma-store": ("bulk", "        fence_async_shared()\n", "", "with no fence since"),
    "store-not-waited": ("bulk", "        tma.store_wait(0)\n        outbox", "        outbox", "may still read it"),
    "store-outlives-program": ("bulk", "    tma.store_wait(0)\n    mbarrier", "    mbarrier", "the program ends while the TMA store"),
    "tma-layout": ("bulk", "S: gl.constexpr = gl.NVMMASharedLayout(128", "S: gl.constexpr = gl.NVMMASharedLayout(64", "the descriptor's layout"),
    "fence-before-wgmma": ("product", "    fence_async_shared()\n    gl.thread", "    gl.thread", "call fence_async_shared"),
    "operand-never-stored": ("product", "    right.store(gl.load(b + short * 64 + column))\n", "", "was never written"),
    "accumulator-used-early": ("product", "    acc = warpgroup_mma_wait(0, deps=[acc])\n", "    acc = acc * 2.0\n", "call warpgroup_mma_wait"),
    "operand-overwritten": (
        "product",
        "    acc = warpgroup_mma_wait(0, deps=[acc])\n    right.store(gl.zeros([32, 64], gl.float16, L))\n",
        "    right.store(gl.zeros([32, 64], gl.float16, L))\n    acc = warpgroup_mma_wait(0, deps=[acc])\n",
        "warpgroup_mma issued at .* may still read it",
    ),
    "store-layout": ("product", "gl.arange(0, 64, gl.SliceLayout(1, MMA))", "gl.arange(0, 64, gl.SliceLayout(1, L))", "layouts of .* differ"),
    "accumulator-layout": ("product", "[3, 0], [4, 1], [16, 32, 16]", "[2, 0], [4, 1], [16, 8]", "version \\[3, 0\\]"),
    "wgmma-from-swizzled": ("product", "S: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)", "S: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [1, 0])", "NVMMASharedLayout only"),
    "layout-of-too-few-warps": ("scaled", "[32], [4]", "[32], [2]", "spreads over 2 warps, the kernel runs on 4"),
    "layout-of-too-many-lanes": ("scaled", "[1], [32], [4]", "[1], [64], [4]", "64 threads a warp"),
    "unmasked-load": ("scaled", ", mask=i < n, other=0.0", "", r"load outside argument x \[100\] float32: element \[100\]"),
    "undefined-lanes-used": ("scaled", ", other=0.0", "", None),
    "axis-that-is-not-there": ("scaled", "gl.sum(value, 0)", "gl.sum(value, 1)", "reduction along axis 1"),
    "expand-without-slice": ("scaled", "value * 2.0", "(value[:, None] * 2.0)", "a new dimension needs a SliceLayout"),
    "stage-not-released": ("specialised", "        mbarrier.arrive(empty.index(i % 2), count=1)\n", "", "deadlock"),
    "stage-not-awaited": (
        "specialised",
        "        mbarrier.wait(empty.index(i % 2), ((i // 2) & 1) ^ 1)\n",
        "",
        "still on its way|armed again",
    ),
    "consumer-does-not-wait": ("specialised", "        mbarrier.wait(ready.index(i % 2), (i // 2) & 1)\n", "", "was never written|before"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_fault_is_caught(fault: str) -> None:
    kernel, old, new, message = FAULTS[fault]
    assert old in SOURCE
    module = emulate.load(SOURCE.replace(old, new), "broken")
    if message is None:  # no error as such: the poison must reach the result
        with pytest.raises(AssertionError):
            run(kernel, module)
        return
    with pytest.raises(emulate.EmulatorError) as caught:
        run(kernel, module)
    text = str(caught.value)
    assert re.search(message, text, re.DOTALL), text
    assert text.startswith(f"kernel {kernel}, program 0")
    assert re.search(r"<emulated broken>:\d+ in ", text), text
