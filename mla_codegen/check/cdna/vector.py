"""Vector instructions that work lane by lane: one line each, as a function of [waves, 64] arrays.

Semantics after AMD's "CDNA3" and "CDNA4 Instruction Set Architecture", 12 Instructions. Encodings may add to them:
SDWA takes a byte or a half of a source, DPP takes the first source from another lane.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mla_codegen.check.cdna import floats
from mla_codegen.check.cdna.dpp import DPP, permuted
from mla_codegen.check.cdna.floats import F32, F64, I32, U32, U64
from mla_codegen.check.cdna.listing import Instruction, Unknown
from mla_codegen.check.cdna.operands import Read, Uses, vector_source, vector_target
from mla_codegen.check.cdna.scalar import reverse_bits
from mla_codegen.check.cdna.state import Waves

Array = NDArray[Any]
Run = Callable[[Waves], None]
I64 = np.int64
_24, _16, _8 = U32(0xFFFFFF), U32(0xFFFF), U32(0xFF)


def _by(amount: Array) -> Array:
    """A shift by the low 5 bits."""
    return amount & U32(31)


def signed(a: Array) -> Array:
    return a.view(I32)


def _signed_24(a: Array) -> Array:
    return (a << U32(8)).view(I32).astype(I64) >> 8


def _bfe_i32(a: Array, first: Array, count: Array) -> Array:
    """`count` bits of `a` from `first` on, extended by the sign of the last."""
    first, count = _by(first), _by(count)
    field = (a >> first) & ((U32(1) << count) - U32(1))
    sign = (U32(1) << count) >> U32(1)
    return (field ^ sign) - sign


def permute_bytes(high: Array, low: Array, selector: Array) -> Array:
    """v_perm_b32: every byte of the selector names a byte of (high, low), a byte of signs (8 to 11), 0 (12) or 0xff."""
    shape = np.broadcast_shapes(high.shape, low.shape, selector.shape)
    both = low | high.astype(U64) << U64(32)
    result = np.zeros(shape, U32)
    constant = selector.size == 1
    for place in range(4):
        wanted = selector >> U32(8 * place) & _8
        if constant:
            result |= _selected(both, int(wanted.flat[0])) << U32(8 * place)
            continue
        byte = (both >> (U64(8) * np.minimum(wanted, U32(7)))).astype(U32) & _8
        for special in range(8, 13):
            byte = np.where(wanted == special, _selected(both, special), byte)
        result |= np.where(wanted > 12, _8, byte) << U32(8 * place)
    return result


def _selected(both: Array, wanted: int) -> Array:
    if wanted < 8:
        return (both >> U64(8 * wanted)).astype(U32) & _8
    if wanted < 12:
        return (both >> U64(16 * (wanted - 8) + 15) & U64(1)).astype(U32) * _8
    return np.zeros(both.shape, U32) if wanted == 12 else np.full(both.shape, _8)


def average_bytes(a: Array, b: Array, c: Array) -> Array:
    """v_lerp_u8: (a + b + (c & 1)) >> 1 of each byte."""
    even, low = U32(0x00FF00FF), U32(0x00010001)

    def half(x: Array, y: Array, z: Array) -> Array:
        return ((x & even) + (y & even) + (z & low)) >> U32(1) & even

    eight = U32(8)
    return half(a, b, c) | half(a >> eight, b >> eight, c >> eight) << eight


def _to_integer(a: Array, lowest: float, highest: float, dtype: Any) -> Array:
    whole = np.trunc(a.astype(F64))
    return np.where(np.isnan(a), 0, np.clip(whole, lowest, highest)).astype(I64).astype(dtype)


def _ordered(a: Array, b: Array) -> Array:
    return ~(np.isnan(a) | np.isnan(b))


def _median(a: Array, b: Array, c: Array) -> Array:
    return np.maximum(np.minimum(a, b), np.minimum(np.maximum(a, b), c))


def _multiply_add_signed_64(a: Array, b: Array, c: Array) -> tuple[Array, Array]:
    """a * b + c of signed numbers in 64 bits, and bit 64 of the 65 that the sum needs: its sign."""
    product, addend = a.astype(I64) * b.astype(I64), c.view(I64)
    with np.errstate(over="ignore"):
        total = product + addend
    negative = np.where((product < 0) == (addend < 0), product < 0, total < 0)
    return total.view(U64), negative


def _multiply_add_64(a: Array, b: Array, c: Array) -> tuple[Array, Array]:
    product = a.astype(U64) * b
    total = product + c
    return total, total < product


def _add_carry(a: Array, b: Array, c: Array | None = None) -> tuple[Array, Array]:
    total = a.astype(U64) + b
    if c is not None:
        total = total + c
    return total.astype(U32), total >> U64(32) != 0


def _subtract_borrow(a: Array, b: Array, c: Array | None = None) -> tuple[Array, Array]:
    total = a.astype(U64) - b
    if c is not None:
        total = total - c
    return total.astype(U32), total >> U64(32) != 0


def _halves(low: Array, high: Array) -> Array:
    return low | high << U32(16)


# name -> (results, sources, function). Sources: u, i, f (32 bits), U (64), m (lane mask), + (the target, as fp32) and
# * (the target, as bits). Results: u (32 bits of any type), U, m. Two results: the function gives a tuple.
TABLE: dict[str, tuple[str, str, Callable[..., Any]]] = {
    "v_mov_b32": ("u", "u", lambda a: a),
    "v_mov_b64": ("U", "U", lambda a: a),
    "v_accvgpr_write_b32": ("u", "u", lambda a: a),
    "v_accvgpr_read_b32": ("u", "u", lambda a: a),
    "v_accvgpr_mov_b32": ("u", "u", lambda a: a),
    "v_not_b32": ("u", "u", lambda a: ~a),
    "v_bfrev_b32": ("u", "u", reverse_bits),
    "v_add_u32": ("u", "uu", lambda a, b: a + b),
    "v_sub_u32": ("u", "uu", lambda a, b: a - b),
    "v_subrev_u32": ("u", "uu", lambda a, b: b - a),
    "v_add_co_u32": ("um", "uu", _add_carry),
    "v_addc_co_u32": ("um", "uum", _add_carry),
    "v_sub_co_u32": ("um", "uu", _subtract_borrow),
    "v_subb_co_u32": ("um", "uum", _subtract_borrow),
    "v_subrev_co_u32": ("um", "uu", lambda a, b: _subtract_borrow(b, a)),
    "v_subbrev_co_u32": ("um", "uum", lambda a, b, c: _subtract_borrow(b, a, c)),
    "v_and_b32": ("u", "uu", lambda a, b: a & b),
    "v_or_b32": ("u", "uu", lambda a, b: a | b),
    "v_xor_b32": ("u", "uu", lambda a, b: a ^ b),
    "v_xnor_b32": ("u", "uu", lambda a, b: ~(a ^ b)),
    "v_lshlrev_b32": ("u", "uu", lambda a, b: b << _by(a)),
    "v_lshrrev_b32": ("u", "uu", lambda a, b: b >> _by(a)),
    "v_ashrrev_i32": ("u", "ui", lambda a, b: b >> signed(_by(a))),
    "v_lshlrev_b64": ("U", "uU", lambda a, b: b << (a & U32(63)).astype(U64)),
    "v_lshrrev_b64": ("U", "uU", lambda a, b: b >> (a & U32(63)).astype(U64)),
    "v_ashrrev_i64": ("U", "uU", lambda a, b: (b.view(I64) >> (a & U32(63)).astype(I64)).view(U64)),
    "v_lshlrev_b16": ("u", "uu", lambda a, b: b << (a & U32(15)) & _16),
    "v_lshrrev_b16": ("u", "uu", lambda a, b: (b & _16) >> (a & U32(15))),
    "v_mul_lo_u32": ("u", "uu", lambda a, b: a * b),
    "v_mul_hi_u32": ("u", "uu", lambda a, b: (a.astype(U64) * b >> U64(32)).astype(U32)),
    "v_mul_hi_i32": ("u", "ii", lambda a, b: (a.astype(I64) * b >> 32).astype(I32)),
    "v_mul_u32_u24": ("u", "uu", lambda a, b: (a & _24) * (b & _24)),
    "v_mul_i32_i24": ("u", "uu", lambda a, b: (_signed_24(a) * _signed_24(b)).astype(I32)),
    "v_mad_u32_u24": ("u", "uuu", lambda a, b, c: (a & _24) * (b & _24) + c),
    "v_mad_i32_i24": ("u", "uui", lambda a, b, c: (_signed_24(a) * _signed_24(b) + c).astype(I32)),
    "v_mad_u64_u32": ("Um", "uuU", _multiply_add_64),
    "v_mad_i64_i32": ("Um", "iiU", _multiply_add_signed_64),
    "v_min_u32": ("u", "uu", np.minimum),
    "v_max_u32": ("u", "uu", np.maximum),
    "v_min_i32": ("u", "ii", np.minimum),
    "v_max_i32": ("u", "ii", np.maximum),
    "v_min3_u32": ("u", "uuu", lambda a, b, c: np.minimum(np.minimum(a, b), c)),
    "v_max3_u32": ("u", "uuu", lambda a, b, c: np.maximum(np.maximum(a, b), c)),
    "v_min3_i32": ("u", "iii", lambda a, b, c: np.minimum(np.minimum(a, b), c)),
    "v_max3_i32": ("u", "iii", lambda a, b, c: np.maximum(np.maximum(a, b), c)),
    "v_med3_i32": ("u", "iii", _median),
    "v_med3_u32": ("u", "uuu", _median),
    "v_add3_u32": ("u", "uuu", lambda a, b, c: a + b + c),
    "v_add_lshl_u32": ("u", "uuu", lambda a, b, c: (a + b) << _by(c)),
    "v_lshl_add_u32": ("u", "uuu", lambda a, b, c: (a << _by(b)) + c),
    "v_lshl_or_b32": ("u", "uuu", lambda a, b, c: a << _by(b) | c),
    "v_and_or_b32": ("u", "uuu", lambda a, b, c: a & b | c),
    "v_or3_b32": ("u", "uuu", lambda a, b, c: a | b | c),
    "v_xad_u32": ("u", "uuu", lambda a, b, c: (a ^ b) + c),
    "v_lshl_add_u64": ("U", "UuU", lambda a, b, c: (a << (b & U32(7)).astype(U64)) + c),
    "v_bfe_u32": ("u", "uuu", lambda a, b, c: a >> _by(b) & ((U32(1) << _by(c)) - U32(1))),
    "v_bfe_i32": ("u", "uuu", _bfe_i32),
    "v_bfi_b32": ("u", "uuu", lambda a, b, c: a & b | ~a & c),
    "v_bfm_b32": ("u", "uu", lambda a, b: ((U32(1) << _by(a)) - U32(1)) << _by(b)),
    "v_alignbit_b32": ("u", "uuu", lambda a, b, c: ((b | a.astype(U64) << U64(32)) >> _by(c)).astype(U32)),
    "v_alignbyte_b32": (
        "u",
        "uuu",
        lambda a, b, c: ((b | a.astype(U64) << U64(32)) >> (c & U32(3)) * U32(8)).astype(U32),
    ),
    "v_perm_b32": ("u", "uuu", permute_bytes),
    "v_lerp_u8": ("u", "uuu", average_bytes),
    "v_cndmask_b32": ("u", "uum", lambda a, b, c: np.where(c, b, a)),
    "v_cvt_f32_u32": ("u", "u", lambda a: a.astype(F32)),
    "v_cvt_f32_i32": ("u", "i", lambda a: a.astype(F32)),
    "v_cvt_u32_f32": ("u", "f", lambda a: _to_integer(a, 0, 2**32 - 1, U32)),
    "v_cvt_i32_f32": ("u", "f", lambda a: _to_integer(a, -(2**31), 2**31 - 1, I32)),
    "v_cvt_f32_ubyte0": ("u", "u", lambda a: (a & _8).astype(F32)),
    "v_cvt_f32_ubyte1": ("u", "u", lambda a: (a >> U32(8) & _8).astype(F32)),
    "v_cvt_f32_ubyte2": ("u", "u", lambda a: (a >> U32(16) & _8).astype(F32)),
    "v_cvt_f32_ubyte3": ("u", "u", lambda a: (a >> U32(24)).astype(F32)),
    "v_cvt_f16_f32": ("u", "f", floats.to_fp16),
    "v_cvt_f32_f16": ("u", "u", lambda a: (a & _16).astype(np.uint16).view(np.float16).astype(F32)),
    "v_cvt_pk_f16_f32": ("u", "ff", lambda a, b: _halves(floats.to_fp16(a), floats.to_fp16(b))),
    "v_cvt_pk_bf16_f32": ("u", "ff", lambda a, b: _halves(floats.to_bf16(a), floats.to_bf16(b))),
    "v_add_f32": ("u", "ff", lambda a, b: a + b),
    "v_sub_f32": ("u", "ff", lambda a, b: a - b),
    "v_subrev_f32": ("u", "ff", lambda a, b: b - a),
    "v_mul_f32": ("u", "ff", lambda a, b: a * b),
    "v_fma_f32": ("u", "fff", floats.fma),
    "v_fmac_f32": ("u", "ff+", floats.fma),
    "v_fmaak_f32": ("u", "fff", floats.fma),
    "v_fmamk_f32": ("u", "fff", floats.fma),
    "v_max_f32": ("u", "ff", floats.maximum),
    "v_min_f32": ("u", "ff", floats.minimum),
    "v_max3_f32": ("u", "fff", lambda a, b, c: floats.maximum(floats.maximum(a, b), c)),
    "v_min3_f32": ("u", "fff", lambda a, b, c: floats.minimum(floats.minimum(a, b), c)),
    "v_exp_f32": ("u", "f", floats.exp2),
    "v_log_f32": ("u", "f", floats.log2),
    "v_rcp_f32": ("u", "f", floats.reciprocal),
    "v_rcp_iflag_f32": ("u", "f", floats.reciprocal),
    "v_rsq_f32": ("u", "f", floats.reciprocal_root),
    "v_sqrt_f32": ("u", "f", floats.root),
    "v_trunc_f32": ("u", "f", np.trunc),
    "v_floor_f32": ("u", "f", np.floor),
    "v_rndne_f32": ("u", "f", np.rint),
    "v_ldexp_f32": ("u", "fi", floats.ldexp),
    "v_div_scale_f32": ("um", "fff", floats.div_scale),
    "v_div_fmas_f32": ("u", "fffm", floats.div_fmas),
    "v_div_fixup_f32": ("u", "fff", floats.div_fixup),
}
Relation = Callable[[Array, Array], Array]
_SIGNED: dict[str, Relation] = {
    "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal,
}  # fmt: skip
_FLOAT: dict[str, Relation] = {name: _SIGNED[name] for name in ("eq", "lt", "le", "gt", "ge")}
_FLOAT |= {
    "lg": lambda a, b: _ordered(a, b) & (a != b),
    "o": _ordered,
    "u": lambda a, b: ~_ordered(a, b),
    "neq": lambda a, b: ~(a == b),
    "nlg": lambda a, b: ~(_ordered(a, b) & (a != b)),
    "nlt": lambda a, b: ~(a < b),
    "nle": lambda a, b: ~(a <= b),
    "ngt": lambda a, b: ~(a > b),
    "nge": lambda a, b: ~(a >= b),
}
for _type in ("u32", "i32", "u64", "i64"):
    _kind = {"u32": "u", "i32": "i", "u64": "U", "i64": "I"}[_type]
    TABLE |= {f"v_cmp_{name}_{_type}": ("m", _kind * 2, function) for name, function in _SIGNED.items()}
TABLE |= {f"v_cmp_{name}_f32": ("m", "ff", function) for name, function in _FLOAT.items()}
TABLE["v_cmp_class_f32"] = ("m", "fu", floats.is_of_class)

# fp32 in and out, but MODE's denormals are nothing to them: conversions, the division's steps, what always flushes.
_OWN_DENORMALS = re.compile(r"v_(cvt|exp|log|rcp|rsq|sqrt|div_scale|div_fixup|ldexp|cmp_class)_")
_SELECT = {"DWORD": (0, 0xFFFFFFFF), "WORD_0": (0, 0xFFFF), "WORD_1": (16, 0xFFFF)}
_SELECT |= {f"BYTE_{number}": (8 * number, 0xFF) for number in range(4)}
_SDWA = ("dst_sel", "dst_unused", "src0_sel", "src1_sel")


def bitop3(table: int, bits: int) -> Callable[[Array, Array, Array], Array]:
    """v_bitop3: any function of three bits by its truth table."""

    def function(a: Array, b: Array, c: Array) -> Array:
        result = np.zeros(np.broadcast_shapes(a.shape, b.shape, c.shape), U32)
        for place in range(8):
            if table >> place & 1:
                result |= (a if place & 4 else ~a) & (b if place & 2 else ~b) & (c if place & 1 else ~c)
        return result if bits == 32 else result & _16

    return function


def build(one: Instruction, uses: Uses, denormals: bool) -> Run:
    """What a vector instruction does to waves. `denormals`: MODE keeps those of fp32."""
    if found := re.fullmatch(r"v_bitop3_b(16|32)", one.name):
        one.allow("bitop3")
        results, sources = "u", "uuu"
        function: Callable[..., Any] = bitop3(int(one.modifiers["bitop3"], 0), int(found[1]))
    elif one.name in TABLE:
        one.allow(*(_SDWA if one.suffix == "sdwa" else DPP if one.suffix == "dpp" else ()))
        results, sources, function = TABLE[one.name]
    else:
        raise Unknown(one)
    targets = one.operands[: len(results)]
    given = list(one.operands[len(results) :])
    if one.name == "v_div_fmas_f32":
        given.append("vcc")
    read_target = sources[-1] in "+*"
    if read_target:
        given.append(one.operands[0])
        sources = sources[:-1] + ("f" if sources[-1] == "+" else "u")
    if len(given) != len(sources):
        raise Unknown(one, f"{len(given)} sources")
    reads = [vector_source(one, text, kind, uses) for text, kind in zip(given, sources, strict=True)]
    writes = [vector_target(one, text, kind, uses) for text, kind in zip(targets, results, strict=True)]
    if not denormals and "f" in sources and not _OWN_DENORMALS.match(one.name):
        function = _flushing(function, results)
    if one.suffix == "sdwa":
        reads, function = _sdwa(one, sources, results, reads, function)
    if one.suffix == "dpp":
        return permuted(one, uses, reads, function, results)
    if len(results) == 1:
        (write,) = writes
        return lambda waves: write(waves, function(*[read(waves) for read in reads]))

    def run(waves: Waves) -> None:
        for write, value in zip(writes, function(*[read(waves) for read in reads]), strict=True):
            write(waves, value)

    return run


def _flushing(function: Callable[..., Any], results: str) -> Callable[..., Any]:
    """MODE without denormals: sources and results of fp32 arithmetic are flushed."""

    def flushed(*values: Array) -> Any:
        values = tuple(floats.flush(value) if value.dtype == F32 else value for value in values)
        result = function(*values)
        return floats.flush(result) if results == "u" and result.dtype == F32 else result

    return flushed


def _sdwa(
    one: Instruction, sources: str, results: str, reads: list[Read], function: Callable[..., Any]
) -> tuple[list[Read], Callable[..., Any]]:
    """Sources cut down to the byte or half that they name, the result moved to its place, the rest of it 0."""

    def chosen(read: Read, kind: str, name: str) -> Read:
        shift, mask = _SELECT[one.modifiers.get(name, "DWORD")]
        if (shift, mask) == _SELECT["DWORD"]:
            return read
        if kind != "u":
            raise Unknown(one, f"SDWA of a source that is no unsigned number: {name}")
        return lambda waves: read(waves) >> U32(shift) & U32(mask)

    names = ["src0_sel", "src1_sel"]
    reads = [chosen(read, kind, name) for read, kind, name in zip(reads, sources, names, strict=False)] + reads[2:]
    if results == "m":
        return reads, function
    shift, mask = _SELECT[one.modifiers.get("dst_sel", "DWORD")]
    if (shift, mask) == _SELECT["DWORD"]:
        return reads, function
    if one.modifiers.get("dst_unused") != "UNUSED_PAD" or results != "u":
        raise Unknown(one, "SDWA that keeps the rest of the target")
    return reads, lambda *values: (function(*values).view(U32) & U32(mask)) << U32(shift)
