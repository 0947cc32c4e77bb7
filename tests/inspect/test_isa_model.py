"""The model's arithmetic, by hand-made numbers, and the residency that it rests on."""

from dataclasses import replace

import pytest
from test_isa_limits import REPORT

from mla_codegen.inspect import HotLoop, ModelError, Workload, predict
from mla_codegen.inspect.model import mma_cycles, tile_cycles
from mla_codegen.inspect.occupancy import occupancy
from mla_codegen.inspect.report import complete


@pytest.mark.parametrize(
    ("arch", "registers", "lds", "warps", "programs", "waves", "limited_by"),
    [
        ("gfx942", 210, 37888, 4, 1, 1, "lds"),
        ("gfx942", 256, 16384, 4, 2, 2, "registers"),
        ("gfx942", 257, 16384, 4, 1, 1, "registers"),
        ("gfx942", 40, 0, 4, 8, 8, "waves"),
        ("gfx942", 256, 16384, 8, 1, 2, "registers"),
        ("gfx942", 64, 65537, 4, 0, 0, "lds"),
        ("gfx950", 166, 37888, 4, 3, 3, "registers"),
        ("gfx950", 230, 75776, 4, 2, 2, "registers"),
        ("sm_90", 137, 94480, 4, 2, 2, "lds"),
        ("sm_90", 255, 1024, 4, 2, 2, "registers"),
        ("sm_90", 32, 1024, 4, 16, 16, "waves"),
        ("sm_90", 32, 232449, 4, 0, 0, "lds"),
        ("sm_120", 40, 0, 4, 12, 12, "waves"),
        ("sm_120", 32, 101376, 4, 1, 1, "lds"),
    ],
)
def test_residency(arch, registers, lds, warps, programs, waves, limited_by):
    held = occupancy(arch, registers, lds, warps)
    assert (held.programs, held.waves_per_simd, held.limited_by) == (programs, waves, limited_by)
    assert held.programs == min(held.by.values())


@pytest.mark.parametrize(
    ("arch", "name", "cycles"),
    [
        ("gfx942", "v_mfma_f32_16x16x32_fp8_fp8", 16),
        ("gfx942", "v_mfma_f32_16x16x16_bf16", 16),
        ("gfx942", "v_mfma_f32_32x32x8_bf16", 32),
        ("gfx942", "v_mfma_f32_32x32x16_fp8_fp8", 32),
        ("gfx950", "v_mfma_f32_16x16x32_fp8_fp8", 16),
        ("gfx950", "v_mfma_f32_16x16x128_f8f6f4", 32),
        ("gfx950", "v_mfma_scale_f32_16x16x128_f8f6f4", 32),
        ("gfx950", "v_mfma_f32_16x16x32_bf16", 16),
        ("gfx950", "v_mfma_f32_16x16x16_bf16", 16),
        ("sm_90", "QGMMA.64x32x32.F32.E4M3.E4M3", 16),
        ("sm_90", "HGMMA.64x64x16.F32.BF16", 32),
        ("sm_80", "HMMA.16816.F32.BF16", 8),
        ("sm_90", "HMMA.16816.F32", 4 / 0.62),
    ],
)
def test_cycles_of_a_matrix_instruction(arch, name, cycles):
    assert mma_cycles(arch, name) == pytest.approx(cycles)


@pytest.mark.parametrize(("arch", "name"), [("gfx942", "v_mfma_f32_16x16x4_f32"), ("sm_90", "DMMA.884")])
def test_a_matrix_instruction_without_a_rule_is_an_error(arch, name):
    with pytest.raises(ModelError, match=name.split(".")[0]):
        mma_cycles(arch, name)


def test_cycles_of_a_tile_on_amd():
    cycles = tile_cycles(REPORT)  # 1 program resident, 4 waves, one a SIMD; counts are for two tiles
    assert cycles["matrix"] == 34 * 16
    assert cycles["vector"] == (200 + 4) * 4
    assert cycles["transcendental"] == 5 * 16
    assert cycles["lds"] == 1024 / 2 * 4 / 128
    assert cycles["issue"] == (34 + 5 + 204 + 32) * 4
    assert cycles["chain"] == sum(cycles[unit] for unit in ("matrix", "vector", "transcendental", "lds"))


