"""pydantic's findings -> Problems, one a value: the key, what was written, what is allowed and the likely cure."""

from typing import Any

from pydantic import ValidationError

from mla_codegen.catalog.targets import TARGETS
from mla_codegen.runtime.formats import ELEMENTS
from mla_codegen.spec.errors import Loc, Problem, did_you_mean, quoted
from mla_codegen.spec.schema import alternatives, flat, homes, keys_at
from mla_codegen.spec.source import Source
from mla_codegen.spec.tree import Value

MOST = 1000  # findings that are put into words
ALIASES = {alias: one.name for one in ELEMENTS.values() for alias in (one.torch.removeprefix("torch."), *one.aliases)}


def problems_of(error: ValidationError, source: Source) -> list[Problem]:
    """The Problems behind a failed validation of `source.data`; values left empty are for the rules to report."""
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
    misspelt: set[Loc] = set()  # a key that is missing because it is misspelt is one problem, not two
    for loc, kind in ordered[:MOST]:
        if kind == "unknown key":
            lacking = [key for key in keys_at(loc[:-1]) if findings.get((*loc[:-1], key)) == "missing"]
            misspelt |= {(*loc[:-1], key) for key in lacking if did_you_mean(str(loc[-1]), [key])}
    for loc, kind in ordered[:MOST]:
        if kind == "unknown key":
            problems.append(unknown_key(loc))
        elif kind == "missing":
            if loc not in misspelt:
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
    """The problem of a key that its mapping cannot have; `loc` ends in it."""
    key, known = str(loc[-1]), keys_at(loc[:-1])
    elsewhere = homes(key)
    if loc == ("name",):
        fix = "remove it: a spec is named by its file"
    elif elsewhere:
        fix = f"{quoted(key)} belongs in {' or '.join(elsewhere[:2])}"
    elif "{" in key or "[" in key:
        fix = "is a `:` missing after the key?"
    else:
        fix = did_you_mean(key, known)
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
    types = {option.get("type") for option in options}
    fix = ""
    if isinstance(value, str):
        words = [word for option in options for word in _words(option)]
        shown = quoted(value) if words else f"the text {quoted(value)}"
        fix = _near_word(value, words, types)
    elif isinstance(value, bool):
        read = str(value).lower()
        shown = quoted(spelled) if spelled.lower() == read else f"{quoted(spelled)}, which YAML reads as {read}"
    elif isinstance(value, int | float):
        shown = quoted(spelled)
        fix = _near_number(value, options)
    elif isinstance(value, list):
        shown = "a list" if value else "an empty list"
    else:
        shown = "a mapping"
        fix = "begin each entry with `- `" if "array" in types else ""
    if loc == ("kv",):
        fix = "write `kv: {layout: paged, page_size: 64}`; element types are said by `kv` in `dtypes`"
    elif loc == ("dtypes", "kv") and isinstance(value, dict):
        fix = "pages are said by `kv` at the top level"
    return Problem(loc, f"{_name(loc)} cannot be {shown}", _allowed(options), fix)


def _near_word(value: str, words: list[str], types: set[str | None]) -> str:
    """What a text may have been meant to be."""
    parts = value.replace(",", " ").split()
    if value.strip().lstrip("+").isdecimal() and "integer" in types and len(value) < 20:
        return f"remove the quotes: {int(value)}"
    if len(parts) > 1 and set(parts) <= set(words):
        return f"separate them by commas: {', '.join(parts)}"
    if "array" in types and 0 < len(value) < 60 and value.isprintable():
        return f"put it in brackets: [{', '.join(parts)}]"
    alias = ALIASES.get(value.lower().removeprefix("torch."))
    return f"write {alias}" if alias in words else did_you_mean(value, words)


def _name(loc: Loc) -> str:
    if isinstance(loc[-1], int):
        return "a shape" if loc[:-1] == ("shapes",) else f"an entry of `{loc[-2]}`"
    return f"`{loc[-1]}`"


def _near_number(value: int | float, options: list[dict[str, Any]]) -> str:
    """The allowed number or numbers next to `value`."""
    for option in options:
        numbers = option.get("enum", [])
        if numbers and isinstance(numbers[0], int):
            below, above = [n for n in numbers if n < value], [n for n in numbers if n > value]
            return "write " + " or ".join(str(n) for n in (below[-1:] + above[:1]))
        if option.get("type") == "integer":
            return (
                f"write {min(max(round(value), option.get('minimum', round(value))), option.get('maximum', 1 << 63))}"
            )
    return ""


def _words(option: dict[str, Any]) -> list[str]:
    words = option.get("enum", [option["const"]] if "const" in option else [])
    return [word for word in words if isinstance(word, str)]


def _allowed(options: list[dict[str, Any]]) -> str:
    """What the schemas of one value admit, in words."""
    words = [str(word) for option in options for word in option.get("enum", [option.get("const")]) if word is not None]
    if any(word in TARGETS for word in words):  # a GPU's name will do, but there are many
        words = [word for word in words if word in TARGETS]
    parts = [", ".join(dict.fromkeys(words))] if words else []
    parts += [_kind(option) for option in options if "enum" not in option and "const" not in option]
    return ", or ".join(dict.fromkeys(parts))


def _kind(option: dict[str, Any]) -> str:
    kind = option.get("type")
    if kind in ("integer", "number"):
        low, high = option.get("minimum"), option.get("maximum")
        bounds = (f" from {low}" if low is not None else "") + (f" to {high}" if high is not None else "")
        return f"a {'whole ' if kind == 'integer' else ''}number{bounds}"
    if kind == "array":
        inner = _allowed(flat(option.get("items")))
        return f"a list; each entry is {inner}" if inner.startswith("a ") else f"a list of: {inner}"
    if kind == "object":
        if "required" in option:
            return f"a mapping with {' and '.join(option['required'])}"
        keys = option.get("properties") or option.get("propertyNames", {}).get("enum", [])
        return f"a mapping of {', '.join(keys)}"
    return {"boolean": "true, false"}.get(str(kind), "a text")
