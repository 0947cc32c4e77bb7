"""Every lane-by-lane and scalar instruction against a second statement of it, on random and special operands."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from one import Bench
from statements import M32, M64, SCALAR, STATEMENTS, number, s32, s64

from mla_codegen.check.cdna import scalar, vector

SPECIAL = [
    0, 1, 2, 3, 5, 15, 16, 31, 32, 33, 63, 64, 255, 256, 0x7FFF, 0x8000, 0xFFFF, 0x10000, 0xFFFFFF, 0x7FFFFFFF,
    0x80000000, 0x80000001, 0xFFFFFFFF, 0x05010400, 0x0C0D0809, 0x7F7F7F7F,
    0x3F800000, 0xBF800000, 0x40000000, 0x3F000000, 0x7F800000, 0xFF800000, 0x7FC00000, 0xFFC00001, 0x00800000,
    0x007FFFFF, 0x80000003, 0x7F7FFFFF, 0xFF7FFFFF, 0x4B800000, 0x4F800000, 0xCF000000, 0x3E22F983, 0x477FE000,
]  # fmt: skip
# Approximate in hardware: held to 1 ulp of the true value, denormals flushed.
APPROXIMATE = {
    "v_exp_f32": torch.exp2,
    "v_log_f32": torch.log2,
    "v_rcp_f32": torch.reciprocal,
    "v_rcp_iflag_f32": torch.reciprocal,
    "v_rsq_f32": torch.rsqrt,
    "v_sqrt_f32": torch.sqrt,
}


def operands(seed: int) -> np.ndarray[Any, Any]:
    """[4 waves, 64] words: special ones, words of any bits, and fp32 numbers of like size."""
    rng = np.random.default_rng(seed)
    words = rng.integers(0, 1 << 32, 256, dtype=np.uint64).astype(np.uint32)
    words[:96] = rng.choice(np.array(SPECIAL, np.uint32), 96)
    words[96:176] = (rng.standard_normal(80) * 2.0 ** rng.integers(-8, 8, 80)).astype(np.float32).view(np.uint32)
    return words.reshape(4, 64)


def as_kind(word: int, high: int, kind: str) -> Any:
    both = word | high << 32
    return {
        "u": word, "*": word, "i": s32(word), "f": number(word), "+": number(word), "U": both, "I": s64(both),
    }[kind]  # fmt: skip


def word_of(value: Any) -> int:
    """The bits of a result."""
    if isinstance(value, float):
        return int(np.float32(value).view(np.uint32))
    return int(value) & M32


def same(got: int, wanted: Any) -> bool:
    if isinstance(wanted, float) and math.isnan(wanted):
        return math.isnan(number(got))
    return got == word_of(wanted)


@pytest.mark.parametrize("name", sorted(set(vector.TABLE) - set(APPROXIMATE)))
def test_vector_instruction(name: str) -> None:
    results, sources, _ = vector.TABLE[name]
    statement = STATEMENTS[name]
    values = [(operands(2 * k), operands(2 * k + 1)) for k in range(len(sources))]
    registers = {8 + 2 * k + half: words for k, pair in enumerate(values) for half, words in enumerate(pair)}
    if name.startswith("v_div_scale"):
        registers[8] = np.where(np.arange(64) % 2, registers[10], registers[12])
    masks = {}
    texts = []
    for k, kind in enumerate(sources):
        at = 8 + 2 * k
        if kind == "m":
            bits = np.random.default_rng(9).integers(0, 1 << 62, 4).astype(np.uint64)
            low, high = (106, 107) if name.startswith("v_div_fmas") else (40, 41)
            masks = {low: bits.astype(np.uint32), high: (bits >> np.uint64(32)).astype(np.uint32)}
            taken = bits
            texts.append("s[40:41]" * (low == 40))
        elif kind in "+*":
            at = 2
        else:
            texts.append(f"v[{at}:{at + 1}]" if kind in "UI" else f"v{at}")
    targets = {"u": ["v2"], "U": ["v[2:3]"], "m": ["s[50:51]"], "um": ["v2", "s[50:51]"], "Um": ["v[2:3]", "s[50:51]"]}
    bench = Bench("gfx950", 4, registers, masks)
    active = np.arange(64) % 7 != 3
    bench.mask(active)
    before = operands(77)
    bench.waves.V[2] = before
    opcode = name if name.startswith(("v_div", "v_mad")) else f"{name}_e64"
    waves = bench.run(f"{opcode} " + ", ".join([*targets[results], *filter(None, texts)]))
    for wave in range(4):
        for lane in range(64):
            given = []
            for k, kind in enumerate(sources):
                if kind == "m":
                    given.append(bool(int(taken[wave]) >> lane & 1))
                    continue
                low, high = values[k]
                if kind in "+*":
                    low = before
                if name.startswith("v_div_scale") and k == 0:
                    low = registers[8]
                given.append(as_kind(int(low[wave, lane]), int(high[wave, lane]), kind))
            if not active[lane]:
                if results[0] == "u":
                    assert waves.V[2, wave, lane] == before[wave, lane]
                continue
            wanted = statement(*given)
            first, *rest = wanted if isinstance(wanted, tuple) else (wanted,)
            if results[0] == "m":
                rest = [first]
            elif results[0] == "U":
                assert int(waves.V[2, wave, lane]) | int(waves.V[3, wave, lane]) << 32 == first & M64, given
            else:
                assert same(int(waves.V[2, wave, lane]), first), (given, first, number(int(waves.V[2, wave, lane])))
            if rest:
                assert bool(int(waves.pair(50)[wave]) >> lane & 1) == rest[0], given
    if "m" in results:
        assert not (int(waves.pair(50)[0]) >> 3 & 1)  # a lane that is off


@pytest.mark.parametrize("name", sorted(APPROXIMATE))
def test_approximate_instruction(name: str) -> None:
    words = operands(5)
    waves = Bench(waves=4, v={1: words}).run(f"{name}_e32 v0, v1")
    x = torch.from_numpy(words.view(np.float32).copy())
    x = torch.where(x.abs() < 2.0**-126, x * 0, x)
    exact = APPROXIMATE[name](x.double())
    wanted = exact.float()
    wanted = torch.where((wanted.abs() < 2.0**-126) & (wanted != 0), wanted * 0, wanted)
    got = torch.from_numpy(waves.V[0].view(np.float32).copy())
    assert torch.equal(got.isnan(), wanted.isnan())
    assert torch.equal(got.isinf(), wanted.isinf())
    fine = wanted.isfinite()
    ulp = torch.maximum(wanted.abs() * 2.0**-23, torch.tensor(2.0**-149))
    assert bool(((got.double() - exact).abs()[fine] <= 1.01 * ulp[fine] + 2.0**-126 * (wanted[fine] == 0)).all())


@pytest.mark.parametrize("name", sorted(scalar.ARITHMETIC))
def test_scalar_instruction(name: str) -> None:
    result, sources, _ = scalar.ARITHMETIC[name]
    values = [(operands(2 * k).reshape(-1), operands(2 * k + 1).reshape(-1)) for k in range(2)]
    registers = {8 + 2 * k + half: words for k, pair in enumerate(values) for half, words in enumerate(pair)}
    bench = Bench(waves=256, s=registers)
    scc = np.arange(256) % 3 == 0
    bench.waves.scc = scc.copy()
    texts = [
        f"s[{8 + 2 * k}:{9 + 2 * k}]" if kind in "UI" else f"s{8 + 2 * k}"
        for k, kind in enumerate(sources)
        if kind != "c"
    ]
    wide = result[0] in "UI"
    waves = bench.run(f"{name} " + ", ".join(["s[2:3]" if wide else "s2", *texts]))
    for k in range(256):
        given = [
            bool(scc[k]) if kind == "c" else as_kind(int(values[place][0][k]), int(values[place][1][k]), kind)
            for place, kind in enumerate(sources)
        ]
        wanted, flag = SCALAR[name](*given)
        wanted &= M64 if wide else M32
        got = int(waves.pair(2)[k]) if wide else int(waves.S[2, k])
        assert got == wanted, given
        assert bool(waves.scc[k]) == (bool(scc[k]) if flag is None else wanted != 0 if flag is ... else flag), given


@pytest.mark.parametrize("width", [16, 32])
@pytest.mark.parametrize("table", [0x00, 0x80, 0xFE, 0xCA, 0x96, 0x6A, 0xFF])
def test_bitop3_is_the_function_of_its_truth_table(table: int, width: int) -> None:
    a, b, c = operands(1), operands(2), operands(3)
    waves = Bench("gfx950", 4, {1: a, 2: b, 3: c}).run(f"v_bitop3_b{width} v0, v1, v2, v3 bitop3:{table:#x}")
    for x, y, z, got in zip(a.flat, b.flat, c.flat, waves.V[0].flat, strict=True):
        wanted = 0
        for k in range(width):
            row = 4 * (int(x) >> k & 1) + 2 * (int(y) >> k & 1) + (int(z) >> k & 1)
            wanted |= (table >> row & 1) << k
        assert got == wanted


def test_comparisons_of_scalars() -> None:
    a, b = operands(1).reshape(-1), operands(2).reshape(-1)
    b[::5] = a[::5]
    relations = {"eq": "==", "lg": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
    for name, sign in relations.items():
        for kind in "ui":
            waves = Bench(waves=256, s={1: a, 2: b}).run(f"s_cmp_{name}_{kind}32 s1, s2")
            for x, y, got in zip(a, b, waves.scc, strict=True):
                left, right = as_kind(int(x), 0, kind), as_kind(int(y), 0, kind)
                assert got == eval(f"{left} {sign} {right}"), (name, kind, left, right)
    assert Bench(s={1: 0xFFFFFFFE}).run("s_cmpk_eq_i32 s1, 0xfffe").scc[0]
    assert not Bench(s={1: 0xFFFFFFFE}).run("s_cmpk_lt_u32 s1, 0xfffe").scc[0]
    assert Bench(s={1: 8}).run("s_bitcmp1_b32 s1, 3").scc[0]
    assert not Bench(s={1: 8}).run("s_bitcmp0_b32 s1, 3").scc[0]


def test_scalars_with_a_short_constant() -> None:
    waves = Bench(s={1: 7, 2: 7, 3: 0x7FFFFFFF}).run(
        "s_movk_i32 s0, 0xff00", "s_addk_i32 s1, 0xfff0", "s_mulk_i32 s2, 0xfffe", "s_addk_i32 s3, 0x1"
    )
    assert [s32(int(waves.S[k, 0])) for k in range(4)] == [-256, -9, -14, -(2**31)]
    assert waves.scc[0]  # the last overflowed


def test_exec_is_saved_and_changed() -> None:
    bench = Bench(s={10: 0x0000FFFF, 11: 0})
    bench.mask(np.arange(64) >= 8)
    waves = bench.run("s_and_saveexec_b64 s[2:3], s[10:11]")
    assert int(waves.pair(2)[0]) == M64 - 0xFF
    assert waves.mask[0].nonzero()[0].tolist() == list(range(8, 16))
    assert waves.scc[0]
    waves = bench.run("s_or_b64 exec, exec, s[2:3]")
    assert waves.mask[0].sum() == 56
    waves = bench.run("s_mov_b64 exec, 0", "s_andn2_saveexec_b64 s[4:5], exec")
    assert not waves.mask.any()
    assert not waves.scc[0]


def test_sdwa_takes_parts_and_places_the_result() -> None:
    a, b = operands(1), operands(2)
    lines = (
        "v_or_b32_sdwa v0, v1, v2 dst_sel:WORD_1 dst_unused:UNUSED_PAD src0_sel:BYTE_3 src1_sel:WORD_0",
        "v_lshlrev_b32_sdwa v3, v4, v1 dst_sel:DWORD dst_unused:UNUSED_PAD src0_sel:DWORD src1_sel:BYTE_2",
    )
    waves = Bench(waves=4, v={1: a, 2: b, 4: np.full((4, 64), 5, np.uint32)}).run(*lines)
    for x, y, word, shifted in zip(a.flat, b.flat, waves.V[0].flat, waves.V[3].flat, strict=True):
        assert int(word) == (int(x) >> 24 | int(y) & 0xFFFF) << 16
        assert int(shifted) == (int(x) >> 16 & 255) << 5


def test_denormals_are_flushed_where_mode_says_so() -> None:
    tiny, one = np.float32(2.0**-130), np.float32(1.0)
    a, b = np.full((1, 64), tiny), np.full((1, 64), one)
    lines = ("v_mul_f32_e32 v3, v1, v2", "v_max_f32_e32 v4, v1, v1", "v_mov_b32_e32 v5, v1", "v_add_f32_e32 v6, v1, v2")
    kept = Bench(v={1: a, 2: b}).run(*lines)
    lost = Bench(v={1: -a, 2: b}, denormals=False).run(*lines)
    assert kept.V[3, 0, 0].view(np.float32) == tiny
    assert kept.V[4, 0, 0].view(np.float32) == tiny
    assert lost.V[3, 0, 0] == 0x80000000
    assert lost.V[4, 0, 0] == 0x80000000
    assert lost.V[5, 0, 0].view(np.float32) == -tiny  # a move is no arithmetic
    assert lost.V[6, 0, 0].view(np.float32) == 1


def test_a_division_as_the_compiler_writes_it() -> None:
    """The sequence of v_div_* around a reciprocal rounds every quotient right."""
    rng = np.random.default_rng(3)
    n = (rng.standard_normal((4, 64)) * 2.0 ** rng.integers(-60, 60, (4, 64))).astype(np.float32)
    d = (rng.standard_normal((4, 64)) * 2.0 ** rng.integers(-60, 60, (4, 64))).astype(np.float32)
    n[0, :8] = [0.0, -0.0, np.inf, 1.0, 1.0, np.nan, 2.0**-140, 2.0**127]
    d[0, :8] = [1.0, 3.0, 2.0, 0.0, np.inf, 1.0, 2.0**-120, 2.0**-120]
    waves = Bench(waves=4, v={1: n, 2: d}).run(
        "v_div_scale_f32 v3, s[0:1], v2, v2, v1", "v_rcp_f32_e32 v4, v3", "v_fma_f32 v5, -v3, v4, 1.0",
        "v_fmac_f32_e32 v4, v5, v4", "v_div_scale_f32 v5, vcc, v1, v2, v1", "v_mul_f32_e32 v6, v5, v4",
        "v_fma_f32 v7, -v3, v6, v5", "v_fmac_f32_e32 v6, v7, v4", "v_fma_f32 v3, -v3, v6, v5",
        "v_div_fmas_f32 v3, v3, v4, v6", "v_div_fixup_f32 v0, v3, v2, v1",
    )  # fmt: skip
    with np.errstate(all="ignore"):
        wanted = torch.from_numpy(n.copy()) / torch.from_numpy(d.copy())
    got = torch.from_numpy(waves.V[0].view(np.float32).copy())
    normal = (wanted.abs() >= 2.0**-126) | (wanted == 0) | ~wanted.isfinite()
    assert torch.equal(got[normal].nan_to_num(7.5), wanted[normal].nan_to_num(7.5))
