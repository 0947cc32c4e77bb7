"""The part of a file that one kernel needs, so that kernels which differ in nothing else compile once.

Generated files of two shapes often hold the same stage 2, or the same stage 1 under another title; a change to one
stage leaves the other's excerpt, and with it the cached result, as it was.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator


def excerpt(text: str, kernel: str) -> str:
    """The kernel `kernel` of a module and every definition that it reaches, without comments and docstrings.

    Functions, classes, assignments and imports are kept if the kernel names them, directly or through others; other
    statements of the module (conditionals and the like) are always kept, because what they do cannot be told by name.
    LookupError if the module does not define the kernel.
    """
    tree = ast.parse(text)
    definitions: dict[str, list[ast.stmt]] = {}
    wanted: list[ast.stmt] = []
    for node in tree.body:
        names = list(_defined(node))
        for name in names:
            definitions.setdefault(name, []).append(node)
        if not names and not _is_text(node):
            wanted.append(node)
    if kernel not in definitions:
        raise LookupError(f"the file does not define {kernel}")
    wanted += definitions[kernel]
    reached: set[int] = set()
    while wanted:
        node = wanted.pop()
        if id(node) in reached:
            continue
        reached.add(id(node))
        for inner in ast.walk(node):
            if isinstance(inner, ast.Name):
                wanted += definitions.get(inner.id, [])
    kept = [_without_docstrings(node) for node in tree.body if id(node) in reached]
    return ast.unparse(ast.Module(kept, [])) + "\n"


def _defined(node: ast.stmt) -> Iterator[str]:
    """The module's names that a statement binds."""
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        yield node.name
    elif isinstance(node, ast.Import):
        yield from (alias.asname or alias.name.split(".")[0] for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        yield from (alias.asname or alias.name for alias in node.names)
    elif isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        for target in targets:
            yield from (inner.id for inner in ast.walk(target) if isinstance(inner, ast.Name))


def _is_text(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _without_docstrings(node: ast.stmt) -> ast.stmt:
    for inner in ast.walk(node):
        if isinstance(inner, ast.FunctionDef | ast.ClassDef):
            body = [statement for statement in inner.body if not _is_text(statement)]
            inner.body = body or [ast.Pass()]
    return node
