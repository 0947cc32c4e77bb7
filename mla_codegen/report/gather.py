"""What the page says of a build, as records: every number worked out and spelled, so that the template only places."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from markupsafe import Markup

from mla_codegen.catalog.optimizations import OPTIMIZATIONS
from mla_codegen.inspect import Row
from mla_codegen.inspect.limits import judge
from mla_codegen.inspect.plans import Call, Subject
from mla_codegen.inspect.table import HOT_LOOP, UNITS, hazard_texts
from mla_codegen.measure.bench import Report, Timing
from mla_codegen.measure.bench import Row as BenchRow
from mla_codegen.plan.resolve import KernelPlan, Plan
from mla_codegen.render.templates import render_kernels
from mla_codegen.report.highlight import python
from mla_codegen.spec.datamodel import spell


class NotAHistory(ValueError):
    """A file that the tuner did not write; `str()` is ready for a terminal."""


@dataclass(frozen=True)
class Setting:
    """A value as it is shown, bold where the spec says it, and where it came from."""

    shown: str
    origin: str


@dataclass(frozen=True)
class Kernel:
    """One kernel file. call: the shape that it is for, in words; settings by name."""

    anchor: str
    file: str
    plan: KernelPlan
    call: str
    settings: Mapping[str, Setting]
    optimizations: Sequence[tuple[str, str]]
    source: Markup
    lines: int


def kernels_of(plan: Plan) -> list[Kernel]:
    """Every kernel of the build, in its order."""
    found = []
    for kernel, text in zip(plan.kernels, render_kernels(list(plan.kernels)), strict=True):
        call = f"{spell(*kernel.call)}" if kernel.call else "all other calls"
        settings = {name: _setting(kernel, name, value, origin) for name, value, origin in kernel.explained()}
        meanings = [(name, OPTIMIZATIONS[name].meaning) for name in kernel.optimizations]
        file = f"{plan.name}/{kernel.name}.py"
        source = python(text, kernel.name)
        found.append(Kernel(kernel.name, file, kernel, call, settings, meanings, source, text.count("\n")))
    return found


def _setting(kernel: KernelPlan, name: str, value: str, origin: str) -> Setting:
    said = name in kernel.resolved and origin.startswith(("shape", "defaults"))
    return Setting(Markup("<b>{}</b>").format(value) if said else value, origin)


def columns_of(kernels: Sequence[Kernel]) -> list[str]:
    """The settings that some kernel has, in the order in which they are explained."""
    return list(dict.fromkeys(name for kernel in kernels for name in kernel.settings))


@dataclass(frozen=True)
class Held:
    """A number of the compiler beside its limit; `share`: of the limit, in percent, 100 at most; None: of nothing."""

    value: str
    allowed: str
    kept: bool
    share: float | None


@dataclass(frozen=True)
class Binary:
    """What the compiler made of one distinct kernel. alike: other files that hold the same one; hot: its hot loop."""

    label: str
    kernel: str
    alike: str
    row: Row
    held: Mapping[str, Held]
    hot: Mapping[str, str]
    faults: Sequence[str]


def binaries_of(subjects: Sequence[Subject], rows: Sequence[Row]) -> list[Binary]:
    """The rows of an inspection, each beside the limits that it was held to."""
    found = []
    for subject, row in zip(subjects, rows, strict=True):
        label = subject.case.label.removeprefix(f"{subject.plan.name}/")
        faults = [str(one) for one in row.broken] + hazard_texts(row)
        if row.failure is not None:
            faults.append(f"{row.failure.reason}: {row.failure.tail}".strip())
        held: dict[str, Held] = {}
        hot: dict[str, str] = {}
        if row.report is not None:
            held = {_in_words(one[0]): _held(*one) for one in judge(row.report, row.case.limits)}
            if row.report.hot is not None:
                counts = row.report.hot.per_rows(64) if row.report.hot.rows else row.report.hot.per_tile()
                hot = {title: f"{counts[name]:.4g}" for name, title in HOT_LOOP.items()}
        alike = ", ".join(Path(file).stem for file in subject.files[1:])
        found.append(Binary(label, subject.kernel.name, alike, row, held, hot, faults))
    return found


def limits_of(binaries: Sequence[Binary]) -> list[str]:
    """The limits that some kernel is held to, in the order of the specs."""
    return list(dict.fromkeys(name for one in binaries for name in one.held))


def _in_words(limit: str) -> str:
    words = limit.replace("hot_loop_per_64_rows.", "hot ").replace("hot_loop_per_tile.", "hot of a tile: ")
    return words.removesuffix("_at_least").replace("_", " ")


def _held(name: str, value: float | None, allowed: float, kept: bool) -> Held:
    side = "≥" if name.endswith("_at_least") else "≤"
    share = 100 * min(1.0, (value or 0) / allowed) if allowed else None
    return Held("no hot loop" if value is None else f"{value:,g}", f"{side} {allowed:,g}", kept, share)


def predictions_of(calls: Iterable[Call]) -> list[tuple[str, Mapping[str, str]]]:
    """What the model says of each call: (kernel, words by column)."""
    found: list[tuple[str, Mapping[str, str]]] = []
    for call in calls:
        guess = call.row.prediction
        if guess is None:
            continue
        cycles = {title: f"{guess.cycles[name]:.0f}" for name, title in UNITS.items()}
        times = {
            "compute µs": f"{1e6 * guess.compute_s:.1f}", "HBM µs": f"{1e6 * guess.hbm_s:.1f}",
            "predicted µs": f"{1e6 * guess.seconds:.1f}", "of roofline": f"{guess.percent_of_roofline:.0f} %",
        }  # fmt: skip
        found.append((call.row.case.label.partition("/")[2], {**cycles, **times, "binds": guess.binds}))
    return found


@dataclass(frozen=True)
class Time:
    """One bar: an implementation on one shape. share: of the roofline of this run, in percent."""

    shape: str
    name: str
    series: int
    first: bool
    us: str
    spread: str
    error: str
    share: float
    wrong: bool
    note: str


def times_of(report: Report, kv: str) -> list[Time]:
    """The bars of one KV type, in the order of the bench."""
    found = []
    for row in report.rows:
        if row.workload.kv != kv:
            continue
        for index, timing in enumerate(row.timings):
            series = report.names.index(timing.name) % 8 + 1
            found.append(_time(report, row, timing, series, index == 0))
    return found


def _time(report: Report, row: BenchRow, timing: Timing, series: int, first: bool) -> Time:
    time, share = timing.time, 0.0
    if time is not None:
        least = max(row.workload.kv_bytes / report.read_tb_s, row.workload.flops / report.product_tflop_s) / 1e6
        share = 100 * least / time.median
    error = max(timing.eager_error, timing.graph_error, key=lambda e: (e != e, e))
    return Time(
        row.workload.shape, timing.name, series, first, f"{time.median:.1f}" if time else "-",
        f"{time.spread:.1f}" if time else "-", "-" if error != error else f"{error:.1e}", share, timing.wrong,
        timing.failure or ("wrong" if timing.wrong else ""),
    )  # fmt: skip


@dataclass(frozen=True)
class Candidate:
    """One line of the tuner's history: its settings, and microseconds or why there are none."""

    settings: Mapping[str, Any]
    us: float
    failure: str


