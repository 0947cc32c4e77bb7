"""The plan: whose setting counts, where each number came from, and what is refused."""

from typing import Any

import pytest
from builds import plan_of, spec_of

from mla_codegen.catalog.targets import TARGETS
from mla_codegen.plan.families import triton
from mla_codegen.plan.families.triton import Triton
from mla_codegen.plan.resolve import KernelPlan, PlanError
from mla_codegen.runtime.splits import choose_splits

SHAPE = {"batch": 8, "kv_len": 4096}


def kernel(kv: str = "bf16", **spec: Any) -> KernelPlan:
    """The kernel of the first shape for `kv`."""
    plan = plan_of(spec_of(**{"shapes": [SHAPE], "defaults": {"optimizations": ["packed_fp8"]}, **spec}))
    return next(k for k in plan.kernels if k.kv == kv and k.batch is not None)


# From the outermost layer inwards: each case adds one, and it wins.
LAYERS = [
    ("automatic", {}, {}, 64),
    ("defaults", {"block_n": 16}, {}, 16),
    ("defaults, per_kv", {"block_n": 16, "per_kv": {"bf16": {"block_n": 32}}}, {}, 32),
    ("shape", {"block_n": 16, "per_kv": {"bf16": {"block_n": 32}}}, {"block_n": 64}, 64),
    (
        "shape, per_kv",
        {"block_n": 16, "per_kv": {"bf16": {"block_n": 32}}},
        {"block_n": 64, "per_kv": {"bf16": {"block_n": 16}}},
        16,
    ),
]


@pytest.mark.parametrize(("source", "defaults", "shape", "value"), LAYERS, ids=[case[0] for case in LAYERS])
def test_the_innermost_setting_counts(source: str, defaults: dict[str, Any], shape: dict[str, Any], value: int) -> None:
    defaults = {"num_stages": 1, "optimizations": ["packed_fp8"], **defaults}
    found = kernel(defaults=defaults, shapes=[{**SHAPE, **shape}])
    assert found.block_n == value
    assert (found.resolved["block_n"].value, found.resolved["block_n"].source) == (value, source)


def test_settings_of_another_kv_type_do_not_reach() -> None:
    defaults = {"optimizations": ["packed_fp8"], "per_kv": {"fp8_e4m3fn": {"block_n": 16}}}
    assert kernel("fp8_e4m3fn", defaults=defaults).block_n == 16
    assert kernel("bf16", defaults=defaults).resolved["block_n"].source == "automatic"


OPTIONS = [
    ("replaced", {}, ["peeled_tail", "packed_fp8"], {"peeled_tail", "packed_fp8"}),
    ("added", {}, ["+peeled_tail"], {"exp2", "packed_fp8", "peeled_tail"}),
    ("removed", {}, ["-exp2"], {"packed_fp8"}),
    ("both", {}, ["-exp2", "+peeled_tail"], {"packed_fp8", "peeled_tail"}),
    (
        "after per_kv",
        {"fp8_e4m3fn": {"optimizations": ["+streaming_loads"]}},
        ["-exp2"],
        {"packed_fp8", "streaming_loads"},
    ),
    ("inherited", {"fp8_e4m3fn": {"optimizations": ["-exp2"]}}, None, {"packed_fp8"}),
]


@pytest.mark.parametrize(("per_kv", "entries", "wanted"), [case[1:] for case in OPTIONS], ids=[c[0] for c in OPTIONS])
def test_lists_of_options(per_kv: dict[str, Any], entries: list[str] | None, wanted: set[str]) -> None:
    defaults = {"optimizations": ["exp2", "packed_fp8"], "per_kv": per_kv}
    shape = SHAPE if entries is None else {**SHAPE, "optimizations": entries}
    assert set(kernel("fp8_e4m3fn", defaults=defaults, shapes=[shape]).optimizations) == wanted


def test_options_of_fp8_do_not_apply_to_other_kv_and_say_so() -> None:
    found = kernel("bf16")
    assert found.optimizations == ()
    assert found.not_taken == ("packed_fp8: the KV is bf16",)


