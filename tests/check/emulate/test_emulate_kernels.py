"""Whole decode kernels of every family through the emulator, against float64."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import yaml
from emulate_decode import BLOCK, KERNELS, SM_SCALE, SPLITS, Case, case, error, merge, scratch, truth

from mla_codegen.check import emulate

LENS = [130, 1, 0, 64, 65]
# The wgmma kernel holds q as two fp8 numbers, the AMD kernels as one.
LIMITS = {"hopper_pairs": 2e-3, "hopper_wgmma": 2e-3, "cdna3_quads": 6e-2, "cdna4_async": 6e-2}
LSE_LIMITS = {"hopper_pairs": 1e-4, "hopper_wgmma": 2e-3, "cdna3_quads": 0.1, "cdna4_async": 0.1}


def launch(name: str, c: Case, folder: Path = KERNELS) -> tuple[torch.Tensor, torch.Tensor]:
    module = emulate.load(folder / f"{name}.py", name)
    partial, lse = (emulate.poison(x) for x in scratch(c))
    kv = {
        "hopper_pairs": lambda: (c.kv.view(torch.int16), partial),
        "cdna3_quads": lambda: (c.kv.view(torch.int32), partial),
        "cdna4_async": lambda: (c.kv, partial),
        "hopper_wgmma": lambda: (*module.descriptors(c.kv, BLOCK), partial.view(torch.int64)),
    }[name]()
    module.stage1[(c.slots,)](c.q, *kv, lse, c.indptr, c.scale, SM_SCALE, SPLITS=SPLITS, BLOCK=BLOCK, num_warps=4)
    assert not emulate.unwritten(lse).any()
    return partial, lse


@pytest.mark.parametrize("name", LIMITS)
def test_ragged_lengths_match_float64(name: str) -> None:
    c = case(LENS)
    out, lse = merge(*launch(name, c))
    want, want_lse = truth(c)
    assert error(out, want) < LIMITS[name]
    assert torch.equal(out[2], torch.zeros_like(out[2]))
    assert torch.equal(lse[2], torch.full_like(lse[2], float("-inf")))
    keep = [0, 1, 3, 4]
    assert (lse[keep] - want_lse[keep]).abs().max() < LSE_LIMITS[name]


def test_minus_zero_bytes_are_zero_on_gfx942() -> None:
    c = case([70], minus_zeros=True)
    assert error(merge(*launch("cdna3_quads", c))[0], truth(c)[0]) < LIMITS["cdna3_quads"]


def test_tma_brings_neighbouring_rows_and_the_kernel_must_drop_them() -> None:
    """The rows behind the last request are NaN and TMA does fetch them; a missing mask of V shows as NaN."""
    c = case([65], guard=80)
    assert error(merge(*launch("hopper_wgmma", c))[0], truth(c)[0]) < LIMITS["hopper_wgmma"]
    source = (KERNELS / "hopper_wgmma.py").read_text()
    line = "        left = gl.where((tile * BLOCK + key < rows)[None, :], left, 0)\n"
    assert line in source
    module = emulate.load(source.replace(line, ""), "unmasked")
    partial, lse = scratch(c)
    module.stage1[(c.slots,)](
        c.q, *module.descriptors(c.kv, BLOCK), partial.view(torch.int64), lse, c.indptr, c.scale, SM_SCALE,
        SPLITS=SPLITS, BLOCK=BLOCK, num_warps=4,
    )  # fmt: skip
    assert torch.isnan(partial).any()


@pytest.mark.parametrize("name", ["hopper_pairs", "cdna4_async"])
def test_same_bits_every_time(name: str) -> None:
    c = case([100])
    first, second = launch(name, c), launch(name, c)
    assert all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(first, second, strict=True))


FAULTS = yaml.safe_load((Path(__file__).parent / "kernel_faults.yaml").read_text())


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_in_whole_kernels_are_caught(fault: str, tmp_path: Path) -> None:
    name, old, new, message = (FAULTS[fault][key] for key in ("file", "old", "new", "message"))
    source = (KERNELS / f"{name}.py").read_text()
    assert old in source
    (tmp_path / f"{name}.py").write_text(source.replace(old, new))
    with pytest.raises(emulate.EmulatorError, match=f"(?s)kernel stage1, program .*{name}.py:[0-9]+ in .*({message})"):
        launch(name, case([130, 600], guard=0), folder=tmp_path)
