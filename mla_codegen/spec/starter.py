"""The commented spec that `mla-codegen init` writes: a file that builds as it is and explains each of its keys."""

import textwrap
from dataclasses import dataclass

from mla_codegen.catalog.optimizations import OPT_IN, OPTIMIZATIONS
from mla_codegen.catalog.targets import Target, find_target
from mla_codegen.spec.errors import UnknownName, unknown_target
from mla_codegen.spec.schema import SCHEMA_FILE


@dataclass(frozen=True)
class MlaModel:
    """A model with latent attention. `gpus`: over how many its heads are usually split."""

    name: str
    title: str
    heads: int
    gpus: int
    latent: int = 512
    rope: int = 64


_ALL = (
    MlaModel("deepseek-v2", "DeepSeek-V2", 128, 8),
    MlaModel("deepseek-v2-lite", "DeepSeek-V2-Lite", 16, 1),
    MlaModel("deepseek-v3", "DeepSeek-V3", 128, 8),
    MlaModel("deepseek-r1", "DeepSeek-R1", 128, 8),
    MlaModel("kimi-k2", "Kimi K2", 64, 8),
    MlaModel("moonlight-16b-a3b", "Moonlight-16B-A3B", 16, 1),
    MlaModel("glm-4.7-flash", "GLM-4.7-Flash", 20, 1),
    MlaModel("minicpm3-4b", "MiniCPM3-4B", 40, 1, latent=256, rope=32),
    MlaModel("mistral-small-4", "Mistral Small 4", 32, 1, latent=256, rope=64),
)

MODELS: dict[str, MlaModel] = {model.name: model for model in _ALL}


def starter(model_name: str, target_name: str, schema: str = SCHEMA_FILE) -> str:
    """The text of a spec for a model on a target; it loads and builds as it is.

    `model_name` is a key of MODELS, also written as on a model hub (`deepseek-ai/DeepSeek-V3`); `target_name` may be a
    GPU's; `schema` is where the JSON Schema lies, from the spec's folder. Raises UnknownName.
    """
    model = MODELS.get(model_name.rsplit("/", 1)[-1].lower().replace("_", "-"))
    if model is None:
        raise UnknownName("model", model_name, MODELS)
    target = find_target(target_name)
    if target is None:
        raise unknown_target(target_name)
    parts = [_head(model, target, schema), _model(model), _dtypes(target), _KV, _defaults(target), _SHAPES]
    return "\n".join(parts)


def _head(model: MlaModel, target: Target, schema: str) -> str:
    return f"""\
# yaml-language-server: $schema={schema}
# {model.title} on {target.name} ({target.title}). The file's name becomes the name of the kernels' folder.
# Editors complete and check this file by the schema of the first line: mla-codegen schema > {SCHEMA_FILE}

# The architecture to build for; `mla-codegen list targets` prints all of them.
target: {target.name}
"""


def _model(model: MlaModel) -> str:
    here = model.heads // model.gpus
    heads = f"  # Query heads on one GPU. {model.title} has {model.heads}"
    if model.gpus > 1:
        counts = ", ".join(f"{model.heads // n} on {n}" for n in (1, 2, 4, 8, 16) if n != model.gpus)
        heads += f"; tensor parallelism over {model.gpus} GPUs leaves {here}.\n  # Others: {counts}."
    else:
        heads += "; divide them by the GPUs of tensor parallelism."
    return f"""\
model:
{heads}
  num_heads: {here}
  # A KV row has kv_lora_rank latent columns, key and value at once, and qk_rope_head_dim columns that are key only.
  kv_lora_rank: {model.latent}
  qk_rope_head_dim: {model.rope}
"""


def _dtypes(target: Target) -> str:
    note = ""
    if target.fp8_mma and "fp8_e4m3fn" not in target.fp8_mma:
        native = ", ".join(sorted(target.fp8_mma))
        note = f"  # With fp8_mma {target.name} multiplies {native}: e4m3fn bytes are taken so, at half their value.\n"
    return f"""\
dtypes:
  q: bf16
  # What the KV cache may hold, in order of preference: a call that offers several forms gets the first.
{note}  kv: [fp8_e4m3fn, bf16]
  out: bf16
"""


_KV = """\
# Where the KV rows of a request lie: one after the other in a tensor (ragged, if nothing is said), or in pages of a
# pool, in any order, as a block table says.
# kv: {layout: paged, page_size: 64}
"""


def _defaults(target: Target) -> str:
    lines = [
        "# Every shape inherits these and may override any of them. What nobody sets is chosen when the spec is built;",
        "# `mla-codegen explain` shows each number and where it came from.",
        "defaults:",
        "  # splits: auto      # parts that the KV of one query row is cut into, so that few rows fill the GPU too",
        "  # block_n: 64       # KV rows of a tile",
        "  # block_h: 16       # heads of a program",
        "  # num_warps: 4      # warps of a program",
        "  # num_stages: 2     # tiles on their way at once; each takes shared memory",
    ]
    if target.waves_per_eu:
        lines.append("  # waves_per_eu: 2   # waves that should share a SIMD: the compiler budgets registers by it")
    lines += [
        "  # per_kv:           # settings for one KV type only",
        "  #   bf16: {block_n: 32}",
        "  # `mla-codegen list optimizations` says more of these:",
        "  optimizations:",
    ]
    for option in OPTIMIZATIONS.values():
        if option.refused_on(target) is not None:
            continue
        lines += textwrap.wrap(option.meaning, 110, initial_indent="    # ", subsequent_indent="    # ")
        lines.append(f"    {'# ' if option.name in OPT_IN else ''}- {option.name}")
    return "\n".join(lines) + "\n"


_SHAPES = """\
# The calls that must be fastest: each shape gets kernels of its own. General kernels serve all other calls.
shapes:
  - {batch: 1, kv_len: 8192} # one request over 8192 KV rows
  - {batch: 16, kv_len: 8192}
  - {batch: 64, kv_len: 8192}
  - {batch: 256, kv_len: 8192}
  # A shape may override what it inherits; +name and -name edit the inherited optimizations:
  # - {batch: 64, kv_len: 1024, splits: 4, num_warps: 8, optimizations: [-peeled_tail]}
"""