@pytest.mark.parametrize(("splits", "direct"), [(1, True), (2, False)])
def test_direct_out_needs_one_split(splits: int, direct: bool) -> None:
    found = kernel(defaults={"optimizations": ["direct_out", "packed_fp8"]}, shapes=[{**SHAPE, "splits": splits}])
    assert found.direct is direct
    assert ("direct_out: there is more than one split" in found.not_taken) is not direct


@pytest.mark.parametrize(("asked", "source"), [(None, "automatic"), ("auto", "auto in shape")])
def test_automatic_splits_are_the_rules(asked: str | None, source: str) -> None:
    found = kernel(shapes=[SHAPE if asked is None else {**SHAPE, "splits": asked}])
    assert found.splits == choose_splits(8, 4096, *found.occupancy, found.block_n) > 1
    assert found.resolved["splits"].source == source


@pytest.mark.parametrize(
    ("target", "heads", "block", "blocks", "masked"),
    [("portable", 1, 16, 1, True), ("portable", 16, 16, 1, False), ("portable", 20, 32, 1, True),
     ("portable", 32, 32, 1, False), ("portable", 40, 32, 2, True), ("portable", 128, 32, 4, False),
     ("sm_90", 40, 64, 1, True), ("sm_90", 64, 64, 1, False), ("sm_90", 112, 64, 2, True),
     ("sm_90", 128, 64, 2, False)],
)  # fmt: skip
def test_automatic_head_blocks(target: str, heads: int, block: int, blocks: int, masked: bool) -> None:
    """64 heads a program where q and the output then fit shared memory."""
    defaults = {"family": "triton", "optimizations": ["packed_fp8"]}
    found = kernel(target=target, model={"num_heads": heads}, defaults=defaults)
    assert (found.block_h, found.head_blocks, found.masked_heads) == (block, blocks, masked)


def test_every_kv_type_gets_each_shape_and_two_general_kernels() -> None:
    plan = plan_of(spec_of())
    names = [k.name for k in plan.kernels]
    assert len(set(names)) == len(names) == 2 * (2 + 2)
    for kv in ("fp8_e4m3fn", "bf16"):
        direct, split = plan.general(kv)
        assert (direct.splits, split.splits) == (1, None)
        assert [(k.batch, k.kv_len) for k in plan.shaped(kv)] == [(4, 1024), (4, 8192)]


