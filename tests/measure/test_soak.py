"""The soak of benchmarks/: what it draws, that its reference is right, that it sees faults and says how to see them."""

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import soak as soaking
from soak_cases import Limits, Pool, attention, differences, draw, make, reference_error

SPEC = """target: portable
model: {num_heads: 2, kv_lora_rank: 64, qk_rope_head_dim: 32}
dtypes: {kv: [bf16, fp8_e4m3fn]}
defaults: {block_n: 32, num_stages: 1, optimizations: [exp2, direct_out, packed_fp8]}
shapes: [{batch: 2, kv_len: 64, splits: 2}]
"""
KINDS, SHAPES = ["bf16", "fp8_e4m3fn"], [(4, 1024), (256, 8192), (1, 131072)]
SMALL = Limits(batch=3, length=80, rows=200)
CPU = torch.device("cpu")
interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="the tiny soak is for the interpreter")


@pytest.fixture
def options(tmp_path: Path) -> list[str]:
    """Arguments of a tiny soak; the last is the file that it writes."""
    spec = tmp_path / "small.yaml"
    spec.write_text(SPEC, encoding="utf-8")
    limits = ["--batch", "3", "--length", "80", "--rows", "200"]
    return ["--spec", str(spec), *limits, "--json", str(tmp_path / "found.json")]


@pytest.fixture(scope="module")
def pool() -> Pool:
    return Pool(2, 64, 32, KINDS, 1400, 0, CPU)


def call_of(pool: Pool, **changes: Any) -> Any:
    """The first call of a small soak with other fields."""
    drawn = replace(draw(1, 0, KINDS, [], SMALL), ahead=0, behind=0, visible=False, **changes)
    return make(drawn, pool, torch.bfloat16, torch.bfloat16, 0)


def test_draws_are_the_same_again_and_keep_to_the_limits() -> None:
    limits = Limits()
    drawn = [draw(3, index, KINDS, SHAPES, limits) for index in range(600)]
    assert drawn == [draw(3, index, KINDS, SHAPES, limits) for index in range(600)]
    assert drawn != [draw(4, index, KINDS, SHAPES, limits) for index in range(600)]
    for one in drawn:
        assert len(one.lens) == len(one.q_lens) <= limits.batch
        assert all(0 <= n <= limits.length for n in one.lens)
        assert sum(q * n for q, n in zip(one.q_lens, one.lens, strict=True)) <= limits.rows
    assert {len(one.lens) for one in drawn} >= {1, 4, 256}
    assert max(max(one.lens) for one in drawn) > 10_000
    assert {max(one.q_lens) for one in drawn} >= {1, 2, 3, 4, 5}
    for flag in (
        "poison",
        "visible",
        "int64",
        "strided",
        "three_dimensions",
        "into",
        "return_lse",
        "ahead",
        "hint",
        "room",
    ):
        assert {bool(getattr(one, flag)) for one in drawn} == {False, True}, flag
    assert {one.scaled for one in drawn if one.kv == "fp8_e4m3fn"} == {False, True}


def test_the_reference_is_attention(pool: Pool) -> None:
    met = 0
    for index in range(60):
        call = make(draw(1, index, KINDS, [], SMALL), pool, torch.bfloat16, torch.bfloat16, 1)
        want = attention(call, pool.latent)
        assert max(reference_error(call, pool.latent, want)) <= soaking.REFERENCE_BOUND
        assert float(differences(want, want).abs().sum()) == 0
        met += any(call.seen)
        for at, seen in enumerate(call.seen):
            if seen > 1:  # one row less is another answer
                call.seen[at] -= 1
                assert differences(attention(call, pool.latent), want)[1] > 1e-3
                break
    assert met > 40


def test_what_a_query_row_sees(pool: Pool) -> None:
    drawn = replace(call_of(pool, q_lens=[2, 0, 3], lens=[5, 9, 1], guard=3).drawn, ahead=1, behind=2)
    call = make(drawn, pool, torch.bfloat16, torch.bfloat16, 0)
    assert call.seen == [0, 4, 5, 0, 0, 1, 0, 0]
    assert call.begins == [0, 3, 3, 17, 17, 17, 0, 0]
    assert call.arguments["qo_indptr"].tolist() == [1, 3, 3, 6]
    assert call.arguments["kv_indptr"].tolist() == [3, 8, 17, 18]


@pytest.mark.parametrize("fault", ["unwritten", "blind", "one row"])
def test_differences_show_faults(pool: Pool, fault: str) -> None:
    call = call_of(pool, q_lens=[1] * 30, lens=[7] * 29 + [0])
    want = attention(call, pool.latent)
    out, lse = want[0].clone(), want[1].clone()
    if fault == "unwritten":
        out[3, 1, 5] = float("nan")
    elif fault == "blind":
        out[29, 1, 5] = 1e-3
    else:
        out[3, 1] *= 1.01
    whole, row, lse_off, wrong = differences((out, lse), want).tolist()
    assert lse_off == 0
    assert (wrong == 1) if fault != "one row" else (wrong == 0 and whole < 3e-3 and row > 9e-3)


@interpreted
def test_a_tiny_soak(options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert soaking.main([*options, "--calls", "5"]) == 0
    found = json.loads(Path(options[-1]).read_text())
    assert found["failure"] is None
    assert found["calls"] == sum(worst["calls"] for worst in found["worst"].values()) == 5
    assert found["reference"]["checks"] == 1
    assert sum(found["served"].values()) == 5
    assert any(name.endswith("_b2_kv64") for name in found["served"])
    assert found["memory"][-1]["calls"] == 5
    assert "5 calls in" in capsys.readouterr().out


@interpreted
def test_a_wrong_kernel_stops_it(
    options: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fault of the second call: it is named, and `--only` makes that call again."""
    decode = soaking.Soak.decode
    calls: list[Any] = []

    def faulty(self: Any, call: Any) -> Any:
        calls.append(call)
        out, lse = decode(self, call)
        return (out * 1.01 + 0.01 if call.drawn.index == 1 else out), lse

    monkeypatch.setattr(soaking.Soak, "decode", faulty)
    monkeypatch.setattr(soaking.Soak, "warm_up", lambda self: None)
    assert soaking.main([*options, "--calls", "3"]) == 1
    failure = json.loads(Path(options[-1]).read_text())["failure"]
    assert failure["why"].startswith("call 1: ")
    assert failure["drawn"]["index"] == 1
    assert "--seed 0 --only 1" in capsys.readouterr().out
    assert soaking.main([*options, "--only", "1"]) == 1
    monkeypatch.setattr(soaking.Soak, "decode", decode)
    assert soaking.main([*options, "--only", "1"]) == 0
    assert calls[-1].drawn == calls[1].drawn
    assert torch.equal(calls[-1].q, calls[1].q)


def test_memory_that_grows() -> None:
    flat = [{"calls": n, "allocated": 5, "reserved": 100, "rss": 7} for n in range(8)]
    assert soaking.grown(flat) == []
    for name, more in (("allocated", 2 << 20), ("rss", 200 << 20), ("reserved", 51)):
        (said,) = soaking.grown([*flat[:-1], {**flat[-1], name: flat[-1][name] + more}])
        assert said.startswith(f"{name} grew from")
        assert "between calls 4 and 7" in said
    early = [{**flat[0], "allocated": 0, "rss": 0}, *flat[1:]]
    assert soaking.grown(early) == []


@pytest.mark.parametrize("name", ["calls", "batch", "length", "rows"])
def test_bad_input(name: str) -> None:
    with pytest.raises(SystemExit) as stop:
        soaking.main([f"--{name}", "0"])
    assert stop.value.code == 2
