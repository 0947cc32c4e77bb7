"""Calls do not depend on what torch is set to: default dtype and device, grad mode, autocast, determinism."""

import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parent))

from steps import SMALL, built

from mla_codegen.check.reference import in_pages, make_case

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SIZES = {"heads": 2, "latent": 64, "rope": 32}
PACKAGE = "state_build"


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    yield
    torch.set_default_dtype(before)


@contextmanager
def default_device(device: str) -> Iterator[None]:
    torch.set_default_device(device)
    yield
    torch.set_default_device(None)


@contextmanager
def deterministic() -> Iterator[None]:
    """torch.empty is filled with NaN then, or the largest integer."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


STATES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "none": nullcontext,
    "bf16 by default": lambda: default_dtype(torch.bfloat16),
    "fp64 by default": lambda: default_dtype(torch.float64),
    "meta by default": lambda: default_device("meta"),
    "GPU or CPU by default": lambda: default_device(DEVICE.type),
    "inference mode": torch.inference_mode,
    "no grad": torch.no_grad,
    "grad": torch.enable_grad,
    "autocast": lambda: torch.autocast(DEVICE.type, torch.bfloat16),
    "deterministic": deterministic,
}


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SimpleNamespace]:
    """A ragged and a paged package, this process the only rank of a group, and what calls give by themselves."""
    folder = tmp_path_factory.mktemp("state")
    paged = {**SMALL, "kv": {"layout": "paged", "page_size": 16}}
    for name, spec in (("ragged", SMALL), ("paged", paged)):
        built(spec, folder, f"{PACKAGE}_{name}")
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)

    def module(name: str) -> Any:
        return importlib.import_module(f"{PACKAGE}_{name}")

    found = SimpleNamespace(
        ragged=module("ragged.dispatch"),
        paged=module("paged.dispatch"),
        op=module("ragged.op").mla_decode,
        parallel=module("ragged.runtime.context_parallel"),
    )
    found.wanted = list(results(found))
    yield found
    dist.destroy_process_group()


def results(package: SimpleNamespace) -> Iterator[torch.Tensor]:
    """One call of each kind, with inputs that are made in whatever state torch is in."""
    for kv in ("bf16", "fp8_e4m3fn"):
        with default_device("cpu"), default_dtype(torch.float32):
            case = make_case([40, 0, 7], q_lens=[1, 1, 2], kv_dtype=kv, **SIZES).to(DEVICE)
            pages = in_pages(case, 16).to(DEVICE)
        tensors, known = (case.q, case.kv, case.qo_indptr, case.kv_indptr), {"sm_scale": case.sm_scale}
        space = torch.empty(package.ragged.workspace_bytes(4, device=DEVICE), dtype=torch.uint8, device=DEVICE)
        scale = None if case.kv_scale is None else case.kv_scale.double()
        decode = package.op if kv == "bf16" else package.ragged.mla_decode
        yield from decode(*tensors, kv_scale=scale, return_lse=True, max_kv_len=64, **known)
        if kv == "bf16":
            yield package.op(*tensors, workspace=space, max_kv_len=64, **known)
            yield package.ragged.custom_kernel((case.q, {"bf16": case.kv}, case.qo_indptr, case.kv_indptr, known))
            yield package.paged.mla_decode(
                case.q, pages.kv, case.qo_indptr, block_table=pages.block_table, kv_lens=pages.kv_lens, **known
            )
    parallel = package.parallel.ContextParallel(package.ragged.DISPATCHER, placement="round_robin")
    lens = case.kv_indptr.diff()
    yield parallel.rows(7)
    yield parallel.visible(case.qo_indptr, lens, 4)
    yield from parallel.decode(*tensors, lens, kv_scale=case.kv_scale, return_lse=True, **known)
    parallel.ranks = 2
    shape, out = (4, 2, 64), torch.empty(4, 2, 64, dtype=torch.bfloat16, device=DEVICE)
    parts, lse = parallel.parts(shape, out.dtype, DEVICE), torch.empty(4, 2, dtype=torch.float32, device=DEVICE)
    parallel.combine(parts.zero_(), out, lse)
    yield from (out, lse)


@pytest.mark.parametrize("state", STATES)
def test_calls(package: SimpleNamespace, state: str) -> None:
    """The bits that they give where torch is as it begins."""
    with STATES[state]():
        got = [one.clone() for one in results(package)]
    assert len(got) == len(package.wanted)
    for one, wanted in zip(got, package.wanted, strict=True):
        assert (one.dtype, one.device, one.shape) == (wanted.dtype, wanted.device, wanted.shape)
        assert torch.equal(one, wanted)


@pytest.mark.parametrize("state", STATES)
def test_warmup(package: SimpleNamespace, state: str) -> None:
    kernels = 8  # two shapes and two general kernels of two KV types
    with STATES[state]():
        assert package.ragged.warmup(progress=None, scaled=(True,), visible=(True,)) == kernels
        assert package.paged.warmup(progress=None, pages=("table",)) == kernels


@pytest.mark.parametrize("state", STATES)
def test_peer_memory(package: SimpleNamespace, state: str) -> None:
    """Made in one state and used in another."""
    form = (2, 2, 64, torch.bfloat16)
    with STATES[state]():
        memory = torch.zeros(package.parallel.PeerMemory.size(*form, 1)[0], dtype=torch.uint8, device=DEVICE)
        peers = package.parallel.PeerMemory(*form, DEVICE, addresses=([memory.data_ptr()], memory))
    for around in (STATES[state], nullcontext):
        with around():
            partial = torch.ones(2, 2, 64, dtype=torch.bfloat16, device=DEVICE)
            partial_lse = torch.ones(2, 2, dtype=torch.float32, device=DEVICE)
            out, lse = torch.empty_like(partial), torch.empty_like(partial_lse)
            peers.merge(partial, partial_lse, out, lse)
            assert torch.equal(out, partial) and torch.equal(lse, partial_lse)
