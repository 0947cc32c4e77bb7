"""`mla-codegen device-report`: verify, bench and inspect on the GPU at hand, written to one file to send back."""

from pathlib import Path
from typing import Annotated

import typer

from mla_codegen.cli import report as terminal
from mla_codegen.cli.common import Spec, check_gpu, fail, load_plans, need_installed


def device_report(
    spec: Spec,
    out: Annotated[Path, typer.Option("--out", "-o", help="The file to write and send")] = Path("device-report.json"),
    dry: Annotated[bool, typer.Option("--dry", help="Without a GPU: what a CPU can say, nothing timed")] = False,
    quick: Annotated[
        bool, typer.Option("--quick", help="One case a kernel; kernels that differ in splits once")
    ] = False,
) -> None:
    """Run verify, bench and inspect on the GPU that a spec is for, and write one file to send to its authors.

    mla-codegen device-report specs/mi300.yaml -o mi300x.json

    mla-codegen device-report specs/mi300.yaml --dry --quick

    The file names the GPU and the versions of the software, no host, path or user. Fails if a part does.
    """
    plans = load_plans([spec], Path("generated"))
    if out.suffix != ".json" or not out.absolute().parent.is_dir():
        fail(f"--out {out}: a file that ends in .json, in a folder that exists", 2)
    if not dry:
        why = "the report is of a GPU\n  fix: `--dry` runs what a CPU can"
        check_gpu([(plan.spec_file, plan.target) for plan in plans], why)
        need_installed(plans)
    from mla_codegen.measure.device_report import beside_prediction, make_report, verdicts

    with terminal.progress("report") as advance:
        found = make_report(spec, out, "cpu" if dry else "cuda", quick, progress=advance)
    well = True
    for part, good, words in verdicts(found):
        well = well and good
        terminal.out.print(f"{part}: {'' if good else 'FAIL, '}{words}", markup=False, highlight=False, soft_wrap=True)
    if rows := beside_prediction(found):
        table = terminal._table(">shape", "kernel", ">model us", ">measured us")
        for shape, kernel, guess, time in rows:
            table.add_row(shape, kernel, f"{guess:.1f}", f"{time:.1f}")
        terminal.out.print(table)
    terminal.out.print(f"written to {out}: send it", highlight=False, soft_wrap=True)
    raise typer.Exit(0 if well else 1)
