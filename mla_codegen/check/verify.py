"""Each kernel of a spec against float64: on the GPU if it is the spec's, else on the CPU.

There plain Triton runs in Triton's interpreter, and Gluon in the emulator. The files that are run are those that
`build` would write, not a rendering made for the test: what a CPU lacks is exchanged below them.
"""

import importlib
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from mla_codegen.catalog.host import cores
from mla_codegen.catalog.releases import installed_triton, release_of
from mla_codegen.check import block_types
from mla_codegen.check.workers import Workers, first_line
from mla_codegen.plan.families import FAMILIES
from mla_codegen.plan.resolve import KernelPlan, Plan
from mla_codegen.publish.write import build

GLUON_USES = ("descriptors", "scratch")  # modules of generated/runtime that Gluon kernels import
TIMEOUT = 900.0  # seconds of one kernel; the slowest takes half a minute on a free core
NAN = float("nan")


@dataclass(frozen=True)
class Result:
    """One kernel's verdict. `error`: relative L2 of the output; `lse_error`: the largest difference of LSE.

    NaN: none came out of it.
    """

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
        numbers = {name: None if value != value else value for name, value in asdict(self).items()}
        return {**numbers, "passed": self.passed}


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

    if kernel.sparse:
        yield from _sparse_cases_of(kernel, seed)
        return
    common: dict[str, Any] = {
        "heads": kernel.heads, "latent": kernel.latent, "rope": kernel.rope, "q_dtype": kernel.q, "kv_dtype": kernel.kv,
    }  # fmt: skip
    tile = kernel.block_n
    splits = kernel.splits or 3
    at_run_time = None if kernel.splits or kernel.balanced else splits
    if splits > 4 or (at_run_time and FAMILIES[kernel.family].gluon):
        lens = [tile * splits + 1, 0, tile + 1]
        yield "ragged", make_case(lens, q_lens=[1, 1, 2 if splits <= 64 else 1], seed=seed, **common), at_run_time
        if at_run_time:
            few = make_case([2 * tile + 1, 3], q_lens=[2, 1], kv_scale=None, seed=seed, index=torch.int64, **common)
            yield "several query rows, no kv_scale, int64 indptr", few, at_run_time
        return
    yield "ragged lengths", make_case(edge_lengths(tile, splits), seed=seed, **common), at_run_time
    lens, q_lens = [2 * tile + 1, 3, 0], [3, 5, 1]
    if kernel.packed:  # none, full blocks, one more than that, and columns that see no row
        lens, q_lens = [*lens, tile + 2], [kernel.q_len, kernel.q_len + 1, 0, 2 * kernel.q_len + 1]
    several = make_case(lens, q_lens=q_lens, kv_scale=None, seed=seed + 1, index=torch.int64, **common)
    yield "several query rows, no kv_scale, int64 indptr", several, at_run_time


def _sparse_cases_of(kernel: KernelPlan, seed: int) -> Iterator[tuple[str, Any, int | None]]:
    """The same of sparse KV, whose requests are query rows. The second case has an attention sink."""
    import torch

    from mla_codegen.check.reference import make_case

    common: dict[str, Any] = {
        "heads": kernel.heads, "latent": kernel.latent, "rope": kernel.rope, "q_dtype": kernel.q, "kv_dtype": kernel.kv,
    }  # fmt: skip
    splits, topk = kernel.splits or 3, kernel.topk or 0
    lens = edge_lengths(kernel.block_n, splits) if splits <= 4 else [kernel.block_n * splits + 1, 0, kernel.block_n + 1]
    lens = sorted({min(length, topk) for length in lens})
    yield "lists", make_case(lens, seed=seed, **common), _at_run_time(kernel, splits)
    few = make_case([0, min(topk, kernel.block_n + 1)], kv_scale=None, seed=seed + 1, **common)
    few.sink = torch.linspace(-2.0, 3.0, kernel.heads)
    yield "an attention sink, no kv_scale", few, _at_run_time(kernel, splits)


def _at_run_time(kernel: KernelPlan, splits: int) -> int | None:
    """The splits that a call gives the kernel, if it takes any."""
    return splits if kernel.any_splits else None


