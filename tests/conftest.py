"""Where there is no GPU, kernels run in Triton's interpreter, and tests that need a GPU are skipped.

Triton reads TRITON_INTERPRET when it decorates a kernel, its own library included, so it must be set before any import.
"""

import os
import sys

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


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if HAS_GPU:
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a GPU; torch sees none"))
