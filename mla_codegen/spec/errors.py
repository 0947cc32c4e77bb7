"""What can be wrong with a user's input, said in one form: where, what, what is allowed, and how to mend it."""

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import takewhile

from mla_codegen.catalog.targets import TARGETS, architecture_without_target

Loc = tuple[str | int, ...]
Place = tuple[int, int]  # line, column; both from 1

SHOWN = 20  # a broken file repeats itself: mending the first few faults usually mends the rest


@dataclass(frozen=True)
class Problem:
    """One fault in a spec. `loc` is the path of keys and list indices to the value (or to the key, if `at_key`)."""

    loc: Loc
    what: str
    allowed: str = ""
    fix: str = ""
    at_key: bool = False

    def lines(self) -> list[str]:
        """What is wrong, and beneath it what is allowed and how to mend it, where there is something to say."""
        lines = [self.what]
        if self.allowed:
            lines.append(f"  allowed: {self.allowed}")
        if self.fix:
            lines.append(f"  fix: {self.fix}")
        return lines


class SpecError(Exception):
    """A spec that cannot be built. `str()` is the whole message, ready for a terminal.

    file       the spec as the user named it
    problems   in the order of the file
    places     (line, column), 1-based, of each problem; None where it concerns the file as a whole
    """

    def __init__(self, file: str, problems: Sequence[Problem], places: Sequence[Place | None]):
        self.file = printable(file)
        self.problems = list(problems)
        self.places = list(places)
        super().__init__("\n".join(self._lines()))

    def _lines(self) -> list[str]:
        lines = []
        for problem, place in list(zip(self.problems, self.places, strict=True))[:SHOWN]:
            where = f"{self.file}:{place[0]}:{place[1]}" if place else self.file
            first, *rest = problem.lines()
            lines += [f"{where}: {first}", *rest]
        if len(self.problems) > SHOWN:
            lines.append(f"{self.file}: more than {SHOWN} problems; these are the first")
        return lines


class UnknownName(ValueError):
    """A name given on the command line that is none of those known. `str()` is ready for a terminal."""

    def __init__(self, kind: str, name: str, known: Iterable[str], allowed: str = "", fix: str = ""):
        names = list(known)
        what, fix = f"unknown {kind} {quoted(name)}", fix or did_you_mean(name, names)
        self.problem = Problem((), what, allowed or ", ".join(names), fix)
        super().__init__("\n".join(self.problem.lines()))


def unknown_target(name: str) -> UnknownName:
    """What is said of a target that is neither one of ours nor a GPU that one of them stands for."""
    arch = architecture_without_target(name)
    fix = f"{printable(name)} is {arch}, which has no target of its own: `portable` runs on any GPU" if arch else ""
    known = [*TARGETS, *(gpu for target in TARGETS.values() for gpu in target.gpus)]
    allowed = f"{', '.join(TARGETS)}, or the name of a GPU (`mla-codegen list targets`)"
    return UnknownName("target", name, known, allowed, fix)


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """`did you mean `x`?`, or nothing if no known word comes near."""
    lowered = {name.lower(): name for name in known}
    typed = word.lower()[:80]

    def likeness(name: str) -> float:
        same = list(takewhile(lambda pair: pair[0] == pair[1], zip(typed, name, strict=False)))
        return difflib.SequenceMatcher(None, typed, name).ratio() + 0.1 * len(same) / len(typed)

    near = difflib.get_close_matches(typed, lowered, n=3, cutoff=0.6)
    near = near or [name for name in lowered if len(typed) > 1 and name.startswith(typed)]
    return f"did you mean `{lowered[max(near, key=likeness)]}`?" if near else ""


def quoted(text: str) -> str:
    """A word of the user's in backticks: on one line, printable and short, whatever it held."""
    short = printable(text)
    return f"`{short if len(short) <= 60 else short[:57] + '...'}`"


def printable(text: str) -> str:
    """`text` with control characters and lone surrogates escaped, so that a terminal shows and survives it."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)
