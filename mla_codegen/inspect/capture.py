"""Put someone else's kernel beside ours: learn how a file launches a kernel by calling its host code without a GPU.

The file's entry (`custom_kernel(data)`) is called in a process of its own with CPU tensors of the wanted shape;
Triton's launch is intercepted, so that no kernel runs, and its arguments become a `CompileJob`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mla_codegen.inspect.compile import Failed, run_request
from mla_codegen.inspect.job import CompileJob, JobError


class CaptureError(RuntimeError):
    """The file did not come to the launch; says why, with the end of what it printed."""


def parse_target(text: str) -> tuple[str, str]:
    """`FILE.py:KERNEL` -> (file, kernel). JobError for anything else."""
    path, _, kernel = text.rpartition(":")
    if not path.endswith(".py") or not kernel.isidentifier():
        raise JobError(f"{text!r}: write FILE.py:KERNEL, a Python file and the name of a @triton.jit function in it")
    return path, kernel


def capture_job(
    path: str,
    kernel: str,
    arch: str,
    *,
    batch: int,
    kv_len: int,
    heads: int = 16,
    width: int = 576,
    entry: str = "custom_kernel",
    options: Mapping[str, Any] | None = None,
    timeout_s: float = 120.0,
) -> CompileJob:
    """The job for the first launch of `kernel` that `entry(data)` makes for this call.

    data     (q, {"fp8": (kv, scale), "bf16": kv}, qo_indptr, kv_indptr, config) as `custom_kernel` takes it: one query
             row a request, `batch` requests of `kv_len` rows of `width` numbers, contents undefined
    options  compiler options that replace the launch's own
    Raises CaptureError when the host code fails before the launch (a call into CUDA, a library that is not here).
    """
    case = {"batch": batch, "kv_len": kv_len, "heads": heads, "width": width}
    request = {"file": str(Path(path).resolve()), "kernel": kernel, "entry": entry, "case": case}
    found = run_request(request, CompileJob(path, kernel, arch, {}), timeout_s=timeout_s)
    if isinstance(found, Failed):
        raise CaptureError(f"{path}: {entry} did not come to the launch of {kernel}: {found.reason}\n{found.tail}")
    return CompileJob(
        path,
        kernel,
        arch,
        found["signature"],
        found["constexprs"],
        for_arch({**found["options"], **(options or {})}, arch),
        frozenset(found["divisible"]),
        within_2gb=frozenset(found["within_2gb"]),
    )


def for_arch(options: dict[str, Any], arch: str) -> dict[str, Any]:
    """Options that the target's compiler has: the other vendor's are dropped, as a launch there would refuse them."""
    foreign = ("maxnreg",) if arch.startswith("gfx") else ("waves_per_eu", "matrix_instr_nonkdim", "kpack")
    return {name: value for name, value in options.items() if name not in foreign}


def load_job(path: str) -> CompileJob:
    """A job written as JSON with the fields of CompileJob, for kernels that no `custom_kernel` launches.

    `path` inside the file is taken relative to the file. Raises JobError.
    """
    try:
        fields = json.loads(Path(path).read_text(encoding="utf-8"))
        fields["path"] = str(Path(path).parent / fields["path"])
        return CompileJob(**fields)
    except (OSError, ValueError, TypeError, KeyError) as error:
        if isinstance(error, JobError):
            raise
        raise JobError(f"{path}: not a job: {type(error).__name__}: {error}") from error
