"""How calls are timed: interleaved, each from a cold L2, the median of many rounds with its spread.

Only ratios between calls timed in the same run are to be trusted: clocks and neighbours change from run to run.
"""

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

FLUSH_BYTES = 256 * 1024 * 1024  # more than any L2 holds
CEILING_BYTES = 4 << 30
PRODUCT_SIZE = 8192
WARM_UP = 3  # rounds before those that count
HOST_CALLS = 20  # calls in a row whose host time is one sample; few enough that the launch queue does not fill

Call = Callable[[], Any]


@dataclass(frozen=True)
class Sample:
    """Microseconds of a call: the median of `rounds`, the quartiles around it, the shortest."""

    median: float
    low: float
    high: float
    least: float
    rounds: int

    @property
    def spread(self) -> float:
        """Half the range between the quartiles."""
        return (self.high - self.low) / 2


def sample_of(times: Sequence[float]) -> Sample:
    """The sample of some microseconds; NaN stays NaN."""
    if len(times) == 1:
        return Sample(times[0], times[0], times[0], times[0], 1)
    low, median, high = statistics.quantiles(times, n=4, method="inclusive")
    return Sample(median, low, high, min(times), len(times))


class Device(Protocol):
    """What timing needs of a device. Work is queued; `mark` notes when the queue gets there.

    name     as the driver says; target: as a spec says (sm_90, ...)
    where    the device that inputs must be on
    """

    name: str
    target: str
    where: torch.device

    def flush(self) -> None:
        """Queue a write of FLUSH_BYTES, so that nothing useful is left in L2."""

    def mark(self) -> Any:
        """Queue a mark."""

    def between(self, begin: Any, end: Any) -> float:
        """Microseconds from one mark to another, once `finish` has returned."""

    def finish(self) -> None:
        """Wait until the queue is empty."""

    def now(self) -> float:
        """The host's clock, in seconds."""

    def capture(self, call: Call) -> tuple[Call, Any]:
        """(replay, what `call` returned) of a graph of the call. Raises what the call does to a capture."""

    def ceilings(self) -> tuple[float, float]:
        """(TB/s of a large read, TFLOP/s of a large bf16 product), measured now."""


def alternate(device: Device, calls: Mapping[str, Call], rounds: int, *, settled: bool = False) -> dict[str, Sample]:
    """Time `calls` interleaved, `rounds` times each, L2 flushed before each.

    settled   the device is idle when a call begins, so that its host time counts too (an eager call of a user);
              otherwise the flush hides it (a graph in a stream of work)
    """
    names = list(calls)
    times: dict[str, list[float]] = {name: [] for name in names}
    marks: list[tuple[str, Any, Any]] = []
    for turn in range(WARM_UP + rounds):
        first = turn % len(names) if names else 0
        for name in names[first:] + names[:first]:  # nobody always runs after the same neighbour
            device.flush()
            if settled:
                device.finish()
            begin = device.mark()
            calls[name]()
            marks.append((name, begin, device.mark()))
        if turn < WARM_UP:
            marks.clear()
    device.finish()
    for name, begin, end in marks:
        times[name].append(device.between(begin, end))
    return {name: sample_of(values) for name, values in times.items()}


def host_times(device: Device, calls: Mapping[str, Call], rounds: int) -> dict[str, Sample]:
    """Microseconds of the host alone: how long a call keeps Python, its launches only queued."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(rounds + 1):
        for name, call in calls.items():
            device.finish()
            begin = device.now()
            for _ in range(HOST_CALLS):
                call()
            spent = (device.now() - begin) / HOST_CALLS * 1e6
            if turn:
                times[name].append(spent)
    device.finish()
    return {name: sample_of(values) for name, values in times.items()}


def geometric_mean(ratios: Sequence[float]) -> float:
    """Of numbers above 0; NaN of none."""
    return math.exp(statistics.fmean(map(math.log, ratios))) if ratios else math.nan


class Gpu:
    """The current CUDA or HIP device."""

    def __init__(self) -> None:
        from mla_codegen.runtime.builds import target_of

        self.where = torch.device("cuda", torch.cuda.current_device())
        self.name = torch.cuda.get_device_name(self.where)
        self.target = target_of(self.where)
        self._flushed = torch.empty(FLUSH_BYTES, dtype=torch.int8, device=self.where)

    def flush(self) -> None:
        self._flushed.fill_(1)

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def between(self, begin: torch.cuda.Event, end: torch.cuda.Event) -> float:
        return begin.elapsed_time(end) * 1e3

    def finish(self) -> None:
        torch.cuda.synchronize(self.where)

    def now(self) -> float:
        return time.perf_counter()

    def capture(self, call: Call) -> tuple[Call, Any]:
        aside = torch.cuda.Stream(self.where)
        aside.wait_stream(torch.cuda.current_stream(self.where))
        with torch.cuda.stream(aside):
            for _ in range(2):
                call()
        self.finish()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            result = call()
        return graph.replay, result

    def ceilings(self) -> tuple[float, float]:
        free, _ = torch.cuda.mem_get_info(self.where)
        count = min(CEILING_BYTES, free // 4) // 4
        numbers = torch.empty(count, dtype=torch.float32, device=self.where).normal_()
        read, _ = self.capture(numbers.sum)
        left = torch.empty(PRODUCT_SIZE, PRODUCT_SIZE, dtype=torch.bfloat16, device=self.where).normal_()
        right = torch.empty_like(left).normal_()
        product, _ = self.capture(lambda: left @ right)
        times = alternate(self, {"read": read, "product": product}, 15)
        return 4 * count / times["read"].median / 1e6, 2 * PRODUCT_SIZE**3 / times["product"].median / 1e6
