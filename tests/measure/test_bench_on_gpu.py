"""The parts that only a GPU can show: events, graphs, ceilings, and processes that compile, time, crash and hang."""

from pathlib import Path

import pytest
import torch

from mla_codegen.measure.bench import bench
from mla_codegen.measure.timing import Gpu, alternate, host_times
from mla_codegen.measure.tune.machine import GpuMachine
from mla_codegen.measure.tune.search import Search
from mla_codegen.measure.tune.space import Space
from mla_codegen.measure.tune.store import Store
from mla_codegen.plan.resolve import make_plan
from mla_codegen.spec.load import parse_spec

pytestmark = pytest.mark.gpu

SPEC = """target: portable
dtypes: {kv: [bf16]}
defaults: {optimizations: [exp2, direct_out]}
shapes:
  - {batch: 3, kv_len: 300, splits: 3}
"""


def test_times_grow_with_the_work() -> None:
    device = Gpu()
    numbers = torch.randn(1 << 26, device=device.where)
    small, _ = device.capture(lambda: numbers[: 1 << 20].sum())
    large, _ = device.capture(numbers.sum)
    times = alternate(device, {"small": small, "large": large}, 15)
    assert 0 < times["small"].median < times["large"].median
    assert host_times(device, {"a": lambda: numbers[:1].add_(1)}, 15)["a"].median > 0
    read, product = device.ceilings()
    assert read > 0.1 and product > 1


def test_bench() -> None:
    plan = make_plan(parse_spec(SPEC, "small.yaml").spec, "small.yaml")
    (row,) = bench([plan], [], Gpu(), rounds=15).rows
    (timing,) = row.timings
    assert not timing.wrong and timing.failure == ""
    assert timing.graph and timing.eager and timing.host
    assert timing.graph.median <= timing.eager.median


def test_tune(tmp_path: Path) -> None:
    spec = parse_spec(SPEC, "small.yaml").spec
    space = Space(spec, spec.shapes[0], "bf16")
    with GpuMachine(torch.cuda.get_device_name(), "test", 120.0, 0, processes=4) as machine:
        found = Search(space, machine, Store(tmp_path / "store"), 6, 0, None).run()
    assert found.best.good and found.now.good and found.tried == 6
