"""The whole bench on a CPU: kernels in the interpreter, a clock that the test winds."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from bench_fakes import FakeDevice, report

from mla_codegen.check.reference import reference
from mla_codegen.cli.bench import show
from mla_codegen.cli.common import without_nan
from mla_codegen.measure import bench as module
from mla_codegen.measure import timing
from mla_codegen.measure.bench import Row, Timing, bench, measure
from mla_codegen.measure.implementations import BenchError, Implementation, other
from mla_codegen.measure.workload import Truth, Workload, call_data, make_inputs, poisoned, workload_of
from mla_codegen.plan.resolve import Plan, make_plan
from mla_codegen.spec.load import parse_spec

SMALL = """target: portable
model: {num_heads: 2, kv_lora_rank: 64, qk_rope_head_dim: 32}
dtypes: {kv: [fp8_e4m3fn, bf16]}
defaults: {block_n: 16, optimizations: [exp2, packed_fp8, direct_out]}
shapes:
  - {batch: 1, kv_len: 20, splits: 2}
"""
WORK = Workload(2, 64, 32, "bf16", "bf16", "bf16", 3, 40)
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def few_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter takes a third of a second a call."""
    monkeypatch.setattr(timing, "WARM_UP", 0)
    monkeypatch.setattr(timing, "HOST_CALLS", 1)


def small_plan() -> Plan:
    return make_plan(parse_spec(SMALL, "small.yaml").spec, "small.yaml")


def exact(data: tuple[Any, ...]) -> torch.Tensor:
    """What `custom_kernel` should give, from the reference."""
    q, kv_data, qo_indptr, kv_indptr, config = data
    ((_, form),) = kv_data.items()
    kv, scale = form if isinstance(form, tuple) else (form, None)
    case = module.make_inputs(WORK, CPU, 0)
    case.q, case.kv, case.qo_indptr, case.kv_indptr = q, kv, qo_indptr, kv_indptr
    case.sm_scale, case.kv_scale = config["sm_scale"], scale
    return reference(case, config["kv_lora_rank"])[0].bfloat16()


def implementation(name: str, call: Any) -> Implementation:
    return Implementation(name, call, lambda _: True, lambda _: "", lambda _: 4e-2)


def test_a_spec_and_others_end_to_end(capsys: pytest.CaptureFixture[str]) -> None:
    device = FakeDevice()

    def slow(data: tuple[Any, ...]) -> torch.Tensor:
        device.spend(30.0)
        return exact(data)

    def broken(data: tuple[Any, ...]) -> torch.Tensor:
        raise KeyError("no fp8 here")

    steps = []
    others = [implementation("slow", slow), implementation("broken", broken)]
    result = bench([small_plan()], others, device, kv="fp8_e4m3fn", rounds=1, progress=lambda *step: steps.append(step))
    ((row,),) = (result.rows,)
    ours, slow_timing, broken_timing = row.timings
    assert (ours.name, ours.kernel) == ("small", "fp8_e4m3fn_b1_kv20")
    assert 0 < ours.eager_error < 3e-3 and 0 < ours.graph_error < 3e-3 and not ours.wrong
    assert slow_timing.graph and slow_timing.graph.median == 30.0 and not slow_timing.wrong
    assert broken_timing.wrong and broken_timing.failure == "KeyError: 'no fp8 here'"
    assert broken_timing.time is None
    assert steps == [("fp8_e4m3fn 1x20", 1)]
    assert row.workload.kv_bytes == 20 * 96 and row.workload.flops == 2 * 2 * (96 + 64) * 20
    assert row.tb_s(slow_timing) == pytest.approx(1920 / 30 / 1e6)


def test_general_kernels_serve_shapes_that_the_spec_does_not_name() -> None:
    ours = bench([small_plan()], [], FakeDevice(), shapes=[(1, 5)], kv="bf16", rounds=1).rows[0].timings[0]
    assert ours.kernel == "bf16_any_direct" or ours.kernel.startswith("bf16_any (")
    assert not ours.wrong


@pytest.mark.parametrize("fault", ["unwritten", "wrong", "half"])
def test_a_wrong_output_shows(fault: str) -> None:
    def call(data: tuple[Any, ...]) -> torch.Tensor:
        good = exact(data)
        out = torch.empty_like(good)
        if fault == "wrong":
            out.copy_(good * 1.1)
        elif fault == "half":
            out[:, :1] = good[:, :1]
        return out

    (timing_,) = measure(WORK, [implementation("x", call)], FakeDevice(), 1, 0).timings
    assert timing_.wrong and timing_.eager is not None


