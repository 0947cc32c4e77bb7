"""The compiler's assembly text as instructions with operands and modifiers, held against the code object's bytes.

The text says what LLVM was asked to encode, the bytes are what runs. `match` walks both in step: every instruction must
have the length and the encoding that its name stands for, one name one opcode number and the other way round, and
every branch must reach its label.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field

from mla_codegen.inspect import amd
from mla_codegen.inspect.listing import Label

VCC, M0, EXEC = 106, 124, 126
AGPRS = 256  # AGPR n is register 256 + n of a wave's vector registers
_NAMED = {"vcc": (VCC, 2), "vcc_lo": (VCC, 1), "vcc_hi": (VCC + 1, 1), "m0": (M0, 1)}
_NAMED |= {"exec": (EXEC, 2), "exec_lo": (EXEC, 1), "exec_hi": (EXEC + 1, 1)}
_REGISTER = re.compile(r"([vsa])(?:(\d+)|\[(\d+):(\d+)\])")
_MODIFIER = re.compile(r"[a-z_0-9]+:\[[^\]]*\]|[a-z_0-9]+:[a-z]+\([^)]*\)|\S+")
_SUFFIX = re.compile(r"_(e32|e64|sdwa|dpp|e64_dpp)$")
_FLOATS = {
    "0.5": 0x3F000000, "-0.5": 0xBF000000, "1.0": 0x3F800000, "-1.0": 0xBF800000, "2.0": 0x40000000,
    "-2.0": 0xC0000000, "4.0": 0x40800000, "-4.0": 0xC0800000, "0.15915494": 0x3E22F983,
}  # fmt: skip


class Unknown(NotImplementedError):
    """An instruction, or a form of one, whose meaning the executor does not have; names it and its line."""

    def __init__(self, instruction: Instruction, why: str = "") -> None:
        super().__init__(f"not modelled{f' ({why})' if why else ''}: {instruction}")


class Mismatch(ValueError):
    """Assembly text that is not that of the code object."""


@dataclass(frozen=True)
class Register:
    """`count` registers from `first` on; file: v (AGPRs from AGPRS on) or s."""

    file: str
    first: int
    count: int

    @property
    def numbers(self) -> range:
        return range(self.first, self.first + self.count)


@dataclass
class Instruction:
    """One line of the listing.

    opcode       with the encoding's suffix; name: without; suffix: e32, e64, sdwa, dpp or ''
    operands     as written; modifiers: name -> value ('' for a flag)
    number       its place in the listing; offset: in the code, once matched
    """

    opcode: str
    text: str
    line: int
    number: int
    name: str = ""
    suffix: str = ""
    operands: list[str] = field(default_factory=list)
    modifiers: dict[str, str] = field(default_factory=dict)
    offset: int = -1

    def __post_init__(self) -> None:
        found = _SUFFIX.search(self.opcode)
        self.suffix = found[1] if found else ""
        self.name = self.opcode[: found.start()] if found else self.opcode
        self.operands, self.modifiers = split_operands(self.text)

    def __str__(self) -> str:
        return f"line {self.line} `{f'{self.opcode} {self.text}'.strip()}`"

    def offset_of(self, name: str = "offset") -> int:
        """An address offset among the modifiers."""
        return int(self.modifiers.get(name) or "0", 0)

    def allow(self, *modifiers: str) -> None:
        """Refuse the instruction if it has any other modifier."""
        for name in self.modifiers:
            if name not in modifiers:
                raise Unknown(self, f"modifier {name}")


def split_operands(text: str) -> tuple[list[str], dict[str, str]]:
    """`v1, v[2:3], s[0:3], 0 offen offset:16` -> operands, modifiers."""
    parts = [part.strip() for part in re.split(r",\s*(?![^\[(]*[\])])", text)] if text else []
    words = _MODIFIER.findall(parts[-1]) if parts else []
    if words:
        parts[-1] = words[0]
    modifiers = {}
    for word in words[1:]:
        name, _, value = word.partition(":")
        modifiers[name] = value
    return parts, modifiers


def register(text: str) -> Register | None:
    """An operand's registers, its sign and bars left aside; None for a number."""
    text = text.strip("-|")
    if text in _NAMED:
        return Register("s", *_NAMED[text])
    found = _REGISTER.fullmatch(text)
    if not found:
        return None
    first, last = int(found[2] or found[3]), int(found[2] or found[4])
    if found[1] == "a":
        return Register("v", first + AGPRS, last - first + 1)
    return Register(found[1], first, last - first + 1)


def number(text: str) -> int:
    """A constant operand: an integer, or the bits of an fp32 number."""
    return _FLOATS[text] if text in _FLOATS else int(text, 0)


def parse(asm: str, kernel: str) -> tuple[list[Instruction], dict[str, int]]:
    """(instructions, label -> number of the instruction behind it)"""
    instructions: list[Instruction] = []
    labels: dict[str, int] = {}
    for item in amd.items(asm, kernel):
        if isinstance(item, Label):
            labels[item.name] = len(instructions)
        else:
            instructions.append(Instruction(item.opcode, item.operands, item.line, len(instructions)))
    return instructions, labels


# --- the bytes: AMD's "CDNA3 Instruction Set Architecture", 13 Microcode Formats ---

