"""The work partition of a call: which query rows, heads and KV rows each of them takes."""

from dataclasses import dataclass

from mla_codegen.runtime.splits import MAX_SPLITS

BALANCED_ROWS = 256  # query rows of a call that a balanced kernel partitions: every program looks at all of them
# The ways, which are also the files of templates/work.
SINGLE, SPLITS, BALANCED = "single", "splits", "balanced"
# What the columns of a program are, which are also the files of templates/columns.
HEADS, QUERIES, LISTS = "heads", "queries", "lists"


def power_of_two(n: int) -> int:
    """The least power of two that is not below n."""
    return 1 << (n - 1).bit_length()


@dataclass(frozen=True)
class Work:
    """The work partition of one kernel.

    partition    single: stage 1 writes the output itself; splits: it writes a partial output for each split; balanced:
                 the tiles of all query rows are partitioned evenly over the programs
    splits       of each query row; None: known at run time, or balanced
    head_blocks  programs that split the heads of a query row; the columns of a request of `q_len`, if packed
    columns      of a program: heads of one query row, or query rows x heads of one request; lists: heads of one query
                 row, which has a list of KV rows
    """

    partition: str
    splits: int | None
    head_blocks: int
    columns: str

    @property
    def packed(self) -> bool:
        """A block of columns may take several query rows of a request."""
        return self.columns == QUERIES

    @property
    def columns_file(self) -> str:
        return f"columns/{self.columns}.jinja"

    @property
    def direct(self) -> bool:
        return self.partition == SINGLE

    @property
    def balanced(self) -> bool:
        return self.partition == BALANCED

    @property
    def merged(self) -> bool:
        """Partial outputs are merged by stage 2."""
        return not self.direct

    @property
    def any_splits(self) -> bool:
        """It takes the number of splits at run time."""
        return self.partition == SPLITS and self.splits is None

    @property
    def fixed_splits(self) -> bool:
        """There are several partial outputs, and how many is known when the kernel is written."""
        return self.partition == SPLITS and self.splits is not None

    @property
    def several_head_blocks(self) -> bool:
        return self.head_blocks > 1 and not self.packed

    @property
    def max_splits(self) -> int:
        return self.splits or MAX_SPLITS

    @property
    def max_rows(self) -> int:
        """Query rows of a call that a balanced kernel takes."""
        return BALANCED_ROWS

    @property
    def splits_name(self) -> str:
        """The number of splits as the kernels name it."""
        return "SPLITS" if self.splits else "splits"

    @property
    def place_found(self) -> str:
        """What a split's place among the partial outputs is worked out from, as source."""
        return "split, splits, " if self.any_splits else "split, "

    @property
    def splits_value(self) -> str:
        """The same as the host names it."""
        return "SPLITS.value" if self.splits else "splits"

    @property
    def scratch_arguments(self) -> str:
        """What the size of the scratch follows from."""
        return "total_q, splits" if self.any_splits else "total_q"

    @property
    def grid(self) -> str:
        """Programs of stage 1, as source."""
        if self.packed:
            factors = ["((batch + 1) * blocks + total_q * HEADS.value // BLOCK_H.value)"]
        else:
            factors = ["programs" if self.balanced else "total_q"]
        if self.several_head_blocks:
            factors.append("HEAD_BLOCKS.value")
        if self.partition == SPLITS:
            factors.append(self.splits_value)
        return " * ".join(factors)

    @property
    def program_is(self) -> str:
        """What a program of stage 1 stands for."""
        parts = ["block of columns" if self.packed else "query row"]
        if self.several_head_blocks:
            parts.append("head block")
        if not self.direct:
            parts.append("split")
        return ", ".join(parts)


@dataclass(frozen=True)
class Merge:
    """Stage 2: how the partial outputs of a query row and head are merged.

    all_splits     the most splits there can be, rounded up to a power of two; masked: some of them do not exist
    tile           splits that a program loads at a time: all of them, or a part
    warps          of a program
    columns        that a program merges; column_blocks: programs that split a head's columns
    at_launch      how many those are is decided at launch: `column_blocks` or one, and the tile with it
    dependent      it is launched as a dependent of stage 1, so that it is on the SMs early
    """

    all_splits: int
    masked: bool
    tile: int
    warps: int
    columns: int
    column_blocks: int = 1
    at_launch: bool = False
    dependent: bool = False

    @property
    def in_tiles(self) -> bool:
        """A program loads some splits at a time."""
        return self.at_launch or self.tile < self.all_splits

    @property
    def rounded_up(self) -> bool:
        """All splits are loaded at once, and some that do not exist with them."""
        return self.masked and not self.in_tiles

    @property
    def several_column_blocks(self) -> bool:
        return self.column_blocks > 1

    @property
    def by_columns(self) -> bool:
        """A program may have a part of the columns."""
        return self.at_launch or self.several_column_blocks

    @property
    def at_once_numbers(self) -> int:
        """Numbers of partial outputs that a program holds."""
        return self.tile * self.columns

    @property
    def compile_time_arguments(self) -> str:
        """Behind the arguments of stage 2, as source."""
        return ", COLUMN_BLOCKS: tl.constexpr" if self.at_launch else ""
