"""The portable family: plain Triton, for every GPU and the interpreter."""

from dataclasses import dataclass, replace
from typing import Any, ClassVar

from mla_codegen.catalog.optimizations import OPTIMIZATIONS
from mla_codegen.plan.families.base import Family
from mla_codegen.plan.families.request import Request, Resources
from mla_codegen.plan.families.stages import Stage, options_of, stage1, stage2
from mla_codegen.runtime.formats import ELEMENTS
from mla_codegen.spec.errors import Problem

LN2 = 0.6931471805599453
# What decoding by shifts makes of e4m3fn is at most 1.75, and 1.875 of its NaN: times 1.125 * 2^15 that is infinite in
# f16, and every number below has few enough digits to stay exact.
KEY_FACTOR = 36864.0
# What `_decode` knows to read: KV as it is; fp8 as words; fp8 whose bytes a matrix unit of another fp8 may take.
AS_IT_IS = ("bf16", "fp16", "fp8_e4m3fn", "fp8_e4m3fnuz", "fp8_ds_mla", "mxfp4_ds_mla", "fp8_ds_v4")
IN_WORDS = ("fp8_e4m3fn", "fp8_e4m3fnuz")
TAKEN_AS = {"fp8_e4m3fn": "fp8_e4m3fnuz"}  # at half its value, 0x80 repaired
SPREAD_BYTES = 16384  # of shared memory, through which scales of fp4 columns come to their threads
MANY_HEADS = 64  # heads of a program from which MMA takes q from shared memory


