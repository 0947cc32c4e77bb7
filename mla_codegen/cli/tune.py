"""`mla-codegen tune`: the fastest settings of each shape on the GPU at hand, written back into the spec."""

import datetime
import importlib.util
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mla_codegen.cli import report as terminal
from mla_codegen.cli.common import Json, Kv, Spec, check_kv, fail, load_plans, need_installed, parse_shapes, without_nan
from mla_codegen.spec.datamodel import spell

if TYPE_CHECKING:
    from mla_codegen.measure.tune.search import Found

INTERRUPTED = 130


def tune(
    spec: Spec,
    shape: Annotated[
        list[str] | None, typer.Option("--shape", metavar="BATCHxKV_LEN", help="One of the spec's; may be repeated")
    ] = None,
    kv: Kv = None,
    trials: Annotated[int, typer.Option("--trials", min=1, help="Candidates of a shape and KV dtype")] = 64,
    timeout: Annotated[float, typer.Option("--timeout", min=1, help="Seconds for one candidate to compile")] = 120.0,
    seed: Annotated[int, typer.Option("--seed", help="Of the search and the random inputs")] = 0,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show the diff of the spec; write nothing")] = False,
    as_json: Json = False,
) -> None:
    """Search the settings of each shape on the GPU and write the winners into the spec, comments and order kept.

    mla-codegen tune specs/h200.yaml --dry-run

    mla-codegen tune specs/h200.yaml --shape 64x8192 --kv fp8_e4m3fn --trials 100

    Timings are kept: after an interruption the same command goes on where it stopped.
    """
    asked = parse_shapes(shape or [])
    (plan,) = load_plans([spec], Path("generated"))
    check_kv(kv, [plan])
    if plan.spec.batch_invariant:
        what = f"{spec} is batch-invariant: one kernel serves all its shapes, and tune searches settings for each shape"
        fix = "tune a copy without `batch_invariant`, then write the settings of the shape that counts into `defaults`"
        fail(f"{what}\n  fix: {fix}", 2)
    named = [s.call for s in plan.spec.shapes]
    for call in asked:
        if call not in named:
            fail(f"{spec} has no shape {spell(*call)}; it has {' '.join(spell(*one) for one in named)}", 2)
    missing = [name for name, module in (("optuna", "optuna"), ("ruamel.yaml", "ruamel")) if not _installed(module)]
    if missing:
        fail(f"tune needs {' and '.join(missing)}\n  fix: pip install 'mla-codegen[tune]'", 2)
    device, target = _device(plan.target.name, f"{spec} is for {plan.target.name} ({plan.target.title})")
    need_installed([plan])

    import triton
    from filelock import FileLock, Timeout

    from mla_codegen.inspect.compile import cache_dir
    from mla_codegen.measure.tune.apply import ApplyError, diff, new_text, write
    from mla_codegen.measure.tune.machine import GpuMachine
    from mla_codegen.measure.tune.search import Search
    from mla_codegen.measure.tune.space import Space
    from mla_codegen.measure.tune.store import Store

    folder = cache_dir() / "tune"
    folder.mkdir(parents=True, exist_ok=True)
    store = Store(folder / f"{target}.jsonl")
    kinds = [name for name in plan.spec.dtypes.kv if kv in (None, name)]
    founds: list[Found] = []
    try:
        with (
            FileLock(folder / f"{target}.lock", timeout=0),
            GpuMachine(device, triton.__version__, timeout, seed) as machine,
        ):
            for name in kinds:
                for one in plan.spec.shapes:
                    if asked and one.call not in asked:
                        continue
                    space = Space(plan.spec, one, name)
                    hints = [found.winner.resolved for found in founds if found.space.kv == name]
                    with terminal.progress("tune") as advance:
                        founds.append(Search(space, machine, store, trials, seed, advance, hints).run())
    except Timeout:
        fail("another tune is running on this machine: their timings would disturb each other", 2)
    except KeyboardInterrupt:
        fail(f"interrupted; {len(store)} timings are kept, and the same command goes on from there", INTERRUPTED)

    where = f"{device}, triton {triton.__version__}"
    day = datetime.date.today().isoformat()
    changes = problem = ""
    try:
        text, changed = new_text(spec, founds, where, day)
        changes = diff(spec, text, changed)
        if changes and not dry_run:
            write(spec, changed)
    except ApplyError as error:
        problem = str(error)
    if as_json:
        found_json = [_json(found) for found in founds]
        typer.echo(json.dumps(without_nan({"device": device, "found": found_json, "diff": changes})))
    else:
        show(founds)
        typer.echo(changes, nl=False)
        if changes:
            done = "nothing is written (--dry-run)" if dry_run else f"{spec} is written; next: mla-codegen build {spec}"
            typer.echo(done)
        else:
            typer.echo(f"{spec} stays as it is" if not problem else "")
    if problem:
        fail(problem, 1)
    raise typer.Exit(0 if all(found.best.good for found in founds) else 1)


