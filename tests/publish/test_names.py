"""Names that a build may not have: what the package, Python or another build already uses."""

import ast
import importlib
import sys
from pathlib import Path

import pytest
from builds import SHAPES, build, plan_of, spec_of
from typer.testing import CliRunner

from mla_codegen.cli.main import app
from mla_codegen.publish import write
from mla_codegen.publish.write import BuildError, fresh_build

SMALL = spec_of(dtypes={"kv": ["bf16"]}, shapes=SHAPES[:1])
AMD = {**SMALL, "target": "gfx942"}


def built(out: Path, *files: str) -> None:
    for file in files:
        build([plan_of(SMALL, file)], out)


def test_every_part_of_the_package_is_taken(tmp_path: Path) -> None:
    """Whatever is written beside a build's folder, by its path, and what `dispatch.py` calls something."""
    out = tmp_path / "generated"
    files = fresh_build([plan_of(SMALL)], out)
    parts = {Path(path).parts[0].removesuffix(".py") for path in files if not path.startswith("small/")}
    assert parts >= {"__init__", "dispatch", "op", "runtime", "manifest.json"}
    names = {node.id for node in ast.walk(ast.parse(files["dispatch.py"])) if isinstance(node, ast.Name)}
    for name in (parts | names) - {"small", "manifest.json"}:
        for spelled in (name, name.upper()):  # a file system may not tell them apart
            with pytest.raises(BuildError, match=rf"^{spelled}\.yaml: .*\n  fix: rename the spec"):
                build([plan_of(SMALL, f"{spelled}.yaml")], out)
    assert not out.exists()


@pytest.mark.parametrize("name", ["__path__", "__pycache__", "__main__"])
def test_names_of_python_s_own(tmp_path: Path, name: str) -> None:
    with pytest.raises(BuildError, match="Python's own"):
        build([plan_of(SMALL, f"{name}.yaml")], tmp_path / "generated")


def test_names_of_modules_that_the_kernels_import_are_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A build is a module of the package, not one beside torch."""
    out = tmp_path / "free_names"
    build([plan_of(SMALL, "torch.yaml"), plan_of(AMD, "triton.yaml")], out)
    monkeypatch.syspath_prepend(str(tmp_path))
    dispatcher = importlib.import_module("free_names.dispatch").DISPATCHER
    assert [one.spec for one in dispatcher.builds] == ["torch.yaml", "triton.yaml"]
    for one in dispatcher.builds:
        for kernel in (out / one.package.split(".")[-1]).glob("bf16*.py"):
            one.kernel(kernel.stem)
    assert sys.modules["torch"].__name__ == "torch"


UNFIT = ["class", "2x", "my-kernels", "größe", "a b", 'a"""b', "torch", "triton", "random", "mla_codegen"]


@pytest.mark.parametrize("name", UNFIT)
def test_packages_that_could_not_be_imported_or_would_hide_another(tmp_path: Path, name: str) -> None:
    with pytest.raises(BuildError, match=r"--out .*\n  fix: name another folder"):
        write.build([plan_of(SMALL)], tmp_path / name)
    assert not any(tmp_path.iterdir())


def test_builds_that_differ_in_case_alone(tmp_path: Path) -> None:
    out = tmp_path / "generated"
    built(out, "H200.yaml")
    with pytest.raises(BuildError, match=r"h200\.yaml and H200\.yaml would both be built into .*H200\n  fix: rename"):
        build([plan_of(AMD, "h200.yaml")], out)


def test_two_files_of_one_name(tmp_path: Path) -> None:
    """A spec that was moved is the same spec; one whose file is still there is another."""
    out = tmp_path / "generated"
    built(out, "mi-300.yaml")
    built(out, "mi_300.yaml")
    (tmp_path / "mi_300.yaml").touch()
    with pytest.raises(BuildError, match=r"old/mi_300\.yaml and mi_300\.yaml would both be built"):
        build([plan_of(SMALL, "old/mi_300.yaml")], out)


def test_the_command_writes_nothing_and_says_which(tmp_path: Path) -> None:
    spec = tmp_path / "runtime.yaml"
    spec.write_text("target: portable\nshapes: [{batch: 1, kv_len: 64, splits: 1}]\n")
    for arguments in (["build", str(spec), "--out", str(tmp_path / "generated")], ["check", str(spec)]):
        done = CliRunner().invoke(app, arguments)
        assert done.exit_code == 2 and "runtime.yaml: runtime is the name of a part of every package" in done.output
    assert [path.name for path in tmp_path.iterdir()] == ["runtime.yaml"]
    twice = [tmp_path / "one.yaml", tmp_path / "ONE.yaml"]
    for path in twice:
        path.write_text(spec.read_text())
    done = CliRunner().invoke(app, ["build", *map(str, twice), "--out", str(tmp_path / "generated")])
    assert done.exit_code == 2 and "would both be built into" in done.output
