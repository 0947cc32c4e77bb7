"""AMD's own device functions on gfx942 and gfx950: buffer loads and stores, and asynchronous copies to LDS."""

from __future__ import annotations

from typing import Any

import numpy as np

from mla_codegen.check.emulate import asynchronous, dtypes, layouts, memory
from mla_codegen.check.emulate.asynchronous import Copy
from mla_codegen.check.emulate.errors import EmulatorError
from mla_codegen.check.emulate.lang import fill_value, masked, need_pointer, stored
from mla_codegen.check.emulate.shared import Descriptor
from mla_codegen.check.emulate.state import current
from mla_codegen.check.emulate.tensor import Tensor


def _addresses(ptr: Any, offsets: Any, what: str) -> Tensor:
    """Pointers of a buffer access: a scalar base and 32-bit offsets, which the hardware takes as non-negative."""
    ptr = need_pointer(ptr, what)
    if ptr.shape:
        raise EmulatorError(f"{what} takes a scalar base pointer, not a tensor of pointers")
    if not isinstance(offsets, Tensor) or not offsets.shape or offsets.dtype.name not in ("int32", "uint32"):
        raise EmulatorError(
            f"{what} takes a tensor of int32 offsets", "put the 64-bit part of the offset into the base pointer"
        )
    return Tensor(ptr.data + offsets.data.astype(np.int64), ptr.dtype, offsets.layout, ptr.buffer)


def _check_span(ptr: Tensor, offsets: Tensor, mask: Any, what: str) -> None:
    size = dtypes.storage_type(ptr.dtype.element_ty).itemsize
    far = offsets.data if mask is None else np.where(mask, offsets.data, 0)
    if far.size and (int(far.min()) < 0 or int(far.max()) * size >= 2**31):
        raise EmulatorError(
            f"{what} at a byte offset outside [0, 2^31)",
            "move the 64-bit part of the offset into the scalar base pointer",
        )


def buffer_load(ptr: Any, offsets: Any, mask: Any = None, other: Any = None, cache: Any = None) -> Tensor:
    """Masked elements are `other`, or zero (the hardware's answer outside the buffer)."""
    pointer = _addresses(ptr, offsets, "buffer_load")
    keep = masked(pointer, mask, "buffer_load")
    _check_span(ptr, offsets, keep, "buffer_load")
    kind = pointer.dtype.element_ty
    fill = fill_value(pointer, other, kind, "buffer_load")
    fill = dtypes.storage_type(kind).type(0) if fill is None else fill
    assert pointer.buffer is not None
    return Tensor(memory.load(pointer.buffer, kind, pointer.data, keep, fill, current().buffers), kind, pointer.layout)


def buffer_store(stored_value: Any, ptr: Any, offsets: Any, mask: Any = None, cache: Any = None) -> None:
    pointer = _addresses(ptr, offsets, "buffer_store")
    keep = masked(pointer, mask, "buffer_store")
    _check_span(ptr, offsets, keep, "buffer_store")
    kind = pointer.dtype.element_ty
    assert pointer.buffer is not None
    memory.store(
        pointer.buffer,
        kind,
        pointer.data,
        stored(pointer, stored_value, kind),
        keep,
        current().buffers,
        current().number,
    )


def _to_shared(dest: Descriptor, pointer: Tensor, mask: Any, other: Any, what: str, zero_masked: bool) -> None:
    kind = pointer.dtype.element_ty
    if dest.shape != pointer.shape or dest.dtype != kind:
        raise EmulatorError(f"{what} of {kind}{list(pointer.shape)} into {dest}: shape and element type must be equal")
    layout = pointer.layout
    if not isinstance(layout, (layouts.BlockedLayout, layouts.SliceLayout)):
        raise EmulatorError(f"{what} with offsets in {layout}", "the offsets need a BlockedLayout or a SliceLayout")
    _check_width(layout, kind, what)
    keep = masked(pointer, mask, what)
    fill = fill_value(pointer, other, kind, what)
    written = None if keep is None or fill is not None or zero_masked else keep
    zero = dtypes.storage_type(kind).type(0)
    assert pointer.buffer is not None
    data = memory.load(pointer.buffer, kind, pointer.data, keep, zero if fill is None else fill, current().buffers)
    current().uncommitted.append(Copy(dest, data, written, what))


def _check_width(layout: Any, kind: Any, what: str) -> None:
    if isinstance(layout, layouts.BlockedLayout):
        bits = int(np.prod(layout.size_per_thread)) * kind.primitive_bitwidth
        if bits != 32 and bits % 128:
            raise EmulatorError(
                f"{what} with {bits} bits a thread", "a thread copies 32 or 128 bits: change size_per_thread"
            )


def global_load_to_shared(
    dest: Descriptor, ptr: Any, mask: Any = None, other: Any = None, cache_modifier: Any = ""
) -> None:
    """Masked-off elements keep what LDS holds, unless `other` is given."""
    _to_shared(
        dest, need_pointer(ptr, "global_load_to_shared"), mask, other, "global_load_to_shared", zero_masked=False
    )


def buffer_load_to_shared(
    dest: Descriptor, ptr: Any, offsets: Any, mask: Any = None, other: Any = None, cache_modifier: Any = ""
) -> None:
    """Masked-off elements become zero, unless `other` is given."""
    pointer = _addresses(ptr, offsets, "buffer_load_to_shared")
    _check_span(ptr, offsets, masked(pointer, mask, "buffer_load_to_shared"), "buffer_load_to_shared")
    _to_shared(dest, pointer, mask, other, "buffer_load_to_shared", zero_masked=True)


def load_shared_relaxed(smem: Descriptor, layout: Any) -> Tensor:
    return smem.load(layout)


ASYNC_COPY: dict[str, Any] = {
    "global_load_to_shared": global_load_to_shared,
    "buffer_load_to_shared": buffer_load_to_shared,
    "commit_group": asynchronous.commit_group,
    "wait_group": asynchronous.wait_group,
    "load_shared_relaxed": load_shared_relaxed,
}
