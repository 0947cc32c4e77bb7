"""The rooms of the package: what each may import, held by reading every import."""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "mla_codegen"
# Lowest first: a room imports itself and rooms before it.
LOW = ("runtime", "catalog", "engines", "spec", "plan", "render", "publish")
ORDER = (*LOW, "inspect", "check", "measure", "report", "cli")


def imports(path: Path) -> set[str]:
    """The dotted modules of the package that a file imports, wherever in it."""
    found = set()
    package = path.relative_to(PACKAGE.parent).with_suffix("").parts[:-1]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join((*base, *((node.module,) if node.module else ())))
            found |= {module, *(f"{module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return {module for module in found if module.split(".")[0] == "mla_codegen"}


def modules() -> dict[str, Path]:
    return {
        ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__"): path
        for path in sorted(PACKAGE.rglob("*.py"))
    }


@pytest.mark.parametrize("room", ORDER)
def test_a_room_imports_only_rooms_before_it(room: str) -> None:
    allowed = set(ORDER[: ORDER.index(room) + 1]) if room != "runtime" else {"runtime"}
    files = sorted((PACKAGE / room).rglob("*.py"))
    assert files
    for path in files:
        for module in imports(path):
            parts = module.split(".")
            if len(parts) > 1 and parts[1] not in ("__version__", "*"):
                assert parts[1] in allowed, f"{path.relative_to(PACKAGE)} imports {module}"


def test_every_room_is_listed_and_says_what_lives_there() -> None:
    rooms = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    assert rooms == set(ORDER)
    for room in rooms:
        assert len((ast.get_docstring(ast.parse((PACKAGE / room / "__init__.py").read_text())) or "").split()) > 5


def test_no_module_imports_itself_through_others() -> None:
    known = modules()
    graph = {name: {module for module in imports(path) if module in known} - {name} for name, path in known.items()}
    # A package's __init__ runs before its modules: they may name it, and that is no circle.
    for name in graph:
        graph[name] = {module for module in graph[name] if not name.startswith(f"{module}.")}
    done: set[str] = set()

    def visit(name: str, trail: tuple[str, ...]) -> None:
        assert name not in trail, " -> ".join((*trail[trail.index(name) :], name))
        if name not in done:
            for module in sorted(graph[name]):
                visit(module, (*trail, name))
            done.add(name)

    for name in sorted(graph):
        visit(name, ())
