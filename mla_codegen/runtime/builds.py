"""What one spec built, and the architecture that it was built for."""

import importlib
from functools import lru_cache
from types import ModuleType

import torch
import triton

from .gluon import mismatch
from .launch import Launch
from .tables import rule_of

DTYPES = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp8_e4m3fn": torch.float8_e4m3fn,
    "fp8_e4m3fnuz": torch.float8_e4m3fnuz,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
INDEX = (torch.int32, torch.int64)  # of ranges, page numbers and lengths


class Build:
    """What one spec built: its folder's tables, and its kernel modules once they are needed."""

    def __init__(self, tables: ModuleType):
        self.package = tables.__name__
        self.target: str = tables.TARGET
        self.spec: str = tables.SPEC
        self.heads: int = tables.HEADS
        self.latent: int = tables.LATENT
        self.rope: int = tables.ROPE
        self.q: torch.dtype = DTYPES[tables.Q]
        self.out: torch.dtype = DTYPES[tables.OUT]
        self.page_size: int | None = tables.PAGE_SIZE
        self.gluon: bool = tables.GLUON
        self.batch_invariant: bool = tables.BATCH_INVARIANT
        self.kv: tuple[str, ...] = tables.KV
        self.choices = {kv: rule_of(tables, kv) for kv in self.kv}
        self.forms = tuple(kv.split("_")[0] for kv in self.kv)  # what custom_kernel calls them
        self.fp8 = next((kv for kv in self.kv if kv.startswith("fp8")), None)

    def __str__(self) -> str:
        kinds = ", ".join(self.kv) + (f", pages of {self.page_size}" if self.page_size else "")
        return f"{self.target}: {self.heads} heads, {self.latent}+{self.rope}, {kinds} ({self.spec})"

    def kernel(self, name: str) -> ModuleType:
        """The module, its kernels exchanged for ones that launch with less host time."""
        module = importlib.import_module(f"{self.package}.{name}")
        for stage in ("stage1", "stage2"):
            kernel = getattr(module, stage, None)
            if isinstance(kernel, triton.JITFunction):  # not yet exchanged, and not interpreted
                setattr(module, stage, Launch(kernel))
        return module


@lru_cache(maxsize=64)
def target_of(device: torch.device) -> str:
    """The name that a spec gives to a device's architecture: gfx942, sm_90, ..., or cpu."""
    if device.type == "cpu":
        return "cpu"
    properties = torch.cuda.get_device_properties(device)
    arch = getattr(properties, "gcnArchName", "")
    if torch.version.hip:
        return str(arch).split(":")[0]
    return f"sm_{properties.major}{properties.minor}"


def full_device(device: torch.device | str | None) -> torch.device:
    """A device with its index; None is the current GPU, or the CPU where kernels are interpreted."""
    if device is None:
        device = "cpu" if triton.knobs.runtime.interpret else "cuda"
    device = torch.device(device)
    return torch.device("cuda", torch.cuda.current_device()) if device == torch.device("cuda") else device


def gluon_unfit(target: str) -> str | None:
    """Why Gluon kernels cannot run here; None where they can."""
    if target == "cpu":
        return (
            "its kernels are Gluon, which Triton's interpreter does not run: build a spec for `portable` beside it, or "
            "check the kernels with `mla-codegen verify`, which emulates them"
        )
    return mismatch()
