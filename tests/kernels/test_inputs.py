"""What a call may hand in: strided q, KV in other shapes and types, 64-bit indices, its own out; odd magnitudes."""

import math

import pytest
import torch
from harness import BF16, MODES, PORTABLE, PORTABLE_FP8, RAGGED, REPORTS, Builder, Mode, check

from mla_codegen.check.reference import TORCH, make_case, reference

LENS = REPORTS["strided-q"]["lens"]
ROUNDED = next(m for m in MODES if str(m) == "gfx942-fp8_e4m3fn-packed_fp8-fp8_mma")


@pytest.mark.parametrize("mode", [BF16, PORTABLE_FP8], ids=str)
@pytest.mark.parametrize("view", ["of a larger tensor", "transposed"])
def test_strided_q(build: Builder, mode: Mode, view: str) -> None:
    kernels = build(mode.spec())
    case = make_case(LENS, kv_dtype=mode.kv)
    rows, heads, columns = case.q.shape
    if view == "transposed":
        larger = torch.full((heads, rows, columns), float("nan"), dtype=case.q.dtype).transpose(0, 1)
        strided = larger
    else:
        larger = torch.full((rows + 1, heads + 16, columns + 64), float("nan"), dtype=case.q.dtype)
        strided = larger[:rows, 3 : 3 + heads, :columns]
    strided.copy_(case.q)
    assert not strided.is_contiguous()
    want = kernels.decode(case)
    case.q = strided
    got = kernels.decode(case)
    check(got, case)
    assert torch.equal(got[0], want[0])


def test_q_with_strided_columns_is_refused_by_its_strides(build: Builder) -> None:
    kernels = build(BF16.spec())
    case = make_case(LENS).to(kernels.device)  # moving it later would make q dense
    case.q = case.q.repeat_interleave(2, 2)[..., ::2]
    with pytest.raises(ValueError, match=r"strides \(18432, 1152, 2\); the last must be 1"):
        kernels.decode(case)


@pytest.mark.parametrize("mode", [BF16, PORTABLE_FP8], ids=str)
def test_kv_of_one_head(build: Builder, mode: Mode) -> None:
    """kv [total_kv, 1, columns], as caches keep it."""
    kernels = build(mode.spec())
    case = make_case(LENS, kv_dtype=mode.kv)
    case.kv = case.kv[:, None, :]
    check(kernels.decode(case), case)


@pytest.mark.parametrize("view", REPORTS["transposed-kv-dtype"]["views"])
@pytest.mark.parametrize("mode", [PORTABLE_FP8, ROUNDED], ids=str)
def test_kv_as_bytes(build: Builder, mode: Mode, view: str) -> None:
    kernels = build(mode.spec())
    case = make_case(REPORTS["transposed-kv-dtype"]["lens"], kv_dtype=mode.kv)
    want = kernels.decode(case)
    check(want, case, bound=mode.bound, lse_bound=mode.lse_bound)
    case.kv = case.kv.view(getattr(torch, view))
    assert torch.equal(kernels.decode(case)[0], want[0])


@pytest.mark.parametrize("mode", [m for m in MODES if m.kv == "fp8_e4m3fn" and m.target != "sm_80"], ids=str)
def test_minus_zero_is_zero(build: Builder, mode: Mode) -> None:
    """The byte 0x80 all over a third of the columns, the rope's too."""
    report = REPORTS["kv-minus-zero"]
    kernels = build(mode.spec())
    case = make_case(report["lens"], kv_dtype=mode.kv)
    case.kv.view(torch.uint8)[3:-3, ::3] = report["byte"]
    got = kernels.run(kernels.shaped.name, case)
    check(got, case, bound=mode.bound, lse_bound=mode.lse_bound)


@pytest.mark.parametrize("direct", [True, False], ids=["direct", "splits"])
def test_int64_indptr(build: Builder, direct: bool) -> None:
    kernels = build(BF16.spec())
    case = make_case([33, 0, 5], q_lens=[2, 1, 3], index=torch.int64)
    check(kernels.run(kernels.general(direct), case, None if direct else 2), case)


