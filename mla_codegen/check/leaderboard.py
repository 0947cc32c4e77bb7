"""A submission as the leaderboard calls it, held to float64: its inputs, its own check, and ours, which is stricter.

The leaderboard lets 5 % of the elements be off by more than 0.1, which an output of half the KV passes.
"""

import importlib.util
import os
import re
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from mla_codegen.catalog.bounds import BOUND_16_BIT
from mla_codegen.check.reference import Case, poisoned_scratch, reference, relative_l2
from mla_codegen.check.verify import Result, _interpret

ALLOWED = re.compile(r"^# Relative L2 error that `mla-codegen verify` allows: (.*)$", re.M)
TORCH = {"fp8": torch.float8_e4m3fn, "fp8_e4m3fn": torch.float8_e4m3fn, "fp8_e4m3fnuz": torch.float8_e4m3fnuz}
SHAPES = ((4, 1024), (3, 500))  # of a submission that has no table of shapes
GENERAL = ((3, 700), (1, 5))  # that no table names
SHORT = (300, 1, 0, 5, 33, 64, 130, 63)  # KV lengths on a CPU, in turns

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
    scale = (kv.float().abs().amax() if total else torch.ones((), device=device)) / torch.finfo(TORCH[fp8]).max
    scale = scale.clamp(min=1e-12).reshape(1)
    fp8_kv = (kv.float() / scale).to(TORCH[fp8])
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


def load_submission(path: Path) -> ModuleType:
    """Import a submission, with a stand-in for the server's `task` module."""
    task = ModuleType("task")
    task.input_t, task.output_t = tuple, torch.Tensor  # type: ignore[attr-defined]
    had = sys.modules.get("task")
    sys.modules["task"] = task
    try:
        spec = importlib.util.spec_from_file_location(f"submission_{abs(hash(path.resolve()))}", path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
    finally:
        if had is None:
            del sys.modules["task"]
        else:
            sys.modules["task"] = had
    return module


def verify_submission(
    path: Path, *, device: str = "auto", seed: int = 0, progress: Callable[[Result, int], None] | None = None
) -> list[Result]:
    """Call `custom_kernel` of a submission with each of its shapes and forms of KV; each output against float64.

    device   cuda, cpu (Triton's interpreter, in processes of their own), or auto: the GPU if there is one
    """
    on_gpu = torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1" and device != "cpu"
    results: dict[int, Result] = {}
    if device == "cuda" or (device == "auto" and on_gpu):
        jobs = _jobs(path)
        for number, job in enumerate(jobs):
            results[number] = _verify(path, job, "cuda", seed)
            if progress:
                progress(results[number], len(jobs))
        return [results[number] for number in sorted(results)]
    with ProcessPoolExecutor(os.cpu_count(), mp_context=get_context("spawn"), initializer=_interpret) as pool:
        jobs = pool.submit(_jobs, path).result()
        running = {pool.submit(_verify, path, job, "cpu", seed): number for number, job in enumerate(jobs)}
        for future in as_completed(running):
            results[running[future]] = future.result()
            if progress:
                progress(future.result(), len(jobs))
    return [results[number] for number in sorted(results)]


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


def _jobs(path: Path) -> list[Job]:
    """Each shape of a file of ours with each KV dtype alone, and two with all forms; any other file with all forms.

    Two shapes more than the file names: for the general kernels.
    """
    module = load_submission(path)
    said = ALLOWED.search(path.read_text(encoding="utf-8"))
    bounds = dict(part.split() for part in said.group(1).split(", ")) if said else {}
    kinds = tuple(getattr(module, "DTYPES", ("bf16", "fp8")))
    allowed = tuple(float(bounds.get(kv, BOUND_16_BIT)) for kv in kinds)
    if not hasattr(module, "DTYPES"):
        return [Job(kinds, allowed, batch, kv_len, True) for batch, kv_len in (*SHAPES, *GENERAL)]
    jobs = []
    for kv, bound in zip(kinds, allowed, strict=True):
        shapes = [(rows, kv_len) for rows, lengths in module.SHAPES[kv].items() for kv_len in lengths]
        jobs += [Job((kv,), (bound,), batch, kv_len, False) for batch, kv_len in (*shapes, *GENERAL)]
    return jobs + [Job(kinds, allowed, batch, kv_len, True) for batch, kv_len in (*shapes[:1], GENERAL[0])]


def _verify(path: Path, job: Job, device: str, seed: int) -> Result:
    """One call. What may use any of several forms is held to the one that it is closest to."""
    begin = time.perf_counter()
    error, failure, bound = 0.0, "", job.bounds[0]
    try:
        module = load_submission(path)
        if device == "cpu":
            from mla_codegen.runtime import interpreter

            interpreter.correct()
            lens = [SHORT[i % len(SHORT)] for i in range(job.batch)]
        else:
            lens = [max(0, job.kv_len - 7 * i) if i % 5 else job.kv_len for i in range(job.batch)]
        model = Model(*(getattr(module, name, default) for name, default in _sizes()))
        fp8 = next((kv for kv in job.kinds if kv.startswith("fp8_")), "fp8_e4m3fn")
        data, cases = make_data(lens, kv_seq_len=job.kv_len, model=model, fp8=fp8, seed=seed, device=device)
        forms = [kv.split("_")[0] for kv in job.kinds]
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
        failure = f"{type(reason).__name__}: {reason}".splitlines()[0]
    on = "GPU" if device == "cuda" else "CPU interpreter"
    return Result(path.name, job.title, on, error, bound, 0.0, 0.0, time.perf_counter() - begin, failure)


def _sizes() -> tuple[tuple[str, int], ...]:
    return ("NUM_HEADS", 16), ("KV_LORA_RANK", 512), ("QK_ROPE_HEAD_DIM", 64)
