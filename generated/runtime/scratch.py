# Copied by mla-codegen from mla_codegen/runtime/scratch.py. Do not edit: `mla-codegen build` writes it anew.
"""Scratch of a call: one piece of memory, the caller's or allocated here, cut into parts that begin at 16 bytes.

Making a tensor takes the host longer than all else that a launch needs of it, so on a GPU the parts are not tensors but
addresses with an element type, as launches take them. On a CPU the interpreter and the emulator need tensors.
"""

from collections.abc import Sequence
from typing import Any

import torch

ALIGNMENT = 16  # bytes: where each part begins, so that a launch finds the same alignment every time
NUMBER = 4  # bytes of a number, fp32 or int32


class Floats:
    """`count` fp32 numbers at an address of `memory`, which is kept for as long as this is."""

    __slots__ = ("address", "count", "memory")
    dtype = torch.float32

    def __init__(self, address: int, count: int, memory: torch.Tensor):
        self.address = address
        self.count = count
        self.memory = memory

    def data_ptr(self) -> int:
        return self.address

    def ptr_range(self) -> int:
        """Bytes from the address on: what Triton asks for on AMD."""
        return self.count * NUMBER


class Integers(Floats):
    """int32 numbers likewise."""

    __slots__ = ()
    dtype = torch.int32


def carve(workspace: torch.Tensor | None, q: torch.Tensor, numbers: Sequence[int], integers: int = 0) -> list[Any]:
    """Parts of so many numbers each, fp32 but for the last `integers`, which are int32. They hold anything.

    workspace   contiguous memory of any type on q's device, at least `size_of(numbers)` bytes from a multiple of 16 on;
                None: allocated on the current stream

    Raises ValueError for a workspace that will not do; the message says what would.
    """
    if workspace is None:
        memory = torch.empty(size_of(numbers) // NUMBER, dtype=torch.float32, device=q.device)
        base = memory.data_ptr()
    else:
        memory = workspace
        base = memory.data_ptr()
        if (
            memory.nbytes < size_of(numbers)
            or base % ALIGNMENT
            or memory.device != q.device
            or not memory.is_contiguous()
        ):
            raise ValueError(_unfit(memory, base, q.device, size_of(numbers)))
    return addresses(memory, base, numbers, integers) if q.is_cuda else tensors(memory, base, numbers, integers)


def size_of(numbers: Sequence[int]) -> int:
    """Bytes of memory for parts of so many numbers."""
    size = 0
    for count in numbers:
        size += count * NUMBER + ALIGNMENT - 1 & -ALIGNMENT
    return size


def addresses(memory: torch.Tensor, base: int, numbers: Sequence[int], integers: int) -> list[Any]:
    """The parts as a launch on a GPU takes them."""
    parts = []
    for count in numbers:
        parts.append(Floats(base, count, memory))
        base += count * NUMBER + ALIGNMENT - 1 & -ALIGNMENT
    for index in range(len(parts) - integers, len(parts)):
        parts[index] = Integers(parts[index].address, parts[index].count, memory)
    return parts


def tensors(memory: torch.Tensor, base: int, numbers: Sequence[int], integers: int) -> list[Any]:
    """The same as tensors of one dimension."""
    flat = memory.view(-1).view(torch.uint8)
    parts = []
    for part in addresses(memory, 0, numbers, integers):
        parts.append(flat[part.address : part.address + part.ptr_range()].view(part.dtype))
    return parts


def _unfit(workspace: torch.Tensor, base: int, device: torch.device, size: int) -> str:
    is_now = f"workspace has {workspace.nbytes:,} bytes on {workspace.device}"
    wanted = f"this call needs {size:,} contiguous bytes on {device} from a multiple of {ALIGNMENT} on"
    if workspace.device != device or workspace.nbytes < size:
        return f"{is_now}; {wanted}"
    if not workspace.is_contiguous():
        return f"{is_now}, strides {workspace.stride()}; {wanted}"
    return f"{is_now}, {base % ALIGNMENT} bytes after a multiple of {ALIGNMENT}; {wanted}"
