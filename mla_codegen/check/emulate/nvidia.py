"""NVIDIA's own device functions: cp.async, TMA with its descriptors, and dependent launch (which is a no-op here)."""

from __future__ import annotations

from typing import Any

import numpy as np
import triton.language.core as tl
from numpy.typing import NDArray

from mla_codegen.check.emulate import asynchronous, dtypes, memory
from mla_codegen.check.emulate.asynchronous import Copy, barrier_of, holds
from mla_codegen.check.emulate.errors import EmulatorError
from mla_codegen.check.emulate.lang import masked, need_pointer
from mla_codegen.check.emulate.memory import Buffer
from mla_codegen.check.emulate.shared import Descriptor
from mla_codegen.check.emulate.state import current
from mla_codegen.check.emulate.tensor import Tensor


def async_load(
    smem: Descriptor,
    pointer: Any,
    mask: Any = None,
    cache_modifier: Any = "",
    eviction_policy: Any = "",
    volatile: Any = False,
) -> None:
    """cp.async: masked-off elements are filled with zeros."""
    pointer = need_pointer(pointer, "async_copy.async_load")
    kind = pointer.dtype.element_ty
    _same(smem, pointer.shape, kind, "async_copy.async_load")
    keep = masked(pointer, mask, "async copy")
    assert pointer.buffer is not None
    zero = dtypes.storage_type(kind).type(0)
    data = memory.load(pointer.buffer, kind, pointer.data, keep, zero, current().buffers)
    current().uncommitted.append(Copy(smem, data, None, "async_copy.async_load"))


def _same(smem: Descriptor, shape: tuple[int, ...], kind: Any, what: str) -> None:
    if smem.shape != tuple(shape) or smem.dtype != kind:
        raise EmulatorError(f"{what} of {kind}{list(shape)} into {smem}: shape and element type must be equal")


def mbarrier_arrive(mbarrier: Descriptor, increment_count: Any = True) -> None:
    """cp.async.mbarrier.arrive: each thread arrives once its copies so far have landed, inside a wait on the barrier.

    With `increment_count` the threads raise the count that the phase awaits by as many as arrive.
    """
    program = current()
    barrier = barrier_of(mbarrier)
    for copy in program.uncommitted:
        copy.barrier = barrier
    barrier.copies += program.uncommitted
    program.bulk_loads += program.uncommitted
    brought = sum(copy.nbytes for copy in program.uncommitted)
    program.uncommitted = []
    threads = 0 if getattr(increment_count, "value", increment_count) else program.warps * program.lanes
    barrier.arrive(threads, brought)
    if program.scheduler is not None:
        program.scheduler.progress()
        program.scheduler.yield_baton()


class TensorMap:
    """A TMA descriptor inside a kernel."""

    def __init__(
        self,
        buffer: Buffer,
        dtype: Any,
        shape: list[int],
        strides: list[int],
        block: list[int],
        layout: Any,
        padding: str,
    ) -> None:
        self.buffer, self.dtype, self.layout, self.padding = buffer, dtype, layout, padding
        self.dims, self.steps, self.block_shape = shape, strides, block
        self.shape = tuple(Tensor(np.int32(n), tl.int32) for n in shape)
        self.strides = tuple(Tensor(np.int64(n), tl.int64) for n in strides)
        self.block_type = tl.block_type(dtype, block)

    def __str__(self) -> str:
        return f"TMA descriptor of {self.buffer.describe()}, block {self.block_shape}"


def tensor_map(name: str, host: Any) -> TensorMap:
    """The kernel's view of a host TensorDescriptor. Its shape and strides must stay inside the tensor."""
    buffer = Buffer(name, host.base)
    dtype = dtypes.FROM_TORCH[host.base.dtype]
    shape, strides = [int(n) for n in host.shape], [int(n) for n in host.strides]
    return _tensor_map(buffer, dtype, shape, strides, list(host.block_shape), host.layout, host.padding)


def _tensor_map(
    buffer: Buffer, dtype: Any, shape: list[int], strides: list[int], block: list[int], layout: Any, padding: str
) -> TensorMap:
    size = dtypes.storage_type(dtype).itemsize
    last = sum((n - 1) * step for n, step in zip(shape, strides, strict=True)) if all(shape) else -1
    if (last + 1) * size > len(buffer.bytes):
        raise EmulatorError(
            f"the TMA descriptor's shape {shape} and strides {strides} reach past argument {buffer.describe()}",
            "make it with the tensor's own shape and strides",
        )
    if strides[-1] != 1 or any(step * size % 16 for step in strides[:-1]):
        raise EmulatorError(
            f"TMA strides {strides} of {size}-byte elements: the last is 1, the others multiples of 16 bytes"
        )
    if block[-1] * size % 16:
        raise EmulatorError(f"TMA block {block} of {size}-byte elements: its last side is a multiple of 16 bytes")
    return TensorMap(buffer, dtype, shape, strides, block, layout, padding)


