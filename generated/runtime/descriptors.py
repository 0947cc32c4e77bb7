# Copied by mla-codegen from mla_codegen/runtime/descriptors.py. Do not edit: `mla-codegen build` writes it anew.
"""TMA descriptors of KV tensors, made once for each tensor and kept.

A descriptor is 128 bytes that hold an address, a shape, strides and a tile; making one takes longer than launching a
kernel. It holds no memory: the cache is keyed by address and number of rows, so that a tensor that comes to lie where a
freed one lay, with as many rows, gets the descriptor that is right for it too.
"""

from typing import Any

import torch
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

MOST = 1024  # descriptor pairs kept for each kernel; a server has one KV tensor a layer
ALIGNMENT = 16  # bytes: of TMA's addresses, and of the copies that bring q


class Address:
    """What a descriptor needs of its tensor, without keeping the tensor."""

    def __init__(self, tensor: torch.Tensor):
        self.dtype = tensor.dtype
        self.address = tensor.data_ptr()

    def data_ptr(self) -> int:
        return self.address


class Tile(TensorDescriptor):
    """A descriptor for tiles of some columns. `encoded`: what a launch hands to the driver, once it is known."""

    encoded: tuple[Any, ...] | None = None


def have_context(device: torch.device) -> None:
    """Make the device's context this thread's own, as encoding a descriptor needs it.

    The driver encodes, and knows no context in a thread that has not yet used CUDA through its runtime, which binds one
    when it is first asked something. A launch sees to that by itself, but comes after the encoding.
    """
    if not torch.cuda.is_current_stream_capturing():  # a thread that captures has used CUDA
        torch.cuda.mem_get_info(device)


class Tiles:
    """The descriptors of one kernel: tiles of `rows` KV rows by each of `parts`, (columns, shared-memory layout)."""

    def __init__(self, dtype: torch.dtype, rows: int, parts: tuple[tuple[int, Any], ...]):
        self.dtype = dtype
        self.rows = rows
        self.parts = parts
        self._cache: dict[tuple[int, ...], tuple[Tile, ...]] = {}
        self._nothing: dict[torch.device, torch.Tensor] = {}

    def of(self, kv: torch.Tensor, kv_layout: tuple[int, int] | None = None) -> tuple[Tile, ...]:
        """One descriptor for each part of `kv` [total_kv, columns] or [total_kv, 1, columns], contiguous rows.

        kv_layout   of a pool [pages, page_size, columns] (or so), whose pages are whole rows apart: elements from page
                    to page first

        Raises ValueError if it does not begin at a multiple of 16 bytes, or its pages are not whole rows apart.
        """
        key: tuple[int, ...] = (kv.data_ptr(), kv.shape[0], kv.get_device())
        if kv_layout:
            key += kv_layout[:1]
        found = self._cache.get(key)
        if found is None:
            found = self._make(kv, kv_layout[0] if kv_layout else None)
            if kv.is_cuda:  # the emulator's memory is the tensor itself
                if len(self._cache) >= MOST:
                    self._cache.clear()
                self._cache[key] = found
        if kv.is_cuda and found[-1].encoded is None:
            have_context(kv.device)
        return found

    def _make(self, kv: torch.Tensor, page_step: int | None) -> tuple[Tile, ...]:
        if kv.data_ptr() % ALIGNMENT:
            raise ValueError(
                f"kv begins {kv.data_ptr() % ALIGNMENT} bytes after a multiple of {ALIGNMENT}, where TMA cannot read: "
                "copy it, or let the pool begin where torch allocated it"
            )
        if not kv.shape[0]:  # nothing will be read, but a descriptor must have a row
            kv = self._one_row(kv)
        columns = kv.shape[-1]
        if page_step is None:
            memory = kv.view(self.dtype).view(-1, columns)
        elif page_step % columns:
            raise ValueError(f"kv has pages {page_step} numbers apart; TMA needs a multiple of the row's {columns}")
        else:  # all rows from the first to the last, those of others between them too
            rows = (kv.shape[0] - 1) * (page_step // columns) + kv[0].numel() // columns
            memory = kv.view(self.dtype).as_strided((rows, columns), (columns, 1))
        base = Address(memory) if kv.is_cuda else memory
        shape, strides = [memory.shape[0], columns], [columns, 1]
        return tuple(Tile(base, shape, strides, [self.rows, part], layout) for part, layout in self.parts)

    def _one_row(self, kv: torch.Tensor) -> torch.Tensor:
        row = self._nothing.get(kv.device)
        if row is None:
            row = torch.zeros((1, kv.shape[-1] * kv.element_size()), dtype=torch.uint8, device=kv.device)
            self._nothing[kv.device] = row
        return row.view(kv.dtype)


def refuse_misaligned(kv: torch.Tensor) -> None:
    """ValueError for a pool that copies of 16 bytes cannot read."""
    if kv.data_ptr() % ALIGNMENT:
        raise ValueError(
            f"kv begins {kv.data_ptr() % ALIGNMENT} bytes after a multiple of {ALIGNMENT}, where cp.async cannot read: "
            "copy it, or let the pool begin where torch allocated it"
        )


def aligned(q: torch.Tensor) -> tuple[torch.Tensor, int, int]:
    """`q`, or a copy if its address or strides do not allow copies of 16 bytes; its strides of rows and of heads."""
    rows, heads, _ = q.stride()
    if q.data_ptr() % ALIGNMENT or rows % ALIGNMENT or heads % ALIGNMENT:  # in elements: Triton's unit
        q = q.clone(memory_format=torch.contiguous_format)
        rows, heads, _ = q.stride()
    return q, rows, heads