@dataclass(frozen=True)
class Job:
    """One kernel, of the spec's `package_of` in `folder`. device: cuda or cpu; quick: its first case alone."""

    folder: str
    spec: str
    kernel: KernelPlan
    device: str
    seed: int
    quick: bool

    @property
    def on(self) -> str:
        return "GPU" if self.device == "cuda" else "CPU emulator" if self.emulated else "CPU interpreter"

    @property
    def emulated(self) -> bool:
        return self.device == "cpu" and FAMILIES[self.kernel.family].gluon

    def result(self, error: float, lse_error: float, seconds: float, failure: str) -> Result:
        bounds = self.kernel.error_bound, lse_error, self.kernel.lse_bound
        return Result(self.spec, self.kernel.name, self.on, error, *bounds, seconds, failure)


def verify_plans(
    plans: list[Plan],
    *,
    device: str = "auto",
    seed: int = 0,
    shapes: Sequence[tuple[int, ...]] = (),
    kv: str | None = None,
    quick: bool = False,
    processes: int | None = None,
    timeout: float = TIMEOUT,
    progress: Callable[[Result, int], None] | None = None,
) -> list[Result]:
    """Check every kernel of `plans`, in the order of the plans. One that crashes or hangs is a failed row.

    device      auto: `cuda` for plans that the GPU at hand can run, `cpu` for the others; or one of them
    shapes, kv  only the kernels that calls of these (batch, kv_len, perhaps q_len) and this KV dtype get
    quick       one case a kernel
    processes   kernels at a time; by default the cores, and 1 on a GPU
    timeout     seconds of one kernel
    """
    with tempfile.TemporaryDirectory(prefix="mla-codegen-verify-") as folder:
        jobs = []
        for plan in plans:
            build([plan], Path(folder) / package_of(plan.name))
            on = _device_of(plan, device)
            jobs += [Job(folder, plan.name, kernel, on, seed, quick) for kernel in plan.serving(shapes, kv)]
        results: dict[int, Result] = {}
        for where in ("cuda", "cpu"):
            mine = [index for index, job in enumerate(jobs) if job.device == where]
            mine.sort(key=lambda index: -(jobs[index].kernel.splits or 5))  # the longest first
            with pool(where, processes) as workers:
                ordered = [jobs[index] for index in mine]
                found = results_of(workers, verify_kernel, ordered, timeout, progress, len(jobs))
            results |= zip(mine, found, strict=True)
        return [results[index] for index in range(len(jobs))]


def package_of(spec: str) -> str:
    """The package that a spec is built as: one each, for two may serve the same calls."""
    return f"verified_{spec}"


def results_of(
    workers: Workers,
    work: Callable[[Any], Result],
    jobs: Sequence[Job],
    timeout: float,
    progress: Callable[[Result, int], None] | None,
    total: int,
) -> list[Result]:
    """What `work` says of each job, in their order; of one that crashed or hung, a failed row. progress: of `total`."""
    results: dict[int, Result] = {}
    for number, outcome in workers.run(work, jobs, timeout):
        results[number] = outcome.value or jobs[number].result(NAN, NAN, NAN, outcome.failure)
        if progress:
            progress(results[number], total)
    return [results[number] for number in range(len(jobs))]


