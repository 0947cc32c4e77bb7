"""The Hopper family: Gluon kernels for sm_90, fp8 (e4m3fn) and bf16 KV.

One kind of kernel for each width of a block of columns. Of 16 columns, the heads of one query token, they are the N of
every product, KV rows or latent columns its M, so that 16 fill wgmma. Wider blocks are warp-specialised and may take
several query tokens. KV tiles come by TMA through a ring of stages. The notes on each choice are in the rendered files'
docstrings.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from mla_codegen.catalog.bounds import BOUND_16_BIT, LSE_BOUND_16_BIT
from mla_codegen.plan.families.base import Family
from mla_codegen.plan.families.request import Request, Resources
from mla_codegen.plan.families.stages import FUSED, Stage, stage1, stage2
from mla_codegen.plan.work import BALANCED_ROWS, Merge, Work, power_of_two
from mla_codegen.spec.errors import Problem

LATENTS = (128, 256, 512)
ROPES = (32, 64, 128)
WARPS_OF_TILE = {64: 4, 128: 8}  # each warp takes 16 KV rows of the scores
MIN_PAGE = 16  # rows: boxes of fewer bytes would not be worth their TMA instructions
SM_BYTES, RESERVED = 233472, 1024  # shared memory of an SM, and what each program takes beside its own
# A block of 16 heads reads the KV again. On an H200 bf16 KV at 64 x 8192 with 128 heads took 704 us so, and 481 us in
# plain Triton with blocks of 64 heads: with more heads than this the 16-column kernel serves only when asked for.
BF16_HEADS = 80
V_ROWS = 16  # KV rows of V in registers at a time
MERGE_RESIDENT = 8  # programs of stage 2 that share an SM, by their registers
PARTIALS_AT_ONCE = 4096  # fp32 numbers of partials that 4 warps of stage 2 hold; 8 warps beyond


def _shared_bytes_16(request: Request, block_n: int, num_warps: int, num_stages: int) -> int:
    """The ring and its barriers, q, weights, and each warp's maxima.

    In fp8 kernels q as two fp8 numbers takes the place that it had as bf16.
    """
    q_bytes = 16 * request.row * 2
    weights, maxima = block_n * 16 * 2, num_warps * 16 * 4
    return num_stages * (block_n * request.row_bytes + 8) + q_bytes + weights + maxima


def _shared_bytes_bf16_64(request: Request, block_n: int, num_warps: int, num_stages: int) -> int:
    """q and the ring; of each tile's owner four vectors; limits of the columns; 15 barriers; 2 KB of the compiler's.

    The weights lie where the rope part of their tile was.
    """
    vectors = 4 * 2 * 64 * 4 + 64 * 4
    return (64 + num_stages * block_n) * request.row * 2 + vectors + 15 * 8 + 2048


def _shared_bytes_fp8_columns(request: Request, width: int, block_n: int, num_stages: int) -> int:
    """q as two fp8 numbers, the ring, weights beyond those in the rope part, vectors and flags, barriers, scratch."""
    weights = 2 * 64 * 32 * 2  # of 64 columns, the other half lies where the rope part of its tile was
    vectors, barriers, scratch = (3 * 2 + 3) * width * 4 + 3 * 4 * 4, 8 * (2 * num_stages + 8), 512
    return width * request.row * 2 + num_stages * block_n * request.row_bytes + weights + vectors + barriers + scratch


@dataclass(frozen=True)
class Kind:
    """The kernels for blocks of so many columns.

    folder       of their templates, under templates/hopper
    warps        KV rows of a tile -> warps of the launch; the first number of rows is the usual one
    stages       tiles in the ring as a rule; most_stages: None: as many as shared memory holds
    latents, ropes   latent and rope dims that they serve
    shared       bytes of shared memory of stage 1: of a request, KV rows of a tile, warps, stages
    packs        a block may take several query tokens
    one_a_sm     one program fills an SM
    parts        TMA brings tiles by parts; halves: of the latent columns, too, each with barriers of its own
    row_time     time of a KV row, in times that of 16 columns: measured at 64 x 8192 on an H200
    """

    folder: str
    warps: dict[int, int]
    shared: Callable[[Request, int, int, int], int]
    row_time: float = 1.0
    stages: int = 2
    most_stages: int | None = None
    latents: tuple[int, ...] = LATENTS
    ropes: tuple[int, ...] = ROPES
    packs: bool = True
    one_a_sm: bool = True
    parts: bool = True
    halves: bool = False

    @property
    def block_n(self) -> int:
        return next(iter(self.warps))

    def takes(self, request: Request) -> bool:
        """The tile and the ring are what the spec sets, if it sets them."""
        block_n, num_stages = (request.knobs.resolved[name].value for name in ("block_n", "num_stages"))
        return block_n in (None, *self.warps) and (self.most_stages is None or num_stages in (None, self.most_stages))


# Columns of a block -> the kind, for bf16 and for fp8 KV.
BF16_KINDS = {
    16: Kind("bf16", WARPS_OF_TILE, _shared_bytes_16, packs=False, one_a_sm=False, parts=False),
    64: Kind("bf16_columns", {64: 4}, _shared_bytes_bf16_64, 1.05, most_stages=2, ropes=(64,), halves=True),
}
FP8_KINDS = {
    16: Kind("fp8", WARPS_OF_TILE, _shared_bytes_16, packs=False, one_a_sm=False, parts=False),
    32: Kind(
        "fp8_columns", {64: 4}, lambda r, n, _, stages: _shared_bytes_fp8_columns(r, 32, n, stages),
        1.1, stages=5, most_stages=5, latents=(256, 512), ropes=(64,),
    ),
    64: Kind(
        "fp8_columns", {64: 4}, lambda r, n, _, stages: _shared_bytes_fp8_columns(r, 64, n, stages),
        1.55, stages=4, most_stages=4, latents=(256, 512), ropes=(64,),
    ),
}  # fmt: skip


def kinds_of(request: Request) -> dict[int, Kind]:
    """The kinds that serve a request's KV, by the columns of a block."""
    kinds = FP8_KINDS if request.format.fp8 else BF16_KINDS
    return {
        width: kind for width, kind in kinds.items() if request.latent in kind.latents and request.rope in kind.ropes
    }


