"""Blocks of columns that take several query tokens of a request: every mix of lengths against float64.

What a call leaves unwritten is NaN, so a column that no program owns, or one past the request's, shows.
"""

import importlib
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from hard_numbers import hold_non_finite
from harness import BASE, BF16, MODES, PORTABLE_FP8, Builder, Got, Kernels, Mode, check, make_spec, rows_of
from pages import run as run_paged

from mla_codegen.check.reference import Case, in_pages, make_case, reference, relative_l2
from mla_codegen.plan.resolve import make_plan
from mla_codegen.publish.manifest import BuildError
from mla_codegen.publish.write import fresh_build, publish
from mla_codegen.spec.load import parse_spec

Q_LENS = [3, 0, 1, 5, 2, 4]
LENS = [100, 20, 0, 65, 1, 33]  # with fewer KV rows than query tokens, too: the first tokens see none
SMALL = {"latent": 64, "rope": 32, "block_n": 16}
EVERY = [*range(9), 16, 17, 31, 33, 64, 70]  # query tokens of a request


def blocks_spec(mode: Mode = BF16, heads: int = 16, **settings: Any) -> dict[str, Any]:
    """A spec of one shape with several query tokens a request, small enough for the interpreter."""
    shape = {"batch": len(LENS), "q_len": settings.pop("q_len", 4), "kv_len": 64, "splits": settings.pop("splits", 3)}
    options = settings.pop("optimizations", [*BASE, *mode.options])
    given = {**SMALL, **settings}
    return make_spec(mode.target, kv=[mode.kv], optimizations=options, heads=heads, shapes=[shape], **given)


def mixed(kernels: Kernels, lens: list[int] | None = None, q_lens: list[int] | None = None, **settings: Any) -> Case:
    """A case for the model of a spec."""
    spec = kernels.plan.spec
    model = {"heads": spec.model.num_heads, "latent": spec.model.kv_lora_rank, "rope": spec.model.qk_rope_head_dim}
    given = {"q_lens": q_lens or Q_LENS, "kv_dtype": spec.dtypes.kv[0], "q_dtype": spec.dtypes.q, **settings}
    return make_case(lens or LENS, **model, **given)


def seen_alone(case: Case, visible: torch.Tensor, latent: int) -> Got:
    """The truth where each query row sees the first `visible` of its request's KV rows, or all if there are fewer."""
    out = torch.zeros(*case.q.shape[:2], latent, dtype=torch.float64)
    lse = torch.full(case.q.shape[:2], float("-inf"), dtype=torch.float64)
    queries, rows = case.qo_indptr.tolist(), case.kv_indptr.tolist()
    for request in range(len(queries) - 1):
        for row in range(queries[request], queries[request + 1]):
            ends = torch.tensor([0, min(int(visible[row]), rows[request + 1] - rows[request])])
            kv = case.kv[rows[request] : rows[request] + int(ends[1])]
            alone = replace(case, q=case.q[row : row + 1], kv=kv, qo_indptr=torch.tensor([0, 1]), kv_indptr=ends)
            out[row], lse[row] = (found[0] for found in reference(alone, latent))
    return out, lse


def close(got: Got, want: Got) -> None:
    blind = want[1] == float("-inf")
    assert got[0].isfinite().all(), f"not finite: {rows_of(~got[0].isfinite().all(-1))}"
    assert (got[0][blind] == 0).all() and (got[1][blind] == float("-inf")).all()
    assert relative_l2(got[0], want[0]) <= 3e-3
    assert ((got[1] - want[1])[~blind].abs() <= 1e-3).all()


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("block_h", [16, 32, 64])
@pytest.mark.parametrize("heads", [5, 16, 20])
def test_ragged_query_tokens(build: Builder, heads: int, block_h: int, splits: int) -> None:
    """Where blocks divide the heads, one query token a program is as good."""
    kernels = build(blocks_spec(heads=heads, splits=splits, block_h=block_h))
    assert kernels.shaped.packed == (heads % block_h != 0)
    case = mixed(kernels)
    check(kernels.run(kernels.shaped.name, case), case)


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_every_way_to_decode_kv(build: Builder, mode: Mode) -> None:
    kernels = build(blocks_spec(mode, heads=4, block_h=16, splits=2, block_n=32))
    assert kernels.shaped.packed
    case = mixed(kernels)
    for name, splits in (("any_q4", 3), ("any_q4_direct", None), ("b6_q4_kv64", None)):
        got = kernels.run(f"{mode.kv}_{name}", case, splits)
        check(got, case, bound=mode.bound, lse_bound=mode.lse_bound)


