"""CUDA graphs: a captured call is right for whatever its buffers hold at a replay, with no allocation and no sync.

Without a GPU the same steps run eagerly in the interpreter, so that what they ask of the kernels (padding, lengths far
from the hint) is asked there too.
"""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

from steps import H200, SMALL, Built, Step, built, capture

from mla_codegen.runtime.builds import target_of

CUDA = torch.cuda.is_available()
WHERE = torch.device("cuda", 0) if CUDA else torch.device("cpu")
gpu = pytest.mark.gpu

# spec, query rows of a request, requests, hint -> the kernel that must serve. Every kind that a spec has. The buffers
# have room for four times the hint a request, but where a number of KV rows a request is given.
KINDS = [
    pytest.param("small", 1, 4, 64, "b4_kv64", id="small-split"),
    pytest.param("small", 1, 3, 32, "b3_kv32", id="small-direct"),
    pytest.param("small", 1, 5, 70, "any", id="small-general"),
    pytest.param("small", 2, 5, 8, "any_direct", id="small-general-direct"),
    pytest.param("h200", 1, 32, 1024, "b32_kv1024", marks=gpu, id="h200-split"),
    pytest.param("h200", 1, 1, 131072, "b1_kv131072", marks=gpu, id="h200-column-blocks"),
    pytest.param("h200", 1, 256, 1024, "b256_kv1024", marks=gpu, id="h200-direct"),
    pytest.param("h200", 4, 5, 3000, "any", marks=gpu, id="h200-general"),
    pytest.param("h200", 1, 300, 64, "any_direct", marks=gpu, id="h200-general-direct"),
    pytest.param("h200", 1, 32, 16384, "balanced", marks=gpu, id="h200-balanced"),
    pytest.param("h200", 4, 8, 16384, "balanced", marks=gpu, id="h200-balanced-q4"),
    pytest.param("h200", 1, 256, 8192, "balanced", marks=gpu, id="h200-balanced-256"),
]
ROOM = {"b1_kv131072": 131072, "balanced": 2048}
KV = ["bf16", "fp8_e4m3fn"]
# Requests, hint, KV rows of each: a split kernel of specs/h200.yaml, a direct one, the general and the balanced one.
ALL = [(32, 1024, 1024), (256, 1024, 1024), (5, 3000, 3000), (32, 8000, 2000)]


@pytest.fixture(scope="module")
def specs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Built]]:
    """Both specs, each built when it is first asked for."""
    made: dict[str, Built] = {}

    def of(name: str) -> Built:
        if name == "h200" and (not CUDA or target_of(WHERE) != "sm_90"):
            pytest.skip("the kernels of specs/h200.yaml are for sm_90")
        if name not in made:
            made[name] = built({"small": SMALL, "h200": H200}[name], tmp_path_factory.mktemp(name), f"graphs_{name}")
        return made[name]

    yield of


