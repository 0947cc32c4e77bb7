"""`@gluon.jit` and `@triton.jit` of the emulator: a kernel is its Python function, run once a program."""

from __future__ import annotations

import builtins
import inspect
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import triton.language.core as tl

from mla_codegen.check.emulate import asynchronous, dtypes, elementwise, lang, state
from mla_codegen.check.emulate.errors import EmulatorError, where_raised
from mla_codegen.check.emulate.memory import Buffer
from mla_codegen.check.emulate.nvidia import TensorMap, tensor_map
from mla_codegen.check.emulate.tensor import Tensor, as_tensor

OPTIONS = {
    "num_warps", "num_stages", "num_ctas", "maxnreg", "launch_pdl", "launch_cooperative_grid", "enable_fp_fusion",
    "waves_per_eu", "matrix_instr_nonkdim", "kpack", "schedule_hint", "debug", "sanitize_overflow", "ptx_options",
    "instrumentation_mode", "warp_size",
}  # fmt: skip


def _either(name: str, device: Callable[..., Any]) -> Callable[..., Any]:
    """A Python builtin that Triton maps to a device function where tensors are involved."""
    host = getattr(builtins, name)

    def choose(*args: Any, **options: Any) -> Any:
        return device(*args) if any(isinstance(arg, Tensor) for arg in args) else host(*args, **options)

    return choose


_BUILTINS = {
    "range": lang.runtime_range,
    "min": _either("min", elementwise.minimum),
    "max": _either("max", elementwise.maximum),
    "abs": _either("abs", elementwise.abs),
    "print": lang.device_print,
}


