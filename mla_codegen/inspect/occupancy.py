"""How many programs a CU or SM holds at a time, and which resource says so."""

from __future__ import annotations

import math

from mla_codegen.inspect.hardware import HARDWARE, Hardware
from mla_codegen.inspect.report import Occupancy


def occupancy(arch: str, registers: int, lds_bytes: int, num_warps: int) -> Occupancy:
    """Resident programs from registers of a lane, LDS bytes of a program and its warps.

    A program that fits nowhere (LDS over the limit) gives 0 programs, limited by `lds`.
    """
    part = HARDWARE[arch]
    by = {  # on equal counts the first is named: the part's own bounds before the kernel's appetite
        "waves": part.waves * part.simds // num_warps,
        "programs": part.programs,
        "registers": _by_registers(part, registers, num_warps),
        "lds": _by_lds(part, lds_bytes),
    }
    limited_by = min(by, key=lambda name: by[name])
    programs = by[limited_by]
    return Occupancy(programs, math.ceil(programs * num_warps / part.simds), limited_by, by)


def _by_registers(part: Hardware, registers: int, num_warps: int) -> int:
    if part.vendor == "amd":
        granted = _round_up(max(registers, 1), part.register_granule)
        waves_per_simd = part.registers // granted
        return waves_per_simd * part.simds // num_warps
    granted = _round_up(max(registers, 1) * part.wave_lanes, part.register_granule)
    per_simd = part.registers // part.simds // granted  # a warp's registers lie in its own sub-partition
    return per_simd * part.simds // num_warps


def _by_lds(part: Hardware, lds_bytes: int) -> int:
    if lds_bytes > part.program_lds_bytes:
        return 0
    granted = _round_up(lds_bytes + part.lds_reserved, part.lds_granule)
    return part.lds_bytes // granted if granted else part.programs


def _round_up(value: int, step: int) -> int:
    return math.ceil(value / step) * step
