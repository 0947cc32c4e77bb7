"""Whether a folder of kernels serves a model, and in words what to build where it does not."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from mla_codegen.catalog.optimizations import OPT_IN, OPTIMIZATIONS
from mla_codegen.catalog.targets import TARGETS
from mla_codegen.runtime.formats import ELEMENTS

NAMES = {element.dtype: element.name for element in ELEMENTS.values()}  # as specs say them


@dataclass(frozen=True)
class Model:
    """What an engine asks of a build.

    target            architecture of the device (sm_90, gfx942, ...), or cpu
    heads             query heads of a call: those of one GPU, times the ranks whose heads a call gathers
    latent, rope      columns of a KV row: kv_lora_rank and qk_rope_head_dim
    dtype             of q and of the output
    kv                of the KV cache
    batch_invariant   the engine runs in its batch-invariant mode
    """

    target: str
    heads: int
    latent: int
    rope: int
    dtype: torch.dtype
    kv: torch.dtype
    batch_invariant: bool = False

    def __str__(self) -> str:
        kinds = f"{name(self.dtype)} q and output, {name(self.kv)} KV in pages"
        mode = ", batch-invariant" if self.batch_invariant else ""
        return f"{self.heads} heads, {self.latent}+{self.rope}, {kinds}{mode}, on {self.target}"


def name(dtype: torch.dtype) -> str:
    """An element type as a spec says it."""
    return NAMES.get(dtype) or str(dtype).removeprefix("torch.")


def unlike(build: Any, model: Model, page_size: int | None = None) -> list[str]:
    """What of a build is not what the model asks for. `page_size` None: any pages will do."""
    found = []
    if model.target != "cpu" and build.target not in (model.target, "portable"):
        found.append(f"it is for {build.target}")
    if why := build.unfit(model.target):
        found.append(why)
    if build.heads != model.heads:
        found.append(f"{build.heads} heads")
    if (build.latent, build.rope) != (model.latent, model.rope):
        found.append(f"KV rows of {build.latent}+{build.rope}")
    if build.q is not model.dtype or build.out is not model.dtype:
        found.append(f"{name(build.q)} q and {name(build.out)} output")
    if name(model.kv) not in build.kv:
        found.append(f"{', '.join(build.kv)} KV")
    if build.topk is not None:
        found.append("sparse KV")
    elif build.page_size is None:
        found.append("ragged KV")
    elif page_size not in (None, build.page_size):
        found.append(f"pages of {build.page_size}")
    if model.batch_invariant and not build.batch_invariant:
        found.append("not batch-invariant")
    return found


def refusal(folder: str, builds: Sequence[Any], model: Model, page_size: int | None = None) -> str:
    """Why no build of the folder serves the model, and the spec to write."""
    asked = f"{model}" if page_size is None else f"{model}, {page_size} rows a page"
    lines = [f"no kernels in {folder} for {asked}. Built there, and what does not fit:"]
    lines += [f"  {build}: {'; '.join(unlike(build, model, page_size))}" for build in builds]
    fitting = {build.page_size for build in builds if not unlike(build, model)}
    if fitting:
        sizes = " or ".join(map(str, sorted(fitting)))
        lines.append(f"Give the engine a block size of {sizes}; or build for this one:")
    command = f"mla-codegen build model.yaml --out {folder}"
    lines += [f"Write this spec as model.yaml, and run `{command}`:", "", spec(model, page_size or 64)]
    return "\n".join(lines)


def spec(model: Model, page_size: int) -> str:
    """A spec whose build serves the model; it builds as it is."""
    target = TARGETS.get(model.target, TARGETS["portable"])
    options = [
        option.name
        for option in OPTIMIZATIONS.values()
        if option.refused_on(target) is None and option.name not in OPT_IN
    ]
    dtype, kv = name(model.dtype), name(model.kv)
    return "\n".join(
        [
            f"target: {target.name}",
            f"model: {{num_heads: {model.heads}, kv_lora_rank: {model.latent}, qk_rope_head_dim: {model.rope}}}",
            f"dtypes: {{q: {dtype}, kv: [{kv}], out: {dtype}}}",
            f"kv: {{layout: paged, page_size: {page_size}}}",
            *(["batch_invariant: true"] if model.batch_invariant else []),
            f"defaults: {{optimizations: [{', '.join(options)}]}}",
            "shapes: # the calls that must be fastest; all others are served too",
            "  - {batch: 64, kv_len: 8192}",
            "",
        ]
    )
