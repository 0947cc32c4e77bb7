"""Exact conversions between float32 and the 8- and 16-bit float formats, over numpy arrays of bits.

bf16 travels as uint16 bits and every fp8 format as uint8 bits, because numpy has neither. Narrow to wide is a table of
256 (or a shift); wide to narrow rounds to nearest even and saturates as the hardware's conversions do.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from mla_codegen.runtime.formats import ELEMENTS

FP8: dict[str, torch.dtype] = {element.mangled: element.dtype for element in ELEMENTS.values() if element.fp8}

_LARGEST = {name: np.float32(torch.finfo(kind).max) for name, kind in FP8.items()}
_NAN = {"fp8e4nv": 0x7F, "fp8e4b8": 0x80, "fp8e5": 0x7F, "fp8e5b16": 0x80}
_F32 = {name: torch.arange(256, dtype=torch.uint8).view(kind).float().numpy() for name, kind in FP8.items()}
_F16 = {name: table.astype(np.float16) for name, table in _F32.items()}


def fp8_to_f32(bits: NDArray[np.uint8], name: str) -> NDArray[np.float32]:
    """Values of fp8 bytes; `name` is Triton's name of the format (a key of FP8)."""
    values: NDArray[np.float32] = _F32[name].take(bits)
    return values


def fp8_to_f16(bits: NDArray[np.uint8], name: str) -> NDArray[np.float16]:
    """The same in float16, which holds every fp8 value exactly."""
    values: NDArray[np.float16] = _F16[name].take(bits)
    return values


def f32_to_fp8(values: NDArray[np.float32], name: str) -> NDArray[np.uint8]:
    """Round to nearest even; what is too large (infinities too) becomes the largest finite value, NaN stays NaN.

    This is `cvt.rn.satfinite` on NVIDIA, and on AMD the conversion under MODE.FP16_OVFL = 1, which Triton sets.
    """
    values = np.asarray(values, np.float32)
    largest = _LARGEST[name]
    clipped = torch.from_numpy(np.ascontiguousarray(np.clip(values, -largest, largest)))
    bits: NDArray[np.uint8] = clipped.to(FP8[name]).view(torch.uint8).numpy().reshape(values.shape)
    return np.where(np.isnan(values), np.uint8(_NAN[name]), bits)


def bf16_to_f32(bits: NDArray[np.uint16]) -> NDArray[np.float32]:
    """Values of bf16 bits."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def f32_to_bf16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Round to nearest even to bf16 bits; NaN becomes the canonical 0x7fff."""
    raw = np.asarray(values, np.float32).view(np.uint32)
    rounded = (raw + np.uint32(0x7FFF) + ((raw >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    return np.where(np.isnan(values), np.uint16(0x7FFF), rounded.astype(np.uint16))
