"""One spec for several releases of Triton: what differs in its text, who may run it, what each release has."""

import ast
import re
import types
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
import yaml
from builds import spec_of, tables
from typer.testing import CliRunner

from mla_codegen.catalog import releases
from mla_codegen.catalog.releases import REFERENCE, RELEASES, Release, installed_triton, release_of
from mla_codegen.cli.main import app
from mla_codegen.plan import resolve
from mla_codegen.plan.resolve import Plan, PlanError, make_plan
from mla_codegen.publish.bundle import bundle
from mla_codegen.publish.write import fresh_build
from mla_codegen.render.templates import render_kernels
from mla_codegen.runtime import builds, calls
from mla_codegen.spec.load import load_spec, parse_spec

ROOT = Path(__file__).parents[2]
GLUON = ("h200", "h200_paged", "mi300", "mi355x")
SMALL = {"defaults": {"optimizations": ["exp2", "packed_fp8"]}, "shapes": [{"batch": 2, "kv_len": 256, "splits": 3}]}
each_release = pytest.mark.parametrize("release", RELEASES.values(), ids=RELEASES)


def shipped(name: str, release: Release) -> Plan:
    return make_plan(load_spec(ROOT / "specs" / f"{name}.yaml").spec, f"specs/{name}.yaml", release)


def small(target: str, release: Release | None, file: str = "small.yaml", **changes: Any) -> Plan:
    return make_plan(parse_spec(yaml.safe_dump(spec_of(target, **{**SMALL, **changes})), file).spec, file, release)


@pytest.mark.parametrize("name", GLUON)
def test_each_release_is_written_in_its_own_names(name: str) -> None:
    """And in no other's; the rest of the text is the same for all."""
    newest = list(RELEASES.values())[-1]
    texts = {
        release.name: "".join(render_kernels(list(shipped(name, release).kernels))) for release in RELEASES.values()
    }
    for release in RELEASES.values():
        text = texts[release.name]
        for new, old in release.names:
            assert new + "(" not in text
            text = text.replace(old + "(", new + "(")
        text = text.replace(f"Gluon of triton {release.name} only", f"Gluon of triton {newest.name} only")
        assert "".join(text.split()) == "".join(texts[newest.name].split())  # black breaks lines elsewhere
    older = {old for release in RELEASES.values() for _, old in release.names}
    assert not [old for old in older if old + "(" in texts[newest.name]]


@pytest.mark.parametrize("name", GLUON)
def test_the_triton_at_hand_has_every_name(name: str) -> None:
    """Of modules; methods of values, as far as releases differ in them."""
    release = release_of(installed_triton())
    assert release is not None
    for text in render_kernels(list(shipped(name, release).kernels)):
        tree = ast.parse(text)
        found: dict[str, Any] = {}
        for node in tree.body:
            if isinstance(node, ast.Import) or (isinstance(node, ast.ImportFrom) and not node.level):
                exec(compile(ast.Module([node], []), name, "exec"), found)
        for node in ast.walk(tree):
            if not isinstance(node, ast.Attribute):
                continue
            home = found.get(node.value.id) if isinstance(node.value, ast.Name) else None
            if isinstance(home, types.ModuleType):
                assert hasattr(home, node.attr), f"{name}: {ast.unparse(node)}"
            elif "reinterpret" in node.attr:
                assert hasattr(found["gl"].shared_memory_descriptor, node.attr)


def test_plain_triton_is_the_same_for_all(tmp_path: Path) -> None:
    files = [fresh_build([shipped("portable", release)], tmp_path / "g") for release in RELEASES.values()]
    assert all(one == files[0] for one in files)
    assert "# Plain Triton: the same for every release." in files[0]["portable/bf16_any.py"]
    assert "TRITON = None" in files[0]["portable/__init__.py"]


@each_release
def test_headers_and_tables_say_the_release(tmp_path: Path, release: Release) -> None:
    files = fresh_build([small("gfx950", release)], tmp_path / "g")
    for path, text in files.items():
        if path.startswith("small/bf16"):
            assert f"# Gluon of triton {release.name} only" in text.split('"""')[0]
    assert f'TRITON = "{release.name}"' in files["small/__init__.py"]


@pytest.mark.parametrize(
    ("version", "name"),
    [("3.6", "3.6"), ("3.6.0", "3.6"), ("3.7.1+git0123", "3.7"), ("3.9.9", "3.9"), ("3.8.0rc1", "3.8"),
     ("3.60.0", None), ("3.5.1", None), ("", None), ("three", None), ("13.6.0", None)],
)  # fmt: skip
def test_the_release_of_a_version(version: str, name: str | None) -> None:
    found = release_of(version)
    assert (found.name if found else None) == name


def test_the_option_goes_before_the_spec_and_that_before_what_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resolve, "installed_triton", lambda: "3.7.1")
    assert small("sm_90", None).triton == "3.7"
    assert small("sm_90", None, triton="3.8").triton == "3.8"
    assert small("sm_90", RELEASES["3.6"], triton="3.8").triton == "3.6"
    assert small("sm_90", None, defaults={"family": "triton", "optimizations": ["packed_fp8"]}).triton is None


