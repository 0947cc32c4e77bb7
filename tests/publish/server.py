"""A stand-in for the leaderboard's server: calls a submission beside it as the server does, and knows nothing of ours.

    python server.py '[{"batch_size": 4, "kv_seq_len": 64, "num_heads": 16, ...}]'

It lies in a folder with `submission.py` and `task.py`, makes the inputs of each config, and prints one JSON object a
config: relative L2 errors against float64 for each form of the KV, whether the leaderboard's own check passes (5 % of
the elements may be off by more than 0.1 + 0.1 |want|), whether inputs were written to, whether an output changed when
the next call was made, and which modules the submission brought in.
"""

import json
import sys

import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def make_inputs(config: dict, seed: int) -> tuple:
    """Normal bf16 queries and KV; fp8 over amax / 448; bytes in the shapes of mxfp4."""
    torch.manual_seed(seed)
    batch, length, row = config["batch_size"], config["kv_seq_len"], config["qk_head_dim"]
    q = torch.randn(batch * config["q_seq_len"], config["num_heads"], row).bfloat16()
    kv = torch.randn(batch * length, config["num_kv_heads"], row).bfloat16()
    scale = (kv.float().abs().max() / 448).reshape(1)
    fp8 = (kv.float() / scale).to(torch.float8_e4m3fn)
    mxfp4 = torch.randint(0, 256, (*kv.shape[:2], row // 2), dtype=torch.uint8)
    block_scales = torch.full((len(kv), row // 32), 127, dtype=torch.uint8)
    kv_data = {"bf16": kv, "fp8": (fp8, scale), "mxfp4": (mxfp4, block_scales)}
    qo_indptr = torch.arange(batch + 1, dtype=torch.int32) * config["q_seq_len"]
    kv_indptr = torch.arange(batch + 1, dtype=torch.int32) * length
    on = {name: tuple(part.to(DEVICE) for part in form) for name, form in kv_data.items() if name != "bf16"}
    kv_data = {"bf16": kv.to(DEVICE), **on}
    return q.to(DEVICE), kv_data, qo_indptr.to(DEVICE), kv_indptr.to(DEVICE), config


def attend(q: torch.Tensor, kv: torch.Tensor, config: dict) -> torch.Tensor:
    """float64 attention, one query row a request."""
    keys = kv.double().view(config["batch_size"], config["kv_seq_len"], -1)
    scores = torch.einsum("bhd,bkd->bhk", q.double(), keys) * config["sm_scale"]
    return torch.einsum("bhk,bkd->bhd", scores.softmax(-1), keys[..., : config["v_head_dim"]])


def flat(data: tuple) -> list[torch.Tensor]:
    q, kv_data, *rest = data
    forms = [kv_data["bf16"], *kv_data["fp8"], *kv_data["mxfp4"]]
    return [q, *forms, *rest[:2]]


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def check(config: dict, seed: int) -> dict:
    from submission import custom_kernel

    data, other = make_inputs(config, seed), make_inputs(config, seed + 1)
    before = [tensor.clone() for tensor in flat(data)]
    out = custom_kernel(data)
    kept = out.clone()
    custom_kernel(other)
    q, kv_data, *_ = data
    fp8, scale = kv_data["fp8"]
    wants = {"bf16": attend(q, kv_data["bf16"], config), "fp8": attend(q, fp8.double() * scale, config)}
    got = out.double()
    return {
        "shape": list(out.shape),
        "dtype": str(out.dtype),
        "errors": {form: float((got - want).norm() / want.norm()) for form, want in wants.items()},
        "leaderboard": {
            form: bool(((got - want).abs() > 0.1 + 0.1 * want.abs()).double().mean() <= 0.05)
            for form, want in wants.items()
        },
        "inputs_unchanged": all(same(a, b) for a, b in zip(before, flat(data), strict=True)),
        "output_kept": torch.equal(out, kept),
    }


if __name__ == "__main__":
    results = [check(config, seed) for seed, config in enumerate(json.loads(sys.argv[1]))]
    modules = sorted({name.partition(".")[0] for name in sys.modules})
    print(json.dumps({"results": results, "modules": modules}))
