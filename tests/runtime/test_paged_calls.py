"""Paged calls: which build serves them, what a wrong one is told, the operators, warmup, and what stays ragged."""

import importlib
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml

sys.path.insert(0, str(Path(__file__).parent))

from steps import capture

from mla_codegen.check.reference import PagedCase, in_pages, make_case, reference, relative_l2
from mla_codegen.plan.resolve import Plan, make_plan
from mla_codegen.publish.bundle import Refused, bundle
from mla_codegen.publish.write import BuildError, fresh_build, publish
from mla_codegen.spec.load import parse_spec

HEADS, LATENT, ROPE = 2, 64, 32
PACKAGE = "paged_build"
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SIZES = {"ragged": None, "rows": 1, "pages": 16}
BOTH_WAYS = "give `block_table`"


def plan_of(name: str, page_size: int | None, kv: list[str]) -> Plan:
    spec: dict[str, Any] = {
        "target": "portable",
        "model": {"num_heads": HEADS, "kv_lora_rank": LATENT, "qk_rope_head_dim": ROPE},
        "dtypes": {"kv": kv},
        "defaults": {"block_n": 32, "num_stages": 1, "optimizations": ["exp2", "direct_out", "packed_fp8"]},
        "shapes": [{"batch": 2, "kv_len": 64, "splits": 2}],
    }
    if page_size:
        spec["kv"] = {"layout": "paged", "page_size": page_size}
    return make_plan(parse_spec(yaml.safe_dump(spec), f"{name}.yaml").spec, f"{name}.yaml")


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """Ragged KV and two page sizes in one folder."""
    folder = tmp_path_factory.mktemp("paged_calls")
    plans = [plan_of(name, size, ["bf16", "fp8_e4m3fn"][: 2 if size == 16 else 1]) for name, size in SIZES.items()]
    publish(fresh_build(plans, folder / PACKAGE), folder / PACKAGE, set(SIZES))
    sys.path.insert(0, str(folder))
    dispatch = importlib.import_module(f"{PACKAGE}.dispatch")
    return SimpleNamespace(
        dispatch=dispatch,
        decode=dispatch.mla_decode,
        op=importlib.import_module(f"{PACKAGE}.op").mla_decode,
        ops=getattr(torch.ops, PACKAGE),
    )


def make(page_size: int, kv: str = "bf16", lens: list[int] | None = None) -> PagedCase:
    case = make_case(lens or [40, 3], heads=HEADS, latent=LATENT, rope=ROPE, kv_dtype=kv)
    return in_pages(case, page_size).to(DEVICE)


def common(case: PagedCase) -> dict[str, Any]:
    rows = case.ragged
    return {"q": rows.q, "qo_indptr": rows.qo_indptr, "sm_scale": rows.sm_scale, "kv_scale": rows.kv_scale}


def by_table(case: PagedCase) -> dict[str, Any]:
    return {**common(case), "kv": case.kv, "block_table": case.block_table, "kv_lens": case.kv_lens}


def by_list(case: PagedCase) -> dict[str, Any]:
    pages = {"kv_indptr": case.kv_indptr, "kv_indices": case.kv_indices, "kv_lens": case.kv_lens}
    return {**common(case), "kv": case.kv, **pages}


def right(out: torch.Tensor, case: PagedCase) -> bool:
    return relative_l2(out, reference(case.ragged, LATENT)[0]) < 3e-3


@pytest.mark.parametrize("kv", ["bf16", "fp8_e4m3fn"])
def test_each_way_to_give_pages(package: SimpleNamespace, kv: str) -> None:
    case = make(16, kv)
    one_head = {"kv": case.kv[:, :, None]}
    as_bytes = {"kv": case.kv.view(torch.uint8)} if kv != "bf16" else {}
    wide = {"block_table": case.block_table.long(), "kv_lens": case.kv_lens.long()}
    for given in (by_table(case), by_list(case), by_table(case) | one_head, by_table(case) | as_bytes | wide):
        assert right(package.decode(**given), case)


def test_pages_of_one_row(package: SimpleNamespace) -> None:
    """As a flat cache of slots is indexed: the ranges say how long a request is."""
    case = make(1)
    alone = {**by_list(case), "kv_lens": None}
    for kv in (case.kv, case.kv[:, 0], case.kv[:, :, None]):
        assert right(package.decode(**{**alone, "kv": kv}), case)
        assert right(package.decode(**{**by_table(case), "kv": kv}), case)


def test_a_table_of_one_column_has_any_stride(package: SimpleNamespace) -> None:
    case = make(16, lens=[9, 3])
    column = case.block_table[:, :1].reshape(1, -1).t()
    assert column.stride(1) != 1
    assert right(package.decode(**{**by_table(case), "block_table": column}), case)