class JitFunction:
    """A device function. Call it from another one, or launch it: `function[(grid,)](*args, num_warps=4)`."""

    def __init__(self, fn: Callable[..., Any], *, gluon: bool, arch: str) -> None:
        self.fn = fn
        self.gluon = gluon
        self.arch = arch
        self.__name__ = fn.__name__
        self.__doc__ = fn.__doc__
        self.__module__ = fn.__module__
        self.signature = inspect.signature(fn)
        self.arg_names = list(self.signature.parameters)
        self._device: Callable[..., Any] | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not state.running():
            raise EmulatorError(f"{self.__name__} is a device function: launch it as {self.__name__}[grid](...)")
        device = self._device or self._bind()
        return device(*args, **kwargs)

    def _bind(self) -> Callable[..., Any]:
        """The function over its module's names, with constexprs as their values and Triton's own `range`."""
        names = {name: lang.plain(value) for name, value in self.fn.__globals__.items()}
        names.update(_BUILTINS)
        defaults = tuple(lang.plain(value) for value in self.fn.__defaults__ or ())
        closure = self.fn.__closure__
        device = types.FunctionType(self.fn.__code__, names, self.fn.__name__, defaults, closure)
        device.__kwdefaults__ = {k: lang.plain(v) for k, v in (self.fn.__kwdefaults__ or {}).items()}
        self._device = device
        return device

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        """A device function in a class is a method of it."""
        return self if instance is None else types.MethodType(self, instance)

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        return lambda *args, **kwargs: self.run(grid, args, kwargs)

    def is_constexpr(self, name: str) -> bool:
        note = self.signature.parameters[name].annotation
        return "constexpr" in (note if isinstance(note, str) else getattr(note, "__name__", ""))

    def run(self, grid: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Run every program of `grid` in order. Arguments as for Triton; CPU tensors become checked pointers."""
        with state.launching:
            self._launch(grid, args, kwargs)

    def _launch(self, grid: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        options = {name: value for name, value in kwargs.items() if name not in self.arg_names}
        unknown = set(options) - OPTIONS
        if unknown:
            raise EmulatorError(
                f"{self.__name__} got {sorted(unknown)}, which are neither parameters nor launch options"
            )
        try:
            bound = self.signature.bind(*args, **{k: v for k, v in kwargs.items() if k in self.arg_names})
        except TypeError as error:
            raise EmulatorError(f"launch of {self.__name__}: {error}") from None
        bound.apply_defaults()
        if callable(grid):
            grid = grid({**bound.arguments, **options})
        sizes = tuple(int(n) for n in (grid if isinstance(grid, (tuple, list)) else (grid,)))
        sizes += (1,) * (3 - len(sizes))
        if state.running():
            raise EmulatorError(f"{self.__name__} is launched inside a kernel")
        buffers: list[Buffer] = []
        given = {
            name: lang.plain(value) if self.is_constexpr(name) else argument(name, value, buffers)
            for name, value in bound.arguments.items()
        }
        self._bind()  # afresh, so that module globals that changed between launches are seen
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            self._run_grid(sizes, given, buffers, options)
        finally:
            torch.set_num_threads(threads)

    def _run_grid(
        self, sizes: tuple[int, ...], given: dict[str, Any], buffers: list[Buffer], options: dict[str, Any]
    ) -> None:
        for z in builtins.range(sizes[2]):
            for y in builtins.range(sizes[1]):
                for x in builtins.range(sizes[0]):
                    self._run_program((x, y, z), (sizes[0], sizes[1], sizes[2]), given, buffers, options)

    def _run_program(
        self,
        index: tuple[int, int, int],
        grid: tuple[int, int, int],
        given: dict[str, Any],
        buffers: list[Buffer],
        options: dict[str, Any],
    ) -> None:
        program = state.Program(
            kernel=self.__name__,
            index=index,
            grid=grid,
            warps=int(options.get("num_warps", 4)),
            lanes=64 if self.arch.startswith("gfx9") else 32,
            arch=self.arch,
            gluon=self.gluon,
            buffers=buffers,
        )
        state.enter(program)
        try:
            with np.errstate(all="ignore"):
                self(**given)
                asynchronous.check_finished()
        except EmulatorError as error:
            error.kernel, error.program = self.__name__, index
            raise
        except Exception as error:
            wrapped = EmulatorError(
                f"{type(error).__name__}: {error}",
                "the kernel uses what Triton does not have, or what the emulator lacks",
            )
            wrapped.line = where_raised(error.__traceback__)
            wrapped.kernel, wrapped.program = self.__name__, index
            raise wrapped from error
        finally:
            state.enter(None)


def argument(name: str, value: Any, buffers: list[Buffer]) -> Any:
    """A launch argument as the kernel sees it: pointer, scalar, descriptor, None, or a tuple of them."""
    if value is None or isinstance(value, (JitFunction, TensorMap)):
        return value
    if isinstance(value, torch.Tensor):
        if value.dtype not in dtypes.FROM_TORCH:
            raise EmulatorError(f"argument {name} has type {value.dtype}, which is not modelled")
        buffer = Buffer(name, value)
        buffers.append(buffer)
        return Tensor(np.int64(0), tl.pointer_type(dtypes.FROM_TORCH[value.dtype]), buffer=buffer)
    if isinstance(value, tuple):
        items = [argument(f"{name}[{i}]", item, buffers) for i, item in enumerate(value)]
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    if hasattr(value, "block_shape") and hasattr(value, "base"):
        descriptor = tensor_map(name, value)
        buffers.append(descriptor.buffer)
        return descriptor
    value = lang.plain(value)
    if isinstance(value, (bool, int, float, np.generic)):
        return as_tensor(value)
    raise EmulatorError(f"argument {name} of type {type(value).__name__} cannot be passed to a kernel")


def jit(arch: str, gluon: bool) -> Callable[..., Any]:
    """The decorator for one dialect; it takes (and ignores) Triton's own options."""

    def decorate(fn: Any = None, **options: Any) -> Any:
        if fn is None:
            return lambda function: JitFunction(function, gluon=gluon, arch=arch)
        return JitFunction(fn, gluon=gluon, arch=arch)

    return decorate
