"""The whole inspection of a set of kernels: compile, describe, hold to limits, predict."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mla_codegen.inspect.compile import Compiled, Failed, Progress, compile_jobs
from mla_codegen.inspect.describe import describe
from mla_codegen.inspect.job import CompileJob
from mla_codegen.inspect.limits import Broken, check, validate
from mla_codegen.inspect.model import ModelError, Prediction, Workload, predict
from mla_codegen.inspect.report import Report
from mla_codegen.inspect.versions import ensure_triton


@dataclass(frozen=True)
class Case:
    """One row to be: a job under a name, what its tile is, what it must keep, and the calls to predict.

    Limits and workloads are for stage 1; a kernel without a hot loop breaks every hot-loop limit, so give stage 2 none.
    """

    label: str
    job: CompileJob
    tile_rows: int | None = None
    matrix_per_tile: int | None = None
    limits: Mapping[str, Any] = field(default_factory=dict)
    workload: Workload | None = None


@dataclass(frozen=True)
class Row:
    """What became of a case: a report, or the failure of its compilation; never both.

    `model_note` says why there is no prediction where a workload asked for one.
    """

    case: Case
    report: Report | None = None
    failure: Failed | None = None
    broken: tuple[Broken, ...] = ()
    prediction: Prediction | None = None
    model_note: str = ""

    @property
    def ok(self) -> bool:
        """Compiled, within its limits, and with no two instructions too close."""
        return self.failure is None and not self.broken and not (self.report and self.report.hazards)


def inspect_cases(
    cases: Sequence[Case],
    *,
    parallel: int | None = None,
    timeout_s: float = 300.0,
    triton: str | None = None,
    use_cache: bool = True,
    progress: Progress | None = None,
) -> list[Row]:
    """Inspect every case, in order. Limits are validated before anything compiles (LimitError).

    triton   another release of Triton to compile with; fetched by pip on first use (VersionError)
    """
    for case in cases:
        validate(case.limits)
    path = ensure_triton(triton) if triton else None
    outcomes = compile_jobs(
        [case.job for case in cases],
        parallel=parallel,
        timeout_s=timeout_s,
        triton=triton,
        triton_path=path,
        use_cache=use_cache,
        progress=progress,
    )
    return [_row(case, outcome) for case, outcome in zip(cases, outcomes, strict=True)]


def _row(case: Case, outcome: Compiled | Failed) -> Row:
    if isinstance(outcome, Failed):
        return Row(case, failure=outcome)
    try:
        report = describe(outcome, tile_rows=case.tile_rows, matrix_per_tile=case.matrix_per_tile)
    except ValueError as error:  # a listing that this parser cannot read, as of a newer compiler
        return Row(case, failure=Failed(case.job, outcome.triton, f"not understood: {error}", "", outcome.seconds))
    broken = tuple(check(report, case.limits, row=case.label))
    if case.workload is None:
        return Row(case, report, None, broken)
    try:
        return Row(case, report, None, broken, predict(report, case.workload))
    except ModelError as error:
        return Row(case, report, None, broken, model_note=str(error))
