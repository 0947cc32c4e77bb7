"""Decode kernels of other libraries, called as their own library calls them, from the inputs of our bench.

They are loaded from single files of a built wheel (docs/peers.md says which); nothing of them is part of this project.
What a serving engine prepares once a step, or keeps, is made here before the clock runs: pages, page tables, schedules,
scratch, and for a kernel that wants q in fp8, the rounded q.
"""

import itertools
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

from mla_codegen.catalog.bounds import BOUND_16_BIT, BOUND_FP8
from mla_codegen.check.modules import import_file
from mla_codegen.check.reference import Case
from mla_codegen.measure.workload import Workload, make_inputs

PAGE = 64  # KV rows of a page; FlashMLA takes no other
FP8_MAX = 448.0  # of e4m3fn
TRITON_SPLIT_ROWS = 512  # vLLM: a split for so many KV rows of the longest request, at most two a processor

Call = Callable[[], torch.Tensor]


@dataclass(frozen=True)
class Paged:
    """The KV of a case in pages.

    kv       [pages, PAGE, 1, row]; the rest of a request's last page is 0
    table    [batch, most pages of a request] int32, 0 where a request has no more
    lens     [batch] int32; longest: the largest of them, known to the host
    """

    kv: torch.Tensor
    table: torch.Tensor
    lens: torch.Tensor
    longest: int


