"""warmup: after it no call brings a kernel a kind of arguments that it has not met. On a GPU compilations are counted.

Triton compiles for a kind: element types, 16-byte alignment, what is None, and integers that it specialises on. Without
a GPU nothing compiles, so the kinds that reach each kernel are compared instead.
"""

import importlib
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from builds import build, plan_of

from mla_codegen.check.reference import make_case

HEADS, LATENT, ROPE = 2, 64, 32
SPEC = {
    "target": "portable",
    "model": {"num_heads": HEADS, "kv_lora_rank": LATENT, "qk_rope_head_dim": ROPE},
    "dtypes": {"kv": ["bf16", "fp8_e4m3fn"]},
    "defaults": {"block_n": 32, "num_stages": 1, "optimizations": ["exp2", "direct_out", "packed_fp8"]},
    "shapes": [{"batch": 2, "kv_len": 64, "splits": 2}, {"batch": 16, "kv_len": 32, "splits": 1}],
}
PACKAGE = "warmup_build"
KERNELS = 8  # two shapes, two general kernels, two KV dtypes

Kinds = dict[tuple[str, str], set[tuple[Any, ...]]]


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """The generated package's dispatch and warmup modules."""
    folder = tmp_path_factory.mktemp("warmup")
    build([plan_of(SPEC, "spec.yaml")], folder / PACKAGE)
    sys.path.insert(0, str(folder))
    return SimpleNamespace(
        dispatch=importlib.import_module(f"{PACKAGE}.dispatch"),
        module=importlib.import_module(f"{PACKAGE}.runtime.warmup"),
    )


def decode(package: SimpleNamespace, device: str, **given: Any) -> None:
    """Calls of batches 1, 2, 16, 17 and 40, short and long, one and several query rows, both KV dtypes."""
    for kv in ("bf16", "fp8_e4m3fn"):
        for lens, q_len in (([5], 1), ([300], 3), ([64, 40], 1), ([9] * 16, 1), ([33] * 17, 1), ([1] * 40, 1)):
            case = make_case(lens, q_lens=q_len, heads=HEADS, latent=LATENT, rope=ROPE, kv_dtype=kv).to(device)
            package.dispatch.mla_decode(
                case.q, case.kv[3:], case.qo_indptr, case.kv_indptr - 3, sm_scale=case.sm_scale, kv_scale=case.kv_scale,
                **{name: make(case) for name, make in given.items()},
            )  # fmt: skip


def visible(case: Any) -> torch.Tensor:
    return torch.ones(case.q.shape[0], dtype=torch.int32, device=case.q.device)


@pytest.fixture
def kinds(package: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> Iterator[Kinds]:
    """(module, stage) -> the kinds of arguments that reached it."""
    met: Kinds = {}

    class Recorder:
        """Stands before an interpreted kernel."""

        def __init__(self, name: tuple[str, str], kernel: Any):
            self.name, self.kernel = name, kernel
            self.run_time = {"batch", "q_len", "splits"}  # what the kernels mark do_not_specialize

        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Any]:
            def launch(*args: Any, **options: Any) -> Any:
                kind: list[Any] = []
                for name, argument in zip(self.kernel.arg_names, args, strict=True):
                    if isinstance(argument, torch.Tensor):
                        kind.append((argument.dtype, argument.data_ptr() % 16 == 0))
                    elif isinstance(argument, int) and name not in self.run_time:
                        kind.append((argument == 1, argument % 16 == 0))
                    else:
                        kind.append(type(argument))
                met.setdefault(self.name, set()).add(tuple(kind))
                return self.kernel[grid](*args, **options)

            return launch

    (build,) = package.dispatch.DISPATCHER.builds
    for choice in build.choices.values():
        shaped = [name for ranges in choice.ranges.values() for _, _, name in ranges]
        for name in (choice.general.direct, choice.general.split, *shaped):
            module = build.kernel(name)
            for stage in ("stage1", "stage2"):
                if hasattr(module, stage):
                    monkeypatch.setattr(module, stage, Recorder((name, stage), getattr(module, stage)))
    yield met


no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled here, not interpreted")


@no_gpu
@pytest.mark.parametrize("given", [{}, {"kv_visible": visible}], ids=["plain", "kv_visible"])
def test_calls_bring_no_kind_that_warmup_did_not(package: SimpleNamespace, kinds: Kinds, given: dict[str, Any]) -> None:
    made = package.dispatch.warmup(progress=None, visible=(bool(given),))
    assert made == KERNELS
    warmed = {name: set(met) for name, met in kinds.items()}
    decode(package, "cpu", **given)
    assert kinds == warmed
    assert len({module for module, _ in kinds}) == KERNELS


@no_gpu
def test_a_kind_that_was_not_asked_for_shows(package: SimpleNamespace, kinds: Kinds) -> None:
    package.dispatch.warmup(progress=None)
    warmed = {name: set(met) for name, met in kinds.items()}
    decode(package, "cpu", kv_visible=visible)
    assert kinds != warmed


@no_gpu
def test_progress_comes_after_each_kernel(package: SimpleNamespace, capsys: pytest.CaptureFixture[str]) -> None:
    steps: list[tuple[int, int, str]] = []
    package.dispatch.warmup(scaled=(False, True), progress=lambda *step: steps.append(step))
    assert [(done, total) for done, total, _ in steps] == [(n, 2 * KERNELS) for n in range(1, 2 * KERNELS + 1)]
    assert len({kernel for _, _, kernel in steps}) == KERNELS
    package.module.show(2, 2, "bf16_any")
    assert capsys.readouterr().err == "\rwarmup 2/2 bf16_any" + " " * 32 + "\n"


@no_gpu
def test_what_a_kernel_raises_comes_after_the_others(package: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    (build,) = package.dispatch.DISPATCHER.builds
    done: list[str] = []

    def fail(*_: object) -> None:
        raise RuntimeError("no such instruction")

    monkeypatch.setattr(build.kernel(build.choices["bf16"].general.split), "run", fail)
    with pytest.raises(RuntimeError, match="no such instruction"):
        package.dispatch.warmup(progress=lambda *step: done.append(step[2]))
    assert len(done) == KERNELS


def test_compilations_are_counted_and_the_listener_given_back(package: SimpleNamespace) -> None:
    import triton

    heard: list[bool] = []
    before = triton.knobs.compilation.listener
    triton.knobs.compilation.listener = lambda **said: heard.append(said["cache_hit"])
    try:
        with package.module.count_compilations() as count:
            for hit in (False, True):
                triton.knobs.compilation.listener(src=None, metadata={}, metadata_group={}, times=None, cache_hit=hit)
        assert (count.total, count.from_disk, heard) == (2, 1, [False, True])
        assert triton.knobs.compilation.listener(cache_hit=True) is None and len(heard) == 3
    finally:
        triton.knobs.compilation.listener = before


@pytest.mark.gpu
def test_after_warmup_no_call_compiles(
    package: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    with package.module.count_compilations() as count:
        package.dispatch.warmup(visible=(False, True), progress=None)
        assert count.total > KERNELS
        warmed = count.total
        decode(package, "cuda")
        decode(package, "cuda", kv_visible=visible)
        torch.cuda.synchronize()
        assert count.total == warmed
