"""Calls from several threads at once: on streams of their own, into cold caches, and through a full cache of choices.

What runs without a GPU is the host's part (the dispatcher's choices, imports of kernels, the descriptors' cache), and
kernels in Triton's interpreter and in the emulator, which keep their state in globals: one launch waits for another.
"""

import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

from steps import H200, SMALL, Step, built

from mla_codegen.check.emulate.loader import load
from mla_codegen.publish.write import read_manifest
from mla_codegen.runtime import descriptors
from mla_codegen.runtime.builds import target_of

THREADS = 8
WHERE = torch.device("cuda", 0)


def together(job: Callable[[int], Any]) -> list[Any]:
    """`job(0)`, `job(1)`, ... in as many threads, all let go at one moment. Raises what one of them raises."""
    barrier = threading.Barrier(THREADS)

    def run(at: int) -> Any:
        barrier.wait()
        return job(at)

    with ThreadPoolExecutor(THREADS) as pool:
        return list(pool.map(run, range(THREADS)))


@pytest.fixture
def hasty() -> Iterator[None]:
    """Threads take turns as often as Python can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("hasty")
@pytest.mark.skipif(torch.cuda.is_available(), reason="calls here are made on the CPU")
def test_each_call_gets_its_own_choice(tmp_path: Path) -> None:
    """While the cache of choices fills up, is cleared, and kernels are looked up in every thread."""
    dispatcher = built(SMALL, tmp_path, "threads_choices").dispatcher
    (build,) = dispatcher.builds
    met = threading.local()

    def kernel(name: str) -> Any:
        def run(*arguments: Any) -> None:
            splits = arguments[9] if len(arguments) > 9 and isinstance(arguments[9], int) else None
            met.seen = (name, splits, arguments[0].shape[0])

        return SimpleNamespace(run=run)

    build.kernel = kernel
    q = {rows: torch.zeros(rows, 2, 96, dtype=torch.bfloat16) for rows in (1, 3, 4, 9)}
    kv = {"bf16": torch.zeros(9, 96, dtype=torch.bfloat16), "fp8_e4m3fn": torch.zeros(9, 96).to(torch.float8_e4m3fn)}
    ends = {rows: torch.zeros(rows + 1, dtype=torch.int32) for rows in q}
    clears = 0

    class Small(dict):  # type: ignore[type-arg]
        """A cache that says that it is full."""

        def __len__(self) -> int:
            return 65536 if super().__len__() >= 20 else super().__len__()

        def clear(self) -> None:
            nonlocal clears
            clears += 1
            super().clear()

    dispatcher._chosen = Small()

    def many(thread: int) -> int:
        wrong = 0
        for i in range(1500):
            rows, kind, hint = (1, 3, 4, 9)[(i + thread) % 4], ("bf16", "fp8_e4m3fn")[i % 2], (i * (thread + 3)) % 3000
            dispatcher.mla_decode(q[rows], kv[kind], ends[rows], ends[rows], sm_scale=1.0, max_kv_len=hint)
            wrong += met.seen != (*build.choices[kind].choose(rows, hint), rows)
        return wrong

    assert together(many) == [0] * THREADS
    assert clears > 10


@pytest.mark.usefixtures("hasty")
def test_kernels_are_imported_once(tmp_path: Path) -> None:
    """Every thread gets the same modules, each of them whole."""
    package = built(SMALL, tmp_path, "threads_imports")
    (build,) = package.dispatcher.builds
    names = [kernel.name for kernel in package.plan.kernels]
    assert len(read_manifest(tmp_path / "threads_imports")["builds"]["spec"]["files"]) == len(names) + 1
    found = together(lambda thread: [build.kernel(name) for name in names[thread % 3 :] + names[: thread % 3]])
    for thread, modules in enumerate(found):
        wanted = [sys.modules[f"threads_imports.spec.{name}"] for name in names[thread % 3 :] + names[: thread % 3]]
        assert all(module is one for module, one in zip(modules, wanted, strict=True))
        assert all(callable(module.run) for module in modules)


@pytest.mark.usefixtures("hasty")
@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled for the GPU here, not interpreted")
def test_interpreted_kernels(tmp_path: Path) -> None:
    """Of two packages, each thread with calls of its own kind, results against float64."""
    packages = [built(SMALL, tmp_path, f"threads_cpu_{at}") for at in range(2)]
    cpu = torch.device("cpu")
    kinds = [("bf16", 4, 64), ("bf16", 3, 32), ("fp8_e4m3fn", 4, 64), ("fp8_e4m3fn", 2, 10)]

    def many(thread: int) -> None:
        kv, batch, room = kinds[thread % 4]
        step = Step(packages[thread // 4], kv, batch, 1, room * batch, room, cpu)
        for turn in range(2):
            step.fill([(7 * thread + 5 * turn + 3 * i) % (room + 1) for i in range(batch)], seed=thread)
            step.decode()
            step.check()

    together(many)


@pytest.mark.usefixtures("hasty")
def test_emulated_kernels() -> None:
    """Different numbers of programs and of elements: a program that met another's state would show."""
    source = """
import triton
import triton.language as tl


@triton.jit
def copy(source, target, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(target + at, tl.load(source + at) + tl.num_programs(0))
"""
    kernel = load(source, "threads_emulated", arch="sm_90").copy

    def many(thread: int) -> bool:
        programs, block = thread + 1, 16 << thread % 3
        source = torch.arange(programs * block, dtype=torch.float32)
        target = torch.full_like(source, float("nan"))
        kernel[(programs,)](source, target, BLOCK=block)
        return torch.equal(target, source + programs)

    assert together(many) == [True] * THREADS


