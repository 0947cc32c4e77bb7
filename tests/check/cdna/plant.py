"""Faults planted in compiled kernels, one at a time, and how many of them the executor reports.

    python tests/check/cdna/plant.py specs/mi300.yaml bf16_b256_kv1024

Planted in every kernel of that file, where a run of it passes: each s_waitcnt removed, each of its counters one too
lax, each s_barrier removed. And each s_nop removed from the text, which `inspect.hazards` must find.
"""

from __future__ import annotations

import importlib
import re
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from mla_codegen.check.cdna import scalar
from mla_codegen.check.cdna.call import Launch, Session
from mla_codegen.check.cdna.listing import Instruction
from mla_codegen.check.cdna.machine import Kernel
from mla_codegen.check.cdna.program import waiting
from mla_codegen.check.reference import make_case, poisoned_scratch
from mla_codegen.inspect import hazards
from mla_codegen.plan.resolve import KernelPlan, Plan
from mla_codegen.publish.write import build

WAIT, LAX, BARRIER, NOP = "wait removed", "wait one too lax", "barrier removed", "s_nop removed"
MOST = {"vmcnt": 63, "lgkmcnt": 15}  # what a counter can ask for


def launches_of(plan: Plan, kernel: KernelPlan, arch: str, folder: str) -> list[Launch]:
    """The launches of one small call of a kernel: a few tiles a split, and lengths that are no whole tiles."""
    import torch

    name = f"planted_{plan.name}_{kernel.name}"
    build([plan], Path(folder) / name)
    sys.path.insert(0, folder)
    module = importlib.import_module(f"{name}.{plan.name}.{kernel.name}")
    splits = kernel.splits or 2
    case = make_case(
        [kernel.block_n * 3 * splits + 5, 3, 0],
        heads=kernel.heads, latent=kernel.latent, rope=kernel.rope, q_dtype=kernel.q, kv_dtype=kernel.kv,
    )  # fmt: skip
    out = torch.empty(3, kernel.heads, kernel.latent, dtype=torch.bfloat16)
    lse = torch.empty(3, kernel.heads)
    args = (case.q, case.kv, case.qo_indptr, case.kv_indptr, None, case.kv_scale, case.sm_scale, out, lse)
    session = Session(arch)
    with session.of(module), poisoned_scratch():
        module.run(*args, *(() if kernel.splits else (splits,)))
    return session.launches


def faults(kernel: Kernel, executed: Sequence[int]) -> Iterator[tuple[str, Instruction, int | None, int | None]]:
    """(what, instruction, vmcnt, lgkmcnt) of every fault of the executor's kinds that a run can meet."""
    for one in kernel.program.instructions:
        if not executed[one.number]:
            continue
        if one.opcode == "s_barrier":
            yield BARRIER, one, None, None
        if one.opcode != "s_waitcnt":
            continue
        vm, lgkm = scalar.waits(one)
        yield WAIT, one, None, None
        if vm is not None and vm < MOST["vmcnt"]:
            yield LAX, one, vm + 1, lgkm
        if lgkm is not None and lgkm < MOST["lgkmcnt"]:
            yield LAX, one, vm, lgkm + 1


@contextmanager
def planted(kernel: Kernel, what: str, one: Instruction, vm: int | None, lgkm: int | None) -> Iterator[None]:
    """Within, the kernel has the fault."""
    program, number = kernel.program, one.number
    step = program.steps[number]
    if what == BARRIER:
        program.instructions[number] = replace(one, opcode="s_nop")
    else:
        program.steps[number] = replace(step, run=waiting(vm, lgkm, kernel))
    try:
        yield
    finally:
        program.steps[number], program.instructions[number] = step, one


def try_all(launch: Launch) -> dict[str, list[tuple[bool, int]]]:
    """what -> (reported, line) of every planted fault."""
    counts, clean = launch.again()
    assert not clean, clean
    found: dict[str, list[tuple[bool, int]]] = {}
    for what, one, vm, lgkm in faults(launch.executable, list(counts.executed)):
        with planted(launch.executable, what, one, vm, lgkm):
            try:
                _, findings = launch.again()
                reported = bool(findings)
            except (RuntimeError, NotImplementedError, ValueError):  # as by an address that no wait made valid
                reported = True
        found.setdefault(what, []).append((reported, one.line))
    found[NOP] = list(without_nops(launch))
    return found


def without_nops(launch: Launch, every: int = 1) -> Iterator[tuple[bool, int]]:
    """(reported, line) with each s_nop, or each of `every` so many, left out of the text."""
    lines = launch.compiled.asm.splitlines()
    places = [number for number, line in enumerate(lines) if re.match(r"\s+s_nop ", line)]
    for number in places[::every]:
        text = "\n".join([*lines[:number], "", *lines[number + 1 :]])
        yield bool(hazards.find(text, launch.kernel, launch.compiled.job.arch)), number + 1


def main(spec: str, names: Sequence[str]) -> None:
    from mla_codegen.cli.common import load_plans

    (plan,) = load_plans([Path(spec)], Path("generated"))
    for kernel in plan.kernels:
        if kernel.name not in names:
            continue
        with tempfile.TemporaryDirectory() as folder:
            for launch in launches_of(plan, kernel, plan.target.name, folder):
                for what, tried in try_all(launch).items():
                    unseen = [line for reported, line in tried if not reported]
                    caught = len(tried) - len(unseen)
                    print(
                        f"{kernel.name}:{launch.kernel}  {what}: {caught} of {len(tried)}; unseen at {unseen}",
                        flush=True,
                    )


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
