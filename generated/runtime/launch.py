# Copied by mla-codegen from mla_codegen/runtime/launch.py. Do not edit: `mla-codegen build` writes it anew.
"""Launch a Triton kernel again with less host time than `kernel[grid](...)` takes.

Triton binds and specialises every argument on every call, some 20 us. `Launch` does it once for each set of argument
kinds (dtypes, 16-byte alignment, sizes that Triton specialises on) and then hands the compiled binary its arguments,
pointers as the numbers that they are. TMA descriptors are encoded once each and not at every launch.
"""

from functools import partial
from typing import Any

import torch
import triton
from triton.runtime import driver

ALIGNED = 15  # Triton specialises pointers on 16-byte alignment
ON_AMD = torch.version.hip is not None
RANGE = 1 << 31  # bytes: AMD kernels address smaller tensors with 32-bit offsets
PLAIN = (int, float, bool, type(None))


class Launch:
    """Stands in for a `@triton.jit` or `@gluon.jit` kernel: `launch[grid](*args, **options)`. `fn` is the kernel.

    Integers are part of the key unless the kernel marks them `do_not_specialize`; floats never are. What is neither a
    number nor a tensor is a TMA descriptor with a place for its encoding (`descriptors.Tile`); at one place a kernel
    always gets tiles of one kind.
    """

    def __init__(self, fn: Any):
        self.fn = fn
        self._keyed = tuple(not parameter.do_not_specialize for parameter in fn.params)
        self._binaries: dict[Any, tuple[Any, Any]] = {}
        self._tiles: dict[int, Any] = {}  # place of a descriptor among the arguments -> how it is encoded

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return partial(self._launch, grid)

    def _launch(self, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
        device = driver.active.get_current_device()
        key: list[Any] = [device]
        given: list[Any] = []
        for place, argument in enumerate(args):
            if type(argument) in PLAIN:
                if self._keyed[place] and type(argument) is not float:
                    key.append(argument)
                given.append(argument)
            elif isinstance(argument, torch.Tensor):
                address = argument.data_ptr()
                key.append(argument.dtype)
                key.append(address & ALIGNED == 0)
                if ON_AMD:
                    key.append(argument.untyped_storage().nbytes() < RANGE)
                given.append(address)
            elif place in self._tiles:
                if argument.encoded is None:
                    argument.encoded = _encode(argument, self._tiles[place])
                given += argument.encoded
        binary, launch = self._binaries.get(tuple(key), (None, None))
        if launch is None or triton.knobs.runtime.launch_enter_hook.calls:  # a profiler wants Triton's own launch
            binary = self.fn[grid](*args, **options)
            self._binaries[tuple(key)] = binary, self._launcher(binary, args)
            return
        launch(grid[0], 1, 1, driver.active.get_current_stream(device), binary.function, *given)

    def _launcher(self, binary: Any, args: tuple[Any, ...]) -> Any:
        """What launches `binary` for (grid, stream, function, *args), its descriptors encoded; None: Triton must."""
        run = binary.run
        places = [place for place, argument in enumerate(args) if hasattr(argument, "encoded")]
        if not places:
            return partial(_call, run, binary.packed_metadata)
        # Triton's wrapper encodes the descriptors; what it wraps takes them encoded.
        wrapper = run.launch
        names = wrapper.__code__.co_freevars if hasattr(wrapper, "__code__") else ()
        kinds = getattr(binary.metadata, "tensordesc_meta", None)
        if "launcher" not in names or not kinds or run.global_scratch_size or run.profile_scratch_size:
            return None
        self._tiles = dict(zip(places, kinds, strict=True))
        raw = wrapper.__closure__[names.index("launcher")].cell_contents
        return partial(_call_raw, raw, run.launch_cooperative_grid, run.launch_pdl, binary.packed_metadata)


def _call(run: Any, packed: Any, x: int, y: int, z: int, stream: int, function: int, *args: Any) -> None:
    run(x, y, z, stream, function, packed, None, None, None, *args)


def _call_raw(
    raw: Any, cooperative: Any, pdl: Any, packed: Any, x: int, y: int, z: int, stream: int, function: int, *args: Any
) -> None:
    raw(x, y, z, stream, function, cooperative, pdl, None, None, packed, None, None, None, *args)


def _encode(tile: Any, kind: Any) -> tuple[Any, ...]:
    """A descriptor as the launcher takes it: 128 encoded bytes, shape, strides."""
    from triton.backends.nvidia.driver import make_tensordesc_arg

    return tuple(make_tensordesc_arg(tile, kind))
