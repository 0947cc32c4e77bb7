"""Inputs, float64 truth and the merge of splits for the decode kernels under `kernels/`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

KERNELS = Path(__file__).parent / "kernels"
HEADS, LATENT, WIDTH = 16, 512, 576
BLOCK, SPLITS = 64, 2
SM_SCALE = WIDTH**-0.5
KV_SCALE = 0.7


@dataclass
class Case:
    """Requests of `lens` rows, one query row each; `kv` has NaN rows before and behind all of them."""

    lens: list[int]
    q: torch.Tensor
    kv: torch.Tensor
    indptr: torch.Tensor
    scale: torch.Tensor

    @property
    def slots(self) -> int:
        return len(self.lens) * SPLITS


def case(lens: list[int], *, minus_zeros: bool = False, guard: int = 3, seed: int = 0) -> Case:
    """Random bf16 queries and e4m3fn KV rows, deterministic in `seed`."""
    draw = torch.Generator().manual_seed(seed)
    starts = [guard]
    for n in lens:
        starts.append(starts[-1] + n)
    kv = torch.randn(starts[-1] + guard, WIDTH, generator=draw).to(torch.float8_e4m3fn)
    rows = kv.view(torch.uint8)
    if minus_zeros:
        rows[:, ::7] = 0x80
    rows[:guard] = 0x7F
    rows[starts[-1] :] = 0x7F
    q = torch.randn(len(lens), HEADS, WIDTH, generator=draw).to(torch.bfloat16)
    return Case(lens, q, kv, torch.tensor(starts, dtype=torch.int32), torch.tensor([KV_SCALE]))


def truth(c: Case) -> tuple[torch.Tensor, torch.Tensor]:
    """out [batch, HEADS, LATENT] and LSE [batch, HEADS] (natural log), float64."""
    outs, lses = [], []
    for b, n in enumerate(c.lens):
        rows = c.kv[c.indptr[b] : c.indptr[b] + n].double() * KV_SCALE
        scores = c.q[b].double() @ rows.T * SM_SCALE
        outs.append(torch.softmax(scores, -1) @ rows[:, :LATENT] if n else torch.zeros(HEADS, LATENT).double())
        lses.append(torch.logsumexp(scores, -1) if n else torch.full((HEADS,), float("-inf")).double())
    return torch.stack(outs), torch.stack(lses)


def merge(partial: torch.Tensor, lse: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge splits: partial [batch, SPLITS, HEADS, LATENT] normalised, lse [batch, SPLITS, HEADS] in base 2."""
    top = lse.double().max(1, keepdim=True).values
    weights = torch.where(lse == float("-inf"), 0.0, torch.exp2(lse.double() - top))
    seen = torch.where(weights[..., None] > 0, partial.double(), 0.0)
    total = weights.sum(1)
    out = (seen * weights[..., None]).sum(1) / torch.where(total > 0, total, 1.0)[..., None]
    return out, (top[:, 0] + total.log2()) * torch.log(torch.tensor(2.0)).double()


def scratch(c: Case, device: str = "cpu") -> tuple[torch.Tensor, torch.Tensor]:
    """Partial outputs and LSE of stage 1, filled with NaN."""
    partial = torch.full((len(c.lens), SPLITS, HEADS, LATENT), float("nan"), device=device)
    return partial, torch.full((len(c.lens), SPLITS, HEADS), float("nan"), device=device)


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    """Relative L2 error."""
    return float((got.double() - want).norm() / want.norm())
