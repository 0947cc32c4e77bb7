"""What holds for every command: no traceback, whatever becomes of its output and whatever lies in its way."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from mla_codegen.cli.main import app
from mla_codegen.render.templates import RenderError

SPEC = """\
target: portable
model: {num_heads: 2, kv_lora_rank: 64, qk_rope_head_dim: 32}
shapes: [{batch: 1, kv_len: 64, splits: 1}]
"""
COMMANDS = [
    ["--help"], ["--version"], ["build", "--help"], ["list", "shapes", "small.yaml"], ["list", "optimizations"],
    ["list", "targets"], ["list", "targets", "--json"], ["explain", "small.yaml", "--batch", "1", "--kv-len", "9"],
    ["schema"], ["init", "--model", "deepseek-v3", "--target", "sm_90"], ["build", "small.yaml"],
    ["check", "small.yaml"], ["check", "small.yaml", "--json"], ["bundle", "small.yaml", "-o", "one.py"],
]  # fmt: skip
# Forked for each command and sink, so that the imports are paid once: prints [exit code, stderr] of each, as JSON.
DRIVER = """
import json, os, sys, tempfile
from mla_codegen.cli.main import main
import mla_codegen.publish.bundle
done = []
for command in json.loads(sys.argv[1]):
    for sink in ("full", "pipe", "closed"):
        errors = tempfile.TemporaryFile()
        if not (child := os.fork()):
            os.dup2(errors.fileno(), 2)
            if sink == "full":
                os.dup2(os.open("/dev/full", os.O_WRONLY), 1)
            elif sink == "pipe":
                reader, writer = os.pipe()
                os.dup2(writer, 1)
                os.close(reader)
            else:
                os.close(1)
                sys.stdout = None
            sys.argv = ["mla-codegen", *command]
            code = 99
            try:
                main()
            except SystemExit as end:
                code = end.code or 0
            except BaseException as error:
                print("Traceback", repr(error), file=sys.stderr)
            try:
                sys.stdout.flush()  # as Python does when it ends
            except BaseException as error:
                print("Traceback at the end", repr(error), file=sys.stderr)
            sys.stderr.flush()
            os._exit(code)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        errors.seek(0)
        done.append([command, sink, code, errors.read().decode()])
