"""Global memory: strided tensors, gaps, empty tensors, poison, and what the messages say."""

from __future__ import annotations

import pytest
import torch

from mla_codegen.check import emulate
from mla_codegen.check.emulate import memory
from mla_codegen.check.emulate.errors import EmulatorError

SOURCE = """
import torch
import triton
import triton.language as tl


@triton.jit
def copy(x, y, n, x_stride, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(y + i, tl.load(x + i * x_stride, mask=i < n, other=0.0), mask=i < n)


@triton.jit
def guarded(x, y, scale):
    value = tl.load(x)
    if scale is not None:
        value = value * tl.load(scale)
    tl.store(y, value)


@triton.jit
def element(x, y, i):
    tl.store(y, tl.load(x + i))


@triton.jit
def as_words(x, y):
    i = tl.arange(0, 4)
    words = x.to(tl.pointer_type(tl.int32), bitcast=True)
    tl.store(y + i, tl.load(words + i))


@triton.jit
def numbered(y, STEP: tl.constexpr, SAME: tl.constexpr):
    i = tl.arange(0, 4)
    program = tl.program_id(0)
    tl.store(y + program * STEP + i, 5 if SAME else program)


def scratch(n):
    return torch.empty(n), torch.empty_like(torch.zeros(n)), torch.zeros(n)
"""


@pytest.fixture(scope="module")
def module():
    return emulate.load(SOURCE, "memory_kernels")


def test_a_scalar_load_outside_is_an_error(module) -> None:
    """Also where the access has no elements to point at: a number, not a vector."""
    with pytest.raises(EmulatorError, match=r"load outside argument x.*offset 4 of 4 \(1 such, offsets 4 to 4\)"):
        module.element[(1,)](torch.zeros(4), torch.zeros(1), 4)
    with pytest.raises(EmulatorError, match=r"unwritten memory: argument x.*offset 2"):
        module.element[(1,)](emulate.poison(torch.empty(4)), torch.zeros(1), 2)


def test_strided_view_is_read_through_its_own_stride(module) -> None:
    big = torch.arange(40.0).view(8, 5)
    y = torch.empty(8)
    module.copy[(1,)](big[:, 2], y, 8, 5, BLOCK=8)
    assert torch.equal(y, big[:, 2])


def test_wrong_stride_hits_a_gap(module) -> None:
    big = torch.arange(40.0).view(8, 5)
    with pytest.raises(
        emulate.EmulatorError, match=r"(?s)gap of the strided argument x \[8\] float32.*stride"
    ) as caught:
        module.copy[(1,)](big[:, 2], torch.empty(8), 8, 4, BLOCK=8)
    assert "memory_kernels>:10 in copy" in str(caught.value)


def test_access_that_lands_in_another_argument_names_it(module) -> None:
    pool = torch.zeros(16)
    with pytest.raises(emulate.EmulatorError, match=r"(?s)outside argument y \[4\].*lies in argument x \[8\]"):
        module.copy[(1,)](pool[4:12], pool[:4], 8, 1, BLOCK=8)


def test_empty_tensor_may_not_be_touched(module) -> None:
    module.copy[(1,)](torch.empty(0), torch.empty(4), 0, 1, BLOCK=4)
    with pytest.raises(emulate.EmulatorError, match="the tensor is empty"):
        module.copy[(1,)](torch.empty(0), torch.empty(4), 4, 1, BLOCK=4)


def test_poison_is_nan_and_a_read_of_it_is_refused(module) -> None:
    x, y = emulate.poison(torch.zeros(8)), torch.zeros(8)
    assert torch.isnan(x).all()
    with pytest.raises(
        emulate.EmulatorError, match=r"load of unwritten memory: argument x \[8\] float32, element offset 0"
    ):
        module.copy[(1,)](x, y, 8, 1, BLOCK=8)
    module.copy[(1,)](torch.ones(8), x, 4, 1, BLOCK=8)
    assert emulate.unwritten(x).tolist() == [False] * 4 + [True] * 4
    assert emulate.unwritten(x[2:6]).tolist() == [False] * 2 + [True] * 2
    module.copy[(1,)](x, y, 4, 1, BLOCK=8)
    assert y.tolist() == [1.0] * 4 + [0.0] * 4


def test_poison_ends_when_host_code_writes(module) -> None:
    x = emulate.poison(torch.zeros(8))
    x.fill_(3.0)
    y = torch.zeros(8)
    module.copy[(1,)](x, y, 8, 1, BLOCK=8)
    assert y.tolist() == [3.0] * 8
    z = emulate.poison(torch.zeros(8))
    emulate.forget(z)
    module.copy[(1,)](z, y, 8, 1, BLOCK=8)
    assert torch.isnan(y).all()


@pytest.mark.parametrize(
    "dtype", [torch.int16, torch.int64, torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.bfloat16]
)
def test_poison_of_every_kind_of_type(dtype: torch.dtype) -> None:
    x = emulate.poison(torch.zeros(4).to(dtype))
    if dtype in (torch.int16, torch.int64):
        assert set(x.view(torch.uint8).tolist()) == {0x7F}
    else:
        assert torch.isnan(x.float()).all()


def test_poison_of_a_view_marks_its_elements_only(module) -> None:
    big = torch.arange(16.0)
    emulate.poison(big[4:8])
    emulate.poison(big[8:10])
    assert emulate.unwritten(big).tolist() == [False] * 4 + [True] * 6 + [False] * 6
    y = torch.zeros(4)
    module.copy[(1,)](big[:4], y, 4, 1, BLOCK=4)
    assert y.tolist() == [0.0, 1.0, 2.0, 3.0]
    with pytest.raises(emulate.EmulatorError, match="unwritten"):
        module.copy[(1,)](big[7:11], y, 4, 1, BLOCK=4)
    assert torch.isnan(big[8:10]).all()


def test_mark_ends_with_the_memory(module) -> None:
    x = emulate.poison(torch.zeros(8))
    view = x[2:]
    del x
    assert emulate.unwritten(view).all()
    address = view.untyped_storage().data_ptr()
    del view
    assert address not in memory._unwritten


def test_torch_empty_of_the_module_is_poisoned(module) -> None:
    first, second, third = module.scratch(4)
    assert torch.isnan(first).all()
    assert emulate.unwritten(first).all()
    assert emulate.unwritten(second).all()
    assert not emulate.unwritten(third).any()


def test_none_arguments_specialise(module) -> None:
    x, y = torch.tensor([3.0]), torch.zeros(1)
    module.guarded[(1,)](x, y, None)
    assert float(y) == 3.0
    module.guarded[(1,)](x, y, torch.tensor([2.0]))
    assert float(y) == 6.0


def test_pointer_cast_keeps_the_place(module) -> None:
    x = torch.arange(8, dtype=torch.int16)
    y = torch.zeros(4, dtype=torch.int32)
    module.as_words[(1,)](x, y)
    assert torch.equal(y, x.view(torch.int32))
    with pytest.raises(emulate.EmulatorError, match="element offset 3 of 3"):
        module.as_words[(1,)](x[:6], y)


def test_two_programs_must_not_store_different_values_at_one_place(module) -> None:
    y = torch.zeros(16, dtype=torch.int32)
    module.numbered[(4,)](y, STEP=4, SAME=False)
    assert y.tolist() == [0] * 4 + [1] * 4 + [2] * 4 + [3] * 4
    module.numbered[(4,)](y, STEP=2, SAME=True)
    with pytest.raises(emulate.EmulatorError, match=r"(?s)program 1, .*element offset 2 .* where program 0 stored"):
        module.numbered[(4,)](y, STEP=2, SAME=False)