LIMITS = {"sm_120": 101376, "gfx942": 65536, "gfx950": 163840, "sm_90": 232448}
FP8_KV = {"dtypes": {"kv": ["fp8_e4m3fnuz"]}}
PLAIN = {"defaults": {"optimizations": []}}
REFUSED: dict[str, tuple[dict[str, Any], str, str]] = {
    "fp8 that the target does not convert": (
        {"target": "sm_80", "defaults": {"optimizations": ["exp2"]}},
        "fp8_e4m3fn KV without packed_fp8 on sm_80",
        "add packed_fp8",
    ),
    "e4m3fn as it is on gfx942": (
        {"target": "gfx942", "defaults": {"family": "triton", "optimizations": []}},
        "the hardware does not convert fp8_e4m3fn, so the compiler would decode it in software",
        "add packed_fp8",
    ),
    "products of e4m3fnuz where e4m3fn is multiplied": (
        {"target": "gfx950", **FP8_KV, "defaults": {"optimizations": ["fp8_mma", "packed_fp8"]}},
        "its matrix units take fp8_e4m3fn, in which bytes of fp8_e4m3fnuz are other numbers",
        "",
    ),
    "more heads than shared memory has room for": (
        {"defaults": {"block_n": 32, "block_h": 128, "optimizations": ["packed_fp8"]}},
        r"32 \w+ rows in 2 stages beside 128 heads needs 262,144 bytes of shared memory; portable has 98,304",
        "block_h: 32 fits",
    ),
    "a tile below that of an fp8 MMA": (
        {"target": "gfx950", "defaults": {"block_n": 16, "optimizations": ["fp8_mma"]}},
        "block_n 16 is below the 32 rows of an fp8 MMA",
        "block_n: 32",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    changes, what, fix = REFUSED[name]
    with pytest.raises(PlanError, match=what) as error:
        plan_of(spec_of(**changes))
    assert all(problem.loc for problem in error.value.problems)
    assert fix in error.value.problems[0].fix


@pytest.mark.parametrize(("target", "limit"), LIMITS.items())
def test_shared_memory_over_the_limit(target: str, limit: int) -> None:
    """The bytes needed and the limit are said, and the tile that is offered is taken."""
    assert TARGETS[target].shared_bytes == limit
    defaults = {"family": "triton", "block_n": 256, "num_stages": 3, "optimizations": ["packed_fp8"]}
    spec = spec_of(target, dtypes={"kv": ["bf16"]}, defaults=defaults, shapes=[SHAPE])
    with pytest.raises(PlanError, match=rf"needs [\d,]+ bytes of shared memory; {target} has {limit:,}") as error:
        plan_of(spec)
    problem = error.value.problems[0]
    assert problem.loc == ("defaults", "block_n")
    offered = int(problem.fix.split("block_n: ")[1].split()[0])
    taken = plan_of({**spec, "defaults": {**defaults, "block_n": offered}}).kernels[0]
    assert taken.shared_bytes <= limit


def test_what_a_family_does_not_know_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Triton, "takes", Triton.takes - {"fast_rcp"})
    defaults = {"family": "triton", "column_blocks": 2, "optimizations": ["exp2", "fast_rcp"]}
    with pytest.raises(PlanError) as error:
        plan_of(spec_of("sm_90", dtypes={"kv": ["bf16"]}, defaults=defaults))
    said = {problem.what: problem.loc for problem in error.value.problems}
    assert said == {
        "the family triton has no fast_rcp": ("defaults", "optimizations"),
        "the family triton has no column_blocks": ("defaults", "column_blocks"),
    }


@pytest.mark.parametrize(
    ("known", "options", "what", "loc"),
    [
        ("AS_IT_IS", [], "it reads bf16 KV, not fp8_e4m3fnuz", ("dtypes", "kv")),
        (
            "IN_WORDS",
            ["packed_fp8"],
            "packed_fp8 splits words of bf16, not of fp8_e4m3fnuz",
            ("defaults", "optimizations"),
        ),
    ],
)
def test_a_format_that_nobody_decodes(
    monkeypatch: pytest.MonkeyPatch, known: str, options: list[str], what: str, loc: tuple[str, ...]
) -> None:
    monkeypatch.setattr(triton, known, ("bf16",))
    with pytest.raises(PlanError) as error:
        plan_of(spec_of(**FP8_KV, defaults={"optimizations": options}))
    assert {(problem.what, problem.loc) for problem in error.value.problems} == {(what, loc)}


def test_a_problem_of_a_shape_is_placed_there_and_said_once() -> None:
    shapes = [SHAPE, {"batch": 9, "kv_len": 64, "block_n": 256, "num_stages": 4}]
    with pytest.raises(PlanError) as error:
        plan_of(spec_of(dtypes={"kv": ["bf16"]}, defaults={}, shapes=shapes))
    assert [problem.loc for problem in error.value.problems] == [("shapes", 1, "block_n")]


@pytest.mark.parametrize("target", TARGETS)
def test_every_target_plans_fp8_and_bf16(target: str) -> None:
    plan = plan_of(spec_of(target, defaults={"family": "triton", "optimizations": ["packed_fp8"]}))
    assert {k.target for k in plan.kernels} == {target}
    for found in plan.kernels:
        assert 0 < found.shared_bytes <= TARGETS[target].shared_bytes
        assert found.concurrent >= TARGETS[target].compute_units


def test_fp4_decoded_in_registers() -> None:
    """Shared memory as the compiler (3.6.0) needs it, or more."""
    for target, heads, tile, warps, needs in (("sm_90", 16, 32, 4, 72192), ("gfx950", 16, 32, 4, 32768)):
        model, dtypes = {"num_heads": heads}, {"kv": ["mxfp4_ds_mla"]}
        found = kernel("mxfp4_ds_mla", target=target, model=model, dtypes=dtypes, defaults={"family": "triton"})
        assert (found.block_n, found.num_warps) == (tile, warps)
        assert needs <= found.shared_bytes <= TARGETS[target].shared_bytes
