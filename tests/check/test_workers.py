"""Jobs that crash, hang or print: each fails alone, and the next one finds a process that works."""

import os
import time

import pytest
from worker_jobs import work

from mla_codegen.check.workers import Outcome, Workers, first_line


def results(workers: Workers, jobs: list, timeout: float = 60.0) -> list[Outcome]:
    found = dict(workers.run(work, jobs, timeout))
    return [found[index] for index in range(len(jobs))]


def test_failures_stay_with_their_jobs() -> None:
    jobs = [("return", 1), ("raise", "bad\nnews"), ("die", 0), ("exit", 3), ("return", 2), ("raise", "")]
    with Workers(2) as workers:
        one, raised, died, left, two, empty = results(workers, jobs)
    assert (one.value, two.value) == (1, 2)
    assert raised == Outcome(failure="ValueError: bad")
    assert died == Outcome(failure="the process died (SIGKILL)", lost=True)
    assert left == Outcome(failure="the process died (exit code 3)", lost=True)
    assert empty.failure == "ValueError"


def test_a_hang_ends_at_its_time_and_others_do_not_wait_for_it() -> None:
    with Workers(2) as workers:
        results(workers, [("return", 0), ("return", 0)])  # both have started
        begin = time.monotonic()
        order = list(workers.run(work, [("sleep", 60), ("return", 1), ("return", 2)], 1.0))
        assert time.monotonic() - begin < 20
    assert [index for index, _ in order] == [1, 2, 0]
    assert order[-1][1] == Outcome(failure="not done within 1 s", lost=True)


def test_processes_are_kept_and_those_that_failed_are_not() -> None:
    with Workers(1) as workers:
        first, again = results(workers, [("pid", 0), ("pid", 0)])
        _, after = results(workers, [("raise", "x"), ("pid", 0)])
    assert first.value == again.value != os.getpid()
    assert after.value != first.value


def test_what_jobs_print_does_not_reach_the_terminal(capfd: pytest.CaptureFixture[str]) -> None:
    with Workers(1) as workers:
        results(workers, [("print", "noise")])
    assert capfd.readouterr().out == ""


def test_stopping_half_way_ends_what_runs() -> None:
    workers = Workers(2)
    running = workers.run(work, [("pid", 0), ("sleep", 60)], 60.0)
    next(running)
    running.close()
    assert len(workers._all) == 1  # the idle one
    workers.close()
    assert not workers._all


def test_first_line() -> None:
    assert first_line(RuntimeError("\n a \nb")) == "RuntimeError: a"
    assert first_line(KeyError()) == "KeyError"
