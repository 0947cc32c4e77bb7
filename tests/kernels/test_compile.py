"""What the compiler makes of stage 1 for GPUs that are not here, and which arguments make binaries of their own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from builds import build
from harness import REPORTS, make_plans, make_spec

from mla_codegen.inspect import inspect_cases
from mla_codegen.inspect.plans import subjects_of

FOREIGN = REPORTS["e4m3fn-on-gfx942"]


@pytest.mark.parametrize("options", [["packed_fp8"], ["packed_fp8", "fp8_mma"]], ids="-".join)
def test_a_foreign_fp8_type_is_not_decoded_in_software(options: list[str]) -> None:
    """Software decoding of e4m3fn comes to thousands of selects."""
    shapes = [{"batch": 64, "kv_len": 8192, "splits": 4}]
    spec = make_spec(FOREIGN["arch"], kv=[FOREIGN["kv"]], optimizations=["exp2", *options], shapes=shapes)
    plan = make_plans(spec)
    found = [s for s in subjects_of([(plan, [plan.kernels[0]])]) if s.stage.kernel == "stage1" and not s.large]
    (row,) = inspect_cases([subject.case for subject in found], parallel=1)
    assert row.report is not None, row.failure
    assert row.report.totals["select"] < FOREIGN["most_selects"]


@pytest.mark.parametrize("target", ["gfx950", "sm_90"])
def test_general_kernels_compile(target: str) -> None:
    """The interpreter lets a name change its type in a loop; the compiler does not."""
    plan = make_plans(make_spec(target, kv=["bf16"], optimizations=["exp2", "peeled_tail"], heads=20))
    found = [subject for subject in subjects_of([(plan, plan.general("bf16"))]) if not subject.large]
    assert {subject.stage.kernel for subject in found} == {"stage1", "stage2"}
    for row in inspect_cases([subject.case for subject in found], parallel=1):
        assert row.failure is None, row.failure.reason


SPECIALISE = """
import importlib, sys, torch
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime.jit import create_function_from_signature
sys.path.insert(0, sys.argv[1])
module = importlib.import_module(sys.argv[3])
bf16, i32 = torch.bfloat16, torch.int32
for stage in ("stage1", "stage2"):
    fn = getattr(module, stage)
    bind = create_function_from_signature(fn.signature, fn.params, make_backend(GPUTarget("cuda", 90, 32)))
    seen = set()
    for batch in map(int, sys.argv[2].split(",")):
        values = {"q": torch.zeros(batch, 16, 576, dtype=bf16), "kv": torch.zeros(64, 576, dtype=bf16),
                  "partial": torch.zeros(64), "partial_lse": torch.zeros(64), "out": torch.zeros(64, dtype=bf16),
                  "lse": torch.zeros(64), "qo_indptr": torch.zeros(batch + 1, dtype=i32),
                  "kv_indptr": torch.zeros(batch + 1, dtype=i32), "kv_visible": None, "kv_scale": None,
                  "sm_scale": 0.1, "batch": batch, "q_len": batch, "stride_qt": 9216, "stride_qh": 576,
                  "splits": batch + 1, "out_layout": None}
        _, specialization, _ = bind(*[values[name] for name in fn.arg_names], debug=False)
        seen.add(str(specialization))
    assert len(seen) == 1, (stage, seen)
"""


@pytest.mark.parametrize("general", [0, 1], ids=["direct", "splits"])
def test_calls_of_any_batch_share_one_binary(tmp_path: Path, general: int) -> None:
    """Numbers that are 1 or divisible by 16 make no binaries of their own: first calls would wait for a compiler."""
    plan = make_plans(make_spec(kv=["bf16"], optimizations=["exp2"]))
    build([plan], tmp_path / "binaries")
    kernel = plan.general("bf16")[general]
    script = SPECIALISE if general else SPECIALISE.replace('("stage1", "stage2")', '("stage1",)')
    env = {**os.environ, "TRITON_INTERPRET": "0"}
    batches = ",".join(map(str, REPORTS["one-binary"]["batches"]))
    command = [sys.executable, "-c", script, str(tmp_path), batches, f"binaries.{plan.name}.{kernel.name}"]
    done = subprocess.run(command, capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr[-2000:]
