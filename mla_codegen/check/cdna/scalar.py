"""Scalar instructions: arithmetic on [waves] arrays of scalar registers, branches, waits, scalar loads.

Semantics after AMD's "CDNA3 Instruction Set Architecture", 5 Scalar ALU Operations and 12 Instructions.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mla_codegen.check.cdna.listing import EXEC, VCC, Instruction, Register, Unknown, number
from mla_codegen.check.cdna.operands import TYPES, Uses, registers, scalar_source
from mla_codegen.check.cdna.state import SCALARS, Access, Waves, unpack

Array = NDArray[Any]
Run = Callable[[Waves], Any]
U32, I32, U64, I64 = np.uint32, np.int32, np.uint64, np.int64


def _carry(total: Array) -> tuple[Array, Array]:
    """A sum or difference in 64 bits -> (its low half, whether the upper half is not 0)"""
    return total.astype(U32), (total >> U64(32)) != 0


def _signed(total: Array) -> tuple[Array, Array]:
    """A sum or difference of int64 -> (its low half, whether int32 overflowed)"""
    return total.astype(I32), total != total.astype(I32)


def _bits(a: Array, b: Array, dtype: Any) -> tuple[Array, Array]:
    """(the first bit, how many) that `b` names in s_bfe."""
    return (b & U32(31)).astype(dtype), (b >> U32(16) & U32(127)).astype(dtype)


def _bfe_u32(a: Array, b: Array) -> Array:
    first, count = _bits(a, b, U64)
    return (a.astype(U64) >> first & ((U64(1) << np.minimum(count, U64(32))) - U64(1))).astype(U32)


def _bfe_i32(a: Array, b: Array) -> Array:
    first, count = _bits(a, b, I64)
    field = a.astype(I64) >> first
    count = np.minimum(count, 32)
    return np.where(count == 0, 0, field << (64 - np.maximum(count, 1)) >> (64 - np.maximum(count, 1))).astype(I32)


def reverse_bits(a: Array) -> Array:
    """Bit 0 becomes bit 31 and so on."""
    for shift, mask in ((1, 0x55555555), (2, 0x33333333), (4, 0x0F0F0F0F), (8, 0x00FF00FF), (16, 0x0000FFFF)):
        a = (a >> U32(shift) & U32(mask)) | (a & U32(mask)) << U32(shift)
    return a


def _count_ones(a: Array) -> Array:
    return np.bitwise_count(a).astype(U32)


def _shifted_sum(shift: int) -> Callable[[Array, Array], tuple[Array, Array]]:
    return lambda a, b: _carry((a.astype(U64) << U64(shift)) + b)


# name -> (result and SCC, sources, function). Results: u, i, U; then `c`: the function gives SCC too; `n`: SCC is
# whether the result is not 0. Sources: u, i, U, I; `c`: SCC.
ARITHMETIC: dict[str, tuple[str, str, Callable[..., Any]]] = {
    "s_mov_b32": ("u", "u", lambda a: a),
    "s_mov_b64": ("U", "U", lambda a: a),
    "s_not_b32": ("un", "u", lambda a: ~a),
    "s_not_b64": ("Un", "U", lambda a: ~a),
    "s_abs_i32": ("in", "i", np.abs),
    "s_brev_b32": ("u", "u", reverse_bits),
    "s_bcnt1_i32_b32": ("un", "u", _count_ones),
    "s_bcnt1_i32_b64": ("un", "U", _count_ones),
    "s_sext_i32_i16": ("i", "u", lambda a: (a << U32(16)).view(I32) >> I32(16)),
    "s_sext_i32_i8": ("i", "u", lambda a: (a << U32(24)).view(I32) >> I32(24)),
    "s_add_u32": ("uc", "uu", lambda a, b: _carry(a.astype(U64) + b)),
    "s_addc_u32": ("uc", "uuc", lambda a, b, c: _carry(a.astype(U64) + b + c)),
    "s_sub_u32": ("uc", "uu", lambda a, b: _carry(a.astype(U64) - b)),
    "s_subb_u32": ("uc", "uuc", lambda a, b, c: _carry(a.astype(U64) - b - c)),
    "s_add_i32": ("ic", "ii", lambda a, b: _signed(a.astype(I64) + b)),
    "s_sub_i32": ("ic", "ii", lambda a, b: _signed(a.astype(I64) - b)),
    "s_mul_i32": ("i", "ii", lambda a, b: a * b),
    "s_mul_hi_u32": ("u", "uu", lambda a, b: (a.astype(U64) * b >> U64(32)).astype(U32)),
    "s_mul_hi_i32": ("i", "ii", lambda a, b: (a.astype(I64) * b >> 32).astype(I32)),
    "s_lshl1_add_u32": ("uc", "uu", _shifted_sum(1)),
    "s_lshl2_add_u32": ("uc", "uu", _shifted_sum(2)),
    "s_lshl3_add_u32": ("uc", "uu", _shifted_sum(3)),
    "s_lshl4_add_u32": ("uc", "uu", _shifted_sum(4)),
    "s_lshl_b32": ("un", "uu", lambda a, b: a << (b & U32(31))),
    "s_lshr_b32": ("un", "uu", lambda a, b: a >> (b & U32(31))),
    "s_ashr_i32": ("in", "iu", lambda a, b: a >> (b & U32(31)).astype(I32)),
    "s_lshl_b64": ("Un", "Uu", lambda a, b: a << (b & U32(63)).astype(U64)),
    "s_lshr_b64": ("Un", "Uu", lambda a, b: a >> (b & U32(63)).astype(U64)),
    "s_ashr_i64": ("In", "Iu", lambda a, b: a >> (b & U32(63)).astype(I64)),
    "s_and_b32": ("un", "uu", lambda a, b: a & b),
    "s_or_b32": ("un", "uu", lambda a, b: a | b),
    "s_xor_b32": ("un", "uu", lambda a, b: a ^ b),
    "s_andn2_b32": ("un", "uu", lambda a, b: a & ~b),
    "s_orn2_b32": ("un", "uu", lambda a, b: a | ~b),
    "s_and_b64": ("Un", "UU", lambda a, b: a & b),
    "s_or_b64": ("Un", "UU", lambda a, b: a | b),
    "s_xor_b64": ("Un", "UU", lambda a, b: a ^ b),
    "s_andn2_b64": ("Un", "UU", lambda a, b: a & ~b),
    "s_orn2_b64": ("Un", "UU", lambda a, b: a | ~b),
    "s_nor_b64": ("Un", "UU", lambda a, b: ~(a | b)),
    "s_nand_b64": ("Un", "UU", lambda a, b: ~(a & b)),
    "s_xnor_b64": ("Un", "UU", lambda a, b: ~(a ^ b)),
    "s_min_i32": ("ic", "ii", lambda a, b: (np.minimum(a, b), a < b)),
    "s_max_i32": ("ic", "ii", lambda a, b: (np.maximum(a, b), a > b)),
    "s_min_u32": ("uc", "uu", lambda a, b: (np.minimum(a, b), a < b)),
    "s_max_u32": ("uc", "uu", lambda a, b: (np.maximum(a, b), a > b)),
    "s_bfe_u32": ("un", "uu", _bfe_u32),
    "s_bfe_i32": ("in", "iu", _bfe_i32),
    "s_pack_ll_b32_b16": ("u", "uu", lambda a, b: (a & U32(0xFFFF)) | b << U32(16)),
    "s_pack_lh_b32_b16": ("u", "uu", lambda a, b: (a & U32(0xFFFF)) | (b & U32(0xFFFF0000))),
    "s_pack_hh_b32_b16": ("u", "uu", lambda a, b: (a >> U32(16)) | (b & U32(0xFFFF0000))),
    "s_cselect_b32": ("u", "uuc", lambda a, b, c: np.where(c, a, b)),
    "s_cselect_b64": ("U", "UUc", lambda a, b, c: np.where(c, a, b)),
}
COMPARE = {
    "eq": np.equal, "lg": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal,
}  # fmt: skip
_COMPARE = re.compile(r"s_cmpk?_(eq|lg|lt|le|gt|ge)_([ui])(32|64)")
_BIT = re.compile(r"s_bitcmp([01])_b32")
# With a constant of 16 bits in the code, extended by its sign.
_SHORT = {"s_movk_i32": "s_mov_b32", "s_addk_i32": "s_add_i32", "s_mulk_i32": "s_mul_i32"}
NOTHING = ("s_nop", "s_setprio", "s_sleep", "s_inst_prefetch", "s_sethalt", "s_icache_inv")
SAVES = {
    "s_and_saveexec_b64": lambda source, exec_: source & exec_,
    "s_or_saveexec_b64": lambda source, exec_: source | exec_,
    "s_andn2_saveexec_b64": lambda source, exec_: source & ~exec_,
    "s_xor_saveexec_b64": lambda source, exec_: source ^ exec_,
}


def build(one: Instruction, uses: Uses) -> Run:
    """What a scalar instruction does to waves; branches, waits, barriers and loads are built elsewhere."""
    name = one.opcode
    if name in NOTHING:
        return lambda waves: None
    if name in SAVES:
        return _save_exec(one, uses)
    if name == "s_setreg_imm32_b32":
        return _set_mode(one)
    if found := _BIT.fullmatch(name):
        word, bit = (scalar_source(one, text, "u", uses) for text in one.operands)
        wanted = U32(int(found[1]))

        def test(waves: Waves) -> None:
            value = word(waves) >> (bit(waves) & U32(31)) & U32(1)
            waves.scc = np.broadcast_to(value == wanted, (waves.count,))

        return test
    if found := _COMPARE.fullmatch(name):
        return _compare(one, uses, COMPARE[found[1]], found[2] if found[3] == "32" else found[2].upper())
    if name in _SHORT:
        return _short(one, uses)
    if name not in ARITHMETIC:
        raise Unknown(one)
    result, sources, function = ARITHMETIC[name]
    texts = iter(one.operands[1:])
    reads = [_flag if kind == "c" else scalar_source(one, next(texts), kind, uses) for kind in sources]
    if next(texts, None) is not None or one.modifiers:
        raise Unknown(one)
    return _assign(one, uses, result, reads, function)


def _flag(waves: Waves) -> Array:
    return waves.scc


def _assign(
    one: Instruction, uses: Uses, result: str, reads: list[Callable[[Waves], Array]], function: Callable[..., Any]
) -> Run:
    target = registers(one, one.operands[0], uses, write=True, file="s")
    wide, first = result[0] in "UI", target.first
    if target.count != (2 if wide else 1):
        raise Unknown(one)
    own, flag = result[1:] == "c", result[1:] == "n"
    if first in (EXEC, EXEC + 1) and not wide:
        raise Unknown(one, "half of EXEC")

    def run(waves: Waves) -> None:
        value = function(*[read(waves) for read in reads])
        if own:
            value, condition = value
            waves.scc = np.broadcast_to(condition, (waves.count,))
        elif flag:
            waves.scc = np.broadcast_to(value != 0, (waves.count,))
        if wide:
            waves.set_pair(first, value.view(U64))
        else:
            waves.S[first] = value.view(U32)

    return run


def _short(one: Instruction, uses: Uses) -> Run:
    bits = number(one.operands[1]) & 0xFFFF
    value = np.array([bits - (1 << 16) if bits >> 15 else bits], I32)
    result, sources, function = ARITHMETIC[_SHORT[one.opcode]]
    reads: list[Callable[[Waves], Array]] = []
    if len(sources) == 2:
        reads.append(scalar_source(one, one.operands[0], sources[0], uses))
    reads.append(lambda waves: value.view(TYPES[sources[-1]]))
    return _assign(one, uses, result, reads, function)


def _compare(one: Instruction, uses: Uses, relation: Callable[..., Array], kind: str) -> Run:
    left = scalar_source(one, one.operands[0], kind, uses)
    if one.opcode.startswith("s_cmpk"):
        value = number(one.operands[1]) & 0xFFFF
        if kind == "i" and value >> 15:
            value -= 1 << 16
        short = np.array([value], TYPES[kind])
        right: Callable[[Waves], Array] = lambda waves: short  # noqa: E731
    else:
        right = scalar_source(one, one.operands[1], kind, uses)

    def run(waves: Waves) -> None:
        waves.scc = np.broadcast_to(relation(left(waves), right(waves)), (waves.count,))

    return run


def _save_exec(one: Instruction, uses: Uses) -> Run:
    target = registers(one, one.operands[0], uses, write=True, file="s").first
    source = scalar_source(one, one.operands[1], "U", uses)
    uses.add(_exec())
    uses.add(_exec(), write=True)
    combine = SAVES[one.opcode]

    def run(waves: Waves) -> None:
        old = waves.pair(EXEC)
        new = np.broadcast_to(combine(source(waves), old), (waves.count,))
        waves.set_exec(unpack(new))
        waves.set_pair(target, old)
        waves.scc = new != 0

    return run


def _exec() -> Register:
    return Register("s", EXEC, 2)


def _set_mode(one: Instruction) -> Run:
    """MODE's bit 23, FP16_OVFL, is the only one that may be set."""
    found = re.fullmatch(r"hwreg\(HW_REG_MODE, 23, 1\)", one.operands[0])
    if not found:
        raise Unknown(one, "of MODE only FP16_OVFL is modelled")
    value = bool(number(one.operands[1]) & 1)

    def run(waves: Waves) -> None:
        waves.saturate = value

    return run


