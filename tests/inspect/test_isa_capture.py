"""A foreign file's launch becomes a job: its types, constants, alignment and options, with no kernel run."""

import json

import pytest

from mla_codegen.inspect import CaptureError, JobError, capture_job, load_job, parse_target
from mla_codegen.inspect.capture import for_arch

FOREIGN = """
import torch
import triton
import triton.language as tl
from task import input_t, output_t


@triton.jit
def before(x):
    tl.store(x, 0.0)


@triton.jit
def attend(q, kv, out, indptr, missing, scale, stride, odd, one, SPLITS: tl.constexpr, TYPE: tl.constexpr):
    tl.store(out, 0.0)


def custom_kernel(data: input_t) -> output_t:
    q, kv_data, qo_indptr, kv_indptr, config = data
    kv, scale = kv_data["fp8"]
    kv = kv.view(torch.float8_e4m3fn).view(-1, 576)
    assert kv.shape[0] == config["batch_size"] * 512
    assert kv_indptr.tolist() == [0, 512, 1024]
    out = torch.empty(q.shape[0], 16, 512, dtype=torch.bfloat16)
    before[(1,)](out)
    attend[(8,)](
        q, kv, out, kv_indptr, None, config["sm_scale"], kv.stride(0), 7, 1, SPLITS=4, TYPE=tl.float8e4nv,
        num_warps=8, num_stages=2, waves_per_eu=2,
    )
    raise RuntimeError("nothing behind the launch is reached")
"""


@pytest.fixture
def foreign(tmp_path):
    path = tmp_path / "foreign.py"
    path.write_text(FOREIGN)
    return str(path)


def test_a_launch_becomes_a_job(foreign):
    job = capture_job(foreign, "attend", "gfx942", batch=2, kv_len=512, options={"num_stages": 3})
    pointers = {"q": "*bf16", "kv": "*fp8e4nv", "out": "*bf16", "indptr": "*i32"}
    constants = {"missing": None, "one": 1, "SPLITS": 4, "TYPE": "=tl.float8e4nv"}
    typed = {name: kind for name, kind in job.signature.items() if kind != "constexpr"}
    assert typed == {**pointers, "scale": "fp32", "stride": "i32", "odd": "i32"}
    assert job.constexprs == constants
    assert job.divisible == {*pointers, "stride"}
    assert job.within_2gb == set(pointers)
    assert job.options == {"num_warps": 8, "num_stages": 3, "waves_per_eu": 2}


def test_options_of_the_other_vendor_are_dropped():
    options = {"num_warps": 8, "waves_per_eu": 2, "maxnreg": 128}
    assert for_arch(options, "sm_90") == {"num_warps": 8, "maxnreg": 128}
    assert for_arch(options, "gfx942") == {"num_warps": 8, "waves_per_eu": 2}


def test_host_code_that_fails_before_the_launch_says_why(foreign):
    with pytest.raises(CaptureError, match="did not come to the launch of attend: AssertionError"):
        capture_job(foreign, "attend", "gfx942", batch=3, kv_len=64)


def test_targets_and_written_jobs(tmp_path):
    assert parse_target("a/b.py:k") == ("a/b.py", "k")
    for wrong in ("b.py", "b.py:", "b.txt:k", "b.py:1k", ":k"):
        with pytest.raises(JobError, match=r"FILE\.py:KERNEL"):
            parse_target(wrong)
    written = tmp_path / "job.json"
    fields = {"path": "k.py", "kernel": "k", "arch": "sm_90", "signature": {"x": "*fp32"}, "divisible": ["x"]}
    written.write_text(json.dumps(fields))
    job = load_job(str(written))
    assert (job.path, job.divisible) == (str(tmp_path / "k.py"), {"x"})
    written.write_text(json.dumps({**fields, "archs": []}))
    with pytest.raises(JobError, match="not a job"):
        load_job(str(written))
