"""Paged calls of single kernels, interpreted, emulated or on a GPU, in every way that their pages may be given."""

from types import ModuleType
from typing import Any

import torch
from harness import Got

from mla_codegen.check.reference import PagedCase, poisoned_scratch
from mla_codegen.plan.resolve import KernelPlan


def run(
    module: ModuleType,
    kernel: KernelPlan,
    case: PagedCase,
    form: str = "table",
    splits: int | None = None,
    *,
    kv_visible: torch.Tensor | None = None,
    **more: Any,
) -> Got:
    """(out, LSE) on the CPU of one call; `form` as in `PagedCase.lists`. The case is on the device to run on.

    more   arguments of `run` beside the case's, or in their place
    """
    rows = case.ragged
    device = rows.q.device
    shape = (rows.q.shape[0], kernel.heads, kernel.latent)
    given: dict[str, Any] = {} if splits is None else {"splits": splits}
    kv_indptr, kv_indices, kv_lens = case.lists(form)
    with poisoned_scratch():
        out = torch.empty(shape, dtype=torch.bfloat16, device=device)
        lse = torch.empty(shape[:2], dtype=torch.float32, device=device)
        given |= {
            "q": rows.q,
            "kv": case.kv,
            "qo_indptr": rows.qo_indptr,
            "kv_indptr": kv_indptr,
            "kv_indices": kv_indices,
            "kv_lens": kv_lens,
            "kv_visible": kv_visible,
            "kv_scale": rows.kv_scale,
            "sm_scale": rows.sm_scale,
            "out": out,
            "lse": lse,
        } | more
        module.run(**given)
    return given["out"].cpu(), given["lse"].cpu()
