"""Ours beside FlashMLA, FlashAttention 3 and vLLM's Triton kernel: one run, one machine, the same inputs.

    python benchmarks/peers.py --libraries peers/ --json peers.json
    python benchmarks/peers.py --libraries peers/ --shapes 64x8192 ragged --kv bf16 --heads 16 128
    python benchmarks/peers.py --table peers.json --page docs/peers.md

docs/peers.md says where the libraries come from and what is timed. One that is missing is a line in the table. Ours is
built into a temporary folder; for a number of heads that the spec does not have, from its shapes without its settings.
The JSON is written after every shape. Exit code 1: something of ours was wrong; 2: it cannot run here.
"""

import argparse
import json
import os
import random
import re
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

import peer_report
from peer_kernels import PEERS, Missing, Peer, compile_once, load, prepare
from peer_timing import Job, Run, least, measure

from mla_codegen.check.workers import MAX_COMPILERS, Workers
from mla_codegen.cli.common import without_nan
from mla_codegen.measure.bench import COMPILE_SECONDS, compile_ahead
from mla_codegen.measure.implementations import build, ours
from mla_codegen.measure.timing import Gpu
from mla_codegen.measure.workload import Workload, workload_of
from mla_codegen.plan.resolve import Plan, make_plan
from mla_codegen.spec.datamodel import Defaults, Shape, Spec, spell
from mla_codegen.spec.load import load_spec

ROOT = Path(__file__).parents[1]
RAGGED = (64, 16384)  # requests of 1 to so many rows
MORE = [(batch, kv_len) for kv_len in (3000, 5000, 16384, 131072) for batch in (1, 8, 16, 128, 512)]
MOST_BYTES = 20e9  # of KV; the peers' pages may be a second copy


def ragged(seed: int) -> tuple[int, ...]:
    """Lengths whose sum the number of requests divides, so that an equal batch can have as many rows."""
    batch, most = RAGGED
    drawn = random.Random(seed)
    lens = [drawn.randint(1, most) for _ in range(batch)]
    lens[lens.index(max(lens))] -= sum(lens) % batch
    return tuple(lens)


def with_heads(spec: Spec, heads: int) -> Spec:
    """The spec for another number of heads: what was tuned for its own is left to the generator's rules."""
    if heads == spec.model.num_heads:
        return spec
    shapes = [Shape(batch=shape.batch, q_len=shape.q_len, kv_len=shape.kv_len) for shape in spec.shapes]
    defaults = Defaults(optimizations=spec.defaults.optimizations)
    model = spec.model.model_copy(update={"num_heads": heads})
    return spec.model_copy(update={"model": model, "shapes": shapes, "defaults": defaults})


