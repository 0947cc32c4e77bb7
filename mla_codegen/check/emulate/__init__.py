"""Runs Gluon kernels on a CPU, strictly: every address, wait, fence and layout is checked. See docs/emulator.md.

    module = emulate.load("generated/h200/....py", "kernels")
    module.stage1[(grid,)](q, kv, ..., num_warps=4)

Names are resolved on first use, so that `emulate.asm` can be imported without Triton.
"""

from __future__ import annotations

import importlib
from typing import Any

_HOMES = {
    "load": "loader",
    "poison": "memory",
    "forget": "memory",
    "unwritten": "memory",
    "EmulatorError": "errors",
}

__all__ = ["EmulatorError", "forget", "load", "poison", "unwritten"]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
