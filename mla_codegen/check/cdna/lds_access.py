"""Instructions on LDS: reads and writes, transposing reads, and shuffles that go through its crossbar.

After AMD's "CDNA3" and "CDNA4 Instruction Set Architecture", 11 Data Share Operations. The order of lanes in a
transposing read is inferred: with it the kernels give right results.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mla_codegen.check.cdna.findings import MODEL
from mla_codegen.check.cdna.listing import Instruction, Unknown
from mla_codegen.check.cdna.operands import Uses, registers
from mla_codegen.check.cdna.state import LANES, Access, Waves
from mla_codegen.check.cdna.vmem import Machine

Array = NDArray[Any]
Run = Callable[[Waves], None]
U32, I64 = np.uint32, np.int64
_NAME = re.compile(r"ds_(read|write)(2|2st64)?_([bui])(8|16|32|64|96|128)(_tr_b8|_tr_b16)?(_d16)?(_d16_hi|_hi)?")
_SWAP = re.compile(r"swizzle\(SWAP,(\d+)\)")
_QUADS = re.compile(r"swizzle\(QUAD_PERM,(\d),(\d),(\d),(\d)\)")


def width(one: Instruction) -> int:
    """Bytes of a lane that an LDS access touches at one place; 4 where it is a shuffle."""
    found = _NAME.fullmatch(one.opcode)
    return int(found[4]) // 8 if found else 4


def build(one: Instruction, uses: Uses, machine: Machine) -> Run:
    """What an LDS instruction does to waves."""
    if one.opcode == "ds_bpermute_b32":
        return _gather_lanes(one, uses)
    if one.opcode == "ds_swizzle_b32":
        return _swizzle(one, uses)
    found = _NAME.fullmatch(one.opcode)
    if not found:
        raise Unknown(one)
    one.allow("offset", "offset0", "offset1")
    size = int(found[4]) // 8
    if found[2]:
        step = size * (64 if found[2] == "2st64" else 1)
        offsets = [one.offset_of("offset0") * step, one.offset_of("offset1") * step]
    else:
        offsets = [one.offset_of()]
    high = bool(found[7])
    if found[1] == "write":
        return _write(one, uses, machine, size, offsets, high)
    if (found[6] or high) and size > 2:
        raise Unknown(one)
    return _read(one, uses, machine, size, offsets, found[3] == "i", found[5] or "", bool(found[6] or high), high)


def _write(one: Instruction, uses: Uses, machine: Machine, size: int, offsets: list[int], high: bool) -> Run:
    at = registers(one, one.operands[0], uses, file="v").first
    words = max(1, size // 4)
    sources = [registers(one, text, uses, file="v") for text in one.operands[1:]]
    if any(source.count != words for source in sources) or len(sources) != len(offsets):
        raise Unknown(one)
    begin = 2 if high else 0

    def run(waves: Waves) -> None:
        marks = []
        base = waves.V[at].astype(I64)
        for offset, source in zip(offsets, sources, strict=True):
            held = np.moveaxis(waves.V[source.first : source.first + words], 0, 2)
            data = np.ascontiguousarray(held).view(np.uint8)[:, :, begin : begin + size]
            marks.append(machine.lds.write(waves, base + offset, data, one).reshape(-1))
        waves.begin("lgkmcnt", Access(one, marks=np.concatenate(marks), writes=True))

    return run


def _read(
    one: Instruction,
    uses: Uses,
    machine: Machine,
    size: int,
    offsets: list[int],
    signed: bool,
    transposed: str,
    half: bool,
    high: bool,
) -> Run:
    words = max(1, size // 4)
    target = registers(one, one.operands[0], uses, write=True, file="v")
    at = registers(one, one.operands[1], uses, file="v").first
    if target.count != words * len(offsets):
        raise Unknown(one)
    if half:
        uses.reads.add(target.first)

    def run(waves: Waves) -> None:
        marks = []
        base = waves.V[at].astype(I64)
        for number, offset in enumerate(offsets):
            found, mark = machine.lds.read(waves, base + offset, size, one)
            marks.append(mark.reshape(-1))
            if transposed:
                if not waves.full:
                    machine.findings.note(MODEL, one, "a transposing read with lanes switched off is not modelled")
                found = transpose(found, 2 if transposed == "_tr_b16" else 1)
            values = _extended(found, size, signed)
            first = target.first + number * words
            if half:
                old = waves.V[first]
                kept = old & U32(0xFFFF) if high else old & U32(0xFFFF0000)
                values = (kept | (values[0] << U32(16) if high else values[0] & U32(0xFFFF)))[None]
            for word in range(words):
                waves.write(first + word, values[word])
        waves.begin("lgkmcnt", Access(one, tuple(target.numbers), marks=np.concatenate(marks)))

    return run


def _extended(found: Array, size: int, signed: bool) -> Array:
    """[waves, 64, bytes] -> [words, waves, 64]"""
    if size >= 4:
        return np.moveaxis(found.view(U32), 2, 0)
    full = np.zeros((*found.shape[:2], 4), np.uint8)
    full[:, :, :size] = found
    values = np.moveaxis(full.view(U32), 2, 0)
    shift = 32 - 8 * size
    return ((values << U32(shift)).view(np.int32) >> np.int32(shift)).view(U32) if signed else values


def transpose(found: Array, element: int) -> Array:
    """ds_read_b64_tr: 16 lanes read 16 x 8 bytes, rows of 16 elements; lane l gets column l of them.

    found     [waves, 64, 8] bytes; element: bytes of one
    """
    rows = 8 // element
    dtype = np.uint8 if element == 1 else np.uint16
    blocks = np.ascontiguousarray(found).view(dtype).reshape(-1, 4, rows, 16)
    return np.ascontiguousarray(blocks.swapaxes(2, 3)).view(np.uint8).reshape(found.shape)


def _gather_lanes(one: Instruction, uses: Uses) -> Run:
    """ds_bpermute_b32: every lane names, times 4, the lane whose value it wants; of a lane switched off it gets 0."""
    one.allow("offset")
    target = registers(one, one.operands[0], uses, write=True, file="v").first
    index, source = (registers(one, text, uses, file="v").first for text in one.operands[1:])
    offset, access = U32(one.offset_of()), Access(one, (target,))

    def run(waves: Waves) -> None:
        lane = ((waves.V[index] + offset) >> U32(2) & U32(63)).astype(I64)
        active = np.where(waves.mask, waves.V[source], U32(0))
        waves.write(target, np.take_along_axis(active, lane, 1))
        waves.begin("lgkmcnt", access)

    return run


def _swizzle(one: Instruction, uses: Uses) -> Run:
    """ds_swizzle_b32 in two of LLVM's ways: SWAP exchanges neighbouring groups of lanes, QUAD_PERM permutes four."""
    one.allow("offset")
    target = registers(one, one.operands[0], uses, write=True, file="v").first
    source = registers(one, one.operands[1], uses, file="v").first
    lanes = np.arange(LANES)
    way = one.modifiers.get("offset", "")
    if found := _SWAP.fullmatch(way):
        lanes = lanes ^ int(found[1])
    elif found := _QUADS.fullmatch(way):
        lanes = lanes // 4 * 4 + np.array([int(digit) for digit in found.groups()])[lanes % 4]
    else:
        raise Unknown(one)
    access = Access(one, (target,))

    def run(waves: Waves) -> None:
        active = np.where(waves.mask, waves.V[source], U32(0))
        waves.write(target, active[:, lanes])
        waves.begin("lgkmcnt", access)

    return run
