"""Conversions to and from the narrow float formats, against their definitions."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from mla_codegen.check.emulate import floats

FORMATS = {"fp8e4nv": (7, 448.0, 0x7F), "fp8e4b8": (8, 240.0, 0x80)}  # exponent bias, largest, a NaN byte
ALL_BF16 = np.arange(65536, dtype=np.uint16)


def value(byte: int, name: str) -> float:
    """An e4m3 byte by its format's definition."""
    bias = FORMATS[name][0]
    if (name == "fp8e4nv" and byte & 0x7F == 0x7F) or (name == "fp8e4b8" and byte == 0x80):
        return math.nan
    sign, exponent, fraction = -1.0 if byte & 0x80 else 1.0, (byte >> 3) & 15, byte & 7
    return sign * (fraction / 8 * 2.0 ** (1 - bias) if exponent == 0 else (1 + fraction / 8) * 2.0 ** (exponent - bias))


def nearest(x: np.ndarray, name: str) -> np.ndarray:
    """Positive byte nearest to |x| by search over the table, ties to the even byte, saturated."""
    table = np.array([value(b, name) for b in range(0x7F if name == "fp8e4nv" else 0x80)])
    size = np.minimum(np.abs(x.astype(np.float64)), FORMATS[name][1])
    above = np.clip(np.searchsorted(table, size), 1, len(table) - 1)
    down, up = size - table[above - 1], table[above] - size
    return np.where((up < down) | ((up == down) & (above % 2 == 0)), above, above - 1)


@pytest.mark.parametrize("name", FORMATS)
def test_all_bytes_decode(name: str) -> None:
    want = np.array([value(b, name) for b in range(256)], np.float32)
    every = np.arange(256, dtype=np.uint8)
    np.testing.assert_array_equal(floats.fp8_to_f32(every, name), want)
    np.testing.assert_array_equal(floats.fp8_to_f16(every, name), want.astype(np.float16))


@pytest.mark.parametrize("name", FORMATS)
def test_all_bf16_values_encode(name: str) -> None:
    x = floats.bf16_to_f32(ALL_BF16)
    got = floats.f32_to_fp8(x, name)
    real = ~np.isnan(x)
    want = nearest(np.nan_to_num(x, nan=0.0, posinf=1e9, neginf=-1e9), name)
    np.testing.assert_array_equal((got & 0x7F)[real], want[real])
    keeps_sign = real & ((want != 0) if name == "fp8e4b8" else real)  # e4m3fnuz has no minus zero
    np.testing.assert_array_equal((got >> 7)[keeps_sign], np.signbit(x)[keeps_sign])
    assert set(got[~real]) == {FORMATS[name][2]}


@pytest.mark.parametrize("name", FORMATS)
def test_encode_rounds_float32_between_values(name: str) -> None:
    largest = FORMATS[name][1]
    x = np.random.default_rng(0).uniform(-1.2 * largest, 1.2 * largest, 20000).astype(np.float32)
    x[:10000] *= np.float32(2.0) ** np.random.default_rng(1).integers(-20, 0, 10000).astype(np.float32)
    np.testing.assert_array_equal(floats.f32_to_fp8(x, name) & 0x7F, nearest(x, name))


@pytest.mark.parametrize("name", floats.FP8)
def test_encode_inverts_decode(name: str) -> None:
    every = np.arange(256, dtype=np.uint8)
    x = floats.fp8_to_f32(every, name)
    finite = np.isfinite(x)
    np.testing.assert_array_equal(floats.f32_to_fp8(x, name)[finite], every[finite])


def test_bf16_equals_torch() -> None:
    x = np.random.default_rng(0).integers(0, 2**32, 100000, dtype=np.uint64).astype(np.uint32).view(np.float32)
    want = torch.from_numpy(x).to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
    real = ~np.isnan(x)
    got = floats.f32_to_bf16(x)
    np.testing.assert_array_equal(got[real], want[real])
    assert np.isnan(floats.bf16_to_f32(got[~real])).all()
