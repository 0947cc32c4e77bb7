"""Tuned settings written into a spec's text: only the shapes' own lines change, comments and order stay.

ruamel.yaml writes the changed shape; its lines are then put in the place of the old ones, so that the rest of the file
keeps every byte whatever ruamel.yaml would make of it.
"""

import io
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import yaml

from mla_codegen.measure.tune.settings import Overrides, for_shape
from mla_codegen.spec.datamodel import spell

PROVENANCE = re.compile(r"# tuned (?P<kv>\S+) on (?P<where>.+?) \((?P<day>[\d-]+)\):(?P<shapes>( \d+(x\d+){1,2})+)\s*$")
ORDER = (
    "batch",
    "q_len",
    "kv_len",
    "family",
    "splits",
    "block_n",
    "block_h",
    "num_warps",
    "num_stages",
    "waves_per_eu",
    "column_blocks",
)


class EditError(Exception):
    """The file cannot be edited line by line; `str()` says why."""


@dataclass(frozen=True)
class Tuned:
    """One shape's winners: for each KV dtype that has one, the settings that it needs."""

    batch: int
    kv_len: int
    per_kv: Mapping[str, Overrides]
    q_len: int = 1

    @property
    def shape(self) -> str:
        return spell(self.batch, self.kv_len, self.q_len)


def edit(text: str, winners: list[Tuned], kvs: list[str], where: str, day: str) -> str:
    """The text with the winners' settings in it, and above `shapes:` a line that says where each dtype's came from.

    kvs          the spec's KV dtypes, the preferred one first
    where, day   device and Triton release, and the date, for that line
    """
    for winner in winners:
        text = _edit_shape(text, winner, kvs)
    return _note(text, winners, where, day)


def _edit_shape(text: str, winner: Tuned, kvs: list[str]) -> str:
    node = _node_of(text, winner)
    first, last, column = node.start_mark.line, _last_line(node), node.start_mark.column
    lines = text.split("\n")
    own = [_less(line.rstrip("\r"), column) for line in lines[first + 1 : last + 1]]
    written = _changed("\n".join([lines[first].rstrip("\r")[column:], *own]) + "\n", node, winner, kvs)
    ending = "\r" if "\r\n" in text else ""
    prefixes = [lines[first][:column], *[" " * column] * (len(written) - 1)]
    new = [(prefix + line).rstrip() + ending for prefix, line in zip(prefixes, written, strict=True)]
    return "\n".join([*lines[:first], *new, *lines[last + 1 :]])


def _changed(shape_text: str, node: Any, winner: Tuned, kvs: list[str]) -> list[str]:
    """The lines of one shape, moved to the left margin, with the winners' settings in them."""
    from ruamel.yaml import YAML
    from ruamel.yaml.comments import CommentedMap
    from ruamel.yaml.error import YAMLError

    ruamel = YAML()
    ruamel.preserve_quotes = True
    ruamel.width = 1 << 20
    ruamel.indent(**_indents(node))
    try:
        shape = ruamel.load(shape_text)
    except YAMLError as error:
        raise EditError(f"the lines of the shape {winner.shape} mean nothing without others (an anchor?)") from error
    common, single = for_shape(winner.per_kv, kvs)
    for knob, value in common.items():
        _put(shape, knob, value)
    said = shape.get("per_kv", {})
    for kv in list(said):
        for knob in common.keys() & said[kv].keys() - single.get(kv, {}).keys():
            del said[kv][knob]  # the shape says it now
        if not said[kv] and kv not in single:
            del said[kv]
    if single and "per_kv" not in shape:
        _put(shape, "per_kv", CommentedMap())
        shape["per_kv"].fa.set_flow_style()
        said = shape["per_kv"]
    for kv, settings in single.items():
        if kv not in said:
            said[kv] = CommentedMap()
            said[kv].fa.set_flow_style()
        for knob, value in settings.items():
            _put(said[kv], knob, value)
    if "per_kv" in shape and not said:
        del shape["per_kv"]
    stream = io.StringIO()
    ruamel.dump(shape, stream)
    return stream.getvalue().rstrip("\n").split("\n")