@dataclass(frozen=True)
class Details:
    """How a tile's bytes become MMA operands. Field names are what the templates say.

    format         file of templates/format that says how a KV row is read
    compute        element type of the products; tl_compute: as Triton names it
    taken_as       the format that fp8 bytes are taken for; tl_fp8: as Triton names it
    word           integer type of words that hold several columns, or what columns are read as one by one
    columns        columns of a word
    latent_value   a tile's columns, or words of them, as values; latent_key, rope_key: as keys, which make NaN of bytes
                   that are NaN, so that the row's weight is NaN; pair_key: the same of one column of a pair, `{}`
    rope_bytes     pointer type of rope columns where they are read by the byte; rope_zero: zero of it
    decode_step    file of templates/steps that splits words of 16 bits
    kv_factor      what 1.0 of the decoded KV stands for
    q_top          power of two that each head's largest |q| is scaled to; 0: q is used as it is
    q_parts        the tensors that q is split into
    weight_shift   added to the exponent of the weights, so that small ones survive; weight_scale: as a factor
    sums_rounded   the softmax sum is of the rounded weights; else rounding is too fine to matter
    key_factor     factor of f16 keys, by which those that are NaN become infinite; 0: keys are used as they are
    zero_sign_is_nan   of fp8 bytes that are decoded by shifts 0x80 is NaN
    reads_infinity     keys may be infinite: a score of -inf must give NaN, not weight 0
    repair_zero    -0 of e4m3fn is NaN in e4m3fnuz and must be cleared
    groups         numbers of a record's groups of columns, which share a scale; group: columns of each
    fp8_columns    columns of a record that are fp8; code_bytes: bytes of those that have scales; page_bytes,
                   row_bytes, scale_bytes: of a page of records, of what a row has of its first part, of its second
    bf16_columns   columns of a record that are bf16; rope_is_value: they are value too
    scales_apart   the scales of a page's records lie behind all of its rows
    q_types        types that parts of q are cast to, where they differ
    """

    format: str
    compute: str
    taken_as: str
    word: str
    columns: int = 1
    latent_value: str = "latent"
    latent_key: str = "latent"
    rope_key: str = "rope"
    pair_key: str = "{}"
    rope_bytes: str = ""
    rope_zero: str = "0.0"
    decode_step: str = ""
    kv_factor: float = 1.0
    q_top: int = 0
    q_parts: tuple[str, ...] = ("q_latent", "q_rope")
    weight_shift: float = 0
    weight_scale: int = 1
    sums_rounded: bool = False
    key_factor: float = 0.0
    zero_sign_is_nan: bool = False
    reads_infinity: bool = False
    repair_zero: bool = False
    row_words: int = 0
    casts_q: bool = False
    groups: tuple[int, ...] = ()
    group: int = 0
    fp8_columns: int = 0
    code_bytes: int = 0
    page_bytes: int = 0
    row_bytes: int = 0
    scale_bytes: int = 0
    bf16_columns: int = 0
    scales_apart: bool = False
    rope_is_value: bool = False
    q_types: tuple[str, ...] = ()

    @property
    def q_casts(self) -> list[tuple[str, str]]:
        """The parts of q, and the type that each is cast to, as kernels name it."""
        types = self.q_types or (self.compute,) * len(self.q_parts)
        return [(part, tl_name(kind)) for part, kind in zip(self.q_parts, types, strict=True)]

    def each(self, name: str) -> str:
        """A name for each group of a record's columns: `acc_0, acc_1` of `acc_{}`."""
        return ", ".join(name.format(group) for group in self.groups)

    def even_key(self, group: int) -> str:
        """The even columns of a group as keys, as source; `odd_key`: the odd ones."""
        return self.pair_key.format(f"even(kv_{group})")

    def odd_key(self, group: int) -> str:
        return self.pair_key.format(f"odd(kv_{group})")

    @property
    def rope_factor(self) -> str:
        """What brings products of a record's rope to the unit of those of its groups, as source."""
        return " * (KEY_FACTOR / KV_SCALE)" if self.key_factor else ""

    @property
    def more_groups(self) -> tuple[int, ...]:
        return self.groups[1:]

    @property
    def rope_at(self) -> int:
        """Where a record's rope columns begin."""
        return self.code_bytes + (0 if self.scales_apart else self.scale_bytes)

    @property
    def names_rope(self) -> bool:
        """The kernel has the constant ROPE; a record of groups says BF16, whose columns may be value too."""
        return self.bf16_columns == 0

    @property
    def rope_norm(self) -> str:
        """What brings the sums of a record's rope to the output, as source."""
        return "(norm / KV_SCALE)" if self.scaled_kv else "norm"

    @property
    def largest(self) -> str:
        """The running maximum, less what the weights are shifted by."""
        return "m - WEIGHT_SHIFT" if self.weight_shift else "m"

    @property
    def format_file(self) -> str:
        return f"format/{self.format}.jinja"

    @property
    def more_q_parts(self) -> tuple[str, ...]:
        return self.q_parts[1:]

    @property
    def weights_in(self) -> str:
        return "fp8" if ELEMENTS[self.compute].fp8 else "f16"

    @property
    def masked_score(self) -> str:
        """Score of a row past the end."""
        return "LOWEST" if self.reads_infinity else 'float("-inf")'

    @property
    def even_latent_key(self) -> str:
        return self.pair_key.format("even(latent)")

    @property
    def odd_latent_key(self) -> str:
        return self.pair_key.format("odd(latent)")

    @property
    def even_rope_key(self) -> str:
        return self.pair_key.format("even(rope)")

    @property
    def odd_rope_key(self) -> str:
        return self.pair_key.format("odd(rope)")

    @property
    def tl_compute(self) -> str:
        return tl_name(self.compute)

    @property
    def tl_fp8(self) -> str:
        return tl_name(self.taken_as)

    @property
    def viewed(self) -> bool:
        """`run` views the KV as what stage 1 loads."""
        return self.group > 0 or ELEMENTS[self.taken_as].fp8

    @property
    def torch_word(self) -> str:
        return ELEMENTS[self.word].torch

    @property
    def scaled_kv(self) -> bool:
        """1.0 of the decoded KV stands for something else."""
        return self.kv_factor != 1.0

    @property
    def scales_q(self) -> bool:
        return self.q_top > 0

    @property
    def q_fills_range(self) -> bool:
        """q becomes fp8 and is scaled to fill its range."""
        return self.q_top > 1


def shared_bytes(request: Request, block_n: int, block_h: int, num_stages: int) -> int:
    """Bytes of shared memory of stage 1, from above (held against the compiler's own numbers by a test).

    The pipelined KV tiles; AMD keeps one less than num_stages, the next one waits in registers. From 64 heads on also
    q and the widened columns of packed fp8, which MMA then reads from shared memory, or the output before its store.
    """
    amd = request.target.vendor == "amd"
    fp4 = request.format.bits == 4
    packed = (request.format.fp8 and "packed_fp8" in request.options) or fp4
    tiles = block_n * request.row_bytes * (max(1, num_stages - 1) if amd else num_stages)
    if fp4:  # tiles become bf16 beside those that are pipelined, their scales on the way
        tiles += block_n * (request.latent if amd else request.row) * 2 + (0 if amd else SPREAD_BYTES)
    if block_h < MANY_HEADS and not (amd and fp4):  # whose output goes through it before its store
        return tiles
    output = block_h * request.latent * (2 if amd and not packed else 4)
    if amd:
        return max(tiles, output)
    widened = block_n * request.latent if packed and not fp4 else 0
    return max(tiles + block_h * request.row * 2 + widened, output)


def tl_name(element: str) -> str:
    """As kernels name it."""
    return f"tl.{ELEMENTS[element].triton}"


