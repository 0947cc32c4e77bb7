"""Spec -> Plan: every decision about every kernel, made once, before anything is rendered.

A `KernelPlan` is a frozen record that templates only place. `Resolved` keeps where a number came from, for `explain`.
"""

from dataclasses import dataclass
from typing import Any

from .datamodel import Settings, Shape, Spec, apply_optimizations
from .errors import Loc, Problem
from .memory import shared_bytes
from .optimizations import OPTIMIZATIONS
from .runtime.choice import Choice, General
from .runtime.splits import MAX_SPLITS, choose_splits
from .targets import TARGETS, Target

BYTES = {"bf16": 2, "fp16": 2, "fp8_e4m3fn": 1, "fp8_e4m3fnuz": 1}
TL = {"bf16": "tl.bfloat16", "fp16": "tl.float16", "fp8_e4m3fn": "tl.float8e4nv", "fp8_e4m3fnuz": "tl.float8e4b8"}
TORCH = {
    "bf16": "torch.bfloat16",
    "fp16": "torch.float16",
    "fp8_e4m3fn": "torch.float8_e4m3fn",
    "fp8_e4m3fnuz": "torch.float8_e4m3fnuz",
}
KNOBS = ("splits", "block_n", "block_h", "num_warps", "num_stages", "waves_per_eu")


@dataclass(frozen=True)
class Resolved:
    """A knob's value and where it came from: `shape`, `shape, per_kv`, `defaults`, `defaults, per_kv`, `automatic`."""

    value: Any
    source: str


@dataclass(frozen=True)
class Lane:
    """The columns of a KV row that one accumulator holds, and how they come out of a tile's words."""

    suffix: str
    decode: str
    decode_rope: str
    q_columns: str
    q_rope_columns: str


@dataclass(frozen=True)
class KernelPlan:
    """One kernel file, every number resolved. Field names are what the templates say."""

    name: str
    spec_name: str
    spec_file: str
    build_command: str
    origin: str
    title: str
    summary: str
    target: str
    family: str
    # shape; None: the general kernels, for every shape that the spec does not name
    batch: int | None
    kv_len: int | None
    # dimensions
    heads: int
    latent: int
    rope: int
    row: int
    row_words: int
    # element types
    q: str
    kv: str
    out: str
    compute: str
    tl_compute: str
    is_fp8: bool
    fp8: str
    tl_fp8: str
    torch_word: str
    word: str
    word_bytes: int
    lanes: tuple[Lane, ...]
    rope_lanes: tuple[Lane, ...]
    rope_bytes: str
    decode_step: str
    kv_factor: float
    q_top: int
    q_parts: tuple[str, ...]
    weight_shift: float
    weight_scale: int
    # tiles and launch
    splits: int | None
    max_splits: int
    block_n: int
    block_h: int
    head_blocks: int
    num_warps: int
    num_stages: int
    waves_per_eu: int | None
    split_tile: int
    stage2_warps: int
    places: int
    shared_bytes: int
    # steps
    exp2: bool
    fast_rcp: bool
    reciprocal: tuple[str, str] | None
    xcd_remap: bool
    xcds: int
    streaming: bool
    peeled: bool
    direct: bool
    masked_heads: bool
    repair_zero: bool
    # where it came from
    resolved: dict[str, Resolved]
    optimizations: tuple[str, ...]
    not_taken: tuple[str, ...]

    @property
    def exp(self) -> str:
        return "tl.math.exp2" if self.exp2 else "tl.exp"

    @property
    def exp_name(self) -> str:
        return "exp2" if self.exp2 else "exp"

    @property
    def log(self) -> str:
        return "tl.math.log2" if self.exp2 else "tl.log"

    @property
    def splits_name(self) -> str:
        return "SPLITS" if self.splits else "splits"

    @property
    def splits_value(self) -> str:
        return "SPLITS.value" if self.splits else "splits"

    @property
    def accs(self) -> str:
        return ", ".join(f"acc{lane.suffix}" for lane in self.lanes)

    @property
    def results(self) -> str:
        return "out, lse" if self.direct else "partial, partial_lse"

    @property
    def grid1(self) -> str:
        factors = ["total_q"]
        if self.head_blocks > 1:
            factors.append("HEAD_BLOCKS.value")
        if not self.direct:
            factors.append(self.splits_value)
        return " * ".join(factors)

    @property
    def program_is(self) -> str:
        parts = ["query row"]
        if self.head_blocks > 1:
            parts.append("head block")
        if not self.direct:
            parts.append("split")
        return ", ".join(parts)


