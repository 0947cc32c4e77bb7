"""Loading of files: what they may import, what their host code sees, and what a launch accepts."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from mla_codegen.check import emulate

FILE = """
import math
import torch
import triton
import triton.language as tl

ROWS = tl.constexpr(4)


@triton.jit(do_not_specialize=["n"])
def fill(y, n, VALUE: tl.constexpr, pair):
    low, high = pair
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    tl.store(y + row, VALUE + low + high + tl.num_programs(0) + n, mask=row < y_rows())


@triton.jit
def y_rows():
    return 7


def run(n):
    out = torch.empty(7, dtype=torch.int32)
    fill[lambda meta: (triton.cdiv(7, ROWS.value),)](out, n, VALUE=math.floor(1.5), pair=(10, 100), num_warps=4)
    return out
"""


def test_a_file_runs_unmodified(tmp_path: Path) -> None:
    path = tmp_path / "kernels.py"
    path.write_text(FILE)
    module = emulate.load(path, "kernels")
    assert module.run(5).tolist() == [118] * 7
    assert module.__file__ == str(path)
    assert "emulate" not in repr(sys.modules["triton"])


def test_nothing_outside_is_patched() -> None:
    import triton
    import triton.language as tl

    before = (triton.jit, tl.load, torch.empty, tl.constexpr)
    emulate.load(FILE, "kernels").run(1)
    assert before == (triton.jit, tl.load, torch.empty, tl.constexpr)


def test_one_file_may_import_another() -> None:
    steps = emulate.load(
        "import triton\nimport triton.language as tl\n\n\n@triton.jit\ndef twice(x):\n    return x * 2\n", "steps"
    )
    main = "import triton\nimport triton.language as tl\nfrom kernels.steps import twice\n\n\n"
    main += "@triton.jit\ndef kernel(y):\n    tl.store(y, twice(tl.load(y)))\n"
    module = emulate.load(main, "main", package={"kernels.steps": steps})
    y = torch.tensor([4.0])
    module.kernel[(1,)](y)
    assert float(y) == 8.0
    relative = emulate.load(
        main.replace("from kernels.steps", "from .steps").replace("\n\n\n", "\nfrom . import steps as again\n\n\n"),
        "kernels.main",
        package={"kernels.steps": steps},
    )
    relative.kernel[(1,)](y)
    assert float(y) == 16.0
    with pytest.raises(emulate.EmulatorError, match=r"relative import of 'kernels.other'"):
        emulate.load("from .other import x\n\n", "kernels.main")


def test_errors_of_imports_and_launches() -> None:
    with pytest.raises(emulate.EmulatorError, match="import of triton"):
        emulate.load("import triton.profiler\n\n", "bad")
    with pytest.raises(emulate.EmulatorError, match="architecture 'sm_70' is not modelled"):
        emulate.load(FILE, "kernels", arch="sm_70")
    module = emulate.load(FILE, "kernels")
    y = torch.zeros(7, dtype=torch.int32)
    with pytest.raises(emulate.EmulatorError, match=r"got \['num_warsp'\], which are neither"):
        module.fill[(1,)](y, 1, VALUE=1, pair=(1, 2), num_warsp=4)
    with pytest.raises(emulate.EmulatorError, match="launch of fill: missing a required argument: 'n'"):
        module.fill[(1,)](y, VALUE=1, pair=(1, 2))
    with pytest.raises(emulate.EmulatorError, match="fill is a device function"):
        module.fill(y, 1, 1, (1, 2))
    with pytest.raises(emulate.EmulatorError, match="argument n of type str"):
        module.fill[(1,)](y, "one", VALUE=1, pair=(1, 2))


def test_assembly_references_import_without_triton() -> None:
    code = "import sys, mla_codegen.check.emulate.asm; sys.exit('triton' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
