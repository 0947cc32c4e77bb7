"""Corrections to Triton's interpreter, so that kernels run right on a CPU with TRITON_INTERPRET=1.

As it stands in triton 3.6.0 to 3.9.0 the interpreter multiplies bf16 by its bit patterns, truncates fp32 -> bf16,
rounds a few per cent of fp8 conversions wrongly, lacks e4m3fnuz in places, has neither inline assembly nor extern
functions; that of 3.6.0 fails on numpy 2.4, that of 3.9.0 on masks that a scalar condition is part of. `correct()`
replaces those parts in place; each assembly step gets a reference, found by its text, and each extern function one
found by its symbol.
"""

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

from .formats import ELEMENTS

_TORCH = {element.mangled: element.dtype for element in ELEMENTS.values()}
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
_SIGNED = {1: np.uint8, 2: np.int16, 4: np.int32, 8: np.int64}


def _as_torch(data: np.ndarray, dtype: tl.dtype) -> torch.Tensor:
    size = data.dtype.itemsize
    bits = torch.from_numpy(np.ascontiguousarray(data).view(_SIGNED[size]))
    return bits.view(_TORCH[dtype.name])


def _convert_float(data: np.ndarray, source: tl.dtype, target: tl.dtype, rounding_mode: Any) -> np.ndarray:
    """Bits of `data` in `target`, rounded to nearest even; fp8 saturates as the hardware's conversions do."""
    values = _as_torch(data, source)
    wanted = _TORCH[target.name]
    if wanted.itemsize == 1:
        values = values.float()
        limit = torch.finfo(wanted).max
        values = torch.where(values.isnan(), values, values.clamp(-limit, limit))
    result = values.to(wanted)
    return result.view(_BITS[wanted.itemsize]).numpy().view(_UNSIGNED[wanted.itemsize]).reshape(data.shape)


def _as_float32(handle: Any) -> np.ndarray:
    if handle.dtype.scalar.is_floating():
        return _as_torch(handle.data, handle.dtype.scalar).float().numpy()
    return np.asarray(handle.data.astype(np.float32))


def _create_dot(self: Any, a: Any, b: Any, d: Any, input_precision: Any, max_num_imprecise_acc: Any) -> Any:
    """Operands exactly as stored, products and sums in fp32."""
    product = np.matmul(_as_float32(a), _as_float32(b))
    return interpreter.TensorHandle(product.astype(d.data.dtype) + d.data, d.dtype.scalar)


def _pair_column(pairs: np.ndarray, shift: int) -> np.ndarray:
    bytes_ = ((pairs.view(np.uint16) >> shift) & 0xFF).astype(np.uint8)
    return torch.from_numpy(bytes_).view(torch.float8_e4m3fn).to(torch.float16).numpy()


_PAIR = "{ .reg .b32 t; .reg .b16 a, b; prmt.b32 t, $1, 0, 0x3120; mov.b32 {a, b}, t; cvt.rn.f16x2.e4m3x2 $0, %s; }"
REFERENCES: dict[str, Callable[..., np.ndarray]] = {
    "rcp.approx.ftz.f32 $0, $1;": lambda x: np.float32(1.0) / x,
    _PAIR % "a": lambda pairs: _pair_column(pairs, 0),
    _PAIR % "b": lambda pairs: _pair_column(pairs, 8),
}
SYMBOLS: dict[str, Callable[..., np.ndarray]] = {"llvm.amdgcn.rcp.f32": lambda x: np.float32(1.0) / x}


class _AsmResult:
    def __init__(self, handle: Any):
        self.handle = handle

    def get_result(self, index: int) -> Any:
        return self.handle


def _create_inline_asm(self: Any, asm: str, constraints: str, values: Any, types: Any, is_pure: bool, pack: int) -> Any:
    reference = REFERENCES.get(" ".join(asm.split()))
    if reference is None:
        raise NotImplementedError(f"no reference of this assembly: add one to REFERENCES in {__name__}: {asm!r}")
    return _AsmResult(interpreter.TensorHandle(reference(*[value.data for value in values]), types[0].scalar))


def _bool(mask: Any) -> Any:
    """A mask as booleans: a scalar condition in it makes it int32 here, which loads and stores of 3.9.0 refuse."""
    return mask if mask.data.dtype == np.bool_ else interpreter.TensorHandle(mask.data.astype(np.bool_), mask.dtype)


