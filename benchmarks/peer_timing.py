"""One shape: ours and the peers on the same inputs, interleaved, timed in two conventions and checked before and after.

Tables in circulation are timed in different ways, and for calls of ten microseconds the way matters:

graph   two events around one replay of a CUDA graph of the call, after a flush of L2; about 3 us of it are the events
ten     a graph of ten times flush and call, less a graph of ten flushes, divided by ten: free of events and launches
eager   an ordinary call to an idle device, host and device; host: how long such a call keeps Python
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from mla_codegen.check.workers import first_line
from mla_codegen.measure.timing import Device, Sample, alternate, host_times
from mla_codegen.measure.workload import Truth, Workload, call_data, make_inputs, poisoned

from peer_kernels import Call, Missing, Paged, paged  # isort: skip

IN_A_ROW = 10
HOST_ROUNDS = 7  # of twenty calls each


@dataclass(frozen=True)
class Job:
    """A workload, or requests of `lens` rows with as many rows together (`workload.kv_len` is then their mean)."""

    workload: Workload
    lens: tuple[int, ...] = ()

    @property
    def shape(self) -> str:
        """64x8192, or 64x1..16384 for 64 requests of 1 to 16384 rows."""
        return f"{self.workload.batch}x{min(self.lens)}..{max(self.lens)}" if self.lens else self.workload.shape

    @property
    def longest(self) -> Workload:
        """The call as a host describes it, by its longest request."""
        return replace(self.workload, kv_len=max(self.lens)) if self.lens else self.workload


@dataclass(frozen=True)
class Run:
    """Something to time. `prepare` does all that is not timed and gives the call; errors above `bound` are wrong."""

    name: str
    prepare: Callable[[tuple[Any, ...], Any, Paged], Call]
    bound: float


def measure(job: Job, runs: Sequence[Run], device: Device, rounds: int, seed: int) -> dict[str, Any]:
    """A row of the report. Times are samples in microseconds; a run that fails is a line that says why."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    case = make_inputs(job.workload, device.where, seed, job.lens or None)
    truth = Truth(case, job.workload.latent, seed)
    data = call_data(job.longest, case)
    pages = paged(case)
    calls: dict[str, Call] = {}
    replays: dict[str, Call] = {}
    outputs: dict[str, torch.Tensor] = {}
    errors: dict[str, list[float]] = {}
    failures: dict[str, str] = {}
    for run in runs:
        try:
            with poisoned(job.workload, device.where):
                call = run.prepare(data, case, pages)
                errors[run.name] = [truth.error(call())]
            replay, output = device.capture(call)
            output.fill_(float("nan"))
            replay()
            errors[run.name].append(truth.error(output))
        except Exception as error:  # a foreign kernel that refuses a shape is a line, not the end of the table
            failures[run.name] = str(error) if isinstance(error, Missing) else first_line(error)
            continue
        calls[run.name], replays[run.name], outputs[run.name] = call, replay, output
    times = {
        "graph": alternate(device, replays, rounds),
        "ten": ten_in_a_row(device, calls, rounds),
        "eager": alternate(device, calls, rounds, settled=True),
        "host": host_times(device, calls, HOST_ROUNDS),
    }
    for name, output in outputs.items():  # a kernel that keeps counters between calls must still be right after many
        output.fill_(float("nan"))
        replays[name]()
        errors[name].append(truth.error(output))
    timings = []
    for run in runs:
        found = {kind: asdict(of[run.name]) if run.name in of else None for kind, of in times.items()}
        worst = max(errors.get(run.name, [float("nan")]), key=lambda error: (error != error, error))
        right = run.name in calls and worst <= run.bound
        failure = failures.get(run.name, "")
        timings.append(
            {"name": run.name, **found, "error": worst, "bound": run.bound, "right": right, "failure": failure}
        )
    work = job.workload
    return {
        "kv": work.kv, "heads": work.heads, "shape": job.shape, "batch": work.batch, "lens": list(job.lens),
        "kv_bytes": work.kv_bytes, "flops": work.flops, "timings": timings,
    }  # fmt: skip


def least(device: Device, rounds: int) -> dict[str, float]:
    """Microseconds of a call that does next to nothing: what each convention adds to every time."""
    number = torch.zeros((), device=device.where)
    calls = {"one kernel": lambda: number.add_(1)}
    replays = {name: device.capture(call)[0] for name, call in calls.items()}
    every = {"graph": alternate(device, replays, rounds), "ten": ten_in_a_row(device, calls, rounds)}
    return {kind: times["one kernel"].median for kind, times in every.items()}


def ten_in_a_row(device: Device, calls: Mapping[str, Call], rounds: int) -> dict[str, Sample]:
    """The second convention: what a call adds to a graph of flushes."""
    nothing = torch.zeros((), device=device.where)
    graphs = {"": lambda: nothing, **calls}
    replays = {name: device.capture(_after_flushes(device, call))[0] for name, call in graphs.items()}
    times = alternate(device, replays, rounds)
    flushes = times.pop("").median
    return {name: _less(sample, flushes) for name, sample in times.items()}


def _after_flushes(device: Device, call: Call) -> Call:
    def several() -> torch.Tensor:
        for _ in range(IN_A_ROW):
            device.flush()
            result = call()
        return result

    return several


def _less(sample: Sample, us: float) -> Sample:
    times = ((at - us) / IN_A_ROW for at in (sample.median, sample.low, sample.high, sample.least))
    return Sample(*times, sample.rounds)
