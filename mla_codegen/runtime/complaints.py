"""What a call is told that cannot be served."""

import operator
from typing import NoReturn

import torch

from .builds import INDEX, Build


def complain(
    build: Build, q: torch.Tensor, kv: torch.Tensor, qo_indptr: torch.Tensor, kv_indptr: torch.Tensor
) -> NoReturn:
    """Raise what is wrong with a call that failed the quick check."""
    if q.dtype is not build.q:
        raise TypeError(f"q is {q.dtype}; {build.spec} was built for {build.q}")
    if q.stride(2) != 1:
        raise ValueError(f"q has strides {q.stride()}; the last must be 1: call .contiguous() on it")
    if kv.shape[-1] != q.shape[2]:
        raise ValueError(f"kv has rows of {kv.shape[-1]} columns, q of {q.shape[2]}")
    if not kv.is_contiguous():
        raise ValueError(f"kv has shape {tuple(kv.shape)} and strides {kv.stride()}; its rows must be contiguous")
    if kv.dim() != 2 and build.page_size is None and (kv.dim() != 3 or kv.shape[1] != 1):
        raise ValueError(
            f"kv has shape {tuple(kv.shape)}; it must be [total_kv, {kv.shape[-1]}], or that with a 1 between. For "
            "paged KV give block_table, or kv_indices, and kv_lens"
        )
    for name, tensor in (("kv", kv), ("qo_indptr", qo_indptr), ("kv_indptr", kv_indptr)):
        if tensor.device != q.device:
            raise ValueError(f"{name} is on {tensor.device}, q on {q.device}")
    for name, tensor in (("qo_indptr", qo_indptr), ("kv_indptr", kv_indptr)):
        if tensor.dtype not in INDEX:
            raise TypeError(f"{name} is {tensor.dtype}; it must be int32 or int64")
        if not tensor.is_contiguous():
            raise ValueError(f"{name} has strides {tensor.stride()}; it must be contiguous")
    shapes = f"qo_indptr has shape {tuple(qo_indptr.shape)}, kv_indptr {tuple(kv_indptr.shape)}"
    raise ValueError(f"{shapes}; both must be [batch + 1]")


def host_int(name: str, value: object) -> int:
    """`value` as a number that the host knows. TypeError if it is none: a tensor would be waited for."""
    if not isinstance(value, torch.Tensor):
        try:
            return operator.index(value)  # type: ignore[arg-type]
        except TypeError:
            pass
    raise TypeError(f"{name} is {value!r}; it must be an int that the host knows, or None")


def describe(tensor: torch.Tensor) -> str:
    return f"{tensor.dtype} of shape {tuple(tensor.shape)}, strides {tensor.stride()}, on {tensor.device}"
