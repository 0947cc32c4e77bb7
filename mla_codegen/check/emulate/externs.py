"""References of the functions that kernels take from outside, by symbol: AMD's single instructions.

A reference gets the element arrays of the arguments and returns the result's, as those of `asm` do. To add one,
decorate a function with `@reference("the symbol")`; `tests/check/emulate/test_emulate_externs.py` holds each to its
definition.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mla_codegen.check.emulate import asm

Array = NDArray[Any]

REFERENCES: dict[str, Callable[..., Array]] = {}


def reference(symbol: str) -> Callable[[Callable[..., Array]], Callable[..., Array]]:
    """Register the decorated function as the reference of the symbol."""

    def register(function: Callable[..., Array]) -> Callable[..., Array]:
        REFERENCES[symbol] = function
        return function

    return register


def _bytes(words: Array) -> NDArray[np.uint8]:
    """[..., 4], the lowest first."""
    words = np.ascontiguousarray(words)
    return words.view(np.uint8).reshape(*words.shape, 4)


def _words(bytes_: Array) -> Array:
    words: Array = np.ascontiguousarray(bytes_).view(np.uint32)[..., 0]
    return words


@reference("llvm.amdgcn.perm")
def perm(high: Array, low: Array, selector: Array) -> Array:
    """v_perm_b32: byte i of the selector picks byte i out of {high, low}: 0..3 low's, 4..7 high's, 12 zero."""
    picks = _bytes(selector)
    if not np.isin(picks, (*range(8), 12)).all():
        raise ValueError("a selector byte of v_perm_b32 other than 0..7 and 12 is not modelled")
    pool = np.concatenate([_bytes(low), _bytes(high), np.zeros((*np.shape(low), 8), np.uint8)], axis=-1)
    return _words(np.take_along_axis(pool, picks.astype(np.intp), axis=-1))


@reference("llvm.amdgcn.lerp")
def lerp(x: Array, y: Array, rounding: Array) -> Array:
    """v_lerp_u8: (x + y + the lowest bit of rounding) >> 1 of each of four unsigned bytes."""
    wide_x, wide_y, wide_rounding = (_bytes(words).astype(np.uint16) for words in (x, y, rounding))
    return _words(((wide_x + wide_y + (wide_rounding & 1)) >> 1).astype(np.uint8))


@reference("llvm.amdgcn.rcp.f32")
def rcp(x: Array) -> Array:
    """v_rcp_f32: within 1 ulp on the hardware, rounded correctly here."""
    return asm.reciprocal(x)
