# Copied by mla-codegen from mla_codegen/runtime/peer_memory.py. Do not edit: `mla-codegen build` writes it anew.
"""Partial results exchanged and merged by one kernel, through memory that all ranks of a host can address.

A collective and a merge cost more than the few kilobytes that they carry. Here each program writes its (query row,
head) into every rank's buffer, sets a flag there, waits for the flags of the same program on the other ranks, and
merges. A program's steps are counted on the device, and results alternate between two slots, so that a CUDA graph may
be replayed and no rank can overwrite what another still reads: to be two steps ahead of it, a rank must have seen its
flag of the step between. Ranks must make the same calls in the same order, and calls on one PeerMemory must not overlap
in time.
"""

import torch
import torch.distributed as dist
import triton
import triton.language as tl

from . import validate
from .builds import full_device
from .launch import Launch, on_device_of
from .merge import weigh

SLOTS = tl.constexpr(2)


@triton.jit(do_not_specialize=["programs", "rank", "lse_at", "flags_at"])
def exchange_and_merge(  # type: ignore[no-untyped-def]
    partial, partial_lse, out, lse, buffers, steps, programs, rank, lse_at, flags_at,
    LATENT: tl.constexpr, RANKS: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """One program per (query row, head): out = sum over ranks of partial * exp(lse_rank - lse).

    buffers [RANKS] int64 holds the addresses, on this rank, of every rank's buffer, multiples of 16: in it lie rows
    [SLOTS, RANKS, programs, LATENT], at byte `lse_at` their LSE [SLOTS, RANKS, programs] fp32, at `flags_at` flags
    [RANKS, programs] int32. `programs` is that of the largest step. `steps` [programs] int32 is this rank's alone.
    DEPENDENT: launched while the kernel before it still runs.
    """
    at = tl.program_id(0).to(tl.int64)
    latent = tl.arange(0, LATENT)
    kind = tl.pointer_type(partial.dtype.element_ty)
    if DEPENDENT:
        tl.extra.cuda.gdc_wait()  # for this step's partial results, and for the step before, which it waited for
    step = tl.load(steps + at) + 1
    slot = (step % SLOTS).to(tl.int64) * RANKS * programs
    row = tl.load(partial + at * LATENT + latent)
    row_lse = tl.load(partial_lse + at)
    mine = rank.to(tl.int64) * programs + at
    for ahead in range(RANKS):  # the next rank first: not all at one
        there = tl.load(buffers + (rank + ahead) % RANKS)
        tl.store(tl.multiple_of(there.to(kind), 16) + (slot + mine) * LATENT + latent, row)
        tl.store((there + lse_at).to(tl.pointer_type(tl.float32)) + slot + mine, row_lse)
    tl.debug_barrier()  # all threads' stores come before the flags, and their loads of the step before its change
    tl.store(steps + at, step)
    for ahead in range(RANKS):
        there = tl.load(buffers + (rank + ahead) % RANKS)
        tl.atomic_xchg((there + flags_at).to(tl.pointer_type(tl.int32)) + mine, step, sem="release", scope="sys")
    here = tl.load(buffers + rank)
    flags = (here + flags_at).to(tl.pointer_type(tl.int32)) + at
    for other in range(RANKS):
        while tl.atomic_add(flags + other * programs, 0, sem="acquire", scope="sys") - step < 0:
            pass  # once it is there it may be a step ahead
    tl.debug_barrier()
    part = slot + at + tl.arange(0, 1)
    lses = (here + lse_at).to(tl.pointer_type(tl.float32)) + part
    rows = tl.multiple_of(here.to(kind), 16) + part[:, None] * LATENT + latent[None, :]
    m = tl.full([1], float("-inf"), tl.float32)
    for other in tl.static_range(RANKS):
        m = tl.maximum(m, tl.load(lses + other * programs, cache_modifier=".cg"))
    m = tl.where(m == float("-inf"), 0.0, m)
    total = tl.zeros([1], tl.float32)
    acc = tl.zeros([1, LATENT], tl.float32)
    for other in tl.static_range(RANKS):
        rank_lse = tl.load(lses + other * programs, cache_modifier=".cg")
        rank_row = tl.load(rows + other * programs.to(tl.int64) * LATENT, cache_modifier=".cg")
        total, acc = weigh(rank_lse, rank_row, m, total, acc, False)
    one = at + tl.arange(0, 1)
    tl.store(out + one[:, None] * LATENT + latent[None, :], acc / tl.where(total == 0.0, 1.0, total)[:, None])
    tl.store(lse + one, m + tl.log(total))


def _launches_dependents(device: torch.device) -> bool:
    """NVIDIA's hardware does from compute capability 9.0 on."""
    nvidia = device.type == "cuda" and torch.version.hip is None
    return nvidia and torch.cuda.get_device_capability(device) >= (9, 0)


class PeerMemory:
    """A buffer on every rank of a group, for steps of up to `max_rows` query rows. Making it is a collective call.

    max_rows, heads, latent, dtype   of the largest output [max_rows, heads, latent]
    group        a `torch.distributed` group whose GPUs can address each other's memory (NVLink, one host)
    addresses    the buffers' addresses [ranks] on this rank and what keeps them alive, where they come from elsewhere
    """

    def __init__(
        self,
        max_rows: int,
        heads: int,
        latent: int,
        dtype: torch.dtype,
        device: torch.device | str,
        group: dist.ProcessGroup | None = None,
        addresses: tuple[list[int], object] | None = None,
    ):
        device = full_device(device)
        self.group = group
        self.rank, self.ranks = dist.get_rank(group), dist.get_world_size(group)
        self.form = (heads, latent, dtype)
        self.programs = max_rows * heads
        _, self.lse_at, self.flags_at = self.size(max_rows, heads, latent, dtype, self.ranks)
        if addresses is None:
            addresses = self._share(self.size(max_rows, heads, latent, dtype, self.ranks)[0], device)
        found, self._memory = addresses
        self.buffers = torch.tensor(found, dtype=torch.int64, device=device)
        self.steps = torch.zeros(self.programs, dtype=torch.int32, device=device)
        self.dependent = _launches_dependents(device)  # its latency passes while the decode ends
        kernel = exchange_and_merge
        self._kernel = Launch(kernel) if isinstance(kernel, triton.JITFunction) else kernel

    @staticmethod
    def size(max_rows: int, heads: int, latent: int, dtype: torch.dtype, ranks: int) -> tuple[int, int, int]:
        """(bytes of a rank's buffer, where the LSE begin, where the flags begin). The buffer must begin as zeros."""
        programs = max_rows * heads * ranks
        lse_at = 2 * programs * latent * dtype.itemsize
        flags_at = lse_at + 2 * programs * 4
        return flags_at + programs * 4, lse_at, flags_at

    def _share(self, size: int, device: torch.device) -> tuple[list[int], object]:
        from torch.distributed import _symmetric_memory

        with torch.cuda.device(device):
            memory = _symmetric_memory.empty(size, dtype=torch.uint8, device=device)
            memory.zero_()
            torch.cuda.synchronize(device)
            group = self.group if self.group is not None else dist.distributed_c10d._get_default_group()
            handle = _symmetric_memory.rendezvous(memory, group=group)
            addresses = list(handle.buffer_ptrs)
            if addresses[self.rank] != memory.data_ptr():
                raise RuntimeError("what torch shared does not begin at its tensor: use the all-gather instead")
            dist.barrier(self.group)  # every buffer is zeroed and mapped before anyone writes
        return addresses, (memory, handle)

    def merge(self, partial: torch.Tensor, partial_lse: torch.Tensor, out: torch.Tensor, lse: torch.Tensor) -> None:
        """Merge all ranks' partial [rows, heads, latent] and LSE [rows, heads] into out and lse."""
        try:
            self._merge(partial, partial_lse, out, lse)
        except Exception:
            validate.tensors(partial=partial, partial_lse=partial_lse, out=out, lse=lse)
            raise

    def _merge(self, partial: torch.Tensor, partial_lse: torch.Tensor, out: torch.Tensor, lse: torch.Tensor) -> None:
        rows, heads, latent = partial.shape
        if (heads, latent, partial.dtype) != self.form or rows * heads > self.programs:
            raise ValueError(
                f"the output is {partial.dtype} {tuple(partial.shape)}; this memory was made for {self.form[2]} "
                f"[{self.programs // self.form[0]}, {self.form[0]}, {self.form[1]}] at most"
            )
        device, lse_shape = self.buffers.device, (rows, heads)
        for tensor, like, name in ((partial, partial, "partial"), (out, partial, "out")):
            if (
                tensor.shape != like.shape
                or tensor.dtype is not like.dtype
                or tensor.device != device
                or not tensor.is_contiguous()
            ):
                validate.fits(name, tensor, like.dtype, tuple(like.shape), device, to_write=tensor is out)
        for tensor, name in ((partial_lse, "partial_lse"), (lse, "lse")):
            if (
                tensor.shape != lse_shape
                or tensor.dtype is not torch.float32
                or tensor.device != device
                or not tensor.is_contiguous()
            ):
                validate.fits(name, tensor, torch.float32, lse_shape, device, to_write=tensor is lse)
        with on_device_of(partial):
            self._kernel[(rows * heads,)](
                partial, partial_lse, out, lse, self.buffers, self.steps, self.programs, self.rank, self.lse_at,
                self.flags_at, latent, self.ranks, self.dependent,
                num_warps=4, **({"launch_pdl": True} if self.dependent else {}),
            )  # fmt: skip