def _decode(request: Request) -> Details:
    """How a tile's bytes become MMA operands: word size, element types, and what 1.0 of them stands for."""
    kv, target = request.kv, request.target
    fp8_mma, packed = "fp8_mma" in request.options, "packed_fp8" in request.options
    if request.format.record:
        return _record(request)
    if not request.format.fp8:
        return Details("plain", kv, kv, kv)
    taken_as = kv if not fp8_mma or kv in target.fp8_mma else TAKEN_AS[kv]
    repair = kv != taken_as
    factor = 2.0 if repair else 1.0
    if fp8_mma and packed:
        return Details(
            "quads", taken_as, taken_as, "int32", 4, kv_factor=factor, repair_zero=repair,
            latent_value="repair(latent)" if repair else "latent",
            latent_key="repair_keys(latent)" if repair else "latent",
            rope_key="repair_key_bytes(rope)" if repair else "rope",
            rope_bytes="tl.uint8" if repair else tl_name(taken_as), rope_zero="0" if repair else "0.0",
            q_parts=(*(f"q_latent_{j}" for j in range(4)), "q_rope"),
        )  # fmt: skip
    if fp8_mma:
        return Details("plain", taken_as, taken_as, taken_as, kv_factor=factor)
    if packed:
        pairs = Details(
            "pairs", "fp16", taken_as, "int16", 2, decode_step="steps/pairs_bits.py.jinja",
            q_parts=("q_latent_even", "q_latent_odd", "q_rope_even", "q_rope_odd"),
        )  # fmt: skip
        if kv != "fp8_e4m3fn":  # its exponent bias is 8, f16's 15
            return replace(pairs, kv_factor=128.0, pair_key="number({})", zero_sign_is_nan=True)
        if target.pair_decode:
            return replace(pairs, decode_step="steps/pairs_asm.py.jinja")
        return replace(pairs, kv_factor=256.0, pair_key="{} * KEY_FACTOR", key_factor=KEY_FACTOR)
    widened = ("latent.to(tl.float16)", "rope.to(tl.float16)")
    return Details("plain", "fp16", taken_as, taken_as, latent_value=widened[0], rope_key=widened[1])


def _record(request: Request) -> Details:
    """Records of fp8 or fp4 columns in groups that have a scale each, and bf16 columns."""
    form, latent = request.format, request.latent
    parts: dict[str, Any] = {
        "group": form.group, "code_bytes": form.code_bytes(latent), "scale_bytes": form.scale_bytes(latent),
        "row_bytes": request.row_bytes - form.scale_bytes(latent) * form.blocks,
    }  # fmt: skip
    if form.bits == 4:
        return Details("fours", "bf16", request.kv, "uint8", q_parts=("q_even", "q_odd", "q_rope"), **parts)
    groups = tuple(range(form.groups(latent)))
    names = [f"q_{part}_{g}" for g in groups for part in ("even", "odd")]
    found = Details(
        "groups", "fp16", request.kv, "uint8", decode_step="steps/pairs_bits.py.jinja", q_parts=(*names, "q_rope"),
        q_types=("fp16",) * len(names) + ("bf16",), groups=groups, fp8_columns=latent - form.tail,
        bf16_columns=form.tail or request.rope, page_bytes=(request.page_size or 0) * request.row_bytes,
        scales_apart=form.blocks, rope_is_value=form.tail > 0, **parts,
    )  # fmt: skip
    if request.target.pair_decode:
        return replace(found, decode_step="steps/pairs_asm.py.jinja")
    return replace(found, kv_factor=256.0, pair_key="{} * KEY_FACTOR", key_factor=KEY_FACTOR)


