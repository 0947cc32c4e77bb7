"""The split rule's properties, for any call and any device."""

from hypothesis import given
from hypothesis import strategies as st

from mla_codegen.runtime.splits import MAX_SPLITS, MAX_WAVES, ROWS_PER_MERGE, ROWS_PER_SPLIT, choose_splits

programs = st.integers(1, 4096)
lengths = st.integers(0, 1 << 20)
places = st.integers(1, 1024)
tiles = st.sampled_from([16, 32, 64, 128, 256])


def cost(splits: int, programs: int, kv_len: int, places: int, block_n: int) -> float:
    """As the rule's documentation counts it."""
    rows = -(-max(1, -(-kv_len // block_n)) // splits) * block_n
    waves = -(-programs * splits // places)
    return waves * (rows + ROWS_PER_SPLIT) + (ROWS_PER_MERGE * splits if splits > 1 else 0)


@given(programs, lengths, places, tiles)
def test_no_split_is_without_work(programs: int, kv_len: int, places: int, block_n: int) -> None:
    splits = choose_splits(programs, kv_len, places, block_n)
    assert 1 <= splits <= MAX_SPLITS
    tiles = max(1, -(-kv_len // block_n))
    assert -(-tiles // -(-tiles // splits)) == splits


@given(programs, lengths, places, tiles)
def test_scratch_is_bounded(programs: int, kv_len: int, places: int, block_n: int) -> None:
    splits = choose_splits(programs, kv_len, places, block_n)
    assert splits == 1 or programs * splits <= MAX_WAVES * places


@given(programs, lengths, places, tiles, st.integers(1, MAX_SPLITS))
def test_no_other_count_costs_less(programs: int, kv_len: int, places: int, block_n: int, other: int) -> None:
    splits = choose_splits(programs, kv_len, places, block_n)
    tiles = max(1, -(-kv_len // block_n))
    if other <= tiles and (other == 1 or programs * other <= MAX_WAVES * places):
        assert cost(splits, programs, kv_len, places, block_n) <= cost(other, programs, kv_len, places, block_n)


@given(lengths, places, tiles, st.integers(1, 64))
def test_whole_waves_of_programs_are_not_split(kv_len: int, places: int, block_n: int, waves: int) -> None:
    """Every place is busy to the end with one split: more would only cost."""
    assert choose_splits(places * waves, kv_len, places, block_n) == 1


@given(programs, places, tiles)
def test_one_tile_is_not_split(programs: int, places: int, block_n: int) -> None:
    assert {choose_splits(programs, kv_len, places, block_n) for kv_len in (0, 1, block_n)} == {1}


@given(st.integers(8, 1024), tiles)
def test_one_long_request_takes_the_device(places: int, block_n: int) -> None:
    splits = choose_splits(1, 1 << 20, places, block_n)
    assert splits > min(places, MAX_SPLITS) // 2
