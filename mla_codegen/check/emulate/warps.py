"""gl.warp_specialize: partitions run as threads that hand one baton around, so exactly one runs at any time.

A partition keeps the baton until an mbarrier.wait blocks it, or until it has arrived at a barrier: whoever that arrival
releases runs ahead at once, so a stage that is released before its last read is overwritten in time to be noticed.
When every partition is blocked the kernel is deadlocked.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np

from mla_codegen.check.emulate import state
from mla_codegen.check.emulate.errors import EmulatorError
from mla_codegen.check.emulate.lang import plain


class Scheduler:
    """Hands the baton round-robin; counts how many in a row found nothing to do."""

    def __init__(self, warps: list[int], program: state.Program) -> None:
        self.program = program
        self.warps = warps
        self.alive = [True] * len(warps)
        self.turn = 0
        self.idle = 0
        self.failure: BaseException | None = None
        self.baton = threading.Condition()

    def yield_baton(self) -> None:
        """Let the others run as far as they can: what they may do now, they do before the caller goes on."""
        if self.failure is None:
            self._hand_over()

    def block(self) -> bool:
        """Called by a partition that cannot go on: False when no partition can."""
        self.idle += 1
        if self.failure is not None or self.idle > sum(self.alive):
            return False
        self._hand_over()
        return True

    def _hand_over(self) -> None:
        me = self.turn
        with self.baton:
            self._next()
            self.baton.wait_for(lambda: self.turn == me or self.failure is not None)
        if self.failure is not None:
            raise _Abandoned
        self.program.warps = self.warps[me]

    def progress(self) -> None:
        self.idle = 0

    def _next(self) -> None:
        for step in range(1, len(self.alive) + 1):
            candidate = (self.turn + step) % len(self.alive)
            if self.alive[candidate]:
                self.turn = candidate
                break
        self.baton.notify_all()

    def run(self, me: int, work: Callable[[], Any], results: list[Any]) -> None:
        with self.baton:
            self.baton.wait_for(lambda: self.turn == me or self.failure is not None)
        try:
            if self.failure is None:
                self.program.warps = self.warps[me]
                self.idle = 0
                with np.errstate(all="ignore"):
                    results[me] = work()
        except _Abandoned:
            pass
        except BaseException as error:  # handed to the launching thread
            self.failure = self.failure or error
        with self.baton:
            self.alive[me] = False
            self.idle = 0
            self._next()


class _Abandoned(Exception):
    """Unwinds a blocked partition after another one failed."""


def warp_specialize(functions_and_args: Any, worker_num_warps: Any, worker_num_regs: Any = ()) -> Any:
    """Run the default partition and the workers side by side; returns what the default partition returns."""
    program = state.current()
    if program.scheduler is not None:
        raise EmulatorError("warp_specialize inside a warp_specialize region")
    counts = [int(plain(n)) for n in worker_num_warps]
    if len(counts) != len(functions_and_args) - 1:
        raise EmulatorError(f"warp_specialize of {len(functions_and_args) - 1} workers with {len(counts)} warp counts")
    home = program.warps
    scheduler = program.scheduler = Scheduler([home, *counts], program)
    results: list[Any] = [None] * len(functions_and_args)
    threads = [
        threading.Thread(target=scheduler.run, args=(i, lambda f=function, a=args: f(*a), results), daemon=True)
        for i, (function, args) in enumerate(functions_and_args)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    program.scheduler, program.warps = None, home
    if scheduler.failure is not None:
        raise scheduler.failure
    return results[0]
