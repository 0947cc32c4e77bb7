"""Host time of a call: how long `custom_kernel` and `mla_decode` keep Python, in microseconds.

    python benchmarks/host_time.py                      # on the GPU at hand, its kernels as in generated/
    python benchmarks/host_time.py --stub               # anywhere: Python alone, with launches that do nothing
    python benchmarks/host_time.py --tree A --tree B    # the builds of several checkouts, interleaved in one process

Idle: the device has nothing to do when a call begins. Busy: it still works on what was queued before, so that a launch
is queued behind it. Each number is the median of many samples of a few calls each.
"""

import argparse
import importlib
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

LATENT, ROPE, HEADS = 512, 64, 16
CALLS = 10  # of one sample; few enough that the launch queue does not fill
BUSY_US = 1500  # device time queued before the calls of a busy sample
SHAPES = [(4, 1024), (64, 1024)]

Call = Callable[[], Any]


def load(tree: Path) -> ModuleType:
    """The `dispatch` module of the build in a checkout, beside those of other checkouts."""
    name = f"host_time_{abs(hash(str(tree.resolve()))):x}"
    spec = importlib.util.spec_from_file_location(
        name, tree / "generated" / "__init__.py", submodule_search_locations=[str(tree / "generated")]
    )
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return importlib.import_module(f"{name}.dispatch")


def calls_of(dispatch: ModuleType, batch: int, kv_len: int, kv: str, device: torch.device) -> dict[str, Call]:
    """The calls to time, by name, on one set of inputs."""
    dtype = {"fp8": torch.float8_e4m3fn, "bf16": torch.bfloat16}[kv]
    q = torch.randn(batch, HEADS, LATENT + ROPE, device=device).bfloat16()
    rows = torch.randn(batch * kv_len, LATENT + ROPE, device=device).to(dtype)
    scale = torch.ones(1, device=device) if kv == "fp8" else None
    qo = torch.arange(batch + 1, dtype=torch.int32, device=device)
    ends = qo * kv_len
    config = {"sm_scale": 0.07, "kv_seq_len": kv_len}
    data = (q, {kv: (rows, scale) if kv == "fp8" else rows}, qo, ends, config)
    options = {"sm_scale": 0.07, "kv_scale": scale, "max_kv_len": kv_len}
    out = torch.empty(batch, HEADS, LATENT, dtype=torch.bfloat16, device=device)
    lse = torch.empty(batch, HEADS, device=device)
    found: dict[str, Call] = {
        "custom_kernel": lambda: dispatch.custom_kernel(data),
        "mla_decode": lambda: dispatch.mla_decode(q, rows, qo, ends, **options),
        "mla_decode out lse": lambda: dispatch.mla_decode(q, rows, qo, ends, out=out, lse=lse, **options),
    }
    if hasattr(dispatch, "workspace_bytes"):
        size = dispatch.workspace_bytes(batch, HEADS, device)
        space = torch.empty(size, dtype=torch.uint8, device=device)
        found["mla_decode out lse workspace"] = lambda: dispatch.mla_decode(
            q, rows, qo, ends, out=out, lse=lse, workspace=space, **options
        )
    return found


def measure(calls: dict[Any, Call], samples: int, device: torch.device, busy: bool) -> dict[Any, float]:
    """Median microseconds of each call, interleaved."""
    times: dict[Any, list[float]] = {name: [] for name in calls}
    on_gpu = device.type == "cuda"
    for turn in range(samples + 3):
        for name, call in calls.items():
            if on_gpu:
                torch.cuda.synchronize()
            if busy:
                torch.cuda._sleep(BUSY_US * 1800)  # cycles, at some 1.8 GHz
            begin = time.perf_counter()
            for _ in range(CALLS):
                call()
            spent = time.perf_counter() - begin
            if turn >= 3:
                times[name].append(spent / CALLS * 1e6)
    return {name: statistics.median(values) for name, values in times.items()}


def stub(dispatch: ModuleType) -> None:
    """Kernels that are launched into nothing, on CPU tensors that pass for those of an H200."""
    package = dispatch.__name__.rpartition(".")[0]
    names = ("calls", "launch", "descriptors")
    runtime = {name: importlib.import_module(f"{package}.runtime.{name}") for name in names}
    import triton
    from triton.runtime import driver

    class Launcher:
        """What Triton's launcher does before it calls C."""

        global_scratch_size = profile_scratch_size = 0
        launch_cooperative_grid = launch_pdl = False

        def __call__(self, x: int, y: int, z: int, stream: int, function: int, *arguments: Any) -> None:
            _nothing(x, y, z, stream, function, False, False, None, None, *arguments)

    launcher = Launcher()
    launcher.launch = _wrap(_nothing)  # type: ignore[attr-defined]
    metadata = SimpleNamespace(tensordesc_meta=[None, None])
    binary = SimpleNamespace(run=launcher, function=0, packed_metadata=(), metadata=metadata)
    triton.JITFunction.run = lambda self, *args, grid, warmup, **options: binary  # type: ignore[method-assign]
    driver.set_active(SimpleNamespace(get_current_device=lambda: 0, get_current_stream=lambda device: 0))
    dispatch.DISPATCHER._debug = ()  # calls on a CPU are checked, those on a GPU are not
    runtime["calls"].target_of = lambda device: "sm_90"
    runtime["launch"]._encode = lambda tile, kind: (0,)
    cache: dict[Any, Any] = {}

    def of(self: Any, kv: torch.Tensor) -> Any:
        key = (kv.data_ptr(), kv.shape[0], kv.get_device())
        found = cache.get(key)
        if found is None:
            found = cache[key] = tuple(SimpleNamespace(encoded=(0,)) for _ in self.parts)
        return found

    runtime["descriptors"].Tiles.of = of
    try:
        scratch = importlib.import_module(f"{package}.runtime.scratch")
    except ImportError:
        return
    scratch.tensors = scratch.addresses


def _nothing(*arguments: Any) -> None:
    pass


def _wrap(launcher: Any) -> Any:
    def inner(*arguments: Any) -> None:
        launcher(*arguments)

    return inner


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tree", action="append", type=Path, help="checkout with a generated/ folder (again for more)")
    parser.add_argument("--samples", type=int, default=200)
    parser.add_argument("--stub", action="store_true", help="no GPU: time Python, launches do nothing")
    parser.add_argument("--json", type=Path, help="write the numbers here, too")
    options = parser.parse_args()
    device = torch.device("cpu") if options.stub else torch.device("cuda", torch.cuda.current_device())
    trees = options.tree or [Path(__file__).parents[1]]
    modules = {tree: load(tree) for tree in trees}
    if options.stub:
        torch.set_num_threads(1)
        for module in modules.values():
            stub(module)
    rows = []
    for batch, kv_len in SHAPES:
        for kv in ("fp8", "bf16"):
            calls = {
                (name, str(tree)): call
                for tree, module in modules.items()
                for name, call in calls_of(module, batch, kv_len, kv, device).items()
            }
            for busy in (False,) if options.stub else (False, True):
                for (name, tree), spent in measure(calls, options.samples, device, busy).items():
                    state = "stubbed" if options.stub else "busy" if busy else "idle"
                    row = {"shape": f"{batch}x{kv_len}", "kv": kv, "call": name, "tree": tree, "device": state}
                    rows.append({**row, "host_us": spent})
                    print(f"{row['shape']:>8} {kv:4} {state:7} {name:30} {spent:8.2f} us  {tree}", flush=True)
    if options.json:
        about = {"torch": torch.__version__, "device": torch.cuda.get_device_name() if not options.stub else "none"}
        options.json.write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
