"""Which kernel serves a call.

A shape of the spec serves the calls with its number of query rows whose KV length is nearest to its own (by ratio),
from half to twice its length. Calls whose longest request is known to be much longer than the mean are served by the
balanced kernel, if the build has one; so are large calls, and those of paged KV, that do not say. Every other call is
served by the general kernels, with the splits of the split rule. All kernels are right for every call; the choice
decides speed only.

Calls with several query tokens a request go to the shape of as many, requests counted in place of query rows; without
one, to the general kernels whose blocks of columns take as many; without those, as above.
"""

from .splits import choose_splits

RAGGED = 1.25  # times the mean length: from there on a longest request makes a batch ragged
# Where nobody says how long the longest request is, a batch of so many KV rows, and so many a request, is taken for
# ragged: partitioning equal lengths costs it some 2 us, a fixed count of splits costs ragged ones up to half the speed.
UNSURE_KV_ROWS = 1 << 18
UNSURE_KV_LEN = 2048


class General:
    """The kernels for any shape, by name, and what the split rule needs to know.

    direct, split             for one split, and for a number of splits given at run time
    units, resident           compute units of the device, and programs that share one
    block_n, head_blocks      KV rows of a tile, and blocks that the heads are cut into
    balanced, balanced_rows   for requests of different lengths, or "", and the query rows that it takes
    """

    def __init__(
        self,
        *,
        direct: str,
        split: str,
        units: int,
        resident: int,
        block_n: int,
        head_blocks: int,
        balanced: str = "",
        balanced_rows: int = 0,
    ) -> None:
        self.direct = direct
        self.split = split
        self.units = units
        self.resident = resident
        self.block_n = block_n
        self.head_blocks = head_blocks
        self.balanced = balanced
        self.balanced_rows = balanced_rows


class Choice:
    """The rule for one KV dtype. `shapes`: query rows of a call -> KV rows of a request -> kernel, by name.

    paged    the KV is, so that the host knows no mean length, only a longest one
    tokens   query tokens of a request, more than one -> requests -> KV rows of a request -> kernel
    blocks   query tokens that a block of columns takes -> the kernels with such blocks; `head_blocks`: those of a
             request of as many
    """

    split_rule = staticmethod(choose_splits)

    def __init__(
        self,
        shapes: dict[int, dict[int, str]],
        general: General,
        paged: bool = False,
        tokens: dict[int, dict[int, dict[int, str]]] | None = None,
        blocks: dict[int, General] | None = None,
    ) -> None:
        self.paged = paged
        self.ranges = {rows: ranges_of(lengths) for rows, lengths in shapes.items()}
        self.general = general
        self.tokens = {
            q_len: {batch: ranges_of(lengths) for batch, lengths in shapes.items()}
            for q_len, shapes in (tokens or {}).items()
        }
        self.blocks = blocks or {}

    def choose(
        self, rows: int, kv_len: int, longest: int | None = None, batch: int | None = None, q_len: int | None = None
    ) -> tuple[str, int | None]:
        """(kernel, splits if it takes them at run time) for `rows` query rows.

        kv_len    KV rows of a request in the mean, as far as the host knows
        longest   KV rows of the longest request, if known
        batch     requests; None: as many as query rows
        q_len     query tokens of the request that has most, if known
        """
        batch = batch or rows
        q_len = max(q_len or 1, -(-rows // batch))  # a hint below the mean is none
        if q_len > 1 and (self.tokens or self.blocks):
            found = self.of_tokens(batch, q_len, kv_len if longest is None else longest)
            if found is not None:
                return found
        if self.is_ragged(rows, kv_len, longest):
            return self.general.balanced, None
        kv_len = kv_len if longest is None else longest
        for low, high, name in self.ranges.get(rows, ()):
            if low <= kv_len < high:
                return name, None
        splits = self.splits(rows, kv_len)
        return (self.general.direct, None) if splits == 1 else (self.general.split, splits)

    def of_tokens(self, batch: int, q_len: int, kv_len: int) -> tuple[str, int | None] | None:
        """The same by requests and their query tokens; None: no kernel is for several of these."""
        for low, high, name in self.tokens.get(q_len, {}).get(batch, ()):
            if low <= kv_len < high:
                return name, None
        if not self.blocks:
            return None
        block = min((size for size in self.blocks if size >= q_len), default=max(self.blocks))
        general = self.blocks[block]
        splits = self.splits(batch * -(-q_len // block), kv_len, general)
        return (general.direct, None) if splits == 1 else (general.split, splits)

    def is_ragged(self, rows: int, kv_len: int, longest: int | None) -> bool:
        """Whether a call is one for the balanced kernel."""
        if not 1 < rows <= self.general.balanced_rows:
            return False
        if longest is None:  # of paged KV the mean is a guess by the room for page numbers
            return self.paged or (kv_len >= UNSURE_KV_LEN and rows * kv_len >= UNSURE_KV_ROWS)
        return longest > RAGGED * kv_len

    def splits(self, rows: int, kv_len: int, general: General | None = None) -> int:
        """The split rule's answer for general kernels; `rows`: query rows, or as many tokens as their blocks take."""
        general = general or self.general
        tiles = -(-kv_len // general.block_n)
        programs = rows * general.head_blocks
        return self.split_rule(programs, tiles * general.block_n, general.units, general.resident, general.block_n)


def ranges_of(lengths: dict[int, str]) -> list[tuple[float, float, str]]:
    """(from, to, name): neighbours meet at their geometric mean, each reaching at most to half and twice its length."""
    ordered = sorted(lengths)
    meets = [(ordered[i - 1] * ordered[i]) ** 0.5 for i in range(1, len(ordered))]
    return [
        (max(low, length / 2), min(high, length * 2), lengths[length])
        for low, high, length in zip([0, *meets], [*meets, float("inf")], ordered, strict=True)
    ]
