"""The examples run. transformers is not among what the tests install: what needs it is skipped without it."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

EXAMPLES = Path(__file__).parents[1] / "examples"


@pytest.fixture(scope="module")
def example() -> ModuleType:
    pytest.importorskip("transformers", "5.17", reason="needs the extra `transformers`, which tests do without")
    spec = importlib.util.spec_from_file_location("transformers_mla", EXAMPLES / "transformers_mla.py")
    assert spec is not None and spec.loader is not None
    module = sys.modules["transformers_mla"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("version", [2, 3])
def test_transformers_runs_on_these_kernels(example: ModuleType, version: int) -> None:
    """Logits as near to fp32 as eager attention's, one prompt padded on the left."""
    found = example.compare(version, requests=2, prompt=14, new=4, large=False)
    assert 0 < found["error"] <= 1.25 * found["eager_error"] < 0.05
    assert found["same_tokens"] > 0.5


def test_transformers_chunks_and_refusals(example: ModuleType) -> None:
    """A prompt in two chunks gives what it gives at once; beam search, other dtypes and longer requests are refused."""
    model = example.small_model(3, large=False)
    with pytest.raises(ValueError, match="in bf16"):
        example.use(example.small_model(3, large=False).float(), None)
    example.use(model, example.build(model.config, 16, 2, 32))
    tokens = torch.randint(1, 1000, (2, 20), device=model.device)
    with torch.no_grad():
        whole = model(tokens, past_key_values=example.LatentCache(model, 2, 20, 16)).logits[:, -1]
        cache = example.LatentCache(model, 2, 20, 16)
        cache.pool.fill_(float("nan"))
        model(tokens[:, :13], past_key_values=cache)
        chunked = model(tokens[:, 13:], past_key_values=cache).logits[:, -1]
        assert example.difference(chunked.float(), whole.float()) < 0.03
        with pytest.raises(ValueError, match="would have 21 rows; the cache was made for 20"):
            model(tokens[:, :1], past_key_values=cache)
    with pytest.raises(NotImplementedError, match="beam search"):
        cache.reorder_cache(torch.tensor([1, 0]))
