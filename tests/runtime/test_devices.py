"""Tensors on a GPU that is not the current one: launches, scratch, descriptors and merges go where the tensors are.

Nothing may be allocated on the current GPU meanwhile, and it stays the current one.
"""

import importlib
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parent))

from steps import H200, SMALL, Built, Step, built

from mla_codegen.check.reference import in_pages, make_case, reference, relative_l2
from mla_codegen.runtime.builds import target_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs: the current one, and another"),
]

HERE, THERE = torch.device("cuda", 0), torch.device("cuda", 1)
SIZES = {"heads": 2, "latent": 64, "rope": 32}
SHAPES = [{"batch": 4, "kv_len": 1024, "splits": 16}, {"batch": 64, "kv_len": 1024, "splits": 1}]
SPECS = {
    "small": SMALL,
    "paged": {**SMALL, "kv": {"layout": "paged", "page_size": 16}},
    "h200": {**H200, "shapes": SHAPES},
}
# Requests, hint, KV rows of each: a split shape, a direct one, the general kernels, and for h200 the balanced one.
CALLS = {
    "small": [(4, 64, 64), (3, 32, 32), (9, 300, 300), (40, 5, 5)],
    "h200": [(4, 1024, 1024), (64, 1024, 1024), (9, 3000, 3000), (300, 64, 64), (32, 8000, 2000)],
}
each_kv = pytest.mark.parametrize("kv", ["bf16", "fp8_e4m3fn"])
each_spec = pytest.mark.parametrize("name", ["small", "h200"])


@pytest.fixture(autouse=True)
def elsewhere() -> Iterator[None]:
    """The current GPU is another than the tensors' before, meanwhile and after, and no memory of it is taken."""
    torch.cuda.set_device(HERE)
    torch.empty(1, device=THERE)
    torch.cuda.synchronize(HERE)
    torch.cuda.reset_peak_memory_stats(HERE)
    before = torch.cuda.memory_allocated(HERE)
    yield
    torch.cuda.synchronize(THERE)
    assert torch.cuda.current_device() == HERE.index
    assert torch.cuda.max_memory_allocated(HERE) == before


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("devices")


def package(folder: Path, name: str, prefix: str = "devices") -> Built:
    if name == "h200" and target_of(THERE) != "sm_90":
        pytest.skip("the kernels of specs/h200.yaml are for sm_90")
    return built(SPECS[name], folder, f"{prefix}_{name}")


def module(name: str, part: str, prefix: str = "devices") -> Any:
    return importlib.import_module(f"{prefix}_{name}.{part}")


def step_of(package: Built, name: str, kind: int, kv: str) -> Step:
    batch, hint, room = CALLS[name][kind]
    step = Step(package, kv, batch, 1, room * batch, hint, THERE)
    step.fill([(room * (3 * i + 1)) % (room + 1) for i in range(batch)], seed=kind)
    return step


@each_spec
@each_kv
def test_mla_decode(folder: Path, name: str, kv: str) -> None:
    """Kernels of each kind, their first call and the next, which is launched without Triton."""
    found = package(folder, name)
    for kind in range(len(CALLS[name])):
        step = step_of(found, name, kind, kv)
        for _ in range(2):
            step.spoil()
            step.decode()
            step.check()


@each_spec
def test_whichever_is_current(folder: Path, name: str) -> None:
    """What was compiled while one device was current serves while the other is."""
    found = package(folder, name)
    step = step_of(found, name, 0, "bf16")
    for _ in range(2):
        step.decode()
        step.check()
        with torch.cuda.device(THERE):
            step.spoil()
            step.decode()
        step.check()


def test_a_tensor_here_and_one_there(folder: Path) -> None:
    step = step_of(package(folder, "small"), "small", 0, "bf16")
    step.kv_indptr = torch.empty_like(step.kv_indptr, device="cpu")
    with pytest.raises(ValueError, match="kv_indptr is on cpu, q on cuda:1"):
        step.decode()


@each_kv
def test_paged(folder: Path, kv: str) -> None:
    found = package(folder, "paged")
    case = make_case([40, 0, 300], q_lens=[1, 2, 1], kv_dtype=kv, **SIZES)
    pages, want = in_pages(case, 16).to(THERE), reference(case, 64)[0]
    known = {"sm_scale": case.sm_scale, "kv_scale": pages.ragged.kv_scale}
    out = found.dispatcher.mla_decode(
        pages.ragged.q, pages.kv, pages.ragged.qo_indptr, block_table=pages.block_table, kv_lens=pages.kv_lens, **known
    )
    assert out.device == THERE and relative_l2(out.cpu(), want) < 3e-3


@each_kv
def test_custom_kernel_and_operators(folder: Path, kv: str) -> None:
    package(folder, "small")
    case = make_case([40, 0, 300], q_lens=[1, 2, 1], kv_dtype=kv, **SIZES)
    want, there = reference(case, 64)[0], case.to(THERE)
    form = {"bf16": there.kv} if kv == "bf16" else {"fp8": (there.kv, there.kv_scale)}
    tensors, known = (there.q, there.kv, there.qo_indptr, there.kv_indptr), {"sm_scale": case.sm_scale}
    dispatch, op = module("small", "dispatch"), module("small", "op").mla_decode
    space = torch.empty(dispatch.workspace_bytes(4, device=THERE), dtype=torch.uint8, device=THERE)
    scale = None if there.kv_scale is None else there.kv_scale.double()  # converted on the tensor's device
    for out in (
        dispatch.custom_kernel((there.q, form, there.qo_indptr, there.kv_indptr, known)),
        dispatch.mla_decode(*tensors, workspace=space, kv_scale=scale, **known),
        op(*tensors, kv_scale=there.kv_scale, **known),
        op(*tensors, kv_scale=there.kv_scale, workspace=space, **known),
        torch.compile(op, fullgraph=True, backend="aot_eager")(*tensors, kv_scale=there.kv_scale, **known),
    ):
        assert out.device == THERE and relative_l2(out.cpu(), want) < 3e-3


