"""What one rank of the context parallel tests does: a process of its own, over gloo, kernels in Triton's interpreter.

Every rank makes the whole case from its seed, keeps its own rows, decodes, and compares with the call over all rows and
with float64. What is wrong comes back as text, so that one start of the processes serves all cases.
"""

import importlib
import sys
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from mla_codegen.check.reference import Case, make_case, poisoned_scratch, reference, relative_l2

HEADS, LATENT, ROPE = 2, 64, 32
MOST_ROWS = 7
BOUND = 3e-3  # relative L2 of the output against float64
LENS = [70, 0, 1, 35]


@dataclass(frozen=True)
class Setting:
    """One case: lengths, query rows, element type, and how the rows are spread."""

    name: str
    lens: list[int]
    q_lens: list[int] | int = 1
    placement: str = "contiguous"
    run: int = 1
    kv: str = "bf16"
    shares: list[int] | None = None  # contiguous, uneven: in 1/8 of a request, by rank
    index: torch.dtype = torch.int32
    peers: bool = False  # exchange through shared memory


def settings(ranks: int) -> Iterator[Setting]:
    """All cases for so many ranks."""
    for placement, run in (("contiguous", 1), ("round_robin", 1), ("round_robin", 16)):
        name = f"{placement} {run}"
        yield Setting(f"{name}, one query row", LENS, 1, placement, run)
        yield Setting(f"{name}, fp8", [66], 2, placement, run, kv="fp8_e4m3fn")
        yield Setting(f"{name}, ragged query rows", LENS, [3, 1, 2, 1], placement, run, index=torch.int64)
        yield Setting(f"{name}, fewer rows than ranks", [1], 1, placement, run)
        yield Setting(f"{name}, no rows at all", [0], 1, placement, run)
    yield Setting("ranks without rows", LENS, [1, 1, 1, 3], shares=[0, 8, *[0] * (ranks - 2)])
    yield Setting("shared memory, ragged query rows", LENS, [3, 1, 2, 1], "round_robin", peers=True)
    yield Setting("shared memory, other places", [66], 2, "contiguous", kv="fp8_e4m3fn", peers=True)
    yield Setting("shared memory, a rank without rows", [1, 0], 1, peers=True)
    yield Setting("query rows older than a rank's rows", [5], 5)  # the first query rows see rank 0 alone


def run_rank(rank: int, ranks: int, folder: str, package: str, store: str, failures: Any) -> None:
    """Entry point of the process. Puts (rank, list of what is wrong) into `failures`."""
    torch.set_num_threads(1)
    sys.path.insert(0, folder)
    wrong: list[str] = []
    try:
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
        dispatcher = importlib.import_module(f"{package}.dispatch").DISPATCHER
        ContextParallel = importlib.import_module(f"{package}.runtime.context_parallel").ContextParallel
        PeerMemory = importlib.import_module(f"{package}.runtime.peer_memory").PeerMemory
        form = (MOST_ROWS, HEADS, LATENT, torch.bfloat16)
        shared = share(f"{store}.peers", PeerMemory.size(*form, ranks)[0], rank, ranks)
        peers = PeerMemory(*form, torch.device("cpu"), addresses=shared)
        for setting in settings(ranks):
            parallel = ContextParallel(
                dispatcher, placement=setting.placement, run=setting.run, peers=peers if setting.peers else None
            )
            wrong += [f"{setting.name}: {what}" for what in check(parallel, setting)]
        dist.destroy_process_group()
    except Exception:
        wrong.append(traceback.format_exc())
    failures.put((rank, wrong))


def share(path: str, size: int, rank: int, ranks: int) -> tuple[list[int], list[torch.Tensor]]:
    """Every rank's buffer as a file that this process maps: (addresses, the mappings)."""
    with open(f"{path}{rank}", "wb") as file:
        file.truncate(size)
    dist.barrier()
    mapped = [torch.from_file(f"{path}{r}", shared=True, size=size, dtype=torch.uint8) for r in range(ranks)]
    return [buffer.data_ptr() for buffer in mapped], mapped


def check(parallel: Any, setting: Setting) -> Iterator[str]:
    """What is wrong with one case on this rank."""
    case = make_case(
        setting.lens, q_lens=setting.q_lens, heads=HEADS, latent=LATENT, rope=ROPE, kv_dtype=setting.kv,
        index=setting.index,
    )  # fmt: skip
    kv, kv_indptr, kv_begin = local_part(parallel, case, setting)
    kv_len = case.kv_indptr.diff()
    given = {"sm_scale": case.sm_scale, "kv_scale": case.kv_scale, "return_lse": True}
    with poisoned_scratch():
        out, lse = parallel.decode(case.q, kv, case.qo_indptr, kv_indptr, kv_len, kv_begin=kv_begin, **given)
        visible = parallel.visible(case.qo_indptr, kv_len, case.q.shape[0], kv_begin)
        again, _ = parallel.decode(case.q, kv, case.qo_indptr, kv_indptr, kv_visible=visible, **given)
    want, want_lse = reference(case, LATENT)
    blind = want_lse == float("-inf")
    if not torch.isfinite(out).all():
        yield "the output is not finite"
    if (out[blind] != 0).any() or not (lse[blind] == float("-inf")).all():
        yield "rows that see nothing are not 0 with LSE -inf"
    if not torch.equal(out, again):
        yield "kv_visible made beforehand gives other bits"
    error = relative_l2(out, want)
    if not error <= BOUND:
        yield f"relative L2 {error:.1e} to float64"
    if not torch.allclose(lse[~blind].double(), want_lse[~blind], rtol=1e-5, atol=1e-4):
        yield "LSE differs from float64"
    if parallel.rank == 0:
        alone, alone_lse = parallel.dispatcher.mla_decode(case.q, case.kv, case.qo_indptr, case.kv_indptr, **given)
        if not relative_l2(out, alone.double()) <= BOUND:
            yield f"relative L2 {relative_l2(out, alone.double()):.1e} to the call over all rows"
        if not torch.allclose(lse, alone_lse, rtol=1e-5, atol=1e-4):
            yield "LSE differs from the call over all rows"
    everyone = [torch.empty_like(out) for _ in range(parallel.ranks)]
    dist.all_gather(everyone, out)
    if not all(torch.equal(out, other) for other in everyone):
        yield "ranks differ in their bits"


def local_part(parallel: Any, case: Case, setting: Setting) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """(kv, kv_indptr, kv_begin) of this rank; rows of NaN lie around its own."""
    begins, pieces, lens = [], [torch.full_like(case.kv[:1], float("nan"))], []
    for first, length in zip(case.kv_indptr.tolist(), setting.lens, strict=False):
        rows = parallel.rows(length)
        if setting.shares is not None:
            edges = [length * sum(setting.shares[:r]) // 8 for r in range(parallel.ranks + 1)]
            rows = torch.arange(edges[parallel.rank], edges[parallel.rank + 1])
            begins.append(edges[parallel.rank])
        pieces.append(case.kv[first + rows])
        lens.append(len(rows))
    pieces.append(pieces[0])
    kv_indptr = (torch.tensor([0, *lens]).cumsum(0) + 1).to(setting.index)
    kv_begin = torch.tensor(begins, dtype=setting.index) if setting.shares is not None else None
    return torch.cat(pieces), kv_indptr, kv_begin
