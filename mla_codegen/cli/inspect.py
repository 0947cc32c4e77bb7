"""`mla-codegen inspect`: what the compiler made of a spec's kernels, without a GPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mla_codegen.catalog.releases import installed_triton, release_of
from mla_codegen.cli import report
from mla_codegen.cli.common import Json, Kv, Specs, fail, load_plans, parse_shapes, release_named

if TYPE_CHECKING:
    from mla_codegen.check.workers import Outcome
    from mla_codegen.inspect import Case, Row
    from mla_codegen.inspect.plans import Call, Subject
    from mla_codegen.plan.resolve import Plan


def inspect(
    specs: Specs,
    shape: Annotated[
        list[str] | None, typer.Option("--shape", metavar="BATCHxKV_LEN", help="Only what such a call gets; repeatable")
    ] = None,
    kv: Kv = None,
    check: Annotated[
        bool,
        typer.Option("--check", help="Say only what is wrong, not the tables"),
    ] = False,
    sample: Annotated[
        bool, typer.Option("--sample", help="Of stages 1 that differ in nothing but the number of splits, only one")
    ] = False,
    against: Annotated[
        str | None,
        typer.Option("--against", metavar="FILE.py:KERNEL", help="Another Triton kernel, or a job.json, beside ours"),
    ] = None,
    triton: Annotated[
        str | None,
        typer.Option("--triton", metavar="VERSION", help="Render for this release and compile with it; pip fetches it"),
    ] = None,
    run: Annotated[
        bool, typer.Option("--run", help="AMD: also execute stage 1 on the CPU, and count what 64 KV rows take")
    ] = False,
    jobs: Annotated[int | None, typer.Option("--jobs", min=1, help="Compilations at a time; default: the CPUs")] = None,
    as_json: Json = False,
) -> None:
    """Compile the kernels of specs for their targets, read the assembly, hold it to the specs' limits.

    No GPU is needed. Fails if a kernel does not compile, breaks a limit, or stands on a hazard of AMD's hardware.

    mla-codegen inspect specs/mi300.yaml

    mla-codegen inspect specs/*.yaml --check

    mla-codegen inspect specs/h200.yaml --shape 64x8192 --kv bf16 --triton 3.9.0

    mla-codegen inspect specs/mi300.yaml --shape 64x8192 --against theirs.py:their_kernel

    mla-codegen inspect specs/mi300.yaml --shape 64x8192 --run
    """
    from mla_codegen.inspect import CaptureError, JobError, VersionError, inspect_cases
    from mla_codegen.inspect import plans as inspection

    shapes = parse_shapes(shape or ())
    plans = load_plans(specs, Path("generated"), triton)
    version = version_of(plans, triton)
    if against and not shapes:
        shapes = [max((s.call for plan in plans for s in plan.spec.shapes), key=lambda s: s[0] * s[1])]
    try:
        chosen = [(plan, inspection.choose(plan, shapes, kv)) for plan in plans]
        subjects = inspection.subjects_of(chosen, representative=sample)
        theirs = _theirs(against, plans, shapes) if against else []
        with report.progress("inspect") as advance:
            rows = inspect_cases(
                [subject.case for subject in subjects] + theirs,
                parallel=jobs,
                triton=version,
                progress=lambda done, total, outcome: advance(f"{outcome.job.kernel} for {outcome.job.arch}", total),
            )
    except (inspection.NotInspectable, CaptureError, JobError, VersionError) as error:
        fail(str(error), 2)
    ours, others = rows[: len(subjects)], rows[len(subjects) :]
    calls = inspection.calls(subjects, ours)
    counted = _count(subjects, version, jobs) if run else {}
    if as_json:
        typer.echo(json.dumps(_as_dict(subjects, ours, calls, others, counted), indent=2, sort_keys=True))
    else:
        if not check:
            _print(subjects, ours, calls)
        if counted:
            report.dynamic(counted)
        _print_against(subjects, ours, others)
        _print_verdict(plans, rows)
    raise typer.Exit(0 if all(row.ok for row in rows) and all(one.value for one in counted.values()) else 1)


def _count(subjects: list[Subject], version: str | None, jobs: int | None) -> dict[str, Outcome]:
    """What stage 1 of every AMD kernel does for 64 KV rows, by the kernel's label."""
    from mla_codegen.check.cdna.dynamic import count_kernels

    if version not in (None, installed_triton()):
        fail(f"--run executes what the installed triton {installed_triton()} compiles\n  fix: leave --triton out", 2)
    chosen = [
        subject for subject in subjects
        if subject.case.job.vendor == "amd" and subject.stage.turn_rows is not None and not subject.large
    ]  # fmt: skip
    wanted = [(subject.plan, subject.kernel, subject.case.job.arch) for subject in chosen]
    with report.progress("run") as advance:
        outcomes = count_kernels(wanted, processes=jobs, progress=advance)
    return {subject.case.label: outcome for subject, outcome in zip(chosen, outcomes, strict=True)}


def version_of(plans: list[Plan], triton: str | None) -> str | None:
    """The version to compile with: as asked for, or else of the specs' release; None: the installed one."""
    if triton is not None:
        release = release_named(triton)
        return release.tried if triton == release.name else triton
    wanted = {plan.release for plan in plans} - {release_of(installed_triton())}
    versions = [release.tried for release in wanted if release]
    if versions and len({plan.release for plan in plans}) > 1:
        releases = ", ".join(sorted({plan.release.name if plan.release else installed_triton() for plan in plans}))
        what = f"the specs are for different releases of Triton: {releases}"
        fail(f"{what}\n  fix: inspect them apart, or name one release with --triton", 2)
    return versions[0] if versions else None


def _theirs(against: str, plans: list[Plan], shapes: list[tuple[int, ...]]) -> list[Case]:
    """Somebody else's kernel for every target and shape that is asked for."""
    from mla_codegen.inspect import Case, capture_job, load_job, parse_target
    from mla_codegen.inspect.plans import arches, tile_rows

    if against.endswith(".json"):
        job = load_job(against)
        return [Case(f"{job.kernel} of {against}", job, tile_rows(job))]
    path, kernel = parse_target(against)
    cases = []
    for plan in plans:
        model = plan.spec.model
        width = model.kv_lora_rank + model.qk_rope_head_dim
        for arch in arches(plan):
            for batch, kv_len, *_ in shapes:
                job = capture_job(
                    path, kernel, arch, batch=batch, kv_len=max(1, kv_len), heads=model.num_heads, width=width
                )
                cases.append(Case(f"{kernel} {arch} {batch}x{kv_len}", job, tile_rows(job)))
    return cases


def _print(subjects: list[Subject], rows: list[Row], calls: list[Call]) -> None:
    from mla_codegen.inspect.table import hot_loop_table, model_table, resource_table

    report.out.print(resource_table(rows))
    for subject in subjects:
        if not subject.large and len(subject.files) > 1:
            others = ", ".join(Path(file).stem for file in subject.files[1:])
            report.out.print(f"  {subject.case.label}, the same in {others}", highlight=False, soft_wrap=True)
    if any(row.report and row.report.hot for row in rows):
        report.out.print(hot_loop_table(rows))
    if any(call.row.prediction for call in calls):
        report.out.print(model_table([call.row for call in calls]))
    for note in dict.fromkeys(call.row.model_note for call in calls if call.row.model_note):
        report.out.print(f"no prediction: {note}", highlight=False)


def _print_against(subjects: list[Subject], ours: list[Row], others: list[Row]) -> None:
    from mla_codegen.inspect.table import versus_table

    for other in others:
        for subject, row in zip(subjects, ours, strict=True):
            same_target = subject.case.job.arch == other.case.job.arch
            if not same_target or subject.stage.turn_rows is None or subject.large:
                continue
            if row.report and other.report:
                names = (subject.case.label, other.case.label)
                report.out.print(versus_table(row.report, other.report, names=names))
                warps = (row.report.num_warps, other.report.num_warps)
                if warps[0] != warps[1]:
                    report.out.print(f"counts are of one warp: ours has {warps[0]}, theirs {warps[1]}", highlight=False)


def _print_verdict(plans: list[Plan], rows: list[Row]) -> None:
    from mla_codegen.inspect.table import hazard_texts

    said: set[str] = set()
    for row in rows:
        texts = [str(one) for one in row.broken] + hazard_texts(row)
        if row.failure is not None:
            texts.append(f"{row.case.label}: {row.failure.reason}")
            if row.failure.reason not in said:  # a fault of a template is in many kernels: its end once
                texts += [f"    {line}" for line in row.failure.tail.splitlines()]
            said.add(row.failure.reason)
        for text in texts:
            report.out.print(text, markup=False, highlight=False, style="red", soft_wrap=True)
    for plan in plans:
        if not any(plan.spec.limits.of(name) for name in plan.spec.dtypes.kv):
            report.out.print(f"{plan.spec_file} has no `limits:`; its kernels were only compiled", highlight=False)
    failed = sum(row.failure is not None for row in rows)
    broken = sum(len(row.broken) for row in rows)
    versions = {one.triton for row in rows for one in (row.report, row.failure) if one}
    parts = [f"{failed} do not compile" if failed else "all compile"]
    parts.append(f"{broken} limits broken" if broken else "no limit broken")
    if any(row.case.job.vendor == "amd" for row in rows):
        hazards = sum(len(row.report.hazards) for row in rows if row.report)
        parts.append(f"{hazards} hazards" if hazards else "no hazard")
    report.out.print(f"{len(rows)} kernels, triton {', '.join(sorted(versions))}: {', '.join(parts)}", highlight=False)


def _as_dict(
    subjects: list[Subject], rows: list[Row], calls: list[Call], others: list[Row], counted: dict[str, Outcome]
) -> dict[str, Any]:
    from mla_codegen.inspect.table import as_dict

    def dynamic(label: str) -> dict[str, Any]:
        """Nothing where it was not asked for; else the counts, or why there are none."""
        if label not in counted:
            return {}
        outcome = counted[label]
        return {"per_64_rows_run": outcome.value.json() if outcome.value else {"failure": outcome.failure}}

    kernels = [
        {**as_dict(row), "spec": s.plan.name, "files": s.files, "stage": s.stage.kernel, "kv": s.kernel.kv,
         "kv_over_2gib": s.large, "limits": dict(s.case.limits), **dynamic(s.case.label)}
        for s, row in zip(subjects, rows, strict=True)
    ]  # fmt: skip
    predicted = [
        {"spec": call.spec, "kernel": call.kernel, "arch": call.row.case.job.arch, "batch": call.batch,
         "kv_len": call.kv_len, "model": as_dict(call.row)["model"], "model_note": call.row.model_note}
        for call in calls
    ]  # fmt: skip
    return {"kernels": kernels, "calls": predicted, "against": [as_dict(row) for row in others]}