@pytest.mark.parametrize("direct", [True, False], ids=["direct", "splits"])
def test_kv_visible_replaces_the_causal_rule(build: Builder, direct: bool) -> None:
    """Each query row sees as many rows as it is told; the reference gets a request for each."""
    kernels = build(BF16.spec())
    case = make_case([40], q_lens=4)
    visible = torch.tensor([40, 0, 7, 33], dtype=torch.int32)
    got = kernels.run(kernels.general(direct), case, None if direct else 2, kv_visible=visible)
    begin = int(case.kv_indptr[0])
    for row, rows in enumerate(visible.tolist()):
        alone = make_case([rows])
        alone.q, alone.kv = case.q[row : row + 1], case.kv
        alone.kv_indptr = torch.tensor([begin, begin + rows], dtype=torch.int32)
        alone.sm_scale = case.sm_scale
        check((got[0][row : row + 1], got[1][row : row + 1]), alone)


def test_the_callers_out_is_written_whole(build: Builder) -> None:
    kernels = build(BF16.spec())
    case = make_case([33, 0, 5])
    mine = torch.full((3, 16, 512), float("nan"), dtype=torch.bfloat16, device=kernels.device)
    out, lse = kernels.decode(case, out=mine)
    check((out, lse), case)
    assert torch.equal(mine.cpu(), out)


@pytest.mark.parametrize("q", ["bf16", "fp16"])
@pytest.mark.parametrize("out", ["bf16", "fp16"])
@pytest.mark.parametrize("mode", PORTABLE, ids=str)
def test_element_types_of_q_and_out(build: Builder, mode: Mode, q: str, out: str) -> None:
    kernels = build(mode.spec(q=q, out=out))
    case = make_case([40, 0, 5], kv_dtype=mode.kv, q_dtype=q)
    got = kernels.run(kernels.shaped.name, case)
    assert got[0].dtype is TORCH[out]
    rounds_q = (q, mode.kv) == ("fp16", "bf16")  # products in bf16: q loses three bits
    check(got, case, lse_bound=2e-2 if rounds_q else mode.lse_bound)


def test_lse_is_natural(build: Builder) -> None:
    report = REPORTS["lse-base"]
    kernels = build(BF16.spec())
    case = make_case(report["lens"])
    _, lse = kernels.decode(case)
    begin, end = case.kv_indptr.tolist()
    scores = torch.einsum("qhd,kd->qhk", case.q.double(), case.kv[begin:end].double()) * case.sm_scale
    ratio = lse / torch.logsumexp(scores, -1)
    assert (ratio - 1).abs().max() < 1e-3


# bf16 reaches 3e38, so a head of q may be far out of the range of f16 and fp8; its direction is what counts.
@pytest.mark.parametrize("size", [1e-38, 1e-6, 1e5, 1e30])
@pytest.mark.parametrize("mode", [BF16, PORTABLE_FP8, ROUNDED], ids=str)
def test_magnitude_of_q(build: Builder, mode: Mode, size: float) -> None:
    """sm_scale undoes the size, so that the answer is an ordinary one (as far as fp32 can hold that scale)."""
    kernels = build(mode.spec())
    case = make_case(RAGGED[2:], kv_dtype=mode.kv)
    case.q = (case.q.float() * size).bfloat16()
    if size > 1e-30:
        case.sm_scale /= size
    check(kernels.run(kernels.shaped.name, case), case, bound=mode.bound, lse_bound=mode.lse_bound)


@pytest.mark.parametrize("mode", [BF16, PORTABLE_FP8], ids=str)
def test_scores_of_thousands_pick_one_row(build: Builder, mode: Mode) -> None:
    """|q| of 1e5 and no smaller sm_scale: the softmax is one row, and nothing overflows."""
    kernels = build(mode.spec())
    case = make_case([65, 40], kv_dtype=mode.kv)
    case.q = (case.q.float() * 1e5).bfloat16()
    got = kernels.run(kernels.shaped.name, case)
    check(got, case, lse_bound=1.0)
    assert float(reference(case, 512)[1].min()) > 1e3


def test_heads_of_q_of_different_size_do_not_share_a_scale(build: Builder) -> None:
    kernels = build(PORTABLE_FP8.spec())
    case = make_case([40], kv_dtype=PORTABLE_FP8.kv)
    sizes = torch.tensor([10.0**power for power in range(-8, 8)])
    case.q = (case.q.float() * sizes[None, :, None]).bfloat16()
    case.sm_scale *= 1e-7
    check(kernels.run(kernels.shaped.name, case), case)
    assert math.isclose(float(sizes.max() / sizes.min()), 1e15, rel_tol=1e-3)
