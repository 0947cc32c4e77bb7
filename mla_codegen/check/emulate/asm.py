"""References of the assembly that kernels inline: {assembly text -> numpy function}.

A reference gets the element arrays of the assembly's inputs and returns those of its outputs. It says what one
*element* becomes, so the `pack` of the call (how many elements share a register) is not its concern. bf16 travels
as uint16 bits, fp8 as uint8 bits, everything else as the numpy type of the same name. To add one, decorate a
function with `@reference("the text")`; the text is compared with its white space normalised.
`tests/check/emulate/test_emulate_asm.py` holds each to its definition for all 256 byte values.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mla_codegen.check.emulate.floats import f32_to_bf16, fp8_to_f16

Array = NDArray[Any]
Reference = Callable[..., tuple[Array, ...]]

REFERENCES: dict[str, Reference] = {}
PATTERNS: list[tuple[re.Pattern[str], Callable[[re.Match[str]], Reference]]] = []


class UnknownAssembly(KeyError):
    """No reference is registered for an assembly text."""

    def __str__(self) -> str:
        return str(self.args[0])


@lru_cache(maxsize=256)
def normalise(text: str) -> str:
    """One canonical spelling: single blanks, none around punctuation, no comments."""
    text = re.sub(r"//[^\n]*", " ", text)
    text = re.sub(r"\s+", " ", text)
    return re.sub(r" ?([{},;]) ?", r"\1", text).strip()


def reference(*texts: str) -> Callable[[Reference], Reference]:
    """Register the decorated function as the reference of every text given."""

    def register(function: Reference) -> Reference:
        for text in texts:
            REFERENCES[normalise(text)] = function
        return function

    return register


def pattern(expression: str) -> Callable[[Callable[[re.Match[str]], Reference]], Callable[[re.Match[str]], Reference]]:
    """Register a maker of references for every normalised text that `expression` matches as a whole."""

    def register(make: Callable[[re.Match[str]], Reference]) -> Callable[[re.Match[str]], Reference]:
        PATTERNS.append((re.compile(expression), make))
        return make

    return register


def find(text: str) -> Reference:
    """The reference of an assembly text. Raises UnknownAssembly when there is none."""
    key = normalise(text)
    if key not in REFERENCES:
        for expression, make in PATTERNS:
            found = expression.fullmatch(key)
            if found:
                REFERENCES[key] = make(found)
                break
        else:
            raise UnknownAssembly(
                f"no reference for the assembly {key!r}; add one with @reference(...) in "
                "mla_codegen/check/emulate/asm.py and a case for it in tests/check/emulate/test_emulate_asm.py"
            )
    return REFERENCES[key]


def run(text: str, inputs: Sequence[Array]) -> tuple[Array, ...]:
    """Outputs of the assembly `text` on element arrays of one shape. Raises UnknownAssembly if it has no reference."""
    return find(text)(*inputs)


def prmt_b32(a: Array, b: Array, selector: int) -> Array:
    """PTX prmt.b32, default mode: nibble i of the selector picks byte i out of {b, a}; bit 3 repeats its sign."""
    pool = [
        (np.asarray(word).view(np.uint32) >> np.uint32(8 * i)) & np.uint32(0xFF) for word in (a, b) for i in range(4)
    ]
    out = np.zeros(np.shape(a), np.uint32)
    for i in range(4):
        pick = (selector >> (4 * i)) & 0xF
        byte = pool[pick & 7]
        if pick & 8:
            byte = np.where(byte & np.uint32(0x80), np.uint32(0xFF), np.uint32(0))
        out |= byte << np.uint32(8 * i)
    return out.view(np.int32)


def _low_byte(pairs: Array) -> NDArray[np.uint8]:
    return (pairs.view(np.uint16) & np.uint16(0xFF)).astype(np.uint8)


def _high_byte(pairs: Array) -> NDArray[np.uint8]:
    return (pairs.view(np.uint16) >> np.uint16(8)).astype(np.uint8)


# --- NVIDIA: two e4m3fn bytes of an int16 become two f16 (even column, odd column) ---


@reference(
    "{ .reg .b16 lo, hi; .reg .b32 a, b; mov.b32 {lo, hi}, $2; cvt.rn.f16x2.e4m3x2 a, lo; cvt.rn.f16x2.e4m3x2 b, hi;"
    " prmt.b32 $0, a, b, 0x5410; prmt.b32 $1, a, b, 0x7632; }",
    "{ .reg .b32 t; .reg .b16 a, b; prmt.b32 t, $2, 0, 0x3120; mov.b32 {a, b}, t; cvt.rn.f16x2.e4m3x2 $0, a;"
    " cvt.rn.f16x2.e4m3x2 $1, b; }",
)
def e4m3_pair_to_f16(pairs: Array) -> tuple[Array, ...]:
    return fp8_to_f16(_low_byte(pairs), "fp8e4nv"), fp8_to_f16(_high_byte(pairs), "fp8e4nv")


@reference("{ .reg .b32 t; .reg .b16 a, b; prmt.b32 t, $1, 0, 0x3120; mov.b32 {a, b}, t; cvt.rn.f16x2.e4m3x2 $0, a; }")
def e4m3_even_to_f16(pairs: Array) -> tuple[Array, ...]:
    return (fp8_to_f16(_low_byte(pairs), "fp8e4nv"),)


@reference("{ .reg .b32 t; .reg .b16 a, b; prmt.b32 t, $1, 0, 0x3120; mov.b32 {a, b}, t; cvt.rn.f16x2.e4m3x2 $0, b; }")
def e4m3_odd_to_f16(pairs: Array) -> tuple[Array, ...]:
    return (fp8_to_f16(_high_byte(pairs), "fp8e4nv"),)


# --- NVIDIA: packing of the epilogue; PTX puts the last operand of cvt..x2 into the low half ---


@reference("cvt.rn.bf16x2.f32 $0, $2, $1;")
def pack_bf16x2(low: Array, high: Array) -> tuple[Array, ...]:
    word = f32_to_bf16(low).astype(np.uint32) | (f32_to_bf16(high).astype(np.uint32) << np.uint32(16))
    return (word.view(np.int32),)


@reference("cvt.rn.f16x2.f32 $0, $2, $1;")
def pack_f16x2(low: Array, high: Array) -> tuple[Array, ...]:
    with np.errstate(over="ignore"):
        halves = [np.asarray(x).astype(np.float16).view(np.uint16).astype(np.uint32) for x in (low, high)]
    halves = [np.where(np.isnan(x), np.uint32(0x7FFF), h) for x, h in zip((low, high), halves, strict=True)]
    return ((halves[0] | (halves[1] << np.uint32(16))).view(np.int32),)


@reference("mov.b64 $0, {$1, $2};")
def pack_f32x2(low: Array, high: Array) -> tuple[Array, ...]:
    words = np.ascontiguousarray(low).view(np.uint32).astype(np.uint64), np.ascontiguousarray(high).view(np.uint32)
    return ((words[0] | (words[1].astype(np.uint64) << np.uint64(32))).view(np.int64),)


# --- reciprocals: the hardware's are within 1 ulp; the reference rounds correctly and flushes as they do ---


@reference("rcp.approx.ftz.f32 $0, $1;")
def rcp_nvidia(x: Array) -> tuple[Array, ...]:
    return (reciprocal(x),)


def reciprocal(x: Array) -> Array:
    """1 / x, subnormals flushed on the way in and out."""
    with np.errstate(all="ignore"):
        return _flush(np.float32(1) / _flush(x))


def _flush(x: Array) -> Array:
    """Subnormals as zeros of their sign."""
    tiny = np.abs(x) < np.float32(2.0**-126)
    return np.where(tiny, np.copysign(np.float32(0), x), x).astype(np.float32)


# --- exponential (within 2 ulp of the hardware) and logarithm (within 2^-22 of it, absolutely, near 1), base 2 ---


@reference("ex2.approx.ftz.f32 $0, $1;")
def exp2_nvidia(x: Array) -> tuple[Array, ...]:
    with np.errstate(all="ignore"):
        return (_flush(np.exp2(_flush(x))),)


@reference("lg2.approx.ftz.f32 $0, $1;")
def log2_nvidia(x: Array) -> tuple[Array, ...]:
    with np.errstate(all="ignore"):
        return (np.log2(_flush(x)),)


# --- byte gathers of two words, any literal selector ---


@pattern(r"prmt\.b32 \$0,\$1,\$2,(0x[0-9a-fA-F]+|\d+);")
def gather_nvidia(found: re.Match[str]) -> Reference:
    selector = int(found[1], 0)
    return lambda a, b: (prmt_b32(a, b, selector),)
