# Copied by mla-codegen from mla_codegen/runtime/validate.py. Do not edit: `mla-codegen build` writes it anew.
"""What is wrong with the arguments of a call, in words. A right call runs none of this but what fails a quick check."""

import operator
from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any, NoReturn

import torch

from .builds import INDEX, Build

LARGEST = torch.finfo(torch.float32).max  # of a number that a kernel takes
DATA = "(q, kv_data, qo_indptr, kv_indptr, config)"
FORMS = '{"fp8": (kv, scale)} or {"bf16": kv}'


def tensor(name: str, value: object) -> torch.Tensor:
    """`value`, or a TypeError that says why it is no tensor that a kernel can read."""
    if isinstance(value, torch.Tensor):
        if value.is_meta:
            raise TypeError(f"{name} is on meta, where tensors have no values; it must be on a GPU or CPU") from None
        if value.layout is torch.strided and not value.is_nested:
            return value
        kind = "nested" if value.is_nested else str(value.layout).removeprefix("torch.")
        raise TypeError(f"{name} is a tensor of layout {kind}; it must be a strided tensor") from None
    fix = ""
    if isinstance(value, (Sequence, int, float)) and not isinstance(value, str):
        fix = ": torch.tensor(...) makes one" if isinstance(value, Sequence) else f": torch.tensor([{value}]) makes one"
    elif hasattr(value, "__array_interface__"):
        fix = ": torch.from_numpy(...) makes one"
    raise TypeError(f"{name} is {what(value)}; it must be a tensor{fix}") from None


def tensors(**given: object) -> None:
    """TypeError for the first that is no tensor; a name that ends in _ may be None."""
    for name, value in given.items():
        if value is not None or not name.endswith("_"):
            tensor(name.rstrip("_"), value)


def arguments(
    q: object,
    kv: object,
    qo_indptr: object,
    sm_scale: object,
    max_kv_len: object = None,
    max_q_len: object = None,
    **others: object,
) -> None:
    """TypeError for the first argument of a call that has a wrong type. `others` are tensors or None."""
    ranges = {"qo_indptr" if others.get("indices") is None else "qo_indptr_": qo_indptr}
    tensors(q=q, kv=kv, **ranges, **{f"{name}_": value for name, value in others.items()})
    number("sm_scale", sm_scale)
    length(max_kv_len)
    query_length(max_q_len)


def data(given: object) -> None:
    """TypeError or ValueError for what `custom_kernel` is given, if a part of it has a wrong type or is missing."""
    if not isinstance(given, (tuple, list)):
        raise TypeError(f"data is {what(given)}; it must be {DATA}") from None
    if len(given) != 5:
        raise ValueError(f"data has {len(given)} parts; it must be {DATA}") from None
    q, kv_data, qo_indptr, kv_indptr, config = given
    mapping("kv_data", kv_data, FORMS)
    for name, form in kv_data.items():
        if isinstance(form, (tuple, list)):
            if len(form) != 2:
                raise TypeError(f"kv_data[{name!r}] has {len(form)} parts; it must be (kv, scale)") from None
            tensor(f"the KV of kv_data[{name!r}]", form[0])
            if form[1] is not None:
                tensor(f"the scale of kv_data[{name!r}]", form[1])
        elif form is not None:
            tensor(f"kv_data[{name!r}]", form)
    tensors(q=q, qo_indptr=qo_indptr, kv_indptr=kv_indptr)
    mapping("config", config, '{"sm_scale": number}')
    if "sm_scale" not in config:
        raise TypeError(f"config has {sorted(map(str, config))}; it must have sm_scale") from None
    number('config["sm_scale"]', config["sm_scale"])
    length(config.get("kv_seq_len"))
    query_length(config.get("q_seq_len"))


def scale_missing(form: str) -> NoReturn:
    """Of the form of KV that `custom_kernel` took."""
    raise TypeError(
        f"kv_data[{form!r}] has no scale, and 8-bit KV needs one: give (kv, scale), the scale a tensor of one element "
        "on the KV's device; torch.ones(1, device=kv.device) if the KV is not scaled"
    )


def mapping(name: str, value: object, example: str) -> None:
    """TypeError if it is no dictionary."""
    if not isinstance(value, Mapping):
        raise TypeError(f"{name} is {what(value)}; it must be a dict, such as {example}") from None


def number(name: str, value: object) -> float:
    """`value` as a finite number that the host knows. TypeError if it is none: a tensor would be waited for."""
    if isinstance(value, Real) and not isinstance(value, bool):
        try:
            if abs(found := float(value)) <= LARGEST:
                return found
        except OverflowError:
            pass
    raise TypeError(f"{name} is {what(value)}; it must be a finite fp32 number that the host knows") from None


def host_int(name: str, value: object) -> int:
    """`value` as a number that the host knows. TypeError if it is none: a tensor would be waited for."""
    if not isinstance(value, (torch.Tensor, bool)):
        try:
            return operator.index(value)  # type: ignore[arg-type]
        except TypeError:
            pass
    raise TypeError(f"{name} is {what(value)}; it must be an int that the host knows") from None


