"""The Hopper family: Gluon kernels for sm_90, fp8 (e4m3fn) and bf16 KV.

Heads are the N of every product, KV rows or latent columns its M, so that 16 heads fill wgmma; KV tiles come by TMA
through a ring of stages. The notes on each choice are in the rendered files' docstrings.
"""

from dataclasses import dataclass, replace
from typing import Any

from mla_codegen.plan.families.request import BYTES, Request, Resources
from mla_codegen.plan.families.stages import POINTER, Stage, stage1, stage2
from mla_codegen.runtime.splits import MAX_SPLITS
from mla_codegen.spec.errors import Problem

NAME = "hopper"
GLUON = True
BALANCED = True  # it has kernels whose programs share out the tiles of all query rows
ALWAYS = frozenset({"exp2", "direct_out", "packed_fp8"})
NEVER = {
    "fast_rcp": "it divides once a head and split, after the loop",
    "streaming_loads": "KV comes by TMA, which goes past L1",
    "peeled_tail": "whole tiles and tails share one loop; what a tail needs stands behind a branch",
    "fp8_mma": "q and the softmax weights keep 16 bits: q is multiplied as two fp8 numbers, the weights in f16",
}
KNOBS = frozenset({"column_blocks"})
TUNABLE = {  # what `tune` may try; the plan says which combinations are legal
    "splits": (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256),
    "block_n": (64, 128),
    "num_warps": (4, 8),
    "num_stages": (1, 2, 3, 4, 5, 6),
    "column_blocks": (1, 2, 4, 8, 16),
}

HEADS_OF_A_BLOCK = 16
LATENTS = (128, 256, 512)
ROPES = (32, 64, 128)
WARPS_OF_TILE = {64: 4, 128: 8}  # each warp takes 16 KV rows of the scores
MIN_PAGE = 16  # rows: boxes of fewer bytes would not be worth their TMA instructions
SM_BYTES, RESERVED = 233472, 1024  # shared memory of an SM, and what each program takes beside its own
# A block of 16 heads reads the KV again. On an H200 bf16 KV at 64 x 8192 with 128 heads took 704 us so, and 481 us in
# plain Triton with blocks of 64 heads (fp8: 434 and 797 us): with more heads than this it serves only when asked for.
BF16_HEADS = 80
V_ROWS = 16  # KV rows of V in registers at a time
MERGE_RESIDENT = 8  # programs of stage 2 that share an SM, by their registers
PARTIALS_AT_ONCE = 4096  # fp32 numbers of partials that 4 warps of stage 2 hold; 8 warps beyond


@dataclass(frozen=True)
class Details:
    """What the templates place beside the plan's record. Field names are what they say.

    compute        element type of PV's products; gl_kv: the KV's as Gluon names it; torch_kv: as torch does
    kind           folder of templates: fp8 or bf16
    bits           of a KV element; swizzle_latent, swizzle_rope: bytes over which TMA swizzles each part
    tile_bytes     of a KV tile; boxes: that TMA brings it in, box_rows: rows of each
    shares_sm      two programs fit an SM
    lse_bound      what `verify` lets LSE be off by, for scores of a few units: q as two fp8 numbers has 8 to 9 bits
    merge_splits   splits that stage 2 loads, a power of two; masked_splits: some of them do not exist
    programs       of stage 1 that the device runs at once, of one head block
    merge_places   programs of stage 2 that the device runs at once
    partials_at_once   numbers that a program of stage 2 holds, where the splits are known at run time
    """

    compute: str
    kind: str
    gl_kv: str
    torch_kv: str
    bits: int
    swizzle_latent: int
    swizzle_rope: int
    tile_bytes: int
    boxes: int
    box_rows: int
    shared_kb: int
    shares_sm: bool
    v_rows: int
    lse_bound: float
    merge_splits: int
    masked_splits: bool
    programs: int
    merge_places: int
    partials_at_once: int
    column_blocks: int
    columns: int
    stage2_warps: int

    @property
    def several_boxes(self) -> bool:
        return self.boxes > 1


def refuse(request: Request) -> str | None:
    """Why the family cannot serve, or None."""
    if request.kv not in ("fp8_e4m3fn", "bf16"):
        return f"its products are of fp8_e4m3fn and bf16 KV, not of {request.kv}"
    if request.page_size is not None and request.page_size < MIN_PAGE:
        return f"TMA brings it pages of {MIN_PAGE} rows or more, not of {request.page_size}"
    if (request.q, request.out) != ("bf16", "bf16"):
        return f"q and out are bf16 in it, not {request.q} and {request.out}"
    if request.latent not in LATENTS or request.rope not in ROPES:
        served = f"{', '.join(map(str, LATENTS))} and {', '.join(map(str, ROPES))}"
        return f"it serves latent and rope ranks of {served}, not {request.latent} + {request.rope}"
    if request.kv == "bf16" and request.heads > BF16_HEADS and request.knobs.resolved["family"].value is None:
        return (
            f"bf16 KV of {request.heads} heads is faster in blocks of 64 heads; `family: hopper` takes it all the same"
        )
    for name, allowed in (("block_h", (HEADS_OF_A_BLOCK,)), ("block_n", (*WARPS_OF_TILE,))):
        asked = request.knobs.resolved[name].value
        if asked is not None and asked not in allowed:
            return f"{name} is {' or '.join(map(str, allowed))} in it, not {asked}"
    return None


