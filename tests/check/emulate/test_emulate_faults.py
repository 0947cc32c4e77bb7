"""Planted faults: each breaks one line of a correct small kernel and must be reported with its line and cause."""

from __future__ import annotations

import re
import types
from pathlib import Path

import pytest
import torch
import yaml
from emulate_decode import KERNELS
from triton.experimental.gluon.language import NVMMASharedLayout
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from mla_codegen.check import emulate

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
    elif kernel.startswith("product"):
        a, b = torch.randn(64, 64, generator=draw).half(), torch.randn(32, 64, generator=draw).half()
        c = emulate.poison(torch.empty(64, 32))
        getattr(module, kernel)[(1,)](a, b, c, num_warps=4)
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


@pytest.mark.parametrize("kernel", ["ring", "bulk", "product", "product_from_registers", "scaled", "specialised"])
def test_the_kernels_are_right_unbroken(kernel: str) -> None:
    run(kernel, emulate.load(SOURCE, "small"))


FAULTS = yaml.safe_load((Path(__file__).parent / "faults.yaml").read_text())


@pytest.mark.parametrize("fault", FAULTS)
def test_fault_is_caught(fault: str) -> None:
    kernel, message = FAULTS[fault]["kernel"], FAULTS[fault]["message"]
    assert FAULTS[fault]["old"] in SOURCE
    module = emulate.load(SOURCE.replace(FAULTS[fault]["old"], FAULTS[fault]["new"]), "broken")
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