@dataclass(frozen=True)
class Plan:
    """All kernels of one spec. `name` is its folder; `kernels` in the order of the dispatch table."""

    name: str
    spec_file: str
    spec: Spec
    target: Target
    kernels: tuple[KernelPlan, ...]

    def shaped(self, kv: str) -> list[KernelPlan]:
        return [kernel for kernel in self.kernels if kernel.kv == kv and kernel.batch is not None]

    def general(self, kv: str) -> tuple[KernelPlan, KernelPlan]:
        """The kernels for any shape: one split, and a number of splits given at run time."""
        direct, split = (kernel for kernel in self.kernels if kernel.kv == kv and kernel.batch is None)
        return direct, split

    def choice(self, kv: str) -> Choice:
        """The dispatcher's rule for this KV dtype."""
        shapes: dict[int, dict[int, str]] = {}
        for kernel in self.shaped(kv):
            shapes.setdefault(kernel.batch or 0, {})[kernel.kv_len or 0] = kernel.name
        direct, split = self.general(kv)
        return Choice(shapes, General(direct.name, split.name, split.places, split.block_n, split.head_blocks))


class PlanError(Exception):
    """Problems found while resolving a spec that is well-formed; the caller adds the file and the places."""

    def __init__(self, problems: list[Problem]):
        self.problems = problems
        super().__init__("; ".join(problem.what for problem in problems))


def make_plan(spec: Spec, spec_file: str) -> Plan:
    """Resolve every kernel of `spec`. Raises PlanError with all problems, each with its place in the spec."""
    target = TARGETS[spec.target]
    problems: list[Problem] = []
    kernels: list[KernelPlan] = []
    for kv in spec.dtypes.kv:
        for index, shape in enumerate(spec.shapes):
            layers = [
                (("shapes", index, "per_kv", kv), "shape, per_kv", shape.per_kv.get(kv)),
                (("shapes", index), "shape", shape),
                *_default_layers(spec, kv),
            ]
            kernels += _kernel(spec, spec_file, target, kv, layers, shape, None, problems)
        for direct in (True, False):
            kernels += _kernel(spec, spec_file, target, kv, _default_layers(spec, kv), None, direct, problems)
    if problems:
        unique = {(problem.loc, problem.what): problem for problem in problems}
        raise PlanError(list(unique.values()))
    return Plan(spec.name, spec_file, spec, target, tuple(kernels))


Layer = tuple[Loc, str, Settings | None]


def _default_layers(spec: Spec, kv: str) -> list[Layer]:
    return [
        (("defaults", "per_kv", kv), "defaults, per_kv", spec.defaults.per_kv.get(kv)),  # type: ignore[call-overload]
        (("defaults",), "defaults", spec.defaults),
    ]


