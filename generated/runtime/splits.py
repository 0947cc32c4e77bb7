# Copied by mla-codegen from mla_codegen/runtime/splits.py. Do not edit: `mla-codegen build` writes it anew.
"""The split rule: how many parts the KV of each query row is cut into.

Decode reads every KV row once, so time follows how evenly the compute units share the rows, and how many of them it
takes to keep the memory busy. A split costs the time to its first tile, and its partial output is written and read
once more. Both are counted here in KV rows. The numbers are fitted to times on an H200 (16 heads, 1 to 256 requests
of 1,000 to 524,288 rows). With fp8 KV the rule's choice was within 4 % of the best count tried; with bf16 not all
that it chooses was timed.
"""

MAX_SPLITS = 256
MAX_WAVES = 16  # programs of a call with several splits, in times what the device runs at once: bounds the scratch
# A KV row's time where few programs read, as a part of its time where they fill the device: programs so large that a
# unit holds one of them, and others.
ALONE = (0.62, 0.56)
ROWS_PER_SPLIT = 90  # time from a program's start to its first tile, as KV rows of one of as many programs as fit
ROWS_PER_PARTIAL = 160  # traffic of a partial output, there and back, as KV rows


def choose_splits(programs: int, kv_len: int, units: int, resident: int, block_n: int) -> int:
    """Splits that should finish `programs` x `kv_len` rows soonest, by `cost`.

    programs   programs of a call with one split: query rows x head blocks
    kv_len     KV rows of a request (of the longest, or the mean, as far as the host knows)
    units      compute units of the device
    resident   programs that share a unit, so that units x resident programs run at the same time
    block_n    KV rows of a tile; a split takes whole tiles

    More than MAX_WAVES of programs are not taken: they would even out less than what the cost is good for, and every
    split takes memory for its partial output.
    """
    tiles = max(1, -(-kv_len // block_n))
    best, best_cost = 1, float("inf")
    for splits in range(1, min(MAX_SPLITS, tiles) + 1):
        if splits > 1 and programs * splits > MAX_WAVES * units * resident:
            break
        tiles_per_split = -(-tiles // splits)
        if splits > 1 and -(-tiles // tiles_per_split) < splits:
            continue  # as many rows a split with fewer splits
        now = cost(splits, programs, tiles, units, resident, block_n)
        if now < best_cost:
            best, best_cost = splits, now
    return best


def cost(splits: int, programs: int, tiles: int, units: int, resident: int, block_n: int) -> float:
    """Time of `splits` splits of `tiles` tiles, as the KV rows that a program could read in it.

    With waves = ceil(programs x splits / concurrent), where the last one counts whole even if it is not full:

        waves x (rows of a split x max(ALONE, crowding) + ROWS_PER_SPLIT)
        + programs x splits / concurrent x ROWS_PER_PARTIAL     (with several splits)

    crowding is the part of the device that works; with more programs than units, that of the fullest unit.
    """
    running, concurrent = programs * splits, units * resident
    crowding = running / concurrent if running <= units else min(1.0, -(-running // units) / resident)
    waves = -(-running // concurrent)
    rows = -(-tiles // splits) * block_n
    merge = running / concurrent * ROWS_PER_PARTIAL if splits > 1 else 0.0
    return waves * (rows * max(ALONE[resident > 1], crowding) + ROWS_PER_SPLIT) + merge
