"""Which calls go to the balanced kernel: the longest request far above the mean, or large and nothing said."""

import pytest

from mla_codegen.runtime.choice import General
from mla_codegen.runtime.tables import MANY, Shaped

SHAPES = {64: {8192: "b64_kv8192"}, 4: {1024: "b4_kv1024"}}
GENERAL = {"direct": "direct", "split": "split", "units": 132, "resident": 2, "block_n": 64, "head_blocks": 1}
BALANCED = {**GENERAL, "balanced": "balanced", "balanced_rows": 256}

CALLS = [
    # rows, mean, longest, kernel
    (64, 8192, 8192, "b64_kv8192"),
    (64, 8192, 10240, "b64_kv8192"),  # 1.25 times the mean
    (64, 8192, 10241, "balanced"),
    (64, 8192, None, "balanced"),
    (64, 4095, None, "split"),  # less than 2^18 rows in all
    (256, 1024, None, "direct"),  # short requests: little to split
    (4, 1024, None, "b4_kv1024"),
    (4, 1024, 4096, "balanced"),
    (1, 100, 500_000, "split"),  # alone: nothing to balance
    (257, 8192, 100_000, "direct"),  # more query rows than the balanced kernel looks at
    (8, 100_000, 8192, "split"),  # a pool with more rows than the requests have
]


@pytest.mark.parametrize(("rows", "mean", "longest", "kernel"), CALLS)
def test_ragged_calls_are_balanced(rows: int, mean: int, longest: int | None, kernel: str) -> None:
    choice = Shaped(SHAPES, General(**BALANCED))
    assert choice.choose(rows, mean, longest)[0] == kernel


def test_a_build_without_one_goes_by_the_longest() -> None:
    choice = Shaped(SHAPES, General(**GENERAL))
    assert choice.choose(64, 1024, 8192)[0] == "b64_kv8192"
    assert choice.choose(64, 8192)[0] == "b64_kv8192"
    assert "balanced" not in {name for name, _, _ in choice.kernels()}


def test_every_kernel_is_tried_with_few_and_with_many_rows() -> None:
    choice = Shaped(SHAPES, General(**BALANCED))
    tried = choice.kernels()
    assert {(name, rows) for name, _, rows in tried} == {
        ("direct", 1), ("split", 1), ("split", MANY[0]), ("balanced", 1), ("balanced", 256), ("b64_kv8192", 1),
        ("b4_kv1024", 1),
    }  # fmt: skip


TOKENS = {2: {8: {4096: "b8_q2"}}, 4: {64: {8192: "b64_q4"}}}
BLOCKS = {
    2: General(**GENERAL | {"direct": "q2_direct", "split": "q2"}),
    4: General(**GENERAL | {"direct": "q4_direct", "split": "q4"}),
}

CALLS_OF_TOKENS = [
    # rows, mean, longest, requests, hint, kernel
    (256, 8192, None, 64, None, "b64_q4"),  # known by the rows alone
    (170, 8192, 8192, 64, 4, "b64_q4"),  # fewer tokens than the hint says
    (256, 8192, 8192, 64, 1, "b64_q4"),  # a hint below the mean is none
    (16, 4096, None, 8, None, "b8_q2"),
    (64, 8192, 8192, 64, 4, "b64_q4"),  # some have none
    (64, 8192, 8192, 64, None, "b64_kv8192"),
    (64, 8192, 8192, 64, 1, "b64_kv8192"),
    (192, 8192, None, 64, None, "q4"),  # 3 tokens take the blocks of 4
    (128, 8192, None, 64, None, "q2"),
    (640, 8192, None, 64, None, "q4"),  # 10 take several blocks
    (256, 100, None, 64, None, "q4_direct"),
    (256, 8192, 100_000, 64, None, "q4"),  # ragged: blocks have no balanced kernel
]


@pytest.mark.parametrize(("rows", "mean", "longest", "batch", "hint", "kernel"), CALLS_OF_TOKENS)
def test_calls_of_several_tokens(
    rows: int, mean: int, longest: int | None, batch: int, hint: int | None, kernel: str
) -> None:
    choice = Shaped(SHAPES, General(**GENERAL), False, TOKENS, BLOCKS)
    assert choice.choose(rows, mean, longest, batch, hint)[0] == kernel


def test_a_build_without_blocks_counts_query_rows() -> None:
    choice = Shaped(SHAPES, General(**GENERAL))
    assert choice.choose(64, 8192, 8192, 16, 4)[0] == "b64_kv8192"


def test_every_kernel_of_blocks_is_tried() -> None:
    tried = {name for name, _, _ in Shaped(SHAPES, General(**GENERAL), False, TOKENS, BLOCKS).kernels()}
    assert {"q2", "q2_direct", "q4", "q4_direct", "b8_q2", "b64_q4"} <= tried


@pytest.mark.parametrize("rows", [1, 7, 64, 500, 4096])
def test_scratch_is_enough_for_several_tokens(rows: int) -> None:
    """What `largest` names covers every call: by query rows x splits of each kernel."""
    choice = Shaped(SHAPES, General(**GENERAL), False, TOKENS, BLOCKS)
    most: dict[str, int] = {}
    for name, query_rows, splits in choice.largest(rows):
        most[name] = max(most.get(name, 0), query_rows * (splits or 1))
    for total in {1, rows // 3 + 1, rows}:
        for batch in {1, max(1, total // 4), max(1, total // 2), total}:
            for kv_len in (1, 500, 8192, 200_000):
                for hint in (None, 1, 3, 9):
                    name, splits = choice.choose(total, kv_len, kv_len, batch, hint)
                    assert total * (splits or 1) <= most[name], (name, total, batch, kv_len, hint)
