"""YAML events -> a tree of values that remember their places.

Built from the parser's events rather than its nodes, so that nesting, aliases, tags and spellings are judged while
they are read: a hostile file is refused before it costs anything. Scalars are read more strictly than YAML 1.1 does: a
number is decimal digits, because `010`, `1_000` and `1:30` mean different numbers to different readers.
"""

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import yaml

from mla_codegen.spec.errors import Loc, Place, Problem, quoted

MAX_DEPTH = 20
MAX_VALUES = 20_000  # aliases counted at every use: nested aliases would otherwise grow without bound

Value = str | int | float | bool | None | list["Value"] | dict[str, "Value"]
Flaw = tuple[Problem, Place | None]


@dataclass(slots=True)
class Node:
    """One value. `place` is where this use of it begins (for an alias, the alias); `spelled` is a scalar's own text."""

    place: Place
    value: Value
    children: dict[str | int, "Node"] = field(default_factory=dict)
    keys: dict[str, Place] = field(default_factory=dict)
    spelled: str = ""
    weight: int = 1


class Unreadable(Exception):
    """A flaw that ends the reading of a file."""

    def __init__(self, problem: Problem, place: Place | None):
        self.flaw = (problem, place)
        super().__init__(problem.what)


_NUMBER = re.compile(r"[-+]?(0|[1-9][0-9]{0,99})")
_DECIMAL = re.compile(r"[-+]?([0-9]+\.[0-9]*|\.[0-9]+)")
_NULLS = {"", "~", "null", "Null", "NULL"}
_TRUTHS = dict.fromkeys(("true", "True", "TRUE", "yes", "Yes", "YES", "on", "On", "ON"), True)
_TRUTHS |= dict.fromkeys(("false", "False", "FALSE", "no", "No", "NO", "off", "Off", "OFF"), False)
# Spellings on which YAML 1.1, YAML 1.2 and plain sense disagree: pattern, what it is, the number it stands for
_ODD: tuple[tuple[re.Pattern[str], str, Callable[[str], int | float]], ...] = (
    (re.compile(r"0o?[0-7]*"), "octal", lambda t: int(t.replace("o", ""), 8)),
    (re.compile(r"0x[0-9a-fA-F]+"), "hexadecimal", lambda t: int(t, 16)),
    (re.compile(r"0b[01]+"), "binary", lambda t: int(t, 2)),
    (re.compile(r"[0-9]+(:[0-5]?[0-9])+"), "base 60", lambda t: _sixty(t)),
    (re.compile(r"0[0-9]+"), "leading zeros", int),
    (re.compile(r"[0-9]+([_,][0-9]+)+"), "digits in groups", lambda t: int(re.sub("[_,]", "", t))),
    (re.compile(r"([0-9]+\.?[0-9]*|\.[0-9]+)[eE][-+]?[0-9]{1,3}"), "an exponent", lambda t: _whole(float(t))),
)


def _sixty(text: str) -> int:
    total = 0
    for part in text.split(":"):
        total = total * 60 + int(part)
    return total


def _whole(number: float) -> int | float:
    return int(number) if number.is_integer() else number


