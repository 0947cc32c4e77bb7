"""Pictures are written without a display, whole, and the same for the same bench."""

from dataclasses import replace
from pathlib import Path

import pytest
from bench_fakes import report

from mla_codegen.measure.bench import Row
from mla_codegen.measure.charts import draw


@pytest.fixture(autouse=True)
def no_display(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MPLBACKEND", "Agg")
    monkeypatch.delenv("DISPLAY", raising=False)


def test_png_and_svg(tmp_path: Path) -> None:
    draw(report(), tmp_path / "a.png")
    draw(report(), tmp_path / "a.svg")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    svg = (tmp_path / "a.svg").read_text()
    for word in ("Fake GPU", "fp8_e4m3fn KV", "bf16 KV", "Roofline", "4x1024", "64x1024", "peer", "read 4.00 TB/s"):
        assert word in svg
    draw(report(), tmp_path / "b.svg")
    assert (tmp_path / "b.svg").read_text() == svg


def test_what_could_not_be_timed_is_left_out(tmp_path: Path) -> None:
    whole = report()
    failed = [replace(t, graph=None, eager=None, host=None) for t in whole.rows[0].timings]
    draw(replace(whole, rows=(Row(whole.rows[0].workload, tuple(failed)),)), tmp_path / "none.png")
    draw(replace(whole, rows=()), tmp_path / "empty.svg")
    assert (tmp_path / "none.png").exists() and (tmp_path / "empty.svg").exists()
