"""What a template family is: a class with these few methods, one object of it in the registry."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from mla_codegen.catalog.bounds import BOUND_16_BIT, BOUND_FP8, LSE_BOUND_16_BIT, LSE_BOUND_FP8
from mla_codegen.plan.families.request import Request, Resources
from mla_codegen.plan.families.stages import Stage
from mla_codegen.plan.work import Merge, Work, power_of_two
from mla_codegen.runtime.formats import ELEMENTS
from mla_codegen.spec.errors import Problem

MERGE_AT_ONCE = 64  # splits whose partials (of 512 columns) fit the registers of 8 warps
MERGE_TILE = 16  # splits that 4 warps merge at a time otherwise
# Time of a KV row by the columns of a program, 16 being 1: products and softmax of plain Triton beside the traffic.
ROW_TIME = {16: 1.0, 32: 1.2, 64: 1.6, 128: 2.8}


class Family(ABC):
    """Which kernels a family can make, with which numbers, and what its templates need to know.

    name      also the folder of its templates
    gluon     its stage 1 is Gluon, which Triton's interpreter does not run
    balances  it has kernels whose programs partition the tiles of all query rows
    packs     it has kernels whose blocks of columns take several query tokens of a request
    tiles     KV comes by TMA: stage 1 takes descriptors instead of a pointer
    strided   its kernels take layouts other than the usual ones: pages apart, strided results, LSE to base 2
    takes     optimisations that its kernels have if a spec says so; always: those that they have in any case;
              never: those that they lack, with the reason. Any other is an error in a spec
    settings  settings of a spec that concern it alone
    tunable   what `tune` may try; the plan says which combinations are legal
    """

    name: ClassVar[str]
    gluon: ClassVar[bool] = False
    balances: ClassVar[bool] = False
    packs: ClassVar[bool] = False
    tiles: ClassVar[bool] = False
    strided: ClassVar[bool] = False
    takes: ClassVar[frozenset[str]] = frozenset()
    always: ClassVar[frozenset[str]] = frozenset()
    never: ClassVar[Mapping[str, str]] = {}
    settings: ClassVar[frozenset[str]] = frozenset()
    tunable: ClassVar[Mapping[str, Sequence[int]]] = {}

    @property
    def known(self) -> frozenset[str]:
        """The optimisations and settings of its own that a spec may name."""
        return self.takes | self.always | self.settings | set(self.never)

    @property
    def template(self) -> str:
        return f"{self.name}/kernel.py.jinja"

    @abstractmethod
    def refuse(self, request: Request) -> str | None:
        """Why the family cannot serve, or None."""

    @abstractmethod
    def resources(self, request: Request) -> Resources | list[Problem]:
        """Tile and launch numbers, or what stands in their way."""

    @abstractmethod
    def details(self, request: Request) -> Any:
        """The rest of what the templates place; `compute` says the element type of the products."""

    @abstractmethod
    def stages(self, kernel: Any) -> list[Stage]:
        """The kernels in the file of a `KernelPlan`, for the compiler."""

    def merge(self, request: Request, work: Work) -> Merge:
        """Stage 2: all splits at once where their partials fit the registers, else some at a time."""
        splits = power_of_two(work.max_splits)
        at_once = work.splits is not None and splits <= MERGE_AT_ONCE
        return Merge(
            splits,
            masked=splits != work.splits,
            tile=splits if at_once else MERGE_TILE,
            warps=8 if at_once and splits > MERGE_TILE else 4,
            columns=request.latent,
        )

    def unpacked(self, request: Request, resources: Resources) -> str | None:
        """Why a block of columns takes one query token of several; None: it takes as many as it has room for."""
        if not self.packs:
            return f"the family {self.name} has no blocks of several query tokens"
        if request.format.record:
            return f"blocks of columns take one query token of {request.kv} KV"
        if request.heads % resources.block_h == 0:
            return f"blocks of {resources.block_h} columns divide the {request.heads} heads of a query token"
        return None

    def row_time(self, request: Request, resources: Resources) -> float:
        """An estimate: time of a KV row of a block of columns, of 16 of them being 1."""
        return ROW_TIME[resources.block_h]

    def bounds(self, details: Any) -> tuple[float, float]:
        """Errors of the output and of the LSE that are allowed."""
        fp8 = ELEMENTS[details.compute].fp8
        return (BOUND_FP8, LSE_BOUND_FP8) if fp8 else (BOUND_16_BIT, LSE_BOUND_16_BIT)

    def needs(self, details: Any) -> frozenset[str]:
        """Features of a kernel, in the words of `runtime.arguments`, that are the family's alone."""
        return frozenset()

    def facts(self, request: Request, details: Any) -> dict[str, str]:
        """What the records of its arguments leave open: type of the KV and how `run` gives it."""
        return {"kv_type": ELEMENTS[request.kv].pointer, "kv_given": "kv", "kv_layout_given": "", "aligned": ""}
