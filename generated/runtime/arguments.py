# Copied by mla-codegen from mla_codegen/runtime/arguments.py. Do not edit: `mla-codegen build` writes it anew.
"""The arguments of calls and kernels: one ordered list, of which signatures, docstrings and operators are made.

The generator prints from it the signature of a kernel and of its `run`, their docstrings and launches, and what a
compiler must know ahead of time; `op` makes the schemas of the operators of it.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

# Where an argument stands.
STAGE1, STAGE2, LOCATE, RUN, CALL = "stage1", "stage2", "locate", "run", "call"
LAYOUT = "layout"  # type of an argument, see `Argument`


@dataclass(frozen=True)
class Argument:
    """One argument, or one meaning of it.

    name      where several records share one, at most one of them fits a kernel
    types     in signatures of kernels: `*i32`, `i32`, `fp32`; a name in braces is a field that the kernel fills in;
              `layout`: a tuple of numbers, or None for what is usual
    meaning   shape, dtype and what it stands for, as docstrings of `run` say it; empty: they don't
    signatures   that it belongs to
    when      what a kernel must have for it (`features`); empty: every kernel has it
    varies    an integer that differs from call to call and must not make another binary
    schema    as an operator of torch.library declares it
    given     what `run` launches a kernel with; empty: the name
    late      behind the inputs in `run`
    default   of `run`
    """

    name: str
    types: str
    meaning: str = ""
    signatures: frozenset[str] = frozenset()
    when: frozenset[str] = frozenset()
    varies: bool = False
    schema: str = ""
    given: str = ""
    late: bool = False
    default: str = ""


def _argument(name: str, types: str, signatures: str, meaning: str = "", *, when: str = "", **more: object) -> Argument:
    return Argument(name, types, meaning, frozenset(signatures.split()), frozenset(when.split()), **more)  # type: ignore[arg-type]


def _call(name: str, schema: str, when: str = "") -> Argument:
    return _argument(name, "", CALL, when=when, schema=schema)


_INDEX = "int32 or int64"
ARGUMENTS: tuple[Argument, ...] = (
    # what callers give
    _call("q", "Tensor q"),
    _call("kv", "Tensor kv"),
    _call("qo_indptr", "Tensor? qo_indptr"),
    _call("kv_indptr", "Tensor? kv_indptr"),
    _call("out", "Tensor(a!) out", when="into"),
    _call("lse", "Tensor(b!) lse", when="into"),
    _call("sm_scale", "float sm_scale"),
    _call("kv_scale", "Tensor? kv_scale=None"),
    _call("kv_visible", "Tensor? kv_visible=None"),
    _call("max_kv_len", "SymInt? max_kv_len=None"),
    _call("block_table", "Tensor? block_table=None"),
    _call("kv_indices", "Tensor? kv_indices=None"),
    _call("kv_lens", "Tensor? kv_lens=None"),
    _call("max_q_len", "SymInt? max_q_len=None"),
    _call("base2", "bool base2=False"),
    _call("indices", "Tensor? indices=None"),
    _call("topk_lens", "Tensor? topk_lens=None"),
    _call("attn_sink", "Tensor? attn_sink=None"),
    _call("workspace", "Tensor(c!)? workspace=None", when="into"),  # last: inductor puts it there
    # what kernels take
    _argument("q", "{q_type}", "stage1 run", "[total_q, {heads}, {row}] {q}, last stride 1"),
    _argument("kv", "{kv_type}", "stage1", when="pointers", given="{kv_given}"),
    _argument("kv_latent", "{kv_latent}", "stage1", when="tiles"),
    _argument("kv_rope", "{kv_rope}", "stage1", when="tiles"),
    _argument("kv", "", "run", "[total_kv, {width}] {kv}, contiguous{aligned}", when="ragged"),
    _argument("kv", "", "run", "[pages, {page_size}, {width}] {kv}, contiguous{aligned}", when="paged"),
    _argument("kv", "", "run", "pool of rows, {kv}, contiguous{aligned}", when="sparse"),
    _argument("partial", "*fp32", "stage1 stage2", when="merged"),
    _argument("partial_lse", "*fp32", "stage1 stage2", when="merged"),
    _argument("row_parts", "*i32", "stage1 stage2", when="balanced"),
    _argument("out", "{out_type}", "stage1", when="direct"),
    _argument("lse", "*fp32", "stage1", when="direct"),
    _argument(
        "qo_indptr", "*i32", "locate stage1 run", f"[batch + 1] {_INDEX}, and kv_indptr alike",
        when="ragged",
    ),
    _argument("qo_indptr", "*i32", "locate stage1 run", f"[batch + 1] {_INDEX}", when="paged"),
    _argument("kv_indptr", "*i32", "locate stage1 run", when="ragged"),
    _argument(
        "kv_indptr", "*i32", "locate stage1 run",
        "[batch + 1] likewise, over kv_indices; None: kv_indices is a table", when="paged",
    ),
    _argument(
        "kv_indices", "*i32", "stage1 run",
        f"page numbers, {_INDEX}: a list of all requests' or a table [batch, most pages] of any row stride",
        when="paged",
    ),
    _argument(
        "kv_lens", "*i32", "locate stage1 run", f"[batch] {_INDEX}: KV rows of each request{{lens_or_none}}",
        when="paged",
    ),
    _argument(
        "kv_visible", "*i32", "locate stage1 run", "[total_q] int32, KV rows that each query row sees, or None: causal",
        when="requests",
    ),
    _argument(
        "indices", "*i32", "stage1 run", "[total_q, {topk}] int32: rows of the pool that each query row sees; -1: none",
        when="sparse",
    ),
    _argument(
        "topk_lens", "*i32", "stage1 run", "[total_q] int32: entries of each list that count, or None: all",
        when="sparse",
    ),
    _argument(
        "attn_sink", "*fp32", "run", "[{heads}] fp32: a score of no value that each head sees, or None", when="sparse"
    ),
    _argument("attn_sink", "*fp32", "stage1", when="sparse direct"),
    _argument("attn_sink", "*fp32", "stage2", when="sparse merged"),
    _argument("kv_scale", "*fp32", "stage1 run", "[1] fp32 or None: 1"),
    _argument("sm_scale", "fp32", "stage1 run"),
    _argument("batch", "i32", "locate stage1", when="requests", varies=True),
    _argument("q_len", "i32", "locate stage1", when="heads", varies=True, given="max(1, total_q // batch)"),
    _argument("blocks", "i32", "stage1", when="queries", varies=True),
    _argument("total_q", "i32", "stage1", when="queries", varies=True),
    _argument("stride_qt", "i32", "stage1"),
    _argument("stride_qh", "i32", "stage1"),
    _argument("page_stride", "i32", "locate stage1", when="paged", varies=True, given="kv_indices.stride(0)"),
    _argument("total_q", "i32", "stage1", when="balanced", varies=True),
    _argument("programs", "i32", "stage1", when="balanced", varies=True),
    _argument("zero", "i32", "stage1", when="opaque_zero", varies=True, given="0"),
    _argument(
        "out", "{out_type}", "stage2 run", "[total_q, {heads}, {latent}] {out}, contiguous; all of it is written",
        late=True,
    ),
    _argument(
        "lse", "*fp32", "stage2 run",
        "[total_q, {heads}] fp32, natural log; all of it is written. None: the caller does not want it",
        given="unwanted if lse is None else lse", late=True,
    ),
    _argument("splits", "i32", "stage1 stage2 run", "2 .. {max_splits}", when="any_splits", varies=True, late=True),
    _argument(
        "workspace", "", "run", "contiguous memory for the scratch, aligned to 16 bytes; None: allocated",
        late=True, default="None",
    ),
    _argument(
        "kv_layout", LAYOUT, "stage1 run",
        "(elements from page to page, entries from column to column of the table); None: contiguous",
        when="paged strided", given="{kv_layout_given}", late=True, default="None",
    ),
    _argument("out_layout", LAYOUT, "stage1", when="direct strided"),
    _argument(
        "out_layout", LAYOUT, "stage2 run",
        "(strides of out, of lse: query row, head; what the LSE is multiplied by); None: as said above",
        when="strided", late=True, default="None",
    ),
)  # fmt: skip


def arguments(where: str, features: Iterable[str]) -> list[Argument]:
    """The arguments of a signature, in order; `features`: what the kernel has."""
    have = frozenset(features)
    found = [one for one in ARGUMENTS if where in one.signatures and one.when <= have]
    if where == RUN:  # results behind the inputs
        found.sort(key=lambda one: one.late)
    return found


def signature(where: str, features: Iterable[str]) -> str:
    """The arguments as a `def` lists them."""
    return ", ".join(
        one.name + (f"={one.default}" if one.default and where == RUN else "") for one in arguments(where, features)
    )


def launched(where: str, features: Iterable[str], facts: Mapping[str, object]) -> str:
    """The arguments as `run` gives them to a kernel."""
    return ", ".join(one.given.format_map(facts) or one.name for one in arguments(where, features))


def varying(where: str, features: Iterable[str]) -> list[str]:
    """Integers that differ from call to call and make no other binary."""
    return [one.name for one in arguments(where, features) if one.varies]


def schema(features: Iterable[str]) -> str:
    """The arguments as an operator of torch.library declares them."""
    return ", ".join(one.schema for one in arguments(CALL, features))


def described(features: Iterable[str], facts: Mapping[str, object]) -> str:
    """The lines that a docstring of `run` has of its arguments."""
    lines = [f"    {one.name:<11} {one.meaning.format_map(facts)}" for one in arguments(RUN, features) if one.meaning]
    return "\n".join(lines)
