"""Remembered types are those that Triton makes, and what they do not fit is left to Triton."""

import subprocess
import sys

import pytest
import triton.language as tl
from triton.language import core

from mla_codegen.check import block_types

MAKE = """
import triton.language as tl
from triton.language import core
SHAPES = ([16], [16, 32], [tl.constexpr(16), 32], core.tuple([1, 1, 4]))
POINTER = core.pointer_type(tl.float32)
ELEMENTS = (tl.float32, tl.bfloat16, POINTER, core.pointer_type(tl.float32, const=True), core.pointer_type(tl.int8, 3))
def made():
    for element in (*ELEMENTS, *ELEMENTS):
        for kind in (element, *(core.block_type(element, shape) for shape in SHAPES)):
            tensor = core.tensor("handle", kind)
            yield str(kind), kind.is_block() and kind.numel, kind.scalar, tensor.handle, tensor.type, tensor.dtype
            yield str(tensor.shape), type(tensor.shape).__module__, str(tensor.numel), str(tensor)
said = [str(row) for row in made()]
"""


def test_they_are_what_triton_makes() -> None:
    """This process remembers already; another that does not says what is right."""
    block_types.remember()
    names: dict[str, list[str]] = {}
    exec(MAKE, names)
    done = subprocess.run([sys.executable, "-c", MAKE + "print(chr(10).join(said))"], text=True, capture_output=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == names["said"] and len(names["said"]) == 100
    with pytest.raises(AssertionError):  # as Triton has it
        core.block_type(tl.float32, (16,))
    assert core.block_type(tl.float32, [16]) == core.block_type(tl.float32, [16])
    assert core.block_type(tl.float32, [16]) != core.block_type(tl.float16, [16])


def test_a_tensor_of_another_form_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def more(self: core.tensor, handle: object, type: core.dtype) -> None:
        self.handle, self.type, self.dtype, self.shape, self.numel, self.more = handle, type, type.scalar, (), 1, handle

    monkeypatch.setattr(core.block_type, "__init__", core.block_type.__init__)
    monkeypatch.setattr(core.tensor, "__init__", more)
    monkeypatch.setattr(core.block_type.__init__, "remembers", False)
    block_types.remember()
    for handle in (1, 2):
        assert core.tensor(handle, tl.float32).more == handle
