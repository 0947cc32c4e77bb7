"""Layouts other than the usual ones: what a call tells its kernels of strides, and which of them they can take.

The usual layouts are compiled in: pages one behind the other, tables with columns side by side, contiguous results and
natural LSE. A call with any other hands its kernels the strides, which makes them other binaries.
"""

import math

import torch

from .builds import Build

ALIGNMENT = 16  # bytes: what steps between pages, rows and heads are multiples of
NOT_HERE = "{build} has kernels that take {what} only: call .contiguous(), or give a buffer that is"


def layout_of_kv(build: Build, kv: torch.Tensor, column_step: int) -> tuple[int, int]:
    """Elements from page to page, and entries of the table from column to column, of paged KV of any page stride.

    kv   [pages, page_size, row], that with a 1 before the last, or [rows, row]; a page's rows lie side by side

    Raises ValueError with what is wrong.
    """
    if not build.strided:
        raise ValueError(NOT_HERE.format(build=build, what="a contiguous pool and tables whose last stride is 1"))
    row = kv.shape[-1]
    page_step = kv.stride(0) if kv.shape[0] > 1 else math.prod(kv.shape[1:])
    # from the last dimension on; the stride of a dimension of 1 means nothing
    ends = zip(reversed(kv.shape[1:]), reversed(kv.stride()[1:]), (1, row, row), strict=False)
    if any(count > 1 and step != wanted for count, step, wanted in ends):
        raise ValueError(
            f"kv has shape {tuple(kv.shape)} and strides {kv.stride()}; the rows of a page must lie side by side, "
            f"{row} numbers each"
        )
    if page_step * kv.element_size() % ALIGNMENT or page_step < 0:
        raise ValueError(
            f"kv has pages {page_step * kv.element_size()} bytes apart; it must be a multiple of {ALIGNMENT} bytes"
        )
    return page_step, column_step


def layout_of_results(
    build: Build, out: torch.Tensor, lse: torch.Tensor | None, base2: bool
) -> tuple[int, int, int, int, float]:
    """Strides of the output (query row, head) and of the LSE (query row, head), and what natural LSE are multiplied by.

    Raises ValueError with what is wrong.
    """
    if not build.strided:
        raise ValueError(NOT_HERE.format(build=build, what="contiguous results and a natural LSE"))
    size, (row, head, last) = out.element_size(), out.stride()
    if last != 1 or row * size % ALIGNMENT or head * size % ALIGNMENT:
        raise ValueError(
            f"out has strides {out.stride()}; the last must be 1, the others multiples of {ALIGNMENT // size}"
        )
    for name, one in (("out", out), ("lse", lse)):
        if one is not None and not apart(one):
            raise ValueError(f"{name} has shape {tuple(one.shape)} and strides {one.stride()}; it overlaps itself")
    lse_row, lse_head = (out.shape[1], 1) if lse is None else lse.stride()
    return row, head, lse_row, lse_head, 1 / math.log(2) if base2 else 1.0


def apart(given: torch.Tensor) -> bool:
    """Whether no two of its elements share memory."""
    end = 1  # elements of what lies inside
    for count, step in sorted(zip(given.shape, given.stride(), strict=True), key=lambda one: one[1]):
        if count > 1:
            if step < end:
                return False
            end += (count - 1) * step
    return True
