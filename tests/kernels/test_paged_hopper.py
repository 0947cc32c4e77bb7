"""Paged KV in the Hopper family, in the emulator: the same bits as ragged KV, and faults that must show."""

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from emulated import Emulated
from harness import EXACT, Got, check, make_plans, make_spec
from pages import run

from mla_codegen.check.emulate.errors import EmulatorError
from mla_codegen.check.reference import PagedCase, in_pages, make_case
from mla_codegen.check.verify import emulated
from mla_codegen.runtime.layout import layout_of_kv, layout_of_results

LENS = [0, 1, 63, 64, 65, 200]
LSE = {"fp8_e4m3fn": 5e-3, "bf16": 1e-4}
Decode = Callable[..., Got]


def spec_of(kv: str, page_size: int | None, model_heads: int = 16, **settings: Any) -> dict[str, Any]:
    spec = make_spec("sm_90", kv=[kv], optimizations=["exp2"], heads=model_heads)
    spec["defaults"] = {"optimizations": ["exp2"], **settings}
    return spec | ({"kv": {"layout": "paged", "page_size": page_size}} if page_size else {})


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Emulated]:
    """The kernels of a spec, built once for each set of arguments of `spec_of`."""
    folder = tmp_path_factory.mktemp("paged_hopper")
    built: dict[str, Emulated] = {}

    def build_once(kv: str, page_size: int | None, **settings: Any) -> Emulated:
        key = f"{kv} {page_size} {settings}"
        if key not in built:
            built[key] = Emulated(spec_of(kv, page_size, **settings), folder, f"paged_hopper_{len(built)}")
        return built[key]

    return build_once


def decode(kernels: Emulated, part: str, case: PagedCase, form: str, splits: int | None = None, **given: Any) -> Got:
    """(out, LSE) of the kernel whose name ends in `part`."""
    kernel = kernels.kernel(part)
    assert kernel.family == "hopper"
    module = emulated(str(kernels.folder), f"{kernels.package}.{kernels.plan.name}.{kernel.name}")
    return run(module, kernel, case, form, splits, **given)


TILES = [  # KV, rows of a tile, of a page: a box is a page, or lies in one
    ("bf16", 64, 16), ("bf16", 64, 64), ("bf16", 64, 256), ("fp8_e4m3fn", 128, 64), ("fp8_e4m3fn", 128, 128),
    ("fp8_e4m3fn", 64, 32),
]  # fmt: skip


@pytest.mark.parametrize(("kv", "block_n", "page_size"), TILES)
def test_the_same_bits_as_ragged(build: Callable[..., Emulated], kv: str, block_n: int, page_size: int) -> None:
    """Requests of no rows, of one, around a page and a tile; one split and several, some of them without rows."""
    kernels, ragged = build(kv, page_size, block_n=block_n), build(kv, None, block_n=block_n)
    case = make_case(LENS, kv_dtype=kv)
    paged = in_pages(case, page_size, seed=page_size)
    for part, form, splits in (("any_direct", "table", None), ("any", "list", 3), ("balanced", "table", None)):
        got = decode(kernels, part, paged, form, splits)
        check(got, case, bound=EXACT, lse_bound=LSE[kv])
        want = ragged.run(part, case, splits)
        assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])


@pytest.mark.parametrize("kv", ["bf16", "fp8_e4m3fn"])
def test_several_query_rows(build: Callable[..., Emulated], kv: str) -> None:
    """The causal rule, int64 ranges, requests that the guess misses, no scale; then numbers of rows in its place."""
    kernels = build(kv, 16, block_n=64)
    case = make_case([70, 3, 0, 129], q_lens=[3, 5, 1, 0], kv_scale=None, kv_dtype=kv, index=torch.int64, seed=1)
    paged = in_pages(case, 16)
    check(decode(kernels, "any_direct", paged, "list"), case, bound=EXACT, lse_bound=LSE[kv])
    visible = torch.tensor([65, 1000, 0, 1, 2, 3, 4, 5, 6], dtype=torch.int32)
    got = decode(kernels, "any_direct", paged, "table", kv_visible=visible)
    want = build(kv, None, block_n=64).run("any_direct", case, kv_visible=visible)
    assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])
    check(decode(kernels, "balanced", paged, "list"), case, bound=EXACT, lse_bound=LSE[kv])


