"""References of inlined assembly: all 256 byte values against their definition, and on a GPU against the assembly."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from mla_codegen.check.emulate import asm, floats

PAIR_TEXTS = [text for text, function in asm.REFERENCES.items() if function is asm.e4m3_pair_to_f16]
EVEN = next(text for text, function in asm.REFERENCES.items() if function is asm.e4m3_even_to_f16)
ODD = next(text for text, function in asm.REFERENCES.items() if function is asm.e4m3_odd_to_f16)
F16X2 = "cvt.rn.f16x2.f32 $0, $2, $1;"
BF16X2 = "cvt.rn.bf16x2.f32 $0, $2, $1;"
PACK64 = "mov.b64 $0, {$1, $2};"
RCP = "rcp.approx.ftz.f32 $0, $1;"
LG2 = "lg2.approx.ftz.f32 $0, $1;"
EX2 = "ex2.approx.ftz.f32 $0, $1;"
PRMT = "prmt.b32 $0, $1, $2, 0x7531;"
ALL_PAIRS = np.arange(65536, dtype=np.uint16).view(np.int16)  # every byte in both places


def e4m3fn(byte: int) -> float:
    """OCP e4m3fn by its definition."""
    sign, exponent, fraction = -1.0 if byte & 0x80 else 1.0, (byte >> 3) & 15, byte & 7
    if byte & 0x7F == 0x7F:
        return math.nan
    return sign * (fraction / 8 * 2.0**-6 if exponent == 0 else (1 + fraction / 8) * 2.0 ** (exponent - 7))


DECODED = np.array([e4m3fn(b) for b in range(256)], np.float16)


def floats_to_try() -> np.ndarray:
    special = [0.0, -0.0, 1.0, -1.0, math.inf, -math.inf, math.nan, 1e-40, 1e38, 3.0, 1e-38, -2.5, 65504.0, 1 + 2**-8]
    random = np.random.default_rng(0).standard_normal(1010) * 2.0 ** np.random.default_rng(1).integers(-40, 40, 1010)
    return np.concatenate([np.array(special), random]).astype(np.float32)


@pytest.mark.parametrize("text", PAIR_TEXTS)
def test_pair_of_bytes_becomes_two_halves(text: str) -> None:
    even, odd = asm.run(text, [ALL_PAIRS])
    raw = ALL_PAIRS.view(np.uint16)
    np.testing.assert_array_equal(even, DECODED[raw & 0xFF])
    np.testing.assert_array_equal(odd, DECODED[raw >> 8])


def test_one_half_of_a_pair() -> None:
    raw = ALL_PAIRS.view(np.uint16)
    np.testing.assert_array_equal(asm.run(EVEN, [ALL_PAIRS])[0], DECODED[raw & 0xFF])
    np.testing.assert_array_equal(asm.run(ODD, [ALL_PAIRS])[0], DECODED[raw >> 8])


def test_packing_keeps_the_first_operand_low() -> None:
    low, high = np.float32([1.0, -2.0]), np.float32([3.0, 0.5])
    packed = asm.run(BF16X2, [low, high])[0]
    np.testing.assert_array_equal(packed.view(np.uint16), floats.f32_to_bf16(np.float32([1.0, 3.0, -2.0, 0.5])))
    packed = asm.run(F16X2, [low, high])[0].view(np.float16)
    assert packed.tolist() == [1.0, 3.0, -2.0, 0.5]
    assert asm.run(PACK64, [low, high])[0].view(np.float32).tolist() == [1.0, 3.0, -2.0, 0.5]


def test_reciprocal() -> None:
    got = asm.run(RCP, [np.float32([2.0, -4.0, 0.0, -0.0, math.inf, 1e-40, 2.0**127])])[0]
    assert got.tolist() == [0.5, -0.25, math.inf, -math.inf, 0.0, math.inf, 0.0]


def test_exponential_and_logarithm() -> None:
    got = asm.run(EX2, [np.float32([0.0, 3.0, -1.0, -math.inf, -130.0, 200.0])])[0]
    assert got.tolist() == [1.0, 8.0, 0.5, 0.0, 0.0, math.inf]
    got = asm.run(LG2, [np.float32([1.0, 8.0, 0.5, 0.0, math.inf])])[0]
    assert got.tolist() == [0.0, 3.0, -1.0, -math.inf, math.inf]


def test_prmt_picks_bytes_and_signs() -> None:
    a, b = np.int32([0x33221100]), np.array([0x77665584], np.uint32).view(np.int32)
    assert asm.run(PRMT, [a, b])[0].view(np.uint32)[0] == 0x77553311
    assert asm.prmt_b32(a, b, 0xC410).view(np.uint32)[0] == 0xFF841100


def test_white_space_does_not_matter_and_unknown_text_says_where_to_add() -> None:
    spread = "\n\tmov.b64   $0 , { $1,$2 } ; // joined\n"
    assert asm.run(spread, [np.float32([1.0]), np.float32([2.0])])[0].dtype == np.int64
    with pytest.raises(asm.UnknownAssembly, match=r"no reference for .*mla_codegen/check/emulate/asm.py"):
        asm.run("bar.sync 0;", [])


gpu = pytest.mark.gpu
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU: the assembly itself cannot run here")


@triton.jit
def one_in(x, y, ASM: tl.constexpr, CONSTRAINTS: tl.constexpr, PACK: tl.constexpr):
    i = tl.program_id(0) * 256 + tl.arange(0, 256)
    tl.store(y + i, tl.inline_asm_elementwise(ASM, CONSTRAINTS, [tl.load(x + i)], y.dtype.element_ty, True, PACK))


@triton.jit
def one_in_two_out(x, y, z, ASM: tl.constexpr, CONSTRAINTS: tl.constexpr, PACK: tl.constexpr):
    i = tl.program_id(0) * 256 + tl.arange(0, 256)
    a, b = tl.inline_asm_elementwise(ASM, CONSTRAINTS, [tl.load(x + i)], (tl.float16, tl.float16), True, PACK)
    tl.store(y + i, a)
    tl.store(z + i, b)


@triton.jit
def two_in(x, z, y, ASM: tl.constexpr, CONSTRAINTS: tl.constexpr, PACK: tl.constexpr):
    i = tl.program_id(0) * 256 + tl.arange(0, 256)
    tl.store(
        y + i,
        tl.inline_asm_elementwise(ASM, CONSTRAINTS, [tl.load(x + i), tl.load(z + i)], y.dtype.element_ty, True, PACK),
    )


@gpu
@needs_gpu
@pytest.mark.parametrize("text", PAIR_TEXTS)
def test_pairs_equal_the_gpu_bit_for_bit(text: str) -> None:
    x = torch.from_numpy(ALL_PAIRS.copy()).cuda()
    even, odd = (
        torch.empty(65536, dtype=torch.float16, device="cuda"),
        torch.empty(65536, dtype=torch.float16, device="cuda"),
    )
    one_in_two_out[(256,)](x, even, odd, text, "=r,=r,r", 2)
    for got, want in zip((even, odd), asm.run(text, [ALL_PAIRS]), strict=True):
        np.testing.assert_array_equal(got.cpu().numpy(), want)
        assert (np.signbit(got.cpu().numpy()) == np.signbit(want))[~np.isnan(want)].all()


@gpu
@needs_gpu
@pytest.mark.parametrize("text", [EVEN, ODD])
def test_halves_equal_the_gpu_bit_for_bit(text: str) -> None:
    x = torch.from_numpy(ALL_PAIRS.copy()).cuda()
    y = torch.empty(65536, dtype=torch.float16, device="cuda")
    one_in[(256,)](x, y, text, "=r,r", 2)
    np.testing.assert_array_equal(y.cpu().numpy(), asm.run(text, [ALL_PAIRS])[0])


@gpu
@needs_gpu
@pytest.mark.parametrize(
    ("text", "constraints", "out"),
    [(BF16X2, "=r,f,f", torch.int32), (F16X2, "=r,f,f", torch.int32), (PACK64, "=l,f,f", torch.int64)],
)
def test_packing_equals_the_gpu_bit_for_bit(text: str, constraints: str, out: torch.dtype) -> None:
    low, high = floats_to_try(), floats_to_try()[::-1].copy()
    y = torch.empty(1024, dtype=out, device="cuda")
    two_in[(4,)](torch.from_numpy(low).cuda(), torch.from_numpy(high).cuda(), y, text, constraints, 1)
    np.testing.assert_array_equal(y.cpu().numpy(), asm.run(text, [low, high])[0])


@gpu
@needs_gpu
def test_prmt_equals_the_gpu_bit_for_bit() -> None:
    a = np.random.default_rng(3).integers(-(2**31), 2**31, (2, 1024)).astype(np.int32)
    a[0].view(np.uint8)[:256] = np.arange(256)
    y = torch.empty(1024, dtype=torch.int32, device="cuda")
    two_in[(4,)](torch.from_numpy(a[0]).cuda(), torch.from_numpy(a[1]).cuda(), y, PRMT, "=r,r,r", 1)
    np.testing.assert_array_equal(y.cpu().numpy(), asm.run(PRMT, [a[0], a[1]])[0])


@gpu
@needs_gpu
def test_logarithm_is_close_to_the_gpu() -> None:
    """PTX bounds its absolute error by 2^-22 near 1."""
    x = np.abs(floats_to_try())
    y = torch.empty(1024, device="cuda")
    one_in[(4,)](torch.from_numpy(x).cuda(), y, LG2, "=f,f", 1)
    np.testing.assert_allclose(y.cpu().numpy(), asm.run(LG2, [x])[0], rtol=2e-7, atol=2**-21)


@gpu
@needs_gpu
@pytest.mark.parametrize("text", [RCP, EX2])
def test_approximations_are_within_two_ulp_of_the_gpu(text: str) -> None:
    x = floats_to_try()
    y = torch.empty(1024, device="cuda")
    one_in[(4,)](torch.from_numpy(x).cuda(), y, text, "=f,f", 1)
    np.testing.assert_array_max_ulp(y.cpu().numpy(), asm.run(text, [x])[0], maxulp=2)
