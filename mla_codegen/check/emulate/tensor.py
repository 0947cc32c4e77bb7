"""The tensor of the emulator: a numpy array in storage form, an element type, a layout, and Triton's operators.

A scalar is a tensor of shape (). A pointer tensor holds element offsets into one `Buffer`. Tensors never change
once made.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import triton.language.core as tl
from numpy.typing import NDArray

from mla_codegen.check.emulate import dtypes, layouts
from mla_codegen.check.emulate.errors import EmulatorError
from mla_codegen.check.emulate.memory import Buffer
from mla_codegen.check.emulate.state import current

AUTO = layouts.AUTO
METHODS: dict[str, Callable[..., Any]] = {}  # functions that are methods too (sum, exp2, ...): filled by `namespaces`
_NATIVE = {"fp16", "fp32", "fp64", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"}
_COMPARE = {operator.lt, operator.le, operator.gt, operator.ge, operator.eq, operator.ne}


def _forward(op: Callable[..., Any]) -> Callable[[Any, Any], Tensor]:
    return lambda self, other: binary(op, self, other)


def _reverse(op: Callable[..., Any]) -> Callable[[Any, Any], Tensor]:
    return lambda self, other: binary(op, other, self)


class TensorType:
    """What `tensor.type` shows: scalar type, shape, layout."""

    def __init__(self, tensor: Tensor) -> None:
        self.scalar = self.element_ty = tensor.dtype
        self.shape = list(tensor.shape)
        self.layout = tensor.layout

    def is_block(self) -> bool:
        return bool(self.shape)


class Tensor:
    """`data` is in storage form and has exactly the tensor's shape; `buffer` is set for pointers only."""

    __slots__ = ("buffer", "data", "dtype", "layout", "shape")
    __array_priority__ = 1000
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, data: Any, dtype: Any, layout: Any = AUTO, buffer: Buffer | None = None) -> None:
        self.data: NDArray[Any] = data
        self.dtype = dtype
        self.layout = layout
        self.buffer = buffer
        self.shape: tuple[int, ...] = data.shape

    @property
    def type(self) -> TensorType:
        return TensorType(self)

    @property
    def numel(self) -> int:
        return int(np.prod(self.shape))

    def __repr__(self) -> str:
        return f"tensor({list(self.shape)}, {self.dtype}, {self.layout})\n{self.data}"

    def __bool__(self) -> bool:
        if self.shape:
            raise EmulatorError(
                f"a tensor of shape {list(self.shape)} used as a condition",
                "`if` and `and` need a scalar: use gl.where or &",
            )
        return bool(self.data)

    def __index__(self) -> int:
        if self.shape or not self.dtype.is_int():
            raise EmulatorError(f"a {self.dtype} tensor of shape {list(self.shape)} used as an index")
        return int(self.data)

    def __getattr__(self, name: str) -> Any:
        try:
            return partial(METHODS[name], self)
        except KeyError:
            raise AttributeError(f"a tensor has no {name!r}") from None

    def __iter__(self) -> Iterator[Any]:
        raise EmulatorError("a tensor cannot be iterated or unpacked")

    def with_data(self, data: Any, dtype: Any = None) -> Tensor:
        """Same layout, other values (and type)."""
        return Tensor(data, self.dtype if dtype is None else dtype, self.layout)

    def __getitem__(self, index: Any) -> Tensor:
        result = self
        for axis, item in enumerate(index if isinstance(index, tuple) else (index,)):
            if item is None:
                result = result.expand_dims(axis)
            elif item != slice(None):
                raise EmulatorError(f"a tensor is indexed with None and : only, not {item!r}")
        return result

    def expand_dims(self, axis: int) -> Tensor:
        if not self.shape:
            return Tensor(np.reshape(self.data, (1,)), self.dtype, AUTO, self.buffer)
        axis += len(self.shape) + 1 if axis < 0 else 0
        return Tensor(np.expand_dims(self.data, axis), self.dtype, layouts.expanded(self.layout, axis), self.buffer)

    def broadcast_to(self, *shape: Any) -> Tensor:
        dims = _dims(shape)
        layout = layouts.check(self.layout, dims, current().warps, current().lanes)
        return Tensor(np.broadcast_to(self.data, dims), self.dtype, layout, self.buffer)

    def reshape(self, *shape: Any) -> Tensor:
        dims = _dims(shape)
        if int(np.prod(dims)) != self.numel:
            raise EmulatorError(f"reshape of {list(self.shape)} to {list(dims)}: the number of elements differs")
        return Tensor(self.data.reshape(dims), self.dtype, layouts.reshaped(self.layout, self.shape, dims), self.buffer)

    view = reshape

    def permute(self, *order: Any) -> Tensor:
        dims = _dims(order)
        if sorted(dims) != list(range(len(self.shape))):
            raise EmulatorError(f"permute by {list(dims)} of a tensor of rank {len(self.shape)}")
        layout = layouts.permuted(self.layout, self.shape, dims)
        return Tensor(self.data.transpose(dims), self.dtype, layout, self.buffer)

    def trans(self, *order: Any) -> Tensor:
        return self.permute(*(order or (1, 0)))

    @property
    def T(self) -> Tensor:
        return self.trans()

    def to(self, dtype: Any, fp_downcast_rounding: Any = None, bitcast: bool = False) -> Tensor:
        """Convert by value, or keep the bits when `bitcast`."""
        dtype = getattr(dtype, "value", dtype)
        if self.buffer is not None:
            return self._pointer_to(dtype)
        if fp_downcast_rounding not in (None, "rtne"):
            raise EmulatorError(f"rounding {fp_downcast_rounding!r} is not modelled: 'rtne' is")
        if dtype is self.dtype or dtype == self.dtype:
            return self
        change = dtypes.bitcast if bitcast else dtypes.convert
        return self.with_data(change(self.data, self.dtype, dtype), dtype)

    cast = to

    def _pointer_to(self, dtype: Any) -> Tensor:
        if not dtype.is_ptr():
            raise EmulatorError("a pointer can be cast to another pointer type only")
        old, new = (dtypes.storage_type(kind.element_ty).itemsize for kind in (self.dtype, dtype))
        if old == new:
            return Tensor(self.data, dtype, self.layout, self.buffer)
        scaled = self.data * old
        if np.any(scaled % new):
            raise EmulatorError(
                f"pointer cast to {dtype.element_ty} at an offset that is not a multiple of {new} bytes"
            )
        return Tensor(scaled // new, dtype, self.layout, self.buffer)

    # operators

    __add__, __radd__ = _forward(operator.add), _reverse(operator.add)
    __sub__, __rsub__ = _forward(operator.sub), _reverse(operator.sub)
    __mul__, __rmul__ = _forward(operator.mul), _reverse(operator.mul)
    __truediv__, __rtruediv__ = _forward(operator.truediv), _reverse(operator.truediv)
    __floordiv__, __rfloordiv__ = _forward(operator.floordiv), _reverse(operator.floordiv)
    __mod__, __rmod__ = _forward(operator.mod), _reverse(operator.mod)
    __and__, __rand__ = _forward(operator.and_), _reverse(operator.and_)
    __or__, __ror__ = _forward(operator.or_), _reverse(operator.or_)
    __xor__, __rxor__ = _forward(operator.xor), _reverse(operator.xor)
    __lshift__, __rlshift__ = _forward(operator.lshift), _reverse(operator.lshift)
    __rshift__, __rrshift__ = _forward(operator.rshift), _reverse(operator.rshift)
    __lt__, __le__, __gt__, __ge__ = (_forward(op) for op in (operator.lt, operator.le, operator.gt, operator.ge))
    __eq__, __ne__ = _forward(operator.eq), _forward(operator.ne)  # type: ignore[assignment]

    def __neg__(self) -> Tensor:
        return binary(operator.sub, 0, self) if self.dtype.is_int() else binary(operator.mul, self, -1.0)

    def __invert__(self) -> Tensor:
        return self.with_data(~self.data)


def _dims(shape: tuple[Any, ...]) -> tuple[int, ...]:
    if len(shape) == 1 and isinstance(shape[0], (list, tuple)):
        shape = tuple(shape[0])
    return tuple(constant_int(n, "a dimension") for n in shape)


def constant_int(value: Any, what: str) -> int:
    """A compile-time integer; a run-time one is refused."""
    if isinstance(value, Tensor):
        raise EmulatorError(f"{what} is a run-time value", "it must be a compile-time constant (constexpr)")
    return int(getattr(value, "value", value))


def as_tensor(value: Any) -> Tensor:
    """Triton's `to_tensor`: numbers become scalars."""
    if isinstance(value, Tensor):
        return value
    value = getattr(value, "value", value)
    if isinstance(value, (bool, int, float, np.generic)):
        value = value.item() if isinstance(value, np.generic) else value
        kind = dtypes.number_type(value)
        return Tensor(dtypes.storage_type(kind).type(value), kind)
    raise EmulatorError(f"expected a tensor or a number, got {value!r}")


def constant(value: Any, dtype: Any) -> Any:
    """A Python number in the storage form of `dtype`."""
    kind = dtypes.storage_type(dtype)
    if dtype.is_floating():
        return dtypes.from_f32(np.asarray(value, np.float64 if dtype.name == "fp64" else np.float32), dtype)[()]
    if isinstance(value, float):
        raise EmulatorError(f"the float {value} where a {dtype} is wanted")
    if dtype.name != "int1" and not dtype.get_int_min_value() <= value <= dtype.get_int_max_value():
        raise EmulatorError(f"{value} is out of range for {dtype}")
    return kind.type(value)


def broadcast_pair(a: Tensor, b: Tensor, what: str) -> tuple[tuple[int, ...], Any]:
    """Shape and layout of an elementwise `what` of two tensors. Ranks must agree in Gluon; layouts must in any case."""
    if not b.shape:
        return a.shape, a.layout
    if not a.shape:
        return b.shape, b.layout
    if a.shape == b.shape:
        shape = a.shape
    else:
        if len(a.shape) != len(b.shape) and current().gluon:
            raise EmulatorError(
                f"{what} of shapes {list(a.shape)} and {list(b.shape)}: the ranks differ", "add [:, None]"
            )
        try:
            shape = np.broadcast_shapes(a.shape, b.shape)
        except ValueError:
            raise EmulatorError(f"{what} of shapes {list(a.shape)} and {list(b.shape)}") from None
    if a.layout is b.layout:
        return shape, a.layout
    return shape, layouts.agree(a.layout, b.layout, shape, f"the operands of {what}")


def coerce(a: Any, b: Any, what: str, division: bool = False) -> tuple[Any, Any, Any, Any]:
    """Stored operands of a binary op after promotion, their common type, and the result's layout."""
    a_number, b_number = not isinstance(a, Tensor), not isinstance(b, Tensor)
    if a_number:
        a = getattr(a, "value", a)
        assert isinstance(b, Tensor)
        kind = dtypes.promote(dtypes.number_type(a), True, b.dtype, False, division)
        return constant(a, kind), dtypes.convert(b.data, b.dtype, kind), kind, b.layout
    if b_number:
        b = getattr(b, "value", b)
        if not isinstance(b, (bool, int, float, np.generic)):
            raise EmulatorError(f"{what} of a tensor and {b!r}")
        kind = dtypes.promote(a.dtype, False, dtypes.number_type(b), True, division)
        return dtypes.convert(a.data, a.dtype, kind), constant(b, kind), kind, a.layout
    layout = broadcast_pair(a, b, what)[1]
    if a.dtype is b.dtype and not division:
        return a.data, b.data, a.dtype, layout
    kind = dtypes.promote(a.dtype, False, b.dtype, False, division)
    return dtypes.convert(a.data, a.dtype, kind), dtypes.convert(b.data, b.dtype, kind), kind, layout


def binary(op: Callable[..., Any], a: Any, b: Any) -> Tensor:
    """`a op b` with Triton's promotion, C's integer division, and pointer arithmetic."""
    name = op.__name__.rstrip("_")
    for side, other in ((a, b), (b, a)):
        if isinstance(side, Tensor) and side.buffer is not None:
            return _pointer_op(op, side, other, side is a)
    division = op is operator.truediv or op is operator.floordiv or op is operator.mod
    x, y, kind, layout = coerce(a, b, name, division)
    if op in _COMPARE:
        if kind.name not in _NATIVE and kind.is_floating():
            x, y = dtypes.to_f32(np.asarray(x), kind), dtypes.to_f32(np.asarray(y), kind)
        return Tensor(op(x, y), tl.int1, layout)
    if op is operator.truediv and not kind.is_floating():
        return Tensor(np.true_divide(x, y, dtype=np.float32), tl.float32, layout)
    if division and op is not operator.truediv:
        return Tensor(_integer_division(op, x, y, kind), kind, layout)
    if kind.name in _NATIVE or (kind.name == "int1" and op in (operator.and_, operator.or_, operator.xor)):
        return Tensor(op(x, y), kind, layout)
    if kind.name == "bf16":
        wide = op(dtypes.to_f32(np.asarray(x), kind), dtypes.to_f32(np.asarray(y), kind))
        return Tensor(dtypes.from_f32(wide, kind), kind, layout)
    raise EmulatorError(f"{name} is not defined on {kind}", "convert to a wider type first")


def _integer_division(op: Callable[..., Any], x: Any, y: Any, kind: Any) -> Any:
    if kind.is_floating():
        if op is operator.mod:
            return np.fmod(x, y)
        raise EmulatorError("// is defined on integers only")
    if np.any(np.equal(y, 0)):
        raise EmulatorError(f"integer {'remainder' if op is operator.mod else 'division'} by zero")
    remainder = np.fmod(x, y)
    return remainder if op is operator.mod else np.floor_divide(np.subtract(x, remainder), y)


def _pointer_op(op: Callable[..., Any], pointer: Tensor, other: Any, pointer_first: bool) -> Tensor:
    if op in (operator.eq, operator.ne):
        raise EmulatorError("pointers cannot be compared; compare the argument with None")
    if op not in (operator.add, operator.sub) or (op is operator.sub and not pointer_first):
        raise EmulatorError(f"{op.__name__} on a pointer")
    other = as_tensor(other)
    if other.buffer is not None or not other.dtype.is_int():
        raise EmulatorError(f"a pointer takes integer offsets, not {other.dtype}")
    layout = broadcast_pair(pointer, other, "pointer arithmetic")[1]
    return Tensor(op(pointer.data, other.data.astype(np.int64)), pointer.dtype, layout, pointer.buffer)
