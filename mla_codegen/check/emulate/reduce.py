"""Reductions along an axis. The result has the SliceLayout of that axis; narrow types widen as in Triton."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import triton.language.core as tl

from mla_codegen.check.emulate import dtypes, layouts
from mla_codegen.check.emulate.errors import EmulatorError
from mla_codegen.check.emulate.tensor import AUTO, Tensor


def _axis(x: Tensor, axis: Any) -> tuple[Tensor, int]:
    axis = getattr(axis, "value", axis)
    if axis is None:
        return Tensor(x.data.reshape(-1), x.dtype, AUTO), 0
    if not -len(x.shape) <= axis < len(x.shape):
        raise EmulatorError(f"reduction along axis {axis} of a tensor of shape {list(x.shape)}")
    return x, axis % len(x.shape)


def _result(x: Tensor, data: Any, axis: int, keep_dims: Any, dtype: Any = None) -> Tensor:
    kind = x.dtype if dtype is None else dtype
    if not np.ndim(data):
        scalar = Tensor(dtypes.storage_type(kind).type(data), kind)
        return scalar
    layout = layouts.sliced(x.layout, axis)
    result = Tensor(data, kind, layout)
    return result.expand_dims(axis) if getattr(keep_dims, "value", keep_dims) else result


def _wide(x: Tensor) -> Tensor:
    if x.dtype.primitive_bitwidth < 32:
        return x.to(tl.float32 if x.dtype.is_floating() else tl.int32)
    return x


def max(input: Tensor, axis: Any = None, return_indices: Any = False, keep_dims: Any = False, **_: Any) -> Any:
    return _extreme(input, axis, return_indices, keep_dims, np.fmax.reduce, np.nanargmax)


def min(input: Tensor, axis: Any = None, return_indices: Any = False, keep_dims: Any = False, **_: Any) -> Any:
    return _extreme(input, axis, return_indices, keep_dims, np.fmin.reduce, np.nanargmin)


def _extreme(
    x: Tensor, axis: Any, indices: Any, keep_dims: Any, values: Callable[..., Any], places: Callable[..., Any]
) -> Any:
    x, at = _axis(x, axis)
    x = _wide(x)
    value = _result(x, values(x.data, axis=at), at, keep_dims)
    if not getattr(indices, "value", indices):
        return value
    return value, _result(x, places(x.data, axis=at).astype(np.int32), at, keep_dims, tl.int32)


def argmax(input: Tensor, axis: Any, tie_break_left: Any = True, keep_dims: Any = False) -> Any:
    return max(input, axis, True, keep_dims)[1]


def argmin(input: Tensor, axis: Any, tie_break_left: Any = True, keep_dims: Any = False) -> Any:
    return min(input, axis, True, keep_dims)[1]


def sum(input: Tensor, axis: Any = None, keep_dims: Any = False, dtype: Any = None) -> Tensor:
    """In the input's own type; integers narrower than 32 bits widen to 32."""
    dtype = getattr(dtype, "value", dtype)
    if dtype is not None:
        input = input.to(dtype)
    elif input.dtype.is_int() and input.dtype.int_bitwidth < 32:
        input = input.to(tl.uint32 if input.dtype.is_int_unsigned() else tl.int32)
    x, at = _axis(input, axis)
    if x.dtype.name == "bf16":
        total = dtypes.from_f32(dtypes.to_f32(x.data, x.dtype).sum(axis=at), x.dtype)
    else:
        total = np.add.reduce(x.data, axis=at, dtype=x.data.dtype)
    return _result(x, total, at, keep_dims)


def xor_sum(input: Tensor, axis: Any = None, keep_dims: Any = False) -> Tensor:
    x, at = _axis(input, axis)
    return _result(x, np.bitwise_xor.reduce(x.data, axis=at), at, keep_dims)


def reduce_or(input: Tensor, axis: Any = None, keep_dims: Any = False) -> Tensor:
    x, at = _axis(input, axis)
    return _result(x, np.bitwise_or.reduce(x.data, axis=at), at, keep_dims)


def reduce(input: Any, axis: Any, combine_fn: Callable[..., Any], keep_dims: Any = False) -> Any:
    """Any combine function: folds halves of the axis until one slice is left."""
    many = isinstance(input, tuple)
    parts = [_axis(x, axis) for x in (input if many else (input,))]
    at, tensors = parts[0][1], [x for x, _ in parts]
    stacks = [np.moveaxis(x.data, at, 0) for x in tensors]
    while len(stacks[0]) > 1:
        half = len(stacks[0]) // 2
        sides = [
            Tensor(stack[i * half : (i + 1) * half], x.dtype)
            for i in (0, 1)
            for stack, x in zip(stacks, tensors, strict=True)
        ]
        folded = combine_fn(*sides)
        stacks = [y.data for y in (folded if isinstance(folded, tuple) else (folded,))]
    results = tuple(_result(x, stack[0], at, keep_dims) for stack, x in zip(stacks, tensors, strict=True))
    return results if many else results[0]


def associative_scan(input: Any, axis: Any, combine_fn: Callable[..., Any], reverse: Any = False) -> Any:
    """Running results along an axis, of any combine function of one tensor."""
    x, at = _axis(input, axis)
    stack = np.moveaxis(x.data, at, 0)
    stack = stack[::-1] if getattr(reverse, "value", reverse) else stack
    total, reach = stack, 1  # each element has taken in `reach` elements
    while reach < len(stack):
        more = combine_fn(Tensor(total[:-reach], x.dtype), Tensor(total[reach:], x.dtype)).data
        total = np.concatenate([total[:reach], more])
        reach *= 2
    total = total[::-1] if getattr(reverse, "value", reverse) else total
    return x.with_data(np.moveaxis(total, 0, at))


def cumsum(input: Tensor, axis: Any = 0, reverse: Any = False, dtype: Any = None) -> Tensor:
    x, at = _axis(input, axis)
    data = np.flip(x.data, at) if reverse else x.data
    total = np.cumsum(data, axis=at, dtype=x.data.dtype)
    return x.with_data(np.flip(total, at) if reverse else total)
