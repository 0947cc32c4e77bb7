"""Read an AMD code object: the kernel's machine code, its descriptor, and where its arguments lie.

Sources: LLVM's "User Guide for AMDGPU Backend" (Kernel Descriptor, Code Object V4 and V5 Metadata, Initial Kernel
Execution State) and the ELF specification.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

ARCHES = {0x4C: "gfx942", 0x4F: "gfx950"}  # EF_AMDGPU_MACH of e_flags
METADATA = 32  # NT_AMDGPU_METADATA
# User SGPRs that the descriptor's kernel_code_properties ask for: bit, name, registers; in this order from s0 on.
_USER_SGPRS = (
    (0, "private_segment_buffer", 4),
    (1, "dispatch_ptr", 2),
    (2, "queue_ptr", 2),
    (3, "kernarg_segment_ptr", 2),
    (4, "dispatch_id", 2),
    (5, "flat_scratch_init", 2),
    (6, "private_segment_size", 1),
)


class CodeObjectError(ValueError):
    """A file that is no code object of a known kind, or one that asks for what is not modelled."""


@dataclass(frozen=True)
class Argument:
    """A kernel argument in the kernarg segment. `kind`: global_buffer, by_value, or hidden_* that the launch fills."""

    offset: int
    size: int
    kind: str


@dataclass(frozen=True)
class CodeObject:
    """One kernel of a code object.

    code             its machine code; `entry`: offset of the first instruction
    preload          4-byte words of the kernarg segment that hardware puts into SGPRs, `preload_from` the first; a
                     kernel with some is entered 256 bytes later
    user_sgprs       what stands in the SGPRs at the start: name -> (first register, registers)
    system_sgprs     register of the workgroup's number in each dimension that the kernel asks for
    denormals        fp32 denormals are kept, else flushed to zero
    """

    name: str
    arch: str
    code: bytes
    entry: int
    lds_bytes: int
    scratch_bytes: int
    kernarg_bytes: int
    arguments: tuple[Argument, ...]
    user_sgprs: dict[str, tuple[int, int]]
    system_sgprs: dict[int, int]
    preload: int
    preload_from: int
    denormals: bool


@dataclass(frozen=True)
class _Section:
    name: int
    kind: int
    address: int
    offset: int
    size: int
    link: int
    entry: int


def read(binary: bytes) -> CodeObject:
    """The only kernel of a code object."""
    if binary[:4] != b"\x7fELF":
        raise CodeObjectError("no ELF file")
    (flags,) = struct.unpack_from("<I", binary, 0x30)
    arch = ARCHES.get(flags & 0xFF)
    if arch is None:
        raise CodeObjectError(f"machine {flags & 0xFF:#x} is none of {', '.join(ARCHES.values())}")
    sections = list(_sections(binary))
    symbols = dict(_symbols(binary, sections))
    descriptors = [name for name in symbols if name.endswith(".kd")]
    if len(descriptors) != 1:
        raise CodeObjectError(f"{len(descriptors)} kernels in it, one is wanted")
    name = descriptors[0].removesuffix(".kd")
    address, _ = symbols[descriptors[0]]
    at = _file_offset(sections, address)
    lds, scratch, kernarg = struct.unpack_from("<III", binary, at)
    (to_entry,) = struct.unpack_from("<q", binary, at + 16)
    _, rsrc1, rsrc2, properties, preload = struct.unpack_from("<IIIHH", binary, at + 44)
    start, size = symbols[name]
    begin = _file_offset(sections, start)
    users, next_sgpr = _user_sgprs(properties, preload, rsrc2)
    return CodeObject(
        name=name,
        arch=arch,
        code=binary[begin : begin + size],
        entry=address + to_entry - start,
        lds_bytes=lds,
        scratch_bytes=scratch,
        kernarg_bytes=kernarg,
        arguments=_arguments(binary, sections, name),
        user_sgprs=users,
        system_sgprs=_system_sgprs(rsrc2, next_sgpr),
        preload=preload & 0x7F,
        preload_from=preload >> 7,
        denormals=_denormals(rsrc1),
    )


def _sections(binary: bytes) -> Iterator[_Section]:
    (table,) = struct.unpack_from("<Q", binary, 0x28)
    size, count = struct.unpack_from("<HH", binary, 0x3A)
    for number in range(count):
        name, kind, _, address, offset, length, link, _, _, entry = struct.unpack_from(
            "<IIQQQQIIQQ", binary, table + number * size
        )
        yield _Section(name, kind, address, offset, length, link, entry)


def _symbols(binary: bytes, sections: list[_Section]) -> Iterator[tuple[str, tuple[int, int]]]:
    """name -> (address, size)"""
    for section in sections:
        if section.kind not in (2, 11):  # SHT_SYMTAB, SHT_DYNSYM
            continue
        strings = sections[section.link].offset
        for at in range(section.offset, section.offset + section.size, 24):
            name, _, _, _, value, size = struct.unpack_from("<IBBHQQ", binary, at)
            end = binary.index(b"\0", strings + name)
            yield binary[strings + name : end].decode(), (value, size)


def _file_offset(sections: list[_Section], address: int) -> int:
    for section in sections:
        if section.address and section.address <= address < section.address + section.size and section.kind != 8:
            return section.offset + address - section.address
    raise CodeObjectError(f"no section holds address {address:#x}")


def _user_sgprs(properties: int, preload: int, rsrc2: int) -> tuple[dict[str, tuple[int, int]], int]:
    """(what the user SGPRs hold, the first SGPR behind them)"""
    found: dict[str, tuple[int, int]] = {}
    at = 0
    for bit, name, count in _USER_SGPRS:
        if properties >> bit & 1:
            found[name] = (at, count)
            at += count
    if preload & 0x7F:
        found["preload"] = (at, preload & 0x7F)
        at += preload & 0x7F
    asked = rsrc2 >> 1 & 0x1F
    if at > asked:
        raise CodeObjectError(f"{at} user SGPRs are filled, {asked} are asked for")
    return found, asked


def _system_sgprs(rsrc2: int, first: int) -> dict[int, int]:
    found: dict[int, int] = {}
    for dimension in range(3):
        if rsrc2 >> (7 + dimension) & 1:
            found[dimension] = first + len(found)
    return found


def _denormals(rsrc1: int) -> bool:
    """FLOAT_MODE of compute_pgm_rsrc1: rounding of fp32 (2 bits), of fp16 and fp64 (2), denormals of either (2 + 2)."""
    mode = rsrc1 >> 12 & 0xFF
    if mode & 0xF:
        raise CodeObjectError(f"rounding mode {mode & 0xF:#x}: only round to nearest even is modelled")
    if mode >> 4 & 3 not in (0, 3):
        raise CodeObjectError("fp32 denormals flushed on one side only are not modelled")
    return bool(mode >> 4 & 3)


def _arguments(binary: bytes, sections: list[_Section], name: str) -> tuple[Argument, ...]:
    for section in sections:
        if section.kind != 7:  # SHT_NOTE
            continue
        at, end = section.offset, section.offset + section.size
        while at < end:
            owner, length, kind = struct.unpack_from("<III", binary, at)
            text = at + 12 + (owner + 3) // 4 * 4
            if kind == METADATA:
                data, _ = _unpack(binary, text)
                for kernel in data["amdhsa.kernels"]:
                    if kernel[".name"] == name:
                        return tuple(Argument(a[".offset"], a[".size"], a[".value_kind"]) for a in kernel[".args"])
            at = text + (length + 3) // 4 * 4
    raise CodeObjectError(f"no metadata of kernel {name}")


def _unpack(data: bytes, at: int) -> tuple[Any, int]:
    """One msgpack value and where the next begins: what LLVM writes, which is maps, arrays, text, bool and numbers."""
    tag = data[at]
    at += 1
    if tag < 0x80:
        return tag, at
    if tag < 0x90:
        return _unpack_map(data, at, tag & 15)
    if tag < 0xA0:
        return _unpack_array(data, at, tag & 15)
    if tag < 0xC0:
        return data[at : at + (tag & 31)].decode(), at + (tag & 31)
    if tag in (0xC0, 0xC2, 0xC3):
        return {0xC0: None, 0xC2: False, 0xC3: True}[tag], at
    if tag >= 0xE0:
        return tag - 256, at
    numbers = {0xCC: ">B", 0xCD: ">H", 0xCE: ">I", 0xCF: ">Q", 0xD0: ">b", 0xD1: ">h", 0xD2: ">i", 0xD3: ">q"}
    if tag in numbers:
        size = struct.calcsize(numbers[tag])
        return struct.unpack_from(numbers[tag], data, at)[0], at + size
    sizes = {0xD9: ">B", 0xDA: ">H", 0xDB: ">I", 0xDC: ">H", 0xDD: ">I", 0xDE: ">H", 0xDF: ">I"}
    if tag not in sizes:
        raise CodeObjectError(f"metadata holds msgpack tag {tag:#x}")
    (count,) = struct.unpack_from(sizes[tag], data, at)
    at += struct.calcsize(sizes[tag])
    if tag >= 0xDE:
        return _unpack_map(data, at, count)
    if tag >= 0xDC:
        return _unpack_array(data, at, count)
    return data[at : at + count].decode(), at + count


def _unpack_map(data: bytes, at: int, count: int) -> tuple[dict[Any, Any], int]:
    found: dict[Any, Any] = {}
    for _ in range(count):
        key, at = _unpack(data, at)
        found[key], at = _unpack(data, at)
    return found, at


def _unpack_array(data: bytes, at: int, count: int) -> tuple[list[Any], int]:
    found = []
    for _ in range(count):
        value, at = _unpack(data, at)
        found.append(value)
    return found, at
