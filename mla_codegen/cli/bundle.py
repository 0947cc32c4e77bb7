"""`mla-codegen bundle`: a build as one file, as a leaderboard takes it."""

from pathlib import Path
from typing import Annotated

import typer

from mla_codegen.cli import report
from mla_codegen.cli.common import Spec, Triton, fail, load_plans


def bundle(
    spec: Spec,
    out: Annotated[Path, typer.Option("-o", "--out", metavar="FILE.py", help="The file to write")],
    leaderboard: Annotated[
        str | None, typer.Option("--leaderboard", metavar="NAME", help="For the `#!POPCORN leaderboard` line")
    ] = None,
    gpu: Annotated[str | None, typer.Option("--gpu", metavar="NAME", help="For the `#!POPCORN gpu` line")] = None,
    triton: Triton = None,
) -> None:
    """Write all kernels of a spec into one file with `custom_kernel(data)`, ready to submit.

    mla-codegen bundle specs/mi355x.yaml -o submission.py --leaderboard NAME --gpu MI355X

    mla-codegen verify submission.py

    What the server would refuse is an error, and nothing is written.
    """
    from mla_codegen.publish.bundle import Refused
    from mla_codegen.publish.bundle import bundle as make

    (plan,) = load_plans([spec], out.resolve().parent / "generated", triton)
    try:
        text = make(plan, leaderboard, gpu)
    except Refused as refused:
        fail("\n".join(f"{out}: {reason}" for reason in refused.reasons) + "\nnothing was written", 2)
    try:
        out.write_text(text, encoding="utf-8")
    except OSError as error:
        fail(f"cannot write {out}: {error.strerror or error}", 2)
    report.out.print(f"{len(plan.kernels)} kernels in {out}: {len(text.encode()):,} bytes")
