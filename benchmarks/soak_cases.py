"""Random calls of `mla_decode`, and what they must give.

A call is drawn from (seed, index) alone, so that any one of a soak can be made again. Its numbers are drawn on the
device: q anew, KV as a slice at a random row of a pool that is drawn once.
"""

import random
from dataclasses import asdict, dataclass
from typing import Any

import torch

from mla_codegen.check.reference import TORCH, Case, reference
from mla_codegen.runtime.formats import KV_FORMATS

FP8_SCALE = 0.02  # kv_scale of fp8 KV: numbers of about 1 are stored as about 50
GATHERED_ROWS = 1 << 16  # KV rows that the reference widens to fp32 at a time
SAMPLED = 6  # query rows of a call that are held to float64

Shape = tuple[int, int]


@dataclass(frozen=True)
class Limits:
    """The most requests of a call, KV rows of a request, and KV rows that a call's query rows see together."""

    batch: int = 300
    length: int = 20000
    rows: int = 400_000


@dataclass(frozen=True)
class Drawn:
    """One call. `q_lens`, `lens`: query and KV rows of each request.

    ahead, behind   query rows of no request, before the first and after the last
    guard           KV rows before the first request and after the last; they hold NaN if `poison`
    room            rows that the KV tensor has at least: their mean a request is part of the choice of the kernel
    offset          where in the pool the KV rows begin, from 0 to 1
    visible         kv_visible is given; scaled: kv_scale is; into: out and lse are, holding NaN
    """

    index: int
    kv: str
    q_lens: list[int]
    lens: list[int]
    ahead: int
    behind: int
    guard: int
    room: int
    offset: float
    hint: int | None
    sm_factor: float
    poison: bool
    visible: bool
    scaled: bool
    int64: bool
    strided: bool
    three_dimensions: bool
    into: bool
    return_lse: bool

    @property
    def kv_rows(self) -> int:
        return max(self.room, sum(self.lens) + 2 * self.guard)

    @property
    def total_q(self) -> int:
        return self.ahead + sum(self.q_lens) + self.behind

    def describe(self) -> dict[str, Any]:
        return asdict(self)


def draw(seed: int, index: int, kinds: list[str], shapes: list[Shape], limits: Limits) -> Drawn:
    """The call `index` of a soak. `kinds`: KV dtypes; `shapes`: (batch, kv_len) of the spec, which a third are near."""
    rng = random.Random(f"{seed}:{index}")
    kv = rng.choice(kinds)
    shape = rng.choice([one for one in shapes if one[0] <= limits.batch] or [(1, 1)]) if rng.random() < 0.33 else None
    most = rng.choice((8, 64, limits.batch))
    batch = shape[0] if shape else rng.randint(1, min(most, limits.batch))
    q_len = 1 if shape or rng.random() < 0.6 else rng.randint(1, 5)
    ragged_q = q_len > 1 and rng.random() < 0.5
    q_lens = [rng.randint(0, q_len) if ragged_q else q_len for _ in range(batch)]
    budget = limits.rows * rng.random() ** 2 / q_len
    longest = min(limits.length, max(1, int(budget)))
    form = rng.choice(("equal", "skewed", "skewed", "one long"))
    if form == "equal":
        lens = [int(min(longest, budget / batch))] * batch
    else:
        power = 6 if form == "one long" else 3
        lens = [int(longest * rng.random() ** power) for _ in range(batch)]
        if form == "one long":
            lens[rng.randrange(batch)] = longest
        shrink = min(1.0, budget / max(1, sum(lens)))
        lens = [int(n * shrink) for n in lens]
    if rng.random() < 0.3:
        lens = [0 if rng.random() < 0.2 else n for n in lens]
    hints = [None, None, max(lens, default=0), rng.randint(0, 100_000)]
    rare = rng.random() < 0.15  # together, so that kernels meet few kinds of arguments: each is a compilation
    padded = rng.random() < 0.1
    room = shape[0] * shape[1] if shape and rng.random() < 0.7 else 0
    return Drawn(
        index=index,
        kv=kv,
        q_lens=q_lens,
        lens=lens,
        ahead=rng.randint(0, 3) if padded else 0,
        behind=rng.randint(0, 30) if padded else 0,
        guard=rng.choice((0, 3, 200)),
        room=room,
        offset=rng.random(),
        hint=shape[1] if shape else rng.choice(hints),
        sm_factor=rng.uniform(0.3, 1.0),
        poison=not room and rng.random() < 0.15,
        visible=rare,
        scaled=KV_FORMATS[kv].scaled and rng.random() < 0.9,
        int64=rare,
        strided=rng.random() < 0.3,
        three_dimensions=rng.random() < 0.2,
        into=rng.random() < 0.4,
        return_lse=rng.random() < 0.6,
    )


