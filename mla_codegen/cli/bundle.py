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
    force: Annotated[bool, typer.Option("--force", help="Overwrite a file that is no bundle of ours")] = False,
) -> None:
    """Write all kernels of a spec into one file with `custom_kernel(data)`, ready to submit.

    mla-codegen bundle specs/mi355x.yaml -o submission.py --leaderboard NAME --gpu MI355X

    mla-codegen verify submission.py

    What the server would refuse is an error, and nothing is written.
    """
    from mla_codegen.publish.bundle import Refused, is_ours
    from mla_codegen.publish.bundle import bundle as make
    from mla_codegen.publish.files import replace_file

    if out.is_dir():
        fail(f"{out} is a folder: name a file in it", 2)
    if out.is_file() and not force and not is_ours(out):
        what = f"{out} is there, and `bundle` did not write it"
        fail(f"{what}\n  fix: name another file, or overwrite this one with --force", 2)

    (plan,) = load_plans([spec], out.resolve().parent / "generated", triton)
    try:
        text = make(plan, leaderboard, gpu)
    except Refused as refused:
        fail("\n".join(f"{out}: {reason}" for reason in refused.reasons) + "\nnothing was written", 2)
    try:
        replace_file(out.resolve() if out.is_file() else out, text)
    except OSError as error:
        fail(f"cannot write {out}: {error.strerror or error}", 2)
    report.out.print(f"{len(plan.kernels)} kernels in {out}: {len(text.encode()):,} bytes")