@each_spec
def test_warmup(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Of the device that it is told: what is called there afterwards compiles nothing."""
    found = package(tmp_path, name, "devices_warm")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    assert module(name, "dispatch", "devices_warm").warmup(THERE, progress=None) > 0
    with module(name, "runtime.warmup", "devices_warm").count_compilations() as count:
        for kind in range(len(CALLS[name])):
            for kv in ("bf16", "fp8_e4m3fn"):
                step = step_of(found, name, kind, kv)
                step.decode()
                step.check()
    assert count.total == 0


@each_spec
def test_a_thread_that_has_not_used_cuda(folder: Path, name: str) -> None:
    """Its current device is 0, whatever the tensors' is; a descriptor needs a context, and gets the tensors' one."""
    found = package(folder, name)
    for kind in range(len(CALLS[name])):
        step_of(found, name, kind, "bf16").decode()
        step = step_of(found, name, kind, "bf16")  # KV at another address
        torch.cuda.synchronize(THERE)
        with ThreadPoolExecutor(1) as pool:
            pool.submit(step.decode).result()
        torch.cuda.synchronize(THERE)
        step.check()


@pytest.fixture
def parallel(folder: Path, tmp_path: Path) -> Iterator[SimpleNamespace]:
    """The module, and this process as the only rank of a group."""
    found = package(folder, "small")
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield SimpleNamespace(dispatcher=found.dispatcher, module=module("small", "runtime.context_parallel"))
    dist.destroy_process_group()


def test_context_parallel(parallel: SimpleNamespace) -> None:
    """The count of visible rows, a step of a single rank, and the merge of two ranks' parts; each twice."""
    case = make_case([40, 0, 300], q_lens=[1, 2, 1], kv_dtype="bf16", **SIZES)
    (want, want_lse), there = reference(case, 64), case.to(THERE)
    lens = there.kv_indptr.diff()
    context = parallel.module.ContextParallel(parallel.dispatcher, placement="round_robin")
    for _ in range(2):
        visible = context.visible(there.qo_indptr, lens, 4)
        assert visible.device == THERE and visible.tolist() == [40, 0, 0, 300]
        out, lse = context.decode(
            there.q, there.kv, there.qo_indptr, there.kv_indptr, kv_visible=visible, sm_scale=case.sm_scale,
            return_lse=True,
        )  # fmt: skip
        assert relative_l2(out.cpu(), want) < 3e-3
    context = parallel.module.ContextParallel(parallel.dispatcher, placement="round_robin")
    context.ranks = 2
    parts = context.parts((4, 2, 64), torch.bfloat16, THERE).fill_(0xFF)
    for part, values, log_sums in zip(parts, (out, torch.zeros_like(out)), (lse, lse), strict=True):
        part[: out.nbytes] = values.view(torch.uint8).view(-1)
        part[out.nbytes : out.nbytes + lse.nbytes] = log_sums.view(torch.uint8).view(-1)
    for _ in range(2):
        merged, merged_lse = torch.full_like(out, float("nan")), torch.full_like(lse, float("nan"))
        context.combine(parts, merged, merged_lse)
        torch.testing.assert_close(merged.double().cpu(), want / 2, rtol=0.02, atol=0.02)
        torch.testing.assert_close(merged_lse.double().cpu(), want_lse + torch.tensor(2.0).log(), rtol=1e-3, atol=1e-3)


def test_peer_memory(parallel: SimpleNamespace) -> None:
    form = (2, 2, 64, torch.bfloat16)
    size = parallel.module.PeerMemory.size(*form, 1)[0]
    memory = torch.zeros(size, dtype=torch.uint8, device=THERE)
    for device in (THERE, "cuda:1"):
        memory.zero_()
        peers = parallel.module.PeerMemory(*form, device, addresses=([memory.data_ptr()], memory))
        for rows in (2, 1, 2):
            partial = torch.randn(rows, 2, 64, device=THERE).bfloat16()
            partial_lse = torch.randn(rows, 2, device=THERE)
            out, lse = torch.empty_like(partial), torch.empty_like(partial_lse)
            peers.merge(partial, partial_lse, out, lse)
            assert torch.equal(out, partial)
            torch.testing.assert_close(lse, partial_lse)
    with pytest.raises(ValueError, match=r"on cpu; it must be contiguous bfloat16 .* on cuda:1"):
        peers.merge(partial.cpu(), partial_lse, out, lse)


def test_shared_peer_memory(parallel: SimpleNamespace) -> None:
    """Memory that torch shares, which it makes on the device that it is asked for."""
    try:
        peers = parallel.module.PeerMemory(2, 2, 64, torch.bfloat16, THERE)
    except RuntimeError as error:
        pytest.skip(f"torch shares no memory in this group of one: {error}")
    partial, partial_lse = torch.randn(2, 2, 64, device=THERE).bfloat16(), torch.randn(2, 2, device=THERE)
    out, lse = torch.empty_like(partial), torch.empty_like(partial_lse)
    peers.merge(partial, partial_lse, out, lse)
    assert torch.equal(out, partial)
