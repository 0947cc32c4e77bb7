"""The JSON Schema agrees with what the loader takes and refuses."""

import copy
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from mla_codegen.catalog.optimizations import OPTIMIZATIONS
from mla_codegen.catalog.targets import TARGETS
from mla_codegen.runtime.formats import KV_FORMATS
from mla_codegen.spec.schema import alternatives, homes, json_schema, keys_at
from mla_codegen.spec.source import read_source

SHIPPED = sorted((Path(__file__).parents[2] / "specs").glob("*.yaml"))
BROKEN = Path(__file__).parent / "broken_specs"


def faults(data: Any) -> list[str]:
    return [error.message for error in jsonschema.Draft202012Validator(json_schema()).iter_errors(data)]


def test_it_is_a_schema() -> None:
    jsonschema.Draft202012Validator.check_schema(json_schema())


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_shipped_specs_are_valid(path: Path) -> None:
    assert faults(read_source(path).data) == []


SEEN = [
    "unknown_key_top",
    "unknown_key_shape",
    "unknown_key_name",
    "wrong_type",
    "wrong_value",
    "missing_keys",
    "ranks",
]
SEEN += ["empty_lists", "unknown_target", "unknown_optimization", "signs_in_defaults", "signs_mixed", "duplicate_kv"]
SEEN += ["unknown_kv_type_in_per_kv", "duplicate_optimization", "booleans", "unknown_family", "empty_values"]
SEEN += ["kv_layout", "page_size"]


@pytest.mark.parametrize("name", SEEN)
def test_an_editor_sees_broken_specs(name: str) -> None:
    assert faults(read_source(BROKEN / f"{name}.yaml").data)


def test_every_key_is_described() -> None:
    schema = json_schema()
    owners = [schema, *schema["$defs"].values()]
    bare = [key for owner in owners for key, value in owner["properties"].items() if "description" not in value]
    assert bare == []
    assert "name" not in schema["properties"] and schema["required"] == ["target", "shapes"]


def test_names_come_with_their_meaning() -> None:
    target = json_schema()["properties"]["target"]["anyOf"]
    assert [(option["const"], option["description"]) for option in target] == [
        *((t.name, t.title) for t in TARGETS.values()),
        *((gpu, f"the same as {t.name}") for t in TARGETS.values() for gpu in t.gpus),
    ]
    plain = json_schema()["$defs"]["Defaults"]["properties"]["optimizations"]["items"]["anyOf"]
    assert [option["const"] for option in plain] == list(OPTIMIZATIONS)
    changes = json_schema()["$defs"]["Shape"]["properties"]["optimizations"]["anyOf"][1]["items"]["anyOf"]
    assert {option["const"] for option in changes} == {sign + name for sign in "+-" for name in OPTIMIZATIONS}


def test_null_is_not_offered() -> None:
    def has_null(part: Any) -> bool:
        if isinstance(part, dict):
            return part.get("type") == "null" or any(has_null(value) for value in part.values())
        return isinstance(part, list) and any(has_null(item) for item in part)

    assert not has_null(json_schema())


def test_each_call_gives_a_copy() -> None:
    first = json_schema()
    kept = copy.deepcopy(first)
    first["properties"].clear()
    assert json_schema() == kept


def test_looking_up_a_place() -> None:
    assert keys_at(("model",)) == ["num_heads", "kv_lora_rank", "qk_rope_head_dim"]
    assert keys_at(("shapes", 3, "per_kv")) == list(KV_FORMATS)
    assert "block_n" in keys_at(("shapes", 3, "per_kv", "bf16"))
    assert keys_at(("shapes", 3, "per_kv", "fp8")) == []
    assert alternatives(("nowhere",)) == []
    assert homes("block_n") == ["a shape", "`defaults`"]
    assert homes("kv") == ["`dtypes`", "the top level"]
    assert homes("page_size") == ["`kv`"]
    assert homes("target") == ["the top level"]
