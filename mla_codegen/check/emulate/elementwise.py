"""Elementwise functions: select, extrema, math, casts, inline assembly and extern functions."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import triton.language.core as tl

from mla_codegen.check.emulate import asm as assembly
from mla_codegen.check.emulate import dtypes, externs
from mla_codegen.check.emulate.errors import EmulatorError
from mla_codegen.check.emulate.lang import plain
from mla_codegen.check.emulate.tensor import Tensor, as_tensor, broadcast_pair, coerce

_erf = np.vectorize(math.erf, otypes=[np.float32])


def _one_tensor(x: Any, y: Any) -> tuple[Any, Any]:
    """At least one of two operands as a tensor: numbers beside a tensor stay weak."""
    x, y = plain(x), plain(y)
    return (x, y) if isinstance(x, Tensor) or isinstance(y, Tensor) else (as_tensor(x), y)


def where(condition: Any, x: Any, y: Any) -> Tensor:
    condition = as_tensor(condition)
    if condition.dtype.name != "int1":
        condition = condition != 0
    if any(isinstance(side, Tensor) and side.buffer is not None for side in (x, y)):
        raise EmulatorError("where over pointers is not modelled", "select the offset instead")
    a, b, kind, layout = coerce(*_one_tensor(x, y), "where")
    shape = np.broadcast_shapes(np.shape(a), np.shape(b))
    probe = Tensor(np.broadcast_to(np.int8(0), shape), tl.int8, layout)
    layout = broadcast_pair(condition, probe, "where's condition and values")[1]
    return Tensor(np.where(condition.data, a, b), kind, layout)


def _extreme(float_op: Any, nan_op: Any) -> Callable[..., Tensor]:
    def apply(x: Any, y: Any, propagate_nan: Any = tl.PropagateNan.NONE) -> Tensor:
        a, b, kind, layout = coerce(*_one_tensor(x, y), float_op.__name__)
        if kind.name == "bf16":
            kind, a, b = tl.float32, dtypes.to_f32(np.asarray(a), kind), dtypes.to_f32(np.asarray(b), kind)
            return Tensor((nan_op if propagate_nan == tl.PropagateNan.ALL else float_op)(a, b), kind, layout).to(
                tl.bfloat16
            )
        return Tensor((nan_op if propagate_nan == tl.PropagateNan.ALL else float_op)(a, b), kind, layout)

    return apply


maximum = _extreme(np.fmax, np.maximum)
minimum = _extreme(np.fmin, np.minimum)


def _unary(name: str, op: Callable[[Any], Any]) -> Callable[[Any], Tensor]:
    def apply(x: Any) -> Tensor:
        x = as_tensor(x)
        if x.dtype.name not in ("fp32", "fp64"):
            raise EmulatorError(f"{name} of {x.dtype}", "math functions take fp32: convert with .to(gl.float32)")
        return x.with_data(op(x.data).astype(x.data.dtype, copy=False))

    apply.__name__ = name
    return apply


exp = _unary("exp", np.exp)
exp2 = _unary("exp2", np.exp2)
log = _unary("log", np.log)
log2 = _unary("log2", np.log2)
sqrt = _unary("sqrt", np.sqrt)
sqrt_rn = _unary("sqrt_rn", np.sqrt)
rsqrt = _unary("rsqrt", lambda x: np.float32(1) / np.sqrt(x))
sin = _unary("sin", np.sin)
cos = _unary("cos", np.cos)
floor = _unary("floor", np.floor)
ceil = _unary("ceil", np.ceil)
erf = _unary("erf", _erf)


def abs(x: Any) -> Tensor:
    x = as_tensor(x)
    if x.dtype.name == "bf16":
        return x.with_data(x.data & np.uint16(0x7FFF))
    if x.dtype.is_fp8():
        return x.to(tl.float32).with_data(np.abs(x.to(tl.float32).data)).to(x.dtype)
    return x.with_data(np.abs(x.data))


def fma(x: Any, y: Any, z: Any) -> Tensor:
    x = as_tensor(x)
    if x.dtype.name != "fp32":
        return x * y + z
    wide = [as_tensor(v).to(tl.float64) if isinstance(v, Tensor) else v for v in (x, y, z)]
    return (wide[0] * wide[1] + wide[2]).to(tl.float32)


def fdiv(x: Any, y: Any, ieee_rounding: Any = False) -> Tensor:
    return as_tensor(x) / y


def div_rn(x: Any, y: Any) -> Tensor:
    return as_tensor(x) / y


def umulhi(x: Any, y: Any) -> Tensor:
    x, y = as_tensor(x), as_tensor(y)
    product = x.data.astype(np.uint32).astype(np.uint64) * y.data.astype(np.uint32).astype(np.uint64)
    layout = broadcast_pair(x, y, "umulhi")[1]
    return Tensor((product >> np.uint64(32)).astype(dtypes.storage_type(x.dtype)), x.dtype, layout)


def add(x: Any, y: Any, sanitize_overflow: Any = True) -> Tensor:
    return as_tensor(x) + y


def sub(x: Any, y: Any, sanitize_overflow: Any = True) -> Tensor:
    return as_tensor(x) - y


def mul(x: Any, y: Any, sanitize_overflow: Any = True) -> Tensor:
    return as_tensor(x) * y


def cast(input: Any, dtype: Any, fp_downcast_rounding: Any = None, bitcast: Any = False) -> Tensor:
    return as_tensor(input).to(plain(dtype), plain(fp_downcast_rounding), plain(bitcast))


def _common_shape(inputs: list[Tensor], what: str) -> tuple[tuple[int, ...], Any]:
    """Shape and layout that all operands broadcast to."""
    shape, layout = inputs[0].shape, inputs[0].layout
    for other in inputs[1:]:
        merged = Tensor(np.broadcast_to(np.int8(0), shape), tl.int8, layout)
        shape, layout = broadcast_pair(merged, other, what)
    return shape, layout


def extern(fn: Callable[..., Any]) -> Callable[..., Any]:
    """`tl.core.extern`: the function is called in a kernel as it stands."""
    return fn


def extern_elementwise(
    lib_name: Any, lib_path: Any, args: Any, arg_type_symbol_dict: Any, is_pure: Any = True, _semantic: Any = None
) -> Tensor:
    """Runs the reference of the symbol that the arguments' types choose (`emulate.externs`)."""
    inputs = [as_tensor(arg) for arg in args]
    kinds = tuple(x.dtype for x in inputs)
    if kinds not in arg_type_symbol_dict:
        known = "; ".join(str([str(kind) for kind in key]) for key in arg_type_symbol_dict)
        raise EmulatorError(f"an extern function of {known} is called with {[str(kind) for kind in kinds]}")
    symbol, kind = arg_type_symbol_dict[kinds]
    if symbol not in externs.REFERENCES:
        raise EmulatorError(
            f"no reference for the symbol {symbol!r}", f"add one with @reference(...) in {externs.__name__}"
        )
    shape, layout = _common_shape(inputs, f"the arguments of {symbol}")
    result = externs.REFERENCES[symbol](*[np.broadcast_to(x.data, shape) for x in inputs])
    return Tensor(result.astype(dtypes.storage_type(kind), copy=False), kind, layout)