def resources(request: Request) -> Resources | list[Problem]:
    """Tile and launch numbers, or what stands in their way."""
    knobs, target = request.knobs, request.target
    block_h = knobs.take("block_h", HEADS_OF_A_BLOCK)
    block_n = knobs.take("block_n", 64)
    num_warps = knobs.take("num_warps", WARPS_OF_TILE[block_n])
    num_stages = knobs.take("num_stages", 2)
    problems = []
    if num_warps != WARPS_OF_TILE[block_n]:
        what = f"num_warps {num_warps} for a tile of {block_n} rows: each warp takes 16 rows of the scores"
        fix = f"num_warps: {WARPS_OF_TILE[block_n]}"
        problems.append(Problem(knobs.loc("num_warps"), what, fix=fix))
    need = shared_bytes(request, block_n, num_warps, num_stages)
    if need > target.shared_bytes:
        what = (
            f"a ring of {num_stages} tiles of {block_n} {request.kv} rows needs {need:,} bytes of shared memory; "
            f"{target.name} has {target.shared_bytes:,}"
        )
        fits = [n for n in range(1, num_stages) if shared_bytes(request, block_n, num_warps, n) <= target.shared_bytes]
        problems.append(Problem(knobs.loc("num_stages"), what, fix=f"num_stages: {fits[-1]}" if fits else ""))
    if problems:
        return problems
    resident = 2 if num_warps == 4 and 2 * (need + RESERVED) <= SM_BYTES else 1  # 8 warps take all registers
    return Resources(block_n, block_h, num_warps, num_stages, None, need, resident)


def shared_bytes(request: Request, block_n: int, num_warps: int, num_stages: int) -> int:
    """Bytes of shared memory of stage 1: the ring and its barriers, q, weights, and each warp's maxima.

    In fp8 kernels q as two fp8 numbers takes the place that it had as bf16.
    """
    row_bytes = request.row * BYTES[request.kv]
    q_bytes = HEADS_OF_A_BLOCK * request.row * 2
    weights, maxima = block_n * HEADS_OF_A_BLOCK * 2, num_warps * HEADS_OF_A_BLOCK * 4
    return num_stages * (block_n * row_bytes + 8) + q_bytes + weights + maxima


def details(request: Request) -> Details:
    """The rest of what the templates place."""
    numbers = resources(request)
    assert isinstance(numbers, Resources)
    size = BYTES[request.kv]
    head_blocks = -(-request.heads // HEADS_OF_A_BLOCK)
    programs = max(1, request.target.compute_units * numbers.resident // head_blocks)
    merge_splits = 1 << ((request.splits or 1) - 1).bit_length()
    automatic = _column_blocks(merge_splits if request.splits else MAX_SPLITS, request.latent)
    column_blocks = request.knobs.take("column_blocks", automatic)
    columns = request.latent // column_blocks
    box_rows = min(request.page_size or numbers.block_n, numbers.block_n)
    return Details(
        compute="fp16" if request.is_fp8 else "bf16",
        kind="fp8" if request.is_fp8 else "bf16",
        gl_kv="gl.float8e4nv" if request.is_fp8 else "gl.bfloat16",
        torch_kv="torch.float8_e4m3fn" if request.is_fp8 else "torch.bfloat16",
        bits=8 * size,
        swizzle_latent=min(128, request.latent * size),
        swizzle_rope=min(128, request.rope * size),
        tile_bytes=numbers.block_n * request.row * size,
        boxes=numbers.block_n // box_rows,
        box_rows=box_rows,
        shared_kb=round(numbers.shared_bytes / 1024),
        shares_sm=numbers.resident == 2,
        v_rows=V_ROWS,
        lse_bound=5e-3 if request.is_fp8 else 1e-3,
        merge_splits=merge_splits,
        masked_splits=request.splits != merge_splits,
        programs=programs,
        merge_places=request.target.compute_units * MERGE_RESIDENT,
        partials_at_once=PARTIALS_AT_ONCE,
        column_blocks=column_blocks,
        columns=columns,
        stage2_warps=8 if merge_splits * columns > PARTIALS_AT_ONCE else 4,
    )


def stages(kernel: Any) -> list[Stage]:
    """The kernels in the file of a `KernelPlan`."""
    f, element = kernel.details, POINTER[kernel.kv].lstrip("*")
    tiles = {
        f"kv_{part}": f"tensordesc<{element}[{f.box_rows}, {columns}],NVMMASharedLayout("
        f"swizzle_byte_width={swizzle}, element_bitwidth={f.bits}, rank=2)>"
        for part, columns, swizzle in (
            ("latent", kernel.latent, f.swizzle_latent),
            ("rope", kernel.rope, f.swizzle_rope),
        )
    }
    first = stage1(kernel, tiles, turn_rows=kernel.block_n)
    constants = {} if kernel.splits else {"COLUMN_BLOCKS": f.column_blocks}
    launched = {"num_warps": kernel.num_warps, "launch_pdl": True}
    merge = {"num_warps": f.stage2_warps, "launch_pdl": True}
    return [replace(first, options=launched), *(replace(stage, options=merge) for stage in stage2(kernel, constants))]


def _column_blocks(splits: int, latent: int) -> int:
    """Programs that share a head's columns in stage 2: more of them hide the latency where there are many splits."""
    wanted = max(1, min(8, splits // 8), splits // 32)
    return min(wanted, latent // 16)
