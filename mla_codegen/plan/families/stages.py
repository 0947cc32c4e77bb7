"""What a family says of the kernels in its files, so that they can be compiled without a GPU: arguments and options.

A launch tells Triton the types of its arguments and a few facts about their values; `Stage` states the same ahead of
time for the usual call: int32 ranges (paged KV: a table of pages), no `kv_visible`, a `kv_scale` where the KV is fp8.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from mla_codegen.runtime import arguments


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
    unaligned: frozenset[str] = frozenset()
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


def stage1(kernel: Any, options: Mapping[str, Any], *, pools: frozenset[str] = frozenset()) -> Stage:
    """Stage 1 of the common call. `pools`: see `Stage`."""
    left_out = ["kv_scale"] * (not kernel.format.scaled) + ["kv_indptr"] * kernel.paged
    left_out += ["topk_lens"] + ["attn_sink"] * kernel.direct if kernel.sparse else ["kv_visible"]
    return _stage(arguments.STAGE1, kernel, options, dict.fromkeys(left_out), pools, kernel.block_n)


def stage2(kernel: Any, options: Mapping[str, Any] | None = None, **constants: Any) -> list[Stage]:
    """The merge of the splits; none where stage 1 writes the output itself. `constants`: see `Stage`."""
    if kernel.direct:
        return []
    known = constants | ({"attn_sink": None} if kernel.sparse else {})
    return [_stage(arguments.STAGE2, kernel, {"num_warps": kernel.merge.warps, **FUSED, **(options or {})}, known)]


def _stage(
    name: str,
    kernel: Any,
    options: Mapping[str, Any],
    constants: Mapping[str, Any],
    pools: frozenset[str] = frozenset(),
    turn_rows: int | None = None,
) -> Stage:
    known = arguments.arguments(name, kernel.features)
    constants = {**dict.fromkeys(one.name for one in known if one.types == arguments.LAYOUT), **constants}
    signature = {one.name: one.types.format_map(kernel.facts) for one in known if one.name not in constants}
    unaligned = frozenset(one.name for one in known if one.varies or one.types == "fp32")  # not q's strides
    return Stage(name, signature, options, constants, unaligned, pools, turn_rows)
