"""What a CU or SM of each target holds and how fast its units are. Every number carries its source.

Sources, by the letters used below:
  A  AMD, "CDNA 3 Instruction Set Architecture" and the MI300X / MI355X data sheets (peak rates, clocks, CUs, HBM)
  L  LLVM, AMDGPU back end (register granules, waves a SIMD, LDS sizes), which Triton's compiler itself obeys
  C  NVIDIA, CUDA C++ Programming Guide, "Compute Capabilities" (limits) and "Arithmetic Instructions" (results a clock)
  D  data sheets of A100, H200 and RTX PRO 6000 (dense tensor peak, boost clock, memory)
  M  measured on an H200: the sum of a 4 GB tensor reads 4.42 TB/s
  P  Luo et al., "Dissecting the NVIDIA Hopper Architecture through Microbenchmarking" (mma.sync reaches about 62 % of
     the wgmma rate on Hopper)
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Hardware:
    """One part: what a CU / SM can hold, and cycles per instruction of one wave on one SIMD (sub-partition).

    registers          32-bit registers of one SIMD for one lane position of a wave, i.e. per-lane budget (AMD: 512);
                       NVIDIA: registers of an SM
    register_granule   allocation step: registers of a lane (AMD), registers of a warp (NVIDIA)
    waves              waves one SIMD can hold; simds of a CU / SM; `programs` of a CU / SM
    lds_bytes          LDS / shared memory of a CU / SM; `lds_reserved` is taken from it for each program
    valu_cycles        a plain vector instruction; half_rate: integer add, shift, logic, conversion where slower
    transcendental     exp, log, reciprocal
    issue_cycles       between two instructions of one wave
    lds_bytes_per_clk  of a CU / SM, all SIMDs together
    fill_bytes_per_clk what one CU / SM can take in from L2
    read_bytes_per_s   what a kernel can read from HBM at most
    dense_flop_per_clk of a CU / SM, by operand bits; `warp_mma_share` of it is what mma.sync reaches
    """

    name: str
    vendor: str
    compute_units: int
    clock_hz: float
    read_bytes_per_s: float
    read_source: str
    registers: int
    register_granule: int
    waves: int
    simds: int
    programs: int
    lds_bytes: int
    lds_granule: int
    lds_reserved: int
    program_lds_bytes: int
    wave_lanes: int
    valu_cycles: float
    half_rate_cycles: float
    transcendental_cycles: float
    issue_cycles: float
    lds_bytes_per_clk: int
    fill_bytes_per_clk: int
    dense_flop_per_clk: dict[int, int]
    warp_mma_share: float = 1.0


_TABLE = (
    # A: 304 CUs, 2.1 GHz, 5.3 TB/s; a wave of 64 on SIMD16: 4 cycles, transcendentals a quarter of that rate;
    # dense peak 1307 TFLOP/s for 16-bit and 2615 for 8-bit operands = 2048 and 4096 FLOP a clock and CU.
    # L: 512 registers a lane (VGPR + AGPR), granule 8, 8 waves a SIMD, 64 KiB LDS in steps of 512 bytes.
    Hardware(
        "gfx942", "amd", 304, 2.1e9, 5.3e12, "data sheet, never reached in full",
        registers=512, register_granule=8, waves=8, simds=4, programs=32,
        lds_bytes=65536, lds_granule=512, lds_reserved=0, program_lds_bytes=65536, wave_lanes=64,
        valu_cycles=4, half_rate_cycles=4, transcendental_cycles=16, issue_cycles=4,
        lds_bytes_per_clk=128, fill_bytes_per_clk=64, dense_flop_per_clk={16: 2048, 8: 4096},
    ),
    # A: 256 CUs, 2.4 GHz, 8 TB/s, dense peak 2.5 and 5.0 PFLOP/s = 4096 and 8192 FLOP a clock and CU, reached only by
    # the instructions with the longer K. LDS reads are faster than on gfx942 for some widths; the older, lower rate is
    # kept here, so LDS cycles are an upper bound. L: 160 KiB LDS in steps of 1280 bytes.
    Hardware(
        "gfx950", "amd", 256, 2.4e9, 8.0e12, "data sheet, never reached in full",
        registers=512, register_granule=8, waves=8, simds=4, programs=32,
        lds_bytes=163840, lds_granule=1280, lds_reserved=0, program_lds_bytes=163840, wave_lanes=64,
        valu_cycles=4, half_rate_cycles=4, transcendental_cycles=16, issue_cycles=4,
        lds_bytes_per_clk=128, fill_bytes_per_clk=64, dense_flop_per_clk={16: 4096, 8: 8192},
    ),
    # C: 64 warps, 32 programs, 164 KiB, 64 fp32 lanes (16 a sub-partition). D: 108 SMs, 1.41 GHz, 312 TFLOP/s,
    # 2.04 TB/s.
    Hardware(
        "sm_80", "nvidia", 108, 1.41e9, 2.04e12, "data sheet, never reached in full",
        registers=65536, register_granule=256, waves=16, simds=4, programs=32,
        lds_bytes=167936, lds_granule=128, lds_reserved=1024, program_lds_bytes=166912, wave_lanes=32,
        valu_cycles=2, half_rate_cycles=2, transcendental_cycles=8, issue_cycles=1,
        lds_bytes_per_clk=128, fill_bytes_per_clk=64, dense_flop_per_clk={16: 2048, 8: 4096},
    ),
    # C: 64 warps, 32 programs, 228 KiB, 128 fp32 lanes, 64 integer lanes, 64 conversions, 16 special functions a clock.
    # D: 132 SMs, 1.83 GHz at the 989 / 1979 TFLOP/s peak. M: the read ceiling. P: mma.sync.
    Hardware(
        "sm_90", "nvidia", 132, 1.83e9, 4.42e12, "measured read ceiling",
        registers=65536, register_granule=256, waves=16, simds=4, programs=32,
        lds_bytes=233472, lds_granule=128, lds_reserved=1024, program_lds_bytes=232448, wave_lanes=32,
        valu_cycles=1, half_rate_cycles=2, transcendental_cycles=8, issue_cycles=1,
        lds_bytes_per_clk=128, fill_bytes_per_clk=64, dense_flop_per_clk={16: 4096, 8: 8192}, warp_mma_share=0.62,
    ),
    # C: 48 warps, 24 programs, 100 KiB. D: 188 SMs, 2.6 GHz, 1.79 TB/s; fp32-accumulating dense rates of 1024 and 2048
    # FLOP a clock and SM.
    Hardware(
        "sm_120", "nvidia", 188, 2.6e9, 1.79e12, "data sheet, never reached in full",
        registers=65536, register_granule=256, waves=12, simds=4, programs=24,
        lds_bytes=102400, lds_granule=128, lds_reserved=1024, program_lds_bytes=101376, wave_lanes=32,
        valu_cycles=1, half_rate_cycles=2, transcendental_cycles=8, issue_cycles=1,
        lds_bytes_per_clk=128, fill_bytes_per_clk=64, dense_flop_per_clk={16: 1024, 8: 2048},
    ),
)  # fmt: skip

HARDWARE: dict[str, Hardware] = {part.name: part for part in _TABLE}