def _installed(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def _device(target: str, what: str) -> tuple[str, str]:
    """(name, architecture) of the GPU at hand, found out by a process of its own; exit 2 if it will not do."""
    from mla_codegen.check.workers import Workers

    with Workers(1) as workers:
        ((_, outcome),) = workers.run(describe_gpu, [None], 120.0)
    if outcome.failure:
        fail(f"the GPU cannot be used: {outcome.failure}", 2)
    if outcome.value is None:
        fail("no GPU: torch sees none, and there is nothing to tune for without one", 2)
    name, at_hand = outcome.value
    if target not in ("portable", at_hand):
        fail(f"{what}; this is {at_hand} ({name})", 2)
    return name, at_hand


def describe_gpu(_: None) -> tuple[str, str] | None:
    """(name, architecture), or None without a GPU."""
    import torch

    from mla_codegen.runtime.builds import target_of

    if not torch.cuda.is_available():
        return None
    device = torch.device("cuda", torch.cuda.current_device())
    return torch.cuda.get_device_name(device), target_of(device)


def show(founds: "list[Found]") -> None:
    """One row a search: what it tried, what it won."""
    from rich.markup import escape

    from mla_codegen.measure.tune.settings import needed

    table = terminal._table(
        "KV", ">shape", ">tried", ">kept from before", ">dropped", ">now us", ">best us", "settings"
    )
    for found in founds:
        counts = (str(found.tried), str(found.reused), str(sum(found.dropped.values())))
        now = f"{found.now.us:.1f}" if found.now.good else "fails"
        words = " ".join(f"{knob}: {value}" for knob, value in needed(found.space, found.winner).items())
        if not found.best.good:
            words = f"[red]nothing runs:[/red] {escape(found.best.failure)}"
        best = f"{found.best.us:.1f}" if found.best.good else "-"
        table.add_row(found.space.kv, found.space.workload.shape, *counts, now, best, words or "as they are")
    terminal.out.print(table)
    reasons: dict[str, int] = {}
    for found in founds:
        for reason, count in found.dropped.items():
            reasons[reason] = reasons.get(reason, 0) + count
    for reason, count in sorted(reasons.items(), key=lambda item: -item[1])[:8]:
        terminal.out.print(f"dropped {count}: {escape(reason)}", soft_wrap=True)


def _json(found: "Found") -> dict[str, Any]:
    from dataclasses import asdict

    return {
        "kv": found.space.kv, "batch": found.space.shape.batch, "q_len": found.space.shape.q_len,
        "kv_len": found.space.shape.kv_len,
        "tried": found.tried, "reused": found.reused, "dropped": found.dropped,
        "now": asdict(found.now), "best": asdict(found.best), "settings": found.winner.resolved,
        "improved": found.improved,
    }  # fmt: skip
