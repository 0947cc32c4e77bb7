# Copied by mla-codegen from mla_codegen/runtime/debug.py. Do not edit: `mla-codegen build` writes it anew.
"""Debug mode: what a call cannot check without waiting for the device.

Values of ranges, page numbers and lengths, and whether what a call writes overlaps what it reads. MLA_CODEGEN_DEBUG=1
checks every call, 0 none; unset, those on a CPU, where nobody waits and a read past the end would end Python. A call
that is being captured in a CUDA graph is not checked: a capture must not wait.
"""

import os
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch

VARIABLE = "MLA_CODEGEN_DEBUG"

Run = Callable[..., None]


def devices() -> tuple[str, ...]:
    """The types of the devices whose calls are checked."""
    return {"": ("cpu",), "0": ()}.get(os.environ.get(VARIABLE, ""), ("cpu", "cuda"))


def watched(run: Run, page_size: int | None, on: tuple[str, ...], topk: int | None = None) -> Run:
    """A kernel's `run`, its arguments checked first on devices of the types `on`."""
    if not on:
        return run

    def checked(*given: Any, **layouts: Any) -> None:
        device = given[0].device.type
        if device in on and not (device == "cuda" and torch.cuda.is_current_stream_capturing()):
            check_lists(*given) if topk else check(page_size, *given)
        run(*given, **layouts)

    return checked


def check_lists(
    q: torch.Tensor, kv: torch.Tensor, indices: torch.Tensor, lens: torch.Tensor | None, sink: torch.Tensor | None,
    kv_scale: torch.Tensor | None, _: float, out: torch.Tensor, lse: torch.Tensor | None, *others: Any,
) -> None:  # fmt: skip
    """The same of sparse KV: a list may name the rows of the pool alone, or -1."""
    inputs = {"q": q, "kv": kv, "indices": indices, "topk_lens": lens, "attn_sink": sink, "kv_scale": kv_scale}
    overlap({"out": out, "lse": lse, "workspace": others[-1]}, inputs)
    if lens is not None:
        for row in _indices((_host(lens) < 0) | (_host(lens) > indices.shape[1])):
            raise ValueError(f"topk_lens of query row {row} is {int(lens[row])}; lists have {indices.shape[1]} entries")
    rows, listed = kv.numel() // kv.shape[-1], _host(indices)
    wrong = (listed < -1) | (listed >= rows)
    if lens is not None:
        wrong &= torch.arange(listed.shape[1]) < _host(lens)[:, None]
    for row, place in wrong.nonzero().tolist():
        raise ValueError(
            f"indices names row {int(listed[row, place])} for query row {row} at {place}; kv has {rows} rows"
        )


def check(page_size: int | None, q: torch.Tensor, kv: torch.Tensor, qo_indptr: torch.Tensor, *others: Any) -> None:
    """Raise ValueError for the first thing that is wrong. The arguments are those of a kernel's `run`.

    Requests without query rows are not looked at, nor are page numbers behind a request's last page: neither is read.
    """
    if page_size is None:
        kv_indptr, kv_visible, kv_scale, _, out, lse, *_, workspace = others
        indices: Any = None
        kv_lens = None
    else:
        kv_indptr, indices, kv_lens, kv_visible, kv_scale, _, out, lse, *_, workspace = others
    inputs = {
        "q": q, "kv": kv, "qo_indptr": qo_indptr, "kv_indptr": kv_indptr, "kv_lens": kv_lens,
        "block_table" if kv_indptr is None else "kv_indices": indices, "kv_visible": kv_visible, "kv_scale": kv_scale,
    }  # fmt: skip
    overlap({"out": out, "lse": lse, "workspace": workspace}, inputs)
    ends = _host(qo_indptr)
    if ends[0] < 0:
        raise ValueError(f"qo_indptr begins at {ends[0]}; it must not be negative")
    for request in _indices(ends[1:] < ends[:-1]):
        raise ValueError(f"qo_indptr falls at request {request}: from {ends[request]} to {ends[request + 1]}")
    if ends[-1] > q.shape[0]:
        raise ValueError(f"qo_indptr ends at {ends[-1]}; q has {q.shape[0]} query rows")
    served = ends[1:] > ends[:-1]
    if kv_visible is not None:
        for row in _indices((_host(kv_visible) < 0)[: ends[-1]]):
            if row >= ends[0]:
                raise ValueError(f"kv_visible of query row {row} is {int(kv_visible[row])}; it must not be negative")
    if page_size is None:
        ranges(kv_indptr, served, kv.shape[0], "kv", "rows")
    else:
        pages(page_size, kv.shape[0], kv_indptr, indices, kv_lens, served)


