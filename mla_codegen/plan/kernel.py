"""The record of one kernel: what its templates place, every number resolved. `resolve` makes it in steps."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mla_codegen.catalog.bounds import BOUND_FP8
from mla_codegen.catalog.targets import TARGETS, Target
from mla_codegen.plan.families.request import Resolved, Resources
from mla_codegen.plan.work import Merge, Work
from mla_codegen.runtime import arguments
from mla_codegen.runtime.formats import ELEMENTS, KV_FORMATS, Element, KVFormat


@dataclass(frozen=True)
class Words:
    """What is said of a kernel.

    name     of its file; origin: which shape it is for; title, summary: the first lines of its docstring
    """

    name: str
    spec_name: str
    spec_file: str
    origin: str
    title: str
    summary: str

    @property
    def build_command(self) -> str:
        return f"mla-codegen build {self.spec_file}"


@dataclass(frozen=True)
class Dimensions:
    """What a kernel computes, for which GPU: dimensions, element types, and the shape that it is tuned for, if any.

    q_len   query tokens of a request that it is for
    """

    target: str
    batch: int | None
    q_len: int
    kv_len: int | None
    heads: int
    latent: int
    rope: int
    q: str
    kv: str
    out: str
    page_size: int | None  # KV rows of a page; None: the KV is ragged, or sparse and does not ask
    topk: int | None  # KV rows of a query row's list; None: it sees a range of its request's

    @property
    def call(self) -> tuple[int, ...]:
        """The shape that it is tuned for, as `Shape.call` says it; of a general kernel nothing."""
        if self.batch is None or self.kv_len is None:
            return ()
        return (self.batch, self.kv_len, self.q_len) if self.q_len > 1 else (self.batch, self.kv_len)

    @property
    def row(self) -> int:
        """Columns of a KV row."""
        return self.latent + self.rope

    @property
    def gpu(self) -> Target:
        return TARGETS[self.target]

    @property
    def format(self) -> KVFormat:
        return KV_FORMATS[self.kv]

    @property
    def elements(self) -> dict[str, Element]:
        return {"q": ELEMENTS[self.q], "out": ELEMENTS[self.out]}

    @property
    def width(self) -> int:
        """Elements of a KV row of the tensor: columns, or bytes of a record."""
        return self.format.width(self.latent, self.rope)

    @property
    def sparse(self) -> bool:
        return self.topk is not None

    @property
    def sees_ranges(self) -> bool:
        """A query row belongs to a request, of whose KV rows it sees the first ones."""
        return not self.sparse

    @property
    def paged(self) -> bool:
        return self.page_size is not None and not self.sparse

    @property
    def rows_are_pages(self) -> bool:
        return self.page_size == 1


@dataclass(frozen=True)
class KernelPlan(Words, Dimensions, Work, Resources):
    """One kernel file: `k` in the templates, whose names these are.

    triton         the release whose Gluon this is (3.6); None: plain Triton, the same for all
    family         template family; details: what its templates need beside this, `f` there
    merge          stage 2; nobody looks at it where there is none
    features       what decides which arguments it has (`runtime.arguments`); facts: what their types and meanings say
    error_bound    relative L2 error of the output that is allowed; lse_bound: of the LSE, for scores of a few units
    optimizations  in the order of the catalog; not_taken: a line for each that was asked for in vain
    resolved       each setting's value and where it came from
    """

    triton: str | None
    family: str
    details: Any
    merge: Merge
    features: frozenset[str]
    facts: Mapping[str, Any]
    error_bound: float
    lse_bound: float
    optimizations: tuple[str, ...]
    not_taken: tuple[str, ...]
    resolved: dict[str, Resolved]

    def has(self, optimization: str) -> bool:
        """Whether a micro-optimisation is in the kernel."""
        return optimization in self.optimizations

    @property
    def compute(self) -> str:
        """Element type of the products."""
        return str(self.details.compute)

    @property
    def fp8_products(self) -> bool:
        """q and the weights are one fp8 number each: the matrix units multiply fp8 at its full rate."""
        return self.error_bound == BOUND_FP8

    @property
    def exp(self) -> str:
        """The exponential of the softmax's base, as kernels name it; `log` likewise."""
        return "tl.math.exp2" if self.has("exp2") else "tl.exp"

    @property
    def log(self) -> str:
        return "tl.math.log2" if self.has("exp2") else "tl.log"

    def natural(self, log_sum: str) -> str:
        """A logarithm of the softmax's base as a natural one, as source."""
        return f"{log_sum} * LN2" if self.has("exp2") else log_sum

    def in_base(self, natural: str) -> str:
        """A natural logarithm as one of the softmax's base, as source."""
        return f"{natural} * LOG2E" if self.has("exp2") else natural

    @property
    def cache_modifier(self) -> str:
        """What loads of KV are given beside the address, as source."""
        return ', cache_modifier=".cg"' if self.has("streaming_loads") else ""

    @property
    def launch_options(self) -> str:
        """Compiler options of stage 1, as `run` passes them."""
        options = {
            "num_warps": self.num_warps,
            "num_stages": self.num_stages,
            "waves_per_eu": self.waves_per_eu,
            "enable_fp_fusion": True,
        }
        return ", ".join(f"{name}={value}" for name, value in options.items() if value is not None)

    @property
    def merge_decided_at_launch(self) -> bool:
        return self.merged and self.merge.at_launch

    @property
    def merge_grid(self) -> str:
        """Programs of stage 2, as source."""
        return "total_q * HEADS.value" + " * COLUMN_BLOCKS.value" * self.merge.several_column_blocks

    @property
    def heads_file(self) -> str:
        """The templates that mask heads, or do not."""
        return "work/some_heads.jinja" if self.masked_heads else "work/all_heads.jinja"

    @property
    def work_file(self) -> str:
        return f"work/{self.partition}.jinja"

    @property
    def rows_file(self) -> str:
        if self.sparse:
            return "rows/listed_blocks.jinja" if self.format.blocks else "rows/listed.jinja"
        return "rows/gathered.jinja" if self.gathered else "rows/pages.jinja" if self.paged else "rows/ragged.jinja"

    @property
    def merge_program_is(self) -> str:
        """What a program of stage 2 stands for."""
        return "query row, head, column block" if self.merge.several_column_blocks else "query row, head"

    @property
    def masked_heads(self) -> bool:
        """The last block of columns may not be full."""
        return self.packed or self.heads % self.block_h != 0

    @property
    def query_blocks(self) -> str:
        """What a block of columns takes of a request, in words."""
        columns = self.q_len * self.heads
        return f"{self.q_len} query tokens x {self.heads} heads are {columns} columns, in blocks of {self.block_h}"

    def programs_of(self, q_len: int) -> int:
        """Programs of a split for a request of `q_len` query tokens."""
        return -(-q_len * self.heads // self.block_h) if self.packed else q_len * self.head_blocks

    @property
    def gathered(self) -> bool:
        """A tile may lie in several pages."""
        return self.page_size is not None and not self.sparse and self.page_size % self.block_n != 0

    @property
    def sink_in_stage2(self) -> bool:
        """The attention sink's weight joins the sum where the splits are merged."""
        return self.sparse and self.merged

    @property
    def occupancy(self) -> tuple[int, int]:
        """Compute units of the device, and programs that share one."""
        return self.gpu.compute_units, self.resident

    @property
    def concurrent(self) -> int:
        """Programs that the device runs at once."""
        return self.gpu.compute_units * self.resident

    def explained(self, splits: int | None = None) -> list[tuple[str, str, str]]:
        """Every number of the kernel as (name, value, where it came from), for people.

        splits   those of a call, where the kernel takes any number
        """
        found = []
        for name, resolved in self.resolved.items():
            if resolved.value is not None:
                value = splits if name == "splits" and self.splits is None and splits else resolved.value
                found.append((name, str(value), resolved.source))
        found.append(("shared memory", f"{self.shared_bytes:,}", f"limit {self.gpu.shared_bytes:,} bytes"))
        if self.packed:
            found.append(("query blocks", str(self.head_blocks), self.query_blocks))
        found.append(("products in", self.compute, f"KV {self.kv}"))
        if self.topk is not None:
            found.append(("topk", str(self.topk), "kv"))
        if self.page_size is not None:
            found.append(("page size", str(self.page_size), "kv"))
        return found

    def signature(self, where: str) -> str:
        """The arguments of `stage1`, `stage2` or `run`, as a `def` lists them."""
        return arguments.signature(where, self.features)

    def launch(self, where: str) -> str:
        """The arguments as `run` gives them to `stage1` or `stage2`."""
        return arguments.launched(where, self.features, self.facts)

    def varying(self, where: str) -> str:
        """Integers of `stage1` or `stage2` that differ from call to call and make no other binary, as source."""
        return json.dumps(arguments.varying(where, self.features))

    @property
    def run_arguments(self) -> str:
        """The lines of `run`'s docstring."""
        return arguments.described(self.features, self.facts)

    @property
    def strided(self) -> bool:
        """It takes layouts other than the usual ones."""
        return "strided" in self.features

    @property
    def ranges(self) -> str:
        """The arguments by which `locate` finds the KV rows that a query row sees."""
        return ", ".join(one.name for one in arguments.arguments("locate", self.features))
