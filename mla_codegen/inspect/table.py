"""Reports as tables for people and JSON for programs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from rich.table import Table
from rich.text import Text

from mla_codegen.inspect.model import Prediction
from mla_codegen.inspect.report import Report
from mla_codegen.inspect.run import Row

HOT_LOOP = {
    "matrix": "matrix",
    "transcendental": "trans",
    "valu": "valu",
    "conversion": "cvt",
    "select": "select",
    "lds_read": "LDS rd",
    "lds_write": "LDS wr",
    "global_load": "load",
    "async_copy": "async",
    "scratch": "scratch",
    "wait": "wait",
}
UNITS = {
    "matrix": "matrix",
    "vector": "vector",
    "transcendental": "trans",
    "lds": "LDS",
    "issue": "issue",
    "chain": "chain",
}
_SHOWN = 3  # hazards of a kernel that are spelled out
_FACTS = (
    ("registers", "registers (AGPRs included)"),
    ("agprs", "AGPRs"),
    ("sgprs", "SGPRs"),
    ("vgpr_spills", "vector registers spilled"),
    ("sgpr_spills", "scalar registers spilled"),
    ("scratch_bytes", "scratch bytes"),
    ("lds_bytes", "LDS / shared bytes"),
    ("code_bytes", "code bytes"),
)


def resource_table(rows: Sequence[Row], *, title: str = "Registers, memory, residency") -> Table:
    """One line a kernel: registers, spills, LDS, how many programs are resident and why, code size, compile time."""
    table = Table(title=title, title_justify="left")
    table.add_column("kernel", overflow="fold")
    for name in ("target", "triton"):
        table.add_column(name)
    for name in ("regs", "AGPR", "SGPR", "spills", "scratch", "LDS", "programs", "waves"):
        table.add_column(name, justify="right")
    table.add_column("limited by")
    table.add_column("code", justify="right")
    table.add_column("compile", justify="right")
    for row in rows:
        report = row.report
        if report is None:
            version = row.failure.triton if row.failure else ""
            table.add_row(row.case.label, row.case.job.arch, version, Text("failed", style="red"))
            continue
        held = report.occupancy
        table.add_row(
            Text(row.case.label, style="red" if row.broken else ""),
            report.arch,
            report.triton,
            str(report.registers),
            str(report.agprs),
            str(report.sgprs),
            Text(f"{report.vgpr_spills}", style="red" if report.vgpr_spills else ""),
            f"{report.scratch_bytes}",
            f"{report.lds_bytes}",
            str(held.programs),
            str(held.waves_per_simd),
            held.limited_by,
            f"{report.code_bytes}",
            f"{report.seconds:.1f} s",
        )
    return table


def violations(rows: Sequence[Row]) -> list[str]:
    """What is wrong, one text a fault: failed compilations with what the compiler said last, broken limits, hazards."""
    texts = []
    for row in rows:
        if row.failure is not None:
            said = "".join(f"\n    {line}" for line in row.failure.tail.splitlines())
            texts.append(f"{row.case.label}: {row.failure.reason}{said}")
        texts += [str(one) for one in row.broken] + hazard_texts(row)
    return texts


def hazard_texts(row: Row) -> list[str]:
    """The first few hazards of a kernel, and how many more there are."""
    found = row.report.hazards if row.report else ()
    texts = [f"{row.case.label}: {one}" for one in found[:_SHOWN]]
    if len(found) > _SHOWN:
        texts.append(f"{row.case.label}: and {len(found) - _SHOWN} more hazards")
    return texts


def hot_loop_table(rows: Sequence[Row], *, rows_of: int = 64) -> Table:
    """One line a kernel with a hot loop: where it is, and its counts for `rows_of` KV rows (for one tile where the rows
    of a tile are not known)."""
    table = Table(title=f"Hot loop, instructions of one wave for {rows_of} KV rows", title_justify="left")
    table.add_column("kernel", overflow="fold")
    table.add_column("loop, lines", overflow="fold")
    table.add_column("rows", justify="right")
    for head in HOT_LOOP.values():
        table.add_column(head, justify="right")
    for row in rows:
        if row.report is None or row.report.hot is None:
            continue
        hot = row.report.hot
        counts = hot.per_rows(rows_of) if hot.rows else hot.per_tile()
        where = f"{hot.label} {hot.lines[0]}-{hot.lines[1]}"
        table.add_row(row.case.label, where, str(hot.rows or "a turn"), *(_number(counts[name]) for name in HOT_LOOP))
    return table


def model_table(rows: Sequence[Row]) -> Table:
    """One line a predicted call: cycles of each unit a tile, which binds, time and percent of the roofline."""
    table = Table(title="Model (published rates, not a measurement)", title_justify="left")
    table.add_column("kernel", overflow="fold")
    for head in (*UNITS.values(), "compute us", "HBM us", "predicted us", "% roofline"):
        table.add_column(head, justify="right")
    table.add_column("binds")
    for row in rows:
        guess = row.prediction
        if guess is None:
            continue
        times = (f"{1e6 * value:.1f}" for value in (guess.compute_s, guess.hbm_s, guess.seconds))
        cycles = (f"{guess.cycles[name]:.0f}" for name in UNITS)
        table.add_row(row.case.label, *cycles, *times, f"{guess.percent_of_roofline:.0f}", guess.binds)
    return table


def versus_table(ours: Report, theirs: Report, *, names: tuple[str, str] = ("ours", "theirs")) -> Table:
    """Two kernels side by side: resources, residency and hot loop, with theirs divided by ours."""
    table = Table(title=f"{names[0]} against {names[1]}, {ours.arch}", title_justify="left")
    table.add_column("")
    table.add_column(names[0], justify="right")
    table.add_column(names[1], justify="right")
    table.add_column("ratio", justify="right")
    for key, title in _FACTS:
        _compare(table, title, getattr(ours, key), getattr(theirs, key))
    _compare(table, "resident programs", ours.occupancy.programs, theirs.occupancy.programs)
    _compare(table, "compile seconds", ours.seconds, theirs.seconds)
    if ours.hot is None or theirs.hot is None:
        return table
    table.add_section()
    by_rows = bool(ours.hot.rows and theirs.hot.rows)
    mine = ours.hot.per_rows(64) if by_rows else ours.hot.per_tile()
    other = theirs.hot.per_rows(64) if by_rows else theirs.hot.per_tile()
    unit = "64 KV rows" if by_rows else "a tile"
    for name, value in mine.items():
        if value or other[name]:
            _compare(table, f"{name} / {unit}", value, other[name])
    return table


def _compare(table: Table, title: str, mine: float, other: float) -> None:
    ratio = f"{other / mine:.2f}" if mine else ("-" if other else "")
    table.add_row(title, _number(mine), _number(other), ratio)


def _number(value: float) -> str:
    return f"{value:.0f}" if float(value).is_integer() else f"{value:.1f}"


def as_dict(row: Row) -> dict[str, Any]:
    """A row as plain data: label, job (without its source text), report or failure, broken limits, prediction."""
    job = row.case.job.as_dict()
    job.pop("source")
    failure, guess = row.failure, row.prediction
    return {
        "label": row.case.label,
        "ok": row.ok,
        "job": job,
        "report": row.report.as_dict() if row.report else None,
        "failure": {"reason": failure.reason, "tail": failure.tail, "triton": failure.triton} if failure else None,
        "broken": [
            {"limit": one.limit, "value": one.value, "allowed": one.allowed, "text": str(one)} for one in row.broken
        ],
        "model": _model_dict(guess) if guess else None,
        "model_note": row.model_note,
    }


def _model_dict(guess: Prediction) -> dict[str, Any]:
    return {
        "cycles_per_tile": dict(guess.cycles),
        "resident_programs": guess.resident,
        "compute_us": 1e6 * guess.compute_s,
        "hbm_us": 1e6 * guess.hbm_s,
        "hbm_bytes": guess.hbm_bytes,
        "predicted_us": 1e6 * guess.seconds,
        "percent_of_roofline": guess.percent_of_roofline,
        "binds": guess.binds,
    }


def to_json(rows: Sequence[Row]) -> str:
    """All rows as one JSON text, keys sorted."""
    return json.dumps([as_dict(row) for row in rows], indent=2, sort_keys=True)
