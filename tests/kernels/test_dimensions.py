"""Heads from 1 to 128, multiples of 16 or not, and the ranks that models have."""

import pytest
from harness import BF16, MODES, PORTABLE_FP8, REPORTS, Builder, Mode, check

from mla_codegen.check.reference import make_case

LENS = [33, 0, 5]
SHAPES = [{"batch": 3, "kv_len": 64, "splits": 2}]
BY_WORDS = [mode for mode in MODES if str(mode) in ("gfx942-fp8_e4m3fn-packed_fp8-fp8_mma", "sm_90-fp8_e4m3fn")]


@pytest.mark.parametrize("heads", REPORTS["head-counts"]["heads"])
@pytest.mark.parametrize("mode", [BF16, PORTABLE_FP8], ids=str)
def test_head_counts(build: Builder, mode: Mode, heads: int) -> None:
    """Both stages; odd counts direct, so that masked heads are stored by stage 1 too."""
    kernels = build(mode.spec(heads=heads, shapes=SHAPES))
    lens = LENS if heads <= 16 else [33]
    case = make_case(lens, heads=heads, kv_dtype=mode.kv)
    check(kernels.run(kernels.shaped.name, case), case)
    check(kernels.run(kernels.general(direct=True), case), case)


@pytest.mark.parametrize("heads", [3, 40, 112])
@pytest.mark.parametrize("mode", BY_WORDS, ids=str)
def test_head_counts_of_other_decodes(build: Builder, mode: Mode, heads: int) -> None:
    kernels = build(mode.spec(heads=heads, shapes=SHAPES))
    case = make_case([33], heads=heads, kv_dtype=mode.kv)
    got = kernels.run(kernels.shaped.name, case)
    check(got, case, bound=mode.bound, lse_bound=mode.lse_bound)


@pytest.mark.parametrize("block_h", [16, 32, 64])
def test_head_blocks(build: Builder, block_h: int) -> None:
    """40 heads in blocks: whole, with a part, or all in one."""
    kernels = build(Mode("sm_90", "bf16").spec(heads=40, block_h=block_h, shapes=SHAPES))
    case = make_case([33, 20], heads=40)
    check(kernels.run(kernels.shaped.name, case), case)


@pytest.mark.parametrize(("latent", "rope"), REPORTS["other-dims"]["dims"])
@pytest.mark.parametrize("mode", [BF16, PORTABLE_FP8, *BY_WORDS], ids=str)
def test_ranks(build: Builder, mode: Mode, latent: int, rope: int) -> None:
    kernels = build(mode.spec(heads=4, latent=latent, rope=rope, shapes=SHAPES))
    case = make_case([65, 0, 7], heads=4, latent=latent, rope=rope, kv_dtype=mode.kv)
    got = kernels.run(kernels.shaped.name, case)
    check(got, case, bound=mode.bound, lse_bound=mode.lse_bound)


@pytest.mark.parametrize("block_n", [16, 64, 128])
@pytest.mark.parametrize("mode", [BF16, PORTABLE_FP8], ids=str)
def test_tile_sizes(build: Builder, mode: Mode, block_n: int) -> None:
    kernels = build(mode.spec(heads=4, block_n=block_n, latent=256, shapes=SHAPES))
    lens = [block_n - 1, block_n, 2 * block_n + 1]
    case = make_case(lens, heads=4, latent=256, kv_dtype=mode.kv)
    check(kernels.run(kernels.shaped.name, case), case)
