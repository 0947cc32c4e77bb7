"""What the AMD Gluon families share: the forms that a kernel may take, their numbers and their register layouts.

A program keeps one tile of KV rows in LDS while the next is on its way into registers. Its waves split the tile's rows
for the scores and the latent columns for the output; with 32 heads twice as many waves split the heads too.
"""

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from mla_codegen.catalog.bounds import BOUND_16_BIT, BOUND_FP8
from mla_codegen.plan.families.base import Family
from mla_codegen.plan.families.request import Request, Resources
from mla_codegen.plan.families.stages import FUSED, Stage, stage1, stage2
from mla_codegen.plan.work import BALANCED_ROWS
from mla_codegen.runtime.formats import ELEMENTS
from mla_codegen.spec.errors import Problem

LATENTS = (256, 512)
ROPE = 64
STAGES = 2  # tiles: one in LDS, the next in registers
WAVES_PER_EU = 2
SIMDS, REGISTERS = 4, 512  # of a CU, and of a SIMD's lanes: divided among the waves on it
# Of the LSE, for scores of a few units, by the fp8 numbers that q becomes. With bf16 it is of weights rounded to bf16.
LSE_BOUNDS = {0: 2e-3, 1: 0.2, 2: 5e-3}
FP8_ONE = {"fp8_e4m3fnuz": "0x40", "fp8_e4m3fn": "0x38"}  # the byte of 1.0


@dataclass(frozen=True)
class Form:
    """One way to compute a tile.

    kind          folder of its templates in the family's
    block_n       KV rows of a tile
    waves         heads of a program -> waves
    numbers       fp8 numbers that q becomes; the weights are fp8 if it is 1, else bf16
    in_lds        heads of a program for which q, in fp8, stays in LDS: its registers would not suffice
    max_columns   columns of the scores whose maximum leaves a wave as one number; 0: the compiler's own reduction
    packed_in_lds q stays in LDS where columns take several query tokens
    side_by_side  q's two rope parts are one MMA operand
    """

    kind: str
    block_n: int
    waves: Mapping[int, int]
    numbers: int
    in_lds: frozenset[int]
    max_columns: int
    packed_in_lds: bool = True
    side_by_side: bool = False

    def keeps_in_lds(self, block_h: int, packed: bool) -> bool:
        """Whether q stays in LDS."""
        return block_h in self.in_lds or (packed and self.packed_in_lds)

    @property
    def query_args(self) -> str:
        if self.side_by_side:
            return "q_latent, q_latent_rest, q_rope"
        return "q_latent, q_rope" + (", q_latent_rest, q_rope_rest" if self.numbers == 2 else "")


