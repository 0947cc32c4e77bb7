"""Spec -> Plan: every decision about every kernel, made once, before anything is rendered.

A `KernelPlan` (`kernel`) is a frozen record that templates only place. What only one template family needs is in its
`details`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from mla_codegen.catalog.optimizations import OPTIMIZATIONS
from mla_codegen.catalog.releases import RELEASES, Release, installed_triton, release_of
from mla_codegen.catalog.targets import TARGETS, Target
from mla_codegen.plan.columns import columns_of
from mla_codegen.plan.families import FAMILIES
from mla_codegen.plan.families.base import Family
from mla_codegen.plan.families.request import Knobs, Layer, Request, Resolved, Resources
from mla_codegen.plan.invariant import shared_splits
from mla_codegen.plan.kernel import Dimensions, KernelPlan, Words
from mla_codegen.plan.work import BALANCED, BALANCED_ROWS, QUERIES, SINGLE, SPLITS, Work
from mla_codegen.runtime.choice import General
from mla_codegen.runtime.formats import ELEMENTS, KV_FORMATS
from mla_codegen.runtime.splits import choose_splits
from mla_codegen.runtime.tables import OneKernel, Shaped
from mla_codegen.spec.datamodel import Shape, Spec, apply_optimizations
from mla_codegen.spec.errors import Loc, Problem, did_you_mean

OF_FAMILIES = ("column_blocks",)  # settings that concern some families alone
OF_WHOLE_TILES = ("peeled_tail",)  # optimisations of layouts whose tiles are whole but for the last


@dataclass(frozen=True)
class Plan:
    """All kernels of one spec. `name` is its folder; `kernels` in the order of the dispatch table.

    release   the Triton release that they are rendered for; None: one whose Gluon is not known (none of them is Gluon)
    """

    name: str
    spec_file: str
    spec: Spec
    target: Target
    release: Release | None
    kernels: tuple[KernelPlan, ...]

    @property
    def strided(self) -> bool:
        """All kernels take layouts other than the usual ones."""
        return all(kernel.strided for kernel in self.kernels)

    def shaped(self, kv: str, q_len: int | None = None) -> list[KernelPlan]:
        """The kernels of the shapes; of those with so many query tokens a request, or of all."""
        return [k for k in self.kernels if k.kv == kv and k.batch is not None and q_len in (None, k.q_len)]

    def general(self, kv: str, q_len: int = 1) -> tuple[KernelPlan, KernelPlan]:
        """The kernels for any shape: one split, and a number of splits given at run time.

        q_len   query tokens that their blocks of columns take
        """
        direct, split = (
            k for k in self.kernels if k.kv == kv and k.batch is None and not k.balanced and k.q_len == q_len
        )
        return direct, split

    def balanced(self, kv: str) -> KernelPlan | None:
        """The kernel for lengths that differ much, if the family has one."""
        return next((kernel for kernel in self.kernels if kernel.kv == kv and kernel.balanced), None)

    def invariant(self, kv: str) -> KernelPlan:
        """The one kernel of a batch-invariant spec."""
        (kernel,) = (kernel for kernel in self.kernels if kernel.kv == kv)
        return kernel

    def serving(self, shapes: Sequence[tuple[int, ...]] = (), kv: str | None = None) -> list[KernelPlan]:
        """The kernels that calls of these (batch, kv_len, perhaps q_len) and KV dtype get; no shape: all."""
        kinds = [name for name in self.spec.dtypes.kv if kv in (None, name)]
        if not shapes:
            return [kernel for kernel in self.kernels if kernel.kv in kinds]
        names = {self.choice(kind).explain(*shape)[0] for kind in kinds for shape in shapes}
        return [kernel for kernel in self.kernels if kernel.name in names]

    @property
    def for_several_tokens(self) -> bool:
        """All shapes are of several query tokens a request: beside a spec for single ones it takes such calls alone."""
        return not self.spec.batch_invariant and all(shape.q_len > 1 for shape in self.spec.shapes)

    @property
    def gluon(self) -> bool:
        """Some kernels are Gluon, which Triton's interpreter does not run."""
        return any(FAMILIES[kernel.family].gluon for kernel in self.kernels)

    @property
    def triton(self) -> str | None:
        """The one release that can run all of the kernels; None: any."""
        return next((kernel.triton for kernel in self.kernels if kernel.triton), None)

    def general_record(self, kv: str) -> dict[str, str | int]:
        """The general kernels as the tables name them: the fields of `General`."""
        record = _record(self.general(kv))
        if balanced := self.balanced(kv):
            record |= {"balanced": balanced.name, "balanced_rows": balanced.max_rows}
        return record

    def block_records(self, kv: str) -> dict[int, dict[str, str | int]]:
        """The same of those whose blocks of columns take several query tokens, by how many."""
        tokens = {k.q_len for k in self.kernels if k.kv == kv and k.batch is None}
        return {q_len: _record(self.general(kv, q_len)) for q_len in sorted(tokens - {1})}

    def shapes(self, kv: str, q_len: int = 1) -> dict[int, dict[int, str]]:
        """Requests of a call -> KV rows of a request -> kernel, of the shapes with so many query tokens a request."""
        found: dict[int, dict[int, str]] = {}
        for kernel in sorted(self.shaped(kv, q_len), key=lambda one: (one.batch, one.kv_len)):
            found.setdefault(kernel.batch or 0, {})[kernel.kv_len or 0] = kernel.name
        return found

    def token_shapes(self, kv: str) -> dict[int, dict[int, dict[int, str]]]:
        """Query tokens of a request, more than one -> `shapes`."""
        tokens = {shape.q_len for shape in self.spec.shapes}
        return {q_len: self.shapes(kv, q_len) for q_len in sorted(tokens - {1})}

    def choice(self, kv: str) -> Shaped | OneKernel:
        """The dispatcher's rule for this KV dtype."""
        if self.spec.batch_invariant:
            return OneKernel(self.invariant(kv).name)
        general = General(**self.general_record(kv))  # type: ignore[arg-type]
        blocks = {q_len: General(**record) for q_len, record in self.block_records(kv).items()}  # type: ignore[arg-type]
        paged = self.spec.kv.layout == "paged"
        return Shaped(self.shapes(kv), general, paged, self.token_shapes(kv), blocks)


