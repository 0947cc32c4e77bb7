# Copied by mla-codegen from mla_codegen/runtime/op.py. Do not edit: `mla-codegen build` writes it anew.
"""`mla_decode` and `merge_states` as operators of torch.library, so that torch.compile takes a model whole.

Two operators of each, with fake implementations: `mla_decode` returns a new (out, LSE); `mla_decode_into` writes into
tensors that it is given, a workspace among them, and its schema says so. `merge_states` likewise.
"""

import hashlib
import os
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from . import validate
from .arguments import CALL, arguments, schema
from .calls import Dispatcher
from .merge import State, merge_states, refuse

INTO = frozenset({"into"})  # the operator that writes into what it is given
NEW_NAMES = [one.name for one in arguments(CALL, ())]
INTO_NAMES = [one.name for one in arguments(CALL, INTO)]
SCHEMAS = {
    "mla_decode": f"({schema(())}) -> (Tensor, Tensor)",
    "mla_decode_into": f"({schema(INTO)}) -> ()",
    "merge_states": "(Tensor[] outs, Tensor[] lses, bool base2=False) -> (Tensor, Tensor)",
    "merge_states_into": "(Tensor[] outs, Tensor[] lses, Tensor(a!) out, Tensor(b!) lse, bool base2=False) -> ()",
}
TAGS = [torch.Tag.pt2_compliant_tag, torch.Tag.needs_fixed_stride_order]

Tensor = torch.Tensor
Decode = Callable[..., Tensor | tuple[Tensor, Tensor]]
Merge = Callable[..., State]

HOME = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))  # the folder of this build
OWNER = "mla_codegen_build"  # attribute of a namespace of torch.ops: whose operators it has


class Owner(NamedTuple):
    """A build whose operators are registered. Kept by torch.ops: modules may be imported again, operators may not."""

    home: str
    schemas: dict[str, str]
    dispatchers: list[Dispatcher]  # one, exchanged when the package is imported again
    library: torch.library.Library  # operators live as long


def register(dispatcher: Dispatcher, package: str) -> tuple[Decode, Merge, Any]:
    """Register the operators as `torch.ops.<package>`, a dot in its name written _.

    Where another build has taken that name, a hash of this build's folder is added to it. A package that is imported
    again keeps its operators, which from then on call the new `dispatcher`.

    Returns `mla_decode` and `merge_states` over them, which take the arguments of the plain ones, and the namespace.
    """
    namespace, owner = _namespace(package.replace(".", "_"))
    if owner is None:
        owner = Owner(HOME, SCHEMAS, [dispatcher], torch.library.Library(namespace, "FRAGMENT"))
        _define(owner, namespace)
        _define_merge(owner.library, namespace)
        setattr(getattr(torch.ops, namespace), OWNER, owner)
    owner.dispatchers[:] = [dispatcher]
    operators = getattr(torch.ops, namespace)
    return _over(operators, owner.dispatchers), _merge_over(operators), operators


def _namespace(name: str) -> tuple[str, Owner | None]:
    """A namespace that is free or already this build's, and then its owner."""
    digest = hashlib.sha256(repr((HOME, sorted(SCHEMAS.items()))).encode()).hexdigest()[:8]
    for namespace in (name, f"{name}_{digest}"):
        operators = getattr(torch.ops, namespace)
        owner = vars(operators).get(OWNER)
        if owner is None and not any(hasattr(operators, one) for one in SCHEMAS):
            return namespace, None
        if owner is not None and (owner.home, owner.schemas) == (HOME, SCHEMAS):
            return namespace, owner
    raise RuntimeError(f"torch.ops.{name} and torch.ops.{name}_{digest} are both taken by others")


class DecodeOnly(torch.autograd.Function):
    """What an operator makes of inputs that require grad: results that say so, and a backward that is an error."""

    @staticmethod
    def forward(ctx: Any, operator: Any, written: tuple[Tensor, ...], *inputs: Any) -> Any:
        ctx.mark_dirty(*written)
        with torch._C._AutoDispatchBelowAutograd():
            results = operator(*inputs)
        return written or results

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise RuntimeError(
            "mla_decode is decode only and has no backward: call it under torch.no_grad(), or detach its inputs"
        )


def _with_autograd(operator: Any, run: Callable[..., Any], writes: slice) -> Callable[..., Any]:
    """The operator's kernel for torch's autograd. Inputs that need no gradient go straight on to `run`."""

    def call(*inputs: Any) -> Any:
        if torch.is_grad_enabled() and any(isinstance(one, Tensor) and one.requires_grad for one in inputs):
            written = inputs[writes]
            results = DecodeOnly.apply(operator, written, *inputs)
            return None if written else results
        if type(inputs[0]) is Tensor and not torch._C._len_torch_dispatch_stack():
            return run(*inputs)
        with torch._C._AutoDispatchBelowAutograd():  # a tracer, which must see the operator
            return operator(*inputs)

    return call


