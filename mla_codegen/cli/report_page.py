"""`mla-codegen report`: a build as one HTML page."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mla_codegen.cli import report
from mla_codegen.cli.common import Json, Spec, Triton, fail, load_plans
from mla_codegen.cli.inspect import version_of
from mla_codegen.publish.files import replace_file

if TYPE_CHECKING:
    from mla_codegen.measure.bench import Report
    from mla_codegen.plan.resolve import Plan
    from mla_codegen.report.gather import History
    from mla_codegen.report.page import Inspected


def report_page(
    spec: Spec,
    html: Annotated[Path, typer.Option("--html", metavar="FILE.html", help="The page to write")] = Path("report.html"),
    bench: Annotated[
        Path | None, typer.Option("--bench", metavar="FILE.json", help="What `bench --json` printed: times, roofline")
    ] = None,
    history: Annotated[
        Path | None, typer.Option("--history", metavar="FILE.jsonl", help="What `tune` keeps: all that was tried")
    ] = None,
    compiled: Annotated[
        bool, typer.Option("--compile/--no-compile", help="Compile the kernels, as `inspect` does; results are kept")
    ] = True,
    triton: Triton = None,
    jobs: Annotated[int | None, typer.Option("--jobs", min=1, help="Compilations at a time; default: the CPUs")] = None,
    as_json: Json = False,
) -> None:
    """Write one HTML page of a build: settings and where they came from, source, the compiler's numbers, times.

    mla-codegen report specs/h200.yaml --html h200.html

    mla-codegen report specs/h200.yaml --bench bench.json --history ~/.cache/mla-codegen/tune/sm_90.jsonl

    The page holds all that it shows: no script, nothing from the network. Fails as `inspect` does, the page written.
    """
    (plan,) = load_plans([spec], Path("generated"), triton)
    if html.is_dir():
        fail(f"--html {html}: this is a folder\n  fix: name a file in it", 2)
    if (bench or history) and importlib.util.find_spec("matplotlib") is None:
        fail("pictures of measurements need matplotlib\n  fix: pip install 'mla-codegen[plot]'", 2)
    times = read_bench(bench) if bench else None
    tried = read_history(plan, history) if history else None
    inspected, reason = _inspect(plan, triton, jobs) if compiled else (None, "Not compiled: `--no-compile`.")

    from mla_codegen.report.page import page

    replace_file(html, page(plan, spec.read_text(encoding="utf-8-sig"), inspected, reason, times, tried))
    ok = inspected is None or inspected.ok
    if as_json:
        found = {"html": str(html), "kernels": len(plan.kernels), "compiled": inspected is not None, "ok": ok}
        typer.echo(json.dumps({**found, "bytes": html.stat().st_size}))
    else:
        verdict = "" if ok else "; the compiler's numbers are not what they should be: the page says where"
        line = f"{html}: {len(plan.kernels)} kernels of {plan.spec_file}, {html.stat().st_size // 1024} KiB{verdict}"
        report.out.print(line, soft_wrap=True, highlight=False, markup=False)
    raise typer.Exit(0 if ok else 1)


def read_bench(path: Path) -> Report:
    """The bench of a file; exit 2 if it is none."""
    from mla_codegen.measure.bench import Report

    try:
        return Report.from_json(path.read_text(encoding="utf-8"))
    except ValueError as error:
        fail(f"--bench {path}: {error}\n  fix: mla-codegen bench SPEC --json > {path}", 2)


def read_history(plan: Plan, path: Path) -> History:
    """The tuner's timings of the plan's shapes; exit 2 if the file has none at all."""
    from mla_codegen.report.gather import NotAHistory, history_of

    try:
        return history_of(plan, path)
    except NotAHistory as error:
        fail(f"--history {error}", 2)


def _inspect(plan: Plan, triton: str | None, jobs: int | None) -> tuple[Inspected | None, str]:
    """What the compiler made of all kernels, or None and why there is nothing of it."""
    from mla_codegen.inspect import VersionError, inspect_cases
    from mla_codegen.inspect import plans as inspection
    from mla_codegen.report.page import Inspected

    try:
        subjects = inspection.subjects_of([(plan, inspection.choose(plan, (), None))])
        version = version_of([plan], triton)
        with report.progress("compile") as advance:
            rows = inspect_cases(
                [subject.case for subject in subjects],
                parallel=jobs,
                triton=version,
                progress=lambda done, total, outcome: advance(f"{outcome.job.kernel} for {outcome.job.arch}", total),
            )
    except inspection.NotInspectable as error:  # a target that has no parser here: the page says so
        return None, str(error)
    except VersionError as error:
        fail(str(error), 2)
    return Inspected(subjects, rows, inspection.calls(subjects, rows)), ""
