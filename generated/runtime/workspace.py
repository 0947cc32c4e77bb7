# Copied by mla-codegen from mla_codegen/runtime/workspace.py. Do not edit: `mla-codegen build` writes it anew.
"""How much scratch calls may need: what a caller that gives `workspace` must allocate, once."""

from collections.abc import Iterator

import torch

from . import validate
from .builds import Build
from .calls import Dispatcher
from .scratch import size_of


def workspace_bytes(
    dispatcher: Dispatcher, total_q: int, heads: int | None = None, device: torch.device | str | None = None
) -> int:
    """Bytes of a workspace that is large enough for every call of up to `total_q` query rows, of any lengths.

    heads    of the calls; None: any that builds for the device have
    device   where calls will run; None is the current GPU

    It follows from the kernels and the split rule alone: no device is asked. Raises ValueError if no build serves,
    TypeError for a number that is no int.
    """
    total_q = validate.host_int("total_q", total_q)
    if heads is not None:
        heads = validate.host_int("heads", heads)
    if total_q < 0:
        raise ValueError(f"total_q is {total_q}; it must not be negative")
    builds = dispatcher.serving(device, heads)
    return max((size for build in builds for size in _sizes(build, total_q)), default=0)


def _sizes(build: Build, total_q: int) -> Iterator[int]:
    """Scratch of the calls that need most."""
    for choice in build.choices.values():
        for name, rows, splits in choice.largest(total_q):
            scratch = build.kernel(name).scratch
            yield size_of(scratch(rows) if splits is None else scratch(rows, splits))