class Triton(Family):
    """Plain Triton."""

    name = "triton"
    packs = True
    strided = True
    takes = frozenset(OPTIMIZATIONS)
    tunable: ClassVar = {  # what `tune` may try; the plan says which combinations are legal
        "splits": (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128),
        "block_n": (16, 32, 64, 128),
        "block_h": (16, 32, 64),
        "num_warps": (2, 4, 8),
        "num_stages": (1, 2, 3, 4),
        "waves_per_eu": (0, 1, 2, 3, 4),
    }

    def refuse(self, request: Request) -> str | None:
        """Why the family cannot serve, or None."""
        if request.kv not in AS_IT_IS:
            return f"it reads {', '.join(AS_IT_IS)} KV, not {request.kv}"
        if "packed_fp8" in request.options and request.format.fp8 and request.kv not in IN_WORDS:
            return f"packed_fp8 splits words of {', '.join(IN_WORDS)}, not of {request.kv}"
        native = request.target.fp8_mma
        if "fp8_mma" in request.options and native.isdisjoint((request.kv, TAKEN_AS.get(request.kv))):
            return (
                f"fp8_mma of {request.kv} KV on {request.target.name}: its matrix units take {', '.join(native)}, in "
                f"which bytes of {request.kv} are other numbers"
            )
        if request.format.fp8 and "packed_fp8" not in request.options and request.kv not in request.target.fp8_convert:
            return (
                f"{request.kv} KV without packed_fp8 on {request.target.name}: the hardware does not convert "
                f"{request.kv}, so the compiler would decode it in software"
            )
        return None

    def resources(self, request: Request) -> Resources | list[Problem]:
        """Tile and launch numbers, or what stands in their way."""
        knobs, target = request.knobs, request.target
        fp8_mma, packed = "fp8_mma" in request.options, "packed_fp8" in request.options
        num_stages = knobs.take("num_stages", 2)

        def memory(block_n: int, block_h: int) -> int:
            return shared_bytes(request, block_n, block_h, num_stages)

        columns = request.columns
        most = 16 if columns <= 16 else 64 if columns > 32 and memory(16, 64) <= target.shared_bytes else 32
        block_h = knobs.take("block_h", most)
        wide = 64 if request.q_len == 1 else 32  # 4 warps of a masked block of 32 columns spill
        num_warps = knobs.take("num_warps", 8 if block_h >= wide else 4)
        waves = knobs.take("waves_per_eu", 0 if target.waves_per_eu else None)
        # Decoding fp4 takes registers: a tile of 32 rows in 4 warps took 412 us on an H200, of 64 rows in 8 warps 488.
        tiles = (32, 16) if request.format.bits == 4 else (64, 32, 16)
        fits = [n for n in tiles if memory(n, block_h) <= target.shared_bytes]
        block_n = knobs.take("block_n", fits[0] if fits else 16)
        need = memory(block_n, block_h)
        problems = []
        if need > target.shared_bytes:
            beside = f" beside {block_h} heads" if block_h >= MANY_HEADS else ""
            what = (
                f"a tile of {block_n} {request.kv} rows in {num_stages} stages{beside} needs {need:,} bytes of shared "
                f"memory; {target.name} has {target.shared_bytes:,}"
            )
            smaller = [n for n in fits if n < block_n]
            fewer = [h for h in (64, 32, 16) if h < block_h and memory(block_n, h) <= target.shared_bytes]
            if smaller:
                problems.append(Problem(knobs.loc("block_n"), what, fix=f"block_n: {smaller[0]} fits"))
            elif fewer:
                problems.append(Problem(knobs.loc("block_h"), what, fix=f"block_h: {fewer[0]} fits"))
            else:
                problems.append(Problem(knobs.loc("block_n"), what, fix="use fewer num_stages"))
        if fp8_mma and not packed and block_n < 32:
            what = f"block_n {block_n} is below the 32 rows of an fp8 MMA"
            problems.append(Problem(knobs.loc("block_n"), what, allowed="32, 64, 128, 256", fix="block_n: 32"))
        if problems:
            return problems
        resident = 2 if need * 2 <= target.shared_bytes else 1
        return Resources(block_n, block_h, num_warps, num_stages, waves or None, need, resident)

    def details(self, request: Request) -> Details:
        """The rest of what the templates place."""
        found = _decode(request)
        fp8_mma = "fp8_mma" in request.options and request.format.fp8
        # The largest weight is 2^bits: small ones stay as clear of 0 as the type allows; bf16 reaches as far as fp32.
        bits = 0 if found.compute == "bf16" else ELEMENTS[found.compute].top
        unscaled = found.compute in ("bf16", request.q)
        return replace(
            found,
            q_top=0 if unscaled else 64 if fp8_mma else 1,
            casts_q=unscaled and found.compute != request.q,
            weight_shift=bits if "exp2" in request.options else bits * LN2,
            weight_scale=1 << bits,
            sums_rounded=fp8_mma,
            reads_infinity=request.format.infinite or found.key_factor > 0,
            row_words=request.row // found.columns,
        )

    def stages(self, kernel: Any) -> list[Stage]:
        """The kernels in the file of a `KernelPlan`."""
        return [stage1(kernel, options_of(kernel), pools=frozenset({"kv"})), *stage2(kernel)]

    def facts(self, request: Request, details: Any) -> dict[str, str]:
        """Rows are read as words or as the format that they are taken for."""
        element = ELEMENTS[details.word]
        words = "kv_layout and (kv_layout[0] // WORD.value, kv_layout[1])"
        return {
            "kv_type": element.pointer,
            "kv_given": "kv.view(KV_DTYPE)" if details.viewed else "kv",
            "kv_layout_given": words if details.row_words < request.row and not request.format.record else "",
            "aligned": "",
        }
