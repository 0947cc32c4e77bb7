"""The one error of the emulator, which always says kernel, source line, what happened and the likely cause."""

from __future__ import annotations

import sys
from types import TracebackType

_SOURCES: set[str] = set()  # file names of the modules that are emulated: where a user's frame is told from ours


def watch(filename: str) -> None:
    """Count frames of `filename` as emulated source when errors look for their line."""
    _SOURCES.add(filename)


def where() -> str:
    """`file:line in function` of the innermost frame of emulated source, or '' outside any."""
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename in _SOURCES:
            name = frame.f_code.co_filename.rsplit("/", 1)[-1]
            return f"{name}:{frame.f_lineno} in {frame.f_code.co_name}"
        frame = frame.f_back  # type: ignore[assignment]
    return ""


def where_raised(trace: TracebackType | None) -> str:
    """The same for an exception's traceback: its innermost frame of emulated source."""
    place = ""
    while trace is not None:
        code = trace.tb_frame.f_code
        if code.co_filename in _SOURCES:
            place = f"{code.co_filename.rsplit('/', 1)[-1]}:{trace.tb_lineno} in {code.co_name}"
        trace = trace.tb_next
    return place


class EmulatorError(Exception):
    """A fault of an emulated kernel, or a use of something that the emulator does not model.

    `what` and `cause` hold the two halves of the message; `kernel`, `program` and `line` say where it happened.
    """

    def __init__(self, what: str, cause: str = "") -> None:
        self.what = what
        self.cause = cause
        self.line = where()
        self.kernel = ""
        self.program: tuple[int, ...] | None = None
        super().__init__(what)

    def __str__(self) -> str:
        place = f"kernel {self.kernel}" if self.kernel else "host code"
        if self.program is not None:
            place += f", program {self.program[0] if self.program[1:] == (0, 0) else self.program}"
        if self.line:
            place += f", {self.line}"
        text = f"{place}: {self.what}"
        return f"{text}\n  likely cause: {self.cause}" if self.cause else text