@pytest.mark.parametrize(
    ("version", "said"), [("3.10.0", "triton 3.10.0 is installed"), ("", "no triton is installed")]
)
def test_gluon_of_an_unknown_release_is_refused(monkeypatch: pytest.MonkeyPatch, version: str, said: str) -> None:
    monkeypatch.setattr(resolve, "installed_triton", lambda: version)
    with pytest.raises(PlanError) as refused:
        small("sm_90", None)
    (problem,) = refused.value.problems
    assert said in problem.what
    assert problem.allowed == ", ".join(RELEASES)
    assert "--triton 3.9" in problem.fix and "family: triton" in problem.fix
    assert small("portable", None).kernels
    assert small("sm_90", RELEASES["3.9"]).triton == "3.9"


def test_the_commands_take_a_release(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("small.yaml").write_text("target: gfx950\nshapes: [{batch: 2, kv_len: 256}]\n")
    run = CliRunner()
    assert run.invoke(app, ["build", "small.yaml", "--triton", "3.8.0"]).exit_code == 0
    assert 'TRITON = "3.8"' in Path("generated/small/__init__.py").read_text()
    assert run.invoke(app, ["check", "small.yaml", "--triton", "3.8"]).exit_code == 0
    other = run.invoke(app, ["check", "small.yaml", "--triton", "3.6"])
    assert other.exit_code == 1
    assert "mend: mla-codegen build small.yaml --out generated --triton 3.6" in other.output
    for command in ("build", "check", "bundle", "inspect"):
        options = ["-o", "out.py"] if command == "bundle" else []
        refused = run.invoke(app, [command, "small.yaml", "--triton", "3.5", *options])
        assert refused.exit_code == 2
        assert "unknown Triton release `3.5`\n  allowed: 3.6, 3.7, 3.8, 3.9" in refused.output
    assert run.invoke(app, ["bundle", "small.yaml", "--triton", "3.6", "-o", "out.py"]).exit_code == 0
    assert "found {triton.__version__}: run `mla-codegen bundle small.yaml" in Path("out.py").read_text()


def test_a_bundle_refuses_another_release() -> None:
    """At import, before anything of Gluon is looked up."""
    text = bundle(small("gfx950", RELEASES["3.7"]))
    (check,) = [node for node in ast.parse(text).body if isinstance(node, ast.If)]
    code = compile(ast.Module([check], []), "bundle", "exec")
    exec(code, {"triton": types.SimpleNamespace(__version__="3.7.9")})
    with pytest.raises(
        ImportError, match=r"triton 3\.7, found 3\.10\.0: run `mla-codegen bundle small\.yaml .*3\.10\.0`"
    ):
        exec(code, {"triton": types.SimpleNamespace(__version__="3.10.0")})


@pytest.fixture
def other_release() -> Release:
    return next(release for release in RELEASES.values() if release != release_of(triton.__version__))


def test_the_dispatcher_refuses_another_release(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, other_release: Release
) -> None:
    """In words that name the command; with portable kernels beside it these serve, and it says so."""
    plans = [small("sm_90", other_release), small("portable", None, "plain.yaml")]
    gluon, portable = tables(plans, tmp_path, "two_releases")
    found = ".".join(triton.__version__.split(".")[:2])
    command = f"`mla-codegen build small.yaml --triton {found}`"
    for module in (builds, calls):
        monkeypatch.setattr(module, "target_of", lambda device: "sm_90")
    with pytest.raises(ValueError, match=re.escape(command)):
        calls.Dispatcher([gluon], "mla-codegen build")._find(torch.device("cpu"), 16, 576)
    with pytest.warns(UserWarning, match=re.escape(command)):
        served = calls.Dispatcher([gluon, portable], "mla-codegen build")._find(torch.device("cpu"), 16, 576)
    assert served.target == "portable"
    with pytest.raises(ImportError, match=re.escape(command)):
        builds.Build(gluon).kernel("bf16_any")


def test_the_reference_is_said_once() -> None:
    """The Makefile reads it; pyproject.toml lets pip choose what is known, and no more."""
    newest = list(RELEASES)[-1]
    major, minor = newest.split(".")
    text = (ROOT / "pyproject.toml").read_text()
    assert f'"triton>={next(iter(RELEASES.values())).tried},<{major}.{int(minor) + 1}"' in text
    assert release_of(REFERENCE) is not None and RELEASES[release_of(REFERENCE).name].tried == REFERENCE
    home = Path(releases.__file__).relative_to(ROOT)
    assert f"mla_codegen/catalog/{home.name}" in (ROOT / "Makefile").read_text()
    assert REFERENCE not in (ROOT / "Makefile").read_text()


@pytest.mark.parametrize("name", [*GLUON, "portable", "portable_paged"])
def test_every_launch_says_that_fp_fusion_is_on(name: str) -> None:
    """Releases differ in the default: 3.10 is to turn it off."""
    for kernel, text in zip(
        (plan := shipped(name, RELEASES["3.9"])).kernels, render_kernels(list(plan.kernels)), strict=True
    ):
        launches = [
            node
            for node in ast.walk(ast.parse(text))
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript) and "stage" in ast.unparse(node.func)
        ]
        assert len(launches) == (1 if kernel.direct else 2)
        for launch in launches:
            assert "enable_fp_fusion=True" in ast.unparse(launch), f"{name}/{kernel.name}"
