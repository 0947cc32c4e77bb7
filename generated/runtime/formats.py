# Copied by mla-codegen from mla_codegen/runtime/formats.py. Do not edit: `mla-codegen build` writes it anew.
"""Element types and KV formats: one record of each, for the generator, the calls and the checks alike."""

import math
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Element:
    """A type of number.

    name      what a spec calls it
    dtype     torch's
    triton    the name that triton.language and Gluon give it, as in `tl.bfloat16`
    mangled   the name that Triton gives it in signatures of kernels, as in `*bf16`
    aliases   what else people call it, beside its name in torch
    infinite  it has infinities
    """

    name: str
    dtype: torch.dtype
    triton: str
    mangled: str
    aliases: tuple[str, ...] = ()
    infinite: bool = False

    @property
    def bytes(self) -> int:
        return self.dtype.itemsize

    @property
    def fp8(self) -> bool:
        """A float of 8 bits."""
        return self.dtype.is_floating_point and self.bytes == 1

    @property
    def top(self) -> int:
        """Exponent of the largest power of two that is one of its numbers."""
        return math.frexp(torch.finfo(self.dtype).max)[1] - 1

    @property
    def torch(self) -> str:
        """As source says it: `torch.bfloat16`."""
        return str(self.dtype)

    @property
    def pointer(self) -> str:
        """Type of a pointer to it in the signature of a kernel."""
        return f"*{self.mangled}"


_ELEMENTS = (
    Element("bf16", torch.bfloat16, "bfloat16", "bf16", infinite=True),
    Element("fp16", torch.float16, "float16", "fp16", ("half", "f16"), infinite=True),
    Element("fp32", torch.float32, "float32", "fp32", infinite=True),
    Element("fp64", torch.float64, "float64", "fp64", infinite=True),
    Element("fp8_e4m3fn", torch.float8_e4m3fn, "float8e4nv", "fp8e4nv", ("e4m3", "e4m3fn")),
    Element("fp8_e4m3fnuz", torch.float8_e4m3fnuz, "float8e4b8", "fp8e4b8", ("e4m3fnuz",)),
    Element("fp8_e5m2", torch.float8_e5m2, "float8e5", "fp8e5", infinite=True),
    Element("fp8_e5m2fnuz", torch.float8_e5m2fnuz, "float8e5b16", "fp8e5b16"),
    Element("int16", torch.int16, "int16", "i16"),
    Element("int32", torch.int32, "int32", "i32"),
)
ELEMENTS: dict[str, Element] = {element.name: element for element in _ELEMENTS}


@dataclass(frozen=True)
class KVFormat:
    """What a KV row is.

    name      what `dtypes: kv` of a spec says
    form      the key under which `kv_data` of `custom_kernel` offers it
    element   type of the row's numbers
    scaled    it comes with a scale: what 1.0 of its numbers stands for
    """

    name: str
    form: str
    element: Element
    scaled: bool = False

    @property
    def fp8(self) -> bool:
        return self.element.fp8

    def row_bytes(self, latent: int, rope: int) -> int:
        """Bytes of a row of so many latent and rope columns."""
        return (latent + rope) * self.element.bytes


_FORMATS = (
    KVFormat("bf16", "bf16", ELEMENTS["bf16"]),
    KVFormat("fp16", "fp16", ELEMENTS["fp16"]),
    KVFormat("fp8_e4m3fn", "fp8", ELEMENTS["fp8_e4m3fn"], scaled=True),
    KVFormat("fp8_e4m3fnuz", "fp8", ELEMENTS["fp8_e4m3fnuz"], scaled=True),
)
KV_FORMATS: dict[str, KVFormat] = {form.name: form for form in _FORMATS}
