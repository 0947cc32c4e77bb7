"""What an execution found wrong, each fault of an instruction once."""

from __future__ import annotations

from dataclasses import dataclass, field

from mla_codegen.check.cdna.listing import Instruction

# Kinds of faults.
WAIT = "wait"  # a register used before the s_waitcnt that covers its load
RACE = "race"  # LDS used by two waves with no barrier between
OUTSIDE = "outside"  # memory outside of the arguments' arrays, or of the launch's LDS
UNWRITTEN = "unwritten"  # LDS or scratch read that nothing wrote
BARRIER = "barrier"  # a barrier that not all waves reach
MODEL = "model"  # something that the executor does not know to be right


@dataclass(frozen=True)
class Finding:
    """One fault, of the kinds above, at a line of the listing."""

    kind: str
    line: int
    text: str

    def __str__(self) -> str:
        return self.text


@dataclass
class Findings:
    """Collects faults; the first of an instruction and kind is kept."""

    found: dict[tuple[int, str], Finding] = field(default_factory=dict)

    def note(self, kind: str, instruction: Instruction, what: str) -> None:
        """`what` says what is wrong at the instruction."""
        key = (instruction.line, kind)
        if key not in self.found:
            self.found[key] = Finding(kind, instruction.line, f"{instruction}: {what}")

    def __len__(self) -> int:
        return len(self.found)

    def sorted(self) -> list[Finding]:
        return sorted(self.found.values(), key=lambda one: (one.line, one.kind))
