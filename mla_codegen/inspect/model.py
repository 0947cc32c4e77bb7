"""A model, not a measurement: what the counted instructions cost at the target's published rates, and what binds.

Per tile and unit it takes the cycles of one program on its CU / SM, as if that unit alone ran; the slowest unit sets
the pace of a CU full of programs. HBM time stands beside it. Launches, prologue, epilogue, the merge of the splits,
latency and cache hits are not modelled, so a prediction is a lower bound; docs/inspect.md gives the formulas.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

from mla_codegen.inspect.hardware import HARDWARE, Hardware
from mla_codegen.inspect.report import HotLoop, Report

# SASS families that issue at the full fp32 rate; every other vector instruction is taken at the integer rate.
_FULL_RATE = frozenset(["FADD", "FMUL", "FFMA", "FADD2", "FMUL2", "FFMA2", "HADD2", "HMUL2", "HFMA2"])
_MFMA = re.compile(r"v_(?:s?mfmac?)_\w+?_(\d+)x(\d+)x(\d+)_?(\w*)")
_SASS_MMA = re.compile(r"([HQI]G?MMA)\.(?:SP\.)?(\d+x\d+x\d+|16816|1688|16832|16864)")
_WARP_SHAPES = {"16816": (16, 8, 16), "1688": (16, 8, 8), "16832": (16, 8, 32), "16864": (16, 8, 64)}


class ModelError(ValueError):
    """An instruction or workload that the model has no rule for."""


@dataclass(frozen=True)
class Workload:
    """One call to predict.

    batch, kv_len   requests, and KV rows of each
    splits          parts that a request's rows are cut into
    programs        programs of stage 1: query rows x head blocks x splits
    kv_row_bytes    bytes of a KV row (576 in fp8, 1152 in bf16)
    other_bytes     further HBM traffic in bytes: q, partial results written and read, out
    flop            floating-point operations that the call needs, at `operand_bits`; 0: HBM alone is the roofline
    compute_units   CUs / SMs to use; None: all of the part
    fixed_s         seconds outside the hot loop (launch, prologue, merge), where measured; added as it is
    """

    batch: int
    kv_len: int
    splits: int
    programs: int
    kv_row_bytes: int
    other_bytes: int = 0
    flop: float = 0.0
    operand_bits: int = 16
    compute_units: int | None = None
    fixed_s: float = 0.0

    def __post_init__(self) -> None:
        for name in ("batch", "kv_len", "splits", "programs", "kv_row_bytes"):
            if getattr(self, name) < 1:
                raise ModelError(f"workload: {name} is {getattr(self, name)}; it must be at least 1")


@dataclass(frozen=True)
class Prediction:
    """The model's answer for one kernel and workload; all times in seconds.

    cycles      unit -> cycles of a tile, as a CU / SM full of `resident` programs pays for each program
    binds       the unit that sets the time: one of `cycles`, or `hbm`
    roofline_s  the least time of any kernel: HBM bytes over the read rate, or FLOP over the dense peak
    """

    cycles: Mapping[str, float]
    resident: int
    compute_s: float
    hbm_s: float
    hbm_bytes: int
    seconds: float
    roofline_s: float
    binds: str

    @property
    def percent_of_roofline(self) -> float:
        """100 where no kernel could be faster."""
        return 100 * self.roofline_s / self.seconds


def tile_cycles(report: Report, *, resident: int | None = None, kv_row_bytes: int = 0) -> dict[str, float]:
    """Cycles that each unit of a CU / SM spends on one tile of one program. ModelError where there is no hot loop.

    matrix, vector, transcendental  on one SIMD (the waves of a program are dealt over the SIMDs)
    lds                             on the CU / SM: reads, writes, wgmma's own reads and what async copies put there
    issue                           instruction slots: a SIMD of an SM issues one a cycle; a GCN wave one each 4 cycles,
                                    so there `resident` programs share the wait
    chain                           a wave's own dependent steps, matrix after LDS after vector, which other waves of
                                    its SIMD and other resident programs can hide
    """
    hot, part = report.hot, HARDWARE[report.arch]
    if hot is None:
        raise ModelError(f"{report.kernel}: no hot loop, so there is nothing to model")
    resident = resident or max(1, report.occupancy.programs)
    waves = max(1.0, report.num_warps / part.simds)
    counts = hot.per_tile()
    full = counts["vector"]
    if part.vendor == "nvidia":
        full = min(full, sum(hot.opcodes.get(name, 0) for name in _FULL_RATE) / hot.tiles)
    matrix = sum(mma_cycles(report.arch, name) * count for name, count in hot.matrix.items()) / hot.tiles * waves
    vector = (full * part.valu_cycles + (counts["vector"] - full) * part.half_rate_cycles) * waves
    transcendental = counts["transcendental"] * part.transcendental_cycles * waves
    lds = _lds_bytes(hot, report, kv_row_bytes) / part.lds_bytes_per_clk
    issue = counts["total"] * part.issue_cycles
    return {
        "matrix": matrix,
        "vector": vector,
        "transcendental": transcendental,
        "lds": lds,
        "issue": issue / resident if part.vendor == "amd" else issue * waves,
        "chain": (matrix + vector + transcendental + lds) / (resident * waves),
    }


def _lds_bytes(hot: HotLoop, report: Report, kv_row_bytes: int) -> float:
    """Bytes that one tile moves through a program's LDS / shared memory, all its waves together."""
    moved = (hot.lds_read_bytes + hot.lds_write_bytes + hot.operand_bytes) / hot.tiles * report.num_warps
    if hot.counts["async_copy"] and hot.rows:
        moved += hot.rows / hot.tiles * kv_row_bytes
    return moved


