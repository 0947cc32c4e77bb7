# Copied by mla-codegen from mla_codegen/runtime/merge.py. Do not edit: `mla-codegen build` writes it anew.
"""Merge attention over several sets of KV rows by their LSE, in one launch: `merge_states([(out, lse), ...])`.

For prefixes that requests share, cascades, contexts in chunks, KV on several GPUs. A state is what attention over one
set of KV rows gave: outputs, already divided by their sum of weights, and the LSE. One that saw nothing has the LSE
-inf, and its output may hold anything.
"""

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from . import validate
from .launch import Launch, on_device_of
from .layout import apart

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
STACK = 8  # states of a stack that are loaded at a time
MANY = 2048  # (row, head) pairs from which on a program takes several
AT_ONCE = 1024  # numbers of an output that such a program takes

State = tuple[torch.Tensor, torch.Tensor]


@triton.jit
def weigh(lse, out, m, total, acc, BASE2: tl.constexpr):  # type: ignore[no-untyped-def]
    """Add a state to the sum of weights [n] and to the outputs [n, columns] times those.

    m [n] is the greatest LSE, or 0 where every state is empty: then every weight is 0, not NaN.
    """
    weight = tl.math.exp2(lse - m) if BASE2 else tl.exp(lse - m)
    out = tl.where((lse == float("-inf"))[:, None], 0.0, out.to(tl.float32))  # 0 x NaN is NaN
    return total + weight, acc + out * weight[:, None]


@triton.jit(do_not_specialize=["pairs"])
def merge(  # type: ignore[no-untyped-def]
    outs, lses, strides, out, lse, merged_strides, pairs,
    HEADS: tl.constexpr, COLUMNS: tl.constexpr, PADDED: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr,
    BASE2: tl.constexpr,
):  # fmt: skip
    """A program merges BLOCK of the `pairs` of a row and a head.

    outs, lses, strides   of each stack of states: pointers, and how many states, then strides of the outputs (state,
                          row, head) and of the LSE (state, row, head)
    merged_strides        of the result: output (row, head), LSE (row, head)
    PADDED, TILE          COLUMNS as a power of two; states of a stack that are loaded at a time
    """
    pair = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    exists = pair < pairs
    row = pair // HEADS
    head = pair % HEADS
    columns = tl.arange(0, PADDED)
    inside = exists[:, None] & (columns < COLUMNS)[None, :]
    m = tl.full([BLOCK], float("-inf"), tl.float32)
    for i in tl.static_range(len(outs)):
        count, _, _, _, lse_state, lse_row, lse_head = strides[i]
        lse_at = lses[i] + row * lse_row + head * lse_head
        for first in range(0, count, TILE):
            for j in tl.static_range(TILE):
                m = tl.maximum(m, tl.load(lse_at, mask=exists & (first + j < count), other=float("-inf")))
                lse_at += lse_state  # 64 bit, as a product of strides need not be
    m = tl.where(m == float("-inf"), 0.0, m)
    total = tl.zeros([BLOCK], tl.float32)
    acc = tl.zeros([BLOCK, PADDED], tl.float32)
    for i in tl.static_range(len(outs)):
        count, out_state, out_row, out_head, lse_state, lse_row, lse_head = strides[i]
        lse_at = lses[i] + row * lse_row + head * lse_head
        out_at = outs[i] + (row * out_row + head * out_head)[:, None] + columns[None, :]
        for first in range(0, count, TILE):
            for j in tl.static_range(TILE):
                state_lse = tl.load(lse_at, mask=exists & (first + j < count), other=float("-inf"))
                # Loaded whether it is empty or not: its address is good, and to wait for the LSE costs a latency.
                state_out = tl.load(out_at, mask=inside & (first + j < count), other=0.0)
                total, acc = weigh(state_lse, state_out, m, total, acc, BASE2)
                lse_at += lse_state
                out_at += out_state
    out_row, out_head, lse_row, lse_head = merged_strides
    acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]  # every state is empty: out 0
    tl.store(out + (row * out_row + head * out_head)[:, None] + columns[None, :], acc, mask=inside)
    log_sum = tl.math.log2(total) if BASE2 else tl.log(total)
    tl.store(lse + row * lse_row + head * lse_head, m + log_sum, mask=exists)


