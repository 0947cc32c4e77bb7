"""Spec -> Plan: every decision about every kernel, made once, before anything is rendered.

A `KernelPlan` (`kernel`) is a frozen record that templates only place. What only one template family needs is in its
`details`.
"""

from dataclasses import dataclass, replace
from typing import Any

from mla_codegen.catalog.optimizations import OPTIMIZATIONS
from mla_codegen.catalog.targets import TARGETS, Target
from mla_codegen.plan.families import FAMILIES
from mla_codegen.plan.families.request import BALANCED_ROWS, Knobs, Layer, Request, Resolved, Resources
from mla_codegen.plan.invariant import shared_splits
from mla_codegen.plan.kernel import KernelPlan
from mla_codegen.runtime.choice import General
from mla_codegen.runtime.splits import MAX_SPLITS, choose_splits
from mla_codegen.runtime.tables import OneKernel, Shaped
from mla_codegen.spec.datamodel import Shape, Spec, apply_optimizations
from mla_codegen.spec.errors import Loc, Problem, did_you_mean

MERGE_AT_ONCE = 64  # splits whose partials (of 512 columns) fit the registers of 8 warps
MERGE_TILE = 16  # splits that 4 warps merge at a time otherwise


BALANCED = frozenset(name for name, family in FAMILIES.items() if getattr(family, "BALANCED", False))


def _power_of_two(n: int) -> int:
    return 1 << (n - 1).bit_length()


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
        direct, split = (k for k in self.kernels if k.kv == kv and k.batch is None and not k.balanced)
        return direct, split

    def balanced(self, kv: str) -> KernelPlan | None:
        """The kernel for lengths that differ much, if the family has one."""
        return next((kernel for kernel in self.kernels if kernel.kv == kv and kernel.balanced), None)

    def invariant(self, kv: str) -> KernelPlan:
        """The one kernel of a batch-invariant spec."""
        (kernel,) = (kernel for kernel in self.kernels if kernel.kv == kv)
        return kernel

    @property
    def gluon(self) -> bool:
        """Some kernels are Gluon, which Triton's interpreter does not run."""
        return any(FAMILIES[kernel.family].GLUON for kernel in self.kernels)

    def general_record(self, kv: str) -> dict[str, str | int]:
        """The general kernels as the tables name them: the fields of `General`."""
        direct, split = self.general(kv)
        units, resident = split.occupancy
        record: dict[str, str | int] = {
            "direct": direct.name, "split": split.name, "units": units, "resident": resident,
            "block_n": split.block_n, "head_blocks": split.head_blocks,
        }  # fmt: skip
        if balanced := self.balanced(kv):
            record |= {"balanced": balanced.name, "balanced_rows": balanced.max_rows}
        return record

    def choice(self, kv: str) -> Shaped | OneKernel:
        """The dispatcher's rule for this KV dtype."""
        if self.spec.batch_invariant:
            return OneKernel(self.invariant(kv).name)
        shapes: dict[int, dict[int, str]] = {}
        for kernel in self.shaped(kv):
            shapes.setdefault(kernel.batch or 0, {})[kernel.kv_len or 0] = kernel.name
        general = General(**self.general_record(kv))  # type: ignore[arg-type]
        return Shaped(shapes, general, self.spec.kv.layout == "paged")


class PlanError(Exception):
    """Problems found while resolving a spec that is well-formed; the caller adds the file and the places."""

    def __init__(self, problems: list[Problem]):
        self.problems = problems
        super().__init__("; ".join(problem.what for problem in problems))


