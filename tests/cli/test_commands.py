"""The command line as a whole: entry points, completion, errors as JSON, progress in a log, where a schema lies."""

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from mla_codegen import __version__
from mla_codegen.catalog.targets import TARGETS
from mla_codegen.cli import common, report
from mla_codegen.cli.main import app, schema_from

ROOT = Path(__file__).parents[2]
SPEC = "target: {target}\nshapes: [{{batch: 4, kv_len: 1024}}]\n"
JSON_COMMANDS = {
    "build": ["build"],
    "check": ["check"],
    "list": ["list", "shapes"],
    "explain": ["explain", "--batch", "4", "--kv-len", "64"],
    "verify": ["verify"],
    "inspect": ["inspect"],
    "bench": ["bench"],
    "tune": ["tune"],
    "report": ["report", "--no-compile"],
}


def run(*arguments: str, folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "mla_codegen", *arguments],
        cwd=folder, env={**os.environ, "PYTHONPATH": str(ROOT), **environment}, text=True, capture_output=True,
    )  # fmt: skip


def test_python_dash_m(tmp_path: Path) -> None:
    done = run("--version", folder=tmp_path)
    assert (done.returncode, done.stdout) == (0, f"{__version__}\n")
    done = run("explain", "absent.yaml", "--batch", "1", "--kv-len", "1", folder=tmp_path)
    assert done.returncode == 2 and done.stdout == "" and "absent.yaml" in done.stderr
    assert "Traceback" not in done.stderr


def complete(*words: str, folder: Path) -> list[str]:
    """What bash is offered for the last of `words`."""
    line = " ".join(("mla-codegen", *words))
    shell = {"_MLA_CODEGEN_COMPLETE": "complete_bash", "COMP_WORDS": line, "COMP_CWORD": str(len(words))}
    code = "import sys; sys.argv[0] = 'mla-codegen'; from mla_codegen.cli.main import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=folder, env={**os.environ, "PYTHONPATH": str(ROOT), **shell},
        text=True, capture_output=True,
    )  # fmt: skip
    return done.stdout.split()


def test_completion(tmp_path: Path) -> None:
    (tmp_path / "specs").mkdir()
    for name in ("specs/one.yaml", "specs/two.yaml", "specs/notes.txt", "mine.yaml"):
        (tmp_path / name).write_text("")
    assert complete("ver", folder=tmp_path) == ["verify"]
    assert complete("verify", "", folder=tmp_path) == ["mine.yaml", "specs/"]
    assert complete("verify", "specs/", folder=tmp_path) == ["specs/one.yaml", "specs/two.yaml"]
    assert complete("explain", "specs/t", folder=tmp_path) == ["specs/two.yaml"]
    assert complete("init", "--target", "H", folder=tmp_path) == ["H100", "H200", "H800", "H20"]
    assert complete("init", "--model", "deepseek-v3", "--target", "gfx", folder=tmp_path) == ["gfx942", "gfx950"]
    assert "--quick" in complete("verify", "--q", folder=tmp_path)


def test_commands_that_run_no_kernel_do_not_wait_for_torch(tmp_path: Path) -> None:
    (tmp_path / "one.yaml").write_text(SPEC.format(target="sm_90"))
    script = """if True:
        import sys
        from typer.testing import CliRunner
        from mla_codegen.cli.main import app
        for command in (["build"], ["check"], ["list", "shapes"], ["explain", "--batch", "4", "--kv-len", "64"]):
            done = CliRunner().invoke(app, [*command, "one.yaml"])
            assert done.exit_code == 0, done.output
        assert not {"torch", "triton", "numpy"} & set(sys.modules)
    """
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        text=True,
        capture_output=True,
    )
    assert done.returncode == 0, done.stderr


def test_completion_can_be_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shellingham.detect_shell", lambda *_: ("bash", "/bin/bash"))  # whatever the tests run under
    shown = CliRunner().invoke(app, ["--show-completion", "bash"], prog_name="mla-codegen")
    assert shown.exit_code == 0 and "complete" in shown.output


@pytest.mark.parametrize("command", JSON_COMMANDS)
def test_errors_as_json(command: str, tmp_path: Path) -> None:
    """Every fault, with its place; nothing else on stdout or stderr."""
    path = tmp_path / "wrong.yaml"
    path.write_text(SPEC.format(target="sm_9") + "defaults: {block_n: 48}\n")
    done = CliRunner().invoke(app, [*JSON_COMMANDS[command], str(path), "--json"])
    assert done.exit_code == 2 and done.stderr == ""
    target, block = json.loads(done.stdout)["errors"]
    assert target["file"] == str(path) and (target["line"], target["column"]) == (1, 9)
    assert target["what"] == "unknown target `sm_9`" and target["fix"] == "did you mean `sm_90`?"
    assert target["allowed"].startswith("gfx942, gfx950")
    assert (block["line"], block["column"], block["fix"]) == (3, 21, "write 32 or 64")


