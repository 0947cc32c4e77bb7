"""What a family says of the kernels in its files, so that they can be compiled without a GPU: arguments and options.

A launch tells Triton the types of its arguments and a few facts about their values; `Stage` states the same ahead of
time for the usual call: int32 ranges (paged KV: a table of pages), no `kv_visible`, a `kv_scale` where the KV is fp8.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

POINTER = {"bf16": "*bf16", "fp16": "*fp16", "fp8_e4m3fn": "*fp8e4nv", "fp8_e4m3fnuz": "*fp8e4b8", "int32": "*i32"}
POINTER |= {"int16": "*i16"}


@dataclass(frozen=True)
class Stage:
    """One kernel of a rendered file.

    kernel      its name in the file
    signature   argument -> type, in any order (`*bf16`, `i32`, `fp32`, `tensordesc<...>`)
    constants   argument -> value, for those that are None or known when it is compiled
    options     compiler options, as its launch gives them
    unaligned   arguments that are not known to be divisible by 16: numbers of no special kind
    pools       pointers to tensors that may be 2 GiB or larger; AMD compilers make another binary for those
    turn_rows   KV rows of one turn of the loop that multiplies; None: there is none (a merge of partial results)
    """

    kernel: str
    signature: Mapping[str, str]
    options: Mapping[str, Any]
    constants: Mapping[str, Any] = field(default_factory=dict)
    unaligned: frozenset[str] = frozenset(
        {"sm_scale", "batch", "q_len", "page_stride", "splits", "total_q", "programs"}
    )
    pools: frozenset[str] = frozenset()
    turn_rows: int | None = None

    @property
    def divisible(self) -> frozenset[str]:
        described = {name for name, kind in self.signature.items() if kind.startswith("tensordesc")}
        return frozenset(self.signature) - self.unaligned - described

    @property
    def pointers(self) -> frozenset[str]:
        return frozenset(name for name, kind in self.signature.items() if kind.startswith("*"))


# a * b + c is one instruction, rounded once: said at every launch, for releases of Triton differ in their default.
FUSED = {"enable_fp_fusion": True}


def options_of(kernel: Any) -> dict[str, Any]:
    """Compiler options of stage 1, as `run` passes them."""
    options = {"num_warps": kernel.num_warps, "num_stages": kernel.num_stages, **FUSED}
    return options | ({} if kernel.waves_per_eu is None else {"waves_per_eu": kernel.waves_per_eu})


def stage1(kernel: Any, kv: Mapping[str, str], *, turn_rows: int, pools: frozenset[str] = frozenset()) -> Stage:
    """Stage 1 of the common call. `kv`: the arguments in the place of the KV and their types; `pools`: see `Stage`."""
    results = {"out": POINTER[kernel.out], "lse": "*fp32"}
    partial = {"partial": "*fp32", "partial_lse": "*fp32"} | ({"shares": "*i32"} if kernel.balanced else {})
    at_run_time = ("total_q", "programs") if kernel.balanced else () if kernel.splits else ("splits",)
    table = {"kv_indices": "*i32", "kv_lens": "*i32", "page_stride": "i32"}
    left_out = ["kv_visible"] + ["kv_indptr"] * kernel.paged + ["kv_scale"] * (not kernel.kv.startswith("fp8"))
    return Stage(
        "stage1",
        {
            "q": POINTER[kernel.q], **kv, **(results if kernel.direct else partial),
            "qo_indptr": "*i32", **(table if kernel.paged else {"kv_indptr": "*i32"}),
            **({"kv_scale": "*fp32"} if kernel.kv.startswith("fp8") else {}),
            "sm_scale": "fp32", "batch": "i32", "q_len": "i32", "stride_qt": "i32", "stride_qh": "i32",
            **dict.fromkeys(at_run_time, "i32"),
        },
        options_of(kernel),
        dict.fromkeys(left_out),
        pools=pools,
        turn_rows=turn_rows,
    )  # fmt: skip


def stage2(kernel: Any, constants: Mapping[str, Any] | None = None) -> list[Stage]:
    """The merge of the splits; none where stage 1 writes the output itself. `constants`: see `Stage`."""
    if kernel.direct:
        return []
    signature = {"partial": "*fp32", "partial_lse": "*fp32", "out": POINTER[kernel.out], "lse": "*fp32"}
    more = {"shares": "*i32"} if kernel.balanced else {} if kernel.splits else {"splits": "i32"}
    return [Stage("stage2", signature | more, {"num_warps": kernel.stage2_warps, **FUSED}, constants or {})]
