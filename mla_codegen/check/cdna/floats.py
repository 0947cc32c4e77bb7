"""Floating point as CDNA's vector units compute it, on numpy arrays: fp8, bf16, fused multiply-add, division, extremes.

Rounding is to nearest even throughout. fp8 is e4m3fnuz on gfx942 and OCP's e4m3fn on gfx950. exp2, log2, reciprocals
and roots, which hardware gives to 1 ulp, are rounded exactly here; as there, they take and give no denormals.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
U16, U32, I32, U64, F32, F64 = np.uint16, np.uint32, np.int32, np.uint64, np.float32, np.float64
TINY = F32(2.0**-126)  # the smallest normal fp32
_MAGNITUDE, _SIGN = U32(0x7FFFFFFF), U32(0x80000000)


def _fp8_table(bias: int, fnuz: bool) -> Array:
    """fp32 of every fp8 e4m3 byte."""
    byte = np.arange(256)
    exponent, mantissa = byte >> 3 & 15, byte & 7
    value = np.where(exponent == 0, mantissa * 2.0 ** (1 - bias - 3), (1 + mantissa / 8) * 2.0 ** (exponent - bias))
    value = np.where(byte & 0x80, -value, value)
    value[byte == 0x80 if fnuz else byte & 0x7F == 0x7F] = np.nan
    return value.astype(F32)


def is_of_class(x: Array, classes: Array) -> Array:
    """Whether fp32 numbers are of one of the classes whose bits are set: signalling NaN, quiet NaN, -infinity, then
    negative normal, denormal and zero, and positive zero, denormal, normal and infinity."""
    bits = x.view(U32)
    magnitude, negative = bits & _MAGNITUDE, bits > _MAGNITUDE
    size = np.select([magnitude == 0, magnitude < 0x800000, magnitude < 0x7F800000], [0, 1, 2], 3)
    number = np.where(negative, 5 - size, 6 + size)
    nan = np.where(bits >> U32(22) & U32(1), 1, 0)
    number = np.where(magnitude > 0x7F800000, nan, number)
    return (classes >> number.astype(U32) & U32(1)) != 0


FP8 = {"gfx942": _fp8_table(8, True), "gfx950": _fp8_table(7, False)}
_LARGEST = {"gfx942": 0x7F, "gfx950": 0x7E}  # bytes of the largest numbers, 240 and 448


def to_fp8(x: Array, arch: str, saturate: bool) -> Array:
    """fp32 -> bytes in uint32. Beyond the largest number: that, or NaN unless `saturate` (MODE's FP16_OVFL)."""
    top = _LARGEST[arch]
    grid = FP8[arch][: top + 1].astype(F64)
    magnitude = np.abs(x).astype(F64)
    at = np.clip(np.searchsorted(grid, magnitude), 1, top)
    below, above = magnitude - grid[at - 1], grid[at] - magnitude
    code = np.where((below < above) | ((below == above) & (at % 2 == 1)), at - 1, at)
    half = grid[top] + (grid[top] - grid[top - 1]) / 2  # a tie goes to the even of `top` and what would come next
    over = magnitude >= half if top % 2 else magnitude > half
    fnuz = arch == "gfx942"
    code = code | np.where(np.signbit(x) & ((code != 0) | (not fnuz)), 0x80, 0)
    nan = 0x80 if fnuz else 0x7F
    return np.where(np.isnan(x) | (over & (not saturate)), nan, code).astype(U32)


def to_bf16(x: Array) -> Array:
    """fp32 -> bits in uint32; NaN becomes a quiet one."""
    bits = x.view(U32)
    rounded = (bits + (U32(0x7FFF) + (bits >> U32(16) & U32(1)))) >> U32(16)
    return np.where(np.isnan(x), bits >> U32(16) | U32(0x40), rounded)


def to_fp16(x: Array) -> Array:
    """fp32 -> bits in uint32."""
    return x.astype(np.float16).view(U16).astype(U32)


def flush(x: Array) -> Array:
    """Denormals become zeros of their sign."""
    return np.where(np.abs(x) < TINY, (x.view(U32) & _SIGN).view(F32), x)


def fma(a: Array, b: Array, c: Array) -> Array:
    """a * b + c, rounded once.

    The product of two fp32 is exact in fp64, the sum is not: where it lies half-way between two fp32, what it lost
    decides.
    """
    product, c = a.astype(F64) * b, c.astype(F64)
    total = product + c
    bits = total.view(U64)
    half_way = ((bits & U64(0x1FFFFFFF)) == U64(0x10000000)) | (np.abs(total) < TINY)
    if half_way.any():
        back = total - product
        lost = (product - (total - back)) + (c - back)
        odd = half_way & np.isfinite(lost) & (lost != 0) & (bits & U64(1) == 0)
        away = np.signbit(lost) == np.signbit(total)
        zero = total == 0  # cannot be: an inexact sum of fp64 is not zero
        total = np.where(odd & ~zero, np.where(away, bits + U64(1), bits - U64(1)), bits).view(F64)
    return total.astype(F32)


def maximum(a: Array, b: Array) -> Array:
    """The larger; of NaN and a number the number; +0 is larger than -0."""
    return np.where((a == 0) & (b == 0), (a.view(U32) & b.view(U32)).view(F32), np.fmax(a, b))


def minimum(a: Array, b: Array) -> Array:
    """The smaller; of NaN and a number the number; -0 is smaller than +0."""
    return np.where((a == 0) & (b == 0), (a.view(U32) | b.view(U32)).view(F32), np.fmin(a, b))


def exp2(x: Array) -> Array:
    return flush(np.exp2(flush(x).astype(F64)).astype(F32))


def log2(x: Array) -> Array:
    return np.log2(flush(x).astype(F64)).astype(F32)


def reciprocal(x: Array) -> Array:
    return flush((1.0 / flush(x).astype(F64)).astype(F32))


def reciprocal_root(x: Array) -> Array:
    return (1.0 / np.sqrt(flush(x).astype(F64))).astype(F32)


def root(x: Array) -> Array:
    return np.sqrt(flush(x).astype(F64)).astype(F32)


def ldexp(x: Array, by: Any) -> Array:
    """x * 2 ** by, rounded once."""
    return np.ldexp(x.astype(F64), np.clip(by, -400, 400)).astype(F32)


def exponent(x: Array) -> Array:
    """The biased exponent field."""
    return (x.view(U32) >> U32(23) & U32(255)).astype(I32)


def _denormal(x: Array) -> Array:
    return (np.abs(x) < TINY) & (x != 0)


def div_scale(value: Array, denominator: Array, numerator: Array) -> tuple[Array, Array]:
    """(v_div_scale's result, its flag for v_div_fmas), after the pseudo-code of CDNA3 ISA 12, VOP3 opcodes."""
    gap = exponent(numerator) - exponent(denominator)
    up = ldexp(value, np.int32(64))
    of_denominator, of_numerator = value == denominator, value == numerator
    with np.errstate(all="ignore"):
        quotient = (numerator.astype(F64) / denominator).astype(F32)
    cases = [(denominator == 0) | (numerator == 0), gap >= 96, _denormal(denominator), _denormal(quotient)]
    small = exponent(numerator) <= 23
    nan = np.full_like(up, np.nan)
    choices = [nan, np.where(of_denominator, up, value), up, np.where(of_numerator, up, value)]
    result = np.select(cases, choices, np.where(small, up, value))
    flag = np.select(cases, [np.False_, np.True_, np.False_, np.True_], np.False_)
    return result, np.broadcast_to(flag, result.shape)


def div_fmas(a: Array, b: Array, c: Array, scaled: Array) -> Array:
    """fma, times 2^64 or 2^-64 where `scaled`."""
    plain = fma(a, b, c)
    by = np.where(exponent(c) > 127, np.int32(64), np.int32(-64))
    return np.where(scaled, ldexp(plain, by), plain)


def div_fixup(quotient: Array, denominator: Array, numerator: Array) -> Array:
    """The quotient with the special cases of division put right, after the pseudo-code.

    A quotient that became NaN on the way from numbers is one that overflowed.
    """
    sign = (denominator.view(U32) ^ numerator.view(U32)) & _SIGN
    gap = exponent(numerator) - exponent(denominator)

    def signed(magnitude: float) -> Array:
        return (sign | np.full_like(sign, F32(magnitude).view(U32))).view(F32)

    cases = [
        np.isnan(numerator),
        np.isnan(denominator),
        ((denominator == 0) & (numerator == 0)) | (np.isinf(denominator) & np.isinf(numerator)),
        (denominator == 0) | np.isinf(numerator),
        np.isinf(denominator) | (numerator == 0),
        gap < -150,
        np.isnan(quotient),
    ]
    quiet = U32(0x400000)
    choices = [
        (numerator.view(U32) | quiet).view(F32),
        (denominator.view(U32) | quiet).view(F32),
        np.full_like(sign, U32(0xFFC00000)).view(F32),
        signed(np.inf),
        signed(0.0),
        signed(0.0),  # underflow
        signed(np.inf),  # overflow
    ]
    return np.select(cases, choices, (sign | quotient.view(U32) & _MAGNITUDE).view(F32))
