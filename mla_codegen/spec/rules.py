"""What a spec must obey beyond types: names that exist, options that the target has, nothing said twice.

The rules read the spec's plain data, not the validated model, so that they speak even where something else is wrong.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

from mla_codegen.catalog.optimizations import OPTIMIZATIONS
from mla_codegen.catalog.targets import TARGETS, Target, find_target
from mla_codegen.runtime.formats import KV_FORMATS
from mla_codegen.spec.datamodel import PAGE_SIZES, Settings, apply_optimizations, edits
from mla_codegen.spec.errors import Loc, Problem, did_you_mean, quoted, unknown_target
from mla_codegen.spec.source import Source
from mla_codegen.spec.tree import Node

MIN_PACKED_ROPE = 32  # packed_fp8 splits the rope columns over accumulators; MMA needs 16 of each
MOST = 1000  # breaches that are put into words


@dataclass(frozen=True)
class _Layer:
    """One mapping of settings. `chains`: the optimisations that it inherits, one list for each KV type it serves."""

    loc: Loc
    settings: dict[str, Any]
    chains: dict[str, list[str]]


def problems_of(source: Source) -> list[Problem]:
    """The breaches of the rules, the first thousand if there are more, in no particular order."""
    return list(islice(_breaches(source), MOST))


def _breaches(source: Source) -> Iterator[Problem]:
    data = source.data
    target = find_target(str(data.get("target")))
    yield from _empty_values(source.root, ())
    yield from _target(data)
    yield from _repeats(_list(_dict(data.get("dtypes")).get("kv")), ("dtypes", "kv"), source)
    yield from _duplicate_shapes(source)
    yield from _settings_of_one_shape(data)
    yield from _unused_per_kv(data)
    for layer in _layers(data):
        yield from _settings(layer, target)
        yield from _repeats(_list(layer.settings.get("optimizations")), (*layer.loc, "optimizations"), source)
        yield from _optimizations(layer, target)
    yield from _packed_rope(data)
    yield from _pages(data)
    yield from _lists(data)
    yield from _records(data)


def _dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _words(value: Any) -> list[str] | None:
    """The texts of a list; None if it is no list."""
    return [item for item in value if isinstance(item, str) and item] if isinstance(value, list) else None


def _kv(data: dict[str, Any]) -> list[str]:
    dtypes = _dict(data.get("dtypes"))
    return list(dict.fromkeys(_words(dtypes["kv"]) or [])) if "kv" in dtypes else ["bf16"]


def _empty_values(node: Node, loc: Loc) -> Iterator[Problem]:
    for step, child in node.children.items():
        here = (*loc, step)
        if child.value is None:
            what = f"{quoted(step)} has no value" if isinstance(step, str) else "this list entry is empty"
            yield Problem(here, what, fix="write one, or remove the line", at_key=True)
        else:
            yield from _empty_values(child, here)


def _target(data: dict[str, Any]) -> Iterator[Problem]:
    name = data.get("target")
    if isinstance(name, str) and find_target(name) is None:
        yield replace(unknown_target(name).problem, loc=("target",))


def _repeats(items: list[Any], loc: Loc, source: Source) -> Iterator[Problem]:
    """An entry that a list already has; `+x` repeats `-x`."""
    seen: dict[str, int] = {}
    for index, item in enumerate(items):
        if not isinstance(item, str):
            continue
        first = seen.setdefault(item.lstrip("+-"), index)
        if first != index:
            line = source.place((*loc, first))[0]
            what = f"{quoted(item)} repeats the {quoted(items[first])} of line {line}"
            yield Problem((*loc, index), what, fix="remove one of the two")


def _duplicate_shapes(source: Source) -> Iterator[Problem]:
    seen: dict[tuple[int, int, int], int] = {}
    topk = _dict(source.data.get("kv")).get("topk")
    for index, shape in enumerate(_list(source.data.get("shapes"))):
        given = {"kv_len": topk, "q_len": 1, **_dict(shape)}
        batch, kv_len, q_len = given.get("batch"), given["kv_len"], given["q_len"]
        if not isinstance(batch, int) or not isinstance(kv_len, int) or not isinstance(q_len, int):
            continue
        first = seen.setdefault((batch, q_len, kv_len), index)
        if first != index:
            line = source.place(("shapes", first))[0]
            tokens = f" q_len {q_len}," if q_len > 1 else ""
            length = f" kv_len {kv_len}" if "kv_len" in shape else f" topk {topk}"
            what = f"the shape batch {batch},{tokens}{length} is already on line {line}"
            yield Problem(("shapes", index), what, fix="remove one of the two")


def _settings_of_one_shape(data: dict[str, Any]) -> Iterator[Problem]:
    """In a batch-invariant spec all shapes share their kernels."""
    if data.get("batch_invariant") is not True:
        return
    for index, shape in enumerate(_list(data.get("shapes"))):
        for key in _dict(shape):
            if key in Settings.model_fields or key == "per_kv":
                what = f"{quoted(key)} for one shape: with `batch_invariant` one kernel serves every call"
                fix = "write it into `defaults`, or remove it"
                yield Problem(("shapes", index, key), what, "batch, q_len, kv_len", fix, at_key=True)


def _unused_per_kv(data: dict[str, Any]) -> Iterator[Problem]:
    kvs = _kv(data)
    if not set(kvs) <= set(KV_FORMATS):
        return  # a misspelt type would make its settings look unused
    owners: list[tuple[Loc, Any]] = [((name,), data.get(name)) for name in ("defaults", "limits")]
    owners += [(("shapes", i), shape) for i, shape in enumerate(_list(data.get("shapes")))]
    per_triton = _dict(_dict(data.get("limits")).get("per_triton"))
    owners += [(("limits", "per_triton", release), limits) for release, limits in per_triton.items()]
    for loc, owner in owners:
        for kv in _dict(_dict(owner).get("per_kv")):
            if kvs and kv not in kvs:
                what = f"settings for {quoted(kv)} KV, which `dtypes: kv` does not name"
                yield Problem((*loc, "per_kv", kv), what, ", ".join(kvs), "remove them, or add it to kv", at_key=True)


def _layers(data: dict[str, Any]) -> Iterator[_Layer]:
    """Every mapping of settings: defaults, what it says of one KV type, each shape, what that says of one KV type."""
    kvs = _kv(data)
    defaults = _dict(data.get("defaults"))
    yield _Layer(("defaults",), defaults, {})
    chains = {kv: apply_optimizations([], _words(defaults.get("optimizations"))) for kv in kvs}
    yield from _per_kv_layers(("defaults",), defaults, chains)
    chains = _after(defaults, chains)
    for index, shape in enumerate(_list(data.get("shapes"))):
        if isinstance(shape, dict):
            loc = ("shapes", index)
            yield _Layer(loc, shape, chains)
            entries = _words(shape.get("optimizations"))
            yield from _per_kv_layers(
                loc, shape, {kv: apply_optimizations(chain, entries) for kv, chain in chains.items()}
            )


def _per_kv_layers(loc: Loc, owner: dict[str, Any], chains: dict[str, list[str]]) -> Iterator[_Layer]:
    for kv, settings in _dict(owner.get("per_kv")).items():
        if isinstance(settings, dict):
            yield _Layer((*loc, "per_kv", kv), settings, {kv: chains.get(kv, [])})


def _after(owner: dict[str, Any], chains: dict[str, list[str]]) -> dict[str, list[str]]:
    per_kv = _dict(owner.get("per_kv"))
    return {
        kv: apply_optimizations(chain, _words(_dict(per_kv.get(kv)).get("optimizations")))
        for kv, chain in chains.items()
    }


def _settings(layer: _Layer, target: Target | None) -> Iterator[Problem]:
    if target is None:
        return
    waves = layer.settings.get("waves_per_eu")
    if isinstance(waves, int) and not target.waves_per_eu:
        takers = ", ".join(t.name for t in TARGETS.values() if t.waves_per_eu)
        what = f"`waves_per_eu` is a hint for AMD compilers; {target.name} has none"
        yield Problem((*layer.loc, "waves_per_eu"), what, f"on {takers} only", "remove it", at_key=True)
    family = layer.settings.get("family")
    if isinstance(family, str) and family not in target.families:
        what = f"the template family {quoted(family)} does not serve {target.name}"
        fix = did_you_mean(family, target.families)
        yield Problem((*layer.loc, "family"), what, ", ".join(target.families), fix)


def _optimizations(layer: _Layer, target: Target | None) -> Iterator[Problem]:
    entries = layer.settings.get("optimizations")
    changing = edits(_words(entries) or [])
    for index, entry in enumerate(_list(entries)):
        if not isinstance(entry, str):
            continue
        loc = (*layer.loc, "optimizations", index)
        sign, name = (entry[:1], entry[1:]) if entry[:1] in ("+", "-") else ("", entry)
        option = OPTIMIZATIONS.get(name)
        if option is None:
            fix = did_you_mean(name, OPTIMIZATIONS)
            yield Problem(loc, f"unknown optimization {quoted(name)}", ", ".join(OPTIMIZATIONS), fix)
        elif sign and not layer.chains:
            what = f"{quoted(entry)} changes an inherited list, and `defaults` inherits none"
            yield Problem(loc, what, fix=f"write {name}" if sign == "+" else "remove it")
        elif changing and not sign:
            what = f"{quoted(name)} stands among entries with + and -"
            fix = f"write +{name}, or the whole list without signs"
            yield Problem(loc, what, "either names (they replace the inherited list) or +name and -name", fix)
        elif sign == "-" and not any(name in chain for chain in layer.chains.values()):
            inherited = list(dict.fromkeys(name for chain in layer.chains.values() for name in chain))
            what = f"{quoted(entry)} removes what is not inherited here"
            yield Problem(loc, what, ", ".join("-" + name for name in inherited), "remove it")
        elif sign != "-" and target is not None and (reason := option.refused_on(target)):
            takers = ", ".join(t.name for t in TARGETS.values() if option.refused_on(t) is None)
            yield Problem(loc, f"{quoted(name)} is not for {target.name}: {reason}", f"on {takers}", "remove it")


def _packed_rope(data: dict[str, Any]) -> Iterator[Problem]:
    rope = _dict(data.get("model")).get("qk_rope_head_dim")
    if not isinstance(rope, int) or rope >= MIN_PACKED_ROPE or rope < 16:
        return
    for layer in _layers(data):
        entries = _words(layer.settings.get("optimizations"))
        for kv in layer.chains or _kv(data):
            if (
                kv in KV_FORMATS
                and KV_FORMATS[kv].fp8
                and "packed_fp8" in apply_optimizations(layer.chains.get(kv, []), entries)
            ):
                what = f"`qk_rope_head_dim` is {rope}; packed_fp8 needs {MIN_PACKED_ROPE} rope columns or more"
                fix = "take packed_fp8 out of the optimizations, or fp8 out of kv"
                yield Problem(("model", "qk_rope_head_dim"), what, "32, 64, 128, 256", fix)
                return


def _pages(data: dict[str, Any]) -> Iterator[Problem]:
    kv = _dict(data.get("kv"))
    layout, size = kv.get("layout", "ragged"), kv.get("page_size")
    if layout == "paged" and "page_size" not in kv:
        sizes = ", ".join(map(str, PAGE_SIZES))
        yield Problem(
            ("kv", "page_size"), "paged KV lacks `page_size`, the rows of a page", sizes, "add `page_size: 64`"
        )
    elif layout == "ragged" and size is not None:
        fix = "remove it, or write `layout: paged`"
        yield Problem(
            ("kv", "page_size"), "`page_size` is for paged KV, and this layout is ragged", fix=fix, at_key=True
        )


def _lists(data: dict[str, Any]) -> Iterator[Problem]:
    """What sparse KV needs, and what it has no use for."""
    kv = _dict(data.get("kv"))
    if kv.get("layout", "ragged") != "sparse":
        if "topk" in kv:
            what = f"`topk` is for sparse KV, and this layout is {kv.get('layout', 'ragged')}"
            yield Problem(("kv", "topk"), what, fix="remove it, or write `layout: sparse`", at_key=True)
        return
    if "topk" not in kv:
        what = "sparse KV lacks `topk`, the entries of a query token's list"
        yield Problem(("kv", "topk"), what, fix="add `topk: 2048`")
    in_blocks = [name for name in _kv(data) if name in KV_FORMATS and KV_FORMATS[name].blocks]
    if in_blocks and "page_size" not in kv:
        what = f"sparse KV of {in_blocks[0]} lacks `page_size`: a page is its rows and then their scales"
        yield Problem(("kv", "page_size"), what, ", ".join(map(str, PAGE_SIZES)), "add `page_size: 64`")
    elif "page_size" in kv and not in_blocks:
        what = "`page_size` says nothing of sparse KV: lists count the rows of the pool, whatever its pages"
        yield Problem(("kv", "page_size"), what, fix="remove it", at_key=True)
    for index, shape in enumerate(_list(data.get("shapes"))):
        for key, why in (
            ("kv_len", "`topk` of `kv` says how many KV rows a query token sees"),
            ("q_len", "every query token has a list of its own: count them all in `batch`"),
        ):
            if key in _dict(shape):
                what = f"{quoted(key)} in a shape of sparse KV: {why}"
                yield Problem(("shapes", index, key), what, fix="remove it", at_key=True)


def _records(data: dict[str, Any]) -> Iterator[Problem]:
    """Rows that a KV type has no form for; records in blocks that are not sparse; q that their columns would round."""
    model, dtypes = _dict(data.get("model")), _dict(data.get("dtypes"))
    latent, rope = model.get("kv_lora_rank", 512), model.get("qk_rope_head_dim", 64)
    for index, name in enumerate(_kv(data)):
        form = KV_FORMATS.get(name)
        if form is None or not isinstance(latent, int) or not isinstance(rope, int):
            continue
        if why := form.unfit(latent, rope):
            yield Problem(("model", "qk_rope_head_dim"), f"{name} KV of {latent} + {rope} columns: {why}")
        if form.blocks and _dict(data.get("kv")).get("layout", "ragged") != "sparse":
            what = f"{name} KV is read by lists alone"
            yield Problem(("dtypes", "kv", index), what, fix="write `kv: {layout: sparse, topk: 512, page_size: 64}`")
        if form.record and dtypes.get("q", "bf16") != "bf16":
            what = f"q is {dtypes['q']}, and {name} KV has bf16 columns"
            yield Problem(("dtypes", "q"), what, "bf16", "write `q: bf16`")
