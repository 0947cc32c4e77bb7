"""An MLA decode backend of vLLM over generated kernels. Prefill, the cache and all else are vLLM's own.

vLLM makes one `MlaCodegenImpl` a layer, then one `MlaCodegenBuilder` a group of layers. Every step the builder makes
the metadata, and in each layer vLLM calls `forward_mqa` for the requests that decode, which stand first in the batch.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import vllm.envs as envs
from vllm.config import get_current_vllm_config
from vllm.logger import init_logger
from vllm.model_executor.layers.attention.mla_attention import (
    MLACommonBackend,
    MLACommonDecodeMetadata,
    MLACommonImpl,
    MLACommonMetadata,
    MLACommonMetadataBuilder,
    QueryLenSupport,
)
from vllm.platforms import current_platform
from vllm.utils.torch_utils import is_quantized_kv_cache
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.worker.workspace import current_workspace_manager, is_workspace_manager_initialized
from vllm.version import __version__ as vllm_version

from mla_codegen.engines.kernels import folder, kernels_for, page_sizes
from mla_codegen.engines.model import Model
from mla_codegen.engines.vllm_plugin import judge
from mla_codegen.runtime.builds import full_device, target_of

logger = init_logger(__name__)

if warning := judge(vllm_version):
    logger.warning(warning)

KV_TYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}  # of --kv-cache-dtype; auto is the model's


class MlaCodegenBackend(MLACommonBackend):
    """What vLLM asks before it makes layers. Whether kernels fit a model is for its layers to say."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.bfloat16, torch.float16]
    supported_kv_cache_dtypes: ClassVar[list[str]] = ["auto", "bfloat16", "float16", "fp8", "fp8_e4m3"]

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"  # as vLLM's registry calls it

    @staticmethod
    def get_impl_cls() -> type["MlaCodegenImpl"]:
        return MlaCodegenImpl

    @staticmethod
    def get_builder_cls() -> type["MlaCodegenBuilder"]:
        return MlaCodegenBuilder

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        return []  # any: the layer says what is built

    @staticmethod
    def get_kv_cache_stride_order(include_num_layers_dimension: bool = False) -> tuple[int, ...]:
        """Pages may lie any distance apart, so all layers may share one pool: [pages, layers, page_size, row]."""
        return (1, 0, 2, 3) if include_num_layers_dimension else (0, 1, 2)

    @staticmethod
    def get_supported_kernel_block_sizes() -> list[int]:
        return page_sizes(folder(), target_of(full_device(None)))

    @classmethod
    def get_preferred_block_size(cls, default_block_size: int) -> int:
        """The page size of the device's own kernels, where vLLM's user named none."""
        return next(iter(cls.get_supported_kernel_block_sizes()), default_block_size)

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        return True  # a build that is not is refused by the layer

    @classmethod
    def supports_combination(cls, *_: Any, **__: Any) -> str | None:
        """In words, what is wrong with the folder of kernels."""
        try:
            sizes = cls.get_supported_kernel_block_sizes()
        except (ValueError, ImportError) as reason:
            return str(reason)
        return None if sizes else f"{folder()} has no build of paged KV that this device can run"


@dataclass
class DecodeMetadata(MLACommonDecodeMetadata):
    """Of the requests that decode, beside what vLLM's class has.

    query_start_loc   [requests + 1] int32 on the device
    max_query_len     query tokens of the request that has most
    max_kv_len        KV rows of the longest request, or an upper bound; None: nobody knows
    scratch           bytes of vLLM's workspace to take for a call; 0: none was reserved
    """

    query_start_loc: torch.Tensor
    max_query_len: int
    max_kv_len: int | None
    scratch: int


