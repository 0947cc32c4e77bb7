"""Stand-ins for the libraries of `benchmarks/peers.py`: operators on CPU tensors that compute attention.

They have the arguments of the real ones in their order, so that an adapter that mixes up lengths, pages, scales or
halves of a row gives a wrong output, as it would there.
"""

from typing import Any

import torch

PAGE = 64
HEADS, LATENT, ROPE = 4, 64, 32
LENS = [70, 64, 2, 200]
TRITON = """
from peer_fakes import attend
from vllm.platforms import current_platform
from vllm.triton_utils import tl, triton

assert not current_platform.is_rocm() and triton.jit and tl.dot


def decode_attention_fwd(q, k, v, out, lse, table, lens, scratch, splits, scale, page, *, k_scale, v_scale, is_mla):
    assert scratch.shape[2] == splits == 1 and is_mla and page == k.shape[1]
    out.copy_(attend(q, k, v, lens, table, scale, float(k_scale)))
"""


def attend(q: Any, k: Any, v: Any, lens: Any, table: Any, sm_scale: float, k_scale: float = 1.0) -> torch.Tensor:
    """q [query rows, heads, row], as many rows a request; k, v in pages; causal: [query rows, heads, columns of v]."""
    outs = []
    requests = q.float().chunk(len(lens))
    for rows, length, pages in zip(requests, lens.tolist(), table.long(), strict=True):
        for token, row in enumerate(rows):
            seen = length - len(rows) + 1 + token
            keys, values = (x[pages].flatten(0, 1)[:seen, 0].float() * k_scale for x in (k, v))
            outs.append(torch.softmax(row @ keys.T * sm_scale, -1) @ values)
    return torch.stack(outs).bfloat16()


def define() -> list[torch.library.Library]:
    """Define the operators; they are gone when the result is."""
    dense = torch.library.Library("_flashmla_C", "DEF")
    dense.define(
        "dense_decode_fwd(Tensor q, Tensor kv, int columns, Tensor lens, Tensor table, float scale, bool causal, "
        "Tensor? schedule, Tensor? splits, Tensor? out) -> (Tensor, Tensor, Tensor, Tensor)"
    )

    def dense_decode(q, kv, columns, lens, table, scale, causal, schedule, splits, out):
        assert kv.shape[1:3] == (PAGE, 1) and out is None and (schedule is None) == (splits is None)
        assert causal == (q.shape[1] > 1)
        result = attend(q.flatten(0, 1), kv, kv[..., :columns], lens, table, scale)
        schedule, splits = (torch.ones(1) if x is None else x.clone() for x in (schedule, splits))
        return result.unflatten(0, q.shape[:2]), torch.zeros(1), schedule, splits

    dense.impl("dense_decode_fwd", dense_decode, "CPU")
    fp8 = torch.library.Library("_flashmla_extension_C", "DEF")
    fp8.define("get_mla_decoding_metadata_dense_fp8(Tensor lens, int rows, int kv_heads) -> Tensor[]")
    fp8.define(
        "fwd_kvcache_mla_fp8(Tensor q, Tensor kv, int columns, Tensor lens, Tensor table, float scale, bool causal, "
        "Tensor schedule, Tensor splits, Tensor? q_scale, Tensor? k_scale) -> Tensor[]"
    )

    def schedule_fp8(lens, rows, kv_heads):
        assert rows % HEADS == 0 and kv_heads == 1
        return [torch.full((1,), 7.0), torch.full((1,), 8.0)]

    def decode_fp8(q, kv, columns, lens, table, scale, causal, schedule, splits, q_scale, k_scale):
        assert (float(schedule), float(splits)) == (7.0, 8.0)
        assert q.dtype == kv.dtype == torch.float8_e4m3fn and q_scale.shape == k_scale.shape == (1,)
        assert causal == (q.shape[1] > 1)
        result = attend(q.flatten(0, 1).float() * q_scale, kv, kv[..., :columns], lens, table, scale, float(k_scale))
        return [result.unflatten(0, q.shape[:2]), torch.zeros(1)]

    fp8.impl("get_mla_decoding_metadata_dense_fp8", schedule_fp8, "CPU")
    fp8.impl("fwd_kvcache_mla_fp8", decode_fp8, "CPU")
    fa3 = torch.library.Library("_vllm_fa3_C", "DEF")
    fa3.define(
        "get_scheduler_metadata(int batch, int q_len, int kv_len, int heads, int kv_heads, int dim, int dim_v, "
        "ScalarType dtype, Tensor lens, Tensor? a, Tensor? b, Tensor? c, Tensor? d, Tensor? e, int? page, int new, "
        "bool causal, int left, int right, bool softcap, int splits, bool? pack, int margin) -> Tensor"
    )
    fa3.define(
        "fwd(Tensor q, Tensor k, Tensor v, Tensor? a, Tensor? b, Tensor? q_v, Tensor? out, Tensor? q_starts, Tensor? c,"
        " Tensor? d, Tensor? e, Tensor? lens, int? q_len, int? kv_len, Tensor? table, Tensor? f, Tensor? g, Tensor? h, "
        "Tensor? i, Tensor? j, Tensor? k1, Tensor? l, Tensor? m, float scale, bool causal, int left, int right, "
        "float softcap, bool interleaved, Tensor? schedule, int splits, bool? pack, int margin, Tensor? n, int world, "
        "int rank, Tensor? o) -> Tensor[]"
    )

    def schedule_fa3(batch, q_len, kv_len, heads, kv_heads, dim, dim_v, *rest):
        assert (batch, kv_len, heads, kv_heads, dim, dim_v) == (len(LENS), max(LENS), HEADS, 1, ROPE, LATENT)
        return torch.tensor([9.0, q_len])

    def decode_fa3(q, k, v, a, b, q_v, out, starts, c, d, e, lens, q_len, kv_len, table, *rest):
        scale, schedule = rest[8], rest[14]
        assert schedule.tolist() == [9.0, q_len] and kv_len == max(LENS) and rest[9] == (q_len > 1)
        assert starts.tolist() == [q_len * request for request in range(5)]
        return [attend(torch.cat([q_v, q], -1), torch.cat([v, k], -1), v, lens, table, scale), torch.zeros(1)]

    fa3.impl("get_scheduler_metadata", schedule_fa3, "CPU")
    fa3.impl("fwd", decode_fa3, "CPU")
    return [dense, fp8, fa3]
