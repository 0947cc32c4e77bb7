"""The kernels of a folder that serve one model: what an engine's backend calls.

The folder is what `mla-codegen build SPEC --out FOLDER` wrote; MLA_CODEGEN_KERNELS names it.
"""

import hashlib
import importlib
import importlib.util
import os
import sys
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from mla_codegen.engines.model import Model, name, refusal, unlike

VARIABLE = "MLA_CODEGEN_KERNELS"


def folder() -> str:
    """The folder that the environment names. ValueError: what to do where it names none."""
    where = os.environ.get(VARIABLE, "")
    if not where:
        raise ValueError(f"{VARIABLE} is not set: `mla-codegen build SPEC --out FOLDER`, then set it to FOLDER")
    if not Path(where, "dispatch.py").is_file():
        raise ValueError(
            f"{VARIABLE} is {where!r}, and {Path(where).resolve()} has no dispatch.py: it must be a folder that "
            f"`mla-codegen build SPEC --out {where}` wrote"
        )
    return str(Path(where).resolve())


@lru_cache
def load(where: str) -> ModuleType:
    """The package in a folder, whatever the folder is called and wherever it lies, with its `dispatch` imported.

    Raises ImportError for a build of another version of the generator.
    """
    alias = f"mla_codegen_kernels_{hashlib.sha256(where.encode()).hexdigest()[:16]}"
    init = Path(where, "__init__.py")
    found = importlib.util.spec_from_file_location(alias, init, submodule_search_locations=[where])
    assert found is not None and found.loader is not None
    package = sys.modules.setdefault(alias, importlib.util.module_from_spec(found))
    found.loader.exec_module(package)
    importlib.import_module(f"{alias}.dispatch")
    return package


class Kernels:
    """The builds of a folder that serve a model on a device, and the calls over these alone.

    mla_decode   the call
    pages        KV rows of a page that there are builds for, those of the device's own target first
    """

    def __init__(self, where: str, model: Model, device: torch.device):
        package = load(where)
        dispatcher = package.dispatch.DISPATCHER
        fitting = [build for build in dispatcher.builds if not unlike(build, model)]
        if not fitting:
            raise ValueError(refusal(where, dispatcher.builds, model))
        fitting.sort(key=lambda build: build.target == "portable")
        self.folder, self.model, self.device = where, model, device
        self.all_builds, self.builds = dispatcher.builds, fitting
        self.dispatcher = type(dispatcher)([build.tables for build in fitting], dispatcher.build_command)
        self.mla_decode = self.dispatcher.mla_decode
        self.pages: list[int] = list(dict.fromkeys(build.page_size for build in fitting))
        self._runtime = f"{package.__name__}.runtime"

    def need_pages_of(self, rows: int) -> None:
        """ValueError if no build has pages of so many rows."""
        if rows not in self.pages:
            raise ValueError(refusal(self.folder, self.all_builds, self.model, rows))

    def workspace_bytes(self, total_q: int) -> int:
        """Scratch that calls of up to so many query rows may need."""
        module = importlib.import_module(f"{self._runtime}.workspace")
        return int(module.workspace_bytes(self.dispatcher, total_q, device=self.device))

    def warmup(self) -> None:
        """Compile all kernels for the arguments that an engine gives."""
        module = importlib.import_module(f"{self._runtime}.warmup")
        module.warmup(self.dispatcher, self.device, pages=("table",), progress=None)

    def graph_length(self, page_size: int, total_q: int, batch: int) -> int | None:
        """`max_kv_len` for a call that is captured, whose lengths nobody knows.

        None where a balanced kernel takes the call: it partitions what it finds at each replay. Else the longest
        `kv_len` of the spec's shapes, of which its author said that calls like these must be fast.
        """
        build = next(build for build in self.builds if build.page_size == page_size)
        kv = name(self.model.kv)
        general = getattr(build.choices[kv], "general", None)
        if total_q == batch and general is not None and 1 < total_q <= general.balanced_rows:
            return None
        return longest(build.tables.SHAPES[kv], *build.tables.TOKEN_SHAPES[kv].values())


def longest(*shapes: dict[int, dict[int, str]]) -> int | None:
    """The longest `kv_len` in tables of query rows -> KV rows -> kernel."""
    return max((length for table in shapes for lengths in table.values() for length in lengths), default=None)


@lru_cache
def kernels_for(where: str, model: Model, device: torch.device) -> Kernels:
    """The kernels for a model: one object for all of its layers. Raises ValueError if no build serves it."""
    return Kernels(where, model, device)


def page_sizes(where: str, target: str) -> list[int]:
    """Page sizes of all builds that can run on a device, whatever their model, those of its own target first."""
    builds: list[Any] = [
        build
        for build in load(where).dispatch.DISPATCHER.builds
        if build.page_size
        and build.topk is None
        and not build.unfit(target)
        and (build.target in (target, "portable") or target == "cpu")
    ]
    builds.sort(key=lambda build: build.target == "portable")
    return list(dict.fromkeys(build.page_size for build in builds))