class MlaCodegenBuilder(MLACommonMetadataBuilder[MLACommonMetadata[DecodeMetadata]]):
    """Makes a step's metadata; when it is made itself, reserves scratch and compiles the kernels."""

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_BATCH
    # Requests may have any number of query tokens. Those of at most `reorder_batch_threshold` decode: 1, or as many as
    # speculative decoding verifies.
    query_len_support: ClassVar[QueryLenSupport] = QueryLenSupport.VARLEN

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device):
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        layer = vllm_config.compilation_config.static_forward_context[layer_names[0]]
        self.kernels = layer.impl.kernels
        self.kernels.need_pages_of(self.page_size)
        self.max_tokens = vllm_config.scheduler_config.max_num_seqs * self.reorder_batch_threshold
        self.scratch = 0
        if is_workspace_manager_initialized():
            self.scratch = self.kernels.workspace_bytes(self.max_tokens)
            current_workspace_manager().get_simultaneous(((self.scratch,), torch.uint8))
        if self.kernels.device.type == "cuda":
            self.kernels.warmup()

    def _build_decode(
        self,
        block_table_tensor: torch.Tensor,
        seq_lens_device: torch.Tensor,
        max_seq_len: int,
        query_start_loc_cpu: torch.Tensor,
        query_start_loc_device: torch.Tensor,
        num_decode_tokens: int,
        dcp_tot_seq_lens_device: torch.Tensor | None,
    ) -> DecodeMetadata:
        return DecodeMetadata(
            block_table=block_table_tensor,
            seq_lens=seq_lens_device,
            dcp_tot_seq_lens=dcp_tot_seq_lens_device,
            query_start_loc=query_start_loc_device,
            max_query_len=max(1, int(query_start_loc_cpu.diff().max())),
            max_kv_len=int(max_seq_len),
            scratch=self.scratch if num_decode_tokens <= self.max_tokens else 0,
        )

    def build_for_cudagraph_capture(self, common_attn_metadata: Any) -> MLACommonMetadata[DecodeMetadata]:
        """As `build`; but the lengths are made up, and the kernel that is captured now serves every replay."""
        metadata = super().build_for_cudagraph_capture(common_attn_metadata)
        if metadata.decode is not None:
            metadata.decode.max_kv_len = self.kernels.graph_length(
                self.page_size, metadata.num_decode_tokens, metadata.num_decodes
            )
        return metadata


class MlaCodegenImpl(MLACommonImpl[MLACommonMetadata[DecodeMetadata]]):
    """Decode attention of a layer. ValueError at once if no build serves its heads, ranks and types."""

    can_return_lse_for_decode: bool = True  # natural logarithm, which is vLLM's default

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int,
        alibi_slopes: list[float] | None,
        sliding_window: int | None,
        kv_cache_dtype: str,
        logits_soft_cap: float | None,
        attn_type: str,
        kv_sharing_target_layer_name: str | None,
        **mla_args: Any,
    ):
        if alibi_slopes or sliding_window or logits_soft_cap or attn_type != "decoder":
            raise NotImplementedError("mla-codegen's kernels have no ALiBi, sliding window, soft cap or encoder")
        super().__init__(
            num_heads, head_size, scale, num_kv_heads, alibi_slopes, sliding_window, kv_cache_dtype, logits_soft_cap,
            attn_type, kv_sharing_target_layer_name, **mla_args,
        )  # fmt: skip
        self.supports_quant_query_input = False  # q stays as the model has it, also over an fp8 cache
        self.scaled = is_quantized_kv_cache(kv_cache_dtype)
        ranks = get_current_vllm_config().parallel_config.decode_context_parallel_size
        dtype = torch.get_default_dtype()  # vLLM makes layers under the model's
        device = full_device(None)
        model = Model(
            target=target_of(device),
            heads=num_heads * ranks,  # with decode context parallelism a call has those of all its ranks
            latent=self.kv_lora_rank,
            rope=self.qk_rope_head_dim,
            dtype=dtype,
            kv=current_platform.fp8_dtype() if self.scaled else KV_TYPES.get(kv_cache_dtype, dtype),
            batch_invariant=bool(envs.VLLM_BATCH_INVARIANT),
        )
        self.kernels = kernels_for(folder(), model, device)

    def forward_mqa(
        self,
        q: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        kv_c_and_k_pe_cache: torch.Tensor,
        attn_metadata: MLACommonMetadata[DecodeMetadata],
        layer: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Attention of the requests that decode, in the latent space.

        q                     [tokens, heads, latent + rope], or its two parts
        kv_c_and_k_pe_cache   [pages, page_size, latent + rope], fp8 in fp8's own type

        Returns out [tokens, heads, latent], and the LSE [tokens, heads] fp32 where ranks must be merged, else None.
        """
        if isinstance(q, tuple):
            q = torch.cat(q, dim=-1)
        decode = attn_metadata.decode
        assert decode is not None
        workspace = None
        if decode.scratch:
            (workspace,) = current_workspace_manager().get_simultaneous(((decode.scratch,), torch.uint8))
        found = self.kernels.mla_decode(
            q, kv_c_and_k_pe_cache, decode.query_start_loc, sm_scale=self.scale,
            kv_scale=layer._k_scale if self.scaled else None, block_table=decode.block_table, kv_lens=decode.seq_lens,
            max_kv_len=decode.max_kv_len, max_q_len=decode.max_query_len, workspace=workspace,
            return_lse=self.need_to_return_lse_for_decode,
        )  # fmt: skip
        return found if self.need_to_return_lse_for_decode else (found, None)
