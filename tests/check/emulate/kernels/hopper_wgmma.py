"""MLA decode of fp8 KV by TMA: QK with fp8 wgmma from shared memory, PV from int16 pairs. 16 heads.

The last tile's rows past the request are zeroed in shared memory before they can meet a weight of 0.
"""

import triton.experimental.gluon.language as gl
from triton.experimental import gluon
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    mma_v2,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

HEADS = gl.constexpr(16)
LOG2E = gl.constexpr(1.4426950408889634)
SPLIT_PAIR = gl.constexpr(
    "{ .reg .b32 t; .reg .b16 a, b; prmt.b32 t, $2, 0, 0x3120; mov.b32 {a, b}, t;"
    " cvt.rn.f16x2.e4m3x2 $0, a; cvt.rn.f16x2.e4m3x2 $1, b; }"
)


@gluon.jit
def fetch(latent_map, rope_map, latents, ropes, bars, tile, row, STAGES: gl.constexpr, BLOCK: gl.constexpr, wanted):
    stage = tile % STAGES
    mbarrier.expect(bars.index(stage), BLOCK * 576, pred=wanted)
    tma.async_copy_global_to_shared(latent_map, [row, 0], bars.index(stage), latents.index(stage), pred=wanted)
    tma.async_copy_global_to_shared(rope_map, [row, 512], bars.index(stage), ropes.index(stage), pred=wanted)


@gluon.jit
def store_split(high_part, values, scale):
    """`values` as a sum of two fp8 numbers, 16 rows each of `high_part`."""
    scaled = values * scale[:, None]
    coarse = scaled.to(gl.float8e4nv)
    high_part.slice(0, 16).store(coarse)
    high_part.slice(16, 16).store((scaled - coarse.to(gl.float32)).to(gl.float8e4nv))


