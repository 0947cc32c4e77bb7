"""DPP: a vector instruction's first source comes from another lane (CDNA3 ISA, 6.3.2 and 13.3.8 DPP)."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mla_codegen.check.cdna.listing import Instruction, Unknown
from mla_codegen.check.cdna.operands import Read, Uses, registers
from mla_codegen.check.cdna.state import LANES, Waves

Array = NDArray[Any]
ROW = 16  # lanes
_MASKS = ("row_mask", "bank_mask", "bound_ctrl")
_SHIFTS = ("row_shl", "row_shr", "row_ror", "row_bcast", "row_newbcast")
DPP = ("quad_perm", "row_mirror", "row_half_mirror", *_SHIFTS, *_MASKS)


def source_lanes(one: Instruction) -> tuple[Array, Array]:
    """(the lane that each lane reads, which lanes have one)"""
    lane = np.arange(LANES)
    row, place = lane // ROW, lane % ROW
    ways = [(name, value) for name, value in one.modifiers.items() if name not in _MASKS]
    if len(ways) != 1:
        raise Unknown(one, "DPP without one way")
    ((name, value),) = ways
    every = np.ones(LANES, bool)
    if name == "quad_perm":
        order = np.array([int(digit) for digit in re.findall(r"\d", value)])
        return lane // 4 * 4 + order[lane % 4], every
    if name == "row_mirror":
        return row * ROW + ROW - 1 - place, every
    if name == "row_half_mirror":
        return lane // 8 * 8 + 7 - lane % 8, every
    count = int(value)
    if name == "row_shr":
        return np.maximum(lane - count, 0), place >= count
    if name == "row_shl":
        return np.minimum(lane + count, LANES - 1), place + count < ROW
    if name == "row_ror":
        return row * ROW + (place - count) % ROW, every
    if name == "row_newbcast":
        return row * ROW + count, every
    if name == "row_bcast" and count == 15:  # the last lane of a row to all of the next
        return np.maximum(row * ROW - 1, 0), row > 0
    if name == "row_bcast" and count == 31:  # lane 31 to the upper half
        return np.full(LANES, 31), row > 1
    raise Unknown(one)


def permuted(
    one: Instruction, uses: Uses, reads: list[Read], function: Callable[..., Any], results: str
) -> Callable[[Waves], None]:
    """A lane whose source is outside of its row or switched off: 0 with bound_ctrl, else it keeps its target.

    `row_mask` and `bank_mask` name the rows of 16 lanes, and the groups of 4 in each, that are written.
    """
    if results != "u":
        raise Unknown(one, "DPP with such a result")
    source, present = source_lanes(one)
    lane = np.arange(LANES)
    rows = int(one.modifiers.get("row_mask") or "0xf", 0) >> lane // ROW & 1
    banks = int(one.modifiers.get("bank_mask") or "0xf", 0) >> lane % ROW // 4 & 1
    enabled = (rows & banks).astype(bool)
    zeros = "bound_ctrl" in one.modifiers
    target = registers(one, one.operands[0], uses, file="v").first  # what is not written stays
    uses.writes.add(target)
    first, rest = reads[0], reads[1:]

    def run(waves: Waves) -> None:
        valid = present & waves.mask[:, source]
        value = first(waves)
        value = np.where(valid, value[:, source], value.dtype.type(0))
        result = function(value, *[read(waves) for read in rest]).view(np.uint32)
        np.copyto(waves.V[target], result, where=waves.mask & enabled & (valid | zeros))

    return run
