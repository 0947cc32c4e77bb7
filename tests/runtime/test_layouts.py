"""Layouts that engines have, taken without a copy: pages apart, strided tables and results, LSE by heads and to base 2.

Each call must give the bits of the same call with the usual layouts, and leave what lies between its results alone.
"""

import importlib
import math
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from builds import build, plan_of

from mla_codegen.check.reference import Case, PagedCase, in_pages, make_case, reference, relative_l2

HEADS, LATENT, ROPE = 3, 64, 32
ROW = LATENT + ROPE
PACKAGE = "layouts_build"
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NAN = float("nan")
LENS, Q_LENS = [40, 0, 3], [2, 1, 1]


def spec_of(page_size: int | None) -> dict[str, Any]:
    spec: dict[str, Any] = {
        "target": "portable",
        "model": {"num_heads": HEADS, "kv_lora_rank": LATENT, "qk_rope_head_dim": ROPE},
        "dtypes": {"kv": ["bf16", "fp8_e4m3fn", "mxfp4_ds_mla"] if page_size == 16 else ["bf16", "fp8_e4m3fn"]},
        "defaults": {
            "block_n": 32,
            "num_stages": 1,
            "optimizations": ["exp2", "peeled_tail", "direct_out", "packed_fp8"],
        },
        "shapes": [{"batch": 3, "kv_len": 64, "splits": 2}, {"batch": 3, "kv_len": 1024, "splits": 1}],
    }
    return spec | ({"kv": {"layout": "paged", "page_size": page_size}} if page_size else {})


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    folder = tmp_path_factory.mktemp("layouts")
    build([plan_of(spec_of(size), f"pages_{size}.yaml") for size in (None, 1, 16, 64)], folder / PACKAGE)
    sys.path.insert(0, str(folder))
    return SimpleNamespace(
        decode=importlib.import_module(f"{PACKAGE}.dispatch").mla_decode,
        op=importlib.import_module(f"{PACKAGE}.op").mla_decode,
    )


def make(kv: str = "bf16", q_lens: list[int] | int = 1, lens: list[int] = LENS) -> Case:
    return make_case(lens, q_lens=q_lens, heads=HEADS, latent=LATENT, rope=ROPE, kv_dtype=kv).to(DEVICE)


def given(case: Case, **more: Any) -> dict[str, Any]:
    return {"q": case.q, "qo_indptr": case.qo_indptr, "sm_scale": case.sm_scale, "kv_scale": case.kv_scale, **more}


def by_table(case: PagedCase) -> dict[str, Any]:
    return given(case.ragged, kv=case.kv, block_table=case.block_table, kv_lens=case.kv_lens)


def apart(kv: torch.Tensor, step: int) -> torch.Tensor:
    """The pages of a pool, `step` numbers from one to the next, NaN between them."""
    size = kv[0].numel()
    memory = torch.empty(len(kv), step, dtype=kv.dtype, device=kv.device)
    memory.view(torch.uint8).fill_(255)  # NaN in every type
    memory.view(torch.uint8)[:, : size * kv.element_size()] = kv.view(torch.uint8).flatten(1)
    return memory[:, :size].unflatten(1, kv.shape[1:])


def both_kernels(package: SimpleNamespace, **call: Any) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """(out, LSE) by the kernel of two splits and by the one that writes the output itself."""
    return [package.decode(**call, max_kv_len=length, return_lse=True) for length in (64, 1024)]


@pytest.mark.parametrize(
    ("kv", "page_size"), [("bf16", 1), ("bf16", 64), ("fp8_e4m3fn", 1), ("fp8_e4m3fn", 16), ("mxfp4_ds_mla", 16)]
)
def test_pages_apart_and_strided_tables(package: SimpleNamespace, kv: str, page_size: int) -> None:
    """A layer of a pool of all layers, padded pages, and tables with other columns between; by table and by list."""
    case = in_pages(make(kv), page_size, seed=page_size)
    want = both_kernels(package, **by_table(case))
    assert relative_l2(want[0][0], reference(case.ragged, LATENT)[0]) < 3e-3
    page, row = case.kv[0].numel(), case.kv.shape[-1]
    wide = torch.stack([torch.full_like(case.table, -1), case.table], 2)[..., 1][:, : case.width]
    by_columns = torch.empty_like(case.block_table.T.long()).T.copy_(case.block_table)
    listed = {"block_table": None, "kv_indptr": case.kv_indptr, "kv_indices": case.kv_indices}
    for changed in (
        {"kv": apart(case.kv, 3 * page)},
        {"kv": apart(case.kv, page + 32)[:, :, None], "block_table": wide},
        {"kv": apart(case.kv, page + 16 * row), **listed},
        {"block_table": by_columns},
    ):
        assert "kv" not in changed or not changed["kv"].is_contiguous()
        for got, right in zip(both_kernels(package, **by_table(case) | changed), want, strict=True):
            assert torch.equal(got[0], right[0]) and torch.equal(got[1], right[1])


