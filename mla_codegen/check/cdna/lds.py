"""LDS of a batch of workgroups, with records of who touched what since the last barrier.

For every cell (the smallest access of the program: 1, 2 or 4 bytes) and wave of its workgroup there is a byte for reads
and one for writes, eight waves side by side as one 64-bit number. A wave that reads what another wrote, or writes what
another touched, with no barrier between, is a race. Waves of one workgroup may write equal values to one place, as
compilers do with replicated tensors.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from mla_codegen.check.cdna.banks import Traffic
from mla_codegen.check.cdna.findings import OUTSIDE, RACE, UNWRITTEN, Findings
from mla_codegen.check.cdna.listing import Instruction
from mla_codegen.check.cdna.state import Waves

Array = NDArray[Any]
WAVES = 8  # most waves of a workgroup
_ONES = np.uint64(0x0101010101010101)
_DONE, _FLYING = 1, 2  # of a write: the data is on its way while its instruction is not waited for
_OWN = np.array([0xFF << 8 * slot for slot in range(WAVES)], np.uint64)


class Lds:
    """Shared memory of `groups` workgroups, `size` bytes each.

    cell      bytes of the smallest access
    traffic   counts bytes and bank conflicts, if given
    """

    def __init__(self, groups: int, size: int, cell: int, findings: Findings, traffic: Traffic | None = None) -> None:
        self.size, self.cell, self.findings, self.traffic = size, cell, findings, traffic
        self.stride = -(-size // 16) * 16
        self.data = np.full(groups * self.stride + 16, 0xA5, np.uint8)
        self.cells = self.stride // cell
        count = groups * self.cells + 16 // cell
        self.read_by = np.zeros((count, WAVES), np.uint8)
        self.written_by = np.zeros((count, WAVES), np.uint8)
        self.ever = np.zeros(count, bool)
        self.last = np.zeros(count, np.int32)  # line of the instruction that touched it last

    def _places(
        self, waves: Waves, at: Array, size: int, instruction: Instruction, write: bool
    ) -> tuple[Array, Array, Array]:
        """(bytes in `data` of the first byte, slots, mask) of the active lanes whose access is inside."""
        mask = waves.mask
        inside = (at >= 0) & (at + size <= self.size)
        if not inside[mask].all():
            furthest = int(at[mask].max()) + size
            self.findings.note(OUTSIDE, instruction, f"LDS up to byte {furthest} of the launch's {self.size}")
            mask = mask & inside
        if self.traffic is not None:
            self.traffic.add(at, mask, size, write)
        base = (waves.group * self.stride)[:, None] + at
        return base[mask], np.broadcast_to(waves.slot[:, None], mask.shape)[mask], mask

    def _cells(self, first: Array, size: int) -> Array:
        return (first // self.cell)[:, None] + np.arange(max(1, size // self.cell))

    def read(self, waves: Waves, at: Array, size: int, instruction: Instruction) -> tuple[Array, Array]:
        """([waves, 64, size] bytes at byte offsets `at` [waves, 64] of the active lanes, marks)."""
        first, slot, mask = self._places(waves, at, size, instruction, False)
        cells = self._cells(first, size)
        written = self.written_by.view(np.uint64)[cells, 0]
        others = written & ~_OWN[slot][:, None]
        if others.any():
            by = self._line(cells, others != 0)
            self.findings.note(RACE, instruction, f"reads LDS that another wave wrote since the last barrier, at {by}")
        flying = written & _OWN[slot][:, None] & (_ONES << np.uint64(1))
        if flying.any():
            by = self._line(cells, flying != 0)
            self.findings.note(RACE, instruction, f"reads LDS whose copy is not waited for, of {by}")
        if not self.ever[cells].all():
            self.findings.note(UNWRITTEN, instruction, "reads LDS that nothing wrote")
        marks = cells * WAVES + slot[:, None]
        self.read_by.reshape(-1)[marks] = 1
        self.last[cells] = instruction.line
        found = np.zeros((*mask.shape, size), np.uint8)
        if size % 4 == 0 and not (first & 3).any():
            words = self.data.view(np.uint32)[(first >> 2)[:, None] + np.arange(size // 4)]
            found.view(np.uint32)[mask] = words
        else:
            found[mask] = self.data[first[:, None] + np.arange(size)]
        return found, marks

    def write(self, waves: Waves, at: Array, data: Array, instruction: Instruction, *, flying: bool = False) -> Array:
        """Store `data` [waves, 64, size] at `at` [waves, 64] of the active lanes; returns marks.

        flying   a copy from memory, which this wave must wait for before it reads there
        """
        size = data.shape[2]
        first, slot, mask = self._places(waves, at, size, instruction, True)
        cells = self._cells(first, size)
        mine = data[mask]
        readers = self.read_by.view(np.uint64)[cells, 0] & ~_OWN[slot][:, None]
        if readers.any():
            by = self._line(cells, readers != 0)
            self.findings.note(RACE, instruction, f"writes LDS that another wave read since the last barrier, at {by}")
        places = first[:, None] + np.arange(size)
        marks = cells * WAVES + slot[:, None]
        before = self.written_by.view(np.uint64)[cells, 0] & ~_OWN[slot][:, None]
        if before.any():
            other = (self.data[places] != mine).reshape(len(first), cells.shape[1], -1).any(2) & (before != 0)
            if other.any():
                by = self._line(cells, other)
                text = f"writes other values to LDS that another wave wrote since the last barrier, at {by}"
                self.findings.note(RACE, instruction, text)
        self.written_by.reshape(-1)[marks] = _FLYING if flying else _DONE
        self.data[places] = mine
        together = self.written_by.view(np.uint64)[cells, 0] & ~_OWN[slot][:, None] & ~before
        if together.any():  # other waves by the same instruction
            other = (self.data[places] != mine).reshape(len(first), cells.shape[1], -1).any(2) & (together != 0)
            if other.any():
                self.findings.note(RACE, instruction, "two waves write different values to the same LDS")
        self.ever[cells] = True
        self.last[cells] = instruction.line
        return marks

    def _line(self, cells: Array, hit: Array) -> str:
        return f"line {int(self.last[cells[hit][0]])}"

    def landed(self, marks: Array) -> None:
        """The copies with these marks are waited for."""
        flat = self.written_by.reshape(-1)
        flat[marks] = np.minimum(flat[marks], _DONE)

    def barrier(self, bundles: list[Waves]) -> None:
        """All waves met; what is still under way may happen after."""
        self.read_by[:] = 0
        self.written_by[:] = 0
        for waves in bundles:
            for access in (*waves.vm, *waves.lgkm):
                if access.marks is not None:
                    flying = access in waves.vm
                    record = self.written_by if access.writes else self.read_by
                    record.reshape(-1)[access.marks] = _FLYING if flying else _DONE

    def of_waves(self, marks: Array, group: Array, slot: Array) -> Array:
        """Those of `marks` that belong to the waves."""
        flat = marks.reshape(-1)
        key = flat // WAVES // self.cells * WAVES + flat % WAVES
        return flat[np.isin(key, group * WAVES + slot)]
