"""Names that a build may not have: those that the package, or Python, already uses. Derived from what is written."""

import ast
import keyword
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath

from mla_codegen.plan.resolve import Plan


def package_flaw(out: Path, shared: Mapping[str, str]) -> str | None:
    """Why the folder `out` could not be imported as the package of the files `shared`; None if it can."""
    name = out.resolve().name
    if not (name.isidentifier() and name.isascii()) or keyword.iskeyword(name):
        return f"--out {out}: {name or 'the root folder'!r} is no name that Python can import a package by"
    if name == "mla_codegen" or name in sys.stdlib_module_names | _imports(shared):
        return f"--out {out}: a package {name!r} would stand before the module {name!r} that Python or its files import"
    return None


def spec_flaw(plan: Plan, builds: Mapping[str, dict], shared: Mapping[str, str], out: Path) -> str | None:
    """Why a build of `plan` cannot lie beside the files `shared` and the other `builds`; None if it can."""
    name = plan.name
    if name.startswith("__") and name.endswith("__"):
        return f"{plan.spec_file}: names like {name} are Python's own"
    # Without regard to case: some file systems have none.
    taken = {PurePosixPath(path).parts[0].removesuffix(".py").casefold() for path in shared}
    taken |= {bound.casefold() for bound in _bound_names(shared["dispatch.py"])}
    if name.casefold() in taken:
        return f"{plan.spec_file}: {name} is the name of a part of every package"
    for other, build in builds.items():
        if other.casefold() != name.casefold() or build["spec"] == plan.spec_file:
            continue
        if other != name or (out.resolve().parent / build["spec"]).is_file():
            return f"{plan.spec_file} and {build['spec']} would both be built into {out / other}"
    return None


def _imports(files: Mapping[str, str]) -> set[str]:
    """Modules that the files import from elsewhere."""
    found = set()
    for path, text in files.items():
        for node in ast.walk(ast.parse(text)) if path.endswith(".py") else ():
            if isinstance(node, ast.Import):
                found |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
                found.add(node.module.split(".")[0])
    return found


def _bound_names(text: str) -> Iterator[str]:
    """What a module binds at its top level, but for the builds that it imports."""
    for node in ast.parse(text).body:
        if isinstance(node, ast.ImportFrom) and (node.module or not node.level):
            yield from (alias.asname or alias.name for alias in node.names)
        elif isinstance(node, ast.Assign):
            yield from (target.id for target in node.targets if isinstance(target, ast.Name))
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
