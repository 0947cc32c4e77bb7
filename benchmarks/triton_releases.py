"""Runs of `mla-codegen bench SPEC --json` under several releases of Triton, side by side, as a Markdown table.

    python benchmarks/triton_releases.py 3.6.0.json 3.9.0.json

Times are those of CUDA graphs and of the host, in microseconds; ratios are a run's time over the first one's. The runs
must be of one GPU, and for the same calls: what one of them lacks is an error.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from mla_codegen.measure.timing import geometric_mean

Run = dict[str, Any]
Call = tuple[str, int, int]  # KV dtype, batch, KV rows


class Mismatch(ValueError):
    """Runs that cannot be compared."""


def calls_of(run: Run) -> dict[Call, Run]:
    """The spec's own timing of each call."""
    return {(row["kv"], row["batch"], row["kv_len"]): row["timings"][0] for row in run["rows"]}


def table(runs: list[Run]) -> list[str]:
    """Lines of the table, and a line of geometric means. Raises Mismatch."""
    if len({run["device"] for run in runs}) > 1:
        raise Mismatch(f"runs of different GPUs: {', '.join(sorted({run['device'] for run in runs}))}")
    found = [calls_of(run) for run in runs]
    if any(calls.keys() != found[0].keys() for calls in found):
        raise Mismatch("the runs timed different calls")
    names = [run["triton"] for run in runs]
    heads = ["KV", "batch x rows", *names, *(f"{name} / {names[0]}" for name in names[1:])]
    heads += [f"host, {name}" for name in names] + [f"error, {name}" for name in names]
    lines = [f"| {' | '.join(heads)} |", "|" + "---|" * len(heads)]
    ratios: dict[tuple[str, int], list[float]] = {}
    for kv, batch, kv_len in found[0]:
        timings = [calls[kv, batch, kv_len] for calls in found]
        if wrong := [name for name, timing in zip(names, timings, strict=True) if timing["wrong"]]:
            raise Mismatch(f"{kv} {batch}x{kv_len} is wrong under {', '.join(wrong)}")
        times = [(timing["graph"] or timing["eager"])["median"] for timing in timings]
        for number, time in enumerate(times[1:]):
            ratios.setdefault((kv, number), []).append(time / times[0])
        cells = [kv, f"{batch} x {kv_len}", *(f"{time:.1f}" for time in times)]
        cells += [f"{time / times[0]:.3f}" for time in times[1:]]
        cells += [f"{timing['host']['median']:.1f}" if timing["host"] else "-" for timing in timings]
        cells += [f"{max(timing['graph_error'] or 0.0, timing['eager_error']):.1e}" for timing in timings]
        lines.append(f"| {' | '.join(cells)} |")
    means = [f"{kv} {names[number + 1]} {geometric_mean(of):.3f}" for (kv, number), of in ratios.items()]
    device, torches = runs[0]["device"], ", ".join(dict.fromkeys(run["torch"] for run in runs))
    return [*lines, "", f"{device}, torch {torches}. Geometric means over {names[0]}: {', '.join(means)}."]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN.json")
    paths = parser.parse_args(arguments).runs
    try:
        print("\n".join(table([json.loads(path.read_text(encoding="utf-8")) for path in paths])))
    except (OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
