"""Cycles that LDS accesses take, by AMD's published bank rule.

LDS has 32 banks of 4 bytes. An access of a wave goes in phases of lanes that together fill a cycle; within a phase, two
lanes that want different words of one bank take turns. Phases of 16 bytes a lane are those of AMD's "Understanding AMD
GPU LDS and Bank Conflicts" (Composable Kernel's documentation); narrower accesses are taken to go in groups of
neighbouring lanes. gfx950 has more banks for some widths: there the numbers are an upper bound.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
BANKS, WORD, LANES = 32, 4, 64


def _quads(*starts: int) -> list[int]:
    return [start + lane for start in starts for lane in range(4)]


# Phases of a read of 16 bytes a lane.
_WIDE_READ = np.array(
    [_quads(*pair) for pair in ((0, 20), (4, 16), (8, 28), (12, 24), (32, 52), (36, 48), (40, 60), (44, 56))]
)


def phases(size: int, write: bool) -> Array:
    """[phases, lanes] of an access of `size` bytes a lane."""
    if size == 16 and not write:
        return _WIDE_READ
    lanes = min(32, BANKS * WORD // max(size, WORD))
    if LANES % lanes:  # 12 bytes a lane
        lanes = 8
    return np.arange(LANES).reshape(-1, lanes)


def cycles(address: Array, mask: Array, size: int, write: bool) -> int:
    """Cycles of an access of many waves: byte addresses and active lanes [waves, 64]."""
    order = phases(size, write)
    words = (address // WORD)[:, :, None] + np.arange(max(1, size // WORD))
    waves = len(address)
    count, lanes = order.shape
    words = words[:, order].reshape(waves * count, -1)  # a row: what one phase of one wave wants
    active = np.repeat(mask[:, order].reshape(waves * count, lanes), max(1, size // WORD), axis=1)
    words = np.sort(np.where(active, words, -1), axis=1)
    fresh = np.ones(words.shape, bool)
    fresh[:, 1:] = words[:, 1:] != words[:, :-1]  # lanes that want the same word share it
    fresh &= words >= 0
    row = np.broadcast_to(np.arange(len(words))[:, None], words.shape)[fresh]
    wanted = np.bincount(row * BANKS + words[fresh] % BANKS, minlength=len(words) * BANKS)
    return int(wanted.reshape(-1, BANKS).max(1).sum())


@dataclass
class Traffic:
    """What a launch did with LDS: bytes that active lanes read and wrote, cycles, and those without any conflict."""

    read: int = 0
    written: int = 0
    cycles: int = 0
    least: int = 0

    def add(self, address: Array, mask: Array, size: int, write: bool) -> None:
        amount = int(mask.sum()) * size
        if write:
            self.written += amount
        else:
            self.read += amount
        self.cycles += cycles(address, mask, size, write)
        self.least += len(address) * len(phases(size, write))
