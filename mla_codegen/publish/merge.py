"""Several modules made one, as readable as they were: what they share stands once, what differs gets a name of its own.

Two definitions are the same if their code is, and that of everything they refer to. A name that means one thing in all
modules stays; otherwise a number is told apart by its value (BLOCK_N_64), anything else by what the names of its
modules begin with, or else by the first of them. Comments travel with the definition below them.
"""

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property


class MergeError(Exception):
    """A module that cannot be taken apart; `str()` says where."""


@dataclass
class Definition:
    """One statement at the top of a module that binds a name."""

    module: str
    name: str
    node: ast.stmt
    lines: list[str]  # its source, the comments above included
    first: int  # number of the first of them in the module

    @cached_property
    def code(self) -> str:
        return ast.dump(self.node)

    @cached_property
    def references(self) -> list[tuple[int, int, str]]:
        """(line in `lines`, column in bytes, name) of each use of a name that is not local."""
        return [(node.lineno - self.first, node.col_offset, node.id) for node in _free_names(self.node)]


@dataclass
class Module:
    """A module in parts. `given` maps a name imported from a sibling to the sibling module that defines it."""

    name: str
    doc: str
    imports: list[ast.Import | ast.ImportFrom]
    definitions: dict[str, Definition]
    given: dict[str, str]


@dataclass
class Merged:
    """`shared`: definitions of several modules; `own`: module -> its own; `names`: (module, name) -> the new name."""

    imports: list[str]
    shared: list[str] = field(default_factory=list)
    own: dict[str, list[str]] = field(default_factory=dict)
    names: dict[tuple[str, str], str] = field(default_factory=dict)


def parse_module(name: str, text: str) -> Module:
    """Take a module apart. Relative imports name siblings by the last part of their path."""
    tree = ast.parse(text)
    lines = text.splitlines()
    module = Module(name, ast.get_docstring(tree) or "", [], {}, {})
    end = 0
    for node in tree.body:
        first = end + 1
        end = node.end_lineno or node.lineno
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            continue
        if isinstance(node, ast.ImportFrom) and node.level:
            module.given |= {alias.name: (node.module or "").split(".")[-1] for alias in node.names}
        elif isinstance(node, ast.Import | ast.ImportFrom):
            module.imports.append(node)
        else:
            bound = _bound_name(node)
            if bound is None or bound in module.definitions:
                raise MergeError(f"{name}, line {node.lineno}: only a definition of one name can be merged")
            source = lines[first - 1 : end]
            blank = next((i for i, line in enumerate(source) if line.strip()), 0)
            module.definitions[bound] = Definition(name, bound, node, source[blank:], first + blank)
    return module


def merge(modules: list[Module]) -> Merged:
    """One namespace for all. Modules that others import from come before them."""
    by_name = {module.name: module for module in modules}
    identity = _Identities(by_name)
    owners: dict[object, list[Definition]] = {}
    for module in modules:
        for definition in module.definitions.values():
            owners.setdefault(identity.of(module.name, definition.name), []).append(definition)
    merged = Merged(_imports(modules), own={module.name: [] for module in modules})
    new_names = _new_names(owners)
    for module in modules:
        for name in (*module.definitions, *module.given):
            merged.names[module.name, name] = new_names[identity.of(module.name, name)]
    for same in owners.values():
        definition = same[0]
        text = _renamed(definition, merged.names)
        (merged.shared if len(same) > 1 else merged.own[definition.module]).append(text)
    return merged


class _Identities:
    """What makes two definitions one: (name, code, identities of what it refers to)."""

    def __init__(self, modules: dict[str, Module]):
        self.modules = modules
        self.found: dict[tuple[str, str], tuple] = {}
        self.numbers: dict[tuple, tuple[str, int]] = {}

    def of(self, module: str, name: str) -> tuple[str, int]:
        """(name, number): equal for equal definitions."""
        here = self.modules[module]
        while name not in here.definitions:
            if here.given[name] not in self.modules:
                raise MergeError(f"{here.name} imports {name} from {here.given[name]}, which is not among the modules")
            here = self.modules[here.given[name]]
        key = (here.name, name)
        if key not in self.found:
            definition = here.definitions[name]
            self.found[key] = (name, definition.code)  # for a definition that refers to itself
            used = dict.fromkeys(reference for _, _, reference in definition.references)
            below = tuple(
                self.of(here.name, one)
                for one in used
                if one != name and (one in here.definitions or one in here.given)
            )
            self.found[key] = (name, definition.code, below)
        whole = self.found[key]
        return self.numbers.setdefault(whole, (name, len(self.numbers)))


