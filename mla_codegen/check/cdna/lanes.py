"""Vector instructions that are not lane by lane with one result: reads of a lane, exchanges, packed pairs, fp8.

Semantics after AMD's "CDNA3" and "CDNA4 Instruction Set Architecture", 12 Instructions.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mla_codegen.check.cdna import floats
from mla_codegen.check.cdna.findings import MODEL, Findings
from mla_codegen.check.cdna.floats import F32, F64, FP8, U32
from mla_codegen.check.cdna.listing import Instruction, Unknown, register
from mla_codegen.check.cdna.operands import Uses, constant, registers, vector_source
from mla_codegen.check.cdna.state import Waves

Array = NDArray[Any]
Run = Callable[[Waves], None]


def bits_of(one: Instruction, name: str, default: str, count: int) -> list[int]:
    """A modifier like op_sel:[0,1,0] as numbers, completed by `default`."""
    found = [int(digit) for digit in re.findall(r"\d", one.modifiers.get(name, ""))]
    return found + [int(default)] * (count - len(found))


def build(one: Instruction, uses: Uses, arch: str, findings: Findings) -> Run | None:
    """What the instruction does to waves; None if it is not one of these."""
    name = one.name
    if name in ("v_readfirstlane_b32", "v_readlane_b32"):
        return _read_lane(one, uses)
    if name == "v_writelane_b32":
        return _write_lane(one, uses)
    if name in ("v_permlane16_swap_b32", "v_permlane32_swap_b32"):
        return _swap_rows(one, uses, findings)
    if name == "v_swap_b32":
        return _swap(one, uses)
    if name in PACKED:
        return _packed(one, uses)
    if name == "v_pk_mov_b32":
        return _packed_move(one, uses)
    if name in PACKED_16 or name == "v_pack_b32_f16":
        return _halves(one, uses)
    if name in ("v_fma_mixlo_f16", "v_fma_mixhi_f16"):
        return _mixed(one, uses)
    if name in ("v_cvt_pk_fp8_f32", "v_cvt_scalef32_pk_fp8_f32"):
        return _to_fp8(one, uses, arch)
    if name in ("v_cvt_pk_f32_fp8", "v_cvt_scalef32_pk_f32_fp8"):
        return _from_fp8(one, uses, arch)
    if name == "v_cvt_scalef32_pk_bf16_fp8":
        return _fp8_to_bf16(one, uses, arch)
    if name == "v_cvt_f32_fp8":
        return _one_from_fp8(one, uses, arch)
    return None


def _read_lane(one: Instruction, uses: Uses) -> Run:
    one.allow()
    target = registers(one, one.operands[0], uses, write=True, file="s").first
    source = registers(one, one.operands[1], uses, file="v").first
    if one.name == "v_readfirstlane_b32":
        # The first active lane; lane 0 if there is none.
        def run(waves: Waves) -> None:
            waves.S[target] = np.take_along_axis(waves.V[source], waves.mask.argmax(1)[:, None], 1)[:, 0]

        return run
    lane = vector_source(one, one.operands[2], "u", uses)

    def run_of(waves: Waves) -> None:
        wanted = np.broadcast_to(lane(waves)[:, :1] & U32(63), (waves.count, 1)).astype(np.int64)
        waves.S[target] = np.take_along_axis(waves.V[source], wanted, 1)[:, 0]

    return run_of


def _write_lane(one: Instruction, uses: Uses) -> Run:
    one.allow()
    target = registers(one, one.operands[0], uses, write=True, file="v").first
    uses.reads.add(target)
    value = vector_source(one, one.operands[1], "u", uses)
    lane = vector_source(one, one.operands[2], "u", uses)

    def run(waves: Waves) -> None:
        wanted = np.broadcast_to(lane(waves)[:, :1] & U32(63), (waves.count, 1)).astype(np.int64)
        np.put_along_axis(waves.V[target], wanted, np.broadcast_to(value(waves)[:, :1], (waves.count, 1)), 1)

    return run


def _swap_rows(one: Instruction, uses: Uses, findings: Findings) -> Run:
    """Odd rows of the first register and even rows of the second change places; a row: 16 or 32 lanes."""
    one.allow()
    first, second = (registers(one, text, uses, file="v").first for text in one.operands)
    uses.writes.update((first, second))
    row = int(one.name[len("v_permlane") :][:2])

    def run(waves: Waves) -> None:
        if not waves.full:
            findings.note(MODEL, one, "lanes are switched off; what a swap of rows does then is not modelled")
        a, b = (waves.V[number].reshape(waves.count, -1, 2, row) for number in (first, second))
        odd = a[:, :, 1].copy()
        a[:, :, 1] = b[:, :, 0]
        b[:, :, 0] = odd

    return run


def _swap(one: Instruction, uses: Uses) -> Run:
    one.allow()
    first, second = (registers(one, text, uses, file="v").first for text in one.operands)
    uses.writes.update((first, second))

    def run(waves: Waves) -> None:
        old = waves.V[first].copy()
        waves.write(first, waves.V[second])
        waves.write(second, old)

    return run


PACKED: dict[str, Callable[..., Array]] = {
    "v_pk_mul_f32": lambda a, b: a * b,
    "v_pk_add_f32": lambda a, b: a + b,
    "v_pk_fma_f32": floats.fma,
}


def _packed(one: Instruction, uses: Uses) -> Run:
    """Two fp32 at once; op_sel and op_sel_hi name the half of each source that goes into the low and high result."""
    one.allow("op_sel", "op_sel_hi", "neg_lo", "neg_hi")
    sources = one.operands[1:]
    count = len(sources)
    target = registers(one, one.operands[0], uses, write=True, file="v").first
    function = PACKED[one.name]
    reads = [_half(one, text, uses) for text in sources]
    selected = (bits_of(one, "op_sel", "0", count), bits_of(one, "op_sel_hi", "1", count))
    negated = (bits_of(one, "neg_lo", "0", count), bits_of(one, "neg_hi", "0", count))

    def run(waves: Waves) -> None:
        results = []
        for select, negate in zip(selected, negated, strict=True):
            values = [read(waves, half) for read, half in zip(reads, select, strict=True)]
            results.append(function(*[-v if no else v for v, no in zip(values, negate, strict=True)]))
        for place, result in enumerate(results):
            waves.write(target + place, result.view(U32))

    return run


def _half(one: Instruction, text: str, uses: Uses) -> Callable[[Waves, int], Array]:
    """How to read the low or high register of a pair as fp32; a constant is the same in both."""
    found = register(text)
    if found is None:
        value = constant(text, "f")[None, :]
        return lambda waves, half: value
    if found.count != 2:
        raise Unknown(one, f"operand {text}")
    uses.add(found)
    if found.file == "s":
        return lambda waves, half: waves.S[found.first + half][:, None].view(F32)
    return lambda waves, half: waves.V[found.first + half].view(F32)


def _packed_move(one: Instruction, uses: Uses) -> Run:
    one.allow("op_sel", "op_sel_hi")
    target = registers(one, one.operands[0], uses, write=True, file="v").first
    low, high = (_half(one, text, uses) for text in one.operands[1:])
    from_low, from_high = bits_of(one, "op_sel", "0", 2)[:2]

    def run(waves: Waves) -> None:
        values = low(waves, from_low).copy(), high(waves, from_high).copy()
        for place, value in enumerate(values):
            waves.write(target + place, value.view(U32))

    return run


def _signed_16(a: Array) -> Array:
    return a.astype(np.uint16).view(np.int16).astype(np.int32)


def _fp16(function: Callable[[Array, Array], Array]) -> Callable[[Array, Array], Array]:
    """On fp16, denormals kept: numpy computes in fp32 and rounds, which rounds sums and products of fp16 right."""

    def on_bits(a: Array, b: Array) -> Array:
        values = (x.astype(np.uint16).view(np.float16) for x in (a, b))
        return function(*values).view(np.uint16).astype(U32)

    return on_bits


# Of two numbers of 16 bits each; the low 16 bits of the result count.
PACKED_16: dict[str, Callable[[Array, Array], Array]] = {
    "v_pk_add_u16": lambda a, b: a + b,
    "v_pk_add_i16": lambda a, b: a + b,
    "v_pk_sub_u16": lambda a, b: a - b,
    "v_pk_sub_i16": lambda a, b: a - b,
    "v_pk_mul_lo_u16": lambda a, b: a * b,
    "v_pk_lshlrev_b16": lambda a, b: b << (a & U32(15)),
    "v_pk_lshrrev_b16": lambda a, b: b >> (a & U32(15)),
    "v_pk_ashrrev_i16": lambda a, b: (_signed_16(b) >> (a & U32(15)).astype(np.int32)).astype(U32),
    "v_pk_add_f16": _fp16(lambda a, b: a + b),
    "v_pk_mul_f16": _fp16(lambda a, b: a * b),
    "v_pk_min_u16": np.minimum,
    "v_pk_max_u16": np.maximum,
    "v_pk_min_i16": lambda a, b: np.minimum(_signed_16(a), _signed_16(b)).astype(U32),
    "v_pk_max_i16": lambda a, b: np.maximum(_signed_16(a), _signed_16(b)).astype(U32),
}


def _halves(one: Instruction, uses: Uses) -> Run:
    """Two numbers of 16 bits; op_sel and op_sel_hi as for fp32 pairs."""
    one.allow("op_sel", "op_sel_hi")
    target = registers(one, one.operands[0], uses, write=True, file="v").first
    first, second = (vector_source(one, text, "u", uses) for text in one.operands[1:])
    low, high = bits_of(one, "op_sel", "0", 2), bits_of(one, "op_sel_hi", "1", 2)
    mask, width = U32(0xFFFF), U32(16)

    def part(value: Array, half: int) -> Array:
        return value >> U32(16 * half) & mask

    def run(waves: Waves) -> None:
        a, b = first(waves), second(waves)
        if one.name == "v_pack_b32_f16":
            waves.write(target, part(a, low[0]) | part(b, low[1]) << width)
            return
        function = PACKED_16[one.name]
        results = [function(part(a, of_a), part(b, of_b)) & mask for of_a, of_b in (low, high)]
        waves.write(target, results[0] | results[1] << width)

    return run


def _mixed(one: Instruction, uses: Uses) -> Run:
    """a * b + c, rounded once, to half of the target; the rest stays. op_sel_hi: a source is fp16, op_sel: which."""
    one.allow("op_sel", "op_sel_hi")
    target = registers(one, one.operands[0], uses, write=True, file="v").first
    uses.reads.add(target)
    halves, narrow = bits_of(one, "op_sel", "0", 3), bits_of(one, "op_sel_hi", "0", 3)
    reads = [
        vector_source(one, text, "u" if is_half else "f", uses)
        for text, is_half in zip(one.operands[1:], narrow, strict=True)
    ]
    high = one.name == "v_fma_mixhi_f16"

    def run(waves: Waves) -> None:
        values = []
        for read, half, is_half in zip(reads, halves, narrow, strict=True):
            value = read(waves)
            if is_half:
                value = (value >> U32(16 * half)).astype(np.uint16).view(np.float16)
            values.append(value.astype(F64))
        a, b, c = values
        result = (a * b + c).astype(np.float16).view(np.uint16).astype(U32)
        old = waves.V[target]
        kept = old & U32(0xFFFF) if high else old & U32(0xFFFF0000)
        waves.write(target, kept | result << U32(16) if high else kept | result)

    return run


def _scale(one: Instruction, text: str, uses: Uses) -> Callable[[Waves], Array]:
    """2 ^ (the exponent of an fp32 operand)."""
    read = vector_source(one, text, "f", uses)
    return lambda waves: np.exp2(floats.exponent(read(waves)).astype(F64) - 127)


def _to_fp8(one: Instruction, uses: Uses, arch: str) -> Run:
    """Two fp32 to two fp8 in the half of the target that op_sel's last bit names; the other half stays."""
    one.allow("op_sel")
    target = registers(one, one.operands[0], uses, write=True, file="v").first
    uses.reads.add(target)
    a, b = (vector_source(one, text, "f", uses) for text in one.operands[1:3])
    scale = _scale(one, one.operands[3], uses) if "scalef32" in one.name else None
    high = re.findall(r"\d", one.modifiers.get("op_sel", "0"))[-1] == "1"

    def run(waves: Waves) -> None:
        x, y = a(waves), b(waves)
        if scale:
            by = 1 / scale(waves)
            x, y = (x * by).astype(F32), (y * by).astype(F32)
        pair = floats.to_fp8(x, arch, waves.saturate) | floats.to_fp8(y, arch, waves.saturate) << U32(8)
        old = waves.V[target]
        kept = old & U32(0xFFFF) if high else old & U32(0xFFFF0000)
        waves.write(target, kept | pair << U32(16) if high else kept | pair)

    return run


