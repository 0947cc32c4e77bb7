"""The page says what the build is: settings, source, limits, times, candidates, and what is wrong."""

import html
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from bench_fakes import report as fake_bench
from conftest import SPEC
from typer.testing import CliRunner

from mla_codegen.cli import report_page
from mla_codegen.cli.main import app
from mla_codegen.inspect.limits import judge
from mla_codegen.measure.bench import Report
from mla_codegen.plan.resolve import Plan
from mla_codegen.render.templates import render_kernel
from mla_codegen.report.gather import NotAHistory, history_of
from mla_codegen.report.highlight import classes, python
from mla_codegen.report.page import FOLDER, Inspected, page


class Read(HTMLParser):
    """Text of the page by the id of the element that it is in, and what links and asks."""

    VOID = ("meta", "wbr", "link", "br")

    def __init__(self, text: str):
        super().__init__()
        self.open: list[tuple[str, str | None]] = []
        self.texts: dict[str, str] = {}
        self.asked: list[str] = []
        self.tags: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        named = dict(attrs)
        self.tags.append(tag)
        self.asked += [named[name] or "" for name in ("src", "href", "xlink:href", "data") if name in named]
        if tag not in self.VOID:
            self.open.append((tag, named.get("id")))

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in self.VOID:
            self.handle_endtag(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop()[0] == tag

    def handle_data(self, data: str) -> None:
        for _, name in self.open:
            if name:
                self.texts[name] = self.texts.get(name, "") + data


def test_what_it_says(whole: str, plan: Plan) -> None:
    read = Read(whole)
    said = {name: " ".join(text.split()) for name, text in read.texts.items()}
    shapes = said["shapes"]
    for name in (kernel.name for kernel in plan.kernels):
        assert name in shapes and name in read.texts
    assert all(words in shapes for words in ("8shape", "8shape, per_kv", "32defaults", "automatic"))
    compiler = said["compiler"]
    assert "1 do not compile, 1 limits broken" in compiler
    assert "it: registers is 200, at most 168 allowed" in compiler
    assert "the compiler said no: error: <bad> & worse" in compiler
    assert "200 broken≤ 168" in compiler and "100≤ 168" in compiler and "80≤ 80" in compiler and "3≥ 2" in compiler
    times = said["times"]
    assert "NVIDIA <H200>" in times and "10.0" in times and "peer" in times and "wrong" not in times.split("bf16")[0]
    tuning = said["tuning"]
    assert "15.020.025 % splits: 16" in tuning and "1: wrong: error over 3e-03" in tuning
    assert "# <the H200 & others>" in said["spec"]


def test_source_is_the_file(whole: str, plan: Plan) -> None:
    """Line by line, with the numbers as ids and no colour that the style sheet lacks."""
    for kernel in plan.kernels:
        lines = re.findall(rf'<span id="{kernel.name}-\d+">(.*?)</span>(?=<span id=|</pre>)', whole)
        text = [re.sub(r"<[^>]*>", "", line) for line in lines]
        assert [html.unescape(line) for line in text] == render_kernel(kernel).splitlines()
    style = (FOLDER / "page.css").read_text()
    source = python('@f\ndef g(x: int) -> "s":\n    return 1 in x  # c\n', "k")
    marked = set(re.findall(r'<span class="(\w+)">', source))
    assert marked <= classes() and len(marked) >= 6
    assert {f".{name}" for name in classes()} <= set(re.findall(r"\.[a-z]+\b", style))


def test_it_is_whole(whole: str, plan: Plan, inspected: Inspected, history: Path) -> None:
    """Nothing is asked of anybody; ids are unique, and what links to one finds it; the same input, the same bytes."""
    read = Read(whole)
    assert "script" not in read.tags and "link" not in read.tags and "img" not in read.tags
    assert "@import" not in whole and "url(" not in whole.replace("url(#", "")
    assert all(link.startswith("#") for link in read.asked)
    ids = re.findall(r'\bid="([^"]+)"', whole)
    assert len(ids) == len(set(ids))
    assert {link[1:] for link in read.asked} <= set(ids)
    assert set(re.findall(r"url\(#([^)]+)\)", whole)) <= set(ids)
    again = page(plan, SPEC, inspected, "", fake_bench(), history_of(plan, history))
    assert again == whole.replace("NVIDIA &lt;H200&gt;", "Fake GPU")


def test_no_line_of_the_file_is_of_this_spec(plan: Plan, tmp_path: Path, history: Path) -> None:
    other = tmp_path / "other.jsonl"
    other.write_text(history.read_text().replace("4x1024", "5x1024"))
    found = history_of(plan, other)
    assert found.searches == [] and found.others == 4
    assert "no timing of these shapes" in page(plan, SPEC, None, "why", None, found)
    other.write_text("{}\nnot JSON\n")
    with pytest.raises(NotAHistory, match="has no timing"):
        history_of(plan, other)


def test_a_bench_comes_back_from_json() -> None:
    from mla_codegen.cli.common import without_nan

    report = fake_bench()
    again = Report.from_json(json.dumps(without_nan(report.json())))
    assert repr(again) == repr(report)  # NaN is not equal to itself
    for bad in ("[]", "{}", '{"rows": [{}]}', "no"):
        with pytest.raises(ValueError, match="not what `bench --json` prints"):
            Report.from_json(bad)


def test_every_limit_is_judged(inspected: Inspected) -> None:
    report = inspected.rows[0].report
    assert report is not None
    assert judge(report, {"registers": 199, "hot_loop_per_tile": {"matrix": 40}}) == [
        ("registers", 200.0, 199, False),
        ("hot_loop_per_tile.matrix", 40.0, 40, True),
    ]


@pytest.fixture
def spec(tmp_path: Path) -> Path:
    (tmp_path / "mine.yaml").write_text(SPEC)
    return tmp_path / "mine.yaml"


def test_command(spec: Path, inspected: Inspected, monkeypatch: pytest.MonkeyPatch) -> None:
    """The page is written, and the exit code is that of `inspect`."""
    path = spec.parent / "new" / "out.html"
    done = CliRunner().invoke(app, ["report", str(spec), "--html", str(path), "--no-compile", "--json"])
    said = json.loads(done.stdout)
    assert done.exit_code == 0 and said["bytes"] == path.stat().st_size and not said["compiled"]
    assert "--no-compile" in Read(path.read_text()).texts["compiler"]
    monkeypatch.setattr(report_page, "_inspect", lambda *_: (inspected, ""))
    done = CliRunner().invoke(app, ["report", str(spec), "--html", str(path)])
    assert done.exit_code == 1 and "the page says where" in done.stdout
    assert "1 limits broken" in path.read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--html", "."], "this is a folder"),
        (["--bench", "bad.txt"], "fix: mla-codegen bench SPEC --json"),
        (["--bench", "absent.json"], "absent.json"),
        (["--history", "bad.txt"], "has no timing"),
    ],
)
def test_bad_input(
    spec: Path, arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    from mla_codegen.cli.entry import run

    monkeypatch.chdir(spec.parent)
    Path("bad.txt").write_text("nothing")
    monkeypatch.setattr("sys.argv", ["mla-codegen", "report", "mine.yaml", "--no-compile", *arguments])
    with pytest.raises(SystemExit) as ended:
        run(app)
    assert ended.value.code == 2 and message in capfd.readouterr().err
    assert not Path("report.html").exists()
