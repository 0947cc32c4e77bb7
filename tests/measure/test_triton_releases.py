"""Two benches under two releases of Triton, side by side."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import triton_releases


def run(triton: str, us: tuple[float, float], **changes: Any) -> dict[str, Any]:
    """What `bench --json` writes, cut down to what is read."""
    rows = []
    for kv_len, median in zip((1024, 8192), us, strict=True):
        sample = {"median": median}
        timing = {
            "graph": sample, "eager": sample, "host": {"median": 9.0}, "wrong": False, "graph_error": 2e-3,
            "eager_error": 1e-3,
        }  # fmt: skip
        other = {**timing, "graph": {"median": 1e9}}
        rows.append({"kv": "bf16", "batch": 4, "kv_len": kv_len, "timings": [timing, other]})
    return {"device": "Fake GPU", "triton": triton, "torch": "2.13.0", "rows": rows, **changes}


def test_times_lie_side_by_side() -> None:
    lines = triton_releases.table([run("3.6.0", (10.0, 20.0)), run("3.9.0", (11.0, 20.0))])
    assert lines[2] == "| bf16 | 4 x 1024 | 10.0 | 11.0 | 1.100 | 9.0 | 9.0 | 2.0e-03 | 2.0e-03 |"
    assert lines[-1] == "Fake GPU, torch 2.13.0. Geometric means over 3.6.0: bf16 3.9.0 1.049."


@pytest.mark.parametrize(
    ("changes", "said"),
    [({"device": "Other GPU"}, "different GPUs"), ({"rows": []}, "different calls")],
)
def test_what_cannot_be_compared_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], changes: dict[str, Any], said: str
) -> None:
    for name, one in (("a", run("3.6.0", (1.0, 2.0))), ("b", run("3.9.0", (1.0, 2.0), **changes))):
        (tmp_path / name).write_text(json.dumps(one))
    assert triton_releases.main([str(tmp_path / "a"), str(tmp_path / "b")]) == 2
    assert said in capsys.readouterr().err


def test_wrong_values_are_no_times() -> None:
    wrong = run("3.9.0", (1.0, 2.0))
    wrong["rows"][0]["timings"][0]["wrong"] = True
    with pytest.raises(triton_releases.Mismatch, match=r"bf16 4x1024 is wrong under 3\.9\.0"):
        triton_releases.table([run("3.6.0", (1.0, 2.0)), wrong])
