"""What several commands share: arguments, the way out, and the step from spec files to plans."""

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperGroup

from mla_codegen.catalog.releases import RELEASES, Release, installed_triton, release_of
from mla_codegen.catalog.targets import TARGETS, Target
from mla_codegen.cli import report
from mla_codegen.plan.resolve import Plan, PlanError, make_plan
from mla_codegen.publish.write import spec_name
from mla_codegen.runtime.formats import KV_FORMATS
from mla_codegen.spec.errors import SpecError, UnknownName
from mla_codegen.spec.load import load_spec


def _some_specs(incomplete: str) -> list[str]:
    """For the shell: specs and submissions, and folders on the way to them."""
    folder, _, begun = incomplete.rpartition("/")
    try:
        found = sorted(Path(folder or "/" * incomplete.startswith("/") or ".").iterdir())
    except OSError:
        return []
    shown = [
        path for path in found if path.suffix in (".yaml", ".yml", ".py") or (path.is_dir() and path.name[0] != ".")
    ]
    start = incomplete[: len(incomplete) - len(begun)]
    return [f"{start}{path.name}{'/' * path.is_dir()}" for path in shown if path.name.startswith(begun)]


def some(names: Callable[[], Sequence[str]]) -> Callable[[str], list[str]]:
    """For the shell: those of `names` that begin so."""
    return lambda incomplete: [name for name in names() if name.startswith(incomplete)]


def target_names() -> list[str]:
    return [*TARGETS, *(gpu for target in TARGETS.values() for gpu in target.gpus if " " not in gpu)]


Specs = Annotated[
    list[Path],
    typer.Argument(help="Spec files, e.g. specs/*.yaml", show_default=False, autocompletion=_some_specs),
]
Spec = Annotated[Path, typer.Argument(help="A spec file", show_default=False, autocompletion=_some_specs)]
Out = Annotated[Path, typer.Option("--out", help="Folder of the generated package")]
Triton = Annotated[
    str | None,
    typer.Option(
        "--triton", metavar="VERSION", help="Triton release to render for; default: the spec's, or the installed one"
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table; errors too")]
Kv = Annotated[
    str | None,
    typer.Option("--kv", help="Only this KV dtype", autocompletion=some(lambda: list(KV_FORMATS))),
]


@dataclass
class _Way:
    """How the command that runs says what is wrong."""

    in_json: bool = False


_way = _Way()
# typer brings its own click, or uses the one that is installed.
UsageError: Any = typer.BadParameter.__mro__[1]


class Commands(TyperGroup):
    """Commands whose errors are JSON where `--json` is given, those of the command line too."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        _way.in_json = "--json" in args
        return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except UsageError as error:
            if not _way.in_json:
                raise
            fail(error.format_message(), 2)


def fail(error: str | SpecError | Sequence[SpecError], code: int) -> NoReturn:
    """Say what is wrong on stderr and exit; with --json, as JSON on stdout.

    A text may have lines `  allowed: ...` and `  fix: ...` under what is wrong.
    """
    errors = [error] if isinstance(error, str | SpecError) else list(error)
    if _way.in_json:
        typer.echo(json.dumps({"errors": [one for each in errors for one in _as_json(each)]}))
    else:
        report.err.print("\n".join(map(str, errors)), markup=False, highlight=False)
    raise typer.Exit(code)


def release_named(version: str) -> Release:
    """The release of a version that the user names; ends the command where kernels cannot be rendered for it."""
    release = release_of(version)
    if release is None:
        fail(str(UnknownName("Triton release", version, RELEASES)), 2)
    return release


def _as_json(error: str | SpecError) -> list[dict[str, Any]]:
    """{file, line, column, what, allowed, fix} of each fault; null for a place that it has not."""
    if isinstance(error, SpecError):
        return [
            {"file": error.file, "line": place and place[0], "column": place and place[1],
             "what": problem.what, "allowed": problem.allowed, "fix": problem.fix}
            for problem, place in zip(error.problems, error.places, strict=True)
        ]  # fmt: skip
    what, _, fix = error.partition("\n  fix: ")
    what, _, allowed = what.partition("\n  allowed: ")
    fix = " ".join(fix.split())
    return [{"file": None, "line": None, "column": None, "what": what, "allowed": allowed, "fix": fix}]


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
    plans: list[Plan] = []
    errors: list[SpecError] = []
    for path in specs:
        try:
            loaded = load_spec(path)
            try:
                plans.append(make_plan(loaded.spec, spec_name(path, out), release))
            except PlanError as error:
                raise loaded.error(error.problems) from error
        except SpecError as error:
            errors.append(error)
    if errors:
        fail(errors, 2)
    names: dict[str, str] = {}
    for plan, path in zip(plans, specs, strict=True):
        name = plan.name.casefold()  # some file systems know no case
        if name in names:
            fail(f"{path} and {names[name]} would both be built into {out / plan.name}: rename one of them", 2)
        names[name] = str(path)
    return plans


def parse_shapes(spelled: Sequence[str]) -> list[tuple[int, ...]]:
    """(batch, kv_len) of each `64x8192`, (batch, kv_len, q_len) of each `64x4x8192`; exit 2 for anything else."""
    shapes: list[tuple[int, ...]] = []
    for text in spelled:
        match = re.fullmatch(r"([1-9]\d{0,4})x(?:([1-9]\d?)x)?([1-9]\d{0,7})", text.strip().lower())
        if not match:
            fail(f"--shape {text}: write BATCHxKV_LEN, as in 64x8192, or BATCHxQ_LENxKV_LEN", 2)
        tokens = int(match[2] or 1)
        shapes.append((int(match[1]), int(match[3]), *([tokens] if tokens > 1 else [])))
    return list(dict.fromkeys(shapes))


def check_kv(kv: str | None, plans: Sequence[Plan]) -> None:
    """Exit 2 if no spec has the KV dtype."""
    known = list(dict.fromkeys(name for plan in plans for name in plan.spec.dtypes.kv))
    if kv is not None and kv not in known:
        fail(str(UnknownName("KV dtype", kv, known)), 2)


def check_gpu(wanted: Sequence[tuple[str, Target]], why: str) -> None:
    """Exit 2 if there is no GPU, or one of the (file, target) is for another; `why`: what for."""
    import torch

    from mla_codegen.runtime.builds import target_of

    if not torch.cuda.is_available():
        fail(f"no GPU: torch sees none, and {why}", 2)
    device = torch.device("cuda", torch.cuda.current_device())
    at_hand = target_of(device)
    for file, target in wanted:
        if target.name not in ("portable", at_hand):
            this = f"this is {at_hand} ({torch.cuda.get_device_name(device)})"
            fix = f"a spec with `target: {at_hand}` or `target: portable`"
            fail(f"{file} is for {target.name} ({target.title}); {this}\n  fix: {fix}", 2)


def without_nan(value: Any) -> Any:
    """The same, null where a number is missing: JSON has no NaN."""
    if isinstance(value, dict):
        return {key: without_nan(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [without_nan(inner) for inner in value]
    return None if isinstance(value, float) and value != value else value
