"""What may be tried: the families' knobs, the plan's refusals, and sameness."""

from collections import Counter

import pytest
from tune_fakes import SPEC, space

from mla_codegen.catalog.targets import TARGETS
from mla_codegen.measure.tune.settings import for_shape, needed
from mla_codegen.measure.tune.space import MAX_WAVES
from mla_codegen.plan.families import FAMILIES


def test_every_combination_is_judged_by_the_plan() -> None:
    where = space()
    reasons = Counter()
    for settings in where.combinations():
        plan = where.legal(settings)
        if isinstance(plan, str):
            reasons[plan.split(" needs ")[-1][:20]] += 1
            continue
        kernel = plan.kernels[0]
        assert kernel.shared_bytes <= TARGETS["sm_80"].shared_bytes
        assert (kernel.splits or 1) * kernel.block_n < 8192 + kernel.block_n
        assert 4 * (kernel.splits or 1) <= MAX_WAVES * kernel.concurrent
    assert reasons  # tiles of 128 rows in 4 stages do not fit, for one
    with pytest.raises(ValueError, match="shared memory"):
        where.candidate({"block_n": 128, "num_stages": 4})
    with pytest.raises(ValueError):
        where.candidate({"block_n": 17})
    with pytest.raises(ValueError, match="100 splits of 64 tiles"):
        where.candidate({"block_n": 128, "num_stages": 1, "splits": 100})


def test_knobs_that_a_target_or_a_model_has_no_use_for() -> None:
    knobs = space().families["triton"]
    assert "waves_per_eu" not in knobs and knobs["block_h"] == (16,)
    amd = space(text=SPEC.replace("sm_80", "gfx950").replace("num_warps", "family: triton\n  num_warps"))
    assert "waves_per_eu" in amd.families["triton"]
    many = space(text=SPEC.replace("dtypes:", "model: {num_heads: 128}\ndtypes:"))
    assert many.families["triton"]["block_h"] == FAMILIES["triton"].tunable["block_h"]
    short = space(text=SPEC.replace("kv_len: 8192", "kv_len: 20"))
    assert max(short.families["triton"]["splits"]) <= 20


def test_a_family_that_the_spec_names_is_the_only_one() -> None:
    where = space(text=SPEC.replace("sm_80", "sm_90").replace("splits: 16", "splits: 16, family: triton"))
    assert list(where.families) == ["triton"]
    free = space(text=SPEC.replace("sm_80", "sm_90"))
    assert tuple(free.families) == TARGETS["sm_90"].families


def test_the_same_kernel_however_it_is_said() -> None:
    where = space()
    said = where.candidate({"splits": 16, "num_warps": 4, "family": "triton"})
    assert said.identity == where.current.identity
    assert said.key(where.workload, "a", "1") == where.current.key(where.workload, "a", "1")
    other = where.candidate({"splits": 8})
    keys = {c.key(where.workload, device, triton) for c in (said, other) for device in "ab" for triton in "12"}
    assert len(keys) == 8
    assert other.resolved["splits"] == 8 and other.resolved["num_warps"] == 4


def test_only_what_is_not_inherited_is_needed() -> None:
    where = space("bf16")
    winner = where.candidate({"family": "triton", "splits": 8, "block_n": 32, "num_warps": 4, "num_stages": 1})
    assert needed(where, winner) == {"splits": 8, "num_stages": 1}
    assert needed(where, where.current) == {}


def test_another_family_is_named() -> None:
    where = space(text=SPEC.replace("sm_80", "sm_90").replace("  num_warps: 4\n", ""))
    assert where.current.kernel.family == "hopper"
    winner = where.candidate({"family": "triton", "splits": 16, "block_n": 32, "num_warps": 4, "num_stages": 2})
    assert needed(where, winner)["family"] == "triton"


@pytest.mark.parametrize(
    ("per_kv", "common", "single"),
    [
        ({"a": {"s": 1}, "b": {"s": 1}}, {"s": 1}, {}),
        ({"a": {"s": 1}, "b": {"s": 2}}, {"s": 1}, {"b": {"s": 2}}),
        ({"a": {"s": 1}}, {}, {"a": {"s": 1}}),
        ({"a": {"s": 1, "n": 2}, "b": {"s": 1}}, {"s": 1}, {"a": {"n": 2}}),
        ({"b": {}}, {}, {}),
    ],
)
def test_settings_of_all_dtypes_are_the_shapes(per_kv: dict, common: dict, single: dict) -> None:
    assert for_shape(per_kv, ["a", "b"]) == (common, single)