@pytest.mark.parametrize("options", [[], ["exp2"], ["peeled_tail", "streaming_loads"]], ids=str)
def test_micro_optimizations(build: Builder, options: list[str]) -> None:
    kernels = build(blocks_spec(heads=4, block_h=16, splits=1, optimizations=options))
    case = mixed(kernels)
    check(kernels.run(kernels.shaped.name, case), case)


def test_128_heads_and_20(build: Builder) -> None:
    """Blocks of 64 divide 128 heads: programs of one query token. Of 20 heads 3 tokens take a block of 64."""
    wide = build(blocks_spec(heads=128, q_len=2, splits=2))
    assert not wide.shaped.packed and wide.shaped.block_h in (32, 64)
    assert any("query blocks" in line for line in wide.shaped.not_taken)
    case = mixed(wide, [40, 7], [2, 3])
    check(wide.run(wide.shaped.name, case), case)
    odd = build(blocks_spec(heads=20, q_len=3, block_h=64))
    case = mixed(odd)
    check(odd.run(odd.shaped.name, case), case)


@pytest.mark.parametrize("heads", [3, 16])
def test_random_query_tokens(build: Builder, heads: int) -> None:
    """Requests of none, of one block and of many, in any order: each column has one program."""
    kernels = build(blocks_spec(heads=heads, block_h=32, splits=1))
    draw = random.Random(heads)
    for _ in range(12):
        q_lens = [draw.choice(EVERY if draw.random() < 0.2 else EVERY[:6]) for _ in range(draw.randint(1, 9))]
        if not any(q_lens):
            continue
        lens = [draw.choice((0, 1, 5, 40)) for _ in q_lens]
        case = mixed(kernels, lens, q_lens)
        check(kernels.run(kernels.shaped.name, case), case)


@pytest.mark.parametrize("splits", [1, 3])
def test_query_rows_of_no_request(build: Builder, splits: int) -> None:
    """As a padded batch of a CUDA graph has behind its last request: 0 and -inf; before the first one likewise."""
    kernels = build(blocks_spec(heads=4, block_h=16, splits=splits))
    case = mixed(kernels)
    total = case.q.shape[0]
    for before, behind in ((0, 1), (0, 40), (7, 0), (9, 13), (1, 200)):
        q = torch.full((before + total + behind, *case.q.shape[1:]), float("nan"), dtype=case.q.dtype)
        q[before : before + total] = case.q
        wide = replace(case, q=q, qo_indptr=case.qo_indptr + before)
        out, lse = kernels.run(kernels.shaped.name, wide)
        mine = slice(before, before + total)
        check((out[mine], lse[mine]), case)
        rest = torch.ones(len(q), dtype=torch.bool)
        rest[mine] = False
        assert (out[rest] == 0).all() and (lse[rest] == float("-inf")).all(), (before, behind)


@pytest.mark.parametrize("splits", [None, 3], ids=["direct", "splits"])
def test_each_column_has_its_own_limit(build: Builder, splits: int | None) -> None:
    """`kv_visible` in any order: none, all, more than there are; rows past a request's greatest limit are NaN."""
    kernels = build(blocks_spec(heads=4, block_h=16))
    name = "bf16_any_q4" if splits else "bf16_any_q4_direct"
    case = mixed(kernels)
    lens = torch.tensor(LENS).repeat_interleave(torch.tensor(Q_LENS))
    generator = torch.Generator().manual_seed(0)
    for share in (0.0, 0.5, 1.2):
        visible = (torch.rand(len(lens), generator=generator) * lens * share).to(torch.int32)
        visible[::4] = 0
        poisoned = replace(case, kv=case.kv.clone())
        want = seen_alone(case, visible, SMALL["latent"])
        first = case.kv_indptr.tolist()
        for request, rows in enumerate(visible.split(Q_LENS)):
            most = int(rows.max()) if len(rows) else 0
            poisoned.kv[first[request] + min(most, LENS[request]) : first[request + 1]] = float("nan")
        close(kernels.run(name, poisoned, splits, kv_visible=visible), want)


@pytest.mark.parametrize("mode", MODES, ids=str)
@pytest.mark.parametrize("splits", [None, 3], ids=["direct", "splits"])
def test_what_is_not_finite_stays_where_it_is_read(build: Builder, mode: Mode, splits: int | None) -> None:
    """A later token's row does not reach the earlier ones of its block, nor one head's q the others."""
    kernels = build(blocks_spec(mode, heads=4, block_h=16, block_n=32))
    name = f"{mode.kv}_any_q4" + ("_direct" if splits is None else "")
    hold_non_finite(lambda case: kernels.run(name, case, splits), mode.kv, 32, heads=4, latent=64, rope=32)


