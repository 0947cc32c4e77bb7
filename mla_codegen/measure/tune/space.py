"""What may be tried for one shape in one KV dtype: the knobs that families declare, and what the plan makes of them.

A candidate is a set of settings laid over those of the spec, as if the shape's `per_kv` said them. The plan judges
whether it is legal; two candidates whose kernels have the same plan are the same.
"""

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from typing import Any

from pydantic import ValidationError

from mla_codegen.catalog.targets import TARGETS
from mla_codegen.measure.workload import Workload, workload_of
from mla_codegen.plan.families import FAMILIES
from mla_codegen.plan.resolve import KernelPlan, Plan, PlanError, make_plan
from mla_codegen.plan.work import power_of_two
from mla_codegen.render.templates import render_kernel
from mla_codegen.spec.datamodel import KVDtype, Settings, Shape, Spec

NAME = "tuned"  # of every candidate's spec: its real name is no part of what is timed
FILE = f"{NAME}.yaml"
MAX_WAVES = 16  # splits that give more programs than this many times what the device runs at once are not tried
METHOD = 1  # a change in how candidates are timed makes old timings incomparable

Knobs = Mapping[str, tuple[Any, ...]]


@dataclass(frozen=True)
class Candidate:
    """Settings and the kernel that they give. No settings: what the spec says now."""

    settings: dict[str, Any]
    plan: Plan

    @property
    def kernel(self) -> KernelPlan:
        """The shape's kernel; the plan's others are the general ones."""
        return self.plan.kernels[0]

    @cached_property
    def identity(self) -> str:
        """Equal for candidates that give the same kernel."""
        return repr(bare(self.kernel))

    @cached_property
    def source(self) -> str:
        """The kernel's file."""
        return render_kernel(self.kernel)

    def gives(self, other: "Candidate") -> bool:
        """Whether the other's kernel is the same, even if its plan has a number that the templates do not place."""
        return self.identity == other.identity or self.source == other.source

    def key(self, workload: Workload, device: str, triton: str) -> str:
        """What its timing is kept under: everything that decides it, the kernel's source above all."""
        parts = (str(METHOD), self.source, repr(workload), device, triton)
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]

    @property
    def resolved(self) -> dict[str, Any]:
        """Every knob's value, for people to read."""
        return {name: r.value for name, r in self.kernel.resolved.items() if r.value is not None}


def bare(kernel: KernelPlan) -> KernelPlan:
    """Without what names the spec and what explains the numbers."""
    return replace(kernel, spec_name="", spec_file="", resolved={}, not_taken=())


def as_candidate(kernel: KernelPlan) -> KernelPlan:
    """A kernel of a spec as a candidate's: under the name that all candidates have."""
    return replace(kernel, spec_name=NAME, spec_file=FILE)


class Space:
    """All candidates of one shape of a spec, in one KV dtype."""

    def __init__(self, spec: Spec, shape: Shape, kv: KVDtype):
        self.spec, self.shape, self.kv = spec, shape, kv
        self.target = TARGETS[spec.target]
        self.current = self.candidate({})
        self.workload = workload_of(self.current.plan, kv, shape.batch, shape.kv_len, shape.q_len)
        layers = (shape.per_kv.get(kv), shape, spec.defaults.per_kv.get(kv), spec.defaults)
        asked = next((layer.family for layer in layers if layer is not None and layer.family), None)
        names = self.target.families if asked is None else (asked,)
        self.families: dict[str, Knobs] = {name: self._knobs(name) for name in names}

    def __str__(self) -> str:
        return f"{self.kv} {self.workload.shape}"

    def _knobs(self, family: str) -> Knobs:
        """What the family declares as tunable, less what this target or this number of heads has no use for."""
        knobs = {name: tuple(values) for name, values in FAMILIES[family].tunable.items()}
        if not self.target.waves_per_eu:
            knobs.pop("waves_per_eu", None)
        if "block_h" in knobs:
            enough = max(16, power_of_two(self.spec.model.num_heads * self.shape.q_len))
            knobs["block_h"] = tuple(heads for heads in knobs["block_h"] if heads <= enough)
        if "splits" in knobs:
            knobs["splits"] = tuple(splits for splits in knobs["splits"] if splits <= self.shape.kv_len)
        return knobs

    def combinations(self) -> Iterator[dict[str, Any]]:
        """Every setting of every knob, legal or not."""
        for family, knobs in self.families.items():
            for values in product(*knobs.values()):
                yield {"family": family, **dict(zip(knobs, values, strict=True))}

    def legal(self, settings: Mapping[str, Any]) -> Plan | str:
        """The plan of some settings, or why there is none."""
        said = self.shape.per_kv.get(self.kv)
        before = said.model_dump(exclude_none=True) if said else {}
        try:
            layer = Settings(**{**before, **settings})
            shape = self.shape.model_copy(update={"per_kv": {self.kv: layer}})
            dtypes = self.spec.dtypes.model_copy(update={"kv": [self.kv]})
            plan = make_plan(self.spec.model_copy(update={"name": NAME, "shapes": [shape], "dtypes": dtypes}), FILE)
        except PlanError as error:
            return str(error)
        except ValidationError as error:
            return str(error.errors()[0]["msg"])
        kernel = plan.kernels[0]
        splits = kernel.splits or 1
        tiles = -(-self.shape.kv_len // kernel.block_n)
        if settings and splits > tiles:
            return f"{splits} splits of {tiles} tiles"
        programs = self.shape.batch * kernel.programs_of(self.shape.q_len) * splits
        if settings and splits > 1 and programs > MAX_WAVES * kernel.concurrent:
            return f"{splits} splits are more than {MAX_WAVES} waves of programs"
        return plan

    def candidate(self, settings: Mapping[str, Any]) -> Candidate:
        """The candidate of legal settings; ValueError says why others are not."""
        plan = self.legal(settings)
        if isinstance(plan, str):
            raise ValueError(plan)
        return Candidate(dict(settings), plan)

    def count(self, most: int) -> int:
        """How many combinations are legal; counting stops beyond `most`."""
        found = 0
        for settings in self.combinations():
            found += not isinstance(self.legal(settings), str)
            if found > most:
                break
        return found