def _define(owner: Owner, namespace: str) -> None:
    """Define the operators of `owner`: kernels, fake implementations, autograd."""
    library, dispatchers = owner.library, owner.dispatchers

    def decode(*given: Any, **named: Any) -> tuple[Tensor, Tensor]:
        return dispatchers[0].mla_decode(  # type: ignore[return-value]
            **dict(zip(NEW_NAMES, given, strict=False)), **named, return_lse=True
        )

    def decode_into(*given: Any, **named: Any) -> None:
        dispatchers[0].mla_decode(**dict(zip(INTO_NAMES, given, strict=False)), **named)

    def fake_decode(*given: Any, **named: Any) -> tuple[Tensor, Tensor]:
        named |= dict(zip(NEW_NAMES, given, strict=False))
        _one_device(*named.values())
        q = named["q"]
        shape, dtype = dispatchers[0].result(**named)
        return q.new_empty(shape, dtype=dtype), q.new_empty(shape[:2], dtype=torch.float32)

    def fake_decode_into(*given: object) -> None:
        _one_device(*given)

    for name, run, fake, writes in (
        ("mla_decode", decode, fake_decode, slice(0)),
        ("mla_decode_into", decode_into, fake_decode_into, slice(4, 6)),
    ):
        library.define(name + SCHEMAS[name], tags=TAGS)
        for key in ("CPU", "CUDA"):
            library.impl(name, run, key)
        torch.library.register_fake(f"{namespace}::{name}", fake, lib=library)
        operator = getattr(getattr(torch.ops, namespace), name).default
        library.impl(name, _with_autograd(operator, run, writes), "Autograd")


def _define_merge(library: torch.library.Library, namespace: str) -> None:
    """The operators of `merge_states`. They know no autograd: a backward through them is torch's own error."""

    def merge(outs: list[Tensor], lses: list[Tensor], base2: bool = False) -> State:
        return merge_states(list(zip(outs, lses, strict=True)), base2=base2)

    def merge_into(outs: list[Tensor], lses: list[Tensor], out: Tensor, lse: Tensor, base2: bool = False) -> None:
        merge_states(list(zip(outs, lses, strict=True)), out=out, lse=lse, base2=base2)

    def fake(outs: list[Tensor], lses: list[Tensor], base2: bool = False) -> State:
        _one_device(*outs, *lses)
        shape = outs[0].shape[-3:]
        return outs[0].new_empty(shape), lses[0].new_empty(shape[:2])

    def fake_into(outs: list[Tensor], lses: list[Tensor], out: Tensor, lse: Tensor, base2: bool = False) -> None:
        _one_device(*outs, *lses, out, lse)

    for name, run, made in (("merge_states", merge, fake), ("merge_states_into", merge_into, fake_into)):
        library.define(name + SCHEMAS[name], tags=TAGS)
        for key in ("CPU", "CUDA"):
            library.impl(name, run, key)
        torch.library.register_fake(f"{namespace}::{name}", made, lib=library)


def _merge_over(operators: Any) -> Merge:
    """`merge_states` as a function that calls the operators."""
    new, into = operators.merge_states.default, operators.merge_states_into.default

    def over(
        states: Sequence[State], *, out: Tensor | None = None, lse: Tensor | None = None, base2: bool = False
    ) -> State:
        try:
            outs, lses = [one for one, _ in states], [one for _, one in states]
            if out is None and lse is None:
                return new(outs, lses, base2)
            shape = outs[0].shape[-3:]
            out = outs[0].new_empty(shape) if out is None else out
            lse = lses[0].new_empty(shape[:2]) if lse is None else lse
            into(outs, lses, out, lse, base2)
        except Exception:
            refuse(states)
            validate.tensors(out_=out, lse_=lse)
            raise
        return out, lse

    over.__doc__ = merge_states.__doc__
    return over


def _one_device(q: Any, *others: Any) -> None:
    """ValueError where there are no values of one tensor only: torch would then take the fake implementation."""
    for one in others:
        if isinstance(one, Tensor) and one.device != q.device:
            raise ValueError(f"q is on {q.device}, another tensor on {one.device}")


def _over(operators: Any, dispatchers: list[Dispatcher]) -> Decode:
    """`mla_decode` as a function that calls the operators."""
    new, into = operators.mla_decode.default, operators.mla_decode_into.default

    def mla_decode(
        q: Tensor,
        kv: Tensor,
        qo_indptr: Tensor | None = None,
        kv_indptr: Tensor | None = None,
        *,
        sm_scale: float,
        max_kv_len: int | None = None,
        max_q_len: int | None = None,
        out: Tensor | None = None,
        lse: Tensor | None = None,
        return_lse: bool = False,
        base2: bool = False,
        workspace: Tensor | None = None,
        **tensors: Tensor | None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        try:
            if type(sm_scale) is not float:  # torch would take a tensor, and wait for it
                sm_scale = validate.number("sm_scale", sm_scale)
            if max_kv_len is not None and type(max_kv_len) is not int:
                max_kv_len = validate.length(max_kv_len)
            if max_q_len is not None and type(max_q_len) is not int:
                max_q_len = validate.query_length(max_q_len)
            options: dict[str, Any] = {  # the one before the workspace is always given: inductor counts on it
                "sm_scale": sm_scale, "max_kv_len": max_kv_len, "max_q_len": max_q_len, "base2": base2,
                "attn_sink": None, **tensors,
            }  # fmt: skip
            if out is None and (workspace is not None or lse is not None):
                shape, dtype = dispatchers[0].result(q, kv, **tensors)
                out = q.new_empty(shape, dtype=dtype)
            if out is None:
                out, lse = new(q, kv, qo_indptr, kv_indptr, **options)
            else:
                lse = q.new_empty(q.shape[:2], dtype=torch.float32) if lse is None else lse
                into(q, kv, qo_indptr, kv_indptr, out, lse, workspace=workspace, **options)
        except Exception:
            validate.arguments(
                q, kv, qo_indptr, sm_scale, max_kv_len, max_q_len, kv_indptr=kv_indptr, out=out, lse=lse,
                workspace=workspace, **tensors,
            )  # fmt: skip
            raise
        return (out, lse) if return_lse else out

    mla_decode.__doc__ = Dispatcher.mla_decode.__doc__
    return mla_decode
