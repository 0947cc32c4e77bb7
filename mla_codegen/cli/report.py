"""What a terminal shows: tables and progress. Everything here prints; nothing decides."""

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from mla_codegen.catalog.optimizations import OPTIMIZATIONS
from mla_codegen.catalog.targets import TARGETS
from mla_codegen.plan.resolve import KernelPlan, Plan

out = Console(width=None if sys.stdout and sys.stdout.isatty() else 180)  # a pipe has no width: do not fold names
SAY_EVERY = 10.0  # seconds between lines of progress in a log
err = Console(stderr=True, soft_wrap=True)


@contextmanager
def progress(what: str) -> Iterator[Callable[[str, int], None]]:
    """A bar on stderr; the yielded function advances it by one: (what was done, how many there are).

    Where stderr is no terminal, a line every so often: a log then shows that something happens.
    """
    if not err.is_terminal:
        with _lines(what) as advance:
            yield advance
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=err, transient=True) as bar:
        task = bar.add_task(what, total=None)

        def advance(name: str, total: int) -> None:
            bar.update(task, total=total, advance=1, description=f"{what} {name}")

        yield advance


@contextmanager
def _lines(what: str) -> Iterator[Callable[[str, int], None]]:
    begin, over = time.monotonic(), threading.Event()
    done, total = 0, 0

    def advance(name: str, count: int) -> None:
        nonlocal done, total
        done, total = done + 1, count

    def say() -> None:
        while not over.wait(SAY_EVERY):
            of = f"{done} of {total}" if total else "at work"
            err.print(f"{what}: {of}, {time.monotonic() - begin:.0f} s", markup=False, highlight=False)

    talking = threading.Thread(target=say, daemon=True)
    talking.start()
    try:
        yield advance
    finally:
        over.set()
        talking.join()


def _table(*columns: str, title: str = "") -> Table:
    table = Table(title=title or None, title_justify="left", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for column in columns:
        right = column.startswith(">")
        table.add_column(column.lstrip(">"), justify="right" if right else "left", overflow="fold")
    return table


def shapes(plans: list[Plan]) -> None:
    """One row a kernel."""
    table = _table(
        "spec", "KV", ">batch", ">q_len", ">kv_len", ">splits", ">tile", ">columns", ">warps", ">stages", ">shared KB",
        "options",
    )  # fmt: skip
    for plan in plans:
        for k in plan.kernels:
            splits = str(k.splits) if k.splits else "run time"
            table.add_row(
                plan.name, k.kv, str(k.batch or "any"), str(k.q_len), str(k.kv_len or "any"), splits, f"{k.block_n}",
                f"{k.block_h}", str(k.num_warps), str(k.num_stages), f"{k.shared_bytes / 1024:.0f}",
                " ".join(k.optimizations),
            )  # fmt: skip
    out.print(table)


def optimizations() -> None:
    table = _table("optimization", "meaning", "needs", "targets")
    for option in OPTIMIZATIONS.values():
        targets = [t.name for t in TARGETS.values() if option.refused_on(t) is None]
        where = "all" if len(targets) == len(TARGETS) else " ".join(targets)
        table.add_row(option.name, option.meaning, option.needs, where)
    out.print(table)


def targets() -> None:
    table = _table("target", "GPU", ">CUs / SMs", ">XCDs", ">shared KB", "fp8 MMA", "families", "a spec may also say")
    for t in TARGETS.values():
        table.add_row(
            t.name, t.title, str(t.compute_units), str(t.xcds), f"{t.shared_bytes / 1024:.0f}",
            " ".join(sorted(t.fp8_mma)) or "-", " ".join(t.families), ", ".join(t.gpus),
        )  # fmt: skip
    out.print(table)


def explanation(plan: Plan, kernel: KernelPlan, rule: str, splits: int) -> None:
    """Every resolved number of a kernel and where it came from."""
    title = escape(kernel.title.replace("\n", " "))
    out.print(f"[bold]{plan.name}/{kernel.name}.py[/bold]  {title}", soft_wrap=True)
    out.print(f"chosen because {escape(rule)}", soft_wrap=True)
    table = _table("setting", ">value", "from")
    for row in kernel.explained(splits):
        table.add_row(*row)
    out.print(table)
    out.print("optimizations: " + (" ".join(kernel.optimizations) or "none"))
    for line in kernel.not_taken:
        out.print(f"not taken: {escape(line)}")


def verification(results: list[Any]) -> None:
    table = _table("spec", "kernel", "on", ">error", ">bound", ">LSE error", ">s", "")
    for r in results:
        verdict = "[green]pass[/green]" if r.passed else f"[red]FAIL[/red] {escape(r.failure)}"
        shown = ((r.error, ".1e"), (r.bound, ".0e"), (r.lse_error, ".0e"), (r.seconds, ".1f"))
        numbers = ("-" if number != number else format(number, form) for number, form in shown)
        table.add_row(r.spec, r.kernel, r.on, *numbers, verdict)
    out.print(table)
    failed = sum(not r.passed for r in results)
    out.print(f"{len(results) - failed} of {len(results)} kernels pass" + (f", {failed} FAIL" if failed else ""))


def dynamic(counted: dict[str, Any]) -> None:
    """What stage 1 did for 64 KV rows: kernel -> outcome of its count."""
    columns = (
        ">matrix",
        ">trans",
        ">valu",
        ">LDS rd",
        ">LDS wr",
        ">loads",
        ">waits met",
        ">LDS KiB",
        ">LDS clk",
        ">least",
    )
    table = _table("kernel", *columns, ">KV KiB", ">read", title="Executed, for 64 KV rows")
    for label, outcome in counted.items():
        one = outcome.value
        if one is None:
            table.add_row(label, f"[red]{escape(outcome.failure)}[/red]")
            continue
        count = one.instructions
        wave = [count[name] for name in ("matrix", "transcendental", "valu", "lds_read", "lds_write", "global_load")]
        lds = [(one.lds_read_bytes + one.lds_written_bytes) / 1024, one.lds_cycles, one.lds_least]
        row = [*wave, one.waits, *lds, one.kv_bytes / 1024]
        table.add_row(label, *(f"{value:.4g}" for value in row), f"{one.kv_reads:g} x")
    out.print(table)
    out.print(
        "Instructions and waits of one wave, LDS and KV of all; LDS clk by AMD's bank rule, least: without conflicts; "
        "read: most times that a KV byte was loaded"
    )