def _from_fp8(one: Instruction, uses: Uses, arch: str) -> Run:
    """Two fp8, from the half of the source that op_sel's first bit (SDWA: src0_sel) names, to two fp32."""
    one.allow("op_sel", "src0_sel")
    target = registers(one, one.operands[0], uses, write=True, file="v").first
    source = vector_source(one, one.operands[1], "u", uses)
    scale = _scale(one, one.operands[2], uses) if "scalef32" in one.name else None
    high = bits_of(one, "op_sel", "0", 1)[0] == 1 or one.modifiers.get("src0_sel") == "WORD_1"
    table = FP8[arch]

    def run(waves: Waves) -> None:
        word = source(waves) >> U32(16 if high else 0)
        values = table[word & U32(0xFF)], table[word >> U32(8) & U32(0xFF)]
        by = scale(waves) if scale else None
        for place, value in enumerate(values):
            value = value if by is None else (value * by).astype(F32)
            waves.write(target + place, value.view(U32))

    return run


def _fp8_to_bf16(one: Instruction, uses: Uses, arch: str) -> Run:
    """Two fp8, from the half of the source that op_sel's first bit names, to two bf16 in a register."""
    one.allow("op_sel")
    target = registers(one, one.operands[0], uses, write=True, file="v").first
    source = vector_source(one, one.operands[1], "u", uses)
    scale = _scale(one, one.operands[2], uses)
    high = bits_of(one, "op_sel", "0", 1)[0] == 1
    table = FP8[arch]

    def run(waves: Waves) -> None:
        word, by = source(waves) >> U32(16 if high else 0), scale(waves)
        first, second = (
            floats.to_bf16((table[word >> U32(shift) & U32(0xFF)] * by).astype(F32)).astype(U32) for shift in (0, 8)
        )
        waves.write(target, first | second << U32(16))

    return run


def _one_from_fp8(one: Instruction, uses: Uses, arch: str) -> Run:
    """One fp8 to fp32; SDWA's src0_sel names the byte."""
    one.allow("src0_sel", "op_sel")
    if one.modifiers.get("op_sel"):
        raise Unknown(one, "op_sel")
    target = registers(one, one.operands[0], uses, write=True, file="v").first
    source = vector_source(one, one.operands[1], "u", uses)
    byte = int(one.modifiers.get("src0_sel", "BYTE_0").removeprefix("BYTE_").replace("DWORD", "0"))
    table = FP8[arch]
    return lambda waves: waves.write(target, table[source(waves) >> U32(8 * byte) & U32(0xFF)].view(U32))
