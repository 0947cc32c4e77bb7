"""The text of kernels: golden files, the same bytes always, and Python that a linter and a formatter leave alone.

`RENEW=1 pytest tests/render/test_render.py` writes the golden files anew; read the diff before it is committed.
"""

import ast
import os
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import black
import jinja2
import pytest
import yaml
from builds import plan_of, spec_of
from jinja2 import nodes

from mla_codegen.catalog.optimizations import OPTIMIZATIONS
from mla_codegen.catalog.releases import REFERENCE, release_of
from mla_codegen.plan.kernel import KernelPlan
from mla_codegen.plan.resolve import Plan, make_plan
from mla_codegen.publish.write import fresh_build
from mla_codegen.render import formatting
from mla_codegen.render import templates as render
from mla_codegen.render.formatting import MODE
from mla_codegen.render.templates import RenderError, render_kernel
from mla_codegen.spec.load import load_spec

TESTS = Path(__file__).parent
GOLDEN = TESTS / "golden"
SHIPPED = sorted((TESTS.parents[1] / "specs").glob("*.yaml"))
SPECS = sorted((GOLDEN / "specs").glob("*.yaml"))


def golden_plan(path: Path) -> Plan:
    return make_plan(load_spec(path).spec, f"specs/{path.name}", release_of(REFERENCE))


def combination(kernel: KernelPlan) -> str:
    """The alternatives that a kernel is made of: family, what a KV row is, where rows lie, the work partition."""
    f = kernel.details
    form = [f.kind] if hasattr(f, "kind") else [f.format, *f.decode_step.split("_")[1:2]]
    if kernel.fp8_products or getattr(f, "two_numbers", False):
        form.append("fp8_mma" if kernel.fp8_products else "two_numbers")
    rows = getattr(f, "rows_file", kernel.rows_file)
    work = "any_splits" if kernel.any_splits else kernel.partition
    parts = [kernel.family, *(part.split(".")[0] for part in form), Path(rows).stem, work]
    return "_".join(parts + (["queries"] if kernel.packed else ["some_heads"] * kernel.masked_heads))


@cache
def goldens() -> dict[Path, str]:
    """A kernel of each combination that the specs come to, the first."""
    found: dict[Path, str] = {}
    for path in SPECS:
        for kernel in golden_plan(path).kernels:
            file = GOLDEN / f"{combination(kernel)}.py"
            if file not in found:
                found[file] = render_kernel(kernel)
    return found


