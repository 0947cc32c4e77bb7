# Copied by mla-codegen from mla_codegen/runtime/context_parallel.py. Do not edit: `mla-codegen build` writes it anew.
"""Context parallel decode: the KV rows of each request lie on several ranks of a `torch.distributed` group.

Every rank calls with the same queries and its own KV rows. Its decode writes (out, LSE) straight into its part of one
buffer, a single all-gather fills in the others' parts, and the kernel of `merge_states` merges them; with `PeerMemory`
one kernel does both. All ranks get the same bits.
Nothing waits for the device, and a step can be captured in a CUDA graph.
"""

import functools
from typing import Any, Literal

import torch
import torch.distributed as dist
import triton
import triton.language as tl

from . import validate
from .builds import INDEX
from .calls import Dispatcher
from .launch import Launch, on_device_of
from .merge import KERNEL as MERGE
from .peer_memory import PeerMemory

ALIGN = 16  # bytes; a rank's part of the buffer is a multiple of them
_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)  # the newer name, and the older one


@triton.jit(do_not_specialize=["batch", "rank"])
def count_visible(  # type: ignore[no-untyped-def]
    qo_indptr, kv_len, kv_begin, visible, batch, rank, RANKS: tl.constexpr, RUN: tl.constexpr
):
    """One program per query row: how many of this rank's rows lie among the global ones that it sees.

    RUN: rows that lie together in round-robin placement; 0: contiguous placement.
    """
    row = tl.program_id(0)
    low, high = 0, batch
    while high - low > 1:  # the last request that begins at or before the row
        middle = (low + high) // 2
        begins_later = tl.load(qo_indptr + middle) > row
        low = tl.where(begins_later, low, middle)
        high = tl.where(begins_later, middle, high)
    length = tl.load(kv_len + low)
    seen = length - (tl.load(qo_indptr + low + 1) - 1 - row)
    if RUN == 0:
        here = seen - (rank * tl.cdiv(length, RANKS) if kv_begin is None else tl.load(kv_begin + low))
    else:
        seen = tl.maximum(seen, 0)
        rounds = seen // (RANKS * RUN)
        rest = seen - rounds * (RANKS * RUN)
        here = rounds * RUN + tl.minimum(tl.maximum(rest - rank * RUN, 0), RUN)
    tl.store(visible + row, tl.maximum(here, 0).to(tl.int32))


