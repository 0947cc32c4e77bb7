"""Which build of a folder serves a model, and what a refusal says. Needs no engine."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from mla_codegen.catalog.targets import TARGETS
from mla_codegen.engines import kernels, vllm_plugin
from mla_codegen.engines.kernels import Kernels, folder, page_sizes
from mla_codegen.engines.model import Model, spec
from mla_codegen.plan.resolve import make_plan
from mla_codegen.spec.load import parse_spec
from tests.builds import build, plan_of, spec_of

MODEL = Model("cpu", 16, 512, 64, torch.bfloat16, torch.bfloat16)
CPU = torch.device("cpu")
PAGED = {"layout": "paged", "page_size": 16}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Builds for 16 heads: portable in pages of 16 rows, ragged and sparse, sm_90 in pages of 64 rows."""
    where = tmp_path_factory.mktemp("engines") / "some.place" / "kernels"
    shapes = [{"batch": 4, "kv_len": 1024, "splits": 2}, {"batch": 4, "q_len": 2, "kv_len": 4096}]
    bf16 = {"kv": ["bf16"]}
    plans = [
        plan_of(spec_of(kv=PAGED, shapes=shapes, dtypes=bf16), "paged.yaml"),
        plan_of(spec_of(shapes=shapes[:1], dtypes=bf16), "ragged.yaml"),
        plan_of(spec_of(kv={"layout": "sparse", "topk": 64}, shapes=[{"batch": 4}], dtypes=bf16), "sparse.yaml"),
        plan_of(
            {"target": "sm_90", "kv": {**PAGED, "page_size": 64}, "shapes": shapes[:1], "dtypes": bf16}, "hopper.yaml"
        ),
    ]
    build(plans, where)
    return str(where)


def test_the_folder_that_the_environment_names(built: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv(kernels.VARIABLE, raising=False)
    with pytest.raises(ValueError, match=r"MLA_CODEGEN_KERNELS is not set: `mla-codegen build SPEC"):
        folder()
    monkeypatch.setenv(kernels.VARIABLE, str(tmp_path))
    with pytest.raises(ValueError, match=rf"{tmp_path} has no dispatch.py: it must be a folder that `mla-codegen bui"):
        folder()
    monkeypatch.setenv(kernels.VARIABLE, built)
    assert folder() == built


def test_calls_over_the_builds_that_fit(built: str) -> None:
    found = Kernels(built, MODEL, CPU)
    assert [one.spec for one in found.builds] == ["paged.yaml"]
    assert found.pages == [16]
    found.need_pages_of(16)
    q, pool = torch.randn(3, 16, 576).bfloat16(), torch.randn(4, 16, 576).bfloat16()
    starts, lens = torch.tensor([0, 1, 3], dtype=torch.int32), torch.tensor([5, 20], dtype=torch.int32)
    table = torch.tensor([[2, -1], [0, 3]], dtype=torch.int32)
    workspace = torch.empty(found.workspace_bytes(3), dtype=torch.uint8)
    out = found.mla_decode(q, pool, starts, sm_scale=0.1, block_table=table, kv_lens=lens, workspace=workspace)
    for row, rows in enumerate((pool[2, :5], pool[[0, 3]].flatten(0, 1)[:19], pool[[0, 3]].flatten(0, 1)[:20])):
        weights = (q[row].double() @ rows.double().T * 0.1).softmax(-1)
        torch.testing.assert_close(out[row].double(), weights @ rows[:, :512].double(), atol=0.02, rtol=0.02)


def test_page_sizes_of_a_device(built: str) -> None:
    assert page_sizes(built, "cpu") == [16]  # the other build is Gluon, which no interpreter runs
    assert page_sizes(built, "sm_90") == [64, 16]  # its own first
    assert page_sizes(built, "gfx942") == [16]


def test_the_length_of_captured_calls(built: str) -> None:
    portable = Kernels(built, MODEL, CPU)
    assert portable.graph_length(16, 4, 4) == 4096  # the longest shape
    hopper = Kernels(built, replace(MODEL, target="sm_90"), torch.device("cuda", 0))
    assert hopper.pages == [64, 16]
    assert hopper.graph_length(64, 4, 4) is None  # balanced
    assert hopper.graph_length(64, 1, 1) == hopper.graph_length(64, 8, 4) == 1024
    assert hopper.graph_length(16, 4, 4) == 4096


@pytest.mark.parametrize(
    ("changes", "page", "words"),
    [
        ({"heads": 128}, None, "16 heads"),
        ({"latent": 256}, None, "KV rows of 512+64"),
        ({"dtype": torch.float16}, None, "bf16 q and bf16 output"),
        ({"kv": torch.float8_e4m3fnuz}, None, "bf16 KV"),
        ({"batch_invariant": True}, None, "not batch-invariant"),
        ({}, 32, "pages of 16"),
    ],
)
def test_a_refusal_names_what_does_not_fit(built: str, changes: dict[str, Any], page: int | None, words: str) -> None:
    model = replace(MODEL, **changes)
    with pytest.raises(ValueError) as error:
        Kernels(built, model, CPU).need_pages_of(page or 0)
    text = str(error.value)
    assert f"no kernels in {built} for {model}" in text
    assert re.search(rf"\(paged.yaml\): {re.escape(words)}\n", text)
    assert re.search(r"\(ragged.yaml\): .*ragged KV", text)
    assert re.search(r"\(sparse.yaml\): .*sparse KV", text)
    assert re.search(r"\(hopper.yaml\): its kernels are Gluon", text)
    assert ("Give the engine a block size of 16; or" in text) == (page is not None)
    assert text.endswith(spec(model, page or 64))


@pytest.mark.parametrize("target", [*TARGETS, "sm_86", "cpu"])
@pytest.mark.parametrize("kv", [torch.bfloat16, torch.float8_e4m3fn])
def test_the_spec_of_a_refusal_plans_for_the_model(target: str, kv: torch.dtype) -> None:
    model = replace(MODEL, target=target, heads=8, kv=kv)
    plan = make_plan(parse_spec(spec(model, 64), "model.yaml").spec, "model.yaml")
    assert plan.target.name == (target if target in TARGETS else "portable")


def test_the_spec_of_a_refusal_serves_the_model(built: str, tmp_path: Path) -> None:
    model = replace(MODEL, heads=4, latent=64, rope=32, kv=torch.float8_e4m3fn, batch_invariant=True)
    build([make_plan(parse_spec(spec(model, 32), "model.yaml").spec, "model.yaml")], tmp_path / "kernels")
    assert Kernels(str(tmp_path / "kernels"), model, CPU).pages == [32]


def test_releases_of_vllm() -> None:
    tested = vllm_plugin.TESTED[-1]
    minor = tested.rpartition(".")[0]
    assert vllm_plugin.judge(tested) is None
    assert vllm_plugin.judge(f"{minor}.99") == f"vLLM is {minor}.99; mla-codegen's backend was tested with {tested}"
    with pytest.raises(RuntimeError, match=r"vLLM is 0\.9\.1; .* `pip install vllm==0\.\d+\.\d+`, or take a newer"):
        vllm_plugin.judge("0.9.1")


def test_the_project_names_the_plugin_and_the_release() -> None:
    project = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    _, _, entry = project.partition('[project.entry-points."vllm.general_plugins"]')
    assert f'\nmla_codegen = "{vllm_plugin.__name__}:{vllm_plugin.register.__name__}"\n' in entry
    assert f'\nvllm = ["vllm=={vllm_plugin.TESTED[-1]}"]' in project