@dataclass(frozen=True)
class Search:
    """The candidates of one shape and KV type. built: the one whose settings the build has, if it was tried."""

    kv: str
    shape: str
    candidates: Sequence[Candidate]
    built: Candidate | None
    kernel: KernelPlan

    @property
    def good(self) -> list[Candidate]:
        return [one for one in self.candidates if not one.failure]

    @property
    def best(self) -> Candidate:
        return min(self.good, key=lambda one: one.us)

    @property
    def built_us(self) -> str:
        return f"{self.built.us:.1f}" if self.built is not None else "not tried"

    @property
    def gain(self) -> str:
        """What the fastest candidate would take off the built one's time."""
        return f"{100 * (1 - self.best.us / self.built.us):.0f} %" if self.built is not None else "-"

    @property
    def differing(self) -> str:
        """The fastest candidate's settings, as far as the build has others."""
        ours = _settings(self.kernel)
        return " ".join(
            f"{name}: {value}" for name, value in self.best.settings.items() if value != ours.get(name)
        )  # fmt: skip


@dataclass(frozen=True)
class History:
    """What the tuner tried of a spec. others: lines of the file that are of other models, shapes or KV types."""

    searches: Sequence[Search]
    devices: Sequence[str]
    failures: Sequence[tuple[str, int]]
    others: int

    def kinds(self) -> list[str]:
        return list(dict.fromkeys(search.kv for search in self.searches))

    def of(self, kv: str) -> list[Search]:
        return [search for search in self.searches if search.kv == kv]


def history_of(plan: Plan, path: Path) -> History:
    """The tuner's timings of this spec's shapes. Raises NotAHistory; OSError where the file cannot be read.

    Timings of several devices or releases do not compare: of those in the file, the last one's are taken.
    """
    records = _records(path)
    model = plan.spec.model
    dimensions = {"heads": model.num_heads, "latent": model.kv_lora_rank, "rope": model.qk_rope_head_dim}
    calls = {(kernel.kv, spell(*kernel.call)): kernel for kernel in plan.kernels if kernel.call}
    ours = [
        one for one in records
        if (one["kv"], one["shape"]) in calls and all(one.get(name, size) == size for name, size in dimensions.items())
    ]  # fmt: skip
    machine = [(one["device"], one["triton"]) for one in ours][-1:]
    ours = [one for one in ours if [(one["device"], one["triton"])] == machine]
    searches: list[Search] = []
    failures: dict[str, int] = {}
    for (kv, shape), kernel in calls.items():
        tried = [
            Candidate(one["settings"], one["us"], one["failure"])
            for one in ours if (one["kv"], one["shape"]) == (kv, shape)
        ]  # fmt: skip
        for one in tried:
            if one.failure:
                failures[one.failure] = failures.get(one.failure, 0) + 1
        wanted = _settings(kernel)
        built = [one for one in tried if not one.failure and dict(one.settings) == wanted][-1:]
        if any(not one.failure for one in tried):
            searches.append(Search(kv, shape, tried, built[0] if built else None, kernel))
    ranked = sorted(failures.items(), key=lambda item: -item[1])
    devices = [f"{name}, triton {release}" for name, release in machine]
    return History(searches, devices, ranked, len(records) - len(ours))


def _settings(kernel: KernelPlan) -> dict[str, Any]:
    return {name: resolved.value for name, resolved in kernel.resolved.items() if resolved.value is not None}


def _records(path: Path) -> list[dict[str, Any]]:
    found = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            record = json.loads(line)
            named = {name: record[name] for name in ("shape", "kv", "settings", "device", "triton", "us", "failure")}
            if not isinstance(named["settings"], dict):
                raise TypeError("settings")
        except (ValueError, KeyError, TypeError):
            continue  # cut off when a process was killed
        found.append(record)
    if not found:
        raise NotAHistory(f"{path} has no timing\n  fix: give the file that `mla-codegen tune` keeps, TARGET.jsonl")
    return found