@pytest.fixture(scope="module")
def shipped(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """All files of a build of the shipped specs."""
    return fresh_build([golden_plan(path) for path in SHIPPED], tmp_path_factory.mktemp("shipped") / "generated")


def python(files: dict[str, str]) -> dict[str, str]:
    return {path: text for path, text in files.items() if path.endswith(".py")}


@pytest.mark.parametrize("file", goldens(), ids=lambda file: file.stem)
def test_golden(file: Path) -> None:
    if os.environ.get("RENEW"):
        file.write_text(goldens()[file], encoding="utf-8")
    assert file.read_text(encoding="utf-8") == goldens()[file], "RENEW=1 pytest tests/render/test_render.py"


def test_every_golden_file_is_rendered() -> None:
    for file in set(GOLDEN.glob("*.py")) - set(goldens()):
        if os.environ.get("RENEW"):
            file.unlink()
    assert set(GOLDEN.glob("*.py")) == set(goldens())


NOT_OF_KERNELS = {"choice.py.jinja", "dispatch.py.jinja", "op.py.jinja", "tables.py.jinja"}


def test_every_template_and_optimization_is_in_a_golden_file() -> None:
    kernels = {combination(kernel): kernel for path in SPECS for kernel in reversed(golden_plan(path).kernels)}
    assert {name for kernel in kernels.values() for name in kernel.optimizations} == set(OPTIMIZATIONS)
    loader = render.environment().loader
    assert isinstance(loader, jinja2.FileSystemLoader)
    used: set[str] = set()

    class Noting(jinja2.FileSystemLoader):
        def get_source(self, environment: jinja2.Environment, template: str) -> object:
            used.add(template)
            return super().get_source(environment, template)

    noting = render.environment().overlay(loader=Noting(loader.searchpath))
    for path in SPECS:
        for kernel in golden_plan(path).kernels:
            noting.get_template(f"{kernel.family}/kernel.py.jinja").render(k=kernel, f=kernel.details)
    known = {name for name in loader.list_templates() if not name.startswith("bundle/")}
    assert known - used == NOT_OF_KERNELS


COUNTED = (
    nodes.CondExpr,
    nodes.Compare,
    nodes.Add,
    nodes.Sub,
    nodes.Mul,
    nodes.Div,
    nodes.FloorDiv,
    nodes.Mod,
    nodes.Concat,
)


@pytest.mark.parametrize("name", [name for name in render.environment().list_templates() if "bundle/" not in name])
def test_a_template_decides_and_computes_nothing(name: str) -> None:
    """No inline conditional, no comparison, no arithmetic: the plan has decided."""
    loader = render.environment().loader
    assert loader is not None
    source, _, _ = loader.get_source(render.environment(), name)
    found = [node for kind in COUNTED for node in render.environment().parse(source).find_all(kind)]
    assert not found, f"line {found[0].lineno}: {type(found[0]).__name__}"


def test_the_same_bytes_twice() -> None:
    first = [render_kernel(kernel) for kernel in plan_of(spec_of()).kernels]
    render.environment.cache_clear()
    formatting._formatted.clear()
    assert [render_kernel(kernel) for kernel in plan_of(spec_of()).kernels] == first


def test_the_order_of_keys_does_not_show(tmp_path: Path) -> None:
    spec = yaml.safe_load(SHIPPED[0].read_text())

    def reverse(value: object) -> object:
        return {key: reverse(value[key]) for key in reversed(value)} if isinstance(value, dict) else value

    reversed_spec = reverse({**spec, "shapes": [reverse(shape) for shape in spec["shapes"]]})
    assert list(reversed_spec) != list(spec)
    builds = [fresh_build([plan_of(one)], tmp_path / "generated") for one in (spec, reversed_spec)]
    assert builds[0] == builds[1]


FAST = {"optimizations": ["exp2", "fast_rcp", "packed_fp8"], "family": "triton"}


def test_no_kernel_that_amd_runs_holds_assembly(shipped: dict[str, str]) -> None:
    """AMD's compiler keeps no distance between a matrix instruction and assembly that it cannot read."""
    plans = [golden_plan(path) for path in (*SHIPPED, *SPECS)]
    plans += [plan_of(spec_of(target, defaults=FAST), f"{target}.yaml") for target in ("gfx942", "gfx950")]
    plans = [plan for plan in plans if plan.target.vendor != "nvidia"]
    assert {plan.target.name for plan in plans} == {"gfx942", "gfx950", "portable"}
    for plan in plans:
        for kernel in plan.kernels:
            path = f"{plan.name}/{kernel.name}.py"
            text = shipped[path] if path in shipped else render_kernel(kernel)
            assert "inline_asm" not in text, path


def test_every_file_is_python(shipped: dict[str, str]) -> None:
    for path, text in python(shipped).items():
        compile(text, path, "exec")


def test_black_changes_nothing(shipped: dict[str, str]) -> None:
    """Files are formatted block by block; that must come to the same as whole files. One kernel of each sort."""
    sorts = {
        re.sub(r"_b\d+_kv\d+", "", path) + str(text.count("stage2")): path for path, text in python(shipped).items()
    }
    for path in sorts.values():
        if "/runtime/" not in path and not path.startswith("runtime/"):
            assert black.format_str(shipped[path], mode=MODE) == shipped[path], path


def test_no_name_is_unused_or_undefined(shipped: dict[str, str], tmp_path: Path) -> None:
    for path, text in python(shipped).items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    command = [sys.executable, "-m", "ruff", "check", "--isolated", "--select", "F,B007,PLW0127", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:]


def constants(module: ast.Module) -> set[str]:
    assigned = [node for node in module.body if isinstance(node, ast.Assign)]
    return {target.id for node in assigned for target in node.targets if isinstance(target, ast.Name)}


def test_every_constant_is_used(shipped: dict[str, str]) -> None:
    for path, text in python(shipped).items():
        if path.count("/") == 1 and not path.startswith("runtime") and not path.endswith("__init__.py"):
            used = {node.id for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Name) and is_load(node)}
            assert constants(ast.parse(text)) <= used, path


