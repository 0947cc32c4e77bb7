"""Stand-ins for the `triton` modules that an emulated file imports. Nothing of the real package is patched."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language.core as tl
from triton.experimental.gluon.language import _layouts as gluon_layouts
from triton.experimental.gluon.language.amd import AMDMFMALayout, AMDWMMALayout, cdna4
from triton.experimental.gluon.language.nvidia.ampere.mbarrier import MBarrierLayout
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from mla_codegen.check.emulate import (
    amd,
    asynchronous,
    elementwise,
    lang,
    memory,
    mma,
    nvidia,
    reduce,
    shape,
    shared,
    state,
    warps,
)
from mla_codegen.check.emulate.errors import EmulatorError
from mla_codegen.check.emulate.launch import jit
from mla_codegen.check.emulate.tensor import METHODS, Tensor, as_tensor


class Namespace(types.ModuleType):
    """A stand-in module; a name that it lacks is an error that says what is covered."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise EmulatorError(
            f"{self.__name__}.{name} is not modelled by the emulator",
            "docs/emulator.md lists what is covered and where to add to it",
        )


class constexpr:
    """Triton's constexpr in host code; inside a kernel just the value."""

    def __new__(cls, value: Any) -> Any:
        return lang.plain(value) if state.running() else tl.constexpr(value)


def _pick(home: Any, names: str) -> dict[str, Any]:
    return {name: getattr(home, name) for name in names.split()}


DTYPES = _pick(
    tl,
    "int1 int8 int16 int32 int64 uint8 uint16 uint32 uint64 float16 bfloat16 float32 float64"
    " float8e4nv float8e4b8 float8e5 float8e5b16 pointer_type dtype void PropagateNan",
)
MATH = _pick(
    elementwise,
    "exp exp2 log log2 sqrt sqrt_rn rsqrt sin cos floor ceil erf abs fma fdiv div_rn umulhi",
)
COMMON = {
    **_pick(
        lang,
        "program_id num_programs arange full zeros full_like zeros_like load store atomic_add atomic_max atomic_min"
        " atomic_xchg cdiv static_range static_assert device_assert device_print assume",
    ),
    **_pick(elementwise, "where maximum minimum add sub mul cast inline_asm_elementwise extern extern_elementwise"),
    **_pick(shape, "expand_dims broadcast broadcast_to reshape ravel permute trans join interleave split gather"),
    **_pick(reduce, "max min sum argmax argmin xor_sum reduce_or reduce cumsum associative_scan"),
    **MATH,
    **DTYPES,
    **dict.fromkeys(("multiple_of", "max_contiguous", "max_constancy"), lang.hint),
    "static_print": print,
    "to_tensor": as_tensor,
    "constexpr": constexpr,
    "tensor": Tensor,
    "tuple": tuple,
}
METHODS.update(
    _pick(elementwise, "exp exp2 log log2 sqrt rsqrt sin cos floor ceil erf abs")
    | _pick(reduce, "max min sum argmax argmin xor_sum reduce cumsum")
    | _pick(lang, "store atomic_add atomic_max atomic_min atomic_xchg")
    | _pick(shape, "ravel split gather")
)
GLUON = {
    **_pick(lang, "num_warps num_ctas convert_layout barrier"),
    "thread_barrier": lang.barrier,
    **_pick(
        gluon_layouts,
        "AutoLayout BlockedLayout CoalescedLayout DistributedLinearLayout DotOperandLayout NVMMADistributedLayout"
        " NVMMASharedLayout PaddedSharedLayout SharedLinearLayout SliceLayout SwizzledSharedLayout",
    ),
    "set_auto_layout": lang.convert_layout,
    "allocate_shared_memory": shared.allocate,
    "shared_memory_descriptor": shared.Descriptor,
    "dot_fma": mma.dot_fma,
    "warp_specialize": warps.warp_specialize,
}
HOPPER = {
    **_pick(mma, "warpgroup_mma warpgroup_mma_wait warpgroup_mma_init mma_v2"),
    "fence_async_shared": asynchronous.fence_async_shared,
}
BUFFER = {**_pick(amd, "buffer_load buffer_store"), "mfma": mma.mfma}