@pytest.mark.parametrize(
    "arguments, what, fix",
    [
        (["verify", "absent.py", "--json"], "absent.py: no such file", ""),
        (["verify", "--json", "--device", "gpu"], "'gpu' is not one of", ""),
        (["verify", "--json"], "Missing argument", ""),
        (["check", "--json", "--unheard-of"], "--unheard-of", ""),
        (["explain", "SPEC", "--batch", "1", "--kv-len", "1", "--kv", "fp8", "--json"], "unknown KV dtype `fp8`", ""),
        (["verify", "SPEC", "--json", "--kv", "fp8"], "unknown KV dtype `fp8`", ""),
        (["verify", "SPEC", "--json", "--shape", "64"], "--shape 64: write BATCHxKV_LEN", ""),
        (["tune", "SPEC", "--json", "--shape", "9x9"], "has no shape 9x9", ""),
    ],
)
def test_what_has_no_place_is_json_too(arguments: list[str], what: str, fix: str, tmp_path: Path) -> None:
    path = tmp_path / "right.yaml"
    path.write_text(SPEC.format(target="portable"))
    done = CliRunner().invoke(app, [str(path) if word == "SPEC" else word for word in arguments])
    assert done.exit_code == 2 and done.stderr == ""
    (error,) = json.loads(done.stdout)["errors"]
    assert what in error["what"] and error["file"] is error["line"] is error["column"] is None
    assert set(error) == {"file", "line", "column", "what", "allowed", "fix"}
    plain = CliRunner().invoke(app, [str(path) if w == "SPEC" else w for w in arguments if w != "--json"])
    assert plain.exit_code == 2 and plain.stdout == "" and plain.stderr


def test_the_fix_of_a_text_is_its_own_entry() -> None:
    (error,) = common._as_json("it is wrong\n  and more\n  allowed: a, b\n  fix: do this,\n  then that")
    assert error["what"] == "it is wrong\n  and more"
    assert (error["allowed"], error["fix"]) == ("a, b", "do this, then that")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("name", ["right.yaml", "submission.py"])
def test_no_gpu_is_bad_input(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_text(SPEC.format(target="portable") if name.endswith("yaml") else "")
    done = CliRunner().invoke(app, ["verify", str(path), "--device", "cuda"])
    assert done.exit_code == 2 and done.stdout == ""
    assert done.stderr.startswith("no GPU: ") and "\n  fix: " in done.stderr
    done = CliRunner().invoke(app, ["verify", str(path), "--device", "cuda", "--json"])
    assert json.loads(done.stdout)["errors"][0]["what"].startswith("no GPU: ")


def test_a_submission_that_needs_a_gpu_is_bad_input(tmp_path: Path) -> None:
    path = tmp_path / "submission.py"
    path.write_text("raise RuntimeError('0 active drivers ([]). There should only be one.')")
    done = CliRunner().invoke(app, ["verify", str(path), "--device", "cpu"])
    assert done.exit_code == 2 and "submission.py needs a GPU: RuntimeError: 0 active" in done.stderr
    assert "0.0e+00" not in done.output


def test_progress_in_a_log(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(report, "SAY_EVERY", 0.05)
    with report.progress("verify") as advance:
        time.sleep(0.2)
        advance("one", 2)
        time.sleep(0.2)
    said = capsys.readouterr().err.splitlines()
    assert said[0] == "verify: at work, 0 s"
    assert said[-1] == "verify: 1 of 2, 0 s"


def schema_line(text: str) -> str:
    found = re.match(r"# yaml-language-server: \$schema=(\S+)\n", text)
    assert found
    return found[1]


@pytest.mark.parametrize("home", [".", "specs", "specs/more"])
def test_a_starter_spec_finds_its_schema_where_it_is_saved(home: str, tmp_path: Path) -> None:
    (tmp_path / "mla-codegen.schema.json").write_text("{}")
    folder = tmp_path / home
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "mine.yaml", "w") as file:
        subprocess.run(
            [sys.executable, "-m", "mla_codegen", "init", "--model", "deepseek-v3", "--target", "H100"],
            cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)}, stdout=file, check=True,
        )  # fmt: skip
    text = (folder / "mine.yaml").read_text()
    assert (folder / schema_line(text)).resolve() == tmp_path / "mla-codegen.schema.json"
    assert "\ntarget: sm_90\n" in text


def test_a_piped_starter_spec_is_taken_for_one_in_specs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    arguments = ["init", "--model", "deepseek-v3", "--target", "portable"]
    (tmp_path / "mla-codegen.schema.json").write_text("{}")
    assert schema_line(CliRunner().invoke(app, arguments).stdout) == "mla-codegen.schema.json"
    (tmp_path / "specs").mkdir()
    assert schema_line(CliRunner().invoke(app, arguments).stdout) == "../mla-codegen.schema.json"


def test_a_schema_that_is_nowhere_is_to_be_written_beside_the_spec(tmp_path: Path) -> None:
    assert schema_from(tmp_path) == "mla-codegen.schema.json"


def test_targets_are_listed_with_their_gpus() -> None:
    listed = CliRunner().invoke(app, ["list", "targets"])
    rows = json.loads(CliRunner().invoke(app, ["list", "targets", "--json"]).stdout)
    assert {row["name"]: tuple(row["gpus"]) for row in rows} == {t.name: t.gpus for t in TARGETS.values()}
    for target in TARGETS.values():
        assert all(gpu in listed.stdout for gpu in target.gpus)
