"""What a GPU makes of a spec, in one file to send to who has none: verify, bench, inspect, and which machine it was.

Each part is a command of its own, so that a crash or a hang costs that part alone; the file is written after each.
"""

import json
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from mla_codegen import __version__
from mla_codegen.catalog.releases import installed_triton
from mla_codegen.publish.files import replace_file

FORMAT = 1  # of the file
TAIL = 4000  # characters of what a part said on stderr
TIMEOUT = 1800.0  # seconds of a part


def parts_of(spec: Path, device: str, quick: bool) -> dict[str, list[str]]:
    """The commands, by name; `device` as of `verify`: without a GPU nothing is timed."""
    parts = {
        "verify": ["verify", str(spec), "--device", device, *(["--quick"] if quick else [])],
        "bench": ["bench", str(spec)],
        "inspect": ["inspect", str(spec), *(["--sample"] if quick else [])],
    }
    if device == "cpu":
        del parts["bench"]
    return parts


def make_report(
    spec: Path,
    out: Path,
    device: str = "cuda",
    quick: bool = False,
    progress: Callable[[str, int], None] | None = None,
    timeout: float = TIMEOUT,
) -> dict[str, Any]:
    """Run the parts and write `out`; the same as a dictionary.

    progress   called before each part with (its name, parts)
    timeout    seconds of each part
    """
    report: dict[str, Any] = {
        "format": FORMAT,
        "machine": machine(device),
        "spec": {"name": spec.stem, "text": spec.read_text(encoding="utf-8")},
        "parts": {},
    }
    parts = parts_of(spec, device, quick)
    for name, arguments in parts.items():
        if progress:
            progress(name, len(parts))
        report["parts"][name] = run_part(arguments, timeout)
        replace_file(out, json.dumps(report, indent=1) + "\n")
    return report


def run_part(arguments: list[str], timeout: float) -> dict[str, Any]:
    """{command, exit_code, seconds, result, stderr}: `result` is its JSON, None if it gave none."""
    start = time.perf_counter()
    try:
        done = subprocess.run(
            [sys.executable, "-m", "mla_codegen", *arguments, "--json"], capture_output=True, text=True, timeout=timeout
        )
        code, said, errors = done.returncode, done.stdout, done.stderr
    except subprocess.TimeoutExpired as late:
        code, said = None, ""
        errors = f"not done in {timeout:.0f} s\n" + _text(late.stderr)
    try:
        result = json.loads(said)
    except ValueError:
        result, errors = None, errors + said
    return {
        "command": " ".join(["mla-codegen", *arguments, "--json"]),
        "exit_code": code,
        "seconds": round(time.perf_counter() - start, 1),
        "result": result,
        "stderr": errors[-TAIL:],
    }


def _text(said: str | bytes | None) -> str:
    return said.decode(errors="replace") if isinstance(said, bytes) else said or ""


def machine(device: str) -> dict[str, Any]:
    """Versions and the GPU; no name of the host, no path, no user."""
    import torch

    facts: dict[str, Any] = {
        "mla_codegen": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "hip": torch.version.hip,
        "cuda": torch.version.cuda,
        "triton": installed_triton(),
        "system": f"{platform.system()} {platform.machine()}",
    }
    if device == "cuda":
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        facts["gpu"] = {
            "name": properties.name,
            "architecture": getattr(properties, "gcnArchName", f"sm_{properties.major}{properties.minor}"),
            "compute_units": properties.multi_processor_count,
            "memory_bytes": properties.total_memory,
            "gpus": torch.cuda.device_count(),
        }
    return facts


def verdicts(report: dict[str, Any]) -> Iterator[tuple[str, bool, str]]:
    """(part, whether all is well, in words) of each part."""
    result: Any
    for name, part in report["parts"].items():
        result = part["result"]
        well = part["exit_code"] == 0
        if result is None:
            yield name, False, (part["stderr"].strip().splitlines() or ["it said nothing"])[-1]
        elif "errors" in result:
            yield name, False, result["errors"][0]["what"]
        elif name == "verify":
            yield name, well, f"{sum(one['passed'] for one in result)} of {len(result)} kernels pass"
        elif name == "bench":
            yield name, well, f"{len(result['rows'])} workloads timed"
        else:
            kernels = result["kernels"]
            yield name, well, f"{len(kernels)} kernels compiled" + ("" if well else "; limits, hazards or failures")


def beside_prediction(report: dict[str, Any]) -> list[tuple[str, str, float, float]]:
    """(shape, kernel, us that the model of `inspect` predicts for stage 1, us measured in a graph) of each workload.

    The measured time has stage 2 and two launches in it.
    """
    bench: Any = report["parts"].get("bench", {}).get("result")
    inspect: Any = report["parts"].get("inspect", {}).get("result")
    if not isinstance(bench, dict) or not isinstance(inspect, dict) or "errors" in {*bench, *inspect}:
        return []
    predicted = {
        (one["kernel"], one["batch"], one["kv_len"]): one["model"]["predicted_us"]
        for one in inspect["calls"]
        if one["model"]
    }
    found = []
    for row in bench["rows"]:
        for timing in row["timings"]:
            key = timing["kernel"], row["batch"], row["kv_len"]
            if key in predicted and timing["graph"]:
                found.append((f"{key[1]}x{key[2]}", key[0], predicted[key], timing["graph"]["median"]))
    return found