def make_plan(spec: Spec, spec_file: str) -> Plan:
    """Resolve every kernel of `spec`. Raises PlanError with all problems, each with its place in the spec."""
    problems: list[Problem] = []
    kernels: list[KernelPlan] = []
    for kv in spec.dtypes.kv:
        defaults: list[Layer] = [
            (("defaults", "per_kv", kv), "defaults, per_kv", spec.defaults.per_kv.get(kv)),
            (("defaults",), "defaults", spec.defaults),
        ]
        if spec.batch_invariant:
            kernels += _kernel(spec, spec_file, kv, defaults, None, "invariant", problems)
            continue
        for index, shape in enumerate(spec.shapes):
            layers: list[Layer] = [
                (("shapes", index, "per_kv", kv), "shape, per_kv", shape.per_kv.get(kv)),
                (("shapes", index), "shape", shape),
                *defaults,
            ]
            kernels += _kernel(spec, spec_file, kv, layers, shape, "shape", problems)
        general = [_kernel(spec, spec_file, kv, defaults, None, kind, problems) for kind in ("direct", "split")]
        kernels += [kernel for found in general for kernel in found]
        if all(kernel.family in BALANCED for found in general for kernel in found):
            kernels += _kernel(spec, spec_file, kv, defaults, None, "balanced", problems)
    if problems:
        unique = {(problem.loc, problem.what): problem for problem in problems}
        raise PlanError(list(unique.values()))
    return Plan(spec.name, spec_file, spec, TARGETS[spec.target], tuple(kernels))