@pytest.mark.parametrize("heads", [16, 64])  # blocks of 16 columns, and of 64
@pytest.mark.parametrize(("kv", "page_size"), [("bf16", 16), ("fp8_e4m3fn", 64)])
def test_layouts_of_engines(build: Callable[..., Emulated], kv: str, page_size: int, heads: int) -> None:
    """Pages whole rows apart, a table by columns, padded heads, LSE as [heads, rows] and to base 2: the same bits."""
    kernels = build(kv, page_size, block_n=64, model_heads=heads, block_h=heads)
    assert kernels.kernel("any_direct").details.kind.endswith("_columns") == (heads == 64)
    case = make_case([0, 65], kv_dtype=kv, heads=heads)
    paged = in_pages(case, page_size)
    pages, _, row = paged.kv.shape
    memory = torch.empty(pages, 3, page_size, row, dtype=paged.kv.dtype).fill_(float("nan"))
    memory[:, 1].view(torch.uint8).copy_(paged.kv.view(torch.uint8))
    table = paged.block_table.T.contiguous().T
    build_of: Any = SimpleNamespace(strided=True)
    apart = {"kv": memory[:, 1], "kv_layout": layout_of_kv(build_of, memory[:, 1], table.stride(1))}
    for part, splits in (("any_direct", None), ("any", 2))[: 2 if heads == 16 else 1]:
        want = decode(kernels, part, paged, "table", splits)
        wide = torch.full((2, heads + 2, 520), float("nan"), dtype=torch.bfloat16)
        lse = torch.full((heads, 5), float("nan"))
        results: dict[str, Any] = {"out": wide[:, :heads, :512], "lse": lse[:, :2].T}
        results["out_layout"] = layout_of_results(build_of, *results.values(), base2=True)
        got = decode(kernels, part, paged, "table", splits, kv_indices=table, **apart, **results)
        assert torch.equal(got[0], want[0])
        torch.testing.assert_close(got[1], want[1] / math.log(2), rtol=1e-6, atol=0)
        assert wide[:, heads:].isnan().all() and wide[..., 512:].isnan().all() and lse[:, 2:].isnan().all()
    with pytest.raises(ValueError, match="TMA needs a multiple of the row's 576"):
        decode(kernels, "any_direct", paged, "table", **{**apart, "kv_layout": (page_size * row + 16, 1)})


@pytest.mark.parametrize("kv", ["bf16", "fp8_e4m3fn"])
def test_an_empty_pool(build: Callable[..., Emulated], kv: str) -> None:
    """No pages at all: neither the list nor the pool is read."""
    case = make_case([0, 0], guard=0, kv_dtype=kv)
    paged = in_pages(case, 64)
    paged.kv, paged.kv_indices = paged.kv[:0], paged.kv_indices[:0]
    check(decode(build(kv, 64, block_n=64), "any_direct", paged, "list"), case)


FAULTS = [
    ("gl.minimum(row, end - 1)", "row", "outside"),  # the list is read behind its end
    ("if left < BLOCK_N:", "if left < 0:", "finite"),  # slots that nobody wrote come to a product
    ("numbers[box]", "numbers[0]", "off by"),
    ("rope.slice(box * PAGE_SIZE, PAGE_SIZE)", "rope.slice(0, PAGE_SIZE)", "on its way"),
]


@pytest.mark.parametrize(("old", "new", "what"), FAULTS, ids=["list", "slots", "page", "slice"])
def test_planted_faults_are_caught(build: Callable[..., Emulated], old: str, new: str, what: str) -> None:
    kernels = build("bf16", 16, block_n=64)
    case = make_case([40, 9], seed=9)
    paged = in_pages(case, 16)
    paged.kv_indices = paged.kv_indices[:-2].clone()  # nothing behind the last page's number
    kernel = kernels.kernel("any_direct")
    text = kernels.files[f"{kernels.plan.name}/{kernel.name}.py"]
    assert old in text
    (kernels.folder / kernels.plan.name / "changed.py").write_text(text.replace(old, new), encoding="utf-8")
    module = emulated(str(kernels.folder), f"{kernels.package}.{kernels.plan.name}.changed")
    with pytest.raises((EmulatorError, AssertionError), match=what):
        check(run(module, kernel, paged, "list"), case)


def test_what_gluon_cannot_serve_goes_to_plain_triton() -> None:
    for kernel in make_plans(spec_of("bf16", 8)).kernels:
        assert kernel.family == "triton" and kernel.page_size == 8
        (line,) = (line for line in kernel.not_taken if line.startswith("family hopper:"))
        assert "page" in line
