"""Sparse calls of records: ours, compiled ahead in processes of their own, and FlashMLA's."""

from collections.abc import Callable
from typing import Any

import torch

from mla_codegen.measure.implementations import dispatch

LATENT, ROW, RECORD, PAGE = 512, 576, 656, 64
Call = Callable[[], Any]


def compile_once(job: tuple[str, str, tuple[int, int, int]]) -> None:
    """Call ours once: (folder, package, (query tokens, heads, entries))."""
    folder, package, (tokens, heads, topk) = job
    q = torch.zeros(tokens, heads, ROW, dtype=torch.bfloat16, device="cuda")
    pool = torch.zeros(1, RECORD, dtype=torch.uint8, device="cuda")
    indices = torch.zeros(tokens, topk, dtype=torch.int32, device="cuda")
    dispatch(folder, package).mla_decode(q, pool, indices=indices, sm_scale=1.0)
    torch.cuda.synchronize()


def flash_mla(q: torch.Tensor, pool: torch.Tensor, indices: torch.Tensor, scale: float) -> Call:
    """FlashMLA's call, q padded to heads that it serves."""
    tokens, heads, _ = q.shape
    padded = q.new_zeros(tokens, 1, 64 if heads <= 64 else 128, ROW)
    padded[:, 0, :heads] = q
    pages, listed = pool.view(-1, PAGE, 1, pool.shape[-1]), indices.view(tokens, 1, -1)
    partition: list[Any] = [None, None]

    def call() -> torch.Tensor:
        out, _, *partition[:] = torch.ops._flashmla_C.sparse_decode_fwd(
            padded, pages, listed, None, None, *partition, None, None, None, LATENT, scale, None
        )
        return out[:, 0, :heads]

    return call
