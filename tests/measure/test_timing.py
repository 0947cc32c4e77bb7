"""Taking turns, and what is made of the times, by a clock that the test winds."""

import math
from collections.abc import Callable
from itertools import count

import pytest
from bench_fakes import FakeDevice
from hypothesis import given
from hypothesis import strategies as st

from mla_codegen.measure.timing import HOST_CALLS, WARM_UP, Sample, alternate, geometric_mean, host_times, sample_of


def test_turns_are_taken_each_from_a_cold_cache() -> None:
    device = FakeDevice()
    calls = {"a": device.call("a", 10.0), "b": device.call("b", 20.0)}
    times = alternate(device, calls, 4)
    assert times["a"] == Sample(10.0, 10.0, 10.0, 10.0, 4)
    assert times["b"].median == 20.0
    turns = [entry for entry in device.log if entry in ("a", "b")]
    assert turns == ["a", "b", "b", "a"] * 3 + ["a", "b"]  # WARM_UP + 4 rounds, led by each in turn
    assert len(turns) == 2 * (WARM_UP + 4)
    assert all(device.log[i - 1] == "flush" for i, entry in enumerate(device.log) if entry in ("a", "b"))


def test_an_eager_call_begins_on_an_idle_device() -> None:
    device = FakeDevice()
    alternate(device, {"a": device.call("a", 1.0)}, 2, settled=True)
    calls = [i for i, entry in enumerate(device.log) if entry == "a"]
    assert all(device.log[i - 2 : i] == ["flush", "finish"] for i in calls)


def test_the_first_rounds_do_not_count() -> None:
    device = FakeDevice()
    slow_at_first = count()

    def time() -> float:
        return 1000.0 if next(slow_at_first) < WARM_UP else 5.0

    assert alternate(device, {"a": device.call("a", time)}, 3)["a"] == Sample(5.0, 5.0, 5.0, 5.0, 3)


def drift(start: float) -> Callable[[], float]:
    numbers = count()
    return lambda: start * (1 + 0.05 * next(numbers))


def test_a_drifting_clock_leaves_the_ratio_right() -> None:
    device = FakeDevice()
    times = alternate(device, {"a": device.call("a", drift(10)), "b": device.call("b", drift(20))}, 21)
    assert times["b"].median / times["a"].median == pytest.approx(2.0)


def test_host_time_is_that_of_calls_in_a_row() -> None:
    device = FakeDevice()
    times = host_times(device, {"a": device.call("a", 7.0), "b": device.call("b", 3.0)}, 5)
    assert times["a"].median == pytest.approx(7.0)
    assert times["b"].median == pytest.approx(3.0)
    assert device.log.count("a") == 6 * HOST_CALLS


def test_nothing_to_time() -> None:
    assert alternate(FakeDevice(), {}, 3) == {}


@given(st.lists(st.floats(0.1, 1e6), min_size=1, max_size=50))
def test_a_sample_is_ordered(times: list[float]) -> None:
    sample = sample_of(times)
    assert sample.least <= sample.low * (1 + 1e-12)
    assert sample.low <= sample.median * (1 + 1e-12)
    assert sample.median <= sample.high * (1 + 1e-12)
    assert sample.rounds == len(times)
    assert sample.spread >= -1e-9 * sample.median


def test_geometric_mean() -> None:
    assert geometric_mean([2.0, 8.0]) == pytest.approx(4.0)
    assert math.isnan(geometric_mean([]))
