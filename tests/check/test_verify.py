"""`verify` from outside: rows that crash or hang, processes that end with it, submissions in the emulator."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from builds import plan_of, spec_of
from worker_jobs import crash_or_pass

from mla_codegen.check import leaderboard, verify
from mla_codegen.check.emulate import EmulatorError
from mla_codegen.check.leaderboard import (
    NEEDS_GPU,
    NeedsGpu,
    Read,
    _jobs,
    load_submission,
    target_of_submission,
    verify_submission,
)
from mla_codegen.check.verify import Job, verify_plans, worst
from mla_codegen.check.workers import Outcome, first_line
from mla_codegen.publish.bundle import bundle
from mla_codegen.spec.errors import UnknownName

ROOT = Path(__file__).parents[2]
GLUON = {
    "target": "gfx950",
    "dtypes": {"kv": ["bf16"]},
    "defaults": {"optimizations": ["exp2", "peeled_tail"]},
    "shapes": [{"batch": 4, "kv_len": 1024, "splits": 4}],
}


def test_a_kernel_that_crashes_is_a_failed_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify, "verify_kernel", crash_or_pass)
    plan = plan_of(spec_of())
    seen = []
    results = verify_plans(
        [plan], device="cpu", processes=2, progress=lambda result, total: seen.append((result, total))
    )
    found = {result.kernel: result.failure for result in results}
    assert list(found) == [kernel.name for kernel in plan.kernels]
    assert found.pop("bf16_b4_kv1024") == "the process died (SIGSEGV)"
    assert found.pop("fp8_e4m3fn_b4_kv1024") == "the process died (exit code 7)"
    assert set(found.values()) == {""}
    assert sorted(seen, key=lambda one: one[0].kernel) == sorted(
        [(result, len(results)) for result in results], key=lambda one: one[0].kernel
    )
    lost = [result.json() for result in results if result.failure]
    assert all(row["error"] is None and row["lse_error"] is None and not row["passed"] for row in lost)


class Late:
    """In the place of `Workers`: nothing is done in time."""

    def __enter__(self) -> "Late":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def run(self, function: object, jobs: list, timeout: float) -> Iterator[tuple[int, Outcome]]:
        for index in range(len(jobs)):
            read = Outcome(Read(False, {"bf16": 3e-3}, {"bf16": []}))
            yield index, read if function is _jobs else Outcome(failure=f"not done within {timeout} s", lost=True)


def test_what_is_not_done_in_time_is_a_failed_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (verify, leaderboard):
        monkeypatch.setattr(module, "pool", lambda *_: Late())
    path = tmp_path / "submission.py"
    path.write_text("")
    plan = plan_of(spec_of())
    results = verify_plans([plan], device="cpu", timeout=9)
    assert len(results) == len(plan.kernels)
    results += verify_submission(path, device="cpu", timeout=9)
    assert {result.failure for result in results} == {"not done within 9 s"}


def test_what_is_asked_for_is_run() -> None:
    plan = plan_of(spec_of())
    assert [kernel.name for kernel in plan.serving([(4, 1000)], "bf16")] == ["bf16_b4_kv1024"]
    assert {kernel.name for kernel in plan.serving([(4, 8192), (4, 1024)])} == {
        f"{kv}_b4_kv{n}" for kv in ("bf16", "fp8_e4m3fn") for n in (1024, 8192)
    }
    assert {kernel.kv for kernel in plan.serving(kv="bf16")} == {"bf16"}
    assert plan.serving() == list(plan.kernels)


def test_quick_runs_the_first_case_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = []
    monkeypatch.setattr(verify, "_load", lambda *_: None)
    monkeypatch.setattr(verify, "_run_case", lambda module, kernel, case, *_: run.append(case) or (0.0, 0.0, ""))
    kernel = plan_of(spec_of()).serving([(4, 8192)], "bf16")[0]
    for quick, cases in ((False, 2), (True, 1)):
        run.clear()
        assert verify.verify_kernel(Job(str(tmp_path), "small", kernel, "cpu", 0, quick)).passed
        assert len(run) == cases


def test_the_worst_error_is_nan_if_any_is() -> None:
    assert worst([1.0, 3.0, 2.0]) == 3.0
    assert worst([1.0, float("nan"), 2.0]) != worst([1.0, float("nan"), 2.0])
    assert worst([]) != worst([])


SUBMISSION = """
import os, signal
import torch
from task import input_t, output_t

def custom_kernel(data: input_t) -> output_t:
    q, kv_data, qo_indptr, kv_indptr, config = data
    if config["kv_seq_len"] == 1024:
        os.kill(os.getpid(), signal.SIGSEGV)
    if config["kv_seq_len"] == 500:
        os._exit(3)
    return q[..., :512] * float("nan")
