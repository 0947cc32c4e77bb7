"""Paged KV in plain Triton: the same bits as ragged KV, whatever unused slots, pages and table entries hold.

`in_pages` deals the rows to pages in random order, fills everything else with NaN and the lists' rest with numbers of
pages that do not exist: reading one of those pages ends the process.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from harness import BF16, MODES, PORTABLE_FP8, Builder, Got, Kernels, Mode, check
from pages import run

from mla_codegen.check.reference import forms, in_pages, make_case

SMALL = {"heads": 4, "latent": 64, "rope": 32}
LENS = [98, 0, 1, 32, 31]
QUADS = next(mode for mode in MODES if str(mode) == "gfx942-fp8_e4m3fn-packed_fp8-fp8_mma")


def built(build: Builder, mode: Mode, page_size: int | None, **settings: Any) -> Kernels:
    """Kernels with tiles of 32 rows; `page_size` None: ragged."""
    spec = mode.spec(**{**SMALL, **settings})
    return build(spec | ({"kv": {"layout": "paged", "page_size": page_size}} if page_size else {}))


@pytest.fixture(scope="module")
def ragged(build: Builder) -> Callable[[Mode, bool], Got]:
    """What ragged kernels give for requests of LENS rows, by mode and whether there is one split."""

    @cache
    def decoded(mode: Mode, direct: bool) -> Got:
        kernels = built(build, mode, None)
        case = make_case(LENS, kv_dtype=mode.kv, **SMALL)
        return kernels.run(kernels.general(direct), case, None if direct else 2)

    return decoded


SIZES = [(BF16, n) for n in (1, 2, 16, 32, 64, 1024)] + [(PORTABLE_FP8, n) for n in (16, 64)]


@pytest.mark.parametrize(("mode", "page_size"), SIZES, ids=str)
def test_page_sizes(build: Builder, ragged: Callable[[Mode, bool], Got], mode: Mode, page_size: int) -> None:
    """Tiles of many pages, of one and of a part of one; each way to give them; one split and several."""
    kernels = built(build, mode, page_size)
    case = make_case(LENS, kv_dtype=mode.kv, **SMALL)
    paged = in_pages(case, page_size, seed=page_size).to(kernels.device)
    for form, direct in zip(("table", "list", "rows"), (True, False, True), strict=True):
        if form in forms(page_size):
            kernel = kernels.plan.general(mode.kv)[0 if direct else 1]
            got = run(kernels.module(kernel.name), kernel, paged, form, None if direct else 2)
            check(got, case, latent=64)
            want = ragged(mode, direct)
            assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])


@pytest.mark.parametrize("page_size", [1, 64])
def test_several_query_rows(build: Builder, page_size: int) -> None:
    """The causal rule, int64 ranges, requests that the guess misses or that have no query rows, no scale."""
    kernels = built(build, PORTABLE_FP8, page_size)
    case = make_case(
        [40, 3, 0, 45], q_lens=[2, 4, 1, 0], kv_scale=None, kv_dtype="fp8_e4m3fn", index=torch.int64, seed=1, **SMALL
    )
    paged = in_pages(case, page_size).to(kernels.device)
    forms_of_kernels = zip(("table", "list"), kernels.plan.general("fp8_e4m3fn"), (None, 2), strict=True)
    for form, kernel, splits in forms_of_kernels:
        check(run(kernels.module(kernel.name), kernel, paged, form, splits), case, latent=64)


@pytest.mark.parametrize("page_size", [16, 64])
def test_rows_seen_are_given(build: Builder, page_size: int) -> None:
    """`kv_visible` beyond the request's rows, none, and some: the rows of shorter requests."""
    kernels = built(build, BF16, page_size)
    case = make_case([70, 40, 50], seed=2, **SMALL)
    visible = torch.tensor([33, 1000, 0], dtype=torch.int32, device=kernels.device)
    kernel = kernels.plan.general("bf16")[0]
    paged = in_pages(case, page_size).to(kernels.device)
    got = run(kernels.module(kernel.name), kernel, paged, "list", kv_visible=visible)
    want = built(build, BF16, None).run(kernel.name, case, kv_visible=visible)
    assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])
    assert (got[0][2] == 0).all() and (got[1][2] == float("-inf")).all()


@pytest.mark.parametrize("heads", [1, 16, 20, 128])
def test_head_counts(build: Builder, heads: int) -> None:
    kernels = built(build, PORTABLE_FP8, 16, heads=heads)
    case = make_case([40, 9], heads=heads, latent=64, rope=32, kv_dtype="fp8_e4m3fn", seed=3)
    paged = in_pages(case, 16).to(kernels.device)
    check(run(kernels.module(kernels.shaped.name), kernels.shaped, paged), case, latent=64)


@pytest.mark.parametrize("page_size", [16, 64])
@pytest.mark.parametrize("mode", [BF16, PORTABLE_FP8, QUADS], ids=str)
def test_without_a_peeled_tail(build: Builder, mode: Mode, page_size: int) -> None:
    """Every tile masked; and words of four fp8 columns, whose rope is read byte by byte."""
    options = [option for option in (*mode.options, "exp2") if option != "peeled_tail"]
    spec = mode.spec(**SMALL) | {"kv": {"layout": "paged", "page_size": page_size}}
    spec["defaults"]["optimizations"] = options
    kernels = build(spec)
    case = make_case([33, 0], kv_dtype=mode.kv, seed=4, **SMALL)
    paged = in_pages(case, page_size).to(kernels.device)
    got = run(kernels.module(kernels.shaped.name), kernels.shaped, paged)
    check(got, case, bound=mode.bound, lse_bound=mode.lse_bound, latent=64)


def test_words_of_four_columns(build: Builder) -> None:
    kernels = built(build, QUADS, 16)
    case = make_case([33, 0], kv_dtype=QUADS.kv, seed=5, **SMALL)
    paged = in_pages(case, 16).to(kernels.device)
    got = run(kernels.module(kernels.shaped.name), kernels.shaped, paged, "list")
    check(got, case, bound=QUADS.bound, lse_bound=QUADS.lse_bound, latent=64)


@pytest.mark.gpu
@pytest.mark.parametrize("page_size", [1, 64])
def test_pools_past_2_31_elements(build: Builder, page_size: int) -> None:
    """The pages that are used lie behind row 2^31 / 96 of a pool."""
    kernels = built(build, BF16, page_size)
    case = make_case([70, 9], seed=6, **SMALL)
    paged = in_pages(case, page_size).to(kernels.device)
    before = (1 << 31) // 96 // page_size + 1
    pool = torch.empty((before + paged.kv.shape[0], page_size, 96), dtype=torch.bfloat16, device=kernels.device)
    pool[before:] = paged.kv
    paged.kv = pool
    paged.table += before
    kernel = kernels.plan.general("bf16")[0]
    check(run(kernels.module(kernel.name), kernel, paged), case, latent=64)
