"""The record of one kernel: what its templates place, every number resolved. `plan` makes it."""

from dataclasses import dataclass
from typing import Any

from mla_codegen.plan.families.request import BALANCED_ROWS, Resolved


@dataclass(frozen=True)
class KernelPlan:
    """One kernel file, every number resolved. Field names are what the templates say."""

    name: str
    spec_name: str
    spec_file: str
    build_command: str
    origin: str
    title: str
    summary: str
    target: str
    family: str
    # shape; None: kernels for any shape
    batch: int | None
    kv_len: int | None
    # dimensions
    heads: int
    latent: int
    rope: int
    row: int
    # element types
    q: str
    kv: str
    page_size: int | None  # KV rows of a page; None: the KV is ragged
    out: str
    compute: str  # element type of the products
    details: Any  # what the family's templates need beside this: `f` there
    # tiles and launch
    splits: int | None
    max_splits: int
    all_splits: int  # the same, rounded up to a power of two
    merge_at_once: bool  # stage 2 loads all splits' partials at once, not MERGE_TILE at a time
    block_n: int
    block_h: int
    head_blocks: int
    num_warps: int
    num_stages: int
    waves_per_eu: int | None
    split_tile: int
    stage2_warps: int
    places: int
    resident: int
    shared_bytes: int
    # steps
    exp2: bool
    fast_rcp: bool
    reciprocal: str | None  # template of `reciprocal`
    xcd_remap: bool
    xcds: int
    streaming: bool
    peeled: bool
    direct: bool
    balanced: bool  # programs take equal shares of all query rows' tiles, not a fixed number of splits of each
    masked_heads: bool
    # where it came from
    resolved: dict[str, Resolved]
    optimizations: tuple[str, ...]
    not_taken: tuple[str, ...]

    @property
    def paged(self) -> bool:
        return self.page_size is not None

    @property
    def rows_are_pages(self) -> bool:
        return self.page_size == 1

    @property
    def gathered(self) -> bool:
        """A tile may lie in several pages."""
        return self.page_size is not None and self.page_size % self.block_n != 0

    @property
    def exp(self) -> str:
        return "tl.math.exp2" if self.exp2 else "tl.exp"

    @property
    def exp_name(self) -> str:
        return "exp2" if self.exp2 else "exp"

    @property
    def log(self) -> str:
        return "tl.math.log2" if self.exp2 else "tl.log"

    @property
    def splits_name(self) -> str:
        return "SPLITS" if self.splits else "splits"

    @property
    def splits_value(self) -> str:
        return "SPLITS.value" if self.splits else "splits"

    @property
    def any_splits(self) -> bool:
        """It takes the number of splits at run time."""
        return self.splits is None and not self.balanced

    @property
    def results(self) -> str:
        shares = ", shares" if self.balanced else ""
        return "out, lse" if self.direct else f"partial, partial_lse{shares}"

    @property
    def occupancy(self) -> tuple[int, int]:
        """Compute units of the device, and programs that share one."""
        return self.places // self.resident, self.resident

    @property
    def max_rows(self) -> int:
        return BALANCED_ROWS

    @property
    def unspecialized(self) -> str:
        """Stage 1's integers that differ from call to call and make no other binary."""
        names = ["batch", "q_len"] + ["page_stride"] * self.paged
        if self.balanced:
            names += ["total_q", "programs"]
        elif not self.splits:
            names.append("splits")
        return str(names).replace("'", '"')

    @property
    def ranges(self) -> str:
        """Arguments that say which rows a query row sees."""
        if self.paged:
            return "qo_indptr, kv_indptr, kv_lens, kv_visible, batch, q_len, page_stride"
        return "qo_indptr, kv_indptr, kv_visible, batch, q_len"

    @property
    def grid1(self) -> str:
        factors = ["programs" if self.balanced else "total_q"]
        if self.head_blocks > 1:
            factors.append("HEAD_BLOCKS.value")
        if not self.direct and not self.balanced:
            factors.append(self.splits_value)
        return " * ".join(factors)

    @property
    def program_is(self) -> str:
        parts = ["query row"]
        if self.head_blocks > 1:
            parts.append("head block")
        if not self.direct:
            parts.append("split")
        return ", ".join(parts)