def _record(general: tuple[KernelPlan, KernelPlan]) -> dict[str, str | int]:
    direct, split = general
    units, resident = split.occupancy
    return {
        "direct": direct.name, "split": split.name, "units": units, "resident": resident,
        "block_n": split.block_n, "head_blocks": split.head_blocks,
    }  # fmt: skip


class PlanError(Exception):
    """Problems found while resolving a spec that is well-formed; the caller adds the file and the places."""

    def __init__(self, problems: list[Problem]):
        self.problems = problems
        super().__init__("; ".join(problem.what for problem in problems))


def make_plan(spec: Spec, spec_file: str, release: Release | None = None) -> Plan:
    """Resolve every kernel of `spec`. Raises PlanError with all problems, each with its place in the spec.

    release   the Triton release to render for; None: the one that the spec names, or else the one installed
    """
    release = release or (RELEASES[spec.triton] if spec.triton else release_of(installed_triton()))
    problems: list[Problem] = []
    kernels: list[KernelPlan] = []
    for kv in spec.dtypes.kv:
        defaults: list[Layer] = [
            (("defaults", "per_kv", kv), "defaults, per_kv", spec.defaults.per_kv.get(kv)),
            (("defaults",), "defaults", spec.defaults),
        ]
        if spec.batch_invariant:
            kernels += _kernel(spec, spec_file, release, kv, defaults, None, "invariant", problems)
            continue
        for index, shape in enumerate(spec.shapes):
            layers: list[Layer] = [
                (("shapes", index, "per_kv", kv), "shape, per_kv", shape.per_kv.get(kv)),
                (("shapes", index), "shape", shape),
                *defaults,
            ]
            kernels += _kernel(spec, spec_file, release, kv, layers, shape, "shape", problems)
        general = [
            _kernel(spec, spec_file, release, kv, defaults, None, kind, problems) for kind in ("direct", "split")
        ]
        kernels += [kernel for found in general for kernel in found]
        if all(FAMILIES[kernel.family].balances for found in general for kernel in found):
            kernels += _kernel(spec, spec_file, release, kv, defaults, None, "balanced", problems)
        kernels += _general_blocks(spec, spec_file, release, kv, defaults, problems)
    if problems:
        unique = {(problem.loc, problem.what): problem for problem in problems}
        raise PlanError(list(unique.values()))
    return Plan(spec.name, spec_file, spec, TARGETS[spec.target], release, tuple(kernels))


