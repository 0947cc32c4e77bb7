"""MLA decode of fp8 KV read as int16 pairs of columns: cp.async ring, mma.sync in f16. 16 heads."""

import triton.experimental.gluon.language as gl
from triton.experimental import gluon
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

HEADS = gl.constexpr(16)
PAIRS = gl.constexpr(256)  # int16 columns of the latent part
ROPE = gl.constexpr(32)  # int16 columns of the rope part
ROW = gl.constexpr(288)
LOG2E = gl.constexpr(1.4426950408889634)
SPLIT_PAIR = gl.constexpr("""
    { .reg .b32 t; .reg .b16 a, b;
      prmt.b32 t, $2, 0, 0x3120;
      mov.b32 {a, b}, t;
      cvt.rn.f16x2.e4m3x2 $0, a;
      cvt.rn.f16x2.e4m3x2 $1, b; }
    """)


@gluon.jit
def halves(pairs):
    """Even and odd columns of a tile as f16."""
    return gl.inline_asm_elementwise(
        SPLIT_PAIR, "=r,=r,r", [pairs], dtype=(gl.float16, gl.float16), is_pure=True, pack=2
    )


@gluon.jit
def fetch(kv, base, row, last, latent, rope, BLOCK: gl.constexpr, LN: gl.constexpr, LR: gl.constexpr):
    """Start copying the tile at `row`; rows past the last one repeat it."""
    rows = gl.minimum(row + gl.arange(0, BLOCK, gl.SliceLayout(1, LN)), last)
    columns = gl.arange(0, PAIRS, gl.SliceLayout(0, LN))
    async_copy.async_copy_global_to_shared(latent, kv + base + rows[:, None] * ROW + columns[None, :])
    rows = gl.minimum(row + gl.arange(0, BLOCK, gl.SliceLayout(1, LR)), last)
    columns = gl.arange(0, ROPE, gl.SliceLayout(0, LR))
    async_copy.async_copy_global_to_shared(rope, kv + base + rows[:, None] * ROW + PAIRS + columns[None, :])
    async_copy.commit_group()


@gluon.jit
def stage1(q, kv, partial, lse, kv_indptr, kv_scale, sm_scale, SPLITS: gl.constexpr, BLOCK: gl.constexpr):
    WARPS: gl.constexpr = gl.num_warps()
    STAGES: gl.constexpr = 2
    MMA: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [1, WARPS], [16, 8])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, MMA, 2)
    LN: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [WARPS, 1], [1, 0])
    LR: gl.constexpr = gl.BlockedLayout([1, 8], [8, 4], [WARPS, 1], [1, 0])
    WIDE: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [1, 0])
    NARROW: gl.constexpr = gl.SwizzledSharedLayout(8, 2, 4, [1, 0])
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
    base = first.to(gl.int64) * ROW
    latents = gl.allocate_shared_memory(gl.int16, [STAGES, BLOCK, PAIRS], WIDE)
    ropes = gl.allocate_shared_memory(gl.int16, [STAGES, BLOCK, ROPE], NARROW)
    fetch(kv, base, low, high - 1, latents.index(0), ropes.index(0), BLOCK, LN, LR)

    head = gl.arange(0, HEADS, gl.SliceLayout(1, LN))
    even = (
        q
        + request * (HEADS * 2 * ROW)
        + head[:, None] * (2 * ROW)
        + 2 * gl.arange(0, PAIRS, gl.SliceLayout(0, LN))[None, :]
    )
    q_even = gl.allocate_shared_memory(gl.float16, [HEADS, PAIRS], WIDE, gl.load(even).to(gl.float16))
    q_odd = gl.allocate_shared_memory(gl.float16, [HEADS, PAIRS], WIDE, gl.load(even + 1).to(gl.float16))
    head = gl.arange(0, HEADS, gl.SliceLayout(1, LR))
    column = gl.arange(0, ROPE, gl.SliceLayout(0, LR))
    even = q + request * (HEADS * 2 * ROW) + 2 * PAIRS + head[:, None] * (2 * ROW) + 2 * column[None, :]
    r_even = gl.allocate_shared_memory(gl.float16, [HEADS, ROPE], NARROW, gl.load(even).to(gl.float16))
    r_odd = gl.allocate_shared_memory(gl.float16, [HEADS, ROPE], NARROW, gl.load(even + 1).to(gl.float16))

    scale = gl.load(kv_scale)
    m = gl.full([HEADS], float("-inf"), gl.float32, gl.SliceLayout(1, MMA))
    total = gl.zeros([HEADS], gl.float32, gl.SliceLayout(1, MMA))
    acc_even = gl.zeros([HEADS, PAIRS], gl.float32, MMA)
    acc_odd = gl.zeros([HEADS, PAIRS], gl.float32, MMA)
    tokens = gl.arange(0, BLOCK, gl.SliceLayout(0, MMA))
    for tile in range(gl.cdiv(high - low, BLOCK)):
        async_copy.wait_group(0)
        gl.thread_barrier()
        row = low + tile * BLOCK
        after = (tile + 1) % STAGES
        fetch(
            kv,
            base,
            gl.minimum(row + BLOCK, high - 1),
            high - 1,
            latents.index(after),
            ropes.index(after),
            BLOCK,
            LN,
            LR,
        )
        latent = latents.index(tile % STAGES)
        k_even, k_odd = halves(latent.permute([1, 0]).load(RIGHT))
        scores = gl.zeros([HEADS, BLOCK], gl.float32, MMA)
        scores = mma_v2(q_even.load(LEFT), k_even, scores)
        scores = mma_v2(q_odd.load(LEFT), k_odd, scores)
        k_even, k_odd = halves(ropes.index(tile % STAGES).permute([1, 0]).load(RIGHT))
        scores = mma_v2(r_even.load(LEFT), k_even, scores)
        scores = mma_v2(r_odd.load(LEFT), k_odd, scores) * (sm_scale * scale * LOG2E)
        scores = gl.where((row + tokens < high)[None, :], scores, float("-inf"))
        m_new = gl.maximum(m, gl.max(scores, 1))
        shrink = gl.exp2(m - m_new)
        weights = gl.exp2(scores - m_new[:, None])
        total = total * shrink + gl.sum(weights, 1)
        m = m_new
        weights = gl.convert_layout(weights.to(gl.float16), LEFT)
        v_even, v_odd = halves(latent.load(RIGHT))
        acc_even = mma_v2(weights, v_even, acc_even * shrink[:, None])
        acc_odd = mma_v2(weights, v_odd, acc_odd * shrink[:, None])
    async_copy.wait_group(0)
    norm = scale / total
    out = partial + (slot + heads)[:, None] * (2 * PAIRS) + 2 * gl.arange(0, PAIRS, gl.SliceLayout(0, MMA))[None, :]
    gl.store(out, acc_even * norm[:, None])
    gl.store(out + 1, acc_odd * norm[:, None])
    gl.store(lse + slot + heads, m + gl.log2(total))
