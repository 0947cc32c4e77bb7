"""What a leaderboard's server refuses in a submission, found before anything is written: each with its own message."""

import ast
import re
from collections.abc import Iterator

MAX_BYTES = 1_000_000
ALLOWED_IMPORTS = ("task", "torch", "triton")
RUNS_TEXT = ("exec", "eval", "compile", "__import__")
PACKERS = ("base64", "binascii", "bz2", "codecs", "gzip", "lzma", "marshal", "pickle", "zipfile", "zlib")
INSTALLS = re.compile(r"\b(pip3?|uv|conda|mamba|apt|apt-get)\s+(-\S+\s+)*install\b|\bensurepip\b", re.I)
RUNS_COMMANDS = ("subprocess", "pip", "ensurepip", "pty")
PACKED = re.compile(r"[A-Za-z0-9+/=_\-\\x]{400,}")  # an unbroken run that no code or prose has
KEEPERS = ("append", "add", "extend", "insert", "setdefault", "update", "__setitem__")
CACHES = ("cache", "lru_cache", "cached_property")


def refusals(text: str) -> list[str]:
    """Why the server would refuse `text`; empty if it would not."""
    found = [*_size(text), *_letters(text), *_installing(text)]
    try:
        tree = ast.parse(text)
    except SyntaxError as error:
        return [*found, f"line {error.lineno}: not Python: {error.msg}"]
    return [*found, *_imports(tree), *_packed(tree), *_kept(tree)]


def _size(text: str) -> Iterator[str]:
    size = len(text.encode())
    if size > MAX_BYTES:
        fix = "bundle a spec with fewer shapes or KV dtypes"
        yield f"the file has {size:,} bytes; the server takes {MAX_BYTES:,}: {fix}"


def _letters(text: str) -> Iterator[str]:
    for number, line in enumerate(text.splitlines(), start=1):
        at = line.lower().find("stream")
        if at >= 0:
            said = line[max(0, at - 20) : at + 26].strip()
            yield f'line {number}: the letters "stream" are refused anywhere, comments included: {said!r}'
            return


def _installing(text: str) -> Iterator[str]:
    for number, line in enumerate(text.splitlines(), start=1):
        if said := INSTALLS.search(line):
            yield f"line {number}: installing packages is refused: {said.group()!r}"


def _imports(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = ["." * node.level + (node.module or "")]
        else:
            continue
        for name in names:
            top = name.split(".")[0]
            if top in RUNS_COMMANDS:
                yield f"line {node.lineno}: installing packages or running commands is refused: import of {name}"
            elif top in PACKERS:
                yield f"line {node.lineno}: packed source is refused: import of {name}"
            elif top not in ALLOWED_IMPORTS:
                yield f"line {node.lineno}: import of {name}: only {', '.join(ALLOWED_IMPORTS)} are there"


def _packed(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            name = _called(node.func)
            if name in RUNS_TEXT and not (isinstance(node.func, ast.Attribute) and name == "compile"):
                yield f"line {node.lineno}: running text as code is refused: {name}(...)"
        elif isinstance(node, ast.Constant) and isinstance(node.value, str | bytes):
            value = node.value if isinstance(node.value, str) else node.value.decode("latin-1")
            if PACKED.search(value):
                yield f"line {node.lineno}: packed source is refused: a string of {len(value):,} unbroken characters"


def _kept(tree: ast.Module) -> Iterator[str]:
    """State that outlives a call: module names written by functions, and caches of what functions make with torch."""
    top = {name.id for node in tree.body for name in ast.walk(node) if _binds_at_top(node, name)}  # type: ignore[attr-defined]
    for function in ast.walk(tree):
        if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        kept = "is kept from one call to the next; the server refuses outputs that are"
        for node in ast.walk(function):
            if isinstance(node, ast.Global | ast.Nonlocal):
                yield f"line {node.lineno}: {', '.join(node.names)} {kept}"
            elif isinstance(node, ast.Subscript | ast.Attribute) and isinstance(node.ctx, ast.Store):
                root = _root(node)
                if root in top or root == function.name:
                    yield f"line {node.lineno}: what {function.name} writes into {root} {kept}"
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in KEEPERS:
                root = _root(node.func)
                if root in top:
                    yield f"line {node.lineno}: what {function.name} puts into {root} {kept}"
        uses_torch = any(isinstance(name, ast.Name) and name.id == "torch" for name in ast.walk(function))
        for decorator in function.decorator_list:
            target = decorator.func if isinstance(decorator, ast.Call) else decorator
            if _called(target) in CACHES and uses_torch:
                yield f"line {function.lineno}: what {function.name} returns {kept}: it is cached"
        for default in [*function.args.defaults, *function.args.kw_defaults]:
            if isinstance(default, ast.Dict | ast.List | ast.Set):
                yield f"line {function.lineno}: a default argument of {function.name} {kept}"


def _binds_at_top(statement: ast.stmt, name: ast.AST) -> bool:
    if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return False
    return isinstance(name, ast.Name) and isinstance(name.ctx, ast.Store)


def _called(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _root(node: ast.expr) -> str:
    while isinstance(node, ast.Subscript | ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""
