"""Sparse KV: a list of rows of a pool for each query row, in every form of row that plain Triton reads.

`in_lists` deals the rows to a pool in random order, fills the rest of it with NaN, and the lists with -1 in places.
"""

import importlib
from typing import Any

import pytest
import torch
from harness import EXACT, LSE_EXACT, Builder, Got, Kernels, check, make_spec

from mla_codegen.check.reference import Case, SparseCase, in_lists, make_case
from mla_codegen.measure.workload import Truth, kv_arguments, make_inputs, workload_of

TOPK, PAGE = 70, 16
FORMS = {"bf16": 32, "fp8_e4m3fn": 32, "fp8_ds_mla": 32, "mxfp4_ds_mla": 32, "fp8_ds_v4": 0}  # and their rope columns
OPTIONS = ["exp2", "direct_out", "packed_fp8"]
LENS = [0, 1, 33, 70, 32]


def built(build: Builder, kv: str, target: str = "portable", **settings: Any) -> Kernels:
    page = {"page_size": PAGE} if kv == "fp8_ds_v4" else {}
    model = {"heads": 4, "latent": 128, "rope": FORMS[kv], **settings}
    spec = make_spec(target, kv=[kv], optimizations=OPTIONS, shapes=[{"batch": len(LENS), "splits": 2}], **model)
    return build(spec | {"kv": {"layout": "sparse", "topk": TOPK, **page}})


def a_case(kv: str, lens: list[int] = LENS, **more: Any) -> Case:
    return make_case(lens, heads=4, latent=128, rope=FORMS[kv], kv_dtype=kv, **more)


def decode(kernels: Kernels, case: SparseCase, bounded: bool = True, **arguments: Any) -> Got:
    """(out, LSE) on the CPU, by `mla_decode`."""
    rows = case.ragged
    given: dict[str, Any] = {"sm_scale": rows.sm_scale, "kv_scale": rows.kv_scale, "attn_sink": rows.sink, **arguments}
    lists = (case.indices, case.topk_lens) if bounded else (case.unbounded, None)
    out, lse = kernels.dispatcher.mla_decode(
        rows.q, case.kv, indices=lists[0], topk_lens=lists[1], return_lse=True, **given
    )
    return out.cpu(), lse.cpu()


@pytest.mark.parametrize("kv", FORMS)
def test_lists(build: Builder, kv: str) -> None:
    """Lists that are empty, of one row, of all; with lengths and without; an attention sink; several splits and one."""
    kernels = built(build, kv)
    case = in_lists(a_case(kv).to(kernels.device), TOPK, PAGE)
    for bounded in (True, False):
        check(decode(kernels, case, bounded), case.ragged)
    few = in_lists(a_case(kv, [33], seed=1).to(kernels.device), TOPK, PAGE)  # of no shape: the general kernels
    few.ragged.sink = torch.tensor([0.0, 1.5, float("inf"), float("-inf")], device=kernels.device)
    check(decode(kernels, few), few.ragged)


@pytest.mark.parametrize("kv", ["bf16", "fp8_e4m3fn", "fp8_ds_mla"])
def test_tiles_without_a_row(build: Builder, kv: str) -> None:
    """A first tile that is all -1, one between others, and a list of nothing else; one split and two."""
    kernels = built(build, kv)
    case = in_lists(a_case(kv, [6, 0, 5]).to(kernels.device), TOPK, PAGE)
    rows = case.unbounded
    case.indices = torch.full_like(rows, -1)
    for row, places in ((0, [32, 33, 34, 64, 68, 69]), (2, [0, 1, 65, 66, 67])):
        case.indices[row, places] = rows[row][rows[row] >= 0]
    case.topk_lens = torch.full_like(case.topk_lens, TOPK)
    for splits in (None, 2):
        kernel = kernels.plan.general(kv)[0 if splits is None else 1]
        out = torch.full((3, 4, 128), float("nan"), dtype=torch.bfloat16, device=kernels.device)
        lse = torch.full((3, 4), float("nan"), device=kernels.device)
        given = () if splits is None else (splits,)
        on = case.ragged
        kernels.module(kernel.name).run(
            on.q, case.kv, case.indices, None, None, on.kv_scale, on.sm_scale, out, lse, *given
        )
        check((out.cpu(), lse.cpu()), case.ragged)


