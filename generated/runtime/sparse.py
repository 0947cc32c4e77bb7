# Copied by mla-codegen from mla_codegen/runtime/sparse.py. Do not edit: `mla-codegen build` writes it anew.
"""Sparse KV in a call: a list of KV rows for each query row, and what may stand beside it."""

from typing import NamedTuple

import torch

from . import validate
from .builds import Build


class Listed(NamedTuple):
    """The lists of a call as kernels take them."""

    indices: torch.Tensor
    lens: torch.Tensor | None
    sink: torch.Tensor | None


def refuse_others(**given: object) -> None:
    """ValueError for an argument that says which KV rows a request has: with lists nobody asks."""
    for name, value in given.items():
        if value is not None:
            raise ValueError(
                f"indices and {name} are both given: with `indices` each query row has a list of KV rows of its own; "
                f"leave {name} out"
            )


def without_lists(topk_lens: object, attn_sink: object, qo_indptr: object) -> torch.Tensor:
    """`qo_indptr`, which only lists can do without; ValueError for what belongs to lists where there are none."""
    for name, value in (("topk_lens", topk_lens), ("attn_sink", attn_sink)):
        if value is not None:
            raise ValueError(f"{name} is for sparse KV, and no `indices` are given, [total_q, topk] int32")
    return validate.tensor("qo_indptr", qo_indptr)


def check(build: Build, name: str, q: torch.Tensor, kv: torch.Tensor, lists: Listed) -> None:
    """Raise what is wrong with q, the pool and the lists, those of a call that failed the quick check."""
    validate.tensors(q=q, kv=kv, indices=lists.indices, topk_lens_=lists.lens, attn_sink_=lists.sink)
    validate.query(build, q)
    if kv.shape[-1] != build.widths[name]:
        what = "bytes" if name in build.records.values() else "columns"
        raise ValueError(f"kv has rows of {kv.shape[-1]} {what}; {name} KV of {build.spec} has {build.widths[name]}")
    if not kv.is_contiguous():
        raise ValueError(f"kv has shape {tuple(kv.shape)} and strides {kv.stride()}; its rows must be contiguous")
    if kv.device != q.device:
        raise ValueError(f"kv is on {kv.device}, q on {q.device}")
    if build.page_size is not None and (kv.dim() < 3 or kv.shape[1] != build.page_size):
        raise ValueError(
            f"kv has shape {tuple(kv.shape)}; {name} records of {build.spec} lie in pages: "
            f"[pages, {build.page_size}, {build.widths[name]}]"
        )
    rows, total_q = build.topk or 0, q.shape[0]
    validate.fits("indices", lists.indices, torch.int32, (total_q, rows), q.device, to_write=False)
    if lists.lens is not None:
        validate.fits("topk_lens", lists.lens, torch.int32, (total_q,), q.device, to_write=False)
    if lists.sink is not None:
        validate.fits("attn_sink", lists.sink, torch.float32, (build.heads,), q.device, to_write=False)


def fit(build: Build, name: str, q: torch.Tensor, kv: torch.Tensor, lists: Listed, index: int) -> bool:
    """Whether q, the pool and the lists are as the build's kernels take them. `index`: q's device."""
    indices, lens, sink = lists
    total_q = q.shape[0]
    return (
        q.dtype is build.q
        and q.stride()[2] == 1
        and kv.shape[-1] == build.widths[name]
        and kv.is_contiguous()
        and kv.get_device() == index
        and (build.page_size is None or (kv.dim() > 2 and kv.shape[1] == build.page_size))
        and indices.dtype is torch.int32
        and indices.shape == (total_q, build.topk)
        and indices.is_contiguous()
        and indices.get_device() == index
        and (
            lens is None
            or (
                lens.dtype is torch.int32
                and lens.shape == (total_q,)
                and lens.is_contiguous()
                and lens.get_device() == index
            )
        )
        and (
            sink is None
            or (
                sink.dtype is torch.float32
                and sink.shape == (build.heads,)
                and sink.is_contiguous()
                and sink.get_device() == index
            )
        )
    )
