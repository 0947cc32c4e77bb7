"""The Hopper family: Gluon kernels for sm_90, fp8 (e4m3fn) and bf16 KV.

Heads are the N of every product, KV rows or latent columns its M, so that 16 heads fill wgmma; KV tiles come by TMA
through a ring of stages. The notes on each choice are in the rendered files' docstrings.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

from mla_codegen.catalog.bounds import BOUND_16_BIT, LSE_BOUND_16_BIT
from mla_codegen.plan.families.base import Family
from mla_codegen.plan.families.request import Request, Resources
from mla_codegen.plan.families.stages import FUSED, Stage, stage1, stage2
from mla_codegen.plan.work import BALANCED_ROWS, Merge, Work, power_of_two
from mla_codegen.spec.errors import Problem

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
    kind           folder of templates: fp8 or bf16; rows: how TMA brings tiles: ragged, pages, boxes
    bits           of a KV element; swizzle_latent, swizzle_rope: bytes over which TMA swizzles each part
    tile_bytes     of a KV tile; boxes: that TMA brings it in, box_rows: rows of each
    shares_sm      two programs fit an SM
    programs       of stage 1 that the device runs at once, of one head block
    merge_programs programs of stage 2 that the device runs at once
    rows_of_thread query rows that a thread of a balanced kernel looks at
    half_latent    words of two latent columns
    high_low_columns   of q as two fp8 numbers
    """

    compute: str
    kind: str
    rows: str
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
    programs: int
    merge_programs: int
    rows_of_thread: int
    half_latent: int
    high_low_columns: int

    @property
    def several_boxes(self) -> bool:
        return self.boxes > 1

    @property
    def splits_pairs(self) -> bool:
        return self.kind == "fp8"

    @property
    def rows_file(self) -> str:
        return f"rows/tma_{self.rows}.jinja"

    @property
    def stage1_file(self) -> str:
        return f"hopper/{self.kind}/stage1.py.jinja"

    @property
    def layouts_file(self) -> str:
        return f"hopper/{self.kind}/layouts.py.jinja"

    @property
    def constants_file(self) -> str:
        return f"hopper/{self.kind}/constants.py.jinja"

    @property
    def imports_file(self) -> str:
        return f"hopper/{self.kind}/imports.py.jinja"

    @property
    def about_file(self) -> str:
        return f"hopper/{self.kind}/about.jinja"


def shared_bytes(request: Request, block_n: int, num_warps: int, num_stages: int) -> int:
    """Bytes of shared memory of stage 1: the ring and its barriers, q, weights, and each warp's maxima.

    In fp8 kernels q as two fp8 numbers takes the place that it had as bf16.
    """
    q_bytes = HEADS_OF_A_BLOCK * request.row * 2
    weights, maxima = block_n * HEADS_OF_A_BLOCK * 2, num_warps * HEADS_OF_A_BLOCK * 4
    return num_stages * (block_n * request.row_bytes + 8) + q_bytes + weights + maxima


