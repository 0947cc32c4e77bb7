"""Absorbed MLA decode for transformers' `DeepseekV3ForCausalLM` and `DeepseekV2ForCausalLM`, its latent cache in pages.

    model = DeepseekV3ForCausalLM(config).bfloat16()
    mla_decode = build(model.config, page_size=64)     # kernels for its heads and dims, in a folder of their own
    use(model, mla_decode)                             # from here on its attention runs on them
    model.generate(tokens, past_key_values=LatentCache(model, requests=len(tokens), rows=4096))

transformers caches latents, too, but expands them for every head at every step. Here decode leaves them as they are: a
head's key part of `kv_b_proj` is multiplied into the query, its value part into the output, and the kernels read a KV
row of latent + rope once for all heads. Prompts are expanded, as transformers does it: there that is less work.

`python examples/transformers_mla.py` tries it, see `main`. Tried with transformers 5.17.
"""

import argparse
import copy
import importlib
import os
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before triton is imported

import yaml
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

NAME = "mla_codegen"  # as `model.set_attn_implementation` knows it
Decode = Callable[..., torch.Tensor]


def build(config: Any, page_size: int, batch: int = 16, kv_len: int = 1024, folder: Path | None = None) -> Decode:
    """`mla_decode` of kernels for a model, for bf16 KV in pages, tuned for so many requests of so many rows.

    folder   where the package goes; None: a new temporary one. Servers build once and import what is there
    """
    from mla_codegen.plan.resolve import make_plan
    from mla_codegen.publish.write import fresh_build, publish
    from mla_codegen.spec.load import parse_spec

    hopper = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
    spec = {
        "target": "sm_90" if hopper else "portable",
        "model": {
            "num_heads": config.num_attention_heads,
            "kv_lora_rank": config.kv_lora_rank,
            "qk_rope_head_dim": config.qk_rope_head_dim,
        },
        "dtypes": {"q": "bf16", "kv": ["bf16"], "out": "bf16"},
        "kv": {"layout": "paged", "page_size": page_size},
        "defaults": {"optimizations": ["exp2", "direct_out", "peeled_tail"]},
        "shapes": [{"batch": batch, "kv_len": kv_len}],
    }
    folder = folder or Path(tempfile.mkdtemp())
    package = f"mla_{config.num_attention_heads}_{config.kv_lora_rank}_{config.qk_rope_head_dim}_{page_size}"
    plan = make_plan(parse_spec(yaml.safe_dump(spec), "model.yaml").spec, "model.yaml")
    publish(fresh_build([plan], folder / package), folder / package, {plan.name})
    sys.path.insert(0, str(folder))
    return importlib.import_module(f"{package}.dispatch").mla_decode  # type: ignore[no-any-return]


@dataclass
class Latents:
    """What a layer's attention gets in place of keys: its cache, and the new tokens' latents and rope parts."""

    layer: "LatentLayer"
    latent: torch.Tensor  # [requests, 1, tokens, latent], normalised
    rope: torch.Tensor  # [requests, 1, tokens, rope], rotated


class LatentLayer(CacheLayerMixin):
    """A layer's part of a `LatentCache`: `kv` [pages, page_size, row], whose pages are all layers' rows apart."""

    def __init__(self, cache: "LatentCache", kv: torch.Tensor):
        super().__init__()
        self.cache, self.kv, self.seen = cache, kv, 0
        self.is_initialized = True

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        pass  # the pool is there from the beginning

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return Latents(self, key_states, value_states), None  # written by `attention`, which knows the padding

    def write(self, latents: Latents) -> None:
        """Append the new tokens' rows."""
        pages, offsets = self.cache.where(self.seen, latents.latent.shape[2])
        self.kv[pages, offsets] = torch.cat([latents.latent, latents.rope], -1)[:, 0]
        self.seen += latents.latent.shape[2]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.seen + query_length, 0

    def get_seq_length(self) -> int:
        return self.seen

    def get_max_length(self) -> int:
        return self.cache.rows

    def reset(self) -> None:
        self.seen = 0

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        raise NotImplementedError("requests keep their pages: beam search would have to copy the last one")


