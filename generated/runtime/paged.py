# Copied by mla-codegen from mla_codegen/runtime/paged.py. Do not edit: `mla-codegen build` writes it anew.
"""Paged KV in a call: which page size it has, and whether its page numbers are given as a kernel takes them."""

from typing import NamedTuple

import torch

from .builds import INDEX

ONE_WAY = (
    "give `block_table` [batch, pages] and `kv_lens` [batch], or `kv_indptr` [batch + 1] over pages, `kv_indices` and "
    "`kv_lens`"
)


class Pages(NamedTuple):
    """The pages of a call as kernels take them: `indices` is a table where `indptr` is None, else a list."""

    size: int
    indptr: torch.Tensor | None
    indices: torch.Tensor
    lens: torch.Tensor | None
    column_step: int = 1  # numbers of a table from column to column


def page_size(kv: torch.Tensor) -> int:
    """KV rows of a page, by the KV's shape: [pages, size, row], [pages, size, 1, row], or [rows, row], pages of 1."""
    return 1 if kv.dim() == 2 else int(kv.shape[1])


def pages_of(
    q: torch.Tensor,
    kv: torch.Tensor,
    qo_indptr: torch.Tensor,
    kv_indptr: torch.Tensor | None,
    block_table: torch.Tensor | None,
    kv_indices: torch.Tensor | None,
    kv_lens: torch.Tensor | None,
) -> Pages:
    """The pages of a call that is not ragged. Raises ValueError or TypeError with what is wrong and how to mend it."""
    if block_table is None and kv_indices is None:
        if kv_lens is not None:
            raise ValueError(
                f"kv_lens is for paged KV, and no pages are given: {ONE_WAY}; ragged KV takes kv_indptr alone"
            )
        raise ValueError(f"kv_indptr is missing: ragged KV needs it, [batch + 1]. For paged KV {ONE_WAY}")
    if qo_indptr.dim() != 1 or qo_indptr.numel() == 0:
        raise ValueError(f"qo_indptr has shape {tuple(qo_indptr.shape)}; it must be [batch + 1]")
    batch = qo_indptr.numel() - 1
    column_step = 1
    if block_table is not None:
        for name, other in (("kv_indptr", kv_indptr), ("kv_indices", kv_indices)):
            if other is not None:
                raise ValueError(f"block_table and {name} are both given, and each says where the pages are: {ONE_WAY}")
        fits = block_table.dim() == 2 and block_table.shape[0] == batch
        _check("block_table", block_table, q, f"[{batch}, pages]", fits)
        if block_table.stride(1) != 1 and block_table.shape[1] > 1:
            column_step = block_table.stride(1)
        indices = block_table
    else:
        assert kv_indices is not None
        if kv_indptr is None:
            raise ValueError("kv_indices needs kv_indptr, [batch + 1]: where in it each request's pages begin")
        _check("kv_indptr", kv_indptr, q, f"[{batch + 1}]", kv_indptr.dim() == 1 and kv_indptr.numel() == batch + 1)
        _check("kv_indices", kv_indices, q, "[pages of all requests]", kv_indices.dim() == 1)
        _contiguous("kv_indptr", kv_indptr)
        _contiguous("kv_indices", kv_indices)
        indices = kv_indices
    if kv.dim() not in (2, 3, 4) or (kv.dim() == 4 and kv.shape[2] != 1):
        raise ValueError(
            f"kv has shape {tuple(kv.shape)}; paged KV is [pages, page_size, {kv.shape[-1]}], or that with a 1 "
            f"before the last, or [rows, {kv.shape[-1]}] for pages of one row"
        )
    size = page_size(kv)
    if kv_lens is not None:
        _check("kv_lens", kv_lens, q, f"[{batch}]", kv_lens.dim() == 1 and kv_lens.shape[0] == batch)
        _contiguous("kv_lens", kv_lens)
    elif block_table is not None or size != 1:
        why = "block_table does not say" if block_table is not None else f"pages of {size} rows do not say"
        raise ValueError(f"kv_lens is missing: {why} how many KV rows a request has; give it, [{batch}] int32")
    return Pages(size, kv_indptr, indices, kv_lens, column_step)


def guess_kv_len(pages: Pages, batch: int) -> int:
    """A guess of a request's KV rows where no `max_kv_len` is given: as many as its page numbers have room for."""
    numbers = pages.indices.shape[-1]
    return pages.size * (numbers if pages.indptr is None else numbers // batch)


def _check(name: str, tensor: torch.Tensor, q: torch.Tensor, shape: str, fits: bool) -> None:
    if not fits:
        raise ValueError(f"{name} has shape {tuple(tensor.shape)}; it must be {shape}")
    if tensor.dtype not in INDEX:
        raise TypeError(f"{name} is {tensor.dtype}; it must be int32 (int64 is taken too): call .int() on it")
    if tensor.device != q.device:
        raise ValueError(f"{name} is on {tensor.device}, q on {q.device}")


def _contiguous(name: str, tensor: torch.Tensor) -> None:
    if not tensor.is_contiguous():
        raise ValueError(f"{name} has strides {tensor.stride()}; it must be contiguous: call .contiguous() on it")
