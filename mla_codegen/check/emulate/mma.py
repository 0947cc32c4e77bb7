"""Matrix products: operands exact in their own element type, float32 (or int32) accumulators.

The order of the additions is the CPU library's, not the hardware's, so results agree within rounding. Each
family's rules about layouts, element types and shapes are checked: what the compiler would refuse is an error
here.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import triton.language.core as tl
from numpy.typing import NDArray

from mla_codegen.check.emulate import dtypes, layouts
from mla_codegen.check.emulate.errors import EmulatorError
from mla_codegen.check.emulate.layouts import AMDMFMALayout, DotOperandLayout, NVMMADistributedLayout, NVMMASharedLayout
from mla_codegen.check.emulate.shared import Descriptor, Reader
from mla_codegen.check.emulate.state import current
from mla_codegen.check.emulate.tensor import AUTO, Tensor

_MFMA_FP8 = {3: {"fp8e4b8", "fp8e5b16"}, 4: {"fp8e4nv", "fp8e5"}}
_TARGET = {3: "gfx942", 4: "gfx950"}


def product(a: NDArray[Any], a_type: Any, b: NDArray[Any], b_type: Any, acc: NDArray[Any] | None) -> NDArray[Any]:
    """a @ b (+ acc) of stored operands; integers accumulate in int32."""
    if a_type.is_int():
        result: NDArray[Any] = np.matmul(a.astype(np.int32), b.astype(np.int32))
    else:
        result = matmul(dtypes.to_f32(a, a_type), dtypes.to_f32(b, b_type))
    return result if acc is None else result + acc


def matmul(a: NDArray[Any], b: NDArray[Any]) -> NDArray[Any]:
    """Float product by torch, whose thread count the launch holds at one: numpy's BLAS would spin on every core."""
    left, right = (torch.from_numpy(np.ascontiguousarray(x) if 0 in x.strides else x) for x in (a, b))
    product: NDArray[Any] = torch.matmul(left, right).numpy()
    return product


def _shapes(a: Any, b: Any, acc: Any, what: str) -> None:
    m, k = a.shape[-2:]
    if b.shape[-2] != k or tuple(acc.shape[-2:]) != (m, b.shape[-1]):
        raise EmulatorError(
            f"{what} of {list(a.shape)} and {list(b.shape)} into {list(acc.shape)}: want [M, K], [K, N], [M, N]"
        )


def _operands(a: Any, b: Any, acc: Any, what: str) -> Any:
    """Both operands in DotOperandLayout of the accumulator's layout; returns that layout."""
    for name, x in (("a", a), ("b", b), ("the accumulator", acc)):
        if not isinstance(x, Tensor):
            raise EmulatorError(f"{what}: {name} is not a tensor but {x!r}")
    parent = acc.layout
    for index, (name, x) in enumerate((("a", a), ("b", b))):
        layout = x.layout
        if not isinstance(layout, DotOperandLayout) or layout.operand_index != index:
            raise EmulatorError(
                f"{what}: {name} has {layout}", f"it must have DotOperandLayout({index}, accumulator's layout, k_width)"
            )
        if layouts.intern(layout.parent) is not parent:
            raise EmulatorError(f"{what}: {name} is an operand of {layout.parent}, the accumulator has {parent}")
    if a.layout.k_width != b.layout.k_width:
        raise EmulatorError(f"{what}: k_width {a.layout.k_width} of a against {b.layout.k_width} of b")
    _shapes(a, b, acc, what)
    return parent


def mma_v2(a: Any, b: Any, acc: Any, input_precision: Any = None) -> Tensor:
    """mma.sync of sm_80 and later."""
    parent = _operands(a, b, acc, "mma_v2")
    if not isinstance(parent, NVMMADistributedLayout) or list(parent.version) != [2, 0]:
        raise EmulatorError(
            f"mma_v2 accumulates in {parent}", "the layout must be NVMMADistributedLayout of version [2, 0]"
        )
    if a.dtype != b.dtype:
        raise EmulatorError(f"mma_v2 of {a.dtype} and {b.dtype}: both operands must have one type")
    if a.shape[1] * a.dtype.primitive_bitwidth % 256:
        raise EmulatorError(f"mma_v2 of {a.dtype} with K = {a.shape[1]}: K must be a multiple of 32 bytes")
    return Tensor(product(a.data, a.dtype, b.data, b.dtype, acc.data), acc.dtype, parent)