@gluon.jit
def stage1(
    q, latent_map, rope_map, partial, lse, kv_indptr, kv_scale, sm_scale, SPLITS: gl.constexpr, BLOCK: gl.constexpr
):
    WARPS: gl.constexpr = gl.num_warps()
    STAGES: gl.constexpr = 2
    WIDE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, 32, 32])
    QK: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, 16, 32])
    PV: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [WARPS, 1], [16, 8])
    S128: gl.constexpr = gl.NVMMASharedLayout(128, 8, 2)
    S64: gl.constexpr = gl.NVMMASharedLayout(64, 8, 2)
    S128_16: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    BQ: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [WARPS, 1], [1, 0])
    BR: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [WARPS, 1], [1, 0])
    request = gl.program_id(0) // SPLITS
    split = gl.program_id(0) % SPLITS
    first = gl.load(kv_indptr + request)
    visible = gl.load(kv_indptr + request + 1) - first
    per_split = gl.cdiv(gl.cdiv(visible, SPLITS), BLOCK) * BLOCK
    low = per_split * split
    rows = gl.minimum(low + per_split, visible) - low
    slot = (request * SPLITS + split) * HEADS
    if rows <= 0:
        gl.store(lse + slot + gl.arange(0, HEADS, gl.SliceLayout(0, QK)), float("-inf"))
        return
    row0 = first + low
    tiles = gl.cdiv(rows, BLOCK)
    latents = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, BLOCK, 512], S128)
    ropes = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, BLOCK, 64], S64)
    pairs = latents._reinterpret(gl.int16, [STAGES, BLOCK, 256], S128_16)
    bars = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(bars.index(i), count=1)
    fence_async_shared()
    gl.thread_barrier()
    for i in gl.static_range(STAGES):
        fetch(latent_map, rope_map, latents, ropes, bars, i, row0 + i * BLOCK, STAGES, BLOCK, i < tiles)

    head = gl.arange(0, HEADS, gl.SliceLayout(1, BQ))
    column = gl.arange(0, 512, gl.SliceLayout(0, BQ))
    q_latent = gl.load(q + (request * HEADS + head[:, None]) * 576 + column[None, :]).to(gl.float32)
    head = gl.arange(0, HEADS, gl.SliceLayout(1, BR))
    column = gl.arange(0, 64, gl.SliceLayout(0, BR))
    q_rope = gl.load(q + (request * HEADS + head[:, None]) * 576 + 512 + column[None, :]).to(gl.float32)
    rope_max = gl.convert_layout(gl.max(gl.abs(q_rope), 1), gl.SliceLayout(1, BQ))
    biggest = gl.maximum(gl.max(gl.abs(q_latent), 1), rope_max)
    biggest = gl.where(biggest > 0, biggest, 1.0)
    ql = gl.allocate_shared_memory(gl.float8e4nv, [32, 512], S128)
    qr = gl.allocate_shared_memory(gl.float8e4nv, [32, 64], S64)
    store_split(ql, q_latent, 448.0 / biggest)
    store_split(qr, q_rope, gl.convert_layout(448.0 / biggest, gl.SliceLayout(1, BR)))
    fence_async_shared()
    gl.thread_barrier()

    scale = gl.load(kv_scale)
    to_log2 = gl.convert_layout(biggest * (sm_scale * scale * LOG2E / 448.0), gl.SliceLayout(0, QK))
    weights_t = gl.allocate_shared_memory(gl.float16, [BLOCK, HEADS], gl.SwizzledSharedLayout(8, 4, 2, [1, 0]))
    m = gl.full([HEADS], float("-inf"), gl.float32, gl.SliceLayout(0, QK))
    total = gl.zeros([HEADS], gl.float32, gl.SliceLayout(0, QK))
    acc_even = gl.zeros([256, HEADS], gl.float32, PV)
    acc_odd = gl.zeros([256, HEADS], gl.float32, PV)
    token = gl.arange(0, BLOCK, gl.SliceLayout(1, QK))
    for tile in range(tiles):
        stage = tile % STAGES
        mbarrier.wait(bars.index(stage), (tile // STAGES) & 1)
        scores = gl.zeros([BLOCK, 32], gl.float32, WIDE)
        scores = warpgroup_mma(latents.index(stage), ql.permute((1, 0)), scores, use_acc=False, is_async=True)
        scores = warpgroup_mma(ropes.index(stage), qr.permute((1, 0)), scores, is_async=True)
        scores = warpgroup_mma_wait(0, deps=[scores])
        coarse, fine = gl.split(scores.reshape([BLOCK, 2, HEADS]).permute((0, 2, 1)))
        scores = gl.convert_layout(coarse + fine, QK) * to_log2[None, :]
        inside = tile * BLOCK + token < rows
        scores = gl.where(inside[:, None], scores, float("-inf"))
        m_new = gl.maximum(m, gl.max(scores, 0))
        shrink = gl.exp2(m - m_new)
        weights = gl.exp2(scores - m_new[None, :])
        total = total * shrink + gl.sum(weights, 0)
        m = m_new
        weights_t.store(weights.to(gl.float16))
        right = weights_t.load(gl.DotOperandLayout(1, PV, 2))
        key = gl.arange(0, BLOCK, gl.SliceLayout(0, gl.DotOperandLayout(0, PV, 2)))
        left = pairs.index(stage).permute((1, 0)).load(gl.DotOperandLayout(0, PV, 2))
        left = gl.where((tile * BLOCK + key < rows)[None, :], left, 0)
        even, odd = gl.inline_asm_elementwise(
            SPLIT_PAIR, "=r,=r,r", [left], dtype=(gl.float16, gl.float16), is_pure=True, pack=2
        )
        shrink = gl.convert_layout(shrink, gl.SliceLayout(0, PV))
        acc_even = mma_v2(even, right, acc_even * shrink[None, :])
        acc_odd = mma_v2(odd, right, acc_odd * shrink[None, :])
        gl.thread_barrier()
        after = tile + STAGES
        fetch(latent_map, rope_map, latents, ropes, bars, after, row0 + after * BLOCK, STAGES, BLOCK, after < tiles)
    norm = gl.convert_layout(scale / total, gl.SliceLayout(0, PV))
    both = gl.inline_asm_elementwise(
        "mov.b64 $0, {$1, $2};",
        "=l,f,f",
        [acc_even * norm[None, :], acc_odd * norm[None, :]],
        dtype=gl.int64,
        is_pure=True,
        pack=1,
    )
    column = gl.arange(0, 256, gl.SliceLayout(1, PV))
    head = gl.arange(0, HEADS, gl.SliceLayout(0, PV))
    gl.store(partial + (slot + head[None, :]) * 256 + column[:, None], both)
    gl.store(lse + slot + gl.arange(0, HEADS, gl.SliceLayout(0, QK)), m + gl.log2(total))


def descriptors(kv, block):
    """TMA descriptors of the latent and the rope columns of `kv` [T, 576] fp8."""
    latent = TensorDescriptor(kv, list(kv.shape), [576, 1], [block, 512], gl.NVMMASharedLayout(128, 8, 2))
    rope = TensorDescriptor(kv, list(kv.shape), [576, 1], [block, 64], gl.NVMMASharedLayout(64, 8, 2))
    return latent, rope
