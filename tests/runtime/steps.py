"""A decode step as a server captures it: buffers of a fixed size that every step fills anew, in place.

Padding: a step of fewer requests than the buffers have leaves rows over, which belong to no request or to requests
without KV rows. What they must give is 0 and an LSE of -inf.
"""

import importlib
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml
from builds import build, plan_of

from mla_codegen.check.reference import TORCH, Case, reference, relative_l2
from mla_codegen.plan.resolve import Plan

SMALL = {
    "target": "portable",
    "model": {"num_heads": 2, "kv_lora_rank": 64, "qk_rope_head_dim": 32},
    "dtypes": {"kv": ["bf16", "fp8_e4m3fn"]},
    "defaults": {"block_n": 32, "num_stages": 1, "optimizations": ["exp2", "peeled_tail", "direct_out", "packed_fp8"]},
    "shapes": [{"batch": 4, "kv_len": 64, "splits": 2}, {"batch": 3, "kv_len": 32, "splits": 1}],
}
H200 = yaml.safe_load((Path(__file__).parents[2] / "specs" / "h200.yaml").read_text(encoding="utf-8"))
BOUND, LSE_BOUND = 3e-3, 5e-3
FP8_SCALE = 0.02


@dataclass(frozen=True)
class Built:
    """A spec's plan and its package's dispatcher."""

    plan: Plan
    dispatcher: Any

    def kernel(self, step: "Step") -> str:
        """The kernel of a step's call, without the KV type that its name begins with."""
        choice, mean = self.dispatcher.builds[0].choices[step.kv_kind], len(step.kv) // step.batch
        return choice.choose(len(step.q), mean, step.hint)[0].removeprefix(f"{step.kv_kind}_")


def built(spec: dict[str, Any], folder: Path, package: str) -> Built:
    """Build `spec` into a package of a name that nobody else imports."""
    plan = plan_of(spec, "spec.yaml")
    build([plan], folder / package)
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    importlib.invalidate_caches()
    return Built(plan, importlib.import_module(f"{package}.dispatch").DISPATCHER)


class Step:
    """The buffers of a step: `batch` requests of up to `q_len` query rows, `rows` KV rows of all of them.

    hint   max_kv_len of the call, which is what chooses the kernel
    """

    def __init__(
        self, built: Built, kv: str, batch: int, q_len: int, rows: int, hint: int, where: torch.device,
        *, visible: bool = False, index: torch.dtype = torch.int32,
    ):  # fmt: skip
        model = built.plan.spec.model
        self.mla_decode = built.dispatcher.mla_decode
        self.batch, self.q_len, self.hint, self.kv_kind, self.where = batch, q_len, hint, kv, where
        self.heads, self.latent = model.num_heads, model.kv_lora_rank
        row = self.latent + model.qk_rope_head_dim
        total_q = batch * q_len
        self.q = torch.zeros(total_q, self.heads, row, dtype=torch.bfloat16, device=where)
        self.kv = torch.zeros(rows, row, device=where).to(TORCH[kv])
        self.qo_indptr = torch.zeros(batch + 1, dtype=index, device=where)
        self.kv_indptr = torch.zeros(batch + 1, dtype=index, device=where)
        self.visible = torch.zeros(total_q, dtype=torch.int32, device=where) if visible else None
        self.scale = torch.full((1,), FP8_SCALE, device=where) if kv.startswith("fp8") else None
        self.sm_scale = row**-0.5
        self.out = torch.empty(total_q, self.heads, self.latent, dtype=torch.bfloat16, device=where)
        self.lse = torch.empty(total_q, self.heads, device=where)

    def fill(
        self, lens: list[int], q_lens: list[int] | None = None, *, seed: int = 0, rows_padded: bool = True
    ) -> None:
        """A new step in the same buffers: requests of `lens` KV rows, up to `batch` of them, the rest padding.

        rows_padded   padding requests have no query rows; else they have theirs, and no KV rows
        """
        q_lens = [self.q_len] * len(lens) if q_lens is None else list(q_lens)
        missing = self.batch - len(lens)
        q_lens += [0 if rows_padded else self.q_len] * missing
        lens = [*lens, *[0] * missing]
        generator = torch.Generator(self.where).manual_seed(seed)
        self.q.copy_(torch.randn(self.q.shape, device=self.where, generator=generator))
        for part in self.kv.split(1 << 17):
            numbers = torch.randn(part.shape, device=self.where, generator=generator)
            part.copy_((numbers / FP8_SCALE).clamp(-240, 240) if self.scale is not None else numbers)
        self.qo_indptr.copy_(torch.tensor([0, *q_lens]).cumsum(0))
        self.kv_indptr.copy_(torch.tensor([0, *lens]).cumsum(0))
        if self.visible is not None:
            self.visible.copy_(torch.randint(0, max(1, *lens), self.visible.shape, generator=torch.manual_seed(seed)))
        self.spoil()

    def spoil(self) -> None:
        """What is not written shows."""
        self.out.fill_(float("nan"))
        self.lse.fill_(float("nan"))

    def decode(self) -> None:
        """The call that is captured."""
        self.mla_decode(
            self.q, self.kv, self.qo_indptr, self.kv_indptr, sm_scale=self.sm_scale, kv_scale=self.scale,
            kv_visible=self.visible, max_kv_len=self.hint, out=self.out, lse=self.lse,
        )  # fmt: skip

    def truth(self) -> tuple[torch.Tensor, torch.Tensor]:
        """float64 (out, LSE) of what the buffers hold now."""
        case = Case(self.q, self.kv, self.qo_indptr, self.kv_indptr, self.sm_scale, self.scale)
        if self.visible is None:
            return reference(case, self.latent)
        out = torch.zeros(self.out.shape, dtype=torch.float64, device=self.where)
        lse = torch.full(self.lse.shape, float("-inf"), dtype=torch.float64, device=self.where)
        qo, kvp, visible = self.qo_indptr.tolist(), self.kv_indptr.tolist(), self.visible.tolist()
        for request in range(self.batch):
            for row in range(qo[request], qo[request + 1]):
                seen = min(visible[row], kvp[request + 1] - kvp[request])
                ends = (torch.tensor([0, n], dtype=torch.int32) for n in (1, seen))
                keys = self.kv[kvp[request] : kvp[request] + seen]
                alone = Case(self.q[row : row + 1], keys, *ends, self.sm_scale, self.scale)
                out[row : row + 1], lse[row : row + 1] = reference(alone, self.latent)
        return out, lse

    def check(self, out: torch.Tensor | None = None, lse: torch.Tensor | None = None) -> None:
        """Hold out and LSE, those of the buffers if not given, to float64."""
        out, lse = self.out if out is None else out, self.lse if lse is None else lse
        want, want_lse = self.truth()
        assert torch.isfinite(out).all()
        blind = want_lse == float("-inf")
        assert (out[blind] == 0).all()
        assert (lse[blind] == float("-inf")).all()
        assert relative_l2(out, want) <= BOUND
        off = torch.linalg.vector_norm(out.double() - want, dim=-1)
        assert (off <= 2 * BOUND * torch.linalg.vector_norm(want, dim=-1)).all()
        assert blind.all() or (lse - want_lse)[~blind].abs().max() <= LSE_BOUND


def capture(run: Callable[[], object], where: torch.device) -> Callable[[], object]:
    """What replays `run` from a CUDA graph; on a CPU, `run` itself: the same steps, eagerly."""
    if where.type == "cpu":
        return run
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run()  # compiles
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        torch.cuda.set_sync_debug_mode("error")
        try:
            run()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return graph.replay
