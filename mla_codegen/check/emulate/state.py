"""The program that runs now: grid position, launch options, work in flight. One at a time."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Any

from mla_codegen.check.emulate.errors import EmulatorError


@dataclass
class Program:
    """One program of a grid. `lanes` is threads per warp: 32 on NVIDIA, 64 on gfx9.

    Work in flight is of `asynchronous`, `mma` and `shared`, which know their own types; here it is only kept.
    """

    kernel: str
    index: tuple[int, int, int]
    grid: tuple[int, int, int]
    warps: int
    lanes: int
    arch: str
    gluon: bool
    dirty: set[Any] = field(default_factory=set)  # generic stores that no fence has made visible to TMA and wgmma
    uncommitted: list[Any] = field(default_factory=list)  # async copies since the last commit_group
    groups: list[Any] = field(default_factory=list)  # committed groups still in flight, oldest first
    products: list[Any] = field(default_factory=list)  # asynchronous warpgroup_mma still running, oldest first
    bulk_loads: list[Any] = field(default_factory=list)  # every TMA load issued
    bulk_stores: list[Any] = field(default_factory=list)  # TMA stores still reading shared memory, oldest first
    buffers: list[Any] = field(default_factory=list)  # every tensor argument of the launch
    scheduler: Any = None  # the running warp_specialize region, if any

    @property
    def number(self) -> int:
        """The program's place in the grid as one number."""
        x, y, z = self.index
        return x + self.grid[0] * (y + self.grid[1] * z)


launching = threading.RLock()  # held by the thread whose kernel runs
_current: Program | None = None


def current() -> Program:
    """The running program. Raises outside a kernel: device functions mean nothing in host code."""
    if _current is None:
        raise EmulatorError("a device function was called outside a kernel")
    return _current


def running() -> bool:
    """Whether a kernel is being emulated."""
    return _current is not None


def enter(program: Program | None) -> None:
    """Make `program` the running one (None: no kernel runs)."""
    global _current
    _current = program