def ranges(indptr: torch.Tensor, served: torch.Tensor, most: int, name: str, what: str) -> None:
    """The ranges of the requests that are served: they must not fall, and end within what there is."""
    begin, end = _host(indptr)[:-1], _host(indptr)[1:]
    for request in _indices(served & ((begin < 0) | (end < begin) | (end > most))):
        is_now = f"kv_indptr gives request {request} the {what} {begin[request]} to {end[request]}"
        if begin[request] < 0:
            raise ValueError(f"{is_now}; it must not begin at a negative number")
        if end[request] < begin[request]:
            raise ValueError(f"{is_now}; it must not fall")
        raise ValueError(f"{is_now}; {name} has {most} {what}")


def pages(
    size: int, count: int, indptr: torch.Tensor | None, indices: torch.Tensor, lens: torch.Tensor | None,
    served: torch.Tensor,
) -> None:  # fmt: skip
    """Page numbers must lie in the pool of `count` pages of `size` rows, and be enough for the lengths."""
    where, numbers = "kv_indices", _host(indices)
    if indptr is not None:
        ranges(indptr, served, len(numbers), where, "entries")
        listed = [numbers[begin:end] for begin, end in pairwise(_host(indptr).tolist())]
    else:
        where, listed = "block_table", list(numbers)
    for request in _indices(served):
        mine = listed[request]
        rows = len(mine) * size if lens is None else int(lens[request])
        if rows < 0:
            raise ValueError(f"kv_lens of request {request} is {rows}; it must not be negative")
        need = -(-rows // size)
        if need > len(mine):
            is_now = f"kv_lens of request {request} is {rows}, which takes {need} pages of {size}"
            raise ValueError(f"{is_now}; {where} has {len(mine)} for it")
        for at in _indices((mine < 0) | (mine >= count))[:1]:
            if at < need:
                raise ValueError(f"{where} gives request {request} page {mine[at]} at {at}; kv has {count} pages")


def overlap(written: dict[str, torch.Tensor | None], read: dict[str, torch.Tensor | None]) -> None:
    """ValueError if memory that is written is also written or read as something else."""
    others = {**read, **written}
    for name, one in written.items():
        others.pop(name)
        for other_name, other in others.items():
            if one is not None and other is not None and shared(one, other):
                raise ValueError(f"{name} and {other_name} overlap in memory; what a call writes must lie apart")


def shared(written: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors have a byte in common."""
    if not written.numel() or not other.numel():
        return False
    begins, length = _pieces(written)
    firsts, size = _pieces(other)
    firsts = firsts.sort().values
    last = torch.searchsorted(firsts, begins + length) - 1  # the last piece that begins before each one ends
    return bool(((last >= 0) & (firsts[last.clamp(min=0)] + size > begins)).any())


def _pieces(tensor: torch.Tensor) -> tuple[torch.Tensor, int]:
    """The memory of a tensor: the addresses of its pieces, and how many bytes lie together in each."""
    item = tensor.element_size()
    shape, strides = list(tensor.shape), list(tensor.stride())
    size = item
    while shape and (strides[-1] * item == size or shape[-1] == 1):
        size *= shape.pop()
        strides.pop()
    first = torch.tensor([tensor.data_ptr()], dtype=torch.int64, device="cpu")
    for count, stride in zip(shape, strides, strict=True):
        first = (first[:, None] + torch.arange(count, dtype=torch.int64, device="cpu") * (stride * item)).view(-1)
    return first, size


def _host(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to("cpu", torch.int64)


def _indices(wrong: torch.Tensor) -> list[int]:
    return wrong.nonzero().view(-1).tolist()
