"""Compiling, checking and timing candidates: the logic without processes, the jobs in the interpreter."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from bench_fakes import FakeDevice

from mla_codegen.check.workers import Outcome
from mla_codegen.measure import timing
from mla_codegen.measure.implementations import build
from mla_codegen.measure.tune import jobs
from mla_codegen.measure.tune import machine as module
from mla_codegen.measure.tune.jobs import Built, Check, Race, check, race, ragged
from mla_codegen.measure.tune.machine import FINAL_ROUNDS, ROUNDS, GpuMachine
from mla_codegen.measure.tune.space import Space
from mla_codegen.measure.tune.store import Measured
from mla_codegen.measure.workload import Workload
from mla_codegen.spec.load import parse_spec

SMALL = """target: portable
model: {num_heads: 2, kv_lora_rank: 64, qk_rope_head_dim: 32}
dtypes: {kv: [bf16]}
defaults: {block_n: 16, family: triton, optimizations: [exp2, direct_out]}
shapes:
  - {batch: 3, kv_len: 40, splits: 2}
"""


def small_space() -> Space:
    spec = parse_spec(SMALL, "small.yaml").spec
    return Space(spec, spec.shapes[0], "bf16")


class NoProcesses:
    """In the place of `Workers`: runs what it is told in this process, and notes it."""

    def __init__(self, does: Callable[[Any], Outcome]):
        self.does = does
        self.jobs: list[Any] = []

    def run(self, function: Any, jobs: Sequence[Any], timeout: float) -> Iterator[tuple[int, Outcome]]:
        for index in reversed(range(len(jobs))):  # processes end in any order
            self.jobs.append(jobs[index])
            yield index, self.does(jobs[index])

    def close(self) -> None:
        pass


@pytest.fixture
def machine() -> Iterator[GpuMachine]:
    with GpuMachine("Fake GPU", "9.9", 10.0, 0, processes=4) as made:
        yield made


def measured(built: Built) -> Measured:
    return Measured(float(built.splits), error=1e-3)


def test_each_candidate_gets_its_own_result(machine: GpuMachine) -> None:
    where = small_space()
    candidates = [where.current, *(where.candidate({"splits": splits}) for splits in (3, 1))]

    def compiles(job: Check) -> Outcome:
        return Outcome("wrong: error over 3e-03" if job.built.splits == 3 else "")

    compilers = machine._compilers = NoProcesses(compiles)
    timer = machine._timer = NoProcesses(lambda job: Outcome([measured(built) for built in job.builts]))
    results = machine.measure(where.workload, candidates, False)
    assert [(m.us, m.failure) for m in results[::2]] == [(2.0, ""), (1.0, "")]
    assert results[1].failure == "wrong: error over 3e-03"
    assert [built.splits for built in timer.jobs[0].builts] == [2, 1] and timer.jobs[0].rounds == ROUNDS
    machine.measure(where.workload, candidates[::2], True)
    assert len(compilers.jobs) == 3  # what is right is not checked again
    assert timer.jobs[1].rounds == FINAL_ROUNDS


def test_one_that_spoils_the_device_takes_only_itself_along(machine: GpuMachine) -> None:
    where = small_space()
    candidates = [where.candidate({"splits": splits}) for splits in (1, 2, 3)]

    def race(job: Race) -> Outcome:
        if any(built.splits == 2 for built in job.builts):
            return Outcome(failure="AcceleratorError: CUDA error: an illegal memory access")
        return Outcome([measured(built) for built in job.builts])

    machine._compilers = NoProcesses(lambda _: Outcome(""))
    machine._timer = NoProcesses(race)
    one, two, three = machine.measure(where.workload, candidates, False)
    assert (one.us, three.us) == (1.0, 3.0)
    assert two.failure.endswith("illegal memory access") and not two.lost


def test_a_candidate_that_hangs_is_lost(machine: GpuMachine) -> None:
    where = small_space()
    machine._compilers = NoProcesses(lambda _: Outcome(failure="not done within 10 s", lost=True))
    (result,) = machine.measure(where.workload, [where.current], False)
    assert result == Measured(failure="not done within 10 s") and result.lost


@pytest.fixture
def built(tmp_path: Path) -> Built:
    package = build(small_space().current.plan, tmp_path, "candidate")
    return Built(str(tmp_path), package, 16, 2, 3e-3, 1e-3)


def spoil(built: Built, old: str, new: str) -> None:
    (path,) = Path(built.folder, built.package, "tuned").glob("bf16_b3_kv40.py")
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


def test_a_right_candidate_passes(built: Built, monkeypatch: pytest.MonkeyPatch) -> None:
    work = small_space().workload
    assert check(Check(built, work, 0), where="cpu") == ""
    monkeypatch.setattr(timing, "WARM_UP", 0)
    jobs._inputs.cache_clear()
    (result,) = race(Race((built,), work, 0, 1), FakeDevice())
    assert result.good and 0 < result.error < 3e-3


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        ("acc * norm", "acc * norm * 1.01", "wrong: error over 3e-03"),
        ("log_sum * LN2", "log_sum", "wrong: LSE off"),
        ("tl.store(out + ", "if at < 3:\n        tl.store(out + ", "wrong: NaN"),
    ],
)
def test_a_wrong_candidate_is_dropped(built: Built, old: str, new: str, why: str) -> None:
    spoil(built, old, new)
    assert check(Check(built, small_space().workload, 0), where="cpu").startswith(why)


def test_a_candidate_that_does_not_run_is_dropped(built: Built) -> None:
    spoil(built, "acc * norm", "acc * nom")
    assert "nom" in check(Check(built, small_space().workload, 0), where="cpu")


def test_wrong_at_the_real_shape_only(built: Built, monkeypatch: pytest.MonkeyPatch) -> None:
    spoil(built, "acc * norm", "acc * norm * 1.01")
    monkeypatch.setattr(timing, "WARM_UP", 0)
    jobs._inputs.cache_clear()
    absent = Built(built.folder, "nowhere", 16, 2, 3e-3, 1e-3)
    wrong, fails = race(Race((built, absent), small_space().workload, 0, 1), FakeDevice())
    assert wrong.failure == "wrong: error over 3e-03" and wrong.error > 3e-3
    assert fails.failure.startswith("ModuleNotFoundError")


def test_ragged_lengths_reach_the_edges_and_stay_within_bounds() -> None:
    assert ragged(1, 64, 4) == [64 * 5 + 3]
    many = ragged(256, 64, 4)
    assert {0, 1, 63, 64, 65, 255, 256, 257} <= set(many) and len(many) == 256
    assert sum(ragged(256, 128, 128)) < jobs.CHECKED_ROWS + 256 * 130


def test_workloads_are_told_apart(machine: GpuMachine) -> None:
    assert Workload(2, 64, 32, "bf16", "bf16", "bf16", 3, 40) == small_space().workload
    assert machine.batch == 4 and machine.batch <= module.MAX_COMPILERS
    assert torch.device("cpu") == FakeDevice.where
