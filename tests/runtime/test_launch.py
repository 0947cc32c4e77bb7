"""The launcher: what it may launch again, held to what Triton itself tells apart; hooks, descriptors, threads."""

import importlib
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton
from hypothesis import given
from hypothesis import strategies as st
from triton._C.libtriton import native_specialize_impl
from triton.backends.nvidia.compiler import CUDABackend
from triton.experimental.gluon.language import NVMMASharedLayout

from mla_codegen.runtime import launch as module
from mla_codegen.runtime.launch import Launch

FREE = (False, False, False, False, True, True, False)  # do_not_specialize of each parameter


class Pointer:
    """Something at an address."""

    def __init__(self, address: int, dtype: torch.dtype = torch.float32):
        self.address, self.dtype = address, dtype

    def data_ptr(self) -> int:
        return self.address


class Kernel:
    """Stands in for a Triton kernel: compiles one binary for each call, and notes what runs."""

    def __init__(self, free: tuple[bool, ...] = FREE, layout: int | None = None):
        names = ["out_layout" if position == layout else f"a{position}" for position in range(len(free))]
        self.params = [SimpleNamespace(name=n, do_not_specialize=f) for n, f in zip(names, free, strict=True)]
        self.compiled: list[list[Any]] = []
        self.launched: list[tuple[Any, ...]] = []  # (grid, stream, binary, its arguments)

    def specialised(self, args: tuple[Any, ...]) -> list[Any]:
        """What Triton compiles for."""
        kinds = zip(args, self.params, strict=True)
        return [native_specialize_impl(CUDABackend, a, False, not p.do_not_specialize, True) for a, p in kinds]

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def compile(*args: Any, **options: Any) -> Any:
            number = len(self.compiled)
            self.compiled.append(self.specialised(args))

            def run(x: int, y: int, z: int, stream: int, function: int, packed: Any, *rest: Any) -> None:
                assert (y, z, function, rest[:3]) == (1, 1, number, (None, None, None))
                self.launched.append(((x,), stream, number, rest[3:]))

            return SimpleNamespace(run=run, function=number, packed_metadata=())

        return compile


@pytest.fixture(scope="module", autouse=True)
def driver() -> Iterator[SimpleNamespace]:
    """A driver with a current device that can be set; device d has the stream 100 + d."""
    active = SimpleNamespace(device=0, get_current_stream=lambda device: 100 + device)
    active.get_current_device = lambda: active.device
    before = module.driver
    module.driver = SimpleNamespace(active=active)
    yield active
    module.driver = before


addresses = st.sampled_from([0x100, 0x200, 0x108, 0x10])
dtypes = st.sampled_from([torch.float32, torch.int32, torch.bfloat16])
pointers = st.one_of(st.none(), st.builds(Pointer, addresses, dtypes))
integers = st.sampled_from([0, 1, 2, 16, 17, -1, -16, (1 << 31) - 1, 1 << 31, -(1 << 31), -(1 << 31) - 1, 1 << 40])
calls = st.tuples(
    pointers, pointers, pointers, st.sampled_from([0.5, 1.0, 1, 2, 16]), integers, integers,
    st.one_of(integers, st.booleans()),
)  # fmt: skip


@given(st.lists(calls, min_size=2, max_size=12))
def test_a_binary_is_launched_again_only_where_triton_would(made: list[tuple[Any, ...]]) -> None:
    kernel = Kernel()
    launch = Launch(kernel)
    for args in [(Pointer(0x100), None, Pointer(0x110), 0.5, 3, 4, 5), *made]:
        before = len(kernel.launched)
        launch[(7,)](*args, num_warps=4)
        if len(kernel.launched) == before:
            assert kernel.compiled[-1] == kernel.specialised(args)
            continue
        grid, stream, number, given = kernel.launched[-1]
        assert kernel.compiled[number] == kernel.specialised(args)
        assert (grid, stream) == ((7,), 100)
        plain = [a.address if isinstance(a, Pointer) else 0 if a is None else a for a in args[:3]]
        assert list(given) == [*plain, *args[3:]]


