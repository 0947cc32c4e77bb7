"""Wait states that gfx942 and gfx950 leave to software, held over every path of a compiled kernel.

The matrix units read and write registers long after they were told to, and nothing in the hardware waits for them; a
few other pairs of instructions are alike. LLVM puts s_nop between such pairs, but only where it knows both
instructions: what stands in inline assembly it does not see. Two instructions that are closer than their rule allows
give old registers, without any error.

Each rule is a function with its numbers. They are those of AMD's "CDNA3" and "CDNA4 Instruction Set Architecture"
(4.5 Manually Inserted Wait States, 7.5 / 7.6 Dependency Resolution: Required Independent Instructions) and of LLVM's
GCNHazardRecognizer.cpp, whose function is named with the rule.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from mla_codegen.inspect import amd
from mla_codegen.inspect.listing import Block, Instruction, build_blocks

# A set of registers is an int with a bit for each: 512 vector registers (AGPRs are the upper half of one file), then
# the scalar ones.
_SCALAR = 512
_VECTOR = (1 << _SCALAR) - 1
_NAMED = {"vcc": (106, 2), "vcc_lo": (106, 1), "vcc_hi": (107, 1), "m0": (124, 1)}
_NAMED |= {"exec": (126, 2), "exec_lo": (126, 1), "exec_hi": (127, 1)}
_VCC, _M0, _EXEC = 0b11 << _SCALAR + 106, 1 << _SCALAR + 124, 0b11 << _SCALAR + 126
_REGISTER = re.compile(r"\b(?:([vsa])(?:(\d+)|\[(\d+):(\d+)\])|(vcc|exec)(_lo|_hi)?|m0)(?![\w:\[])")

# Passes of four cycles that a matrix instruction takes, by its shape (LLVM: SISchedule.td). Those on fp32 and fp64
# operands follow other rules and are not here; of 16x16x128 and 32x32x64 see `_passes`.
_PASSES = (
    (re.compile(r"v_mfma_\w+?_4x4x"), 2),
    (re.compile(r"v_mfma_\w+?_16x16x(8_xf32|16_|32_|64_)|v_smfmac_\w+?_16x16x"), 4),
    (re.compile(r"v_mfma_\w+?_32x32x(4_xf32|8_|16_|32_)|v_smfmac_\w+?_32x32x"), 8),
)
_NARROW = re.compile(r"cbsz:[234]\b.*blgp:[234]\b")  # both operands of 6 or 4 bits: half the passes
FURTHEST = 20  # no rule asks for more wait states

_TWO_RESULTS = re.compile(r"v_(add|addc|sub|subb|subrev|subbrev)_co_|v_div_scale_|v_mad_[ui]64_[ui]32")
_ACCUMULATES = re.compile(r"v_(fmac|mac|pk_fmac|dot\w*c)_|v_writelane|v_cvt_(pk|sr)_[fb]f?8_|v_cvt_scalef32_(pk|sr)")
_RETURNS = re.compile(r"ds_(read|load|bpermute|permute|swizzle|consume|append)|ds_\w+_rtn_")
_NO_RESULT = re.compile(r"s_(cmp|bitcmp|cbranch|branch|waitcnt|barrier|nop|setreg|sleep|endpgm|setprio|sendmsg)")


@dataclass(frozen=True)
class Step:
    """An instruction as the rules see it. `sources`: the registers of each operand behind the first."""

    instruction: Instruction
    opcode: str
    reads: int
    writes: int
    sources: tuple[int, ...]
    matrix: bool
    valu: bool  # on the vector ALU and no matrix instruction
    vmem: bool
    lds: bool
    dpp: bool
    transcendental: bool
    partial: bool  # writes a part of a vector register
    passes: int | None
    states: int  # wait states that it is worth

    @property
    def c(self) -> int:
        """Registers of a matrix instruction's C."""
        if self.opcode.startswith("v_smfmac"):
            return self.writes
        return self.sources[2] if len(self.sources) > 2 else 0

    @property
    def factors(self) -> int:
        """Registers of its A, B, scales and indices."""
        return _union(source for number, source in enumerate(self.sources) if number != 2 or "smfmac" in self.opcode)


@dataclass(frozen=True)
class Hazard:
    """Two instructions that are too close on some path. `there` wait states of the `wanted` lie between them."""

    rule: str
    first: Instruction
    second: Instruction
    wanted: int
    there: int

    def __str__(self) -> str:
        pair = " then ".join(f"line {one.line} `{one.opcode} {one.operands}`" for one in (self.first, self.second))
        return f"{self.rule}: {pair}, {self.there} wait states between them of {self.wanted}"


Wanted = Callable[[Step, Step, int, bool], int]
RULES: dict[str, Wanted] = {}


