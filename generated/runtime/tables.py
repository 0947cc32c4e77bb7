# Copied by mla-codegen from mla_codegen/runtime/tables.py. Do not edit: `mla-codegen build` writes it anew.
"""A build's tables: whether this runtime can read them, and the rule of each KV dtype that they give.

The rule itself is in `choice`. Here is what a whole build asks of it beside the choice: all kernels, those with most
scratch, and the reason in words.
"""

from collections.abc import Iterator, Sequence
from functools import lru_cache
from types import ModuleType

from .choice import Choice, General
from .splits import MAX_SPLITS, MAX_WAVES, choose_splits

# Of what tables, kernels and this runtime say to one another: the names in the tables, the arguments of `run` and
# `scratch`, what kernels import from here. It rises with every change after which older tables or kernels would fail.
VERSION = 4

# Query rows that make a large grid of any merge: of heads in one block, and of more.
MANY = (1024, 256)


def refuse_other_versions(tables: Sequence[ModuleType], build_command: str) -> None:
    """Raise ImportError if any build was written by another version of the generator than this runtime."""
    if strangers := [table for table in tables if getattr(table, "VERSION", 0) != VERSION]:
        stems = ", ".join(table.__name__ for table in strangers)
        specs = " ".join(dict.fromkeys(str(table.SPEC) for table in tables))
        raise ImportError(
            f"{stems}: built by another version of mla-codegen than the runtime beside it. Build all specs of this "
            f"package anew: `{build_command} {specs}`"
        )


class Shaped(Choice):
    """The rule of a build with kernels for its shapes."""

    split_rule = staticmethod(lru_cache(maxsize=4096)(choose_splits))  # lengths that grow by a row ask the same again

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
        for block in self.blocks.values():
            found += [(block.direct, None, 1), (block.split, 2, 1)]
            if general.balanced:
                found.append((block.split, 2, MANY[0]))
        shaped |= {name for by_batch in self.tokens.values() for ranges in by_batch.values() for _, _, name in ranges}
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
        concurrent = general.units * general.resident
        for splits in range(2, MAX_SPLITS + 1):
            yield general.split, min(total_q, MAX_WAVES * concurrent // (general.head_blocks * splits)), splits
        for q_len, by_batch in self.tokens.items():
            for batch, ranges in by_batch.items():
                yield from ((name, min(total_q, batch * q_len), None) for _, _, name in ranges)
        for q_len, block in self.blocks.items():
            yield block.direct, total_q, None
            concurrent = block.units * block.resident
            for splits in range(2, MAX_SPLITS + 1):
                requests = MAX_WAVES * concurrent // (block.head_blocks * splits)
                yield block.split, min(total_q, requests * q_len), splits

    def explain(self, rows: int, kv_len: int, q_len: int = 1) -> tuple[str, int | None, str]:
        """The same as `choose` for requests of one length and of `q_len` query tokens each, and the reason in words.

        rows   requests
        """
        if q_len > 1:
            return self._explain_tokens(rows, kv_len, q_len)
        name, splits = self.choose(rows, kv_len, kv_len)
        for low, high, shaped in self.ranges.get(rows, ()):
            if name == shaped:
                return name, splits, f"its shape serves {rows} query rows over {low:.0f} to {high:.0f} KV rows"
        why = (
            f"the spec has no shape with {rows} query rows"
            if rows not in self.ranges
            else f"{kv_len} is not within half to twice the length of a shape with {rows} query rows"
        )
        concurrent = self.general.units * self.general.resident
        return name, splits, f"{why}; the split rule gives {splits or 1} for {concurrent} programs at a time"

    def _explain_tokens(self, batch: int, kv_len: int, q_len: int) -> tuple[str, int | None, str]:
        name, splits = self.choose(batch * q_len, kv_len, kv_len, batch, q_len)
        call = f"{batch} requests of {q_len} query tokens"
        for low, high, shaped in self.tokens.get(q_len, {}).get(batch, ()):
            if name == shaped:
                return name, splits, f"its shape serves {call} over {low:.0f} to {high:.0f} KV rows"
        for size, block in self.blocks.items():
            if name in (block.direct, block.split):
                concurrent = block.units * block.resident
                why = f"the spec has no such shape for {call}; blocks of columns take {size} query tokens"
                rule = f"the split rule gives {splits or 1} for {concurrent} programs at a time"
                return name, splits, f"{why}; {rule}, to each request (blocks have no balanced kernel)"
        return name, splits, f"no block of columns takes several query tokens; as {batch * q_len} requests of one each"


class OneKernel:
    """The rule of a batch-invariant build: one kernel serves every call of its KV dtype."""

    def __init__(self, name: str):
        self.name = name

    def choose(self, *_: int | None) -> tuple[str, int | None]:
        """As `Choice.choose`; nothing of the call counts."""
        return self.name, None

    def explain(self, rows: int, kv_len: int, q_len: int = 1) -> tuple[str, int | None, str]:
        """As `Shaped.explain`."""
        why = "the spec is batch-invariant: one kernel serves every call of this KV type"
        if q_len > 1:
            why += ", and a program one query token, whose bits do not follow the request's others"
        return self.name, None, why

    def kernels(self) -> list[tuple[str, int | None, int]]:
        """As `Shaped.kernels`."""
        return [(self.name, None, 1)]

    def largest(self, total_q: int) -> Iterator[tuple[str, int, int | None]]:
        """As `Shaped.largest`."""
        yield self.name, total_q, None


def rule_of(tables: ModuleType, kv: str) -> Shaped | OneKernel:
    """The rule that a build's tables give for a KV dtype."""
    if tables.BATCH_INVARIANT:
        return OneKernel(tables.INVARIANT[kv])
    blocks = {q_len: General(**record) for q_len, record in tables.BLOCKS[kv].items()}
    paged = tables.PAGE_SIZE is not None and tables.TOPK is None
    return Shaped(tables.SHAPES[kv], General(**tables.GENERAL[kv]), paged, tables.TOKEN_SHAPES[kv], blocks)