"""


def test_a_submission_that_crashes_is_a_failed_row(tmp_path: Path) -> None:
    path = tmp_path / "submission.py"
    path.write_text(SUBMISSION)
    results = verify_submission(path, device="cpu", processes=2)
    assert [result.failure for result in results] == [
        "the process died (SIGSEGV)",
        "the process died (exit code 3)",
        "the output holds NaN or infinity",
        "the output holds NaN or infinity",
    ]
    assert all(result.error != result.error for result in results)


def test_a_submission_that_cannot_be_imported_is_a_failed_row(tmp_path: Path) -> None:
    path = tmp_path / "submission.py"
    path.write_text("def broken(:\n")
    (row,) = verify_submission(path, device="cpu")
    assert row.kernel == "import" and row.failure.startswith("SyntaxError")


def test_a_submission_that_needs_a_gpu_says_which(tmp_path: Path) -> None:
    path = tmp_path / "submission.py"
    path.write_text("#!POPCORN gpu MI300X\nimport torch\ntorch.empty(1, device='cuda')")
    with pytest.raises(NeedsGpu, match=r"submission.py needs gfx942 \(AMD Instinct MI300X\): "):
        verify_submission(path, device="cpu")


def test_what_needs_a_gpu_is_told_from_what_is_wrong(tmp_path: Path) -> None:
    path = tmp_path / "submission.py"
    path.write_text("from triton.experimental.gluon.language.nvidia import blackwell\n")
    with pytest.raises(EmulatorError) as not_modelled:
        load_submission(path, emulated=True)
    for message in (first_line(not_modelled.value), "RuntimeError: 0 active drivers ([]). There should only be one."):
        assert NEEDS_GPU.search(message)
    for message in (
        "EmulatorError: load of unwritten memory",
        "ValueError: kv_data offers",
        "error 1.0e+00 over 3e-03",
    ):
        assert not NEEDS_GPU.search(message)


def test_a_gluon_bundle_runs_in_the_emulator(tmp_path: Path) -> None:
    path = tmp_path / "submission.py"
    path.write_text(bundle(plan_of(GLUON)), encoding="utf-8")
    assert getattr(target_of_submission(path), "name", None) == "gfx950"
    results = verify_submission(path, device="cpu", shapes=[(4, 1024), (2, 30)], kv="bf16")
    assert [result.kernel for result in results] == ["4 x 1024, bf16", "2 x 30, bf16"]
    assert {result.on for result in results} == {"CPU emulator"}
    assert all(result.passed and 0 < result.error < 3e-3 for result in results), results
    with pytest.raises(UnknownName, match="unknown KV dtype `fp16`"):
        verify_submission(path, device="cpu", kv="fp16")


def children(pid: int) -> set[int]:
    """Processes that live and were started by `pid`, resource trackers and all."""
    found = set()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, parent = stat.read_text().rpartition(")")[2].split()[:2]
        except OSError:
            continue
        if int(parent) == pid and state != "Z":
            found.add(int(stat.parent.name))
    return found


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def within(seconds: float, what: object) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if what():  # type: ignore[operator]
            return True
        time.sleep(0.02)
    return False


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc")
@pytest.mark.parametrize(
    "command, sent, status",
    [
        ("verify", signal.SIGTERM, 143),
        ("verify", signal.SIGINT, 130),
        ("verify", signal.SIGKILL, -9),
        ("inspect", signal.SIGTERM, 143),
        ("inspect", signal.SIGKILL, -9),
    ],
)
def test_processes_end_with_the_command(command: str, sent: signal.Signals, status: int, tmp_path: Path) -> None:
    spec = tmp_path / "small.yaml"
    spec.write_text(yaml.safe_dump(spec_of("sm_90", defaults={"family": "triton"})))
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "MLA_CODEGEN_CACHE_DIR": str(tmp_path / "cache")}
    environment |= {"TMPDIR": str(tmp_path)}
    process = subprocess.Popen(
        [sys.executable, "-m", "mla_codegen", command, str(spec), "--jobs", "2"],
        env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a shell's background job ignores it
    )  # fmt: skip
    try:
        assert within(60, lambda: len(children(process.pid)) == 2)
        started = children(process.pid)
        time.sleep(0.5)
        started |= children(process.pid)
        process.send_signal(sent)
        assert within(30, lambda: not any(map(alive, started)))  # 0.1 s on a quiet machine
        assert process.wait(30) == status
        if sent != signal.SIGKILL:
            assert not list(tmp_path.glob("mla-codegen-*"))  # temporary folders
    finally:
        process.kill()
        process.wait()
