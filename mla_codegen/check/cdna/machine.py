"""Run a launch: batches of workgroups, whose waves go in step as long as they are at one place of the program.

Waves that a branch parts go on apart, the ones behind first, and together again where they meet. At a barrier all of a
batch wait for each other, which is more than the hardware's waves of one workgroup do: no result can depend on it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mla_codegen.check.cdna import code_object, lds_access
from mla_codegen.check.cdna.banks import Traffic
from mla_codegen.check.cdna.findings import BARRIER, WAIT, Finding, Findings
from mla_codegen.check.cdna.lds import WAVES, Lds
from mla_codegen.check.cdna.listing import Instruction
from mla_codegen.check.cdna.memory import Memory
from mla_codegen.check.cdna.program import Program, Step
from mla_codegen.check.cdna.state import LANES, SCALARS, Waves

Array = NDArray[Any]
BATCH = 64  # waves that run at a time: their registers stay in the caches
LONGEST = 50_000_000  # instructions of a launch, times the waves in step: more is a loop without end


class Endless(RuntimeError):
    """A kernel that does not end."""


@dataclass(frozen=True)
class Pointer:
    """A kernel argument that points into memory: its bytes, and how far before them the pointer lies.

    name     for reports
    content  [bytes] uint8, written back when the launch is done
    before   bytes: where arrays of many GiB are meant, of which only a part exists
    count    note how often each byte is read
    """

    name: str
    content: Array
    before: int = 0
    count: bool = False


@dataclass(frozen=True)
class Counts:
    """What a launch did, summed over its waves.

    executed   [instructions]: how often each was run, by its number in the listing
    reads      argument whose reads were counted -> [bytes]: how often each was read
    waits      s_waitcnt that had something to wait for
    traffic    of LDS, where it was counted
    """

    instructions: Sequence[Instruction]
    executed: Array
    reads: Mapping[str, Array]
    waits: int = 0
    traffic: Traffic | None = None


# Loads of vector memory end in the order in which they began: the later of two to one register is the one that stays.
IN_ORDER = ("global_load", "buffer_load")


class Kernel:
    """A compiled kernel that can be launched: `asm` and `binary` as the compiler gave them."""

    def __init__(self, asm: str, binary: bytes) -> None:
        self.code = code_object.read(binary)
        self.findings = Findings()
        self.memory = Memory(self.findings)
        self.lds = Lds(0, 0, 4, self.findings)
        self.executed = np.zeros(0, np.int64)
        self.budget = self.waits = 0
        self.traffic: Traffic | None = None
        self.program = Program(asm, self.code, self)
        self.cell = min(
            (lds_access.width(one) for one in self.program.instructions if one.opcode.startswith("ds_")), default=4
        )
        self.cell = min(4, self.cell)

    def launch(
        self,
        programs: int,
        waves: int,
        lds_bytes: int,
        arguments: Sequence[Pointer | bytes],
        *,
        only: Sequence[int] = (),
        count_traffic: bool = False,
    ) -> tuple[Counts, list[Finding]]:
        """Run all workgroups of a grid of one dimension, or `only` some; (counts, faults).

        waves       of a workgroup
        lds_bytes   of a workgroup, beside what the code object itself asks for
        arguments   in the kernel's order; the bytes of what is no pointer. Further pointers of the kernel are null
        count_traffic   count bytes and bank conflicts of LDS
        """
        if waves > WAVES:
            raise ValueError(f"{waves} waves a workgroup; the records of LDS hold {WAVES}")
        self.findings.found.clear()
        self.memory = Memory(self.findings)
        kernarg = self._kernarg(programs, waves, arguments)
        base = self.memory.add("the arguments", kernarg)
        self.executed = np.zeros(len(self.program.steps) + 1, np.int64)
        chosen = list(only) or list(range(programs))
        step = max(1, BATCH // waves)
        self.budget = LONGEST
        self.traffic = Traffic() if count_traffic else None
        self.waits = 0
        with np.errstate(all="ignore"):
            for begin in range(0, len(chosen), step):
                self._run(chosen[begin : begin + step], waves, lds_bytes + self.code.lds_bytes, kernarg, base)
        reads = {}
        for number, argument in enumerate((one for one in arguments if isinstance(one, Pointer)), 1):
            argument.content[:] = self.memory.content(number)
            if argument.count:
                reads[argument.name] = self.memory.counted[number]
        counts = Counts(self.program.instructions, np.cumsum(self.executed)[:-1], reads, self.waits, self.traffic)
        return counts, self.findings.sorted()

    def _kernarg(self, programs: int, waves: int, arguments: Sequence[Pointer | bytes]) -> Array:
        """The kernarg segment, pointers put into memory on the way."""
        segment = np.zeros(self.code.kernarg_bytes + 16, np.uint8)
        given = [one for one in self.code.arguments if not one.kind.startswith("hidden_")]
        if len(arguments) > len(given):
            raise ValueError(f"{self.code.name} takes {len(given)} arguments, {len(arguments)} were given")
        for place, value in zip(given, arguments, strict=False):
            if isinstance(value, Pointer):
                address = self.memory.add(value.name, value.content, value.count) - value.before
                value = address.to_bytes(8, "little")
            if len(value) != place.size:
                raise ValueError(f"{self.code.name}: an argument of {len(value)} bytes for one of {place.size}")
            segment[place.offset : place.offset + place.size] = np.frombuffer(value, np.uint8)
        hidden = {
            "hidden_block_count_x": programs, "hidden_block_count_y": 1, "hidden_block_count_z": 1,
            "hidden_group_size_x": waves * LANES, "hidden_group_size_y": 1, "hidden_group_size_z": 1,
            "hidden_grid_dims": 1,
        }  # fmt: skip
        for place in self.code.arguments:
            if place.kind in hidden:
                value = hidden[place.kind].to_bytes(place.size, "little")
                segment[place.offset : place.offset + place.size] = np.frombuffer(value, np.uint8)
        return segment

    def _start(self, groups: Sequence[int], waves: int, kernarg: Array, base: int) -> Waves:
        """All waves of the batch at the entry, registers as the hardware hands them over."""
        group = np.repeat(np.arange(len(groups)), waves)
        slot = np.tile(np.arange(waves), len(groups))
        start = Waves(self.program.registers, group, slot)
        start.pc = self.program.entry
        start.V[0] = slot[:, None] * LANES + np.arange(LANES)
        for name, (first, count) in self.code.user_sgprs.items():
            if name == "kernarg_segment_ptr":
                start.set_pair(first, np.full(len(group), base, np.uint64))
            elif name == "preload":
                words = kernarg.view(np.uint32)[self.code.preload_from :][:count]
                start.S[first : first + count] = words[:, None]
            else:
                raise code_object.CodeObjectError(f"{self.code.name} wants {name} in SGPRs")
        for dimension, register in self.code.system_sgprs.items():
            start.S[register] = np.asarray(groups, np.uint32)[group] if dimension == 0 else 0
        return start

    def _run(self, groups: Sequence[int], waves: int, lds_bytes: int, kernarg: Array, base: int) -> None:
        self.lds = Lds(len(groups), lds_bytes, self.cell, self.findings, self.traffic)
        ready = [self._start(groups, waves, kernarg, base)]
        waiting: list[Waves] = []
        ended = np.zeros(len(groups), bool)
        while ready:
            at = min(range(len(ready)), key=lambda number: ready[number].pc)
            bundle = ready.pop(at)
            for other in [one for one in ready if one.pc == bundle.pc]:
                if bundle.alike(other):
                    ready.remove(other)
                    bundle = bundle.join(other)
            last = self._block(bundle)
            if last.opcode == "s_endpgm":
                ended[bundle.group] = True
            elif last.opcode == "s_barrier":
                waiting.append(bundle)
            elif branch := self.program.branches.get(last.number):
                ready += self._branch(bundle, branch.target, None if branch.taken is None else branch.taken(bundle))
            else:
                ready.append(bundle)
            if not ready and waiting:
                for one in waiting:
                    if ended[one.group].any():
                        barrier = self.program.instructions[one.pc - 1]
                        self.findings.note(BARRIER, barrier, "a wave of the workgroup has ended and never comes here")
                self.lds.barrier(waiting)
                ready, waiting = waiting, []

    def _branch(self, bundle: Waves, target: int, taken: Array | None) -> list[Waves]:
        if taken is None or taken.all():
            bundle.pc = target
            return [bundle]
        if not taken.any():
            return [bundle]
        away = bundle.part(taken, self.lds.of_waves)
        away.pc = target
        return [bundle.part(~taken, self.lds.of_waves), away]

    def _block(self, waves: Waves) -> Instruction:
        """Run to the end of the block; the instruction there."""
        begin, end = waves.pc, int(self.program.ends[waves.pc])
        for step in self.program.steps[begin:end]:
            if waves.pending and not waves.pending.keys().isdisjoint(step.touches):
                self._too_early(step, waves)
            step.run(waves)
        waves.pc = end
        self.executed[begin] += waves.count
        self.executed[end] -= waves.count
        self.budget -= end - begin
        if self.budget < 0:
            raise Endless(f"{self.code.name} has not ended after {LONGEST} instructions")
        return self.program.instructions[end - 1]

    def _too_early(self, step: Step, waves: Waves) -> None:
        early = waves.pending.keys() & step.touches
        if step.instruction.opcode.startswith(IN_ORDER):
            early = {one for one in early if one in step.reads or not waves.pending[one][1].opcode.startswith(IN_ORDER)}
            if not early:
                return
        number = min(early)
        counter, by = waves.pending[number]
        name = f"s{number - SCALARS}" if number >= SCALARS else f"a{number - 256}" if number >= 256 else f"v{number}"
        how = "reads" if number in step.reads else "overwrites"
        text = f"{how} {name} before the wait on {counter} for what {by} loads there"
        self.findings.note(WAIT, step.instruction, text)
