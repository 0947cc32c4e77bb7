"""pydantic's findings -> Problems, one a value: the key, what was written, what is allowed and the likely cure."""

from typing import Any

from pydantic import ValidationError

from .errors import Loc, Problem, did_you_mean, quoted
from .schema import alternatives, flat, homes, keys_at
from .source import Source
from .tree import Value

MOST = 1000  # findings that are put into words


def problems_of(error: ValidationError, source: Source) -> list[Problem]:
    """The Problems behind a failed validation of `source.data`, without those that rules.empty_values reports."""
    findings: dict[Loc, str] = {}
    for found in error.errors(include_url=False, include_context=False, include_input=False):
        loc, kind = _real(found["loc"], source), found["type"]
        if found["loc"][-1:] == ("[key]",) or kind == "extra_forbidden":
            findings.setdefault(loc, "unknown key")
        elif kind == "missing":
            findings.setdefault((*loc, found["loc"][-1]), "missing")
        else:
            findings.setdefault(loc, "value")
    unknown = {loc for loc, kind in findings.items() if kind == "unknown key"}
    findings = {loc: kind for loc, kind in findings.items() if not any(loc[:n] in unknown for n in range(len(loc)))}
    ordered = sorted(findings.items(), key=lambda item: source.place(item[0], item[1] == "unknown key"))
    problems = []
    for loc, kind in ordered[:MOST]:
        if kind == "unknown key":
            problems.append(unknown_key(loc))
        elif kind == "missing":
            problems.append(_missing(loc))
        else:
            node = source.node(loc)
            if node is not None and node.value is not None:
                problems.append(_wrong_value(loc, node.value, node.spelled))
    return problems


def _real(loc: tuple[Any, ...], source: Source) -> Loc:
    """`loc` up to where the text goes: pydantic adds the names of union members, which are no keys."""
    node, steps = source.root, []
    for step in loc:
        if step not in node.children:
            break
        node = node.children[step]
        steps.append(step)
    return tuple(steps)


def unknown_key(loc: Loc) -> Problem:
    key, known = str(loc[-1]), keys_at(loc[:-1])
    fix = did_you_mean(key, known)
    if loc == ("name",):
        fix = "remove it: a spec is named by its file"
    elif not fix and (elsewhere := homes(key)):
        fix = f"{quoted(key)} belongs in {' or '.join(elsewhere[:2])}"
    return Problem(loc, f"unknown key {quoted(key)}{_within(loc)}", ", ".join(known), fix, at_key=True)


def _within(loc: Loc) -> str:
    names = [str(step) for step in loc[:-1] if isinstance(step, str)]
    if not names:
        return ""
    if loc[0] == "shapes" and len(loc) == 3:
        return " in a shape"
    return f" in {quoted(names[-1])}"


def _missing(loc: Loc) -> Problem:
    owner = "this shape" if loc[0] == "shapes" and len(loc) > 1 else "the spec"
    key = str(loc[-1])
    options = alternatives(loc)
    example = {"target": "sm_90", "shapes": "[{batch: 64, kv_len: 8192}]", "batch": "64", "kv_len": "8192"}.get(
        key, "..."
    )
    return Problem(loc, f"{owner} lacks `{key}`", _allowed(options), f"add `{key}: {example}`")


def _wrong_value(loc: Loc, value: Value, spelled: str) -> Problem:
    options = alternatives(loc)
    key = _name(loc)
    allowed = _allowed(options)
    types = {_type(option) for option in options}
    fix = ""
    if isinstance(value, str):
        what = f"{key} cannot be the text {quoted(value)}"
        words = [word for option in options for word in _words(option)]
        fix = did_you_mean(value, words)
        if value.strip().lstrip("+").isdecimal() and "integer" in types and len(value) < 20:
            fix = f"remove the quotes: {int(value)}"
        elif "array" in types:
            fix = f"put it in brackets: [{value}]" if value and len(value) < 60 and value.isprintable() else ""
    elif isinstance(value, bool):
        what = f"{key} cannot be {quoted(spelled)}, which YAML reads as {str(value).lower()}"
    elif isinstance(value, int | float):
        what = f"{key} cannot be {quoted(spelled)}"
        fix = _near(value, options)
    elif isinstance(value, list):
        what = f"{key} cannot be an empty list" if not value else f"{key} cannot be a list"
    else:
        what = f"{key} cannot be a mapping"
        if "array" in types:
            fix = "begin each entry with `- `"
    return Problem(loc, what, allowed, fix)


def _name(loc: Loc) -> str:
    if isinstance(loc[-1], int):
        return "a shape" if loc[:-1] == ("shapes",) else f"an entry of `{loc[-2]}`"
    return f"`{loc[-1]}`"


def _near(value: int | float, options: list[dict[str, Any]]) -> str:
    """The allowed number or numbers next to `value`."""
    for option in options:
        numbers = option.get("enum", [])
        if numbers and isinstance(numbers[0], int):
            below, above = [n for n in numbers if n < value], [n for n in numbers if n > value]
            return "write " + " or ".join(str(n) for n in (below[-1:] + above[:1]))
        if option.get("type") == "integer":
            low, high = option["minimum"], option["maximum"]
            return f"write {low if value < low else high if value > high else round(value)}"
    return ""


def _type(option: dict[str, Any]) -> str:
    return option.get("type") or "string"


def _words(option: dict[str, Any]) -> list[str]:
    words = option.get("enum", [option["const"]] if "const" in option else [])
    return [word for word in words if isinstance(word, str)]


def _allowed(options: list[dict[str, Any]]) -> str:
    """What the schemas of one value admit, in words."""
    words = [
        str(word) for option in options for word in (option.get("enum") or [option.get("const")]) if word is not None
    ]
    parts = [", ".join(dict.fromkeys(words))] if words else []
    for option in options:
        if "enum" in option or "const" in option:
            continue
        kind = option["type"]
        if kind == "integer":
            text = f"a whole number from {option['minimum']} to {option['maximum']}"
        elif kind == "array":
            inner = _allowed(flat(option["items"]))
            text = f"a list of: {inner}" if not inner.startswith("a ") else f"a list, each entry {inner}"
        else:
            keys = option.get("properties") or option.get("propertyNames", {}).get("enum", [])
            text = f"a mapping of {', '.join(keys)}"
        if text not in parts:
            parts.append(text)
    return ", or ".join(parts)
