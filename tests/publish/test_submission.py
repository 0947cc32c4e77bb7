"""What the server refuses: each alone is found, named and placed; what only resembles it is left alone."""

import pytest

from mla_codegen.publish.submission import MAX_BYTES, refusals

FINE = '''"""A submission."""

import torch
import triton
import triton.language as tl
from task import input_t, output_t

TABLE = {4: 2}
limit = 3


def custom_kernel(data: input_t) -> output_t:
    q, kv_data, *_ = data
    parts = []
    parts.append(torch.empty(q.shape[0]))
    local = {}
    local["a"] = parts
    q[0] = TABLE[4]
    compiled = torch.compile
    return parts[0]
'''


def test_a_plain_submission_is_not_refused() -> None:
    assert refusals(FINE) == []


CASES = {
    "too long": (f"# {'x ' * (MAX_BYTES // 2)}\n", "the server takes 1,000,000"),
    "letters in a comment": ("# one Stream\n", 'line 21: the letters "stream" are refused anywhere'),
    "letters in a name": ("def upstreams():\n    pass\n", 'letters "stream"'),
    "exec": ("exec('x = 1')\n", "line 21: running text as code is refused: exec"),
    "eval": ("eval('1')\n", "running text as code is refused: eval"),
    "compile": ("compile('1', '', 'eval')\n", "running text as code is refused: compile"),
    "import by name": ("__import__('os')\n", "running text as code is refused: __import__"),
    "packers": ("import zlib\n", "packed source is refused: import of zlib"),
    "unpacking": ("from base64 import b64decode\n", "packed source is refused: import of base64"),
    "packed text": (f"DATA = '{'QUJD' * 200}'\n", "packed source is refused: a string of 800 unbroken"),
    "packed bytes": (f"DATA = b'{'QUJD' * 200}'\n", "packed source is refused"),
    "pip": ("# run pip install triton\n", "installing packages is refused: 'pip install'"),
    "pip as a module": ("from pip import main\n", "installing packages or running commands"),
    "commands": ("import subprocess\n", "installing packages or running commands is refused: import of subprocess"),
    "other imports": ("import numpy\n", "import of numpy: only task, torch, triton are there"),
    "siblings": ("from .choice import Choice\n", "import of .choice"),
    "global": ("def f(x):\n    global last\n    last = x\n", "last is kept from one call to the next"),
    "a module's dict": ("def f(x):\n    TABLE[1] = x\n", "what f writes into TABLE is kept"),
    "a module's list": ("KEPT = []\ndef f(x):\n    KEPT.append(x)\n", "what f puts into KEPT is kept"),
    "a function's attribute": ("def f(x):\n    f.last = x\n", "what f writes into f is kept"),
    "a cache": (
        "from torch import lru_cache\n@lru_cache(maxsize=1)\ndef f(n):\n    return torch.empty(n)\n",
        "what f returns is kept",
    ),
    "a default argument": ("def f(x, seen={}):\n    return seen\n", "a default argument of f is kept"),
    "not Python": ("def f(:\n", "line 21: not Python"),
}


@pytest.mark.parametrize("name", CASES)
def test_it_is_found_and_said(name: str) -> None:
    text, said = CASES[name]
    found = refusals(FINE + text)
    assert len(found) == 1, found
    assert said in found[0]


def test_all_reasons_come_at_once() -> None:
    found = refusals(FINE + "import os\nexec('1')\n# streams\n")
    assert len(found) == 3