def _bool_mask_second(create_masked_load: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, ptrs, mask, *rest, **named: create_masked_load(self, ptrs, _bool(mask), *rest, **named)


def _bool_mask_third(create_masked_store: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, ptrs, value, mask, *rest: create_masked_store(self, ptrs, value, _bool(mask), *rest)


def _create_extern(self: Any, library: str, path: str, symbol: str, values: Any, kind: Any, is_pure: bool) -> Any:
    reference = SYMBOLS.get(symbol)
    if reference is None:
        raise NotImplementedError(f"no reference of this symbol: add one to SYMBOLS in {__name__}: {symbol!r}")
    return interpreter.TensorHandle(reference(*[value.data for value in values]), kind.scalar)


class _Extern:
    """A file's own extern function, called in the interpreter as those of the language are."""

    def __init__(self, function: Callable[..., Any]):
        self.function = function

    def __call__(self, *args: Any) -> Any:
        return self.function(*args, _semantic=TritonSemantic(interpreter.interpreter_builder))


def _bind_externs(names: dict[str, Any]) -> None:
    """Functions that a kernel's module makes with `@tl.core.extern`: the interpreter knows the language's only."""
    for name, value in names.items():
        if tl.core.is_builtin(value) and value.__module__ == names["__name__"]:
            names[name] = _Extern(value)


def _with_fnuz(patch_lang_core: Callable[..., Any]) -> Callable[..., Any]:
    """The interpreter's own dtype -> type table lacks e4m3fnuz."""

    def patched(lang: Any, *args: Any) -> Any:
        result = patch_lang_core(lang, *args)
        to_ir = lang.dtype.to_ir
        lang.dtype.to_ir = lambda self, builder: self if self.name in ("fp8e4b8", "fp8e5b16") else to_ir(self, builder)
        return result

    return patched


def _whole_number(convert: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """The interpreter holds an int64 argument from 2^31 to 2^32 in 32 bits: sums wrap, a store writes half of it."""

    def converted(argument: Any) -> Any:
        result = convert(argument)
        if isinstance(argument, int) and result.dtype == tl.int64:
            result.handle.data = result.handle.data.astype(np.int64)
        return result

    return converted


def _with_index(patch_lang_tensor: Callable[..., Any]) -> Callable[..., Any]:
    """numpy 2.4 makes no number of an array of one element, which scalars are in 3.6.0."""

    def patched(tensor: Any, scope: Any) -> None:
        patch_lang_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    return patched


def _quiet(min_max: Callable[..., Any]) -> Callable[..., Any]:
    """A maximum of nothing but NaN is NaN, as the hardware's is, and no reason for numpy to warn."""
    quiet = {np.nanmax: np.fmax.reduce, np.nanmin: np.fmin.reduce}

    def patched(self: Any, input: Any, val_reduce_op: Any, idx_reduce_op: Any = None) -> Any:
        return min_max(self, input, quiet.get(val_reduce_op, val_reduce_op), idx_reduce_op)

    return patched


class _NoScope:
    """What a repeated patch returns: nothing to restore."""

    def restore(self) -> None:
        pass


_patched: set[frozenset[int]] = set()  # language modules that the running launch has patched already


def _patch_once(patch_lang: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """The interpreter patches the language anew on every call of a helper; once a launch is enough."""
    modules: dict[int, frozenset[int]] = {}

    def patched(fn: Any) -> Any:
        key = id(fn.__globals__)
        found = modules.get(key)
        if found is None:
            found = frozenset(id(value) for value in fn.__globals__.values() if value is tl or value is tl.core)
            modules[key] = found
            _bind_externs(fn.__globals__)
        if found in _patched:
            return _NoScope()
        _patched.add(found)
        return patch_lang(fn)

    return patched


_one_at_a_time = threading.RLock()  # the interpreter keeps the grid, the program and the patched language in globals


def _launch(run: Callable[..., Any]) -> Callable[..., Any]:
    """One launch at a time, and log2(0) = -inf and -inf - x are what the kernels mean, not faults."""

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        with _one_at_a_time, np.errstate(all="ignore"):
            _patched.clear()
            return run(*args, **kwargs)

    return wrapped


def correct() -> None:
    """Replace the faulty parts, once for the process."""
    if getattr(interpreter, "_corrected_for_mla", False):
        return
    interpreter._corrected_for_mla = True
    interpreter._convert_float = _convert_float
    builder = interpreter.InterpreterBuilder
    builder.create_dot = _create_dot
    builder.create_inline_asm = _create_inline_asm
    builder.create_masked_load = _bool_mask_second(builder.create_masked_load)
    builder.create_masked_store = _bool_mask_third(builder.create_masked_store)
    builder.create_extern_elementwise = _create_extern
    interpreter._implicit_cvt = _whole_number(interpreter._implicit_cvt)
    interpreter.ReduceOps.min_max = _quiet(interpreter.ReduceOps.min_max)
    interpreter._patch_lang_core = _with_fnuz(interpreter._patch_lang_core)
    interpreter._patch_lang_tensor = _with_index(interpreter._patch_lang_tensor)
    interpreter._patch_lang = _patch_once(interpreter._patch_lang)
    interpreter.InterpretedFunction.run = _launch(interpreter.InterpretedFunction.run)
