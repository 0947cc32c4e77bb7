"""Each AMD kernel of a spec as the compiler makes it, executed on a CPU (`cdna`) and held to float64.

No GPU is needed, nor AMD's software. A kernel passes if its results are right and the executor found no fault: no
register used before its load is waited for, no race in LDS, no access outside of the arguments, and no two
instructions closer than the hardware allows.
"""

from __future__ import annotations

import importlib
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mla_codegen.catalog.host import cores
from mla_codegen.catalog.releases import installed_triton, release_of
from mla_codegen.check.verify import Job, Result, Tally, by_layout, cases_of, importable, package_of, results_of
from mla_codegen.check.workers import Workers, first_line
from mla_codegen.inspect.job import AMD_ARCHES
from mla_codegen.plan.resolve import Plan
from mla_codegen.publish.write import build

TIMEOUT = 1800.0  # seconds of one kernel, compilations included
FAR = 3 << 31  # bytes from where a pointer points to the KV rows of a call with a KV of many GiB


class NotCompiled(ValueError):
    """A spec whose kernels cannot be compiled and executed here; `str()` is ready for a terminal."""


@dataclass(frozen=True)
class CompiledJob(Job):
    """A kernel compiled for `arch`."""

    arch: str = ""

    @property
    def on(self) -> str:
        return f"{self.arch}, executed"


def arches_of(plan: Plan) -> tuple[str, ...]:
    """The AMD targets that a plan's kernels are for. NotCompiled if there are none, or another release is meant."""
    if plan.triton is not None and plan.release != release_of(installed_triton()):
        raise NotCompiled(
            f"{plan.spec_file} is for triton {plan.triton}, {installed_triton()} is installed\n"
            "  fix: install that release beside mla-codegen, or leave `triton` out of the spec"
        )
    if plan.target.name == "portable":
        return AMD_ARCHES
    if plan.target.name not in AMD_ARCHES:
        raise NotCompiled(
            f"{plan.spec_file} is for {plan.target.name}; code can be executed for {', '.join(AMD_ARCHES)}\n"
            "  fix: leave --compiled out, or name specs for AMD"
        )
    return (plan.target.name,)


def verify_compiled(
    plans: Sequence[Plan],
    *,
    seed: int = 0,
    shapes: Sequence[tuple[int, int]] = (),
    kv: str | None = None,
    quick: bool = False,
    processes: int | None = None,
    timeout: float = TIMEOUT,
    progress: Callable[[Result, int], None] | None = None,
) -> list[Result]:
    """Check every AMD kernel of `plans`, in their order; arguments as of `verify.verify_plans`.

    Raises NotCompiled before anything runs.
    """
    targets = [arches_of(plan) for plan in plans]
    with tempfile.TemporaryDirectory(prefix="mla-codegen-compiled-") as folder:
        jobs = []
        for plan, arches in zip(plans, targets, strict=True):
            build([plan], Path(folder) / package_of(plan.name))
            for arch in arches:
                jobs += [
                    CompiledJob(folder, plan.name, kernel, "cpu", seed, quick, arch)
                    for kernel in plan.serving(shapes, kv)
                ]
        with Workers(processes or cores(), {"TRITON_INTERPRET": "0", "OMP_NUM_THREADS": "1"}) as workers:
            return results_of(workers, verify_kernel, jobs, timeout, progress, len(jobs))


def verify_kernel(job: CompiledJob) -> Result:
    """One kernel's cases, the first of them again with its KV far into a pool of many GiB."""
    from mla_codegen.check.cdna.call import Session

    start = time.perf_counter()
    kernel, tally = job.kernel, Tally()
    sessions = [Session(job.arch)]
    try:
        module = importlib.import_module(f"{importable(job)}.{job.spec}.{kernel.name}")
        cases = list(cases_of(kernel, job.seed))[: 1 if job.quick else None]
        for number, (what, case, splits, ways) in enumerate(by_layout(kernel, cases, "cpu", job.seed)):
            with sessions[0].of(module):
                tally.run(module, kernel, what, case, ways, splits, "cpu")
            if number == 0 and not job.quick and not kernel.sparse:
                step = kernel.format.row_bytes(kernel.latent, kernel.rope) * (kernel.page_size or 1)
                away = FAR // step  # rows, or pages
                sessions.append(Session(job.arch, before={"kv": away * step}))
                far = [_further(way, away) for way in ways]
                with sessions[1].of(module):
                    tally.run(module, kernel, f"{what}, KV of many GiB", case, far, splits, "cpu")
    except Exception as reason:  # a kernel that cannot run is a failed row, not the end of the table
        tally.failures.append(first_line(reason))
    faults = list(dict.fromkeys(one for session in sessions for one in session.findings))
    if faults:
        tally.failures.append(f"{faults[0]}" + (f", and {len(faults) - 1} more faults" if faults[1:] else ""))
    return tally.result(job, time.perf_counter() - start)


def _further(way: tuple[Any, ...], away: int) -> tuple[Any, ...]:
    """The same call where its KV lies `away` rows, or pages, behind the pointer: ranges or page numbers say so."""
    if len(way) == 4:
        kv, qo_indptr, kv_indptr, visible = way
        return kv, qo_indptr, kv_indptr + away, visible
    kv, qo_indptr, kv_indptr, kv_indices, kv_lens, visible = way
    return kv, qo_indptr, kv_indptr, kv_indices + away, kv_lens, visible
