"""The data model of a spec: what a user may write, before any number is resolved."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    model_validator,
)
from pydantic_core import core_schema

from mla_codegen.catalog.targets import find_target
from mla_codegen.spec.limits import KVDtype, Limits, TritonName

FloatDtype = Literal["bf16", "fp16"]
Splits = Literal["auto"] | Annotated[int, Field(ge=1, le=1024)]


@dataclass(frozen=True)
class OneOf:
    """A whole number out of a list. (`Literal` would take True for 1 and 16.0 for 16.)"""

    numbers: tuple[int, ...]

    def _check(self, number: int) -> int:
        if number not in self.numbers:
            raise ValueError("not in the list")
        return number

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> core_schema.CoreSchema:
        return core_schema.no_info_after_validator_function(self._check, handler(source))

    def __get_pydantic_json_schema__(
        self, schema: core_schema.CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        return {"type": "integer", "enum": list(self.numbers)}


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class Settings(_Strict):
    """Knobs of a kernel. What is left out is inherited, and in the end chosen by the plan."""

    splits: Splits | None = Field(default=None, description="KV splits per query row; `auto` asks the split rule")
    block_n: Annotated[int, OneOf((16, 32, 64, 128, 256))] | None = Field(default=None, description="KV rows of a tile")
    block_h: Annotated[int, OneOf((16, 32, 64, 128))] | None = Field(
        default=None, description="columns of a program: heads, or query tokens x heads of a request"
    )
    num_warps: Annotated[int, OneOf((1, 2, 4, 8, 16))] | None = Field(
        default=None, description="warps of a stage-1 program"
    )
    num_stages: Annotated[int, Field(ge=1, le=8)] | None = Field(default=None, description="software pipelining depth")
    waves_per_eu: Annotated[int, Field(ge=0, le=8)] | None = Field(
        default=None, description="occupancy hint of AMD targets (0: none)"
    )
    column_blocks: Annotated[int, OneOf((1, 2, 4, 8, 16, 32))] | None = Field(
        default=None, description="programs of stage 2 that share a head's columns (families that have it)"
    )
    family: str | None = Field(default=None, description="template family; the target's best one if left out")
    optimizations: list[str] | None = Field(
        default=None,
        description="micro-optimisations by name (`mla-codegen list optimizations`). In a shape or per_kv, entries "
        "written +name and -name change the inherited list instead of replacing it",
    )


class Defaults(Settings):
    """Settings for every shape, and settings that apply to one KV element type only."""

    per_kv: dict[KVDtype, Settings] = Field(default_factory=dict, description="settings for one KV element type")


class Shape(Defaults):
    """One call shape that gets kernels of its own: `batch` requests of `q_len` query tokens over `kv_len` KV rows."""

    batch: Annotated[int, Field(ge=1, le=65536, description="requests of a call (query rows, where q_len is 1)")]
    q_len: Annotated[int, Field(ge=1, le=64)] = Field(
        default=1, description="query tokens of a request (multi-token prediction, speculative decoding)"
    )
    kv_len: Annotated[int, Field(ge=1, le=16_777_216, description="KV rows of a request (sparse KV: `topk` says it)")]

    @property
    def call(self) -> tuple[int, ...]:
        """(batch, kv_len), and q_len behind them if it is more than 1: how shapes are told apart."""
        return (self.batch, self.kv_len, self.q_len) if self.q_len > 1 else (self.batch, self.kv_len)


def spell(batch: int, kv_len: int, q_len: int = 1) -> str:
    """A shape as the command line has it: `64x8192`, with several query tokens a request `64x4x8192`."""
    return f"{batch}x{q_len}x{kv_len}" if q_len > 1 else f"{batch}x{kv_len}"


class Model(_Strict):
    """Dimensions of the attention."""

    num_heads: Annotated[int, Field(ge=1, le=128)] = Field(default=16, description="query heads on this device")
    kv_lora_rank: Annotated[int, OneOf((64, 128, 256, 512, 1024))] = Field(
        default=512, description="latent columns of a KV row: key and value"
    )
    qk_rope_head_dim: Annotated[int, OneOf((0, 16, 32, 64, 128, 256))] = Field(
        default=64,
        description="rope columns of a KV row: key only (0: those of a record that are a part of its latent)",
    )


def _bf16() -> list[KVDtype]:
    return ["bf16"]


class Dtypes(_Strict):
    """Element types. `kv` in order of preference: a call that offers several forms gets the first."""

    q: FloatDtype = Field(default="bf16", description="element type of q")
    kv: Annotated[list[KVDtype], Field(min_length=1)] = Field(
        default_factory=_bf16, description="element types of the KV rows, the preferred one first"
    )
    out: FloatDtype = Field(default="bf16", description="element type of the output")


PAGE_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)


class KVLayout(_Strict):
    """How the KV rows of a request lie in memory."""

    layout: Literal["ragged", "paged", "sparse"] = Field(
        default="ragged",
        description="ragged: consecutive rows of one tensor; paged: pages of a pool, in any order, that a table lists; "
        "sparse: rows of a pool, of which each query token has a list",
    )
    page_size: Annotated[int, OneOf(PAGE_SIZES)] | None = Field(
        default=None, description="KV rows of a page (paged; sparse, if records lie in blocks)"
    )
    topk: Annotated[int, Field(ge=1, le=65536)] | None = Field(
        default=None, description="entries of a query token's list of KV rows (sparse)"
    )

    @property
    def words(self) -> str:
        """` in pages of 64 rows`, ` by lists of 2048 rows`; nothing for ragged KV."""
        if self.topk is not None:
            return f" by lists of {self.topk} row{'s' if self.topk > 1 else ''}"
        return "" if self.page_size is None else f" in pages of {self.page_size} row{'s' if self.page_size > 1 else ''}"


def _own_name(target: str) -> str:
    """The target's own name where a GPU's is written; the rules report names that are neither."""
    found = find_target(target)
    return found.name if found else target


def _listed(data: Any) -> Any:
    """A sparse spec with the KV rows of its shapes, which are those of a list."""
    kv = data.get("kv") if isinstance(data, dict) else None
    if not isinstance(kv, dict) or kv.get("layout") != "sparse" or not isinstance(data.get("shapes"), list):
        return data
    known = {"kv_len": kv.get("topk", 1)}
    return data | {"shapes": [known | shape if isinstance(shape, dict) else shape for shape in data["shapes"]]}


class Spec(_Strict):
    """One deployment: a target, a model, and the shapes that must be fast. `name` is the file's stem."""

    _fill = model_validator(mode="before")(_listed)

    name: str
    target: Annotated[str, AfterValidator(_own_name)] = Field(
        description="the architecture to build for, or the name of a GPU (`mla-codegen list targets`)"
    )
    model: Model = Field(default=Model(), description="dimensions of the attention")
    dtypes: Dtypes = Field(default=Dtypes(), description="element types of q, the KV rows and the output")
    kv: KVLayout = Field(default=KVLayout(), description="how the KV rows of a request lie in memory")
    defaults: Defaults = Field(default=Defaults(), description="settings that every shape inherits")
    shapes: Annotated[list[Shape], Field(min_length=1)] = Field(
        description="the call shapes that get kernels of their own"
    )
    triton: TritonName | None = Field(
        default=None,
        description="the Triton release that will run the kernels; the installed one if left out (Gluon changes with "
        "every release, plain Triton is the same for all)",
    )
    batch_invariant: bool = Field(
        default=False,
        description="one kernel a KV type serves every call, so that a query row has the same bits whoever shares its "
        "batch; settings stand in `defaults` alone",
    )
    limits: Limits = Field(
        default=Limits(), description="what the compiler may make of the kernels (`mla-codegen inspect --check`)"
    )


def edits(entries: Iterable[str]) -> bool:
    """Whether a list of optimisations changes the inherited one (+name, -name) instead of replacing it."""
    return any(entry.startswith(("+", "-")) for entry in entries)


def apply_optimizations(inherited: list[str], entries: list[str] | None) -> list[str]:
    """The optimisations in force after one more layer of settings; None changes nothing."""
    if entries is None:
        return inherited
    if not edits(entries):
        return list(entries)
    names = list(inherited)
    for entry in entries:
        name = entry[1:]
        if entry[:1] == "+" and name not in names:
            names.append(name)
        elif entry[:1] == "-" and name in names:
            names.remove(name)
    return names
