"""The process that compiles one kernel (or notes how a file launches it): `python worker.py REQUEST.json RESULT.json`.

Triton's compiler may abort the process on a bad asm constraint, fails to link a second AMD target in the same process,
and can hang; so it lives here, alone. The file imports the standard library and Triton only, because it also runs under
Triton releases other than the one that this package is installed with.
"""

from __future__ import annotations

import ast
import base64
import gc
import importlib.util
import json
import os
import signal
import stat
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import types
from collections.abc import Callable
from typing import Any

PARSES = 3  # tries of a parse that CPython fails


class _StandIn(type):
    """Takes the place of a name that could not be imported: usable as an annotation, a decorator or a base class."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return cls

    def __getitem__(cls, item: Any) -> Any:
        return cls


class Missing(metaclass=_StandIn):
    """Stands for what a module that is not installed would have given."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        return args[0] if len(args) == 1 and not kwargs and callable(args[0]) else cls


class _MissingModule(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Missing


def _import_or_stand_in(node: ast.Import | ast.ImportFrom, module: types.ModuleType, notes: list[str]) -> None:
    """Run one import statement; a module that is not there becomes a stand-in, so that annotations still resolve."""
    code = compile(ast.Module([node], []), module.__name__, "exec")
    try:
        exec(code, module.__dict__)
    except ImportError as error:
        notes.append(f"line {node.lineno}: {error}; a stand-in took its place")
        for alias in node.names:
            bound = alias.asname or alias.name.split(".")[0]
            if isinstance(node, ast.Import):
                module.__dict__[bound] = _MissingModule(alias.name)
            else:
                module.__dict__[bound] = Missing


def load_module(path: str) -> tuple[types.ModuleType, list[str]]:
    """Define what the file defines without running its statements.

    Imports, functions, classes, assignments and conditionals are executed; expressions (calls), loops, `with` blocks
    and assertions at module level are not. An assignment that fails (a tensor on a GPU that is not there) is skipped.
    Returns (module, notes): the notes say what was skipped or stood in for.
    """
    with open(path, encoding="utf-8") as file:
        tree = ast.parse(file.read(), filename=path)
    folder = os.path.dirname(os.path.abspath(path))
    package: list[str] = []
    root = folder
    while os.path.exists(os.path.join(root, "__init__.py")):
        package.insert(0, os.path.basename(root))
        root = os.path.dirname(root)
    sys.path += [folder, root]
    name = ".".join([*package, "mla_inspected_" + os.path.splitext(os.path.basename(path))[0]])
    module = types.ModuleType(name)
    module.__file__ = path
    module.__package__ = ".".join(package)
    module.__spec__ = importlib.util.spec_from_loader(name, loader=None)
    sys.modules[name] = module
    notes: list[str] = []
    for node in tree.body:
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            _import_or_stand_in(node, module, notes)
            continue
        defines = isinstance(node, (ast.FunctionDef, ast.ClassDef, ast.AsyncFunctionDef))
        if not defines and not isinstance(node, (ast.Assign, ast.AnnAssign, ast.AugAssign, ast.If, ast.Try)):
            continue
        try:
            exec(compile(ast.Module([node], []), path, "exec"), module.__dict__)
        except Exception as error:  # whatever the file's own code raises: the kernel may not need it
            notes.append(f"line {node.lineno}: {type(error).__name__}: {error}; skipped")
    return module, notes


def find_kernel(module: types.ModuleType, name: str, notes: list[str]) -> Any:
    """The JIT function called `name`, taken out of autotuner and heuristics wrappers."""
    kernel = getattr(module, name, None)
    while kernel is not None and (hasattr(kernel, "configs") or not hasattr(kernel, "cache_key")):
        kernel = getattr(kernel, "fn", None)
    if kernel is None or not hasattr(kernel, "cache_key"):
        kernels = sorted(key for key, value in vars(module).items() if hasattr(value, "cache_key"))
        hint = "; ".join(notes[:4])
        raise LookupError(
            f"{module.__file__} has no @triton.jit or @gluon.jit kernel named {name}; it has "
            f"{', '.join(kernels) or 'none'}" + (f" ({hint})" if hint else "")
        )
    return kernel


def _value(value: Any, module: types.ModuleType) -> Any:
    if isinstance(value, str) and value.startswith("="):
        import triton.language

        return eval(value[1:], {"tl": triton.language, **module.__dict__})
    return value


def _nvidia_listing(binary: bytes) -> dict[str, str]:
    """SASS with labels and the resource usage of a cubin, by the tools inside the Triton wheel."""
    import triton

    tools = os.path.join(os.path.dirname(triton.__file__), "backends", "nvidia", "bin")
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "kernel.cubin")
        with open(path, "wb") as file:
            file.write(binary)
        sass = subprocess.run([os.path.join(tools, "nvdisasm"), "-c", path], capture_output=True, text=True, check=True)
        usage = subprocess.run(
            [os.path.join(tools, "cuobjdump"), "--dump-resource-usage", path],
            capture_output=True,
            text=True,
            check=True,
        )
    return {"sass": sass.stdout, "resources": usage.stdout}


