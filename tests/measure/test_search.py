"""What the search tries, what it keeps, and what it takes for better."""

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
import tune_fakes
from tune_fakes import SMALL, FakeMachine, cost, search, space

from mla_codegen.measure.tune.search import FINALISTS, NOISE, Search
from mla_codegen.measure.tune.store import Measured, Store
from mla_codegen.plan.families import FAMILIES
from mla_codegen.plan.resolve import KernelPlan


@pytest.fixture
def few_knobs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FAMILIES["triton"], "tunable", SMALL)


def test_tpe_finds_a_far_better_setting(tmp_path: Path) -> None:
    machine = FakeMachine()
    found = search(machine, tmp_path / "store", trials=48).run()
    assert found.tried == len(machine.measured) == 48
    assert machine.measured[0].settings == {}  # the current setting comes first
    assert found.now.us == cost(space().current.kernel)
    assert found.improved and found.best.us < found.now.us - 10
    assert found.best.us == min(cost(c.kernel) for c in machine.measured)
    assert machine.finals[0].settings == {} and len(machine.finals) == 1 + FINALISTS


def test_hints_come_first(tmp_path: Path) -> None:
    hint = {"family": "triton", "splits": 12, "block_n": 32, "num_warps": 8, "num_stages": 3, "waves_per_eu": 7}
    illegal = {"family": "triton", "splits": 4, "block_n": 128, "num_warps": 8, "num_stages": 4}
    machine = FakeMachine()
    others = [{"family": "cdna9"}, illegal, hint]
    found = Search(space(), machine, Store(tmp_path / "store"), 12, 0, hints=others).run()
    tried = machine.measured[1].kernel
    assert (tried.splits, tried.block_n, tried.num_warps, tried.num_stages) == (12, 32, 8, 3)
    assert found.best.us <= cost(tried) and found.tried == 12


def test_the_same_seed_asks_for_the_same(tmp_path: Path) -> None:
    one, two = FakeMachine(), FakeMachine()
    search(one, tmp_path / "a").run()
    search(two, tmp_path / "b").run()
    assert [c.settings for c in one.measured] == [c.settings for c in two.measured]


def test_a_small_grid_is_tried_whole(few_knobs: None, tmp_path: Path) -> None:
    machine = FakeMachine()
    found = search(machine, tmp_path / "store", trials=12).run()
    tried = {(c.kernel.splits, c.kernel.block_n, c.kernel.num_stages) for c in machine.measured[1:]}
    assert tried == {(s, n, g) for s in SMALL["splits"] for n in SMALL["block_n"] for g in SMALL["num_stages"]}
    kernel = found.winner.kernel
    assert (kernel.splits, kernel.block_n, kernel.num_stages) == (8, 32, 2)


def test_wrong_and_failing_candidates_are_dropped(few_knobs: None, tmp_path: Path) -> None:
    def fails(kernel: KernelPlan) -> str:
        return "wrong: error over 3e-03" if kernel.splits == 8 else "out of registers" if kernel.block_n == 16 else ""

    found = search(FakeMachine(fails=fails), tmp_path / "store", trials=12).run()
    assert (found.winner.kernel.splits, found.winner.kernel.block_n) == (4, 32)
    assert found.dropped == {"wrong: error over 3e-03": 4, "out of registers": 4}


def test_a_gain_within_the_noise_is_none(few_knobs: None, tmp_path: Path) -> None:
    def flat(kernel: KernelPlan) -> float:
        return 100.0 if kernel.splits == 16 else 100.0 / (1 + NOISE * 0.9)

    found = search(FakeMachine(flat), tmp_path / "a", trials=12).run()
    assert not found.improved and found.winner is found.space.current and found.best == found.now

    def better(kernel: KernelPlan) -> float:
        return 100.0 if kernel.splits == 16 else 100.0 / (1 + NOISE * 1.1)

    assert search(FakeMachine(better), tmp_path / "b", trials=12).run().improved


def test_the_final_decides_and_not_a_timing_of_another_day(few_knobs: None, tmp_path: Path) -> None:
    path = tmp_path / "store"
    search(FakeMachine(), path, trials=12).run()
    again = FakeMachine(lambda kernel: 10.0 if kernel.splits == 16 else 20.0)
    found = search(again, path, trials=12).run()
    assert again.measured == [] and found.reused == found.tried == 13
    assert not found.improved and found.now.us == 10.0


