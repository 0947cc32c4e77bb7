"""What Triton and Gluon share: programs, creation of tensors, global memory, loops, assertions and hints."""

from __future__ import annotations

import builtins
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import triton.language.core as tl

from mla_codegen.check.emulate import dtypes, layouts, memory
from mla_codegen.check.emulate.errors import EmulatorError
from mla_codegen.check.emulate.state import current
from mla_codegen.check.emulate.tensor import Tensor, as_tensor, broadcast_pair, constant, constant_int


def plain(value: Any) -> Any:
    """A compile-time value out of its constexpr."""
    return getattr(value, "value", value) if isinstance(value, tl.constexpr) else value


def checked_layout(layout: Any, shape: tuple[int, ...]) -> Any:
    """`layout` interned and fit for this launch."""
    program = current()
    return layouts.check(plain(layout), shape, program.warps, program.lanes)


def _shape(shape: Any) -> tuple[int, ...]:
    shape = plain(shape)
    dims = tuple(constant_int(n, "a dimension") for n in (shape if isinstance(shape, (list, tuple)) else (shape,)))
    for n in dims:
        if n & (n - 1) or n < 1:
            raise EmulatorError(f"tensor dimension {n} of {list(dims)} is not a power of two")
    return dims


# --- programs, creation ---


def program_id(axis: Any) -> Tensor:
    return Tensor(np.int32(current().index[plain(axis)]), tl.int32)


def num_programs(axis: Any) -> Tensor:
    return Tensor(np.int32(current().grid[plain(axis)]), tl.int32)


def num_warps() -> int:
    return current().warps


def num_ctas() -> int:
    return 1


def arange(start: Any, end: Any, layout: Any = None) -> Tensor:
    start, end = constant_int(start, "a bound of arange"), constant_int(end, "a bound of arange")
    shape = _shape([end - start])
    return Tensor(np.arange(start, end, dtype=np.int32), tl.int32, checked_layout(layout, shape))


def full(shape: Any, value: Any, dtype: Any, layout: Any = None) -> Tensor:
    dims, dtype = _shape(shape), plain(dtype)
    if isinstance(value, Tensor):
        scalar: Any = value.to(dtype).data
    else:
        value = plain(value)
        scalar = constant(float(value) if dtype.is_floating() else value, dtype)
    return Tensor(np.full(dims, scalar, dtypes.storage_type(dtype)), dtype, checked_layout(layout, dims))


def zeros(shape: Any, dtype: Any, layout: Any = None) -> Tensor:
    return full(shape, 0, dtype, layout)


def full_like(input: Tensor, value: Any, shape: Any = None, dtype: Any = None, layout: Any = None) -> Tensor:
    return full(
        input.shape if shape is None else shape,
        value,
        input.dtype if dtype is None else dtype,
        input.layout if layout is None else layout,
    )


def zeros_like(input: Tensor, shape: Any = None, dtype: Any = None, layout: Any = None) -> Tensor:
    return full_like(input, 0, shape, dtype, layout)


def convert_layout(value: Tensor, layout: Any, assert_trivial: Any = False) -> Tensor:
    return Tensor(value.data, value.dtype, checked_layout(layout, value.shape), value.buffer)


# --- global memory ---


def masked(pointer: Tensor, mask: Any, what: str) -> Any:
    """`mask` as a bool array of the pointer's shape, or None for none."""
    mask = plain(mask)
    if mask is None:
        return None
    mask = as_tensor(mask)
    if mask.dtype.name != "int1":
        raise EmulatorError(f"the mask of a {what} is {mask.dtype}", "compare something: a mask is int1")
    shape, _ = broadcast_pair(pointer, mask, f"a {what}'s pointer and mask")
    if shape != pointer.shape:
        raise EmulatorError(f"a mask of shape {list(mask.shape)} for a {what} of shape {list(pointer.shape)}")
    return np.broadcast_to(mask.data, shape)


def need_pointer(pointer: Any, what: str) -> Tensor:
    if not isinstance(pointer, Tensor) or pointer.buffer is None:
        hint = "the argument is None: guard its use with `if ARG is not None`" if pointer is None else ""
        raise EmulatorError(f"{what} takes a pointer, not {type(pointer).__name__} {pointer!r}"[:200], hint)
    return pointer


def load(
    pointer: Any,
    mask: Any = None,
    other: Any = None,
    boundary_check: Any = (),
    padding_option: Any = "",
    cache_modifier: Any = "",
    eviction_policy: Any = "",
    volatile: Any = False,
) -> Tensor:
    """Masked elements become `other`; without `other` they are undefined, here poison."""
    pointer = need_pointer(pointer, "load")
    where_ = masked(pointer, mask, "load")
    if plain(other) is not None and where_ is None:
        raise EmulatorError("load with `other` but no mask")
    kind = pointer.dtype.element_ty
    fill = fill_value(pointer, other, kind, "load")
    assert pointer.buffer is not None
    data = memory.load(pointer.buffer, kind, pointer.data, where_, fill, current().buffers)
    return Tensor(data, kind, pointer.layout)


def fill_value(pointer: Tensor, other: Any, kind: Any, what: str) -> Any:
    """`other` of a masked access in storage form, broadcast; None stays None."""
    other = plain(other)
    if other is None:
        return None
    if not isinstance(other, Tensor):
        return constant(float(other) if kind.is_floating() else other, kind)
    broadcast_pair(pointer, other, f"a {what}'s pointer and other")
    return np.broadcast_to(other.to(kind).data, pointer.shape)


def store(
    pointer: Any,
    value: Any,
    mask: Any = None,
    boundary_check: Any = (),
    cache_modifier: Any = "",
    eviction_policy: Any = "",
) -> None:
    pointer = need_pointer(pointer, "store")
    kind = pointer.dtype.element_ty
    data = stored(pointer, value, kind)
    assert pointer.buffer is not None
    memory.store(
        pointer.buffer, kind, pointer.data, data, masked(pointer, mask, "store"), current().buffers, current().number
    )


