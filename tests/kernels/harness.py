"""What the kernel tests share: small specs, their kernels built and loaded, and the comparison with float64.

The kernels under test are the rendered files themselves, published into a package and called through its dispatcher, or
one by one where a test wants a certain kernel or number of splits. Whatever a call allocates holds NaN beforehand.
"""

import importlib
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import yaml
from builds import plan_of

from mla_codegen.check.reference import Case, poisoned_scratch, reference, relative_l2
from mla_codegen.plan.resolve import KernelPlan, Plan
from mla_codegen.publish.write import fresh_build, publish

REPORTS: dict[str, dict[str, Any]] = yaml.safe_load(
    (Path(__file__).parent / "public_reports.yaml").read_text(encoding="utf-8")
)

EXACT, FP8 = 3e-3, 4e-2  # relative L2 of the output: 16-bit products, and q and weights rounded to fp8
LSE_EXACT, LSE_FP8 = 1e-4, 0.1  # largest difference of natural LSE, for scores of a few units

RAGGED = [300, 0, 1, 63, 65]
SHAPE = {"batch": len(RAGGED), "kv_len": 256, "splits": 3}
BASE = ("exp2", "peeled_tail", "direct_out")

Got = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Mode:
    """A way to decode KV elements on a target. `options` are what it takes beyond BASE."""

    target: str
    kv: str
    options: tuple[str, ...] = ()

    def __str__(self) -> str:
        return "-".join([self.target, self.kv, *self.options])

    @property
    def bound(self) -> float:
        return FP8 if "fp8_mma" in self.options else EXACT

    @property
    def lse_bound(self) -> float:
        return LSE_FP8 if "fp8_mma" in self.options else LSE_EXACT

    def spec(self, **settings: Any) -> dict[str, Any]:
        """A spec of one shape in this mode; `settings` as in `make_spec`."""
        return make_spec(self.target, kv=[self.kv], optimizations=[*BASE, *self.options], **settings)


PACKED, MMA = "packed_fp8", "fp8_mma"
# Every way to decode whose code differs, one row each. Targets that differ in numbers only are in test_plan.
MODES = [
    Mode("portable", "bf16"),
    Mode("portable", "fp16"),
    Mode("portable", "fp8_e4m3fn", (PACKED,)),
    Mode("portable", "fp8_e4m3fnuz", (PACKED,)),
    Mode("gfx942", "fp8_e4m3fn", (PACKED, MMA)),
    Mode("gfx942", "fp8_e4m3fnuz"),
    Mode("gfx942", "fp8_e4m3fnuz", (MMA,)),
    Mode("gfx942", "fp8_e4m3fnuz", (PACKED, MMA)),
    Mode("sm_90", "fp8_e4m3fn"),
    Mode("sm_90", "fp8_e4m3fn", (PACKED,)),
    Mode("sm_90", "fp8_e4m3fn", (MMA,)),
    Mode("sm_90", "fp8_e4m3fn", (PACKED, MMA)),
]
# Ways whose code is that of one above (a test holds them to it): run where a GPU's compiler could make a difference.
ALIKE = [
    Mode("gfx942", "bf16"),
    Mode("gfx942", "fp8_e4m3fn", (PACKED,)),
    Mode("gfx942", "fp8_e4m3fnuz", (PACKED,)),
    Mode("gfx950", "fp8_e4m3fn"),
    Mode("gfx950", "fp8_e4m3fn", (MMA,)),
    Mode("gfx950", "fp8_e4m3fn", (PACKED,)),
    Mode("gfx950", "fp8_e4m3fn", (PACKED, MMA)),
    Mode("gfx950", "fp8_e4m3fnuz", (PACKED,)),
    Mode("sm_80", "bf16"),
    Mode("sm_80", "fp8_e4m3fn", (PACKED,)),
    Mode("sm_90", "bf16"),
    Mode("sm_90", "fp16"),
    Mode("sm_90", "fp8_e4m3fnuz", (PACKED,)),
]
DISTINCT = tuple(MODES)
MODES += ALIKE if torch.cuda.is_available() else []
PORTABLE = [mode for mode in MODES if mode.target == "portable"]
BF16 = MODES[0]
PORTABLE_FP8 = MODES[2]


def make_spec(
    target: str = "portable",
    *,
    kv: list[str],
    optimizations: list[str],
    heads: int = 16,
    latent: int = 512,
    rope: int = 64,
    q: str = "bf16",
    out: str = "bf16",
    shapes: list[dict[str, Any]] | None = None,
    **defaults: Any,
) -> dict[str, Any]:
    """A spec as data. `defaults` are settings such as block_n. The family is the one that the interpreter runs."""
    return {
        "target": target,
        "model": {"num_heads": heads, "kv_lora_rank": latent, "qk_rope_head_dim": rope},
        "dtypes": {"q": q, "kv": kv, "out": out},
        "defaults": {"family": "triton", "block_n": 32, "num_stages": 1, "optimizations": optimizations, **defaults},
        "shapes": shapes or [SHAPE],
    }