class TreeBuilder:
    """Reads one document. `flaws` collects what is wrong but does not stop the reading."""

    def __init__(self, text: str):
        self.flaws: list[Flaw] = []
        self.open: list[Place] = []  # the brackets and braces around the place being read
        # Not by libyaml, whose words for what is wrong differ.
        self._events: Iterator[yaml.Event] = yaml.parse(text, Loader=yaml.SafeLoader)
        self._anchors: dict[str, Node | None] = {}  # None while the anchored value itself is being read
        self._weight = 0

    def document(self) -> Node | None:
        """The only document of the text, or None if it holds nothing. Raises Unreadable or yaml.YAMLError."""
        root = None
        for event in self._events:
            if isinstance(event, yaml.DocumentStartEvent):
                if root is not None:
                    raise Unreadable(
                        Problem((), "a second YAML document begins here", fix="write one spec in one file"),
                        _place(event),
                    )
                root = self._node(next(self._events), ())
        return root

    def _node(self, event: yaml.Event, loc: Loc) -> Node:
        if isinstance(event, yaml.AliasEvent):
            return self._alias(event, loc)
        place = _place(event)
        assert isinstance(event, yaml.ScalarEvent | yaml.CollectionStartEvent)
        if event.tag is not None:
            tag = event.tag.replace("tag:yaml.org,2002:", "!!")
            self._flaw(loc, f"the tag {quoted(tag)} has no meaning in a spec", place, fix="remove the tag")
        if len(self.open) >= MAX_DEPTH:
            raise Unreadable(Problem(loc, f"nested more than {MAX_DEPTH} levels deep"), place)
        self._count(1, loc, place)
        if event.anchor is not None:
            self._anchors[event.anchor] = None
        if isinstance(event, yaml.ScalarEvent):
            node = self._scalar(event, loc, place)
        else:
            self.open.append(place)
            node = (
                self._sequence(loc, place) if isinstance(event, yaml.SequenceStartEvent) else self._mapping(loc, place)
            )
            self.open.pop()
        if event.anchor is not None:
            self._anchors[event.anchor] = node
        return node

    def _alias(self, event: yaml.AliasEvent, loc: Loc) -> Node:
        place = _place(event)
        name = event.anchor or ""
        target = self._anchors.get(name)
        if target is None:
            what = "stands inside its own anchor" if name in self._anchors else f"has no anchor `&{name}` before it"
            self._flaw(loc, f"the alias {quoted('*' + name)} {what}", place)
            return Node(place, None)
        self._count(target.weight, loc, place)
        return Node(place, target.value, target.children, target.keys, target.spelled, target.weight)

    def _count(self, values: int, loc: Loc, place: Place) -> None:
        self._weight += values
        if self._weight > MAX_VALUES:
            what = f"the spec holds more than {MAX_VALUES:,} values (an alias counts as what it stands for)"
            raise Unreadable(Problem(loc, what), place)

    def _sequence(self, loc: Loc, place: Place) -> Node:
        values: list[Value] = []
        node = Node(place, values)
        before = self._weight
        while not isinstance(event := next(self._events), yaml.SequenceEndEvent):
            child = self._node(event, (*loc, len(values)))
            node.children[len(values)] = child
            values.append(child.value)
        node.weight += self._weight - before
        return node

    def _mapping(self, loc: Loc, place: Place) -> Node:
        values: dict[str, Value] = {}
        node = Node(place, values)
        merged: list[Node] = []
        before = self._weight
        while not isinstance(event := next(self._events), yaml.MappingEndEvent):
            at = _place(event)
            if not isinstance(event, yaml.ScalarEvent):
                self._flaw(
                    loc,
                    "a key must be a single word",
                    at,
                    fix="put text that holds { } [ ] * in quotes; a spec is no template",
                )
                self._node(event, (*loc, "?"))
                self._node(next(self._events), (*loc, "?"))
                continue
            key = event.value
            child_loc = (*loc, key)
            child = self._node(next(self._events), child_loc)
            if key == "<<" and event.implicit[0]:
                merged += self._merge_sources(child, child_loc)
            elif key in values:
                what = f"the key {quoted(key)} is given twice; the first is on line {node.keys[key][0]}"
                self._flaw(child_loc, what, at, fix="remove one of the two")
            else:
                values[key], node.children[key], node.keys[key] = child.value, child, at
        for source in merged:
            for name, child in source.children.items():
                if name not in values and isinstance(name, str):
                    values[name], node.children[name], node.keys[name] = child.value, child, source.keys[name]
        node.weight += self._weight - before
        return node

    def _merge_sources(self, node: Node, loc: Loc) -> list[Node]:
        """The mappings that `<<` names, the strongest first."""
        sources = list(node.children.values()) if isinstance(node.value, list) else [node]
        for source in sources:
            if not isinstance(source.value, dict):
                self._flaw(loc, "`<<` takes a mapping, or a list of mappings", source.place)
        return [source for source in sources if isinstance(source.value, dict)]

    def _scalar(self, event: yaml.ScalarEvent, loc: Loc, place: Place) -> Node:
        text = event.value
        if event.style or event.tag is not None:  # quoted, or a block of text
            return Node(place, text, spelled=text)
        if text in _NULLS:
            return Node(place, None)
        if text in _TRUTHS:
            return Node(place, _TRUTHS[text], spelled=text)
        if _NUMBER.fullmatch(text):
            return Node(place, int(text), spelled=text)
        if _DECIMAL.fullmatch(text) and len(text) <= 100:
            return Node(place, float(text), spelled=text)
        if (odd := _odd_number(text)) is not None:
            kind, number = odd
            what = f"{quoted(text)} is an unusual spelling of {number} ({kind}), which YAML readers take differently"
            plain = text.lstrip("+-0o")
            octal = kind == "octal" and plain and plain != str(abs(number))
            self._flaw(loc, what, place, f"write {number}" + (f", or {plain} if that is meant" if octal else ""))
            return Node(place, number, spelled=text)
        return Node(place, text, spelled=text)

    def _flaw(self, loc: Loc, what: str, place: Place, fix: str = "") -> None:
        self.flaws.append((Problem(loc, what, fix=fix), place))


def _odd_number(text: str) -> tuple[str, int | float] | None:
    """What is odd about a number's spelling, and the number that is most likely meant; None if `text` is no number."""
    sign, digits = (text[0], text[1:]) if text[0] in "+-" else ("", text)
    for pattern, kind, number in _ODD:
        if len(digits) <= 100 and pattern.fullmatch(digits):
            value = number(digits)
            return (kind, -value if sign == "-" else value) if math.isfinite(value) else None
    return None


def _place(event: yaml.Event) -> Place:
    mark = event.start_mark
    assert mark is not None  # a parser's events all have one
    return mark.line + 1, mark.column + 1