class Pool:
    """KV rows of every kind, drawn once: `rows` rows of `latent + rope` numbers of about 1."""

    def __init__(self, heads: int, latent: int, rope: int, kinds: list[str], rows: int, seed: int, where: torch.device):
        self.heads, self.latent, self.row, self.where = heads, latent, latent + rope, where
        generator = torch.Generator(where).manual_seed(seed)
        self.rows = {}
        for kind in kinds:
            pool = torch.empty(rows, self.row, dtype=TORCH[kind], device=where)
            for part in pool.split(1 << 18):
                numbers = torch.randn(part.shape, device=where, generator=generator)
                part.copy_((numbers / FP8_SCALE).clamp(-240, 240) if KV_FORMATS[kind].scaled else numbers)
            self.rows[kind] = pool
        self.scale = torch.tensor([FP8_SCALE], device=where)


@dataclass
class Call:
    """A call's tensors. `begins`, `seen`: of each query row, its first KV row in `kv` and how many it sees."""

    drawn: Drawn
    q: torch.Tensor
    kv: torch.Tensor
    arguments: dict[str, Any]
    begins: list[int]
    seen: list[int]
    scale: float
    sm_scale: float


def make(drawn: Drawn, pool: Pool, q_dtype: torch.dtype, out_dtype: torch.dtype, seed: int) -> Call:
    """The tensors of a call, on the pool's device."""
    where, heads, row = pool.where, pool.heads, pool.row
    generator = torch.Generator(where).manual_seed(seed * 1_000_003 + drawn.index)
    shape = (drawn.total_q, heads + 16, row + 64) if drawn.strided else (drawn.total_q, heads, row)
    q = torch.randn(shape, device=where, generator=generator).to(q_dtype)[:, :heads, :row]
    total = drawn.kv_rows
    rows = pool.rows[drawn.kv]
    first = int(drawn.offset * (len(rows) - total))
    kv = rows[first : first + total]
    if drawn.poison and drawn.guard:
        kv = kv.clone()
        nan = torch.full((drawn.guard, row), float("nan"), device=where).to(kv.dtype)
        kv[: drawn.guard], kv[total - drawn.guard :] = nan, nan
    index = torch.int64 if drawn.int64 else torch.int32
    qo, kvp = [drawn.ahead], [drawn.guard]
    for q_len, kv_len in zip(drawn.q_lens, drawn.lens, strict=True):
        qo.append(qo[-1] + q_len)
        kvp.append(kvp[-1] + kv_len)
    rng = random.Random(drawn.index)
    begins, seen = [0] * drawn.ahead, [0] * drawn.ahead
    for q_len, kv_len, begin in zip(drawn.q_lens, drawn.lens, kvp, strict=False):
        begins += [begin] * q_len
        seen += [max(0, kv_len - q_len + t + 1) for t in range(q_len)]
    begins += [0] * drawn.behind
    seen += [0] * drawn.behind
    visible = None
    if drawn.visible:
        limits = [n for n, q_len in zip(drawn.lens, drawn.q_lens, strict=True) for _ in range(q_len)]
        asked = [rng.randint(0, n + 10) for n in limits]
        seen[drawn.ahead : drawn.total_q - drawn.behind] = map(min, asked, limits)
        asked = [7] * drawn.ahead + asked + [7] * drawn.behind  # of a row of no request it counts for nothing
        visible = torch.tensor(asked, dtype=torch.int32, device=where)
    fp8 = KV_FORMATS[drawn.kv].scaled
    scale = FP8_SCALE if drawn.scaled else 1.0
    sm_scale = drawn.sm_factor * row**-0.5 * (FP8_SCALE if fp8 and not drawn.scaled else 1.0)
    nan = float("nan")
    arguments = {
        "q": q,
        "kv": kv[:, None] if drawn.three_dimensions else kv,
        "qo_indptr": torch.tensor(qo, dtype=index, device=where),
        "kv_indptr": torch.tensor(kvp, dtype=index, device=where),
        "sm_scale": sm_scale,
        "kv_scale": pool.scale if drawn.scaled else None,
        "kv_visible": visible,
        "max_kv_len": drawn.hint,
        "return_lse": drawn.return_lse,
    }
    if drawn.into:
        arguments["out"] = torch.full((drawn.total_q, heads, pool.latent), nan, dtype=out_dtype, device=where)
        arguments["lse"] = torch.full((drawn.total_q, heads), nan, device=where)
    return Call(drawn, q, kv, arguments, begins, seen, scale, sm_scale)


