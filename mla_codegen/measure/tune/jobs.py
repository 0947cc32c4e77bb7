"""What the processes do that touch the GPU: compile a candidate and hold it to float64, then time those that are right.

They call candidates through their build's dispatcher, with a call that is given to the candidate's kernel.
"""

from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import torch

from mla_codegen.check.reference import TORCH, Case, make_case, reference, relative_l2
from mla_codegen.check.verify import edge_lengths
from mla_codegen.check.workers import first_line
from mla_codegen.measure.implementations import dispatch
from mla_codegen.measure.timing import Gpu, alternate
from mla_codegen.measure.tune.store import Measured
from mla_codegen.measure.workload import Truth, Workload, kv_arguments, make_inputs, poisoned

CHECKED_ROWS = 40_000  # KV rows of a check, about: the truth of more takes longer than compiling


@dataclass(frozen=True)
class Built:
    """A candidate's build: a package in a folder, and what its check needs to know."""

    folder: str
    package: str
    tile: int
    splits: int
    bound: float
    lse_bound: float


@dataclass(frozen=True)
class Check:
    """Compile a candidate for `workload`, and try it on ragged requests."""

    built: Built
    workload: Workload
    seed: int


@dataclass(frozen=True)
class Race:
    """Time candidates, interleaved."""

    builts: tuple[Built, ...]
    workload: Workload
    seed: int
    rounds: int


def _call(
    built: Built,
    workload: Workload,
    case: Case,
    kv: dict[str, torch.Tensor],
    out: torch.Tensor,
    return_lse: bool = False,
) -> Any:
    return dispatch(built.folder, built.package).mla_decode(
        q=case.q, qo_indptr=case.qo_indptr, sm_scale=case.sm_scale, kv_scale=case.kv_scale,
        max_kv_len=workload.kv_len, max_q_len=workload.q_len, out=out, return_lse=return_lse, **kv,
    )  # fmt: skip


def _build(built: Built) -> Any:
    (build,) = dispatch(built.folder, built.package).DISPATCHER.builds
    return build


def _poison(workload: Workload, case: Case) -> torch.Tensor:
    """An output full of NaN."""
    shape = (case.q.shape[0], workload.heads, workload.latent)
    return torch.full(shape, float("nan"), dtype=TORCH[workload.out], device=case.q.device)


def check(job: Check, where: str = "cuda") -> str:
    """Why the candidate is dropped, or nothing. Raises if it spoils the device for others."""
    try:
        return _check(job, where)
    except Exception as reason:  # does not compile, or asks for more than there is: this process can go on
        if where != "cpu":
            torch.cuda.synchronize()  # raises if the context is lost
        return first_line(reason)


def _check(job: Check, where: str) -> str:
    built, workload = job.built, job.workload
    most = _build(built).topk
    lens = ragged(workload.batch, built.tile, built.splits)
    case = make_case(
        [min(length, most or length) for length in lens], heads=workload.heads, latent=workload.latent,
        rope=workload.rope, q_lens=[max(1, workload.q_len - request % 3) for request in range(workload.batch)],
        q_dtype=workload.q, kv_dtype=workload.kv, seed=job.seed,
    ).to(where)  # fmt: skip
    out = _poison(workload, case)
    with poisoned(workload, case.q.device):
        _, lse = _call(built, workload, case, kv_arguments(case, _build(built)), out, return_lse=True)
    want, want_lse = reference(case, workload.latent)
    if not bool(torch.isfinite(out).all()):
        return "wrong: NaN or infinity in the output"
    if not relative_l2(out, want) <= built.bound:
        return f"wrong: error over {built.bound:.0e}"
    blind = want_lse == float("-inf")
    off = (lse.double() - want_lse)[~blind].abs()
    if bool((lse[blind] != float("-inf")).any()) or not bool((off <= built.lse_bound).all()):
        return f"wrong: LSE off by more than {built.lse_bound:.0e}"
    return ""


def ragged(batch: int, tile: int, splits: int) -> list[int]:
    """KV lengths of `batch` requests: where a kernel may go wrong, the longest first, as many as have room."""
    edges = edge_lengths(tile, splits)[::-1]
    lens: list[int] = []
    for request in range(batch):
        length = edges[request % len(edges)]
        lens.append(length if sum(lens) + length <= CHECKED_ROWS or not lens else length % (tile + 2))
    return lens


def race(job: Race, device: Any = None) -> list[Measured]:
    """What became of each candidate. Raises if one of them spoils the device for the others."""
    device = device or _gpu()
    case, truth = _inputs(job.workload, device.where, job.seed)
    results: dict[int, Measured] = {}
    replays = {}
    kv = kv_arguments(case, _build(job.builts[0]))  # candidates differ in settings alone
    for index, built in enumerate(job.builts):
        try:
            out = _poison(job.workload, case)
            replay, _ = device.capture(partial(_call, built, job.workload, case, kv, out))
            out.fill_(float("nan"))
            replay()
            error = truth.error(out)
            if error <= built.bound:
                results[index] = Measured(error=error)
                replays[str(index)] = replay
            else:
                results[index] = Measured(error=error, failure=f"wrong: error over {built.bound:.0e}")
        except Exception as reason:
            device.finish()  # raises too if the context is lost
            results[index] = Measured(failure=first_line(reason))
    for name, sample in alternate(device, replays, job.rounds).items():
        measured = Measured(sample.median, sample.low, sample.high, results[int(name)].error)
        results[int(name)] = measured
    return [results[index] for index in range(len(job.builts))]


@lru_cache(maxsize=1)
def _gpu() -> Gpu:
    return Gpu()


@lru_cache(maxsize=1)
def _inputs(workload: Workload, where: torch.device, seed: int) -> tuple[Case, Truth]:
    """Kept from batch to batch: gigabytes of KV take longer to draw than to read."""
    torch.cuda.empty_cache()
    case = make_inputs(workload, where, seed)
    return case, Truth(case, workload.latent, seed)
