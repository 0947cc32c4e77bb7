"""What a family is asked: one kernel of a spec, its options, and the knobs that the spec may set for it."""

from dataclasses import dataclass
from typing import Any

from mla_codegen.catalog.targets import Target
from mla_codegen.runtime.formats import KV_FORMATS, KVFormat
from mla_codegen.spec.datamodel import Settings
from mla_codegen.spec.errors import Loc

NAMES = ("family", "splits", "block_n", "block_h", "num_warps", "num_stages", "waves_per_eu", "column_blocks")
Layer = tuple[Loc, str, Settings | None]


@dataclass(frozen=True)
class Resolved:
    """A knob's value and where it came from: `shape`, `shape, per_kv`, `defaults`, `defaults, per_kv`, `automatic`."""

    value: Any
    source: str


class Knobs:
    """The settings that reach one kernel, innermost first, and what became of each."""

    def __init__(self, layers: list[Layer]):
        self.layers = layers
        self.resolved = {name: self._asked(name) for name in NAMES}

    def _asked(self, name: str) -> Resolved:
        for _, source, settings in self.layers:
            value = getattr(settings, name, None)
            if value is not None:
                return Resolved(value, source)
        return Resolved(None, "automatic")

    def take(self, name: str, automatic: Any) -> Any:
        """The value asked for, or else the automatic one, which is noted."""
        if self.resolved[name].value is None:
            self.resolved[name] = Resolved(automatic, "automatic")
        return self.resolved[name].value

    def loc(self, name: str) -> Loc:
        """The place of the setting, or of the innermost settings if nobody set it."""
        for loc, _, settings in self.layers:
            if getattr(settings, name, None) is not None:
                return (*loc, name)
        return next(loc for loc, _, settings in self.layers if settings is not None)


@dataclass(frozen=True)
class Request:
    """One kernel to resolve. `options`: optimisations in force.

    page_size  KV rows of a page; None: the rows of a request are consecutive ones, or nobody asks (sparse)
    q_len      query tokens of a request
    topk       KV rows of a query row's list; None: it sees a range of its request's
    """

    target: Target
    heads: int
    latent: int
    rope: int
    q: str
    kv: str
    out: str
    options: tuple[str, ...]
    knobs: Knobs
    page_size: int | None = None
    q_len: int = 1
    topk: int | None = None

    @property
    def sparse(self) -> bool:
        return self.topk is not None

    @property
    def columns(self) -> int:
        """Query tokens x heads of a request."""
        return self.q_len * self.heads

    @property
    def row(self) -> int:
        return self.latent + self.rope

    @property
    def format(self) -> KVFormat:
        return KV_FORMATS[self.kv]

    @property
    def row_bytes(self) -> int:
        """Bytes of a KV row."""
        return self.format.row_bytes(self.latent, self.rope)


@dataclass(frozen=True)
class Resources:
    """Tile and launch numbers. `resident`: programs that share a compute unit."""

    block_n: int
    block_h: int
    num_warps: int
    num_stages: int
    waves_per_eu: int | None
    shared_bytes: int
    resident: int