def _less(line: str, column: int) -> str:
    """A line moved to the left by up to `column` blanks."""
    return line[min(column, len(line) - len(line.lstrip())) :]


def _indents(node: Any) -> dict[str, int]:
    """How the file indents what lies inside a shape."""
    found = {"mapping": 2, "sequence": 4, "offset": 2}
    for key, value in node.value:
        inside = value.start_mark.column - key.start_mark.column
        if isinstance(value, yaml.MappingNode) and not value.flow_style and inside > 0:
            found["mapping"] = inside
        elif isinstance(value, yaml.SequenceNode) and not value.flow_style and value.value and inside >= 0:
            found["offset"] = inside
            found["sequence"] = value.value[0].start_mark.column - key.start_mark.column
    return found


def _put(mapping: Any, knob: str, value: Any) -> None:
    """Set a key; a new one goes where people would look for it, before per_kv and optimizations at any rate."""
    if knob in mapping:
        mapping[knob] = value
        return
    rank = ORDER.index(knob) if knob in ORDER else len(ORDER)
    for place, name in enumerate(mapping):
        later = ORDER.index(name) > rank if name in ORDER else name in ("per_kv", "optimizations")
        if later:
            mapping.insert(place, knob, value)
            return
    mapping[knob] = value


def _node_of(text: str, winner: Tuned) -> Any:
    """The shape's node in the text, on lines of its own."""
    root: Any = yaml.compose(text)
    shapes = next((value for key, value in root.value if key.value == "shapes"), None)
    if shapes is None or shapes.flow_style:
        raise EditError("`shapes` is no list with a line for each shape")
    found = None
    for index, item in enumerate(shapes.value):
        said = {key.value: value.value for key, value in item.value if isinstance(value, yaml.ScalarNode)}
        named = (said.get("batch"), said.get("kv_len"), said.get("q_len", "1"))
        if named == (str(winner.batch), str(winner.kv_len), str(winner.q_len)):
            found = index
    if found is None:
        raise EditError(f"the shape {winner.shape} is not written out in one place")
    if shapes.value[found].start_mark.index < shapes.start_mark.index:
        raise EditError(f"the shape {winner.shape} is written in another place, under an anchor")
    return shapes.value[found]


def _last_line(node: Any) -> int:
    """The line of a node's last value: a block's own end mark is where the next thing begins."""
    if isinstance(node, yaml.MappingNode) and not node.flow_style and node.value:
        aliased = (value.start_mark.index < key.start_mark.index for key, value in node.value)  # it stands elsewhere
        pairs = zip(node.value, aliased, strict=True)
        return max(int(key.end_mark.line) if far else _last_line(value) for (key, value), far in pairs)
    if isinstance(node, yaml.SequenceNode) and not node.flow_style and node.value:
        return max(_last_line(value) for value in node.value)
    return int(node.end_mark.line)


def _note(text: str, winners: list[Tuned], where: str, day: str) -> str:
    """Renew the lines that say where settings came from. A shape that is tuned anew leaves its old line."""
    lines = text.split("\n")
    ending = "\r" if "\r\n" in text else ""
    at = next(index for index, line in enumerate(lines) if re.match(r"['\"]?shapes['\"]?\s*:", line))
    first = at
    while first > 0 and PROVENANCE.match(lines[first - 1]):
        first -= 1
    said: dict[tuple[str, str, str], list[str]] = {}
    for line in lines[first:at]:
        match = PROVENANCE.match(line)
        if match:
            said[match["kv"], match["where"], match["day"]] = match["shapes"].split()
    for winner in winners:
        for kv in winner.per_kv:
            for (other, _, _), shapes in said.items():
                if other == kv and winner.shape in shapes:
                    shapes.remove(winner.shape)
            said.setdefault((kv, where, day), []).append(winner.shape)
    notes = [
        f"# tuned {kv} on {on} ({when}): {' '.join(shapes)}{ending}"
        for (kv, on, when), shapes in said.items()
        if shapes
    ]
    return "\n".join([*lines[:first], *notes, *lines[at:]])
