"""Small kernels for the compiler tests, as plain text: each test takes the file that it needs.

They are compiled for targets that are not there and never run.
"""

TRITON = '''
import torch
import triton
import triton.language as tl
from task import input_t, output_t

ROWS = tl.constexpr(32)


@triton.jit
def fold(q, k, out, count, scale, TYPE: tl.constexpr):
    """A loop with two products and an exponential, like the kernels that matter."""
    h = tl.arange(0, 16)
    c = tl.arange(0, 64)
    r = tl.arange(0, ROWS)
    x = tl.load(q + h[:, None] * 64 + c[None, :]).to(TYPE)
    acc = tl.zeros([16, 64], tl.float32)
    for start in range(0, count, ROWS):
        y = tl.load(k + (start + r)[:, None] * 64 + c[None, :])
        s = tl.dot(x, tl.trans(y))
        p = tl.math.exp2(s * (1.0 if scale is None else scale))
        acc = tl.dot(p.to(TYPE), y, acc)
    tl.store(out + h[:, None] * 64 + c[None, :], acc)


@triton.jit
def crowded(q, k, out, count):
    """More accumulators than a wave has registers where waves_per_eu asks for many waves."""
    h = tl.arange(0, 32)
    c = tl.arange(0, 128)
    r = tl.arange(0, 32)
    acc = tl.zeros([32, 128], tl.float32)
    for start in range(0, count, 32):
        x = tl.load(q + h[:, None] * 4096 + start + r[None, :])
        y = tl.load(k + (start + r)[:, None] * 128 + c[None, :])
        acc = tl.dot(x, y, acc)
    tl.store(out + h[:, None] * 128 + c[None, :], acc)


@triton.jit
def decode(x, y):
    """e4m3fn to fp32: one instruction where the target has it, dozens where it has not."""
    i = tl.arange(0, 1024)
    tl.store(y + i, tl.load(x + i).to(tl.float32))


@triton.jit
def wide(q, k, out, count):
    """Tiles whose double buffer is over 64 KiB."""
    h = tl.arange(0, 16)
    r = tl.arange(0, 256)
    acc = tl.zeros([16, 64], tl.float32)
    for start in range(0, count, 256):
        x = tl.load(q + h[:, None] * 4096 + start + r[None, :])
        y = tl.load(k + (start + r)[:, None] * 64 + tl.arange(0, 64)[None, :])
        acc = tl.dot(x, y, acc)
    tl.store(out + h[:, None] * 64 + tl.arange(0, 64)[None, :], acc)


@triton.jit
def aborts(x):
    """An asm constraint that only AMD knows ends the compiler's process for an NVIDIA target."""
    i = tl.arange(0, 128)
    v = tl.inline_asm_elementwise("v_rcp_f32 $0, $1", "=v,v", [tl.load(x + i)], dtype=tl.float32, is_pure=True, pack=1)
    tl.store(x + i, v)


@triton.jit
def describes(desc, out):
    """A tensor descriptor argument."""
    tile = desc.load([0, 0])
    tl.store(out + tl.arange(0, 16)[:, None] * 64 + tl.arange(0, 64)[None, :], tile.to(tl.float32))


def custom_kernel(data: input_t) -> output_t:
    return fold[(1,)](*data)


raise RuntimeError("module-level statements are not run")
'''

GLUON = '''
from triton.experimental import gluon
import triton.experimental.gluon.language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma, mbarrier, warpgroup_mma, warpgroup_mma_wait


@gluon.jit
def ring(desc, q, out, count):
    """A wgmma loop that waits for TMA: the wait is a loop inside the loop, placed behind the function's end."""
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    SH: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    LD: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    a = gl.arange(0, 64, gl.SliceLayout(1, LD))
    b = gl.arange(0, 64, gl.SliceLayout(0, LD))
    x = gl.allocate_shared_memory(gl.bfloat16, [64, 64], SH, gl.load(q + a[:, None] * 64 + b[None, :]))
    y = gl.allocate_shared_memory(gl.bfloat16, [64, 64], SH)
    bar = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(bar, count=1)
    acc = gl.zeros([64, 64], gl.float32, ACC)
    for i in range(count):
        mbarrier.expect(bar, 64 * 64 * 2)
        tma.async_copy_global_to_shared(desc, [i * 64, 0], bar, y)
        mbarrier.wait(bar, i & 1)
        acc = warpgroup_mma(x, y.permute((1, 0)), acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=[acc])
    m = gl.arange(0, 64, gl.SliceLayout(1, ACC))
    n = gl.arange(0, 64, gl.SliceLayout(0, ACC))
    gl.store(out + m[:, None] * 64 + n[None, :], acc)
'''