def pool(device: str, processes: int | None) -> Workers:
    """Processes that run kernels on `device`: Triton decides at import whether it interprets."""
    if device == "cuda":
        return Workers(processes or 1, {"TRITON_INTERPRET": "0"})
    return Workers(processes or cores(), {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"})


def _device_of(plan: Plan, device: str) -> str:
    if device != "auto":
        return device
    runs_here = plan.triton is None or plan.release == release_of(installed_triton())
    return "cuda" if runs_here and gpu_at_hand() and plan.target.name in ("portable", gpu_at_hand()) else "cpu"


def gpu_at_hand() -> str | None:
    """The architecture of the GPU that kernels would run on; None if there is none, or kernels are interpreted."""
    import torch

    if not torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET") == "1":
        return None
    from mla_codegen.runtime.builds import target_of

    return target_of(torch.device("cuda", 0))


def verify_kernel(job: Job) -> Result:
    """Run one kernel's cases. Raises if it spoilt the device for others."""
    start = time.perf_counter()
    kernel = job.kernel
    tally = Tally()
    if job.device == "cpu":
        block_types.remember()
    try:
        module = (_emulate if job.emulated else _load)(job)
        cases = list(cases_of(kernel, job.seed))[: 1 if job.quick else None]
        for what, case, splits, ways in by_layout(kernel, cases, job.device, job.seed):
            tally.run(module, kernel, what, case, ways, splits, job.device)
    except Exception as reason:  # a kernel that cannot run is a failed row, not the end of the table
        if job.device == "cuda":
            settle()
        tally.failures.append(first_line(reason))
    return tally.result(job, time.perf_counter() - start)


@dataclass
class Tally:
    """What the cases of a kernel came to."""

    errors: list[float] = field(default_factory=list)
    lse_errors: list[float] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    def run(
        self,
        module: Any,
        kernel: KernelPlan,
        what: str,
        case: Any,
        ways: list[tuple[Any, ...]],
        splits: int | None,
        device: str,
    ) -> None:
        """One case, held to the kernel's bounds. `ways`: see `by_layout`."""
        error, lse_error, wrong = _run_case(module, kernel, case, ways, splits, device)
        self.errors.append(error)
        self.lse_errors.append(lse_error)
        if wrong:
            self.failures.append(f"{what}: {wrong}")
        elif not error <= kernel.error_bound:
            self.failures.append(f"{what}: error {error:.1e} over {kernel.error_bound:.0e}")
        elif not lse_error <= kernel.lse_bound:
            self.failures.append(f"{what}: LSE off by {lse_error:.1e}, allowed {kernel.lse_bound:.0e}")

    def result(self, job: Job, seconds: float) -> Result:
        failure = self.failures[0] if self.failures else ""
        return job.result(worst(self.errors), worst(self.lse_errors), seconds, failure)


def settle() -> None:
    """Raises if what failed has spoilt the GPU for its whole process, which is then replaced."""
    import torch

    torch.cuda.synchronize()


def worst(values: list[float]) -> float:
    """The largest; NaN if any is, or if there is none."""
    return max(values, key=lambda value: (value != value, value), default=NAN)


def importable(job: Job) -> str:
    """The job's package, from now on to be imported."""
    if job.folder not in sys.path:
        sys.path.insert(0, job.folder)
    return package_of(job.spec)


def _load(job: Job) -> Any:
    name = importable(job)
    package = importlib.import_module(f"{name}.{job.spec}")
    calls = importlib.import_module(f"{name}.runtime.calls")
    calls.Dispatcher([package], "mla-codegen build")  # corrects the interpreter where it is in use
    return calls.Build(package).kernel(job.kernel.name)


def _emulate(job: Job) -> Any:
    name = importable(job)
    return emulated(f"{job.folder}/{name}", f"{name}.{job.spec}.{job.kernel.name}")


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


def by_layout(
    kernel: KernelPlan, cases: Sequence[tuple[str, Any, int | None]], device: str, seed: int
) -> Iterator[tuple[str, Any, int | None, list[tuple[Any, ...]]]]:
    """(what, case, splits, ways) of each case; `ways`: arguments that say where the KV rows of each query row lie.

    Paged KV is given in every way; on a CPU, for the time, as a table in the first case and in the others in the last.
    """
    from mla_codegen.check.reference import forms, in_lists, in_pages

    for number, (what, case, splits) in enumerate(cases):
        ways: list[tuple[Any, ...]]
        if kernel.topk is not None:
            sparse = in_lists(case.to(device), kernel.topk, kernel.page_size or 16, seed)
            sink = sparse.ragged.sink
            ways = [(sparse.kv, sparse.indices, sparse.topk_lens, sink)]
            if device == "cuda" or number > 0:
                ways.append((sparse.kv, sparse.unbounded, None, sink))
        elif kernel.page_size is None:
            on = case.to(device)
            ways = [(on.kv, on.qo_indptr, on.kv_indptr, None)]
        else:
            paged = in_pages(case, kernel.page_size, seed).to(device)
            table, *others = forms(kernel.page_size)
            every = device == "cuda"
            names = [table] * (every or number == 0) + others * (every or number == len(cases) - 1)
            ways = [(paged.kv, paged.ragged.qo_indptr, *paged.lists(name), None) for name in names]
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
        args = (case.q, *way, case.kv_scale, case.sm_scale, out, lse)
        with poisoned_scratch():
            module.run(*args) if splits is None else module.run(*args, splits)
        out, lse = out.cpu().double(), lse.cpu().double()
        if not bool(torch.isfinite(out).all()):
            return NAN, NAN, "the output holds NaN or infinity"
        if bool((out[blind] != 0).any()) or not bool((lse[blind] == float("-inf")).all()):
            return NAN, NAN, "a query row that sees nothing is not 0 with LSE -inf"
        seen = ~blind
        error = max(error, relative_l2(out, want))
        lse_error = max(lse_error, float((lse[seen] - want_lse[seen]).abs().max()) if bool(seen.any()) else 0.0)
    return error, lse_error, ""
