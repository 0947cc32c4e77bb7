"""A submission as the leaderboard calls it, held to float64: its inputs, its own check, and ours, which is stricter.

The leaderboard lets 5 % of the elements be off by more than 0.1, which an output of half the KV passes.
"""

import re
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from mla_codegen.catalog.bounds import BOUND_16_BIT
from mla_codegen.catalog.targets import TARGETS, Target, find_target
from mla_codegen.check import block_types
from mla_codegen.check.modules import import_file
from mla_codegen.check.reference import Case, poisoned_scratch, reference, relative_l2
from mla_codegen.check.verify import NAN, TIMEOUT, Result, gpu_at_hand, pool, settle
from mla_codegen.check.workers import first_line
from mla_codegen.runtime.formats import KV_FORMATS
from mla_codegen.spec.errors import UnknownName

POPCORN_GPU = re.compile(r"^#!POPCORN gpus? (\S+)", re.M)
# What Triton, torch and the emulator say of a file that no CPU runs.
NEEDS_GPU = re.compile(
    r"active drivers|not compiled with CUDA|no NVIDIA driver|No (CUDA|HIP) GPUs|(CUDA|ROCM)_HOME|driver is not"
    r"|emulator has no such module|is not modelled|no reference of this assembly",
    re.I,
)
ALLOWED = re.compile(r"^# Relative L2 error that `mla-codegen verify` allows: (.*)$", re.M)
SHAPES = ((4, 1024), (3, 500))  # of a submission that has no table of shapes
GENERAL = ((3, 700), (1, 5))  # that no table names
SHORT = (300, 1, 0, 5, 33, 64, 130, 63)  # KV lengths on a CPU, repeated

Data = tuple[Any, ...]


@dataclass(frozen=True)
class Model:
    """Dimensions of the attention, as a submission's config has them."""

    heads: int = 16
    latent: int = 512
    rope: int = 64