def _scale_layout(dot_operand_layout: Any, shape: Any) -> Any:
    return lang.plain(cdna4.get_mfma_scale_layout(lang.plain(dot_operand_layout), list(shape)))


def _empty(make: Callable[..., Any]) -> Callable[..., Any]:
    def create(*args: Any, **kwargs: Any) -> Any:
        tensor = make(*args, **kwargs)
        return memory.poison(tensor) if tensor.device.type == "cpu" else tensor

    return create


class Torch(types.ModuleType):
    """torch, with `empty` and its kin poisoned: what no kernel wrote is known."""

    empty = staticmethod(_empty(torch.empty))
    empty_like = staticmethod(_empty(torch.empty_like))
    empty_strided = staticmethod(_empty(torch.empty_strided))

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def build(arch: str) -> dict[str, types.ModuleType]:
    """The stand-in modules by dotted name, for a file written for `arch` (sm_90, gfx942, gfx950)."""
    made: dict[str, types.ModuleType] = {"torch": Torch("torch")}

    def add(name: str, members: dict[str, Any] | None = None) -> types.ModuleType:
        module = made[name] = Namespace(name)
        module.__path__ = []
        for key, value in (members or {}).items():
            setattr(module, key, value)
        parent, _, leaf = name.rpartition(".")
        if parent:
            setattr(made[parent], leaf, module)
        return module

    triton_names = {**_pick(triton, "cdiv next_power_of_2 __version__"), "constexpr_function": lambda fn: fn}
    add("triton", triton_names | {"jit": jit(arch, gluon=False)})
    plain_triton = {"range": lang.runtime_range, "dot": mma.dot, "debug_barrier": lang.barrier}
    add("triton.language", COMMON | plain_triton)
    add("triton.language.math", MATH)
    add("triton.language.core", COMMON | {"_aggregate": lambda cls: cls})
    add("triton.language.extra")
    add(
        "triton.language.extra.cuda",
        {"gdc_wait": nvidia.gdc_wait, "gdc_launch_dependents": nvidia.gdc_launch_dependents},
    )
    add("triton.language.extra.libdevice", MATH)
    add("triton.language.extra.cuda.libdevice", MATH)
    add("triton.experimental")
    add("triton.experimental.gluon", {"jit": jit(arch, gluon=True), "constexpr_function": lambda fn: fn})
    add("triton.experimental.gluon.nvidia", {})
    add("triton.experimental.gluon.nvidia.hopper", {"TensorDescriptor": TensorDescriptor})
    root = "triton.experimental.gluon.language"
    add(root, COMMON | GLUON)
    add(f"{root}.extra")
    add(f"{root}.extra.libdevice", MATH)
    add(f"{root}.nvidia")
    for name in ("ampere", "hopper"):
        members: dict[str, Any] = {"mma_v2": mma.mma_v2} if name == "ampere" else dict(HOPPER)
        add(f"{root}.nvidia.{name}", members)
        add(f"{root}.nvidia.{name}.async_copy", nvidia.FUNCTIONS["async_copy"])
        add(f"{root}.nvidia.{name}.mbarrier", nvidia.FUNCTIONS["mbarrier"] | {"MBarrierLayout": MBarrierLayout})
    add(f"{root}.nvidia.hopper.tma", nvidia.FUNCTIONS["tma"])
    add(f"{root}.amd", {"AMDMFMALayout": AMDMFMALayout, "AMDWMMALayout": AMDWMMALayout})
    add(f"{root}.amd.cdna3", BUFFER)
    add(f"{root}.amd.cdna4", BUFFER | {"mfma_scaled": mma.mfma_scaled, "get_mfma_scale_layout": _scale_layout})
    add(f"{root}.amd.cdna4.async_copy", amd.ASYNC_COPY)
    return made
