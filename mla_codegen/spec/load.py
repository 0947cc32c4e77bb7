"""A spec file, loaded: read, checked, and able to say where in the file a later problem lies."""

import keyword
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import PurePath

from pydantic import ValidationError

from mla_codegen.spec import rules, wording
from mla_codegen.spec.datamodel import (
    Defaults,
    Dtypes,
    FloatDtype,
    KVDtype,
    Model,
    Settings,
    Shape,
    Spec,
    Splits,
    apply_optimizations,
)
from mla_codegen.spec.errors import Loc, Place, Problem, SpecError, quoted
from mla_codegen.spec.source import Source, parse_source, read_source
from mla_codegen.spec.tree import Flaw

__all__ = [
    "Defaults",
    "Dtypes",
    "FloatDtype",
    "KVDtype",
    "LoadedSpec",
    "Model",
    "Settings",
    "Shape",
    "Spec",
    "Splits",
    "apply_optimizations",
    "load_spec",
    "parse_spec",
]


@dataclass(frozen=True)
class LoadedSpec:
    """A checked spec and the text it came from. `file` is the path as the user gave it."""

    file: str
    spec: Spec
    source: Source

    def place(self, loc: Loc, at_key: bool = False) -> Place:
        """Line and column (from 1) of the value at `loc`, or of its key; of what is around it if it is not there."""
        return self.source.place(loc, at_key)

    def error(self, problems: Iterable[Problem]) -> SpecError:
        """A SpecError of `problems`, each at its place, in the order of the file."""
        return _error(self.source, [(problem, self.place(problem.loc, problem.at_key)) for problem in problems])


def load_spec(path: str | os.PathLike[str]) -> LoadedSpec:
    """Read, parse and check a spec file. Raises SpecError, and nothing else, for whatever is wrong with it."""
    return _check(read_source(path))


def parse_spec(text: str, file: str) -> LoadedSpec:
    """Check the text of a spec as if `file` held it: its stem names the spec. Raises SpecError."""
    return _check(parse_source(text, file))


def spec_name(file: str) -> str:
    """The name that a file's stem gives its spec: `mi300-x.yaml` is mi300_x. Raises SpecError if it is not one."""
    stem = PurePath(file).stem
    name = re.sub(r"[-. ]", "_", stem)
    reason = ""
    if not re.fullmatch(r"[A-Za-z0-9_]+", name):
        reason = "holds other characters than letters, digits, _ and -"
    elif not name.isidentifier():
        reason = "begins with a digit"
    elif keyword.iskeyword(name):
        reason = "is taken by Python"
    if reason:
        what = f"the file name {quoted(stem)} {reason}; it becomes the name of a Python package"
        near = re.sub(r"[^A-Za-z0-9_]+", "_", name).strip("_")
        raise SpecError(file, [Problem((), what, fix=f"rename the file, to spec_{near}.yaml say")], [None])
    return name


def _check(source: Source) -> LoadedSpec:
    name = spec_name(source.file)
    spec, typed = None, []
    try:
        spec = Spec.model_validate({**source.data, "name": name, **_as_spelled(source)})
    except ValidationError as error:
        typed = wording.problems_of(error, source)
    if "name" in source.data:
        typed.append(wording.unknown_key(("name",)))
    found = list(source.flaws)
    for stage in (typed, rules.problems_of(source)):
        found += _unsaid(stage, found, source)
    if found or spec is None:
        raise _error(source, found)
    return LoadedSpec(source.file, spec, source)


def _as_spelled(source: Source) -> dict[str, str]:
    """`triton` as it is written: 3.10 is a release, and no number."""
    node = source.node(("triton",))
    return {"triton": node.spelled} if node and type(node.value) in (int, float) else {}


def _unsaid(problems: list[Problem], found: list[Flaw], source: Source) -> list[Flaw]:
    """Those of `problems`, with their places, that do not merely follow from a problem found before."""
    flawed = {problem.loc for problem, _ in found}
    misread = {place for _, place in source.flaws}
    new = [(problem, source.place(problem.loc, problem.at_key)) for problem in problems]
    return [
        (problem, place)
        for problem, place in new
        if place not in misread and not any(problem.loc[:n] in flawed for n in range(1, len(problem.loc) + 1))
    ]


def _error(source: Source, found: Iterable[Flaw]) -> SpecError:
    unique = {(problem.what, place): (problem, place) for problem, place in found}
    ordered = sorted(unique.values(), key=lambda item: item[1] or (0, 0))
    return SpecError(source.file, [problem for problem, _ in ordered], [place for _, place in ordered])
