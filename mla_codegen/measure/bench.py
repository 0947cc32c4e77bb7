"""Kernels against the clock: ours and others interleaved, on the same inputs, the error of each beside its time."""

import json
import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any

import torch

from mla_codegen.check.workers import MAX_COMPILERS, Workers, first_line
from mla_codegen.measure.implementations import Implementation, build, calling, ours
from mla_codegen.measure.timing import Device, Gpu, Sample, alternate, geometric_mean, host_times
from mla_codegen.measure.workload import Truth, Workload, make_inputs, poisoned, workload_of
from mla_codegen.plan.resolve import Plan

COMPILE_SECONDS = 300.0  # of one kernel; one that takes longer is compiled where it is timed

Shapes = Sequence[tuple[int, ...]]


@dataclass(frozen=True)
class Timing:
    """One implementation on one workload, microseconds; None: could not be timed so, and `failure` says why.

    graph    a CUDA graph's replay, device time alone; eager: an ordinary call to an idle device, host and device
    host     how long an ordinary call keeps Python
    *_error  relative L2 against float64, the worst of the sampled requests; NaN: not all of the output was written
    bound    errors above it are wrong
    """

    name: str
    kernel: str
    graph: Sample | None
    eager: Sample | None
    host: Sample | None
    graph_error: float
    eager_error: float
    bound: float
    failure: str

    @property
    def wrong(self) -> bool:
        """Nothing ran, or what it gave is not attention."""
        return self.eager is None or not max(self.eager_error, self.graph_error) <= self.bound

    @property
    def time(self) -> Sample | None:
        """Device time where there is one."""
        return self.graph or self.eager


@dataclass(frozen=True)
class Row:
    """One workload, timed. `timings` in the order of the implementations that serve it."""

    workload: Workload
    timings: tuple[Timing, ...]

    def tb_s(self, timing: Timing) -> float:
        """TB/s of KV, each row counted once."""
        return self.workload.kv_bytes / timing.time.median / 1e6 if timing.time else float("nan")

    def tflop_s(self, timing: Timing) -> float:
        return self.workload.flops / timing.time.median / 1e6 if timing.time else float("nan")


@dataclass(frozen=True)
class Report:
    """A bench. `read_tb_s`, `product_tflop_s`: ceilings measured in the same run."""

    device: str
    target: str
    triton: str
    torch: str
    read_tb_s: float
    product_tflop_s: float
    rounds: int
    rows: tuple[Row, ...]

    @property
    def names(self) -> list[str]:
        return list(dict.fromkeys(timing.name for row in self.rows for timing in row.timings))

    def ratios(self, base: str, other: str, kind: str) -> list[float]:
        """Time of `other` over time of `base`, for each workload that both did right. kind: graph or eager."""
        found = []
        for row in self.rows:
            by_name = {timing.name: timing for timing in row.timings if not timing.wrong}
            if base in by_name and other in by_name:
                ours, theirs = getattr(by_name[base], kind), getattr(by_name[other], kind)
                if ours and theirs:
                    found.append(theirs.median / ours.median)
        return found

    def json(self) -> dict[str, Any]:
        rows = []
        for row in self.rows:
            timings = [
                {**asdict(t), "wrong": t.wrong, "tb_s": row.tb_s(t), "tflop_s": row.tflop_s(t),
                 "of_read_ceiling": row.tb_s(t) / self.read_tb_s}
                for t in row.timings
            ]  # fmt: skip
            work = {"kv_bytes": row.workload.kv_bytes, "flops": row.workload.flops}
            rows.append({**asdict(row.workload), **work, "timings": timings})
        base = self.names[0] if self.names else ""
        means = {
            name: {kind: geometric_mean(self.ratios(base, name, kind)) for kind in ("graph", "eager")}
            for name in self.names[1:]
        }
        return {**asdict(self), "rows": rows, "base": base, "geometric_mean_ratios": means}

    @classmethod
    def from_json(cls, text: str) -> "Report":
        """What `json` gave, a missing number NaN. ValueError for anything else."""
        try:
            data = json.loads(text)
            rows = tuple(
                Row(_made(Workload, row), tuple(_timing_of(timing) for timing in row["timings"]))
                for row in data["rows"]
            )
            return _made(cls, {**data, "rows": rows})
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise ValueError(f"not what `bench --json` prints: {type(error).__name__}: {error}") from error


def _made(kind: Any, data: dict[str, Any]) -> Any:
    """A record of `kind` from its fields among `data`."""
    return kind(**{field.name: data[field.name] for field in fields(kind) if field.name in data})


def _timing_of(data: dict[str, Any]) -> Timing:
    samples = {kind: data[kind] and _made(Sample, data[kind]) for kind in ("graph", "eager", "host")}
    errors = {name: float("nan") if data[name] is None else data[name] for name in ("graph_error", "eager_error")}
    made: Timing = _made(Timing, {**data, **samples, **errors})
    return made