def rule(text: str) -> Callable[[Wanted], Wanted]:
    """Register `wanted(first, second, live, gfx950)`: the wait states that the pair needs, 0 where it is no such pair.

    live   registers of `second` that nothing between the two has written
    """

    def register(wanted: Wanted) -> Wanted:
        RULES[text] = wanted
        return wanted

    return register


# --- matrix instructions: ISA 7.5 (CDNA4: 7.6) ---


@rule("a vector result read by a matrix instruction")
def _result_to_matrix(first: Step, second: Step, live: int, gfx950: bool) -> int:
    """checkMAIHazards90A: LegacyVALUNotDotWritesVGPRWaitStates."""
    return 2 if first.valu and second.matrix and first.writes & second.reads & live & _VECTOR else 0


@rule("EXEC written, then a matrix instruction")
def _exec_to_matrix(first: Step, second: Step, live: int, gfx950: bool) -> int:
    """checkMAIHazards90A: VALUWritesExecWaitStates."""
    return 4 if first.valu and second.matrix and first.writes & _EXEC else 0


@rule("a matrix result read as A or B")
def _matrix_to_factor(first: Step, second: Step, live: int, gfx950: bool) -> int:
    """GFX940_XDL_N_PassWritesVGPROverlappedSrcABWaitStates."""
    if not (first.passes and second.matrix and first.writes & second.factors & live):
        return 0
    return first.passes + 3 + _later(first, gfx950)


@rule("a matrix result read as C")
def _matrix_to_sum(first: Step, second: Step, live: int, gfx950: bool) -> int:
    """GFX940_XDL_N_PassWritesVGPROverlappedXDLOrSMFMASrcCWaitStates; the same registers are forwarded."""
    if not (first.passes and second.matrix and first.writes & second.c & live):
        return 0
    if first.writes == second.c:
        return 2 if first.passes == 2 else 0
    return first.passes + 1 + _later(first, gfx950)


@rule("a matrix result read by a vector, LDS or memory instruction")
def _matrix_to_reader(first: Step, second: Step, live: int, gfx950: bool) -> int:
    """GFX940_XDL_N_PassWriteVgprVALUMemExpReadWaitStates."""
    if not (first.passes and not second.matrix and first.writes & second.reads & live):
        return 0
    return first.passes + 3 + _later(first, gfx950)


@rule("a matrix result overwritten by a vector, LDS or memory instruction")
def _matrix_to_writer(first: Step, second: Step, live: int, gfx950: bool) -> int:
    """GFX940_XDL_N_PassWriteVgprVALUWawWaitStates."""
    if not (first.passes and not second.matrix and first.writes & second.writes & live):
        return 0
    return first.passes + 3 + _later(first, gfx950)


@rule("C of a matrix instruction overwritten by a vector, LDS or memory instruction")
def _sum_to_writer(first: Step, second: Step, live: int, gfx950: bool) -> int:
    """checkMAIVALUHazards: SMFMA4x4 / GFX940_XDL4Pass / SMFMA16x16 / SMFMA32x32ReadVgprVALUWarWaitStates."""
    return first.passes - 1 if first.passes and not second.matrix and first.c & second.writes else 0


def _later(first: Step, gfx950: bool) -> int:
    """gfx950 writes the results of all but the shortest matrix instructions a cycle later."""
    return 1 if gfx950 and first.passes != 2 else 0


# --- the vector ALU: ISA 4.5 ---


@rule("a scalar result of a vector instruction read by a memory instruction")
def _scalar_to_memory(first: Step, second: Step, live: int, gfx950: bool) -> int:
    """checkVMEMHazards."""
    return 5 if first.valu and second.vmem and _scalars(first.writes & second.reads & live) else 0


@rule("a scalar result of a vector instruction selects a lane")
def _scalar_to_lane(first: Step, second: Step, live: int, gfx950: bool) -> int:
    """checkRWLaneHazards."""
    selects = second.opcode in ("v_readlane_b32", "v_writelane_b32") and len(second.sources) > 1
    return 4 if first.valu and selects and _scalars(first.writes & second.sources[1] & live) else 0


@rule("a scalar result of a vector instruction read by another")
def _scalar_to_vector(first: Step, second: Step, live: int, gfx950: bool) -> int:
    """checkVALUHazards: VALUWriteSGPRVALUReadWaitstates; v_div_fmas reads VCC later: checkDivFMasHazards."""
    if not (first.valu and second.valu and _scalars(first.writes & second.reads & live)):
        return 0
    return 4 if second.opcode.startswith("v_div_fmas") and first.writes & _VCC else 2


