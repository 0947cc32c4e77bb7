"""Vector memory: global and buffer loads and stores, copies straight to LDS, and scratch.

After AMD's "CDNA3 Instruction Set Architecture", 9 Vector Memory Operations and 10 Flat Memory Instructions; CDNA4's
for copies of 12 and 16 bytes a lane.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from mla_codegen.check.cdna.findings import OUTSIDE, UNWRITTEN, Findings
from mla_codegen.check.cdna.lds import Lds
from mla_codegen.check.cdna.listing import M0, Instruction, Unknown
from mla_codegen.check.cdna.memory import Memory
from mla_codegen.check.cdna.operands import Uses, registers, scalar_source
from mla_codegen.check.cdna.state import LANES, SCALARS, Access, Waves

Array = NDArray[Any]
Run = Callable[[Waves], None]
U32, U64, I64 = np.uint32, np.uint64, np.int64
CACHE = ("sc0", "sc1", "nt")  # say where copies are kept, not what is read
RAW_BUFFER = 0x27000  # word 3 of a descriptor of plain bytes, without a format, a stride or a swizzle
_NAME = re.compile(
    r"(global|buffer)_(load|store)_(lds_)?(dword(?:x[234])?|[us]byte|[us]?short|byte)(_d16|_d16_hi)?(_lds)?"
)
_BYTES = {"dword": 4, "dwordx2": 8, "dwordx3": 12, "dwordx4": 16, "short": 2, "byte": 1}


class Machine(Protocol):
    """Where instructions find the memory of the launch. `waits`: waits that had something to wait for."""

    memory: Memory
    lds: Lds
    findings: Findings
    waits: int


# waves -> (addresses, lanes that access), both [waves, 64]; a load gives the other active lanes 0
Address = Callable[[Waves], tuple[Array, Array]]


def build(one: Instruction, uses: Uses, machine: Machine) -> Run:
    """What a global or buffer instruction does to waves."""
    found = _NAME.fullmatch(one.opcode)
    if not found:
        raise Unknown(one)
    buffer, store, kind = found[1] == "buffer", found[2] == "store", found[4]
    to_lds = bool(found[3] or found[6]) or "lds" in one.modifiers
    half = found[5] or ""
    one.allow("offset", "offen", "lds", *CACHE) if buffer else one.allow("offset", *CACHE)
    size = _BYTES[re.sub(r"^[us](?=byte|short)", "", kind)]
    texts = list(one.operands)
    data = None
    if not to_lds:
        data = texts.pop(1 if store and not buffer else 0)
    address = (_buffer if buffer else _global)(one, texts, size, uses, machine)
    if to_lds:
        if store or half:
            raise Unknown(one)
        return _copy(one, address, size, uses, machine)
    assert data is not None
    target = registers(one, data, uses, write=not store, file="v")
    if target.count != max(1, size // 4):
        raise Unknown(one, f"operand {data}")
    if store:
        return _store(one, target.first, size, half, address, machine)
    if half:
        uses.reads.add(target.first)
    return _load(one, target.first, size, kind, half, address, machine)


def _global(one: Instruction, texts: list[str], size: int, uses: Uses, machine: Machine) -> Address:
    """A 64-bit address of vector registers, or of scalar ones and a 32-bit offset of a vector one."""
    place, base = texts
    offset = np.array(one.offset_of(), I64).astype(U64)
    at = registers(one, place, uses, file="v")
    if base == "off":
        if at.count != 2:
            raise Unknown(one, f"operand {place}")

        def wide(waves: Waves) -> tuple[Array, Array]:
            low, high = waves.V[at.first], waves.V[at.first + 1].astype(U64)
            return (low | high << U64(32)) + offset, waves.mask

        return wide
    scalar = registers(one, base, uses, file="s")
    if at.count != 1 or scalar.count != 2:
        raise Unknown(one, f"operands {place}, {base}")

    def narrow(waves: Waves) -> tuple[Array, Array]:
        return waves.V[at.first] + waves.pair(scalar.first)[:, None] + offset, waves.mask

    return narrow


def _buffer(one: Instruction, texts: list[str], size: int, uses: Uses, machine: Machine) -> Address:
    """base + scalar offset + (vector offset + constant), the bracket held to the descriptor's size: beyond it loads
    give 0 and stores do nothing.

    The bracket has 32 bits, so that a negative vector offset counts. LLVM relies on that: before gfx1250 it moves
    constants into the instruction without asking whether the sum wraps.
    """
    place, descriptor, scalar = texts
    if ("offen" in one.modifiers) == (place == "off"):
        raise Unknown(one, f"operand {place}")
    at = None if place == "off" else registers(one, place, uses, file="v").first
    words = registers(one, descriptor, uses, file="s")
    if words.count != 4:
        raise Unknown(one, f"operand {descriptor}")
    first = words.first
    extra = scalar_source(one, scalar, "u", uses)
    offset = U32(one.offset_of())

    def bounded(waves: Waves) -> tuple[Array, Array]:
        high, records = waves.S[first + 1], waves.S[first + 2].astype(U64)
        if (high >> U32(16)).any() or (waves.S[first + 3] != RAW_BUFFER).any():
            raise Unknown(one, f"a buffer descriptor {high[0]:#x} {waves.S[first + 3][0]:#x} that is not raw")
        base = waves.S[first] | high.astype(U64) << U64(32)
        varying = np.zeros((waves.count, LANES), U32) if at is None else waves.V[at]
        within = (varying + offset).astype(U64)
        inside = within + U64(size) <= records[:, None]
        if (waves.mask & ~inside & (within < records[:, None])).any():
            machine.findings.note(OUTSIDE, one, "an access across the end of the buffer's records")
        return within + (base + extra(waves))[:, None], waves.mask & inside

    return bounded


def _load(one: Instruction, target: int, size: int, kind: str, half: str, address: Address, machine: Machine) -> Run:
    words = max(1, size // 4)
    access = Access(one, tuple(range(target, target + words)))
    signed = kind in ("sbyte", "sshort")

    def run(waves: Waves) -> None:
        at, lanes = address(waves)
        found = np.zeros((waves.count, LANES, max(4, size)), np.uint8)
        if lanes.any():
            found[lanes, :size] = machine.memory.read(at[lanes], size, one)
        values = np.moveaxis(found.view(U32), 2, 0)
        if signed:
            shift = np.int32(32 - 8 * size)
            values = ((values << shift.astype(U32)).view(np.int32) >> shift).view(U32)
        if half:
            old = waves.V[target]
            kept = old & U32(0xFFFF) if half == "_d16_hi" else old & U32(0xFFFF0000)
            values = (kept | (values[0] << U32(16) if half == "_d16_hi" else values[0] & U32(0xFFFF)))[None]
        for word in range(words):
            waves.write(target + word, values[word])
        waves.begin("vmcnt", access)

    return run


def _store(one: Instruction, source: int, size: int, half: str, address: Address, machine: Machine) -> Run:
    words = max(1, size // 4)
    begin = 2 if half == "_d16_hi" else 0
    access = Access(one)

    def run(waves: Waves) -> None:
        at, lanes = address(waves)
        if lanes.any():
            held = np.ascontiguousarray(np.moveaxis(waves.V[source : source + words], 0, 2)).view(np.uint8)
            machine.memory.write(at[lanes], held[lanes][:, begin : begin + size], one)
        waves.begin("vmcnt", access)

    return run


def _copy(one: Instruction, address: Address, size: int, uses: Uses, machine: Machine) -> Run:
    """Memory to LDS: lane l's bytes go to M0 + the constant offset + size * l, once the wave has waited for them."""
    uses.reads.add(SCALARS + M0)
    offset = one.offset_of()
    if size < 4:
        raise Unknown(one)

    def run(waves: Waves) -> None:
        at, lanes = address(waves)
        found = np.zeros((waves.count, LANES, size), np.uint8)
        if lanes.any():
            found[lanes] = machine.memory.read(at[lanes], size, one)
        base = (waves.S[M0] & U32(0xFFFF)).astype(I64)[:, None]
        place = base + offset + size * np.arange(LANES)
        marks = machine.lds.write(waves, place, found, one, flying=True)
        waves.begin("vmcnt", Access(one, marks=marks, writes=True))

    return run


