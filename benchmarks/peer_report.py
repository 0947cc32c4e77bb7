"""What was found, as a table for the terminal and as Markdown for a page. Reads the JSON that the benchmark writes."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from mla_codegen.measure.timing import geometric_mean

Row = dict[str, Any]
COLUMNS = (
    ("KV", "left"), ("heads", "right"), ("shape", "left"), ("", "left"), ("graph us", "right"), ("ten us", "right"),
    ("eager us", "right"), ("host us", "right"), ("peer/ours", "right"), ("ten", "right"), ("eager", "right"),
    ("TB/s", "right"), ("of read", "right"), ("error", "right"), ("", "left"),
)  # fmt: skip
BEGIN, END = "\n<!-- results -->\n", "\n<!-- end -->\n"  # of a page that holds the tables
NOTES = 60  # letters of a reason that a table line has room for


def median(timing: Row | None, kind: str) -> float | None:
    """Microseconds; None if it was not timed, or is wrong."""
    return timing[kind]["median"] if timing and timing["right"] and timing[kind] else None


def timing_of(row: Row, name: str) -> Row | None:
    return next((timing for timing in row["timings"] if timing["name"] == name), None)


def ratio(row: Row, name: str, kind: str) -> float | None:
    """The peer's time over ours."""
    ours, theirs = median(row["timings"][0], kind), median(timing_of(row, name), kind)
    return theirs / ours if ours and theirs else None


def ratios(rows: Sequence[Row], name: str, kind: str) -> list[float]:
    return [found for row in rows if (found := ratio(row, name, kind)) is not None]


def means(found: Row) -> list[Row]:
    """Geometric means of the ratios, for each KV type, count of heads and peer, over the shapes that both did right."""
    result = []
    for kv, heads in dict.fromkeys((row["kv"], row["heads"]) for row in found["rows"]):
        rows = [row for row in found["rows"] if (row["kv"], row["heads"]) == (kv, heads)]
        for name in dict.fromkeys(timing["name"] for row in rows for timing in row["timings"][1:]):
            every = {kind: ratios(rows, name, kind) for kind in ("graph", "ten", "eager")}
            kinds = {kind: geometric_mean(of) for kind, of in every.items()}
            least = min(every["graph"], default=float("nan"))
            result.append(
                {"kv": kv, "heads": heads, "name": name, "shapes": len(every["graph"]), **kinds, "least": least}
            )
    return result


def show(found: Row) -> None:
    """The table, the ceiling that its percentages are of, and the means."""
    console = Console(width=170, highlight=False)
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for title, justify in COLUMNS:
        table.add_column(title, justify=justify, no_wrap=True)  # type: ignore[arg-type]
    for row in found["rows"]:
        for index, timing in enumerate(row["timings"]):
            table.add_row(*_cells(found, row, index, timing))
    console.print(table)
    console.print(
        f"{found['device']}, torch {found['torch']}, triton {found['triton']}; read in this run "
        f"{found['read_tb_s']:.2f} TB/s; medians of {found['rounds']}; a kernel that does next to nothing takes "
        f"{found['least_us']['graph']:.1f} us graph, {found['least_us']['ten']:.1f} ten"
    )
    for mean in means(found):
        if mean["shapes"]:
            console.print(
                f"{mean['kv']}, {mean['heads']} heads: {mean['name']} over ours, geometric mean of {mean['shapes']} "
                f"shapes: {mean['graph']:.2f} graph, {mean['ten']:.2f} ten, {mean['eager']:.2f} eager; "
                f"the least {mean['least']:.2f}"
            )


def _cells(found: Row, row: Row, index: int, timing: Row) -> list[str]:
    first = [row["kv"], str(row["heads"]), row["shape"]] if index == 0 else ["", "", ""]
    times = [f"{timing[kind]['median']:.1f}" if timing[kind] else "-" for kind in ("graph", "ten", "eager", "host")]
    over = [ratio(row, timing["name"], kind) if index else None for kind in ("graph", "ten", "eager")]
    us = timing["graph"]["median"] if timing["graph"] else None
    speed = row["kv_bytes"] / us / 1e6 if us else None
    share = [f"{speed:.2f}", f"{speed / found['read_tb_s']:.0%}"] if speed else ["-", "-"]
    error = f"{timing['error']:.1e}" if timing["error"] is not None else "nan"
    note = timing["failure"] or ("" if timing["right"] else "WRONG")
    return [
        *first, timing["name"], *times, *(f"{value:.2f}" if value else "" for value in over), *share,
        error if timing["graph"] else "-", escape(note[:NOTES]),
    ]  # fmt: skip


def markdown(found: Row) -> str:
    """A table for each KV type and count of heads. Times as graph / ten."""
    lines = [
        f"{found['device']}, torch {found['torch']}, triton {found['triton']}, medians of {found['rounds']}; a large "
        f"read takes {found['read_tb_s']:.2f} TB/s. Times are microseconds in the conventions *graph* / *ten*; `x` is "
        "the peer's time over ours (*graph*): above 1 ours is faster. A kernel that does next to nothing takes "
        f"{found['least_us']['graph']:.1f} / {found['least_us']['ten']:.1f}."
    ]
    summary = means(found)
    for kv, heads in dict.fromkeys((row["kv"], row["heads"]) for row in found["rows"]):
        rows = [row for row in found["rows"] if (row["kv"], row["heads"]) == (kv, heads)]
        names = list(dict.fromkeys(timing["name"] for row in rows for timing in row["timings"][1:]))
        names = [name for name in names if any(median(timing_of(row, name), "graph") for row in rows)]
        titles = ["shape", "ours", "of read", "error", *(title for name in names for title in (name, "x", "error"))]
        lines += ["", f"{kv} KV, {heads} heads:", "", _line(titles), "|---" * len(titles) + "|"]
        for row in rows:
            ours = row["timings"][0]
            us = median(ours, "graph")
            share = f"{row['kv_bytes'] / us / 1e6 / found['read_tb_s']:.0%}" if us else "-"
            cells = [row["shape"], _times(ours), share, _error(ours)]
            for name in names:
                timing, over = timing_of(row, name), ratio(row, name, "graph")
                cells += [_times(timing), f"{over:.2f}" if over else "-", _error(timing)]
            lines.append(_line(cells))
        cells = ["geometric mean", "", "", ""]
        for name in names:
            mean = next(m for m in summary if (m["kv"], m["heads"], m["name"]) == (kv, heads, name))
            cells += ["", f"{mean['graph']:.2f} / {mean['ten']:.2f}", ""]
        lines.append(_line(cells))
        for name in names:
            mean = next(m for m in summary if (m["kv"], m["heads"], m["name"]) == (kv, heads, name))
            eager = f"Eagerly, {name} takes {mean['eager']:.2f} times ours (geometric mean)."
            lines += ["", eager] if name == names[0] else [eager]
    return "\n".join(lines)


def fill(page: Path, text: str) -> None:
    """Put `text` between the marks of a page. Raises ValueError if it has none."""
    before, begin, rest = page.read_text(encoding="utf-8").partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{page}: no line {BEGIN.strip()!r} with a line {END.strip()!r} after it")
    page.write_text(f"{before}{begin}\n{text}\n{end}{after}", encoding="utf-8")


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _times(timing: Row | None) -> str:
    graph, ten = median(timing, "graph"), median(timing, "ten")
    return f"{graph:.1f} / {ten:.1f}" if graph is not None and ten is not None else "-"


def _error(timing: Row | None) -> str:
    return f"{timing['error']:.1e}" if median(timing, "graph") and timing is not None else "-"
