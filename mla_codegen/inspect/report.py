"""What one compiled kernel came to: the record that the parsers fill and that limits, model and tables read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from mla_codegen.catalog.limits import CLASSES, KINDS, SUMS
from mla_codegen.inspect.hazards import Hazard

Counts = Mapping[str, int]


def complete(counts: Mapping[str, int]) -> dict[str, int]:
    """Counts by kind, completed by zeros and the sums, in the order of CLASSES."""
    unknown = set(counts) - set(KINDS)
    if unknown:
        raise ValueError(f"no such kinds of instruction: {', '.join(sorted(unknown))}")
    full = {kind: counts.get(kind, 0) for kind in KINDS}
    full.update({name: sum(full[kind] for kind in kinds) for name, kinds in SUMS.items()})
    return {name: full[name] for name in CLASSES}


@dataclass(frozen=True)
class Occupancy:
    """How many programs and waves one CU / SM holds at a time.

    `programs` is the least of `by`, which gives what each resource alone would allow; `limited_by` names the scarcest.
    `waves_per_simd` counts waves (warps) of all resident programs on one SIMD (SM sub-partition), rounded up.
    """

    programs: int
    waves_per_simd: int
    limited_by: str
    by: Mapping[str, int]


@dataclass(frozen=True)
class HotLoop:
    """The loop that multiplies matrices, counted for one wave / warp and one turn of the loop.

    label, lines    where it stands in the listing; `lines` are the first and the last
    counts          instructions by class (see CLASSES)
    matrix          matrix instructions by their full names
    opcodes         all instructions by the first part of their names
    lds_read_bytes  bytes that the wave's LDS / shared-memory reads move; `lds_write_bytes` likewise, shuffles through
                    LDS included
    operand_bytes   bytes of shared memory that wgmma reads for itself: the wave's quarter of a warp group's
    tiles           tiles of KV rows in one turn (more than one where the compiler unrolled)
    rows            KV rows in one turn, None where the caller did not say
    """

    label: str
    lines: tuple[int, int]
    blocks: int
    counts: Counts
    matrix: Counts
    opcodes: Counts
    lds_read_bytes: int
    lds_write_bytes: int
    operand_bytes: int = 0
    tiles: int = 1
    rows: int | None = None

    def per_tile(self) -> dict[str, float]:
        """Counts for one tile of KV rows."""
        return {name: count / self.tiles for name, count in self.counts.items()}

    def per_rows(self, rows: int) -> dict[str, float]:
        """Counts for so many KV rows. ValueError when the rows of a turn are not known."""
        if self.rows is None:
            raise ValueError(f"loop {self.label}: counts per KV row need tile_rows, the rows of one tile")
        return {name: count * rows / self.rows for name, count in self.counts.items()}


@dataclass(frozen=True)
class Report:
    """One compiled kernel.

    registers      VGPRs of a lane, AGPRs included (AMD: the unified file), or registers of a thread
    vgpr_spills    spilled vector registers (NVIDIA: bytes of spill stores / 4, as ptxas tells)
    scratch_bytes  private memory of a lane / stack frame of a thread
    lds_bytes      LDS / shared memory of a program
    totals         instructions of the whole kernel by class; `opcodes` by the first part of their names
    hazards        pairs of instructions closer than AMD's hardware allows; of NVIDIA's none are looked for
    """

    kernel: str
    path: str
    arch: str
    triton: str
    seconds: float
    code_bytes: int
    registers: int
    agprs: int
    sgprs: int
    vgpr_spills: int
    sgpr_spills: int
    scratch_bytes: int
    lds_bytes: int
    num_warps: int
    occupancy: Occupancy
    totals: Counts
    opcodes: Counts
    hot: HotLoop | None
    hazards: tuple[Hazard, ...] = ()
    notes: tuple[str, ...] = field(default=())
    cached: bool = False

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready; the hot loop carries its counts per tile and, where rows are known, per 64 KV rows too."""
        fields = asdict(self)
        if self.hot is not None:
            fields["hot"]["per_tile"] = self.hot.per_tile()
            fields["hot"]["per_64_rows"] = self.hot.per_rows(64) if self.hot.rows else None
        return fields