def make_tensor_descriptor(
    base: Any, shape: Any, strides: Any, block_shape: Any, layout: Any, padding_option: Any = "zero"
) -> TensorMap:
    """A descriptor made inside the kernel."""
    pointer = need_pointer(base, "make_tensor_descriptor")
    if pointer.shape or int(pointer.data):
        raise EmulatorError("make_tensor_descriptor on a moved pointer is not modelled", "pass the argument itself")
    assert pointer.buffer is not None
    dims, steps, block = ([int(getattr(n, "value", n)) for n in values] for values in (shape, strides, block_shape))
    padding = getattr(padding_option, "value", padding_option)
    return _tensor_map(
        pointer.buffer, pointer.dtype.element_ty, dims, steps, block, getattr(layout, "value", layout), padding
    )


def _box(desc: TensorMap, coord: Any) -> tuple[NDArray[Any], NDArray[np.bool_]]:
    """Element offsets of the block at `coord`, and which of them lie inside the descriptor's shape."""
    if len(coord) != len(desc.dims):
        raise EmulatorError(f"{len(coord)} coordinates for a {desc} of rank {len(desc.dims)}")
    index: Any = np.int64(0)
    inside: Any = np.bool_(True)
    for axis, (start, n, step, size) in enumerate(zip(coord, desc.dims, desc.steps, desc.block_shape, strict=True)):
        side = [1] * len(desc.dims)
        side[axis] = size
        at = (int(start) + np.arange(size, dtype=np.int64)).reshape(side)
        index = index + at * step
        inside = inside & (at >= 0) & (at < n)
    return np.broadcast_to(index, desc.block_shape), np.broadcast_to(inside, desc.block_shape)


def _fits(desc: TensorMap, smem: Descriptor, what: str) -> None:
    if not isinstance(desc, TensorMap):
        raise EmulatorError(f"{what} takes a tensor descriptor, not {desc!r}")
    _same(smem, tuple(desc.block_shape), desc.dtype, what)
    if smem.layout != desc.layout:
        raise EmulatorError(
            f"{what}: the descriptor's layout is {desc.layout}, the shared memory's {smem.layout}",
            "TMA writes its own swizzle",
        )


def tma_load(desc: TensorMap, coord: Any, barrier: Descriptor, result: Descriptor, pred: Any = True) -> None:
    """tma.async_load: elements outside the descriptor's shape are zero (or NaN, by its padding)."""
    if not holds(pred):
        return
    what = "tma.async_load"
    _fits(desc, result, what)
    result.fenced_by_compiler()
    index, inside = _box(desc, coord)
    fill = dtypes.poison_value(desc.dtype) if desc.padding == "nan" else dtypes.storage_type(desc.dtype).type(0)
    data = memory.load(desc.buffer, desc.dtype, index, inside, fill, current().buffers)
    asynchronous.copy_with_barrier(result, data, barrier_of(barrier), what)


def tma_store(desc: TensorMap, coord: Any, src: Descriptor) -> None:
    """tma.async_store: elements outside the descriptor's shape are dropped."""
    what = "tma.async_store"
    _fits(desc, src, what)
    src.check_readable(f"{what} from")
    src.read_by_async_proxy(what)
    index, inside = _box(desc, coord)
    memory.store(desc.buffer, desc.dtype, index, src.view(), inside, current().buffers, current().number)
    asynchronous.bulk_store(src)


def gdc_wait() -> None:
    """Kernels run one after another here, so what a dependent launch waits for is done."""
    current()


def gdc_launch_dependents() -> None:
    current()


# By the names of every release.
FUNCTIONS: dict[str, dict[str, Any]] = {
    "async_copy": {
        **dict.fromkeys(("async_load", "async_copy_global_to_shared"), async_load),
        "mbarrier_arrive": mbarrier_arrive,
        "commit_group": asynchronous.commit_group,
        "wait_group": asynchronous.wait_group,
    },
    "tma": {
        **dict.fromkeys(("async_load", "async_copy_global_to_shared"), tma_load),
        **dict.fromkeys(("async_store", "async_copy_shared_to_global"), tma_store),
        "store_wait": asynchronous.store_wait,
        "make_tensor_descriptor": make_tensor_descriptor,
        "tensor_descriptor": TensorMap,
    },
    "mbarrier": {name: getattr(asynchronous, name) for name in ("init", "invalidate", "expect", "arrive", "wait")},
}
