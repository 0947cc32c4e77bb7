"""What holds for every command: errors in words, and an output that may be closed or full before all is written."""

import os
import sys
from typing import Any, TextIO

import typer

from mla_codegen.cli import common, report
from mla_codegen.cli.common import fail
from mla_codegen.publish.manifest import BuildError
from mla_codegen.render.templates import RenderError


class OutputLost(Exception):
    """stdout takes no more. Not an OSError: libraries that print would take that for theirs."""


class Output:
    """A text stream that raises OutputLost where the stream below raises OSError."""

    def __init__(self, stream: TextIO):
        self._stream = stream

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except OSError as error:
            return self._lost(error)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError as error:
            self._lost(error)

    def _lost(self, error: OSError) -> int:
        raise OutputLost(error.strerror or str(error)) from error

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class Errors(Output):
    """stderr likewise, but what it does not take is dropped: there is nowhere left to say so."""

    def _lost(self, error: OSError) -> int:
        _drop(2)
        return 0


class Commands(common.Commands):
    """The commands; what any of them cannot do for reasons outside of this program is said, with exit code 2."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except BuildError as error:
            fail(str(error), 2)
        except RenderError as error:
            fail(str(error), 1)
        except OSError as error:  # commands say more of those that they expect
            fail(f"{error.filename}: {error.strerror}" if error.filename else str(error), 2)


def _nowhere() -> TextIO:
    """In place of a stream that is closed from the start, lest a file that is opened later takes its number."""
    return os.fdopen(os.open(os.devnull, os.O_WRONLY), "w")


def _drop(number: int) -> None:
    """Send what is yet to come, and what Python has still buffered, nowhere."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), number)


def run(app: typer.Typer) -> None:
    """Run the command of `sys.argv` and leave."""
    sys.stdout = Output(sys.stdout or _nowhere())
    sys.stderr = Errors(sys.stderr or _nowhere())
    try:
        try:
            app()
        finally:
            sys.stdout.flush()
    except OutputLost as error:
        _drop(1)
        if not isinstance(error.__cause__, BrokenPipeError):  # as of `| head`, which has read what it wanted
            report.err.print(f"stdout: {error}: not all of the output was written", markup=False, highlight=False)
        sys.exit(2)
