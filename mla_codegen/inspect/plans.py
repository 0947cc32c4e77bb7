"""A spec's kernels under inspection: what to compile for them, each distinct kernel once, and the calls to predict.

A kernel is compiled from the text that `build` writes, cut down to what the kernel needs (`isa.excerpt`), so that
shapes whose kernels are equal share one compilation and one row.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from mla_codegen.inspect import Case, CompileJob, Row, Workload, predict
from mla_codegen.inspect.excerpt import excerpt
from mla_codegen.inspect.job import AMD_ARCHES, ARCHES
from mla_codegen.inspect.model import ModelError
from mla_codegen.plan.families import FAMILIES
from mla_codegen.plan.families.stages import Stage
from mla_codegen.plan.resolve import KernelPlan, Plan
from mla_codegen.render.templates import render_kernel
from mla_codegen.runtime.formats import ELEMENTS
from mla_codegen.spec.datamodel import spell

# What a spec for any GPU is inspected for: one architecture of each kind that the other targets are of.
ANY = ("gfx942", "gfx950", "sm_90")
TWO_GIB = 1 << 31
LARGE = "KV of 2 GiB and more"


class NotInspectable(ValueError):
    """A spec, or a choice of its kernels, that gives nothing to compile; `str()` is ready for a terminal."""


@dataclass
class Subject:
    """One distinct kernel: the case to compile, and the files of the build that hold it.

    large    compiled for a KV of 2 GiB and more, where that makes another binary
    alike    equal for stages 1 that differ in nothing but the number of splits
    """

    case: Case
    plan: Plan
    kernel: KernelPlan
    stage: Stage
    large: bool
    alike: str
    files: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Call:
    """One call shape of a spec and the model's answer for its stage 1."""

    spec: str
    kernel: str
    batch: int
    kv_len: int
    row: Row


def choose(plan: Plan, shapes: Sequence[tuple[int, ...]], kv: str | None) -> list[KernelPlan]:
    """The plan's kernels for calls of these (batch, kv_len, perhaps q_len); all of them if no shape is given."""
    if kv not in (None, *plan.spec.dtypes.kv):
        raise NotInspectable(f"{plan.spec_file} has no {kv} KV; it has {', '.join(plan.spec.dtypes.kv)}")
    return plan.serving(shapes, kv)


def arches(plan: Plan) -> tuple[str, ...]:
    """What a plan's kernels are compiled for."""
    name = plan.target.name
    if name == "portable":
        return ANY
    if name not in ARCHES:
        raise NotInspectable(f"{plan.spec_file}: {name} cannot be inspected; what can: {', '.join(ARCHES)}")
    return (name,)


def subjects_of(plans: Iterable[tuple[Plan, Sequence[KernelPlan]]], *, representative: bool = False) -> list[Subject]:
    """The distinct kernels among those given, in their order.

    representative   of stages 1 that differ in nothing but the number of splits, only the first
    """
    found: dict[str, Subject] = {}
    for plan, kernels in plans:
        for kernel in kernels:
            for subject in _subjects(plan, kernel):
                key = subject.alike if representative else subject.case.job.canonical()
                found.setdefault(f"{plan.name} {key}", subject).files.append(f"{plan.name}/{kernel.name}.py")
    return list(found.values())


def _subjects(plan: Plan, kernel: KernelPlan) -> Iterable[Subject]:
    text = render_kernel(kernel)
    several = len(arches(plan)) > 1
    for arch in arches(plan):
        for stage in FAMILIES[kernel.family].stages(kernel):
            source = excerpt(text, stage.kernel)
            both = (False, True) if stage.pools and arch in AMD_ARCHES else (False,)
            for large in both:
                job = CompileJob(
                    f"{stage.kernel}.py",
                    stage.kernel,
                    arch,
                    stage.signature,
                    stage.constants,
                    stage.options,
                    stage.divisible,
                    source,
                    stage.pointers - (stage.pools if large else frozenset()) if arch in AMD_ARCHES else frozenset(),
                )
                label = f"{plan.name}/{kernel.name}:{stage.kernel}"
                label += f" {arch}" if several else ""
                label += f", {LARGE}" if large else ""
                release = plan.release.name if plan.release else None
                limits = plan.spec.limits.of(kernel.kv, stage_2=stage.turn_rows is None, triton=release)
                alike = job.canonical() if stage.turn_rows is None else _without_splits(job)
                case = Case(label, job, stage.turn_rows, limits=limits)
                yield Subject(case, plan, kernel, stage, large, alike)


