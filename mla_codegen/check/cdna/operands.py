"""From an operand's text to how its value is read, and which registers an instruction touches.

Vector instructions see [waves, 64] arrays; a scalar register is [waves, 1] and a constant [1, 1] to them. Scalar
instructions see [waves] and [1].
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mla_codegen.check.cdna.listing import EXEC, Instruction, Register, Unknown, number, register
from mla_codegen.check.cdna.state import SCALARS, Waves, unpack

Array = NDArray[Any]
Read = Callable[[Waves], Array]
# Kinds of values: one letter each in the tables of instructions.
TYPES = {"u": np.uint32, "i": np.int32, "f": np.float32, "U": np.uint64, "I": np.int64}
_LOW, _ALL = 0xFFFFFFFF, 0xFFFFFFFFFFFFFFFF
_NEGATED = re.compile(r"-(?=[vsa|]|\d*\[)")


@dataclass
class Uses:
    """Registers that an instruction reads and writes, scalar ones from SCALARS on."""

    reads: set[int] = field(default_factory=set)
    writes: set[int] = field(default_factory=set)

    def add(self, found: Register, *, write: bool = False) -> None:
        first = found.first + (SCALARS if found.file == "s" else 0)
        (self.writes if write else self.reads).update(range(first, first + found.count))


def registers(instruction: Instruction, text: str, uses: Uses, *, write: bool = False, file: str = "") -> Register:
    """An operand that must be registers, of `file` if given."""
    found = register(text)
    if found is None or (file and found.file != file):
        raise Unknown(instruction, f"operand {text}")
    uses.add(found, write=write)
    return found


def constant(text: str, kind: str) -> Array:
    """[1] of a constant operand. 64-bit integers are extended by their sign."""
    value = number(text)
    if kind in "UI":
        return np.array([value & _ALL], np.uint64).view(TYPES[kind])
    return np.array([value & _LOW], np.uint32).view(TYPES[kind])


def vector_source(instruction: Instruction, text: str, kind: str, uses: Uses) -> Read:
    """How a vector instruction reads an operand as `kind`: u, i, f; U for a pair of registers; m for a lane mask."""
    negate = kind == "f" and _NEGATED.match(text) is not None
    text = text[1:] if negate else text
    magnitude = text.startswith("|")
    if magnitude and kind != "f":
        raise Unknown(instruction, f"operand {text}")
    text = text.strip("|")
    read = _vector_source(instruction, text, kind, uses)
    if magnitude:
        plain = read
        read = lambda waves: np.abs(plain(waves))  # noqa: E731
    if negate:
        positive = read
        read = lambda waves: -positive(waves)  # noqa: E731
    return read


def _vector_source(instruction: Instruction, text: str, kind: str, uses: Uses) -> Read:
    found = register(text)
    if kind == "m":
        at = registers(instruction, text, uses, file="s").first
        return (lambda waves: waves.mask) if at == EXEC else (lambda waves: unpack(waves.pair(at)))
    if found is None:
        value = constant(text, kind)[None, :]
        return lambda waves: value
    uses.add(found)
    first, dtype = found.first, TYPES[kind]
    if kind in "UI":
        if found.count != 2:
            raise Unknown(instruction, f"operand {text}")
        if found.file == "s":
            return lambda waves: waves.pair(first)[:, None].view(dtype)
        return lambda waves: (
            waves.V[first] | waves.V[first + 1].astype(np.uint64) << np.uint64(32)
        ).view(dtype)  # fmt: skip
    if found.count != 1:
        raise Unknown(instruction, f"operand {text}")
    if found.file == "s":
        return lambda waves: waves.S[first][:, None].view(dtype)
    return lambda waves: waves.V[first].view(dtype)


def scalar_source(instruction: Instruction, text: str, kind: str, uses: Uses) -> Read:
    """How a scalar instruction reads an operand as `kind`: u, i, U or I."""
    found = register(text)
    if found is None:
        value = constant(text, kind)
        return lambda waves: value
    if found.file != "s" or found.count != (2 if kind in "UI" else 1):
        raise Unknown(instruction, f"operand {text}")
    uses.add(found)
    first, dtype = found.first, TYPES[kind]
    if kind in "UI":
        return lambda waves: waves.pair(first).view(dtype)
    return lambda waves: waves.S[first].view(dtype)


def vector_target(instruction: Instruction, text: str, kind: str, uses: Uses) -> Callable[[Waves, Array], None]:
    """How a vector instruction writes its result: u (any 32 bits), U (a pair of registers), m (a lane mask)."""
    if kind == "m":
        at = registers(instruction, text, uses, write=True, file="s").first
        return lambda waves, value: waves.set_pair(at, _bits(waves, value))
    first = registers(instruction, text, uses, write=True, file="v").first
    if kind == "U":

        def write_pair(waves: Waves, value: Array) -> None:
            waves.write(first, value.astype(np.uint32))
            waves.write(first + 1, (value >> np.uint64(32)).astype(np.uint32))

        return write_pair
    return lambda waves, value: waves.write(first, value.view(np.uint32))


def _bits(waves: Waves, value: Array) -> Array:
    """A result by lane as bits, 0 for inactive lanes."""
    packed = np.packbits(value & waves.mask, axis=1, bitorder="little")
    return packed.view(np.uint64)[:, 0]
