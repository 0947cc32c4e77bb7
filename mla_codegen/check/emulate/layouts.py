"""Layouts: what Gluon demands of them, and where an operation leaves its result.

The layout classes are Triton's own. Every layout is interned, so that equality in the hot path is identity. What
reshape, permute, split and join do to a layout is computed on its linear form (bases of register, lane and warp),
which Triton's library gives without a GPU.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
from triton._C.libtriton import gluon_ir, ir
from triton.experimental.gluon.language import _layouts as gluon_layouts
from triton.experimental.gluon.language.amd._layouts import AMDMFMALayout

from mla_codegen.check.emulate.errors import EmulatorError

AutoLayout = gluon_layouts.AutoLayout
BlockedLayout = gluon_layouts.BlockedLayout
DistributedLayout = gluon_layouts.DistributedLayout
DotOperandLayout = gluon_layouts.DotOperandLayout
LinearLayout = gluon_layouts.DistributedLinearLayout
NVMMADistributedLayout = gluon_layouts.NVMMADistributedLayout
NVMMASharedLayout = gluon_layouts.NVMMASharedLayout
SharedLayout = gluon_layouts.SharedLayout
SliceLayout = gluon_layouts.SliceLayout
SwizzledSharedLayout = gluon_layouts.SwizzledSharedLayout

AUTO = AutoLayout()
_interned: dict[Any, Any] = {AUTO: AUTO}
_slices: dict[tuple[int, int], Any] = {}
_checked: dict[tuple[int, int, int], None] = {}


def intern(layout: Any) -> Any:
    """The one object that stands for all layouts equal to `layout`."""
    found = _interned.get(layout)
    if found is None:
        if isinstance(layout, SliceLayout):
            layout = SliceLayout(layout.dim, intern(layout.parent))
        found = _interned.setdefault(layout, layout)
    return found


def sliced(layout: Any, axis: int) -> Any:
    """The layout that is left when `axis` of `layout` is reduced away."""
    if layout is AUTO:
        return AUTO
    key = (id(layout), axis)
    found = _slices.get(key)
    if found is None:
        found = _slices[key] = intern(SliceLayout(axis, layout))
    return found


def expanded(layout: Any, axis: int) -> Any:
    """The layout of a tensor with a new dimension at `axis`: the parent of a slice along that axis."""
    if layout is AUTO:
        return AUTO
    if not isinstance(layout, SliceLayout):
        raise EmulatorError(
            f"a new dimension needs a SliceLayout, this tensor has {layout}",
            "build it with gl.SliceLayout(axis, parent) or convert_layout it first",
        )
    if layout.dim != axis:
        raise EmulatorError(
            f"a new dimension {axis} on a tensor sliced along dimension {layout.dim} of {layout.parent}",
            "x[:, None] wants SliceLayout(1, ...), x[None, :] wants SliceLayout(0, ...)",
        )
    return layout.parent


def check(layout: Any, shape: tuple[int, ...], warps: int, lanes: int) -> Any:
    """Intern `layout`; refuse it when its rank, warps or lanes do not fit the tensor and the launch."""
    if layout is None:
        return AUTO
    if not isinstance(layout, DistributedLayout):
        raise EmulatorError(f"expected a distributed layout, got {layout!r}")
    layout = intern(layout)
    if layout is AUTO or isinstance(layout, gluon_layouts.CoalescedLayout):
        return AUTO
    key = (id(layout), warps, lanes)
    if key not in _checked:
        _check_threads(layout, warps, lanes)
        _checked[key] = None
    if layout.rank != len(shape):
        raise EmulatorError(f"a tensor of shape {list(shape)} with a layout of rank {layout.rank}: {layout}")
    return layout


def _check_threads(layout: Any, warps: int, lanes: int) -> None:
    root = layout
    while isinstance(root, (SliceLayout, DotOperandLayout)):
        root = root.parent
    if isinstance(root, LinearLayout):
        have_warps, have_lanes = 2 ** len(root.warp_bases), 2 ** len(root.lane_bases)
    else:
        have_warps = int(np.prod(root.warps_per_cta))
        have_lanes = lanes
        if isinstance(root, BlockedLayout):
            have_lanes = int(np.prod(root.threads_per_warp))
    if have_warps != warps:
        raise EmulatorError(
            f"layout {root} spreads over {have_warps} warps, the kernel runs on {warps}",
            "warps_per_cta must multiply to num_warps",
        )
    if have_lanes != lanes:
        raise EmulatorError(
            f"layout {root} spreads over {have_lanes} threads a warp, this target has {lanes}",
            "threads_per_warp must multiply to 64 on gfx9 and to 32 on NVIDIA",
        )
    if isinstance(root, AMDMFMALayout) and lanes != 64:
        raise EmulatorError(f"{root} on a target of {lanes} threads a warp")


def agree(a: Any, b: Any, shape: tuple[int, ...], what: str) -> Any:
    """The common layout of two operands of `what`; AUTO gives way. Raises when they differ."""
    if a is b or b is AUTO:
        return a
    if a is AUTO:
        return b
    if isinstance(a, LinearLayout) or isinstance(b, LinearLayout):
        same = len(shape) == a.rank == b.rank and linear(a, shape) == linear(b, shape)
        if same:
            return b if isinstance(a, LinearLayout) else a
    raise EmulatorError(
        f"layouts of {what} differ: {a} against {b}", "give both the same layout, or call gl.convert_layout on one"
    )


@lru_cache(maxsize=1)
def _builder() -> Any:
    context = ir.context()
    ir.load_dialects(context)
    return context, gluon_ir.GluonOpBuilder(context)


@lru_cache(maxsize=4096)
def _linear(layout: Any, shape: tuple[int, ...]) -> Any:
    if isinstance(layout, LinearLayout):
        return layout
    builder = _builder()[1]
    return builder.to_linear_layout(layout._to_ir(builder), list(shape))


def linear(layout: Any, shape: tuple[int, ...]) -> Any:
    """`layout` on `shape` as bases of register, lane and warp."""
    return _linear(layout, tuple(shape))


def _map_bases(layout: Any, shape: tuple[int, ...], new_shape: tuple[int, ...], move: Any) -> Any:
    source = linear(layout, shape)
    moved = [
        [list(move(basis)) for basis in bases]
        for bases in (source.reg_bases, source.lane_bases, source.warp_bases, source.block_bases)
    ]
    return intern(LinearLayout(*moved, list(new_shape)))


def permuted(layout: Any, shape: tuple[int, ...], order: tuple[int, ...]) -> Any:
    """Layout after the dimensions are reordered."""
    if layout is AUTO:
        return AUTO
    return _map_bases(layout, shape, tuple(shape[i] for i in order), lambda basis: [basis[i] for i in order])


def reshaped(layout: Any, shape: tuple[int, ...], new_shape: tuple[int, ...]) -> Any:
    """Layout after a row-major reshape: every basis keeps its flat position."""
    if layout is AUTO or shape == new_shape:
        return layout

    def move(basis: list[int]) -> list[int]:
        flat = int(np.ravel_multi_index(tuple(basis), shape)) if shape else 0
        return [int(i) for i in np.unravel_index(flat, new_shape)]

    return _map_bases(layout, shape, new_shape, move)


def joined(layout: Any, shape: tuple[int, ...]) -> Any:
    """Layout of gl.join: a new last dimension of 2, held in registers."""
    if layout is AUTO:
        return AUTO
    source = linear(layout, shape)
    register, lane, warp = (
        [[*basis, 0] for basis in bases] for bases in (source.reg_bases, source.lane_bases, source.warp_bases)
    )
    register.insert(0, [0] * len(shape) + [1])
    return intern(LinearLayout(register, lane, warp, [], [*shape, 2]))


def split(layout: Any, shape: tuple[int, ...]) -> Any:
    """Layout of each half of gl.split: the last dimension (2) must lie in one thread's registers."""
    if layout is AUTO:
        return AUTO
    source = linear(layout, shape)
    pair = [0] * (len(shape) - 1) + [1]
    if pair not in [list(basis) for basis in source.reg_bases]:
        raise EmulatorError(
            f"gl.split along a dimension that is spread over threads: {source}",
            "both halves of a pair must be in one thread; convert_layout before the split",
        )
    registers = [list(basis[:-1]) for basis in source.reg_bases if list(basis) != pair]
    rest = [[list(basis[:-1]) for basis in bases] for bases in (source.lane_bases, source.warp_bases)]
    return intern(LinearLayout(registers, *rest, [], list(shape[:-1])))


def byte_pattern(layout: Any, shape: tuple[int, ...], itemsize: int) -> tuple[Any, ...]:
    """What decides where the bytes of a shared tile lie: views of equal patterns alias byte for byte."""
    row = shape[-1] * itemsize if shape else itemsize
    if isinstance(layout, NVMMASharedLayout):
        width = layout.swizzle_byte_width
        return ("nvmma", width, layout.transposed, layout.fp4_padded, row)
    if isinstance(layout, SwizzledSharedLayout):
        plain = list(range(len(layout.order) - 1, -1, -1))
        if layout.max_phase == 1 and list(layout.order) == plain:
            return ("rows",)
        if list(layout.order) != plain:
            columns = shape[layout.order[0]] * itemsize
            return ("swizzled", layout.vec * itemsize, layout.per_phase, layout.max_phase, tuple(layout.order), columns)
        return ("swizzled", layout.vec * itemsize, layout.per_phase, layout.max_phase, tuple(layout.order), row)
    return (layout, tuple(shape), itemsize)
