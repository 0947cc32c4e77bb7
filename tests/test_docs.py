"""The documentation says what is so: examples run, their output is what is shown, tables are what the code knows.

`RENEW=1 pytest tests/test_docs.py` writes the shown outputs, tables, the excerpt and the JSON Schema anew.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from mla_codegen.catalog.optimizations import OPTIMIZATIONS
from mla_codegen.catalog.targets import TARGETS
from mla_codegen.cli.main import app
from mla_codegen.spec.schema import SCHEMA_FILE, json_schema

ROOT = Path(__file__).parents[1]
RENEW = os.environ.get("RENEW") == "1"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]
RUN = [ROOT / "README.md", *(ROOT / "docs" / f"{name}.md" for name in ("calls", "engine", "paged", "sparse", "spec"))]

BLOCK = re.compile(r"^```(?P<kind>yaml|python|console|sh)(?: file=(?P<file>\S+))?\n(?P<text>.*?)^```$", re.M | re.S)
PROGRESS = re.compile(r"verify: .*, \d+ s")  # in a log; a reader sees a bar
ACTIVATE = ". .venv/bin/activate"
TABLE = re.compile(r"(?<=^<!-- table: )(?P<name>\w+) -->\n(?P<text>.*?)(?=^<!-- end -->$)", re.M | re.S)
EXCERPT = re.compile(
    r'(?<=^<!-- excerpt: )(?P<file>\S+), from "(?P<start>.+)", (?P<lines>\d+) lines -->\n'
    r"```python\n(?P<text>.*?)(?=^```$)",
    re.M | re.S,
)


def hold(page: Path, old: str, new: str) -> None:
    """`page` shows `new`; with RENEW=1 it is made to."""
    if RENEW and old != new:
        text = page.read_text(encoding="utf-8")
        assert text.count(old) == 1
        page.write_text(text.replace(old, new), encoding="utf-8")
    else:
        assert old == new


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the checkout as `make verify` leaves it: an environment, and all specs built into generated/."""
    folder = tmp_path_factory.mktemp("docs") / "checkout"
    skipped = shutil.ignore_patterns(".*", "__pycache__", "tests", "peers", "generated", "dist")
    shutil.copytree(ROOT, folder, ignore=skipped)
    tools = folder / ".venv" / "bin"
    tools.mkdir(parents=True)
    (tools / "activate").write_text(f'PATH="{tools}:$PATH"\n')
    for name, arguments in (("mla-codegen", "-m mla_codegen"), ("python", "")):
        (tools / name).write_text(f'#!/bin/sh\nexec "{sys.executable}" {arguments} "$@"\n')
        (tools / name).chmod(0o755)
    built = subprocess.run(
        f"{ACTIVATE} && mla-codegen build specs/*.yaml", shell=True, cwd=folder,
        env={**os.environ, "PYTHONPATH": str(folder)}, capture_output=True, text=True,
    )  # fmt: skip
    assert built.returncode == 0, built.stderr
    return folder


@pytest.fixture
def shell(checkout: Path, tmp_path: Path):
    """Run a line as a reader would, in the checkout after `make verify`: its output."""
    folder = tmp_path / "checkout"
    shutil.copytree(checkout, folder)
    activate = folder / ".venv" / "bin" / "activate"
    activate.write_text(activate.read_text().replace(str(checkout), str(folder)))
    environment = {key: value for key, value in os.environ.items() if key not in ("TRITON_INTERPRET", "VIRTUAL_ENV")}
    environment |= {
        "PATH": "/usr/local/bin:/usr/bin:/bin", "PYTHONPATH": str(folder), "PYTHONWARNINGS": "ignore", "TERM": "dumb",
        "NO_COLOR": "1", "COLUMNS": "110",
    }  # fmt: skip
    activated = False

    def run(line: str) -> str:
        nonlocal activated
        activated = activated or line == ACTIVATE
        done = subprocess.run(
            ["bash", "-c", f"{ACTIVATE}; {line}" if activated else line], cwd=folder, env=environment, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=300, check=False,
        )  # fmt: skip
        assert "Traceback" not in done.stdout, done.stdout
        assert "not found" not in done.stdout, done.stdout
        return "".join(line.rstrip() + "\n" for line in done.stdout.splitlines() if not PROGRESS.fullmatch(line))

    run.folder = folder  # type: ignore[attr-defined]
    return run


