# Copied by mla-codegen from mla_codegen/runtime/layout.py. Do not edit: `mla-codegen build` writes it anew.
"""Layouts other than the usual ones: what a call tells its kernels of strides, and which of them they can take.

The usual layouts are compiled in: pages one behind the other, tables with columns side by side, contiguous results and
natural LSE. A call with any other hands its kernels the strides, which makes them other binaries.
"""

import math
from functools import lru_cache

import torch

from .builds import Build

PER_NAT = 1 / math.log(2)  # what a natural logarithm is to base 2
ALIGNMENT = 16  # bytes: what steps between pages, rows and heads are multiples of
NOT_HERE = "{build} has kernels that take {what} only: call .contiguous(), or give a buffer that is"


Steps = tuple[int, ...]


def layout_of_kv(build: Build, kv: torch.Tensor, column_step: int) -> tuple[int, int]:
    """Elements from page to page, and entries of the table from column to column, of paged KV of any page stride.

    kv   [pages, page_size, row], that with a 1 before the last, or [rows, row]; a page's rows lie side by side

    Raises ValueError with what is wrong.
    """
    if not build.strided:
        raise ValueError(NOT_HERE.format(build=build, what="a contiguous pool and tables whose last stride is 1"))
    return _page_step(kv.shape, kv.stride(), kv.element_size()), column_step


def layout_of_results(
    build: Build, out: torch.Tensor, lse: torch.Tensor | None, base2: bool
) -> tuple[int, int, int, int, float]:
    """Strides of the output (query row, head) and of the LSE (query row, head), and what natural LSE are multiplied by.

    Raises ValueError with what is wrong.
    """
    if not build.strided:
        raise ValueError(NOT_HERE.format(build=build, what="contiguous results and a natural LSE"))
    row, head = _steps_of_out(out.shape, out.stride(), out.element_size())
    lse_row, lse_head = (out.shape[1], 1) if lse is None else _steps_of_lse(lse.shape, lse.stride())
    return row, head, lse_row, lse_head, PER_NAT if base2 else 1.0


@lru_cache(maxsize=1024)  # an engine's layouts are few, and every layer of every step asks
def _page_step(shape: Steps, steps: Steps, size: int) -> int:
    row = shape[-1]
    page_step = steps[0] if shape[0] > 1 else math.prod(shape[1:])
    # from the last dimension on; the stride of a dimension of 1 means nothing
    ends = zip(reversed(shape[1:]), reversed(steps[1:]), (1, row, row), strict=False)
    if any(count > 1 and step != wanted for count, step, wanted in ends):
        raise ValueError(
            f"kv has shape {tuple(shape)} and strides {steps}; the rows of a page must lie side by side, {row} numbers "
            "each"
        )
    if page_step * size % ALIGNMENT or page_step < 0:
        raise ValueError(f"kv has pages {page_step * size} bytes apart; it must be a multiple of {ALIGNMENT} bytes")
    return page_step


@lru_cache(maxsize=1024)
def _steps_of_out(shape: Steps, steps: Steps, size: int) -> Steps:
    if any(count > 1 and step * size % ALIGNMENT for count, step in zip(shape[:2], steps[:2], strict=True)):
        raise ValueError(f"out has strides {steps}; those of rows and heads must be multiples of {ALIGNMENT // size}")
    apart("out", shape, steps)
    return steps[:2]


@lru_cache(maxsize=1024)
def _steps_of_lse(shape: Steps, steps: Steps) -> Steps:
    apart("lse", shape, steps)
    return steps


def apart(name: str, shape: Steps, steps: Steps) -> None:
    """ValueError if two elements share memory."""
    end = 1  # elements of what lies inside
    for count, step in sorted(zip(shape, steps, strict=True), key=lambda one: one[1]):
        if count > 1:
            if step < end:
                raise ValueError(f"{name} has shape {tuple(shape)} and strides {steps}; it overlaps itself")
            end += (count - 1) * step
