"""Inputs whose numbers are hard, for the kernels of every family: NaN and infinity, sinks far above the rest, strides.

Each `hold_...` takes `run(case) -> (out, LSE)`, so that interpreted, emulated and compiled kernels are held alike.
"""

from collections.abc import Callable
from dataclasses import replace

import torch
from harness import Got, rows_of

from mla_codegen.check.reference import Case, make_case, reference

NAN, INF = float("nan"), float("inf")
NAN_BYTES = {"fp8_e4m3fn": (0x7F, 0xFF), "fp8_e4m3fnuz": (0x80, 0x80)}

Run = Callable[[Case], Got]


def hold_non_finite(run: Run, kv: str, tile: int, *, heads: int = 16, latent: int = 512, rope: int = 64) -> None:
    """NaN or infinity that is read gives NaN in out and LSE of the query rows and heads that read it, of no others.

    The others must not change by a bit. `tile`: KV rows of a tile; requests end within one, at its end, and behind.
    """
    lens = [tile + 6, tile + 6, 2 * tile + 1, tile, tile + 1, 9, 0, 3]
    q_lens = [1, 2, 1, 1, 1, 2, 1, 1]
    clean = make_case(lens, q_lens=q_lens, heads=heads, latent=latent, rope=rope, kv_dtype=kv)
    out, lse = run(clean)
    assert out.isfinite().all() and not lse.isnan().any()
    case = replace(clean, q=clean.q.clone(), kv=clean.kv.clone())
    first = clean.kv_indptr.tolist()
    bad = torch.zeros(out.shape[:2], dtype=torch.bool)

    def in_q(row: int, head: int, column: int, value: float) -> None:
        case.q[row, head, column] = value
        bad[row, head] = True

    def in_kv(request: int, row: int, column: int, value: float, *, sign: int = 0) -> None:
        """By the bytes where KV is fp8: it has no infinity, and torch writes one of its NaNs only."""
        if kv in NAN_BYTES:
            case.kv.view(torch.uint8)[first[request] + row, column] = NAN_BYTES[kv][sign]
        else:
            case.kv[first[request] + row, column] = value

    in_q(0, 0, 1, NAN)  # a latent column
    in_q(1, heads - 1, latent + rope - 1, INF)  # of the earlier query row of two; the last rope column
    in_q(2, 0, 0, -INF)
    case.q[2, heads // 2] = NAN  # a head that holds nothing else
    bad[2, heads // 2] = True
    in_kv(2, 2 * tile, latent, -INF)  # the only row of a tile, and of the last split if there are three: a rope column
    bad[3] = True
    in_kv(3, 0, latent - 1, NAN, sign=1)
    bad[4] = True
    in_kv(4, 3, latent + rope - 1, INF, sign=1)
    bad[5] = True
    in_kv(5, 8, 2, NAN)  # the last row of a request: of its two query rows the second alone sees it
    bad[7] = True
    case.q[8] = NAN  # a request without rows: nothing is read
    got, got_lse = run(case)
    assert (got[8] == 0).all() and (got_lse[8] == -INF).all()
    want, want_lse = reference(case, latent)
    assert torch.equal(want.isnan().any(-1), bad) and torch.equal(want_lse.isnan(), bad)
    wrong = bad & ~got.isnan().all(-1)
    assert not wrong.any(), f"(query row, head) that read NaN or infinity and are not NaN: {rows_of(wrong)}"
    wrong = bad & ~got_lse.isnan()
    assert not wrong.any(), f"LSE that is not NaN: {rows_of(wrong)}, {got_lse[wrong][:4].tolist()}"
    assert torch.equal(got[~bad], out[~bad]) and torch.equal(got_lse[~bad], lse[~bad]), "others changed"
    if clean.kv_scale is not None:
        got, got_lse = run(replace(clean, kv_scale=torch.tensor([INF])))
        empty = lse == -INF
        assert (got[empty] == 0).all() and (got_lse[empty] == -INF).all()
        assert got[~empty].isnan().all() and got_lse[~empty].isnan().all(), "kv_scale is read"


SINKS = (0.0, 1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0, 5.0, 6.0, 7.0, 8.0, 10.0, 12.0, 16.0, 18.0)


def sinks(kv: str, rows: int, *, ones: bool, most: float = 18.0) -> Case:
    """A request whose second row's score lies SINKS[head] nats, `most` at most, above those of the others, which are 0.

    ones    all values are 1; else the sink's are 0, so that only what rounding leaves of the others' weights counts
    The score is one product of numbers that fp8 holds exactly, so that q's rounding plays no part.
    """
    case = make_case([rows], kv_dtype=kv, kv_scale=None)
    first = int(case.kv_indptr[0])
    values = case.kv.float()
    values[first : first + rows, 512:] = 0
    values[first : first + rows, :512] = 1.0 if ones else values[first : first + rows, :512]
    values[first + 1, 512] = 1.0
    if not ones:
        values[first + 1, :512] = 0
    q = torch.zeros_like(case.q)
    q[0, :, 512] = torch.tensor(SINKS).clamp(max=most)
    return replace(case, q=q, kv=values.to(case.kv.dtype), sm_scale=1.0)


def hold_ones(run: Run, kv: str, rows: int = 300) -> None:
    """The mean of ones is 1 whatever the weights: what is divided by is the sum of what was multiplied."""
    case = sinks(kv, rows, ones=True)
    out, _ = run(case)
    off = (out.float() - 1).abs().amax(-1)
    assert (off <= 2.0**-7).all(), f"ones came out off by {off[0].tolist()}"


def hold_sinks(run: Run, kv: str, bound: float, lse_bound: float, *, most: float = 18.0, rows: int = 300) -> None:
    """Each head within `bound` (relative L2) where nearly all weight lies on a row of zeros."""
    case = sinks(kv, rows, ones=False, most=most)
    out, lse = run(case)
    want, want_lse = reference(case, 512)
    off = torch.linalg.vector_norm(out.double() - want, dim=-1) / torch.linalg.vector_norm(want, dim=-1)
    assert (off <= bound).all(), f"heads with a sink {SINKS} nats above are off by {off[0].tolist()}"
    assert ((lse - want_lse).abs() <= lse_bound).all(), (lse - want_lse)[0].tolist()


def far_heads(q: torch.Tensor) -> torch.Tensor:
    """`q` with heads so far apart that the last begins 2^31 elements or more behind the first: a view.

    Memory is taken where it is written, so this costs a few pages on a CPU. A kernel that multiplies in 32 bits reads
    zeros in the half that lies before the view.
    """
    rows, heads, columns = q.shape
    stride = -(-(1 << 31) // (heads - 1) // 16) * 16 + 16
    span = (heads - 1) * stride + rows * columns
    pool = torch.empty(2 * span, dtype=q.dtype, device=q.device)
    far = pool.as_strided(q.shape, (columns, stride, 1), span)
    far.copy_(q)
    return far
