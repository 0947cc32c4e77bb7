"""Instructions across lanes, on packed numbers, fp8 and matrices, against loops over lanes and torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from one import Bench

from mla_codegen.check.cdna.findings import MODEL
from mla_codegen.check.cdna.lanes import PACKED_16
from mla_codegen.check.cdna.listing import Unknown

LANES = 64
FP8 = {"gfx942": torch.float8_e4m3fnuz, "gfx950": torch.float8_e4m3fn}
LARGEST = {"gfx942": 240.0, "gfx950": 448.0}


def words(seed: int, waves: int = 2) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).integers(0, 1 << 32, (waves, LANES), dtype=np.uint64).astype(np.uint32)


def floats(seed: int, waves: int = 2) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).standard_normal((waves, LANES)).astype(np.float32)


def test_reads_and_writes_of_a_lane() -> None:
    a = words(1)
    bench = Bench(waves=2, v={1: a, 2: a}, s={3: np.array([5, 70], np.uint32), 4: np.array([9, 8], np.uint32)})
    bench.mask(np.arange(LANES) > 17)
    waves = bench.run(
        "v_readfirstlane_b32 s0, v1",
        "v_readlane_b32 s1, v1, s3",
        "v_readlane_b32 s2, v1, 63",
        "v_writelane_b32 v2, s4, s3",
    )
    assert waves.S[0].tolist() == a[:, 18].tolist()
    assert waves.S[1].tolist() == [a[0, 5], a[1, 6]]  # lane 70 % 64
    assert waves.S[2].tolist() == a[:, 63].tolist()
    assert (waves.V[2] != a).sum() == 2
    assert [waves.V[2, 0, 5], waves.V[2, 1, 6]] == [9, 8]


def test_read_of_the_first_lane_where_none_is_on() -> None:
    bench = Bench(v={1: words(1, 1)})
    bench.mask(np.zeros(LANES))
    waves = bench.run("v_readfirstlane_b32 s0, v1")
    assert waves.S[0, 0] == waves.V[1, 0, 0]


@pytest.mark.parametrize("row", [16, 32])
def test_swap_of_rows(row: int) -> None:
    a, b = words(1), words(2)
    waves = Bench("gfx950", 2, {1: a, 2: b}).run(f"v_permlane{row}_swap_b32_e32 v1, v2")
    for lane in range(LANES):
        odd = lane // row % 2 == 1
        assert (waves.V[1, :, lane] == (b[:, lane - row] if odd else a[:, lane])).all()
        assert (waves.V[2, :, lane] == (b[:, lane] if odd else a[:, lane + row])).all()


def test_swap_of_rows_with_lanes_off_is_reported() -> None:
    bench = Bench("gfx950")
    bench.mask(np.arange(LANES) < 32)
    bench.run("v_permlane32_swap_b32_e32 v1, v2")
    assert [one.kind for one in bench.findings.sorted()] == [MODEL]


SOURCES = {
    "quad_perm:[1,0,3,2]": lambda lane: lane ^ 1,
    "quad_perm:[2,3,0,1]": lambda lane: lane ^ 2,
    "row_shr:4": lambda lane: lane - 4 if lane % 16 >= 4 else None,
    "row_shl:3": lambda lane: lane + 3 if lane % 16 < 13 else None,
    "row_ror:8": lambda lane: lane // 16 * 16 + (lane % 16 - 8) % 16,
    "row_newbcast:5": lambda lane: lane // 16 * 16 + 5,
    "row_bcast:15": lambda lane: lane // 16 * 16 - 1 if lane >= 16 else None,
    "row_bcast:31": lambda lane: 31 if lane >= 32 else None,
    "row_mirror": lambda lane: lane // 16 * 16 + 15 - lane % 16,
    "row_half_mirror": lambda lane: lane // 8 * 8 + 7 - lane % 8,
}


@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("way", SOURCES)
def test_dpp(way: str, zeros: bool) -> None:
    a, b, old = words(1), words(2), words(3)
    bench = Bench(waves=2, v={1: a, 2: b, 0: old})
    on = np.arange(LANES) % 11 != 4
    bench.mask(on)
    waves = bench.run(f"v_add_u32_dpp v0, v1, v2 {way} row_mask:0xd bank_mask:0xb" + " bound_ctrl:1" * zeros)
    for lane in range(LANES):
        source = SOURCES[way](lane)
        present = source is not None and on[source]
        written = on[lane] and 0xD >> lane // 16 & 1 and 0xB >> lane % 16 // 4 & 1 and (present or zeros)
        value = a[:, source] if present else 0
        assert (waves.V[0, :, lane] == (b[:, lane] + np.uint32(value) if written else old[:, lane])).all(), lane


def test_packed_fp32() -> None:
    x = {k: floats(k) for k in range(1, 7)}
    waves = Bench(waves=2, v=x, s={8: np.float32([2, 3]), 9: np.float32([5, 7])}).run(
        "v_pk_mul_f32 v[10:11], v[1:2], v[3:4]",
        "v_pk_mul_f32 v[12:13], v[1:2], s[8:9] op_sel_hi:[1,0]",
        "v_pk_add_f32 v[14:15], v[1:2], v[3:4] op_sel:[0,1] op_sel_hi:[1,0] neg_lo:[0,1] neg_hi:[0,1]",
        "v_pk_fma_f32 v[16:17], v[1:2], v[3:4], v[5:6] op_sel:[1,0,0]",
    )
    got = {k: waves.V[k].view(np.float32) for k in range(10, 18)}
    low = np.array([2, 3], np.float32)[:, None]
    wanted = {
        10: x[1] * x[3], 11: x[2] * x[4], 12: x[1] * low, 13: x[2] * low, 14: x[1] - x[4], 15: x[2] - x[3],
        16: x[2].astype(float) * x[3] + x[5], 17: x[2].astype(float) * x[4] + x[6],
    }  # fmt: skip
    for k, value in wanted.items():
        assert (got[k] == value.astype(np.float32)).all(), k


def test_packed_moves_and_halves() -> None:
    a, b = words(1), words(2)
    two = np.full((2, LANES), 0x00030005, np.uint32)
    waves = Bench(waves=2, v={2: a, 3: b, 4: two, 6: a, 7: b}).run(
        "v_pk_mov_b32 v[10:11], v[2:3], v[6:7] op_sel:[1,0]",
        "v_pk_lshlrev_b16 v12, v4, v2",
        "v_pk_lshrrev_b16 v13, 8, v2 op_sel_hi:[0,1]",
        "v_pack_b32_f16 v14, v2, v3 op_sel:[1,0,0]",
    )
    assert (waves.V[10] == b).all()
    assert (waves.V[11] == a).all()
    for x, y, shifted, halved, packed in zip(a.flat, b.flat, *(waves.V[k].flat for k in (12, 13, 14)), strict=True):
        low, high = int(x) & 0xFFFF, int(x) >> 16
        assert shifted == (low << 5 & 0xFFFF) | (high << 3 & 0xFFFF) << 16
        assert halved == low >> 8 | high >> 8 << 16
        assert packed == high | (int(y) & 0xFFFF) << 16


def signed_16(x: int) -> int:
    return x - 65536 if x >> 15 else x


def on_fp16(function: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> Callable[[int, int], int]:
    """Bits to bits, in fp64, rounded by torch; NaN as one of them."""

    def on_bits(a: int, b: int) -> int:
        x, y = (torch.tensor([signed_16(v)], dtype=torch.int16).view(torch.float16).double() for v in (a, b))
        result = function(x, y).half()
        return 0x7E00 if bool(result.isnan()) else int(result.view(torch.int16)) & 0xFFFF

    return on_bits


def one_nan(word: int) -> int:
    """Both halves, NaN of fp16 as one of them."""
    halves = [word & 0xFFFF, word >> 16]
    low, high = (0x7E00 if half & 0x7FFF > 0x7C00 else half for half in halves)
    return low | high << 16


HALVES = {
    "v_pk_add_f16": on_fp16(lambda a, b: a + b),
    "v_pk_mul_f16": on_fp16(lambda a, b: a * b),
    "v_pk_add_u16": lambda a, b: a + b,
    "v_pk_add_i16": lambda a, b: signed_16(a) + signed_16(b),
    "v_pk_sub_u16": lambda a, b: a - b,
    "v_pk_sub_i16": lambda a, b: signed_16(a) - signed_16(b),
    "v_pk_mul_lo_u16": lambda a, b: a * b,
    "v_pk_lshlrev_b16": lambda a, b: b * 2 ** (a % 16),
    "v_pk_lshrrev_b16": lambda a, b: b // 2 ** (a % 16),
    "v_pk_ashrrev_i16": lambda a, b: signed_16(b) // 2 ** (a % 16),
    "v_pk_min_u16": min,
    "v_pk_max_u16": max,
    "v_pk_min_i16": lambda a, b: min(a, b, key=signed_16),
    "v_pk_max_i16": lambda a, b: max(a, b, key=signed_16),
}


@pytest.mark.parametrize("name", sorted(PACKED_16))
def test_pairs_of_16_bits(name: str) -> None:
    """Both halves; then with the halves that op_sel (for the low result) and op_sel_hi (for the high one) name."""
    a, b = words(1), words(2)
    a[0, :4] = b[0, 1:5] = [0, 0x80008000, 0x7FFFFFFF, 0xFFFF0001]
    waves = Bench(waves=2, v={1: a, 2: b}).run(f"{name} v3, v1, v2", f"{name} v4, v1, v2 op_sel:[1,0] op_sel_hi:[1,0]")
    for x, y, straight, crossed in zip(*(array.flat for array in (a, b, waves.V[3], waves.V[4])), strict=True):
        (low_x, high_x), (low_y, high_y) = ((int(v) & 0xFFFF, int(v) >> 16) for v in (x, y))
        low, high = HALVES[name](low_x, low_y) & 0xFFFF, HALVES[name](high_x, high_y) & 0xFFFF
        if name.endswith("f16"):
            straight, crossed = one_nan(int(straight)), one_nan(int(crossed))
        assert straight == low | high << 16
        assert crossed == (HALVES[name](high_x, low_y) & 0xFFFF) * 0x10001


def some_numbers(arch: str) -> np.ndarray[Any, Any]:
    """[4, 64]: all of fp8 and their midpoints, what is between them, too large, NaN, infinity, signed zeros."""
    table = torch.arange(256, dtype=torch.uint8).view(FP8[arch]).float().numpy()
    fine = np.sort(table[np.isfinite(table)])
    middle = (fine[1:] + fine[:-1]) / 2
    rng = np.random.default_rng(0)
    edge = LARGEST[arch] * np.float32([1, 1.02, 31 / 30, 29 / 28, 1.034, 1.036, 1.04, 2, -1.02, -1.04, -2])
    special = np.float32([np.nan, np.inf, -np.inf, 0.0, -0.0, 2**-11, -(2**-11), 2**-10, 3 * 2**-11, 1e-30])
    return np.concatenate([rng.choice(middle, 135), rng.standard_normal(100) * 50, edge, special]).astype(
        np.float32
    ).reshape(4, 64)  # fmt: skip


@pytest.mark.parametrize("saturate", [False, True])
@pytest.mark.parametrize("arch", FP8)
def test_fp8_from_fp32(arch: str, saturate: bool) -> None:
    x = some_numbers(arch)
    old = words(8, 4)
    lines = [f"s_setreg_imm32_b32 hwreg(HW_REG_MODE, 23, 1), {int(saturate)}"]
    lines += ["v_cvt_pk_fp8_f32 v0, v1, v2", "v_cvt_pk_fp8_f32 v3, v2, v1 op_sel:[0,0,1]"]
    waves = Bench(arch, 4, {1: x, 2: x[::-1], 0: old, 3: old}).run(*lines)
    tensor = torch.from_numpy(x)
    # torch's rounding of what is in range; half a step beyond the largest number, a tie goes to an even mantissa
    wanted = tensor.clamp(-LARGEST[arch], LARGEST[arch]).to(FP8[arch]).view(torch.uint8).numpy().astype(np.uint32)
    over = np.abs(x) > 464 if arch == "gfx950" else np.abs(x) >= 248
    wanted = np.where(np.isnan(x) | (over & (not saturate)), 0x7F if arch == "gfx950" else 0x80, wanted)
    assert ((waves.V[0] & 0xFF) == wanted).all()
    assert ((waves.V[0] >> 8 & 0xFF) == wanted[::-1]).all()
    assert (waves.V[0] >> 16 == old >> 16).all()
    assert (waves.V[3] >> 24 == wanted).all()
    assert ((waves.V[3] & 0xFFFF) == old & 0xFFFF).all()


def test_mixed_products() -> None:
    """fp32 and halves of fp16 words, rounded once to either half of the target."""
    x, y, pairs, old = floats(1, 4), floats(2, 4), words(3, 4) & 0x3FFF3FFF, words(4, 4)
    waves = Bench("gfx942", 4, {1: x, 2: y, 3: pairs, 4: old, 5: old}).run(
        "v_fma_mixlo_f16 v4, v1, v2, 0",
        "v_fma_mixhi_f16 v5, v1, v3, v3 op_sel:[0,1,0] op_sel_hi:[0,1,1]",
    )
    low, high = (
        (pairs >> shift).astype(np.uint16).view(np.float16).astype(np.float64).reshape(4, 64) for shift in (0, 16)
    )
    product = (x.astype(np.float64) * y).astype(np.float16).view(np.uint16)
    fused = (x.astype(np.float64) * high + low).astype(np.float16).view(np.uint16)
    assert ((waves.V[4] & 0xFFFF) == product).all() and (waves.V[4] >> 16 == old >> 16).all()
    assert ((waves.V[5] & 0xFFFF) == old & 0xFFFF).all() and (waves.V[5] >> 16 == fused).all()


@pytest.mark.parametrize("arch", FP8)
def test_fp32_from_fp8(arch: str) -> None:
    every = np.arange(256, dtype=np.uint32).reshape(4, 64)
    word = every | every[::-1] << 8 | every[:, ::-1] << 16
    waves = Bench(arch, 4, {1: word}).run(
        "v_cvt_pk_f32_fp8_e32 v[2:3], v1",
        "v_cvt_pk_f32_fp8_sdwa v[4:5], v1 src0_sel:WORD_1",
        "v_cvt_f32_fp8_sdwa v6, v1 src0_sel:BYTE_1",
    )
    table = torch.arange(256, dtype=torch.uint8).view(FP8[arch]).float().numpy()
    for register, byte in ((2, every), (3, every[::-1]), (4, every[:, ::-1]), (6, every[::-1])):
        assert np.array_equal(waves.V[register].view(np.float32), table[byte], equal_nan=True)


def test_scaled_conversions_of_gfx950() -> None:
    x = floats(1, 4) * 3
    scale = np.float32(2.0**-5)
    waves = Bench("gfx950", 4, {1: x, 2: x[::-1], 0: words(3, 4), 5: np.full((4, 64), 0x403C3840, np.uint32)}).run(
        f"s_mov_b32 s0, {int(scale.view(np.uint32)):#x}",
        "v_cvt_scalef32_pk_fp8_f32 v0, v1, v2, s0",
        "v_cvt_scalef32_pk_f32_fp8 v[6:7], v5, s0 op_sel:[1,0,0]",
        "v_cvt_scalef32_pk_bf16_fp8 v8, v5, 1.0 op_sel:[1,0,0]",
    )
    wanted = torch.from_numpy(x / scale).to(FP8["gfx950"]).view(torch.uint8).numpy()
    assert ((waves.V[0] & 0xFF) == wanted).all()
    assert (waves.V[6].view(np.float32) == np.float32(1.5) * scale).all()  # 0x3c
    assert (waves.V[7].view(np.float32) == np.float32(2.0) * scale).all()  # 0x40
    assert (waves.V[8] == 0x40003FC0).all()  # 2.0 and 1.5 in bf16


MATRICES = [
    ("gfx942", "v_mfma_f32_16x16x16_bf16", 16, 16, "bf16"),
    ("gfx942", "v_mfma_f32_16x16x16_f16", 16, 16, "f16"),
    ("gfx942", "v_mfma_f32_32x32x8_bf16", 32, 8, "bf16"),
    ("gfx942", "v_mfma_f32_16x16x32_fp8_fp8", 16, 32, "fp8"),
    ("gfx942", "v_mfma_f32_32x32x16_fp8_fp8", 32, 16, "fp8"),
    ("gfx950", "v_mfma_f32_16x16x32_bf16", 16, 32, "bf16"),
    ("gfx950", "v_mfma_f32_32x32x16_bf16", 32, 16, "bf16"),
    ("gfx950", "v_mfma_f32_16x16x128_f8f6f4", 16, 128, "fp8"),
    ("gfx950", "v_mfma_f32_32x32x64_f8f6f4", 32, 64, "fp8"),
    ("gfx950", "v_mfma_scale_f32_16x16x128_f8f6f4", 16, 128, "fp8"),
]


def dtype_of(arch: str, kind: str) -> torch.dtype:
    return {"bf16": torch.bfloat16, "f16": torch.float16, "fp8": FP8[arch]}[kind]


@pytest.mark.parametrize(("arch", "name", "side", "depth", "kind"), MATRICES)
def test_matrix_instruction(arch: str, name: str, side: int, depth: int, kind: str) -> None:
    """Every number is put where the manual has it: A's row and B's column are the lane modulo the side."""
    dtype = dtype_of(arch, kind)
    torch.manual_seed(0)
    a, b = (torch.randn(2, side, depth).to(dtype) for _ in range(2))
    c = torch.randn(2, side, side)
    each = depth * side // 64  # numbers of a lane
    size = a.element_size()
    held = np.zeros((2, 2, LANES, each * size), np.uint8)  # [operand, wave, lane, bytes]
    for operand, matrix in enumerate((a, b)):
        data = matrix.view(torch.uint8).numpy().reshape(2, side, depth * size)
        for lane in range(LANES):
            begin = lane // side * each * size
            held[operand, :, lane] = data[:, lane % side, begin : begin + each * size]
    count, rows = each * size // 4, side * side // 64
    registers = {}
    for operand, first in enumerate((10, 30)):
        for k in range(count):
            registers[first + k] = held[operand].view(np.uint32)[:, :, k]
    places = {}
    for register in range(rows):
        value = np.zeros((2, LANES), np.float32)
        for lane in range(LANES):
            row = 8 * (register // 4) + 4 * (lane // 32) + register % 4 if side == 32 else 4 * (lane // 16) + register
            places[register, lane] = row, lane % side
            value[:, lane] = c[:, row, lane % side].numpy()
        registers[50 + register] = value
    scales = np.random.default_rng(1).integers(120, 132, (2, 2, LANES)).astype(np.uint32)  # one a row and 32 of K
    registers |= {90: scales[0] << 8, 91: scales[1]}
    bench = Bench(arch, 2, registers)
    target = f"v[100:{99 + rows}], v[10:{9 + count}], v[30:{29 + count}]"
    text = f"{name} {target}, v[50:{49 + rows}]"
    if "scale" in name:
        text += ", v90, v91 op_sel:[1,0,0] op_sel_hi:[0,0,0]"
    waves = bench.run(text)
    fa, fb = a.double(), b.double()
    if "scale" in name:
        for operand, matrix in enumerate((fa, fb)):
            for lane in range(LANES):
                part = slice(lane // side * each, (lane // side + 1) * each)
                by = torch.from_numpy(2.0 ** (scales[operand, :, lane].astype(float) - 127))
                matrix[:, lane % side, part] *= by[:, None]
    wanted = (fa @ fb.transpose(1, 2) + c.double()).float().numpy()
    got = waves.V[100 : 100 + rows].view(np.float32)
    for (register, lane), (row, column) in places.items():
        assert np.allclose(got[register, :, lane], wanted[:, row, column], rtol=1e-6, atol=1e-6)


def test_matrix_instruction_on_nothing_to_add() -> None:
    one = np.full((1, LANES), 0x3F803F80, np.uint32)
    waves = Bench(v={1: one, 2: one}).run("v_mfma_f32_16x16x16_bf16 a[0:3], v[1:2], v[1:2], 0")
    assert (waves.V[256:260].view(np.float32) == 16).all()


@pytest.mark.parametrize(
    "text",
    [
        "v_mfma_f32_4x4x4_16b_bf16 v[0:3], v[4:5], v[6:7], v[0:3]",
        "v_mfma_f32_16x16x128_f8f6f4 v[0:3], v[4:9], v[10:15], v[0:3] cbsz:2 blgp:2",
        "v_fantasy_b32 v0, v1",
        "v_add_f32_e64 v0, v1, v2 clamp",
        "s_fantasy_b32 s0, s1",
        "s_setreg_imm32_b32 hwreg(HW_REG_MODE, 0, 4), 1",
        "s_mov_b32 exec_lo, s1",
        "ds_add_u32 v0, v1",
        'ds_swizzle_b32 v0, v1 offset:swizzle(BITMASK_PERM,"01pip")',
        "global_atomic_add v[0:1], v2, off",
        "buffer_load_dword v0, off, s[0:3], 0 offen",
        "buffer_load_dword v0, v1, s[0:3], 0",
        "flat_load_dword v0, v[1:2]",
        "v_add_u32_dpp v0, v1, v2 wave_shl:1 row_mask:0xf bank_mask:0xf",
    ],
)
def test_what_is_not_modelled_is_refused_by_name(text: str) -> None:
    with pytest.raises(Unknown, match=f"line 1 `{text.split()[0]}"):
        Bench("gfx950").run(text)