@pytest.mark.parametrize("page", RUN, ids=lambda page: page.name)
def test_examples_run_and_print_what_is_shown(page: Path, checkout: Path, shell):
    """Blocks with a file name are written, sh and console blocks run, in the order of the page.

    The README activates the environment itself; its `make` lines have been run, as far as a page needs them.
    """
    if page.name != "README.md":
        shell(ACTIVATE)
    for block in BLOCK.finditer(page.read_text(encoding="utf-8")):
        if block["file"]:
            (shell.folder / block["file"]).write_text(block["text"], encoding="utf-8")
        if block["kind"] == "sh":
            for line in block["text"].splitlines():
                assert line.startswith("make ") or shell(line) == "", line
        if block["kind"] != "console":
            continue
        commands = [line for line in block["text"].splitlines() if line.startswith("$ ")]
        assert commands, block["text"]
        shown = "".join(f"{command}\n{shell(command[2:])}" for command in commands)
        hold(page, f"```console\n{block['text']}```", f"```console\n{shown}```")


def commands() -> str:
    known = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    rows = [f"| `{name}` | {' '.join(command.help.split(chr(10) * 2)[0].split())} |" for name, command in known.items()]
    return "\n".join(["| command | what it does |", "|---|---|", *rows]) + "\n"


def targets() -> str:
    rows = [
        f"| `{t.name}` | {t.title} | {t.compute_units} | {t.xcds} | {t.shared_bytes // 1024} "
        f"| {', '.join(sorted(t.fp8_mma)) or '-'} | {', '.join(t.families)} | {', '.join(t.gpus) or '-'} |"
        for t in TARGETS.values()
    ]
    head = "| target | GPU | CUs or SMs | XCDs | shared memory, KiB | fp8 products of | families, best first | GPUs |"
    return "\n".join([head, "|---|---|---|---|---|---|---|---|", *rows]) + "\n"


def optimizations() -> str:
    rows = []
    for option in OPTIMIZATIONS.values():
        names = [target.name for target in TARGETS.values() if option.refused_on(target) is None]
        where = "all" if len(names) == len(TARGETS) else ", ".join(names)
        rows.append(f"| `{option.name}` | {option.meaning} | {option.needs} | {where} |")
    return "\n".join(["| name | meaning | needs | targets |", "|---|---|---|---|", *rows]) + "\n"


def test_tables_are_what_the_code_knows():
    page = ROOT / "README.md"
    tables = {table["name"]: table["text"] for table in TABLE.finditer(page.read_text(encoding="utf-8"))}
    assert set(tables) == {"commands", "targets", "optimizations"}
    for make in (commands, targets, optimizations):
        head = f"<!-- table: {make.__name__} -->\n"
        hold(page, f"{head}{tables[make.__name__]}<!-- end -->", f"{head}{make()}<!-- end -->")


def test_the_excerpt_is_of_the_file_that_it_names():
    page = ROOT / "README.md"
    excerpt = EXCERPT.search(page.read_text(encoding="utf-8"))
    assert excerpt
    lines = (ROOT / excerpt["file"]).read_text(encoding="utf-8").splitlines()
    first = next(index for index, line in enumerate(lines) if line.startswith(excerpt["start"]))
    indent = len(lines[first]) - len(lines[first].lstrip())
    text = "".join(line[indent:] + "\n" for line in lines[first : first + int(excerpt["lines"])])
    hold(page, f"lines -->\n```python\n{excerpt['text']}```", f"lines -->\n```python\n{text}```")


def test_the_schema_is_what_the_command_prints():
    path = ROOT / SCHEMA_FILE
    text = json.dumps(json_schema(), indent=2) + "\n"
    if RENEW:
        path.write_text(text, encoding="utf-8")
    assert path.read_text(encoding="utf-8") == text


def test_every_key_of_a_spec_is_documented():
    text = (ROOT / "docs" / "spec.md").read_text(encoding="utf-8")
    schema = json_schema()
    keys = set(schema["properties"])
    for part in ("Model", "Dtypes", "KVLayout", "Defaults", "Shape"):
        keys |= set(schema["$defs"][part]["properties"])
    assert not [key for key in sorted(keys) if f"| `{key}` |" not in text]


def test_every_page_is_reached_and_every_link_leads_somewhere():
    linked = set()
    for page in PAGES:
        for link in re.findall(r"\]\(([^)#\s]+)\)", page.read_text(encoding="utf-8")):
            if not link.startswith("http"):
                assert (page.parent / link).exists(), f"{page.name} links to {link}"
                linked.add((page.parent / link).resolve())
    assert {page.resolve() for page in PAGES} - {(ROOT / "README.md").resolve()} <= linked


def test_make_says_what_it_does():
    text = (ROOT / "Makefile").read_text(encoding="utf-8")
    (phony,) = re.findall(r"^\.PHONY: (.*)$", text, re.M)
    assert re.findall(r"^#   make (\w+)", text, re.M) == phony.split()