def _kernel(
    spec: Spec,
    spec_file: str,
    target: Target,
    kv: str,
    layers: list[Layer],
    shape: Shape | None,
    general_direct: bool | None,
    problems: list[Problem],
) -> list[KernelPlan]:
    """The kernel, or nothing and at least one more problem."""
    found = len(problems)
    heads, latent, rope = spec.model.num_heads, spec.model.kv_lora_rank, spec.model.qk_rope_head_dim
    wanted, options_loc = _optimizations(layers)
    taken, not_taken = _applicable(wanted, kv)
    is_fp8 = kv.startswith("fp8")
    fp8_mma, packed = "fp8_mma" in taken, "packed_fp8" in taken
    if fp8_mma and kv == "fp8_e4m3fnuz" and kv not in target.fp8_mma:
        problems.append(
            Problem(
                options_loc,
                f"fp8_mma of {kv} KV on {target.name}: its matrix units take e4m3fn, where {kv}'s largest number "
                "(byte 0x7F) is NaN",
                fix="take fp8_mma out of the optimizations for this KV",
            )
        )
        return []
    if is_fp8 and not packed and kv not in target.fp8_convert:
        problems.append(
            Problem(
                options_loc,
                f"{kv} KV without packed_fp8 on {target.name}: the hardware does not convert {kv}, so the "
                "compiler would decode it in software",
                fix="add packed_fp8 to the optimizations",
            )
        )
        return []

    decode = _decode(target, kv, fp8_mma, packed)
    q_top = 0 if decode["compute"] in ("bf16", spec.dtypes.q) else (64 if fp8_mma else 1)

    knobs = {name: _knob(name, layers) for name in KNOBS}
    block_h = _take(knobs, "block_h", 16 if heads <= 16 else 32 if heads <= 32 else 64)
    num_warps = _take(knobs, "num_warps", 8 if block_h >= 64 else 4)
    num_stages = _take(knobs, "num_stages", 2)
    waves = _take(knobs, "waves_per_eu", 0 if target.waves_per_eu else None)
    word_size = BYTES[kv]

    def memory(block_n: int) -> int:
        return shared_bytes(
            target, block_n=block_n, block_h=block_h, row_bytes=(latent + rope) * word_size, latent=latent,
            num_warps=num_warps, num_stages=num_stages, compute_bytes=1 if fp8_mma else 2,
        )  # fmt: skip

    fits = [n for n in (64, 32, 16) if memory(n) <= target.shared_bytes]
    block_n = _take(knobs, "block_n", fits[0] if fits else 16)
    need = memory(block_n)
    if need > target.shared_bytes:
        what = (
            f"a tile of {block_n} {kv} rows in {num_stages} stages needs {need:,} bytes of shared memory; "
            f"{target.name} has {target.shared_bytes:,}"
        )
        smaller = [n for n in (128, 64, 32, 16) if n < block_n and memory(n) <= target.shared_bytes]
        fix = f"block_n: {smaller[0]} fits ({memory(smaller[0]):,} bytes)" if smaller else "use fewer num_stages"
        problems.append(Problem(_knob_loc("block_n", layers), what, fix=fix))
    if fp8_mma and not packed and block_n < 32:
        problems.append(
            Problem(_knob_loc("block_n", layers), f"block_n {block_n} is below the 32 rows of an fp8 MMA",
                    allowed="32, 64, 128, 256", fix="block_n: 32")
        )  # fmt: skip
    if len(problems) > found:
        return []

    head_blocks = -(-heads // block_h)
    places = target.compute_units * (2 if need * 2 <= target.shared_bytes else 1)
    direct_asked = "direct_out" in taken
    splits: int | None
    if shape is not None:
        auto = choose_splits(shape.batch * head_blocks, shape.kv_len, places, block_n)
        asked = _take(knobs, "splits", "auto")
        if asked == "auto":
            knobs["splits"] = Resolved(auto, "automatic" if knobs["splits"].source == "automatic" else
                                       f"auto in {knobs['splits'].source}")  # fmt: skip
            splits = auto
        else:
            splits = int(asked)
        direct = splits == 1 and direct_asked
        name = f"{kv}_b{shape.batch}_kv{shape.kv_len}"
        origin = f"shape batch={shape.batch} kv_len={shape.kv_len}, KV {kv}"
        tuned = f"tuned for {shape.batch} requests of {shape.kv_len} rows on {target.name} ({target.title})"
    else:
        direct = bool(general_direct)
        splits = 1 if direct else None
        knobs["splits"] = Resolved(1 if direct else "at run time", "the general kernels")
        name = f"{kv}_any{'_direct' if direct else ''}"
        origin = f"any shape, {'one split' if direct else 'splits at run time'}, KV {kv}"
        tuned = f"for shapes that the spec does not name, on {target.name} ({target.title})"
    if direct_asked and not direct:
        not_taken.append("direct_out: there is more than one split")
    optimizations = tuple(o for o in taken if o != "direct_out" or direct)
    if splits is None:
        max_splits, split_tile, stage2_warps = MAX_SPLITS, 16, 4
    else:
        max_splits = splits
        split_tile = 1 << (splits - 1).bit_length()
        stage2_warps = 8 if split_tile > 16 else 4

    heads_text = f"{heads} head{'s' if heads > 1 else ''}"
    return [
        KernelPlan(
            name=name,
            spec_name=spec.name,
            spec_file=spec_file,
            build_command=f"mla-codegen build {spec_file}",
            origin=origin,
            title=f"MLA decode, {heads_text}, latent {latent} + rope {rope}, {kv} KV, {tuned}.",
            summary=_SUMMARY[shape is None],
            target=target.name,
            family="triton",
            batch=shape.batch if shape else None,
            kv_len=shape.kv_len if shape else None,
            heads=heads,
            latent=latent,
            rope=rope,
            row=latent + rope,
            row_words=(latent + rope) // (len(decode["lanes"])),
            q=spec.dtypes.q,
            kv=kv,
            out=spec.dtypes.out,
            is_fp8=is_fp8,
            q_top=q_top,
            q_parts=tuple(
                [f"q_latent{lane.suffix}" for lane in decode["lanes"]]
                + [f"q_rope{lane.suffix}" for lane in decode["rope_lanes"]]
            ),
            # e4m3fnuz ends at 240, e4m3fn at 448: the largest weight is 1, so scale by 2^7 or 2^8
            weight_shift=_shift(fp8_mma, decode["compute"], "exp2" in taken),
            weight_scale=(128 if decode["compute"] == "fp8_e4m3fnuz" else 256) if fp8_mma else 1,
            splits=splits,
            max_splits=max_splits,
            block_n=block_n,
            block_h=block_h,
            head_blocks=head_blocks,
            num_warps=num_warps,
            num_stages=num_stages,
            waves_per_eu=waves or None,
            split_tile=split_tile,
            stage2_warps=stage2_warps,
            places=places,
            shared_bytes=need,
            exp2="exp2" in taken,
            fast_rcp="fast_rcp" in taken,
            reciprocal=target.reciprocal,
            xcd_remap="xcd_remap" in taken,
            xcds=target.xcds,
            streaming="streaming_loads" in taken,
            peeled="peeled_tail" in taken,
            direct=direct,
            masked_heads=heads % block_h != 0,
            resolved=knobs,
            optimizations=optimizations,
            not_taken=tuple(not_taken),
            **decode,
        )
    ]


_SUMMARY = {
    False: "Right for any number of requests of any lengths; fastest near the shape above.",
    True: "Right for any number of requests of any lengths.",
}


def _shift(fp8_mma: bool, compute: str, exp2: bool) -> float:
    if not fp8_mma:
        return 0
    bits = 7 if compute == "fp8_e4m3fnuz" else 8
    return bits if exp2 else bits * 0.6931471805599453


def _optimizations(layers: list[Layer]) -> tuple[list[str], Loc]:
    """The names in force and the place that names them: from the outermost layer inwards, +name and -name edit."""
    names: list[str] = []
    place: Loc = layers[-1][0]
    for loc, _, settings in reversed(layers):
        if settings is not None and settings.optimizations is not None:
            place = (*loc, "optimizations")
            names = apply_optimizations(names, settings.optimizations)
    return [name for name in OPTIMIZATIONS if name in names], place


def _applicable(names: list[str], kv: str) -> tuple[list[str], list[str]]:
    """Those that concern this KV element type, and a line for each that does not."""
    taken, not_taken = [], []
    for name in names:
        if OPTIMIZATIONS[name].fp8_only and not kv.startswith("fp8"):
            not_taken.append(f"{name}: the KV is {kv}")
        else:
            taken.append(name)
    return taken, not_taken


def _knob(name: str, layers: list[Layer]) -> Resolved:
    for _, source, settings in layers:
        value = getattr(settings, name, None) if settings is not None else None
        if value is not None:
            return Resolved(value, source)
    return Resolved(None, "automatic")


def _knob_loc(name: str, layers: list[Layer]) -> Loc:
    for loc, _, settings in layers:
        if settings is not None and getattr(settings, name, None) is not None:
            return (*loc, name)
    return layers[0][0] if layers[0][2] is not None else layers[1][0]


def _take(knobs: dict[str, Resolved], name: str, automatic: Any) -> Any:
    if knobs[name].value is None:
        knobs[name] = Resolved(automatic, "automatic")
    return knobs[name].value


def _decode(target: Target, kv: str, fp8_mma: bool, packed: bool) -> dict[str, Any]:
    """How a tile's bytes become MMA operands: word size, lanes, element types, and what 1.0 of them stands for."""
    plain = Lane("", "latent", "rope", "latent[None, :]", "rope[None, :]")
    result: dict[str, Any] = {
        "compute": kv, "tl_compute": TL[kv], "fp8": kv, "tl_fp8": TL[kv], "torch_word": TORCH[kv], "word": "",
        "word_bytes": 0, "lanes": (plain,), "rope_lanes": (plain,), "rope_bytes": "", "decode_step": "",
        "kv_factor": 1.0, "repair_zero": False,
    }  # fmt: skip
    if not kv.startswith("fp8"):
        return result
    # The format that the kernel takes the bytes for: e4m3fn may pass for e4m3fnuz, at half its value, 0x80 mended.
    taken_as = kv
    if fp8_mma and kv not in target.fp8_mma:
        taken_as = next(iter(target.fp8_mma))
    factor = 1.0 if kv == taken_as else 2.0
    result.update(fp8=taken_as, tl_fp8=TL[taken_as], torch_word=TORCH[taken_as], kv_factor=factor)
    if fp8_mma and not packed:
        repair = kv != taken_as
        result.update(compute=taken_as, tl_compute=TL[taken_as], repair_zero=repair)
    elif fp8_mma:
        repair = kv != taken_as
        words = "repair(latent)" if repair else "latent"
        rope = Lane("", "", "repair_bytes(rope)" if repair else "rope", "", "rope[None, :]")
        result.update(
            compute=taken_as, tl_compute=TL[taken_as], torch_word="torch.int32", word="int32", word_bytes=4,
            lanes=tuple(Lane(f"_{j}", f"column({words}, {j})", "", f"4 * words[None, :]{f' + {j}' if j else ''}", "")
                        for j in range(4)),
            rope_lanes=(rope,), rope_bytes="tl.uint8" if repair else TL[taken_as],
            decode_step="steps/quads.py.jinja", repair_zero=repair,
        )  # fmt: skip
    elif packed:
        lanes = tuple(
            Lane(f"_{name}", f"{name}(latent)", f"{name}(rope)", f"2 * words[None, :]{offset}",
                 f"2 * rope_words[None, :]{offset}")
            for name, offset in (("even", ""), ("odd", " + 1"))
        )  # fmt: skip
        bits = not (target.pair_decode and kv == "fp8_e4m3fn")  # the hardware's conversion is of e4m3fn alone
        result.update(
            compute="fp16", tl_compute="tl.float16", torch_word="torch.int16", word="int16", word_bytes=2,
            lanes=lanes, rope_lanes=lanes, decode_step=f"steps/pairs_{'bits' if bits else 'asm'}.py.jinja",
        )  # fmt: skip
        if bits:  # e4m3's exponent bias is 7 (fnuz: 8), f16's 15
            result["kv_factor"] = 256.0 if kv == "fp8_e4m3fn" else 128.0
    else:
        widened = Lane("", "latent.to(tl.float16)", "rope.to(tl.float16)", "latent[None, :]", "rope[None, :]")
        result.update(compute="fp16", tl_compute="tl.float16", lanes=(widened,), rope_lanes=(widened,))
    return result
