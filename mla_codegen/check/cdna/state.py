"""Waves that run in step: registers of many waves side by side, and the loads that they have not waited for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mla_codegen.check.cdna.listing import EXEC, Instruction

Array = NDArray[Any]
LANES = 64
SGPRS = 128
SCALARS = 1024  # scalar register n among the registers that are waited for
_UNSET = 0x7FC0DEAD  # a NaN: registers before anything is written


def pack(mask: Array) -> Array:
    """[waves, 64] bool -> [waves] uint64, lane 0 the lowest bit."""
    packed = np.packbits(mask, axis=1, bitorder="little")
    return packed.view(np.uint64)[:, 0]


def unpack(bits: Array) -> Array:
    """[waves] uint64 -> [waves, 64] bool."""
    parts = np.ascontiguousarray(bits).view(np.uint8).reshape(-1, 8)
    return np.unpackbits(parts, axis=1, bitorder="little").view(bool)


@dataclass(frozen=True)
class Access:
    """A memory instruction under way. Its counter goes down when it is done, `scalar` ones in any order.

    registers   those that it writes, scalar ones from SCALARS on
    marks       places in the LDS records that it touches, for a write or a read of LDS
    """

    instruction: Instruction
    registers: tuple[int, ...] = ()
    scalar: bool = False
    marks: Array | None = None
    writes: bool = False


class Waves:
    """Registers and state of waves at one place of the program.

    V [registers, waves, 64] and S [SGPRS, waves] uint32; scc [waves] and mask [waves, 64] bool (EXEC); full: all of it
    group, slot   [waves]: the workgroup of each wave in its batch, and its number there
    vm, lgkm      accesses under way; pending: register -> (counter, the instruction that loads it)
    saturate      MODE's FP16_OVFL
    scratch       private memory, [words, waves, 64], and which words are written
    """

    def __init__(self, registers: int, group: Array, slot: Array) -> None:
        count = len(group)
        self.V = np.full((registers, count, LANES), _UNSET, np.uint32)
        self.S = np.full((SGPRS, count), _UNSET, np.uint32)
        self.scc = np.zeros(count, bool)
        self.group, self.slot = group, slot
        self.pc = 0
        self.vm: list[Access] = []
        self.lgkm: list[Access] = []
        self.pending: dict[int, tuple[str, Instruction]] = {}
        self.saturate = False
        self.scratch = np.zeros((0, count, LANES), np.uint32)
        self.scratch_written = np.zeros(0, bool)
        self.set_exec(np.ones((count, LANES), bool))

    @property
    def count(self) -> int:
        return len(self.group)

    def set_exec(self, mask: Array) -> None:
        self.mask = mask
        self.full = bool(mask.all())
        bits = pack(mask)
        self.S[EXEC], self.S[EXEC + 1] = bits.astype(np.uint32), (bits >> np.uint64(32)).astype(np.uint32)

    def pair(self, number: int) -> Array:
        """[waves] uint64 of scalar registers `number` and the next."""
        return self.S[number] | self.S[number + 1].astype(np.uint64) << np.uint64(32)

    def set_pair(self, number: int, value: Array) -> None:
        if number == EXEC:
            self.set_exec(unpack(np.broadcast_to(value, (self.count,))))
            return
        self.S[number] = value.astype(np.uint32)
        self.S[number + 1] = (value >> np.uint64(32)).astype(np.uint32)

    def write(self, number: int, value: Array) -> None:
        """Give vector register `number` a value, in the active lanes."""
        if self.full:
            self.V[number] = value
        else:
            np.copyto(self.V[number], value, where=self.mask)

    # --- accesses under way ---

    def begin(self, counter: str, access: Access) -> None:
        for one in access.registers:
            self.pending[one] = (counter, access.instruction)
        (self.vm if counter == "vmcnt" else self.lgkm).append(access)

    def wait_vm(self, most: int) -> list[Access]:
        """Wait until `most` vector memory accesses are under way, which end in order; returns those that ended."""
        done = self.vm[: max(0, len(self.vm) - most)]
        del self.vm[: len(done)]
        self._end(done)
        return done

    def wait_lgkm(self, most: int) -> list[Access]:
        """Likewise of LDS accesses, in order; scalar loads end in any order, so only a wait for all covers them."""
        if most == 0:
            done, self.lgkm = self.lgkm, []
        else:
            ordered = [one for one in self.lgkm if not one.scalar]
            done = ordered[: max(0, len(ordered) - most)]
            gone = {id(one) for one in done}
            self.lgkm = [one for one in self.lgkm if id(one) not in gone]
        self._end(done)
        return done

    def _end(self, done: Sequence[Access]) -> None:
        for access in done:
            for one in access.registers:
                if one in self.pending and self.pending[one][1] is access.instruction:
                    del self.pending[one]

    # --- parting and meeting ---

    def alike(self, other: Waves) -> bool:
        """Whether the two can go on in step."""
        return (
            self.pc == other.pc
            and self.saturate == other.saturate
            and self.pending == other.pending
            and [one.instruction for one in self.vm] == [one.instruction for one in other.vm]
            and [one.instruction for one in self.lgkm] == [one.instruction for one in other.lgkm]
            and np.array_equal(self.scratch_written, other.scratch_written)
        )

    def part(self, chosen: Array, of_marks: Any) -> Waves:
        """The `chosen` [waves] of them, as waves of their own. `of_marks(marks, group, slot)`: those of the waves."""
        part = Waves.__new__(Waves)
        part.V, part.S = self.V[:, chosen], self.S[:, chosen]
        part.scc, part.group, part.slot = self.scc[chosen], self.group[chosen], self.slot[chosen]
        part.scratch, part.scratch_written = self.scratch[:, chosen], self.scratch_written.copy()
        part.pc, part.saturate, part.pending = self.pc, self.saturate, dict(self.pending)

        def mine(access: Access) -> Access:
            marks = access.marks if access.marks is None else of_marks(access.marks, part.group, part.slot)
            return Access(access.instruction, access.registers, access.scalar, marks, access.writes)

        part.vm, part.lgkm = list(map(mine, self.vm)), list(map(mine, self.lgkm))
        part.mask = self.mask[chosen]
        part.full = bool(part.mask.all())
        return part

    def join(self, other: Waves) -> Waves:
        """Both, in step."""
        both = Waves.__new__(Waves)
        for name in ("V", "S", "scratch"):
            setattr(both, name, np.concatenate([getattr(self, name), getattr(other, name)], axis=1))
        for name in ("scc", "group", "slot", "mask"):
            setattr(both, name, np.concatenate([getattr(self, name), getattr(other, name)]))
        both.pc, both.saturate, both.pending = self.pc, self.saturate, self.pending
        both.scratch_written = self.scratch_written
        both.full = self.full and other.full

        def joined(mine: list[Access], theirs: list[Access]) -> list[Access]:
            pairs = zip(mine, theirs, strict=True)
            return [
                a if a.marks is None or b.marks is None
                else Access(a.instruction, a.registers, a.scalar, np.concatenate([a.marks, b.marks]), a.writes)
                for a, b in pairs
            ]  # fmt: skip

        both.vm, both.lgkm = joined(self.vm, other.vm), joined(self.lgkm, other.lgkm)
        return both