def test_the_build_follows_the_shape_of_kv(package: SimpleNamespace) -> None:
    """One folder serves ragged KV and both page sizes; what was not built is said with how to build it."""
    case = make(16)
    rows = case.ragged
    ragged = {**common(case), "kv": rows.kv, "kv_indptr": rows.kv_indptr}
    assert torch.equal(package.decode(**ragged, max_kv_len=64), package.decode(**by_table(case), max_kv_len=64))
    with pytest.raises(ValueError, match=r"KV in pages of 32 on .*\n.*pages of 16 \(pages(.*\n)*.*page_size: 32}`"):
        package.decode(**by_table(make(32)))
    paged_only = type(package.dispatch.DISPATCHER)([importlib.import_module(f"{PACKAGE}.pages")], "mla-codegen build")
    with pytest.raises(ValueError, match=r"rows of 96, ragged KV on .*\n  portable: .*pages of 16"):
        paged_only.mla_decode(**ragged)


V, T = ValueError, TypeError
WRONG = {
    "nothing": ({"block_table": None, "kv_lens": None}, V, f"kv_indptr is missing.*{BOTH_WAYS}"),
    "only lengths": ({"block_table": None}, V, f"no pages are given.*{BOTH_WAYS}"),
    "table and ranges": (lambda c: {"kv_indptr": c.kv_indptr}, V, f"block_table and kv_indptr.*{BOTH_WAYS}"),
    "table and list": (lambda c: {"kv_indices": c.kv_indices}, V, "block_table and kv_indices are both given"),
    "no lengths": ({"kv_lens": None}, V, r"kv_lens is missing: block_table .* give it, \[2\] int32"),
    "no ranges": (lambda c: {"block_table": None, "kv_indices": c.kv_indices}, V, "kv_indices needs kv_indptr"),
    "no lengths of pages": (
        lambda c: {**by_list(c), "block_table": None, "kv_lens": None}, V, "pages of 16 rows do not say",
    ),
    "float lengths": (lambda c: {"kv_lens": c.kv_lens.float()}, T, r"kv_lens is torch\.float32.*call \.int\(\)"),
    "short lengths": (lambda c: {"kv_lens": c.kv_lens[:1]}, V, r"kv_lens has shape \(1,\); it must be \[2\]"),
    "strided lengths": (lambda c: {"kv_lens": c.kv_lens.repeat(2)[::2]}, V, "kv_lens has strides .*contiguous"),
    "table of others": (lambda c: {"block_table": c.block_table[:1]}, V, r"block_table has shape .*\[2, pages\]"),
    "float table": (lambda c: {"block_table": c.block_table.half()}, T, r"block_table is torch\.float16"),
    "no query ranges": ({"qo_indptr": torch.zeros(0, dtype=torch.int32)}, V, r"qo_indptr has shape \(0,\); it must be"),
    "elsewhere": (lambda c: {"block_table": c.block_table.to("meta")}, T, "block_table is on meta, where"),
    "heads of KV": (lambda c: {"kv": c.kv[:, :, None].expand(-1, -1, 2, -1)}, V, r"is \[pages, page_size, 96\]"),
    "columns": (lambda c: {"kv": c.kv[..., :64].contiguous()}, V, "kv has rows of 64 columns, q of 96"),
    "gaps": (lambda c: {"kv": c.kv.repeat(1, 2, 1)[:, ::2]}, V, "rows of a page must lie side by side"),
    "a vector": (lambda c: {"kv": c.kv[0, 0]}, V, r"paged KV is \[pages, page_size, 96\]"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_what_a_wrong_call_is_told(package: SimpleNamespace, name: str) -> None:
    changes, kind, message = WRONG[name]
    case = make(16)
    with pytest.raises(kind, match=re.compile(message, re.S)):
        package.decode(**{**by_table(case), **(changes(case) if callable(changes) else changes)})


def test_ragged_calls_hear_of_paged_ones(package: SimpleNamespace) -> None:
    case = make(16)
    with pytest.raises(ValueError, match=r"must be \[total_kv, 96\].*For paged KV give block_table"):
        package.decode(**common(case), kv=case.kv, kv_indptr=case.ragged.kv_indptr)
    with pytest.raises(ValueError, match="ragged KV"):  # its kv is a tensor of pages
        dispatcher = type(package.dispatch.DISPATCHER)([importlib.import_module(f"{PACKAGE}.pages")], "build")
        rows = case.ragged
        dispatcher.custom_kernel((rows.q, {"bf16": rows.kv}, rows.qo_indptr, rows.kv_indptr, {"sm_scale": 1.0}))


def test_the_guess_of_a_length(package: SimpleNamespace) -> None:
    """Without `max_kv_len` the kernel is chosen by what the table, or a request's part of the list, has room for."""
    paged = importlib.import_module(f"{PACKAGE}.runtime.paged")
    case = make(16)
    table = paged.Pages(16, None, case.block_table, case.kv_lens)
    assert paged.guess_kv_len(table, 2) == 16 * case.width
    assert paged.guess_kv_len(paged.Pages(16, case.kv_indptr, case.kv_indices, case.kv_lens), 2) == 16 * 3
    assert paged.guess_kv_len(paged.Pages(1, case.kv_indptr, case.kv_indices[:5], None), 2) == 2


@pytest.mark.parametrize("form", ["table", "list"])
def test_operators(package: SimpleNamespace, form: str) -> None:
    case = make(16, "fp8_e4m3fn")
    rows = case.ragged
    kv_indptr, indices, lens = case.lists(form)
    table, indices = (indices, None) if form == "table" else (None, indices)
    options, pages = (rows.sm_scale, rows.kv_scale, None, None), (table, indices, lens)
    tensors = (rows.q, case.kv.view(torch.uint8), rows.qo_indptr, kv_indptr)
    torch.library.opcheck(package.ops.mla_decode.default, (*tensors, *options, *pages))
    out = torch.empty(2, HEADS, LATENT, dtype=torch.bfloat16, device=DEVICE)
    lse = torch.empty(2, HEADS, device=DEVICE)
    torch.library.opcheck(package.ops.mla_decode_into.default, (*tensors, out, lse, *options, *pages))
    given = by_table(case) if form == "table" else by_list(case)
    want = package.decode(**given)
    assert torch.equal(package.op(**given), want)
    assert torch.equal(torch.compile(package.op, fullgraph=True, backend="aot_eager")(**given), want)


def test_a_workspace(package: SimpleNamespace) -> None:
    """Scratch of the caller's, of the size that is asked for, for paged calls as for ragged ones."""
    size = package.dispatch.workspace_bytes(2, device=DEVICE)
    space = torch.full((size,), 0x7F, dtype=torch.uint8, device=DEVICE)
    case = make(16)
    for decode in (package.decode, package.op):
        out, lse = decode(**by_table(case), workspace=space, return_lse=True)
        assert right(out, case) and lse.isfinite().all()
        assert torch.equal(out, package.decode(**by_table(case)))


def test_warmup(package: SimpleNamespace) -> None:
    """Each kernel, of paged KV in each way that its pages may be given."""
    kernels = 3  # a KV type: a shape, and the general kernels, for one split and for several
    assert package.dispatch.warmup(progress=None) == kernels * (1 + 3 + 2 * 2)
    assert package.dispatch.warmup(progress=None, pages=("table",)) == kernels * (1 + 1 + 2)
    both = {"numbers": (torch.int32, torch.int64), "pages": ("table",)}
    assert package.dispatch.warmup(progress=None, **both) == kernels * (1 + 2 * (1 + 2))


@pytest.mark.parametrize("form", ["table", "list"])
def test_graphs_follow_the_buffers(package: SimpleNamespace, form: str) -> None:
    """Captured at one set of lengths and pages, replayed at others; on a CPU the same steps run eagerly."""
    first, *later = (make(16, lens=lens) for lens in ([40, 3], [7, 90], [0, 64], [100, 1]))
    big = make(16, lens=[112, 112])  # buffers with room for each
    given = by_table(big) if form == "table" else by_list(big)
    buffers = {name: value.clone() for name, value in given.items() if isinstance(value, torch.Tensor)}
    if form == "table":
        buffers["block_table"] = big.table.clone()[:, : big.width]
    out = torch.empty(2, HEADS, LATENT, dtype=torch.bfloat16, device=DEVICE)

    def fill(case: PagedCase) -> None:
        for name, value in (by_table(case) if form == "table" else by_list(case)).items():
            if name == "block_table":
                buffers[name].fill_(2147480000)[:, : value.shape[1]] = value
            elif name in buffers:
                buffers[name][: value.shape[0]] = value

    fill(first)
    replay = capture(
        lambda: package.decode(**buffers, sm_scale=first.ragged.sm_scale, max_kv_len=64, out=out), torch.device(DEVICE)
    )
    for case in (first, *later):
        fill(case)
        out.fill_(float("nan"))
        replay()
        assert right(out, case)


@pytest.mark.gpu
def test_after_warmup_no_call_compiles(
    package: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    counted = importlib.import_module(f"{PACKAGE}.runtime.warmup").count_compilations
    package.dispatch.warmup(progress=None)
    with counted() as count:
        for size in (1, 16):
            for lens in ([5], [64, 40], [300, 2], [9] * 17):
                case = make(size, lens=lens)
                for given in (by_table(case), by_list(case)):
                    package.decode(**given)
        torch.cuda.synchronize()
    assert count.total == 0


def test_two_builds_of_one_page_size_are_refused(tmp_path: Any) -> None:
    plans = [plan_of(name, 16, ["bf16"]) for name in ("one", "two")]
    with pytest.raises(BuildError, match="both serve portable, 2 heads, rows of 96, pages of 16"):
        fresh_build(plans, tmp_path / "generated")


def test_a_bundle_is_ragged() -> None:
    with pytest.raises(Refused, match=r"the KV of pages\.yaml is paged"):
        bundle(plan_of("pages", 16, ["bf16"]))