def _without_splits(job: CompileJob) -> str:
    """The job as text, the number of splits left open."""
    open_ended = re.sub(r"^SPLITS = \w+\.constexpr\(\d+\)$", "SPLITS = ...", job.text(), flags=re.MULTILINE)
    return replace(job, source=open_ended).canonical()


def workload(kernel: KernelPlan, batch: int, kv_len: int, q_len: int = 1) -> Workload:
    """What a call of this shape asks of the kernel: `q_len` query rows a request."""
    splits = kernel.splits or 1
    programs = batch * kernel.programs_of(q_len) * splits
    rows = batch * q_len * kernel.heads
    written = 0 if kernel.direct else 2 * rows * splits * (kernel.latent + 1) * 4  # partial results, there and back
    return Workload(
        batch,
        kv_len,
        splits,
        programs,
        kv_row_bytes=kernel.format.row_bytes(kernel.latent, kernel.rope),
        other_bytes=rows * (kernel.row * ELEMENTS[kernel.q].bytes + kernel.latent * ELEMENTS[kernel.out].bytes + 4)
        + written,
        flop=2.0 * rows * kv_len * (kernel.row + kernel.latent),
        operand_bits=8 if kernel.fp8_products else 16,
    )


def calls(subjects: Sequence[Subject], rows: Sequence[Row]) -> list[Call]:
    """The model's answer for each shape of the specs whose stage 1 is among the rows, by the binary that it runs."""
    found = []
    for subject, row in zip(subjects, rows, strict=True):
        if row.report is None or subject.stage.turn_rows is None:
            continue
        for kernel in subject.plan.kernels:
            if f"{subject.plan.name}/{kernel.name}.py" not in subject.files:
                continue
            both = subject.case.job.arch in AMD_ARCHES and bool(subject.stage.pools)
            for batch, kv_len, *q_len in _shapes(subject.plan, kernel):
                size = batch * kv_len * kernel.format.row_bytes(kernel.latent, kernel.rope)
                if both and subject.large != (size >= TWO_GIB):
                    continue
                found.append(_call(subject, row, kernel, batch, kv_len, *q_len))
    return found


def _shapes(plan: Plan, kernel: KernelPlan) -> list[tuple[int, ...]]:
    """The (batch, kv_len, perhaps q_len) that the kernel serves: its own, all if it is batch-invariant, or none."""
    if plan.spec.batch_invariant:
        return [shape.call for shape in plan.spec.shapes]
    return [] if kernel.batch is None or kernel.kv_len is None else [(kernel.batch, kernel.kv_len, kernel.q_len)]


def _call(subject: Subject, row: Row, kernel: KernelPlan, batch: int, kv_len: int, q_len: int = 1) -> Call:
    label = f"{subject.plan.name}/{kernel.name}"
    if kernel.batch is None:
        label += f" {spell(batch, kv_len, q_len)}"
    if len(arches(subject.plan)) > 1:
        label += f" {subject.case.job.arch}"
    case = Case(label, subject.case.job, subject.case.tile_rows, workload=workload(kernel, batch, kv_len, q_len))
    assert row.report is not None and case.workload is not None
    try:
        answer = Row(case, row.report, prediction=predict(row.report, case.workload))
    except ModelError as error:
        answer = Row(case, row.report, model_note=str(error))
    return Call(subject.plan.name, kernel.name, batch, kv_len, answer)


def tile_rows(job: CompileJob) -> int | None:
    """KV rows of a tile of someone else's kernel, by the usual names of that constant."""
    for name in ("BLOCK_N", "BLOCK_KV", "BLOCK_SIZE_N", "TILE_N", "PAGE_SIZE"):
        value: Any = job.constexprs.get(name)
        if isinstance(value, int) and not isinstance(value, bool):
            return value
    return None