def mma_cycles(arch: str, name: str) -> float:
    """Cycles that one matrix instruction keeps a SIMD's matrix unit busy. ModelError for a name that it cannot read."""
    part = HARDWARE[arch]
    return _mfma_cycles(part, name) if part.vendor == "amd" else _sass_mma_cycles(part, name)


def _mfma_cycles(part: Hardware, name: str) -> float:
    match = _MFMA.match(name)
    if not match:
        raise ModelError(f"{name}: not a matrix instruction that the model knows")
    m, n, k = (int(match[i]) for i in (1, 2, 3))
    if match[4] in ("f32", "xf32", "f64"):
        raise ModelError(f"{name}: the model has no rate for {match[4]} operands")
    bits = 8 if re.search(r"fp8|bf8|f8f6f4|i8", match[4]) else 16
    rate = part.dense_flop_per_clk[bits] / part.simds
    # gfx950 runs the shapes that it shares with gfx942 at gfx942's rate; only the longer K is faster.
    long_k = m * k >= (2048 if bits == 8 else 512)
    if part.name == "gfx950" and not long_k:
        rate /= 2
    return 2 * m * n * k / rate


def _sass_mma_cycles(part: Hardware, name: str) -> float:
    match = _SASS_MMA.match(name)
    if not match:
        raise ModelError(f"{name}: not a matrix instruction that the model knows")
    shape = _WARP_SHAPES.get(match[2]) or tuple(int(size) for size in match[2].split("x"))
    bits = 8 if match[1][0] in "QI" else 16
    flop = 2 * math.prod(shape)
    rate = part.dense_flop_per_clk[bits] / part.simds
    if "G" in match[1]:  # a warp group's four warps share one instruction, each on its own SIMD
        return flop / 4 / rate
    return flop / (rate * part.warp_mma_share)


def predict(report: Report, workload: Workload) -> Prediction:
    """The time of stage 1 by the model. The report must know its tile's rows (`describe(..., tile_rows=...)`)."""
    hot, part = report.hot, HARDWARE[report.arch]
    if hot is None or hot.rows is None:
        raise ModelError(f"{report.kernel}: the model needs a hot loop with known rows")
    if report.occupancy.programs < 1:
        raise ModelError(f"{report.kernel}: no program fits a compute unit ({report.occupancy.limited_by})")
    units = workload.compute_units or part.compute_units
    per_unit = math.ceil(workload.programs / units)
    resident = min(report.occupancy.programs, per_unit)
    cycles = tile_cycles(report, resident=resident, kv_row_bytes=workload.kv_row_bytes)
    tile_rows = hot.rows // hot.tiles
    tiles = math.ceil(math.ceil(workload.kv_len / workload.splits) / tile_rows)
    slowest = max(cycles, key=lambda unit: cycles[unit])
    compute_s = per_unit * tiles * cycles[slowest] / part.clock_hz
    hbm_bytes = workload.batch * workload.kv_len * workload.kv_row_bytes + workload.other_bytes
    active = min(units, workload.programs)
    hbm_s = hbm_bytes / min(part.read_bytes_per_s, active * part.fill_bytes_per_clk * part.clock_hz)
    peak = part.dense_flop_per_clk[workload.operand_bits] * part.compute_units * part.clock_hz
    return Prediction(
        cycles=cycles,
        resident=resident,
        compute_s=compute_s,
        hbm_s=hbm_s,
        hbm_bytes=hbm_bytes,
        seconds=max(compute_s, hbm_s) + workload.fixed_s,
        roofline_s=max(hbm_bytes / part.read_bytes_per_s, workload.flop / peak),
        binds=slowest if compute_s > hbm_s else "hbm",
    )