def _general_blocks(
    spec: Spec, spec_file: str, release: Release | None, kv: str, defaults: list[Layer], problems: list[Problem]
) -> list[KernelPlan]:
    """The kernels for any shape whose blocks of columns take several query tokens: two for each size of block.

    None where a block takes one query token: there the other general kernels serve all calls.
    """
    kernels: dict[int, list[KernelPlan]] = {}
    for q_len in sorted({shape.q_len for shape in spec.shapes} - {1}, reverse=True):
        found = [
            kernel
            for kind in ("direct", "split")
            for kernel in _kernel(spec, spec_file, release, kv, defaults, None, kind, problems, q_len)
        ]
        if len(found) == 2 and all(kernel.packed for kernel in found):
            kernels.setdefault(found[0].block_h, found)
    return [kernel for found in reversed(kernels.values()) for kernel in found]


def _kernel(
    spec: Spec,
    spec_file: str,
    release: Release | None,
    kv: str,
    layers: list[Layer],
    shape: Shape | None,
    kind: str,
    problems: list[Problem],
    q_len: int = 1,
) -> list[KernelPlan]:
    """The kernel, or nothing and at least one more problem.

    kind   shape: the kernel of `shape`; direct, split, balanced: a general kernel; invariant: the batch-invariant one
    q_len  query tokens of a request that a general kernel is for
    """
    if shape is not None:
        q_len = shape.q_len
    settled = _settle(spec, release, kv, layers, problems, q_len)
    if settled is None:
        return []
    family, request, resources, have, not_taken = settled
    named = None if shape is None else (shape.batch, shape.kv_len)
    columns, request, resources, one_token = columns_of(request, family, resources, named, lambda: Knobs(layers))
    if one_token is not None:
        not_taken.append(f"query blocks: {one_token}")
    work = _partition(spec, shape, kind, request, resources, "direct_out" in have, columns, q_len)
    details = family.details(request)
    dimensions = Dimensions(
        request.target.name, shape.batch if shape else None, q_len, shape.kv_len if shape else None,
        request.heads, request.latent, request.rope, request.q, kv, request.out, request.page_size, request.topk,
    )  # fmt: skip
    words = _words(spec, spec_file, kind, dimensions)
    error_bound, lse_bound = family.bounds(details)
    if "direct_out" in request.options and not work.direct:
        not_taken.append("direct_out: there is more than one split")
    not_taken += [f"{name}: {why}" for name, why in family.never.items() if name in request.options]
    return [
        KernelPlan(
            **vars(words),
            **vars(dimensions),
            **vars(work),
            **vars(resources),
            triton=release.name if family.gluon and release else None,
            family=family.name,
            details=details,
            merge=family.merge(request, work),
            features=_features(family, dimensions, work) | family.needs(details),
            facts=_facts(dimensions, work) | family.facts(request, details),
            error_bound=error_bound,
            lse_bound=lse_bound,
            optimizations=tuple(
                name for name in OPTIMIZATIONS if name in have and (name != "direct_out" or work.direct)
            ),
            not_taken=tuple(not_taken),
            resolved=request.knobs.resolved,
        )
    ]


def _settle(
    spec: Spec, release: Release | None, kv: str, layers: list[Layer], problems: list[Problem], q_len: int
) -> tuple[Family, Request, Resources, set[str], list[str]] | None:
    """(family, what it is asked, its numbers, optimisations in its kernel, why others are not); None: more problems."""
    model, knobs = spec.model, Knobs(layers)
    wanted, options_loc = _optimizations(layers)
    options, not_taken = _applicable(wanted, kv, spec.kv.layout)
    request = Request(
        TARGETS[spec.target], model.num_heads, model.kv_lora_rank, model.qk_rope_head_dim, spec.dtypes.q, kv,
        spec.dtypes.out, tuple(options), knobs, spec.kv.page_size, q_len, spec.kv.topk,
    )  # fmt: skip
    family, refusals = _family(request, problems, options_loc)
    if family is None:
        return None
    if family.gluon and release is None:
        problems.append(_unknown_release())
        return None
    resources = family.resources(request)
    if not isinstance(resources, Resources):
        problems += resources
        return None
    asked = dict.fromkeys(options, options_loc)
    asked |= {name: knobs.loc(name) for name in OF_FAMILIES if knobs.resolved[name].value}
    fix = "remove it, or choose another family"
    lacking = [Problem(loc, f"the family {family.name} has no {name}", fix=fix)
               for name, loc in asked.items() if name not in family.known]  # fmt: skip
    if lacking:
        problems += lacking
        return None
    have = set(options) - set(family.never) | {
        name for name in family.always if request.format.fp8 or not OPTIMIZATIONS[name].fp8_only
    }
    return family, request, resources, have, not_taken + refusals


