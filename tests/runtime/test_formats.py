"""The records of element types against torch, which they do without."""

import pytest
import torch
import triton.language as tl

from mla_codegen.runtime.formats import ELEMENTS, Element


@pytest.mark.parametrize("element", ELEMENTS.values(), ids=lambda element: element.name)
def test_an_element_is_torchs_and_tritons(element: Element) -> None:
    assert str(element.dtype) == element.torch and element.dtype.itemsize == element.bytes
    assert getattr(tl, element.triton).name == (element.mangled if element.largest else element.triton)
    assert (element.largest > 0) == element.dtype.is_floating_point
    if element.largest:
        assert torch.finfo(element.dtype).max == element.largest
        assert 1 <= element.largest / 2.0**element.top < 2
        grown = torch.tensor([float("inf")], dtype=torch.float64).to(element.dtype).double()
        assert bool(grown.isinf()) == element.infinite