class Merge:
    """The kernel, launched with little host time. `KERNEL` is the one of this process."""

    def __init__(self) -> None:
        self.kernel: Any = Launch(merge) if isinstance(merge, triton.JITFunction) else merge

    def __call__(
        self,
        outs: tuple[Any, ...],
        lses: tuple[Any, ...],
        strides: tuple[tuple[int, ...], ...],
        out: torch.Tensor,
        lse: torch.Tensor,
        base2: bool = False,
    ) -> None:
        """As the kernel takes them; out [rows, heads, columns] and lse [rows, heads] of any strides."""
        rows, heads, columns = out.shape
        pairs, padded = rows * heads, 1 << (columns - 1).bit_length()
        block = max(1, AT_ONCE // padded) if pairs >= MANY else 1
        most = max(one[0] for one in strides)
        with on_device_of(out):
            self.kernel[(-(-pairs // block),)](
                outs, lses, strides, out, lse, (*out.stride()[:2], *lse.stride()), pairs, heads, columns, padded,
                block, min(STACK, 1 << (most - 1).bit_length()), base2, num_warps=4, enable_fp_fusion=True,
            )  # fmt: skip


KERNEL = Merge()


def merge_states(
    states: Sequence[State],
    *,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    base2: bool = False,
) -> State:
    """Attention over the KV rows of all states together, from attention over those of each.

    states   (out, lse) of each: out [rows, heads, columns] bf16, fp16 or fp32, any strides but the last, which is 1;
             lse [rows, heads] fp32, any strides. Or of a stack: out [n, rows, heads, columns], lse [n, rows, heads].
             Where an LSE is -inf the state saw nothing, and its out may hold anything, NaN too
    out      [rows, heads, columns] to write into, of these dtypes and strides; None: made, in the first state's dtype
    lse      [rows, heads] fp32 likewise. Both may be those of a state, in pair; else they must lie apart
    base2    the LSE, given and returned, are logarithms to base 2; else natural ones

    Returns (out, lse): lse = log(sum of exp(lse_i)), out = sum of out_i exp(lse_i - lse); where all are -inf, 0 and
    -inf. One launch for any number of states; nothing waits for the device. Raises TypeError and ValueError as
    `mla_decode` does.
    """
    try:
        first = states[0][0]
        shape, device = first.shape[-3:], first.device
        outs, lses, strides = [], [], []
        for state, state_lse in states:
            count, steps, lse_steps = 1, state.stride(), state_lse.stride()
            if state.dim() == 4:
                count, stacked = state.shape[0], state_lse.dim() == 3
            else:
                steps, lse_steps, stacked = (0, *steps), (0, *lse_steps), state_lse.dim() == 2
            if (
                not stacked
                or len(steps) != 4
                or state.shape[-3:] != shape
                or state_lse.shape != state.shape[:-1]
                or steps[3] != 1
                or state.dtype not in DTYPES
                or state_lse.dtype is not torch.float32
                or state.device != device
                or state_lse.device != device
            ):
                refuse(states)
            if count:
                outs.append(state)
                lses.append(state_lse)
                strides.append((count, *steps[:3], *lse_steps))
        if out is None:
            out = torch.empty(shape, dtype=first.dtype, device=device)
        elif (
            out.shape != shape
            or out.dtype not in DTYPES
            or out.stride()[2] != 1
            or out.device != device
            or out.requires_grad
        ):
            validate.strided("out", out, DTYPES, tuple(shape), device)
        if not out.is_contiguous():
            apart("out", out.shape, out.stride())
        if lse is None:
            lse = torch.empty(shape[:2], dtype=torch.float32, device=device)
        elif lse.shape != shape[:2] or lse.dtype is not torch.float32 or lse.device != device or lse.requires_grad:
            validate.strided("lse", lse, (torch.float32,), tuple(shape[:2]), device)
        if not lse.is_contiguous():
            apart("lse", lse.shape, lse.stride())
    except Exception:
        refuse(states)
        validate.tensors(out_=out, lse_=lse)
        raise
    if not outs:  # stacks of none
        out.zero_()
        lse.fill_(float("-inf"))
    elif out.numel() or lse.numel():
        KERNEL(tuple(outs), tuple(lses), tuple(strides), out, lse, bool(base2))
    return out, lse


def refuse(states: Any) -> None:
    """Raise what is wrong with the states, if anything is."""
    if not isinstance(states, (list, tuple)):
        raise TypeError(f"states is {validate.what(states)}; it must be a list of (out, lse)") from None
    if not states:
        raise ValueError("no states: give one (out, lse) or more") from None
    first = None
    for number, state in enumerate(states):
        name = f"states[{number}]"
        if not isinstance(state, (list, tuple)) or len(state) != 2:
            what = f"{len(state)} parts" if isinstance(state, (list, tuple)) else validate.what(state)
            raise TypeError(f"{name} is {what}; it must be (out, lse)") from None
        out, lse = validate.tensor(f"the out of {name}", state[0]), validate.tensor(f"the LSE of {name}", state[1])
        if out.dim() not in (3, 4):
            raise ValueError(
                f"the out of {name} has shape {tuple(out.shape)}; it must be [rows, heads, columns], or of a stack "
                "[n, rows, heads, columns]"
            ) from None
        first = out if first is None else first
        wanted = (*out.shape[:-3], *first.shape[-3:])
        if out.dtype not in DTYPES or out.shape != wanted or out.device != first.device or out.stride(-1) != 1:
            words = "bf16, fp16 or fp32"
            is_now = f"the out of {name} is {validate.describe(out)}"
            raise ValueError(
                f"{is_now}; it must be {words} {list(wanted)} on {first.device}, the last stride 1"
            ) from None
        if lse.dtype is not torch.float32 or lse.shape != out.shape[:-1] or lse.device != first.device:
            is_now = f"the LSE of {name} is {validate.describe(lse)}"
            raise ValueError(f"{is_now}; it must be float32 {list(out.shape[:-1])} on {first.device}") from None
