"""Hard numbers in plain Triton, every way to decode KV and every form of kernel: see `hard_numbers`."""

import math
from dataclasses import replace

import pytest
import torch
from hard_numbers import far_heads, hold_non_finite, hold_ones, hold_sinks
from harness import BF16, EXACT, MODES, PORTABLE_FP8, Builder, Case, Got, Mode, check
from pages import run as run_paged

from mla_codegen.check.reference import in_pages, make_case

each_mode = pytest.mark.parametrize("mode", MODES, ids=str)
SMALL = {"heads": 4, "latent": 64, "rope": 32}


@each_mode
@pytest.mark.parametrize("splits", [None, 3], ids=["direct", "splits"])
def test_what_is_not_finite_stays_where_it_is_read(build: Builder, mode: Mode, splits: int | None) -> None:
    kernels = build(mode.spec(**SMALL))
    name = kernels.general(direct=splits is None)
    hold_non_finite(lambda case: kernels.run(name, case, splits), mode.kv, 32, **SMALL)
