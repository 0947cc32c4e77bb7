"""A bench as a picture: bars of time for each shape and implementation, and where each stands under the roofline."""

from pathlib import Path
from typing import Any

from mla_codegen.measure.bench import Report, Row, Timing

SUFFIXES = (".png", ".svg")
COLORS = ("#1f5fa8", "#e07b39", "#3b9a6d", "#a23b72", "#8a8a8a", "#c9a227", "#5b4b9a", "#4fb3bf")
MARKERS = ("o", "s", "^", "D")
INK = "#333333"
STYLE: Any = {
    "svg.fonttype": "none",
    "font.size": 9,
    "text.color": INK,
    "axes.edgecolor": INK,
    "axes.titlesize": 10,
    "figure.titlesize": 12,
    "axes.labelcolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
}


def draw(report: Report, path: Path) -> None:
    """Write the picture; PNG or SVG by the file's suffix. Needs matplotlib, no display."""
    import matplotlib
    from matplotlib.figure import Figure

    kinds = list(dict.fromkeys(row.workload.kv for row in report.rows))
    colors = colors_of(report)
    most = max((sum(row.workload.kv == kind for row in report.rows) for kind in kinds), default=1)
    width = max(7.0, 2.0 + 0.32 * most * max(1, len(report.names)))
    with matplotlib.rc_context({**STYLE, "svg.hashsalt": "mla-codegen"}):  # the same bytes for the same report
        figure = Figure(figsize=(width, 3.1 * len(kinds) + 4.2), layout="constrained")
        panels = figure.subplots(len(kinds) + 1, 1, squeeze=False, height_ratios=[*[1.0] * len(kinds), 1.35])[:, 0]
        for panel, kind in zip(panels, kinds, strict=False):
            _bars(panel, [row for row in report.rows if row.workload.kv == kind], colors, kind)
        roofline(panels[-1], report, colors, kinds)
        figure.suptitle(f"MLA decode on {report.device} (triton {report.triton})", x=0.01, ha="left", weight="bold")
        figure.savefig(path, dpi=150, metadata={"Date": None} if path.suffix == ".svg" else None)


def colors_of(report: Report) -> dict[str, str]:
    """Each implementation's colour, in the order of the bench."""
    return {name: COLORS[index % len(COLORS)] for index, name in enumerate(report.names)}


def _bars(panel: Any, rows: list[Row], colors: dict[str, str], kind: str) -> None:
    names = [name for name in colors if any(_timed(row, name) for row in rows)]
    width = 0.8 / max(1, len(names))
    for index, name in enumerate(names):
        at, heights, spreads = [], [], []
        for position, row in enumerate(rows):
            timing = _timed(row, name)
            if timing and timing.time:
                at.append(position + (index - (len(names) - 1) / 2) * width)
                heights.append(timing.time.median)
                spreads.append((timing.time.median - timing.time.low, timing.time.high - timing.time.median))
        errors = list(zip(*spreads, strict=True))
        bars = panel.bar(at, heights, width * 0.92, color=colors[name], label=name, yerr=errors, ecolor=INK)
        panel.bar_label(
            bars, [f"{height:.0f}" if height >= 100 else f"{height:.3g}" for height in heights], fontsize=6, padding=2
        )
    panel.margins(y=0.12)
    panel.set_xticks(range(len(rows)), [row.workload.shape for row in rows])
    panel.set_xlabel("requests x KV rows of each")
    panel.set_ylabel("µs")
    wrong = any(timing.wrong and timing.time for row in rows for timing in row.timings)
    note = "; what is wrong is left out" if wrong else ""
    panel.set_title(f"{kind} KV: time of a call, median and quartiles{note}", loc="left")
    _clean(panel)
    if names:
        panel.legend(frameon=False, fontsize=8, loc="upper left")


def roofline(panel: Any, report: Report, colors: dict[str, str], kinds: list[str]) -> None:
    """A point a shape, KV type and implementation, under the roof that was measured in the same run."""
    corner = report.product_tflop_s / report.read_tb_s
    found = [row.workload.flops / row.workload.kv_bytes for row in report.rows]
    low, high = min([*found, corner]) / 3, max([*found, corner]) * 3
    roof = [(x, min(x * report.read_tb_s, report.product_tflop_s)) for x in (low, corner, high)]
    panel.plot(*zip(*roof, strict=True), color=INK, linewidth=1.2)
    for name, color in colors.items():
        for kind, marker in zip(kinds, MARKERS, strict=False):
            points = [
                (row.workload.flops / row.workload.kv_bytes, row.tflop_s(timing))
                for row in report.rows
                if row.workload.kv == kind and (timing := _timed(row, name)) is not None
            ]
            if points:
                xs, ys = zip(*points, strict=True)
                panel.scatter(xs, ys, 22, color=color, marker=marker, alpha=0.8, label=f"{name}, {kind}", linewidths=0)
    panel.set_xscale("log")
    panel.set_xlabel("FLOP for each byte of KV")
    panel.set_ylabel("TFLOP/s")
    measured = f"read {report.read_tb_s:.2f} TB/s, bf16 product {report.product_tflop_s:.0f} TFLOP/s"
    panel.set_title(f"Roofline, one point a shape; measured roof: {measured}", loc="left")
    panel.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    _clean(panel)
    if panel.get_legend_handles_labels()[0]:
        panel.legend(frameon=False, fontsize=8, loc="lower right")


def _timed(row: Row, name: str) -> Timing | None:
    return next((timing for timing in row.timings if timing.name == name and timing.time and not timing.wrong), None)


def _clean(panel: Any) -> None:
    from matplotlib.ticker import FuncFormatter, NullFormatter

    if panel.has_data():
        panel.set_yscale("log")
    panel.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    panel.yaxis.set_minor_formatter(NullFormatter())
    panel.spines[["top", "right"]].set_visible(False)
    panel.grid(axis="y", which="major", color="#dddddd", linewidth=0.6)
    panel.set_axisbelow(True)
