"""Context parallel decode: is it right, and what does a step take, on any number of GPUs.

    torchrun --nproc-per-node 2 benchmarks/context_parallel.py --json context_parallel.json

First outputs and LSE against float64, in both placements, also from a CUDA graph whose lengths change between replays.
Then the time of a step: all GPUs together against one GPU alone with all rows, and what the exchange and the merge take
by themselves: by an all-gather, or with --exchange peers through memory that the GPUs of one host share. The count of
visible rows, which all layers of a step have in common, is timed apart. A step finds its KV rows in memory, not in the
L2 cache: steps go round over several copies. Without a GPU it checks over gloo, in Triton's interpreter, and times
nothing.
"""

import argparse
import functools
import importlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

CUDA = torch.cuda.is_available()
if not CUDA:
    os.environ["TRITON_INTERPRET"] = "1"
sys.path.insert(0, str(Path(__file__).parents[1]))

from group_timing import Timer, capture  # noqa: E402

from mla_codegen.check.reference import TORCH, make_case, reference, relative_l2  # noqa: E402
from mla_codegen.runtime.formats import KV_FORMATS  # noqa: E402

BOUND, LSE_BOUND = 4e-3, 5e-3  # relative L2 of the output, largest difference of LSE (q as two fp8: 2e-3)
COLD_BYTES = 1 << 28  # what a step's copies of the KV add up to on a rank: several L2 caches


