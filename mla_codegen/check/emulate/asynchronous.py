"""Asynchronous copies and barriers. Everything lands as late as the program allows, so a missing wait always shows.

A copy takes its source when it is issued; its bytes reach shared memory only inside the wait that covers it
(wait_group, or mbarrier.wait of the phase that counts it). Until then any access to its target is an error.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from mla_codegen.check.emulate.errors import EmulatorError, where
from mla_codegen.check.emulate.shared import Descriptor, Reader
from mla_codegen.check.emulate.state import current
from mla_codegen.check.emulate.tensor import Tensor


class Copy:
    """Elements on their way into `target`; `mask` marks those that are written at all."""

    def __init__(self, target: Descriptor, data: NDArray[Any], mask: NDArray[np.bool_] | None, what: str) -> None:
        target.check_writable(f"{what} into")
        self.target, self.data, self.mask, self.what = target, data, mask, what
        self.line = where()
        self.barrier: Barrier | None = None
        self.generic = True  # written through the generic proxy, unlike what TMA brings
        self.committed = False
        target.allocation.arriving.append(self)

    @property
    def nbytes(self) -> int:
        return self.target.numel * self.target.itemsize

    def land(self) -> None:
        """Make the bytes visible."""
        self.target.allocation.arriving.remove(self)
        if self.mask is None:
            self.target.view()[...] = self.data
        else:
            np.copyto(self.target.view(), self.data, where=self.mask)
        self.target.mark_written(self.mask)
        if self.generic:
            self.target.mark_unfenced()

    def missing(self) -> str:
        """Which wait would have made it visible."""
        if self.barrier is not None:
            seen = self.barrier.last_wait
            return "mbarrier.wait on its barrier, with the parity of its phase, is missing" + (
                f" ({seen})" if seen else ""
            )
        if not self.committed:
            return "the copy was never committed (commit_group), so no wait_group covers it"
        return "wait_group with a small enough number of outstanding groups is missing"


class Group:
    """The copies of one commit_group."""

    def __init__(self, copies: list[Copy]) -> None:
        self.copies = copies

    def land(self) -> None:
        for copy in self.copies:
            copy.land()


def commit_group() -> None:
    """Close the current group of asynchronous copies."""
    program = current()
    for copy in program.uncommitted:
        copy.committed = True
    program.groups.append(Group(program.uncommitted))
    program.uncommitted = []


def wait_group(num_outstanding: Any = 0) -> None:
    """Land the oldest groups until at most `num_outstanding` are left; on gfx9, 0 lands uncommitted copies too."""
    keep = getattr(num_outstanding, "value", num_outstanding)
    if isinstance(keep, Tensor) or keep < 0:
        raise EmulatorError(f"wait_group takes a compile-time constant of at least 0, not {keep}")
    program = current()
    while len(program.groups) > keep:
        program.groups.pop(0).land()
    if keep == 0 and program.lanes == 64:
        Group(program.uncommitted).land()
        program.uncommitted = []


class Barrier:
    """An mbarrier: arrivals and bytes that the current phase still awaits, and the copies that will bring the bytes."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.phase = 0
        self.pending = count
        self.bytes = 0
        self.copies: list[Copy] = []
        self.last_wait = ""

    def arrive(self, count: int, nbytes: int = 0) -> None:
        if self.pending < count:
            raise EmulatorError(
                f"an arrival too many in phase {self.phase} of a barrier made for {self.count}",
                "the barrier is armed again before a wait has seen its last phase complete",
            )
        self.pending -= count
        self.bytes += nbytes
        if self.pending == 0 and self.bytes == 0 and not self.copies:
            self._flip()

    def complete(self) -> bool:
        """Land the copies of the current phase if they complete it."""
        if self.pending or self.bytes != sum(copy.nbytes for copy in self.copies):
            return False
        for copy in self.copies:
            copy.land()
        self._flip()
        return True

    def _flip(self) -> None:
        self.phase += 1
        self.pending, self.bytes, self.copies = self.count, 0, []

    def why(self) -> str:
        brought = sum(copy.nbytes for copy in self.copies)
        return (
            f"phase {self.phase} awaits {self.pending} of {self.count} arrivals; {self.bytes} bytes are expected"
            f" and its copies bring {brought}"
        )