def make_plans(spec: dict[str, Any]) -> Plan:
    """The plan of a spec given as data, named `spec`."""
    return plan_of(spec, "spec.yaml")


class Kernels:
    """The loaded package of one spec."""

    def __init__(self, spec: dict[str, Any], folder: Path, package: str, device: torch.device):
        self.plan = make_plans(spec)
        self.device = device
        self.files = fresh_build([self.plan], folder / package)
        publish(self.files, folder / package, {self.plan.name})
        if str(folder) not in sys.path:
            sys.path.insert(0, str(folder))
        self.dispatcher = importlib.import_module(f"{package}.dispatch").DISPATCHER

    def text(self, name: str) -> str:
        """The rendered file of a kernel."""
        return self.files[f"{self.plan.name}/{name}.py"]

    def module(self, name: str) -> ModuleType:
        return self.dispatcher.builds[0].kernel(name)

    @property
    def shaped(self) -> KernelPlan:
        """The kernel of the spec's first shape."""
        return self.plan.kernels[0]

    def general(self, direct: bool) -> str:
        """Name of the kernel for any shape, of the spec's first KV type."""
        return self.plan.general(self.plan.kernels[0].kv)[0 if direct else 1].name

    def decode(self, case: Case, **arguments: Any) -> Got:
        """(out, LSE) on the CPU, by `mla_decode`."""
        on = case.to(self.device)
        given: dict[str, Any] = {"sm_scale": on.sm_scale, "kv_scale": on.kv_scale, **arguments}
        with poisoned_scratch():
            out, lse = self.dispatcher.mla_decode(on.q, on.kv, on.qo_indptr, on.kv_indptr, return_lse=True, **given)
        return out.cpu(), lse.cpu()

    def run(self, name: str, case: Case, splits: int | None = None, *, kv_visible: torch.Tensor | None = None) -> Got:
        """(out, LSE) on the CPU, by the kernel `name`, with `splits` if it takes them at run time."""
        on = case.to(self.device)
        model = self.plan.spec.model
        shape = (on.q.shape[0], model.num_heads, model.kv_lora_rank)
        given: dict[str, Any] = {} if splits is None else {"splits": splits}
        with poisoned_scratch():
            out = torch.empty(shape, dtype=self.dispatcher.builds[0].out, device=self.device)
            lse = torch.empty(shape[:2], dtype=torch.float32, device=self.device)
            self.module(name).run(
                q=on.q,
                kv=on.kv,
                qo_indptr=on.qo_indptr,
                kv_indptr=on.kv_indptr,
                kv_visible=None if kv_visible is None else kv_visible.to(self.device),
                kv_scale=on.kv_scale,
                sm_scale=on.sm_scale,
                out=out,
                lse=lse,
                **given,
            )
        return out.cpu(), lse.cpu()


Builder = Callable[[dict[str, Any]], Kernels]


def check(
    got: Got, case: Case, *, bound: float = EXACT, lse_bound: float = LSE_EXACT, latent: int | None = None
) -> None:
    """Hold (out, LSE) to float64: as a whole, and each query row and head alone, so that none hides among others."""
    out, lse = got
    want, want_lse = reference(case, latent or out.shape[2])
    assert out.shape == want.shape
    assert lse.shape == want_lse.shape
    assert lse.dtype is torch.float32
    blind = want_lse == float("-inf")
    assert torch.isfinite(out).all(), f"rows that are not finite: {rows_of(~torch.isfinite(out).all(-1))}"
    assert (out[blind] == 0).all(), f"rows that see nothing are not 0: {rows_of(blind & (out != 0).any(-1))}"
    assert (lse[blind] == float("-inf")).all()
    difference = torch.linalg.vector_norm(out.double() - want, dim=-1)
    size = torch.linalg.vector_norm(want, dim=-1)
    off = difference > 2 * bound * size
    assert not off.any(), f"(query row, head) off by more than {2 * bound:g}: {rows_of(off)}"
    assert relative_l2(out, want) <= bound
    lse_off = ~blind & ((lse - want_lse).abs() > lse_bound + 1e-5 * want_lse.abs())
    assert not lse_off.any(), f"LSE off: {rows_of(lse_off)}, {lse[lse_off][:4]} for {want_lse[lse_off][:4]}"


def rows_of(mask: torch.Tensor) -> list[list[int]]:
    """The first few (query row, head) where `mask` is set."""
    return mask.nonzero()[:6].tolist()


def code_of(text: str) -> str:
    """A rendered file without comments and docstrings, which may speak of what is not there."""
    text = re.sub(r'""".*?"""', "", text, flags=re.S)
    return re.sub(r"#.*", "", text)
