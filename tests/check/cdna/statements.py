"""What each lane-by-lane instruction computes, stated a second time: on Python's numbers, one lane at a time.

Integers are Python's, of any width; fp32 results are rounded from exact fractions. After the pseudo-code of AMD's
instruction set manuals. Sources: u unsigned, i signed, f float, U 64 bits, m bool.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from fractions import Fraction
from typing import Any

M32, M64 = (1 << 32) - 1, (1 << 64) - 1
NAN, INF = math.nan, math.inf


def bits(x: float) -> int:
    """The bits of a float that is an fp32 number."""
    return int(struct.unpack("<I", struct.pack("<f", x))[0])


def number(pattern: int) -> float:
    return float(struct.unpack("<f", struct.pack("<I", pattern))[0])


def rounded(exact: Fraction, sign_of_zero: float = 1.0) -> float:
    """The nearest fp32, ties to even, beyond the largest infinity."""
    if exact == 0:
        return math.copysign(0.0, sign_of_zero)
    magnitude, sign = abs(exact), -1.0 if exact < 0 else 1.0
    exponent = max(-126, magnitude.numerator.bit_length() - magnitude.denominator.bit_length() - 1)
    while magnitude >= Fraction(2) ** (exponent + 1):
        exponent += 1
    ulp = Fraction(2) ** (exponent - 23)
    whole = math.floor(magnitude / ulp)
    rest = magnitude / ulp - whole
    if rest > Fraction(1, 2) or (rest == Fraction(1, 2) and whole % 2):
        whole += 1
    value = whole * ulp
    return sign * (INF if value >= Fraction(2) ** 128 else float(value))


def fma(a: float, b: float, c: float) -> float:
    if not all(map(math.isfinite, (a, b, c))):
        if math.isnan(a) or math.isnan(b) or (a == 0 and math.isinf(b)) or (b == 0 and math.isinf(a)):
            return NAN
        product = math.copysign(INF, math.copysign(1, a) * math.copysign(1, b)) if INF in (abs(a), abs(b)) else 0.0
        return product + c
    exact = Fraction(a) * Fraction(b) + Fraction(c)
    if exact == 0:
        negative = math.copysign(1, a) * math.copysign(1, b) < 0
        nothing = a == 0 or b == 0
        return -0.0 if negative and nothing and c == 0 and math.copysign(1, c) < 0 else 0.0
    return rounded(exact)


def add(a: float, b: float) -> float:
    if not (math.isfinite(a) and math.isfinite(b)):
        return a + b
    if a == 0 and b == 0:
        return a + b
    return rounded(Fraction(a) + Fraction(b))


def multiply(a: float, b: float) -> float:
    if not (math.isfinite(a) and math.isfinite(b)) or a == 0 or b == 0:
        return a * b
    return rounded(Fraction(a) * Fraction(b), math.copysign(1, a) * math.copysign(1, b))


def largest(*values: float) -> float:
    numbers = [value for value in values if not math.isnan(value)]
    if not numbers:
        return NAN
    return max(numbers, key=lambda value: (value, math.copysign(1, value)))


def smallest(*values: float) -> float:
    return -largest(*[-value for value in values])


def wide(low: int, high: int) -> int:
    return high << 32 | low


def s32(x: int) -> int:
    return (x & M32) - (1 << 32) if x >> 31 & 1 else x & M32


def s64(x: int) -> int:
    return x - (1 << 64) if x >> 63 else x


def s24(x: int) -> int:
    x &= 0xFFFFFF
    return x - (1 << 24) if x >> 23 else x


def byte(x: int, place: int) -> int:
    return x >> 8 * place & 0xFF


def perm(a: int, b: int, selector: int) -> int:
    data = [*b.to_bytes(4, "little"), *a.to_bytes(4, "little")]
    result = []
    for choice in selector.to_bytes(4, "little"):
        if choice >= 13:
            result.append(0xFF)
        elif choice == 12:
            result.append(0)
        elif choice >= 8:
            result.append(0xFF if data[2 * (choice - 8) + 1] & 0x80 else 0)
        else:
            result.append(data[choice])
    return int.from_bytes(bytes(result), "little")


def lerp(a: int, b: int, c: int) -> int:
    parts = [(byte(a, k) + byte(b, k) + (byte(c, k) & 1)) >> 1 for k in range(4)]
    return int.from_bytes(bytes(parts), "little")


def bfe_i(a: int, first: int, count: int) -> int:
    first, count = first & 31, count & 31
    if not count:
        return 0
    field = a >> first & ((1 << count) - 1)
    return field - (1 << count) if field >> (count - 1) else field


def to_integer(x: float, low: int, high: int) -> int:
    if math.isnan(x):
        return 0
    return low if x <= low else high if x >= high else math.trunc(x)


def half(x: float) -> int:
    if math.isnan(x):  # quiet, its first bits kept
        return bits(x) >> 16 & 0x8000 | 0x7E00 | bits(x) >> 13 & 0x1FF
    try:
        return int.from_bytes(struct.pack("<e", x), "little")
    except OverflowError:
        return 0x7C00 | 0x8000 * (x < 0)


def bf16(x: float) -> int:
    if math.isnan(x):
        return bits(x) >> 16 | 0x40
    pattern = bits(x)
    low = pattern & 0xFFFF
    return (pattern >> 16) + (low > 0x8000 or (low == 0x8000 and pattern >> 16 & 1))


def nearest(x: float) -> float:
    """To an integer, ties to even."""
    return x if not math.isfinite(x) else math.copysign(float(round(x)), x)


def field(x: float) -> int:
    return bits(x) >> 23 & 0xFF


def scaled(x: float, by: int) -> float:
    if not math.isfinite(x) or x == 0:
        return x
    by = max(-400, min(400, by))
    return rounded(Fraction(x) * Fraction(2) ** by)


def divided(a: float, b: float) -> float:
    return 0.0 if math.isinf(b) else INF if math.isinf(a) else rounded(Fraction(a) / Fraction(b))


def div_scale(s0: float, s1: float, s2: float) -> tuple[float, bool]:
    small = abs(s1) < 2.0**-126
    if s1 == 0 or s2 == 0:
        return NAN, False
    if field(s2) - field(s1) >= 96:
        return (scaled(s0, 64) if s0 == s1 else s0), True
    if small:
        return scaled(s0, 64), False
    if math.isfinite(s1) and math.isfinite(s2) and 0 < abs(divided(s2, s1)) < 2.0**-126:
        return (scaled(s0, 64) if s0 == s2 else s0), True
    return (scaled(s0, 64) if field(s2) <= 23 else s0), False


def div_fmas(a: float, b: float, c: float, vcc: bool) -> float:
    plain = fma(a, b, c)
    return scaled(plain, 64 if field(c) > 127 else -64) if vcc else plain


def div_fixup(q: float, d: float, n: float) -> float:
    sign = math.copysign(1, d) * math.copysign(1, n)
    if math.isnan(n) or math.isnan(d) or (d == 0 and n == 0) or (math.isinf(d) and math.isinf(n)):
        return NAN
    if d == 0 or math.isinf(n):
        return sign * INF
    if math.isinf(d) or n == 0 or field(n) - field(d) < -150:
        return sign * 0.0
    return math.copysign(INF if math.isnan(q) else q, sign)


STATEMENTS: dict[str, Callable[..., Any]] = {
    "v_mov_b32": lambda a: a,
    "v_mov_b64": lambda a: a,
    "v_accvgpr_write_b32": lambda a: a,
    "v_accvgpr_read_b32": lambda a: a,
    "v_accvgpr_mov_b32": lambda a: a,
    "v_not_b32": lambda a: M32 - a,
    "v_bfrev_b32": lambda a: int(f"{a:032b}"[::-1], 2),
    "v_add_u32": lambda a, b: a + b,
    "v_sub_u32": lambda a, b: a - b,
    "v_subrev_u32": lambda a, b: b - a,
    "v_add_co_u32": lambda a, b: (a + b, a + b > M32),
    "v_addc_co_u32": lambda a, b, c: (a + b + c, a + b + c > M32),
    "v_sub_co_u32": lambda a, b: (a - b, b > a),
    "v_subb_co_u32": lambda a, b, c: (a - b - c, b + c > a),
    "v_subrev_co_u32": lambda a, b: (b - a, a > b),
    "v_subbrev_co_u32": lambda a, b, c: (b - a - c, a + c > b),
    "v_and_b32": lambda a, b: sum(1 << k for k in range(32) if a >> k & 1 and b >> k & 1),
    "v_or_b32": lambda a, b: sum(1 << k for k in range(32) if a >> k & 1 or b >> k & 1),
    "v_xor_b32": lambda a, b: sum(1 << k for k in range(32) if (a >> k & 1) != (b >> k & 1)),
    "v_xnor_b32": lambda a, b: sum(1 << k for k in range(32) if (a >> k & 1) == (b >> k & 1)),
    "v_lshlrev_b32": lambda a, b: b * 2 ** (a % 32),
    "v_lshrrev_b32": lambda a, b: b // 2 ** (a % 32),
    "v_ashrrev_i32": lambda a, b: b // 2 ** (a % 32),
    "v_lshlrev_b64": lambda a, b: b * 2 ** (a % 64),
    "v_lshrrev_b64": lambda a, b: b // 2 ** (a % 64),
    "v_ashrrev_i64": lambda a, b: s64(b) // 2 ** (a % 64),
    "v_lshlrev_b16": lambda a, b: b * 2 ** (a % 16) % 65536,
    "v_lshrrev_b16": lambda a, b: b % 65536 // 2 ** (a % 16),
    "v_mul_lo_u32": lambda a, b: a * b,
    "v_mul_hi_u32": lambda a, b: a * b // 2**32,
    "v_mul_hi_i32": lambda a, b: a * b // 2**32,
    "v_mul_u32_u24": lambda a, b: a % 2**24 * (b % 2**24),
    "v_mul_i32_i24": lambda a, b: s24(a) * s24(b),
    "v_mad_u32_u24": lambda a, b, c: a % 2**24 * (b % 2**24) + c,
    "v_mad_i32_i24": lambda a, b, c: s24(a) * s24(b) + c,
    "v_mad_u64_u32": lambda a, b, c: (a * b + c, a * b + c > M64),
    "v_mad_i64_i32": lambda a, b, c: (a * b + s64(c), a * b + s64(c) < 0),
    "v_min_u32": min,
    "v_max_u32": max,
    "v_min_i32": min,
    "v_max_i32": max,
    "v_min3_u32": min,
    "v_max3_u32": max,
    "v_min3_i32": min,
    "v_max3_i32": max,
    "v_med3_i32": lambda *x: sorted(x)[1],
    "v_med3_u32": lambda *x: sorted(x)[1],
    "v_add3_u32": lambda a, b, c: a + b + c,
    "v_add_lshl_u32": lambda a, b, c: (a + b) * 2 ** (c % 32),
    "v_lshl_add_u32": lambda a, b, c: a * 2 ** (b % 32) + c,
    "v_lshl_or_b32": lambda a, b, c: a * 2 ** (b % 32) % 2**32 | c,
    "v_and_or_b32": lambda a, b, c: a & b | c,
    "v_or3_b32": lambda a, b, c: a | b | c,
    "v_xad_u32": lambda a, b, c: (a ^ b) + c,
    "v_lshl_add_u64": lambda a, b, c: a * 2 ** (b % 8) + c,
    "v_bfe_u32": lambda a, b, c: a // 2 ** (b % 32) % 2 ** (c % 32),
    "v_bfe_i32": bfe_i,
    "v_bfi_b32": lambda a, b, c: sum(((b if a >> k & 1 else c) >> k & 1) << k for k in range(32)),
    "v_bfm_b32": lambda a, b: (2 ** (a % 32) - 1) * 2 ** (b % 32),
    "v_alignbit_b32": lambda a, b, c: wide(b, a) >> c % 32,
    "v_alignbyte_b32": lambda a, b, c: wide(b, a) >> 8 * (c % 4),
    "v_perm_b32": perm,
    "v_lerp_u8": lerp,
    "v_cndmask_b32": lambda a, b, c: b if c else a,
    "v_cvt_f32_u32": lambda a: rounded(Fraction(a)),
    "v_cvt_f32_i32": lambda a: rounded(Fraction(a)),
    "v_cvt_u32_f32": lambda a: to_integer(a, 0, M32),
    "v_cvt_i32_f32": lambda a: to_integer(a, -(2**31), 2**31 - 1),
    "v_cvt_f32_ubyte0": lambda a: float(byte(a, 0)),
    "v_cvt_f32_ubyte1": lambda a: float(byte(a, 1)),
    "v_cvt_f32_ubyte2": lambda a: float(byte(a, 2)),
    "v_cvt_f32_ubyte3": lambda a: float(byte(a, 3)),
    "v_cvt_f16_f32": half,
    "v_cvt_f32_f16": lambda a: struct.unpack("<e", (a & 0xFFFF).to_bytes(2, "little"))[0],
    "v_cvt_pk_f16_f32": lambda a, b: half(a) | half(b) << 16,
    "v_cvt_pk_bf16_f32": lambda a, b: bf16(a) | bf16(b) << 16,
    "v_add_f32": add,
    "v_sub_f32": lambda a, b: add(a, -b),
    "v_subrev_f32": lambda a, b: add(b, -a),
    "v_mul_f32": multiply,
    "v_fma_f32": fma,
    "v_fmac_f32": fma,
    "v_fmaak_f32": fma,
    "v_fmamk_f32": fma,
    "v_max_f32": largest,
    "v_min_f32": smallest,
    "v_max3_f32": largest,
    "v_min3_f32": smallest,
    "v_trunc_f32": lambda a: a if not math.isfinite(a) else math.copysign(float(math.trunc(a)), a),
    "v_floor_f32": lambda a: a if not math.isfinite(a) else math.copysign(float(math.floor(a)), a),
    "v_rndne_f32": nearest,
    "v_ldexp_f32": scaled,
    "v_div_scale_f32": div_scale,
    "v_div_fmas_f32": div_fmas,
    "v_div_fixup_f32": div_fixup,
}
_RELATIONS: dict[str, Callable[[Any, Any], bool]] = {
    "eq": lambda a, b: a == b,
    "ne": lambda a, b: a != b,
    "lt": lambda a, b: a < b,
    "le": lambda a, b: a <= b,
    "gt": lambda a, b: a > b,
    "ge": lambda a, b: a >= b,
}
for _type in ("u32", "i32", "u64", "i64"):
    STATEMENTS |= {f"v_cmp_{name}_{_type}": relation for name, relation in _RELATIONS.items()}
STATEMENTS |= {f"v_cmp_{name}_f32": _RELATIONS[name] for name in ("eq", "lt", "le", "gt", "ge")}
STATEMENTS |= {
    "v_cmp_lg_f32": lambda a, b: a < b or a > b,
    "v_cmp_o_f32": lambda a, b: a == a and b == b,
    "v_cmp_u_f32": lambda a, b: a != a or b != b,
    "v_cmp_neq_f32": lambda a, b: a != b,
    "v_cmp_nlg_f32": lambda a, b: not (a < b or a > b),
    "v_cmp_nlt_f32": lambda a, b: not a < b,
    "v_cmp_nle_f32": lambda a, b: not a <= b,
    "v_cmp_ngt_f32": lambda a, b: not a > b,
    "v_cmp_nge_f32": lambda a, b: not a >= b,
}


def of_class(a: float, classes: int) -> bool:
    """The bit that a number's class has; Python has no signalling NaN, whose bit counts as the quiet one's here."""
    if math.isnan(a):
        return bool(classes & 2)
    place = 9 if a == INF else 6 if a == 0 else 7 if abs(a) < 2.0**-126 else 8
    return bool(classes >> (place if math.copysign(1, a) > 0 else 11 - place) & 1)


STATEMENTS["v_cmp_class_f32"] = of_class


def signed_overflow(x: int) -> tuple[int, bool]:
    return x, not -(2**31) <= x < 2**31


def sbfe(a: int, b: int, signed: bool) -> int:
    first, count = b & 31, min(b >> 16 & 127, 64)
    value = a >> first & ((1 << count) - 1)
    if signed and count:
        a = s32(a) >> first
        value = a & ((1 << count) - 1)
        value = value - (1 << count) if value >> (count - 1) else value
    return value


# (result, SCC); SCC None: it stays; `...`: whether the result is not 0. The last argument is SCC where it is read.
SCALAR: dict[str, Callable[..., Any]] = {
    "s_mov_b32": lambda a: (a, None),
    "s_mov_b64": lambda a: (a, None),
    "s_not_b32": lambda a: (~a, ...),
    "s_not_b64": lambda a: (~a, ...),
    "s_abs_i32": lambda a: (abs(a), ...),
    "s_brev_b32": lambda a: (int(f"{a:032b}"[::-1], 2), None),
    "s_bcnt1_i32_b32": lambda a: (f"{a:b}".count("1"), ...),
    "s_bcnt1_i32_b64": lambda a: (f"{a:b}".count("1"), ...),
    "s_sext_i32_i16": lambda a: ((a & 0xFFFF) - (a >> 15 & 1) * 65536, None),
    "s_sext_i32_i8": lambda a: ((a & 0xFF) - (a >> 7 & 1) * 256, None),
    "s_add_u32": lambda a, b: (a + b, a + b > M32),
    "s_addc_u32": lambda a, b, c: (a + b + c, a + b + c > M32),
    "s_sub_u32": lambda a, b: (a - b, b > a),
    "s_subb_u32": lambda a, b, c: (a - b - c, b + c > a),
    "s_add_i32": lambda a, b: signed_overflow(a + b),
    "s_sub_i32": lambda a, b: signed_overflow(a - b),
    "s_mul_i32": lambda a, b: (a * b, None),
    "s_mul_hi_u32": lambda a, b: (a * b >> 32, None),
    "s_mul_hi_i32": lambda a, b: (a * b >> 32, None),
    **{
        f"s_lshl{k}_add_u32": lambda a, b, k=k: (a * 2**k + b, a * 2**k + b > M32)  # type: ignore[misc]
        for k in (1, 2, 3, 4)
    },
    "s_lshl_b32": lambda a, b: (a << b % 32, ...),
    "s_lshr_b32": lambda a, b: (a >> b % 32, ...),
    "s_ashr_i32": lambda a, b: (a >> b % 32, ...),
    "s_lshl_b64": lambda a, b: (a << b % 64, ...),
    "s_lshr_b64": lambda a, b: (a >> b % 64, ...),
    "s_ashr_i64": lambda a, b: (a >> b % 64, ...),
    **{
        f"s_{name}_b{width}": function
        for width in (32, 64)
        for name, function in {
            "and": lambda a, b: (a & b, ...),
            "or": lambda a, b: (a | b, ...),
            "xor": lambda a, b: (a ^ b, ...),
            "andn2": lambda a, b: (a & ~b, ...),
            "orn2": lambda a, b: (a | ~b, ...),
        }.items()
    },
    "s_nor_b64": lambda a, b: (~(a | b), ...),
    "s_nand_b64": lambda a, b: (~(a & b), ...),
    "s_xnor_b64": lambda a, b: (~(a ^ b), ...),
    "s_min_i32": lambda a, b: (min(a, b), a < b),
    "s_max_i32": lambda a, b: (max(a, b), a > b),
    "s_min_u32": lambda a, b: (min(a, b), a < b),
    "s_max_u32": lambda a, b: (max(a, b), a > b),
    "s_bfe_u32": lambda a, b: (sbfe(a, b, False), ...),
    "s_bfe_i32": lambda a, b: (sbfe(a & M32, b, True), ...),
    "s_pack_ll_b32_b16": lambda a, b: (a % 65536 + b % 65536 * 65536, None),
    "s_pack_lh_b32_b16": lambda a, b: (a % 65536 + b // 65536 * 65536, None),
    "s_pack_hh_b32_b16": lambda a, b: (a // 65536 + b // 65536 * 65536, None),
    "s_cselect_b32": lambda a, b, c: (a if c else b, None),
    "s_cselect_b64": lambda a, b, c: (a if c else b, None),
}
