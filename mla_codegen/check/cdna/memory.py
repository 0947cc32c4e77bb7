"""Device memory: the arguments' arrays, each alone in a part of the address space, so that a wrong address shows.

Array n has the addresses from n * SPACE + START on. Nothing else is near, neither 64 GiB before its first byte nor a
TiB behind: an offset that is too large, negative or cut to 32 bits leads nowhere.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from mla_codegen.check.cdna.findings import OUTSIDE, Findings
from mla_codegen.check.cdna.listing import Instruction

Array = NDArray[Any]
SHIFT = 40
SPACE = 1 << SHIFT
START = 1 << 36
_PAGE = 256  # arrays begin at multiples of it


class Memory:
    """Arrays of bytes by address. Reads and writes take the addresses of many lanes at once."""

    def __init__(self, findings: Findings) -> None:
        self.findings = findings
        self.names: list[str] = []
        self.sizes = np.zeros(1, np.int64)
        self.starts = np.zeros(1, np.int64)  # in the arena
        self.arena = np.zeros(_PAGE, np.uint8)
        self.words = self.arena.view(np.uint32)
        self.counted: dict[int, Array] = {}  # number of an array -> how often each byte was read

    def add(self, name: str, content: Array, count: bool = False) -> int:
        """Put bytes into memory; returns the address of the first. `count` its reads."""
        self.names.append(name)
        number = len(self.names)
        self.sizes = np.append(self.sizes, content.size)
        self.starts = np.append(self.starts, self.arena.size)
        padding = np.zeros(-content.size % _PAGE + _PAGE, np.uint8)
        self.arena = np.concatenate([self.arena, content, padding])
        self.words = self.arena.view(np.uint32)
        if count:
            self.counted[number] = np.zeros(content.size, np.int32)
        return number * SPACE + START

    def content(self, number: int) -> Array:
        """The bytes of array `number`, counted from 1 in the order of `add`."""
        start = int(self.starts[number])
        return self.arena[start : start + int(self.sizes[number])]

    def _places(self, address: Array, size: int, instruction: Instruction, what: str) -> tuple[Array, Array]:
        """(places in the arena, which of them are within an array)"""
        number = (address >> np.uint64(SHIFT)).astype(np.int64)
        known = (number > 0) & (number <= len(self.names))
        number = np.where(known, number, 0)
        offset = (address & np.uint64(SPACE - 1)).astype(np.int64) - START
        right = known & (offset >= 0) & (offset + size <= self.sizes[number])
        if not right.all():
            first = int(np.argmax(~right))
            where = f"{self.names[number[first] - 1]} {int(offset[first]):+d}" if known[first] else "no array"
            size_of = f" of {int(self.sizes[number[first]])} bytes" if known[first] else ""
            self.findings.note(
                OUTSIDE, instruction, f"{what} of {size} bytes at {where}{size_of} ({int((~right).sum())} lanes)"
            )
        return np.where(right, self.starts[number] + offset, 0), right

    def read(self, address: Array, size: int, instruction: Instruction) -> Array:
        """[lanes, size] bytes at `address` [lanes]; 0 where that is outside."""
        place, right = self._places(address, size, instruction, "a load")
        for number, counts in self.counted.items():
            start, end = int(self.starts[number]), int(self.starts[number] + self.sizes[number])
            mine = place[right & (place >= start) & (place < end)] - start
            np.add.at(counts, (mine[:, None] + np.arange(size)).reshape(-1), 1)
        if size % 4 == 0 and not (place & 3).any():
            found = self.words[(place >> 2)[:, None] + np.arange(size // 4)].view(np.uint8)
        else:
            found = self.arena[place[:, None] + np.arange(size)]
        if not right.all():
            found[~right] = 0
        return found

    def write(self, address: Array, data: Array, instruction: Instruction) -> None:
        """Store `data` [lanes, size] at `address` [lanes], the last lane's where several name a byte."""
        size = data.shape[1]
        place, right = self._places(address, size, instruction, "a store")
        place, data = place[right], data[right]
        if size % 4 == 0 and not (place & 3).any():
            self.words[(place >> 2)[:, None] + np.arange(size // 4)] = np.ascontiguousarray(data).view(np.uint32)
        else:
            self.arena[place[:, None] + np.arange(size)] = data