print(json.dumps(done))
"""


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
def test_a_stdout_that_takes_no_more(tmp_path: Path) -> None:
    (tmp_path / "small.yaml").write_text(SPEC)
    done = subprocess.run(
        [sys.executable, "-c", DRIVER, json.dumps(COMMANDS)], cwd=tmp_path, text=True, capture_output=True, check=False
    )
    assert done.returncode == 0, done.stderr
    words = {"full": "stdout: No space left on device: not all of the output was written\n", "pipe": ""}
    for command, sink, code, errors in json.loads(done.stdout):
        assert "Traceback" not in errors, (command, sink, errors)
        if sink == "closed":  # before the command began: nobody wants to hear
            assert (code, errors) == (0, ""), (command, errors)
        else:
            assert code == 2, (command, sink, code, errors)
            assert errors == words[sink], (command, errors)


def invoke(*arguments: str) -> Any:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a spec and its build."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "small.yaml").write_text(SPEC)
    assert invoke("build", "small.yaml").exit_code == 0
    return tmp_path


def test_words_for_what_check_cannot_read(folder: Path) -> None:
    (folder / "generated" / "op.py").unlink()
    (folder / "generated" / "op.py").mkdir()
    for command in ("check", "build"):
        done = invoke(command, "small.yaml")
        assert (done.exit_code, done.output) == (
            2, "generated/op.py is no file, where one of the build belongs\n  fix: move it away\n",
        )  # fmt: skip
    (folder / "generated" / "manifest.json").write_text("[]")
    done = invoke("check", "small.yaml")
    assert done.exit_code == 2 and "generated/manifest.json cannot be read: it is not what mla-codegen" in done.output


def test_check_names_the_command_that_mends_other_builds(folder: Path) -> None:
    (folder / "amd.yaml").write_text(SPEC.replace("portable", "gfx942"))
    assert invoke("build", "amd.yaml").exit_code == 0
    manifest = json.loads((folder / "generated" / "manifest.json").read_text())
    manifest["builds"]["amd"]["tables"] -= 1
    (folder / "generated" / "manifest.json").write_text(json.dumps(manifest, indent=2) + "\n")
    done = invoke("check", "small.yaml")
    assert done.exit_code == 1
    assert "outdated: generated/amd/__init__.py\n" in done.output
    assert "mend: mla-codegen build amd.yaml small.yaml --out generated" in done.output
    assert invoke("build", "small.yaml").exit_code == 2
    assert invoke("build", "amd.yaml", "small.yaml").exit_code == 0
    assert invoke("check", "small.yaml").exit_code == 0


@pytest.mark.parametrize("command", ["build", "check", "verify", "inspect", "bundle"])
def test_a_spec_that_cannot_be_read(folder: Path, command: str) -> None:
    (folder / "binary.yaml").write_bytes(b"\x80\x00")
    (folder / "loop.yaml").symlink_to("loop.yaml")
    (folder / "folder.yaml").mkdir()
    for spec, says in (("binary", "binary"), ("loop", "cannot be read"), ("folder", "a directory"), ("no", "no such")):
        done = invoke(command, f"{spec}.yaml", *(["-o", "one.py"] if command == "bundle" else []))
        assert done.exit_code == 2 and says in done.output, done.output
        assert isinstance(done.exception, SystemExit)


def test_a_bundle_does_not_replace_what_is_no_bundle(folder: Path) -> None:
    (folder / "model.py").write_text("mine")
    for out in ("model.py", "small.yaml"):
        done = invoke("bundle", "small.yaml", "-o", out)
        assert done.exit_code == 2 and f"{out} is there, and `bundle` did not write it\n  fix: " in done.output
    assert invoke("bundle", "small.yaml", "-o", "generated").exit_code == 2
    assert (folder / "model.py").read_text() == "mine" and (folder / "small.yaml").read_text() == SPEC
    for arguments in (["--force"], []):  # the second time it is one
        assert invoke("bundle", "small.yaml", "-o", "model.py", *arguments).exit_code == 0
    assert not list(folder.glob(".model*"))


def test_errors_that_no_command_expects(monkeypatch: pytest.MonkeyPatch) -> None:
    """The system's by the file that they name; a template's as what it is."""
    for error, code, says in (
        (PermissionError(13, "Permission denied", "/a/b"), 2, "/a/b: Permission denied\n"),
        (OSError("no more"), 2, "no more\n"),
        (RenderError("templates/op.py.jinja:3: no"), 1, "templates/op.py.jinja:3: no\n"),
    ):

        def fail(error: Exception = error) -> None:
            raise error

        monkeypatch.setattr("mla_codegen.spec.schema.json_schema", fail)
        done = invoke("schema")
        assert (done.exit_code, done.output) == (code, says)


def test_a_stderr_that_takes_nothing(tmp_path: Path) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "mla_codegen", "build", "no.yaml"], cwd=tmp_path, stderr=full, check=False
        )
    assert done.returncode == 2


def test_python_itself_ends_quietly(tmp_path: Path) -> None:
    """As a shell runs it, down to what Python says when it flushes at its end."""
    for sink in ("/dev/full", None):
        reader, writer = (None, os.open(sink, os.O_WRONLY)) if sink else os.pipe()
        if reader is not None:
            os.close(reader)
        done = subprocess.run(
            [sys.executable, "-m", "mla_codegen", "schema"], cwd=tmp_path, stdout=writer, stderr=subprocess.PIPE,
            text=True, check=False,
        )  # fmt: skip
        os.close(writer)
        assert done.returncode == 2 and len(done.stderr.splitlines()) == bool(sink), done.stderr
