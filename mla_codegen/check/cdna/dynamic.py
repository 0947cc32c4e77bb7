"""What stage 1 does for 64 KV rows, counted while its compiled code runs.

Two calls that differ in nothing but the number of whole tiles are executed; the difference is what the tiles cost, with
branches as they were taken and LDS addresses as they came, and without what a program does once.
"""

from __future__ import annotations

import importlib
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mla_codegen.catalog.host import cores
from mla_codegen.check.cdna.call import Launch, Session
from mla_codegen.check.workers import Outcome, Workers
from mla_codegen.inspect import amd
from mla_codegen.inspect.listing import Instruction
from mla_codegen.inspect.report import complete
from mla_codegen.plan.resolve import KernelPlan, Plan
from mla_codegen.publish.write import build

ROWS = 64
TILES = (2, 4)  # of a split, in the two calls
TIMEOUT = 900.0  # seconds of one kernel


@dataclass(frozen=True)
class Dynamic:
    """Counts for ROWS KV rows of a program.

    instructions     of one wave, by class (`inspect.report.complete`)
    waits            s_waitcnt of one wave that had something to wait for
    lds_read_bytes, lds_written_bytes    by active lanes, all waves
    lds_cycles       that LDS takes for them by AMD's bank rule; lds_least: without any bank conflict
    kv_bytes         loaded from the KV, all waves
    kv_reads         most times that any byte of the call's KV rows was loaded, by all programs of one head block
    """

    instructions: dict[str, float]
    waits: float
    lds_read_bytes: float
    lds_written_bytes: float
    lds_cycles: float
    lds_least: float
    kv_bytes: float
    kv_reads: float

    def json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class CountJob:
    """A kernel of the package `counted_SPEC` in `folder`, compiled for `arch`."""

    folder: str
    spec: str
    kernel: KernelPlan
    arch: str


def count_kernels(
    wanted: Sequence[tuple[Plan, KernelPlan, str]],
    *,
    processes: int | None = None,
    timeout: float = TIMEOUT,
    progress: Callable[[str, int], None] | None = None,
) -> list[Outcome]:
    """Counts (`Dynamic`) of stage 1 of these kernels, each for an AMD target, in order; or why there are none."""
    with tempfile.TemporaryDirectory(prefix="mla-codegen-counted-") as folder:
        for plan in {plan.name: plan for plan, _, _ in wanted}.values():
            build([plan], Path(folder) / f"counted_{plan.name}")
        jobs = [CountJob(folder, plan.name, kernel, arch) for plan, kernel, arch in wanted]
        outcomes: dict[int, Outcome] = {}
        with Workers(processes or cores(), {"TRITON_INTERPRET": "0", "OMP_NUM_THREADS": "1"}) as workers:
            for number, outcome in workers.run(count, jobs, timeout):
                outcomes[number] = outcome
                if progress:
                    progress(jobs[number].kernel.name, len(jobs))
        return [outcomes[number] for number in range(len(jobs))]


def count(job: CountJob) -> Dynamic:
    """Execute both calls of a kernel and compare."""
    if job.folder not in sys.path:
        sys.path.insert(0, job.folder)
    module = importlib.import_module(f"counted_{job.spec}.{job.spec}.{job.kernel.name}")
    few, many = (_launch(module, job, tiles) for tiles in TILES)
    return difference(few, many, job.kernel)


def _launch(module: Any, job: CountJob, tiles: int) -> Launch:
    """Stage 1 of a call of one request, `tiles` whole tiles a split."""
    import torch

    from mla_codegen.check.reference import TORCH, forms, in_lists, in_pages, make_case

    kernel = job.kernel
    splits = kernel.splits or 2
    case = make_case(
        [tiles * kernel.block_n * splits],
        heads=kernel.heads, latent=kernel.latent, rope=kernel.rope, q_dtype=kernel.q, kv_dtype=kernel.kv, guard=0,
    )  # fmt: skip
    rows: tuple[Any, ...] = (case.kv, case.qo_indptr, case.kv_indptr, None)
    if kernel.topk is not None:
        sparse = in_lists(case, kernel.topk, kernel.page_size or 16, gaps=False)
        rows = (sparse.kv, sparse.indices, sparse.topk_lens, None)
    elif kernel.page_size is not None:
        paged = in_pages(case, kernel.page_size)
        rows = (paged.kv, case.qo_indptr, *paged.lists(forms(kernel.page_size)[0]), None)
    out = torch.empty(1, kernel.heads, kernel.latent, dtype=TORCH[kernel.out])
    args = (case.q, *rows, case.kv_scale, case.sm_scale, out, out[..., 0].float())
    session = Session(job.arch, count=frozenset({"kv"}), traffic=True)
    with session.of(module):
        module.run(*args) if kernel.splits or kernel.balanced else module.run(*args, splits)
    return session.launches[0]


def difference(few: Launch, many: Launch, kernel: KernelPlan) -> Dynamic:
    """What the tiles that `many` has more cost, for ROWS rows of a program."""
    tiles = TILES[1] - TILES[0]
    portion = ROWS / (tiles * kernel.block_n * (kernel.splits or 2) * kernel.head_blocks)
    waves = many.compiled.metadata["num_warps"]
    more = many.counts.executed - few.counts.executed
    kinds: Counter[str] = Counter()
    for one, times in zip(many.counts.instructions, more, strict=True):
        kinds[amd.kind(Instruction(one.line, one.opcode, one.text))] += int(times)
    traffic, before = many.counts.traffic, few.counts.traffic
    assert traffic is not None and before is not None
    reads = many.counts.reads["kv"]
    total = float(reads.sum()) - float(few.counts.reads["kv"].sum())
    return Dynamic(
        {name: times * portion / waves for name, times in complete(kinds).items()},
        (many.counts.waits - few.counts.waits) * portion / waves,
        (traffic.read - before.read) * portion,
        (traffic.written - before.written) * portion,
        (traffic.cycles - before.cycles) * portion,
        (traffic.least - before.least) * portion,
        total * portion,
        float(reads.max()) / kernel.head_blocks,
    )