@pytest.mark.parametrize("page_size", [1, 4, 16, 64])
@pytest.mark.parametrize("mode", [BF16, PORTABLE_FP8], ids=str)
def test_pages(build: Builder, mode: Mode, page_size: int) -> None:
    """Of one row, of parts of a tile, of a tile, of several."""
    spec = blocks_spec(mode, heads=4, block_h=16, splits=2)
    kernels = build(spec | {"kv": {"layout": "paged", "page_size": page_size}})
    case = mixed(kernels)
    paged = in_pages(case, page_size).to(kernels.device)
    for form in ("table", "list"):
        check(run_paged(kernels.module(kernels.shaped.name), kernels.shaped, paged, form), case)


@pytest.mark.parametrize("hint", [None, 1, 4, 5, 900])
def test_calls_are_right_whatever_the_hint(build: Builder, hint: int | None) -> None:
    """By `mla_decode`: a shape's mean, ragged tokens, one token each, and more than any shape has."""
    kernels = build(blocks_spec(heads=4))
    for lens, q_lens in (
        (LENS, [4] * 6), (LENS, Q_LENS), (LENS, [1] * 6), ([30, 9], [17, 0]), ([50], [1]), ([64] * 6, [4] * 6)
    ):  # fmt: skip
        case = mixed(kernels, lens, q_lens)
        check(kernels.decode(case, max_q_len=hint), case)
        if hint in (None, 4):
            check(kernels.decode(case, max_q_len=hint, max_kv_len=max(lens)), case)


def test_strided_q_and_wide_ranges(build: Builder) -> None:
    kernels = build(blocks_spec(heads=4, block_h=16))
    case = mixed(kernels, index=torch.int64)
    larger = torch.full((case.q.shape[0] + 1, 9, 128), float("nan"), dtype=case.q.dtype)
    strided = larger[1:, 2:6, : case.q.shape[2]]
    strided.copy_(case.q)
    check(kernels.run(kernels.shaped.name, replace(case, q=strided)), case)


def test_a_build_for_several_tokens_beside_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Specs of one model, one of them with several query tokens in all shapes: it takes the calls that have such."""
    one, several = (make_spec(kv=["bf16"], optimizations=[*BASE], heads=4, shapes=shapes, **SMALL) for shapes in (
        [{"batch": 2, "kv_len": 64}], [{"batch": 2, "q_len": 4, "kv_len": 64, "block_h": 16}]
    ))  # fmt: skip
    plans = [make_plan(parse_spec(yaml.safe_dump(spec), f"{name}.yaml").spec, f"{name}.yaml")
             for name, spec in (("one", one), ("several", several))]  # fmt: skip
    publish(fresh_build(plans, tmp_path / "twins"), tmp_path / "twins", {plan.name for plan in plans})
    monkeypatch.syspath_prepend(str(tmp_path))
    dispatcher = importlib.import_module("twins.dispatch").DISPATCHER
    (build, other) = dispatcher.serving("cpu")
    assert (build.spec, other.spec, build.several) == ("one.yaml", "several.yaml", other)
    seen: list[str] = []
    for each in (build, other):

        def kernel(name: str, each: Any = each) -> Any:
            seen.append(each.spec)
            return type(each).kernel(each, name)

        monkeypatch.setattr(each, "kernel", kernel)
    for q_lens, spec in (([1, 1], "one.yaml"), ([4, 3], "several.yaml")):
        case = make_case([40, 9], q_lens=q_lens, heads=4, latent=64, rope=32)
        out, lse = dispatcher.mla_decode(
            case.q, case.kv, case.qo_indptr, case.kv_indptr, sm_scale=case.sm_scale, return_lse=True
        )
        check((out, lse), case)
        assert seen[-1] == spec


def test_two_builds_for_single_tokens_are_still_refused(tmp_path: Path) -> None:
    spec = make_spec(kv=["bf16"], optimizations=[*BASE], heads=4, shapes=[{"batch": 2, "kv_len": 64}], **SMALL)
    plans = [make_plan(parse_spec(yaml.safe_dump(spec), f"{name}.yaml").spec, f"{name}.yaml") for name in ("a", "b")]
    with pytest.raises(BuildError, match="both serve portable, 4 heads"):
        fresh_build(plans, tmp_path / "twins")
