"""The truth that kernels are held to: float64 softmax attention, and makers of inputs that provoke faults."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

from mla_codegen.runtime.formats import ELEMENTS, KV_FORMATS
from mla_codegen.runtime.records import pack, unpack

TORCH = {element.name: element.dtype for element in ELEMENTS.values()}


@dataclass
class Case:
    """Inputs of one call. Shapes and dtypes as in `mla_decode`; `poisoned` KV rows lie outside every request."""

    q: torch.Tensor
    kv: torch.Tensor
    qo_indptr: torch.Tensor
    kv_indptr: torch.Tensor
    sm_scale: float
    kv_scale: torch.Tensor | None
    records: str = ""  # the KV type whose records `kv` has, [rows, bytes]; those in blocks are pages of one row
    sink: torch.Tensor | None = None  # [heads] fp32

    def to(self, device: str | torch.device) -> "Case":
        """The same on another device."""
        scale, sink = (None if one is None else one.to(device) for one in (self.kv_scale, self.sink))
        return Case(
            self.q.to(device), self.kv.to(device), self.qo_indptr.to(device), self.kv_indptr.to(device),
            self.sm_scale, scale, self.records, sink,
        )  # fmt: skip

    def numbers(self, begin: int, end: int, latent: int) -> torch.Tensor:
        """KV rows in float64, unscaled: [rows, latent + rope]."""
        rows = self.kv[begin:end]
        if self.records:
            return unpack(self.records, rows, self.q.shape[-1] - latent)
        return rows.reshape(-1, self.q.shape[-1]).double()


def make_case(
    lens: list[int],
    *,
    heads: int = 16,
    latent: int = 512,
    rope: int = 64,
    q_lens: list[int] | int = 1,
    q_dtype: str = "bf16",
    kv_dtype: str = "bf16",
    kv_scale: float | None = 0.5,
    guard: int = 3,
    seed: int = 0,
    index: torch.dtype = torch.int32,
) -> Case:
    """Random inputs for requests of `lens` KV rows and `q_lens` query rows.

    `guard` rows of NaN lie before the first request and after the last; between requests nothing does, since indptr
    arrays leave no room there: the neighbour's rows are what a request must not see. fp8 KV holds -0 (or 0, if it
    has no other) in a few places. `kv_scale` applies to fp8 KV only.
    """
    generator = torch.Generator().manual_seed(seed)
    if isinstance(q_lens, int):
        q_lens = [q_lens] * len(lens)
    row = latent + rope
    total_q, total_kv = sum(q_lens), sum(lens)
    q = torch.randn(total_q, heads, row, generator=generator).to(TORCH[q_dtype])
    values = torch.randn(total_kv + 2 * guard, row, generator=generator)
    values = values.clamp(-4, 4) * (40.0 if KV_FORMATS[kv_dtype].fp8 else 1.0)
    form = KV_FORMATS[kv_dtype]
    if form.record:  # groups of very different sizes, also of one row
        wide = torch.exp2(torch.randint(-8, 2, (len(values), latent // 64, 1), generator=generator).float())
        values[:, :latent] = (values[:, :latent].view(len(values), -1, 64) * wide).flatten(1)
        kv = pack(kv_dtype, values, rope).flatten(1)
    else:
        kv = values.to(form.element.dtype)
    if form.fp8:
        zeros = torch.rand(kv.shape, generator=generator) < 0.02
        kv.view(torch.uint8)[zeros] = torch.tensor(-0.0).to(kv.dtype).view(torch.uint8)
        scale = None if kv_scale is None else torch.tensor([kv_scale / 20], dtype=torch.float32)
    else:
        scale = None
    kv[:guard] = nothing(kv.dtype)
    kv[total_kv + guard :] = nothing(kv.dtype)
    qo_indptr = torch.tensor([0, *q_lens]).cumsum(0).to(index)
    kv_indptr = (torch.tensor([0, *lens]).cumsum(0) + guard).to(index)
    effective = float(scale) * 40 if scale is not None else 40.0 if KV_FORMATS[kv_dtype].fp8 else 1.0
    sm_scale = 1.0 / (row**0.5) / effective if scale is None else 1.0 / (row**0.5)
    return Case(q, kv, qo_indptr, kv_indptr, sm_scale, scale, kv_dtype if form.record else "")


def nothing(dtype: torch.dtype) -> float:
    """What fills rows that nobody may read: NaN, in records the byte of it."""
    return float("nan") if dtype.is_floating_point else 0xFF


@dataclass
class PagedCase:
    """The inputs of a `Case`, its KV in pages: rows of no request are NaN, page numbers of no request garbage.

    kv [pages, page_size, row]; table [batch, more than width] int32, of which `block_table` is a view, `width` columns;
    kv_indptr [batch + 1] and kv_indices are the same pages as a list; kv_lens [batch] int32. `ragged` has the truth:
    `reference(case.ragged, ...)`.
    """

    ragged: Case
    kv: torch.Tensor
    table: torch.Tensor
    width: int
    kv_indptr: torch.Tensor
    kv_indices: torch.Tensor
    kv_lens: torch.Tensor

    def to(self, device: str | torch.device) -> "PagedCase":
        """The same on another device."""
        tensors = (self.kv, self.table, self.kv_indptr, self.kv_indices, self.kv_lens)
        kv, table, kv_indptr, kv_indices, kv_lens = (tensor.to(device) for tensor in tensors)
        return PagedCase(self.ragged.to(device), kv, table, self.width, kv_indptr, kv_indices, kv_lens)

    @property
    def block_table(self) -> torch.Tensor:
        """[batch, most pages], its row stride larger than that."""
        return self.table[:, : self.width]

    def lists(self, form: str) -> tuple[torch.Tensor | None, torch.Tensor, torch.Tensor | None]:
        """(kv_indptr, kv_indices, kv_lens) as kernels take them: form `table`, `list`, or `rows` (pages of one row)."""
        if form == "table":
            return None, self.block_table, self.kv_lens
        return self.kv_indptr, self.kv_indices, None if form == "rows" else self.kv_lens


def forms(page_size: int) -> tuple[str, ...]:
    """How a call may give its pages; see `PagedCase.lists`."""
    return ("table", "list", "rows") if page_size == 1 else ("table", "list")


def in_pages(case: Case, page_size: int, seed: int = 0) -> PagedCase:
    """`case` with its KV rows dealt to pages of a pool in random order, some pages unused. On the case's device."""
    device = case.kv.device
    ends = case.kv_indptr.long()
    lens = ends.diff()
    counts = (lens + page_size - 1) // page_size
    begins = counts.cumsum(0) - counts  # of each request's pages among all
    requests = torch.arange(len(lens), device=device)
    used, most = int(counts.sum()), max([1, *counts.tolist()])
    order = torch.randperm(used + 3, generator=torch.Generator().manual_seed(seed))[:used].to(device)

    row = torch.arange(int(ends[0]), int(ends[-1]), device=device)
    owner = requests.repeat_interleave(lens)
    offset = row - ends[owner]  # within the request
    page = order[begins[owner] + offset // page_size]
    kv = torch.empty((used + 3, page_size, case.kv.shape[-1]), dtype=case.kv.dtype, device=device)
    kv.fill_(nothing(kv.dtype))
    pool, rows = (x.view(torch.uint8).view(-1, x.shape[-1] * x.element_size()) for x in (kv, case.kv))
    pool[page * page_size + offset % page_size] = rows[row]

    garbage = torch.tensor([2147480000, -1], dtype=torch.int32, device=device)
    table = garbage.repeat(len(lens), most + 1)
    owner = requests.repeat_interleave(counts)
    table[owner, torch.arange(used, device=device) - begins[owner]] = order.int()
    indptr = torch.cat([counts.new_zeros(1), counts.cumsum(0)]).to(case.kv_indptr.dtype)
    return PagedCase(case, kv, table, most + 1, indptr, torch.cat([order.int(), garbage]), lens.int())


@dataclass
class SparseCase:
    """A `Case` whose requests are query rows, each with a list of its KV rows: places in a pool, in random order.

    kv [pages, page_size, row], rows of nobody NaN; indices [total_q, topk] int32, -1 in places, garbage behind the last
    entry that counts; topk_lens [total_q] int32. Half of the lists have their last entry at the end of the list.
    """

    ragged: Case
    kv: torch.Tensor
    indices: torch.Tensor
    topk_lens: torch.Tensor

    @property
    def unbounded(self) -> torch.Tensor:
        """The lists with -1 in place of garbage, for calls without `topk_lens`."""
        places = torch.arange(self.indices.shape[1], device=self.indices.device)
        return self.indices.masked_fill(places >= self.topk_lens[:, None], -1)


def in_lists(case: Case, topk: int, page_size: int = 1, seed: int = 0, gaps: bool = True) -> SparseCase:
    """`case`, of one query row a request and at most `topk` KV rows, with its rows dealt to a pool. On its device.

    gaps   lists have entries -1 among the others
    """
    device, generator = case.kv.device, torch.Generator().manual_seed(seed)
    ends = case.kv_indptr.tolist()
    lens = [end - begin for begin, end in pairwise(ends)]
    used, row = ends[-1] - ends[0], case.kv.shape[-1]
    count = -(-(used + 3) // page_size)
    order = torch.randperm(count * page_size, generator=generator)[:used]
    kv = torch.empty((count, page_size, row), dtype=case.kv.dtype, device=device).fill_(nothing(case.kv.dtype))
    mine = case.kv[ends[0] : ends[-1]].reshape(used, row)
    if case.records and KV_FORMATS[case.records].blocks:
        kv = in_blocks(kv, mine, order.to(device), KV_FORMATS[case.records].scale_bytes(case.q.shape[-1]))
    else:
        _raw(kv.view(-1, row))[order.to(device)] = _raw(mine)
    indices = torch.full((len(lens), topk), 2147480000, dtype=torch.int32)
    topk_lens = torch.zeros(len(lens), dtype=torch.int32)
    for number, (begin, length) in enumerate(zip(ends, lens, strict=False)):
        room = topk if number % 2 else min(topk, length + length // 3 + 2)
        room = room if gaps else length
        places = torch.randperm(room, generator=generator)[:length].sort().values
        topk_lens[number] = room
        indices[number, :room] = -1
        indices[number, places] = order[begin - ends[0] : begin - ends[0] + length].int()
    return SparseCase(case, kv, indices.to(device), topk_lens.to(device))


def in_blocks(pool: torch.Tensor, rows: torch.Tensor, places: torch.Tensor, scale_bytes: int) -> torch.Tensor:
    """`pool` [pages, page_size, bytes] with records [rows, bytes], pages of one row each, at `places` of it."""
    size, width = pool.shape[1:]
    pages, page, place = pool.view(len(pool), -1), places // size, places % size
    first = width - scale_bytes
    columns = torch.arange(width, device=pool.device)
    first_part, second_part = place[:, None] * first + columns, place[:, None] * scale_bytes + columns - first
    at = torch.where(columns < first, first_part, size * first + second_part)
    pages[page[:, None], at] = rows
    return pool


def _raw(rows: torch.Tensor) -> torch.Tensor:
    return rows.view(torch.uint8)


def reference(case: Case, latent: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(out [total_q, heads, latent], LSE [total_q, heads]) in float64, on the case's device.

    Query row t of a request's q_len rows sees its first kv_len - q_len + t + 1 KV rows (the causal mask of decode). No
    visible row: out 0, LSE -inf. A query row and head one of whose scores is not finite, for what q or a visible KV row
    holds: all NaN.
    """
    q = case.q.double()
    scale = 1.0 if case.kv_scale is None else float(case.kv_scale)
    out = torch.zeros(q.shape[0], q.shape[1], latent, dtype=torch.float64, device=q.device)
    lse = torch.full(q.shape[:2], float("-inf"), dtype=torch.float64, device=q.device)
    qo, kvp = case.qo_indptr.tolist(), case.kv_indptr.tolist()
    for request in range(len(qo) - 1):
        q_begin, q_end, kv_begin, kv_end = qo[request], qo[request + 1], kvp[request], kvp[request + 1]
        if q_end == q_begin or kv_end == kv_begin:
            continue
        keys = case.numbers(kv_begin, kv_end, latent) * scale
        scores = torch.einsum("qhd,kd->qhk", q[q_begin:q_end], keys) * case.sm_scale
        visible = kv_end - kv_begin - (q_end - 1 - torch.arange(q_begin, q_end, device=q.device))
        hidden = torch.arange(kv_end - kv_begin, device=q.device)[None, :] >= visible[:, None]
        scores.masked_fill_(hidden[:, None, :], 0.0)
        bad = ~scores.isfinite().all(-1, keepdim=True)
        scores.masked_fill_(hidden[:, None, :], float("-inf"))
        part = torch.logsumexp(scores, -1)
        weights = torch.exp(scores - part[..., None]).nan_to_num(0.0)  # no visible row: -inf less -inf
        values = keys[:, :latent].nan_to_num(0.0, 0.0, 0.0)  # those of a hidden row do not count
        out[q_begin:q_end] = torch.einsum("qhk,kd->qhd", weights, values).masked_fill_(bad, float("nan"))
        lse[q_begin:q_end] = part.masked_fill_(bad[..., 0], float("nan"))
    if case.sink is not None:
        out /= 1.0 + torch.exp(case.sink.double()[None, :] - lse)[..., None]
    return out, lse


def relative_l2(got: torch.Tensor, want: torch.Tensor) -> float:
    """||got - want|| / ||want||; NaN if anything of `got` is, 0 if both are all zero."""
    difference = float(torch.linalg.vector_norm(got.double() - want))
    size = float(torch.linalg.vector_norm(want))
    return difference / size if size else difference


@contextmanager
def poisoned_scratch() -> Iterator[None]:
    """Within, `torch.empty` gives NaN (0x7f in bytes): what a kernel leaves unwritten, or reads unwritten, shows."""
    empty = torch.empty

    def poisoned(*args: Any, **kwargs: Any) -> torch.Tensor:
        tensor = empty(*args, **kwargs)
        if tensor.is_floating_point() and tensor.element_size() > 1:
            return tensor.fill_(float("nan"))
        return tensor.fill_(0x7F)

    torch.empty = poisoned
    try:
        yield
    finally:
        torch.empty = empty
