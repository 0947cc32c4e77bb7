"""MFMA: D = A x B + C of small matrices spread over a wave's lanes.

Layouts after AMD's "CDNA3 Instruction Set Architecture", 7 Matrix Arithmetic Instructions, and AMD's matrix instruction
calculator. Of an M x M x K instruction lane l holds row l % M of A and column l % M of B, and of K the part l // M.
D has rows in registers: of 16 x 16, lane l and register r hold row 4 (l // 16) + r of column l % 16; of 32 x 32, row
8 (r // 4) + 4 (l // 32) + r % 4 of column l % 32. Sums are rounded once, to fp32; hardware rounds oftener.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mla_codegen.check.cdna.floats import F32, F64, FP8, U16, U32
from mla_codegen.check.cdna.lanes import bits_of
from mla_codegen.check.cdna.listing import Instruction, Register, Unknown, register
from mla_codegen.check.cdna.operands import Uses, constant, registers
from mla_codegen.check.cdna.state import Waves

Array = NDArray[Any]
_NAME = re.compile(r"v_mfma_(scale_)?f32_(16x16|32x32)x(\d+)_(bf16|f16|fp8_fp8|f8f6f4)")
_BYTES = {"bf16": 2, "f16": 2, "fp8_fp8": 1, "f8f6f4": 1}


def build(one: Instruction, uses: Uses, arch: str) -> Callable[[Waves], None]:
    found = _NAME.fullmatch(one.name)
    if not found:
        raise Unknown(one)
    scaled, side, depth, kind = bool(found[1]), int(found[2][:2]), int(found[3]), found[4]
    one.allow(*(("op_sel", "op_sel_hi") if scaled else ()))  # without cbsz and blgp: both operands are fp8 e4m3
    target = registers(one, one.operands[0], uses, write=True, file="v").first
    words = side * depth * _BYTES[kind] // 4 // 64
    factors = [registers(one, text, uses, file="v") for text in one.operands[1:3]]
    if any(factor.count != words for factor in factors):
        raise Unknown(one, f"operands of other than {words} registers")
    a, b = (_loader(factor, side, kind, arch) for factor in factors)
    if scaled:
        bytes_of = [
            low + 2 * high
            for low, high in zip(bits_of(one, "op_sel", "0", 2)[:2], bits_of(one, "op_sel_hi", "0", 2)[:2], strict=True)
        ]
        scales = [registers(one, text, uses, file="v").first for text in one.operands[4:6]]
        a, b = (_scaled(load, at, byte) for load, at, byte in zip((a, b), scales, bytes_of, strict=True))
    start = _start(one, uses, side)
    count = side * side // 64

    def run(waves: Waves) -> None:
        total = _square(a(waves), side) @ _square(b(waves), side).swapaxes(1, 2) + start(waves)
        waves.V[target : target + count] = _spread(total.astype(F32), side).view(U32)

    return run


def _loader(factor: Register, side: int, kind: str, arch: str) -> Callable[[Waves], Array]:
    """[waves, 64, numbers of a lane] fp32"""
    first, end = factor.first, factor.first + factor.count

    def words(waves: Waves) -> Array:
        return np.ascontiguousarray(np.moveaxis(waves.V[first:end], 0, 2))

    if kind == "bf16":
        return lambda waves: (words(waves).view(U16).astype(U32) << U32(16)).view(F32)
    if kind == "f16":
        return lambda waves: words(waves).view(np.float16).astype(F32)
    table = FP8[arch]
    return lambda waves: table[words(waves).view(np.uint8)]


def _scaled(load: Callable[[Waves], Array], at: int, byte: int) -> Callable[[Waves], Array]:
    """Times 2 ^ (e - 127): each lane's numbers, 32 of one row, have the exponent e in a byte of a register."""

    def scaled(waves: Waves) -> Array:
        exponent = (waves.V[at] >> U32(8 * byte) & U32(0xFF)).astype(F64) - 127
        return load(waves) * np.exp2(exponent)[:, :, None]

    return scaled


def _square(values: Array, side: int) -> Array:
    """[waves, 64, n] as held by lanes -> [waves, side, K] in fp64"""
    count, lanes, each = values.shape
    parts = values.reshape(count, lanes // side, side, each).swapaxes(1, 2)
    return parts.reshape(count, side, lanes // side * each).astype(F64)


def _start(one: Instruction, uses: Uses, side: int) -> Callable[[Waves], Array]:
    """C as [waves, side, side] or [1, 1, 1]"""
    text, count = one.operands[3], side * side // 64
    if register(text) is None:
        value = constant(text, "f")[None, None]
        return lambda waves: value
    found = registers(one, text, uses, file="v")
    if found.count != count:
        raise Unknown(one, f"operand {text}")

    def gather(waves: Waves) -> Array:
        held = waves.V[found.first : found.first + count].view(F32)
        blocks = held.reshape(count // 4, 4, waves.count, 64 // side, side)
        return blocks.transpose(2, 0, 3, 1, 4).reshape(waves.count, side, side)

    return gather


def _spread(matrix: Array, side: int) -> Array:
    """[waves, side, side] -> [registers, waves, 64]"""
    count = side * side // 64
    blocks = matrix.reshape(-1, count // 4, 64 // side, 4, side)
    return blocks.transpose(1, 3, 0, 2, 4).reshape(count, len(matrix), 64)
