"""References of AMD's single instructions, held to their definitions; and how kernels call them."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from mla_codegen.check import emulate
from mla_codegen.check.emulate.errors import EmulatorError
from mla_codegen.check.emulate.externs import REFERENCES

RANDOM = np.random.default_rng(2).integers(0, 2**32, (2, 256), dtype=np.uint64).astype(np.uint32)


@pytest.mark.parametrize("selector", [0x07050301, 0x06040200, 0x0C0C0501, 0x00010203])
def test_perm_picks_bytes(selector: int) -> None:
    high, low = RANDOM
    got = REFERENCES["llvm.amdgcn.perm"](high, low, np.full(256, selector, np.int32))
    pool = low.astype(np.uint64) | (high.astype(np.uint64) << np.uint64(32))
    for i in range(4):
        pick = (selector >> (8 * i)) & 0xFF
        want = np.zeros(256, np.uint64) if pick == 12 else (pool >> np.uint64(8 * pick)) & np.uint64(0xFF)
        np.testing.assert_array_equal((got >> np.uint32(8 * i)) & np.uint32(0xFF), want)


def test_perm_refuses_selectors_that_it_does_not_know() -> None:
    with pytest.raises(ValueError, match="not modelled"):
        REFERENCES["llvm.amdgcn.perm"](*RANDOM, np.full(256, 0x08000000, np.int32))


@pytest.mark.parametrize("rounding", [0, 1])
def test_lerp_averages_bytes(rounding: int) -> None:
    x, y = np.meshgrid(np.arange(256), np.arange(256))
    words = [np.ascontiguousarray(z.astype(np.uint8)).view(np.uint32).reshape(-1) for z in (x, y)]
    got = REFERENCES["llvm.amdgcn.lerp"](*words, np.full(len(words[0]), rounding * 0x01010101, np.int32))
    np.testing.assert_array_equal(got.view(np.uint8).reshape(256, 256), (x + y + rounding) // 2)


def test_reciprocal() -> None:
    x = np.float32([2.0, -4.0, 0.0, -0.0, math.inf, 1e-40, 2.0**127])
    assert REFERENCES["llvm.amdgcn.rcp.f32"](x).tolist() == [0.5, -0.25, math.inf, -math.inf, 0.0, math.inf, 0.0]


KERNEL = """
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.amd import cdna3

@tl.core.extern
def pick(high, low, selector, _semantic=None):
    symbols = {(tl.uint32, tl.uint32, tl.int32): ("SYMBOL", tl.uint32)}
    return tl.core.extern_elementwise("", "", [high, low, selector], symbols, is_pure=True, _semantic=_semantic)

@gluon.jit
def kernel(x, y):
    i = gl.arange(0, 64, gl.BlockedLayout([1], [64], [1], [0]))
    word = gl.load(x + i)
    gl.store(y + i, pick(word, word, 0x00010203))
"""


@pytest.mark.parametrize(
    ("symbol", "dtype", "message"),
    [
        ("llvm.amdgcn.perm", torch.uint32, None),
        ("llvm.amdgcn.perm", torch.int32, "an extern function of .*uint32.* is called with .*int32"),
        ("llvm.amdgcn.sad.u8", torch.uint32, "no reference for the symbol 'llvm.amdgcn.sad.u8'"),
    ],
)
def test_in_a_kernel(symbol: str, dtype: torch.dtype, message: str | None) -> None:
    module = emulate.load(KERNEL.replace("SYMBOL", symbol), "externs")
    x = torch.arange(64, dtype=torch.int32).mul(0x01030507).view(dtype)
    y = torch.zeros(64, dtype=dtype)
    if message is None:
        module.kernel[(1,)](x, y, num_warps=1)
        swapped = x.view(torch.uint8).reshape(64, 4).flip(1)
        assert torch.equal(y.view(torch.uint8).reshape(64, 4), swapped)
    else:
        with pytest.raises(EmulatorError, match=message):
            module.kernel[(1,)](x, y, num_warps=1)