def bench(
    plans: Sequence[Plan],
    against: Sequence[Implementation],
    device: Device,
    *,
    shapes: Shapes = (),
    kv: str | None = None,
    rounds: int = 21,
    seed: int = 0,
    progress: Callable[[str, int], None] | None = None,
) -> Report:
    """Time every workload of `plans`: their kernels, built into a temporary folder, and `against`.

    shapes   (batch, kv_len, perhaps q_len) in place of the specs' own; kv: only this KV dtype
    """
    import triton

    workloads = [
        (plan, workload_of(plan, name, *shape))
        for plan in plans
        for name in plan.spec.dtypes.kv
        for shape in (shapes or [s.call for s in plan.spec.shapes])
        if kv in (None, name)
    ]
    with tempfile.TemporaryDirectory(prefix="mla-codegen-bench-") as folder:
        packages = {plan.name: build(plan, Path(folder), f"benched_{plan.name}") for plan in plans}
        if isinstance(device, Gpu):
            compile_ahead([(folder, packages[plan.name], workload) for plan, workload in workloads])
        everyone = [ours(plan, folder, packages[plan.name]) for plan in plans] + list(against)
        read, product = device.ceilings()
        rows = []
        unique = list(dict.fromkeys(workload for _, workload in workloads))
        for workload in unique:
            rows.append(measure(workload, [i for i in everyone if i.serves(workload)], device, rounds, seed))
            if progress:
                progress(f"{workload.kv} {workload.shape}", len(unique))
    versions = (triton.__version__, torch.__version__)
    return Report(device.name, device.target, *versions, read, product, rounds, tuple(rows))


def measure(workload: Workload, runs: Sequence[Implementation], device: Device, rounds: int, seed: int) -> Row:
    """All that is to be known of one workload; an implementation that fails is a line that says so."""
    torch.cuda.empty_cache()
    failures: dict[str, str] = {}
    errors: dict[tuple[str, str], float] = {}
    try:
        case = make_inputs(workload, device.where, seed)
        truth = Truth(case, workload.latent, seed)
    except torch.OutOfMemoryError:
        failures = {run.name: f"no room for {workload.kv_bytes / 1e9:.0f} GB of KV" for run in runs}
        return Row(workload, tuple(_timing(run, workload, {}, {}, {}, errors, failures) for run in runs))

    calls: dict[str, Callable[[], Any]] = {}
    replays: dict[str, Callable[[], Any]] = {}
    for run in runs:
        try:
            call = partial(run.call, run.prepare(workload, case))
            with poisoned(workload, device.where):
                errors[run.name, "eager"] = truth.error(call())
            calls[run.name] = call
        except Exception as error:  # a failed line, not the end of the table
            failures[run.name] = first_line(error)
            continue
        try:
            replay, result = device.capture(call)
            (result[0] if isinstance(result, tuple | list) else result).fill_(float("nan"))
            replay()
            errors[run.name, "graph"] = truth.error(result)
            replays[run.name] = replay
        except Exception as error:
            failures[run.name] = f"no graph: {first_line(error)}"
    graph = alternate(device, replays, rounds)
    eager = alternate(device, calls, rounds, settled=True)
    host = host_times(device, calls, rounds)
    return Row(workload, tuple(_timing(run, workload, graph, eager, host, errors, failures) for run in runs))


def _timing(
    run: Implementation,
    workload: Workload,
    graph: dict[str, Sample],
    eager: dict[str, Sample],
    host: dict[str, Sample],
    errors: dict[tuple[str, str], float],
    failures: dict[str, str],
) -> Timing:
    eager_error = errors.get((run.name, "eager"), float("nan"))
    graph_error = errors.get((run.name, "graph"), eager_error)
    times = (graph.get(run.name), eager.get(run.name), host.get(run.name))
    failure = failures.get(run.name, "")
    return Timing(run.name, run.kernel(workload), *times, graph_error, eager_error, run.bound(workload), failure)


def compile_ahead(jobs: Sequence[tuple[str, str, Workload]]) -> None:
    """Fill Triton's cache from several processes; what fails here fails again where it is timed, and is told."""
    unique = list(dict.fromkeys(jobs))
    with Workers(max(1, min(len(unique), os.cpu_count() or 1, MAX_COMPILERS))) as workers:
        for _ in workers.run(_call_once, unique, COMPILE_SECONDS):
            pass


def _call_once(job: tuple[str, str, Workload]) -> None:
    """Call the kernel of a workload on requests of one KV row: compilation does not depend on lengths."""
    folder, package, workload = job
    case = make_inputs(workload, torch.device("cuda"), 0, lens=[1] * workload.batch)
    call, prepare = calling(folder, package)
    call(prepare(workload, case))
    torch.cuda.synchronize()
