"""Puts `benchmarks/` on the path: its modules are scripts and what they share, no package."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