def _bound_name(node: ast.stmt) -> str | None:
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return node.name
    if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
        return node.targets[0].id
    return None


def _free_names(node: ast.AST) -> Iterator[ast.Name]:
    """Names that a statement looks up outside of itself. A name bound anywhere in a function is local to it."""
    if isinstance(node, ast.FunctionDef):
        outside: list[ast.AST | None] = [
            *node.decorator_list,
            *node.args.defaults,
            *node.args.kw_defaults,
            node.returns,
        ]
        parameters = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        outside += [parameter.annotation for parameter in parameters]
        for part in outside:
            if part is not None:
                yield from _free_names(part)
        bound = {parameter.arg for parameter in parameters}
        for extra in (node.args.vararg, node.args.kwarg):
            bound |= {extra.arg} if extra else set()
        inner = [name for part in node.body for name in _free_names(part)]
        bound |= {name.id for part in node.body for name in ast.walk(part) if _binds(name)}  # type: ignore[attr-defined]
        yield from (name for name in inner if name.id not in bound)
        return
    if isinstance(node, ast.Name):
        if isinstance(node.ctx, ast.Load):
            yield node
        return
    for child in ast.iter_child_nodes(node):
        yield from _free_names(child)


def _binds(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)


def _new_names(owners: dict[object, list[Definition]]) -> dict[object, str]:
    by_name: dict[str, list[object]] = {}
    for key, same in owners.items():
        by_name.setdefault(same[0].name, []).append(key)
    names: dict[object, str] = {}
    for name, keys in by_name.items():
        values = [_value(owners[key][0].node) for key in keys]
        common = [_common([one.module for one in owners[key]]) for key in keys]
        for key, value, prefix in zip(keys, values, common, strict=True):
            if len(keys) == 1:
                names[key] = name
            elif value is not None and values.count(value) == 1:
                names[key] = f"{name}_{value}"
            elif prefix and common.count(prefix) == 1:
                names[key] = f"{name}_{prefix}"
            else:
                names[key] = f"{name}_{owners[key][0].module}"
    taken = list(names.values())
    twice = {name for name in taken if taken.count(name) > 1}
    if twice:
        raise MergeError(f"two definitions would be named {', '.join(sorted(twice))}")
    return names


def _common(names: list[str]) -> str:
    """The words that all names begin with."""
    words = list(zip(*(name.split("_") for name in names), strict=False))
    same = next((i for i, each in enumerate(words) if len(set(each)) > 1), len(words))
    return "_".join(names[0].split("_")[:same])


def _value(node: ast.stmt) -> int | None:
    """64 of `BLOCK_N = constexpr(64)`."""
    if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call) and len(node.value.args) == 1:
        value = node.value.args[0]
        if isinstance(value, ast.Constant) and type(value.value) is int and value.value >= 0:
            return value.value
    return None


def _renamed(definition: Definition, names: dict[tuple[str, str], str]) -> str:
    """Its source under the new names."""
    module, node = definition.module, definition.node
    lines = [line.encode() for line in definition.lines]
    places = list(definition.references)
    offset = {ast.FunctionDef: len("def "), ast.ClassDef: len("class ")}.get(type(node), 0)
    places.append((node.lineno - definition.first, node.col_offset + offset, definition.name))
    for line, column, name in sorted(places, reverse=True):
        new = names.get((module, name), name).encode()
        before, after = lines[line][:column], lines[line][column + len(name.encode()) :]
        lines[line] = before + new + after
    return "\n".join(line.decode() for line in lines)


def _imports(modules: list[Module]) -> list[str]:
    """All absolute imports, those from one module in one statement."""
    plain: dict[str, None] = {}
    members: dict[str, set[str]] = {}
    for module in modules:
        for node in module.imports:
            if isinstance(node, ast.Import):
                plain |= dict.fromkeys(ast.unparse(node).splitlines())
            else:
                members.setdefault(node.module or "", set()).update(ast.unparse(alias) for alias in node.names)
    return [
        *sorted(plain),
        *(f"from {source} import {', '.join(sorted(names))}" for source, names in sorted(members.items())),
    ]
