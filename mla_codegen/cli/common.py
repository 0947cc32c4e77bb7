"""What several commands share: arguments, the way out, and the step from spec files to plans."""

from pathlib import Path
from typing import Annotated, NoReturn

import typer

from mla_codegen.cli import report
from mla_codegen.plan.resolve import Plan, PlanError, make_plan
from mla_codegen.publish.write import spec_name
from mla_codegen.spec.errors import SpecError
from mla_codegen.spec.load import load_spec

Specs = Annotated[list[Path], typer.Argument(help="Spec files, e.g. specs/*.yaml", show_default=False)]
Spec = Annotated[Path, typer.Argument(help="A spec file", show_default=False)]
Out = Annotated[Path, typer.Option("--out", help="Folder of the generated package")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table")]


def fail(message: str, code: int) -> NoReturn:
    report.err.print(message, markup=False, highlight=False)
    raise typer.Exit(code)


def load_plans(specs: list[Path], out: Path) -> list[Plan]:
    """Plans of all specs; what is wrong with any of them is printed, and nothing is written."""
    plans, messages = [], []
    for path in specs:
        try:
            loaded = load_spec(path)
            try:
                plans.append(make_plan(loaded.spec, spec_name(path, out)))
            except PlanError as error:
                raise loaded.error(error.problems) from error
        except SpecError as error:
            messages.append(str(error))
    if messages:
        fail("\n".join(messages), 2)
    names: dict[str, str] = {}
    for plan, path in zip(plans, specs, strict=True):
        name = plan.name.casefold()  # some file systems know no case
        if name in names:
            fail(f"{path} and {names[name]} would both be built into {out / plan.name}: rename one of them", 2)
        names[name] = str(path)
    return plans
