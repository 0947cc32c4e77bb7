"""A soak: thousands of random calls of a spec's kernels, each held to a reference, and memory that must not grow.

    python benchmarks/soak.py                         # specs/h200.yaml on the GPU at hand
    python benchmarks/soak.py --calls 100000 --seed 7
    python benchmarks/soak.py --seed 7 --only 81234   # that call again, alone, with all that is known of it

Every call is held to fp32 attention on the same device, and that to float64 now and then. It stops at the first call
that is wrong. Exit codes: 0 all right, 1 a call or the memory was wrong, 2 bad input. Without a GPU the kernels run in
Triton's interpreter: a few small calls, as in `--calls 5 --batch 3 --length 80 --rows 200`.
"""

import argparse
import gc
import importlib
import json
import os
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch

CUDA = torch.cuda.is_available()
if not CUDA:
    os.environ["TRITON_INTERPRET"] = "1"
ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]

from soak_cases import Call, Drawn, Limits, Pool, attention, differences, draw, make, reference_error  # noqa: E402

from mla_codegen.check.reference import TORCH, poisoned_scratch  # noqa: E402
from mla_codegen.cli import report  # noqa: E402
from mla_codegen.cli.common import load_plans  # noqa: E402
from mla_codegen.publish.write import build  # noqa: E402
from mla_codegen.runtime.formats import KV_FORMATS  # noqa: E402

TOGETHER = 16  # calls in flight before their verdicts are read
EVERY = 200  # calls between two times that the reference is held to float64
REFERENCE_BOUND = 1e-5  # of the fp32 reference, both in relative L2 and in LSE
MIB = 1 << 20
GROWTH = {"allocated": 1 * MIB, "rss": 96 * MIB}  # bytes that the second half of a soak may add
RESERVED = 1.5  # times what was reserved at half time


class Wrong(Exception):
    """A call that is wrong: its index, and what was found."""

    def __init__(self, drawn: Drawn, why: str):
        self.drawn, self.why = drawn, why
        super().__init__(f"call {drawn.index}: {why}")


