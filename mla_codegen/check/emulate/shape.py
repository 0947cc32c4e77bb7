"""Functions that move or reshape a tensor's elements."""

from __future__ import annotations

from typing import Any

import numpy as np

from mla_codegen.check.emulate import layouts
from mla_codegen.check.emulate.errors import EmulatorError
from mla_codegen.check.emulate.lang import plain
from mla_codegen.check.emulate.tensor import Tensor, broadcast_pair, coerce


def expand_dims(input: Tensor, axis: Any) -> Tensor:
    for at in sorted(axis) if isinstance(axis, (list, tuple)) else [plain(axis)]:
        input = input.expand_dims(at)
    return input


def broadcast(input: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
    shape, layout = broadcast_pair(input, other, "broadcast")
    wide = [Tensor(np.broadcast_to(x.data, shape), x.dtype, layout, x.buffer) for x in (input, other)]
    return wide[0], wide[1]


def broadcast_to(input: Tensor, *shape: Any) -> Tensor:
    return input.broadcast_to(*shape)


def reshape(input: Tensor, *shape: Any, can_reorder: Any = False) -> Tensor:
    return input.reshape(*shape)


def ravel(x: Tensor) -> Tensor:
    return x.reshape(x.numel)


def permute(input: Tensor, *dims: Any) -> Tensor:
    return input.permute(*dims)


def trans(input: Tensor, *dims: Any) -> Tensor:
    return input.trans(*dims)


def join(a: Tensor, b: Tensor) -> Tensor:
    x, y, kind, layout = coerce(a, b, "join")
    x, y = np.broadcast_arrays(x, y)
    return Tensor(np.stack([x, y], axis=-1), kind, layouts.joined(layout, x.shape))


def interleave(a: Tensor, b: Tensor) -> Tensor:
    both = join(a, b)
    return both.reshape(*both.shape[:-2], both.shape[-2] * 2)


def split(a: Tensor) -> tuple[Tensor, Tensor]:
    if not a.shape or a.shape[-1] != 2:
        raise EmulatorError(f"split of a tensor of shape {list(a.shape)}: the last dimension must be 2")
    layout = layouts.split(a.layout, a.shape)
    return Tensor(a.data[..., 0], a.dtype, layout), Tensor(a.data[..., 1], a.dtype, layout)


def gather(src: Tensor, index: Tensor, axis: Any) -> Tensor:
    axis = plain(axis)
    if index.data.size and (index.data.min() < 0 or index.data.max() >= src.shape[axis]):
        raise EmulatorError(f"gather index outside [0, {src.shape[axis]})")
    return Tensor(np.take_along_axis(src.data, index.data.astype(np.int64), axis), src.dtype, index.layout)
