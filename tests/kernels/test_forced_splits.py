"""The split count decides speed only: any count gives the same answer, the same bits each time."""

import pytest
import torch
from harness import BF16, MODES, PORTABLE_FP8, REPORTS, Builder, Got, Kernels, Mode, check

from mla_codegen.check.reference import Case, make_case

FEW, REPEAT = REPORTS["fewer-rows-than-splits"], REPORTS["repeat-bitwise"]
INVARIANCE, BATCH = REPORTS["split-invariance"], REPORTS["batch-invariance"]
REMAPPED = next(m for m in MODES if str(m) == "gfx942-fp8_e4m3fn-packed_fp8-fp8_mma")


def run(kernels: Kernels, case: Case, splits: int) -> Got:
    direct = splits == 1
    return kernels.run(kernels.general(direct), case, None if direct else splits)


@pytest.mark.parametrize("splits", FEW["splits"])
@pytest.mark.parametrize("mode", [BF16, PORTABLE_FP8], ids=str)
def test_fewer_rows_than_splits(build: Builder, mode: Mode, splits: int) -> None:
    kernels = build(mode.spec(heads=2, block_n=16))
    lens = FEW["lens"] if splits <= 8 else [FEW["lens"][0], FEW["lens"][-1]]
    case = make_case(lens, heads=2, kv_dtype=mode.kv)
    check(run(kernels, case, splits), case, bound=mode.bound, lse_bound=mode.lse_bound)


@pytest.mark.parametrize("splits", [2, 3, 5, 8, 13])
def test_kernels_of_a_fixed_split_count(build: Builder, splits: int) -> None:
    """Counts that are powers of two and that are not: stage 2 pads its tile of splits."""
    kernels = build(BF16.spec(heads=2, block_n=16, shapes=[{"batch": 4, "kv_len": 64, "splits": splits}]))
    case = make_case([70, 0, 16, 33], heads=2)
    check(kernels.run(kernels.shaped.name, case), case)


def test_the_most_splits(build: Builder) -> None:
    kernels = build(PORTABLE_FP8.spec(heads=1, block_n=16, latent=128))
    case = make_case([16 * 128 - 5], heads=1, latent=128, kv_dtype=PORTABLE_FP8.kv)
    check(run(kernels, case, 128), case)


@pytest.mark.parametrize("splits", REPEAT["splits"])
@pytest.mark.parametrize("mode", [BF16, PORTABLE_FP8], ids=str)
def test_the_same_bits_every_time(build: Builder, mode: Mode, splits: int) -> None:
    kernels = build(mode.spec(heads=2))
    case = make_case(REPEAT["lens"], heads=2, kv_dtype=mode.kv)
    first = run(kernels, case, splits)
    check(first, case)
    for _ in range(REPEAT["repeats"] - 1):
        again = run(kernels, case, splits)
        assert torch.equal(again[0].view(torch.int16), first[0].view(torch.int16))
        assert torch.equal(again[1].view(torch.int32), first[1].view(torch.int32))


@pytest.mark.parametrize("mode", [BF16, PORTABLE_FP8], ids=str)
def test_lse_does_not_follow_the_split_count(build: Builder, mode: Mode) -> None:
    kernels = build(mode.spec(heads=2))
    case = make_case(INVARIANCE["lens"], heads=2, kv_dtype=mode.kv)
    results = [run(kernels, case, splits) for splits in INVARIANCE["splits"]]
    for out, lse in results:
        assert (lse - results[0][1]).abs().max() <= INVARIANCE["tolerance"]
        check((out, lse), case)


@pytest.mark.parametrize("splits", [1, 4])
@pytest.mark.parametrize("mode", [BF16, REMAPPED], ids=str)
def test_a_request_does_not_see_its_batch(build: Builder, mode: Mode, splits: int) -> None:
    """With one kernel and split count, request 0 has the same bits whoever shares its batch."""
    kernels = build(mode.spec(heads=2))
    whole = make_case(BATCH["lens"], heads=2, kv_dtype=mode.kv)
    results = []
    for batch in BATCH["batches"]:
        indptrs = whole.qo_indptr[: batch + 1], whole.kv_indptr[: batch + 1]
        case = Case(whole.q[:batch], whole.kv, *indptrs, whole.sm_scale, whole.kv_scale)
        results.append(run(kernels, case, splits))
        check(results[-1], case, bound=mode.bound, lse_bound=mode.lse_bound)
    for out, lse in results[1:]:
        assert torch.equal(out[0].view(torch.int16), results[0][0][0].view(torch.int16))
        assert torch.equal(lse[0].view(torch.int32), results[0][1][0].view(torch.int32))
