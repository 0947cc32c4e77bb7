"""Around a compilation: load a file without running it, find its kernel, word an error, have another Triton."""

import sys
from types import SimpleNamespace

import pytest

from mla_codegen.inspect import VersionError, ensure_triton, worker
from mla_codegen.inspect.compile import installed_triton


@pytest.fixture
def load(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))

    def write_and_load(text, name="file.py"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return worker.load_module(str(path))

    return write_and_load


def test_only_definitions_are_executed(load):
    module, notes = load(
        "A = 1\n"
        "def f(): return A\n"
        "class C: x = A\n"
        "if A:\n    B = 2\n"
        "print(undefined)\n"
        "for i in undefined: pass\n"
        "with undefined: pass\n"
        "assert False\n"
        "raise SystemExit(3)\n"
        "if __name__ == '__main__':\n    undefined()\n"
    )
    assert (module.f(), module.C.x, module.B) == (1, 1, 2)
    assert notes == []


def test_an_assignment_that_fails_is_skipped_and_noted(load):
    module, notes = load("X = 1 / 0\nY = 2\n")
    assert module.Y == 2
    assert not hasattr(module, "X")
    assert notes == ["line 1: ZeroDivisionError: division by zero; skipped"]


def test_missing_modules_get_stand_ins(load):
    module, notes = load(
        "from task_that_is_not_here import input_t, wrap\n"
        "import other_that_is_not_here as other\n"
        "@wrap\n"
        "def f(x: input_t) -> other.Thing[int]: return x\n"
        "@other.configured(3)\n"
        "class C(input_t): pass\n"
    )
    assert module.f(5) == 5
    assert len(notes) == 2
    assert all("stand-in" in note for note in notes)


def test_siblings_and_packages_can_be_imported(load, tmp_path):
    (tmp_path / "pack").mkdir()
    (tmp_path / "pack" / "__init__.py").write_text("")
    (tmp_path / "pack" / "steps_of_pack.py").write_text("V = 7\n")
    module, notes = load("from .steps_of_pack import V\n", "pack/stage.py")
    assert (module.V, notes) == (7, [])


def test_a_kernel_is_taken_out_of_its_wrappers():
    kernel = SimpleNamespace(cache_key="k", arg_names=[])
    tuned = SimpleNamespace(fn=SimpleNamespace(fn=kernel), configs=[])
    module = SimpleNamespace(__file__="f.py", tuned=tuned, plain=kernel, function=len)
    assert worker.find_kernel(module, "tuned", []) is kernel
    assert worker.find_kernel(module, "plain", []) is kernel
    with pytest.raises(LookupError, match="named function; it has plain"):
        worker.find_kernel(module, "function", [])


def test_an_error_gives_its_place_and_its_cause():
    try:
        try:
            raise AttributeError("no '_reinterpret'")
        except AttributeError as inner:
            raise RuntimeError("at 3:4:\n  x = y\n") from inner
    except RuntimeError as error:
        assert worker._reason(error) == "RuntimeError at 3:4: AttributeError: no '_reinterpret'"
    assert worker._reason(ValueError("bad")) == "ValueError: bad"


def test_other_triton_releases(monkeypatch, tmp_path):
    monkeypatch.setenv("MLA_CODEGEN_CACHE_DIR", str(tmp_path))
    assert ensure_triton(installed_triton()) is None
    folder = tmp_path / "triton" / f"1.2.3-py{sys.version_info.major}{sys.version_info.minor}"
    (folder / "triton").mkdir(parents=True)
    assert ensure_triton("1.2.3") == folder
    with pytest.raises(VersionError, match="no release"):
        ensure_triton("newest; rm")
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(VersionError, match=r"triton 1\.2\.4 could not be installed"):
        ensure_triton("1.2.4")
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]  # nothing half made is left
