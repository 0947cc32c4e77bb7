"""Bundles on a stand-in for the server: in a process and a folder of their own, where the generator is not."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from builds import plan_of

from mla_codegen.check.leaderboard import verify_submission
from mla_codegen.publish.bundle import bundle
from mla_codegen.runtime import formats, interpreter

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="its tensors are on the CPU, for the interpreter")
SERVER = Path(__file__).parent / "server.py"
CORRECTIONS = (interpreter, formats)  # of Triton's interpreter, which stands in for the GPU
TASK = "import torch\n\ninput_t, output_t = tuple, torch.Tensor\n"
HALF = """
import torch
from task import input_t, output_t

def custom_kernel(data: input_t) -> output_t:
    q, kv_data, qo_indptr, kv_indptr, config = data
    kv, scale = kv_data["fp8"]
    out = torch.zeros(q.shape[0], q.shape[1], config["v_head_dim"], dtype=torch.bfloat16)
    for row in range(q.shape[0]):
        begin, end = kv_indptr[row], kv_indptr[row + 1]
        keys = kv[begin : (begin + end + 1) // 2, 0].float() * scale
        weights = torch.softmax(q[row].float() @ keys.T * config["sm_scale"], -1)
        out[row] = weights @ keys[:, : config["v_head_dim"]]
    return out
"""


def config(batch: int, kv_len: int, heads: int, latent: int, rope: int) -> dict[str, Any]:
    row = latent + rope
    return {
        "batch_size": batch, "num_heads": heads, "num_kv_heads": 1, "qk_head_dim": row, "kv_lora_rank": latent,
        "qk_rope_head_dim": rope, "v_head_dim": latent, "q_seq_len": 1, "kv_seq_len": kv_len, "sm_scale": row**-0.5,
    }  # fmt: skip


def serve(folder: Path, submission: str, configs: list[dict[str, Any]]) -> dict[str, Any]:
    """Run the stand-in in `folder`; what it printed."""
    shutil.copy(SERVER, folder / "server.py")
    (folder / "task.py").write_text(TASK)
    (folder / "submission.py").write_text(submission, encoding="utf-8")
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    for module in CORRECTIONS:
        (folder / "corrections").mkdir(exist_ok=True)
        shutil.copy(str(module.__file__), folder / "corrections")
    begin = "import runpy, corrections.interpreter as interpreter; interpreter.correct(); "
    begin += "runpy.run_path('server.py', run_name='__main__')"
    done = subprocess.run(
        [sys.executable, "-c", begin, json.dumps(configs)], cwd=folder, text=True, capture_output=True, timeout=300,
        env={**environment, "TRITON_INTERPRET": "1"}, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("kinds", [["fp8_e4m3fn", "bf16"], ["bf16"]], ids="-".join)
def test_a_bundle_runs_unchanged(tmp_path: Path, kinds: list[str]) -> None:
    """Shapes of the spec and others; the preferred form is served, from a dict that offers all three."""
    spec = {
        "target": "portable",
        "model": {"num_heads": 4, "kv_lora_rank": 64, "qk_rope_head_dim": 32},
        "dtypes": {"kv": kinds},
        "defaults": {"block_n": 32, "num_stages": 1, "optimizations": ["exp2", "direct_out", "packed_fp8"]},
        "shapes": [{"batch": 4, "kv_len": 64, "splits": 2}, {"batch": 5, "kv_len": 100, "splits": 1}],
    }
    text = bundle(plan_of(spec), "mla", "MI355X")
    shapes = [(4, 64), (5, 100), (3, 70), (1, 1)]
    said = serve(tmp_path, text, [config(*shape, 4, 64, 32) for shape in shapes])
    assert "triton" in said["modules"] and "mla_codegen" not in said["modules"]
    form, other = ("fp8", "bf16") if len(kinds) == 2 else ("bf16", "fp8")
    for (batch, _), result in zip(shapes, said["results"], strict=True):
        assert result["shape"] == [batch, 4, 64] and result["dtype"] == "torch.bfloat16"
        assert result["errors"][form] <= 3e-3 < result["errors"][other]
        assert result["leaderboard"][form] and result["inputs_unchanged"] and result["output_kept"]


def test_half_of_the_kv_passes_there_and_not_here(tmp_path: Path) -> None:
    said = serve(tmp_path, HALF, [config(2, 2048, 16, 512, 64)])
    assert said["results"][0]["leaderboard"]["fp8"] and said["results"][0]["errors"]["fp8"] > 0.5
    results = verify_submission(tmp_path / "submission.py", device="cpu", processes=1)
    assert [result.kernel for result in results if result.passed] == []
    assert all("all forms" in result.kernel for result in results)


@pytest.mark.parametrize(
    "change,found",
    [("q *= 2", "inputs_unchanged"), ("out = KEPT.setdefault('out', out).copy_(out + 1)", "output_kept")],
)
def test_the_stand_in_sees_what_a_server_must_not_accept(tmp_path: Path, change: str, found: str) -> None:
    text = HALF.replace("    return out", f"    {change}\n    return out") + "\nKEPT = {}\n"
    result = serve(tmp_path, text, [config(2, 9, 4, 64, 32)])["results"][0]
    assert [name for name in ("inputs_unchanged", "output_kept") if not result[name]] == [found]
