"""Sparse decode of fp8_ds_mla records beside FlashMLA's: one run, one machine, the same inputs.

    python benchmarks/sparse_peers.py --libraries peers/ --page docs/sparse.md

`_flashmla_C.abi3.so` is that of vLLM's wheel (docs/peers.md says where it comes from); it serves 64 and 128 heads,
and fewer padded to 64. Times are of CUDA graphs, interleaved, L2 flushed before each; errors are against float64 of the
stored numbers, for the first and the last query token. Ours is built from specs/h200_sparse.yaml, other numbers of
heads and of entries with its shapes and without its settings.
Exit code 1: something of ours was wrong; 2: it cannot run here.
"""

import argparse
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from peer_kernels import Missing, load
from peer_report import fill
from sparse_calls import LATENT, ROW, Call, compile_once, flash_mla

from mla_codegen.catalog.bounds import BOUND_16_BIT
from mla_codegen.check.workers import MAX_COMPILERS, Workers
from mla_codegen.measure.bench import COMPILE_SECONDS
from mla_codegen.measure.implementations import build, dispatch
from mla_codegen.measure.timing import Gpu, alternate
from mla_codegen.plan.resolve import make_plan
from mla_codegen.runtime.records import pack, unpack
from mla_codegen.spec.datamodel import Shape, Spec
from mla_codegen.spec.load import load_spec

ROOT = Path(__file__).parents[1]
KV = "fp8_ds_mla"
POOL = 262_144  # records
HEADS, TOKENS, TOPK = (8, 16, 64, 128), (1, 64, 128, 256), (512, 1024, 4096)


def spec_for(shipped: Spec, heads: int, topk: int) -> Spec:
    """The shipped spec for other heads or other lists: settings that were tuned for its own are left out."""
    if (heads, topk) == (shipped.model.num_heads, shipped.kv.topk):
        return shipped
    return shipped.model_copy(
        update={
            "model": shipped.model.model_copy(update={"num_heads": heads}),
            "kv": shipped.kv.model_copy(update={"topk": topk}),
            "shapes": [Shape(batch=shape.batch, kv_len=topk) for shape in shipped.shapes],
        }
    )


def error(out: torch.Tensor, q: torch.Tensor, pool: torch.Tensor, indices: torch.Tensor, scale: float) -> float:
    """The worse relative L2 of the first and the last query token."""
    found = []
    for token in (0, -1):
        keys = unpack(KV, pool[indices[token].long()])
        want = (q[token].double() @ keys.T * scale).softmax(-1) @ keys[:, :LATENT]
        found.append(float((out[token].double() - want).norm() / want.norm()))
    return max(found, key=lambda one: (one != one, one))


def row(
    device: Gpu, mla_decode: Callable[..., Any], jobs: tuple[int, int, int], pool: torch.Tensor, apart: bool
) -> str:
    """A line of the table. jobs: query tokens, heads, entries; apart: no two tokens name the same record."""
    tokens, heads, topk = jobs
    scale = 192**-0.5
    generator = torch.Generator(device.where).manual_seed(tokens)
    q = (torch.randn(tokens, heads, ROW, device=device.where, generator=generator) / 3).bfloat16()

    def some(count: int) -> torch.Tensor:
        return torch.randperm(POOL, device=device.where, generator=generator)[:count].int()

    indices = some(tokens * topk).view(tokens, topk) if apart else torch.stack([some(topk) for _ in range(tokens)])
    out = torch.full((tokens, heads, LATENT), float("nan"), dtype=torch.bfloat16, device=device.where)
    calls: dict[str, Call] = {"ours": lambda: mla_decode(q, pool, indices=indices, sm_scale=scale, out=out)}
    if hasattr(torch.ops._flashmla_C, "sparse_decode_fwd"):
        calls["FlashMLA"] = flash_mla(q, pool, indices, scale)
    captured = {name: device.capture(call) for name, call in calls.items()}
    times = alternate(device, {name: replay for name, (replay, _) in captured.items()}, 25)
    errors = {name: error(result, q, pool, indices, scale) for name, (_, result) in captured.items()}
    if not errors["ours"] <= BOUND_16_BIT:
        raise SystemExit(f"wrong: {tokens} x {topk}, {heads} heads: error {errors['ours']:.1e}")
    ours = times["ours"].median
    cells = [str(tokens), str(heads), f"{topk}{', apart' if apart else ''}", f"{ours:.1f}"]
    theirs = times.get("FlashMLA")
    cells += [f"{theirs.median:.1f}", f"{theirs.median / ours:.2f}"] if theirs else ["-", "-"]
    cells += [f"{tokens * topk * pool.shape[1] / ours / 1e6:.2f}", f"{errors['ours']:.1e}"]
    cells.append(f"{errors['FlashMLA']:.1e}" if theirs else "-")
    return f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--libraries", type=Path, required=True)
    parser.add_argument("--page", type=Path, help="the page whose table is written; else it is printed alone")
    parser.add_argument("--quick", action="store_true", help="16 heads, 2048 entries")
    given = parser.parse_args()
    if not torch.cuda.is_available():
        print("no GPU", file=sys.stderr)
        raise SystemExit(2)
    try:
        load(given.libraries, "_flashmla_C.abi3.so")
    except Missing as reason:
        print(reason, file=sys.stderr)
    loaded = load_spec(ROOT / "specs" / "h200_sparse.yaml")
    device = Gpu()
    pool = torch.cat([pack(KV, torch.randn(1 << 14, ROW, device=device.where) / 3) for _ in range(POOL >> 14)])
    jobs = [((tokens, heads, 2048), False) for heads in HEADS for tokens in TOKENS]
    jobs += [((64, heads, topk), False) for heads in (16, 64) for topk in TOPK] + [((64, 16, 2048), True)]
    jobs = [job for job in jobs if job[0][1:] == (16, 2048)] if given.quick else jobs
    with tempfile.TemporaryDirectory(prefix="sparse-peers-") as folder:
        plans = {key: make_plan(spec_for(loaded.spec, *key), loaded.file) for key in {job[1:] for job, _ in jobs}}
        packages = {key: build(plan, Path(folder), f"heads_{key[0]}_{key[1]}") for key, plan in plans.items()}
        with Workers(min(MAX_COMPILERS, os.cpu_count() or 1)) as workers:
            longest_first = sorted(jobs, key=lambda one: -one[0][1])
            tasks = dict.fromkeys((folder, packages[job[1:]], job) for job, _ in longest_first)
            for _ in workers.run(compile_once, list(tasks), COMPILE_SECONDS):
                pass
        lines = [
            "| query tokens | heads | entries | ours, us | FlashMLA, us | ratio | ours, TB/s | our error | its error |",
            "|---|---|---|---|---|---|---|---|---|",
        ]
        for job, apart in jobs:
            lines.append(row(device, dispatch(folder, packages[job[1:]]).mla_decode, job, pool, apart))
            print(lines[-1], flush=True)
    text = "\n".join([f"{device.name}, torch {torch.__version__}, us in the median of 25.", "", *lines])
    if given.page:
        fill(given.page, text)
    else:
        print(text)


if __name__ == "__main__":
    main()
