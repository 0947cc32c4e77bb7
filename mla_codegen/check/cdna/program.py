"""A kernel made executable: its instructions as functions of waves, in blocks that end where control may turn."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from mla_codegen.check.cdna import lanes, lds_access, listing, matrix, scalar, vector, vmem
from mla_codegen.check.cdna.code_object import CodeObject
from mla_codegen.check.cdna.listing import Instruction, Unknown
from mla_codegen.check.cdna.operands import Uses
from mla_codegen.check.cdna.state import SCALARS, Waves

ENTRY_AFTER_PRELOAD = 256  # bytes: a kernel's arguments are in SGPRs already, so the code that loads them is skipped


@dataclass(frozen=True)
class Step:
    """One instruction ready to run. `touches`: registers that must not be under way, scalar ones from SCALARS on."""

    instruction: Instruction
    run: Callable[[Waves], Any]
    reads: frozenset[int]
    touches: frozenset[int]


@dataclass(frozen=True)
class Branch:
    """A branch's target and which waves take it; None: all."""

    target: int
    taken: Callable[[Waves], Any] | None


class Program:
    """A kernel's instructions, bound to the memory of `machine`.

    ends       number of an instruction -> one behind the last of its block
    branches   of those that are branches
    """

    def __init__(self, asm: str, code: CodeObject, machine: vmem.Machine) -> None:
        self.code = code
        self.instructions, self.labels = listing.parse(asm, code.name)
        listing.match(code.code, self.instructions, self.labels)
        self.branches: dict[int, Branch] = {}
        self.steps = [self._step(one, machine) for one in self.instructions]
        self.entry = self._entry()
        leaders = {*self.labels.values(), self.entry, 0}
        leaders |= {one.number + 1 for one in self.instructions if self._turns(one)}
        self.ends = self._ends(leaders)
        self.registers = 1 + max(
            (number for step in self.steps for number in step.touches if number < SCALARS), default=0
        )

    def _entry(self) -> int:
        offset = self.code.entry + (ENTRY_AFTER_PRELOAD if self.code.preload else 0)
        at = {one.offset: one.number for one in self.instructions}
        if offset not in at:
            raise listing.Mismatch(f"no instruction begins at the entry {offset:#x}")
        return at[offset]

    def _turns(self, one: Instruction) -> bool:
        return one.number in self.branches or one.opcode in ("s_barrier", "s_endpgm")

    def _ends(self, leaders: set[int]) -> np.ndarray[Any, Any]:
        ends = np.zeros(len(self.instructions), np.int64)
        end = len(self.instructions)
        for number in reversed(range(len(self.instructions))):
            ends[number] = end
            if number in leaders:
                end = number
        return ends

    def _step(self, one: Instruction, machine: vmem.Machine) -> Step:
        uses = Uses()
        if one.opcode.startswith(("s_branch", "s_cbranch")):
            self.branches[one.number] = Branch(self.labels[one.operands[0]], scalar.branch(one, uses))
            run: Callable[[Waves], Any] = _nothing
        else:
            run = build(one, uses, self.code.arch, self.code.denormals, machine)
        reads = frozenset(uses.reads)
        # What an instruction overwrites must not be under way either.
        return Step(one, run, reads, reads | frozenset(uses.writes))


def build(one: Instruction, uses: Uses, arch: str, denormals: bool, machine: vmem.Machine) -> Callable[[Waves], Any]:
    """What an instruction does to waves; of branches and barriers nothing. Raises Unknown, naming it and its line."""
    try:
        return _build(one, uses, arch, denormals, machine)
    except (ValueError, KeyError, IndexError) as error:  # operands that are none
        raise Unknown(one, f"{type(error).__name__}: {error}") from error


def _build(one: Instruction, uses: Uses, arch: str, denormals: bool, machine: vmem.Machine) -> Callable[[Waves], Any]:
    name = one.opcode
    if name in ("s_barrier", "s_endpgm"):
        return _nothing
    if name == "s_waitcnt":
        return waiting(*scalar.waits(one), machine)
    if name.startswith("s_load"):
        return scalar.load(one, uses, lambda: machine.memory)
    if name.startswith("s_"):
        return scalar.build(one, uses)
    if name.startswith("v_mfma"):
        return matrix.build(one, uses, arch)
    if name.startswith("v_"):
        return lanes.build(one, uses, arch, machine.findings) or vector.build(one, uses, denormals)
    if name.startswith("ds_"):
        return lds_access.build(one, uses, machine)
    if name.startswith("scratch_"):
        return vmem.build_scratch(one, uses, machine)
    return vmem.build(one, uses, machine)


def _nothing(waves: Waves) -> None:
    return None


def waiting(vm: int | None, lgkm: int | None, machine: vmem.Machine) -> Callable[[Waves], Any]:
    """s_waitcnt with these counts; None: not waited for."""

    def wait(waves: Waves) -> None:
        done = waves.wait_vm(vm) if vm is not None else []
        for access in done:
            if access.marks is not None:
                machine.lds.landed(access.marks)
        if lgkm is not None:
            done = done + waves.wait_lgkm(lgkm)
        machine.waits += waves.count * bool(done)

    return wait
