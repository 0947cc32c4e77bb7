"""The commands: parse, call, print. Exit codes: 0 done, 1 a check failed, 2 bad input."""

import json
import signal
import sys
from collections.abc import Iterable
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from mla_codegen import __version__
from mla_codegen.catalog.targets import Target
from mla_codegen.cli import report
from mla_codegen.cli.bench import bench
from mla_codegen.cli.bundle import bundle
from mla_codegen.cli.common import (
    Json,
    Kv,
    Out,
    Spec,
    Specs,
    Triton,
    check_gpu,
    check_kv,
    fail,
    load_plans,
    parse_shapes,
    some,
    target_names,
)
from mla_codegen.cli.device_report import device_report
from mla_codegen.cli.entry import Commands, run
from mla_codegen.cli.inspect import inspect
from mla_codegen.cli.report_page import report_page
from mla_codegen.cli.tune import tune
from mla_codegen.plan.resolve import KernelPlan, Plan
from mla_codegen.publish import write
from mla_codegen.publish.write import find_drift, fresh_build, rebuild_command
from mla_codegen.spec.errors import UnknownName

app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
    help="""Specialised split-KV kernels for MLA decode, from a YAML spec.

    mla-codegen init --model deepseek-v3 --target H200 > mine.yaml

    mla-codegen verify mine.yaml --quick

    mla-codegen build mine.yaml --out kernels

    then in Python: `from kernels.dispatch import custom_kernel`
    """,
)


class Subject(str, Enum):
    shapes = "shapes"
    optimizations = "optimizations"
    targets = "targets"


class Device(str, Enum):
    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"


@app.command()
def build(
    specs: Specs,
    out: Out = Path("generated"),
    triton: Triton = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite files edited by hand, or not ours")] = False,
    as_json: Json = False,
) -> None:
    """Render the kernels of one or several specs.

    mla-codegen build specs/mi300.yaml

    mla-codegen build specs/*.yaml --out generated

    mla-codegen build specs/h200.yaml --triton 3.8

    Builds of other specs in the same folder stay, and the dispatcher serves them all.
    """
    plans = load_plans(specs, out, triton)
    files, written, removed = write.build(plans, out, force=force)
    if as_json:
        typer.echo(json.dumps({"out": str(out), "files": sorted(files), "written": written, "removed": removed}))
        return
    kernels = sum(len(plan.kernels) for plan in plans)
    changes = f"{len(written)} files written" + (f", {len(removed)} removed" if removed else "")
    done = changes if written or removed else "up to date"
    of = plans[0].spec_file if len(plans) == 1 else f"{len(plans)} specs"
    report.out.print(f"{kernels} kernels of {of} in {out}/: {done}", soft_wrap=True, highlight=False)


@app.command()
def check(specs: Specs, out: Out = Path("generated"), triton: Triton = None, as_json: Json = False) -> None:
    """Fail, with a diff, if the generated folder differs from a fresh build.

    mla-codegen check specs/*.yaml
    """
    plans = load_plans(specs, out, triton)
    files = fresh_build(plans, out)
    drifts = find_drift(files, out, {plan.name for plan in plans})
    if as_json:
        typer.echo(json.dumps([{"kind": d.kind, "path": d.path, "diff": d.diff} for d in drifts]))
    else:
        for drift in drifts:
            typer.echo(f"{drift.kind}: {out / drift.path}")
            typer.echo(drift.diff, nl=False)
        options = f" --triton {triton}" if triton else ""
        mend = f"mend: mla-codegen build {' '.join(map(str, specs))} --out {out}{options}"
        if any(drift.kind == "outdated" for drift in drifts):  # of other specs, which must be built too
            mend = f"mend: {rebuild_command(files, out)}"
        typer.echo(f"{len(drifts)} differences; {mend}" if drifts else f"{out} is up to date")
    raise typer.Exit(1 if drifts else 0)


@app.command(name="list")
def list_(
    subject: Annotated[Subject, typer.Argument(help="What to list")],
    specs: Annotated[list[Path] | None, typer.Argument(help="With `shapes`: spec files")] = None,
    as_json: Json = False,
) -> None:
    """List the shapes of specs, the micro-optimisations, or the targets.

    mla-codegen list shapes specs/h200.yaml

    mla-codegen list optimizations
    """
    from mla_codegen.catalog.optimizations import OPTIMIZATIONS
    from mla_codegen.catalog.targets import TARGETS

    if subject is Subject.shapes:
        paths = specs or sorted(Path("specs").glob("*.yaml"))
        if not paths:
            fail("no spec given, and there is none in specs/", 2)
        plans = load_plans(paths, Path("generated"))
        if as_json:
            typer.echo(json.dumps([kernel_json(k) for plan in plans for k in plan.kernels]))
        else:
            report.shapes(plans)
    elif subject is Subject.optimizations:
        if as_json:
            options = [
                {
                    "name": o.name, "meaning": o.meaning, "needs": o.needs,
                    "targets": [t.name for t in TARGETS.values() if o.refused_on(t) is None],
                }
                for o in OPTIMIZATIONS.values()
            ]  # fmt: skip
            typer.echo(json.dumps(options))
        else:
            report.optimizations()
    elif as_json:
        rows: list[dict[str, Any]] = [
            {
                "name": t.name, "title": t.title, "shared_bytes": t.shared_bytes, "compute_units": t.compute_units,
                "xcds": t.xcds, "fp8_mma": sorted(t.fp8_mma), "families": list(t.families), "gpus": list(t.gpus),
            }
            for t in TARGETS.values()
        ]  # fmt: skip
        typer.echo(json.dumps(rows))
    else:
        report.targets()


