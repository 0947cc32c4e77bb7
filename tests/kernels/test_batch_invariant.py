"""Batch-invariant mode: the bits of a request are its own, whoever shares its batch and wherever its KV rows lie.

Every call has the same request, REQUEST, among others; `VARIATIONS` change all that is not its own. The first test of a
file that runs on a GPU too does so with the kernels of the GPU's target.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from emulated import Emulated
from harness import BF16, MODES, PORTABLE_FP8, Builder, Got, Mode, check, make_spec

from mla_codegen.check.reference import Case, make_case

BATCHES = (1, 2, 8, 64) if torch.cuda.is_available() else (1, 2, 8, 20)  # the interpreter runs a row at a time
ROWS = 300
SMALL = {"heads": 1, "latent": 128, "rope": 64}
WHOLE = {"heads": 16, "latent": 512, "rope": 64}
FP8_MMA = next(m for m in MODES if str(m) == "gfx942-fp8_e4m3fn-packed_fp8-fp8_mma")


def mates(batch: int) -> list[int]:
    """KV rows of `batch - 1` other requests: ragged, every third empty, the first longer than REQUEST."""
    return [411, *((17 * i) % 41 if i % 3 else 0 for i in range(1, batch - 1))]


# What is not the request's own: the others' KV rows, where it stands among them, and arguments of the call.
VARIATIONS: dict[str, dict[str, Any]] = {
    **{f"batch {batch}": {"others": mates(batch)} for batch in BATCHES if batch > 1},
    "last of 8": {"others": mates(8), "place": 7},
    "in the middle, pool begins elsewhere": {"others": mates(8), "place": 3, "guard": 50},
    "empty mates": {"others": [0] * 7, "place": 2},
    "mates with other query rows": {"others": [40, 9, 0], "place": 2, "q_lens": [3, 0, 2]},
    "short hint": {"others": [], "max_kv_len": 1},
    "long hint": {"others": [5], "max_kv_len": 1_000_000},
    "int64": {"others": [5], "place": 1, "index": torch.int64},
}


def case_of(
    mode: Mode, size: dict[str, int], variation: dict[str, Any], rows: int = ROWS, q_len: int = 1
) -> tuple[Case, int]:
    """The call, and the last query row of REQUEST in it. REQUEST's rows are the same in all."""
    own = make_case([rows], **size, kv_dtype=mode.kv, guard=0, seed=99)
    others, place = variation.get("others", []), variation.get("place", 0)
    lens = [*others[:place], rows, *others[place:]]
    q_lens = variation.get("q_lens", [1] * len(others))
    q_lens = [*q_lens[:place], q_len, *q_lens[place:]]
    index = variation.get("index", torch.int32)
    given = {"guard": variation.get("guard", 3), "seed": len(lens), "index": index}
    case = make_case(lens, q_lens=q_lens, **size, kv_dtype=mode.kv, **given)
    last = int(case.qo_indptr[place + 1]) - 1
    begin = int(case.kv_indptr[place])
    case.q[last] = own.q[0]
    case.kv[begin : begin + rows] = own.kv
    return case, last


def same(got: Got, row: int, want: Got) -> bool:
    """Whether query row `row` has the bits of `want`, which is (out [heads, latent], LSE [heads])."""
    out, lse = got
    bits = torch.equal(out[row].view(torch.int16), want[0].view(torch.int16))
    return bits and torch.equal(lse[row].view(torch.int32), want[1].view(torch.int32))


def invariant(spec: dict[str, Any], splits: int) -> dict[str, Any]:
    """The spec in batch-invariant mode with this number of splits."""
    shapes = [{"batch": shape["batch"], "kv_len": shape["kv_len"]} for shape in spec["shapes"]]
    return {**spec, "batch_invariant": True, "shapes": shapes, "defaults": {**spec["defaults"], "splits": splits}}


WAYS = [BF16, PORTABLE_FP8, FP8_MMA]


@pytest.mark.parametrize(("mode", "splits"), [(BF16, 1), (BF16, 4), (PORTABLE_FP8, 3), (FP8_MMA, 2)], ids=str)
def test_a_request_has_its_own_bits(build: Builder, mode: Mode, splits: int) -> None:
    kernels = build(invariant(mode.spec(**SMALL), splits))
    case, row = case_of(mode, SMALL, {})
    alone = kernels.decode(case)
    want = alone[0][row], alone[1][row]
    for name, variation in VARIATIONS.items():
        case, row = case_of(mode, SMALL, variation)
        hint = {"max_kv_len": variation["max_kv_len"]} if "max_kv_len" in variation else {}
        got = kernels.decode(case, **hint)
        assert same(got, row, want), name
        if name in ("batch 8", "last of 8"):  # the request stands in them, and its bits are the same in all
            check(got, case, bound=mode.bound, lse_bound=mode.lse_bound)


