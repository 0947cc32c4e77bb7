"""Executes an unmodified Python file so that its kernels run through the emulator."""

from __future__ import annotations

import builtins
import importlib.util
import linecache
import re
import types
from pathlib import Path
from typing import Any

import triton

from mla_codegen.catalog.releases import RELEASES
from mla_codegen.check.emulate.errors import EmulatorError, watch

try:
    from mla_codegen.check.emulate import namespaces
except ImportError as missing:
    raise EmulatorError(
        f"triton {triton.__version__} has not the Gluon that the emulator models ({missing})",
        f"install a triton of {', '.join(RELEASES)}",
    ) from missing

ARCHES = ("sm_90", "gfx942", "gfx950")


def load(
    path_or_source: str | Path, name: str, *, arch: str | None = None, package: dict[str, Any] | None = None
) -> types.ModuleType:
    """The module that `path_or_source` defines, its `@gluon.jit` and `@triton.jit` kernels launchable on CPU tensors.

    path_or_source   a path to a Python file, or its text (anything with a newline)
    name             the module's `__name__`
    arch             one of ARCHES; by default what the file says: gfx950 for cdna4, gfx942 for other AMD, else sm_90
    package          modules (or anything with the names) that the file may import by these dotted names;
                     relative imports are resolved against `name`
    """
    text = str(path_or_source)
    if "\n" in text:
        filename, source = f"<emulated {name}>", text
        linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
    else:
        filename, source = text, Path(text).read_text(encoding="utf-8")
    chosen = arch or _guess(source)
    if chosen not in ARCHES:
        raise EmulatorError(f"architecture {chosen!r} is not modelled", f"one of {', '.join(ARCHES)}")
    watch(filename)
    module = types.ModuleType(name)
    module.__file__ = filename
    module.__dict__["__builtins__"] = {
        **vars(builtins),
        "__import__": _importer(namespaces.build(chosen), package or {}, name.rpartition(".")[0]),
    }
    exec(compile(source, filename, "exec"), module.__dict__)
    return module


def _guess(source: str) -> str:
    if re.search(r"language\.amd|AMDMFMALayout", source):
        return "gfx950" if re.search(r"cdna4|AMDMFMALayout\(\s*(version\s*=\s*)?4", source) else "gfx942"
    return "sm_90"


def _importer(stand_ins: dict[str, types.ModuleType], package: dict[str, Any], home: str) -> Any:
    """`__import__` that serves the stand-ins and `package`, and leaves every other module alone."""
    served = {**stand_ins, **package}

    def emulated_import(name: str, globals: Any = None, locals: Any = None, fromlist: Any = (), level: int = 0) -> Any:
        if level:
            absolute = importlib.util.resolve_name("." * level + name, home) if home else name
            if absolute in served:
                return served[absolute]
            members = {item: served.get(f"{absolute}.{item}") for item in fromlist or ()}
            if members and None not in members.values():
                return types.SimpleNamespace(**members)
            raise EmulatorError(
                f"relative import of {absolute or name!r}",
                f"load that file first and pass package={{{absolute!r}: module}}",
            )
        if name in served:
            top = name.partition(".")[0]
            return served[name] if fromlist or top not in served else served[top]
        if name.partition(".")[0] == "triton":
            raise EmulatorError(
                f"import of {name}: the emulator has no such module", "docs/emulator.md lists what is covered"
            )
        return builtins.__import__(name, globals, locals, fromlist, level)

    return emulated_import
