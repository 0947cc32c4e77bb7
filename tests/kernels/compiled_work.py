"""Paged blocks of query tokens of AMD kernels as the compiler makes them: a job for a process of its own."""

import importlib
import sys
from pathlib import Path
from typing import Any

from harness import check, make_plans
from pages import run

from mla_codegen.check.cdna.call import Session
from mla_codegen.check.reference import in_pages, make_case
from mla_codegen.publish.write import build


def hold(job: tuple[dict[str, Any], float, float, str]) -> list[str]:
    """Hold the general kernel of (spec, bounds of output and LSE), built into a folder; what the executor found."""
    spec, bound, lse_bound, folder = job
    plan = make_plans(spec)
    build([plan], Path(folder) / "compiled_build")
    sys.path.insert(0, folder)
    kernel = next(kernel for kernel in plan.kernels if kernel.name.endswith("any_q4"))
    module = importlib.import_module(f"compiled_build.{plan.name}.{kernel.name}")
    n = kernel.block_n
    case = make_case([2 * n + 1, 20, 0, n + 3], q_lens=[3, 0, 1, 9], heads=kernel.heads, kv_dtype=kernel.kv)
    session = Session(plan.target.name)
    with session.of(module):
        got = run(module, kernel, in_pages(case, 16), "list", 2)
    check(got, case, bound=bound, lse_bound=lse_bound)
    return [str(finding) for finding in session.findings]