@pytest.mark.parametrize("mode", WAYS, ids=str)
def test_a_query_row_has_the_bits_that_it_has_alone(build: Builder, mode: Mode) -> None:
    """The last of four query rows sees what a single one does; so does one to which `kv_visible` shows it all."""
    kernels = build(invariant(mode.spec(**SMALL), 4))
    case, row = case_of(mode, SMALL, {})
    alone = kernels.decode(case)
    want = alone[0][row], alone[1][row]
    for q_len in (2, 4):
        case, row = case_of(mode, SMALL, {"others": [9], "place": 1}, q_len=q_len)
        assert same(kernels.decode(case), row, want)
    visible = torch.full((case.q.shape[0],), ROWS, dtype=torch.int32, device=kernels.device)
    assert same(kernels.decode(case, kv_visible=visible), row, want)


def test_it_is_the_mode_that_does_it(build: Builder) -> None:
    """Without it the same calls do differ: other kernels, other numbers of splits."""
    kernels = build(BF16.spec(**SMALL, shapes=[{"batch": 1, "kv_len": ROWS, "splits": 7}]))
    case, row = case_of(BF16, SMALL, {})
    alone = kernels.decode(case)
    want = alone[0][row], alone[1][row]
    case, row = case_of(BF16, SMALL, VARIATIONS[f"batch {BATCHES[-1]}"])
    assert not same(kernels.decode(case), row, want)


GLUON = {
    "hopper-fp8": ("sm_90", "hopper", "fp8_e4m3fn", ["exp2"]),
    "hopper-bf16": ("sm_90", "hopper", "bf16", ["exp2"]),
    "cdna3-fp8": ("gfx942", "cdna3", "fp8_e4m3fn", ["fp8_mma", "xcd_remap"]),
    "cdna4-bf16": ("gfx950", "cdna4", "bf16", ["xcd_remap"]),
}


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("name", GLUON)
def test_in_the_emulator(name: str, splits: int, tmp_path: Path) -> None:
    """Batches of 1, 2 and 8; the request's KV elsewhere; several query rows."""
    target, family, kv, options = GLUON[name]
    spec = invariant(make_spec(target, kv=[kv], optimizations=options), splits)
    spec["defaults"] = {"family": family, "optimizations": options, "splits": splits}
    kernels = Emulated(spec, tmp_path, f"invariant_{name.replace('-', '_')}_{splits}")
    mode = Mode(target, kv)
    case, row = case_of(mode, WHOLE, {}, rows=200)
    alone = kernels.run("invariant", case)
    want = alone[0][row], alone[1][row]
    variations = [{"others": [70]}, {"others": [0, 65, 1, 0, 3, 130, 0], "place": 6, "guard": 9}]
    for variation, q_len in ((variations[0], 1), (variations[1], 1), (variations[0], 2)):
        case, row = case_of(mode, WHOLE, variation, rows=200, q_len=q_len)
        assert same(kernels.run("invariant", case), row, want)


@pytest.mark.gpu
@pytest.mark.parametrize("kv", ["fp8_e4m3fn", "bf16"])
@pytest.mark.parametrize("file", ["h200.yaml", "portable.yaml"])
def test_shipped_specs_in_this_mode(build: Builder, file: str, kv: str) -> None:
    """All heads, long requests, hints that would choose every shape's kernel, and mates that are long as well."""
    text = (Path(__file__).parents[2] / "specs" / file).read_text(encoding="utf-8")
    spec = yaml.safe_load(text)
    shapes = [{"batch": shape["batch"], "kv_len": shape["kv_len"]} for shape in spec["shapes"]]
    kernels = build({**spec, "batch_invariant": True, "shapes": shapes})
    mode = Mode(spec["target"], kv)
    decode: Callable[..., Got] = kernels.decode
    for rows in (1, 700, 9000):
        case, row = case_of(mode, WHOLE, {}, rows=rows)
        alone = decode(case)
        check(alone, case, lse_bound=5e-3)
        want = alone[0][row], alone[1][row]
        room = torch.empty(1 << 27, dtype=torch.uint8, device=kernels.device)
        for name, variation in {**VARIATIONS, "batch 300": {"others": mates(300), "place": 299}}.items():
            case, row = case_of(mode, WHOLE, variation, rows=rows)
            assert same(decode(case, workspace=room), row, want), (name, rows)
            for hint in (None, *(shape["kv_len"] for shape in shapes)):
                assert same(decode(case, max_kv_len=hint), row, want), (name, rows, hint)
        for q_len in (2, 4):
            case, row = case_of(mode, WHOLE, {"others": [3000, 0], "place": 1}, rows=rows, q_len=q_len)
            assert same(decode(case), row, want), (rows, q_len)