_SCRATCH = re.compile(r"scratch_(load|store)_dword(?:x([234]))?")


def build_scratch(one: Instruction, uses: Uses, machine: Machine) -> Run:
    """A lane's own memory, at a constant offset, on top of a scalar register if one is named."""
    found = _SCRATCH.fullmatch(one.opcode)
    if not found:
        raise Unknown(one)
    one.allow("offset", *CACHE)
    store, count = found[1] == "store", int(found[2] or 1)
    texts = list(one.operands)
    data = registers(one, texts.pop(1 if store else 0), uses, write=not store, file="v")
    place, base = texts
    if place != "off" or data.count != count or one.offset_of() % 4:
        raise Unknown(one)
    scalar = None if base == "off" else registers(one, base, uses, file="s").first
    access = Access(one, () if store else tuple(data.numbers))

    def run(waves: Waves) -> None:
        at = one.offset_of()
        if scalar is not None:
            offsets = waves.S[scalar]
            if (offsets != offsets[0]).any():
                raise Unknown(one, "scratch offsets that differ among waves")
            at += int(offsets[0])
        words = slice(at // 4, at // 4 + count)
        grow = words.stop - len(waves.scratch)
        if grow > 0:
            waves.scratch = np.concatenate([waves.scratch, np.zeros((grow, waves.count, LANES), U32)])
            waves.scratch_written = np.concatenate([waves.scratch_written, np.zeros(grow, bool)])
        if store:
            np.copyto(waves.scratch[words], waves.V[data.first : data.first + count], where=waves.mask)
            waves.scratch_written[words] = True
        else:
            if not waves.scratch_written[words].all():
                machine.findings.note(UNWRITTEN, one, "reads scratch that nothing wrote")
            for number, value in zip(data.numbers, waves.scratch[words], strict=True):
                waves.write(number, value)
        waves.begin("vmcnt", access)

    return run
