"""Hard numbers for AMD kernels as the compiler makes them, executed on a CPU: a job for a process of its own.

Triton must not be its interpreter there, so this is no test module.
"""

import importlib
import sys
from pathlib import Path
from typing import Any

import torch
from hard_numbers import hold_non_finite, hold_ones, hold_sinks
from harness import EXACT, FP8, Got

from mla_codegen.check.cdna.call import Session
from mla_codegen.check.reference import Case
from mla_codegen.cli.common import load_plans
from mla_codegen.publish.write import build


def hold(job: tuple[str, str, str]) -> list[str]:
    """Hold the kernels for any shape of (spec, its KV type), built into a folder; returns what the executor found."""
    spec, kv, folder = job
    (plan,) = load_plans([Path(spec)], Path("generated"))
    package = f"hard_{plan.name}"
    build([plan], Path(folder) / package)
    sys.path.insert(0, folder)
    session = Session(plan.target.name)
    for kernel in plan.general(kv):
        module = importlib.import_module(f"{package}.{plan.name}.{kernel.name}")
        splits = {} if kernel.splits else {"splits": 3}

        def run(case: Case, module: Any = module, splits: dict[str, int] = splits) -> Got:
            out = torch.full((case.q.shape[0], 16, 512), float("nan"), dtype=torch.bfloat16)
            lse = torch.full(out.shape[:2], float("nan"))
            with session.of(module):
                module.run(
                    q=case.q, kv=case.kv, qo_indptr=case.qo_indptr, kv_indptr=case.kv_indptr, kv_visible=None,
                    kv_scale=case.kv_scale, sm_scale=case.sm_scale, out=out, lse=lse, **splits,
                )  # fmt: skip
            return out, lse

        one = "fp8_mma" in kernel.optimizations
        hold_non_finite(run, kv, kernel.block_n)
        hold_ones(run, kv)
        hold_sinks(run, kv, FP8 if one else EXACT, 0.1 if one else 5e-3, most=10.0 if one else 18.0)
    return [str(finding) for finding in session.findings]