@rule("a vector result read across lanes")
def _vector_to_lanes(first: Step, second: Step, live: int, gfx950: bool) -> int:
    """checkDPPHazards, checkPermlaneHazards; checkVALUHazards: VALUWriteVGPRReadlaneRead."""
    if not (first.valu and first.writes & second.reads & live & _VECTOR):
        return 0
    if second.dpp or second.opcode.startswith(("v_permlane16_swap", "v_permlane32_swap")):
        return 2
    return 1 if second.opcode in ("v_readlane_b32", "v_readfirstlane_b32") else 0


@rule("EXEC written, then a read across lanes")
def _exec_to_lanes(first: Step, second: Step, live: int, gfx950: bool) -> int:
    """checkDPPHazards, checkPermlaneHazards; checkVALUHazards: VALUWriteEXECRWLane."""
    if not (first.valu and first.writes & _EXEC):
        return 0
    lanes = ("v_permlane", "v_readlane", "v_readfirstlane", "v_writelane")
    return 5 if second.dpp else 4 if second.opcode.startswith(lanes) else 0


@rule("a transcendental result read by a vector instruction")
def _transcendental_to_vector(first: Step, second: Step, live: int, gfx950: bool) -> int:
    """checkVALUHazards: TransDefWaitstates."""
    reader = second.valu and not second.transcendental
    return 1 if first.transcendental and reader and first.writes & second.reads & live else 0


@rule("a part of a vector register written, then the register read")
def _part_to_vector(first: Step, second: Step, live: int, gfx950: bool) -> int:
    """checkVALUHazards: Shift16DefWaitstates."""
    return 1 if first.partial and second.valu and first.writes & second.reads & live else 0


# --- memory: ISA 4.5 ---


@rule("data of a wide store overwritten")
def _stored_to_writer(first: Step, second: Step, live: int, gfx950: bool) -> int:
    """checkVALUHazardsHelper, createsVALUHazard: more than 8 bytes a lane and no scalar offset in a register."""
    if not (first.vmem and "_store_" in first.opcode and (second.valu or second.matrix)):
        return 0
    operands = _operands(first.instruction)
    if first.opcode.startswith("buffer_"):
        data = _registers(operands[0])
        if len(operands) > 3 and _registers(operands[3]):
            return 0
    else:
        data = _registers(operands[1])
    return 2 if data.bit_count() > 2 and data & second.writes else 0


@rule("M0 written, then a copy to LDS")
def _m0_to_copy(first: Step, second: Step, live: int, gfx950: bool) -> int:
    """checkReadM0Hazards."""
    return 1 if first.opcode.startswith("s_") and first.writes & second.reads & live & _M0 else 0


# --- the walk ---


def find(asm: str, kernel: str, arch: str) -> list[Hazard]:
    """The pairs of the kernel that stand too close, each once, in the listing's order.

    A matrix instruction whose length is not known is one too: nothing can be said of what comes behind it.
    """
    blocks = build_blocks(amd.items(asm, kernel), amd.flow)
    steps = [[_step(one) for one in block.instructions] for block in blocks]
    before = _predecessors(blocks)
    found: dict[tuple[str, int, int], Hazard] = {}
    for number, inside in enumerate(steps):
        for index, second in enumerate(inside):
            if second.matrix and second.passes is None:
                text = "a matrix instruction that the rules do not know"
                found[text, second.instruction.line, 0] = Hazard(text, second.instruction, second.instruction, 1, 0)
            if not (second.matrix or second.valu or second.vmem or second.lds):
                continue
            for first, there, live in _earlier(steps, before, number, index):
                for text, wanted in RULES.items():
                    states = wanted(first, second, live, arch == "gfx950")
                    if states > there:
                        key = (text, first.instruction.line, second.instruction.line)
                        if key not in found or found[key].there > there:
                            found[key] = Hazard(text, first.instruction, second.instruction, states, there)
    return sorted(found.values(), key=lambda one: (one.second.line, one.first.line))


def _earlier(
    steps: Sequence[Sequence[Step]], before: Sequence[Sequence[int]], block: int, index: int
) -> Iterator[tuple[Step, int, int]]:
    """Instructions that may run before that of `block` at `index`, with the wait states between and what is live."""
    second = steps[block][index]
    paths = [(block, index, 0, second.reads | second.writes)]
    seen: set[tuple[int, int, int]] = set()  # of blocks entered from their end
    while paths:
        number, end, there, live = paths.pop()
        for first in reversed(steps[number][:end]):
            yield first, there, live
            there += first.states
            live &= ~first.writes
            if there >= FURTHEST:
                break
        else:
            for one in before[number]:
                if (one, there, live) not in seen:
                    seen.add((one, there, live))
                    paths.append((one, len(steps[one]), there, live))