def _column_blocks(splits: int, latent: int) -> int:
    """Programs that split a head's columns in stage 2: more of them hide the latency where there are many splits."""
    wanted = max(1, min(8, splits // 8), splits // 32)
    return min(wanted, latent // 16)


class Hopper(Family):
    """wgmma and TMA, everything transposed."""

    name = "hopper"
    gluon = True
    balances = True
    tiles = True
    always = frozenset({"exp2", "direct_out", "packed_fp8"})
    never: ClassVar = {
        "fast_rcp": "it divides once a head and split, after the loop",
        "streaming_loads": "KV comes by TMA, which goes past L1",
        "peeled_tail": "whole tiles and tails share one loop; what a tail needs stands behind a branch",
        "fp8_mma": "q and the softmax weights keep 16 bits: q is multiplied as two fp8 numbers, the weights in f16",
    }
    settings = frozenset({"column_blocks"})
    tunable: ClassVar = {  # what `tune` may try; the plan says which combinations are legal
        "splits": (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256),
        "block_n": (64, 128),
        "num_warps": (4, 8),
        "num_stages": (1, 2, 3, 4, 5, 6),
        "column_blocks": (1, 2, 4, 8, 16),
    }

    def refuse(self, request: Request) -> str | None:
        """Why the family cannot serve, or None."""
        if request.kv not in ("fp8_e4m3fn", "bf16"):
            return f"its products are of fp8_e4m3fn and bf16 KV, not of {request.kv}"
        if request.page_size is not None and request.page_size < MIN_PAGE:
            return f"TMA brings it pages of {MIN_PAGE} rows or more, not of {request.page_size}"
        if (request.q, request.out) != ("bf16", "bf16"):
            return f"q and out are bf16 in it, not {request.q} and {request.out}"
        if request.latent not in LATENTS or request.rope not in ROPES:
            served = f"{', '.join(map(str, LATENTS))} and {', '.join(map(str, ROPES))}"
            return f"it serves latent and rope dims of {served}, not {request.latent} + {request.rope}"
        if request.kv == "bf16" and request.heads > BF16_HEADS and request.knobs.resolved["family"].value is None:
            faster = f"bf16 KV of {request.heads} heads is faster in blocks of 64 heads"
            return f"{faster}; `family: hopper` takes it all the same"
        for name, allowed in (("block_h", (HEADS_OF_A_BLOCK,)), ("block_n", (*WARPS_OF_TILE,))):
            asked = request.knobs.resolved[name].value
            if asked is not None and asked not in allowed:
                return f"{name} is {' or '.join(map(str, allowed))} in it, not {asked}"
        return None

    def resources(self, request: Request) -> Resources | list[Problem]:
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
            fits = [
                n for n in range(1, num_stages) if shared_bytes(request, block_n, num_warps, n) <= target.shared_bytes
            ]
            problems.append(Problem(knobs.loc("num_stages"), what, fix=f"num_stages: {fits[-1]}" if fits else ""))
        if problems:
            return problems
        resident = 2 if num_warps == 4 and 2 * (need + RESERVED) <= SM_BYTES else 1  # 8 warps take all registers
        return Resources(block_n, block_h, num_warps, num_stages, None, need, resident)

    def details(self, request: Request) -> Details:
        """The rest of what the templates place."""
        numbers = self.resources(request)
        assert isinstance(numbers, Resources)
        element = request.format.element
        head_blocks = -(-request.heads // HEADS_OF_A_BLOCK)
        box_rows = min(request.page_size or numbers.block_n, numbers.block_n)
        return Details(
            compute="fp16" if element.fp8 else "bf16",
            kind="fp8" if element.fp8 else "bf16",
            rows="ragged" if request.page_size is None else "pages" if box_rows == numbers.block_n else "boxes",
            gl_kv=f"gl.{element.triton}",
            torch_kv=element.torch,
            bits=8 * element.bytes,
            swizzle_latent=min(128, request.latent * element.bytes),
            swizzle_rope=min(128, request.rope * element.bytes),
            tile_bytes=numbers.block_n * request.row_bytes,
            boxes=numbers.block_n // box_rows,
            box_rows=box_rows,
            shared_kb=round(numbers.shared_bytes / 1024),
            shares_sm=numbers.resident == 2,
            v_rows=V_ROWS,
            programs=max(1, request.target.compute_units * numbers.resident // head_blocks),
            merge_programs=request.target.compute_units * MERGE_RESIDENT,
            rows_of_thread=BALANCED_ROWS // (32 * numbers.num_warps),
            half_latent=request.latent // 2,
            high_low_columns=2 * numbers.block_h,
        )

    def merge(self, request: Request, work: Work) -> Merge:
        """Stage 2: all splits at once if their number is known; several programs a head where there are many."""
        splits = power_of_two(work.max_splits)
        column_blocks = request.knobs.take("column_blocks", _column_blocks(splits, request.latent))
        columns = request.latent // column_blocks
        if work.splits is None:
            tile = PARTIALS_AT_ONCE // columns
            return Merge(splits, True, tile, 4, columns, column_blocks, at_launch=True, dependent=True)
        warps = 8 if splits * columns > PARTIALS_AT_ONCE else 4
        return Merge(splits, splits != work.splits, splits, warps, columns, column_blocks, dependent=True)

    def bounds(self, details: Details) -> tuple[float, float]:
        """q as two fp8 numbers has 8 to 9 bits: that shows in the LSE."""
        return BOUND_16_BIT, 5e-3 if details.kind == "fp8" else LSE_BOUND_16_BIT

    def facts(self, request: Request, details: Details) -> dict[str, str]:
        """The types of the TMA descriptors."""
        parts = (("latent", request.latent, details.swizzle_latent), ("rope", request.rope, details.swizzle_rope))
        return {"aligned": ", aligned to 16 bytes"} | {
            f"kv_{part}": f"tensordesc<{request.format.element.mangled}[{details.box_rows}, {columns}],"
            f"NVMMASharedLayout(swizzle_byte_width={swizzle}, element_bitwidth={details.bits}, rank=2)>"
            for part, columns, swizzle in parts
        }

    def stages(self, kernel: Any) -> list[Stage]:
        """The kernels in the file of a `KernelPlan`."""
        constants = {} if kernel.splits else {"COLUMN_BLOCKS": kernel.merge.column_blocks}
        first = stage1(kernel, {"num_warps": kernel.num_warps, **FUSED, "launch_pdl": True})
        return [first, *stage2(kernel, {"launch_pdl": True}, **constants)]
