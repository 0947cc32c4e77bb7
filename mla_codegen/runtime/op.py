"""`mla_decode` as operators of torch.library, so that torch.compile takes a model whole.

Two operators, both with a fake implementation: `mla_decode` returns a new (out, LSE); `mla_decode_into` writes into
tensors that it is given, a workspace among them, and its schema says so.
"""

from collections.abc import Callable

import torch

from .calls import Dispatcher

_INPUTS = "Tensor q, Tensor kv, Tensor qo_indptr, Tensor? kv_indptr"
_OPTIONS = "float sm_scale, Tensor? kv_scale=None, Tensor? kv_visible=None, SymInt? max_kv_len=None"
_RESULTS, _WORKSPACE = "Tensor(a!) out, Tensor(b!) lse", "Tensor(c!)? workspace=None"  # last: inductor puts it there
_PAGES = "Tensor? block_table=None, Tensor? kv_indices=None, Tensor? kv_lens=None"
SCHEMAS = {
    "mla_decode": f"({_INPUTS}, {_OPTIONS}, {_PAGES}) -> (Tensor, Tensor)",
    "mla_decode_into": f"({_INPUTS}, {_RESULTS}, {_OPTIONS}, {_PAGES}, {_WORKSPACE}) -> ()",
}

Tensor = torch.Tensor
Decode = Callable[..., Tensor | tuple[Tensor, Tensor]]

_libraries: list[torch.library.Library] = []  # an operator lives as long as its library


def register(dispatcher: Dispatcher, package: str) -> Decode:
    """Register both operators as `torch.ops.<package>`, a dot in its name written _; returns `mla_decode` over them.

    What it returns takes the arguments of the dispatcher's `mla_decode`.
    """
    namespace = package.replace(".", "_")
    library = torch.library.Library(namespace, "DEF")
    _libraries.append(library)

    def decode(
        q: Tensor,
        kv: Tensor,
        qo_indptr: Tensor,
        kv_indptr: Tensor | None,
        sm_scale: float,
        kv_scale: Tensor | None = None,
        kv_visible: Tensor | None = None,
        max_kv_len: int | None = None,
        block_table: Tensor | None = None,
        kv_indices: Tensor | None = None,
        kv_lens: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        return dispatcher.mla_decode(  # type: ignore[return-value]
            q, kv, qo_indptr, kv_indptr, sm_scale=sm_scale, kv_scale=kv_scale, kv_visible=kv_visible,
            block_table=block_table, kv_indices=kv_indices, kv_lens=kv_lens, max_kv_len=max_kv_len, return_lse=True,
        )  # fmt: skip

    def decode_into(
        q: Tensor,
        kv: Tensor,
        qo_indptr: Tensor,
        kv_indptr: Tensor | None,
        out: Tensor,
        lse: Tensor,
        sm_scale: float,
        kv_scale: Tensor | None = None,
        kv_visible: Tensor | None = None,
        max_kv_len: int | None = None,
        block_table: Tensor | None = None,
        kv_indices: Tensor | None = None,
        kv_lens: Tensor | None = None,
        workspace: Tensor | None = None,
    ) -> None:
        dispatcher.mla_decode(
            q, kv, qo_indptr, kv_indptr, sm_scale=sm_scale, kv_scale=kv_scale, kv_visible=kv_visible,
            block_table=block_table, kv_indices=kv_indices, kv_lens=kv_lens, max_kv_len=max_kv_len, out=out, lse=lse,
            workspace=workspace,
        )  # fmt: skip

    def fake_decode(
        q: Tensor,
        kv: Tensor,
        qo_indptr: Tensor,
        kv_indptr: Tensor | None,
        sm_scale: float,
        kv_scale: Tensor | None = None,
        kv_visible: Tensor | None = None,
        max_kv_len: int | None = None,
        block_table: Tensor | None = None,
        kv_indices: Tensor | None = None,
        kv_lens: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        paged = block_table is not None or kv_indices is not None
        shape, dtype = dispatcher.result(q, kv if paged else None)
        return q.new_empty(shape, dtype=dtype), q.new_empty(shape[:2], dtype=torch.float32)

    def fake_decode_into(*_: object, **__: object) -> None:
        """It writes, and returns nothing."""

    for name, run, fake in (("mla_decode", decode, fake_decode), ("mla_decode_into", decode_into, fake_decode_into)):
        library.define(name + SCHEMAS[name], tags=[torch.Tag.pt2_compliant_tag, torch.Tag.needs_fixed_stride_order])
        for key in ("CPU", "CUDA"):
            library.impl(name, run, key)
        torch.library.register_fake(f"{namespace}::{name}", fake, lib=library)
    operators = getattr(torch.ops, namespace)
    new, into = operators.mla_decode.default, operators.mla_decode_into.default

    def mla_decode(
        q: Tensor,
        kv: Tensor,
        qo_indptr: Tensor,
        kv_indptr: Tensor | None = None,
        *,
        sm_scale: float,
        kv_scale: Tensor | None = None,
        kv_visible: Tensor | None = None,
        block_table: Tensor | None = None,
        kv_indices: Tensor | None = None,
        kv_lens: Tensor | None = None,
        max_kv_len: int | None = None,
        out: Tensor | None = None,
        lse: Tensor | None = None,
        return_lse: bool = False,
        workspace: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        options = (sm_scale, kv_scale, kv_visible, max_kv_len)
        pages = (block_table, kv_indices, kv_lens)
        if out is None and (workspace is not None or lse is not None):
            shape, dtype = dispatcher.result(q, None if block_table is None and kv_indices is None else kv)
            out = q.new_empty(shape, dtype=dtype)
        if out is None:
            out, lse = new(q, kv, qo_indptr, kv_indptr, *options, *pages)
        else:
            lse = q.new_empty(q.shape[:2], dtype=torch.float32) if lse is None else lse
            into(q, kv, qo_indptr, kv_indptr, out, lse, *options, *pages, workspace)
        return (out, lse) if return_lse else out

    mla_decode.__doc__ = Dispatcher.mla_decode.__doc__
    return mla_decode