class Soak:
    """The kernels of a spec, the pool that their calls read, and the worst that was found."""

    def __init__(self, options: argparse.Namespace, folder: Path):
        self.options = options
        (plan,) = load_plans([options.spec], folder)
        package = folder.name.replace("-", "_")  # a name that no other soak of this process has
        build([plan], folder / package)
        sys.path.insert(0, str(folder))
        self.dispatch: Any = importlib.import_module(f"{package}.dispatch")
        self.where = torch.device("cuda", torch.cuda.current_device()) if CUDA else torch.device("cpu")
        self.kinds = list(plan.spec.dtypes.kv)
        self.shapes = [(shape.batch, shape.kv_len) for shape in plan.spec.shapes]
        self.limits = Limits(options.batch, options.length, options.rows)
        model = plan.spec.model
        self.pool = Pool(
            model.num_heads, model.kv_lora_rank, model.qk_rope_head_dim, self.kinds,
            1000 + max(2 * options.rows, *(batch * kv_len for batch, kv_len in self.shapes)), options.seed, self.where,
        )  # fmt: skip
        self.q, self.out = TORCH[plan.spec.dtypes.q], TORCH[plan.spec.dtypes.out]
        self.bounds: dict[str, tuple[float, float]] = {}
        for kv in self.kinds:
            kernels = [kernel for kernel in plan.kernels if kernel.kv == kv]
            self.bounds[kv] = max(k.error_bound for k in kernels), max(k.lse_bound for k in kernels)
        self.worst: dict[str, Any] = {
            kv: {"error": 0.0, "row_error": 0.0, "lse_error": 0.0, "calls": 0} for kv in self.kinds
        }
        self.served: Counter[str] = Counter()
        self.reference = {"error": 0.0, "lse_error": 0.0, "checks": 0}

    def warm_up(self) -> None:
        for index, visible in ((torch.int32, False), (torch.int64, True)):
            self.dispatch.warmup(indices=(index,), visible=(visible,), progress=None)
            if any(KV_FORMATS[kv].scaled for kv in self.kinds):
                self.dispatch.warmup(indices=(index,), visible=(visible,), scaled=(False,), progress=None)

    def start(self, index: int) -> tuple[Drawn, torch.Tensor]:
        """Make the call: what was drawn, and its differences, which are still on the device."""
        drawn = draw(self.options.seed, index, self.kinds, self.shapes, self.limits)
        self.served[self.kernel(drawn)] += 1
        call = make(drawn, self.pool, self.q, self.out, self.options.seed)
        got = self.decode(call)
        want = attention(call, self.pool.latent)
        if index % EVERY == 0 or self.options.only is not None:
            error, lse_error = reference_error(call, self.pool.latent, want)
            self.reference["error"] = max(self.reference["error"], error)
            self.reference["lse_error"] = max(self.reference["lse_error"], lse_error)
            self.reference["checks"] += 1
            if not max(error, lse_error) <= REFERENCE_BOUND:
                raise Wrong(drawn, f"the reference is off float64 by {error:.1e}, its LSE by {lse_error:.1e}")
        return drawn, differences((got[0], want[1] if got[1] is None else got[1]), want)

    def kernel(self, drawn: Drawn) -> str:
        """The kernel that serves a call."""
        if not drawn.total_q:
            return "none"
        (build,) = self.dispatch.DISPATCHER.builds
        return build.choices[drawn.kv].choose(drawn.total_q, drawn.kv_rows // len(drawn.lens), drawn.hint)[0]

    def decode(self, call: Call) -> tuple[torch.Tensor, torch.Tensor | None]:
        """(out, LSE if the call gives one)."""
        with poisoned_scratch():
            got = self.dispatch.mla_decode(**call.arguments)
        if call.drawn.return_lse:
            return got
        return got, call.arguments.get("lse")

    def judge(self, drawn: Drawn, found: list[float]) -> None:
        """Note the differences of a call. Raises Wrong."""
        whole, row, lse, wrong = found
        bound, lse_bound = self.bounds[drawn.kv]
        if wrong:
            raise Wrong(drawn, f"{wrong:.0f} numbers are not finite, or not 0 and -inf where nothing is seen")
        if not (whole <= bound and row <= 2 * bound and lse <= lse_bound):
            raise Wrong(
                drawn, f"error {whole:.1e} (bound {bound:.0e}), of one row and head {row:.1e} ({2 * bound:.0e}), "
                f"LSE {lse:.1e} ({lse_bound:.0e})",
            )  # fmt: skip
        worst = self.worst[drawn.kv]
        worst["calls"] += 1
        for name, value in (("error", whole), ("row_error", row), ("lse_error", lse)):
            worst[name] = max(worst[name], value)

    def memory(self) -> dict[str, int]:
        """Bytes held now: by tensors, by torch's allocator, by the process."""
        gc.collect()
        with open("/proc/self/statm") as file:
            rss = int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        if not CUDA:
            return {"allocated": 0, "reserved": 0, "rss": rss}
        return {"allocated": torch.cuda.memory_allocated(), "reserved": torch.cuda.memory_reserved(), "rss": rss}

    def run(self) -> dict[str, Any]:
        """All calls, or as many as fit in `--seconds`. Raises Wrong at the first that is wrong."""
        options = self.options
        if options.only is not None:
            drawn, found = self.start(options.only)
            self.judge(drawn, found.tolist())
            return {"calls": 1, "drawn": drawn.describe()}
        self.warm_up()
        began = time.perf_counter()
        memory = [{"calls": 0, **self.memory()}]
        flight: list[tuple[Drawn, torch.Tensor]] = []
        done = 0
        with report.progress("soak") as advance:
            for index in range(options.calls):
                flight.append(self.start(index))
                late = options.seconds is not None and time.perf_counter() - began > options.seconds
                if len(flight) == TOGETHER or index + 1 == options.calls or late:
                    found = torch.stack([one for _, one in flight]).tolist()
                    for (drawn, _), numbers in zip(flight, found, strict=True):
                        self.judge(drawn, numbers)
                        done += 1
                        advance("", options.calls)
                    flight.clear()
                    if late or done - memory[-1]["calls"] >= options.calls / 20:
                        memory.append({"calls": done, **self.memory()})
                if late:
                    break
        if memory[-1]["calls"] != done:
            memory.append({"calls": done, **self.memory()})
        return {"calls": done, "seconds": time.perf_counter() - began, "memory": memory}


def grown(memory: list[dict[str, int]]) -> list[str]:
    """What the second half of a soak added that it must not."""
    half, last = memory[len(memory) // 2], memory[-1]
    found = [
        f"{name} grew from {half[name]:,} to {last[name]:,} bytes between calls {half['calls']} and {last['calls']}"
        for name, most in GROWTH.items()
        if last[name] - half[name] > most
    ]
    if last["reserved"] > RESERVED * half["reserved"]:
        grew = f"from {half['reserved']:,} to {last['reserved']:,} bytes"
        found.append(f"reserved grew {grew} between calls {half['calls']} and {last['calls']}")
    return found


def arguments(given: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--spec", type=Path, default=ROOT / "specs" / "h200.yaml")
    parser.add_argument("--calls", type=int, default=10_000)
    parser.add_argument("--seconds", type=float, help="stop after this time, compilation not counted")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, metavar="INDEX", help="make this call alone")
    limits = Limits()
    parser.add_argument("--batch", type=int, default=limits.batch, help="most requests of a call")
    parser.add_argument("--length", type=int, default=limits.length, help="most KV rows of a request")
    parser.add_argument("--rows", type=int, default=limits.rows, help="most KV rows that a call reads")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write what was found")
    options = parser.parse_args(given)
    for name in ("calls", "batch", "length", "rows"):
        if getattr(options, name) < 1:
            parser.error(f"--{name} must be at least 1")
    return options


def main(given: list[str] | None = None) -> int:
    options = arguments(given)
    found: dict[str, Any] = {"spec": str(options.spec), "seed": options.seed, "failure": None}
    with tempfile.TemporaryDirectory(prefix="mla-codegen-soak-") as folder:
        soak = Soak(options, Path(folder))
        try:
            found |= soak.run()
            faults = grown(found["memory"]) if "memory" in found else []
            if faults:
                found["failure"] = {"why": "; ".join(faults)}
        except Wrong as wrong:
            found["failure"] = {"why": str(wrong), "drawn": wrong.drawn.describe()}
    found |= {
        "served": dict(soak.served.most_common()),
        "worst": soak.worst,
        "reference": soak.reference,
        "bounds": soak.bounds,
    }
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    for kv, worst in soak.worst.items():
        numbers = ", ".join(f"{name} {worst[name]:.1e}" for name in ("error", "row_error", "lse_error"))
        print(f"{kv}: {worst['calls']} calls, worst {numbers}")
    if "memory" in found:
        last = found["memory"][-1]
        held = ", ".join(f"{name} {last[name] / MIB:,.0f} MiB" for name in ("allocated", "reserved", "rss"))
        print(f"{found['calls']} calls in {found['seconds']:.1f} s; at the end {held}")
    if found["failure"]:
        print(f"FAIL {found['failure']['why']}")
        if drawn := found["failure"].get("drawn"):
            given = f"--spec {options.spec} --batch {options.batch} --length {options.length} --rows {options.rows}"
            one = f"--seed {options.seed} --only {drawn['index']}"
            print(f"{json.dumps(drawn)}\nagain: python benchmarks/soak.py {given} {one}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