def barrier_of(descriptor: Descriptor) -> Barrier:
    """The barrier that lives in a shared descriptor. Raises if init was never called on it."""
    barrier: Barrier | None = descriptor.allocation.barriers.get(descriptor.offset)
    if barrier is None:
        raise EmulatorError(
            f"{descriptor} is used as an mbarrier but was never initialised", "call mbarrier.init first"
        )
    return barrier


def holds(pred: Any) -> bool:
    """A scalar predicate as a bool."""
    return bool(getattr(pred, "value", pred))


def init(mbarrier: Descriptor, count: Any) -> None:
    count = int(getattr(count, "value", count))
    if mbarrier.numel != 1 or mbarrier.itemsize != 8:
        raise EmulatorError(f"an mbarrier is one int64, not {mbarrier}", "index the array of barriers")
    mbarrier.allocation.barriers[mbarrier.offset] = Barrier(count)


def invalidate(mbarrier: Descriptor) -> None:
    barrier = barrier_of(mbarrier)
    if barrier.copies:
        raise EmulatorError(f"mbarrier.invalidate while {barrier.copies[0].what} is still on its way")
    del mbarrier.allocation.barriers[mbarrier.offset]


def expect(mbarrier: Descriptor, bytes: Any, pred: Any = True) -> None:
    """Arrive once and await `bytes` more bytes in the current phase."""
    if holds(pred):
        barrier_of(mbarrier).arrive(1, int(getattr(bytes, "value", bytes)))


def arrive(mbarrier: Descriptor, *, count: Any = 1, pred: Any = True) -> None:
    if holds(pred):
        barrier_of(mbarrier).arrive(int(getattr(count, "value", count)))
        scheduler = current().scheduler
        if scheduler is not None:
            scheduler.progress()
            scheduler.yield_baton()


def wait(mbarrier: Descriptor, phase: Any, pred: Any = True, deps: Any = ()) -> None:
    """Block until the phase of parity `phase` has completed. What can never complete is a deadlock, and an error."""
    if not holds(pred):
        return
    barrier = barrier_of(mbarrier)
    parity = int(phase)
    if parity not in (0, 1):
        raise EmulatorError(f"mbarrier.wait takes a parity of 0 or 1, not {parity}", "write (i // STAGES) & 1")
    line = where()
    while barrier.phase % 2 == parity:
        if barrier.complete():
            continue
        scheduler = current().scheduler
        if scheduler is None or not scheduler.block():
            raise EmulatorError(
                f"deadlock: mbarrier.wait for parity {parity} never returns: {barrier.why()}",
                "expect names other bytes than the copies bring, nothing was issued, or the parity is wrong",
            )
    if current().scheduler is not None:
        current().scheduler.progress()
    barrier.last_wait = (
        f"the last wait, at {line}, asked for parity {parity} and the barrier is in phase {barrier.phase}"
    )


def fence_async_shared(cluster: Any = False) -> None:
    """Show generic stores to TMA and wgmma."""
    program = current()
    for allocation in program.dirty:
        allocation.unfenced.clear()
    program.dirty.clear()


def copy_with_barrier(target: Descriptor, data: NDArray[Any], barrier: Barrier, what: str) -> None:
    """A TMA load: its bytes count towards the barrier's current phase."""
    copy = Copy(target, data, None, what)
    copy.barrier, copy.generic = barrier, False
    barrier.copies.append(copy)
    current().bulk_loads.append(copy)


def bulk_store(source: Descriptor) -> None:
    """A TMA store has been issued: `source` is read until store_wait."""
    current().bulk_stores.append(Reader(source, "a TMA store"))


def store_wait(pendings: Any) -> None:
    stores = current().bulk_stores
    while len(stores) > getattr(pendings, "value", pendings):
        stores.pop(0).finish()


def check_finished() -> None:
    """Raise for what must not outlive a program: its shared memory may belong to another by then."""
    program = current()
    for copy in program.bulk_loads:
        if copy in copy.target.allocation.arriving:
            raise EmulatorError(
                f"the program ends with {copy.what} of {copy.line} on its way", "wait on its barrier first"
            )
    if program.products:
        raise EmulatorError(
            "the program ends with an asynchronous warpgroup_mma running", "warpgroup_mma_wait is missing"
        )
    if program.bulk_stores:
        raise EmulatorError(
            f"the program ends while the TMA store of {program.bulk_stores[0].line} reads its memory",
            "call tma.store_wait(0)",
        )
