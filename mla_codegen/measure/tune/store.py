"""Timings that outlive an interruption: a file of one JSON record a line, only ever appended to.

A record is complete once its line ends; a line that was cut off when a process was killed is passed over.
"""

import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Measured:
    """What became of a candidate: microseconds in a CUDA graph, or why there are none.

    us, low, high   median and quartiles; NaN with a failure
    error           relative L2 against float64
    lost            its process died or ran out of time: that may be the machine's fault, and is not kept
    """

    us: float = float("nan")
    low: float = float("nan")
    high: float = float("nan")
    error: float = float("nan")
    failure: str = ""
    lost: bool = field(default=False, compare=False)

    @property
    def good(self) -> bool:
        return not self.failure


class Store:
    """Records by key. `path` is made when the first one is added."""

    def __init__(self, path: Path):
        self.path = path
        self._records: dict[str, Measured] = {}
        for line in self._lines():
            try:
                record = json.loads(line)
                fields = {name: record[name] for name in ("us", "low", "high", "error", "failure")}
                self._records[str(record["key"])] = Measured(**fields)
            except (ValueError, KeyError, TypeError):
                continue  # cut off, or not ours

    def _lines(self) -> list[str]:
        try:
            return self.path.read_text(encoding="utf-8", errors="replace").split("\n")
        except FileNotFoundError:
            return []

    def __len__(self) -> int:
        return len(self._records)

    def get(self, key: str) -> Measured | None:
        return self._records.get(key)

    def add(self, key: str, measured: Measured, about: dict[str, Any]) -> None:
        """Keep a measurement under `key`; `about` is for people who read the file."""
        self._records[key] = measured
        record = {"key": key, **about, **asdict(measured)}
        record.pop("lost")
        self.path.parent.mkdir(parents=True, exist_ok=True)
        # One write, begun on a line of its own whatever an earlier process left, so that records never mix.
        handle = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            size = os.fstat(handle).st_size
            torn = size > 0 and os.pread(handle, 1, size - 1) != b"\n"
            os.write(handle, f"{chr(10) if torn else ''}{json.dumps(record)}\n".encode())
            os.fsync(handle)
        finally:
            os.close(handle)