@pytest.mark.usefixtures("hasty")
def test_descriptors_are_those_of_their_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    """While their cache is filled and cleared by all threads."""
    monkeypatch.setattr(descriptors, "MOST", 16)
    tiles = descriptors.Tiles(torch.bfloat16, 64, ())

    def make(kv: Any, page_step: int | None) -> tuple[Any, ...]:
        return (SimpleNamespace(of=(kv.data_ptr(), kv.shape[0], page_step), encoded=b"..."),)

    monkeypatch.setattr(tiles, "_make", make)

    def pool(address: int, rows: int) -> Any:
        return SimpleNamespace(
            data_ptr=lambda: address, shape=(rows, 576), get_device=lambda: 0, is_cuda=True, device=WHERE
        )

    def many(thread: int) -> int:
        wrong = 0
        for i in range(3000):
            address, rows = 16 * ((i * (thread + 1)) % 23), i % 3
            step = (None, 576, 1152)[i // 3 % 3]
            found = tiles.of(pool(address, rows), step and (step, 1))
            wrong += found[0].of != (address, rows, step)
        return wrong

    assert together(many) == [0] * THREADS


def test_a_thread_that_encodes_a_descriptor_has_a_context(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cached descriptor may not be encoded yet: whoever gets it may have to, also where only the last is left."""
    asked: list[torch.device] = []
    monkeypatch.setattr(descriptors, "have_context", asked.append)
    tiles = descriptors.Tiles(torch.bfloat16, 64, ())
    pair = SimpleNamespace(encoded=None), SimpleNamespace(encoded=None)
    monkeypatch.setattr(tiles, "_make", lambda kv, page_step: pair)
    kv: Any = SimpleNamespace(data_ptr=lambda: 16, shape=(1, 576), get_device=lambda: 0, is_cuda=True, device=WHERE)
    assert tiles.of(kv) is pair
    assert asked == [WHERE]
    pair[0].encoded = b"..."
    assert tiles.of(kv) is pair
    assert asked == [WHERE] * 2
    pair[1].encoded = b"..."
    assert tiles.of(kv) is pair
    assert asked == [WHERE] * 2


def spec_of(name: str) -> dict[str, Any]:
    """h200: a few shapes of that spec, so that a package of its own is soon compiled."""
    if name == "small":
        return SMALL
    if target_of(WHERE) != "sm_90":
        pytest.skip("the kernels of specs/h200.yaml are for sm_90")
    return {**H200, "shapes": [{"batch": 4, "kv_len": 1024, "splits": 16}, {"batch": 64, "kv_len": 1024, "splits": 1}]}


# Requests, hint, KV rows of each: a split shape, a direct one, the general kernels, the balanced one.
CALLS = {
    "small": [(4, 64, 64), (3, 32, 32), (9, 300, 300), (40, 5, 5)],
    "h200": [(4, 1024, 1024), (64, 1024, 1024), (9, 3000, 3000), (300, 64, 64), (32, 8000, 2000)],
}
each_spec = pytest.mark.parametrize("name", ["small", "h200"])


def steps_of(package: Any, name: str) -> list[Step]:
    """One for each thread, of all kinds of calls and both KV types."""
    made = []
    for thread in range(THREADS):
        batch, hint, room = CALLS[name][thread % len(CALLS[name])]
        kv = ("bf16", "fp8_e4m3fn")[thread // len(CALLS[name]) % 2]
        step = Step(package, kv, batch, 1, room * batch, hint, WHERE)
        step.fill([(room * (3 * i + thread + 1)) % (room + 1) for i in range(batch)], seed=thread)
        made.append(step)
    return made


@pytest.mark.gpu
@each_spec
def test_threads_on_streams_of_their_own(name: str, tmp_path: Path) -> None:
    """The bits that the same calls give one after the other, and those are right."""
    steps = steps_of(built(spec_of(name), tmp_path, f"threads_streams_{name}"), name)
    wanted = []
    for step in steps:
        step.decode()
        step.check()
        wanted.append((step.out.clone(), step.lse.clone()))
        step.spoil()
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in steps]

    def many(thread: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        step, found = steps[thread], []
        with torch.cuda.stream(streams[thread]):
            for _ in range(50):
                step.spoil()
                step.decode()
                found.append((step.out.clone(), step.lse.clone()))
        streams[thread].synchronize()
        return found

    for found, (out, lse) in zip(together(many), wanted, strict=True):
        assert all(torch.equal(one, out) and torch.equal(one_lse, lse) for one, one_lse in found)


@pytest.mark.gpu
@each_spec
def test_the_first_call_of_a_kernel_in_all_threads_at_once(name: str, tmp_path: Path) -> None:
    """Packages that nobody has called: imports, compilation, descriptors and launches all begin in eight threads."""
    for round_, (batch, hint, room) in enumerate(CALLS[name]):
        package = built(spec_of(name), tmp_path / str(round_), f"threads_cold_{name}_{round_}")
        steps = []
        for thread in range(THREADS):
            step = Step(package, ("bf16", "fp8_e4m3fn")[round_ % 2], batch, 1, room * batch, hint, WHERE)
            step.fill([(room * (3 * i + thread + 1)) % (room + 1) for i in range(batch)], seed=thread)
            steps.append(step)
        torch.cuda.synchronize()

        def first(thread: int, steps: list[Step] = steps) -> None:
            with torch.cuda.stream(torch.cuda.Stream()):
                steps[thread].decode()
                steps[thread].decode()

        together(first)
        torch.cuda.synchronize()
        for step in steps:
            step.check()


@pytest.mark.gpu
def test_one_tensor_read_by_all_threads(tmp_path: Path) -> None:
    """One KV pool, as the threads of a server share it: its descriptors are made once and used by all."""
    name = "h200" if target_of(WHERE) == "sm_90" else "small"
    steps = steps_of(built(spec_of(name), tmp_path, "threads_shared"), name)
    most = max((step for step in steps if step.kv_kind == "bf16"), key=lambda step: len(step.kv))
    for step in steps:
        if step.kv_kind == "bf16":
            step.kv = most.kv
    torch.cuda.synchronize()

    def many(thread: int) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(20):
                steps[thread].decode()

    together(many)
    torch.cuda.synchronize()
    for step in steps:
        step.check()


@pytest.mark.gpu
def test_a_new_thread_may_make_the_first_call_with_a_tensor(tmp_path: Path) -> None:
    """Of a kernel that is compiled: there is a descriptor to encode, and nothing before has used CUDA in the thread."""
    name = "h200" if target_of(WHERE) == "sm_90" else "small"
    package = built(spec_of(name), tmp_path, "threads_new")
    for batch, hint, room in CALLS[name]:
        steps = [Step(package, "bf16", batch, 1, room * batch, hint, WHERE) for _ in range(3)]
        for seed, step in enumerate(steps):
            step.fill([room] * batch, seed=seed)
        steps[0].decode()
        torch.cuda.synchronize()
        for step in steps[1:]:
            with ThreadPoolExecutor(1) as pool:
                pool.submit(step.decode).result()
        torch.cuda.synchronize()
        for step in steps:
            step.check()