class LatentCache(Cache):
    """Latents and rope parts of all layers in pages of one pool [pages, layers, page_size, latent + rope].

    A page number stands for the same rows of every layer, so there is one table [requests, pages of a request]. Each
    layer's part of the pool is a view with pages apart, which the kernels read as it lies. Prompts may be padded on the
    left: padding has no rows.

    requests    of a batch; rows: most tokens of each of them, prompt and generated ones
    """

    def __init__(self, model: PreTrainedModel, requests: int, rows: int, page_size: int = 64):
        config, device = model.config, model.device
        self.rows, self.page_size = rows, page_size
        each = -(-rows // page_size)
        row = config.kv_lora_rank + config.qk_rope_head_dim
        layers = config.num_hidden_layers
        self.pool = torch.empty(requests * each + 1, layers, page_size, row, dtype=torch.bfloat16, device=device)
        # Pages in any order, as requests that come and go leave them. The last one takes what padding writes.
        self.table = torch.randperm(requests * each, device=device).int().view(requests, each)
        self.qo_indptr = torch.arange(requests + 1, dtype=torch.int32, device=device)
        self.padding = torch.zeros(requests, dtype=torch.int64, device=device)
        self._where: tuple[tuple[int, int], Any] = ((-1, -1), None)
        super().__init__(layers=[LatentLayer(self, self.pool[:, layer]) for layer in range(layers)])

    def where(self, seen: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(pages, rows in them) [requests, count] of the tokens behind the first `seen`; all layers ask the same."""
        if self._where[0] != (seen, count):
            if seen + count > self.rows:
                raise ValueError(f"a request would have {seen + count} rows; the cache was made for {self.rows}")
            at = seen + torch.arange(count, device=self.table.device) - self.padding[:, None]
            pages = self.table.gather(1, at.clamp(min=0) // self.page_size).long()
            pages = torch.where(at < 0, len(self.pool) - 1, pages)
            self._where = ((seen, count), (pages, at % self.page_size))
        return self._where[1]  # type: ignore[no-any-return]

    def lengths(self, seen: int) -> torch.Tensor:
        """KV rows of each request [requests] int32."""
        return (seen - self.padding).int()


def use(model: PreTrainedModel, mla_decode: Decode) -> None:
    """Let the model's attention run on `mla_decode`, wherever it is called with a `LatentCache`.

    `set_attn_implementation("eager")` undoes it. Raises ValueError for a model without such MLA, or not in bf16.
    """
    modules = [module for module in model.modules() if hasattr(module, "expand_kv") and hasattr(module, "kv_b_proj")]
    if not modules or model.dtype is not torch.bfloat16:
        raise ValueError(f"{type(model).__name__} in {model.dtype}: it must have MLA with `expand_kv`, in bf16")
    for module in modules:
        expand = type(module).expand_kv.__get__(module)
        module.expand_kv = lambda latent, rope, expand=expand: (
            (latent, None) if isinstance(latent, Latents) else expand(latent, rope)
        )
        module.expanded = expand
        nope, value = module.qk_nope_head_dim, module.v_head_dim
        parts = module.kv_b_proj.weight.detach().view(module.num_heads, nope + value, module.kv_lora_rank)
        module.w_uk, module.w_uv = parts.split([nope, value], 1)
        module.mla_decode = mla_decode
    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, sdpa_mask)
    model.set_attn_implementation(NAME)


def attention(
    module: Any, query: torch.Tensor, key: Any, value: Any, attention_mask: torch.Tensor | None, **options: Any
) -> tuple[torch.Tensor, None]:
    """What transformers calls in every layer.

    query [requests, heads, tokens, nope + rope] -> [requests, tokens, heads, value]
    """
    if not isinstance(key, Latents):
        return sdpa_attention_forward(module, query, key, value, attention_mask, **options)  # type: ignore[return-value]
    layer, cache = key.layer, key.layer.cache
    requests, heads, tokens, _ = query.shape
    prompt = layer.seen == 0
    if prompt and attention_mask is not None:  # the last token sees all of its request
        cache.padding = tokens - attention_mask[:, 0, -1].bool().sum(-1)
    layer.write(key)
    if prompt:
        expanded = module.expanded(key.latent, key.rope)
        return sdpa_attention_forward(module, query, *expanded, attention_mask, **options)  # type: ignore[return-value]

    nope, latent = module.qk_nope_head_dim, module.kv_lora_rank
    q = query.new_empty(requests, tokens, heads, latent + module.qk_rope_head_dim)
    q[..., :latent] = torch.einsum("bhtn,hnl->bthl", query[..., :nope], module.w_uk)
    q[..., latent:] = query[..., nope:].transpose(1, 2)
    out = module.mla_decode(
        q.flatten(0, 1), layer.kv, cache.qo_indptr * tokens, block_table=cache.table, kv_lens=cache.lengths(layer.seen),
        sm_scale=module.scaling, max_kv_len=layer.seen,
    )  # fmt: skip
    return torch.einsum("bthl,hvl->bthv", out.view(requests, tokens, heads, latent), module.w_uv), None


def small_model(version: int, large: bool) -> PreTrainedModel:
    """A random DeepSeek-V2 or V3 of a few layers, dense: rounding must not send tokens to other experts."""
    import transformers

    layers, size = (6, 1024) if large else (2, 64)
    dims = {"kv_lora_rank": 512, "qk_rope_head_dim": 64} if large else {"kv_lora_rank": 128, "qk_rope_head_dim": 32}
    config = getattr(transformers, f"DeepseekV{version}Config")(
        vocab_size=1000, hidden_size=size, intermediate_size=2 * size, num_hidden_layers=layers, q_lora_rank=size,
        num_attention_heads=16 if large else 4, num_key_value_heads=16 if large else 4, qk_nope_head_dim=64,
        v_head_dim=64, n_routed_experts=8, num_experts_per_tok=2, n_group=1, topk_group=1, moe_intermediate_size=32,
        first_k_dense_replace=layers, max_position_embeddings=8192, eos_token_id=None, num_nextn_predict_layers=0,
        initializer_range=0.8 * size**-0.5, **dims,
    )  # fmt: skip
    model = getattr(transformers, f"DeepseekV{version}ForCausalLM")(config)
    return model.eval().to("cuda" if torch.cuda.is_available() else "cpu", torch.bfloat16)  # type: ignore[no-any-return]


@torch.no_grad()
def forced(model: PreTrainedModel, tokens: torch.Tensor, mask: torch.Tensor, prompt: int, cache: Any) -> torch.Tensor:
    """Logits [requests, steps, vocabulary] fp32 of a prompt and then one token after the other, as they are given."""
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    found, begin = [], 0
    for end in range(prompt, tokens.shape[1]):
        out = model(
            tokens[:, begin:end], attention_mask=mask[:, :end], position_ids=positions[:, begin:end],
            past_key_values=cache, use_cache=True,
        )  # fmt: skip
        cache, begin = out.past_key_values, end
        found.append(out.logits[:, -1].float())
    return torch.stack(found, 1)


def timed(model: PreTrainedModel, tokens: torch.Tensor, mask: torch.Tensor, new: int, cache: Any) -> tuple[Any, float]:
    """(tokens [requests, prompt + new], seconds) of generating greedily, the prompts' time included."""
    if tokens.is_cuda:
        torch.cuda.synchronize()
    begin = time.perf_counter()
    found = model.generate(
        tokens, attention_mask=mask, max_new_tokens=new, do_sample=False, past_key_values=cache, pad_token_id=0
    )
    if tokens.is_cuda:
        torch.cuda.synchronize()
    return found, time.perf_counter() - begin


def speed(
    model: PreTrainedModel, tokens: torch.Tensor, mask: torch.Tensor, new: int, cache: Callable[[], Any]
) -> tuple[Any, float]:
    """(tokens [requests, prompt + new], tokens a second that decode steps generate)."""
    timed(model, tokens, mask, 2, cache())  # what is compiled at first
    _, prompts = timed(model, tokens, mask, 1, cache())
    generated, all_of_it = timed(model, tokens, mask, new, cache())
    return generated, len(tokens) * (new - 1) / (all_of_it - prompts)


def difference(got: torch.Tensor, want: torch.Tensor) -> float:
    """Relative L2 norm."""
    return float((got - want).norm() / want.norm())


def compare(version: int, requests: int, prompt: int, new: int, large: bool) -> dict[str, float]:
    """Generate by transformers' eager attention and by the kernels; errors of logits against fp32, tokens a second.

    The first request's prompt is shorter, padded on the left. Both are given the tokens that the eager model generated.
    """
    torch.manual_seed(version)
    model = small_model(version, large)
    page_size, rows = 64 if large else 16, prompt + new
    tokens = torch.randint(1, 1000, (requests, prompt), device=model.device)
    mask = torch.ones(requests, rows, dtype=torch.int64, device=model.device)
    mask[0, : prompt // 3] = 0

    def cache() -> LatentCache:
        return LatentCache(model, requests, rows, page_size)

    model.set_attn_implementation("eager")
    generated, eager_speed = speed(model, tokens, mask[:, :prompt], new, lambda: None)
    eager = forced(model, generated, mask, prompt, None)
    exact = forced(copy.deepcopy(model).float(), generated, mask, prompt, None)
    use(model, build(model.config, page_size, requests, rows))
    ours, our_speed = speed(model, tokens, mask[:, :prompt], new, cache)
    logits = forced(model, generated, mask, prompt, cache())
    return {
        "eager_error": difference(eager, exact),
        "error": difference(logits, exact),
        "apart": difference(logits, eager),
        "same_tokens": float((ours == generated)[:, prompt:].float().mean()),
        "eager_tokens_per_s": eager_speed,
        "tokens_per_s": our_speed,
    }


def main() -> int:
    """Compare both on small random models; exit code 1 if logits are not as near to fp32 as eager attention's."""
    large = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=16 if large else 2)
    parser.add_argument("--prompt", type=int, default=4096 if large else 24, help="tokens of a prompt")
    parser.add_argument("--new", type=int, default=32 if large else 12, help="tokens to generate")
    options = parser.parse_args()
    right = True
    for version in (2, 3):
        found = compare(version, options.requests, options.prompt, options.new, large)
        fine = found["error"] <= 1.25 * found["eager_error"]
        right &= fine
        print(
            f"DeepSeek-V{version}: logits off fp32 by {found['error']:.1e}, eager attention's by "
            f"{found['eager_error']:.1e}, from each other by {found['apart']:.1e}: {'ok' if fine else 'TOO FAR'}; "
            f"{found['same_tokens']:.0%} of the tokens the same; {found['tokens_per_s']:.1f} tokens/s, eager "
            f"{found['eager_tokens_per_s']:.1f}",
            flush=True,
        )
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
