"""Hopper kernels of wide blocks of columns, in the emulator against float64: two warpgroups and a TMA warp.

Small latent ranks, so that a case takes a second; those of DeepSeek in one test.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from emulated import Emulated
from hard_numbers import hold_non_finite, hold_ones, hold_sinks
from harness import EXACT, Got, check, make_plans, make_spec
from pages import run as run_paged
from test_query_blocks import LENS, Q_LENS, close, seen_alone

from mla_codegen.check.emulate.errors import EmulatorError
from mla_codegen.check.reference import Case, in_pages, make_case
from mla_codegen.plan.kernel import KernelPlan

LATENT = 128
Build = Callable[..., Emulated]


def spec_of(heads: int = 16, q_len: int = 4, page_size: int | None = None, **settings: Any) -> dict[str, Any]:
    """A spec of one shape; `block_h` as it comes, if not among the settings."""
    shape = {"batch": 2, "q_len": q_len, "kv_len": 256, "splits": 3}
    model = {"latent": settings.pop("latent", LATENT), "rope": settings.pop("rope", 64)}
    spec = make_spec("sm_90", kv=["bf16"], optimizations=["exp2"], heads=heads, shapes=[shape], **model)
    spec["defaults"] = {"family": "hopper", "optimizations": ["exp2", "direct_out"], **settings}
    return spec | ({"kv": {"layout": "paged", "page_size": page_size}} if page_size else {})


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> Build:
    """The kernels of a spec, built once for each set of arguments of `spec_of`."""
    folder = tmp_path_factory.mktemp("hopper_columns")
    built: dict[str, Emulated] = {}

    def build_once(**settings: Any) -> Emulated:
        key = str(settings)
        if key not in built:
            built[key] = Emulated(spec_of(**settings), folder, f"hopper_columns_{len(built)}")
        return built[key]

    return build_once


def shaped(kernels: Emulated) -> str:
    """The kernel of the shape, as `Emulated` names it."""
    return kernels.plan.kernels[0].name.partition("_")[2]


def mixed(heads: int, lens: list[int] = LENS, q_lens: list[int] = Q_LENS, **settings: Any) -> Case:
    return make_case(lens, q_lens=q_lens, heads=heads, **{"latent": LATENT, "rope": 64, **settings})


def held(got: Got, case: Case) -> None:
    check(got, case, bound=EXACT, lse_bound=1e-4)


@pytest.mark.parametrize(
    ("heads", "q_len", "columns"),
    [(16, 4, "queries"), (96, 2, "queries"), (128, 1, "heads"), (20, 1, "heads")],
)
def test_every_mix_of_lengths(build: Build, heads: int, q_len: int, columns: str) -> None:
    """Splits and none, none of no rows, of one, of a tile; query tokens from none to more than a block has."""
    kernels = build(heads=heads, q_len=q_len, block_h=64)
    kernel = kernels.plan.kernels[0]
    assert (kernel.block_h, kernel.columns) == (64, columns)
    case = mixed(heads, [300, 0, 1, 65], [2, 1, 3, 5]) if heads > 16 else mixed(heads, [300, 0, 1, 65, 64, 33])
    held(kernels.run(shaped(kernels), case), case)
    part = f"any_q{q_len}" if kernel.packed else "any"
    held(kernels.run(f"{part}_direct", case), case)
    if heads <= 16:
        held(kernels.run(part, case, 7), case)


def test_ranks_of_deepseek(build: Build) -> None:
    kernels = build(latent=512)
    case = mixed(16, latent=512, index=torch.int64)
    held(kernels.run(shaped(kernels), case), case)


def test_balanced(build: Build) -> None:
    """Long beside short requests, and rows of no request."""
    kernels = build(heads=128, q_len=1)
    case = mixed(128, [700, 0, 1, 130], [1, 2, 1, 1])
    held(kernels.run("balanced", case), case)


def test_query_rows_of_no_request(build: Build) -> None:
    kernels = build(heads=4)
    case = mixed(4)
    total = case.q.shape[0]
    for before, behind in ((0, 1), (7, 40)):
        q = torch.full((before + total + behind, *case.q.shape[1:]), float("nan"), dtype=case.q.dtype)
        q[before : before + total] = case.q
        out, lse = kernels.run(shaped(kernels), replace(case, q=q, qo_indptr=case.qo_indptr + before))
        mine = slice(before, before + total)
        held((out[mine], lse[mine]), case)
        rest = torch.ones(len(q), dtype=torch.bool)
        rest[mine] = False
        assert (out[rest] == 0).all() and (lse[rest] == float("-inf")).all()


@pytest.mark.parametrize("splits", [None, 3], ids=["direct", "splits"])
def test_each_column_has_its_own_limit(build: Build, splits: int | None) -> None:
    """`kv_visible` in any order: none, all, more than there are; rows past a request's greatest limit are NaN."""
    kernels = build(heads=4)
    case = mixed(4)
    visible = torch.tensor([5, 100, 1000, 0, 65, 1, 64, 0, 2, 1, 0, 33, 2, 5, 31], dtype=torch.int32)
    poisoned = replace(case, kv=case.kv.clone())
    first = case.kv_indptr.tolist()
    for request, rows in enumerate(visible.split(Q_LENS)):
        most = int(rows.max()) if len(rows) else 0
        poisoned.kv[first[request] + min(most, LENS[request]) : first[request + 1]] = float("nan")
    part = "any_q4" if splits else "any_q4_direct"
    close(kernels.run(part, poisoned, splits, kv_visible=visible), seen_alone(case, visible, LATENT))


