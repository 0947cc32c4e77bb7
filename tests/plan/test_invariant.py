"""Batch-invariant specs: one kernel a KV type, one number of splits, settings in `defaults` alone. No kernel runs."""

import json
from pathlib import Path
from typing import Any

import pytest
from builds import plan_of, spec_of, tables
from typer.testing import CliRunner

from mla_codegen.cli.main import app
from mla_codegen.plan.invariant import shared_splits
from mla_codegen.plan.resolve import Plan
from mla_codegen.publish.bundle import Refused, bundle
from mla_codegen.render.templates import render_kernel
from mla_codegen.runtime.builds import Build
from mla_codegen.runtime.splits import MAX_SPLITS, choose_splits, cost

SHAPES = [{"batch": 4, "kv_len": 1024}, {"batch": 64, "kv_len": 8192}]
DEFAULTS = {"block_n": 32, "optimizations": ["exp2", "direct_out", "packed_fp8"]}


def plan(**changes: Any) -> Plan:
    return plan_of(spec_of(**{"batch_invariant": True, "shapes": SHAPES, "defaults": DEFAULTS, **changes}))


def test_one_kernel_a_kv_type_serves_every_call() -> None:
    found = plan()
    assert [kernel.name for kernel in found.kernels] == ["fp8_e4m3fn_invariant", "bf16_invariant"]
    for kv in ("fp8_e4m3fn", "bf16"):
        choice = found.choice(kv)
        chosen = {choice.choose(rows, kv_len) for rows in (1, 4, 64, 5000) for kv_len in (0, 1024, 10**6)}
        assert chosen == {(f"{kv}_invariant", None)}
        assert {choice.choose(64, 4096, longest) for longest in (None, 1, 10**6)} == chosen
        assert choice.kernels() == [(f"{kv}_invariant", None, 1)]
        assert list(choice.largest(500)) == [(f"{kv}_invariant", 500, None)]


def test_there_is_no_balanced_kernel() -> None:
    """Its shares follow the whole batch. Ordinary specs of the target have it."""
    defaults = {"optimizations": ["exp2"]}
    spec = {"target": "sm_90", "shapes": SHAPES, "defaults": defaults}
    assert any(kernel.balanced for kernel in plan_of(spec_of(**spec)).kernels)
    found = plan_of(spec_of(**spec, batch_invariant=True))
    assert [kernel.family for kernel in found.kernels] == ["hopper", "hopper"]
    assert not any(kernel.balanced for kernel in found.kernels)
    assert found.choice("bf16").choose(64, 1000, 100_000) == ("bf16_invariant", None)


def test_false_is_an_ordinary_spec() -> None:
    assert plan(batch_invariant=False).kernels == plan_of(spec_of(shapes=SHAPES, defaults=DEFAULTS)).kernels
    assert len(plan(batch_invariant=False).kernels) == 8


SPLITS = [
    ({"splits": 6}, 6, "defaults"),
    ({"splits": 6, "per_kv": {"bf16": {"splits": 3}}}, 3, "defaults, per_kv"),
    ({}, None, "automatic"),
    ({"splits": "auto"}, None, "auto in defaults"),
]


@pytest.mark.parametrize(("settings", "splits", "source"), SPLITS, ids=[case[2] for case in SPLITS])
def test_where_the_number_of_splits_comes_from(settings: dict[str, Any], splits: int | None, source: str) -> None:
    kernel = plan(defaults=DEFAULTS | settings).invariant("bf16")
    automatic = shared_splits([(4, 1024), (64, 8192)], *kernel.occupancy, kernel.block_n)
    assert kernel.splits == (splits or automatic)
    assert (kernel.resolved["splits"].value, kernel.resolved["splits"].source) == (kernel.splits, source)
    assert f"SPLITS = tl.constexpr({kernel.splits})" in render_kernel(kernel)


def test_one_split_writes_the_output_itself() -> None:
    kernel = plan(defaults=DEFAULTS | {"splits": 1}).invariant("bf16")
    assert kernel.direct
    assert "stage2" not in render_kernel(kernel)


@pytest.mark.parametrize(("programs", "kv_len"), [(1, 131072), (4, 1024), (64, 8192), (300, 500), (7, 0)])
def test_the_number_for_one_shape_is_the_split_rules(programs: int, kv_len: int) -> None:
    assert shared_splits([(programs, kv_len)], 128, 1, 32) == choose_splits(programs, kv_len, 128, 1, 32)


def test_the_number_for_several_shapes_loses_least_over_all() -> None:
    shapes, device = [(4, 1024), (64, 8192), (256, 8192)], (132, 2, 64)

    def loss(splits: int) -> float:
        product = 1.0
        for programs, kv_len in shapes:
            tiles = kv_len // device[2]
            every = [cost(n, programs, tiles, *device) for n in range(1, MAX_SPLITS + 1)]
            product *= cost(splits, programs, tiles, *device) / min(every)
        return product

    found = shared_splits(shapes, *device)
    assert all(loss(found) <= loss(other) * (1 + 1e-9) for other in range(1, MAX_SPLITS + 1))
    alone = {choose_splits(programs, kv_len, *device) for programs, kv_len in shapes}
    assert min(alone) < found < max(alone)


def test_the_tables_say_it(tmp_path: Path) -> None:
    (module,) = tables([plan()], tmp_path, "invariant_tables")
    build = Build(module)
    assert build.batch_invariant
    assert build.choices["bf16"].choose(4, 1024) == ("bf16_invariant", None)


def test_explain(tmp_path: Path) -> None:
    file = tmp_path / "even.yaml"
    file.write_text(
        json.dumps(spec_of(batch_invariant=True, shapes=SHAPES, defaults=DEFAULTS | {"splits": 6})), encoding="utf-8"
    )
    shown = CliRunner().invoke(app, ["explain", str(file), "--batch", "3", "--kv-len", "77", "--json"])
    found = json.loads(shown.stdout)
    assert found["kernel"] == "fp8_e4m3fn_invariant"
    assert found["rule"] == "the spec is batch-invariant: one kernel serves every call of this KV type"
    assert found["splits"] == 6


def test_tune_and_bundle_refuse(tmp_path: Path) -> None:
    with pytest.raises(Refused, match="is batch-invariant, which costs time"):
        bundle(plan())
    file = tmp_path / "even.yaml"
    file.write_text(json.dumps(spec_of(batch_invariant=True, shapes=SHAPES)), encoding="utf-8")
    told = CliRunner().invoke(app, ["tune", str(file)])
    assert told.exit_code == 2
    assert "is batch-invariant: one kernel serves all its shapes" in told.stderr
    assert "fix: tune a copy without `batch_invariant`" in told.stderr


def test_inspect_predicts_every_shape(tmp_path: Path) -> None:
    """The one kernel is compiled once, and the model asked about each call that the spec names."""
    file = tmp_path / "even.yaml"
    spec = spec_of("sm_90", batch_invariant=True, shapes=SHAPES, defaults=DEFAULTS | {"family": "triton", "splits": 4})
    file.write_text(json.dumps(spec | {"dtypes": {"kv": ["bf16"]}}), encoding="utf-8")
    shown = CliRunner().invoke(app, ["inspect", str(file), "--json"])
    found = json.loads(shown.stdout)
    assert [(call["kernel"], call["batch"], call["kv_len"]) for call in found["calls"]] == [
        ("bf16_invariant", 4, 1024),
        ("bf16_invariant", 64, 8192),
    ]