def inline_asm_elementwise(
    asm: Any, constraints: Any, args: Any, dtype: Any, is_pure: Any = True, pack: Any = 1
) -> Any:
    """Runs the reference of the assembly (`mla_codegen.check.emulate.asm`)."""
    text = plain(asm)
    inputs = [as_tensor(arg) for arg in args]
    shape, layout = _common_shape(inputs, "inline assembly operands")
    try:
        results = assembly.run(text, [np.broadcast_to(x.data, shape) for x in inputs])
    except assembly.UnknownAssembly as unknown:
        raise EmulatorError(str(unknown)) from None
    dtype = plain(dtype)
    kinds = [plain(kind) for kind in dtype] if isinstance(dtype, (tuple, list)) else [dtype]
    if len(results) != len(kinds):
        raise EmulatorError(
            f"the reference of {assembly.normalise(text)!r} gives {len(results)} outputs, "
            f"the call names {len(kinds)} types"
        )
    outputs = []
    for result, kind in zip(results, kinds, strict=True):
        want = dtypes.storage_type(kind)
        if result.dtype.itemsize != want.itemsize:
            raise EmulatorError(
                f"the reference of {assembly.normalise(text)!r} gives {result.dtype} where the call says {kind}"
            )
        outputs.append(Tensor(result if result.dtype == want else result.view(want), kind, layout))
    return tuple(outputs) if isinstance(dtype, (tuple, list)) else outputs[0]