some_pointers = st.lists(st.builds(Pointer, addresses, dtypes), min_size=2, max_size=2).map(tuple)
some_numbers = st.lists(integers, min_size=3, max_size=3).map(tuple)
layouts = st.one_of(st.none(), st.tuples(some_numbers, st.sampled_from([0.5, 1.0])).map(lambda one: (*one[0], one[1])))


@given(st.lists(st.tuples(some_pointers, st.tuples(some_numbers, some_numbers), layouts), min_size=2, max_size=12))
def test_tuples_are_told_apart_as_triton_does(made: list[tuple[Any, ...]]) -> None:
    """Of pointers, of numbers in tuples, and layouts, which may be None at first, or later."""
    kernel = Kernel((False,) * 3, layout=2)
    launch = Launch(kernel)
    for args in made:
        before = len(kernel.launched)
        launch[(7,)](*args, num_warps=4)
        if len(kernel.launched) == before:
            assert kernel.compiled[-1] == kernel.specialised(args)
            continue
        _, _, number, given = kernel.launched[-1]
        assert kernel.compiled[number] == kernel.specialised(args)
        assert list(given) == [tuple(one.address for one in args[0]), *args[1:]]


USUAL = (Pointer(0x100), Pointer(0x200), None, 0.5, 3, 4, 5)
DIFFERENT = {
    "alignment": (Pointer(0x104), *USUAL[1:]),
    "alignment of another": (USUAL[0], Pointer(0x208), *USUAL[2:]),
    "element type": (Pointer(0x100, torch.float16), *USUAL[1:]),
    "a pointer more": (*USUAL[:2], Pointer(0x100), *USUAL[3:]),
    "a pointer less": (USUAL[0], None, *USUAL[2:]),
    "an integer": (*USUAL[:6], 6),
    "a wide integer": (*USUAL[:4], 1 << 31, *USUAL[5:]),
    "an integer for a float": (*USUAL[:3], 1, *USUAL[4:]),
}
SAME = {
    "addresses": (Pointer(0x110), Pointer(0x5550), *USUAL[2:]),
    "a float": (*USUAL[:3], 0.25, *USUAL[4:]),
    "free integers": (*USUAL[:4], 1, 16, 5),
}


@pytest.mark.parametrize("what", [*DIFFERENT, *SAME])
def test_what_makes_another_binary(what: str) -> None:
    kernel = Kernel()
    launch = Launch(kernel)
    launch[(1,)](*USUAL)
    for _ in range(2):
        launch[(1,)](*(DIFFERENT | SAME)[what])
    assert len(kernel.compiled) == (2 if what in DIFFERENT else 1)
    assert len(kernel.launched) == (1 if what in DIFFERENT else 2)


def test_each_device_has_its_own(driver: SimpleNamespace) -> None:
    kernel = Kernel()
    launch = Launch(kernel)
    try:
        for driver.device in (0, 1, 0, 1):
            launch[(1,)](*USUAL)
    finally:
        driver.device = 0
    assert [(stream, number) for _, stream, number, _ in kernel.launched] == [(100, 0), (101, 1)]


@pytest.mark.parametrize("large", [module.RANGE - 1, module.RANGE])
def test_on_amd_the_memory_s_size_counts(monkeypatch: pytest.MonkeyPatch, large: int) -> None:
    monkeypatch.setattr(module, "ON_AMD", True)
    kernel = Kernel()
    launch = Launch(kernel)
    for size in (64, large, 64, large):
        first = Pointer(0x100)
        first.ptr_range = lambda size=size: size  # type: ignore[attr-defined]
        launch[(1,)](first, torch.zeros(4), *USUAL[2:])
    assert len(kernel.compiled) == (2 if large == module.RANGE else 1)


