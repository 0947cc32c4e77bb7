"""MLA decode of fp8 KV on gfx950: asynchronous copies to LDS, scaled MFMA for QK, plain for PV. 16 heads."""

import triton.experimental.gluon.language as gl
from triton.experimental import gluon
from triton.experimental.gluon.language.amd import AMDMFMALayout, cdna4

HEADS = gl.constexpr(16)
LOG2E = gl.constexpr(1.4426950408889634)


@gluon.jit
def fetch(base, start, last, latent, rope, BLOCK: gl.constexpr, LN: gl.constexpr, LR: gl.constexpr):
    row = gl.minimum(start + gl.arange(0, BLOCK, gl.SliceLayout(1, LN)), last)
    column = gl.arange(0, 512, gl.SliceLayout(0, LN))
    cdna4.async_copy.buffer_load_to_shared(latent, base, row[:, None] * 576 + column[None, :])
    row = gl.minimum(start + gl.arange(0, BLOCK, gl.SliceLayout(1, LR)), last)
    column = 512 + gl.arange(0, 64, gl.SliceLayout(0, LR))
    cdna4.async_copy.global_load_to_shared(rope, base + row[:, None] * 576 + column[None, :])
    cdna4.async_copy.commit_group()


@gluon.jit
def stage1(q, kv, partial, lse, kv_indptr, kv_scale, sm_scale, SPLITS: gl.constexpr, BLOCK: gl.constexpr):
    WARPS: gl.constexpr = gl.num_warps()
    F8: gl.constexpr = gl.float8e4nv
    SCALED: gl.constexpr = AMDMFMALayout(4, [16, 16, 128], True, [1, WARPS])
    PLAIN: gl.constexpr = AMDMFMALayout(4, [16, 16, 32], True, [1, WARPS])
    SCALED_L: gl.constexpr = gl.DotOperandLayout(0, SCALED, 16)
    SCALED_R: gl.constexpr = gl.DotOperandLayout(1, SCALED, 16)
    PLAIN_L: gl.constexpr = gl.DotOperandLayout(0, PLAIN, 8)
    PLAIN_R: gl.constexpr = gl.DotOperandLayout(1, PLAIN, 8)
    LN: gl.constexpr = gl.BlockedLayout([1, 16], [2, 32], [WARPS, 1], [1, 0])
    LR: gl.constexpr = gl.BlockedLayout([1, 16], [16, 4], [WARPS, 1], [1, 0])
    request = gl.program_id(0) // SPLITS
    split = gl.program_id(0) % SPLITS
    first = gl.load(kv_indptr + request)
    visible = gl.load(kv_indptr + request + 1) - first
    per_split = gl.cdiv(gl.cdiv(visible, SPLITS), BLOCK) * BLOCK
    low = per_split * split
    high = gl.minimum(low + per_split, visible)
    slot = (request * SPLITS + split) * HEADS
    heads = gl.arange(0, HEADS, gl.SliceLayout(1, PLAIN))
    if high <= low:
        gl.store(lse + slot + heads, float("-inf"))
        return
    base = kv + first.to(gl.int64) * 576
    latents = gl.allocate_shared_memory(F8, [2, BLOCK, 512], gl.SwizzledSharedLayout(16, 1, 8, [1, 0]))
    ropes = gl.allocate_shared_memory(F8, [2, BLOCK, 64], gl.SwizzledSharedLayout(16, 2, 4, [1, 0]))
    fetch(base, low, high - 1, latents.index(0), ropes.index(0), BLOCK, LN, LR)
    head = gl.arange(0, HEADS, gl.SliceLayout(1, SCALED_L))[:, None] * 576
    q_latent = gl.load(q + request * (HEADS * 576) + head + gl.arange(0, 512, gl.SliceLayout(0, SCALED_L))[None, :])
    head = gl.arange(0, HEADS, gl.SliceLayout(1, PLAIN_L))[:, None] * 576
    q_rope = gl.load(q + request * (HEADS * 576) + 512 + head + gl.arange(0, 64, gl.SliceLayout(0, PLAIN_L))[None, :])
    q_latent = q_latent.to(F8)
    q_rope = q_rope.to(F8)
    scale = gl.load(kv_scale)
    token = gl.arange(0, BLOCK, gl.SliceLayout(0, PLAIN))
    m = gl.full([HEADS], float("-inf"), gl.float32, gl.SliceLayout(1, PLAIN))
    total = gl.zeros([HEADS], gl.float32, gl.SliceLayout(1, PLAIN))
    acc = gl.zeros([HEADS, 512], gl.float32, PLAIN)
    stage = 0
    for start in range(low, high, BLOCK):
        fetch(base, start + BLOCK, high - 1, latents.index(1 - stage), ropes.index(1 - stage), BLOCK, LN, LR)
        cdna4.async_copy.wait_group(1)
        gl.thread_barrier()
        k = latents.index(stage).permute([1, 0]).load(SCALED_R)
        scores = gl.zeros([HEADS, BLOCK], gl.float32, SCALED)
        scores = cdna4.mfma_scaled(q_latent, None, "e4m3", k, None, "e4m3", scores)
        scores = gl.convert_layout(scores, PLAIN)
        k = cdna4.async_copy.load_shared_relaxed(ropes.index(stage).permute([1, 0]), PLAIN_R)
        scores = cdna4.mfma(q_rope, k, scores) * (sm_scale * scale * LOG2E)
        scores = gl.where((start + token < high)[None, :], scores, float("-inf"))
        m_new = gl.maximum(m, gl.max(scores, 1))
        shrink = gl.exp2(m - m_new)
        weights = gl.exp2(scores - m_new[:, None])
        total = total * shrink + gl.sum(weights, 1)
        m = m_new
        weights = gl.convert_layout(weights.to(F8), PLAIN_L)
        acc = cdna4.mfma(weights, latents.index(stage).load(PLAIN_R), acc * shrink[:, None])
        stage = 1 - stage
    cdna4.async_copy.wait_group(0)
    columns = gl.arange(0, 512, gl.SliceLayout(0, PLAIN))
    gl.store(partial + (slot + heads)[:, None] * 512 + columns[None, :], acc * (scale / total)[:, None])
    gl.store(lse + slot + heads, m + gl.log2(total))
