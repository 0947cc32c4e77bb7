"""Pages, blocks of several query tokens and the balanced partition in the CDNA families, against float64."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import compiled_work
import pytest
import torch
from emulated import Emulated
from hard_numbers import hold_non_finite
from harness import make_plans
from pages import run as run_paged
from test_cdna import (
    CDNA3_BF16,
    CDNA4_BF16,
    CDNA4_FP8,
    EXACT_FP8,
    FORMS,
    ONE_FP8,
    OWN,
    TILE64,
    Build,
    Form,
    build,
    case_of,
    hold,
    spec_of,
)

from mla_codegen.check.emulate.errors import EmulatorError
from mla_codegen.check.reference import in_pages
from mla_codegen.check.verify import emulated
from mla_codegen.check.workers import Workers
from mla_codegen.inspect import inspect_cases
from mla_codegen.inspect.plans import subjects_of

__all__ = ["build"]
SHAPE = {"batch": 6, "q_len": 4, "kv_len": 256, "splits": 3}


def of_pages(form: Form, page_size: int, folder: Path, **settings: Any) -> Emulated:
    spec = spec_of(form, **settings) | {"kv": {"layout": "paged", "page_size": page_size}}
    return Emulated(spec, folder, f"cdna_pages_{form}_{page_size}_{len(settings)}".replace("-", "_"))


PAGES = [
    (ONE_FP8, 1),
    (ONE_FP8, 64),
    (EXACT_FP8, 16),
    (CDNA3_BF16, 128),
    (CDNA4_FP8, 16),
    (TILE64, 256),
    (CDNA4_BF16, 2),
]


@pytest.mark.parametrize(("form", "page_size"), PAGES, ids=str)
def test_pages(form: Form, page_size: int, tmp_path: Path) -> None:
    """Pages of a row, of parts of a tile, of a tile and of several, in a pool whose other pages are NaN."""
    n = form.block_n
    kernels = of_pages(form, page_size, tmp_path)
    case = case_of(form, [0, 1, n - 1, n, n + 1, 3 * n + 5], q_lens=[1, 2, 1, 1, 3, 1], index=torch.int64)
    paged = in_pages(case, page_size, seed=page_size)
    for part, way, splits in (("any_direct", "table", None), ("any", "list", 3), ("balanced", "table", None)):
        assert kernels.kernel(part).family == form.family
        hold(form, run_paged(kernels.module(part), kernels.kernel(part), paged, way, splits), case)


PAGE_FAULTS = {
    "page numbers behind the list's end": (
        "// PAGE_SIZE, (end - 1) // PAGE_SIZE",
        "// PAGE_SIZE, end // PAGE_SIZE + 1",
    ),
    "rows behind the last one": (
        "(gl.minimum(start + n, end - 1) & (PAGE_SIZE - 1))",
        "((start + n) & (PAGE_SIZE - 1))",
    ),
    "the next tile's numbers for this one": (
        "page_numbers(pages, start + BLOCK_N + BLOCK_N,",
        "page_numbers(pages, start,",
    ),
}


@pytest.mark.parametrize("fault", PAGE_FAULTS)
def test_faults_of_pages_are_caught(fault: str, tmp_path: Path) -> None:
    kernels = of_pages(CDNA3_BF16, 16, tmp_path)
    old, new = PAGE_FAULTS[fault]
    case = case_of(CDNA3_BF16, [200, 40], seed=3)
    paged = in_pages(case, 16)
    paged.kv_indices = paged.kv_indices[:-2].clone()  # nothing behind the last page's number
    kernel = kernels.kernel("any_direct")
    text = kernels.files[f"{kernels.plan.name}/{kernel.name}.py"]
    assert old in text
    (kernels.folder / kernels.plan.name / "changed.py").write_text(text.replace(old, new), encoding="utf-8")
    module = emulated(str(kernels.folder), f"{kernels.package}.{kernels.plan.name}.changed")
    with pytest.raises((AssertionError, EmulatorError)):
        hold(CDNA3_BF16, run_paged(module, kernel, paged, "list"), case)


@pytest.mark.parametrize(
    ("form", "heads"),
    [(form, heads) for form in OWN for heads in ((4, 16) if form is EXACT_FP8 else (16, 20))],
    ids=str,
)
def test_blocks_of_query_tokens(form: Form, heads: int, build: Build) -> None:
    """Requests of none, one and many query tokens; fewer KV rows than tokens; a limit inside a tile and at its end."""
    kernels = build(form, heads=heads, shapes=[SHAPE])
    part = "any_q4" if any(kernel.name.endswith("any_q4") for kernel in kernels.plan.kernels) else "any"
    packs = not (form is EXACT_FP8 and heads == 16)
    assert kernels.kernel(part).packed == packs
    if not packs:
        (line,) = (line for line in kernels.kernel("kv256").not_taken if line.startswith("query blocks"))
        assert "divide" in line
    n = form.block_n
    case = case_of(form, [2 * n + 1, 20, 0, n, 1, n + 3], q_lens=[3, 0, 1, 9, 2, 4], heads=heads)
    hold(form, kernels.run(part, case, 2), case)
    hold(form, kernels.run(f"{part}_direct", case), case)


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_what_is_not_finite_stays_in_its_query_token(form: Form, build: Build) -> None:
    kernels = build(form, heads=4, shapes=[SHAPE])
    hold_non_finite(lambda case: kernels.run("any_q4", case, 3), form.kv, form.block_n, heads=4)


@pytest.mark.parametrize("form", [ONE_FP8, CDNA4_BF16], ids=str)
def test_rows_of_no_request_and_limits_given(form: Form, build: Build) -> None:
    """`kv_visible` in any order, none at all among them; query rows before the first request and behind the last."""
    kernels = build(form, heads=4, shapes=[SHAPE])
    lens, q_lens = [form.block_n + 9, 40], [3, 2]
    case = case_of(form, lens, q_lens=q_lens, heads=4)
    visible = [form.block_n + 2, 0, 5, 1000, 39]
    out, lse = kernels.run("any_q4", case, 2, kv_visible=torch.tensor(visible, dtype=torch.int32))
    row = 0
    for request, (length, tokens) in enumerate(zip(lens, q_lens, strict=True)):
        for _ in range(tokens):
            begin = int(case.kv_indptr[request])
            rows = torch.tensor([begin, begin + min(length, visible[row])], dtype=torch.int32)
            alone = replace(case, q=case.q[row : row + 1], qo_indptr=torch.tensor([0, 1]), kv_indptr=rows)
            hold(form, (out[row : row + 1], lse[row : row + 1]), alone)
            row += 1
    wide = torch.full((5 + 12, 4, 576), float("nan"), dtype=torch.bfloat16)
    wide[3:8] = case.q
    out, lse = kernels.run("any_q4_direct", replace(case, q=wide, qo_indptr=case.qo_indptr + 3))
    hold(form, (out[3:8], lse[3:8]), case)
    rest = torch.tensor([*range(3), *range(8, 17)])
    assert (out[rest] == 0).all() and (lse[rest] == float("-inf")).all()


@pytest.mark.parametrize(("form", "heads"), [(ONE_FP8, 16), (CDNA4_BF16, 40)], ids=str)
def test_balanced(form: Form, heads: int, build: Build) -> None:
    """Long beside short and empty requests, several query rows that the guess misses."""
    case = case_of(form, [700, 0, 1, 65, 130], q_lens=[1, 1, 3, 1, 2], heads=heads, seed=9)
    hold(form, build(form, heads=heads).run("balanced", case), case)


MASK = "(kv_row[None, :] < gl.minimum(limit, end)[:, None])"
BLOCK_FAULTS = {
    "every column sees what the last one does": (MASK, "(kv_row[None, :] < end)"),
    "columns that see nothing": ("seen = gl.where(m_new == LOWEST, 0.0, m_new)", "seen = m_new"),
    "values of rows that are not finite": ("if gl.min(finite, 0) == 0:", "if gl.min(finite, 0) == 2:"),
    "bytes of NaN that some columns see": (
        "gl.where(holds_nan[None, :],",
        "gl.where(holds_nan[None, :] & (start < 0),",
    ),
}


@pytest.mark.parametrize("fault", BLOCK_FAULTS)
def test_faults_of_blocks_are_caught(fault: str, build: Build) -> None:
    old, new = BLOCK_FAULTS[fault]
    form = CDNA3_BF16 if "values" in fault else ONE_FP8
    kernels = build(form, heads=4, shapes=[SHAPE])
    run = lambda case: kernels.run_changed("any_q4", old, new, case, 3)  # noqa: E731
    with pytest.raises((AssertionError, EmulatorError)):
        case = case_of(form, [form.block_n + 3, 2], q_lens=[4, 4], heads=4)
        hold(form, run(case), case)
        hold_non_finite(run, form.kv, form.block_n, heads=4)


@pytest.mark.parametrize("form", [ONE_FP8, CDNA4_FP8], ids=str)
def test_compiled(form: Form, tmp_path: Path) -> None:
    """Pages and blocks of query tokens in the machine code: kernels that need both."""
    spec = spec_of(form, heads=4, shapes=[SHAPE]) | {"kv": {"layout": "paged", "page_size": 16}}
    with Workers(1, {"TRITON_INTERPRET": "0", "OMP_NUM_THREADS": "1"}) as workers:
        ((_, outcome),) = workers.run(compiled_work.hold, [(spec, form.bound, form.lse_bound, str(tmp_path))], 900.0)
    assert not outcome.failure, outcome.failure
    assert outcome.value == []


@pytest.mark.parametrize(("form", "spills"), [(ONE_FP8, 0), (CDNA3_BF16, 0), (CDNA4_FP8, 1), (CDNA4_BF16, 0)], ids=str)
def test_pages_and_blocks_fit_the_registers(form: Form, spills: int) -> None:
    """No loop over tiles uses scratch; on gfx950 the KV's scale waits there for the end of the fp8 kernel."""
    plan = make_plans(spec_of(form, shapes=[SHAPE]) | {"kv": {"layout": "paged", "page_size": 16}})
    kernel = next(kernel for kernel in plan.kernels if kernel.name.endswith("any_q4"))
    assert kernel.packed and kernel.block_h == 32
    (row,) = inspect_cases([s.case for s in subjects_of([(plan, [kernel])]) if s.stage.kernel == "stage1"], parallel=1)
    assert row.report is not None, row.failure
    assert row.report.vgpr_spills <= spills and row.report.hot is not None
    assert row.report.hot.counts["scratch"] == 0 and not row.report.hazards


def test_what_is_left_to_plain_triton_says_why() -> None:
    for form in (CDNA3_BF16, CDNA4_FP8):
        spec = spec_of(form, rope=32, shapes=[SHAPE]) | {"kv": {"layout": "paged", "page_size": 8}}
        del spec["defaults"]["family"]
        spec["defaults"]["optimizations"].append("packed_fp8")
        for kernel in make_plans(spec).kernels:
            assert kernel.family == "triton"
            assert any(line.startswith(f"family {form.family}: it serves latent dims") for line in kernel.not_taken)