@pytest.mark.parametrize("hook", ["launch_enter_hook", "launch_exit_hook"])
def test_a_profiler_gets_tritons_own_launch(hook: str) -> None:
    kernel = Kernel()
    launch = Launch(kernel)
    launch[(1,)](*USUAL)
    chain = getattr(triton.knobs.runtime, hook)
    watch = lambda metadata: None  # noqa: E731
    chain.add(watch)
    try:
        launch[(1,)](*USUAL)
    finally:
        chain.remove(watch)
    assert (len(kernel.compiled), len(kernel.launched)) == (2, 0)
    launch[(1,)](*USUAL)
    assert (len(kernel.compiled), len(kernel.launched)) == (2, 1)


def launches_of(binary: Any, monkeypatch: pytest.MonkeyPatch, calls: list[tuple[Any, ...]], **options: Any) -> None:
    """Launch a kernel whose binary is compiled already."""
    monkeypatch.setattr(Kernel, "__getitem__", lambda self, grid: lambda *args, **options: binary)
    launch = Launch(Kernel((True,) * len(calls[0])))
    for args in calls:
        launch[(3,)](*args, **options)


# Arguments of NVIDIA's launch: those before the kernel's own, and these.
REACHES = {
    "3.6": lambda *own: (3, 1, 1, 100, 9, False, True, None, None, "packed", None, None, None, *own),
    "3.7": lambda *own: (3, 1, 1, 100, 9, False, True, "packed", *(None,) * 5, "annotations", "types", own),
}


@pytest.mark.parametrize("release", module.FORMS)
def test_descriptors_are_encoded_once(monkeypatch: pytest.MonkeyPatch, release: str) -> None:
    """By the launcher that Triton wraps, under the arguments of a launch that NVIDIA's driver takes in each release."""
    given: list[Any] = []
    encoded: list[Any] = []

    def launcher(*args: Any) -> None:
        given.append(args)

    def wrap(launcher: Any) -> Any:
        return lambda *args: launcher(*args)

    monkeypatch.setattr(module, "FORM", module.FORMS[release])
    run = SimpleNamespace(
        launch=wrap(launcher), global_scratch_size=0, profile_scratch_size=0, launch_cooperative_grid=False,
        launch_pdl=True, arg_annotations="annotations", kernel_signature="types",
    )  # fmt: skip
    metadata = SimpleNamespace(tensordesc_meta=["meta"])
    binary = SimpleNamespace(run=run, function=9, packed_metadata="packed", metadata=metadata)
    monkeypatch.setattr(module, "_encode", lambda tile, kind: encoded.append(kind) or ("code", tile.name))
    one, two = SimpleNamespace(encoded=None, name="one"), SimpleNamespace(encoded=None, name="two")
    launches_of(binary, monkeypatch, [(tile, 5) for tile in (one, one, two, one, two)], launch_pdl=True)
    reaches = REACHES["3.6" if release == "3.6" else "3.7"]
    assert given == [reaches("code", name, 5) for name in ("one", "two", "one", "two")]
    assert encoded == ["meta", "meta"]


@pytest.mark.parametrize("release", module.FORMS)
@pytest.mark.parametrize("amd", [False, True])
def test_a_binary_that_needs_scratch_goes_through_tritons_launcher(
    monkeypatch: pytest.MonkeyPatch, release: str, amd: bool
) -> None:
    """Which takes the kernel's own arguments one by one in every release."""
    monkeypatch.setattr(module, "FORM", module.FORMS[release])
    monkeypatch.setattr(module, "ON_AMD", amd)
    given: list[Any] = []

    class Run:
        launch_pdl, global_scratch_size, profile_scratch_size = False, 64, 0

        def __call__(self, *args: Any) -> None:
            given.append(args)

    binary = SimpleNamespace(run=Run(), function=9, packed_metadata="packed")
    launches_of(binary, monkeypatch, [(4, 5), (4, 5)])
    assert given == [(3, 1, 1, 100, 9, "packed", None, None, None, 4, 5)]


def test_an_unknown_release_launches_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FORM", None)
    kernel = Kernel()
    launch = Launch(kernel)
    for _ in range(3):
        launch[(1,)](*USUAL)
    assert (len(kernel.compiled), len(kernel.launched)) == (3, 0)


