"""Each kernel of a spec against float64: on the GPU if it is the spec's, else on the CPU.

There plain Triton runs in Triton's interpreter, and Gluon in the emulator. The files that are run are those that
`build` would write, not a rendering made for the test: what a CPU lacks is exchanged below them.
"""

import importlib
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from mla_codegen.catalog.bounds import BOUND_16_BIT, BOUND_FP8, LSE_BOUND_16_BIT, LSE_BOUND_FP8
from mla_codegen.catalog.releases import installed_triton, release_of
from mla_codegen.plan.families import FAMILIES
from mla_codegen.plan.resolve import KernelPlan, Plan
from mla_codegen.publish.write import build

GLUON_USES = ("descriptors", "scratch")  # modules of generated/runtime that Gluon kernels import


@dataclass(frozen=True)
class Result:
    """One kernel's verdict. `error`: relative L2 of the output; `lse_error`: the largest difference of LSE."""

    spec: str
    kernel: str
    on: str
    error: float
    bound: float
    lse_error: float
    lse_bound: float
    seconds: float
    failure: str

    @property
    def passed(self) -> bool:
        return not self.failure

    def json(self) -> dict[str, Any]:
        return {**asdict(self), "passed": self.passed}


def edge_lengths(tile: int, splits: int) -> list[int]:
    """KV lengths where a kernel may go wrong: none, one, around a tile, around one tile a split, and more than that."""
    full = tile * splits
    return sorted({0, 1, 5, tile - 1, tile, tile + 1, full - 1, full, full + 1, full + tile + 3})


def cases_of(kernel: KernelPlan, seed: int) -> Iterator[tuple[str, Any, int | None]]:
    """(what, case, splits at run time) of the checks of one kernel.

    With many splits there are fewer query rows: each costs a program a split, 10 ms in the interpreter. So there are
    for Gluon kernels that take any number of splits, whose merge has a program for each head and column block.
    """
    import torch

    from mla_codegen.check.reference import make_case

    common: dict[str, Any] = {
        "heads": kernel.heads, "latent": kernel.latent, "rope": kernel.rope, "q_dtype": kernel.q, "kv_dtype": kernel.kv,
    }  # fmt: skip
    tile = kernel.block_n
    splits = kernel.splits or 3
    at_run_time = None if kernel.splits or kernel.balanced else splits
    if splits > 4 or (at_run_time and FAMILIES[kernel.family].GLUON):
        lens = [tile * splits + 1, 0, tile + 1]
        yield "ragged", make_case(lens, q_lens=[1, 1, 2 if splits <= 64 else 1], seed=seed, **common), at_run_time
        if at_run_time:
            few = make_case([2 * tile + 1, 3], q_lens=[2, 1], kv_scale=None, seed=seed, index=torch.int64, **common)
            yield "several query rows, no kv_scale, int64 indptr", few, at_run_time
        return
    yield "ragged lengths", make_case(edge_lengths(tile, splits), seed=seed, **common), at_run_time
    lens, q_lens = [2 * tile + 1, 3, 0], [3, 5, 1]
    several = make_case(lens, q_lens=q_lens, kv_scale=None, seed=seed + 1, index=torch.int64, **common)
    yield "several query rows, no kv_scale, int64 indptr", several, at_run_time


def verify_plans(
    plans: list[Plan], *, device: str = "auto", seed: int = 0, progress: Callable[[Result, int], None] | None = None
) -> list[Result]:
    """Check every kernel of `plans`, in parallel on the CPU, in the order of the plans.

    device   auto: `cuda` for plans that the GPU at hand can run, `cpu` for the others; or one of them
    """
    with tempfile.TemporaryDirectory(prefix="mla-codegen-verify-") as folder:
        out = Path(folder) / "verified"
        build(plans, out)
        jobs = [(plan, kernel) for plan in plans for kernel in plan.kernels]
        on = {plan.name: _device_of(plan, device) for plan in plans}
        results: dict[tuple[str, str], Result] = {}

        def note(result: Result) -> None:
            results[result.spec, result.kernel] = result
            if progress:
                progress(result, len(jobs))

        for plan, kernel in jobs:
            if on[plan.name] == "cuda":
                note(_verify_kernel(folder, plan.name, kernel, "cuda", seed))
        on_cpu = [(plan, kernel) for plan, kernel in jobs if on[plan.name] == "cpu"]
        if on_cpu:
            # Triton decides at import whether it interprets, so the kernels run in processes of their own.
            with ProcessPoolExecutor(os.cpu_count(), mp_context=get_context("spawn"), initializer=_interpret) as pool:
                on_cpu.sort(key=lambda job: -(job[1].splits or 5))  # the longest first
                running = [pool.submit(_verify_kernel, folder, p.name, k, "cpu", seed) for p, k in on_cpu]
                for future in as_completed(running):
                    note(future.result())
        return [results[plan.name, kernel.name] for plan, kernel in jobs]


def _interpret() -> None:
    os.environ["TRITON_INTERPRET"] = "1"
    import torch

    torch.set_num_threads(1)


def _device_of(plan: Plan, device: str) -> str:
    if device != "auto":
        return device
    import torch

    if not torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET") == "1":
        return "cpu"
    from mla_codegen.runtime.builds import target_of

    runs_here = plan.triton is None or plan.release == release_of(installed_triton())
    return "cuda" if runs_here and plan.target.name in ("portable", target_of(torch.device("cuda", 0))) else "cpu"


