# Copied by mla-codegen from mla_codegen/runtime/splits.py. Do not edit: `mla-codegen build` writes it anew.
"""The split rule: how many parts the KV of each query row is cut into.

Decode reads every KV row once, so time follows how evenly the compute units share the rows. A split costs a fixed time
(first loads, epilogue, its share of the merge), which is counted here in KV rows.
"""

MAX_SPLITS = 256
ROWS_PER_SPLIT = 160  # fixed cost of a split, as the KV rows that could be read in that time
ROWS_PER_MERGE = 4  # what stage 2 adds for each split of a query row, likewise


def choose_splits(programs: int, kv_len: int, places: int, block_n: int) -> int:
    """Splits that should finish `programs` x `kv_len` rows soonest, by `cost`.

    programs   programs of a call with one split: query rows x head blocks
    kv_len     KV rows of a request (of the longest, or the mean, as far as the host knows)
    places     programs that run at the same time on the device
    block_n    KV rows of a tile; a split takes whole tiles
    """
    tiles = max(1, -(-kv_len // block_n))
    best, best_cost = 1, float("inf")
    for splits in range(1, min(MAX_SPLITS, tiles) + 1):
        tiles_per_split = -(-tiles // splits)
        if splits > 1 and -(-tiles // tiles_per_split) < splits:
            continue  # as many rows a split with fewer splits
        now = cost(splits, programs, tiles, places, block_n)
        if now < best_cost:
            best, best_cost = splits, now
    return best


def cost(splits: int, programs: int, tiles: int, places: int, block_n: int) -> int:
    """Time of `splits` splits of `tiles` tiles, as the KV rows that a program could read in it.

    waves x (rows of a split + ROWS_PER_SPLIT) + ROWS_PER_MERGE x splits, with waves = ceil(programs x splits / places).
    The last wave counts whole even if it is not full.
    """
    waves = -(-programs * splits // places)
    rows = -(-tiles // splits) * block_n
    return waves * (rows + ROWS_PER_SPLIT) + (ROWS_PER_MERGE * splits if splits > 1 else 0)