class Bench:
    """The group, the generated package, and what has been found so far."""

    def __init__(self, options: argparse.Namespace):
        self.options = options
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        self.device = torch.device("cuda", torch.cuda.current_device()) if CUDA else torch.device("cpu")
        self.dispatcher = importlib.import_module(f"{options.package}.dispatch").DISPATCHER
        self.build = self.dispatcher._find(self.device, options.heads, options.row)
        self.timer = Timer(self.device, options.repeat_us)
        self.began = time.monotonic()
        self.found: dict[str, Any] = {
            "device": torch.cuda.get_device_name() if CUDA else "cpu", "ranks": self.ranks, "torch": torch.__version__,
            "build": str(self.build), "exchange_by": options.exchange, "checks": [], "steps": [], "exchange": [],
        }  # fmt: skip

        runtime = importlib.import_module(f"{options.package}.runtime.context_parallel")
        peers = None
        if options.exchange == "peers":
            form = (4 * max(16, *options.batch), options.heads, self.build.latent, self.build.out)
            peers = runtime.PeerMemory(*form, self.device)
        self.parallel = functools.partial(runtime.ContextParallel, self.dispatcher, peers=peers)

    def say(self, text: str) -> None:
        if self.rank == 0:
            print(f"{time.monotonic() - self.began:6.1f} s  {text}", flush=True)

    def note(self, kind: str, row: dict[str, Any]) -> None:
        """Keep a row, and the file up to date: what has been found stays if the time runs out."""
        self.found[kind].append(row)
        self.say(f"{kind}: " + "  ".join(f"{name} {value}" for name, value in row.items()))
        if self.rank == 0 and self.options.json:
            self.options.json.write_text(json.dumps(self.found, indent=1) + "\n")

    def out_of_time(self) -> bool:
        return self.timer.largest(time.monotonic() - self.began) > self.options.seconds

    def check(self, lens: list[int], q_len: int, kv: str, placement: str, empty: bool) -> None:
        """One case against float64. `empty`: the last rank has no rows (contiguous placement)."""
        case = make_case(lens, q_lens=q_len, heads=self.options.heads, rope=self.options.row - 512, kv_dtype=kv)
        parallel = self.parallel(placement=placement)
        sharers = self.ranks - 1 if empty else self.ranks
        rows, counts, begins = [], [0], []
        for first, length in zip(case.kv_indptr.tolist(), lens, strict=False):
            here = parallel.rows(length)
            if empty:
                edges = [length * min(rank, sharers) // sharers for rank in range(self.ranks + 1)]
                here = torch.arange(edges[self.rank], edges[self.rank + 1])
                begins.append(edges[self.rank])
            rows.append(first + here)
            counts.append(counts[-1] + len(here))
        kv_len = case.kv_indptr.diff().to(self.device)
        local, local_indptr = case.kv[torch.cat(rows)].to(self.device), torch.tensor(counts, device=self.device)
        kv_begin = torch.tensor(begins, device=self.device) if empty else None
        case = case.to(self.device)

        def step() -> tuple[torch.Tensor, torch.Tensor]:
            return parallel.decode(
                case.q, local, case.qo_indptr, local_indptr.to(case.qo_indptr.dtype), kv_len, sm_scale=case.sm_scale,
                kv_scale=case.kv_scale, kv_begin=kv_begin, return_lse=True,
            )  # fmt: skip

        out, lse = step()
        if CUDA:
            graph, (again, again_lse) = capture(step)
            again.fill_(float("nan"))
            graph.replay()
            torch.cuda.synchronize()
            same = torch.equal(out, again) and torch.equal(lse, again_lse)
            if q_len == 1 and not empty and placement == "round_robin":  # every request one row shorter, in place
                longest = max(range(len(lens)), key=lambda b: lens[b])
                kv_len[longest] -= 1
                if (lens[longest] - 1) % self.ranks == self.rank:  # the others' rows move up by none
                    local_indptr[longest + 1 :] -= 1
                    at = int(local_indptr[longest + 1])
                    local[at:-1] = local[at + 1 :].clone()
                graph.replay()
                torch.cuda.synchronize()
                shorter, _ = step()
                same = same and torch.equal(shorter, again) and not torch.equal(shorter, out)
            del graph
        else:
            same = True
        want, want_lse = reference(case, out.shape[2])
        everyone = [torch.empty_like(out) for _ in range(self.ranks)]
        dist.all_gather(everyone, out)
        same = same and all(torch.equal(out, other) for other in everyone)
        alone, _ = self.dispatcher.mla_decode(
            case.q, case.kv, case.qo_indptr, case.kv_indptr, sm_scale=case.sm_scale, kv_scale=case.kv_scale,
            return_lse=True,
        )  # fmt: skip
        seen = want_lse > float("-inf")
        error, alone_error = relative_l2(out, want), relative_l2(alone, want)
        lse_error = float((lse[seen] - want_lse[seen]).abs().max())
        blind = bool((out[~seen] == 0).all()) and bool((lse[~seen] == float("-inf")).all())
        passed = self.timer.largest(0.0 if same and blind and error <= BOUND and lse_error <= LSE_BOUND else 1.0) == 0.0
        self.note(
            "checks",
            {
                "kv": kv, "placement": "one rank without rows" if empty else placement, "batch": len(lens),
                "q_len": q_len, "error": f"{error:.2e}", "one_gpu_error": f"{alone_error:.2e}",
                "lse_error": f"{lse_error:.1e}", "passed": passed,
            },
        )  # fmt: skip

    def checks(self) -> None:
        scale = 1 if CUDA else 100
        ragged = [4096 // scale, 0, 1, 63, 65, 5000 // scale, 777 // scale, 2, *[1500 // scale + i for i in range(8)]]
        for kv in self.build.kv:
            for placement in ("contiguous", "round_robin"):
                for lens in ([20000 // scale], ragged if CUDA else ragged[:4]):
                    for q_len in (1, 4):
                        self.check(lens, q_len, kv, placement, empty=False)
            self.check(ragged[:4], 1, kv, "contiguous", empty=True)

    def kv_rows(self, rows: int, kv: str) -> torch.Tensor:
        """Random KV rows, made on the device."""
        made = torch.empty(rows, self.options.row, dtype=TORCH[kv], device=self.device)
        for begin in range(0, rows, 1 << 18):
            values = torch.randn(min(1 << 18, rows - begin), self.options.row, device=self.device)
            made[begin : begin + len(values)] = (values.clamp(-4, 4) * (40 if made.element_size() == 1 else 1)).to(
                made.dtype
            )
        return made

    def time(self, batch: int, rows: int, kv: str, q_len: int) -> None:
        """A step of `batch` requests of `rows` KV rows: all ranks together, and one rank alone."""
        scale = torch.full((1,), 0.025, device=self.device) if KV_FORMATS[kv].scaled else None
        q = torch.randn(batch * q_len, self.options.heads, self.options.row, device=self.device).bfloat16()
        dist.broadcast(q, 0)
        qo_indptr = torch.arange(batch + 1, device=self.device, dtype=torch.int32) * q_len
        kv_len = torch.full((batch,), rows, device=self.device, dtype=torch.int32)
        parallel = self.parallel(placement=self.options.placement)
        given: dict[str, Any] = {"sm_scale": self.options.row**-0.5, "kv_scale": scale, "return_lse": True}
        visible = parallel.visible(qo_indptr, kv_len, len(q))
        row: dict[str, Any] = {"kv": kv, "batch": batch, "q_len": q_len, "rows": rows}
        for who, here in (("one", rows), ("all", len(parallel.rows(rows)))):
            indptr = torch.arange(batch + 1, device=self.device, dtype=torch.int32) * here
            first = self.kv_rows(here * batch, kv)
            copies = [first] + [first.clone() for _ in range(min(31, COLD_BYTES // first.nbytes))]
            rounds = iter(range(1 << 60))

            def alone(copies=copies, indptr=indptr, here=here, rounds=rounds) -> Any:
                return self.dispatcher.mla_decode(
                    q, copies[next(rounds) % len(copies)], qo_indptr, indptr, max_kv_len=here, **given
                )

            def together(copies=copies, indptr=indptr, here=here, rounds=rounds) -> Any:
                return parallel.decode(
                    q, copies[next(rounds) % len(copies)], qo_indptr, indptr, kv_visible=visible, max_kv_len=here,
                    **given,
                )  # fmt: skip

            steps = max(4, len(copies))
            row[f"{who}_decode_us"] = self.timer.graph_us(alone, steps)
            if who == "all":
                row["step_us"] = self.timer.graph_us(together, steps)
                row["eager_step_us"] = self.timer.eager_us(together, steps)
            else:
                row["eager_one_us"] = self.timer.eager_us(alone, steps)
            del first, copies
        row["speedup"] = round(row["one_decode_us"] / row["step_us"], 2)
        row["eager_speedup"] = round(row["eager_one_us"] / row["eager_step_us"], 2)
        row["exchange_and_merge_us"] = round(row["step_us"] - row["all_decode_us"], 1)
        self.note("steps", row)

    def time_exchange(self, batch: int) -> None:
        """What the collective and the kernels around it take by themselves, back to back in a graph."""
        parallel = self.parallel(placement=self.options.placement)
        shape = (batch, self.options.heads, self.build.latent)
        parts = parallel.parts(shape, self.build.out, self.device)
        parts.zero_()
        out, partial = (torch.zeros(shape, dtype=self.build.out, device=self.device) for _ in range(2))
        lse, partial_lse = (torch.zeros(shape[:2], device=self.device) for _ in range(2))
        qo_indptr = torch.arange(batch + 1, device=self.device, dtype=torch.int32)
        kv_len = torch.full((batch,), 1000, device=self.device, dtype=torch.int32)

        def exchange_and_merge() -> None:
            if parallel.peers:
                parallel.peers.merge(partial, partial_lse, out, lse)
            else:
                parallel.exchange(parts)
                parallel.combine(parts, out, lse)

        row = {"batch": batch, "bytes_a_rank": parts.shape[1]}
        if not parallel.peers:
            row["exchange_us"] = self.timer.graph_us(lambda: parallel.exchange(parts), 50)
            row["merge_us"] = self.timer.graph_us(lambda: parallel.combine(parts, out, lse), 50)
        row["exchange_and_merge_us"] = self.timer.graph_us(exchange_and_merge, 50)
        row["eager_exchange_and_merge_us"] = self.timer.eager_us(exchange_and_merge, 50)
        row["visible_us"] = self.timer.graph_us(lambda: parallel.visible(qo_indptr, kv_len, batch), 50)
        self.note("exchange", row)


def table(found: dict[str, Any]) -> str:
    """The steps as Markdown."""
    lines = [
        f"| KV | batch | rows | 1 GPU us | {found['ranks']} GPUs us | speedup | exchange + merge us | eager: 1, all |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in found["steps"]:
        lines.append(
            f"| {row['kv']} | {row['batch']} | {row['rows']} | {row['one_decode_us']} | {row['step_us']} | "
            f"{row['speedup']} | {row['exchange_and_merge_us']} | {row['eager_one_us']}, {row['eager_step_us']} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--package", default="generated", help="generated package to run")
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--row", type=int, default=576, help="columns of a KV row")
    parser.add_argument("--rows", type=int, nargs="+", default=[131072, 327600, 1048576], help="KV rows of a request")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--placement", choices=["contiguous", "round_robin"], default="round_robin")
    parser.add_argument("--exchange", choices=["all_gather", "peers"], default="all_gather")
    parser.add_argument("--json", type=Path, help="file to write what was found to")
    parser.add_argument("--seconds", type=float, default=600, help="start no further measurement after so long")
    parser.add_argument("--repeat-us", type=float, default=20000, help="microseconds of one of the repeated timings")
    options = parser.parse_args()
    if CUDA:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("nccl", device_id=torch.device("cuda", torch.cuda.current_device()))
    else:
        torch.set_num_threads(1)
        dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    bench = Bench(options)
    bench.checks()
    if CUDA:
        for batch in options.batch:
            bench.time_exchange(batch)
        for batch in options.batch:
            for rows in options.rows:
                for kv in bench.build.kv:
                    if not bench.out_of_time():
                        bench.time(batch, rows, kv, 1)
    failed = [row for row in bench.found["checks"] if not row["passed"]]
    if bench.rank == 0:
        print(table(bench.found))
        print(f"{len(bench.found['checks']) - len(failed)} of {len(bench.found['checks'])} checks passed")
    dist.barrier()
    dist.destroy_process_group()
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
