# Copied by mla-codegen from mla_codegen/runtime/choice.py. Do not edit: `mla-codegen build` writes it anew.
"""Which kernel serves a call.

A shape of the spec serves the calls with its number of query rows whose KV length is nearest to its own (by ratio),
from half to twice its length. Every other call is served by the general kernels, with the splits of the split rule. All
kernels are right for every call; the choice decides speed only. A batch-invariant build has one kernel and no choice.
"""

from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from types import ModuleType

from .splits import choose_splits


@dataclass(frozen=True)
class General:
    """The kernels for any shape (module for one split, module for several), and what the split rule needs to know."""

    direct: str
    split: str
    places: int
    block_n: int
    head_blocks: int


class Choice:
    """The rule for one KV dtype of a build. `shapes`: query rows of a call -> KV rows of a request -> module."""

    def __init__(self, shapes: dict[int, dict[int, str]], general: General):
        self.ranges = {rows: _ranges(lengths) for rows, lengths in shapes.items()}
        self.general = general

    def choose(self, rows: int, kv_len: int) -> tuple[str, int | None]:
        """(module, splits if it takes them at run time) for `rows` query rows over about `kv_len` KV rows each."""
        for low, high, name in self.ranges.get(rows, ()):
            if low <= kv_len < high:
                return name, None
        splits = self.splits(rows, kv_len)
        return (self.general.direct, None) if splits == 1 else (self.general.split, splits)

    def kernels(self) -> list[tuple[str, int | None]]:
        """Every kernel of the rule, with a number of splits where it takes them at run time."""
        shaped = {name for ranges in self.ranges.values() for _, _, name in ranges}
        general: list[tuple[str, int | None]] = [(self.general.split, 2), (self.general.direct, None)]
        return general + [(name, None) for name in sorted(shaped)]

    def splits(self, rows: int, kv_len: int) -> int:
        """The split rule's answer for the general kernels."""
        general = self.general
        tiles = -(-kv_len // general.block_n)
        return _choose_splits(rows * general.head_blocks, tiles * general.block_n, general.places, general.block_n)

    def explain(self, rows: int, kv_len: int) -> tuple[str, int | None, str]:
        """The same as `choose`, and the reason in words."""
        name, splits = self.choose(rows, kv_len)
        for low, high, shaped in self.ranges.get(rows, ()):
            if name == shaped:
                return name, splits, f"its shape serves {rows} query rows over {low:.0f} to {high:.0f} KV rows"
        why = (
            f"the spec has no shape with {rows} query rows"
            if rows not in self.ranges
            else f"{kv_len} is not within half to twice the length of a shape with {rows} query rows"
        )
        rule = f"{why}; the split rule gives {splits or 1} for {self.general.places} programs at a time"
        return name, splits, rule


class OneKernel:
    """The rule of a batch-invariant build: one kernel serves every call of its KV dtype."""

    def __init__(self, name: str):
        self.name = name

    def choose(self, rows: int, kv_len: int) -> tuple[str, int | None]:
        """As `Choice.choose`; nothing of the call counts."""
        return self.name, None

    def explain(self, rows: int, kv_len: int) -> tuple[str, int | None, str]:
        """As `Choice.explain`."""
        return self.name, None, "the spec is batch-invariant: one kernel serves every call of this KV type"

    def kernels(self) -> list[tuple[str, int | None]]:
        """As `Choice.kernels`."""
        return [(self.name, None)]


def choice_of(tables: ModuleType, kv: str) -> Choice | OneKernel:
    """The rule that a build's tables give for a KV dtype."""
    if tables.BATCH_INVARIANT:
        return OneKernel(tables.INVARIANT[kv])
    return Choice(tables.SHAPES[kv], General(*tables.GENERAL[kv]))


_choose_splits = lru_cache(maxsize=4096)(choose_splits)


def _ranges(lengths: dict[int, str]) -> list[tuple[float, float, str]]:
    """(from, to, name): neighbours meet at their geometric mean, each reaching at most to half and twice its length."""
    ordered = sorted(lengths)
    meets = [(a * b) ** 0.5 for a, b in pairwise(ordered)]
    return [
        (max(low, length / 2), min(high, length * 2), lengths[length])
        for low, high, length in zip([0, *meets], [*meets, float("inf")], ordered, strict=True)
    ]