def compile_request(request: dict[str, Any]) -> dict[str, Any]:
    """Compile the job; returns the record that goes to RESULT.json (assembly, metadata, seconds)."""
    module, notes = load_module(request["file"])
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel = find_kernel(module, request["kernel"], notes)
    source_class: Any = ASTSource
    if getattr(kernel, "is_gluon", lambda: False)():
        from triton.experimental.gluon._runtime import GluonASTSource

        source_class = GluonASTSource
    missing = [name for name in kernel.arg_names if name not in request["signature"]]
    extra = [name for name in request["signature"] if name not in kernel.arg_names]
    if missing or extra:
        raise LookupError(
            f"{request['kernel']}({', '.join(kernel.arg_names)}): the signature lacks {missing or 'nothing'} "
            f"and names {extra or 'nothing'} that the kernel does not take"
        )
    signature = {name: request["signature"][name] for name in kernel.arg_names}
    constexprs = {name: _value(value, module) for name, value in request["constexprs"].items()}
    arch = request["arch"]
    attrs: dict[tuple[int, ...], list[list[Any]]] = {}
    for name in request["divisible"]:
        attrs.setdefault((kernel.arg_names.index(name),), []).append(["tt.divisibility", 16])
    for name in request["within_2gb"] if arch.startswith("gfx") else ():
        attrs.setdefault((kernel.arg_names.index(name),), []).append(["tt.pointer_range", 32])
    target = GPUTarget("hip", arch, 64) if arch.startswith("gfx") else GPUTarget("cuda", int(arch[3:]), 32)
    start = time.perf_counter()
    compiled = triton.compile(
        source_class(kernel, signature, constexprs, attrs), target=target, options=dict(request["options"])
    )
    seconds = time.perf_counter() - start
    metadata = {
        "shared": compiled.metadata.shared,
        "num_warps": compiled.metadata.num_warps,
        "name": compiled.metadata.name,
    }
    record = {"triton": triton.__version__, "seconds": seconds, "notes": notes, "metadata": metadata}
    if arch.startswith("gfx"):
        binary = compiled.asm["hsaco"]
        record.update(asm=compiled.asm["amdgcn"], binary_bytes=len(binary), binary=base64.b64encode(binary).decode())
    else:
        record.update(asm=compiled.asm["ptx"], binary_bytes=len(compiled.asm["cubin"]))
        record.update(_nvidia_listing(compiled.asm["cubin"]))
    return record


def _kind(value: Any) -> tuple[str, bool]:
    """An argument's type in a signature, and whether it counts as divisible by 16."""
    from triton._utils import canonicalize_dtype

    if hasattr(value, "data_ptr"):
        return "*" + canonicalize_dtype(value.dtype), value.data_ptr() % 16 == 0
    if hasattr(value, "block_shape"):
        shape = ", ".join(map(str, value.block_shape))
        layout = f",{value.layout!r}" if hasattr(value, "layout") else ""
        return f"tensordesc<{canonicalize_dtype(value.base.dtype)}[{shape}]{layout}>", False
    if isinstance(value, bool):
        return "i1", False
    if isinstance(value, int):
        return "i32" if -(2**31) <= value < 2**31 else "i64", value % 16 == 0
    return "fp32", False


def launch_of(function: Any, args: tuple[Any, ...], options: dict[str, Any]) -> dict[str, Any]:
    """A launch as the fields of a job: types, constexprs and divisibility as Triton itself would specialise them."""
    import triton.language

    given = {**dict(zip(function.arg_names, args)), **options}  # noqa: B905 - defaults and keywords follow
    launch: dict[str, Any] = {"signature": {}, "constexprs": {}, "divisible": [], "within_2gb": [], "options": {}}
    for parameter in function.params:
        name = parameter.name
        value = given.get(name, parameter.default)
        kind, aligned = _kind(value)
        is_one = kind == "i32" and value == 1 and not parameter.do_not_specialize
        if parameter.is_constexpr or value is None or is_one:
            value = getattr(value, "value", value)
            if isinstance(value, triton.language.dtype):
                value = "=tl." + next(key for key, found in vars(triton.language).items() if found is value)
            launch["constexprs"][name] = value
            continue
        launch["signature"][name] = kind
        if aligned and not (parameter.do_not_specialize or parameter.do_not_specialize_on_alignment):
            launch["divisible"].append(name)
        if hasattr(value, "untyped_storage") and value.untyped_storage().size() < 2**31:
            launch["within_2gb"].append(name)
    known = (
        "num_warps",
        "num_stages",
        "num_ctas",
        "waves_per_eu",
        "maxnreg",
        "matrix_instr_nonkdim",
        "kpack",
        "enable_fp_fusion",
    )
    launch["options"] = {name: options[name] for name in known if options.get(name) is not None}
    return launch


