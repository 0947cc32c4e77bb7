"""Run compilations, each in a process of its own, several at a time, and keep what came out.

A compiler that raises, aborts, is killed or hangs costs one `Failed` outcome with the end of what it said; the other
jobs go on. Successes are kept under the user's cache folder by content (the file's text, the job, the Triton release,
the environment that Triton reads), one gzip file each, written beside and renamed into place.
"""

from __future__ import annotations

import base64
import contextlib
import gzip
import hashlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import platformdirs

from mla_codegen.catalog.host import cores
from mla_codegen.catalog.releases import installed_triton
from mla_codegen.inspect.job import CompileJob
from mla_codegen.publish.files import replace_file

WORKER = Path(__file__).with_name("worker.py")
TAIL_LINES = 25
_READ_BY_TRITON = ("TRITON_", "AMDGCN_", "MLIR_", "LLVM_", "DISABLE_", "ALLOW_", "ENABLE_", "USE_", "PTXAS_", "NVPTX_")
# Where files go and what is printed changes no binary; the interpreter would replace the compiler altogether.
_WITHOUT_EFFECT = (
    *("TRITON_CACHE_DIR", "TRITON_HOME", "TRITON_DUMP_DIR", "TRITON_OVERRIDE_DIR", "TRITON_CACHE_AUTOTUNING"),
    *("TRITON_PRINT_AUTOTUNING", "TRITON_ALWAYS_COMPILE", "TRITON_KERNEL_DUMP", "TRITON_DUMP_PTXAS_LOG"),
    "TRITON_INTERPRET",
)


@dataclass(frozen=True)
class Compiled:
    """What the compiler made: assembly text (AMD: GCN; NVIDIA: PTX and SASS), metadata and the time it took.

    binary   AMD: the code object; empty for NVIDIA
    """

    job: CompileJob
    triton: str
    asm: str
    sass: str
    resources: str
    log: str
    metadata: Mapping[str, Any]
    binary_bytes: int
    seconds: float
    notes: tuple[str, ...] = ()
    cached: bool = False
    binary: bytes = b""


@dataclass(frozen=True)
class Failed:
    """A compilation that gave nothing. `reason` is one line; `tail` is the end of what the compiler printed."""

    job: CompileJob
    triton: str
    reason: str
    tail: str
    seconds: float


@dataclass(frozen=True)
class _How:
    """How a batch is compiled, the processes that it has running, and whether it was called off.

    A process is put into `live` before `called_off` is looked at; `called_off` is set before `live` is gone through,
    so that none is missed.
    """

    triton: str
    triton_path: Path | None
    timeout_s: float
    use_cache: bool
    live: set[subprocess.Popen[bytes]] = field(default_factory=set)
    called_off: threading.Event = field(default_factory=threading.Event)


Outcome = Compiled | Failed
Progress = Callable[[int, int, Outcome], None]


def cache_dir() -> Path:
    """Where results and other Triton releases are kept; `MLA_CODEGEN_CACHE_DIR` moves it."""
    return Path(os.environ.get("MLA_CODEGEN_CACHE_DIR") or platformdirs.user_cache_dir("mla-codegen"))


def compile_jobs(
    jobs: Sequence[CompileJob],
    *,
    parallel: int | None = None,
    timeout_s: float = 300.0,
    triton: str | None = None,
    triton_path: Path | None = None,
    use_cache: bool = True,
    progress: Progress | None = None,
) -> list[Outcome]:
    """Compile every job; the outcomes are in the jobs' order and none raises for a compiler's failure.

    parallel     processes at a time; default: the processors this process may use, at most 8
    timeout_s    seconds after which a compilation is ended and counted as failed
    triton       the release that `triton_path` holds (see `versions.ensure_triton`); default: the installed one
    progress     called in this thread after each job: (done, total, outcome)
    """
    version = triton or installed_triton()
    parallel = parallel or min(8, cores())
    how = _How(version, triton_path, timeout_s, use_cache)
    outcomes: dict[int, Outcome] = {}
    with ThreadPoolExecutor(max_workers=parallel) as pool:
        running = {pool.submit(_compile_one, job, how): index for index, job in enumerate(jobs)}
        pending = set(running)
        try:
            while pending:
                done, pending = wait(pending, return_when=FIRST_COMPLETED)
                for future in done:
                    outcomes[running[future]] = future.result()
                    if progress:
                        progress(len(outcomes), len(jobs), outcomes[running[future]])
        except BaseException:  # Ctrl-C, or a progress callback that fails: leave nothing running behind
            how.called_off.set()
            pool.shutdown(wait=False, cancel_futures=True)
            for process in list(how.live):
                _end(process)
            raise
    return [outcomes[index] for index in range(len(jobs))]


def _environment(triton_path: Path | None, scratch: str) -> dict[str, str]:
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    # Releases differ in this default, and with it in numbers and instruction counts.
    env.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
    env["TRITON_CACHE_DIR"] = os.path.join(scratch, "triton")
    env["TRITON_DUMP_PTXAS_LOG"] = "1"
    env["PYTHONDONTWRITEBYTECODE"] = "1"
    if triton_path is not None:
        env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(triton_path), os.environ.get("PYTHONPATH")]))
    return env


def cache_key(job: CompileJob, triton: str) -> str:
    """Content key of a result: job and source, Triton release, worker, and the variables that Triton reads."""
    relevant = {
        name: value
        for name, value in _environment(None, "").items()
        if name.startswith(_READ_BY_TRITON) and name not in _WITHOUT_EFFECT
    }
    parts = json.dumps([job.digest(), triton, sorted(relevant.items())])
    return hashlib.sha256(parts.encode() + WORKER.read_bytes()).hexdigest()


