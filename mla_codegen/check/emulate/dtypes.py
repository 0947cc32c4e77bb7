"""Element types: Triton's own dtype objects, the numpy form that each is stored in, and Triton's promotion rules."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import torch
import triton.language.core as tl
from numpy.typing import NDArray

from mla_codegen.check.emulate import floats
from mla_codegen.check.emulate.errors import EmulatorError
from mla_codegen.runtime.formats import ELEMENTS

_INTEGERS = [f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)]
_STORAGE = {
    "int1": np.dtype(np.bool_),
    "fp16": np.dtype(np.float16),
    "fp32": np.dtype(np.float32),
    "fp64": np.dtype(np.float64),
    "bf16": np.dtype(np.uint16),
} | {name: np.dtype(name) for name in _INTEGERS}
_STORAGE |= {name: np.dtype(np.uint8) for name in floats.FP8}

FROM_TORCH = {element.dtype: getattr(tl, element.triton) for element in ELEMENTS.values()}
FROM_TORCH |= {torch.bool: tl.int1, **{getattr(torch, name): getattr(tl, name) for name in _INTEGERS}}


@lru_cache(maxsize=64)
def _storage(name: str) -> np.dtype[Any]:
    try:
        return _STORAGE[name]
    except KeyError:
        raise EmulatorError(f"element type {name} is not modelled") from None


def storage_type(dtype: Any) -> np.dtype[Any]:
    """The numpy type that holds `dtype`: bf16 as uint16 bits, fp8 as uint8 bits."""
    return _storage(dtype.name)


@lru_cache(maxsize=64)
def _poison(name: str) -> Any:
    kind = _storage(name)
    if kind == np.bool_:
        return kind.type(True)
    if name in floats.FP8:
        return kind.type(0x80 if name in ("fp8e4b8", "fp8e5b16") else 0x7F)
    if name == "bf16":
        return kind.type(0x7FFF)
    if kind.kind == "f":
        return kind.type("nan")
    return np.frombuffer(b"\x7f" * kind.itemsize, kind)[0]


def poison_value(dtype: Any) -> Any:
    """NaN of `dtype`, 0x7f bytes for integers: what undefined elements hold."""
    return _poison(dtype.name)


def to_f32(data: NDArray[Any], dtype: Any) -> NDArray[Any]:
    """Values of stored `data` as float32 (float64 stays)."""
    name = dtype.name
    if name == "fp32" or name == "fp64":
        return data
    if name == "bf16":
        return floats.bf16_to_f32(data)
    if name in floats.FP8:
        return floats.fp8_to_f32(data, name)
    return data.astype(np.float32)


def from_f32(values: NDArray[Any], dtype: Any) -> NDArray[Any]:
    """float32 (or float64) values in the stored form of the float type `dtype`."""
    name = dtype.name
    if name == "bf16":
        return floats.f32_to_bf16(values)
    if name in floats.FP8:
        return floats.f32_to_fp8(values.astype(np.float32, copy=False), name)
    return values.astype(_storage(name), copy=False)


def convert(data: NDArray[Any], source: Any, target: Any) -> NDArray[Any]:
    """Stored `data` of type `source` in the stored form of `target`, by value."""
    if source is target or source == target:
        return data
    if target.name == "int1":
        return (to_f32(data, source) if source.is_floating() else data) != 0
    if source.is_floating():
        values = to_f32(data, source)
        if target.is_floating():
            if source.name == "fp16" and target.name == "fp64":
                return data.astype(np.float64)
            return from_f32(values, target)
        limits = np.iinfo(_storage(target.name))  # as the hardware: saturate, NaN becomes 0
        wide = np.nan_to_num(np.trunc(values).astype(np.float64), nan=0.0, posinf=np.inf, neginf=-np.inf)
        inside = (wide >= limits.min) & (wide <= limits.max)
        exact = np.where(inside, wide, 0).astype(_storage(target.name))
        return np.where(inside, exact, np.where(wide < 0, limits.min, limits.max).astype(_storage(target.name)))
    if target.is_floating():
        if target.name in ("fp32", "fp64", "fp16"):
            return data.astype(_storage(target.name))
        return from_f32(data.astype(np.float32), target)
    return data.astype(_storage(target.name))


def bitcast(data: NDArray[Any], source: Any, target: Any) -> NDArray[Any]:
    """The same bits as another type of the same width."""
    if source.primitive_bitwidth != target.primitive_bitwidth:
        raise EmulatorError(
            f"bitcast from {source} ({source.primitive_bitwidth} bits) to {target} ({target.primitive_bitwidth} bits)"
        )
    return data.view(_storage(target.name))


def number_type(value: Any) -> Any:
    """The type that Triton gives a Python number."""
    if isinstance(value, bool):
        return tl.int1
    if isinstance(value, int):
        for kind, low, high in (
            (tl.int32, -(2**31), 2**31),
            (tl.uint32, 0, 2**32),
            (tl.int64, -(2**63), 2**63),
            (tl.uint64, 0, 2**64),
        ):
            if low <= value < high:
                return kind
        raise EmulatorError(f"integer {value} does not fit 64 bits")
    return tl.float32


def _rank(dtype: Any) -> int:
    return int(dtype.kind().value)


def promote(a: Any, a_number: bool, b: Any, b_number: bool, division: bool) -> Any:
    """Triton's type of `a op b`; a Python number does not widen an operand of its own kind or above."""
    if a == b and not (division and a.name in ("fp16", "bf16")):
        return a
    if a_number != b_number:
        number, tensor = (a, b) if a_number else (b, a)
        if _rank(number) <= _rank(tensor):
            return tl.float32 if division and tensor.name in ("fp16", "bf16") else tensor
    names = (a.name, b.name)
    for wide in ("fp64", "fp32"):
        if wide in names:
            return a if a.name == wide else b
    if "fp16" in names:
        return tl.float32 if division else tl.float16
    if "bf16" in names:
        return tl.float32 if division or names != ("bf16", "bf16") else tl.bfloat16
    if a.is_fp8() and b.is_fp8():
        return a if a == b else tl.float16
    if not (a.is_int() or a.name == "int1") or not (b.is_int() or b.name == "int1"):
        raise EmulatorError(f"no common type of {a} and {b}", "convert one operand with .to(...)")
    if a.int_signedness == b.int_signedness:
        return a if a.int_bitwidth > b.int_bitwidth else b
    if division:
        raise EmulatorError(f"division or remainder of {a} and {b}", "give both the same signedness")
    unsigned, signed = (a, b) if a.is_int_unsigned() else (b, a)
    return unsigned if unsigned.int_bitwidth >= signed.int_bitwidth else signed