def stored(pointer: Tensor, value: Any, kind: Any) -> Any:
    """`value` as the pointer's type and shape. Its layout must be the pointer's."""
    value = plain(value)
    if not isinstance(value, Tensor):
        value = Tensor(np.asarray(constant(float(value) if kind.is_floating() else value, kind)), kind)
    shape, _ = broadcast_pair(pointer, value, "a store's pointer and value")
    if shape != pointer.shape:
        raise EmulatorError(
            f"a value of shape {list(value.shape)} stored through pointers of shape {list(pointer.shape)}"
        )
    return np.broadcast_to(value.to(kind).data, shape)


def _atomic(pointer: Any, value: Any, mask: Any, combine: Callable[[Any, Any], Any]) -> Tensor:
    pointer = need_pointer(pointer, "an atomic")
    kind = pointer.dtype.element_ty
    data = stored(pointer, value, kind)
    where_ = masked(pointer, mask, "atomic")
    assert pointer.buffer is not None
    buffers = current().buffers
    old = np.array(memory.load(pointer.buffer, kind, pointer.data, where_, dtypes.poison_value(kind), buffers))
    cells = pointer.buffer.view(dtypes.storage_type(kind))
    for at in np.ndindex(pointer.shape):
        if where_ is None or where_[at]:
            index = int(np.asarray(pointer.data)[at])
            old[at] = cells[index]
            cells[index] = combine(cells[index], data[at])
    return Tensor(old if pointer.shape else old[()], kind, pointer.layout)


def atomic_add(pointer: Any, val: Any, mask: Any = None, sem: Any = None, scope: Any = None) -> Tensor:
    return _atomic(pointer, val, mask, lambda a, b: a + b)


def atomic_max(pointer: Any, val: Any, mask: Any = None, sem: Any = None, scope: Any = None) -> Tensor:
    return _atomic(pointer, val, mask, builtins.max)


def atomic_min(pointer: Any, val: Any, mask: Any = None, sem: Any = None, scope: Any = None) -> Tensor:
    return _atomic(pointer, val, mask, builtins.min)


def atomic_xchg(pointer: Any, val: Any, mask: Any = None, sem: Any = None, scope: Any = None) -> Tensor:
    return _atomic(pointer, val, mask, lambda a, b: b)


# --- loops, assertions, hints ---


def cdiv(x: Any, div: Any) -> Any:
    x, div = plain(x), plain(div)
    return (x + div - 1) // div


def static_range(*args: Any, **options: Any) -> range:
    bounds = [plain(arg) for arg in args]
    if any(isinstance(n, Tensor) for n in bounds):
        raise EmulatorError("static_range over a run-time value", "its bounds must be compile-time constants")
    step = plain(options.get("step", 1))
    return builtins.range(*bounds) if len(bounds) != 2 else builtins.range(bounds[0], bounds[1], step)


def runtime_range(*args: Any, **options: Any) -> Iterator[Tensor]:
    """Triton's `range`: the loop variable is a run-time integer, whatever the bounds are."""
    bounds = [as_tensor(plain(arg)) for arg in args]
    if len(bounds) == 1:
        bounds.insert(0, as_tensor(0))
    if len(bounds) == 2:
        bounds.append(as_tensor(plain(options.get("step") or 1)))
    kind = bounds[0].dtype
    for bound in bounds[1:]:
        kind = dtypes.promote(kind, False, bound.dtype, False, False)
    make = dtypes.storage_type(kind).type
    frame = sys._getframe(1)
    before: dict[str, Tensor] | None = {}
    for i in builtins.range(*(int(bound) for bound in bounds)):
        if before == {}:
            before = {name: value for name, value in frame.f_locals.items() if isinstance(value, Tensor)}
        elif before is not None:
            _check_carried(before, frame.f_locals)
            before = None  # one pass of the body tells
        yield Tensor(make(i), kind)
    if before:
        _check_carried(before, frame.f_locals)


def _check_carried(before: dict[str, Tensor], after: dict[str, Any]) -> None:
    """Raise if the loop body gave a tensor that existed before the loop another type, shape or layout."""
    for name, old in before.items():
        new = after.get(name)
        if not isinstance(new, Tensor) or new is old:
            continue
        for what, x, y in (
            ("type", old.dtype, new.dtype),
            ("shape", old.shape, new.shape),
            ("layout", old.layout, new.layout),
        ):
            if x != y and not (what == "layout" and layouts.AUTO in (x, y)):
                raise EmulatorError(
                    f"variable {name} enters a loop with {what} {x} and leaves its body with {y}",
                    "a loop-carried variable keeps type, shape and layout: convert it back, or use another name",
                )


def static_assert(cond: Any, msg: Any = "") -> None:
    if not plain(cond):
        raise EmulatorError(f"static_assert failed: {plain(msg)}")


def device_assert(cond: Any, msg: Any = "", mask: Any = None) -> None:
    if not np.all(as_tensor(cond).data):
        raise EmulatorError(f"device_assert failed: {plain(msg)}")


def device_print(prefix: Any, *args: Any, hex: Any = False) -> None:
    print(current().index, plain(prefix), *args)


def assume(cond: Any) -> None:
    if not np.all(as_tensor(cond).data):
        raise EmulatorError("an assumption given to the compiler is false", "assume() must hold for every program")


def hint(input: Any, values: Any) -> Any:
    """multiple_of and its kin: a promise on contents that the emulator does not need."""
    return input


def barrier() -> None:
    """Threads of a program run in step here, so a barrier has nothing left to do."""
    current()
