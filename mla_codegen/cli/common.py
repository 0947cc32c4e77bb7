"""What several commands share: arguments, the way out, and the step from spec files to plans."""

from pathlib import Path
from typing import Annotated, NoReturn

import typer

from mla_codegen.catalog.releases import RELEASES, Release, installed_triton, release_of
from mla_codegen.cli import report
from mla_codegen.plan.resolve import Plan, PlanError, make_plan
from mla_codegen.publish.write import spec_name
from mla_codegen.spec.errors import SpecError, UnknownName
from mla_codegen.spec.load import load_spec

Specs = Annotated[list[Path], typer.Argument(help="Spec files, e.g. specs/*.yaml", show_default=False)]
Spec = Annotated[Path, typer.Argument(help="A spec file", show_default=False)]
Out = Annotated[Path, typer.Option("--out", help="Folder of the generated package")]
Triton = Annotated[
    str | None,
    typer.Option(
        "--triton", metavar="VERSION", help="Triton release to render for; default: the spec's, or the installed one"
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table")]


def fail(message: str, code: int) -> NoReturn:
    report.err.print(message, markup=False, highlight=False)
    raise typer.Exit(code)


def release_named(version: str) -> Release:
    """The release of a version that the user names; ends the command where kernels cannot be rendered for it."""
    release = release_of(version)
    if release is None:
        fail(str(UnknownName("Triton release", version, RELEASES)), 2)
    return release


def need_installed(plans: list[Plan]) -> None:
    """End the command if plans are rendered for another release of Triton than the one that would run them here."""
    have = installed_triton()
    for plan in plans:
        if plan.triton and plan.release != release_of(have):
            what = f"{plan.spec_file} is for triton {plan.triton}, and {have} is installed"
            fail(f"{what}\n  fix: install that one, or remove `triton` from the spec", 2)


def load_plans(specs: list[Path], out: Path, triton: str | None = None) -> list[Plan]:
    """Plans of all specs; what is wrong with any of them is printed, and nothing is written.

    triton   the release to render for, before what specs say
    """
    release = release_named(triton) if triton is not None else None
    plans, messages = [], []
    for path in specs:
        try:
            loaded = load_spec(path)
            try:
                plans.append(make_plan(loaded.spec, spec_name(path, out), release))
            except PlanError as error:
                raise loaded.error(error.problems) from error
        except SpecError as error:
            messages.append(str(error))
    if messages:
        fail("\n".join(messages), 2)
    names: dict[str, str] = {}
    for plan, path in zip(plans, specs, strict=True):
        if plan.name in names:
            fail(f"{path} and {names[plan.name]} would both be built into {out / plan.name}: rename one of them", 2)
        names[plan.name] = str(path)
    return plans
