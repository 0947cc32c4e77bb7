"""See what Triton's compiler made of a kernel, for AMD and NVIDIA targets, with no GPU present.

`inspect_cases` does it all; the modules behind it: `job` (what to compile), `compile` (processes and cache), `versions`
(other Triton releases), `capture` (someone else's kernel), `amd`, `nvidia` and `listing` (assembly), `describe` (the
report), `limits`, `model`, `table`.
"""

from mla_codegen.inspect.capture import CaptureError, capture_job, load_job, parse_target
from mla_codegen.inspect.compile import Compiled, Failed, compile_jobs
from mla_codegen.inspect.describe import describe
from mla_codegen.inspect.job import CompileJob, JobError
from mla_codegen.inspect.limits import Broken, LimitError, check, limit_names, validate
from mla_codegen.inspect.model import ModelError, Prediction, Workload, predict
from mla_codegen.inspect.report import CLASSES, HotLoop, Occupancy, Report
from mla_codegen.inspect.run import Case, Row, inspect_cases
from mla_codegen.inspect.versions import VersionError, ensure_triton

__all__ = [
    "CLASSES",
    "Broken",
    "CaptureError",
    "Case",
    "CompileJob",
    "Compiled",
    "Failed",
    "HotLoop",
    "JobError",
    "LimitError",
    "ModelError",
    "Occupancy",
    "Prediction",
    "Report",
    "Row",
    "VersionError",
    "Workload",
    "capture_job",
    "check",
    "compile_jobs",
    "describe",
    "ensure_triton",
    "inspect_cases",
    "limit_names",
    "load_job",
    "parse_target",
    "predict",
    "validate",
]