def jobs(plan: Plan, shapes: list[str], more: bool, kv: str | None, seed: int) -> list[Job]:
    """What is asked of one plan. Shapes as `spell` has them, or `ragged`: its equal batch follows."""
    found = []
    for name in plan.spec.dtypes.kv:
        if kv not in (None, name):
            continue
        spelled = shapes or [spell(shape.batch, shape.kv_len, shape.q_len) for shape in plan.spec.shapes]
        spelled = [*spelled, *(f"{batch}x{kv_len}" for batch, kv_len in MORE), "ragged"] if more else spelled
        for shape in dict.fromkeys(spelled):
            if shape == "ragged":
                lens = ragged(seed)
                equal = workload_of(plan, name, len(lens), sum(lens) // len(lens))
                found += [Job(equal, lens), Job(equal)]
            else:
                batch, *q_len, kv_len = map(int, shape.split("x"))
                found.append(Job(workload_of(plan, name, batch, kv_len, *q_len)))
    return [job for job in found if job.workload.kv_bytes <= MOST_BYTES]


def runs(plan: Plan, folder: str, package: str, job: Job, peers: tuple[Peer, ...], libraries: Path) -> list[Run]:
    """Ours first, called as its users call it; then each peer that has the KV type."""
    mine = ours(plan, folder, package)
    work = job.workload
    found = [Run("ours", lambda data, case, pages: partial(mine.call, data), mine.bound(job.longest))]
    for peer in peers:
        if work.kv in peer.prepare:
            prepared = partial(_prepared, peer, libraries, work)
            found.append(Run(peer.name, prepared, peer.bound(work.kv)))
    return found


def _prepared(peer: Peer, libraries: Path, work: Workload, data: Any, case: Any, pages: Any) -> Any:
    return prepare(peer, libraries, work.kv, case, pages, work.latent)


def compile_peers(peers: tuple[Peer, ...], libraries: Path, work: list[Job]) -> None:
    """Those that are Triton, from several processes; what fails here fails again where it is timed, and is told."""
    triton = [peer for peer in peers if any(file.endswith(".py") for file in peer.files.values())]
    tasks = [(p, libraries, job.longest) for p in triton for job in work if job.workload.kv in p.prepare]
    with Workers(max(1, min(len(tasks), os.cpu_count() or 1, MAX_COMPILERS))) as workers:
        for _ in workers.run(compile_once, tasks, COMPILE_SECONDS):
            pass


def shape(text: str) -> str:
    """An argument of --shapes."""
    if text != "ragged" and not re.fullmatch(r"[1-9]\d{0,4}x([1-9]\d?x)?[1-9]\d{0,7}", text):
        raise argparse.ArgumentTypeError(f"{text}: write BATCHxKV_LEN or BATCHxQ_LENxKV_LEN, as in 64x8192, or ragged")
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--libraries", type=Path, default=Path("peers"), help="folder of the peers' files")
    parser.add_argument("--spec", type=Path, default=ROOT / "specs" / "h200.yaml")
    parser.add_argument("--shapes", type=shape, nargs="+", default=[], help="in place of the spec's; or `ragged`")
    parser.add_argument("--more", action="store_true", help="also lengths and batches that the spec does not name")
    parser.add_argument("--heads", type=int, nargs="+", help="in place of the spec's 16")
    parser.add_argument("--kv", help="only this KV type")
    parser.add_argument("--peers", nargs="+", default=[peer.name for peer in PEERS], help="only these")
    parser.add_argument("--rounds", type=int, default=15, help="times each call is timed, 15 at least")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=1e9, help="start no further shape after so long")
    parser.add_argument("--json", type=Path, help="file to write what was found to")
    parser.add_argument("--table", type=Path, metavar="JSON", help="only print such a file as Markdown")
    parser.add_argument("--page", type=Path, metavar="MD", help="with --table: write it between the page's marks")
    options = parser.parse_args()
    if options.table:
        text = peer_report.markdown(json.loads(options.table.read_text(encoding="utf-8")))
        if options.page:
            peer_report.fill(options.page, text)
        else:
            print(text)
        return
    peers = tuple(peer for peer in PEERS if peer.name in options.peers)
    if unknown := set(options.peers) - {peer.name for peer in PEERS}:
        parser.error(f"--peers {sorted(unknown)[0]}: there are {', '.join(repr(peer.name) for peer in PEERS)}")
    if options.rounds < 15:
        parser.error("--rounds: 15 at least, or medians are not to be trusted")
    if not torch.cuda.is_available():
        parser.error("no GPU: torch sees none")
    sys.exit(run(options, peers))


def run(options: argparse.Namespace, peers: tuple[Peer, ...]) -> int:
    """Measure everything asked for, then show it; the exit code."""
    import triton

    began = time.monotonic()

    def say(text: str) -> None:
        print(f"{time.monotonic() - began:6.1f} s  {text}", file=sys.stderr, flush=True)

    device = Gpu()
    spec = load_spec(options.spec).spec
    if spec.target not in ("portable", device.target):
        print(f"{options.spec} is for {spec.target}; this is {device.target} ({device.name})", file=sys.stderr)
        return 2
    for peer in peers:
        for file in dict.fromkeys(peer.files.values()):
            try:
                load(options.libraries, file)
                say(f"{peer.name}: {file} loaded")
            except Missing as error:
                say(f"{peer.name}: {error}")
    with tempfile.TemporaryDirectory(prefix="mla-codegen-peers-") as folder:
        work = []
        for heads in options.heads or [spec.model.num_heads]:
            plan = make_plan(with_heads(spec, heads), str(options.spec))
            package = build(plan, Path(folder), f"peers_{heads}_heads")
            asked = jobs(plan, options.shapes, options.more, options.kv, options.seed)
            work += [(job, runs(plan, folder, package, job, peers, options.libraries), package) for job in asked]
        with ThreadPoolExecutor() as both:  # each waits for processes of its own
            theirs = both.submit(compile_peers, peers, options.libraries, [job for job, _, _ in work])
            compile_ahead([(folder, package, job.longest) for job, _, package in work])
            theirs.result()
        say(f"{len(work)} shapes; all is built and compiled")
        read, _ = device.ceilings()
        found: dict[str, Any] = {
            "device": device.name, "torch": torch.__version__, "triton": triton.__version__, "read_tb_s": read,
            "rounds": options.rounds, "least_us": least(device, options.rounds), "rows": [],
        }  # fmt: skip
        for job, implementations, _ in work:
            if time.monotonic() - began > options.seconds:
                say(f"{options.seconds:.0f} s are over: {len(work) - len(found['rows'])} shapes are left out")
                break
            found["rows"].append(measure(job, implementations, device, options.rounds, options.seed))
            say(f"{job.workload.kv}, {job.workload.heads} heads, {job.shape}")
            if options.json:
                whole = without_nan({**found, "means": peer_report.means(found)})
                options.json.write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")
    peer_report.show(found)
    return 0 if all(row["timings"][0]["right"] for row in found["rows"]) else 1


if __name__ == "__main__":
    main()