def mfma(a: Any, b: Any, acc: Any) -> Tensor:
    """MFMA of gfx942 (layout version 3) and gfx950 (version 4), each with its own fp8 types."""
    parent = _mfma_layout(a, b, acc, "mfma")
    for x in (a, b):
        if x.dtype.is_fp8() and x.dtype.name not in _MFMA_FP8[parent.version]:
            raise EmulatorError(
                f"mfma on {_TARGET[parent.version]} with {x.dtype} operands, which it lacks",
                "gfx942 has fp8e4b8 (e4m3fnuz), gfx950 fp8e4nv (e4m3fn); the compiler decodes in software or refuses",
            )
    if a.dtype != b.dtype and not (a.dtype.is_fp8() and b.dtype.is_fp8()):
        raise EmulatorError(f"mfma of {a.dtype} and {b.dtype}: both operands must have one type")
    return Tensor(product(a.data, a.dtype, b.data, b.dtype, acc.data), acc.dtype, parent)


def _mfma_layout(a: Any, b: Any, acc: Any, what: str) -> Any:
    parent = _operands(a, b, acc, what)
    if not isinstance(parent, AMDMFMALayout) or parent.version not in _MFMA_FP8:
        raise EmulatorError(f"{what} accumulates in {parent}", "the layout must be AMDMFMALayout of version 3 or 4")
    if a.shape[1] % parent.instr_shape[2]:
        raise EmulatorError(f"{what} with K = {a.shape[1]}, no multiple of the instruction's {parent.instr_shape[2]}")
    return parent


def mfma_scaled(a: Any, a_scale: Any, a_format: Any, b: Any, b_scale: Any, b_format: Any, acc: Any) -> Tensor:
    """gfx950's scaled product: groups of 32 along K carry an e8m0 scale (None: 1)."""
    a_format, b_format = (getattr(form, "value", form) for form in (a_format, b_format))
    for name, x in (("a", a), ("b", b)):
        if not isinstance(x, Tensor) or not isinstance(x.layout, DotOperandLayout):
            raise EmulatorError(f"mfma_scaled: {name} must have a DotOperandLayout")
    parent = acc.layout
    if not isinstance(parent, AMDMFMALayout) or parent.version != 4:
        raise EmulatorError(
            f"mfma_scaled accumulates in {parent}", "the layout must be AMDMFMALayout of version 4 (gfx950)"
        )
    left = _scaled(a, a_format, a_scale, 1)
    right = _scaled(b, b_format, b_scale, 0)
    if left.shape[1] != right.shape[0]:
        raise EmulatorError(f"mfma_scaled of K = {left.shape[1]} and K = {right.shape[0]}")
    return Tensor(matmul(left, right) + acc.data, acc.dtype, parent)


_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


def _scaled(x: Tensor, form: str, scale: Any, k_axis: int) -> NDArray[Any]:
    wanted = {"e4m3": "fp8e4nv", "e5m2": "fp8e5", "e2m1": "uint8"}.get(form)
    if wanted is None:
        raise EmulatorError(f"mfma_scaled format {form!r}: e4m3, e5m2 and e2m1 exist")
    if x.dtype.name not in (wanted, "uint8"):
        raise EmulatorError(f"mfma_scaled: an operand of format {form} has type {x.dtype}")
    if form == "e2m1":
        pair = np.stack([_E2M1.take(x.data & 0xF), _E2M1.take(x.data >> 4)], axis=k_axis + 1)
        shape = list(x.shape)
        shape[k_axis] *= 2
        values = pair.reshape(shape)
    else:
        values = dtypes.to_f32(x.data, tl.float8e4nv if form == "e4m3" else tl.float8e5)
    scale = getattr(scale, "value", scale)
    if scale is None:
        return values
    bits = np.asarray(scale.data if isinstance(scale, Tensor) else np.uint8(scale))
    factor = np.where(bits == 255, np.float32("nan"), np.exp2(bits.astype(np.float32) - np.float32(127)))
    if factor.ndim == 0:
        return values * factor
    along_k = np.repeat(factor, 32, axis=1)  # scales are [M, K / 32] and [N, K / 32]
    if along_k.shape != (values.shape if k_axis == 1 else values.shape[::-1]):
        raise EmulatorError(
            f"mfma_scaled: scales of shape {list(factor.shape)} for an operand of shape {list(values.shape)}"
        )
    return values * (along_k if k_axis == 1 else along_k.T)


class Accumulator:
    """The result of an asynchronous warpgroup_mma: no value until warpgroup_mma_wait."""

    def __init__(self, tensor: Tensor, readers: list[Reader]) -> None:
        self.tensor = tensor
        self.readers = readers
        self.shape, self.dtype, self.layout = tensor.shape, tensor.dtype, tensor.layout

    def __getattr__(self, name: str) -> Any:
        raise EmulatorError(
            f"{name!r} of the accumulator of an asynchronous warpgroup_mma",
            "call warpgroup_mma_wait(0, deps=[...]) first",
        )


def _unusable(self: Accumulator, *_: Any) -> Any:
    raise EmulatorError(
        "the accumulator of an asynchronous warpgroup_mma is used", "call warpgroup_mma_wait(0, deps=[...]) first"
    )


