"""What of a file one kernel needs."""

import ast

import pytest

from mla_codegen.inspect.excerpt import excerpt

TEXT = '''# a header that names a shape
"""The module's docstring."""

import triton
import triton.language as tl
from other import unused

HEADS = tl.constexpr(16)
WIDTH, ROPE = 512, 64
TOTAL = WIDTH + ROPE  # by way of another constant
IDLE = 3

if triton.__version__ < "3":
    HEADS = tl.constexpr(8)


@triton.jit
def inner(x):
    """Adds."""
    return x + TOTAL


@triton.jit
def first(x):
    # says why
    tl.store(x, inner(HEADS))


@triton.jit
def second(x, n: tl.constexpr = IDLE):
    """Nothing but this."""


def run(x):
    first[(1,)](x)
'''


def names(text: str) -> list[str]:
    return [getattr(node, "name", type(node).__name__) for node in ast.parse(text).body]


def test_what_is_reached_is_kept_in_order() -> None:
    cut = excerpt(TEXT, "first")
    assert names(cut) == ["Import", "Import", "Assign", "Assign", "Assign", "If", "inner", "first"]
    assert "Adds" not in cut and "#" not in cut and "unused" not in cut and "IDLE" not in cut


def test_another_kernel_has_another_excerpt() -> None:
    cut = excerpt(TEXT, "second")
    assert names(cut) == ["Import", "Import", "Assign", "Assign", "If", "second"]
    assert "IDLE = 3" in cut and "pass" in cut  # a default value; a body that was nothing but a docstring
    assert "HEADS" in cut and "TOTAL" not in cut  # conditionals are kept, whatever they do, and what they name


def test_changes_elsewhere_do_not_show() -> None:
    changed = TEXT.replace("names a shape", "names another").replace("IDLE = 3", "IDLE = 4").replace("# says why", "#")
    assert excerpt(changed, "first") == excerpt(TEXT, "first")
    assert excerpt(changed, "second") != excerpt(TEXT, "second")
    assert excerpt(TEXT.replace("WIDTH, ROPE = 512", "WIDTH, ROPE = 256"), "first") != excerpt(TEXT, "first")


def test_a_kernel_that_is_not_there() -> None:
    with pytest.raises(LookupError, match="does not define third"):
        excerpt(TEXT, "third")
