"""Whether a block of columns takes several query tokens of a request, or one as with a single token.

A block reads the KV once for all of its columns, which saves time wherever KV traffic is the time. Small calls wait for
latencies instead, and more programs with fewer columns each are faster there.
"""

from collections.abc import Callable
from dataclasses import replace

from mla_codegen.plan.families.base import Family
from mla_codegen.plan.families.request import Knobs, Request, Resources
from mla_codegen.plan.work import HEADS, LISTS, QUERIES
from mla_codegen.runtime.splits import choose_splits, cost

# An estimate: what one more query token costs that reads the same KV rows at the same time, much of it from L2. On an
# H200 the Hopper kernels of 16 heads took 1.25 and 2.4 times as long with 2 and 4 query tokens (bf16, 64 x 8192).
NEXT_TOKEN = 0.5


def columns_of(
    request: Request, family: Family, resources: Resources, shape: tuple[int, int] | None, again: Callable[[], Knobs]
) -> tuple[str, Request, Resources, str | None]:
    """(what the columns of a program are, the request and its numbers, why they are of one query token).

    The reason is None where they are of several, or where a request has one token. Nothing is estimated without a shape
    (batch, kv_len), nor where the spec sets `block_h`.

    again   gives the settings anew: with one token a program they are chosen for its heads alone
    """
    if request.sparse:
        return LISTS, request, resources, None
    if request.q_len == 1:
        return HEADS, request, resources, None
    alone = replace(request, q_len=1, knobs=again())
    one_token = family.resources(alone)
    why = family.unpacked(request, resources)
    if why is not None:
        return HEADS, request, resources, why
    if shape is None or request.knobs.resolved["block_h"].source != "automatic" or not isinstance(one_token, Resources):
        return QUERIES, request, resources, None
    packed_time = _time(request, family, resources, shape, -(-request.columns // resources.block_h), 1)
    alone_time = _time(request, family, one_token, shape, -(-request.heads // one_token.block_h), request.q_len)
    if packed_time <= alone_time:
        return QUERIES, request, resources, None
    alone.knobs.take("family", family.name)
    batch, kv_len = shape
    why = f"{batch} requests of {kv_len} KV rows are faster with a program for each query token, by the plan's estimate"
    return HEADS, alone, one_token, why


def _time(
    request: Request, family: Family, resources: Resources, shape: tuple[int, int], blocks: int, tokens: int
) -> float:
    """An estimate to compare: time as KV rows that a compute unit could read. `tokens` that each read all KV rows."""
    batch, kv_len = shape
    device = (request.target.compute_units, resources.resident, resources.block_n)
    programs, tiles = batch * blocks * tokens, max(1, -(-kv_len // resources.block_n))
    splits = choose_splits(programs, kv_len, *device)
    repeated = (1 + NEXT_TOKEN * (tokens - 1)) / tokens
    row_time = family.row_time(request, resources) * resources.resident
    return cost(splits, programs, tiles, *device) * row_time * repeated
