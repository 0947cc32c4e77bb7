"""A spec as a file: its bytes read with care, its text as a tree of values, and the line and column of each."""

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import yaml

from mla_codegen.spec.errors import Loc, Place, Problem, SpecError, did_you_mean
from mla_codegen.spec.syntax import syntax_flaw
from mla_codegen.spec.tree import Flaw, Node, TreeBuilder, Unreadable, Value

MAX_BYTES = 50_000

START = "`mla-codegen init --model deepseek-v3 --target sm_90` writes a spec to start from"
_UNPRINTABLE = re.compile("[^\t\n\r\x20-\x7e\x85\xa0-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


@dataclass(frozen=True)
class Source:
    """A spec's text, read. `flaws` are what is wrong with the text alone; the tree is complete in spite of them."""

    file: str
    root: Node
    flaws: list[Flaw]

    @property
    def data(self) -> dict[str, Value]:
        """What the text says, as plain dicts, lists and scalars."""
        return cast(dict[str, Value], self.root.value)

    def node(self, loc: Loc) -> Node | None:
        """The value at `loc`, or None if the text has none there."""
        node: Node | None = self.root
        for step in loc:
            node = node.children.get(step) if node else None
        return node

    def place(self, loc: Loc, at_key: bool = False) -> Place:
        """Line and column of the value at `loc`, or of its key; of the nearest value around it if it is not there."""
        node = self.root
        for depth, step in enumerate(loc):
            if at_key and depth == len(loc) - 1 and step in node.keys:
                return node.keys[str(step)]
            if step not in node.children:
                break
            node = node.children[step]
        return node.place


def read_source(path: str | os.PathLike[str]) -> Source:
    """Read a spec file. Raises SpecError for whatever keeps it from being a YAML mapping."""
    file = os.fspath(path)
    return parse_source(_decode(file, _read(Path(path), file)), file)


def parse_source(text: str, file: str) -> Source:
    """Read the text of a spec; `file` is what messages call it. Raises SpecError as read_source does."""
    if bad := _UNPRINTABLE.search(text):
        what = f"the character {bad.group().encode('unicode_escape').decode()} has no place in YAML text"
        raise _error(
            file, Problem((), what, fix="is this the right file? Remove the character"), _at(text, bad.start())
        )
    builder = TreeBuilder(text)
    try:
        root = builder.document()
    except Unreadable as stop:
        raise _joined(file, [*builder.flaws, stop.flaw]) from None
    except yaml.YAMLError as error:
        raise _joined(file, [*builder.flaws, syntax_flaw(error, text, builder.open)]) from None
    if root is None or root.value is None:
        what = "the file holds only comments" if "#" in text else "the file is empty"
        raise _error(file, Problem((), what, fix=START), (1, 1))
    if not isinstance(root.value, dict):
        kind = "a list" if isinstance(root.value, list) else "a single value"
        what = f"a spec is a mapping (`target: ...`, `shapes: ...`); this is {kind}"
        raise _error(file, Problem((), what, fix=START), root.place)
    return Source(file, root, builder.flaws)


def _read(path: Path, file: str) -> bytes:
    try:
        if path.is_dir():
            near = sorted(entry.name for entry in path.glob("*.y*ml"))
            what = "this is a directory, not a spec"
            raise _error(file, Problem((), what, fix=f"name one of its files: {', '.join(near[:8])}" if near else ""))
        with path.open("rb") as stream:
            content = stream.read(MAX_BYTES + 1)
    except FileNotFoundError:
        raise _error(file, Problem((), "no such file", fix=_near_file(path))) from None
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        reason = getattr(error, "strerror", None) or str(error)
        raise _error(file, Problem((), f"cannot be read: {reason.lower()}")) from None
    if len(content) > MAX_BYTES:
        what = f"the file is larger than {MAX_BYTES:,} bytes, the most that a spec may have"
        raise _error(file, Problem((), what, fix="is this the right file?"))
    return content


def _near_file(path: Path) -> str:
    try:
        return did_you_mean(
            path.name, (entry.name for entry in path.parent.iterdir() if entry.suffix in (".yaml", ".yml"))
        )
    except (OSError, ValueError):
        return ""


def _decode(file: str, content: bytes) -> str:
    if content.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise _error(file, Problem((), "the text is UTF-16", allowed="UTF-8", fix="save it as UTF-8"), (1, 1))
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        before = content[: error.start].decode("utf-8-sig", errors="replace")
        kind = "the file is binary, not text" if b"\x00" in content else "the text is not UTF-8"
        what = f"{kind}: byte 0x{content[error.start]:02x} at offset {error.start}"
        raise _error(file, Problem((), what, allowed="UTF-8", fix=""), _at(before, len(before))) from None


def _at(text: str, index: int) -> Place:
    lines = re.split("\r\n|\r|\n", text[:index])
    return len(lines), len(lines[-1]) + 1


def _error(file: str, problem: Problem, place: Place | None = None) -> SpecError:
    return SpecError(file, [problem], [place])


def _joined(file: str, flaws: list[Flaw]) -> SpecError:
    return SpecError(file, [problem for problem, _ in flaws], [place for _, place in flaws])
