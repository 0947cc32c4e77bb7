"""The backend in vLLM's own classes: its layer, builder and metadata, against attention that nobody absorbed.

Where vLLM's compiled parts are missing its Python is enough. What they would do, prefill and the cache's update, is
done here in torch.
"""

import json
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

vllm = pytest.importorskip("vllm", reason="needs vLLM, of which its Python files and their imports are enough")

from vllm.config import (  # noqa: E402
    AttentionConfig,
    CacheConfig,
    DeviceConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    SpeculativeConfig,
    VllmConfig,
    set_current_vllm_config,
)
from vllm.model_executor.layers.attention import mla_attention  # noqa: E402
from vllm.v1.attention.backend import CommonAttentionMetadata  # noqa: E402
from vllm.v1.attention.backends.mla.prefill.base import MLAPrefillBackend  # noqa: E402
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend  # noqa: E402
from vllm.v1.kv_cache_interface import MLAAttentionSpec  # noqa: E402
from vllm.v1.worker import workspace  # noqa: E402

from mla_codegen.engines import vllm_plugin  # noqa: E402
from mla_codegen.engines.kernels import VARIABLE  # noqa: E402
from tests.builds import build, plan_of, spec_of  # noqa: E402

DEVICE = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
HEADS, LATENT, ROPE, NOPE, VALUE, PAGE = 2, 256, 64, 48, 40, 16
SCALE = (NOPE + ROPE) ** -0.5
PAGES = 24
MODEL = {
    "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "vocab_size": 512, "hidden_size": 128,
    "intermediate_size": 256, "moe_intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS, "n_shared_experts": 1, "n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 2,
    "topk_group": 1, "first_k_dense_replace": 1, "q_lora_rank": None, "kv_lora_rank": LATENT, "qk_rope_head_dim": ROPE,
    "qk_nope_head_dim": NOPE, "v_head_dim": VALUE, "max_position_embeddings": 512,
}  # fmt: skip


class Prefill(MLAPrefillBackend):
    """Causal attention of new tokens, request by request."""

    @staticmethod
    def get_name() -> str:
        return "TORCH"

    def run_prefill_new_tokens(self, q, k, v, return_softmax_lse, out=None, output_scale=None):  # type: ignore[no-untyped-def]
        assert not return_softmax_lse
        starts = self._prefill_metadata.query_start_loc.tolist()
        parts = []
        for begin, end in pairwise(starts):
            one = [given[begin:end].transpose(0, 1).float() for given in (q, k, v)]
            parts.append(torch.nn.functional.scaled_dot_product_attention(*one, is_causal=True, scale=self.scale))
        return torch.cat(parts, dim=1).transpose(0, 1).to(q.dtype)

    def run_prefill_context_chunk(self, *_: Any) -> Any:
        raise NotImplementedError


