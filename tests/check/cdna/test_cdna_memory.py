"""Loads, stores and LDS: what they move, and the faults that they must report."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from one import Bench

from mla_codegen.check.cdna import banks
from mla_codegen.check.cdna.findings import OUTSIDE, RACE, UNWRITTEN

LANES = 64


def kinds(bench: Bench) -> list[str]:
    return [one.kind for one in bench.findings.sorted()]


def content(size: int, seed: int = 0) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)


def addressed(bench: Bench, base: int, offsets: Any) -> None:
    """Put base + offsets [waves, 64] into v[0:1]."""
    address = np.uint64(base) + np.broadcast_to(offsets, (bench.waves.count, LANES)).astype(np.uint64)
    bench.waves.V[0] = address.astype(np.uint32)
    bench.waves.V[1] = (address >> np.uint64(32)).astype(np.uint32)


@pytest.mark.parametrize(("kind", "size"), [("dword", 4), ("dwordx2", 8), ("dwordx3", 12), ("dwordx4", 16)])
def test_global_loads_and_stores(kind: str, size: int) -> None:
    data = content(4096)
    bench = Bench(waves=2)
    base, there = bench.memory.add("a", data), bench.memory.add("b", np.zeros(4096, np.uint8))
    at = np.random.default_rng(1).permutation(120)[: 2 * LANES].repeat(2)[: 2 * LANES].reshape(2, LANES) * 16
    addressed(bench, base, at)
    count = size // 4
    last = f"v[4:{3 + count}]" if count > 1 else "v4"
    waves = bench.run(f"global_load_{kind} {last}, v[0:1], off offset:4", "s_waitcnt vmcnt(0)")
    got = np.ascontiguousarray(np.moveaxis(waves.V[4 : 4 + count], 0, 2)).view(np.uint8)
    for wave in range(2):
        for lane in range(LANES):
            begin = at[wave, lane] + 4
            assert (got[wave, lane] == data[begin : begin + size]).all()
    place = np.arange(2 * LANES).reshape(2, LANES) * 16
    addressed(bench, there, place)
    on = np.arange(LANES) % 3 != 0
    bench.mask(on)
    bench.run(f"global_store_{kind} v[0:1], {last}, off offset:-0")
    stored = bench.memory.content(2)
    for wave in range(2):
        for lane in range(LANES):
            begin = place[wave, lane]
            wanted = got[wave, lane] if on[lane] else 0
            assert (stored[begin : begin + size] == wanted).all()
    assert not kinds(bench)


def test_global_addresses_of_scalar_base_and_short_numbers() -> None:
    data = content(512)
    bench = Bench(v={2: np.arange(LANES, dtype=np.uint32)[None] * 2, 5: 0xAAAAAAAA})
    base = bench.memory.add("a", data)
    bench.waves.set_pair(6, np.array([base], np.uint64))
    waves = bench.run(
        "global_load_ubyte v3, v2, s[6:7]", "global_load_sbyte v4, v2, s[6:7] offset:1",
        "global_load_short_d16_hi v5, v2, s[6:7]", "global_load_sshort v6, v2, s[6:7]",
        "global_load_ushort v7, v2, s[6:7]",
    )  # fmt: skip
    shorts = data.view(np.int16)[:LANES]
    assert (waves.V[3, 0] == data[: 2 * LANES : 2]).all()
    assert (waves.V[4, 0].view(np.int32) == data[1 : 2 * LANES : 2].view(np.int8)).all()
    assert (waves.V[5, 0] == 0xAAAA | shorts.view(np.uint16).astype(np.uint32) << 16).all()
    assert (waves.V[6, 0].view(np.int32) == shorts).all()
    assert (waves.V[7, 0] == shorts.view(np.uint16)).all()


@pytest.mark.parametrize("offset", [-4, 509, 512, 1 << 33, -(1 << 32)])
def test_access_outside_of_an_argument_is_reported(offset: int) -> None:
    bench = Bench()
    bench.memory.add("before", content(512))
    base = bench.memory.add("a", content(512))
    bench.memory.add("behind", content(512))
    at = np.zeros((1, LANES), np.int64)
    at[0, 9] = offset
    addressed(bench, base, at)
    bench.run("global_load_dword v4, v[0:1], off")
    assert kinds(bench) == [OUTSIDE]
    assert f"at a {offset:+d} of 512 bytes (1 lanes)" in str(bench.findings.sorted()[0])
    bench.findings.found.clear()
    bench.run("global_store_dword v[0:1], v4, off")
    assert kinds(bench) == [OUTSIDE]
    bench.findings.found.clear()
    bench.mask(np.arange(LANES) != 9)  # what a lane that is off would do is nothing
    bench.run("global_load_dword v4, v[0:1], off")
    assert not kinds(bench)


def descriptor(bench: Bench, base: int, records: int) -> None:
    for number, word in enumerate((base & 0xFFFFFFFF, base >> 32, records, 0x27000)):
        bench.waves.S[8 + number] = word


def test_buffer_access_beyond_its_records_is_nothing() -> None:
    data = content(1024)
    bench = Bench(v={2: np.arange(LANES, dtype=np.uint32)[None] * 16, 3: 7})
    base = bench.memory.add("a", data)
    descriptor(bench, base, 512)
    waves = bench.run("buffer_load_dword v4, v2, s[8:11], 0 offen offset:4", "s_movk_i32 s2, 0x8")
    wanted = data.view(np.uint32)[1::4].copy()
    wanted[32:] = 0
    assert (waves.V[4, 0] == wanted[:LANES]).all()
    bench.run("buffer_store_dword v3, v2, s[8:11], s2 offen")
    stored = bench.memory.content(1).view(np.uint32)
    assert (stored[2:128:4] == 7).all()
    assert (stored[130::4] == data.view(np.uint32)[130::4]).all()
    assert not kinds(bench)
    bench.waves.S[10] = 510
    bench.run("buffer_load_dwordx4 v[4:7], v2, s[8:11], 0 offen")
    assert kinds(bench) == [OUTSIDE]


def test_buffer_load_of_one_place_by_all_lanes() -> None:
    data = content(64)
    bench = Bench()
    descriptor(bench, bench.memory.add("a", data), 64)
    waves = bench.run("buffer_load_dword v4, off, s[8:11], 0 offset:12")
    assert (waves.V[4, 0] == data.view(np.uint32)[3]).all()
    assert not kinds(bench)


def test_a_negative_buffer_offset_and_a_constant_meet_in_32_bits() -> None:
    data = content(1024)
    bench = Bench(v={2: np.arange(-256, 0, 4).astype(np.int32).view(np.uint32)[None]})
    base = bench.memory.add("a", data)
    descriptor(bench, base, 1024)
    waves = bench.run("buffer_load_dword v4, v2, s[8:11], 0 offen offset:256")
    assert (waves.V[4, 0] == data.view(np.uint32)[:LANES]).all()
    assert not kinds(bench)


def test_copy_from_memory_to_lds() -> None:
    data = content(4096)
    bench = Bench("gfx950", v={2: np.arange(LANES, dtype=np.uint32)[None, ::-1] * 16}, s={124: 256})
    base = bench.memory.add("a", data)
    descriptor(bench, base, 4096)
    bench.run("buffer_load_dwordx4 v2, s[8:11], 0 offen offset:16 lds")
    rows = data.reshape(-1, 16)
    assert (bench.lds.data[272 : 272 + 1024].reshape(LANES, 16) == rows[64:0:-1]).all()
    bench.waves.V[6] = np.arange(LANES, dtype=np.uint32) * 16 + 272
    bench.run("ds_read_b128 v[12:15], v6")
    assert kinds(bench) == [RACE]  # it has not waited for its copy
    bench.findings.found.clear()
    for access in bench.waves.wait_vm(0):
        bench.lds.landed(access.marks)
    bench.run("ds_read_b128 v[12:15], v6")
    assert not kinds(bench)


def test_scratch_keeps_what_it_got() -> None:
    a = np.arange(2 * LANES, dtype=np.uint32).reshape(2, LANES)
    bench = Bench(waves=2, v={1: a, 2: a + 1, 3: a + 2, 4: a + 3}, s={33: 32})
    waves = bench.run(
        "scratch_store_dwordx4 off, v[1:4], off offset:16", "scratch_load_dwordx2 v[8:9], off, off offset:24",
        "scratch_store_dword off, v1, s33", "scratch_load_dword v10, off, off offset:32",
    )  # fmt: skip
    assert (waves.V[8] == a + 2).all()
    assert (waves.V[10] == a).all()
    assert not kinds(bench)
    bench.run("scratch_load_dword v10, off, off offset:64")
    assert kinds(bench) == [UNWRITTEN]


def test_scalar_loads() -> None:
    data = content(256)
    bench = Bench(waves=2, s={20: 0x10})
    base = bench.memory.add("a", data)
    bench.waves.set_pair(6, np.array([base, base + 64], np.uint64))
    waves = bench.run("s_load_dwordx4 s[8:11], s[6:7], 0x8", "s_load_dword s12, s[6:7], s20")
    for wave in range(2):
        words = data[64 * wave :].view(np.uint32)
        assert waves.S[8:12, wave].tolist() == words[2:6].tolist()
        assert waves.S[12, wave] == words[4]


# --- LDS ---


@pytest.mark.parametrize("bits", [8, 16, 32, 64, 96, 128])
def test_lds_gives_back_what_was_written(bits: int) -> None:
    size, count = bits // 8, max(1, bits // 32)
    values = np.random.default_rng(2).integers(0, 1 << 32, (4, 2, LANES), dtype=np.uint64).astype(np.uint32)
    bench = Bench(waves=2, v={k: values[k] for k in range(4)}, lds_bytes=4096)
    bench.waves.V[9] = np.random.default_rng(3).permutation(2 * LANES).astype(np.uint32).reshape(2, LANES) * 16
    data, back = (f"v[{at}:{at + count - 1}]" if count > 1 else f"v{at}" for at in (0, 20))
    unit = f"u{bits}" if bits < 32 else f"b{bits}"
    waves = bench.run(f"ds_write_b{bits} v9, {data} offset:64", f"ds_read_{unit} {back}, v9 offset:64")
    for k in range(count):
        assert (waves.V[20 + k] == (values[k] & ((1 << 8 * min(size, 4)) - 1))).all()
    assert not kinds(bench)


def test_pairs_of_lds() -> None:
    a, b = (np.arange(LANES, dtype=np.uint32)[None] + k for k in (1000, 2000))
    bench = Bench(v={0: np.arange(LANES, dtype=np.uint32)[None] * 8, 1: a, 2: b}, lds_bytes=65536)
    waves = bench.run(
        "ds_write2_b32 v0, v1, v2 offset1:1", "ds_read_b64 v[4:5], v0",
        "ds_write2st64_b32 v0, v1, v2 offset0:8 offset1:10", "ds_read2st64_b32 v[6:7], v0 offset0:10 offset1:8",
        "ds_write2st64_b64 v0, v[1:2], v[4:5] offset0:16 offset1:18", "ds_read2_b64 v[8:11], v0 offset0:0 offset1:1",
    )  # fmt: skip
    assert (waves.V[4] == a).all()
    assert (waves.V[5] == b).all()
    assert (waves.V[6] == b).all()
    assert (waves.V[7] == a).all()
    assert (waves.V[10, 0, :-1] == a[0, 1:]).all()
    assert (bench.lds.data[16 * 512 :].view(np.uint32)[: 2 * LANES : 2] == a).all()
    assert (bench.lds.data[18 * 512 :].view(np.uint32)[1 : 2 * LANES : 2] == b).all()


def test_halves_of_lds() -> None:
    a = np.random.default_rng(0).integers(0, 1 << 32, (1, LANES), dtype=np.uint64).astype(np.uint32)
    bench = Bench(v={0: np.arange(LANES, dtype=np.uint32)[None] * 4, 1: a, 5: 0x11112222, 6: 0x11112222})
    waves = bench.run(
        "ds_write_b16_d16_hi v0, v1", "ds_write_b16 v0, v1 offset:2", "ds_read_b32 v4, v0",
        "ds_read_u16_d16 v5, v0", "ds_read_u16_d16_hi v6, v0", "ds_read_i16 v7, v0", "ds_read_i8 v8, v0",
    )  # fmt: skip
    low, high = a & 0xFFFF, a >> 16
    assert (waves.V[4] == high | low << 16).all()
    assert (waves.V[5] == 0x11110000 | high).all()
    assert (waves.V[6] == 0x2222 | high << 16).all()
    assert (waves.V[7].view(np.int32) == high.astype(np.uint16).view(np.int16)).all()
    assert (waves.V[8].view(np.int32) == (high & 255).astype(np.uint8).view(np.int8)).all()


@pytest.mark.parametrize(("kind", "rows", "bits"), [("b16", 4, 16), ("b8", 8, 8)])
def test_transposing_read(kind: str, rows: int, bits: int) -> None:
    """16 lanes read rows of 16 elements; lane l of them gets column l."""
    bench = Bench("gfx950", v={0: np.arange(LANES, dtype=np.uint32)[None] * 8}, lds_bytes=512)
    elements = content(512) if bits == 8 else content(512).view(np.uint16)
    bench.lds.data[:512] = elements.view(np.uint8)
    bench.lds.ever[:] = True
    waves = bench.run(f"ds_read_b64_tr_{kind} v[2:3], v0")
    got = np.ascontiguousarray(waves.V[2:4, 0].T).view(elements.dtype)
    blocks = elements.reshape(4, rows, 16)
    for lane in range(LANES):
        assert got[lane].tolist() == [blocks[lane // 16, row, lane % 16] for row in range(rows)]


def test_shuffles_through_lds() -> None:
    a = np.random.default_rng(0).integers(0, 1 << 32, (2, LANES), dtype=np.uint64).astype(np.uint32)
    index = np.random.default_rng(1).integers(0, LANES, (2, LANES)).astype(np.uint32)
    bench = Bench(waves=2, v={1: index * 4, 2: a})
    on = np.arange(LANES) % 5 != 0
    bench.mask(on)
    waves = bench.run(
        "ds_bpermute_b32 v3, v1, v2 offset:8", "ds_swizzle_b32 v4, v2 offset:swizzle(SWAP,16)",
        "ds_swizzle_b32 v5, v2 offset:swizzle(QUAD_PERM,3,1,0,2)",
    )  # fmt: skip
    for wave in range(2):
        for lane in np.flatnonzero(on):
            sources = (index[wave, lane] + 2) % LANES, lane ^ 16, lane // 4 * 4 + (3, 1, 0, 2)[lane % 4]
            for register, source in zip((3, 4, 5), sources, strict=True):
                assert waves.V[register, wave, lane] == (a[wave, source] if on[source] else 0)


def two_waves(offsets: Any) -> Bench:
    bench = Bench(waves=2, v={1: np.arange(2 * LANES, dtype=np.uint32).reshape(2, LANES)})
    bench.waves.V[0] = np.asarray(offsets, np.uint32)
    return bench


def only(bench: Bench, wave: int) -> None:
    mask = np.zeros((2, LANES), bool)
    mask[wave] = True
    bench.waves.set_exec(mask)


def test_races_in_lds_are_reported() -> None:
    lanes = np.arange(LANES) * 4
    for first, second, kind in (
        ("ds_write_b32 v0, v1", "ds_read_b32 v2, v0", "another wave wrote"),
        ("ds_read_b32 v2, v0", "ds_write_b32 v0, v1", "another wave read"),
        ("ds_write_b32 v0, v1", "ds_write_b32 v0, v1", "other values"),
    ):
        bench = two_waves([lanes, lanes])
        bench.lds.ever[:] = True
        only(bench, 0)
        bench.run(first)
        only(bench, 1)
        bench.run(second)
        assert kinds(bench) == [RACE]
        assert kind in str(bench.findings.sorted()[0])
        bench.findings.found.clear()
        bench.waves.wait_lgkm(0)
        bench.lds.barrier([bench.waves])
        bench.run(second)  # after a barrier all is well
        assert not kinds(bench)


def test_waves_may_write_equal_values_and_their_own_places() -> None:
    lanes = np.arange(LANES) * 4
    bench = two_waves([lanes, lanes + 256])
    bench.run("ds_write_b32 v0, v1", "ds_read_b32 v2, v0")
    assert not kinds(bench)
    bench = two_waves([lanes, lanes])
    bench.waves.V[1, 1] = bench.waves.V[1, 0]
    bench.run("ds_write_b32 v0, v1")
    assert not kinds(bench)
    bench.waves.V[1, 1, 5] += 1
    bench.run("ds_write_b32 v0, v1")  # in one instruction
    assert kinds(bench) == [RACE]


def test_a_write_not_waited_for_is_not_covered_by_a_barrier() -> None:
    lanes = np.arange(LANES) * 4
    bench = two_waves([lanes, lanes])
    only(bench, 0)
    bench.run("ds_write_b32 v0, v1")
    bench.lds.barrier([bench.waves])
    only(bench, 1)
    bench.run("ds_read_b32 v2, v0")
    assert kinds(bench) == [RACE]


def test_lds_outside_and_unwritten_is_reported() -> None:
    bench = two_waves(np.full((2, LANES), 4094))
    bench.run("ds_write_b32 v0, v1")
    assert kinds(bench) == [OUTSIDE]
    bench = two_waves(np.zeros((2, LANES)))
    bench.run("ds_read_b32 v2, v0 offset:16")
    assert kinds(bench) == [UNWRITTEN]


# --- bank conflicts ---


def cycles_by_hand(address: np.ndarray[Any, Any], size: int, phases: list[list[int]]) -> int:
    total = 0
    for phase in phases:
        wanted: dict[int, set[int]] = {}
        for lane in phase:
            for word in range(int(address[lane]) // 4, (int(address[lane]) + size) // 4):
                wanted.setdefault(word % 32, set()).add(word)
        total += max(len(words) for words in wanted.values())
    return total


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("size", [4, 8, 16])
def test_cycles_of_an_access(size: int, seed: int) -> None:
    address = np.random.default_rng(seed).integers(0, 512, (3, LANES)) * size
    lanes = {4: 32, 8: 16, 16: 8}[size]
    phases = [list(range(begin, begin + lanes)) for begin in range(0, LANES, lanes)]
    on = np.ones((3, LANES), bool)
    assert banks.cycles(address, on, size, True) == sum(cycles_by_hand(row, size, phases) for row in address)
    if size == 16:
        quads = [(0, 20), (4, 16), (8, 28), (12, 24), (32, 52), (36, 48), (40, 60), (44, 56)]
        phases = [[*range(a, a + 4), *range(b, b + 4)] for a, b in quads]
        assert banks.cycles(address, on, size, False) == sum(cycles_by_hand(row, size, phases) for row in address)


def test_cycles_without_and_with_conflicts() -> None:
    lanes, on = np.arange(LANES)[None], np.ones((1, LANES), bool)
    assert banks.cycles(lanes * 4, on, 4, False) == 2
    assert banks.cycles(lanes * 16, on, 16, True) == 8
    assert banks.cycles(lanes * 0, on, 4, False) == 2  # all lanes the same word
    assert banks.cycles(lanes * 128, on, 4, False) == LANES  # all in one bank
    assert banks.cycles(lanes * 128, lanes < 8, 4, False) == 8
