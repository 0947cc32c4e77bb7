"""A machine whose kernels take the time that a formula says, for tests of the search.

Run as a script, it searches and dies on the way.
"""

import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from mla_codegen.measure.tune.search import Search
from mla_codegen.measure.tune.space import Candidate, Space
from mla_codegen.measure.tune.store import Measured, Store
from mla_codegen.measure.workload import Workload
from mla_codegen.plan.families import FAMILIES
from mla_codegen.plan.resolve import KernelPlan
from mla_codegen.spec.load import parse_spec

SPEC = """# a spec of the tests
target: sm_80
dtypes: {kv: [fp8_e4m3fn, bf16]}
defaults:
  num_warps: 4
  optimizations: [exp2, packed_fp8]
  per_kv:
    bf16: {block_n: 32}
shapes:
  - {batch: 4, kv_len: 8192, splits: 16}  # long
  - {batch: 64, kv_len: 1024, splits: 4}
"""
SMALL = {"splits": (2, 4, 8), "block_n": (16, 32), "num_stages": (1, 2)}


def cost(kernel: KernelPlan) -> float:
    """Microseconds: best at 8 splits, tiles of 32 rows, 8 warps, 3 stages."""
    splits = abs((kernel.splits or 1) - 8)
    return 50 + splits + abs(kernel.block_n - 32) / 4 + abs(kernel.num_warps - 8) + 2 * abs(kernel.num_stages - 3)


class FakeMachine:
    """Notes what it measures. `fails`: why a kernel is dropped, if it is; `stop`: called after `stop_after` of them."""

    device = "Fake GPU"
    triton = "9.9"
    batch = 4

    def __init__(
        self,
        cost: Callable[[KernelPlan], float] = cost,
        fails: Callable[[KernelPlan], str] = lambda _: "",
        stop: Callable[[], None] | None = None,
        stop_after: int = 0,
    ):
        self.cost, self.fails, self.stop, self.stop_after = cost, fails, stop, stop_after
        self.measured: list[Candidate] = []
        self.finals: list[Candidate] = []

    def measure(self, workload: Workload, candidates: Sequence[Candidate], final: bool) -> list[Measured]:
        if self.stop and len(self.measured) >= self.stop_after:
            self.stop()
        (self.finals if final else self.measured).extend(candidates)
        results = []
        for candidate in candidates:
            failure = self.fails(candidate.kernel)
            us = self.cost(candidate.kernel)
            lost = failure.startswith("not done")
            results.append(Measured(failure=failure, lost=lost) if failure else Measured(us, us, us, 1e-3))
        return results


def space(kv: str = "fp8_e4m3fn", index: int = 0, text: str = SPEC) -> Space:
    spec = parse_spec(text, "spec.yaml").spec
    return Space(spec, spec.shapes[index], kv)  # type: ignore[arg-type]


def search(machine: FakeMachine, path: Path, trials: int = 24, where: Space | None = None) -> Search:
    return Search(where or space(), machine, Store(path), trials, 0, None)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    assert "triton" in FAMILIES
    search(FakeMachine(stop=die, stop_after=12), Path(sys.argv[1])).run()
