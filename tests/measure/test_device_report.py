"""One file of what a GPU makes of a spec: its parts fail alone, and what it says is so."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from mla_codegen.measure import device_report
from mla_codegen.measure.device_report import beside_prediction, make_report, run_part, verdicts

SPEC = {
    "target": "gfx950",
    "model": {"num_heads": 16, "kv_lora_rank": 256, "qk_rope_head_dim": 64},
    "dtypes": {"q": "bf16", "kv": ["bf16"], "out": "bf16"},
    "shapes": [{"batch": 2, "kv_len": 64, "splits": 1}],
}


def test_a_part_that_fails_or_hangs_says_so() -> None:
    good = run_part(["list", "targets"], 60)
    assert good["exit_code"] == 0 and any(one["name"] == "gfx942" for one in good["result"])
    bad = run_part(["verify", "nowhere.yaml"], 60)
    assert bad["exit_code"] == 2 and "nowhere.yaml" in json.dumps(bad["result"])
    late = run_part(["list", "targets"], 0.01)
    assert late["exit_code"] is None and late["result"] is None and "not done in 0 s" in late["stderr"]
    words = {name: (well, what) for name, well, what in verdicts({"parts": {"verify": bad, "bench": late}})}
    assert words["verify"][0] is False and words["bench"][0] is False
    assert "not done" in words["bench"][1]


def test_a_report_without_a_gpu(tmp_path: Path) -> None:
    spec = tmp_path / "small.yaml"
    spec.write_text(yaml.safe_dump(SPEC), encoding="utf-8")
    out = tmp_path / "report.json"
    seen: list[str] = []
    found = make_report(spec, out, "cpu", quick=True, progress=lambda name, total: seen.append(f"{name} of {total}"))
    assert seen == ["verify of 2", "inspect of 2"]
    assert json.loads(out.read_text(encoding="utf-8")) == found
    assert found["spec"] == {"name": "small", "text": spec.read_text(encoding="utf-8")}
    assert all(well for _, well, _ in verdicts(found)), list(verdicts(found))
    assert "kernels pass" in next(verdicts(found))[2]
    assert beside_prediction(found) == []


def test_what_is_done_is_written_before_the_next_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec, out = tmp_path / "small.yaml", tmp_path / "report.json"
    spec.write_text("target: portable\n", encoding="utf-8")
    calls: list[list[str]] = []

    def part(arguments: list[str], timeout: float) -> dict[str, Any]:
        if calls:
            assert list(json.loads(out.read_text())["parts"]) == [one[0] for one in calls]
        calls.append(arguments)
        return {"command": "", "exit_code": 0, "seconds": 0.0, "result": [], "stderr": ""}

    monkeypatch.setattr(device_report, "run_part", part)
    monkeypatch.setattr(device_report, "machine", lambda device: {"gpu": {"name": "MI300X"}})
    make_report(spec, out)
    assert [one[0] for one in calls] == ["verify", "bench", "inspect"]
    assert calls[0][-2:] == ["--device", "cuda"]


def test_measured_beside_predicted() -> None:
    """By kernel and shape; a workload that no model or no graph has is left out."""
    timing = {"kernel": "bf16_b4_kv64", "graph": {"median": 12.5}}
    rows = [
        {"batch": 4, "kv_len": 64, "timings": [timing, {"kernel": "", "graph": None}]},
        {"batch": 8, "kv_len": 64, "timings": [{**timing, "graph": None}]},
    ]
    model = {"kernel": "bf16_b4_kv64", "batch": 4, "kv_len": 64, "model": {"predicted_us": 10.0}}
    parts = {"bench": {"result": {"rows": rows}}, "inspect": {"result": {"calls": [model, {**model, "model": None}]}}}
    assert beside_prediction({"parts": parts}) == [("4x64", "bf16_b4_kv64", 10.0, 12.5)]
    assert (
        beside_prediction({"parts": {"bench": {"result": {"errors": []}}, **parts} | {"inspect": {"result": None}}})
        == []
    )
