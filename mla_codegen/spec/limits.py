"""`limits:` of a spec: what the compiler may make of its kernels. The names are those that the inspection can hold."""

from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, create_model

from mla_codegen.catalog.limits import CLASSES, limit_names
from mla_codegen.catalog.releases import RELEASES
from mla_codegen.runtime.formats import KV_FORMATS

Bound = Annotated[float, Field(ge=0, allow_inf_nan=False)]

_MEANINGS = {
    "registers": "vector registers of a lane, AGPRs included (AMD); registers of a thread (NVIDIA)",
    "agprs": "accumulation registers of a lane (AMD)",
    "sgprs": "scalar registers of a wave (AMD)",
    "vgpr_spills": "vector registers that live in memory",
    "sgpr_spills": "scalar registers that live in memory",
    "scratch_bytes": "private memory of a lane; stack frame of a thread",
    "lds_bytes": "LDS / shared memory of a program",
    "code_bytes": "size of the machine code",
    "hot_loop_per_64_rows": "instructions of one wave in the hot loop for 64 KV rows, by class",
    "hot_loop_per_tile": "instructions of one wave in the hot loop for one tile, by class",
    "resident_programs_at_least": "programs that a CU / SM holds at a time, at least",
    "waves_per_simd_at_least": "waves (warps) that a SIMD (SM sub-partition) holds at a time, at least",
    "cndmask_total": "select instructions (v_cndmask, SEL) in the whole kernel; many of them: fp8 decoded in software",
}
# Stage 2 merges partial results: it has no hot loop, and few registers by nature, so it is held to these alone.
FOR_STAGE_2 = ("vgpr_spills", "sgpr_spills", "scratch_bytes", "lds_bytes")


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


def _optional(kind: Any, meaning: str) -> tuple[Any, Any]:
    return (kind | None, Field(default=None, description=meaning))


def _fields() -> dict[str, Any]:
    fields = {}
    for name in limit_names():
        meaning = _MEANINGS.get(name) or f"{name.removesuffix('_total')} instructions in the whole kernel"
        fields[name] = _optional(HotLoop if name.startswith("hot_loop_") else Bound, meaning)
    return fields


if TYPE_CHECKING:
    KVDtype = str
    TritonName = str
    HotLoop = Any

    class KvLimits(_Strict):
        """Upper bounds, and lower ones where the name ends in `_at_least`."""

else:
    KVDtype = Literal[tuple(KV_FORMATS)]
    TritonName = Literal[tuple(RELEASES)]
    _LOOP = {name: _optional(Bound, f"{name} instructions at most") for name in CLASSES}
    HotLoop = create_model("HotLoopLimits", __base__=_Strict, **_LOOP)
    KvLimits = create_model("KvLimits", __base__=_Strict, **_fields())


class OneRelease(KvLimits):
    """Limits for every kernel, and others for one KV element type."""

    per_kv: dict[KVDtype, KvLimits] = Field(
        default_factory=dict, description="limits for one KV element type; they go before those beside per_kv"
    )


class Limits(OneRelease):
    """Limits for every kernel, others for one KV element type, and others under one release of Triton."""

    per_triton: dict[TritonName, OneRelease] = Field(
        default_factory=dict, description="limits under one release of Triton; they go before all others"
    )

    def of(self, kv: str, *, stage_2: bool = False, triton: str | None = None) -> dict[str, Any]:
        """The limits in force for kernels of this KV element type, as `inspect.limits` takes them.

        triton   the release that compiles them (3.6); None: one without limits of its own
        """
        found: dict[str, Any] = {}
        for layer in (self, self.per_triton.get(triton or "")):
            for part in (layer, layer.per_kv.get(kv)) if layer else ():
                own = part.model_dump(exclude_none=True, exclude={"per_kv", "per_triton"}) if part else {}
                for name, bound in own.items():
                    found[name] = {**found.get(name, {}), **bound} if isinstance(bound, dict) else bound
        return {name: bound for name, bound in found.items() if not stage_2 or name in FOR_STAGE_2}
