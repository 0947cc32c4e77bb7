"""Shared memory: allocations of real bytes, and descriptors that alias them.

Views (index, slice, permute, reshape, reinterpret) are strides over the logical bytes of an allocation; swizzles
move no bytes here, so a reinterpretation is allowed only where both layouts place every byte alike. Each byte
remembers whether anything wrote it; each allocation knows the asynchronous copies still on their way into it and
the operations still reading it.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from mla_codegen.check.emulate import dtypes, layouts
from mla_codegen.check.emulate.errors import EmulatorError, where
from mla_codegen.check.emulate.state import current
from mla_codegen.check.emulate.tensor import Tensor, constant_int


class Arriving(Protocol):
    """An asynchronous copy that is still on its way into `target`."""

    target: Descriptor
    what: str
    line: str

    def missing(self) -> str:
        """Which wait would have made it visible."""


class Allocation:
    """One gl.allocate_shared_memory: poisoned bytes and what is known of them."""

    def __init__(self, size: int, dtype: Any) -> None:
        kind = dtypes.storage_type(dtype)
        self.bytes: NDArray[np.uint8] = np.full(size // kind.itemsize, dtypes.poison_value(dtype), kind).view(np.uint8)
        self.written = np.zeros(size, np.int8)  # -1 once written, so that a whole element reads as -1
        self.complete = False  # every byte has been written
        self.line = where()
        self.arriving: list[Arriving] = []
        self.readers: list[Reader] = []
        self.unfenced: dict[Any, Descriptor] = {}  # generic stores since the last fence_async_shared
        self.barriers: dict[int, Any] = {}  # by offset: what `asynchronous` keeps of an mbarrier


class Reader:
    """An asynchronous operation that still reads a region (a wgmma operand, the source of a TMA store)."""

    def __init__(self, region: Descriptor, what: str) -> None:
        self.region = region
        self.what = what
        self.line = where()
        region.allocation.readers.append(self)

    def finish(self) -> None:
        self.region.allocation.readers.remove(self)


class DescriptorType:
    """What `descriptor.type` shows."""

    def __init__(self, descriptor: Descriptor) -> None:
        self.element_ty = self.scalar = descriptor.dtype
        self.shape = list(descriptor.shape)
        self.layout = descriptor.layout


class Descriptor:
    """A view of an allocation: element type, shape, byte strides and byte offset."""

    def __init__(
        self,
        allocation: Allocation,
        dtype: Any,
        shape: tuple[int, ...],
        strides: tuple[int, ...],
        offset: int,
        layout: Any,
    ) -> None:
        self.allocation = allocation
        self.dtype = dtype
        self.shape = shape
        self.strides = strides
        self.offset = offset
        self.layout = layout
        self.itemsize = dtypes.storage_type(dtype).itemsize

    @property
    def type(self) -> DescriptorType:
        return DescriptorType(self)

    @property
    def rank(self) -> int:
        return len(self.shape)

    @property
    def numel(self) -> int:
        return int(np.prod(self.shape))

    def __str__(self) -> str:
        return f"shared {self.dtype}{list(self.shape)} of the allocation at {self.allocation.line or 'launch'}"

    # views

    def index(self, index: Any) -> Descriptor:
        """The subview at `index` of the first dimension."""
        at = int(index)
        if not 0 <= at < self.shape[0]:
            raise EmulatorError(
                f"index {at} of {self}, which has {self.shape[0]} along dimension 0", "a stage index without % STAGES"
            )
        return Descriptor(
            self.allocation,
            self.dtype,
            self.shape[1:],
            self.strides[1:],
            self.offset + at * self.strides[0],
            self.layout,
        )

    def slice(self, start: Any, length: Any, dim: Any = 0) -> Descriptor:
        """`length` elements from `start` along `dim`; all three are compile-time constants."""
        start, length, dim = (getattr(n, "value", n) for n in (start, length, dim))
        if any(isinstance(n, Tensor) for n in (start, length, dim)):
            raise EmulatorError("slice takes compile-time constants", "loop with gl.static_range")
        if start < 0 or length < 1 or start + length > self.shape[dim]:
            raise EmulatorError(f"slice [{start}, {start + length}) along dimension {dim} of {self}")
        shape = (*self.shape[:dim], length, *self.shape[dim + 1 :])
        offset = self.offset + start * self.strides[dim]
        return Descriptor(self.allocation, self.dtype, shape, self.strides, offset, self.layout)

    def permute(self, order: Any) -> Descriptor:
        order = [getattr(i, "value", i) for i in order]
        if sorted(order) != list(range(self.rank)):
            raise EmulatorError(f"permute by {order} of {self}")
        shape, strides = (tuple(values[i] for i in order) for values in (self.shape, self.strides))
        return Descriptor(self.allocation, self.dtype, shape, strides, self.offset, self.layout)

    def reshape(self, shape: Any) -> Descriptor:
        dims = tuple(int(getattr(n, "value", n)) for n in shape)
        if int(np.prod(dims)) != self.numel:
            raise EmulatorError(f"reshape of {self} to {list(dims)}: the number of elements differs")
        self._need_rows("reshape")
        strides = _row_major(dims, self.itemsize)
        return Descriptor(self.allocation, self.dtype, dims, strides, self.offset, self.layout)

    def reinterpret(self, dtype: Any, shape: Any, layout: Any) -> Descriptor:
        """The same bytes as another type and shape. Both layouts must place every byte alike."""
        dtype, layout = getattr(dtype, "value", dtype), getattr(layout, "value", layout)
        dims = tuple(int(getattr(n, "value", n)) for n in shape)
        size = dtypes.storage_type(dtype).itemsize
        self._need_rows("reinterpret")
        if int(np.prod(dims)) * size > self.numel * self.itemsize:
            raise EmulatorError(f"reinterpret of {self} as {dtype}{list(dims)}: the view is larger than the memory")
        mine = layouts.byte_pattern(self.layout, self.shape, self.itemsize)
        theirs = layouts.byte_pattern(layout, dims, size)
        if mine != theirs:
            raise EmulatorError(
                f"reinterpret of {self} as {dtype}{list(dims)}: {self.layout} and {layout} place bytes differently",
                f"bytes of a vector and of a row, phases and swizzle width must be equal: {mine} against {theirs}",
            )
        return Descriptor(self.allocation, dtype, dims, _row_major(dims, size), self.offset, layout)

    _reinterpret = reinterpret  # before 3.9

    def _need_rows(self, what: str) -> None:
        if self.strides != _row_major(self.shape, self.itemsize):
            raise EmulatorError(
                f"{what} of a permuted or sliced view: {self}", f"{what} the allocation, then slice or permute"
            )

    def _keep_alive(self) -> None:
        return None

    # bytes

    def view(self) -> NDArray[Any]:
        """The elements, aliasing the allocation."""
        kind = dtypes.storage_type(self.dtype)
        return np.ndarray(self.shape, kind, self.allocation.bytes.data, self.offset, self.strides)

    def _shadow(self) -> NDArray[Any]:
        return np.ndarray(
            self.shape, np.dtype(f"i{self.itemsize}"), self.allocation.written.data, self.offset, self.strides
        )

    def mark_written(self, mask: NDArray[np.bool_] | None = None) -> None:
        if not self.allocation.complete:
            if mask is None:
                self._shadow()[...] = -1
            else:
                self._shadow()[mask] = -1
            self.allocation.complete = bool(self.allocation.written.all())

    def overlaps(self, other: Descriptor) -> bool:
        """Whether both touch a common byte."""
        if self.allocation is not other.allocation:
            return False
        mine, theirs = self._span(), other._span()
        if mine[1] <= theirs[0] or theirs[1] <= mine[0]:
            return False
        touched = np.zeros(len(self.allocation.bytes), np.int8)
        np.ndarray(self.shape, f"i{self.itemsize}", touched.data, self.offset, self.strides)[...] = -1
        return bool(np.ndarray(other.shape, f"i{other.itemsize}", touched.data, other.offset, other.strides).any())

    def _span(self) -> tuple[int, int]:
        last = sum((n - 1) * s for n, s in zip(self.shape, self.strides, strict=True))
        return self.offset, self.offset + last + self.itemsize

    def check_readable(self, what: str) -> None:
        """Raise if a copy into this region is still on its way, or if part of it was never written."""
        for copy in self.allocation.arriving:
            if self.overlaps(copy.target):
                raise EmulatorError(
                    f"{what} {self} before {copy.what} issued at {copy.line} has landed", copy.missing()
                )
        if not self.allocation.complete:
            holes = self._shadow() != -1
            if holes.any():
                first = [int(i[0]) for i in np.nonzero(holes)]
                raise EmulatorError(
                    f"{what} {self}: element {first} was never written ({int(holes.sum())} of {self.numel})",
                    "a store or copy is missing, or goes to another stage or part",
                )

    def check_writable(self, what: str) -> None:
        """Raise if an asynchronous operation still writes or reads this region."""
        for copy in self.allocation.arriving:
            if self.overlaps(copy.target):
                raise EmulatorError(
                    f"{what} {self} while {copy.what} issued at {copy.line} is still on its way there", copy.missing()
                )
        for reader in self.allocation.readers:
            if self.overlaps(reader.region):
                raise EmulatorError(
                    f"{what} {self} while {reader.what} issued at {reader.line} may still read it",
                    "wait for that operation first: the stage is refilled too early",
                )

    def read_by_async_proxy(self, what: str) -> None:
        """Raise if TMA or wgmma would read bytes that a generic store left unfenced."""
        for region in self.allocation.unfenced.values():
            if self.overlaps(region):
                raise EmulatorError(
                    f"{what} reads {self}, stored through the generic proxy with no fence since",
                    "call fence_async_shared() after the store and before the barrier and this operation",
                )

    def fenced_by_compiler(self) -> None:
        """Triton puts a proxy fence before a TMA load that overwrites generic stores: none is unfenced after it."""
        unfenced = self.allocation.unfenced
        for key in [key for key, region in unfenced.items() if self.overlaps(region)]:
            del unfenced[key]

    # values

    def load(self, layout: Any) -> Tensor:
        """A tensor with the region's elements, in `layout`."""
        program = current()
        kept = layouts.check(getattr(layout, "value", layout), self.shape, program.warps, program.lanes)
        self.check_readable("load of")
        return Tensor(self.view().copy(), self.dtype, kept)

    def store(self, value: Any) -> None:
        """Write a tensor of the region's very shape and type."""
        if not isinstance(value, Tensor):
            raise EmulatorError(f"a shared store takes a tensor, not {value!r}")
        if value.shape != self.shape:
            raise EmulatorError(f"store of a tensor of shape {list(value.shape)} into {self}")
        if value.dtype is not self.dtype and value.dtype != self.dtype:
            raise EmulatorError(f"store of a {value.dtype} tensor into {self}", "convert it with .to(...)")
        self.check_writable("store into")
        self.view()[...] = value.data
        self.mark_written()
        self.mark_unfenced()

    def mark_unfenced(self) -> None:
        """Remember a generic write that the asynchronous proxy does not see yet (NVIDIA only)."""
        program = current()
        if program.lanes == 32:
            self.allocation.unfenced[(self.offset, self.shape, self.strides)] = self
            program.dirty.add(self.allocation)


def _row_major(shape: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    strides = [itemsize]
    for n in reversed(shape[1:]):
        strides.append(strides[-1] * n)
    return tuple(reversed(strides)) if shape else ()


def allocate(element_ty: Any, shape: Any, layout: Any, value: Any = None) -> Descriptor:
    """gl.allocate_shared_memory: poisoned, or holding `value`."""
    element_ty, layout = getattr(element_ty, "value", element_ty), getattr(layout, "value", layout)
    dims = tuple(constant_int(n, "a shared allocation's dimension") for n in shape)
    if not isinstance(layout, layouts.SharedLayout):
        raise EmulatorError(f"shared memory needs a shared layout, not {layout!r}")
    size = dtypes.storage_type(element_ty).itemsize
    if isinstance(layout, layouts.NVMMASharedLayout) and layout.element_bitwidth != size * 8:
        raise EmulatorError(f"{layout} for elements of {size * 8} bits: {element_ty}")
    allocation = Allocation(int(np.prod(dims)) * size, element_ty)
    result = Descriptor(allocation, element_ty, dims, _row_major(dims, size), 0, layout)
    if value is not None:
        result.store(value)
    return result
