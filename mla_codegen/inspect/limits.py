"""Limits on what the compiler may make of a kernel, and the check that names what broke.

A limit is an upper bound, except those that end in `_at_least`. The names are listed by `limit_names()`.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mla_codegen.catalog.limits import AT_LEAST, CLASSES, TABLES, TOTALS, limit_names
from mla_codegen.inspect.report import Report


class LimitError(ValueError):
    """A limit that is not one: an unknown name, or a value that is no number."""


@dataclass(frozen=True)
class Broken:
    """A limit that a kernel does not keep. `value` is None where there was nothing to measure."""

    row: str
    limit: str
    value: float | None
    allowed: float

    def __str__(self) -> str:
        if self.value is None:
            return f"{self.row}: {self.limit} cannot be checked: the kernel has no hot loop"
        side = "at least" if self.limit.endswith("_at_least") else "at most"
        return f"{self.row}: {self.limit} is {self.value:g}, {side} {self.allowed:g} allowed"


def validate(limits: Mapping[str, Any]) -> None:
    """Raise LimitError for a name that does not exist (with the nearest that does) or a value that is no limit."""
    for name, value in limits.items():
        _known(name, limit_names(), "limits")
        if name not in TABLES:
            _number(name, value)
            continue
        if not isinstance(value, Mapping):
            raise LimitError(f"limits: {name} takes a table of classes ({{matrix: 36, valu: 240}}), not {value!r}")
        for inner, bound in value.items():
            _known(inner, CLASSES, f"limits: {name}")
            _number(f"{name}.{inner}", bound)


def check(report: Report, limits: Mapping[str, Any], *, row: str | None = None) -> list[Broken]:
    """The limits that this kernel breaks, in the order given; `row` names it in messages (default: the kernel)."""
    row = row or report.kernel
    return [Broken(row, name, value, allowed) for name, value, allowed, kept in judge(report, limits) if not kept]


def judge(report: Report, limits: Mapping[str, Any]) -> list[tuple[str, float | None, float, bool]]:
    """Each limit in the order given: its name, the kernel's value (None: nothing to measure), what is allowed, whether
    the kernel keeps it."""
    validate(limits)
    found: list[tuple[str, float | None, float, bool]] = []
    for name, allowed in limits.items():
        if name in TABLES:
            counts = _loop_counts(report, name)
            for inner, bound in allowed.items():
                count = None if counts is None else counts[inner]
                found.append((f"{name}.{inner}", count, bound, count is not None and count <= bound))
            continue
        value = _value(report, name)
        found.append((name, value, allowed, value >= allowed if name in AT_LEAST else value <= allowed))
    return found


def _loop_counts(report: Report, table: str) -> dict[str, float] | None:
    if report.hot is None:
        return None
    return report.hot.per_rows(64) if table == "hot_loop_per_64_rows" else report.hot.per_tile()


def _value(report: Report, name: str) -> float:
    if name in AT_LEAST:
        return float(getattr(report.occupancy, AT_LEAST[name]))
    if name in TOTALS:
        return report.totals[TOTALS[name]]
    return float(getattr(report, name))


def _known(name: str, names: list[str] | tuple[str, ...], where: str) -> None:
    if name in names:
        return
    near = difflib.get_close_matches(str(name), names, n=1, cutoff=0.5)
    hint = f"; did you mean {near[0]}?" if near else f"; known are {', '.join(names)}"
    raise LimitError(f"{where}: {name!r} is no limit{hint}")


def _number(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not value >= 0:
        raise LimitError(f"limits: {name} is {value!r}; a limit is a number, 0 or more")
