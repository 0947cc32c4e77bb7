"""`bench` and `tune` as a user calls them: what they refuse, print and write. The device is a fake."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from bench_fakes import FakeDevice, report
from tune_fakes import SPEC, FakeMachine
from typer.testing import CliRunner, Result

from mla_codegen.check.workers import Outcome
from mla_codegen.cli import bench as bench_command
from mla_codegen.cli import tune as tune_command
from mla_codegen.cli.main import app
from mla_codegen.measure import bench as bench_module
from mla_codegen.spec.load import load_spec

NO_GPU = not torch.cuda.is_available()


@pytest.fixture
def spec(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MLA_CODEGEN_CACHE_DIR", str(tmp_path / "cache"))
    path = tmp_path / "mine.yaml"
    path.write_text(SPEC)
    return path


def call(*arguments: Any) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["bench", "--shape", "64*8192"], "--shape 64*8192: write BATCHxKV_LEN, as in 64x8192"),
        (["bench", "--shape", "0x8192"], "write BATCHxKV_LEN"),
        (["bench", "--kv", "fp8"], "unknown KV dtype `fp8`"),
        (["bench", "--plot", "a.pdf"], "--plot a.pdf: the file's name must end in .png or .svg"),
        (["bench", "--plot", "/nowhere/at/all/a.svg"], "there is no folder /nowhere/at/all"),
        (["tune", "--shape", "5x5"], "has no shape 5x5; it has 4x8192 64x1024"),
        (["tune", "--kv", "fp16"], "unknown KV dtype `fp16`"),
    ],
)
def test_bad_arguments(spec: Path, arguments: list[str], message: str) -> None:
    result = call(arguments[0], spec, *arguments[1:])
    assert result.exit_code == 2
    assert message in result.stderr


@pytest.mark.skipif(not NO_GPU, reason="there is a GPU")
def test_no_gpu(spec: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    outcome = Outcome(tune_command.describe_gpu(None))
    monkeypatch.setattr("mla_codegen.check.workers.Workers.run", lambda *_: iter([(0, outcome)]))
    for command in ("bench", "tune"):
        result = call(command, spec)
        assert result.exit_code == 2
        assert result.stderr.startswith("no GPU: torch sees none")


def test_another_gpu(spec: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.current_device", lambda: 0)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda device: "NVIDIA H200")
    monkeypatch.setattr("mla_codegen.runtime.builds.target_of", lambda device: "sm_90")
    for arguments in (["bench"], ["verify", "--device", "cuda"]):
        result = call(arguments[0], spec, *arguments[1:])
        assert result.exit_code == 2
        assert "is for sm_80 (NVIDIA A100); this is sm_90 (NVIDIA H200)" in result.stderr
        assert "fix: a spec with `target: sm_90` or `target: portable`" in result.stderr
    monkeypatch.setattr(
        "mla_codegen.check.workers.Workers.run", lambda *_: iter([(0, Outcome(("NVIDIA H200", "sm_90")))])
    )
    result = call("tune", spec)
    assert result.exit_code == 2
    assert "is for sm_80 (NVIDIA A100); this is sm_90 (NVIDIA H200)" in result.stderr


def test_missing_extras(spec: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "fix: pip install 'mla-codegen[plot]'" in call("bench", spec, "--plot", "a.svg").stderr
    result = call("tune", spec)
    assert result.exit_code == 2
    assert "tune needs optuna and ruamel.yaml\n  fix: pip install 'mla-codegen[tune]'" in result.stderr


def test_bench_prints_draws_and_exits(spec: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_command, "the_gpu", lambda plans: FakeDevice())
    monkeypatch.setattr(bench_module, "bench", lambda *_, **__: report())
    drawn: list[str] = []
    monkeypatch.setattr("mla_codegen.measure.charts.draw", lambda result, path: drawn.append(path.name))
    result = call("bench", spec, "--plot", tmp_path / "a.png", "--plot", tmp_path / "a.svg", "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["device"] == "Fake GPU"
    assert drawn == ["a.png", "a.svg"]
    assert "geometric mean" in call("bench", spec).stdout
    assert "--against nowhere: write module:function" in call("bench", spec, "--against", "nowhere").stderr


def test_bench_fails_if_our_kernels_are_wrong(tmp_path: Path, spec: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_command, "the_gpu", lambda plans: FakeDevice())
    monkeypatch.setattr(bench_module, "bench", lambda *_, **__: report())
    spec.rename(tmp_path / "peer.yaml")  # the name of the one that is wrong
    assert call("bench", tmp_path / "peer.yaml").exit_code == 1


class Fakes:
    """What `tune` is given in the place of a GPU."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **settings: Any):
        self.made: list[FakeMachine] = []

        def machine(device: str, triton: str, timeout: float, seed: int) -> Any:
            made = FakeMachine(**settings)
            made.__class__.__enter__ = lambda self: self  # type: ignore[attr-defined]
            made.__class__.__exit__ = lambda self, *_: None  # type: ignore[attr-defined]
            self.made.append(made)
            return made

        monkeypatch.setattr(tune_command, "_device", lambda target, what: ("Fake GPU", "sm_80"))
        monkeypatch.setattr("mla_codegen.measure.tune.machine.GpuMachine", machine)


def test_tune_shows_and_then_writes(spec: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Fakes(monkeypatch)
    dry = call("tune", spec, "--trials", 12, "--dry-run", "--shape", "4x8192")
    assert dry.exit_code == 0, dry.output
    assert "-  - {batch: 4, kv_len: 8192, splits: 16}  # long" in dry.stdout
    assert "nothing is written" in dry.stdout and spec.read_text() == SPEC
    again = Fakes(monkeypatch)
    wet = call("tune", spec, "--trials", 12, "--shape", "4x8192")
    assert wet.exit_code == 0, wet.output
    assert again.made[0].measured == []  # all timings were kept
    assert "next: mla-codegen build" in wet.stdout
    written = spec.read_text()
    assert written.startswith("# a spec of the tests\n") and "# tuned fp8_e4m3fn on Fake GPU, triton" in written
    assert load_spec(spec).spec.shapes[1] == load_spec(spec).spec.shapes[1]
    assert "  - {batch: 64, kv_len: 1024, splits: 4}\n" in written


def test_tune_as_json(spec: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Fakes(monkeypatch, fails=lambda kernel: "no" if kernel.kv == "bf16" else "")
    result = call("tune", spec, "--trials", 6, "--json", "--dry-run")
    assert result.exit_code == 1  # nothing of bf16 runs
    found = json.loads(result.stdout)["found"]
    assert [(f["kv"], f["batch"]) for f in found] == [
        ("fp8_e4m3fn", 4), ("fp8_e4m3fn", 64), ("bf16", 4), ("bf16", 64),
    ]  # fmt: skip
    assert found[2]["best"]["us"] is None and found[2]["dropped"] == {"no": 6}


def test_tune_interrupted(spec: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop() -> None:
        raise KeyboardInterrupt

    Fakes(monkeypatch, stop=stop, stop_after=5)
    result = call("tune", spec, "--trials", 12)
    assert result.exit_code == 130
    assert "interrupted; 8 timings are kept" in result.stderr
    assert spec.read_text() == SPEC


def test_one_tune_at_a_time(spec: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from filelock import FileLock

    Fakes(monkeypatch)
    (tmp_path / "cache" / "tune").mkdir(parents=True)
    with FileLock(tmp_path / "cache" / "tune" / "sm_80.lock"):
        result = call("tune", spec)
    assert result.exit_code == 2
    assert "another tune is running" in result.stderr