def paged(case: Case) -> Paged:
    """A request's pages follow each other in memory. If all lengths fill their pages they are the case's own memory."""
    bounds = case.kv_indptr.tolist()
    lens = [end - begin for begin, end in itertools.pairwise(bounds)]
    counts = [-(-length // PAGE) for length in lens]
    row = case.kv.shape[-1]
    if all(length % PAGE == 0 for length in lens):
        kv = case.kv[bounds[0] : bounds[-1]]
    else:
        kv = torch.zeros(sum(counts) * PAGE, row, dtype=case.kv.dtype, device=case.kv.device)
        at = 0
        for begin, length, count in zip(bounds, lens, counts, strict=False):
            kv[at : at + length] = case.kv[begin : begin + length]
            at += count * PAGE
    table = torch.zeros(len(lens), max(counts), dtype=torch.int32)
    first = 0
    for request, count in enumerate(counts):
        table[request, :count] = torch.arange(first, first + count)
        first += count
    device = case.kv.device
    return Paged(
        kv.view(-1, PAGE, 1, row), table.to(device), torch.tensor(lens, dtype=torch.int32, device=device), max(lens)
    )


def by_request(case: Case) -> torch.Tensor:
    """q as [batch, query tokens of a request, heads, row]; every request of the benchmark has as many."""
    return case.q.unflatten(0, (case.qo_indptr.numel() - 1, -1))


def _flash_mla_bf16(_: Any, case: Case, pages: Paged, latent: int) -> Call:
    op = torch.ops._flashmla_C.dense_decode_fwd
    q = by_request(case)
    given = (q, pages.kv, latent, pages.lens, pages.table, case.sm_scale, q.shape[1] > 1)  # causal
    schedule = op(*given, None, None, None)[2:]  # made by the first call of a step, and kept
    return lambda: op(*given, *schedule, None)[0].flatten(0, 1)


def _flash_mla_fp8(_: Any, case: Case, pages: Paged, latent: int) -> Call:
    ops = torch.ops._flashmla_extension_C
    q_scale = (case.q.float().abs().amax() / FP8_MAX).reshape(1)
    q = (by_request(case).float() / q_scale).to(torch.float8_e4m3fn)
    _, q_len, heads, _ = q.shape
    schedule = ops.get_mla_decoding_metadata_dense_fp8(pages.lens, q_len * heads, 1)
    given = (q, pages.kv, latent, pages.lens, pages.table, case.sm_scale, q_len > 1)  # causal
    return lambda: ops.fwd_kvcache_mla_fp8(*given, *schedule, q_scale, case.kv_scale)[0].flatten(0, 1)


def _flash_attention_3(_: Any, case: Case, pages: Paged, latent: int) -> Call:
    ops = torch.ops._vllm_fa3_C
    batch, q_len, heads, row = by_request(case).shape
    causal = q_len > 1
    schedule = ops.get_scheduler_metadata(
        batch, q_len, pages.longest, heads, 1, row - latent, latent, case.q.dtype, pages.lens, case.qo_indptr,
        None, None, None, None,  # cu_seqlens_k, cu_seqlens_k_new, seqused_q, leftpad_k
        PAGE, 0, causal, -1, -1, False,  # page size, new rows, causal, window, softcap
        0, None, 0,  # splits by its own rule, pack_gqa, processors left free
    )  # fmt: skip
    given = (
        case.q[..., latent:], pages.kv[..., latent:], pages.kv[..., :latent],
        None, None, case.q[..., :latent], None,  # k_new, v_new, q_v, out
        case.qo_indptr, None, None, None, pages.lens, q_len, pages.longest, pages.table,
        None, None, None, None, None, None, None, None,  # batch index, left padding, rotary, scales
        case.sm_scale, causal, -1, -1, 0.0, True, schedule, 0, None, 0, None, 1, 0, None,
    )  # fmt: skip
    return lambda: ops.fwd(*given)[0]


def triton_splits(longest: int, processors: int) -> int:
    """The splits that vLLM gives its Triton kernel."""
    wanted = max(1, longest // TRITON_SPLIT_ROWS)
    return min(1 << (wanted - 1).bit_length(), 2 * processors)


def _vllm_triton(module: Any, case: Case, pages: Paged, latent: int) -> Call:
    batch, q_len, heads, _ = by_request(case).shape
    if q_len > 1:
        raise Missing("it decodes one query token a request")
    device = case.q.device
    splits = triton_splits(pages.longest, torch.cuda.get_device_properties(device).multi_processor_count)
    out = torch.full((batch, heads, latent), float("nan"), dtype=case.q.dtype, device=device)
    lse = torch.empty(batch, heads, dtype=case.q.dtype, device=device)
    scratch = torch.empty(batch, heads, splits, latent + 1, dtype=torch.float32, device=device)
    scale = torch.ones(1, device=device) if case.kv_scale is None else case.kv_scale
    given = (case.q, pages.kv, pages.kv[..., :latent], out, lse, pages.table, pages.lens, scratch, splits)

    def call() -> torch.Tensor:
        module.decode_attention_fwd(*given, case.sm_scale, PAGE, k_scale=scale, v_scale=scale, is_mla=True)
        return out

    return call


@dataclass(frozen=True)
class Peer:
    """A kernel to compare with. `files`: where it is, for each KV dtype; `exact_q`: it does not round q to fp8."""

    name: str
    files: Mapping[str, str]
    prepare: Mapping[str, Callable[[Any, Case, Paged, int], Call]]
    rounds_q: tuple[str, ...] = ()

    def bound(self, kv: str) -> float:
        """Errors above it mean that it was called wrongly."""
        return BOUND_FP8 if kv in self.rounds_q else 2 * BOUND_16_BIT


PEERS = (
    Peer(
        "FlashMLA",
        {"bf16": "_flashmla_C.abi3.so", "fp8_e4m3fn": "_flashmla_extension_C.abi3.so"},
        {"bf16": _flash_mla_bf16, "fp8_e4m3fn": _flash_mla_fp8},
        ("fp8_e4m3fn",),
    ),
    Peer("FlashAttention 3", {"bf16": "_vllm_fa3_C.abi3.so"}, {"bf16": _flash_attention_3}),
    Peer(
        "vLLM Triton",
        dict.fromkeys(("bf16", "fp8_e4m3fn"), "triton_decode_attention.py"),
        dict.fromkeys(("bf16", "fp8_e4m3fn"), _vllm_triton),
    ),
)


class Missing(Exception):
    """A peer's file is not there or cannot be loaded."""


_loaded: dict[Path, Any] = {}


def load(folder: Path, file: str) -> Any:
    """Load a library (its operators appear under `torch.ops`) or a Python file (the module). Raises Missing."""
    path = folder.resolve() / file
    if path not in _loaded:
        if not path.is_file():
            raise Missing(f"no {file} in {folder}")
        try:
            _loaded[path] = _module(path) if path.suffix == ".py" else torch.ops.load_library(str(path))
        except (OSError, ImportError) as error:
            raise Missing(f"{file}: {str(error).splitlines()[0]}") from error
    return _loaded[path]


def _module(path: Path) -> ModuleType:
    """A file of vLLM without vLLM: it asks for the platform and for triton, by vLLM's names."""
    import triton
    import triton.language

    if "vllm" not in sys.modules:
        platform = SimpleNamespace(is_rocm=lambda: torch.version.hip is not None)
        stand_ins = {
            "vllm": {},
            "vllm.platforms": {"current_platform": platform},
            "vllm.triton_utils": {"triton": triton, "tl": triton.language},
        }
        for name, contents in stand_ins.items():
            module = ModuleType(name)
            vars(module).update(contents)
            sys.modules.setdefault(name, module)
    return import_file(path, f"peer_{path.stem}")


def prepare(peer: Peer, folder: Path, kv: str, case: Case, pages: Paged, latent: int) -> Call:
    """A call of `peer` for a case, everything but the call itself done. Raises Missing, or what the peer raises."""
    return peer.prepare[kv](load(folder, peer.files[kv]), case, pages, latent)


def compile_once(job: tuple[Peer, Path, Workload]) -> None:
    """In a process of its own: fill Triton's cache for a workload, by a call on requests of one KV row."""
    peer, folder, work = job
    case = make_inputs(work, torch.device("cuda"), 0, lens=[1] * work.batch)
    table = torch.zeros(work.batch, -(-work.kv_len // PAGE), dtype=torch.int32, device="cuda")
    pages = replace(paged(case), table=table, longest=work.kv_len)
    prepare(peer, folder, work.kv, case, pages, work.latent)()
    torch.cuda.synchronize()