class ContextParallel:
    """Decode over the KV rows of all ranks of a group.

    dispatcher   `DISPATCHER` of the generated package
    group        a `torch.distributed` group; None is the default one. NCCL on GPUs, gloo on CPUs
    placement    "contiguous": rank r of n holds rows r * c .. (r + 1) * c of a request of `kv_len` rows,
                 c = ceil(kv_len / n), or what the calls' `kv_begin` says
                 "round_robin": row i lies on rank (i // run) % n
    run          neighbouring rows that round-robin placement keeps together, e.g. the rows of a page
    peers        memory that the ranks share, for steps of few query rows; None: an all-gather, then a merge
    """

    def __init__(
        self,
        dispatcher: Dispatcher,
        group: dist.ProcessGroup | None = None,
        placement: Literal["contiguous", "round_robin"] = "contiguous",
        run: int = 1,
        peers: PeerMemory | None = None,
    ):
        run = validate.host_int("run", run)
        if placement not in ("contiguous", "round_robin"):
            raise ValueError(f"placement is {placement!r}; it must be 'contiguous' or 'round_robin'")
        if run < 1 or (placement == "contiguous" and run != 1):
            raise ValueError(f"run is {run}; it must be at least 1, and 1 in contiguous placement")
        self.dispatcher = dispatcher
        self.group = group
        self.peers = peers
        self.ranks = dist.get_world_size(group)
        self.rank = dist.get_rank(group)
        if self.rank < 0:
            raise ValueError("this process is not a rank of the group")
        self.run = 0 if placement == "contiguous" else run
        kernel: Any = count_visible
        self._count_visible = Launch(kernel) if isinstance(kernel, triton.JITFunction) else kernel

    def rows(self, kv_len: int, rank: int | None = None) -> torch.Tensor:
        """The rows [rows of the rank] int64 of a request of `kv_len` rows that lie on a rank (None: on this one)."""
        rank = self.rank if rank is None else rank
        if self.run:
            every = torch.arange(kv_len, dtype=torch.int64, device="cpu")
            return every[every // self.run % self.ranks == rank]
        chunk = -(-kv_len // self.ranks)
        begin, end = min(rank * chunk, kv_len), min((rank + 1) * chunk, kv_len)
        return torch.arange(begin, end, dtype=torch.int64, device="cpu")

    def visible(
        self, qo_indptr: torch.Tensor, kv_len: torch.Tensor, total_q: int, kv_begin: torch.Tensor | None = None
    ) -> torch.Tensor:
        """How many of this rank's KV rows each query row sees: [total_q] int32, the same for every layer of a step.

        Query row t of a request's q_len sees the first kv_len - q_len + t + 1 rows of the whole request.
        """
        try:
            return self._visible(qo_indptr, kv_len, total_q, kv_begin)
        except Exception:
            validate.tensors(qo_indptr=qo_indptr, kv_len=kv_len, kv_begin_=kv_begin)
            raise

    def _visible(
        self, qo_indptr: torch.Tensor, kv_len: torch.Tensor, total_q: int, kv_begin: torch.Tensor | None
    ) -> torch.Tensor:
        if type(total_q) is not int:
            total_q = validate.host_int("total_q", total_q)
        batch = qo_indptr.shape[0] - 1
        sizes = {"qo_indptr": (qo_indptr, batch + 1), "kv_len": (kv_len, batch), "kv_begin": (kv_begin, batch)}
        for name, (tensor, size) in sizes.items():
            if tensor is not None and (
                tensor.shape != (size,)
                or tensor.dtype not in INDEX
                or tensor.device != qo_indptr.device
                or not tensor.is_contiguous()
            ):
                wanted = f"contiguous int32 or int64 [{size}] on {qo_indptr.device}"
                raise ValueError(f"{name} is {validate.describe(tensor)}; it must be {wanted}")
        if batch < 0 or total_q < 0:
            raise ValueError(f"qo_indptr is [{batch + 1}], total_q {total_q}; they must be [batch + 1], and 0 or more")
        if kv_begin is not None and self.run:
            raise ValueError("kv_begin belongs to contiguous placement; this one is round-robin")
        visible = torch.empty(total_q, dtype=torch.int32, device=qo_indptr.device)
        if total_q and batch:
            with on_device_of(visible):
                self._count_visible[(total_q,)](
                    qo_indptr, kv_len, kv_begin, visible, batch, self.rank, self.ranks, self.run, num_warps=1
                )
        return visible

    def decode(
        self,
        q: torch.Tensor,
        kv: torch.Tensor,
        qo_indptr: torch.Tensor,
        kv_indptr: torch.Tensor,
        kv_len: torch.Tensor | None = None,
        *,
        sm_scale: float,
        kv_scale: torch.Tensor | None = None,
        kv_begin: torch.Tensor | None = None,
        kv_visible: torch.Tensor | None = None,
        max_kv_len: int | None = None,
        max_q_len: int | None = None,
        out: torch.Tensor | None = None,
        return_lse: bool = False,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """One decode step; every rank of the group must call, with the same q, qo_indptr, kv_len and sm_scale.

        q, qo_indptr, sm_scale, kv_scale, out   as in `mla_decode`
        kv           [rows of this rank, latent + rope]: of each request those that lie here, in order; may be none
        kv_indptr    [batch + 1] int32 or int64 into `kv`
        kv_len       [batch] int32 or int64 on the device: KV rows of each whole request
        kv_begin     [batch] likewise, with contiguous placement: the place of this rank's first row in the request, if
                     the rows are not split evenly. All rows of a request must lie somewhere, and on one rank
        kv_visible   what `visible` gave for these lengths, in place of kv_len: one kernel less for each layer
        max_kv_len   KV rows on this rank of the longest request, if known; it only helps the choice of kernel
        max_q_len    query rows of the request that has most, if known, likewise

        Returns what one call over all rows would: out [total_q, heads, latent], with `return_lse` also the natural-log
        LSE [total_q, heads] fp32, the same bits on every rank. The errors are those of `mla_decode`.
        """
        try:
            return self._decode(
                q, kv, qo_indptr, kv_indptr, kv_len, sm_scale, kv_scale, kv_begin, kv_visible, max_kv_len, max_q_len,
                out, return_lse,
            )  # fmt: skip
        except Exception:
            validate.arguments(
                q, kv, qo_indptr, sm_scale, max_kv_len, max_q_len, kv_indptr=kv_indptr, kv_len=kv_len,
                kv_scale=kv_scale, kv_begin=kv_begin, kv_visible=kv_visible, out=out,
            )  # fmt: skip
            raise

    def _decode(
        self,
        q: torch.Tensor,
        kv: torch.Tensor,
        qo_indptr: torch.Tensor,
        kv_indptr: torch.Tensor,
        kv_len: torch.Tensor | None,
        sm_scale: float,
        kv_scale: torch.Tensor | None,
        kv_begin: torch.Tensor | None,
        kv_visible: torch.Tensor | None,
        max_kv_len: int | None,
        max_q_len: int | None,
        out: torch.Tensor | None,
        return_lse: bool,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        if kv_visible is None:
            if kv_len is None:
                raise ValueError("give kv_len, the KV rows of each whole request, or kv_visible")
            kv_visible = self.visible(qo_indptr, kv_len, q.shape[0], kv_begin)
        mla_decode = functools.partial(
            self.dispatcher.mla_decode, q, kv, qo_indptr, kv_indptr, sm_scale=sm_scale, kv_scale=kv_scale,
            kv_visible=kv_visible, max_kv_len=max_kv_len, max_q_len=max_q_len,
        )  # fmt: skip
        if self.ranks == 1 or q.shape[0] == 0:
            return mla_decode(out=out, return_lse=return_lse)
        shape, dtype = self.dispatcher.result(q)
        rows, heads, _ = shape
        if out is None:
            out = torch.empty(shape, dtype=dtype, device=q.device)
        else:
            validate.fits("out", out, dtype, shape, q.device, to_write=True)
        lse = torch.empty((rows, heads), dtype=torch.float32, device=q.device)

        if self.peers is not None:
            partial, partial_lse = torch.empty_like(out), torch.empty_like(lse)
            mla_decode(out=partial, lse=partial_lse)
            self.peers.merge(partial, partial_lse, out, lse)
            return (out, lse) if return_lse else out
        parts = self.parts(shape, dtype, q.device)
        mine = parts[self.rank]
        lse_at, end = _ends(shape, dtype)
        mla_decode(
            out=mine[:lse_at].view(dtype).view(shape), lse=mine[lse_at:end].view(torch.float32).view(rows, heads)
        )
        self.exchange(parts)
        self._combine(parts, out, lse)
        return (out, lse) if return_lse else out

    def parts(self, shape: tuple[int, int, int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """The buffer [ranks, bytes] uint8 for an output of this form: of each rank its out, then its LSE."""
        return torch.empty((self.ranks, _part_bytes(shape, dtype)), dtype=torch.uint8, device=device)

    def exchange(self, parts: torch.Tensor) -> None:
        """Fill in the other ranks' parts of the buffer; this rank's own is sent from where it lies."""
        _all_gather(parts.view(-1), parts[self.rank], group=self.group)

    def combine(self, parts: torch.Tensor, out: torch.Tensor, lse: torch.Tensor) -> None:
        """Merge all parts of the buffer into out [rows, heads, latent] and lse [rows, heads] fp32.

        TypeError for what is no tensor; ValueError for those that do not fit the buffer, as `parts` makes it.
        """
        validate.tensors(parts=parts, out=out, lse=lse)
        if out.dim() != 3:
            raise ValueError(f"out has shape {tuple(out.shape)}; it must be [rows, heads, latent]")
        rows, heads, latent = out.shape
        size = _part_bytes((rows, heads, latent), out.dtype)
        validate.fits("parts", parts, torch.uint8, (self.ranks, size), out.device, to_write=False)
        validate.fits("out", out, out.dtype, (rows, heads, latent), out.device, to_write=True)
        validate.fits("lse", lse, torch.float32, (rows, heads), out.device, to_write=True)
        self._combine(parts, out, lse)

    def _combine(self, parts: torch.Tensor, out: torch.Tensor, lse: torch.Tensor) -> None:
        rows, heads, latent = out.shape
        lse_at, _ = _ends((rows, heads, latent), out.dtype)
        flat, size = parts.view(-1), parts.shape[1]
        outs, lses = flat.view(out.dtype), flat[lse_at:].view(torch.float32)
        stack = (self.ranks, size // out.dtype.itemsize, heads * latent, latent, size // lse.dtype.itemsize, heads, 1)
        MERGE((outs,), (lses,), (stack,), out, lse)


def _part_bytes(shape: tuple[int, int, int], dtype: torch.dtype) -> int:
    """Of a rank's part of the buffer."""
    return -(-_ends(shape, dtype)[1] // ALIGN) * ALIGN


def _ends(shape: tuple[int, int, int], dtype: torch.dtype) -> tuple[int, int]:
    """Where the output ends in a rank's part, and the LSE behind it, in bytes."""
    rows, heads, latent = shape
    out = rows * heads * latent * dtype.itemsize
    return out, out + rows * heads * 4
