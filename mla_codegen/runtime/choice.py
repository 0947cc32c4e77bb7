"""Which kernel serves a call.

A shape of the spec serves the calls with its number of query rows whose KV length is nearest to its own (by ratio),
from half to twice its length. Calls whose longest request is known to be much longer than the mean are served by the
balanced kernel, if the build has one; so are large calls, and those of paged KV, that do not say. Every other call is
served by the general kernels, with the splits of the split rule. All kernels are right for every call; the choice
decides speed only. A batch-invariant build has one kernel and no choice.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from types import ModuleType

from .splits import MAX_SPLITS, MAX_WAVES, choose_splits

# Query rows that make a large grid of any merge: of heads in one block, and of more.
MANY = (1024, 256)
RAGGED = 1.25  # times the mean length: from there on a longest request makes a batch ragged
# Where nobody says how long the longest request is, a batch of so many KV rows, and so many a request, is taken for
# ragged: sharing out equal lengths costs it some 2 us, a fixed number of splits costs ragged ones up to half the speed.
UNSURE_KV_ROWS = 1 << 18
UNSURE_KV_LEN = 2048


@dataclass(frozen=True)
class General:
    """The kernels for any shape (module for one split, module for several), and what the split rule needs to know.

    units, resident           compute units of the device, and programs that share one
    balanced, balanced_rows   module for requests of different lengths, or "", and the query rows that it takes
    """

    direct: str
    split: str
    units: int
    resident: int
    block_n: int
    head_blocks: int
    balanced: str = ""
    balanced_rows: int = 0


class Choice:
    """The rule for one KV dtype of a build. `shapes`: query rows of a call -> KV rows of a request -> module.

    `paged`: the KV is, so that the host knows no mean length, only a longest one.
    """

    def __init__(self, shapes: dict[int, dict[int, str]], general: General, paged: bool = False):
        self.paged = paged
        self.ranges = {rows: _ranges(lengths) for rows, lengths in shapes.items()}
        self.general = general

    def choose(self, rows: int, kv_len: int, longest: int | None = None) -> tuple[str, int | None]:
        """(module, splits if it takes them at run time) for `rows` query rows.

        kv_len    KV rows of a request in the mean, as far as the host knows
        longest   KV rows of the longest request, if known
        """
        if self.is_ragged(rows, kv_len, longest):
            return self.general.balanced, None
        kv_len = kv_len if longest is None else longest
        for low, high, name in self.ranges.get(rows, ()):
            if low <= kv_len < high:
                return name, None
        splits = self.splits(rows, kv_len)
        return (self.general.direct, None) if splits == 1 else (self.general.split, splits)

    def is_ragged(self, rows: int, kv_len: int, longest: int | None) -> bool:
        """Whether a call is one for the balanced kernel."""
        if not 1 < rows <= self.general.balanced_rows:
            return False
        if longest is None:  # of paged KV the mean is a guess by the room for page numbers
            return self.paged or (kv_len >= UNSURE_KV_LEN and rows * kv_len >= UNSURE_KV_ROWS)
        return longest > RAGGED * kv_len

    def kernels(self) -> list[tuple[str, int | None, int]]:
        """Every kernel of the rule, splits where it takes them at run time, and query rows to try it with.

        Where there is a balanced kernel, what merges any number of splits has one stage 2 for few query rows and one
        for many.
        """
        general = self.general
        shaped = {name for ranges in self.ranges.values() for _, _, name in ranges}
        found: list[tuple[str, int | None, int]] = [(general.direct, None, 1), (general.split, 2, 1)]
        if general.balanced:
            found.append((general.split, 2, MANY[general.head_blocks > 1]))
            found += [(general.balanced, None, rows) for rows in (1, general.balanced_rows)]
        return found + [(name, None, 1) for name in sorted(shaped)]

    def largest(self, total_q: int) -> Iterator[tuple[str, int, int | None]]:
        """(module, query rows, splits) of calls up to `total_q` query rows, the one with most scratch among them."""
        for rows, ranges in self.ranges.items():
            if rows <= total_q:
                yield from ((name, rows, None) for _, _, name in ranges)
        general = self.general
        yield general.direct, total_q, None
        if general.balanced:
            yield general.balanced, min(total_q, general.balanced_rows), None
        places = general.units * general.resident
        for splits in range(2, MAX_SPLITS + 1):
            yield general.split, min(total_q, MAX_WAVES * places // (general.head_blocks * splits)), splits

    def splits(self, rows: int, kv_len: int) -> int:
        """The split rule's answer for the general kernels."""
        general = self.general
        tiles = -(-kv_len // general.block_n)
        programs = rows * general.head_blocks
        return _choose_splits(programs, tiles * general.block_n, general.units, general.resident, general.block_n)

    def explain(self, rows: int, kv_len: int) -> tuple[str, int | None, str]:
        """The same as `choose` for requests of one length, and the reason in words."""
        name, splits = self.choose(rows, kv_len, kv_len)
        for low, high, shaped in self.ranges.get(rows, ()):
            if name == shaped:
                return name, splits, f"its shape serves {rows} query rows over {low:.0f} to {high:.0f} KV rows"
        why = (
            f"the spec has no shape with {rows} query rows"
            if rows not in self.ranges
            else f"{kv_len} is not within half to twice the length of a shape with {rows} query rows"
        )
        places = self.general.units * self.general.resident
        return name, splits, f"{why}; the split rule gives {splits or 1} for {places} programs at a time"


class OneKernel:
    """The rule of a batch-invariant build: one kernel serves every call of its KV dtype."""

    def __init__(self, name: str):
        self.name = name

    def choose(self, rows: int, kv_len: int, longest: int | None = None) -> tuple[str, int | None]:
        """As `Choice.choose`; nothing of the call counts."""
        return self.name, None

    def explain(self, rows: int, kv_len: int) -> tuple[str, int | None, str]:
        """As `Choice.explain`."""
        return self.name, None, "the spec is batch-invariant: one kernel serves every call of this KV type"

    def kernels(self) -> list[tuple[str, int | None, int]]:
        """As `Choice.kernels`."""
        return [(self.name, None, 1)]

    def largest(self, total_q: int) -> Iterator[tuple[str, int, int | None]]:
        """As `Choice.largest`."""
        yield self.name, total_q, None


def choice_of(tables: ModuleType, kv: str) -> Choice | OneKernel:
    """The rule that a build's tables give for a KV dtype."""
    if tables.BATCH_INVARIANT:
        return OneKernel(tables.INVARIANT[kv])
    return Choice(tables.SHAPES[kv], General(*tables.GENERAL[kv]), tables.PAGE_SIZE is not None)


_choose_splits = lru_cache(maxsize=4096)(choose_splits)


def _ranges(lengths: dict[int, str]) -> list[tuple[float, float, str]]:
    """(from, to, name): neighbours meet at their geometric mean, each reaching at most to half and twice its length."""
    ordered = sorted(lengths)
    meets = [(a * b) ** 0.5 for a, b in pairwise(ordered)]
    return [
        (max(low, length / 2), min(high, length * 2), lengths[length])
        for low, high, length in zip([0, *meets], [*meets, float("inf")], ordered, strict=True)
    ]