def _partition(
    spec: Spec,
    shape: Shape | None,
    kind: str,
    request: Request,
    resources: Resources,
    direct_out: bool,
    columns: str,
    q_len: int,
) -> Work:
    """The kernel's work partition; notes the splits among the settings."""
    knobs = request.knobs
    packed = columns == QUERIES
    head_blocks = -(-(request.columns if packed else request.heads) // resources.block_h)

    def programs(batch: int, q_len: int) -> int:
        """Of a call with one split."""
        blocks = -(-q_len * request.heads // resources.block_h) if packed else q_len * head_blocks
        return batch * blocks

    if kind in GENERAL and kind != "invariant":
        knobs.resolved["splits"] = Resolved(1 if kind == "direct" else GENERAL[kind][1], "the general kernels")
        partition = {"direct": SINGLE, "split": SPLITS, "balanced": BALANCED}[kind]
        return Work(partition, 1 if kind == "direct" else None, head_blocks, columns)
    device = (request.target.compute_units, resources.resident, resources.block_n)
    if shape is None:
        auto = shared_splits([(programs(s.batch, s.q_len), s.kv_len) for s in spec.shapes], *device)
    else:
        auto = choose_splits(programs(shape.batch, q_len), shape.kv_len, *device)
    asked = knobs.take("splits", "auto")
    if asked == "auto":
        source = knobs.resolved["splits"].source
        knobs.resolved["splits"] = Resolved(auto, source if source == "automatic" else f"auto in {source}")
    splits = auto if asked == "auto" else int(asked)
    return Work(SINGLE if splits == 1 and direct_out else SPLITS, splits, head_blocks, columns)


def _features(family: Family, dimensions: Dimensions, work: Work) -> frozenset[str]:
    """What decides which arguments the kernel has, in the words of `runtime.arguments`."""
    return frozenset(
        {
            *(["sparse"] if dimensions.sparse else ["requests", "paged" if dimensions.paged else "ragged"]),
            "direct" if work.direct else "merged",
            "tiles" if family.tiles else "pointers",
            work.columns,
            *(["strided"] if family.strided else []),
            *(["balanced"] if work.balanced else []),
            *(["any_splits"] if work.any_splits else []),
        }
    )


def _facts(dimensions: Dimensions, work: Work) -> dict[str, object]:
    """What the records of the arguments leave open, less what is the family's."""
    return {
        **vars(dimensions),
        "row": dimensions.row,
        "width": dimensions.width,
        "max_splits": work.max_splits,
        "q_type": ELEMENTS[dimensions.q].pointer,
        "out_type": ELEMENTS[dimensions.out].pointer,
        "lens_or_none": "; None: as many as page numbers" if dimensions.rows_are_pages else "",
    }


# The kernels for any shape: end of the name, which they are, what for, and what is to be said of them.
_ANY = ("for shapes that the spec does not name,", "Right for any number of requests of any lengths.")
GENERAL = {
    "direct": ("any_direct", "one split", *_ANY),
    "split": ("any", "splits at run time", *_ANY),
    "balanced": (
        "balanced", "tiles partitioned on the device", "for requests of lengths that differ much,",
        f"Right for requests of any lengths, up to {BALANCED_ROWS} query rows in all.",
    ),
    "invariant": (
        "invariant", "batch-invariant", "batch-invariant, for every shape,",
        "Serves every call of its KV type, so that a query row's bits do not depend on its batch.",
    ),
}  # fmt: skip


def _words(spec: Spec, spec_file: str, kind: str, kernel: Dimensions) -> Words:
    heads = f"{kernel.heads} head{'s' if kernel.heads > 1 else ''}"
    several = kernel.q_len > 1
    if kernel.batch is None:
        end, which, use, summary = GENERAL[kind]
        name, origin = f"{kernel.kv}_{end}", f"any shape, {which}, KV {kernel.kv}"
        if several and kind in ("direct", "split"):
            name = name.replace("_any", f"_any_q{kernel.q_len}")
            origin = f"any shape of {kernel.q_len} query tokens, {which}, KV {kernel.kv}"
            use = f"for shapes of about {kernel.q_len} query tokens that the spec does not name,"
    elif several:
        name = f"{kernel.kv}_b{kernel.batch}_q{kernel.q_len}_kv{kernel.kv_len}"
        origin = f"shape batch={kernel.batch} q_len={kernel.q_len} kv_len={kernel.kv_len}, KV {kernel.kv}"
        use = f"tuned for {kernel.batch} requests of {kernel.q_len} query tokens over {kernel.kv_len} rows"
        summary = "Right for any number of requests of any lengths; fastest near the shape above."
    elif kernel.sparse:
        name = f"{kernel.kv}_b{kernel.batch}_top{kernel.topk}"
        origin = f"shape batch={kernel.batch}, KV {kernel.kv}"
        use = f"tuned for {kernel.batch} query tokens"
        summary = "Right for any number of query tokens; fastest near the shape above."
    else:
        name = f"{kernel.kv}_b{kernel.batch}_kv{kernel.kv_len}"
        origin = f"shape batch={kernel.batch} kv_len={kernel.kv_len}, KV {kernel.kv}"
        use = f"tuned for {kernel.batch} requests of {kernel.kv_len} rows"
        summary = "Right for any number of requests of any lengths; fastest near the shape above."
    title = (
        f"MLA decode, {heads} of latent {kernel.latent} + rope {kernel.rope}, {kernel.kv} KV{spec.kv.words},\n"
        f"{use} on {kernel.target} ({kernel.gpu.title})."
    )
    return Words(name, spec.name, spec_file, origin, title, summary)


def _family(request: Request, problems: list[Problem], options_loc: Loc) -> tuple[Family | None, list[str]]:
    """The family asked for, or else the target's best one that can serve; and why better ones do not."""
    asked = request.knobs.resolved["family"].value
    candidates = request.target.families if asked is None else (asked,)
    refusals: list[str] = []
    reason: str | None = None
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
    loc = request.knobs.loc("family") if asked else options_loc if _names_one(reason) else ("dtypes", "kv")
    fix = "add packed_fp8 to the optimizations" if "packed_fp8" in (reason or "") else ""
    problems.append(Problem(loc, reason or "", fix=fix))
    return None, []


def _names_one(reason: str | None) -> bool:
    """It speaks of an optimisation."""
    return any(name in (reason or "") for name in OPTIMIZATIONS)


def _unknown_release() -> Problem:
    """The installed Triton has a Gluon that templates cannot be rendered in."""
    have = installed_triton()
    what = f"triton {have} is installed, whose Gluon is not known" if have else "no triton is installed"
    fix = f"name the release that will run the kernels (`--triton {list(RELEASES)[-1]}`), or write `family: triton`"
    return Problem(("target",), what, ", ".join(RELEASES), fix)


def _optimizations(layers: list[Layer]) -> tuple[list[str], Loc]:
    """The names in force and the place that names them: from the outermost layer inwards, +name and -name edit."""
    names: list[str] = []
    place: Loc = layers[-1][0]
    for loc, _, settings in reversed(layers):
        if settings is not None and settings.optimizations is not None:
            place = (*loc, "optimizations")
            names = apply_optimizations(names, settings.optimizations)
    return [name for name in OPTIMIZATIONS if name in names], place


def _applicable(names: list[str], kv: str, layout: str) -> tuple[list[str], list[str]]:
    """Those that concern this KV element type and layout, and a line for each that does not."""
    taken, not_taken = [], []
    for name in names:
        if OPTIMIZATIONS[name].fp8_only and not KV_FORMATS[kv].fp8:
            not_taken.append(f"{name}: the KV is {kv}")
        elif name in OF_WHOLE_TILES and layout == "sparse":
            not_taken.append(f"{name}: a list may name no row anywhere, so every tile is masked")
        else:
            taken.append(name)
    return taken, not_taken