@pytest.mark.parametrize("descriptor", [False, True])
def test_what_reaches_the_driver_is_what_triton_itself_hands_it(
    monkeypatch: pytest.MonkeyPatch, driver: SimpleNamespace, descriptor: bool
) -> None:
    """NVIDIA's own launcher of the installed release, over a driver that takes notes."""
    nvidia = importlib.import_module("triton.backends.nvidia.driver")
    from triton.runtime import driver as tritons

    from mla_codegen.runtime.descriptors import Tile

    notes: list[Any] = []
    fill = lambda *args: ("map", *args)  # noqa: E731
    utils = SimpleNamespace(
        launch=lambda *args: notes.append(args), build_signature_metadata=lambda kinds: ("types", *kinds),
        fill_tma_descriptor=fill, fill_tma_descriptor_tiled=fill,
    )  # fmt: skip
    driver.utils = utils
    monkeypatch.setattr(type(tritons), "active", property(lambda self: driver))
    for name in ("PyKernelArg", "ARG_CONSTEXPR", "ARG_KERNEL", "ARG_TUPLE"):  # of the C module
        monkeypatch.setattr(nvidia, name, lambda **fields: fields, raising=False)
    if hasattr(nvidia, "compile_module_from_src"):  # 3.6 compiles a launcher for each signature
        monkeypatch.setattr(nvidia, "compile_module_from_src", lambda **source: utils)
        monkeypatch.setattr(nvidia, "library_dirs", list)
    layout = NVMMASharedLayout(128, 16, 2)
    tensor = torch.zeros(64, 64, dtype=torch.bfloat16)
    tile = Tile(tensor, [64, 64], [64, 1], [16, 64], layout)
    kinds = {"swizzle": 3, "elem_size": 2, "elem_type": 10, "block_size": [16, 64], "fp4_padded": False}
    signature = {
        0: f"tensordesc<bf16[16, 64],{layout!r}>" if descriptor else "*bf16",
        1: "constexpr",
        2: "fp32",
        3: "i32",
    }
    metadata = SimpleNamespace(
        tensordesc_meta=[kinds] if descriptor else None, num_ctas=1, global_scratch_size=0, global_scratch_align=1,
        profile_scratch_size=0, profile_scratch_align=1, launch_cooperative_grid=False, launch_pdl=True,
        instrumentation_mode="",
    )  # fmt: skip
    run = nvidia.CudaLauncher(SimpleNamespace(constants={}, signature=signature), metadata)
    binary = SimpleNamespace(run=run, function=9, packed_metadata=(4, 1, 1024), metadata=metadata)
    first = tile if descriptor else Pointer(0x100, torch.bfloat16)
    args = (first, None, 0.5, 7)
    launches_of(binary, monkeypatch, [args, args], launch_pdl=True)
    (ours,) = notes
    run(3, 1, 1, 100, 9, (4, 1, 1024), None, None, None, *args)
    theirs = notes[-1]
    bare = lambda own: [0 if one is None else one.address if isinstance(one, Pointer) else one for one in own]  # noqa: E731
    if isinstance(ours[-1], tuple):
        assert (*ours[:-1], bare(ours[-1])) == (*theirs[:-1], bare(theirs[-1]))
    else:
        assert bare(ours) == bare(theirs)
    assert module.FORM is not None


def test_threads_at_once() -> None:
    """Each thread's arguments reach the binary that was compiled for their kind."""
    kernel = Kernel()
    launch = Launch(kernel)
    ready = threading.Barrier(4)

    def work(number: int) -> None:
        ready.wait()
        for turn in range(200):
            launch[(number + 1,)](Pointer(0x100 + 8 * (turn % 2)), None, None, 0.5, number, turn, number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(kernel.launched) + len(kernel.compiled) == 800
    assert len(kernel.launched) >= 800 - 4 * 8
    for (programs,), _, number, (address, _, _, _, free, _, keyed) in kernel.launched:
        assert programs == free + 1 == keyed + 1
        assert kernel.compiled[number][0] == ("*fp32", "D" if address % 16 == 0 else "")