def _predecessors(blocks: Sequence[Block]) -> list[list[int]]:
    before: list[list[int]] = [[] for _ in blocks]
    for number, block in enumerate(blocks):
        for successor in block.successors:
            before[successor].append(number)
    return before


# --- what an instruction reads and writes ---


def _step(instruction: Instruction) -> Step:
    opcode = amd.opcode_family(instruction)
    kind = amd.kind(instruction)
    matrix, vector = kind == "matrix", opcode.startswith("v_")
    partial = vector and _writes_a_part(instruction)
    reads, writes, sources = _effects(instruction, opcode, partial)
    return Step(
        instruction,
        opcode,
        reads,
        writes,
        sources,
        matrix=matrix,
        valu=vector and not matrix,
        vmem=opcode.startswith(("buffer_", "global_", "flat_", "scratch_")),
        lds=opcode.startswith("ds_"),
        dpp=instruction.opcode.endswith("_dpp"),
        transcendental=kind == "transcendental",
        partial=partial,
        passes=_passes(instruction) if matrix else None,
        states=int(instruction.operands, 0) + 1 if opcode == "s_nop" else 1,
    )


def _effects(instruction: Instruction, opcode: str, partial: bool) -> tuple[int, int, tuple[int, ...]]:
    """(registers read, registers written, those of each operand behind the first)."""
    registers = [_registers(operand) for operand in _operands(instruction)]
    first, rest = registers[0] if registers else 0, tuple(registers[1:])
    reads, writes = _union(rest), first
    if opcode.startswith("v_"):
        if "_swap_" in opcode:
            reads, writes = first | _union(rest), first | _union(rest)
        elif _TWO_RESULTS.match(opcode):
            reads, writes = _union(rest[1:]), first | rest[0]
        elif opcode.startswith("v_cmpx"):
            writes |= _EXEC
        elif opcode.startswith("v_div_fmas"):
            reads |= _VCC
        elif _ACCUMULATES.match(opcode) or opcode.startswith("v_smfmac") or partial:
            reads |= first
        if instruction.opcode.endswith("_dpp"):
            reads |= first
    elif opcode.startswith("ds_"):
        if not _RETURNS.match(opcode):
            reads, writes = reads | first, 0
    elif opcode.startswith(("buffer_", "global_", "flat_", "scratch_")):
        to_lds = "_lds_" in opcode or re.search(r"\blds\b", instruction.operands)
        if to_lds:
            reads, writes = reads | first | _M0, 0
        elif "_atomic_" in opcode:
            reads, writes = reads | first, first if re.search(r"\b(sc0|glc)\b", instruction.operands) else 0
        elif "_load_" not in opcode:
            reads, writes = reads | first, 0
    elif _NO_RESULT.match(opcode):
        reads, writes = reads | first, 0
    elif "saveexec" in opcode:
        writes |= _EXEC
    return reads, writes, rest


def _operands(instruction: Instruction) -> list[str]:
    """The operands without the modifiers behind the last."""
    parts = re.split(r",\s*(?![^\[(]*[\])])", instruction.operands)
    return [*parts[:-1], *parts[-1].split()[:1]]


def _registers(operand: str) -> int:
    found = 0
    for match in _REGISTER.finditer(operand):
        file, one, low, high = match[1], match[2], match[3], match[4]
        if file is None:
            at, count = _NAMED[match[0]]
            at += _SCALAR
        else:
            at, last = int(one or low), int(one or high)
            count = last - at + 1
            at += {"v": 0, "a": 256, "s": _SCALAR}[file]
        found |= ((1 << count) - 1) << at
    return found


def _union(registers: Iterator[int] | Sequence[int]) -> int:
    found = 0
    for one in registers:
        found |= one
    return found


def _scalars(registers: int) -> int:
    """Scalar registers but EXEC, which has rules of its own."""
    return (registers & ~_EXEC) >> _SCALAR


def _writes_a_part(instruction: Instruction) -> bool:
    """SDWA into a byte or a half, or op_sel that names the upper half of the result."""
    if instruction.opcode.endswith("_sdwa"):
        selected = re.search(r"dst_sel:(\w+)", instruction.operands)
        return selected is not None and selected[1] != "DWORD"
    selects = re.search(r"op_sel:\[([01,]+)\]", instruction.operands)
    if selects is None:
        return False
    bits = selects[1].split(",")
    return len(bits) == len(_operands(instruction)) and bits[-1] == "1"


def _passes(instruction: Instruction) -> int | None:
    """Passes of a matrix instruction; None where its shape is not known."""
    for shape, passes in (("16x16x128", 8), ("32x32x64_f8f6f4", 16)):
        if shape in instruction.opcode:
            return passes // 2 if _NARROW.search(instruction.operands) else passes
    return next((passes for pattern, passes in _PASSES if pattern.match(instruction.opcode)), None)
