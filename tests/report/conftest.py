"""A page with everything on it, from made-up numbers: no compiler, no GPU."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "measure"))

from bench_fakes import report as fake_bench

from mla_codegen.inspect import Failed, HotLoop, Occupancy, Report, Row
from mla_codegen.inspect import plans as inspection
from mla_codegen.inspect.limits import check
from mla_codegen.inspect.report import complete
from mla_codegen.plan.resolve import Plan, make_plan
from mla_codegen.report.gather import history_of
from mla_codegen.report.page import Inspected, page
from mla_codegen.spec.load import parse_spec

SPEC = """\
target: sm_90  # <the H200 & others>
dtypes: {q: bf16, kv: [fp8_e4m3fn, bf16], out: bf16}
defaults: {family: triton, block_n: 32}
shapes:
  - {batch: 4, kv_len: 1024, splits: 8, per_kv: {bf16: {num_warps: 8}}}
limits: {registers: 168, resident_programs_at_least: 2, hot_loop_per_64_rows: {matrix: 80}}
"""


def described(kernel: str, registers: int) -> Report:
    hot = HotLoop("L1", (1, 2), 1, complete({"matrix": 40}), {"HMMA": 40}, {}, 0, 0, rows=32)
    return Report(
        kernel, "k.py", "sm_90", "3.6.0", 1.0, 4096, registers, 0, 0, 0, 0, 0, 65536, 4,
        Occupancy(3, 3, "lds", {"lds": 3}), complete({"matrix": 40}), {}, hot,
    )  # fmt: skip


@pytest.fixture(scope="session")
def plan() -> Plan:
    return make_plan(parse_spec(SPEC, "mine.yaml").spec, "mine")


@pytest.fixture(scope="session")
def inspected(plan: Plan) -> Inspected:
    """The first kernel breaks its limit of registers, the second does not compile, the others are as they should be."""
    subjects = inspection.subjects_of([(plan, list(plan.kernels))])
    rows = []
    for number, subject in enumerate(subjects):
        if number == 1:
            failed = Failed(subject.case.job, "3.6.0", "the compiler said no", "error: <bad> & worse", 1.0)
            rows.append(Row(subject.case, failure=failed))
            continue
        report = described(subject.stage.kernel, 200 if number == 0 else 100)
        rows.append(Row(subject.case, report, broken=tuple(check(report, subject.case.limits, row="it"))))
    return Inspected(subjects, rows, inspection.calls(subjects, rows))


@pytest.fixture(scope="session")
def history(plan: Plan, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four candidates of one shape: the built one, a faster one, a wrong one, one of another model; and a torn line."""
    kernel = next(one for one in plan.kernels if one.call and one.kv == "bf16")
    settings = {name: one.value for name, one in kernel.resolved.items() if one.value is not None}
    record = {
        "key": "k", "shape": "4x1024", "kv": "bf16", "heads": 16, "latent": 512, "rope": 64, "settings": settings,
        "device": "NVIDIA H200", "triton": "3.6.0", "us": 20.0, "failure": "",
    }  # fmt: skip
    records = [
        record,
        {**record, "settings": {**settings, "splits": 16}, "us": 15.0},
        {**record, "us": float("nan"), "failure": "wrong: error over 3e-03"},
        {**record, "heads": 128, "us": 1.0},
    ]
    path = tmp_path_factory.mktemp("tune") / "sm_90.jsonl"
    path.write_text("".join(f"{json.dumps(one)}\n" for one in records) + '{"key": "torn')
    return path


@pytest.fixture(scope="session")
def whole(plan: Plan, inspected: Inspected, history: Path) -> str:
    bench = replace(fake_bench(), device="NVIDIA <H200>")
    return page(plan, SPEC, inspected, "", bench, history_of(plan, history))