@app.command()
def explain(
    spec: Spec,
    batch: Annotated[int, typer.Option("--batch", min=1, help="Requests of the call")],
    kv_len: Annotated[int, typer.Option("--kv-len", min=0, help="KV rows of a request")],
    q_len: Annotated[int, typer.Option("--q-len", min=1, help="Query tokens of a request")] = 1,
    kv: Annotated[str | None, typer.Option("--kv", help="KV dtype; the spec's first if left out")] = None,
    as_json: Json = False,
) -> None:
    """Say which kernel a call gets, and every number of it with where it came from.

    mla-codegen explain specs/h200.yaml --batch 64 --kv-len 8192
    """
    (plan,) = load_plans([spec], Path("generated"))
    kinds = list(plan.spec.dtypes.kv)
    if kv is not None and kv not in kinds:
        fail(str(UnknownName("KV dtype", kv, kinds)), 2)
    name = kv or kinds[0]
    module, splits, rule = plan.choice(name).explain(batch, kv_len, q_len)
    kernel = next(k for k in plan.kernels if k.name == module)
    if as_json:
        typer.echo(json.dumps({**kernel_json(kernel), "rule": rule, "splits": splits or kernel.splits}))
    else:
        report.explanation(plan, kernel, rule, splits or kernel.splits or 1)


def kernel_json(kernel: KernelPlan) -> dict[str, Any]:
    return {
        "kernel": kernel.name, "spec": kernel.spec_name, "target": kernel.target, "family": kernel.family,
        "batch": kernel.batch, "q_len": kernel.q_len, "kv_len": kernel.kv_len, "kv": kernel.kv,
        "products_in": kernel.compute, "packed": kernel.packed,
        "shared_bytes": kernel.shared_bytes, "optimizations": list(kernel.optimizations),
        "not_taken": list(kernel.not_taken), "page_size": kernel.page_size, "topk": kernel.topk,
        "settings": {
            name: {"value": r.value, "from": r.source} for name, r in kernel.resolved.items() if r.value is not None
        },
    }  # fmt: skip


@app.command()
def schema() -> None:
    """Print the JSON Schema of a spec, for editors.

    mla-codegen schema > mla-codegen.schema.json
    """
    from mla_codegen.spec.schema import json_schema

    typer.echo(json.dumps(json_schema(), indent=2))


@app.command()
def init(
    model: Annotated[
        str,
        typer.Option("--model", help="A model's name, e.g. deepseek-v3", autocompletion=some(lambda: list(_models()))),
    ],
    target: Annotated[
        str,
        typer.Option(
            "--target", help="An architecture or a GPU: sm_90, H200, portable", autocompletion=some(target_names)
        ),
    ],
) -> None:
    """Print a commented starter spec.

    mla-codegen init --model deepseek-v3 --target MI300X > mine.yaml
    """
    from mla_codegen.spec.starter import starter

    try:
        typer.echo(starter(model, target, schema_from(home_of_output())), nl=False)
    except UnknownName as error:
        fail(str(error), 2)


def _models() -> Iterable[str]:
    from mla_codegen.spec.starter import MODELS

    return MODELS


def home_of_output() -> Path:
    """The folder of the file that stdout goes to; for a pipe, specs/ where there is one."""
    try:
        file = Path(f"/proc/self/fd/{sys.stdout.fileno()}").resolve()
    except (OSError, ValueError):  # no file at all
        file = Path()
    if file.is_file():
        return file.parent
    return Path("specs").absolute() if Path("specs").is_dir() else Path.cwd()


def schema_from(folder: Path) -> str:
    """Where the nearest JSON Schema lies, seen from `folder`: in it, or in a folder above it."""
    from mla_codegen.spec.schema import SCHEMA_FILE

    homes = (folder, *folder.parents)
    up = next((number for number, home in enumerate(homes) if (home / SCHEMA_FILE).is_file()), 0)
    return "../" * up + SCHEMA_FILE


