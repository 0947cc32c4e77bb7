# Copied by mla-codegen from mla_codegen/runtime/launch.py. Do not edit: `mla-codegen build` writes it anew.
"""Launch a Triton kernel again with less host time than `kernel[grid](...)` takes.

Triton binds and specialises every argument on every call, some 20 us. `Launch` looks at the first call, writes a Python
function for these arguments, and hands the compiled binary its arguments by it, pointers as the numbers that they are.
The function looks up the binary by all that Triton may specialise on: of pointers the element type, whether there is
one, and alignment; of integers the value, or the width alone where the kernel says `do_not_specialize`; of numbers in a
tuple what Triton looks at. TMA descriptors are encoded once each and not at every launch. How a launch reaches the
driver changes with Triton's releases: `FORMS` has those that are known, and under another every launch is Triton's own.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import torch
import triton
from triton.runtime import driver

from .arguments import ARGUMENTS, LAYOUT

ALIGNED = 15  # Triton specialises pointers on 16-byte alignment
ON_AMD = torch.version.hip is not None
RANGE = 1 << 31  # bytes: AMD kernels address smaller tensors with 32-bit offsets

# CUDA is in use by the time that a kernel is launched: without what torch wraps around it to see to that.
current_device: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)

LAYOUTS = frozenset(one.name for one in ARGUMENTS if one.types == LAYOUT)  # they may be None
HOOKS = (None, None, None)  # launch metadata, enter, exit


@dataclass(frozen=True)
class Form:
    """How one release of Triton hands a launch to NVIDIA's driver.

    first    (binary, its launcher) -> what stands between the stream and the kernel's own arguments
    packed   those are one tuple
    encode   what `make_tensordesc_arg` takes behind a descriptor and its kind
    """

    first: Callable[[Any, Any], tuple[Any, ...]]
    packed: bool = True
    encode: tuple[None, ...] = (None,)


def _scratch_first(binary: Any, run: Any) -> tuple[Any, ...]:
    grid = (run.launch_cooperative_grid, run.launch_pdl)
    return (binary.function, *grid, None, None, binary.packed_metadata, *HOOKS)


def _scratch_last(binary: Any, run: Any) -> tuple[Any, ...]:
    grid, types = (run.launch_cooperative_grid, run.launch_pdl), (run.arg_annotations, run.kernel_signature)
    return (binary.function, *grid, binary.packed_metadata, *HOOKS, None, None, *types)


FORMS = {
    "3.6": Form(_scratch_first, packed=False, encode=()),
    "3.7": Form(_scratch_last, encode=()),
    "3.8": Form(_scratch_last),
    "3.9": Form(_scratch_last),
}
FORM = FORMS.get(".".join(triton.__version__.split(".")[:2]))

_HERE = nullcontext()


def on_device_of(tensor: torch.Tensor) -> AbstractContextManager[Any]:
    """Within, the tensor's device is the current one, as a launch needs it."""
    index = tensor.get_device()
    return _HERE if index < 0 or index == current_device() else torch.cuda.device(index)


# What an argument is; the last two are tuples, of pointers and of numbers, perhaps in tuples.
POINTER, TILE, INTEGER, KEYED, FLOAT = "pointer", "tile", "integer", "keyed", "float"
POINTERS, NUMBERS = "pointers", "numbers"