def test_eight_waves_share_four_simds():
    one, two = tile_cycles(REPORT), tile_cycles(replace(REPORT, num_warps=8))
    assert two["matrix"] == 2 * one["matrix"]
    assert two["lds"] == 2 * one["lds"]
    assert two["chain"] == one["chain"]  # the two waves of a SIMD hide each other's waits


def test_residents_hide_chain_and_issue_on_amd():
    one, two = tile_cycles(REPORT, resident=1), tile_cycles(REPORT, resident=2)
    assert two["chain"] == one["chain"] / 2
    assert two["issue"] == one["issue"] / 2
    assert two["matrix"] == one["matrix"]


def nvidia_report():
    counts = complete({"matrix": 2, "transcendental": 3, "other_valu": 30, "async_copy": 2, "wait": 1})
    hot = HotLoop(
        label=".L_x_1",
        lines=(1, 50),
        blocks=1,
        counts=counts,
        matrix={"QGMMA.64x32x32.F32.E4M3.E4M3": 2},
        opcodes={"FMUL": 10, "IMAD": 20},
        lds_read_bytes=1280,
        lds_write_bytes=0,
        operand_bytes=768,
        rows=64,
    )
    return replace(REPORT, arch="sm_90", hot=hot, occupancy=occupancy("sm_90", 137, 94480, 4))


def test_cycles_of_a_tile_on_nvidia():
    cycles = tile_cycles(nvidia_report(), kv_row_bytes=576)
    assert cycles["matrix"] == 2 * 16
    assert cycles["vector"] == 10 * 1 + 20 * 2
    assert cycles["transcendental"] == 3 * 8
    assert cycles["lds"] == ((1280 + 768) * 4 + 64 * 576) / 128
    assert cycles["issue"] == 38


def test_prediction_of_a_call_bound_by_bytes():
    work = Workload(batch=64, kv_len=8192, splits=4, programs=256, kv_row_bytes=576, other_bytes=1000)
    guess = predict(nvidia_report(), work)
    assert guess.hbm_bytes == 64 * 8192 * 576 + 1000
    assert guess.hbm_s == pytest.approx(guess.hbm_bytes / 4.42e12)
    slowest = max(guess.cycles.values())
    assert guess.compute_s == pytest.approx(2 * 32 * slowest / 1.83e9)  # 256 programs on 132 SMs, 2048 rows each
    assert guess.binds == "hbm"
    assert guess.percent_of_roofline == pytest.approx(100)


def test_prediction_of_a_call_bound_by_a_unit():
    work = Workload(batch=1, kv_len=640, splits=1, programs=304, kv_row_bytes=576)
    guess = predict(REPORT, work)
    assert guess.binds == "chain"
    assert guess.seconds == guess.compute_s == pytest.approx(10 * guess.cycles["chain"] / 2.1e9)
    assert guess.percent_of_roofline < 100


def test_few_programs_cannot_draw_all_of_the_bandwidth():
    work = Workload(batch=1, kv_len=640, splits=1, programs=1, kv_row_bytes=576)
    assert predict(REPORT, work).hbm_s == pytest.approx(640 * 576 / (64 * 2.1e9))


def test_flop_can_be_the_roofline_and_fixed_time_is_added():
    flop = 2 * 128 * 1088 * 64 * 8192
    work = Workload(64, 8192, 4, 256, kv_row_bytes=576, flop=flop, operand_bits=16, fixed_s=1e-5)
    guess = predict(nvidia_report(), work)
    assert guess.roofline_s == pytest.approx(flop / (4096 * 132 * 1.83e9))
    assert guess.seconds == pytest.approx(max(guess.compute_s, guess.hbm_s) + 1e-5)


def test_what_cannot_be_modelled_says_why():
    work = Workload(1, 64, 1, 1, 576)
    with pytest.raises(ModelError, match="hot loop"):
        predict(replace(REPORT, hot=None), work)
    with pytest.raises(ModelError, match="no program fits"):
        predict(replace(REPORT, occupancy=occupancy("gfx942", 64, 70000, 4)), work)
    with pytest.raises(ModelError, match="splits is 0"):
        Workload(1, 64, 0, 1, 576)