@app.command()
def verify(
    specs: Specs,
    device: Annotated[Device, typer.Option("--device", help="auto: the GPU if it is the spec's")] = Device.auto,
    shape: Annotated[
        list[str] | None,
        typer.Option("--shape", metavar="BATCHxKV_LEN", help="Only kernels that such a call gets; repeatable"),
    ] = None,
    kv: Kv = None,
    quick: Annotated[bool, typer.Option("--quick", help="One case a kernel")] = False,
    compiled: Annotated[
        bool, typer.Option("--compiled", help="AMD kernels: execute what the compiler makes of them, on the CPU")
    ] = False,
    jobs: Annotated[
        int | None, typer.Option("--jobs", min=1, help="Kernels at a time; default: the CPUs, and 1 on a GPU")
    ] = None,
    timeout: Annotated[float, typer.Option("--timeout", min=1, help="Seconds of one kernel")] = 900.0,
    seed: Annotated[int, typer.Option("--seed", help="Of the random inputs")] = 0,
    as_json: Json = False,
) -> None:
    """Check each kernel of a spec against float64, on the GPU if there is one, else on the CPU.

    mla-codegen verify specs/portable.yaml

    mla-codegen verify specs/h200.yaml --shape 64x8192 --kv bf16 --quick

    mla-codegen verify specs/mi300.yaml --compiled

    mla-codegen verify submission.py

    A Python file is taken for a submission, ours or another, and called as a leaderboard calls it. A kernel that
    crashes or is not done in time is a failed row.
    """
    from mla_codegen.check.verify import Result, verify_plans

    submissions = [path for path in specs if path.suffix == ".py"]
    if compiled and (submissions or device is Device.cuda):
        fail("--compiled executes the kernels of specs on the CPU: leave submissions and --device cuda out", 2)
    plans = load_plans([path for path in specs if path not in submissions], Path("generated"))
    missing = [str(path) for path in submissions if not path.is_file()]
    if missing:
        fail(f"{', '.join(missing)}: no such file", 2)
    shapes = parse_shapes(shape or ())
    if plans:
        check_kv(kv, plans)
    if device is Device.cuda:
        wanted = [(plan.spec_file, plan.target) for plan in plans] + _targets_of(submissions)
        check_gpu(wanted, "`--device cuda` asks for one\n  fix: leave it out, and the kernels run on the CPU")
    results: list[Result] = []
    options: dict[str, Any] = {
        "seed": seed, "shapes": shapes, "kv": kv, "quick": quick, "processes": jobs, "timeout": timeout,
    }  # fmt: skip
    if compiled:
        _show(_verify_compiled(plans, options), as_json)
    options["device"] = device.value
    if plans:
        with report.progress("verify") as advance:
            results += verify_plans(plans, **options, progress=lambda result, total: advance(result.kernel, total))
    for path in submissions:
        from mla_codegen.check.leaderboard import NeedsGpu, verify_submission

        try:
            with report.progress(f"verify {path}") as advance:
                results += verify_submission(
                    path, **options, progress=lambda result, total: advance(result.kernel, total)
                )
        except (NeedsGpu, UnknownName) as error:
            fail(str(error), 2)
    _show(results, as_json)


def _verify_compiled(plans: list[Plan], options: dict[str, Any]) -> list[Any]:
    from mla_codegen.check.compiled import NotCompiled, verify_compiled

    try:
        with report.progress("verify") as advance:
            return list(verify_compiled(plans, **options, progress=lambda result, total: advance(result.kernel, total)))
    except NotCompiled as error:
        fail(str(error), 2)


def _show(results: list[Any], as_json: bool) -> NoReturn:
    """Print the verdicts and end the command."""
    if as_json:
        typer.echo(json.dumps([result.json() for result in results]))
    else:
        report.verification(results)
    raise typer.Exit(0 if all(result.passed for result in results) else 1)


def _targets_of(submissions: list[Path]) -> list[tuple[str, Target]]:
    from mla_codegen.check.leaderboard import target_of_submission

    found = [(str(path), target_of_submission(path)) for path in submissions]
    return [(file, target) for file, target in found if target is not None]


app.command()(inspect)
app.command()(bench)
app.command()(tune)
app.command()(device_report)
app.command()(bundle)
app.command(name="report")(report_page)


@app.callback(invoke_without_command=True)
def _version(version: Annotated[bool, typer.Option("--version", help="Print the version")] = False) -> None:
    if version:
        typer.echo(__version__)
        raise typer.Exit


def _terminated(*_: object) -> None:
    """As Ctrl-C: whoever has processes and temporary folders takes them along."""
    sys.exit(128 + signal.SIGTERM)


def main() -> None:
    """Entry point of the `mla-codegen` command."""
    signal.signal(signal.SIGTERM, _terminated)
    run(app)


if __name__ == "__main__":
    main()