@pytest.mark.parametrize("length", [64, 1024])  # two splits, one
def test_strided_results(package: SimpleNamespace, length: int) -> None:
    """Padded heads, rows apart, LSE as [heads, rows], to base 2."""
    case = make(q_lens=Q_LENS)
    call = given(case, kv=case.kv, kv_indptr=case.kv_indptr, max_kv_len=length)
    want, want_lse = package.decode(**call, return_lse=True)
    rows = len(want)
    for padded, by_heads, base2 in (
        (True, False, False),
        (False, True, False),
        (False, False, True),
        (True, True, True),
    ):
        memory = torch.full((rows, HEADS + 1, LATENT + 32), NAN, dtype=want.dtype, device=DEVICE)
        lse_memory = torch.full((HEADS, rows + 3), NAN, device=DEVICE)
        results: dict[str, Any] = {"base2": base2}
        if padded:
            results["out"] = memory[:, :HEADS, :LATENT]
        if by_heads:
            results["lse"] = lse_memory[:, :rows].T
        out, lse = package.decode(**call, **results, return_lse=True)
        assert torch.equal(out, want)
        torch.testing.assert_close(lse, want_lse / math.log(2) if base2 else want_lse, rtol=1e-6, atol=0)
        assert memory[:, HEADS:].isnan().all() and memory[..., LATENT:].isnan().all()
        assert lse_memory[:, rows:].isnan().all()
    assert torch.equal(package.decode(**call, out=memory[:, :HEADS, :LATENT]), want)  # nobody wants the LSE
    by_operator = package.op(**call, **results, return_lse=True)
    assert torch.equal(by_operator[0], want) and torch.equal(by_operator[1], lse)


def test_base_2_without_exp2(tmp_path: Path) -> None:
    """Kernels whose softmax is in base e."""
    spec = spec_of(None)
    spec["defaults"]["optimizations"], spec["dtypes"]["kv"] = ["direct_out"], ["bf16"]
    build([plan_of(spec)], tmp_path / "layouts_base_e")
    sys.path.insert(0, str(tmp_path))
    decode = importlib.import_module("layouts_base_e.dispatch").mla_decode
    case = make()
    call = given(case, kv=case.kv, kv_indptr=case.kv_indptr, return_lse=True, base2=True)
    want = reference(case, LATENT)[1] / math.log(2)
    for length in (64, 1024):
        torch.testing.assert_close(decode(**call, max_kv_len=length)[1].double(), want, rtol=1e-5, atol=1e-4)


def test_no_query_rows(package: SimpleNamespace) -> None:
    case = make(q_lens=0)
    lse = torch.empty(HEADS, 0, device=DEVICE).T
    out, got = package.decode(**given(case, kv=case.kv, kv_indptr=case.kv_indptr), lse=lse, return_lse=True, base2=True)
    assert out.shape == (0, HEADS, LATENT) and got.shape == (0, HEADS)


def test_refusals(package: SimpleNamespace) -> None:
    case = in_pages(make(), 16)
    rows = len(case.ragged.q)
    usual = torch.empty(rows, HEADS, LATENT, dtype=torch.bfloat16, device=DEVICE)
    for changed, message in (
        ({"kv": apart(case.kv, 16 * ROW + 4)}, r"pages \d+ bytes apart; it must be a multiple of 16"),
        ({"kv": case.kv.repeat_interleave(2, 1)[:, ::2]}, "rows of a page must lie side by side"),
        ({"kv": case.kv.repeat_interleave(2, 2)[..., ::2]}, "rows of a page must lie side by side"),
        ({"out": usual.repeat_interleave(2, 2)[..., ::2]}, "out is .* the last stride 1"),
        ({"out": torch.empty(rows, HEADS, LATENT + 4, dtype=torch.bfloat16, device=DEVICE)[..., :LATENT]}, "of 8"),
        ({"out": usual[:, :1].expand(-1, HEADS, -1)}, "out has shape .* it overlaps itself"),
        ({"lse": torch.empty(rows, 1, device=DEVICE).expand(-1, HEADS)}, "lse has shape .* it overlaps itself"),
        ({"lse": torch.empty(rows, HEADS + 1, device=DEVICE)}, r"lse is .* must be float32 \[3, 3\]"),
    ):
        with pytest.raises(ValueError, match=message):
            package.decode(**by_table(case) | changed)
    ragged = make()
    with pytest.raises(ValueError, match=r"kv has .* its rows must be contiguous"):
        wide = torch.empty(len(ragged.kv), ROW + 16, dtype=torch.bfloat16, device=DEVICE)[:, :ROW]
        package.decode(**given(ragged, kv=wide, kv_indptr=ragged.kv_indptr))


def test_overlaps_are_seen_in_debug_mode(package: SimpleNamespace) -> None:
    if DEVICE == "cuda":
        pytest.skip("calls on a CPU are checked, those on a GPU only if asked for")
    case = in_pages(make(), 16)
    pool = torch.zeros(2 * len(case.kv), 16 * ROW, dtype=torch.bfloat16)
    kv = pool[::2].unflatten(1, (16, ROW)).copy_(case.kv)
    between = pool[1::2][:3, : HEADS * LATENT].unflatten(1, (HEADS, LATENT))
    assert torch.equal(package.decode(**by_table(case) | {"kv": kv, "out": between}), package.decode(**by_table(case)))
    with pytest.raises(ValueError, match=re.escape("out and kv overlap in memory")):
        package.decode(
            **by_table(case) | {"kv": kv, "out": kv[:3].flatten(1)[:, : HEADS * LATENT].unflatten(1, (HEADS, LATENT))}
        )