def test_a_call_that_cannot_be_captured_is_timed_eagerly() -> None:
    class NoGraphs(FakeDevice):
        def capture(self, call: Any) -> Any:
            raise RuntimeError("operation not permitted when stream is capturing")

    (timing_,) = measure(WORK, [implementation("x", exact)], NoGraphs(), 1, 0).timings
    assert timing_.graph is None and timing_.eager is not None and not timing_.wrong
    assert timing_.failure == "no graph: RuntimeError: operation not permitted when stream is capturing"


def test_no_room_for_the_kv_is_a_line_of_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_room(*_: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(module, "make_inputs", no_room)
    (timing_,) = measure(WORK, [implementation("x", exact)], FakeDevice(), 1, 0).timings
    assert timing_.wrong and timing_.failure.startswith("no room for")


def test_inputs_and_their_truth() -> None:
    for kv in ("bf16", "fp16", "fp8_e4m3fn", "fp8_e4m3fnuz"):
        work = Workload(2, 64, 32, "bf16", "bf16", kv, 5, 70)
        case = make_inputs(work, CPU, 3)
        assert case.kv.shape == (350, 96) and bool(torch.isfinite(case.kv.float()).all())
        assert case.kv_indptr.tolist() == [0, 70, 140, 210, 280, 350]
        want, _ = reference(case, 64)
        truth = Truth(case, 64)
        assert 0 in truth.requests and 4 in truth.requests and len(set(truth.requests)) == 4
        assert truth.error(want) < 1e-12 and truth.error((want, None)) < 1e-12
        spoilt = want.clone()
        spoilt[4] *= 1.5
        assert truth.error(spoilt) == pytest.approx(0.5)
        spoilt[2, 1, 3] = float("nan")
        assert truth.error(spoilt) != truth.error(spoilt)
        data = call_data(work, case)
        assert list(data[1]) == [kv.split("_")[0]] and data[4]["kv_seq_len"] == 70
    assert not torch.equal(make_inputs(WORK, CPU, 1).kv, make_inputs(WORK, CPU, 2).kv)
    assert make_inputs(WORK, CPU, 1, lens=[0, 5]).kv_indptr.tolist() == [0, 0, 5]


def test_poison() -> None:
    with poisoned(WORK, CPU):
        assert bool(torch.empty(4).isnan().all())
    assert workload_of(small_plan(), "bf16", 3, 40) == WORK


def test_ratios_leave_out_what_is_wrong() -> None:
    result = report()
    assert result.names == ["h200", "peer"]
    assert result.ratios("h200", "peer", "graph") == pytest.approx([2.0, 2.0])  # the third is wrong
    assert result.ratios("h200", "peer", "eager") == pytest.approx([1.5, 1.5])
    as_json = json.loads(json.dumps(without_nan(result.json())))
    assert as_json["geometric_mean_ratios"] == {"peer": pytest.approx({"graph": 2.0, "eager": 1.5})}
    assert as_json["rows"][2]["timings"][1]["graph_error"] is None
    assert as_json["rows"][0]["timings"][0]["graph"]["median"] == 10.0
    assert as_json["read_tb_s"] == 4.0


def test_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    show(report())
    out = capsys.readouterr().out
    lines = out.splitlines()
    assert "graph us" in lines[0] and "of read" in lines[0]
    assert lines[1].split()[:4] == ["fp8_e4m3fn", "4x1024", "h200", "10.0"]
    assert "graph: [because]" in out  # what failed says why, brackets and all
    assert "h200 against peer, geometric mean of 2 shapes: 2.00x in a graph, 1.50x eagerly" in lines[-1]
    assert "read 4.00 TB/s, bf16 product 800 TFLOP/s" in out
    show(replace(report(), rows=report().rows[2:]))
    assert "h200 against peer, no shape that both did right" in capsys.readouterr().out


def test_others_by_module_and_by_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "peer_of_test.py").write_text("def decode(data):\n    return data\n\n\nnumber = 3\n")
    (tmp_path / "failing_peer.py").write_text("import nowhere_to_be_found\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert other("peer_of_test:decode").call((1,)) == (1,)
    assert other(f"{tmp_path / 'peer_of_test.py'}:decode").name.endswith("peer_of_test.py:decode")
    for spelled, message in {
        "peer_of_test": "write module:function",
        "peer_of_test:": "write module:function",
        "peer_of_test:number": "has no function number",
        "failing_peer:decode": "cannot be imported: ModuleNotFoundError",
        "nowhere.py:decode": "cannot be imported: FileNotFoundError",
    }.items():
        with pytest.raises(BenchError, match=message):
            other(spelled)


def test_rows_know_their_rates() -> None:
    result = report()
    row: Row = result.rows[0]
    timing_: Timing = row.timings[0]
    assert row.tb_s(timing_) == pytest.approx(4 * 1024 * 576 / 10 / 1e6)
    assert row.tflop_s(timing_) == pytest.approx(2 * 16 * 1088 * 4096 / 10 / 1e6)