def _compile_one(job: CompileJob, how: _How) -> Outcome:
    start = time.perf_counter()
    try:
        stored = cache_dir() / "isa" / f"{cache_key(job, how.triton)}.json.gz"
        if how.use_cache and (record := _read(stored)) is not None:
            return replace(_compiled(job, record), cached=True)
        with tempfile.TemporaryDirectory(prefix="mla-codegen-isa-") as scratch:
            outcome = _run_worker(job, how, Path(scratch))
            if isinstance(outcome, Failed):
                return outcome
            if outcome["triton"] != how.triton:
                return Failed(
                    job, how.triton, f"asked for Triton {how.triton}, compiled by {outcome['triton']}", "", 0.0
                )
    except Exception as error:  # a full disk, an unreadable file: this row fails, the others go on
        return Failed(job, how.triton, f"{type(error).__name__}: {error}", "", time.perf_counter() - start)
    if how.use_cache:
        _write(stored, outcome)
    return _compiled(job, outcome)


def _run_worker(job: CompileJob, how: _How, scratch: Path) -> Failed | dict[str, Any]:
    source = Path(job.path)
    if job.source is not None:
        source = scratch / (source.name if source.suffix == ".py" else "kernel.py")
        source.write_text(job.source, encoding="utf-8")
    request = {**job.as_dict(), "source": None, "file": str(source.resolve())}
    return _exchange(request, job, how, scratch)


def run_request(request: Mapping[str, Any], job: CompileJob, *, timeout_s: float) -> Failed | dict[str, Any]:
    """One worker process for any request that worker.py knows; `job` only names it in a failure."""
    with tempfile.TemporaryDirectory(prefix="mla-codegen-isa-") as scratch:
        return _exchange(request, job, _How(installed_triton(), None, timeout_s, False), Path(scratch))


def _exchange(request: Mapping[str, Any], job: CompileJob, how: _How, scratch: Path) -> Failed | dict[str, Any]:
    asked, result, log = scratch / "request.json", scratch / "result.json", scratch / "log.txt"
    asked.write_text(json.dumps(request), encoding="utf-8")
    start = time.perf_counter()
    with open(log, "wb") as output:
        process = subprocess.Popen(
            [sys.executable, str(WORKER), str(asked), str(result)],
            stdin=subprocess.PIPE,  # its end tells the worker that this process is gone
            stdout=output,
            stderr=subprocess.STDOUT,
            env=_environment(how.triton_path, str(scratch)),
            cwd=scratch,
            start_new_session=True,  # so that a time-out also ends ptxas, the compiler's own child
        )
        how.live.add(process)
        if how.called_off.is_set():
            _end(process)
        try:
            code: int | None = process.wait(timeout=how.timeout_s)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            _end(process)
            how.live.discard(process)
    seconds = time.perf_counter() - start
    printed = log.read_text(encoding="utf-8", errors="replace")
    if code is None:
        return Failed(
            job, how.triton, f"the compiler was still running after {how.timeout_s:g} s", _tail(printed), seconds
        )
    if not result.exists():
        ended = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit status {code}"
        return Failed(job, how.triton, f"the compiler {ended}", _tail(printed), seconds)
    record: dict[str, Any] = json.loads(result.read_text(encoding="utf-8"))
    if "error" in record:
        reason = str(record["error"]).strip().splitlines()[0]
        return Failed(job, how.triton, reason, _tail(printed + "\n" + record["traceback"]), seconds)
    record["log"] = printed[-20000:]
    return record


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the worker and whatever it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    if process.stdin:
        process.stdin.close()


def _tail(text: str) -> str:
    lines = [line[:300] for line in text.strip().splitlines()]
    return "\n".join(lines[-TAIL_LINES:])


def _compiled(job: CompileJob, record: Mapping[str, Any]) -> Compiled:
    return Compiled(
        job=job,
        triton=record["triton"],
        asm=record["asm"],
        sass=record.get("sass", ""),
        resources=record.get("resources", ""),
        log=record["log"],
        metadata=record["metadata"],
        binary_bytes=record["binary_bytes"],
        seconds=record["seconds"],
        notes=tuple(record["notes"]),
        binary=base64.b64decode(record.get("binary", "")),
    )


def _read(path: Path) -> dict[str, Any] | None:
    """A record as `_write` stored it under this name; None: compile again."""
    try:
        record = json.loads(gzip.decompress(path.read_bytes()))
    except (OSError, EOFError, ValueError, RecursionError, zlib.error):  # absent, cut short, or no record at all
        return None
    if not isinstance(record, dict) or record.pop("seal", None) != _seal(path, record):
        return None
    return record


def _seal(path: Path, record: Mapping[str, Any]) -> str:
    """What only a whole record has, and only under its own name: not one of another job, program or release."""
    return hashlib.sha256(f"{path.name} {json.dumps(record, sort_keys=True)}".encode()).hexdigest()


def _write(path: Path, record: Mapping[str, Any]) -> None:
    """Store a result; the cache is a convenience, so a folder that cannot be written loses nothing but time."""
    sealed = json.dumps({"seal": _seal(path, record), **record})
    with contextlib.suppress(OSError):
        replace_file(path, gzip.compress(sealed.encode(), compresslevel=3))