for _name in ("add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "getitem", "neg", "lt", "gt", "le", "ge"):
    setattr(Accumulator, f"__{_name}__", _unusable)


def warpgroup_mma(
    a: Any,
    b: Any,
    acc: Any,
    *,
    use_acc: Any = True,
    precision: Any = None,
    max_num_imprecise_acc: Any = None,
    is_async: Any = False,
) -> Any:
    """wgmma of sm_90: b in shared memory, a in shared memory or registers, M a multiple of 64."""
    start = acc.tensor if isinstance(acc, Accumulator) else acc
    parent = start.layout
    if not isinstance(parent, NVMMADistributedLayout) or list(parent.version) != [3, 0]:
        raise EmulatorError(f"warpgroup_mma accumulates in {parent}", "use NVMMADistributedLayout of version [3, 0]")
    _shapes(a, b, start, "warpgroup_mma")
    if a.dtype != b.dtype:
        raise EmulatorError(f"warpgroup_mma of {a.dtype} and {b.dtype}: both operands must have one type")
    size = dtypes.storage_type(a.dtype).itemsize
    (m, n), k = start.shape, a.shape[1]
    if m % 64 or n % parent.instr_shape[1] or k * size % 32 or parent.instr_shape[2] * size != 32:
        raise EmulatorError(
            f"warpgroup_mma of M {m}, N {n}, K {k} {a.dtype} with instruction {list(parent.instr_shape)}",
            "M is a multiple of 64, N of the instruction's N, and the instruction's K is 32 bytes",
        )
    regions = []
    for name, x, k_axis in (("a", a, 1), ("b", b, 0)):
        if isinstance(x, Descriptor):
            if not isinstance(x.layout, NVMMASharedLayout):
                raise EmulatorError(f"warpgroup_mma: {name} lies in {x.layout}", "wgmma reads NVMMASharedLayout only")
            if size == 1 and x.strides[k_axis] != 1:
                raise EmulatorError(f"warpgroup_mma: {name} is 8 bits wide and its K dimension is not contiguous")
            x.check_readable(f"warpgroup_mma operand {name},")
            x.read_by_async_proxy(f"warpgroup_mma operand {name}")
            regions.append(x)
        elif name == "b":
            raise EmulatorError("warpgroup_mma: b must lie in shared memory")
        elif not isinstance(x.layout, DotOperandLayout) or layouts.intern(x.layout.parent) is not parent:
            raise EmulatorError(
                f"warpgroup_mma: a has {x.layout}", "in registers it wants DotOperandLayout(0, accumulator's layout)"
            )
    left, right = (x.view() if isinstance(x, Descriptor) else x.data for x in (a, b))
    base = start.data if bool(getattr(use_acc, "value", use_acc)) else None
    result = Tensor(product(left, a.dtype, right, b.dtype, base), start.dtype, parent)
    if not getattr(is_async, "value", is_async):
        warpgroup_mma_wait(0, deps=[start])
        return result
    readers = [Reader(region, "an asynchronous warpgroup_mma") for region in regions]
    token = Accumulator(result, readers)
    current().products.append(token)
    return token


def warpgroup_mma_wait(num_outstanding: Any = 0, deps: Any = None) -> Any:
    """Finish the oldest products until `num_outstanding` are left; returns the values of `deps`."""
    if deps is None:
        raise EmulatorError("warpgroup_mma_wait without deps", "pass the accumulators that it waits for: deps=[acc]")
    running = current().products
    while len(running) > getattr(num_outstanding, "value", num_outstanding):
        for reader in running.pop(0).readers:
            reader.finish()
    values = [
        dep.tensor if isinstance(dep, Accumulator) and not any(dep is token for token in running) else dep
        for dep in deps
    ]
    return values[0] if len(values) == 1 else tuple(values)


def warpgroup_mma_init(value: Tensor) -> Accumulator:
    return Accumulator(value, [])


def dot(
    a: Any,
    b: Any,
    acc: Any = None,
    input_precision: Any = None,
    allow_tf32: Any = None,
    out_dtype: Any = tl.float32,
    **_: Any,
) -> Tensor:
    """tl.dot: any layout; operands of one type, or two fp8 types."""
    if a.dtype != b.dtype and not (a.dtype.is_fp8() and b.dtype.is_fp8()):
        raise EmulatorError(f"dot of {a.dtype} and {b.dtype}: both operands must have one type")
    if a.shape[-1] != b.shape[-2]:
        raise EmulatorError(f"dot of {list(a.shape)} and {list(b.shape)}")
    kind = tl.int32 if a.dtype.is_int() else getattr(out_dtype, "value", out_dtype)
    base = None if acc is None else acc.data
    return Tensor(product(a.data, a.dtype, b.data, b.dtype, base), kind if acc is None else acc.dtype, AUTO)


def dot_fma(a: Any, b: Any, acc: Any) -> Tensor:
    parent = _operands(a, b, acc, "dot_fma")
    return Tensor(product(a.data, a.dtype, b.data, b.dtype, acc.data), acc.dtype, parent)
