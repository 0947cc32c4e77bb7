"""Work that may crash, hang or spoil its process: done in processes of their own, each job under a time limit.

A kernel that writes out of bounds ruins the CUDA context of its whole process, one that never ends holds it for ever,
and a compiler can abort. So the process that decides never touches the device; these do, and are replaced at need.
"""

import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import connection
from multiprocessing.connection import Connection
from typing import Any

MAX_COMPILERS = 16  # processes that compile at the same time: each holds a context on the device


@dataclass(frozen=True)
class Outcome:
    """What became of a job. `failure` is empty if there is a `value`; `lost`: the process died or ran out of time."""

    value: Any = None
    failure: str = ""
    lost: bool = False


class _Worker:
    """A new Python, not a fork: a forked process cannot use CUDA.

    In a session of its own: Ctrl-C is the parent's to handle, and what the process starts, ptxas say, ends with it.
    """

    def __init__(self, environment: Mapping[str, str]) -> None:
        self.connection, theirs = connection.Pipe()
        start = f"import sys; sys.path[:] = {sys.path!r}; from {__name__} import _serve; _serve({theirs.fileno()})"
        self.process = subprocess.Popen(
            [sys.executable, "-c", start],
            env={**os.environ, **environment},
            pass_fds=[theirs.fileno()],
            start_new_session=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,  # compilers print; the terminal is the parent's
            stderr=subprocess.DEVNULL,
        )
        theirs.close()

    def end(self) -> None:
        self.connection.close()
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


class Workers:
    """Up to `count` processes, started when they are needed and kept for later jobs. Close it, or use `with`.

    They end with this process, however it ends. `environment`: variables that they have besides this process's.
    """

    def __init__(self, count: int, environment: Mapping[str, str] | None = None):
        self.count = count
        self.environment = environment or {}
        self._idle: list[_Worker] = []
        self._all: set[_Worker] = set()

    def __enter__(self) -> "Workers":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(self, function: Callable[[Any], Any], jobs: Sequence[Any], timeout: float) -> Iterator[tuple[int, Outcome]]:
        """(index of the job, what became of it), as they end. `function` is at the top level of a module.

        timeout   seconds of one job, the start of its process included
        """
        waiting = deque(enumerate(jobs))
        busy: dict[Connection, tuple[_Worker, int, float]] = {}
        try:
            while waiting or busy:
                while waiting and len(busy) < self.count:
                    index, job = waiting.popleft()
                    worker = self._idle.pop() if self._idle else self._start()
                    with suppress(OSError):  # it has died meanwhile: told as of one that dies at work
                        worker.connection.send((function, job))
                    busy[worker.connection] = (worker, index, time.monotonic() + timeout)
                until = min(deadline for _, _, deadline in busy.values())
                for ready in connection.wait(list(busy), max(0.0, until - time.monotonic())):
                    worker, index, _ = busy.pop(ready)  # type: ignore[call-overload]
                    yield index, self._result(worker)
                for late in [c for c, (_, _, deadline) in busy.items() if deadline <= time.monotonic()]:
                    worker, index, _ = busy.pop(late)
                    self._end(worker)
                    yield index, Outcome(failure=f"not done within {timeout:.0f} s", lost=True)
        finally:  # stopped half-way: what still runs has nobody to report to
            for worker, _, _ in busy.values():
                self._end(worker)

    def close(self) -> None:
        """End all processes."""
        for worker in list(self._all):
            self._end(worker)
        self._idle.clear()

    def _start(self) -> _Worker:
        worker = _Worker(self.environment)
        self._all.add(worker)
        return worker

    def _end(self, worker: _Worker) -> None:
        self._all.discard(worker)
        worker.end()

    def _result(self, worker: _Worker) -> Outcome:
        try:
            failure, value = worker.connection.recv()
        except (EOFError, OSError):
            with suppress(subprocess.TimeoutExpired):
                worker.process.wait(5)
            code = worker.process.returncode or 0
            how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
            self._end(worker)
            return Outcome(failure=f"the process died ({how})", lost=True)
        if failure:  # what raised may have spoilt the device's context
            self._end(worker)
            return Outcome(failure=failure)
        self._idle.append(worker)
        return Outcome(value)


def _serve(descriptor: int) -> None:
    jobs = Connection(descriptor)
    threading.Thread(target=_end_with_parent, args=(descriptor,), daemon=True).start()
    while True:
        try:
            function, job = jobs.recv()
        except EOFError:  # the parent is gone
            return
        try:
            answer = ("", function(job))
        except Exception as error:
            answer = (first_line(error), None)
        jobs.send(answer)


def _end_with_parent(descriptor: int) -> None:
    """Wait until the other end of the connection is closed, by `close` or by death; then nobody wants an answer."""
    watch = select.poll()
    watch.register(descriptor, 0)  # only hang-ups
    watch.poll()
    os.killpg(0, signal.SIGKILL)


def first_line(error: BaseException) -> str:
    """An exception in one line that is never empty."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0].strip()}" if lines else type(error).__name__
