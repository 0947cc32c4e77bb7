"""What a bench compares: a spec's own build, called as its users call it, and whatever else has the same call."""

import importlib
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mla_codegen.catalog.bounds import BOUND_FP8
from mla_codegen.check.modules import import_file
from mla_codegen.check.reference import Case
from mla_codegen.check.workers import first_line
from mla_codegen.measure.workload import Workload, call_data, kv_arguments, workload_of
from mla_codegen.plan.resolve import Plan
from mla_codegen.publish import write


class BenchError(Exception):
    """What was asked for cannot be timed here; `str()` says why and what to do."""


@dataclass(frozen=True)
class Implementation:
    """Something to call with what `prepare` makes of a case: as `custom_kernel` takes it, if nothing else is said.

    `kernel` names what serves a workload, if that is known.
    """

    name: str
    call: Callable[[Any], Any]
    serves: Callable[[Workload], bool]
    kernel: Callable[[Workload], str]
    bound: Callable[[Workload], float]
    prepare: Callable[[Workload, Case], Any] = call_data


def build(plan: Plan, folder: Path, name: str) -> str:
    """Write the plan's build into `folder` as a package; what it is called: `name`, and the end of the folder's name.

    So two builds of one process never have the same module names, of which Python would import the first twice.
    """
    package = f"{name}_{folder.name.rpartition('-')[2]}"
    write.build([plan], folder / package)
    return package


def dispatch(folder: str, package: str) -> Any:
    """The `dispatch` module of a package in `folder`."""
    if folder not in sys.path:
        sys.path.insert(0, folder)
    importlib.invalidate_caches()
    return importlib.import_module(f"{package}.dispatch")


def calling(folder: str, package: str) -> tuple[Callable[[Any], Any], Callable[[Workload, Case], Any]]:
    """(call, prepare) of a package: `custom_kernel`, or of KV that is not ragged `mla_decode`, over the case's KV."""
    module = dispatch(folder, package)
    (build,) = module.DISPATCHER.builds
    if build.layout is None:
        return module.custom_kernel, call_data

    def prepare(workload: Workload, case: Case) -> dict[str, Any]:
        given = {"q": case.q, "qo_indptr": case.qo_indptr, "sm_scale": case.sm_scale, "kv_scale": case.kv_scale}
        hints = {"max_kv_len": workload.kv_len, "max_q_len": workload.q_len}
        return {**given, **hints, **kv_arguments(case, build)}

    return lambda given: module.mla_decode(**given), prepare


def ours(plan: Plan, folder: str, package: str) -> Implementation:
    """The kernels of a build, called as its users call them."""

    def chosen(workload: Workload) -> tuple[str, int | None]:
        return plan.choice(workload.kv).choose(
            workload.query_rows, workload.kv_len, workload.kv_len, workload.batch, workload.q_len
        )

    def kernel(workload: Workload) -> str:
        name, splits = chosen(workload)
        return f"{name} ({splits} splits)" if splits else name

    def serves(workload: Workload) -> bool:
        named = workload.kv in plan.spec.dtypes.kv
        return named and workload == workload_of(plan, workload.kv, workload.batch, workload.kv_len, workload.q_len)

    def bound(workload: Workload) -> float:
        name, _ = chosen(workload)
        return next(k.error_bound for k in plan.kernels if k.name == name)

    call, prepare = calling(folder, package)
    return Implementation(plan.name, call, serves, kernel, bound, prepare)


def other(spelled: str) -> Implementation:
    """`module:function` or `file.py:function`, imported as from the current folder. Raises BenchError."""
    where, _, function = spelled.rpartition(":")
    if not where or not function:
        raise BenchError(f"--against {spelled}: write module:function or file.py:function")
    try:
        if where.endswith(".py"):
            module = import_file(Path(where), f"against_{Path(where).stem}")
        else:
            if "" not in sys.path and os.getcwd() not in sys.path:
                sys.path.insert(0, os.getcwd())
            module = importlib.import_module(where)
    except Exception as error:
        raise BenchError(f"--against {spelled}: {where} cannot be imported: {first_line(error)}") from error
    call = getattr(module, function, None)
    if not callable(call):
        raise BenchError(f"--against {spelled}: {where} has no function {function}")
    return Implementation(spelled, call, lambda _: True, lambda _: "", lambda _: BOUND_FP8)
