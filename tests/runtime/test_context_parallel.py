"""Context parallel decode: ranks over gloo in processes of their own, placement, refusals, and the merge's rounding."""

import functools
import importlib
import multiprocessing
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from builds import build, plan_of

sys.path.insert(0, str(Path(__file__).parent))

import context_parallel_ranks as ranks_module

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="ranks over gloo on CPUs need the interpreter; benchmarks/ has the run on GPUs"
)

SPEC = {
    "target": "portable",
    "model": {
        "num_heads": ranks_module.HEADS,
        "kv_lora_rank": ranks_module.LATENT,
        "qk_rope_head_dim": ranks_module.ROPE,
    },
    "dtypes": {"kv": ["bf16", "fp8_e4m3fn"]},
    "defaults": {"block_n": 32, "num_stages": 1, "optimizations": ["exp2", "peeled_tail", "direct_out", "packed_fp8"]},
    "shapes": [{"batch": 2, "kv_len": 64, "splits": 2}],
}
PACKAGE = "context_parallel_build"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the generated package."""
    folder = tmp_path_factory.mktemp("context_parallel")
    build([plan_of(SPEC, "spec.yaml")], folder / PACKAGE)
    sys.path.insert(0, str(folder))
    return folder


@pytest.fixture(scope="module")
def alone(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SimpleNamespace]:
    """The modules of the package, with this process as the only rank of a group."""
    store = tmp_path_factory.mktemp("store") / "store"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    yield SimpleNamespace(
        dispatcher=importlib.import_module(f"{PACKAGE}.dispatch").DISPATCHER,
        module=importlib.import_module(f"{PACKAGE}.runtime.context_parallel"),
    )
    dist.destroy_process_group()


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="gloo ranks run the kernels in the interpreter")
@pytest.mark.parametrize("ranks", [3])
def test_ranks_together_give_what_one_call_over_all_rows_gives(folder: Path, tmp_path: Path, ranks: int) -> None:
    context = multiprocessing.get_context("spawn")
    failures: Any = context.Queue()
    store = str(tmp_path / "store")
    processes = [
        context.Process(target=ranks_module.run_rank, args=(rank, ranks, str(folder), PACKAGE, store, failures))
        for rank in range(ranks)
    ]
    for process in processes:
        process.start()
    try:
        reports = dict(failures.get(timeout=300) for _ in processes)
    finally:
        for process in processes:
            process.join(timeout=30)
            process.kill()
    assert reports == {rank: [] for rank in range(ranks)}


def test_a_single_rank_calls_the_kernel_alone(alone: SimpleNamespace) -> None:
    parallel = alone.module.ContextParallel(alone.dispatcher, placement="round_robin")
    setting = ranks_module.Setting("one rank", [40, 3], [2, 5], "round_robin")
    assert list(ranks_module.check(parallel, setting)) == []


class Placed:
    """`rows` and `visible` of every rank of a group, in one process."""

    def __init__(self, alone: SimpleNamespace, ranks: int, placement: str, run: int):
        self.ranks = []
        for rank in range(ranks):
            parallel = alone.module.ContextParallel(alone.dispatcher, placement=placement, run=run)
            parallel.ranks, parallel.rank = ranks, rank
            self.ranks.append(parallel)


@pytest.mark.parametrize("placement,run", [("contiguous", 1), ("round_robin", 1), ("round_robin", 3)])
@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_each_row_lies_on_one_rank_and_query_rows_see_their_own_prefix(
    alone: SimpleNamespace, ranks: int, placement: str, run: int
) -> None:
    lens, q_lens = [0, 5, 24, 100], [1, 7, 0, 3]
    qo_indptr = torch.tensor([0, *q_lens]).cumsum(0)
    placed = Placed(alone, ranks, placement, run).ranks
    rows = [[parallel.rows(length) for parallel in placed] for length in lens]
    for length, shared in zip(lens, rows, strict=True):
        assert torch.cat(shared).sort().values.tolist() == list(range(length))
    visible = [parallel.visible(qo_indptr, torch.tensor(lens), sum(q_lens)) for parallel in placed]
    at = 0
    for request, (length, q_len) in enumerate(zip(lens, q_lens, strict=True)):
        for t in range(q_len):
            for rank in range(ranks):
                want = int((rows[request][rank] < length - q_len + t + 1).sum())
                assert min(int(visible[rank][at]), len(rows[request][rank])) == want
            at += 1


def combine(alone: SimpleNamespace, parts: torch.Tensor, rows: int, latent: int) -> tuple[torch.Tensor, torch.Tensor]:
    """What as many ranks as there are parts make of them, for one head."""
    parallel = alone.module.ContextParallel(alone.dispatcher)
    parallel.ranks = len(parts)
    out, lse = torch.full((rows, 1, latent), float("nan"), dtype=torch.bfloat16), torch.full((rows, 1), float("nan"))
    parallel.combine(parts, out, lse)
    return out[:, 0], lse[:, 0]


def test_merging_rounded_partials_adds_at_most_their_own_rounding(alone: SimpleNamespace) -> None:
    """|out - exact| <= (sum of the ranks' weights * |partial|) * 2^-8 for them, and 2^-8 |out| for the result."""
    ranks, at, latent = 4, 6, 64
    generator = torch.Generator().manual_seed(1)
    exact = torch.randn(ranks, at, latent, generator=generator, dtype=torch.float64)
    lse = torch.randn(ranks, at, generator=generator) * 3
    lse[:, 1] = float("-inf")
    lse[1, 2] = float("-inf")
    exact[1, 2] = float("nan")  # a part without rows may hold anything
    part = latent * at * 2 + at * 4  # a multiple of 16 bytes
    parts = torch.empty(ranks, -(-part // 16) * 16, dtype=torch.uint8)
    for rank in range(ranks):
        parts[rank, : latent * at * 2] = exact[rank].to(torch.bfloat16).view(torch.uint8).flatten()
        parts[rank, latent * at * 2 : part] = lse[rank].view(torch.uint8)
    out, out_lse = combine(alone, parts, at, latent)
    want_lse = torch.logsumexp(lse.double(), 0)
    weights = torch.exp(lse.double() - want_lse).nan_to_num(0.0)[..., None]
    used = exact.nan_to_num(0.0)
    want = (weights * used).sum(0)
    allowed = ((weights * used.abs()).sum(0) + want.abs()) * 2.0**-8 * 1.01
    assert ((out.double() - want).abs() <= allowed).all()
    assert (out[1] == 0).all() and (out_lse[1] == float("-inf")).all()
    torch.testing.assert_close(out_lse.double(), want_lse, rtol=1e-6, atol=1e-6)


def test_a_merge_keeps_nan_where_it_is(alone: SimpleNamespace) -> None:
    """One rank's NaN makes its (query row, head) NaN, beside ranks with rows and beside ranks without."""
    ranks, at, latent = 3, 4, 64
    partial, lse = torch.randn(ranks, at, latent).bfloat16(), torch.randn(ranks, at)
    partial[1, 0], lse[1, 0] = float("nan"), float("nan")
    lse[:, 2] = float("-inf")
    partial[2, 2], lse[2, 2] = float("nan"), float("nan")
    parts = torch.cat([partial.view(ranks, -1).view(torch.uint8), lse.view(torch.uint8)], 1)
    out, out_lse = combine(alone, parts, at, latent)
    bad = torch.tensor([True, False, True, False])
    assert torch.equal(out.isnan().all(-1), bad) and torch.equal(out.isnan().any(-1), bad)
    assert torch.equal(out_lse.isnan(), bad)

    form = (at, 1, latent, torch.bfloat16)
    memory = torch.zeros(alone.module.PeerMemory.size(*form, 1)[0], dtype=torch.uint8)
    peers = alone.module.PeerMemory(*form, torch.device("cpu"), addresses=([memory.data_ptr()], memory))
    got, got_lse = torch.empty(at, 1, latent, dtype=torch.bfloat16), torch.empty(at, 1)
    peers.merge(partial[1][:, None], lse[1][:, None], got, got_lse)
    assert torch.equal(got[:, 0].isnan().all(-1), lse[1].isnan()) and torch.equal(got_lse[:, 0].isnan(), lse[1].isnan())
    assert (got[2] == 0).all() and got_lse[2] == float("-inf")


def test_refusals_say_what_is_wanted(alone: SimpleNamespace) -> None:
    make = alone.module.ContextParallel
    with pytest.raises(ValueError, match="'contiguous' or 'round_robin'"):
        make(alone.dispatcher, placement="striped")
    with pytest.raises(ValueError, match="run is 4"):
        make(alone.dispatcher, run=4)
    parallel = make(alone.dispatcher, placement="round_robin")
    qo_indptr, lens = torch.tensor([0, 1]), torch.tensor([5])
    with pytest.raises(ValueError, match=r"kv_len is torch.float32 .*int32 or int64 \[1\]"):
        parallel.visible(qo_indptr, lens.float(), 1)
    with pytest.raises(ValueError, match="kv_begin belongs to contiguous"):
        parallel.visible(qo_indptr, lens, 1, lens)
    q = torch.zeros(1, ranks_module.HEADS, ranks_module.LATENT + ranks_module.ROPE, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="give kv_len"):
        parallel.decode(q, q[0], qo_indptr, qo_indptr, sm_scale=1.0)


def test_shared_memory_is_for_the_form_that_it_was_made_for(alone: SimpleNamespace) -> None:
    """A single rank exchanges with itself, step after step; more rows or other heads than planned are refused."""
    form = (2, ranks_module.HEADS, ranks_module.LATENT, torch.bfloat16)
    memory = torch.zeros(alone.module.PeerMemory.size(*form, 1)[0], dtype=torch.uint8)
    peers = alone.module.PeerMemory(*form, torch.device("cpu"), addresses=([memory.data_ptr()], memory))
    for rows in (2, 1, 2):
        partial = torch.randn(rows, *form[1:3]).bfloat16()
        out, lse, partial_lse = torch.empty_like(partial), torch.empty(rows, form[1]), torch.randn(rows, form[1])
        peers.merge(partial, partial_lse, out, lse)
        assert torch.equal(out, partial)
        torch.testing.assert_close(lse, partial_lse)
    for wrong in (torch.empty(3, *form[1:3], dtype=torch.bfloat16), torch.empty(1, 1, form[2], dtype=torch.bfloat16)):
        with pytest.raises(ValueError, match=r"this memory was made for torch\.bfloat16 \[2, 2, 64\] at most"):
            peers.merge(wrong, wrong[..., 0].float(), wrong, wrong[..., 0].float())


NO_TENSORS: list[Any] = [None, [1.0], 0.5, torch.zeros(2).numpy(), torch.zeros(2, device="meta")]


def test_what_is_no_tensor_is_said(alone: SimpleNamespace) -> None:
    """Every tensor of every call, one after the other."""
    heads, latent = ranks_module.HEADS, ranks_module.LATENT
    parallel = alone.module.ContextParallel(alone.dispatcher)
    ends, lens = torch.tensor([0, 1], dtype=torch.int32), torch.tensor([5], dtype=torch.int32)
    memory = torch.zeros(alone.module.PeerMemory.size(1, heads, latent, torch.bfloat16, 1)[0], dtype=torch.uint8)
    peers = alone.module.PeerMemory(
        1, heads, latent, torch.bfloat16, torch.device("cpu"), addresses=([memory.data_ptr()], memory)
    )
    out, lse = torch.zeros(1, heads, latent, dtype=torch.bfloat16), torch.zeros(1, heads)
    row = latent + ranks_module.ROPE
    q, kv = torch.zeros(1, heads, row, dtype=torch.bfloat16), torch.zeros(5, row, dtype=torch.bfloat16)
    calls: list[tuple[Any, dict[str, Any]]] = [
        (parallel.visible, {"qo_indptr": ends, "kv_len": lens, "total_q": 1}),
        (
            parallel.combine,
            {"parts": parallel.parts((1, heads, latent), out.dtype, out.device), "out": out, "lse": lse},
        ),
        (peers.merge, {"partial": out.clone(), "partial_lse": lse.clone(), "out": out, "lse": lse}),
        (
            functools.partial(parallel.decode, sm_scale=1.0),
            {"q": q, "kv": kv, "qo_indptr": ends, "kv_indptr": ends * 5, "kv_len": lens},
        ),
    ]
    for call, given in calls:
        call(**given)
        for name, value in given.items():
            if isinstance(value, torch.Tensor):
                for wrong in NO_TENSORS:
                    if not (name in ("kv_len", "kv_indptr") and wrong is None and "q" in given):
                        with pytest.raises(TypeError, match=rf"\b{name} is .*; it must be"):
                            call(**{**given, name: wrong})
    for wrong in ("1", 1.0, torch.tensor(1), None):
        with pytest.raises(TypeError, match=r"total_q is .*; it must be an int"):
            parallel.visible(ends, lens, wrong)
        with pytest.raises(TypeError, match=r"run is .*; it must be an int"):
            alone.module.ContextParallel(alone.dispatcher, "round_robin", run=wrong)
    for wrong in ("1.0", None, float("nan"), torch.tensor(1.0)):
        with pytest.raises(TypeError, match=r"sm_scale is .*; it must be a finite"):
            parallel.decode(q, kv, ends, ends * 5, lens, sm_scale=wrong)


def test_what_does_not_fit_a_merge_is_said(alone: SimpleNamespace) -> None:
    """Kernels index by the shapes: what is smaller, strided or of another type would be read past its end."""
    heads, latent = ranks_module.HEADS, ranks_module.LATENT
    parallel = alone.module.ContextParallel(alone.dispatcher)
    out, lse = torch.zeros(2, heads, latent, dtype=torch.bfloat16), torch.zeros(2, heads)
    parts = parallel.parts((2, heads, latent), out.dtype, out.device)
    memory = torch.zeros(alone.module.PeerMemory.size(2, heads, latent, torch.bfloat16, 1)[0], dtype=torch.uint8)
    peers = alone.module.PeerMemory(
        2, heads, latent, torch.bfloat16, torch.device("cpu"), addresses=([memory.data_ptr()], memory)
    )
    good = {"partial": out.clone(), "partial_lse": lse.clone(), "out": out, "lse": lse}
    for name, tensor in good.items():
        for wrong in (tensor[:1], tensor.double(), tensor.repeat_interleave(2, -1)[..., ::2]):
            with pytest.raises(ValueError, match=r"it must be contiguous|this memory was made for"):
                peers.merge(**{**good, name: wrong})
    for name, wrong in (
        ("parts", parts[:, :-16]), ("parts", parts.short()), ("lse", lse[:1]), ("lse", lse.half()),
        ("out", out.transpose(0, 1)), ("parts", parts.repeat(1, 2)[:, ::2]),
    ):  # fmt: skip
        with pytest.raises(ValueError, match="it must be contiguous"):
            parallel.combine(**{"parts": parts, "out": out, "lse": lse, name: wrong})
    with pytest.raises(ValueError, match=r"out has shape \(128,\)"):
        parallel.combine(parts, out[0, 0].repeat(2), lse)
    ends, lens = torch.tensor([0, 2], dtype=torch.int32), torch.tensor([5], dtype=torch.int32)
    for qo_indptr, total_q, message in (
        (ends.float(), 2, r"qo_indptr is torch\.float32"), (ends.repeat(2)[::2], 2, r"strides \(2,\)"),
        (ends[:0], 2, "kv_len is|they must be"), (ends, -1, "total_q -1"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            parallel.visible(qo_indptr, lens, total_q)