def make_data(
    lens: list[int], *, kv_seq_len: int, model: Model = Model(), fp8: str = "fp8_e4m3fn", seed: int = 0,
    device: str = "cpu",
) -> tuple[Data, dict[str, Case]]:  # fmt: skip
    """Inputs as the leaderboard makes them, and the cases that its forms of the KV amount to, by kv_data's keys.

    Queries and KV are standard normal in bf16; fp8 is the KV over amax / 448; "mxfp4" is there for show.
    """
    generator = torch.Generator().manual_seed(seed)
    batch, row, total = len(lens), model.latent + model.rope, sum(lens)
    q = torch.randn(batch, model.heads, row, generator=generator).bfloat16().to(device)
    kv = torch.randn(total, 1, row, generator=generator).bfloat16().to(device)
    fp8_dtype = KV_FORMATS[fp8].element.dtype
    scale = (kv.float().abs().amax() if total else torch.ones((), device=device)) / torch.finfo(fp8_dtype).max
    scale = scale.clamp(min=1e-12).reshape(1)
    fp8_kv = (kv.float() / scale).to(fp8_dtype)
    qo_indptr = torch.arange(batch + 1, dtype=torch.int32, device=device)
    kv_indptr = torch.tensor([0, *lens]).cumsum(0).to(torch.int32).to(device)
    sm_scale = row**-0.5
    packed = torch.zeros(total, 1, row // 2, dtype=torch.uint8, device=device)
    block_scales = torch.full((total, row // 32), 127, dtype=torch.uint8, device=device)
    kv_data = {"bf16": kv, "fp8": (fp8_kv, scale), "mxfp4": (packed, block_scales)}
    config = {
        "batch_size": batch, "num_heads": model.heads, "num_kv_heads": 1, "qk_head_dim": row,
        "kv_lora_rank": model.latent, "qk_rope_head_dim": model.rope, "v_head_dim": model.latent, "q_seq_len": 1,
        "kv_seq_len": kv_seq_len, "sm_scale": sm_scale,
    }  # fmt: skip
    common = (qo_indptr, kv_indptr, sm_scale)
    cases = {"bf16": Case(q, kv, *common, None), "fp8": Case(q, fp8_kv, *common, scale)}
    return (q, kv_data, qo_indptr, kv_indptr, config), cases


def passes_leaderboard(out: torch.Tensor, want: torch.Tensor) -> bool:
    """The leaderboard's own check: at most 5 % of the elements further off than 0.1 + 0.1 |want|."""
    off = (out.double() - want.double()).abs() > 0.1 + 0.1 * want.double().abs()
    return bool(off.double().mean() <= 0.05)


class NeedsGpu(Exception):
    """A submission that no CPU runs; `str()` says which GPU it needs, and why."""


def target_of_submission(path: Path) -> Target | None:
    """What a file of ours was made for, as its docstring says it; None for a file of others."""
    head = path.read_text(encoding="utf-8", errors="replace")[:4000]
    return next((t for t in TARGETS.values() if f"{t.name} ({t.title})" in head), None)


def is_gluon(path: Path) -> bool:
    """Whether the emulator has to run it on a CPU: Triton's interpreter does not know Gluon."""
    return "triton.experimental" in path.read_text(encoding="utf-8", errors="replace")


def load_submission(path: Path, *, emulated: bool = False) -> ModuleType:
    """Import a submission, with a stand-in for the server's `task` module.

    emulated   its kernels, Gluon and Triton, run in the emulator
    """
    task = ModuleType("task")
    task.input_t, task.output_t = tuple, torch.Tensor  # type: ignore[attr-defined]
    if emulated:
        from mla_codegen.check import emulate

        # torch itself, since merging kernels may load partials that nobody wrote, and drop them
        return emulate.load(path, f"submission_{path.stem}", package={"task": task, "torch": torch})
    had = sys.modules.get("task")
    sys.modules["task"] = task
    try:
        return import_file(path, f"submission_{abs(hash(path.resolve()))}")
    finally:
        if had is None:
            del sys.modules["task"]
        else:
            sys.modules["task"] = had


def verify_submission(
    path: Path,
    *,
    device: str = "auto",
    seed: int = 0,
    shapes: Sequence[tuple[int, int]] = (),
    kv: str | None = None,
    quick: bool = False,
    processes: int | None = None,
    timeout: float = TIMEOUT,
    progress: Callable[[Result, int], None] | None = None,
) -> list[Result]:
    """Call `custom_kernel` of a submission with each of its shapes and forms of KV; each output against float64.

    device      cuda, cpu (Triton's interpreter, or the emulator for Gluon), or auto: the GPU if it will do
    shapes, kv  these (batch, kv_len) in place of its own, and this KV dtype alone
    quick       each kernel once
    processes   calls at a time; by default the cores, and 1 on a GPU
    timeout     seconds of one call

    A call that crashes or hangs is a failed row. Raises NeedsGpu, and UnknownName for a KV dtype that it lacks.
    """
    where = _device_for(path) if device == "auto" else device
    on = "GPU" if where == "cuda" else "CPU emulator" if is_gluon(path) else "CPU interpreter"

    def lost(title: str, bound: float, failure: str) -> Result:
        return Result(path.name, title, on, NAN, bound, NAN, NAN, NAN, failure)

    def refuse(failure: str) -> None:
        if where == "cpu" and NEEDS_GPU.search(failure):
            raise NeedsGpu(f"{path} needs {_gpu_of(path)}: {failure}")

    results: dict[int, Result] = {}
    with pool(where, processes) as workers:
        ((_, read),) = workers.run(_jobs, [(path, where)], timeout)
        if read.failure:
            refuse(read.failure)
            results[0] = lost("import", BOUND_16_BIT, read.failure)
            if progress:
                progress(results[0], 1)
            return [results[0]]
        jobs = _chosen(read.value, shapes, kv, quick)
        for index, outcome in workers.run(_verify, [(path, job, where, seed) for job in jobs], timeout):
            results[index] = outcome.value or lost(jobs[index].title, jobs[index].bounds[0], outcome.failure)
            refuse(results[index].failure)
            if progress:
                progress(results[index], len(jobs))
    return [results[index] for index in sorted(results)]


def _device_for(path: Path) -> str:
    """The GPU, unless there is none, or the file is one of ours for another."""
    target, at_hand = target_of_submission(path), gpu_at_hand()
    fits = at_hand is not None and (target is None or target.name in ("portable", at_hand))
    return "cuda" if fits else "cpu"


def _gpu_of(path: Path) -> str:
    """In words."""
    named = POPCORN_GPU.search(path.read_text(encoding="utf-8", errors="replace"))
    target = target_of_submission(path) or (find_target(named[1]) if named else None)
    if target is None or target.name == "portable":
        return f"a GPU ({named[1]})" if named else "a GPU"
    return f"{target.name} ({target.title})"


@dataclass(frozen=True)
class Job:
    """One call. `kinds`: KV dtypes that the submission may use, with the error that is allowed from each.

    together   all forms are on offer, "mxfp4" too, as on the server; otherwise the only one of `kinds`
    """

    kinds: tuple[str, ...]
    bounds: tuple[float, ...]
    batch: int
    kv_len: int
    together: bool

    @property
    def title(self) -> str:
        return f"{self.batch} x {self.kv_len}, {'all forms' if self.together else self.kinds[0]}"


@dataclass(frozen=True)
class Read:
    """What a submission says of itself. `shapes`: (batch, kv_len) that have kernels of their own, by KV dtype."""

    ours: bool
    bounds: dict[str, float]
    shapes: dict[str, list[tuple[int, int]]]


def _jobs(asked: tuple[Path, str]) -> Read:
    """Read (path, device)."""
    path, device = asked
    module = load_submission(path, emulated=device == "cpu" and is_gluon(path))
    said = ALLOWED.search(path.read_text(encoding="utf-8"))
    bounds = dict(part.split() for part in said.group(1).split(", ")) if said else {}
    kinds = tuple(getattr(module, "DTYPES", ("bf16", "fp8")))
    shapes = {kv: list(SHAPES) for kv in kinds}
    if hasattr(module, "DTYPES"):
        for kv in kinds:
            shapes[kv] = [(rows, kv_len) for rows, lengths in module.SHAPES.get(kv, {}).items() for kv_len in lengths]
    return Read(hasattr(module, "DTYPES"), {kv: float(bounds.get(kv, BOUND_16_BIT)) for kv in kinds}, shapes)


def _chosen(read: Read, shapes: Sequence[tuple[int, int]], kv: str | None, quick: bool) -> list[Job]:
    """Each shape of a file of ours with each KV dtype alone, and two with all forms; any other file with all forms.

    Two shapes more than the file names: for the general kernels.
    """
    kinds = tuple(read.bounds)
    if kv not in (None, *kinds):
        raise UnknownName("KV dtype", str(kv), kinds)
    general = GENERAL[:1] if quick else GENERAL
    jobs = []
    if read.ours or kv:
        for kind in kinds if kv is None else (kv,):
            calls = shapes or (*read.shapes[kind], *general)
            jobs += [Job((kind,), (read.bounds[kind],), batch, kv_len, False) for batch, kv_len in calls]
    if not read.ours and kv is None:
        together = list(shapes) or [*SHAPES, *general]
    else:
        together = [] if quick or kv or shapes else [*read.shapes[kinds[-1]][:1], GENERAL[0]]
    return jobs + [Job(kinds, tuple(read.bounds.values()), batch, kv_len, True) for batch, kv_len in together]


def _verify(asked: tuple[Path, Job, str, int]) -> Result:
    """One call: (path, job, device, seed). What may use any of several forms is held to the one it is closest to."""
    path, job, device, seed = asked
    begin = time.perf_counter()
    error, failure, bound = NAN, "", job.bounds[0]
    emulated = device == "cpu" and is_gluon(path)
    try:
        module = load_submission(path, emulated=emulated)
        if device == "cpu":
            from mla_codegen.runtime import interpreter

            interpreter.correct()
            block_types.remember()
            lens = [SHORT[i % len(SHORT)] for i in range(job.batch)]
        else:
            lens = [max(0, job.kv_len - 7 * i) if i % 5 else job.kv_len for i in range(job.batch)]
        model = Model(*(getattr(module, name, default) for name, default in _sizes()))
        fp8 = next((kv for kv in job.kinds if kv in KV_FORMATS and KV_FORMATS[kv].fp8), "fp8_e4m3fn")
        data, cases = make_data(lens, kv_seq_len=job.kv_len, model=model, fp8=fp8, seed=seed, device=device)
        forms = [KV_FORMATS[kv].form if kv in KV_FORMATS else kv for kv in job.kinds]
        offered = data[1] if job.together else {forms[0]: data[1][forms[0]]}
        with poisoned_scratch():
            out = module.custom_kernel((data[0], offered, *data[2:]))
        wants = [reference(cases[form], model.latent)[0] for form in forms]
        if out.shape != wants[0].shape:
            failure = f"the output has shape {tuple(out.shape)}, not {tuple(wants[0].shape)}"
        elif not bool(torch.isfinite(out).all()):
            failure = "the output holds NaN or infinity"
        else:
            found = zip((relative_l2(out, want) for want in wants), job.bounds, wants, strict=True)
            error, bound, want = min(found, key=lambda form: form[0])
            failure = "" if error <= bound else f"error {error:.1e} over {bound:.0e}"
            if failure and passes_leaderboard(out, want):
                failure += " (the leaderboard's own check would pass it)"
    except Exception as reason:  # a kernel that cannot run is a failed row, not the end of the table
        if device == "cuda":
            settle()
        failure = first_line(reason)
    on = "GPU" if device == "cuda" else "CPU emulator" if emulated else "CPU interpreter"
    seconds = time.perf_counter() - begin
    return Result(path.name, job.title, on, error, bound, NAN, NAN, seconds, failure)  # it gives no LSE


def _sizes() -> tuple[tuple[str, int], ...]:
    return ("NUM_HEADS", 16), ("KV_LORA_RANK", 512), ("QK_ROPE_HEAD_DIM", 64)
