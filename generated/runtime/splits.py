# Copied by mla-codegen from mla_codegen/runtime/splits.py. Do not edit: `mla-codegen build` writes it anew.
"""The split rule: how many parts the KV of each query row is cut into.

Decode reads every KV row once, so time follows how evenly the compute units share the rows, and how many of them it
takes to keep the memory busy. A split costs the time to its first tile, and its partial output is written and read
once more. Both are counted here in KV rows. The numbers are fitted to an H200 (16 heads; fp8 and bf16 KV; 1 to 128
requests of 1,000 to 524,288 rows), where the rule's choice was within 4 % of the best count tried.
"""

MAX_SPLITS = 256
# A KV row's time where few programs read, as a part of its time where all places are taken: programs so large that a
# unit holds one of them, and others.
ALONE = (0.62, 0.56)
ROWS_PER_SPLIT = 90  # time from a program's start to its first tile, as KV rows of one of as many programs as fit
ROWS_PER_PARTIAL = 160  # traffic of a partial output, there and back, as KV rows


def choose_splits(programs: int, kv_len: int, units: int, resident: int, block_n: int) -> int:
    """Splits that should finish `programs` x `kv_len` rows soonest.

    programs   programs of a call with one split: query rows x head blocks
    kv_len     KV rows of a request (of the longest, or the mean, as far as the host knows)
    units      compute units of the device
    resident   programs that share a unit, so that units x resident places run at the same time
    block_n    KV rows of a tile; a split takes whole tiles

    Cost of s splits, with waves(s) = ceil(programs x s / places), where the last wave counts whole even if not full:

        waves(s) x (rows of a split x max(ALONE, crowding(s)) + ROWS_PER_SPLIT)
        + programs x s / places x ROWS_PER_PARTIAL     (if s > 1)

    crowding(s) is the part of the places that are taken; with more programs than units, that of the fullest unit.
    """
    places = units * resident
    alone = ALONE[resident > 1]
    tiles = max(1, -(-kv_len // block_n))
    best, best_cost = 1, float("inf")
    for splits in range(1, min(MAX_SPLITS, tiles) + 1):
        tiles_per_split = -(-tiles // splits)
        if splits > 1 and -(-tiles // tiles_per_split) < splits:
            continue  # as many rows a split with fewer splits
        running = programs * splits
        full = -(-running // units) / resident  # of the fullest unit's places
        crowding = running / places if running <= units else min(1.0, full)
        waves = -(-running // places)
        cost = waves * (tiles_per_split * block_n * max(alone, crowding) + ROWS_PER_SPLIT)
        cost += running / places * ROWS_PER_PARTIAL if splits > 1 else 0
        if cost < best_cost:
            best, best_cost = splits, cost
    return best
