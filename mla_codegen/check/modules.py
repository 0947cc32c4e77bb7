"""Python files that are in no package, as modules."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType


def import_file(path: Path, name: str) -> ModuleType:
    """The module that the file at `path` defines, by this name in `sys.modules`; raises what the file raises.

    An `__init__.py` becomes a package, of which other modules can be imported.
    """
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module
