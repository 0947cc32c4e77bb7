"""One instruction, or a few, run on registers that a test gives."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from mla_codegen.check.cdna.findings import Findings
from mla_codegen.check.cdna.lds import Lds
from mla_codegen.check.cdna.listing import Instruction
from mla_codegen.check.cdna.memory import Memory
from mla_codegen.check.cdna.operands import Uses
from mla_codegen.check.cdna.program import build
from mla_codegen.check.cdna.state import LANES, Waves


def _words(value: Any) -> Any:
    return np.uint32(value & 0xFFFFFFFF) if isinstance(value, int) else np.asarray(value).view(np.uint32)


class Bench:
    """Memory and LDS of one workgroup, and its waves' registers. v, s: number -> value, 32 bits of any type."""

    def __init__(
        self,
        arch: str = "gfx942",
        waves: int = 1,
        v: Mapping[int, Any] | None = None,
        s: Mapping[int, Any] | None = None,
        lds_bytes: int = 4096,
        denormals: bool = True,
    ) -> None:
        self.arch, self.denormals = arch, denormals
        self.findings = Findings()
        self.memory = Memory(self.findings)
        self.lds = Lds(1, lds_bytes, 1, self.findings)
        self.waits = 0
        self.waves = Waves(600, np.zeros(waves, np.int64), np.arange(waves))
        for number, value in (v or {}).items():
            self.waves.V[number] = _words(value)
        for number, value in (s or {}).items():
            self.waves.S[number] = _words(value)

    def mask(self, lanes: Any) -> None:
        """Switch on these lanes alone, in all waves. `lanes`: [64] bool."""
        self.waves.set_exec(np.broadcast_to(np.asarray(lanes, bool), (self.waves.count, LANES)).copy())

    def run(self, *lines: str) -> Waves:
        """Run instructions, as a listing writes them."""
        with np.errstate(all="ignore"):
            for number, line in enumerate(lines):
                opcode, _, operands = line.partition(" ")
                one = Instruction(opcode, operands.strip(), number + 1, number)
                build(one, Uses(), self.arch, self.denormals, self)(self.waves)
        return self.waves
