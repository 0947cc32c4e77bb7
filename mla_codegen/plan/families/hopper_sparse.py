"""The Hopper family of sparse KV: Gluon kernels for sm_90 that gather `fp8_ds_mla` records by lists.

Some warps gather, others multiply. Up to 32 heads go in blocks of 8 or 16, which are the N of every product, as in the
family `hopper`; more go in blocks of 64, which two warpgroups share.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

from mla_codegen.catalog.bounds import BOUND_16_BIT
from mla_codegen.plan.families.hopper import MERGE_RESIDENT, RESERVED, SM_BYTES, V_ROWS, Hopper
from mla_codegen.plan.families.request import Request, Resources
from mla_codegen.plan.families.stages import FUSED, Stage, stage1, stage2
from mla_codegen.spec.errors import Problem

FORMAT, LATENT, ROPE = "fp8_ds_mla", 512, 64
BLOCKS = (8, 16, 64)  # heads of a program
NARROW_HEADS = 32  # up to so many two blocks of 16 are no slower than one of 64
BLOCK_N, STRIP, GATHERING = 64, 16, 4
GATHERING_REGISTERS = {8: 64, 16: 64, 64: 56}  # of a thread that gathers
STAGES = {8: 2, 16: 2, 64: 3}
REGISTERS = {8: 128, 16: 128, 64: 168}  # of a thread, so that two programs fit an SM, or one of 12 warps
SECOND_REGISTERS, PRODUCTS_IN_FLIGHT = 224, 2
WEIGHT_SHIFTS = {8: 14.0, 16: 14.0, 64: 6.0}
PHASES = {8: 1, 16: 2}  # of the weights' swizzle


@dataclass(frozen=True)
class Details:
    """What the templates place beside the plan's record. Field names are what they say.

    compute              element type of PV's products
    kind                 narrow: blocks of 8 or 16 heads; wide: of 64
    groups, group        numbers of the groups of fp8 columns, and columns of each
    scale_at, rope_at    where a record's scales begin, in fp32 numbers, and its rope, in bf16
    strip, strips        records that are asked for at a time, and where those of a tile begin
    gathering            warps that gather, warps_in_all: all; gathering_registers, registers: of a thread
    masked               the last block of heads is not full
    weight_shift         exponent of the largest weight times its row's largest scale
    """

    compute: str
    kind: str
    groups: tuple[int, ...]
    group: int
    scale_at: int
    rope_at: int
    strip: int
    strips: tuple[int, ...]
    gathering: int
    warps_in_all: int
    gathering_registers: int
    registers: int
    half_latent: int
    half_group: int
    high_low_columns: int
    v_rows: int
    merge_programs: int
    weights_phases: int
    masked: bool
    weight_shift: float

    @property
    def looks_up_first(self) -> bool:
        """The next tile's entries are asked for before a tile's records: faster in blocks of 64 heads."""
        return self.kind == "wide"

    @property
    def looks_up_last(self) -> bool:
        return not self.looks_up_first

    @property
    def now(self) -> str:
        """What names of a tile's entries begin with, where those of the next tile have come already."""
        return "now_" if self.looks_up_first else ""

    @property
    def reads_infinity(self) -> bool:
        """Its kernels need no finite score of what is no row: their maximum begins at a finite one."""
        return True

    def each(self, name: str) -> str:
        """A name for each group of a record's columns: `even_0, even_1` of `even_{}`."""
        return ", ".join(name.format(group) for group in self.groups)

    @property
    def more_groups(self) -> tuple[int, ...]:
        return self.groups[1:]

    @property
    def products(self) -> str:
        """What multiplies, as an import lists it."""
        return "warpgroup_mma" if self.wide else "mma_v2, warpgroup_mma"

    @property
    def wide(self) -> bool:
        """Two warpgroups share the heads."""
        return self.kind == "wide"

    @property
    def shift_is(self) -> str:
        """What the shift of the weights is, in words."""
        if self.wide:
            return "a maximum may stay 2^8 behind, so that weights times scales reach from 2^-6 to 2^2"
        return "weights times scales reach 2^14, so that small ones survive f16"

    @property
    def second_registers(self) -> int:
        """Of a thread of the second warpgroup that multiplies."""
        return SECOND_REGISTERS

    @property
    def products_in_flight(self) -> int:
        """Products of V that a warpgroup leaves running while it prepares the next ones."""
        return PRODUCTS_IN_FLIGHT

    @property
    def mask_argument(self) -> str:
        """What the function that stores takes beside the rest, as source."""
        return ", head" if self.masked else ""

    @property
    def about_file(self) -> str:
        return f"hopper_sparse/{self.kind}_about.jinja"

    @property
    def layouts_file(self) -> str:
        return f"hopper_sparse/{self.kind}_layouts.py.jinja"

    @property
    def stage1_file(self) -> str:
        return f"hopper_sparse/{self.kind}.py.jinja"


