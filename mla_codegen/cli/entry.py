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
            raise OutputLost(error.strerror or str(error)) from error

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError as error:
            raise OutputLost(error.strerror or str(error)) from error

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


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


def run(app: typer.Typer) -> None:
    """Run the command of `sys.argv` and leave."""
    sys.stdout = Output(sys.stdout or _nowhere())
    sys.stderr = sys.stderr or _nowhere()
    try:
        try:
            app()
        finally:
            sys.stdout.flush()
    except OutputLost as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what is still buffered goes nowhere
        report.err.print(f"stdout: {error}: not all of the output was written", markup=False, highlight=False)
        sys.exit(2)
