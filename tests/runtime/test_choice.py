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
    (256, 1024, None, "direct"),  # short requests: little to share out
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