def _verify_kernel(folder: str, spec: str, kernel: KernelPlan, device: str, seed: int) -> Result:
    import time

    start = time.perf_counter()
    fp8_products = kernel.compute.startswith("fp8")
    bound, lse_bound = (BOUND_FP8, LSE_BOUND_FP8) if fp8_products else (BOUND_16_BIT, LSE_BOUND_16_BIT)
    lse_bound = getattr(kernel.details, "lse_bound", lse_bound)  # the family may know better
    error = lse_error = 0.0
    failure = ""
    try:
        emulated = device == "cpu" and FAMILIES[kernel.family].GLUON
        module = (_emulate if emulated else _load)(folder, spec, kernel)
        for what, case, splits, ways in _by_layout(kernel, cases_of(kernel, seed), device, seed):
            case_error, case_lse, wrong = _run_case(module, kernel, case, ways, splits, device)
            error, lse_error = max(error, case_error), max(lse_error, case_lse)
            if not failure:
                if wrong:
                    failure = f"{what}: {wrong}"
                elif not case_error <= bound:
                    failure = f"{what}: error {case_error:.1e} over {bound:.0e}"
                elif not case_lse <= lse_bound:
                    failure = f"{what}: LSE off by {case_lse:.1e}, allowed {lse_bound:.0e}"
    except Exception as reason:  # a kernel that cannot run is a failed row, not the end of the table
        failure = f"{type(reason).__name__}: {reason}".splitlines()[0]
    on = "GPU" if device == "cuda" else "CPU emulator" if FAMILIES[kernel.family].GLUON else "CPU interpreter"
    return Result(spec, kernel.name, on, error, bound, lse_error, lse_bound, time.perf_counter() - start, failure)


def _load(folder: str, spec: str, kernel: KernelPlan) -> Any:
    if folder not in sys.path:
        sys.path.insert(0, folder)
    package = importlib.import_module(f"verified.{spec}")
    calls = importlib.import_module("verified.runtime.calls")
    calls.Dispatcher([package], "mla-codegen build")  # corrects the interpreter where it is in use
    return calls.Build(package).kernel(kernel.name)


def _emulate(folder: str, spec: str, kernel: KernelPlan) -> Any:
    if folder not in sys.path:
        sys.path.insert(0, folder)
    return emulated(f"{folder}/verified", f"verified.{spec}.{kernel.name}")


def emulated(folder: str, name: str) -> Any:
    """The Gluon kernel file `name` (package.spec.kernel) of the importable package in `folder`, to be run on a CPU."""
    from mla_codegen.check import emulate

    _, spec, kernel = name.split(".")
    return emulate.load(f"{folder}/{spec}/{kernel}.py", name, package=runtime_of(name))


def runtime_of(name: str) -> dict[str, Any]:
    """What the Gluon kernel file `name` (package.spec.kernel) imports from its package, by dotted name.

    These are not emulated. So scratch is NaN, but not forbidden to be read before it is written: merging kernels load
    partials that nobody wrote and drop them.
    """
    package = name.split(".")[0]
    return {f"{package}.runtime.{part}": importlib.import_module(f"{package}.runtime.{part}") for part in GLUON_USES}


def _by_layout(
    kernel: KernelPlan, cases: Iterator[tuple[str, Any, int | None]], device: str, seed: int
) -> Iterator[tuple[str, Any, int | None, list[tuple[Any, ...]]]]:
    """(what, case, splits, ways) of each case; `ways`: arguments that say where the KV of each request lies.

    Paged KV is given in every way; on a CPU, for the time, as a table in the first case and in the others in the last.
    """
    from mla_codegen.check.reference import forms, in_pages

    found = list(cases)
    for number, (what, case, splits) in enumerate(found):
        if kernel.page_size is None:
            on = case.to(device)
            ways: list[tuple[Any, ...]] = [(on.kv, on.kv_indptr)]
        else:
            paged = in_pages(case, kernel.page_size, seed).to(device)
            table, *others = forms(kernel.page_size)
            every = device == "cuda"
            names = [table] * (every or number == 0) + others * (every or number == len(found) - 1)
            ways = [(paged.kv, *paged.lists(name)) for name in names]
        yield what, case, splits, ways


def _run_case(
    module: Any, kernel: KernelPlan, case: Any, ways: list[tuple[Any, ...]], splits: int | None, device: str
) -> tuple[float, float, str]:
    """(relative L2, largest LSE difference, what else is wrong), the worst of `ways`."""
    import torch

    from mla_codegen.check.reference import TORCH, poisoned_scratch, reference, relative_l2

    want, want_lse = reference(case, kernel.latent)
    blind = want_lse == float("-inf")
    case = case.to(device)
    shape = (case.q.shape[0], kernel.heads, kernel.latent)
    error = lse_error = 0.0
    for way in ways:
        out = torch.full(shape, float("nan"), dtype=TORCH[kernel.out], device=device)
        lse = torch.full(shape[:2], float("nan"), dtype=torch.float32, device=device)
        kv, *lists = way
        args = (case.q, kv, case.qo_indptr, *lists, None, case.kv_scale, case.sm_scale, out, lse)
        with poisoned_scratch():
            module.run(*args) if splits is None else module.run(*args, splits)
        out, lse = out.cpu().double(), lse.cpu().double()
        if not bool(torch.isfinite(out).all()):
            return float("nan"), float("nan"), "the output holds NaN or infinity"
        if bool((out[blind] != 0).any()) or not bool((lse[blind] == float("-inf")).all()):
            return float("nan"), float("nan"), "a query row that sees nothing is not 0 with LSE -inf"
        seen = ~blind
        error = max(error, relative_l2(out, want))
        lse_error = max(lse_error, float((lse[seen] - want_lse[seen]).abs().max()) if bool(seen.any()) else 0.0)
    return error, lse_error, ""