@pytest.mark.parametrize("part", ["any_q4_direct", "any_q4", "any_direct", "any"])
def test_what_is_not_finite_stays_where_it_is_read(build: Build, part: str) -> None:
    kernels = build(heads=4, block_h=64)
    splits = None if part.endswith("direct") else 3
    hold_non_finite(lambda case: kernels.run(part, case, splits), "bf16", 64, heads=4, latent=LATENT, rope=64)


def test_sinks(build: Build) -> None:
    """Scores far above the rest: a reference that lags behind its column's maximum must not cost accuracy."""
    kernels = build(heads=16, block_h=64, latent=512)
    hold_ones(lambda case: kernels.run("any_direct", case), "bf16")
    hold_sinks(lambda case: kernels.run("any_direct", case), "bf16", 2 * EXACT, 1e-4)


@pytest.mark.parametrize("factor", [1.0, 30.0], ids=["calm", "rising"])
def test_kv_scale_and_rising_scores(build: Build, factor: float) -> None:
    """A scale beside bf16 KV; scores that rise along the rows move references in nearly every tile."""
    case = mixed(16, [300, 65], [2, 4])
    rising = torch.linspace(0.1, factor, len(case.kv))[:, None]
    scaled = replace(case, kv=(case.kv.float() * rising).to(case.kv.dtype), kv_scale=torch.tensor([0.5]))
    plain = replace(scaled, kv=(scaled.kv.float() * 0.5).to(case.kv.dtype), kv_scale=None)
    held(build().run("any_q4", scaled, 2), plain)


def test_a_negative_scale(build: Build) -> None:
    """The largest product has the least score then."""
    case = mixed(16, [300, 65], [2, 4])
    for negative in (replace(case, sm_scale=-case.sm_scale), replace(case, sm_scale=-20 * case.sm_scale)):
        held(build().run("any_q4_direct", negative), negative)


@pytest.mark.parametrize(("heads", "page_size"), [(4, 16), (4, 64), (64, 128)])
def test_pages(build: Build, heads: int, page_size: int) -> None:
    """Of a part of a tile, of a tile, of two; what lies behind a request in its last page is NaN."""
    kernels = build(heads=heads, page_size=page_size, block_h=64)
    case = mixed(heads)
    paged = in_pages(case, page_size)
    part = "any_q4_direct" if kernels.plan.kernels[0].packed else "any_direct"
    for form in ("table", "list"):
        held(run_paged(kernels.module(part), kernels.kernel(part), paged, form), case)


@pytest.mark.parametrize(
    ("old", "new", "what"),
    [
        ("    mbarrier.wait(full_rope.index(W), phase)\n", "", "wait"),
        ("        fence_async_shared()  # wgmma reads the weights through the async proxy\n", "", "fence"),
        ("            zero_rows(right.index(W), finite.index(W))\n", "", "finite"),
        ("        mbarrier.wait(empty_left.index(0), phase)\n", "", "barrier|still|read"),
        ("    mbarrier.arrive(sums_full.index(W))\n", "", "deadlock"),
    ],
    ids=["wait", "fence", "tail", "refill", "deadlock"],
)
def test_planted_faults_are_caught(build: Build, old: str, new: str, what: str) -> None:
    case = mixed(4, [200, 300], [4, 3])
    case.kv[-1] = float("nan")
    with pytest.raises((EmulatorError, AssertionError), match=what):
        held(build(heads=4).run_changed("any_q4_direct", old, new, case), case)


def kernels_of(**settings: Any) -> KernelPlan:
    return make_plans(spec_of(**settings)).kernels[0]


def test_which_block() -> None:
    """By the columns of a request; settings that a wide block cannot have leave it out."""
    assert kernels_of(heads=16, q_len=1).block_h == 16
    assert kernels_of(heads=16, q_len=2).block_h == 64
    assert kernels_of(heads=128, q_len=1).block_h == 64
    assert kernels_of(heads=8, q_len=2).packed
    assert kernels_of(heads=16, q_len=2, rope=32).block_h == 16
    narrow = kernels_of(heads=16, q_len=4, num_stages=1)
    assert narrow.block_h == 16 and not narrow.packed
    assert any("take one query token's" in line for line in narrow.not_taken)


def test_128_heads_of_bf16_are_served() -> None:
    spec = spec_of(heads=128, q_len=1, latent=512)
    del spec["defaults"]["family"]
    assert {kernel.family for kernel in make_plans(spec).kernels} == {"hopper"}
