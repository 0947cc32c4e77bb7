"""A spec may name a GPU; what is built and printed has the name of its architecture."""

import pytest

from mla_codegen.catalog.targets import (
    TARGETS,
    WITHOUT_TARGET,
    _key,
    architecture_without_target,
    find_target,
)
from mla_codegen.plan.resolve import make_plan
from mla_codegen.spec.errors import SpecError
from mla_codegen.spec.load import parse_spec
from mla_codegen.spec.starter import starter

PAIRS = [(target.name, name) for target in TARGETS.values() for name in (target.name, *target.gpus)]


def test_names_are_names_of_one_target() -> None:
    keys = [_key(name) for _, name in PAIRS] + [_key(n) for a, names in WITHOUT_TARGET.items() for n in (a, *names)]
    assert len(keys) == len(set(keys))


@pytest.mark.parametrize("target, name", PAIRS)
def test_a_gpu_is_its_target_however_it_is_spelled(target: str, name: str) -> None:
    for spelled in (name, name.lower(), name.upper(), name.replace(" ", ""), name.replace(" ", "-"), f" {name} "):
        found = find_target(spelled)
        assert found is not None and found.name == target
    if target != "portable":
        assert find_target(TARGETS[target].title) is TARGETS[target]


@pytest.mark.parametrize(
    "name, target",
    [
        ("H100", "sm_90"), ("h200", "sm_90"), ("GH200", "sm_90"), ("NVIDIA H100", "sm_90"), ("sm90", "sm_90"),
        ("A100", "sm_80"), ("L40S", "sm_89"), ("L4", "sm_89"), ("RTX 4090", "sm_89"), ("GeForce RTX 4090", "sm_89"),
        ("B200", "sm_100"), ("GB200", "sm_100"), ("rtx5090", "sm_120"), ("MI300X", "gfx942"), ("MI300A", "gfx942"),
        ("MI325X", "gfx942"), ("AMD Instinct MI350X", "gfx950"), ("mi355x", "gfx950"), ("Portable", "portable"),
    ],
)  # fmt: skip
def test_a_spec_may_say(name: str, target: str) -> None:
    spec = parse_spec(f"target: {name}\nshapes: [{{batch: 4, kv_len: 1024}}]\n", "a.yaml").spec
    assert spec.target == target
    plan = make_plan(spec, "a.yaml")
    assert plan.target is TARGETS[target]
    assert {kernel.target for kernel in plan.kernels} == {target}
    assert starter("deepseek-v3", name) == starter("deepseek-v3", target)


@pytest.mark.parametrize("name", [name for names in WITHOUT_TARGET.values() for name in names])
def test_a_gpu_without_a_target_is_told_so(name: str) -> None:
    """Its name may be near to another's: A10 is no A100."""
    with pytest.raises(SpecError) as error:
        parse_spec(f"target: {name}\nshapes: [{{batch: 4, kv_len: 1024}}]\n", "a.yaml")
    assert str(error.value).startswith(f"a.yaml:1:9: unknown target `{name}`\n  allowed: gfx942, ")
    fix = f"{name} is {architecture_without_target(name)}, which has no target of its own: `portable` runs on any GPU"
    assert str(error.value).endswith(f"  fix: {fix}")


def test_rules_know_the_target_of_a_gpu() -> None:
    text = "target: H100\ndefaults: {optimizations: [xcd_remap]}\nshapes: [{batch: 4, kv_len: 1024}]\n"
    with pytest.raises(SpecError, match="`xcd_remap` is not for sm_90: sm_90 has one die"):
        parse_spec(text, "a.yaml")
