"""Memory cut into parts, and how much of it calls may need."""

from pathlib import Path
from types import ModuleType

import pytest
import torch
import triton
from builds import plan_of, spec_of
from builds import tables as build_tables
from hypothesis import given
from hypothesis import strategies as st

from mla_codegen.runtime.calls import Dispatcher
from mla_codegen.runtime.scratch import ALIGNMENT, Floats, addresses, carve, size_of
from mla_codegen.runtime.workspace import workspace_bytes

Q = torch.zeros(1, 1, 1)
counts = st.lists(st.integers(0, 100), min_size=1, max_size=5)


@given(counts, st.integers(0, 5), st.booleans())
def test_parts_are_aligned_apart_and_within(numbers: list[int], integers: int, given_memory: bool) -> None:
    integers = min(integers, len(numbers))
    size = size_of(numbers)
    workspace = torch.zeros(size, dtype=torch.uint8) if given_memory else None
    parts = carve(workspace, Q, numbers, integers)
    first = len(numbers) - integers
    assert [part.dtype for part in parts] == [torch.float32] * first + [torch.int32] * integers
    assert [part.numel() for part in parts] == numbers
    for value, part in enumerate(parts):
        part.fill_(value)
    for value, part in enumerate(parts):
        assert (part == value).all()
        assert not part.numel() or part.data_ptr() % ALIGNMENT == 0


@given(counts, st.integers(0, 5))
def test_on_a_gpu_they_are_the_same_as_addresses(numbers: list[int], integers: int) -> None:
    memory = torch.zeros(size_of(numbers) + 1, dtype=torch.uint8)
    integers = min(integers, len(numbers))
    tensors = carve(memory, Q, numbers, integers)
    for part, tensor in zip(addresses(memory, memory.data_ptr(), numbers, integers), tensors, strict=True):
        assert part.dtype is tensor.dtype
        assert part.data_ptr() == tensor.data_ptr() or not tensor.numel()
        assert part.ptr_range() == tensor.nbytes
        assert part.memory is memory


def test_triton_takes_addresses_as_it_takes_tensors() -> None:
    from triton._C.libtriton import native_specialize_impl
    from triton.backends.amd.compiler import HIPBackend
    from triton.backends.nvidia.compiler import CUDABackend

    tensor = torch.zeros(8)
    for backend in (CUDABackend, HIPBackend):
        for offset in (0, 1):
            given = Floats(tensor.data_ptr() + 4 * offset, 4, tensor)
            want = native_specialize_impl(backend, tensor[offset:], False, True, True)
            assert native_specialize_impl(backend, given, False, True, True) == want


@pytest.fixture(scope="module")
def tables(tmp_path_factory: pytest.TempPathFactory) -> list[ModuleType]:
    small = spec_of(model={"num_heads": 2, "kv_lora_rank": 64, "qk_rope_head_dim": 32})
    shaped = [{"batch": 3, "kv_len": 64, "splits": 250}]
    wide = spec_of(model={"num_heads": 96, "kv_lora_rank": 64, "qk_rope_head_dim": 32}, shapes=shaped)
    plans = [plan_of(small, "small.yaml"), plan_of(wide, "wide.yaml")]
    return build_tables(plans, tmp_path_factory.mktemp("workspace"), "workspace_package")


@pytest.fixture
def dispatcher(tables: list[ModuleType]) -> Dispatcher:
    if not triton.knobs.runtime.interpret:
        pytest.skip("calls here are made on the CPU")
    return Dispatcher(tables, "mla-codegen build")


@pytest.mark.parametrize("heads", [2, 96])
@pytest.mark.parametrize("total_q", [0, 1, 2, 3, 4, 40])
def test_no_call_needs_more(dispatcher: Dispatcher, heads: int, total_q: int) -> None:
    bound = workspace_bytes(dispatcher, total_q, heads)
    (build,) = dispatcher.serving(heads=heads)
    most = 0
    for kv, choice in build.choices.items():
        for rows in range(1, total_q + 1):
            for kv_len in [0, 40, *(int(1.3**power) for power in range(16, 70))]:
                name, splits = choice.choose(rows, kv_len)
                needed = size_of(build.kernel(name).scratch(rows, *([] if splits is None else [splits])))
                most = max(most, needed)
                assert needed <= bound, (kv, rows, kv_len, name, splits)
    if total_q == 40:  # among so many calls is one that needs nearly as much
        assert bound <= 1.5 * most


def test_a_batch_invariant_build_grows_with_the_rows(tmp_path: Path) -> None:
    if not triton.knobs.runtime.interpret:
        pytest.skip("calls here are made on the CPU")
    model = {"num_heads": 2, "kv_lora_rank": 64, "qk_rope_head_dim": 32}
    defaults = {"splits": 5, "block_n": 32, "optimizations": ["packed_fp8"]}
    shapes = [{"batch": 4, "kv_len": 64}]
    plan = plan_of(spec_of(model=model, batch_invariant=True, defaults=defaults, shapes=shapes))
    dispatcher = Dispatcher(build_tables([plan], tmp_path, "invariant_workspace"), "mla-codegen build")
    assert workspace_bytes(dispatcher, 7) == size_of((7 * 2 * 5 * 64, 7 * 2 * 5, 7 * 2))


def test_of_all_builds_the_largest(dispatcher: Dispatcher) -> None:
    each = [workspace_bytes(dispatcher, 5, heads, "cpu") for heads in (2, 96)]
    assert workspace_bytes(dispatcher, 5) == max(each) > min(each)
    with pytest.raises(ValueError, match="no kernel for 7 heads; built for 2, 96"):
        workspace_bytes(dispatcher, 5, 7)
    with pytest.raises(ValueError, match="total_q is -1"):
        workspace_bytes(dispatcher, -1)
