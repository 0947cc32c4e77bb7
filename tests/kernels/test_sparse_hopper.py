"""Sparse KV in the Hopper family, in the emulator: blocks of 8, 16 and 64 heads, and faults that must show."""

from pathlib import Path
from typing import Any

import pytest
import torch
from emulated import Emulated
from harness import EXACT, Got, check, make_plans, make_spec

from mla_codegen.check.emulate.errors import EmulatorError
from mla_codegen.check.reference import SparseCase, in_lists, make_case, poisoned_scratch

TOPK, LSE = 150, 5e-3


def spec_of(heads: int) -> dict[str, Any]:
    spec = make_spec("sm_90", kv=["fp8_ds_mla"], optimizations=[], heads=heads, shapes=[{"batch": 2, "splits": 2}])
    return spec | {"defaults": {}, "kv": {"layout": "sparse", "topk": TOPK}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("sparse_hopper")


def launch(module: Any, heads: int, case: SparseCase, *splits: int, bounded: bool = True) -> Got:
    """(out, LSE) of one kernel."""
    rows = case.ragged
    lists = (case.indices, case.topk_lens) if bounded else (case.unbounded, None)
    with poisoned_scratch():
        out = torch.empty(len(rows.q), heads, 512, dtype=torch.bfloat16)
        lse = torch.empty(len(rows.q), heads, dtype=torch.float32)
        module.run(rows.q, case.kv, *lists, rows.sink, rows.kv_scale, rows.sm_scale, out, lse, *splits)
    return out, lse


@pytest.mark.parametrize("heads", [5, 16, 20, 96])
def test_lists(folder: Path, heads: int) -> None:
    """No row, one, around a tile, all; a first tile without a row; one split, two, some without rows; a sink."""
    kernels = Emulated(spec_of(heads), folder, f"sparse_hopper_{heads}")
    assert {kernel.family for kernel in kernels.plan.kernels} == {"hopper_sparse"}
    assert {kernel.block_h for kernel in kernels.plan.kernels} == {8 if heads < 9 else 16 if heads < 33 else 64}
    case = in_lists(make_case([0, 1, 65, TOPK], heads=heads, kv_dtype="fp8_ds_mla"), TOPK, 16)
    case.ragged.sink = torch.linspace(-2.0, 3.0, heads)
    check(launch(kernels.module("any_direct"), heads, case), case.ragged, bound=EXACT, lse_bound=LSE)
    few = in_lists(make_case([20, 0], heads=heads, kv_dtype="fp8_ds_mla", kv_scale=None, seed=1), TOPK)
    few.indices = few.unbounded.roll(64, 1)  # behind a tile of -1
    few.topk_lens = torch.full_like(few.topk_lens, TOPK)
    check(launch(kernels.module("top150"), heads, few, bounded=False), few.ragged, bound=EXACT, lse_bound=LSE)
    if heads == 16:
        check(launch(kernels.module("any"), heads, few, 3), few.ragged, bound=EXACT, lse_bound=LSE)


@pytest.mark.parametrize("heads", [16, 64])
def test_numbers_that_are_not_finite(folder: Path, heads: int) -> None:
    """A scale that is infinite, a rope of -inf, NaN in q: NaN where they are seen, and nothing where no row is."""
    module = Emulated(spec_of(heads), folder, f"sparse_numbers_{heads}").module("any_direct")
    case = in_lists(make_case([70, 3, 3, 0], heads=heads, kv_dtype="fp8_ds_mla"), TOPK)
    records = case.kv.view(-1, 656)
    first = [int(row[row >= 0][0]) for row in case.unbounded[:2]]
    records[first[0], 512:528].view(torch.float32)[1] = float("inf")
    records[first[1], 528:].view(torch.bfloat16)[:] = float("-inf")
    case.ragged.q[1] = case.ragged.q[1].abs()
    case.ragged.q[3] = float("nan")
    out, lse = launch(module, heads, case)
    assert torch.isnan(out[:2]).all() and torch.isnan(lse[:2]).all()
    assert torch.isfinite(out[2]).all() and torch.isfinite(lse[2]).all()
    assert (out[3] == 0).all() and (lse[3] == float("-inf")).all()


FAULTS = [  # what the kernel's text becomes, and what the emulator says of it
    ("mbarrier.wait(full.index(slot), tile // STAGES & 1)\n", "\n", "never written"),
    ("        fence_async_shared()  # cp.async wrote", "        # cp.async wrote", "fence_async_shared"),
    ("count=GATHERING * 32", "count=GATHERING * 32 + 1", "deadlock"),
]


@pytest.mark.parametrize(("old", "new", "said"), FAULTS)
def test_planted_faults_show(folder: Path, old: str, new: str, said: str) -> None:
    from mla_codegen.check import emulate
    from mla_codegen.check.verify import runtime_of

    kernels = Emulated(spec_of(8), folder, "sparse_faults")
    text = kernels.files["spec/fp8_ds_mla_any_direct.py"]
    assert old in text
    name = "sparse_faults.spec.fp8_ds_mla_any_direct"
    module = emulate.load(text.replace(old, new), name, package=runtime_of(name))
    case = in_lists(make_case([150], heads=8, kv_dtype="fp8_ds_mla"), TOPK)
    with pytest.raises(EmulatorError, match=said):
        launch(module, 8, case)


def test_other_rows_fall_to_plain_triton() -> None:
    for kv, model in (("bf16", {}), ("fp8_ds_mla", {"latent": 256})):
        spec = make_spec("sm_90", kv=[kv], optimizations=[], **model)  # type: ignore[arg-type]
        spec |= {"defaults": {}, "kv": {"layout": "sparse", "topk": 64}, "shapes": [{"batch": 1}]}
        assert {kernel.family for kernel in make_plans(spec).kernels} == {"triton"}
