"""Global memory: the tensors passed to a kernel, with every address checked and unwritten bytes told from written ones.

A pointer is a buffer (the tensor argument it came from) and element offsets. An access may touch only elements of
that very tensor: not the gaps of a strided view, not the neighbour behind it. `poison` marks a tensor as written
by nobody, so that a kernel that reads it first is caught; `torch.empty` inside emulated modules does so by itself.
"""

from __future__ import annotations

import weakref
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from mla_codegen.check.emulate.dtypes import FROM_TORCH, poison_value, storage_type
from mla_codegen.check.emulate.errors import EmulatorError

_unwritten: dict[int, tuple[NDArray[np.uint8], int]] = {}
# storage address -> 1 for each byte that a kernel wrote; and the tensor's version, which moves when host code writes it


def poison(tensor: torch.Tensor) -> torch.Tensor:
    """Fill `tensor` with NaN (0x7f bytes where there is none) and mark it unwritten; returns it.

    An emulated kernel that reads an element before a kernel stored it is stopped. The mark ends with the memory's life,
    with `forget`, or with an in-place write by host code. Of a view, its own elements only are marked.
    """
    shadow = _shadow(tensor)
    if not tensor.numel():
        return tensor
    kind = FROM_TORCH.get(tensor.dtype)
    if kind is None:
        raise EmulatorError(f"poison of a {tensor.dtype} tensor: that type is not modelled")
    value = np.full(1, poison_value(kind))
    with torch.no_grad():
        tensor.copy_(torch.from_numpy(value.view(np.uint8)).view(tensor.dtype).expand(tensor.shape))
    storage = tensor.untyped_storage()
    if shadow is None:
        shadow = np.ones(storage.nbytes(), np.uint8)
        weakref.finalize(storage, _unwritten.pop, storage.data_ptr(), None)
    _bytes_of(tensor, shadow).fill_(0)
    _unwritten[storage.data_ptr()] = shadow, _version(tensor)
    return tensor


def _bytes_of(tensor: torch.Tensor, shadow: NDArray[np.uint8]) -> torch.Tensor:
    """The shadow of `tensor`'s elements, [*shape, element size], aliasing the storage's."""
    size = tensor.element_size()
    start = torch.from_numpy(shadow)[tensor.storage_offset() * size :]
    return start.as_strided((*tensor.shape, size), (*[s * size for s in tensor.stride()], 1))