@dataclass(frozen=True)
class Details:
    """What the templates place beside the plan's record. Field names are what they say.

    compute         element type of the products; `2 x`: q is two numbers of it; the weights' behind
    kind            folder of templates
    fp8             the KV is fp8: rows are read as 32-bit words; row: those, or bf16 numbers, of a KV row
    taken_as        fp8 format that the bytes are taken for; gl_fp8: as Gluon names it; fp8_max: its largest number;
                    fp8_one: the byte of 1.0
    kv_unit         what 1.0 of the bytes taken so stands for; repair_zero: -0 of e4m3fn must be cleared
    weight_shift    power of two that weights are multiplied by before they become fp8
    numbers         fp8 numbers that q becomes; the weights are fp8 if it is 1, else bf16
    query_step      template that keeps q in fp8; query_in_lds: in LDS
    query_args      the parts of q; query_rope: rope columns of an operand of q
    head_waves, column_waves         waves along heads and along rows or columns
    rows_of_wave, columns_of_wave    of the scores and of the output
    shared_kb       LDS; most_registers: what waves_per_eu leaves a lane; shares_cu: two programs fit a CU
    unit            neighbouring latent columns that a lane reads of a row; 0: V comes through the transposing read
    out_*, value_*, maxima_*         bases of register layouts over (head, column), (row, word) and (head, maximum)
    maxima          partial maxima of a row
    paged           KV rows lie in pages; pointer_cache, cache: what loads by pointer, and by base and offset, are given
    programs        that the device runs at once, of one head block
    """

    compute: str
    kind: str
    fp8: bool
    row: int
    taken_as: str
    gl_fp8: str
    fp8_max: float
    fp8_one: str
    kv_unit: float
    repair_zero: bool
    weight_shift: float
    numbers: int
    query_step: str
    query_in_lds: bool
    query_args: str
    query_rope: int
    head_waves: int
    column_waves: int
    rows_of_wave: int
    columns_of_wave: int
    shared_kb: int
    shares_cu: bool
    most_registers: int
    unit: int
    max_columns: int
    maxima: int
    maxima_registers: list[list[int]]
    maxima_waves: list[list[int]]
    out_registers: list[list[int]]
    out_waves: list[list[int]]
    value_registers: list[list[int]]
    value_waves: list[list[int]]
    family: str
    block_n: int
    latent: int
    cache: str
    pointer_cache: str
    side_by_side: bool
    paged: bool
    looks_by_rows: bool
    programs: int

    @property
    def query_latent(self) -> str:
        """q's latent columns as an operand, where q is bf16, as source."""
        return "q_latent.load(A_OPERAND)" if self.query_in_lds else "q_latent"

    @property
    def reads_infinity(self) -> bool:
        """Scores of masked rows are finite, and LOWEST is defined."""
        return True

    @property
    def rows_of_lane(self) -> int:
        """Query rows that a lane of a balanced kernel looks at."""
        return max(1, BALANCED_ROWS // (64 * self.head_waves * self.column_waves))

    @property
    def rows_file(self) -> str:
        return f"rows/{'lane_pages' if self.paged else 'buffer_ragged'}.jinja"

    @property
    def kv_words(self) -> str:
        """The KV as what rows are read as, as source."""
        return "kv.to(gl.pointer_type(gl.uint32), bitcast=True)" if self.fp8 else "kv"

    @property
    def latent_end(self) -> str:
        """Where the rope part of a row begins, in the same, as source."""
        return "LATENT // 4" if self.fp8 else "LATENT"

    def lanes(self, columns: int, bytes_of_lane: int) -> str:
        """How the 64 lanes of a wave split rows of `columns`, as many columns a lane as 16 bytes hold."""
        return f"[{64 * bytes_of_lane // columns}, {columns // bytes_of_lane}]"

    def rows_at_once(self, columns: int, bytes_of_lane: int) -> int:
        """Rows of `columns` that the lanes of all waves hold side by side, as `lanes` has them."""
        waves = self.head_waves * self.column_waves
        return min(self.block_n, waves * 64 * bytes_of_lane // columns)

    def phases(self, columns: int) -> str:
        """Rows of a phase, and phases, of LDS rows of `columns` bytes whose 16-byte chunks are exchanged."""
        return f"{128 // columns}, {columns // 16}"

    @property
    def maxima_phases(self) -> str:
        return f"{32 // self.maxima}, {self.maxima // 4}"

    @property
    def exact(self) -> bool:
        return self.numbers == 2

    @property
    def row_words(self) -> int:
        """32-bit words of a KV row of fp8."""
        return self.row

    @property
    def octets(self) -> bool:
        """A lane reads 8 neighbouring columns of a row, as a word of 64 bits; else 4, as a word of 32."""
        return self.unit == 8

    @property
    def unit_bytes(self) -> int:
        """Bytes that a lane reads of a row of bf16."""
        return 2 * self.unit

    @property
    def unit_words(self) -> int:
        return self.unit // 2

    @property
    def half_latent(self) -> int:
        return self.latent // 2

    @property
    def quarter_rows(self) -> int:
        """Words of four rows in a tile."""
        return self.block_n // 4

    @property
    def value_lanes(self) -> str:
        words = [self.unit // 2, self.unit, 2 * self.unit, 4 * self.unit]
        return str([[0, word] for word in words] + [[8, 0], [16, 0]])

    @property
    def out_run(self) -> int:
        """Neighbouring columns of O in a lane."""
        return 4 * self.unit

    @property
    def out_lanes(self) -> str:
        return f"[0, {4 * self.unit}], [0, {8 * self.unit}]"

    @property
    def max_of_lane(self) -> bool:
        """Every lane leaves a maximum of its own numbers in LDS; else every wave one of its columns."""
        return self.max_columns == 4

    @property
    def programs_words(self) -> str:
        return "two programs" if self.shares_cu else "one program"

    @property
    def format_file(self) -> str:
        return "amd_gluon/format_fp8.jinja" if self.fp8 else "amd_gluon/format_bf16.jinja"

    def _own(self, name: str) -> str:
        return f"{self.family}/{self.kind}/{name}.jinja"

    @property
    def about_file(self) -> str:
        return self._own("about")

    @property
    def layouts_file(self) -> str:
        return self._own("layouts.py")

    @property
    def tile_file(self) -> str:
        return self._own("tile.py")

    @property
    def query_file(self) -> str:
        return self._own("query.py")


def shared_bytes(request: Request, form: Form, block_h: int, in_lds: bool) -> int:
    """Bytes of LDS of stage 1: the tile, what of q stays there, and room for maxima and weights in turn."""
    tile = form.block_n * request.row_bytes
    weight_bytes = 1 if form.numbers == 1 else 2
    if not form.numbers:
        query = block_h * (request.row if in_lds else request.rope) * 2
    else:
        query = block_h * request.row * form.numbers if in_lds else 0
    maxima = 4 * (form.block_n // form.max_columns) if form.max_columns else 0
    return tile + query + block_h * max(maxima, form.block_n * weight_bytes)


def _doublings(first: int, end: int) -> list[int]:
    """first, 2 first, 4 first, ... below `end`."""
    bases = []
    while first < end:
        bases.append(first)
        first *= 2
    return bases


class AmdGluon(Family):
    """A family of AMD's matrix cores.

    taken_as     fp8 format of the target's matrix units
    transposes   LDS has a transposing read; else a lane reads several columns of a row and transposes them in registers
    """

    gluon = True
    takes = frozenset({"xcd_remap", "streaming_loads", "fp8_mma"})
    balances = True
    packs = True
    always = frozenset({"exp2", "peeled_tail", "direct_out"})
    never: ClassVar = {"fast_rcp": "it divides once a head and split, after the loop"}
    taken_as: ClassVar[str]
    transposes: ClassVar[bool]

    @abstractmethod
    def form_of(self, request: Request) -> Form | str:
        """The form that serves, or why there is none."""

    def _form(self, request: Request) -> Form:
        form = self.form_of(request)
        assert isinstance(form, Form)
        return form

    def refuse(self, request: Request) -> str | None:
        """Why the family cannot serve with the form that it would take, or None."""
        form = self.form_of(request)
        if request.sparse:
            return "its tiles are rows and pages of a request, not rows that lists name"
        if isinstance(form, str):
            return form
        if (request.q, request.out) != ("bf16", "bf16"):
            return f"q and out are bf16 in it, not {request.q} and {request.out}"
        if request.latent not in LATENTS or request.rope != ROPE:
            served = f"{' and '.join(map(str, LATENTS))} with a rope dim of {ROPE}"
            return f"it serves latent dims of {served}, not {request.latent} + {request.rope}"
        asked = request.knobs.resolved["block_h"].value
        if asked is not None and asked not in form.waves:
            return f"block_h is {' or '.join(map(str, form.waves))} in it, not {asked}"
        return None

    def resources(self, request: Request) -> Resources | list[Problem]:
        """Tile and launch numbers, or what stands in their way."""
        form, knobs = self._form(request), request.knobs
        block_h = knobs.take("block_h", max(form.waves) if request.columns > 16 or request.q_len > 1 else 16)
        block_n = knobs.take("block_n", form.block_n)
        num_warps = knobs.take("num_warps", form.waves[block_h])
        num_stages = knobs.take("num_stages", STAGES)
        waves_per_eu = knobs.take("waves_per_eu", WAVES_PER_EU)
        problems = []
        if num_warps != form.waves[block_h]:
            what = f"num_warps {num_warps}: {form.waves[block_h]} split {block_h} heads and tiles of {block_n} rows"
            problems.append(Problem(knobs.loc("num_warps"), what, fix=f"num_warps: {form.waves[block_h]}"))
        if num_stages != STAGES:
            what = f"num_stages {num_stages}: one tile is in LDS and the next one in registers, no more and no less"
            problems.append(Problem(knobs.loc("num_stages"), what, fix=f"num_stages: {STAGES}"))
        if waves_per_eu not in (1, WAVES_PER_EU):
            what = f"waves_per_eu {waves_per_eu}: the kernels need more than {REGISTERS // 3} registers a lane"
            problems.append(Problem(knobs.loc("waves_per_eu"), what, fix=f"waves_per_eu: {WAVES_PER_EU}"))
        if problems:
            return problems
        packed = request.q_len > 1 and request.heads % block_h != 0
        need = shared_bytes(request, form, block_h, form.keeps_in_lds(block_h, packed))
        resident = max(1, min(request.target.shared_bytes // need, SIMDS * waves_per_eu // num_warps))
        return Resources(block_n, block_h, num_warps, num_stages, waves_per_eu, need, resident)

    def details(self, request: Request) -> Details:
        """The rest of what the templates place."""
        form, taken_as, transposes = self._form(request), self.taken_as, self.transposes
        numbers = self.resources(request)
        assert isinstance(numbers, Resources)
        block_h = numbers.block_h
        packed = request.q_len > 1 and request.heads % block_h != 0
        in_lds = form.keeps_in_lds(block_h, packed)
        head_waves = block_h // 16
        column_waves = numbers.num_warps // head_waves
        fp8 = ELEMENTS[taken_as]
        unit = 0 if transposes else request.latent // 64
        heads_of_waves = [[base, 0] for base in _doublings(16, 16 * head_waves)]
        maxima = form.block_n // form.max_columns if form.max_columns else 0
        return Details(
            compute={0: "bf16", 1: taken_as, 2: f"2 x {taken_as}, bf16"}[form.numbers],
            kind=form.kind,
            fp8=request.format.fp8,
            row=request.row // 4 if request.format.fp8 else request.row,
            taken_as=taken_as,
            gl_fp8=f"gl.{fp8.triton}",
            fp8_max=fp8.largest,
            fp8_one=FP8_ONE[taken_as],
            kv_unit=1.0 if request.kv in (taken_as, "bf16") else 2.0,
            repair_zero=request.kv not in (taken_as, "bf16"),
            weight_shift=float(fp8.top),  # weights end at 1: as far as fp8 reaches
            numbers=form.numbers,
            query_step=f"amd_gluon/query_{'lds' if in_lds else 'words'}.py.jinja",
            query_in_lds=in_lds,
            query_args=form.query_args,
            query_rope=request.rope * (2 if form.side_by_side else 1),
            head_waves=head_waves,
            column_waves=column_waves,
            rows_of_wave=form.block_n // column_waves,
            columns_of_wave=request.latent // column_waves,
            shared_kb=round(numbers.shared_bytes / 1024),
            shares_cu=numbers.resident > 1,
            most_registers=REGISTERS // (numbers.waves_per_eu or 1),
            unit=unit,
            max_columns=form.max_columns,
            maxima=maxima,
            maxima_registers=[[0, base] for base in _doublings(1, maxima)],
            maxima_waves=[[0, 0]] * (column_waves.bit_length() - 1) + heads_of_waves,
            out_registers=[[0, base] for base in (unit, 2 * unit, *_doublings(1, unit))],
            out_waves=[[0, 16 * unit], [0, 32 * unit], *heads_of_waves],
            value_registers=[[0, base] for base in _doublings(1, unit // 2)] + [[1, 0], [2, 0], [4, 0]],
            value_waves=[[0, 8 * unit], [0, 16 * unit]] + [[0, 0]] * len(heads_of_waves),
            family=self.name,
            block_n=form.block_n,
            latent=request.latent,
            cache=', cache=".cg"' if "streaming_loads" in request.options else "",
            pointer_cache=', cache_modifier=".cg"' if "streaming_loads" in request.options else "",
            paged=request.page_size is not None,
            looks_by_rows=packed and request.kv not in (taken_as, "bf16"),
            programs=max(1, request.target.compute_units * numbers.resident // -(-request.heads // block_h)),
            side_by_side=form.side_by_side,
        )

    def bounds(self, details: Details) -> tuple[float, float]:
        """By the fp8 numbers that q becomes."""
        return BOUND_FP8 if details.numbers == 1 else BOUND_16_BIT, LSE_BOUNDS[details.numbers]

    def stages(self, kernel: Any) -> list[Stage]:
        """The kernels in the file of a `KernelPlan`."""
        options = {"num_warps": kernel.num_warps, "waves_per_eu": kernel.waves_per_eu, **FUSED}
        return [stage1(kernel, options), *stage2(kernel)]
