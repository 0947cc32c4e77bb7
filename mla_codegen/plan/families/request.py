"""What a family is asked: one kernel of a spec, its options, and the knobs that the spec may set for it."""

from dataclasses import dataclass
from typing import Any

from mla_codegen.catalog.targets import Target
from mla_codegen.spec.datamodel import Settings
from mla_codegen.spec.errors import Loc

BYTES = {"bf16": 2, "fp16": 2, "fp8_e4m3fn": 1, "fp8_e4m3fnuz": 1}
NAMES = ("family", "splits", "block_n", "block_h", "num_warps", "num_stages", "waves_per_eu", "column_blocks")
BALANCED_ROWS = 256  # query rows of a call that a balanced kernel shares out: every program looks at all of them
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
    """One kernel to resolve. `options`: optimisations in force; `splits`: known to `details`; None: at run time.

    page_size  KV rows of a page; None: the rows of a request are consecutive ones
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
    splits: int | None = None
    page_size: int | None = None

    @property
    def row(self) -> int:
        return self.latent + self.rope

    @property
    def is_fp8(self) -> bool:
        return self.kv.startswith("fp8")


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