class _Launched(Exception):
    """Ends the host code at the launch that was asked for."""


def record_launch(request: dict[str, Any]) -> dict[str, Any]:
    """Call the file's entry with tensors on the CPU whose contents nobody reads, up to the launch of the kernel."""
    module, notes = load_module(request["file"])
    import torch
    from triton.runtime.autotuner import Autotuner
    from triton.runtime.jit import JITFunction

    kernel = find_kernel(module, request["kernel"], notes)
    entry = getattr(module, request["entry"], None)
    if not callable(entry):
        raise LookupError(f"{request['file']} has no function {request['entry']} to call")
    launches: list[dict[str, Any]] = []

    def run(self: Any, *args: Any, **kwargs: Any) -> None:
        if self is kernel:
            launches.append(launch_of(self, args, kwargs))
            raise _Launched

    def run_first(self: Any, *args: Any, **kwargs: Any) -> None:
        self.fn.run(*args, **{**kwargs, **self.configs[0].all_kwargs()})

    JITFunction.run, Autotuner.run = run, run_first
    case = request["case"]
    batch, rows, heads, width = case["batch"], case["kv_len"], case["heads"], case["width"]
    q = torch.empty(batch, heads, width, dtype=torch.bfloat16)
    kv = torch.empty(batch * rows, 1, width, dtype=torch.bfloat16)
    fp8 = torch.empty(batch * rows, 1, width, dtype=torch.float8_e4m3fn)
    ranges = [torch.arange(batch + 1, dtype=torch.int32) * length for length in (1, rows)]
    config = {"batch_size": batch, "kv_seq_len": rows, "q_seq_len": 1, "num_heads": heads, "sm_scale": width**-0.5}
    data = (q, {"fp8": (fp8, torch.ones(1)), "bf16": kv}, *ranges, config)
    try:
        entry(data)
    except _Launched:
        return launches[0]
    raise LookupError(f"{request['entry']} returned without launching {request['kernel']}")


def _reason(error: BaseException) -> str:
    """One line: the first error's kind and place, and the innermost error's words (Triton nests one per function)."""
    inner = error
    while cause := inner.__cause__ or inner.__context__:
        inner = cause
    if inner is error:
        return f"{type(error).__name__}: {error}"
    place = str(error).strip().splitlines()[0][:80]
    return f"{type(error).__name__} {place} {type(inner).__name__}: {str(inner).strip()}"


def _patiently(work: Callable[[dict[str, Any]], dict[str, Any]], request: dict[str, Any]) -> dict[str, Any]:
    """`work`, again where CPython 3.11 failed a parse for no fault of the text.

    Its ast.parse counts the depth of what it builds, and now and then (a collection in its midst) counts wrong.
    """
    for _ in range(PARSES):
        try:
            return work(request)
        except SystemError as error:
            if "recursion depth mismatch" not in str(error):
                raise
            gc.disable()
    return work(request)


def _end_with_parent(parent: int) -> None:
    """Nothing is written to the pipe that is stdin: it ends when the parent does, and then so does this group."""
    os.read(0, 1)
    while os.getppid() == parent:
        time.sleep(0.05)
    os.killpg(0, signal.SIGKILL)


def main() -> None:
    request_path, result_path = sys.argv[1:3]
    if stat.S_ISFIFO(os.fstat(0).st_mode):
        threading.Thread(target=_end_with_parent, args=(os.getppid(),), daemon=True).start()
    # This file's folder must not shadow modules of the inspected file.
    here = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry or ".") != here]
    with open(request_path, encoding="utf-8") as file:
        request = json.load(file)
    work = record_launch if "entry" in request else compile_request
    try:
        record = _patiently(work, request)
    except Exception as error:
        record = {"error": _reason(error), "traceback": traceback.format_exc()}
    with open(result_path + ".part", "w", encoding="utf-8") as file:
        json.dump(record, file)
    os.replace(result_path + ".part", result_path)


if __name__ == "__main__":
    main()