def length(value: object, name: str = "max_kv_len (kv_seq_len)") -> int | None:
    """`max_kv_len`, which may be None. TypeError or ValueError if it is no length."""
    if value is None:
        return None
    found = host_int(name, value)
    if found < 0:
        raise ValueError(f"{name} is {found}; it must not be negative") from None
    return found


def query_length(value: object) -> int | None:
    """`max_q_len` likewise."""
    return length(value, "max_q_len (q_seq_len)")


def query(build: Build, q: torch.Tensor) -> None:
    """Raise what is wrong with q."""
    if q.dtype is not build.q:
        raise TypeError(f"q is {q.dtype}; {build.spec} was built for {build.q}")
    if q.stride(2) != 1:
        raise ValueError(f"q has strides {q.stride()}; the last must be 1: call .contiguous() on it")


def inputs(
    build: Build, name: str, q: torch.Tensor, kv: torch.Tensor, qo_indptr: torch.Tensor, kv_indptr: torch.Tensor
) -> NoReturn:
    """Raise what is wrong with the inputs of a call that failed the quick check. `name`: of the KV's type."""
    tensors(q=q, kv=kv, qo_indptr=qo_indptr, kv_indptr=kv_indptr)
    query(build, q)
    if kv.shape[-1] != build.widths[name]:
        raise ValueError(f"kv has rows of {kv.shape[-1]} columns, q of {q.shape[2]}")
    if not kv.is_contiguous() and build.page_size is None:
        raise ValueError(f"kv has shape {tuple(kv.shape)} and strides {kv.stride()}; its rows must be contiguous")
    if kv.dim() != 2 and build.page_size is None and (kv.dim() != 3 or kv.shape[1] != 1):
        raise ValueError(
            f"kv has shape {tuple(kv.shape)}; it must be [total_kv, {kv.shape[-1]}], or that with a 1 between. For "
            "paged KV give block_table, or kv_indices, and kv_lens"
        )
    for name, given in (("kv", kv), ("qo_indptr", qo_indptr), ("kv_indptr", kv_indptr)):
        if given.device != q.device:
            raise ValueError(f"{name} is on {given.device}, q on {q.device}")
    for name, given in (("qo_indptr", qo_indptr), ("kv_indptr", kv_indptr)):
        if given.dtype not in INDEX:
            raise TypeError(f"{name} is {given.dtype}; it must be int32 or int64")
        if not given.is_contiguous():
            raise ValueError(f"{name} has strides {given.stride()}; it must be contiguous")
    shapes = f"qo_indptr has shape {tuple(qo_indptr.shape)}, kv_indptr {tuple(kv_indptr.shape)}"
    raise ValueError(f"{shapes}; both must be [batch + 1]")


def fits(
    name: str, given: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...], device: torch.device, to_write: bool
) -> None:
    """Raise what is wrong with a tensor that must be contiguous and of this dtype, shape and device."""
    tensor(name, given)
    if given.dtype is not dtype or given.shape != shape or not given.is_contiguous() or given.device != device:
        words = str(dtype).removeprefix("torch.")
        raise ValueError(f"{name} is {describe(given)}; it must be contiguous {words} {list(shape)} on {device}")
    if to_write:
        writable(name, given)


def strided(
    name: str, given: torch.Tensor, dtypes: tuple[torch.dtype, ...], shape: tuple[int, ...], device: torch.device
) -> None:
    """Raise what is wrong with a tensor to write into that may have any strides; of three dimensions the last is 1."""
    tensor(name, given)
    apart = given.dim() != 3 or given.stride(2) == 1
    if given.dtype not in dtypes or given.shape != shape or given.device != device or not apart:
        words = " or ".join(str(one).removeprefix("torch.") for one in dtypes)
        last = ", the last stride 1" if len(shape) == 3 else ""
        raise ValueError(f"{name} is {describe(given)}; it must be {words} {list(shape)} on {device}{last}")
    writable(name, given)


def writable(name: str, given: torch.Tensor) -> None:
    """Raise what is wrong with a tensor to write into that has the right form."""
    if given.requires_grad and torch.is_grad_enabled():
        raise ValueError(
            f"{name} requires grad, and what a kernel writes has none (decode only): give a tensor that does not, or "
            "call under torch.no_grad()"
        )


def scale(kv_scale: torch.Tensor, device: torch.device) -> None:
    """Raise what is wrong with a `kv_scale` that is not one element on the device."""
    tensor("kv_scale", kv_scale)
    if kv_scale.numel() != 1 or kv_scale.device != device:
        raise ValueError(f"kv_scale is {describe(kv_scale)}; it must have one element, on {device}")


def describe(given: torch.Tensor) -> str:
    return f"{given.dtype} of shape {tuple(given.shape)}, strides {given.stride()}, on {given.device}"


def what(value: Any) -> str:
    """A value of a wrong type: a number or a short text as it is, of others the type."""
    if value is None or isinstance(value, (bool, int, float, complex)) or (isinstance(value, str) and len(value) < 20):
        return repr(value)
    kind = type(value)
    name = kind.__name__ if kind.__module__ in ("builtins", "torch") else f"{kind.__module__}.{kind.__name__}"
    return f"{'an' if name[0] in 'aeiou' else 'a'} {name}"