def shared_bytes(request: Request, block_h: int, num_stages: int) -> int:
    """Bytes of shared memory of stage 1: the ring with its entries and barriers, q as fp8 and bf16, and weights."""
    groups = request.format.groups(request.latent)
    ring = num_stages * (BLOCK_N * (request.row_bytes + 4) + 16)
    q_bytes = 2 * block_h * (request.latent + request.rope)
    if block_h in PHASES:
        return ring + q_bytes + groups * BLOCK_N * block_h * 2
    # Of either warpgroup weights, and of each row what lifts it; of each head maxima and sums.
    return ring + q_bytes + 2 * (BLOCK_N * (2 * block_h + 2 * groups + 4 * groups + 8) + 8 * block_h + 32) + 4 * block_h


class HopperSparse(Hopper):
    """wgmma over records that warps gather."""

    name = "hopper_sparse"
    balances = False
    tiles = False
    strided = False
    always = frozenset({"exp2", "direct_out"})
    never: ClassVar = {
        "fast_rcp": "it divides once a head and split, after the loop",
        "streaming_loads": "records come by cp.async, 16 bytes a lane, which goes past L1",
    }
    tunable: ClassVar = {
        "splits": (1, 2, 3, 4, 6, 8, 12, 16, 24, 32),
        "num_stages": (1, 2, 3),
        "column_blocks": (1, 2, 4, 8, 16),
    }

    def refuse(self, request: Request) -> str | None:
        """Why the family cannot serve, or None."""
        if not request.sparse:
            return "it reads KV rows by lists"
        if request.kv != FORMAT:
            return f"it gathers {FORMAT} records, not {request.kv} rows"
        if (request.latent, request.rope) != (LATENT, ROPE):
            return f"its records are of {LATENT} + {ROPE} columns, not of {request.latent} + {request.rope}"
        if (request.q, request.out) != ("bf16", "bf16"):
            return f"q and out are bf16 in it, not {request.q} and {request.out}"
        for name, allowed in (("block_h", BLOCKS), ("block_n", (BLOCK_N,)), ("num_warps", (4,))):
            asked = request.knobs.resolved[name].value
            if asked is not None and asked not in allowed:
                return f"{name} is {' or '.join(map(str, allowed))} in it, not {asked}"
        return None

    def resources(self, request: Request) -> Resources | list[Problem]:
        """Tile and launch numbers, or what stands in their way."""
        knobs, target = request.knobs, request.target
        block_h = knobs.take("block_h", 8 if request.heads <= 8 else 16 if request.heads <= NARROW_HEADS else 64)
        knobs.take("block_n", BLOCK_N)
        num_warps = knobs.take("num_warps", 4)
        num_stages = knobs.take("num_stages", STAGES[block_h])
        need = shared_bytes(request, block_h, num_stages)
        if need > target.shared_bytes:
            what = (
                f"a ring of {num_stages} tiles of {BLOCK_N} {request.kv} rows beside {block_h} heads needs {need:,} "
                f"bytes of shared memory; {target.name} has {target.shared_bytes:,}"
            )
            return [Problem(knobs.loc("num_stages"), what, fix=f"num_stages: {STAGES[block_h]}")]
        resident = 2 if block_h in PHASES and 2 * (need + RESERVED) <= SM_BYTES else 1
        return Resources(BLOCK_N, block_h, num_warps, num_stages, None, need, resident)

    def details(self, request: Request) -> Any:
        """The rest of what the templates place."""
        numbers = self.resources(request)
        assert isinstance(numbers, Resources)
        block_h, form = numbers.block_h, request.format
        narrow = block_h in PHASES
        return Details(
            compute="fp16",
            kind="narrow" if narrow else "wide",
            groups=tuple(range(form.groups(request.latent))),
            group=form.group,
            scale_at=request.latent // 4,
            rope_at=(request.latent + form.scale_bytes(request.latent)) // 2,
            strip=STRIP,
            strips=tuple(range(0, BLOCK_N, STRIP)),
            gathering=GATHERING,
            warps_in_all=(4 if narrow else 8) + GATHERING,
            gathering_registers=GATHERING_REGISTERS[block_h],
            registers=REGISTERS[block_h],
            half_latent=request.latent // 2,
            half_group=form.group // 2,
            high_low_columns=2 * block_h,
            v_rows=V_ROWS,
            merge_programs=request.target.compute_units * MERGE_RESIDENT,
            weights_phases=PHASES.get(block_h, 0),
            masked=request.heads % block_h != 0,
            weight_shift=WEIGHT_SHIFTS[block_h],
        )

    def bounds(self, details: Any) -> tuple[float, float]:
        """q as two fp8 numbers has 8 to 9 bits: that shows in the LSE."""
        return BOUND_16_BIT, 5e-3

    def needs(self, details: Any) -> frozenset[str]:
        """Arguments beyond what all kernels take."""
        return frozenset({"opaque_zero"} if details.wide else ())

    def facts(self, request: Request, details: Any) -> dict[str, str]:
        """Records are bytes."""
        return {"kv_type": "*u8", "kv_given": "kv", "aligned": ", aligned to 16 bytes"}

    def stages(self, kernel: Any) -> list[Stage]:
        """The kernels in the file of a `KernelPlan`."""
        constants = {} if kernel.splits else {"COLUMN_BLOCKS": kernel.merge.column_blocks}
        options = {"num_warps": kernel.num_warps, "maxnreg": kernel.details.registers, **FUSED, "launch_pdl": True}
        return [stage1(kernel, options), *stage2(kernel, {"launch_pdl": True}, **constants)]
