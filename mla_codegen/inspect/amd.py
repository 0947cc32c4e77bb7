"""Read GCN assembly as LLVM prints it for gfx942 and gfx950: registers, spills, and what kind each instruction is."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator

from mla_codegen.inspect.listing import Flow, Instruction, Item, Label, ListingError

_LINE = re.compile(r"\s+([a-z][a-z0-9_]+)(?:\s+([^;]*))?")
_LABEL = re.compile(r"(\.LBB\d+_\d+):")
_FAR = re.compile(r"\((\.LBB\w+)-\.Lpost_getpc")
_WIDTHS = {"u8": 1, "i8": 1, "b8": 1, "u16": 2, "i16": 2, "b16": 2, "b32": 4, "f32": 4, "b64": 8, "f64": 8}
_WIDTHS |= {"b96": 12, "b128": 16}
_TRANSCENDENTAL = re.compile(r"v_(exp|log|rcp|rsq|sqrt|sin|cos)_")
_MOVES = ("v_mov_", "v_accvgpr_", "v_swap_", "v_readlane", "v_writelane", "v_readfirstlane", "v_pk_mov_")
_WAITS = ("s_waitcnt", "s_wait_")
_CROSS_LANE = ("ds_bpermute", "ds_permute", "ds_swizzle")


def items(asm: str, kernel: str) -> Iterator[Item]:
    """Labels and instructions of the kernel's function, up to its end label.

    A jump too far for a branch is written as pc arithmetic and s_setpc_b64; its label is put among the operands.
    """
    far = ""
    lines = enumerate(asm.splitlines(), 1)
    for _, text in lines:
        if text.startswith(f"{kernel}:"):
            break
    else:
        raise ListingError(f"the assembly has no function {kernel}")
    for number, text in lines:
        if text.startswith(".Lfunc_end"):
            return
        if match := _LABEL.match(text):
            yield Label(match[1], number)
        elif match := _LINE.match(text):
            opcode, operands = match[1], (match[2] or "").strip()
            if label := _FAR.search(operands):
                far = label[1]
            if opcode == "s_setpc_b64":
                operands, far = f"{operands} {far}".strip(), ""
            yield Instruction(number, opcode, operands)


def flow(instruction: Instruction) -> Flow | None:
    """Where a branch goes; None for what is none."""
    opcode = instruction.opcode
    if opcode == "s_branch":
        return Flow((instruction.operands,), falls_through=False)
    if opcode.startswith("s_cbranch"):
        return Flow((instruction.operands,))
    if opcode == "s_setpc_b64":
        return Flow(tuple(instruction.operands.split()[1:]), falls_through=False)
    if opcode == "s_endpgm":
        return Flow((), falls_through=False)
    return None


def kind(instruction: Instruction) -> str:
    """The instruction's kind, one of report.KINDS."""
    opcode = instruction.opcode
    if opcode.startswith("v_"):
        return _vector_kind(opcode)
    if opcode.startswith("ds_"):
        if opcode.startswith(_CROSS_LANE):
            return "shuffle"
        return "lds_read" if opcode.startswith(("ds_read", "ds_load")) else "lds_write"
    if opcode.startswith("scratch_"):
        return "scratch"
    if opcode.startswith(("global_", "buffer_", "flat_")):
        return _memory_kind(instruction)
    if opcode.startswith(_WAITS):
        return "wait"
    if opcode.startswith("s_barrier"):
        return "barrier"
    return "scalar"


def _vector_kind(opcode: str) -> str:
    if opcode.startswith(("v_mfma_", "v_smfmac_")):
        return "matrix"
    if _TRANSCENDENTAL.match(opcode):
        return "transcendental"
    if opcode.startswith("v_cvt_"):
        return "conversion"
    if opcode.startswith("v_cndmask"):
        return "select"
    if opcode.startswith(("v_perm_", "v_permlane")):
        return "permute"
    return "move" if opcode.startswith(_MOVES) else "other_valu"


def _memory_kind(instruction: Instruction) -> str:
    opcode = instruction.opcode
    if "_lds_" in opcode or re.search(r"\blds\b", instruction.operands):
        return "async_copy"
    if opcode.startswith("buffer_") and "off, s[0:3], 0" in instruction.operands:
        return "scratch"  # a spill of the older kind: at a constant offset from the wave's private segment
    if "_load_" in opcode:
        return "global_load"
    if "_store_" in opcode or "_atomic_" in opcode:
        return "global_store"
    return "barrier"  # cache write-back and invalidate: orders memory


def lds_bytes(instruction: Instruction) -> int:
    """Bytes that an LDS access of a whole wave occupies the banks for: at least a bank's 4 bytes a lane."""
    opcode = instruction.opcode
    if not opcode.startswith("ds_"):
        return 0
    pair = 2 if re.match(r"ds_(read|write)2", opcode) else 1
    width = next((_WIDTHS[part] for part in opcode.split("_") if part in _WIDTHS), 4)
    return 64 * pair * max(width, 4)


def matrix_name(instruction: Instruction) -> str:
    """The matrix instruction's name."""
    return instruction.opcode


def resources(asm: str) -> dict[str, int]:
    """Registers, spills, scratch and code size, from the code object's metadata and LLVM's comments."""
    found = {
        name: _number(asm, rf"\.{key}:\s+(\d+)", key)
        for name, key in {
            "registers": "vgpr_count",
            "agprs": "agpr_count",
            "sgprs": "sgpr_count",
            "vgpr_spills": "vgpr_spill_count",
            "sgpr_spills": "sgpr_spill_count",
            "scratch_bytes": "private_segment_fixed_size",
        }.items()
    }
    found["code_bytes"] = _number(asm, r"; codeLenInByte = (\d+)", "codeLenInByte")
    return found


def llvm_occupancy(asm: str) -> int:
    """Waves a SIMD by LLVM's own reckoning (registers only: it does not see Triton's LDS)."""
    return _number(asm, r"; Occupancy: (\d+)", "Occupancy")


def opcode_family(instruction: Instruction) -> str:
    """The opcode without its encoding suffix: v_cndmask_b32_e32 -> v_cndmask_b32."""
    return re.sub(r"_(e32|e64|sdwa|dpp|e64_dpp)$", "", instruction.opcode)


def count_families(instructions: list[Instruction]) -> Counter[str]:
    """Instructions by family."""
    return Counter(map(opcode_family, instructions))


def _number(text: str, pattern: str, name: str) -> int:
    match = re.search(pattern, text)
    if not match:
        raise ListingError(f"the assembly does not give {name}")
    return int(match[1])