@pytest.mark.parametrize("kv", ["bf16", "fp8_ds_mla", "mxfp4_ds_mla", "fp8_ds_v4"])
def test_nan_reaches_those_that_name_it(build: Builder, kv: str) -> None:
    kernels = built(build, kv)
    case = in_lists(a_case(kv, [9, 40]).to(kernels.device), TOPK, PAGE)
    named = int(case.indices[1][case.indices[1] >= 0][3])
    first = case.kv[named // PAGE] if kv == "fp8_ds_v4" else case.kv.view(-1, case.kv.shape[-1])[named]
    # a page's rows come before its scales; fp4 has no NaN, but its scales have
    at = named % PAGE * 192 if kv == "fp8_ds_v4" else 64 if kv == "mxfp4_ds_mla" else 0
    first.view(torch.uint8).view(-1)[at : at + 2] = 0x7F if kv.startswith("fp8") else 0xFF
    out, lse = decode(kernels, case)
    assert torch.isnan(out[1]).all() and torch.isnan(lse[1]).all()
    assert torch.isfinite(out[0]).all() and torch.isfinite(lse[0]).all()


@pytest.mark.parametrize("kv", ["fp8_ds_mla", "mxfp4_ds_mla"])
@pytest.mark.parametrize("paged", [None, 16, 32])
def test_records_of_requests(build: Builder, paged: int | None, kv: str) -> None:
    """One cache for sparse and dense calls: records ragged, and in pages smaller and larger than a tile."""
    from pages import run

    from mla_codegen.check.reference import in_pages

    spec = make_spec(kv=[kv], optimizations=[*OPTIONS, "peeled_tail"], heads=20, latent=256, rope=32)
    kernels = build(spec | ({"kv": {"layout": "paged", "page_size": paged}} if paged else {}))
    case = make_case([40, 0, 3], q_lens=[2, 1, 3], heads=20, latent=256, rope=32, kv_dtype=kv)
    if paged is None:
        got = kernels.decode(case)
    else:
        kernel = kernels.plan.general(kv)[1]
        got = run(kernels.module(kernel.name), kernel, in_pages(case, paged).to(kernels.device), "list", 2)
    check(got, case, bound=EXACT, lse_bound=LSE_EXACT)


def test_operators_and_warmup(build: Builder) -> None:
    """The calls as operators, with their fake implementations; each kind of sparse call ahead of the first."""
    kernels = built(build, "fp8_ds_mla")
    package = kernels.dispatcher.builds[0].package.rsplit(".", 1)[0]
    module, dispatch = (importlib.import_module(f"{package}.{name}") for name in ("op", "dispatch"))
    case = in_lists(a_case("fp8_ds_mla").to(kernels.device), TOPK, PAGE)
    given = {"indices": case.indices, "topk_lens": case.topk_lens, "attn_sink": torch.zeros(4, device=kernels.device)}
    want = decode(kernels, case, attn_sink=given["attn_sink"])
    got = module.mla_decode(case.ragged.q, case.kv, sm_scale=case.ragged.sm_scale, return_lse=True, **given)
    assert all(torch.equal(one.cpu(), other) for one, other in zip(got, want, strict=True))
    arguments = (case.ragged.q, case.kv, None, None, case.ragged.sm_scale)
    torch.library.opcheck(module.operators.mla_decode.default, arguments, given)
    calls = dispatch.warmup(kernels.device, visible=(False, True), sinks=(False, True), progress=None)
    assert calls == 3 * 2 * 2


def test_what_bench_and_tune_run(build: Builder) -> None:
    """Their inputs: a pool and lists, of records too; and their truth."""
    for kv in ("fp8_ds_mla", "fp8_ds_v4"):
        kernels = built(build, kv)
        workload = workload_of(kernels.plan, kv, 3, TOPK)
        case = make_inputs(workload, kernels.device, 0)
        lists = kv_arguments(case, kernels.dispatcher.builds[0])
        out = kernels.dispatcher.mla_decode(case.q, sm_scale=case.sm_scale, max_kv_len=TOPK, max_q_len=1, **lists)
        assert Truth(case, workload.latent).error(out) <= EXACT
        assert workload.kv_bytes == 3 * TOPK * kernels.dispatcher.builds[0].widths[kv]


def test_batch_invariant(build: Builder) -> None:
    """A query row has the same bits alone and among others."""
    spec = make_spec(kv=["fp8_ds_mla"], optimizations=OPTIONS, heads=4, latent=128, rope=32, shapes=[{"batch": 5}])
    kernels = build(spec | {"kv": {"layout": "sparse", "topk": TOPK}, "batch_invariant": True})
    case = in_lists(a_case("fp8_ds_mla").to(kernels.device), TOPK, PAGE)
    whole = decode(kernels, case)
    for row in (2, 3):
        alone = kernels.dispatcher.mla_decode(
            case.ragged.q[row : row + 1], case.kv, indices=case.indices[row : row + 1],
            topk_lens=case.topk_lens[row : row + 1], sm_scale=case.ragged.sm_scale,
        )  # fmt: skip
        assert torch.equal(alone.cpu()[0], whole[0][row])


def test_what_is_refused(build: Builder) -> None:
    kernels = built(build, "fp8_ds_mla")
    mla_decode = kernels.dispatcher.mla_decode
    case = in_lists(a_case("fp8_ds_mla").to(kernels.device), TOPK, PAGE)
    rows = case.ragged
    given: dict[str, Any] = {"q": rows.q, "kv": case.kv, "indices": case.unbounded, "sm_scale": 1.0}

    def refused(words: str, error: type = ValueError, **change: Any) -> None:
        with pytest.raises(error, match=words):
            mla_decode(**given | change)

    refused(r"indices has no dimension; it must be \[total_q, topk\]", indices=case.unbounded[0, 0])
    refused(r"rows of 195 bytes; records of spec.yaml have 196 \(fp8_ds_mla\)", kv=case.kv[..., :195])
    refused("no kernel for 4 heads and rows of 160, KV by lists of 64", indices=case.indices[:, :64].contiguous())
    refused(r"contiguous int32 \[5, 70\]", indices=case.indices.long())
    refused("attn_sink is .* contiguous float32", attn_sink=torch.zeros(5, device=kernels.device))
    refused(r"topk_lens is .* int32 \[5\]", topk_lens=case.topk_lens[:4])
    refused("indices and kv_lens are both given", kv_lens=case.topk_lens)
    refused("attn_sink is for sparse KV", indices=None, qo_indptr=rows.qo_indptr, attn_sink=torch.zeros(4))
    refused("qo_indptr is None; it must be a tensor", TypeError, indices=None)
    refused("indices is a list", TypeError, indices=[[1, 2]])
    if kernels.device.type == "cpu":  # debug mode
        wrong = case.unbounded.clone()
        wrong[2, 7] = case.kv.numel() // 196
        refused(r"indices names row \d+ for query row 2 at 7; kv has \d+ rows", indices=wrong)