def _width(request: Request) -> int:
    """Columns of a block as a rule: the narrowest that holds those of a request, else the widest.

    Blocks of one query token alone do not hold several. Settings of the tile and the ring that a kind cannot have leave
    it out.
    """
    kinds = {width: kind for width, kind in kinds_of(request).items() if kind.takes(request)} or kinds_of(request)
    holding = [w for w, kind in kinds.items() if w >= request.columns and (kind.packs or request.q_len == 1)]
    return min(holding, default=max(kinds))


@dataclass(frozen=True)
class Details:
    """What the templates place beside the plan's record. Field names are what they say.

    compute        element type of PV's products; gl_kv: the KV's as Gluon names it; torch_kv: as torch does
    kind           folder of templates; rows: how TMA brings tiles: ragged, pages, boxes
    bits           of a KV element; swizzle_latent, swizzle_rope: bytes over which TMA swizzles each part
    tile_bytes     of a KV tile; boxes: that TMA brings it in, box_rows: rows of each
    parts          TMA brings tiles by parts; halves: of the latent columns, too, each with barriers of its own
    shares_sm      two programs fit an SM
    programs       of stage 1 that the device runs at once, of one head block
    merge_programs programs of stage 2 that the device runs at once
    rows_of_thread query rows that a thread of a balanced kernel looks at
    half_latent    words of two latent columns; half_words: words of half the columns, if they have 16 bits
    half_bytes     of half the latent columns of a tile; rope_bytes: of its rope columns
    high_low_columns   of q as two fp8 numbers; interleaves_q: these are the rows of one operand, 8 by 8
    q_chunks       parts of q's latent dims of 128
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
    parts: bool
    halves: bool
    shared_kb: int
    shares_sm: bool
    v_rows: int
    programs: int
    merge_programs: int
    rows_of_thread: int
    half_latent: int
    half_words: int
    half_bytes: int
    rope_bytes: int
    high_low_columns: int
    interleaves_q: bool
    q_chunks: int
    splits_q: bool
    reads_infinity: ClassVar[bool] = True  # LOWEST is the kernel's own

    @property
    def several_boxes(self) -> bool:
        return self.boxes > 1

    @property
    def latent_part(self) -> str:
        """Latent columns that TMA brings at once, as source."""
        return "HALF" if self.halves else "LATENT"

    @property
    def splits_pairs(self) -> bool:
        return self.kind in ("fp8", "fp8_columns")

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


def _chosen(request: Request) -> bool:
    """The family is the plan's choice, not the spec's."""
    return request.knobs.resolved["family"].value is None


def _column_blocks(splits: int, latent: int) -> int:
    """Programs that split a head's columns in stage 2: more of them hide the latency where there are many splits."""
    wanted = max(1, min(8, splits // 8), splits // 32)
    return min(wanted, latent // 16)


class Hopper(Family):
    """wgmma and TMA, everything transposed."""

    name = "hopper"
    gluon = True
    balances = True
    packs = True
    tiles = True
    strided = True
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
        "block_h": (16, 32, 64),
        "block_n": (64, 128),
        "num_warps": (4, 8),
        "num_stages": (1, 2, 3, 4, 5, 6),
        "column_blocks": (1, 2, 4, 8, 16),
    }

    def refuse(self, request: Request) -> str | None:
        """Why the family cannot serve, or None."""
        if request.sparse:
            return "TMA brings it ranges of rows and pages, not rows that lists name"
        if request.kv not in ("fp8_e4m3fn", "bf16"):
            return f"its products are of fp8_e4m3fn and bf16 KV, not of {request.kv}"
        if request.page_size is not None and request.page_size < MIN_PAGE:
            return f"TMA brings it pages of {MIN_PAGE} rows or more, not of {request.page_size}"
        if (request.q, request.out) != ("bf16", "bf16"):
            return f"q and out are bf16 in it, not {request.q} and {request.out}"
        if request.latent not in LATENTS or request.rope not in ROPES:
            served = f"{', '.join(map(str, LATENTS))} and {', '.join(map(str, ROPES))}"
            return f"it serves latent and rope dims of {served}, not {request.latent} + {request.rope}"
        kinds = kinds_of(request)
        asked = request.knobs.resolved["block_h"].value
        if asked is not None and asked not in kinds:
            return f"block_h is {' or '.join(map(str, kinds))} in it, not {asked}"
        width = asked or _width(request)
        if (request.kv, width) == ("bf16", 16) and request.heads > BF16_HEADS and _chosen(request):
            faster = f"bf16 KV of {request.heads} heads is faster in blocks of 64 heads"
            return f"{faster}; `family: hopper` takes it all the same"
        block_n, tiles = request.knobs.resolved["block_n"].value, kinds[width].warps
        if block_n is not None and block_n not in tiles:
            return f"block_n is {' or '.join(map(str, tiles))} in it with blocks of {width} columns, not {block_n}"
        return None

    def unpacked(self, request: Request, resources: Resources) -> str | None:
        """Blocks of 16 columns take the heads of one query token."""
        if not kinds_of(request)[resources.block_h].packs:
            return f"blocks of {resources.block_h} columns take one query token's"
        return super().unpacked(request, resources)

    def row_time(self, request: Request, resources: Resources) -> float:
        """An estimate: time of a KV row of a block of columns, of 16 of them being 1."""
        return kinds_of(request)[resources.block_h].row_time

    def resources(self, request: Request) -> Resources | list[Problem]:
        """Tile and launch numbers, or what stands in their way."""
        knobs, target = request.knobs, request.target
        block_h = knobs.take("block_h", _width(request))
        kind = kinds_of(request)[block_h]
        block_n = knobs.take("block_n", kind.block_n)
        num_warps = knobs.take("num_warps", kind.warps[block_n])
        num_stages = knobs.take("num_stages", kind.stages)
        problems = []
        if num_warps != kind.warps[block_n]:
            what = f"num_warps {num_warps} for a tile of {block_n} rows: each warp takes 16 rows of the scores"
            fix = f"num_warps: {kind.warps[block_n]}"
            problems.append(Problem(knobs.loc("num_warps"), what, fix=fix))
        if kind.most_stages and num_stages != kind.most_stages:
            what = f"a ring of {num_stages} tiles: with blocks of {block_h} columns it has {kind.most_stages}"
            problems.append(Problem(knobs.loc("num_stages"), what, fix=f"num_stages: {kind.most_stages}"))
        need = kind.shared(request, block_n, num_warps, num_stages)
        if need > target.shared_bytes and not problems:
            what = (
                f"a ring of {num_stages} tiles of {block_n} {request.kv} rows needs {need:,} bytes of shared memory; "
                f"{target.name} has {target.shared_bytes:,}"
            )
            fits = [
                n for n in range(1, num_stages) if kind.shared(request, block_n, num_warps, n) <= target.shared_bytes
            ]
            problems.append(Problem(knobs.loc("num_stages"), what, fix=f"num_stages: {fits[-1]}" if fits else ""))
        if problems:
            return problems
        room = num_warps == 4 and 2 * (need + RESERVED) <= SM_BYTES  # 8 warps take all registers
        return Resources(block_n, block_h, num_warps, num_stages, None, need, 2 if room and not kind.one_a_sm else 1)

    def details(self, request: Request) -> Details:
        """The rest of what the templates place."""
        numbers = self.resources(request)
        assert isinstance(numbers, Resources)
        element = request.format.element
        kind = kinds_of(request)[numbers.block_h]
        head_blocks = -(-request.heads // numbers.block_h)
        box_rows = min(request.page_size or numbers.block_n, numbers.block_n)
        return Details(
            compute="fp16" if element.fp8 else "bf16",
            kind=kind.folder,
            rows="ragged" if request.page_size is None else "pages" if box_rows == numbers.block_n else "boxes",
            gl_kv=f"gl.{element.triton}",
            torch_kv=element.torch,
            bits=8 * element.bytes,
            swizzle_latent=min(128, request.latent * element.bytes),
            swizzle_rope=min(128, request.rope * element.bytes),
            tile_bytes=numbers.block_n * request.row_bytes,
            boxes=numbers.block_n // box_rows,
            box_rows=box_rows,
            parts=kind.parts,
            halves=kind.halves,
            shared_kb=round(numbers.shared_bytes / 1024),
            shares_sm=numbers.resident == 2,
            v_rows=V_ROWS,
            programs=max(1, request.target.compute_units * numbers.resident // head_blocks),
            merge_programs=request.target.compute_units * MERGE_RESIDENT,
            rows_of_thread=BALANCED_ROWS // (32 * numbers.num_warps),
            half_latent=request.latent // 2,
            half_words=request.latent // 4,
            half_bytes=numbers.block_n * request.latent // 2 * element.bytes,
            rope_bytes=numbers.block_n * request.rope * element.bytes,
            high_low_columns=2 * numbers.block_h,
            interleaves_q=numbers.block_h == 32,
            q_chunks=request.latent // 128,
            splits_q=True,
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
        return BOUND_16_BIT, 5e-3 if details.compute == "fp16" else LSE_BOUND_16_BIT

    def facts(self, request: Request, details: Details) -> dict[str, str]:
        """The types of the TMA descriptors."""
        latent = request.latent // 2 if details.halves else request.latent
        parts = (("latent", latent, details.swizzle_latent), ("rope", request.rope, details.swizzle_rope))
        rows = "kv_layout and (kv_layout[0] // (LATENT.value + ROPE.value), kv_layout[1])"  # from page to page
        return {"aligned": ", aligned to 16 bytes", "kv_layout_given": rows} | {
            f"kv_{part}": f"tensordesc<{request.format.element.mangled}[{details.box_rows}, {columns}],"
            f"NVMMASharedLayout(swizzle_byte_width={swizzle}, element_bitwidth={details.bits}, rank=2)>"
            for part, columns, swizzle in parts
        }

    def stages(self, kernel: Any) -> list[Stage]:
        """The kernels in the file of a `KernelPlan`."""
        constants = {} if kernel.splits else {"COLUMN_BLOCKS": kernel.merge.column_blocks}
        first = stage1(kernel, {"num_warps": kernel.num_warps, **FUSED, "launch_pdl": True})
        if kernel.details.halves:  # the loop of a warpgroup takes a tile of each
            first = replace(first, turn_rows=2 * kernel.block_n)
        return [first, *stage2(kernel, {"launch_pdl": True}, **constants)]