def _version(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _shadow(tensor: torch.Tensor) -> NDArray[np.uint8] | None:
    found = _unwritten.get(tensor.untyped_storage().data_ptr())
    if found is None:
        return None
    shadow, version = found
    if _version(tensor) != version:
        forget(tensor)
        return None
    return shadow


def forget(tensor: torch.Tensor) -> None:
    """Take `tensor` as fully written."""
    _unwritten.pop(tensor.untyped_storage().data_ptr(), None)


def unwritten(tensor: torch.Tensor) -> torch.Tensor:
    """Bool tensor of `tensor`'s shape: what no kernel has stored in a poisoned tensor (else all False)."""
    shadow = _shadow(tensor)
    if shadow is None or not tensor.numel():
        return torch.zeros(tensor.shape, dtype=torch.bool)
    return (_bytes_of(tensor, shadow) == 0).any(-1)


class Buffer:
    """A tensor argument seen as memory: `bytes` spans its first to its last element."""

    def __init__(self, name: str, tensor: torch.Tensor) -> None:
        if tensor.device.type != "cpu":
            raise EmulatorError(f"argument {name} is on {tensor.device}: the emulator takes CPU tensors")
        self.name = name
        self.tensor = tensor  # keeps the storage alive while pointers exist
        self.itemsize = tensor.element_size()
        self.address = tensor.data_ptr() if tensor.numel() else 0
        spans = [(n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True)]
        elements = sum(spans) + 1 if tensor.numel() else 0
        flat = tensor.detach().as_strided((elements,), (1,), tensor.storage_offset())
        self.bytes: NDArray[np.uint8] = flat.view(torch.uint8).numpy() if elements else np.zeros(0, np.uint8)
        self.steps = _steps(tensor) if elements != tensor.numel() else []
        shadow = _shadow(tensor) if elements else None
        self.shadow = None if shadow is None else shadow[tensor.storage_offset() * self.itemsize :]
        self.writers: NDArray[np.int32] | None = None  # 1 + number of the last program that stored each element
        self._views: dict[Any, NDArray[Any]] = {}

    def view(self, kind: np.dtype[Any]) -> NDArray[Any]:
        """The memory as whole elements of `kind`."""
        found = self._views.get(kind)
        if found is None:
            whole = len(self.bytes) // kind.itemsize * kind.itemsize
            found = self._views[kind] = self.bytes[:whole].view(kind)
        return found

    def describe(self) -> str:
        return f"{self.name} {list(self.tensor.shape)} {str(self.tensor.dtype).removeprefix('torch.')}"


def _steps(tensor: torch.Tensor) -> list[tuple[int, int]]:
    """(size, stride) of the dimensions, the largest stride first, by which an offset is told from a gap.

    Empty: no gap is looked for, because elements overlap.
    """
    steps = sorted(
        ((n, s) for n, s in zip(tensor.shape, tensor.stride(), strict=True) if n > 1), key=lambda step: -step[1]
    )
    inner = 0  # span of the dimensions within
    for count, stride in reversed(steps):
        if stride <= inner:
            return []
        inner += (count - 1) * stride
    return steps


def _first(bad: NDArray[np.bool_]) -> tuple[int, ...]:
    """Where `bad` holds first; () in a scalar."""
    return tuple(int(i[0]) for i in np.nonzero(bad)) if bad.ndim else ()


def _fault(
    buffer: Buffer, size: int, index: NDArray[Any], bad: NDArray[np.bool_], verb: str, others: list[Buffer]
) -> None:
    first = _first(bad)
    offset = int(index[first]) if index.ndim else int(index)
    count = int(bad.sum())
    low, high = int(index[bad].min()), int(index[bad].max())
    elements = len(buffer.bytes) // size
    at = f"element {list(first)} of the access, " if first else ""
    what = (
        f"{verb} outside argument {buffer.describe()}: {at}element offset {offset} of {elements}"
        f" ({count} such, offsets {low} to {high})"
    )
    target = buffer.address + offset * size
    cause = "a row or column past the end is neither masked nor clamped, or a 32-bit offset has wrapped"
    if not elements:
        cause = "the tensor is empty: nothing of it may be read"
    for other in others:
        if other is not buffer and other.address <= target < other.address + len(other.bytes):
            cause += f"; that address lies in argument {other.describe()}"
    if 0 <= offset < elements:
        what = (
            f"{verb} in a gap of the strided argument {buffer.describe()}: {at}element offset {offset} is not its own"
        )
        cause = "a row or head stride of the tensor is not the one that the kernel uses"
    raise EmulatorError(what, cause)


def _checked(
    buffer: Buffer, size: int, index: NDArray[Any], mask: NDArray[np.bool_] | None, verb: str, others: list[Buffer]
) -> None:
    elements = len(buffer.bytes) // size
    if mask is None:
        if index.size and (int(index.min()) < 0 or int(index.max()) >= elements):
            _fault(buffer, size, index, (index < 0) | (index >= elements), verb, others)
    else:
        bad = mask & ((index < 0) | (index >= elements))
        if bad.any():
            _fault(buffer, size, index, bad, verb, others)
    if buffer.steps:
        rest = np.asarray(index) * size // buffer.itemsize
        for count, stride in buffer.steps:  # what is left once the elements before are counted off
            rest = rest - np.minimum(rest // stride, count - 1) * stride
        bad = rest != 0 if mask is None else (rest != 0) & mask
        if bad.any():
            _fault(buffer, size, index, bad, verb, others)


def load(
    buffer: Buffer, kind: Any, index: NDArray[Any], mask: NDArray[np.bool_] | None, other: Any, others: list[Buffer]
) -> NDArray[Any]:
    """Elements of Triton type `kind` at `index`; masked ones become `other`, or poison where `other` is None."""
    store = storage_type(kind)
    _checked(buffer, store.itemsize, index, mask, "load", others)
    memory = buffer.view(store)
    if mask is None:
        if buffer.shadow is not None:
            _check_written(buffer, store.itemsize, index, None)
        return memory[index] if not index.ndim else memory.take(index)
    fill = poison_value(kind) if other is None else other
    if not len(memory):
        return np.broadcast_to(np.asarray(fill, store), index.shape).copy()
    safe = np.where(mask, index, 0)
    if buffer.shadow is not None:
        _check_written(buffer, store.itemsize, safe, mask)
    return np.where(mask, memory.take(safe), np.asarray(fill).astype(store, copy=False))


def _check_written(buffer: Buffer, size: int, index: NDArray[Any], mask: NDArray[np.bool_] | None) -> None:
    shadow = buffer.shadow
    assert shadow is not None
    start = np.asarray(index) * size
    bad = (shadow[start] == 0) | (shadow[start + (size - 1)] == 0)
    if mask is not None:
        bad &= mask
    if bad.any():
        first = _first(bad)
        raise EmulatorError(
            f"load of unwritten memory: argument {buffer.describe()}, element offset {int(np.asarray(index)[first])}"
            f" ({int(bad.sum())} elements)",
            "an earlier kernel or split left this part unwritten and the load is not masked for it",
        )


def store(
    buffer: Buffer,
    kind: Any,
    index: NDArray[Any],
    value: NDArray[Any],
    mask: NDArray[np.bool_] | None,
    others: list[Buffer],
    program: int = 0,
) -> None:
    """Write `value` (storage form) at `index` where `mask` holds, as the program of that number."""
    size = storage_type(kind).itemsize
    _checked(buffer, size, index, mask, "store", others)
    if mask is not None:
        index, value = index[mask], value[mask]
    memory = buffer.view(storage_type(kind))
    _mark_writer(buffer, size, memory, np.asarray(index), value, program)
    memory[index] = value
    if buffer.shadow is not None:
        start = np.asarray(index) * size
        for byte in range(size):
            buffer.shadow[start + byte] = 1


def _mark_writer(
    buffer: Buffer, size: int, memory: NDArray[Any], index: NDArray[Any], value: NDArray[Any], program: int
) -> None:
    """Raise if another program of this launch stored another value at the same place: which one stays is a race."""
    if buffer.writers is None:
        buffer.writers = np.zeros(len(buffer.bytes) // buffer.itemsize + 1, np.int32)
    places = index * size // buffer.itemsize
    before = buffer.writers[places]
    clash = (before != 0) & (before != program + 1)
    if clash.any():
        old, new = (np.ascontiguousarray(x).view(f"u{size}") for x in (memory[index], value))
        clash &= old.reshape(clash.shape) != new.reshape(clash.shape)
        if clash.any():
            first = _first(clash)
            raise EmulatorError(
                f"store to argument {buffer.describe()}, element offset {int(index[first])}"
                f" ({int(clash.sum())} elements), where program {int(before[first]) - 1} stored another value",
                "two programs write the same row, head or split",
            )
    buffer.writers[places] = program + 1
