"""One number of splits for all calls of a batch-invariant spec.

The number decides a query row's bits, so it may follow nothing that a call brings. What is left to choose it by are the
shapes that the spec names.
"""

import math
from collections.abc import Sequence

from mla_codegen.runtime.splits import MAX_SPLITS, cost


def shared_splits(shapes: Sequence[tuple[int, int]], units: int, resident: int, block_n: int) -> int:
    """The splits that lose least over all `shapes`, each against its own best number.

    shapes     (programs of a call with one split, KV rows of a request)
    units      compute units of the device; resident: programs that share one
    block_n    KV rows of a tile

    Least by the geometric mean of cost(splits) / least cost of the shape, the prices being the split rule's; the
    smallest such number.
    """
    counts = range(1, MAX_SPLITS + 1)
    works = [(programs, max(1, -(-kv_len // block_n))) for programs, kv_len in shapes]
    costs = [
        [cost(splits, programs, tiles, units, resident, block_n) for splits in counts] for programs, tiles in works
    ]
    losses = [sum(math.log(row[at] / min(row)) for row in costs) for at in range(MAX_SPLITS)]
    return counts[losses.index(min(losses))]
