# Copied by mla-codegen from mla_codegen/runtime/formats.py. Do not edit: `mla-codegen build` writes it anew.
"""Element types and KV formats: one record of each, for the generator, the calls and the checks alike.

The generator needs no torch and does not wait for its import: a dtype is looked up when a call or a check wants it.
"""

import math
import sys
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch as _torch


@dataclass(frozen=True)
class Element:
    """A type of number.

    name      what a spec calls it
    torch     its dtype as source says it: `torch.bfloat16`
    triton    the name that triton.language and Gluon give it, as in `tl.bfloat16`
    mangled   the name that Triton gives it in signatures of kernels, as in `*bf16`
    bytes     of a number
    largest   of a float: its largest number
    aliases   what else people call it, beside its name in torch
    infinite  it has infinities
    """

    name: str
    torch: str
    triton: str
    mangled: str
    bytes: int
    largest: float = 0.0
    aliases: tuple[str, ...] = ()
    infinite: bool = False

    @cached_property
    def dtype(self) -> "_torch.dtype":
        """torch's."""
        import torch

        found: torch.dtype = getattr(torch, self.torch.removeprefix("torch."))
        return found

    @property
    def fp8(self) -> bool:
        """A float of 8 bits."""
        return self.largest > 0 and self.bytes == 1

    @property
    def top(self) -> int:
        """Exponent of the largest power of two that is one of its numbers."""
        return math.frexp(self.largest)[1] - 1

    @property
    def pointer(self) -> str:
        """Type of a pointer to it in the signature of a kernel."""
        return f"*{self.mangled}"


_ELEMENTS = (
    Element("bf16", "torch.bfloat16", "bfloat16", "bf16", 2, (2 - 2**-7) * 2.0**127, infinite=True),
    Element("fp16", "torch.float16", "float16", "fp16", 2, 65504.0, ("half", "f16"), infinite=True),
    Element("fp32", "torch.float32", "float32", "fp32", 4, (2 - 2**-23) * 2.0**127, infinite=True),
    Element("fp64", "torch.float64", "float64", "fp64", 8, sys.float_info.max, infinite=True),
    Element("fp8_e4m3fn", "torch.float8_e4m3fn", "float8e4nv", "fp8e4nv", 1, 448.0, ("e4m3", "e4m3fn")),
    Element("fp8_e4m3fnuz", "torch.float8_e4m3fnuz", "float8e4b8", "fp8e4b8", 1, 240.0, ("e4m3fnuz",)),
    Element("fp8_e5m2", "torch.float8_e5m2", "float8e5", "fp8e5", 1, 57344.0, infinite=True),
    Element("fp8_e5m2fnuz", "torch.float8_e5m2fnuz", "float8e5b16", "fp8e5b16", 1, 57344.0),
    Element("uint8", "torch.uint8", "uint8", "u8", 1),
    Element("int16", "torch.int16", "int16", "i16", 2),
    Element("int32", "torch.int32", "int32", "i32", 4),
)
ELEMENTS: dict[str, Element] = {element.name: element for element in _ELEMENTS}


@dataclass(frozen=True)
class KVFormat:
    """What a KV row is.

    name      what `dtypes: kv` of a spec says
    form      the key under which `kv_data` of `custom_kernel` offers it
    element   type of the row's numbers
    scaled    it comes with a scale: what 1.0 of its numbers stands for
    group     of a record, which is bytes of several types: latent columns that share a scale; 0: the row is no record
    bits      of such a column: 8 are fp8, 4 are fp4 (e2m1), two columns a byte
    scale     bytes of such a scale
    tail      last latent columns of a record that are bf16 instead of fp8: rope columns that are value too
    spare     bytes behind a record's scales
    blocks    a page of records is its rows first and then their scales
    """

    name: str
    form: str
    element: Element
    scaled: bool = False
    group: int = 0
    bits: int = 8
    scale: int = 0
    tail: int = 0
    spare: int = 0
    blocks: bool = False

    @property
    def fp8(self) -> bool:
        """Its numbers are fp8, all of them under one scale."""
        return self.element.fp8

    @property
    def infinite(self) -> bool:
        """It may hold infinities: a record in its scales and in its bf16 columns."""
        return self.record or self.element.infinite

    @property
    def record(self) -> bool:
        return self.group > 0

    def code_bytes(self, latent: int) -> int:
        """Bytes of a record's columns that scales are for."""
        return (latent - self.tail) * self.bits // 8

    def groups(self, latent: int) -> int:
        """Scales of a record."""
        return (latent - self.tail) // self.group

    def scale_bytes(self, latent: int) -> int:
        """Bytes of a record's scales and of what follows them."""
        return self.groups(latent) * self.scale + self.spare

    def row_bytes(self, latent: int, rope: int) -> int:
        """Bytes of a row of so many latent and rope columns."""
        if self.record:
            others = (self.tail + rope) * ELEMENTS["bf16"].bytes
            return self.code_bytes(latent) + self.scale_bytes(latent) + others
        return (latent + rope) * self.element.bytes

    def width(self, latent: int, rope: int) -> int:
        """Elements of a row of the tensor: columns, or bytes of a record."""
        return self.row_bytes(latent, rope) // self.element.bytes

    def unfit(self, latent: int, rope: int) -> str:
        """Why a row of so many columns has no such form; nothing if it has."""
        if not self.record:
            return "" if rope else "without rope columns there are records alone whose rope is a part of the latent"
        if self.tail and rope:
            return f"its last {self.tail} latent columns are the rope: write `qk_rope_head_dim: 0`"
        if not self.tail and not rope:
            return "it has rope columns behind the latent"
        if latent <= self.tail or (latent - self.tail) % self.group:
            return f"its columns of {self.bits} bits come in groups of {self.group}"
        return ""


_FORMATS = (
    KVFormat("bf16", "bf16", ELEMENTS["bf16"]),
    KVFormat("fp16", "fp16", ELEMENTS["fp16"]),
    KVFormat("fp8_e4m3fn", "fp8", ELEMENTS["fp8_e4m3fn"], scaled=True),
    KVFormat("fp8_e4m3fnuz", "fp8", ELEMENTS["fp8_e4m3fnuz"], scaled=True),
    KVFormat("fp8_ds_mla", "fp8_ds_mla", ELEMENTS["uint8"], group=128, scale=4),
    KVFormat("mxfp4_ds_mla", "mxfp4_ds_mla", ELEMENTS["uint8"], group=32, bits=4, scale=1),
    KVFormat("fp8_ds_v4", "fp8_ds_v4", ELEMENTS["uint8"], group=64, scale=1, tail=64, spare=1, blocks=True),
)
KV_FORMATS: dict[str, KVFormat] = {form.name: form for form in _FORMATS}
