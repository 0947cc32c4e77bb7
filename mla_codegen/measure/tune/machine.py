"""The GPU as the search sees it: candidates are compiled and checked in parallel, then timed alone, interleaved.

This process never touches the device, so neither a crash nor a hang of a candidate reaches it.
"""

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mla_codegen.check.workers import MAX_COMPILERS, Outcome, Workers
from mla_codegen.measure.implementations import build
from mla_codegen.measure.tune.jobs import Built, Check, Race, check, race
from mla_codegen.measure.tune.space import Candidate
from mla_codegen.measure.tune.store import Measured
from mla_codegen.measure.workload import Workload

ROUNDS = 15
FINAL_ROUNDS = 41


class GpuMachine:
    """Close it, or use `with`.

    device, triton   names, part of what timings are kept under
    timeout          seconds that one candidate may take to compile and pass its check, and again to be timed
    """

    def __init__(self, device: str, triton: str, timeout: float, seed: int, processes: int | None = None):
        self.device, self.triton, self.timeout, self.seed = device, triton, timeout, seed
        self.batch = max(2, min(processes or os.cpu_count() or 1, MAX_COMPILERS))
        self._compilers = Workers(self.batch)
        self._timer = Workers(1)  # one: what runs beside a kernel changes its time
        self._folder = tempfile.TemporaryDirectory(prefix="mla-codegen-tune-")
        self._built: dict[str, Built] = {}
        self._checked: set[tuple[Built, Workload]] = set()

    def __enter__(self) -> "GpuMachine":
        return self

    def __exit__(self, *_: object) -> None:
        self._compilers.close()
        self._timer.close()
        self._folder.cleanup()

    def measure(self, workload: Workload, candidates: Sequence[Candidate], final: bool) -> list[Measured]:
        """What became of each, in their order."""
        builts = [self._build(candidate) for candidate in candidates]
        results: dict[int, Measured] = {}
        unchecked = [i for i, built in enumerate(builts) if (built, workload) not in self._checked]
        jobs = [Check(builts[i], workload, self.seed) for i in unchecked]
        for at, outcome in self._compilers.run(check, jobs, self.timeout):
            index = unchecked[at]
            failure = outcome.failure or outcome.value
            if failure:
                results[index] = Measured(failure=failure, lost=outcome.lost)
            else:
                self._checked.add((builts[index], workload))
        right = [index for index in range(len(builts)) if index not in results]
        for index, measured in zip(right, self._race([builts[i] for i in right], workload, final), strict=True):
            results[index] = measured
        return [results[index] for index in range(len(builts))]

    def _race(self, builts: list[Built], workload: Workload, final: bool) -> list[Measured]:
        """In one go; if that fails, each alone, so that one that spoils the device takes only itself along."""
        if not builts:
            return []
        job = Race(tuple(builts), workload, self.seed, FINAL_ROUNDS if final else ROUNDS)
        outcome = self._one(race, job, self.timeout * len(builts))
        if not outcome.failure:
            return list(outcome.value)
        if len(builts) == 1:
            return [Measured(failure=outcome.failure, lost=outcome.lost)]
        return [self._race([built], workload, final)[0] for built in builts]

    def _one(self, function: Any, job: Any, timeout: float) -> Outcome:
        ((_, outcome),) = self._timer.run(function, [job], timeout)
        return outcome

    def _build(self, candidate: Candidate) -> Built:
        built = self._built.get(candidate.identity)
        if built is None:
            kernel = candidate.kernel
            package = build(candidate.plan, Path(self._folder.name), f"candidate_{len(self._built)}")
            built = Built(
                self._folder.name, package, kernel.block_n, kernel.splits or 1, kernel.error_bound, kernel.lse_bound
            )
            self._built[candidate.identity] = built
        return built