_PADDING = (0xBF9F0000, 0xBF800000)  # s_code_end, s_nop 0
_LITERAL, _SDWA, _DPP = 255, 249, 250


def match(code: bytes, instructions: Sequence[Instruction], labels: dict[str, int]) -> None:
    """Give every instruction its offset in `code`; Mismatch where text and bytes part."""
    at = 0
    names: dict[tuple[str, int], str] = {}
    opcodes: dict[str, tuple[str, int]] = {}
    for previous, one in zip([None, *instructions], instructions, strict=False):
        if previous and previous.opcode == "s_branch" and previous.number < 16:
            at = _skip_padding(code, at)
        if at + 4 > len(code):
            raise Mismatch(f"the code ends before {one}")
        form, opcode, size = _decode(code, at)
        wanted = _form_of(one)
        if form not in wanted:
            raise Mismatch(f"at {at:#x} stands a {form}, not {one}")
        known = names.setdefault((form, opcode), one.name)
        if known != one.name or opcodes.setdefault(f"{one.name} {form}", (form, opcode)) != (form, opcode):
            raise Mismatch(f"at {at:#x} stands {form} {opcode:#x}, which is `{known}`, not {one}")
        one.offset = at
        at += size
    if any(word not in _PADDING for (word,) in struct.iter_unpack("<I", code[at : len(code) // 4 * 4])):
        raise Mismatch(f"code behind {instructions[-1]}")
    for one in instructions:
        if one.opcode.startswith(("s_branch", "s_cbranch")):
            (jump,) = struct.unpack_from("<h", code, one.offset)
            there = one.offset + 4 + 4 * jump
            target = instructions[labels[one.operands[0]]]
            if there != target.offset:
                raise Mismatch(f"{one} jumps to {there:#x}, its label is at {target.offset:#x}")


def _skip_padding(code: bytes, at: int) -> int:
    """Behind the part that loads what would have been preloaded the code goes on at a multiple of 256 bytes."""
    end = (at + 255) // 256 * 256
    words = struct.unpack_from(f"<{(min(end, len(code)) - at) // 4}I", code, at)
    return end if all(word in _PADDING for word in words) else at


def _form_of(one: Instruction) -> tuple[str, ...]:
    """The encodings that an instruction's name may have."""
    name = one.opcode
    if name.startswith(("s_load", "s_buffer", "s_store", "s_dcache", "s_memtime", "s_memrealtime", "s_scratch")):
        return ("SMEM",)
    if name.startswith("s_"):
        return ("SOP1", "SOP2", "SOPC", "SOPP", "SOPK")
    if name.startswith("v_"):
        if one.suffix in ("e32", "sdwa", "dpp"):
            return ("VOP1", "VOP2", "VOPC")
        return ("VOP3", "VOP3P", "VOP1", "VOP2") if one.suffix == "" else ("VOP3",)
    if name.startswith("ds_"):
        return ("DS",)
    return ("MUBUF",) if name.startswith("buffer_") else ("FLAT",)


def _decode(code: bytes, at: int) -> tuple[str, int, int]:
    """(encoding, opcode number, bytes) of the instruction at `at`."""
    (word,) = struct.unpack_from("<I", code, at)
    low, second = word & 0xFF, word >> 8 & 0xFF
    if word >> 30 == 2:
        top = word >> 23
        if top == 0b101111101:
            return "SOP1", second, 8 if low == _LITERAL else 4
        if top == 0b101111110:
            return "SOPC", word >> 16 & 0x7F, 8 if _LITERAL in (low, second) else 4
        if top == 0b101111111:
            return "SOPP", word >> 16 & 0x7F, 4
        if word >> 28 == 0b1011:
            opcode = word >> 23 & 0x1F
            return "SOPK", opcode, 8 if opcode == 20 else 4  # s_setreg_imm32_b32
        return "SOP2", word >> 23 & 0x7F, 8 if _LITERAL in (low, second) else 4
    if word >> 31 == 0:
        wide = 8 if word & 0x1FF in (_LITERAL, _SDWA, _DPP) else 4
        if word >> 25 == 0b0111111:
            return "VOP1", word >> 9 & 0xFF, wide
        if word >> 25 == 0b0111110:
            return "VOPC", word >> 17 & 0xFF, wide
        opcode = word >> 25
        return "VOP2", opcode, 8 if opcode in (23, 24, 36, 37) else wide  # with a constant in the code
    top = word >> 26
    if top == 0b110100:
        opcode = word >> 16 & 0x3FF
        if word >> 23 & 7 == 7:
            opcode = word >> 16 & 0x7F
            if opcode != 0x2C:
                return "VOP3P", opcode, 8
            return "VOP3P", 0x1000 | struct.unpack_from("<I", code, at + 8)[0] >> 16 & 0x7F, 16  # scales, then the MFMA
        return "VOP3", opcode, 8
    if top == 0b110111:
        return "FLAT", word >> 14 & 3 | (word >> 18 & 0x7F) << 2, 8
    forms = {0b110000: ("SMEM", 18, 0xFF), 0b110110: ("DS", 17, 0xFF), 0b111000: ("MUBUF", 18, 0x7F)}
    if top not in forms:
        raise Mismatch(f"at {at:#x} stands {word:#010x}, of no known encoding")
    form, shift, mask = forms[top]
    return form, word >> shift & mask, 8
