"""MLA decode of fp8 KV on gfx942, read as int32 quads of columns: byte j of a word feeds accumulator j. 16 heads.

The bytes are e4m3fn; the matrix unit takes them as e4m3fnuz, which is worth half: a factor of two stands in the scale.
Minus zero (0x80) would be NaN there and is cleared four bytes at a time.
"""

import triton.experimental.gluon.language as gl
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon.language.amd import AMDMFMALayout, cdna3

HEADS = gl.constexpr(16)
LOG2E = gl.constexpr(1.4426950408889634)


@gluon.jit
def without_minus_zero(x):
    carry = (x & 0x7F7F7F7F) + 0x7F7F7F7F
    return x & ((carry & -0x7F7F7F80) | 0x7F7F7F7F)


@gluon.jit
def byte(words, J: gl.constexpr):
    return ((words >> (8 * J)) & 0xFF).to(gl.int8).to(gl.float8e4b8, bitcast=True)


@tl.core.extern
def reciprocal(x, _semantic=None):
    symbols = {(tl.float32,): ("llvm.amdgcn.rcp.f32", tl.float32)}
    return tl.core.extern_elementwise("", "", [x], symbols, is_pure=True, _semantic=_semantic)


@gluon.jit
def stage1(q, kv, partial, lse, kv_indptr, kv_scale, sm_scale, SPLITS: gl.constexpr, BLOCK: gl.constexpr):
    WARPS: gl.constexpr = gl.num_warps()
    MMA: gl.constexpr = AMDMFMALayout(3, [16, 16, 32], True, [1, WARPS])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, MMA, 8)
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, MMA, 8)
    LN: gl.constexpr = gl.BlockedLayout([1, 4], [2, 32], [WARPS, 1], [1, 0])
    LR: gl.constexpr = gl.BlockedLayout([1, 4], [16, 4], [WARPS, 1], [1, 0])
    request = gl.program_id(0) // SPLITS
    split = gl.program_id(0) % SPLITS
    first = gl.load(kv_indptr + request)
    visible = gl.load(kv_indptr + request + 1) - first
    per_split = gl.cdiv(gl.cdiv(visible, SPLITS), BLOCK) * BLOCK
    low = per_split * split
    high = gl.minimum(low + per_split, visible)
    slot = (request * SPLITS + split) * HEADS
    heads = gl.arange(0, HEADS, gl.SliceLayout(1, MMA))
    if high <= low:
        gl.store(lse + slot + heads, float("-inf"))
        return
    base = kv + first.to(gl.int64) * 144
    head = gl.arange(0, HEADS, gl.SliceLayout(1, LEFT))[:, None] * 576
    q_latent = gl.load(q + request * (HEADS * 576) + head + gl.arange(0, 512, gl.SliceLayout(0, LEFT))[None, :])
    q_rope = gl.load(q + request * (HEADS * 576) + 512 + head + gl.arange(0, 64, gl.SliceLayout(0, LEFT))[None, :])
    q_latent = q_latent.to(gl.float8e4b8)
    q_rope = q_rope.to(gl.float8e4b8)
    words = gl.allocate_shared_memory(gl.int32, [BLOCK, 128], gl.SwizzledSharedLayout(4, 1, 8, [1, 0]))
    rope_words = gl.allocate_shared_memory(gl.int32, [BLOCK, 16], gl.SwizzledSharedLayout(4, 2, 4, [1, 0]))
    bytes_ = words._reinterpret(gl.float8e4b8, [BLOCK, 512], gl.SwizzledSharedLayout(16, 1, 8, [1, 0]))
    rope_bytes = rope_words._reinterpret(gl.float8e4b8, [BLOCK, 64], gl.SwizzledSharedLayout(16, 2, 4, [1, 0]))
    row = gl.arange(0, BLOCK, gl.SliceLayout(1, LN))
    column = gl.arange(0, 128, gl.SliceLayout(0, LN))[None, :]
    rope_row = gl.arange(0, BLOCK, gl.SliceLayout(1, LR))
    rope_column = 128 + gl.arange(0, 16, gl.SliceLayout(0, LR))[None, :]
    token = gl.arange(0, BLOCK, gl.SliceLayout(0, MMA))
    scale = gl.load(kv_scale) * 2.0
    m = gl.full([HEADS], float("-inf"), gl.float32, gl.SliceLayout(1, MMA))
    total = gl.zeros([HEADS], gl.float32, gl.SliceLayout(1, MMA))
    acc0 = gl.zeros([HEADS, 128], gl.float32, MMA)
    acc1 = gl.zeros([HEADS, 128], gl.float32, MMA)
    acc2 = gl.zeros([HEADS, 128], gl.float32, MMA)
    acc3 = gl.zeros([HEADS, 128], gl.float32, MMA)
    for start in range(low, high, BLOCK):
        latent = cdna3.buffer_load(base, gl.minimum(start + row, high - 1)[:, None] * 144 + column)
        rope = cdna3.buffer_load(base, gl.minimum(start + rope_row, high - 1)[:, None] * 144 + rope_column)
        gl.thread_barrier()
        words.store(without_minus_zero(latent))
        rope_words.store(without_minus_zero(rope))
        gl.thread_barrier()
        scores = gl.zeros([HEADS, BLOCK], gl.float32, MMA)
        scores = cdna3.mfma(q_latent, bytes_.permute([1, 0]).load(RIGHT), scores)
        scores = cdna3.mfma(q_rope, rope_bytes.permute([1, 0]).load(RIGHT), scores) * (sm_scale * scale * LOG2E)
        scores = gl.where((start + token < high)[None, :], scores, float("-inf"))
        m_new = gl.maximum(m, gl.max(scores, 1))
        shrink = gl.exp2(m - m_new)
        weights = gl.exp2(scores - m_new[:, None])
        total = total * shrink + gl.sum(weights, 1)
        m = m_new
        weights = gl.convert_layout(weights.to(gl.float8e4b8), LEFT)
        v = words.load(RIGHT)
        acc0 = cdna3.mfma(weights, byte(v, 0), acc0 * shrink[:, None])
        acc1 = cdna3.mfma(weights, byte(v, 1), acc1 * shrink[:, None])
        acc2 = cdna3.mfma(weights, byte(v, 2), acc2 * shrink[:, None])
        acc3 = cdna3.mfma(weights, byte(v, 3), acc3 * shrink[:, None])
    norm = (scale * reciprocal(total))[:, None]
    out = partial + (slot + heads)[:, None] * 512 + 4 * gl.arange(0, 128, gl.SliceLayout(0, MMA))[None, :]
    gl.store(out, acc0 * norm)
    gl.store(out + 1, acc1 * norm)
    gl.store(out + 2, acc2 * norm)
    gl.store(out + 3, acc3 * norm)
    gl.store(lse + slot + heads, m + gl.log2(total))