def attention(call: Call, latent: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(out [total_q, heads, latent], LSE [total_q, heads]) in fp32: padded products of query rows of like lengths."""
    total_q, heads, _ = call.q.shape
    where = call.q.device
    out = torch.zeros(total_q, heads, latent, device=where)
    lse = torch.full((total_q, heads), float("-inf"), device=where)
    order = sorted((at for at in range(total_q) if call.seen[at]), key=lambda at: -call.seen[at])
    while order:
        longest = call.seen[order[0]]
        most = max(1, GATHERED_ROWS // longest)
        some = [at for at in order[:most] if 2 * call.seen[at] >= longest]
        order = order[len(some) :]
        at, begins, seen = torch.tensor(
            [some, [call.begins[i] for i in some], [call.seen[i] for i in some]], device=where
        )
        n = torch.arange(longest, device=where)
        inside = torch.minimum(n, seen[:, None] - 1)  # rows behind the last are not read: they may hold NaN
        keys = call.kv[begins[:, None] + inside].to(torch.float32)
        q = call.q[at].to(torch.float32)
        scores = torch.bmm(q, keys.transpose(1, 2)) * (call.sm_scale * call.scale)
        scores.masked_fill_((n >= seen[:, None])[:, None], float("-inf"))
        lse[at] = torch.logsumexp(scores, -1)
        out[at] = torch.bmm(torch.softmax(scores, -1), keys[..., :latent]) * call.scale
    return out, lse


def differences(got: tuple[torch.Tensor, torch.Tensor], want: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """[4] on the device: relative L2 of the output, the worst of one query row and head, largest of LSE, and a count.

    It counts numbers that are not finite, and rows that see nothing but are not 0 with LSE -inf.
    """
    out, lse = got[0].to(torch.float32), got[1]
    if not out.numel():
        return torch.zeros(4, device=out.device)
    wrong = (~torch.isfinite(out)).sum()
    blind = want[1] == float("-inf")
    wrong = wrong + (blind & ((out != 0).any(-1) | (lse != float("-inf")))).sum()
    off = torch.linalg.vector_norm(out - want[0], dim=-1)
    size = torch.linalg.vector_norm(want[0], dim=-1)
    whole = torch.linalg.vector_norm(off) / torch.linalg.vector_norm(size).clamp_min(1e-30)
    worst = torch.where(blind, 0.0, off / size.clamp_min(1e-30)).amax()
    lse_off = torch.where(blind, 0.0, (lse - want[1]).abs()).amax()
    return torch.stack([whole, worst, lse_off, wrong.to(torch.float32)])


def reference_error(call: Call, latent: int, want: tuple[torch.Tensor, torch.Tensor]) -> tuple[float, float]:
    """(relative L2, LSE) by which some query rows of `want` are off float64, which is computed another way."""
    rows = [at for at in range(call.q.shape[0]) if call.seen[at]]
    error = lse_error = 0.0
    for at in random.Random(call.drawn.index).sample(rows, min(SAMPLED, len(rows))):
        begin, seen = call.begins[at], call.seen[at]
        ends = (torch.tensor([0, n], dtype=torch.int32) for n in (1, seen))
        scale = torch.tensor([call.scale], device=call.q.device)
        case = Case(call.q[at : at + 1], call.kv[begin : begin + seen], *ends, call.sm_scale, scale)
        out, lse = reference(case, latent)
        error = max(error, float((want[0][at] - out[0]).norm() / out.norm()))
        lse_error = max(lse_error, float((want[1][at] - lse[0]).abs().max()))
    return error, lse_error