class Launch:
    """Stands in for a `@triton.jit` or `@gluon.jit` kernel: `launch[grid](*args, **options)`. `fn` is the kernel.

    At one position among the arguments a kernel always gets the same: integers, floats, TMA descriptors with room for
    their encoding (`descriptors.Tile`) and of one kind, tuples of pointers, tuples of numbers (or None, where it is a
    layout), or else what has `data_ptr()` and `dtype`, or None. The options are always the same, too. The grid has one
    dimension.
    """

    def __init__(self, fn: Any):
        self.fn = fn
        self.binaries: dict[Any, tuple[Any, tuple[Any, ...]] | None] = {}  # what launches, what it takes first
        self.tiles: dict[int, Any] = {}  # position of a descriptor among the arguments -> how it is encoded
        self._launch: Callable[..., None] = self._first

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return partial(self._launch, grid[0])

    def _first(self, programs: int, *args: Any, **options: Any) -> None:
        self._launch = written(self, [self._kind(position, argument) for position, argument in enumerate(args)])
        self._launch(programs, *args, **options)

    def _kind(self, position: int, argument: Any) -> str:
        if isinstance(argument, float):
            return FLOAT
        if self.fn.params[position].name in LAYOUTS:
            return NUMBERS
        if isinstance(argument, tuple):
            return POINTERS if hasattr(argument[0], "data_ptr") else NUMBERS
        if isinstance(argument, int):
            free = self.fn.params[position].do_not_specialize and type(argument) is int
            return INTEGER if free else KEYED
        return TILE if hasattr(argument, "encoded") else POINTER

    def compile(self, key: Any, programs: int, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        """Launch as Triton does, and note how to launch the same binary again."""
        binary = self.fn[(programs,)](*args, **options)
        self.binaries[key] = self._launcher(binary, [i for i, one in enumerate(args) if hasattr(one, "encoded")])

    def _launcher(self, binary: Any, tiles: list[int]) -> tuple[Any, tuple[Any, ...]] | None:
        """(function, its arguments between the stream and the kernel's own); None: only Triton can launch it."""
        run = binary.run
        wrapper: Any = getattr(run, "launch", None)
        if FORM is None or getattr(run, "gsan_enabled", False):
            return None
        if not hasattr(run, "launch_pdl") or run.global_scratch_size or run.profile_scratch_size:
            call = (lambda *args: run(*args[:-1], *args[-1])) if _packed() else run
            return None if tiles else (call, (binary.function, binary.packed_metadata, *HOOKS))
        first = FORM.first(binary, run)
        if not tiles:
            return wrapper, first
        # Triton's wrapper encodes the descriptors; what it wraps takes them encoded.
        names = wrapper.__code__.co_freevars if hasattr(wrapper, "__code__") else ()
        kinds = getattr(binary.metadata, "tensordesc_meta", None)
        if "launcher" not in names or not kinds:
            return None
        self.tiles.update(zip(tiles, kinds, strict=True))
        return wrapper.__closure__[names.index("launcher")].cell_contents, first


def written(launch: Launch, kinds: list[str]) -> Callable[..., None]:
    """The function that launches for arguments of these kinds. It holds no state but `launch`'s."""
    of = {kind: [position for position, one in enumerate(kinds) if one == kind] for kind in set(kinds)}
    pointers, integers = of.get(POINTER, []), of.get(INTEGER, [])
    key = ["device"]
    key += [f"None if a{i} is None else a{i}.dtype" for i in pointers]
    key += [part for i in of.get(KEYED, []) for part in (f"a{i}", f"type(a{i})")]
    key += [f"type(a{i}) is float or (type(a{i}), a{i})" for i in of.get(FLOAT, [])]
    key += [f"tuple((one.dtype, one.data_ptr() & {ALIGNED} == 0) for one in a{i})" for i in of.get(POINTERS, [])]
    key += [f"a{i} and special(a{i})" for i in of.get(NUMBERS, [])]
    if pointers:  # nearly always 0: all are aligned
        apart = "".join(f"p{i} & {ALIGNED} == 0, " for i in pointers)
        key.append(f"({' | '.join(f'p{i}' for i in pointers)}) & {ALIGNED} and ({apart})")
    if integers:  # nearly always 0: all are small and none is negative
        apart = "".join(f"width(a{i}), " for i in integers)
        key.append(f"({' | '.join(f'a{i}' for i in integers)}) >> 31 and ({apart})")
    if ON_AMD:
        key += [f"tuple(extent(one) < {RANGE} for one in a{i})" for i in of.get(POINTERS, [])]
    if ON_AMD and pointers:
        apart = "".join(f"extent(a{i}) < {RANGE}, " for i in pointers)
        key.append(f"({' | '.join(f'extent(a{i})' for i in pointers)}) >> 31 and ({apart})")
    encode = [f"    if a{i}.encoded is None: a{i}.encoded = encode(a{i}, tiles[{i}])" for i in of.get(TILE, [])]
    as_given = {POINTER: "p{0}", TILE: "*a{0}.encoded", POINTERS: "tuple([one.data_ptr() for one in a{0}])"}
    given = [as_given.get(kind, "a{0}").format(i) for i, kind in enumerate(kinds)]
    own = "".join(f"{one}, " for one in given)
    own = f"({own})" if _packed() else own
    args = ", ".join(f"a{i}" for i in range(len(kinds)))
    lines = [
        f"def launch(programs, {args}, **options):",
        "    device = current_device()",
        *(f"    p{i} = 0 if a{i} is None else a{i}.data_ptr()" for i in pointers),
        f"    key = ({', '.join(key)},)",
        "    found = binaries.get(key)",
        # A profiler wants Triton's own launch.
        "    if found is None or runtime.launch_enter_hook.calls or runtime.launch_exit_hook.calls:",
        f"        return compile(key, programs, ({args},), options)",
        *encode,
        "    call, first = found",
        f"    call(programs, 1, 1, stream_of(device), *first, {own})",
    ]
    active = driver.active
    torchs = active.get_current_device is torch.cuda.current_device
    names: dict[str, Any] = {
        "binaries": launch.binaries, "compile": launch.compile, "encode": _encode, "tiles": launch.tiles,
        "runtime": triton.knobs.runtime, "current_device": current_device if torchs else active.get_current_device,
        "stream_of": active.get_current_stream, "width": _width, "extent": _extent, "special": _special,
    }  # fmt: skip
    exec("\n".join(lines), names)
    return names["launch"]


def _packed() -> bool:
    """Whether what launches takes the kernel's own arguments as one tuple."""
    return FORM is not None and FORM.packed and not ON_AMD


def _width(number: int) -> int:
    """Which of its integer types Triton takes for a number."""
    return 32 if -(1 << 31) <= number < 1 << 31 else 64 if -(1 << 63) <= number < 1 << 63 else 65


@lru_cache(maxsize=4096)
def _special(numbers: tuple[Any, ...]) -> tuple[Any, ...]:
    """What Triton may specialise on of numbers in tuples. At one position they are all integers or all floats."""
    return tuple(
        [
            _special(one)
            if isinstance(one, tuple)
            else one == 1 or (one % 16 == 0, _width(one))
            if isinstance(one, int)
            else type(one)
            for one in numbers
        ]
    )


def _extent(argument: Any) -> int:
    """Bytes of the memory that an argument points into."""
    if argument is None:
        return 0
    return argument.ptr_range() if hasattr(argument, "ptr_range") else argument.untyped_storage().nbytes()


def _encode(tile: Any, kind: Any) -> tuple[Any, ...]:
    """A descriptor as the launcher takes it: 128 encoded bytes, shape, strides."""
    from triton.backends.nvidia.driver import make_tensordesc_arg

    assert FORM is not None
    return tuple(make_tensordesc_arg(tile, kind, *FORM.encode))
