# Copied by mla-codegen from mla_codegen/runtime/launch.py. Do not edit: `mla-codegen build` writes it anew.
"""Launch a Triton kernel again with less host time than `kernel[grid](...)` takes.

Triton binds and specialises every argument on every call, some 20 us. `Launch` does it once for each set of argument
kinds (dtypes, 16-byte alignment, sizes that Triton specialises on) and then hands the compiled binary its arguments.
"""

from functools import partial
from typing import Any

import torch
import triton
from triton.runtime import driver

ALIGNED = 15  # Triton specialises pointers on 16-byte alignment


class Launch:
    """Stands in for a `@triton.jit` kernel: `launch[grid](*args, **options)`. `fn` is the kernel itself.

    Integers are part of the key unless the kernel marks them `do_not_specialize`; floats never are.
    """

    def __init__(self, fn: Any):
        self.fn = fn
        self._keyed = tuple(not parameter.do_not_specialize for parameter in fn.params)
        self._binaries: dict[Any, Any] = {}

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return partial(self._launch, grid)

    def _launch(self, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
        device = driver.active.get_current_device()
        key: list[Any] = [device]
        for argument, keyed in zip(args, self._keyed, strict=True):
            if isinstance(argument, torch.Tensor):
                key.append(argument.dtype)
                key.append(argument.data_ptr() & ALIGNED == 0)
            elif keyed and not isinstance(argument, float):
                key.append(argument)
        binary = self._binaries.get(tuple(key))
        if binary is None or triton.knobs.runtime.launch_enter_hook is not None:
            self._binaries[tuple(key)] = self.fn[grid](*args, **options)
            return
        binary.run(
            grid[0], 1, 1, driver.active.get_current_stream(device), binary.function, binary.packed_metadata,
            None, None, None, *args,
        )  # fmt: skip
