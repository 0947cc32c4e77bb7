# Copied by mla-codegen from mla_codegen/runtime/builds.py. Do not edit: `mla-codegen build` writes it anew.
"""What one spec built, and the architecture that it was built for."""

import hashlib
import importlib.util
import os
import sys
from functools import lru_cache
from types import ModuleType
from typing import NamedTuple

import torch
import triton

from .formats import ELEMENTS, KV_FORMATS
from .gluon import mismatch
from .launch import Launch
from .tables import rule_of

NAMES = {known.element.dtype: known.name for known in KV_FORMATS.values() if not known.record}  # of KV by its dtype
INDEX = (torch.int32, torch.int64)  # of ranges, page numbers and lengths


class Lists(NamedTuple):
    """Sparse KV: a list of `topk` rows for each query row."""

    topk: int


Layout = Lists | int | None


def words_of(layout: Layout) -> str:
    """`, pages of 64`; nothing for ragged KV."""
    if layout is None:
        return ""
    return f", lists of {layout.topk}" if isinstance(layout, Lists) else f", pages of {layout}"


class Build:
    """What one spec built: its folder's tables, and its kernel modules once they are needed."""

    def __init__(self, tables: ModuleType):
        self.package = tables.__name__
        self.tables = tables
        self.target: str = tables.TARGET
        self.spec: str = tables.SPEC
        self.heads: int = tables.HEADS
        self.latent: int = tables.LATENT
        self.rope: int = tables.ROPE
        self.q: torch.dtype = ELEMENTS[tables.Q].dtype
        self.out: torch.dtype = ELEMENTS[tables.OUT].dtype
        self.page_size: int | None = tables.PAGE_SIZE
        self.topk: int | None = tables.TOPK
        self.triton: str | None = tables.TRITON
        self.batch_invariant: bool = tables.BATCH_INVARIANT
        self.strided: bool = tables.STRIDED
        self.kv: tuple[str, ...] = tables.KV
        self.several: Build = self  # the build for calls of several query tokens a request
        self.for_several = not self.batch_invariant and not any(tables.SHAPES.values())
        self.choices = {kv: rule_of(tables, kv) for kv in self.kv}
        self.forms = tuple(KV_FORMATS[kv].form for kv in self.kv)  # what custom_kernel calls them
        self.fp8 = next((kv for kv in self.kv if KV_FORMATS[kv].fp8), None)
        self.widths = {kv: KV_FORMATS[kv].width(self.latent, self.rope) for kv in self.kv}  # of a row of the tensor
        self.records = {self.widths[kv]: kv for kv in self.kv if KV_FORMATS[kv].record}

    def __str__(self) -> str:
        kinds = ", ".join(self.kv) + words_of(self.layout)
        return f"{self.target}: {self.heads} heads, {self.latent}+{self.rope}, {kinds} ({self.spec})"

    @property
    def layout(self) -> Layout:
        """How a call gives its KV rows: pages of so many, a list of `topk` for each query row, or None, ragged."""
        return self.page_size if self.topk is None else Lists(self.topk)

    @property
    def takes(self) -> tuple[object, ...]:
        """What calls must be like, but for their sizes."""
        return (self.target, self.heads, self.latent, self.rope, self.layout, self.q, self.out, self.kv)

    def unfit(self, target: str) -> str | None:
        """Why its kernels cannot run on `target`; None where they can, or where the target alone decides."""
        if self.triton is None:
            return None
        if target == "cpu":
            return (
                "its kernels are Gluon, which Triton's interpreter does not run: build a spec for `portable` beside "
                "it, or check the kernels with `mla-codegen verify`, which emulates them"
            )
        return mismatch(self.triton, self.spec)

    def kernel(self, name: str) -> ModuleType:
        """The module, its kernels exchanged for ones that launch with less host time.

        Raises ImportError if its Gluon is of another Triton release than the one at hand.
        """
        if why := self.triton and mismatch(self.triton, self.spec):
            raise ImportError(f"{self}: {why}")
        now = sys.modules.get(self.package)
        ours = now is self.tables or getattr(now, "__file__", None) == getattr(self.tables, "__file__", "")
        module = importlib.import_module(f"{self.package if ours else self._alias()}.{name}")
        for stage in ("stage1", "stage2"):
            kernel = getattr(module, stage, None)
            if isinstance(kernel, triton.JITFunction):  # not yet exchanged, and not interpreted
                setattr(module, stage, Launch(kernel))
        return module

    def _alias(self) -> str:
        """Its package under a name that is this folder's alone: by now another folder goes by the name that it had."""
        folder = os.path.dirname(os.path.abspath(str(self.tables.__file__)))
        root, name = os.path.split(folder)
        alias = f"mla_codegen_{hashlib.sha256(root.encode()).hexdigest()[:16]}"
        if alias not in sys.modules:
            spec = importlib.util.spec_from_file_location(
                alias, os.path.join(root, "__init__.py"), submodule_search_locations=[root]
            )
            assert spec is not None and spec.loader is not None
            package = sys.modules.setdefault(alias, importlib.util.module_from_spec(spec))
            spec.loader.exec_module(package)
        return f"{alias}.{name}"


@lru_cache(maxsize=64)
def target_of(device: torch.device) -> str:
    """The name that a spec gives to a device's architecture: gfx942, sm_90, ..., or cpu."""
    if device.type == "cpu":
        return "cpu"
    if device.type != "cuda":
        raise ValueError(f"no kernels for the device {device}: calls run on a GPU ('cuda'), or on the CPU")
    if (device.index or 0) >= torch.cuda.device_count():
        raise ValueError(f"no kernels for the device {device}: torch sees {torch.cuda.device_count()} GPUs")
    properties = torch.cuda.get_device_properties(device)
    arch = getattr(properties, "gcnArchName", "")
    if torch.version.hip:
        return str(arch).split(":")[0]
    return f"sm_{properties.major}{properties.minor}"


def full_device(device: torch.device | str | None) -> torch.device:
    """A device with its index; None is the current GPU, or the CPU where kernels are interpreted.

    Raises TypeError or ValueError for what names no device.
    """
    if device is None:
        device = "cpu" if triton.knobs.runtime.interpret else "cuda"
    try:
        device = torch.device(device)
    except (TypeError, RuntimeError):
        kind = ValueError if isinstance(device, str) else TypeError
        raise kind(f"device is {device!r}; it must be a torch.device, such as 'cuda:0', or None") from None
    if device == torch.device("cuda") and torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return device
