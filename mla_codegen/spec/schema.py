"""The JSON Schema of a spec, by which editors complete and check it. Messages read what is allowed from it too."""

from functools import cache
from typing import Any

from mla_codegen.catalog.optimizations import OPTIMIZATIONS
from mla_codegen.catalog.targets import TARGETS
from mla_codegen.spec.datamodel import Spec

SCHEMA_FILE = "mla-codegen.schema.json"


def json_schema() -> dict[str, Any]:
    """A new copy of the schema (draft 2020-12). It has no `name`: that is the file's."""
    schema = Spec.model_json_schema()
    _tidy(schema)
    definitions = schema["$defs"]
    del schema["properties"]["name"]
    schema["required"].remove("name")
    schema = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "mla-codegen spec",
        **{key: value for key, value in schema.items() if key != "title"},
    }
    targets = {target.name: target.title for target in TARGETS.values()}
    targets |= {gpu: f"the same as {target.name}" for target in TARGETS.values() for gpu in target.gpus}
    schema["properties"]["target"].update(_names(targets))
    definitions["Dtypes"]["properties"]["kv"]["uniqueItems"] = True
    definitions["Shape"]["required"].remove("kv_len")  # of sparse KV `topk` says it
    families = sorted({family for target in TARGETS.values() for family in target.families})
    meanings = {option.name: f"{option.meaning} Needs {option.needs}." for option in OPTIMIZATIONS.values()}
    signed = {sign + name: meaning for name, meaning in meanings.items() for sign in "+-"}
    plain, changes = ({"type": "array", "items": _names(names), "uniqueItems": True} for names in (meanings, signed))
    for name in ("Settings", "Defaults", "Shape"):
        properties = definitions[name]["properties"]
        properties["family"]["enum"] = families
        described = {"description": properties["optimizations"]["description"]}
        properties["optimizations"] = described | (plain if name == "Defaults" else {"anyOf": [plain, changes]})
    return schema


def _names(meanings: dict[str, str]) -> dict[str, Any]:
    """One name of several, with what each means."""
    return {"anyOf": [{"const": name, "description": meaning} for name, meaning in meanings.items()]}


def _tidy(part: Any) -> None:
    """Drop what pydantic adds and a spec does not mean: null as a value, its defaults, titles that repeat the key."""
    if isinstance(part, list):
        for item in part:
            _tidy(item)
    if not isinstance(part, dict):
        return
    for name in part.get("properties", {}):
        part["properties"][name].pop("title", None)
    options = [option for option in part.get("anyOf", []) if option != {"type": "null"}]
    if len(options) == 1:
        del part["anyOf"]
        part.update(options[0])
    elif options:
        part["anyOf"] = options
    if part.get("default", 0) is None:
        del part["default"]
    for value in list(part.values()):
        _tidy(value)


@cache
def _schema() -> dict[str, Any]:
    return json_schema()


def alternatives(loc: tuple[str | int, ...]) -> list[dict[str, Any]]:
    """The schemas that a value at `loc` may meet, without references and unions; none if a spec has no such place."""
    found = [_schema()]
    for step in loc:
        found = [part for schema in found for part in _step(schema, step)]
    return found


def _step(schema: dict[str, Any], step: str | int) -> list[dict[str, Any]]:
    if isinstance(step, int):
        return flat(schema.get("items"))
    if step in schema.get("properties", {}):
        return flat(schema["properties"][step])
    keys = schema.get("propertyNames", {}).get("enum", [])
    return flat(schema.get("additionalProperties")) if step in keys else []


def flat(schema: Any) -> list[dict[str, Any]]:
    """A schema without its references and unions: the plain schemas that it comes to."""
    if not isinstance(schema, dict):
        return []
    if "$ref" in schema:
        return flat(_schema()["$defs"][schema["$ref"].rsplit("/", 1)[1]])
    if "anyOf" in schema:
        return [part for option in schema["anyOf"] for part in flat(option)]
    return [schema]


def keys_at(loc: tuple[str | int, ...]) -> list[str]:
    """The keys that the mapping at `loc` may have."""
    keys: list[str] = []
    for schema in alternatives(loc):
        keys += schema.get("properties", {})
        keys += schema.get("propertyNames", {}).get("enum", [])
    return keys


def homes(key: str) -> list[str]:
    """Where a spec may have `key`, in words, the most usual place first."""
    places: dict[str, tuple[str | int, ...]] = {"a shape": ("shapes", 0)}
    places |= {f"`{name}`": (name,) for name in ("defaults", "model", "dtypes", "kv", "limits")}
    places["`hot_loop_per_64_rows`"] = ("limits", "hot_loop_per_64_rows")
    found = [words for words, loc in places.items() if key in keys_at(loc)]
    return found + (["the top level"] if key in keys_at(()) else [])