def ragged(batch: int, most: int) -> list[int]:
    """Lengths from 0 to `most`, both among them if there are two requests or more."""
    return [most, 0, *((most * (7 * i + 3) // 11) % (most + 1) for i in range(batch - 2))][:batch]


@pytest.mark.parametrize("kv", KV)
@pytest.mark.parametrize(("spec", "q_len", "batch", "hint", "kernel"), KINDS)
def test_replays_follow_the_buffers(
    specs: Callable[[str], Built], spec: str, q_len: int, batch: int, hint: int, kernel: str, kv: str
) -> None:
    """Captured at one length; replayed with one row, four times the rows, ragged rows, one long and fewer requests."""
    most = ROOM.get(kernel, 4 * hint)
    step = Step(specs(spec), kv, batch, q_len, most * batch, hint, WHERE)
    assert specs(spec).kernel(step) == kernel
    step.fill([min(hint, most)] * batch)
    replay = capture(step.decode, WHERE)
    step.spoil()
    replay()
    step.check()
    later: list[dict[str, Any]] = [
        {"lens": [1] * batch},
        {"lens": [most] * batch},
        {"lens": ragged(batch, most)},
        {"lens": [*[3] * (batch - 1), min(100_000, most * batch - 3 * (batch - 1))]},  # one request has nearly all rows
        {"lens": ragged(batch, min(hint, most))[: batch // 2]},
        {"lens": ragged(batch, min(hint, most))[: batch // 2], "rows_padded": False},
        {"lens": [7] * batch, "q_lens": [(3 * i) % (q_len + 1) for i in range(batch)]},
        {"lens": []},
    ]
    for seed, given in enumerate(later, start=1):
        step.fill(**given, seed=seed)
        replay()
        step.check()
    again = step.out.clone(), step.lse.clone()
    step.spoil()
    replay()  # nothing changed: the same bits
    assert torch.equal(step.out, again[0])
    assert torch.equal(step.lse, again[1])


@pytest.mark.parametrize("kv", KV)
@pytest.mark.parametrize(
    ("spec", "batch", "hint"),
    [("small", 4, 64), pytest.param("h200", 32, 1024, marks=gpu), pytest.param("h200", 7, 500, marks=gpu)],
)
def test_visible_rows_and_int64_change_in_place(
    specs: Callable[[str], Built], spec: str, batch: int, hint: int, kv: str
) -> None:
    step = Step(specs(spec), kv, batch, 1, 2 * hint * batch, hint, WHERE, visible=True, index=torch.int64)
    step.fill([hint] * batch)
    replay = capture(step.decode, WHERE)
    for seed, lens in enumerate(([hint] * batch, ragged(batch, 2 * hint), [3] * (batch // 2)), start=5):
        step.fill(lens, seed=seed)
        replay()
        step.check()
    assert step.visible is not None
    step.visible.fill_(1)
    replay()
    step.check()


@gpu
@pytest.mark.parametrize("kv", KV)
@pytest.mark.parametrize(("batch", "hint", "room"), ALL)
def test_nothing_is_allocated_outside_the_graphs_pool(
    specs: Callable[[str], Built], kv: str, batch: int, hint: int, room: int
) -> None:
    """By the allocator's own counts: of the common pool over the capture, of all pools over the replays."""
    name = "h200" if target_of(WHERE) == "sm_90" else "small"
    step = Step(specs(name), kv, batch, 1, room * batch, hint, WHERE)
    step.fill([room] * batch)
    first = capture(step.decode, WHERE)  # whatever is made once is made, and kept while there is a graph

    def common() -> int:
        torch.cuda.synchronize()
        segments = torch.cuda.memory_snapshot()
        return sum(s["allocated_size"] for s in segments if tuple(s["segment_pool_id"]) == (0, 0))

    before = common()
    replay = capture(step.decode, WHERE)
    assert common() == before
    counts = [torch.cuda.memory_stats()[f"{name}.all.allocated"] for name in ("allocation", "segment")]
    for _ in range(5):
        first()
        replay()
    torch.cuda.synchronize()
    assert [torch.cuda.memory_stats()[f"{name}.all.allocated"] for name in ("allocation", "segment")] == counts


@gpu
def test_a_capture_may_be_the_first_call_with_a_tensor(specs: Callable[[str], Built]) -> None:
    """The kernel is compiled, but the KV is a tensor that it has not met: its descriptors are made in the capture."""
    name = "h200" if target_of(WHERE) == "sm_90" else "small"
    known, new = (Step(specs(name), "bf16", 32, 1, 2 * 1024 * 32 + extra, 1024, WHERE) for extra in (0, 77))
    known.fill([1024] * 32)
    known.decode()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        new.decode()
    for seed, lens in enumerate(([1024] * 32, ragged(32, 2048))):
        new.fill(lens, seed=seed)
        graph.replay()
        new.check()


@gpu
def test_an_eager_call_does_not_wait_for_the_device(specs: Callable[[str], Built]) -> None:
    step = Step(specs("small"), "bf16", 4, 1, 256, 64, WHERE)
    step.fill([64] * 4)
    step.decode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step.decode()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    step.check()


@gpu
@pytest.mark.parametrize("kv", KV)
@pytest.mark.parametrize(("batch", "hint", "room"), ALL)
def test_among_other_work_in_one_graph(
    specs: Callable[[str], Built], kv: str, batch: int, hint: int, room: int
) -> None:
    """Copies and fills right before, several layers, and what reads the output right behind."""
    name = "h200" if target_of(WHERE) == "sm_90" else "small"
    step = Step(specs(name), kv, batch, 1, room * batch, hint, WHERE)
    given, results, layers = torch.empty_like(step.q), [], 3
    copies = [torch.empty_like(step.out) for _ in range(layers)]

    def run() -> None:
        for layer in range(layers):
            step.q.copy_(given)
            step.out.fill_(float("nan"))
            step.lse.fill_(float("nan"))
            step.decode()
            copies[layer].copy_(step.out)
            given.mul_(-1)

    step.fill([room] * batch)
    replay = capture(run, WHERE)
    for seed in (1, 2):
        step.fill(ragged(batch, room), seed=seed)
        given.copy_(step.q)
        start = given.clone()
        replay()
        for layer in range(layers):
            step.q.copy_(start * (-1) ** layer)
            step.check(copies[layer], step.truth()[1])
            results.append(copies[layer].clone())
    assert not torch.equal(results[0], results[1])


@gpu
@pytest.mark.parametrize("kv", KV)
def test_several_graphs_at_once(specs: Callable[[str], Built], kv: str) -> None:
    """Captured from one dispatcher, replayed on a stream each without waiting for each other."""
    name = "h200" if target_of(WHERE) == "sm_90" else "small"
    kinds = [(32, 1024, 2048), (5, 3000, 6000), (32, 8000, 2000)] * 2  # each kernel twice; the last is balanced
    steps = [Step(specs(name), kv, batch, 1, room * batch, hint, WHERE) for batch, hint, room in kinds]
    for seed, step in enumerate(steps):
        step.fill([1000] * step.batch, seed=seed)
    replays = [capture(step.decode, WHERE) for step in steps]
    wanted = []
    for seed, (step, replay) in enumerate(zip(steps, replays, strict=True), start=10):
        step.fill(ragged(step.batch, len(step.kv) // step.batch), seed=seed)
        replay()
        step.check()
        wanted.append((step.out.clone(), step.lse.clone()))
        step.spoil()
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in steps]
    kept: list[list[torch.Tensor]] = [[] for _ in steps]
    for _ in range(20):
        for at, (stream, step, replay) in enumerate(zip(streams, steps, replays, strict=True)):
            with torch.cuda.stream(stream):
                replay()
                kept[at].append(step.out.clone())
    torch.cuda.synchronize()
    for step, (out, lse), outs in zip(steps, wanted, kept, strict=True):
        assert all(torch.equal(one, out) for one in outs)
        assert torch.equal(step.lse, lse)