def branch(one: Instruction, uses: Uses) -> Callable[[Waves], Array] | None:
    """Which waves [waves] a branch takes away; None: all."""
    name = one.opcode
    if name == "s_branch":
        return None
    condition = name.removeprefix("s_cbranch_")
    if condition in ("scc0", "scc1"):
        return (lambda waves: waves.scc) if condition == "scc1" else (lambda waves: ~waves.scc)
    if condition in ("vccz", "vccnz"):
        uses.add(Register("s", VCC, 2))
        return lambda waves: (waves.pair(VCC) == 0) == (condition == "vccz")
    if condition in ("execz", "execnz"):
        uses.add(_exec())
        return lambda waves: waves.mask.any(1) != (condition == "execz")
    raise Unknown(one)


def waits(one: Instruction) -> tuple[int | None, int | None]:
    """(vmcnt, lgkmcnt) that an s_waitcnt waits for; None: does not."""
    found = {name: int(value) for name, value in re.findall(r"(vmcnt|lgkmcnt|expcnt)\((\d+)\)", one.text)}
    if not found or re.sub(r"(vmcnt|lgkmcnt|expcnt)\(\d+\)|[&\s]", "", one.text):
        raise Unknown(one)
    return found.get("vmcnt"), found.get("lgkmcnt")


def load(one: Instruction, uses: Uses, memory: Callable[[], Any]) -> Run:
    """s_load_dword and its wider forms: up to 16 scalar registers from memory."""
    found = re.fullmatch(r"s_load_dword(?:x(\d+))?", one.opcode)
    if not found or one.modifiers:
        raise Unknown(one)
    count = int(found[1] or 1)
    target = registers(one, one.operands[0], uses, write=True, file="s")
    base = registers(one, one.operands[1], uses, file="s").first
    offset = scalar_source(one, one.operands[2], "u", uses)
    access = Access(one, tuple(SCALARS + n for n in target.numbers), scalar=True)

    def run(waves: Waves) -> None:
        address = waves.pair(base) + offset(waves).astype(U64)
        data = memory().read(address, 4 * count, one)
        waves.S[target.first : target.first + count] = np.ascontiguousarray(data).view(U32).T
        waves.begin("lgkmcnt", access)

    return run