def _kernel(
    spec: Spec,
    spec_file: str,
    kv: str,
    layers: list[Layer],
    shape: Shape | None,
    kind: str,
    problems: list[Problem],
) -> list[KernelPlan]:
    """The kernel, or nothing and at least one more problem.

    kind   shape: the kernel of `shape`; direct, split, balanced: a general kernel; invariant: the batch-invariant one
    """
    target = TARGETS[spec.target]
    heads, latent, rope = spec.model.num_heads, spec.model.kv_lora_rank, spec.model.qk_rope_head_dim
    wanted, options_loc = _optimizations(layers)
    options, not_taken = _applicable(wanted, kv)
    knobs = Knobs(layers)
    request = Request(
        target, heads, latent, rope, spec.dtypes.q, kv, spec.dtypes.out, tuple(options), knobs,
        page_size=spec.kv.page_size,
    )  # fmt: skip
    family, refusals = _family(request, problems, options_loc)
    if family is None:
        return []
    not_taken += refusals
    resources = family.resources(request)
    if not isinstance(resources, Resources):
        problems += resources
        return []
    if unknown := [name for name in ("column_blocks",) if knobs.resolved[name].value and name not in family.KNOBS]:
        what = f"the family {family.NAME} has no {unknown[0]}"
        problems.append(Problem(knobs.loc(unknown[0]), what, fix="remove it, or choose another family"))
        return []
    have = set(options) - set(family.NEVER) | {
        name for name in family.ALWAYS if kv.startswith("fp8") or not OPTIMIZATIONS[name].fp8_only
    }

    head_blocks = -(-heads // resources.block_h)
    places = target.compute_units * resources.resident
    splits: int | None
    device = (target.compute_units, resources.resident, resources.block_n)
    if kind == "invariant":
        auto = shared_splits([(s.batch * head_blocks, s.kv_len) for s in spec.shapes], *device)
    elif shape is not None:
        auto = choose_splits(shape.batch * head_blocks, shape.kv_len, *device)
    if kind in ("shape", "invariant"):
        asked = knobs.take("splits", "auto")
        if asked == "auto":
            source = knobs.resolved["splits"].source
            knobs.resolved["splits"] = Resolved(auto, source if source == "automatic" else f"auto in {source}")
        splits = auto if asked == "auto" else int(asked)
        direct = splits == 1 and "direct_out" in have
    else:
        direct = kind == "direct"
        splits = 1 if direct else None
        knobs.resolved["splits"] = Resolved(1 if direct else GENERAL[kind][1], "the general kernels")
    name, origin, use, summary = _words(kind, kv, shape)
    details = family.details(replace(request, splits=splits))
    if "direct_out" in options and not direct:
        not_taken.append("direct_out: there is more than one split")
    not_taken += [f"{name}: {why}" for name, why in family.NEVER.items() if name in options]
    taken = tuple(option for option in OPTIMIZATIONS if option in have and (option != "direct_out" or direct))
    model = f"{heads} head{'s' if heads > 1 else ''} of latent {latent} + rope {rope}"
    all_splits = _power_of_two(splits or MAX_SPLITS)
    at_once = splits is not None and all_splits <= MERGE_AT_ONCE

    return [
        KernelPlan(
            name=name,
            spec_name=spec.name,
            spec_file=spec_file,
            build_command=f"mla-codegen build {spec_file}",
            origin=origin,
            title=f"MLA decode, {model}, {kv} KV{spec.kv.words},\n{use} on {target.name} ({target.title}).",
            summary=summary,
            target=target.name,
            family=family.NAME,
            batch=shape.batch if shape else None,
            kv_len=shape.kv_len if shape else None,
            heads=heads,
            latent=latent,
            rope=rope,
            row=latent + rope,
            q=spec.dtypes.q,
            kv=kv,
            page_size=spec.kv.page_size,
            out=spec.dtypes.out,
            compute=details.compute,
            details=details,
            splits=splits,
            max_splits=splits or MAX_SPLITS,
            all_splits=all_splits,
            merge_at_once=at_once,
            block_n=resources.block_n,
            block_h=resources.block_h,
            head_blocks=head_blocks,
            num_warps=resources.num_warps,
            num_stages=resources.num_stages,
            waves_per_eu=resources.waves_per_eu,
            split_tile=all_splits if at_once else MERGE_TILE,
            stage2_warps=8 if at_once and all_splits > MERGE_TILE else 4,
            places=places,
            resident=resources.resident,
            shared_bytes=resources.shared_bytes,
            exp2="exp2" in taken,
            fast_rcp="fast_rcp" in taken,
            reciprocal=target.reciprocal,
            xcd_remap="xcd_remap" in taken,
            xcds=target.xcds,
            streaming="streaming_loads" in taken,
            peeled="peeled_tail" in taken,
            direct=direct,
            balanced=kind == "balanced",
            masked_heads=heads % resources.block_h != 0,
            resolved=knobs.resolved,
            optimizations=taken,
            not_taken=tuple(not_taken),
        )
    ]


# The kernels for any shape: end of the name, which they are, what for, and what is to be said of them.
_ANY = ("for shapes that the spec does not name,", "Right for any number of requests of any lengths.")
GENERAL = {
    "direct": ("any_direct", "one split", *_ANY),
    "split": ("any", "splits at run time", *_ANY),
    "balanced": (
        "balanced", "splits shared out on the device", "for requests of lengths that differ much,",
        f"Right for requests of any lengths, up to {BALANCED_ROWS} query rows in all.",
    ),
    "invariant": (
        "invariant", "batch-invariant", "batch-invariant, for every shape,",
        "Serves every call of its KV type, so that a query row's bits do not depend on its batch.",
    ),
}  # fmt: skip


def _words(kind: str, kv: str, shape: Shape | None) -> tuple[str, str, str, str]:
    """(name, which shape it is for, what for, what is to be said of it)."""
    if shape is None:
        end, which, use, summary = GENERAL[kind]
        return f"{kv}_{end}", f"any shape, {which}, KV {kv}", use, summary
    return (
        f"{kv}_b{shape.batch}_kv{shape.kv_len}",
        f"shape batch={shape.batch} kv_len={shape.kv_len}, KV {kv}",
        f"tuned for {shape.batch} requests of {shape.kv_len} rows",
        "Right for any number of requests of any lengths; fastest near the shape above.",
    )


def _family(request: Request, problems: list[Problem], options_loc: Loc) -> tuple[Any, list[str]]:
    """The family asked for, or else the target's best one that can serve; and why better ones do not."""
    asked = request.knobs.resolved["family"].value
    candidates = request.target.families if asked is None else (asked,)
    refusals: list[str] = []
    for name in candidates:
        if name not in request.target.families:
            what = f"family {name} does not exist for {request.target.name}"
            allowed = ", ".join(request.target.families)
            problems.append(Problem(request.knobs.loc("family"), what, allowed, did_you_mean(name, candidates)))
            return None, []
        reason = FAMILIES[name].refuse(request)
        if reason is None:
            request.knobs.take("family", name)
            return FAMILIES[name], refusals
        refusals.append(f"family {name}: {reason}")
    loc = options_loc if asked is None else request.knobs.loc("family")
    fix = "add packed_fp8 to the optimizations" if "packed_fp8" in reason else ""
    problems.append(Problem(loc, reason, fix=fix))
    return None, []


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
