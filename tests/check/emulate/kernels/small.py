"""Small correct kernels, one for each mechanism. The fault tests break one line of them at a time."""

import triton.experimental.gluon.language as gl
from triton.experimental import gluon
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)


@gluon.jit
def ring(x, y, tiles):
    """y = x, [tiles * 16, 64] fp32, through a ring of two cp.async stages."""
    L: gl.constexpr = gl.BlockedLayout([1, 4], [2, 16], [4, 1], [1, 0])
    TALL: gl.constexpr = gl.BlockedLayout([4, 1], [4, 8], [1, 4], [0, 1])
    offsets = gl.arange(0, 16, gl.SliceLayout(1, L))[:, None] * 64 + gl.arange(0, 64, gl.SliceLayout(0, L))[None, :]
    stages = gl.allocate_shared_memory(gl.float32, [2, 16, 64], gl.SwizzledSharedLayout(4, 1, 8, [1, 0]))
    async_copy.async_copy_global_to_shared(stages.index(0), x + offsets)
    async_copy.commit_group()
    for i in range(tiles):
        after = gl.minimum(i + 1, tiles - 1)
        async_copy.async_copy_global_to_shared(stages.index((i + 1) % 2), x + after * 1024 + offsets)
        async_copy.commit_group()
        async_copy.wait_group(1)
        gl.thread_barrier()
        tile = gl.convert_layout(stages.index(i % 2).load(TALL), L)
        gl.store(y + i * 1024 + offsets, tile)
    async_copy.wait_group(0)


@gluon.jit
def bulk(x_map, y_map, tiles):
    """y = 2 x, [tiles * 16, 64] fp32, by TMA in both directions, one stage."""
    L: gl.constexpr = gl.BlockedLayout([1, 4], [2, 16], [4, 1], [1, 0])
    S: gl.constexpr = gl.NVMMASharedLayout(128, 32, 2)
    inbox = gl.allocate_shared_memory(gl.float32, [16, 64], S)
    outbox = gl.allocate_shared_memory(gl.float32, [16, 64], S)
    bar = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(bar, count=1)
    for i in range(tiles):
        mbarrier.expect(bar, 16 * 64 * 4)
        tma.async_copy_global_to_shared(x_map, [i * 16, 0], bar, inbox)
        mbarrier.wait(bar, i & 1)
        value = inbox.load(L) * 2.0
        tma.store_wait(0)
        outbox.store(value)
        fence_async_shared()
        tma.async_copy_shared_to_global(y_map, [i * 16, 0], outbox)
    tma.store_wait(0)
    mbarrier.invalidate(bar)


@gluon.jit
def product(a, b, c):
    """c = a @ b.T for a [64, 64], b [32, 64] f16, c [64, 32] fp32, by an asynchronous wgmma."""
    L: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 32, 16])
    S: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    row = gl.arange(0, 64, gl.SliceLayout(1, L))[:, None]
    short = gl.arange(0, 32, gl.SliceLayout(1, L))[:, None]
    column = gl.arange(0, 64, gl.SliceLayout(0, L))[None, :]
    left = gl.allocate_shared_memory(gl.float16, [64, 64], S, gl.load(a + row * 64 + column))
    right = gl.allocate_shared_memory(gl.float16, [32, 64], S)
    right.store(gl.load(b + short * 64 + column))
    fence_async_shared()
    gl.thread_barrier()
    acc = gl.zeros([64, 32], gl.float32, MMA)
    acc = warpgroup_mma(left, right.permute((1, 0)), acc, is_async=True)
    acc = warpgroup_mma_wait(0, deps=[acc])
    right.store(gl.zeros([32, 64], gl.float16, L))
    out_row = gl.arange(0, 64, gl.SliceLayout(1, MMA))[:, None]
    out_column = gl.arange(0, 32, gl.SliceLayout(0, MMA))[None, :]
    gl.store(c + out_row * 32 + out_column, acc)


@gluon.jit
def product_from_registers(a, b, c):
    """The same with a as a register operand."""
    L: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 32, 16])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    row = gl.arange(0, 64, gl.SliceLayout(1, LEFT))[:, None]
    column = gl.arange(0, 64, gl.SliceLayout(0, LEFT))[None, :]
    left = gl.load(a + row * 64 + column)
    short = gl.arange(0, 32, gl.SliceLayout(1, L))[:, None]
    column = gl.arange(0, 64, gl.SliceLayout(0, L))[None, :]
    right = gl.allocate_shared_memory(gl.float16, [32, 64], gl.NVMMASharedLayout(128, 16, 2))
    right.store(gl.load(b + short * 64 + column))
    fence_async_shared()
    gl.thread_barrier()
    acc = warpgroup_mma(left, right.permute((1, 0)), gl.zeros([64, 32], gl.float32, MMA))
    out_row = gl.arange(0, 64, gl.SliceLayout(1, MMA))[:, None]
    out_column = gl.arange(0, 32, gl.SliceLayout(0, MMA))[None, :]
    gl.store(c + out_row * 32 + out_column, acc)


@gluon.jit
def scaled(x, y, n):
    """y[i] = 2 x[i] for i < n <= 128, and the sum of x in y[128]."""
    L: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    i = gl.arange(0, 128, L)
    value = gl.load(x + i, mask=i < n, other=0.0)
    gl.store(y + i, value * 2.0, mask=i < n)
    gl.store(y + 128, gl.sum(value, 0))


@gluon.jit
def produce(x_map, stages, ready, empty, tiles):
    for i in range(tiles):
        mbarrier.wait(empty.index(i % 2), ((i // 2) & 1) ^ 1)
        mbarrier.expect(ready.index(i % 2), 16 * 64 * 4)
        tma.async_copy_global_to_shared(x_map, [i * 16, 0], ready.index(i % 2), stages.index(i % 2))


@gluon.jit
def consume(y, stages, ready, empty, tiles):
    L: gl.constexpr = gl.BlockedLayout([1, 4], [2, 16], [4, 1], [1, 0])
    offsets = gl.arange(0, 16, gl.SliceLayout(1, L))[:, None] * 64 + gl.arange(0, 64, gl.SliceLayout(0, L))[None, :]
    for i in range(tiles):
        mbarrier.wait(ready.index(i % 2), (i // 2) & 1)
        value = stages.index(i % 2).load(L)
        mbarrier.arrive(empty.index(i % 2), count=1)
        gl.store(y + i * 1024 + offsets, value)


@gluon.jit
def specialised(x_map, y, tiles):
    """y = x by a producer warp (TMA) and four consumer warps over two stages."""
    stages = gl.allocate_shared_memory(gl.float32, [2, 16, 64], gl.NVMMASharedLayout(128, 32, 2))
    ready = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(2):
        mbarrier.init(ready.index(i), count=1)
        mbarrier.init(empty.index(i), count=1)
    gl.warp_specialize(
        [(consume, (y, stages, ready, empty, tiles)), (produce, (x_map, stages, ready, empty, tiles))], [1], [24]
    )
