"""A device whose clock the tests wind: what bench and tune do with times, without a GPU.

Test modules import it by name: pytest puts their folder on the path.
"""

from collections.abc import Callable
from typing import Any

import torch

from mla_codegen.measure.bench import Report, Row, Timing
from mla_codegen.measure.timing import Sample
from mla_codegen.measure.workload import Workload


class FakeDevice:
    """Time passes only where a call says so, through `spend`; the queue is empty at once."""

    name = "Fake GPU"
    target = "portable"
    where = torch.device("cpu")

    def __init__(self) -> None:
        self.us = 0.0
        self.log: list[str] = []

    def spend(self, us: float) -> None:
        self.us += us

    def call(self, name: str, us: float | Callable[[], float], result: Any = None) -> Callable[[], Any]:
        """A call that takes `us` microseconds and is noted in `log`."""

        def run() -> Any:
            self.log.append(name)
            self.spend(us() if callable(us) else us)
            return result

        return run

    def flush(self) -> None:
        self.log.append("flush")
        self.spend(60.0)

    def mark(self) -> float:
        return self.us

    def between(self, begin: float, end: float) -> float:
        return end - begin

    def finish(self) -> None:
        self.log.append("finish")

    def now(self) -> float:
        return self.us * 1e-6

    def capture(self, call: Callable[[], Any]) -> tuple[Callable[[], Any], Any]:
        result = call()

        def replay() -> None:
            again = call()
            result.copy_(again)

        return replay, result

    def ceilings(self) -> tuple[float, float]:
        return 4.0, 800.0


def report() -> Report:
    """Three shapes, two implementations: the peer takes twice as long, and is wrong on the third."""
    rows = []
    for kv, batch, wrong in (("fp8_e4m3fn", 4, False), ("bf16", 4, False), ("bf16", 64, True)):
        work = Workload(16, 512, 64, "bf16", "bf16", kv, batch, 1024)
        error = float("nan") if wrong else 2e-2
        ours = Timing("h200", "k", sample(10.0), sample(20.0), sample(5.0), 1e-3, 1e-3, 3e-3, "")
        note = "graph: [because]" if wrong else ""
        peer = Timing("peer", "", sample(20.0), sample(30.0), sample(9.0), error, error, 4e-2, note)
        rows.append(Row(work, (ours, peer)))
    return Report("Fake GPU", "sm_90", "3.6.0", "2.11.0", 4.0, 800.0, 21, tuple(rows))


def sample(us: float) -> Sample:
    return Sample(us, us * 0.98, us * 1.04, us * 0.97, 21)
