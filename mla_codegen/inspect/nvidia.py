"""Read SASS as nvdisasm prints it: registers, stack and spills, and what kind each instruction is."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator

from mla_codegen.inspect.listing import Flow, Instruction, Item, Label, ListingError

_LINE = re.compile(r"\s+/\*([0-9a-f]+)\*/\s+(?:(@!?U?P\w+)\s+)?([A-Z][\w.]*)\s*([^;]*);")
_LABEL = re.compile(r"(\.L_x?_?\w+|\.L\w+):")
_TARGET = re.compile(r"`\((\.?\w+)\)")

_FAMILIES = {
    "matrix": "HMMA IMMA BMMA DMMA QMMA OMMA HGMMA QGMMA IGMMA BGMMA UTCHMMA UTCQMMA UTCIMMA UTCOMMA",
    "transcendental": "MUFU",
    "conversion": "F2F F2FP F2I I2F I2FP I2I F2IP I2IP FRND",
    "select": "SEL FSEL",
    "permute": "PRMT",
    "move": "MOV CS2R",
    "shuffle": "SHFL REDUX",
    "lds_read": "LDS LDSM",
    "lds_write": "STS STSM ATOMS",
    "global_load": "LDG LD",
    "global_store": "STG ST RED REDG ATOM ATOMG",
    "async_copy": "LDGSTS UTMALDG UTMASTG UTMAREDG UTMAPF UBLKCP UBLKPF UBLKRED",
    "scratch": "LDL STL",
    "wait": "SYNCS DEPBAR NANOSLEEP ACQBULK",
    "barrier": "BAR LDGDEPBAR ARRIVES WARPSYNC WARPGROUP WARPGROUPSET MEMBAR ERRBAR FENCE CCTL CCTLL UTMACMDFLUSH "
    "UTMACCTL",
    "scalar": "BRA BRX BRXU JMP CALL RET EXIT PREEXIT KILL BREAK BPT BSSY BSYNC LDC S2R R2UR ELECT VOTEU RPCMOV LEPC "
    "SETMAXREG NOP YIELD",
}
_KINDS = {family: kind for kind, families in _FAMILIES.items() for family in families.split()}
_WARP_SHAPES = {"1688": (16, 8, 8), "16816": (16, 8, 16), "16832": (16, 8, 32), "884": (8, 8, 4), "16864": (16, 8, 64)}


def items(sass: str, kernel: str) -> Iterator[Item]:
    """Labels and instructions of the kernel's section."""
    lines = enumerate(sass.splitlines(), 1)
    for _, text in lines:
        if text.startswith(f".text.{kernel}:"):
            break
    else:
        raise ListingError(f"the listing has no section .text.{kernel}")
    for number, text in lines:
        if text.startswith("//---"):
            return
        if match := _LABEL.match(text):
            yield Label(match[1], number)
        elif match := _LINE.match(text):
            yield Instruction(number, match[3], match[4].strip(), match[2] or "")


def flow(instruction: Instruction) -> Flow | None:
    """Where a branch goes; None for what is none. A guard, or a predicate before the target, makes it conditional."""
    base = _base(instruction)
    targets = tuple(_TARGET.findall(instruction.operands))
    conditional = bool(instruction.guard)
    if base in ("BRA", "JMP"):
        guarded = re.match(r"!?U?P\w+,|UR\w+,", instruction.operands)
        return Flow(targets, falls_through=conditional or guarded is not None or "DIV" in instruction.opcode)
    if base == "CALL":
        return Flow(targets, falls_through=True)
    if base in ("EXIT", "RET", "KILL", "BRX", "BRXU"):
        return Flow(targets, falls_through=conditional)
    return None


def kind(instruction: Instruction) -> str:
    """The instruction's kind, one of report.KINDS."""
    if instruction.opcode.startswith("WARPGROUP.DEPBAR"):
        return "wait"
    if instruction.opcode.startswith("HADD2.F32"):  # how 16-bit numbers are widened
        return "conversion"
    base = _base(instruction)
    if base in _KINDS:
        return _KINDS[base]
    return "scalar" if base.startswith(("U", "S2")) else "other_valu"  # U..: the uniform (scalar) datapath


def lds_bytes(instruction: Instruction) -> int:
    """Bytes of shared memory that the instruction moves for one warp (wgmma operands are in `operand_bytes`)."""
    parts = instruction.opcode.split(".")
    if parts[0] in ("LDSM", "STSM"):
        return 128 * next((int(part) for part in reversed(parts) if part in ("2", "4")), 1)
    if parts[0] in ("LDS", "STS", "ATOMS"):
        bits = next((int(part) for part in parts if part in ("64", "128")), 32)
        return 32 * bits // 8
    return 0


def operand_bytes(instruction: Instruction) -> int:
    """Bytes of shared memory that a wgmma reads for a whole warp group: B always, A where it is not in registers."""
    if not instruction.opcode.startswith(("HGMMA", "QGMMA", "IGMMA")):
        return 0
    m, n, k = mma_shape(instruction)
    element = 1 if instruction.opcode.startswith(("QGMMA", "IGMMA")) else 2
    operands = [part.strip() for part in instruction.operands.split(",")]
    a_in_registers = len(operands) > 1 and operands[1].startswith("R") and not operands[1].startswith("RZ")
    return element * k * (n + (0 if a_in_registers else m))


def mma_shape(instruction: Instruction) -> tuple[int, int, int]:
    """M, N, K of a matrix instruction: HMMA.16816 and HGMMA.64x64x16 alike. ListingError for a shape not known."""
    for part in instruction.opcode.split(".")[1:]:
        if match := re.fullmatch(r"(\d+)x(\d+)x(\d+)", part):
            return int(match[1]), int(match[2]), int(match[3])
        if part in _WARP_SHAPES:
            return _WARP_SHAPES[part]
    raise ListingError(f"line {instruction.line}: the shape of {instruction.opcode} is not known")


def matrix_name(instruction: Instruction) -> str:
    """The matrix instruction's name with shape and types."""
    return instruction.opcode


def resources(usage: str, log: str, sass: str, kernel: str) -> dict[str, int]:
    """Registers and stack from cuobjdump, spills from ptxas' log, code size from the last instruction's address."""
    match = re.search(rf"Function {re.escape(kernel)}:\s*\n\s*REG:(\d+) STACK:(\d+)", usage)
    if not match:
        raise ListingError(f"cuobjdump gives no resource usage of {kernel}")
    spills = re.search(r"(\d+) bytes spill stores", log)
    if not spills:
        raise ListingError("ptxas' log does not give its spills")
    addresses = re.findall(r"^\s+/\*([0-9a-f]+)\*/", sass, re.MULTILINE)
    return {
        "registers": int(match[1]),
        "agprs": 0,
        "sgprs": 0,
        "vgpr_spills": int(spills[1]) // 4,
        "sgpr_spills": 0,
        "scratch_bytes": int(match[2]),
        "code_bytes": max((int(address, 16) for address in addresses), default=-16) + 16,
    }


def opcode_family(instruction: Instruction) -> str:
    """The opcode without its modifiers: HMMA.16816.F32 -> HMMA."""
    return _base(instruction)


def count_families(instructions: list[Instruction]) -> Counter[str]:
    """Instructions by family."""
    return Counter(map(opcode_family, instructions))


def _base(instruction: Instruction) -> str:
    return instruction.opcode.split(".")[0]
