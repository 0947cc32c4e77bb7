"""The commands: parse, call, print. Exit codes: 0 done, 1 a check failed, 2 bad input."""

import json
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import typer

from mla_codegen import __version__
from mla_codegen.cli import report
from mla_codegen.cli.bench import bench
from mla_codegen.cli.bundle import bundle
from mla_codegen.cli.common import Json, Out, Spec, Specs, fail, load_plans
from mla_codegen.cli.entry import Commands, run
from mla_codegen.cli.inspect import inspect
from mla_codegen.cli.tune import tune
from mla_codegen.plan.resolve import KernelPlan
from mla_codegen.publish import write
from mla_codegen.publish.write import find_drift, fresh_build, rebuild_command
from mla_codegen.spec.errors import UnknownName

app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
    help="""Specialised split-KV kernels for MLA decode, from a YAML spec.

    mla-codegen init --model deepseek-v3 --target sm_90 > specs/mine.yaml

    mla-codegen build specs/mine.yaml

    mla-codegen verify specs/mine.yaml

    then in Python: `from generated.dispatch import custom_kernel`
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
    force: Annotated[bool, typer.Option("--force", help="Overwrite files edited by hand, or not ours")] = False,
    as_json: Json = False,
) -> None:
    """Render the kernels of one or several specs.

    mla-codegen build specs/mi300.yaml

    mla-codegen build specs/*.yaml --out generated

    Builds of other specs in the same folder stay, and the dispatcher serves them all.
    """
    plans = load_plans(specs, out)
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
def check(specs: Specs, out: Out = Path("generated"), as_json: Json = False) -> None:
    """Fail, with a diff, if the generated folder differs from a fresh build.

    mla-codegen check specs/*.yaml
    """
    plans = load_plans(specs, out)
    files = fresh_build(plans, out)
    drifts = find_drift(files, out, {plan.name for plan in plans})
    if as_json:
        typer.echo(json.dumps([{"kind": d.kind, "path": d.path, "diff": d.diff} for d in drifts]))
    else:
        for drift in drifts:
            typer.echo(f"{drift.kind}: {out / drift.path}")
            typer.echo(drift.diff, nl=False)
        mend = f"mend: mla-codegen build {' '.join(map(str, specs))} --out {out}"
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
                "xcds": t.xcds, "fp8_mma": sorted(t.fp8_mma), "families": list(t.families),
            }
            for t in TARGETS.values()
        ]  # fmt: skip
        typer.echo(json.dumps(rows))
    else:
        report.targets()


@app.command()
def explain(
    spec: Spec,
    batch: Annotated[int, typer.Option("--batch", min=1, help="Query rows of the call")],
    kv_len: Annotated[int, typer.Option("--kv-len", min=0, help="KV rows of a request")],
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
    module, splits, rule = plan.choice(name).explain(batch, kv_len)
    kernel = next(k for k in plan.kernels if k.name == module)
    if as_json:
        typer.echo(json.dumps({**kernel_json(kernel), "rule": rule, "splits": splits or kernel.splits}))
    else:
        report.explanation(plan, kernel, rule, splits or kernel.splits or 1)


def kernel_json(kernel: KernelPlan) -> dict[str, Any]:
    return {
        "kernel": kernel.name, "spec": kernel.spec_name, "target": kernel.target, "family": kernel.family,
        "batch": kernel.batch, "kv_len": kernel.kv_len, "kv": kernel.kv, "products_in": kernel.compute,
        "shared_bytes": kernel.shared_bytes, "optimizations": list(kernel.optimizations),
        "not_taken": list(kernel.not_taken), "page_size": kernel.page_size,
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
    model: Annotated[str, typer.Option("--model", help="A model's name, e.g. deepseek-v3")],
    target: Annotated[str, typer.Option("--target", help="An architecture, e.g. sm_90, gfx942, portable")],
) -> None:
    """Print a commented starter spec.

    mla-codegen init --model deepseek-v3 --target gfx942 > specs/mine.yaml
    """
    from mla_codegen.spec.starter import starter

    try:
        typer.echo(starter(model, target), nl=False)
    except UnknownName as error:
        fail(str(error), 2)


@app.command()
def verify(
    specs: Specs,
    device: Annotated[Device, typer.Option("--device", help="auto: the GPU if it is the spec's")] = Device.auto,
    seed: Annotated[int, typer.Option("--seed", help="Of the random inputs")] = 0,
    as_json: Json = False,
) -> None:
    """Check each kernel of a spec against float64, on the GPU if there is one, else in Triton's interpreter.

    mla-codegen verify specs/portable.yaml

    mla-codegen verify specs/*.yaml --json

    mla-codegen verify submission.py

    A Python file is taken for a submission, ours or another, and called as a leaderboard calls it.
    """
    from mla_codegen.check.verify import Result, verify_plans

    submissions = [path for path in specs if path.suffix == ".py"]
    plans = load_plans([path for path in specs if path not in submissions], Path("generated"))
    missing = [str(path) for path in submissions if not path.is_file()]
    if missing:
        fail(f"{', '.join(missing)}: no such file", 2)
    results: list[Result] = []
    if plans:
        with report.progress("verify") as advance:
            results += verify_plans(
                plans, device=device.value, seed=seed, progress=lambda result, total: advance(result.kernel, total)
            )
    for path in submissions:
        from mla_codegen.check.leaderboard import verify_submission

        with report.progress(f"verify {path}") as advance:
            results += verify_submission(
                path, device=device.value, seed=seed, progress=lambda result, total: advance(result.kernel, total)
            )
    if as_json:
        typer.echo(json.dumps([result.json() for result in results]))
    else:
        report.verification(results)
    raise typer.Exit(0 if all(result.passed for result in results) else 1)


app.command()(inspect)
app.command()(bench)
app.command()(tune)
app.command()(bundle)


@app.callback(invoke_without_command=True)
def _version(version: Annotated[bool, typer.Option("--version", help="Print the version")] = False) -> None:
    if version:
        typer.echo(__version__)
        raise typer.Exit


def main() -> None:
    """Entry point of the `mla-codegen` command."""
    run(app)


if __name__ == "__main__":
    main()