def is_load(node: ast.Name) -> bool:
    return isinstance(node.ctx, ast.Load)


def test_no_branch_on_what_is_known(shipped: dict[str, str]) -> None:
    """No `if` or `while` whose condition is made of module constants and literals alone."""
    for path, text in python(shipped).items():
        if path.startswith("runtime"):
            continue
        module = ast.parse(text)
        known = constants(module)
        for node in ast.walk(module):
            if isinstance(node, ast.If | ast.While | ast.IfExp):
                names = {part.id for part in ast.walk(node.test) if isinstance(part, ast.Name)}
                assert names - known - {"tl", "torch"}, f"{path}:{node.lineno}: {ast.unparse(node.test)}"


def test_kernels_stand_alone(shipped: dict[str, str]) -> None:
    """They import torch and triton, and the runtime that is copied beside them."""
    for path, text in python(shipped).items():
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Import):
                roots = {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and not node.level:
                roots = {str(node.module).split(".")[0]}
            else:
                continue
            assert roots <= {"torch", "triton", "numpy"} | set(sys.stdlib_module_names), f"{path}: {roots}"


def test_the_header_says_whence_and_how(shipped: dict[str, str]) -> None:
    text = shipped["h200/bf16_b64_kv8192.py"]
    head = text.split('"""')[0]
    assert "specs/h200.yaml, shape batch=64 kv_len=8192, KV bf16" in head
    assert "Do not edit" in head
    assert "`mla-codegen build specs/h200.yaml`" in head


@pytest.fixture
def templates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of templates of the test's own."""
    monkeypatch.setattr(render, "template_folder", lambda: tmp_path)
    render.environment.cache_clear()
    yield tmp_path
    render.environment.cache_clear()


BROKEN = {
    "undefined name": ("x = 1\ny = {{ k.no_such_thing }}\n", r"triton/kernel\.py\.jinja:2: .*no_such_thing"),
    "syntax": ("x = 1\n{% if %}\n", r"triton/kernel\.py\.jinja:2: "),
    "not Python": ("def f(:\n    pass\n", r"triton/kernel\.py\.jinja rendered something that is not Python"),
    "missing include": ('x = 1\n{% include "steps/none.py.jinja" %}\n', r"steps/none\.py\.jinja"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_template_is_named_with_its_line(templates: Path, name: str) -> None:
    text, message = BROKEN[name]
    (templates / "triton").mkdir()
    (templates / "triton" / "kernel.py.jinja").write_text(text)
    with pytest.raises(RenderError, match=message):
        render_kernel(plan_of(spec_of()).kernels[0])


def test_an_error_inside_an_include_names_the_include(templates: Path) -> None:
    (templates / "triton").mkdir()
    (templates / "triton" / "kernel.py.jinja").write_text('x = 1\n{% include "triton/part.py.jinja" %}\n')
    (templates / "triton" / "part.py.jinja").write_text("y = 1\nz = 2\nw = {{ k.no_such_thing }}\n")
    with pytest.raises(RenderError, match=r"triton/part\.py\.jinja:3: "):
        render_kernel(plan_of(spec_of()).kernels[0])


def test_undefined_names_are_errors_everywhere() -> None:
    assert render.environment().undefined is jinja2.StrictUndefined


def test_formatting_by_pieces_is_blacks_own() -> None:
    """Paragraphs at any depth, docstrings with blank lines, and pieces that are none by themselves."""
    text = '# one\n"""a\n\nb"""\n\nX=1\n\n\ndef f(a,b):\n    """c\n\n    d"""\n    if a:\n'
    text += "        b=1\n\n        b=2\n\n    return b\n"
    assert formatting.format_text(text) == black.format_str(text, mode=MODE)
    broken = "def f(a):\n    if a:\n        b=1\n\n    else:\n        b=2\n    return b\n"
    assert formatting.format_text(broken) == black.format_str(broken, mode=MODE)
    with pytest.raises(black.InvalidInput):
        formatting.format_text("def f(:\n")
