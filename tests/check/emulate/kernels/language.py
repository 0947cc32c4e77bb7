"""Expressions that test_emulate_gpu.py runs both emulated and compiled. Outputs are int32 bits."""

import triton
import triton.language as tl


@triton.jit
def bits(value):
    """Any 8-, 16- or 32-bit tensor as int32 bits."""
    if value.dtype.primitive_bitwidth == 8:
        return value.to(tl.int8, bitcast=True).to(tl.int32)
    elif value.dtype.primitive_bitwidth == 16:
        return value.to(tl.int16, bitcast=True).to(tl.int32)
    else:
        return value.to(tl.int32, bitcast=True)


@triton.jit
def convert(x, y, SIZE: tl.constexpr, TO: tl.constexpr):
    i = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    tl.store(y + i, bits(tl.load(x + i).to(TO)))


@triton.jit
def integers(x, y, SIZE: tl.constexpr):
    """x is int32; the results of sixteen expressions a block of SIZE."""
    i = tl.arange(0, SIZE)
    a = tl.load(x + i)
    b = tl.load(x + SIZE + i)
    tl.store(y + i, a // b)
    tl.store(y + SIZE + i, a % b)
    tl.store(y + 2 * SIZE + i, a + b)
    tl.store(y + 3 * SIZE + i, a * b)
    tl.store(y + 4 * SIZE + i, a >> 3)
    tl.store(y + 5 * SIZE + i, a << 5)
    tl.store(y + 6 * SIZE + i, (a & b) | (a ^ 255))
    tl.store(y + 7 * SIZE + i, bits(tl.div_rn(a.to(tl.float32), b.to(tl.float32))))
    tl.store(y + 8 * SIZE + i, tl.where(a < b, a, 7))
    tl.store(y + 9 * SIZE + i, tl.minimum(a, b))
    tl.store(y + 10 * SIZE + i, tl.maximum(a, -5))
    tl.store(y + 11 * SIZE + i, a.to(tl.int8).to(tl.int32))
    tl.store(y + 12 * SIZE + i, bits(a.to(tl.float32)))
    tl.store(y + 13 * SIZE + i, (a.to(tl.uint32, bitcast=True) >> 3).to(tl.int32, bitcast=True))
    tl.store(y + 14 * SIZE + i, bits(a.to(tl.float16)))
    tl.store(y + 15 * SIZE + i, tl.abs(a))


@triton.jit
def floats(x, y, SIZE: tl.constexpr):
    """x is fp32; results that are exact in IEEE arithmetic, one a block of SIZE."""
    i = tl.arange(0, SIZE)
    a = tl.load(x + i)
    b = tl.load(x + SIZE + i)
    h = a.to(tl.float16)
    f = b.to(tl.bfloat16)
    tl.store(y + i, bits(a + b))
    tl.store(y + SIZE + i, bits(a * b))
    tl.store(y + 2 * SIZE + i, bits(tl.maximum(a, b)))
    tl.store(y + 3 * SIZE + i, bits(tl.minimum(a, 0.5)))
    tl.store(y + 4 * SIZE + i, bits(h + 1))
    tl.store(y + 5 * SIZE + i, bits(f * 3))
    tl.store(y + 6 * SIZE + i, bits(h * f))
    tl.store(y + 7 * SIZE + i, a.to(tl.int32))
    tl.store(y + 8 * SIZE + i, (a < b).to(tl.int32))
    tl.store(y + 9 * SIZE + i, bits(-a))
    tl.store(y + 10 * SIZE + i, bits(tl.abs(f)))
    tl.store(y + 11 * SIZE + i, bits(tl.where(a > 0, h, 0.0)))
    both = tl.interleave(a, b)
    wide = tl.arange(0, 2 * SIZE)
    tl.store(y + 12 * SIZE + wide, bits(tl.ravel(tl.trans(tl.reshape(both, [2, SIZE])))))
    tl.store(y + 14 * SIZE + i, bits(tl.max(tl.reshape(a, [1, SIZE]), 1)[:, None].broadcast_to(1, SIZE)).reshape(SIZE))
    tl.store(y + 15 * SIZE + i, i)
