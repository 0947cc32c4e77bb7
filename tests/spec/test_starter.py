"""Starter specs load, and each of their commented-out lines is true as well."""

import re

import pytest

from mla_codegen.catalog.optimizations import OPTIMIZATIONS
from mla_codegen.catalog.targets import TARGETS
from mla_codegen.plan.resolve import make_plan
from mla_codegen.spec.errors import UnknownName
from mla_codegen.spec.load import parse_spec
from mla_codegen.spec.starter import MODELS, OPT_IN, starter


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("model", MODELS)
def test_it_loads_and_plans(model: str, target: str) -> None:
    text = starter(model, target)
    spec = parse_spec(text, "start.yaml").spec
    assert spec.target == target
    assert spec.model.num_heads * MODELS[model].gpus == MODELS[model].heads
    assert (spec.model.kv_lora_rank, spec.model.qk_rope_head_dim) == (MODELS[model].latent, MODELS[model].rope)
    possible = [
        o.name for o in OPTIMIZATIONS.values() if o.refused_on(TARGETS[target]) is None and o.name not in OPT_IN
    ]
    assert spec.defaults.optimizations == possible
    assert len(make_plan(spec, "start.yaml").kernels) >= 2 * len(spec.shapes)
    assert text.startswith("# yaml-language-server: $schema=mla-codegen.schema.json\n")
    assert text.endswith("\n") and max(map(len, text.splitlines())) <= 120


@pytest.mark.parametrize("target", TARGETS)
def test_its_suggestions_can_be_taken(target: str) -> None:
    text = re.sub(r"(?m)^( *)# (?=- |[a-z_]+: |  bf16)", r"\1", starter("deepseek-v3", target).split("\n", 4)[4])
    spec = parse_spec(text, "start.yaml").spec
    assert spec.defaults.block_n == 64 and spec.defaults.num_stages == 2
    assert spec.shapes[-1].optimizations == ["-peeled_tail"]
    assert (spec.defaults.waves_per_eu == 2) == TARGETS[target].waves_per_eu
    assert ("fp8_mma" in (spec.defaults.optimizations or [])) == bool(TARGETS[target].fp8_mma)


def test_heads_are_those_of_one_gpu() -> None:
    assert parse_spec(starter("deepseek-v3", "sm_90"), "a.yaml").spec.model.num_heads == 16
    assert parse_spec(starter("kimi-k2", "sm_90"), "a.yaml").spec.model.num_heads == 8
    assert "DeepSeek-V3 has 128; tensor parallelism over 8 GPUs leaves 16." in starter("deepseek-v3", "sm_90")
    assert "128 on 1, 64 on 2, 32 on 4, 8 on 16" in starter("deepseek-v3", "sm_90")


def test_names_as_a_hub_writes_them() -> None:
    assert starter("deepseek-ai/DeepSeek-V3", "sm_90") == starter("deepseek-v3", "sm_90")


def test_unknown_names() -> None:
    with pytest.raises(
        UnknownName, match=r"unknown model `deepsek-v3`\n  allowed: deepseek-v2, .*\n  fix: did you mean `deepseek-v3`"
    ):
        starter("deepsek-v3", "sm_90")
    with pytest.raises(UnknownName, match=r"unknown target `sm9`\n  allowed: gfx942, .*\n  fix: did you mean `sm_90`"):
        starter("deepseek-v3", "sm9")
