"""Pictures as SVG inside of the page: text stays text, and colours are the style sheet's, for light and dark."""

import io
import re
from collections.abc import Sequence
from typing import Any

from markupsafe import Markup, escape

from mla_codegen.measure import charts
from mla_codegen.measure.bench import Report
from mla_codegen.report.gather import Search

GRID = "#dddddd"
WIDTH = 5.2  # inches: what a phone shows with text of a readable size
# What matplotlib is told -> what the page's style sheet calls it.
VARIABLES = {charts.INK: "var(--ink)", GRID: "var(--line)"} | {
    color: f"var(--series-{number})" for number, color in enumerate(charts.COLORS, 1)
}


def roofline(report: Report) -> Markup:
    """Every shape under the roof whose slopes were measured in the same run."""
    kinds = list(dict.fromkeys(row.workload.kv for row in report.rows))

    def draw(panel: Any) -> None:
        charts.roofline(panel, report, charts.colors_of(report), kinds)
        panel.set_title("", loc="left")  # the page says it

    read = f"{report.read_tb_s:.2f} TB/s of reads and {report.product_tflop_s:.0f} TFLOP/s of products"
    return _svg(draw, 3.6, "roofline", f"Roofline of {report.device}: each shape's TFLOP/s under a roof of {read}")


def candidates(searches: Sequence[Search], kv: str) -> Markup:
    """One row a shape, one dot a candidate: its time over the fastest one's. The setting that is built is ringed."""

    def draw(panel: Any) -> None:
        for place, search in enumerate(searches):
            times = [one.us / search.best.us for one in search.good]
            panel.scatter(times, [place] * len(times), 16, color=charts.COLORS[0], alpha=0.55, linewidths=0)
            if search.built is not None:
                ring = {"facecolors": "none", "edgecolors": charts.COLORS[1], "linewidths": 1.6}
                panel.scatter([search.built.us / search.best.us], [place], 64, **ring)
        panel.set_xscale("log")
        panel.set_yticks(range(len(searches)), [search.shape for search in searches])
        panel.invert_yaxis()
        panel.set_xlabel("time over the fastest candidate's")
        panel.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
        panel.xaxis.set_minor_formatter(lambda value, _: f"{value:g}" if f"{value:.0e}"[0] in "2345" else "")
        panel.spines[["top", "right"]].set_visible(False)
        panel.grid(axis="x", which="major", color=GRID, linewidth=0.6)
        panel.set_axisbelow(True)

    what = f"{kv} KV: times of the tuner's candidates for {len(searches)} shapes, each over the fastest of its shape"
    return _svg(draw, 0.9 + 0.3 * len(searches), f"tuned-{kv}", what)


def _svg(draw: Any, height: float, name: str, label: str) -> Markup:
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context({**charts.STYLE, "svg.hashsalt": name}):
        figure = Figure(figsize=(WIDTH, height), layout="constrained")
        draw(figure.subplots())
        written = io.StringIO()
        figure.savefig(written, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    text = written.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.S)
    text = re.sub(r'(?<=<svg )height="[^"]*" |(?<=pt" )width="[^"]*" |width="[\d.]+pt" ', "", text)
    text = re.sub(r'(\bid="|url\(#|href="#)', rf"\1{name}-", text)  # ids are the whole page's
    for color, variable in VARIABLES.items():
        text = text.replace(color, variable)
    return Markup(text.replace("<svg ", f'<svg role="img" aria-label="{escape(label)}" ', 1))
