"""What a bench or a tuner runs: one shape in one KV dtype, its inputs, and the float64 truth of some requests."""

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from mla_codegen.check.reference import TORCH, Case, in_lists, in_pages, poisoned_scratch, reference, relative_l2
from mla_codegen.plan.resolve import Plan
from mla_codegen.runtime.formats import KV_FORMATS
from mla_codegen.runtime.records import pack
from mla_codegen.spec.datamodel import spell

FP8_SCALE = 0.02  # kv_scale of fp8 KV: numbers of about 1 are stored as about 50
SAMPLED = 4  # requests that are held to float64
LIST_PAGE = 64  # rows of a page of the pools that lists name rows of
CHUNK_ROWS = 1 << 18  # KV rows that are drawn at a time: fp32 needs four times the room of fp8


@dataclass(frozen=True)
class Workload:
    """`batch` requests of `q_len` query rows and `kv_len` KV rows each; dimensions and dtypes as in a spec."""

    heads: int
    latent: int
    rope: int
    q: str
    out: str
    kv: str
    batch: int
    kv_len: int
    q_len: int = 1

    @property
    def query_rows(self) -> int:
        return self.batch * self.q_len

    @property
    def row(self) -> int:
        return self.latent + self.rope

    @property
    def shape(self) -> str:
        return spell(self.batch, self.kv_len, self.q_len)

    @property
    def kv_bytes(self) -> int:
        """Bytes of KV, each read once: what decode cannot do without."""
        return self.batch * self.kv_len * KV_FORMATS[self.kv].row_bytes(self.latent, self.rope)

    @property
    def flops(self) -> int:
        """Of both products: a multiplication and an addition for each number of a row as key, and as value."""
        return 2 * self.heads * (self.row + self.latent) * self.query_rows * self.kv_len


def workload_of(plan: Plan, kv: str, batch: int, kv_len: int, q_len: int = 1) -> Workload:
    """The workload of one shape with the model and dtypes of `plan`."""
    model, dtypes = plan.spec.model, plan.spec.dtypes
    return Workload(
        model.num_heads, model.kv_lora_rank, model.qk_rope_head_dim, dtypes.q, dtypes.out, kv, batch, kv_len,
        q_len,
    )  # fmt: skip


def make_inputs(workload: Workload, where: torch.device, seed: int, lens: Sequence[int] | None = None) -> Case:
    """Random inputs, drawn on the device. `lens`: KV rows of each request, `kv_len` for all if left out.

    q and KV are normal, so that scores have a spread of about 1 and every KV row has weight.
    """
    lens = [workload.kv_len] * workload.batch if lens is None else list(lens)
    generator = torch.Generator(where).manual_seed(seed)
    q = torch.randn(len(lens) * workload.q_len, workload.heads, workload.row, device=where, generator=generator)
    form = KV_FORMATS[workload.kv]
    dtype, fp8 = form.element.dtype, form.fp8
    kv = torch.empty(sum(lens), form.width(workload.latent, workload.rope), dtype=dtype, device=where)
    for rows in kv.split(CHUNK_ROWS):
        numbers = torch.randn(len(rows), workload.row, device=where, generator=generator)
        if form.record:
            numbers = pack(workload.kv, numbers, workload.rope).flatten(1)
        elif fp8:
            limit = torch.finfo(dtype).max
            numbers = (numbers / FP8_SCALE).clamp(-limit, limit)
        rows.copy_(numbers)
    scale = torch.tensor([FP8_SCALE], dtype=torch.float32, device=where) if fp8 else None
    qo_indptr = torch.arange(len(lens) + 1, dtype=torch.int32, device=where) * workload.q_len
    kv_indptr = torch.tensor([0, *lens], device=where).cumsum(0).to(torch.int32)
    records = workload.kv if form.record else ""
    return Case(q.to(TORCH[workload.q]), kv, qo_indptr, kv_indptr, workload.row**-0.5, scale, records)


def call_data(workload: Workload, case: Case) -> tuple[Any, ...]:
    """The same inputs in the form that `custom_kernel` takes."""
    form = (case.kv, case.kv_scale) if case.kv_scale is not None else case.kv
    config = {
        "batch_size": workload.batch, "num_heads": workload.heads, "num_kv_heads": 1, "qk_head_dim": workload.row,
        "kv_lora_rank": workload.latent, "qk_rope_head_dim": workload.rope, "v_head_dim": workload.latent,
        "q_seq_len": workload.q_len, "kv_seq_len": workload.kv_len, "sm_scale": case.sm_scale,
    }  # fmt: skip
    return case.q, {KV_FORMATS[workload.kv].form: form}, case.qo_indptr, case.kv_indptr, config


def kv_arguments(case: Case, build: Any) -> dict[str, torch.Tensor]:
    """The KV of a case as `mla_decode` of a build takes it: ragged, in pages of a table, or in a pool by lists."""
    if build.topk is not None:
        sparse = in_lists(case, build.topk, build.page_size or LIST_PAGE)
        return {"kv": sparse.kv, "indices": sparse.indices, "topk_lens": sparse.topk_lens}
    if build.page_size is None:
        return {"kv": case.kv, "kv_indptr": case.kv_indptr}
    paged = in_pages(case, build.page_size)
    return {"kv": paged.kv, "block_table": paged.block_table, "kv_lens": paged.kv_lens}


class Truth:
    """float64 attention of a few requests of a case, the first and the last among them."""

    def __init__(self, case: Case, latent: int, seed: int = 0):
        batch = case.qo_indptr.numel() - 1
        others = random.Random(seed).sample(range(batch), min(batch, SAMPLED))
        self.requests = list(dict.fromkeys([0, batch - 1, *others]))[:SAMPLED]
        ends = case.qo_indptr.tolist()
        self._queries = [slice(ends[request], ends[request + 1]) for request in self.requests]
        bounds = case.kv_indptr.tolist()
        self._rows = [
            reference(self._alone(case, queries, bounds[r], bounds[r + 1]), latent)[0]
            for r, queries in zip(self.requests, self._queries, strict=True)
        ]

    @staticmethod
    def _alone(case: Case, queries: slice, begin: int, end: int) -> Case:
        counts = (queries.stop - queries.start, end - begin)
        qo_indptr, kv_indptr = (torch.tensor([0, n], dtype=torch.int32) for n in counts)
        rows = (case.q[queries], case.kv[begin:end])
        return Case(*rows, qo_indptr, kv_indptr, case.sm_scale, case.kv_scale, case.records)

    def error(self, out: Any) -> float:
        """The worst relative L2 error of the sampled requests; NaN if anything of `out` is not finite."""
        if isinstance(out, tuple | list):  # (out, LSE)
            out = out[0]
        if not bool(torch.isfinite(out).all()):
            return float("nan")
        pairs = zip(self._queries, self._rows, strict=True)
        return max(relative_l2(out[queries].reshape(want.shape), want) for queries, want in pairs)


@contextmanager
def poisoned(workload: Workload, where: torch.device) -> Iterator[None]:
    """Within, what a call allocates holds NaN: a number left unwritten shows.

    `torch.empty` is replaced; for outputs made in other ways, the allocator is given blocks of NaN to hand out again.
    """
    shape = (workload.query_rows, workload.heads, workload.latent)
    blocks = [torch.full(shape, float("nan"), dtype=TORCH[workload.out], device=where) for _ in range(4)]
    del blocks
    with poisoned_scratch():
        yield