def test_nothing_runs(few_knobs: None, tmp_path: Path) -> None:
    found = search(FakeMachine(fails=lambda _: "no such instruction"), tmp_path / "store", trials=12).run()
    assert not found.improved and not found.best.good
    assert found.dropped == {"no such instruction": 13}


def test_a_current_setting_that_fails_is_replaced_by_what_runs(few_knobs: None, tmp_path: Path) -> None:
    machine = FakeMachine(fails=lambda kernel: "too large" if kernel.splits == 16 else "")
    found = search(machine, tmp_path / "store", trials=12).run()
    assert found.improved and found.best.good and not found.now.good


def test_going_on_after_an_interruption(tmp_path: Path) -> None:
    def stop() -> None:
        raise KeyboardInterrupt

    path = tmp_path / "store"
    stopped = FakeMachine(stop=stop, stop_after=9)
    with pytest.raises(KeyboardInterrupt):
        search(stopped, path).run()
    assert 9 <= len(stopped.measured) < 24
    resumed, whole = FakeMachine(), FakeMachine()
    found = search(resumed, path).run()
    straight = search(whole, tmp_path / "other").run()
    assert found.reused == len(stopped.measured)
    first, rest = [c.settings for c in stopped.measured], [c.settings for c in resumed.measured]
    assert first + rest == [c.settings for c in whole.measured]
    assert found.winner.settings == straight.winner.settings


def test_going_on_after_a_kill(tmp_path: Path) -> None:
    path = tmp_path / "store"
    done = subprocess.run([sys.executable, tune_fakes.__file__, str(path)], timeout=120)
    assert done.returncode == -9
    kept = len(Store(path))
    assert kept >= 12
    with path.open("a") as file:
        file.write('{"key": "cut o')  # as a kill in the middle of a write would leave it
    resumed = FakeMachine()
    found = search(resumed, path).run()
    assert found.reused == kept and len(resumed.measured) == 24 - kept
    assert len(Store(path)) == 24


def test_what_may_be_the_machines_fault_is_not_kept(few_knobs: None, tmp_path: Path) -> None:
    path = tmp_path / "store"
    search(FakeMachine(fails=lambda k: "not done within 9 s" if k.splits == 8 else ""), path, trials=12).run()
    again = FakeMachine()
    found = search(again, path, trials=12).run()
    assert {c.kernel.splits for c in again.measured} == {8}
    assert found.winner.kernel.splits == 8


def test_timings_are_of_one_device_and_one_triton(few_knobs: None, tmp_path: Path) -> None:
    path = tmp_path / "store"
    search(FakeMachine(), path, trials=12).run()
    for name, value in (("device", "Another GPU"), ("triton", "10.0")):
        other = FakeMachine()
        setattr(other, name, value)
        assert search(other, path, trials=12).run().reused == 0
    moved = FakeMachine()
    assert search(moved, path, trials=12, where=space("bf16")).run().reused == 0


def test_progress_names_the_shape_and_the_best(few_knobs: None, tmp_path: Path) -> None:
    steps: list[tuple[str, int]] = []
    store = Store(tmp_path / "store")
    Search(space(), FakeMachine(), store, 12, 0, lambda what, total: steps.append((what, total))).run()
    assert len(steps) == 13 and steps[-1] == ("fp8_e4m3fn 4x8192, best 56.0 us", 13)


def test_a_record_can_be_read_by_people(few_knobs: None, tmp_path: Path) -> None:
    search(FakeMachine(), tmp_path / "store", trials=12).run()
    record = json.loads((tmp_path / "store").read_text().splitlines()[0])
    assert (record["device"], record["triton"], record["shape"]) == ("Fake GPU", "9.9", "4x8192")
    assert record["settings"]["splits"] == 16 and record["us"] == cost(space().current.kernel)


def test_store_keeps_failures_and_passes_over_foreign_lines(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "store"
    store = Store(path)
    assert len(store) == 0 and store.get("a") is None
    store.add("a", Measured(1.0, 0.9, 1.1, 1e-3), {})
    store.add("b", Measured(failure="wrong"), {})
    with path.open("a") as file:
        file.write('[1, 2]\n{"key": "c"}\nnull')
    store = Store(path)
    store.add("d", Measured(2.0), {})
    again = Store(path)
    assert len(again) == 3
    assert again.get("a") == Measured(1.0, 0.9, 1.1, 1e-3)
    failed = again.get("b")
    assert failed and not failed.good and math.isnan(failed.us)
