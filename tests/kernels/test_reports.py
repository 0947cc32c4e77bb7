"""Every reported case is a test: its name stands in one of the test files."""

from pathlib import Path

import pytest
from harness import REPORTS

ELSEWHERE = {"unknown-arch": "test_calls.py", "fp8-on-sm80": "test_plan.py", "shared-memory-limit": "test_plan.py"}
HERE = Path(__file__).parent
LEFT = {"spills"}  # held by the limits of the shipped specs


@pytest.mark.parametrize("name", sorted(set(REPORTS) - set(ELSEWHERE) - LEFT))
def test_is_tested(name: str) -> None:
    texts = [path.read_text(encoding="utf-8") for path in HERE.glob("test_*.py") if path.name != Path(__file__).name]
    assert any(f'"{name}"' in text for text in texts)
