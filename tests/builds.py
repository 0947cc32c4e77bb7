"""Specs, plans and packages of builds for the tests of the modules that make them."""

import importlib
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import yaml

from mla_codegen.plan.resolve import Plan, make_plan
from mla_codegen.publish.write import fresh_build, publish
from mla_codegen.spec.load import parse_spec

SHAPES = [{"batch": 4, "kv_len": 1024, "splits": 8}, {"batch": 4, "kv_len": 8192, "splits": 1}]


def spec_of(target: str = "portable", **changes: Any) -> dict[str, Any]:
    """A small spec as data; `changes` replace its top-level keys."""
    return {
        "target": target,
        "dtypes": {"kv": ["fp8_e4m3fn", "bf16"]},
        "defaults": {"block_n": 32, "optimizations": ["exp2", "direct_out", "packed_fp8"]},
        "shapes": SHAPES,
        **changes,
    }


def plan_of(spec: dict[str, Any], file: str = "small.yaml") -> Plan:
    return make_plan(parse_spec(yaml.safe_dump(spec), file).spec, file)


def build(plans: list[Plan], out: Path, **options: Any) -> tuple[list[str], list[str]]:
    """Build as the command does: (written, removed)."""
    return publish(fresh_build(plans, out), out, {plan.name for plan in plans}, **options)


def tables(plans: list[Plan], folder: Path, package: str) -> list[ModuleType]:
    """Build `plans` into a package in `folder` and import what its dispatcher looks up."""
    build(plans, folder / package)
    sys.path.insert(0, str(folder))
    try:
        return [importlib.import_module(f"{package}.{plan.name}") for plan in plans]
    finally:
        sys.path.remove(str(folder))
