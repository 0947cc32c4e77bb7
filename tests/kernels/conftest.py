"""Fixtures of the kernel tests: the device, and specs built once for all tests of a process."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

from harness import Builder, Kernels

from mla_codegen.runtime.builds import target_of


@pytest.fixture(scope="session")
def device() -> torch.device:
    """The GPU if there is one, else the CPU, where Triton's interpreter runs the kernels of every target."""
    return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


@pytest.fixture(scope="session")
def build(device: torch.device, tmp_path_factory: pytest.TempPathFactory) -> Builder:
    """Build and load the kernels of a spec. On a GPU only its own target's and portable ones can run: others skip."""
    folder = tmp_path_factory.mktemp("kernels")
    built: dict[str, Kernels] = {}

    def build_once(spec: dict[str, Any]) -> Kernels:
        if device.type == "cuda" and spec["target"] not in ("portable", target_of(device)):
            pytest.skip(f"kernels for {spec['target']} do not run on {target_of(device)}")
        key = json.dumps(spec)
        if key not in built:
            built[key] = Kernels(spec, folder, f"build_{len(built)}", device)
        return built[key]

    return build_once