@pytest.fixture(scope="module", autouse=True)
def kernels(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Kernels for the model below, in the folder that the environment names."""
    where = tmp_path_factory.mktemp("vllm") / "kernels"
    model = {"num_heads": HEADS, "kv_lora_rank": LATENT, "qk_rope_head_dim": ROPE}
    shapes = [{"batch": 4, "kv_len": 64, "splits": 2}, {"batch": 2, "q_len": 3, "kv_len": 64}]
    plans = [plan_of(spec_of(model=model, kv={"layout": "paged", "page_size": PAGE}, shapes=shapes), "paged.yaml")]
    build(plans, where)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(VARIABLE, str(where))
        patch.setattr(mla_attention, "get_mla_prefill_backend", lambda _: Prefill)
        vllm_plugin.register()
        yield where
    register_backend(AttentionBackendEnum.CUSTOM, "")


@pytest.fixture(scope="module")
def model_config(tmp_path_factory: pytest.TempPathFactory) -> ModelConfig:
    where = tmp_path_factory.mktemp("model")
    (where / "config.json").write_text(json.dumps(MODEL))
    return ModelConfig(model=str(where), skip_tokenizer_init=True, dtype="bfloat16", max_model_len=512)


class Served:
    """A layer of the model, its builder, and a cache full of NaN but for what a step writes."""

    def __init__(self, model_config: ModelConfig, kv: str = "auto", drafted: int = 0, page: int = PAGE, **layer: Any):
        torch.manual_seed(0)
        self.fp8 = kv != "auto"
        speculative = None
        if drafted:
            speculative = SpeculativeConfig(method="ngram", num_speculative_tokens=drafted, prompt_lookup_max=2)
        self.config = VllmConfig(
            model_config=model_config,
            cache_config=CacheConfig(block_size=page, cache_dtype=kv),
            scheduler_config=SchedulerConfig(
                max_num_seqs=8, max_num_batched_tokens=512, max_model_len=512, is_encoder_decoder=False
            ),
            parallel_config=ParallelConfig(),
            attention_config=AttentionConfig(backend="CUSTOM"),
            device_config=DeviceConfig(device=DEVICE.type),
        )
        self.config.speculative_config = speculative
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.bfloat16)
        try:
            with set_current_vllm_config(self.config), DEVICE:
                given = {"num_heads": HEADS, "kv_lora_rank": LATENT, **layer}
                projection = torch.nn.Linear(given["kv_lora_rank"], given["num_heads"] * (NOPE + VALUE), bias=False)
                self.layer = mla_attention.MLAAttention(
                    scale=SCALE, qk_nope_head_dim=NOPE, qk_rope_head_dim=ROPE, v_head_dim=VALUE, q_lora_rank=None,
                    kv_b_proj=projection, cache_config=self.config.cache_config, prefix="model.layers.0.attn",
                    attn_backend=AttentionBackendEnum.CUSTOM.get_class(), **given,
                )  # fmt: skip
                self.layer.kv_b_proj = Tupled(projection)
                self.layer.impl.kv_b_proj = self.layer.kv_b_proj
                self.layer.impl.dcp_world_size = 1  # vLLM asks its process groups at the first call
                spec = MLAAttentionSpec(
                    block_size=page, num_kv_heads=1, head_size=LATENT + ROPE,
                    dtype=torch.uint8 if self.fp8 else torch.bfloat16,
                )  # fmt: skip
                self.builder = AttentionBackendEnum.CUSTOM.get_class().get_builder_cls()(
                    spec, ["model.layers.0.attn"], self.config, DEVICE
                )
        finally:
            torch.set_default_dtype(before)
        weights = projection.weight.detach().T.view(LATENT, HEADS, NOPE + VALUE)
        self.w_k, self.w_v = weights.split([NOPE, VALUE], dim=-1)
        self.layer.W_UV, self.layer.W_UK_T = self.w_v.transpose(0, 1), self.w_k.permute(1, 2, 0)
        self.scale = 0.25 if self.fp8 else 1.0
        self.layer._k_scale = torch.tensor(self.scale, device=DEVICE)

    def step(self, q_lens: list[int], kv_lens: list[int], padded: int = 0, layers: int = 1) -> None:
        """A step of requests: `q_lens` new tokens, `kv_lens` rows with them. `padded` ones are behind the last."""
        requests, tokens = len(q_lens) + padded, sum(q_lens) + padded
        pool = torch.full((PAGES, layers, PAGE, LATENT + ROPE), float("nan"), device=DEVICE, dtype=torch.bfloat16)
        cache = pool[:, -1]
        table = torch.full((requests, 16), -1, dtype=torch.int32)
        free = torch.randperm(PAGES, dtype=torch.int32)
        self.rows = []
        for request, rows in enumerate(kv_lens):
            count = -(-rows // PAGE)
            table[request, :count], free = free[:count], free[count:]
            new = torch.randn(rows, LATENT + ROPE, device=DEVICE).bfloat16()
            if self.fp8:
                new = (new / self.scale).to(torch.float8_e4m3fn).bfloat16()
            where = table[request, :count].long().to(DEVICE)
            room = cache[where].flatten(0, 1)
            room[:rows] = new
            cache[where] = room.view(count, PAGE, -1)
            self.rows.append(new.double() * self.scale)
        self.cache = pool.to(torch.float8_e4m3fn).view(torch.uint8)[:, -1] if self.fp8 else cache
        ends = torch.tensor([0, *q_lens] + [0] * padded).cumsum(0).int()
        self.common = CommonAttentionMetadata(
            query_start_loc=ends.to(DEVICE), query_start_loc_cpu=ends,
            seq_lens=torch.tensor([*kv_lens] + [0] * padded, dtype=torch.int32, device=DEVICE),
            seq_lens_cpu_upper_bound=torch.tensor([*kv_lens] + [0] * padded, dtype=torch.int32),
            num_reqs=requests, num_actual_tokens=tokens, max_query_len=max(q_lens), max_seq_len=max(kv_lens),
            block_table_tensor=table.to(DEVICE), slot_mapping=torch.zeros(tokens, dtype=torch.int64, device=DEVICE),
        )  # fmt: skip
        self.q_lens, self.kv_lens = q_lens, kv_lens
        self.q = torch.randn(tokens, HEADS, NOPE + ROPE, device=DEVICE).bfloat16()
        self.new = [rows[len(rows) - count :] for rows, count in zip(self.rows, q_lens, strict=True)]

    @torch.inference_mode()
    def forward(self, metadata: Any) -> torch.Tensor:
        """vLLM's layer over the step: [tokens, heads * value]."""
        new = torch.cat([*self.new, torch.zeros(len(self.q) - sum(self.q_lens), LATENT + ROPE, device=DEVICE).double()])
        latent, rope = new.bfloat16().split([LATENT, ROPE], dim=-1)
        out = torch.full((len(self.q), HEADS * VALUE), float("nan"), dtype=torch.bfloat16, device=DEVICE)
        return self.layer.forward_impl(self.q, latent, rope.unsqueeze(1), self.cache, metadata, output=out)

    def expected(self) -> torch.Tensor:
        """The same in float64 with keys and values of every head."""
        found, begin = [], 0
        for rows, q_len in zip(self.rows, self.q_lens, strict=True):
            latent, rope = rows.split([LATENT, ROPE], dim=-1)
            keys = torch.einsum("kl,lhn->hkn", latent, self.w_k.double())
            keys = torch.cat([keys, rope.expand(HEADS, -1, -1)], dim=-1)
            values = torch.einsum("kl,lhv->hkv", latent, self.w_v.double())
            scores = torch.einsum("qhd,hkd->hqk", self.q[begin : begin + q_len].double(), keys) * SCALE
            seen = torch.ones(q_len, len(rows), dtype=torch.bool, device=DEVICE).tril(len(rows) - q_len)
            weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
            found.append(torch.einsum("hqk,hkv->qhv", weights, values).flatten(1))
            begin += q_len
        return torch.cat(found)

    def check(self, metadata: Any) -> None:
        out, want = self.forward(metadata), self.expected()
        error = (out[: len(want)].double() - want).norm() / want.norm()
        assert error < 0.01
        assert not out[len(want) :].any()  # padding: 0


class Tupled(torch.nn.Module):
    """A projection as vLLM's parallel layers are called."""

    def __init__(self, linear: torch.nn.Linear):
        super().__init__()
        self.linear, self.weight = linear, linear.weight

    def forward(self, given: torch.Tensor) -> tuple[torch.Tensor, None]:
        return self.linear(given), None


@pytest.mark.parametrize("kv", ["auto", "fp8"])
def test_decode(model_config: ModelConfig, kv: str) -> None:
    """Ragged lengths, padding as a captured step has it, and a pool that layers share."""
    served = Served(model_config, kv)
    assert served.layer.attn_backend.indexes_kv_by_block_stride()
    served.step([1, 1, 1], [70, 1, 16], padded=1, layers=3)
    metadata = served.builder.build(0, served.common)
    assert metadata.num_prefills == 0 and metadata.decode.max_kv_len == 70
    served.check(metadata)


def test_drafted_tokens_and_prefill_in_one_step(model_config: ModelConfig) -> None:
    """Requests of several query tokens decode in one call, a prompt behind them goes through vLLM's prefill."""
    served = Served(model_config, drafted=2)
    assert served.builder.reorder_batch_threshold == 3
    served.step([3, 1, 2, 7], [40, 9, 2, 7])
    metadata = served.builder.build(0, served.common)
    assert (metadata.num_decodes, metadata.num_decode_tokens, metadata.num_prefills) == (3, 6, 1)
    assert metadata.decode.max_query_len == 3
    served.check(metadata)


def test_the_lse_is_the_natural_logarithm(model_config: ModelConfig) -> None:
    served = Served(model_config)
    served.step([1, 1], [33, 5])
    served.layer.impl.need_to_return_lse_for_decode = True  # as with decode context parallelism
    metadata = served.builder.build(0, served.common)
    q = torch.randn(2, HEADS, LATENT + ROPE, device=DEVICE).bfloat16()
    out, lse = served.layer.impl.forward_mqa(q, served.cache, metadata, served.layer)
    for request, rows in enumerate(served.rows):
        scores = q[request].double() @ rows.T * SCALE
        torch.testing.assert_close(lse[request].double(), scores.logsumexp(-1), atol=1e-4, rtol=1e-4)
    assert lse.dtype is torch.float32 and out.shape == (2, HEADS, LATENT)


def test_scratch_comes_from_the_workspace_of_vllm(model_config: ModelConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    if DEVICE.type == "cpu":
        monkeypatch.setattr(torch.accelerator, "empty_cache", lambda: None)  # it wants an accelerator
    workspace.init_workspace_manager(DEVICE)
    try:
        served = Served(model_config)
        assert served.builder.scratch == served.layer.impl.kernels.workspace_bytes(8) > 0
        workspace.lock_workspace()  # from here on it must not grow
        served.step([1, 1, 1], [70, 1, 16])
        served.check(served.builder.build(0, served.common))
    finally:
        workspace.reset_workspace_manager()


def test_a_captured_step(model_config: ModelConfig) -> None:
    """The capture's lengths are made up; on a GPU one graph serves steps of other lengths."""
    served = Served(model_config)
    served.step([1, 1, 1, 1], [40, 40, 40, 40])
    served.common.max_seq_len = 512
    metadata = served.builder.build_for_cudagraph_capture(served.common)
    assert metadata.decode.max_kv_len == 64  # the longest shape of the spec
    served.check(metadata)
    if DEVICE.type == "cpu":
        return
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = served.forward(metadata)
    first = served
    for q_lens, kv_lens, padded in (([1] * 4, [70, 1, 33, 16], 0), ([1, 1], [90, 2], 2)):
        now = Served(model_config)
        now.step(q_lens, kv_lens, padded)
        for name in ("query_start_loc", "seq_lens", "block_table_tensor"):
            getattr(first.common, name).copy_(getattr(now.common, name))
        first.q.copy_(now.q)
        first.cache.copy_(now.cache)
        graph.replay()
        want = now.expected()
        assert (captured[: len(want)].double() - want).norm() < 0.01 * want.norm()
        assert not captured[len(want) :].any()


def selected(**changes: Any) -> list[str]:
    """What vLLM's choice of a backend finds wrong with this one."""
    asked = {
        "head_size": 320, "dtype": torch.bfloat16, "kv_cache_dtype": "auto", "block_size": None, "use_mla": True,
        "has_sink": False, "use_sparse": False, "use_mm_prefix": False, "use_per_head_quant_scales": False,
        "device_capability": None, "attn_type": "decoder", **changes,
    }  # fmt: skip
    return AttentionBackendEnum.CUSTOM.get_class().validate_configuration(**asked)


def test_registered_under_custom_and_selected() -> None:
    backend = AttentionBackendEnum.CUSTOM.get_class()
    assert AttentionBackendEnum.CUSTOM.get_path() == vllm_plugin.BACKEND
    assert selected() == selected(kv_cache_dtype="fp8", block_size=PAGE) == []
    assert backend.get_preferred_block_size(64) == PAGE
    assert selected(block_size=24) == ["block_size not supported"]
    assert selected(use_sparse=True) == ["sparse not supported"]
    assert selected(kv_cache_dtype="fp8_e5m2") == ["kv_cache_dtype not supported"]


def test_another_plugin_keeps_custom_unless_kernels_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    register_backend(AttentionBackendEnum.CUSTOM, "other.Backend")
    try:
        with monkeypatch.context() as patch:
            patch.delenv(VARIABLE)
            vllm_plugin.register()
            assert AttentionBackendEnum.CUSTOM.get_path() == "other.Backend"
        vllm_plugin.register()
        assert AttentionBackendEnum.CUSTOM.get_path() == vllm_plugin.BACKEND
    finally:
        register_backend(AttentionBackendEnum.CUSTOM, vllm_plugin.BACKEND)


def test_refusals(model_config: ModelConfig, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no kernels in .*kernels for 4 heads, 256\+64, .*(?s:.*)num_heads: 4"):
        Served(model_config, num_heads=4)
    with pytest.raises(ValueError, match=r"16 heads|pages of 16(?s:.*)page_size: 32"):
        Served(model_config, page=32)
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    (reason,) = selected()
    assert "has no dispatch.py: it must be a folder that `mla-codegen build SPEC" in reason
