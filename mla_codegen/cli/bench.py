"""`mla-codegen bench`: every shape of a spec on the GPU at hand, beside other implementations."""

import importlib.util
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mla_codegen.cli import report as terminal
from mla_codegen.cli.common import (
    Json,
    Kv,
    Specs,
    check_gpu,
    check_kv,
    fail,
    load_plans,
    need_installed,
    parse_shapes,
    without_nan,
)
from mla_codegen.plan.resolve import Plan

if TYPE_CHECKING:
    from mla_codegen.measure.bench import Report, Row, Timing
    from mla_codegen.measure.timing import Gpu

Shapes = Annotated[
    list[str] | None, typer.Option("--shape", metavar="BATCHxKV_LEN", help="In place of the spec's; may be repeated")
]


def bench(
    specs: Specs,
    shape: Shapes = None,
    kv: Kv = None,
    against: Annotated[
        list[str] | None,
        typer.Option("--against", metavar="MODULE:FUNCTION", help="Anything with custom_kernel's call; or FILE.py:..."),
    ] = None,
    rounds: Annotated[int, typer.Option("--rounds", min=15, help="Times each call is timed")] = 21,
    seed: Annotated[int, typer.Option("--seed", help="Of the random inputs")] = 0,
    plot: Annotated[
        list[Path] | None, typer.Option("--plot", metavar="FILE.png|.svg", help="Draw it too; may be repeated")
    ] = None,
    as_json: Json = False,
) -> None:
    """Time every shape on the GPU, each call interleaved with the others, from a cold L2, its error beside its time.

    mla-codegen bench specs/h200.yaml --plot bench.svg

    mla-codegen bench specs/h200.yaml --shape 64x8192 --kv fp8_e4m3fn --against other_package.decode:custom_kernel
    """
    asked = parse_shapes(shape or [])
    check_plots(plot or [])
    plans = load_plans(specs, Path("generated"))
    check_kv(kv, plans)
    gpu = the_gpu(plans)
    from mla_codegen.measure.bench import bench as run
    from mla_codegen.measure.implementations import BenchError, other

    try:
        others = [other(spelled) for spelled in against or []]
    except BenchError as error:
        fail(str(error), 2)
    with terminal.progress("bench") as advance:
        result = run(plans, others, gpu, shapes=asked, kv=kv, rounds=rounds, seed=seed, progress=advance)
    for path in plot or []:
        from mla_codegen.measure.charts import draw

        draw(result, path)
    if as_json:
        typer.echo(json.dumps(without_nan(result.json())))
    else:
        show(result)
    names = {plan.name for plan in plans}
    raise typer.Exit(1 if any(t.wrong and t.name in names for row in result.rows for t in row.timings) else 0)


def check_plots(paths: list[Path]) -> None:
    """Exit 2 before anything is timed if a picture could not be written after it."""
    for path in paths:
        if path.suffix not in (".png", ".svg"):
            fail(f"--plot {path}: the file's name must end in .png or .svg", 2)
        if not path.absolute().parent.is_dir():
            fail(f"--plot {path}: there is no folder {path.absolute().parent}", 2)
    if paths and importlib.util.find_spec("matplotlib") is None:
        fail("--plot needs matplotlib\n  fix: pip install 'mla-codegen[plot]'", 2)


def the_gpu(plans: list[Plan]) -> "Gpu":
    """The GPU at hand; exit 2 if there is none, or if a spec is for another."""
    check_gpu([(plan.spec_file, plan.target) for plan in plans], "times from Triton's interpreter would mean nothing")
    from mla_codegen.measure.timing import Gpu

    need_installed(plans)
    return Gpu()


def show(result: "Report") -> None:
    """The table, the ceilings that its percentages are of, and the geometric means."""
    columns = (
        "KV", ">shape", "implementation", ">graph us", ">±", ">eager us", ">±", ">host us", ">error", ">TB/s",
        ">of read", ">TFLOP/s", "",
    )  # fmt: skip
    table = terminal._table(*columns)
    for row in result.rows:
        for index, timing in enumerate(row.timings):
            first = (row.workload.kv, row.workload.shape) if index == 0 else ("", "")
            table.add_row(*first, *_cells(result, row, timing))
    terminal.out.print(table)
    terminal.out.print(
        f"{result.device}, triton {result.triton}, torch {result.torch}; ceilings in this run: read "
        f"{result.read_tb_s:.2f} TB/s, bf16 product {result.product_tflop_s:.0f} TFLOP/s",
        soft_wrap=True,
    )
    base = result.names[0] if result.names else ""
    for name in result.names[1:]:
        from mla_codegen.measure.timing import geometric_mean

        graph, eager = result.ratios(base, name, "graph"), result.ratios(base, name, "eager")
        what = f"{len(eager)} shape{'s' if len(eager) != 1 else ''}"
        kinds = ((graph, "in a graph"), (eager, "eagerly"))
        means = ", ".join(f"{geometric_mean(ratios):.2f}x {how}" for ratios, how in kinds if ratios)
        line = f"geometric mean of {what}: {means}" if means else "no shape that both did right"
        terminal.out.print(f"{base} against {name}, {line}", markup=False, soft_wrap=True)


def _cells(result: "Report", row: "Row", timing: "Timing") -> list[str]:
    from rich.markup import escape

    cells = [escape(timing.name)]
    for sample in (timing.graph, timing.eager):
        cells += [f"{sample.median:.1f}", f"{sample.spread:.1f}"] if sample else ["-", "-"]
    cells.append(f"{timing.host.median:.1f}" if timing.host else "-")
    error = max(timing.eager_error, timing.graph_error, key=lambda e: (e != e, e))
    cells.append(f"[red]{error:.1e}[/red]" if timing.wrong else f"{error:.1e}")
    if timing.time:
        share = row.tb_s(timing) / result.read_tb_s
        cells += [f"{row.tb_s(timing):.2f}", f"{share:.0%}", f"{row.tflop_s(timing):.0f}"]
    else:
        cells += ["-", "-", "-"]
    note = timing.failure or ("[red]WRONG[/red]" if timing.wrong else "")
    return [*cells, note if note.startswith("[red]") else escape(note)]
