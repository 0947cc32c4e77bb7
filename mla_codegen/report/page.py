"""The page: one HTML file with its style sheet and pictures inside. It asks nothing of the network and runs no script.

The same build gives the same bytes: no time, host or path of a machine is in it.
"""

from dataclasses import dataclass
from functools import cache
from pathlib import Path

import jinja2
from markupsafe import Markup, escape

from mla_codegen import __version__
from mla_codegen.inspect import Row
from mla_codegen.inspect.plans import Call, Subject
from mla_codegen.measure.bench import Report
from mla_codegen.plan.resolve import Plan
from mla_codegen.report import figures, gather
from mla_codegen.report.highlight import yaml

FOLDER = Path(__file__).parent


@dataclass(frozen=True)
class Inspected:
    """What the compiler made of a plan's kernels, row by row, and the calls that the model speaks of."""

    subjects: list[Subject]
    rows: list[Row]
    calls: list[Call]

    @property
    def ok(self) -> bool:
        return all(row.ok for row in self.rows)


@cache
def _environment() -> jinja2.Environment:
    found = jinja2.Environment(
        loader=jinja2.FileSystemLoader(FOLDER), undefined=jinja2.StrictUndefined, trim_blocks=True,
        lstrip_blocks=True, keep_trailing_newline=True, autoescape=True,
    )  # fmt: skip
    found.filters["breakable"] = _breakable
    return found


def _breakable(name: str) -> Markup:
    """A long name that may go on in the next line behind an underscore."""
    return Markup("_<wbr>").join(escape(part) for part in name.split("_"))


def page(
    plan: Plan,
    spec_text: str,
    inspected: Inspected | None,
    not_inspected: str = "",
    bench: Report | None = None,
    history: gather.History | None = None,
) -> str:
    """The whole page.

    not_inspected   why there is nothing of the compiler, where `inspected` is None
    bench, history  what was measured; pictures of it need matplotlib
    """
    kernels = gather.kernels_of(plan)
    binaries = gather.binaries_of(inspected.subjects, inspected.rows) if inspected else []
    kinds = list(dict.fromkeys(row.workload.kv for row in bench.rows)) if bench else []
    return _environment().get_template("page.html.jinja").render(
        version=__version__,
        style=(FOLDER / "page.css").read_text(encoding="utf-8"),
        plan=plan,
        spec=yaml(spec_text, "spec"),
        kernels=kernels,
        columns=gather.columns_of(kernels),
        binaries=binaries,
        limits=gather.limits_of(binaries),
        verdict=_verdict(binaries),
        releases=sorted({one.row.report.triton for one in binaries if one.row.report}),
        predictions=gather.predictions_of(inspected.calls) if inspected else [],
        not_inspected=not_inspected,
        bench=bench,
        times={kv: gather.times_of(bench, kv) for kv in kinds} if bench else {},
        roofline=figures.roofline(bench) if bench and bench.rows else "",
        history=history,
        candidates={kv: figures.candidates(history.of(kv), kv) for kv in history.kinds()} if history else {},
    )  # fmt: skip


def _verdict(binaries: list[gather.Binary]) -> str:
    failed = sum(one.row.failure is not None for one in binaries)
    broken = sum(len(one.row.broken) for one in binaries)
    hazards = sum(len(one.row.report.hazards) for one in binaries if one.row.report)
    parts = [f"{failed} do not compile" if failed else "all compile"]
    parts.append(f"{broken} limits broken" if broken else "no limit broken")
    if any(one.row.case.job.vendor == "amd" for one in binaries):
        parts.append(f"{hazards} hazards" if hazards else "no hazard")
    return ", ".join(parts)
