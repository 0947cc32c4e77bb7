"""Where there is no GPU, kernels run in Triton's interpreter, and tests that need a GPU are skipped.

Triton reads TRITON_INTERPRET when it decorates a kernel, its own library included, so it must be set before any import.
"""

import os
import sys
import time

import pytest
import torch
from hypothesis import settings

HAS_GPU = torch.cuda.is_available()

if not HAS_GPU:
    if "triton" in sys.modules and os.environ.get("TRITON_INTERPRET") != "1":
        raise RuntimeError("triton was imported before TRITON_INTERPRET=1 could be set: set it in the environment")
    os.environ["TRITON_INTERPRET"] = "1"

settings.register_profile("tests", deadline=None, derandomize=True)
settings.load_profile("tests")


def pytest_configure(config: pytest.Config) -> None:
    # Triton's interpreter converts arrays of one element to numbers in its own way.
    config.addinivalue_line("filterwarnings", "ignore:Conversion of an array with ndim:DeprecationWarning")
    if not HAS_GPU:
        from mla_codegen.check.block_types import remember

        remember()
    if not hasattr(config, "workerinput") and not sys.stdout.isatty():
        config.pluginmanager.register(Progress(config))


class Progress:
    """A line every so often where a log has no terminal's dots: how many tests are done, and how many failed."""

    EVERY = 15.0  # seconds

    def __init__(self, config: pytest.Config):
        self.config = config
        self.begin = self.said = time.monotonic()
        self.total = self.done = self.failed = 0

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self.total = self.total or len(session.items)

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids: list[str]) -> None:
        self.total = len(ids)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.failed += report.failed
        self.done += report.when == "teardown"
        now = time.monotonic()
        if now - self.said >= self.EVERY:
            self.said = now
            terminal = self.config.pluginmanager.get_plugin("terminalreporter")
            line = f"{self.done} of {self.total} tests, {self.failed} failed, {now - self.begin:.0f} s"
            terminal.write(f"\n{line}\n", flush=True)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if HAS_GPU:
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a GPU; torch sees none"))
