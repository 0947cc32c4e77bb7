"""The page in a real browser: on a phone and a desk, light and dark. Skipped where there is none."""

import html
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(BROWSER is None, reason="no browser: apt-get install chromium")

CLOSED = "script-src 'none'"
# What the browser knows of the page, in frames as wide as a phone and a desk, sources shut and open.
PROBE = """<!DOCTYPE html><meta charset="utf-8"><body><pre id="found"></pre><script>
const page = PAGE;
function look(win) {
  const doc = win.document, seen = new Map();
  const rgb = text => text.match(/[\\d.]+/g).map(Number);
  const light = color => color.slice(0, 3).map(c => c / 255)
    .map(c => c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4)
    .reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0);
  const ground = node => {
    for (; node; node = node.parentElement) {
      const color = rgb(win.getComputedStyle(node).backgroundColor);
      if (color.length < 4 || color[3] === 1) return color;
    }
    return [255, 255, 255];
  };
  let contrast = 99, smallest = 99, texts = 0, dullest = "";
  const walker = doc.createTreeWalker(doc.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const parent = walker.currentNode.parentElement;
    if (!walker.currentNode.textContent.trim() || !parent.checkVisibility()) continue;
    const style = win.getComputedStyle(parent), svg = parent.closest("svg");
    const [a, b] = [light(rgb(svg ? style.fill : style.color)), light(ground(parent))];
    const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    if (ratio < contrast) { contrast = ratio; dullest = walker.currentNode.textContent; }
    if (!svg) smallest = Math.min(smallest, parseFloat(style.fontSize));
    texts++;
  }
  return {
    contrast, dullest, smallest, texts, over: doc.documentElement.scrollWidth - win.innerWidth, width: win.innerWidth,
    dark: win.matchMedia("(prefers-color-scheme: dark)").matches,
    asked: win.performance.getEntriesByType("resource").map(entry => entry.name),
    headings: [...doc.querySelectorAll("h1, h2, h3")].map(one => +one.tagName[1]),
    regions: [...doc.querySelectorAll(".scroll, pre")].every(one => one.tabIndex === 0 && one.ariaLabel),
    tables: [...doc.querySelectorAll("table")].every(one => one.caption && one.querySelector("thead th[scope=col]")),
    pictures: [...doc.querySelectorAll("svg")].map(one => [one.getAttribute("aria-label"), one.clientWidth]),
    targets: Math.min(...[...doc.querySelectorAll("nav a, summary")].map(one => one.getBoundingClientRect().height)),
    lines: doc.querySelectorAll("details pre > span").length,
    tall: [...doc.querySelectorAll("details[open] pre")].map(one => one.scrollHeight / one.children.length),
  };
}
const found = [];
for (const width of [390, 1280]) for (const open of [false, true]) {
  const frame = document.createElement("iframe");
  frame.style.cssText = `border: 0; height: 844px; width: ${width}px`;
  frame.srcdoc = page;
  frame.onload = () => {
    if (open) frame.contentDocument.querySelectorAll("details").forEach(one => one.open = true);
    found.push({open, ...look(frame.contentWindow)});
    document.getElementById("found").textContent = JSON.stringify(found);
  };
  document.body.append(frame);
}
</script>"""


def browse(file: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """The document as the browser has it after all scripts."""
    assert BROWSER is not None
    flags = ("--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=20000", "--dump-dom", *options)
    folder = file.parent / "profile"
    return subprocess.run(
        [BROWSER, *flags, f"--user-data-dir={folder}", file.as_uri()], capture_output=True, text=True, timeout=120,
        check=True,
    )  # fmt: skip


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_a_phone_and_a_desk(whole: str, tmp_path: Path, dark: bool) -> None:
    probe = tmp_path / "probe.html"
    probe.write_text(PROBE.replace("PAGE", json.dumps(whole).replace("</", "<\\/")), encoding="utf-8")
    done = browse(probe, f"--blink-settings=preferredColorScheme={0 if dark else 1}")
    match = re.search(r'<pre id="found">(.*?)</pre>', done.stdout, re.S)
    assert match and match[1], done.stderr
    found: list[dict[str, Any]] = json.loads(html.unescape(match[1]))
    assert sorted((one["width"], one["open"]) for one in found) == [
        (width, open_) for width in (390, 1280) for open_ in (False, True)
    ]
    for one in found:
        assert one["dark"] == dark
        assert one["over"] <= 0, "the page itself scrolls sideways"
        assert one["contrast"] >= 4.5, one["dullest"]
        assert one["smallest"] >= 12 and one["targets"] >= 40
        assert one["asked"] == []
        assert one["regions"] and one["tables"]
        assert one["headings"][0] == 1
        assert all(b - a <= 1 for a, b in zip(one["headings"], one["headings"][1:], strict=False))
        assert len(one["pictures"]) == 2 and all(label and width > 300 for label, width in one["pictures"])
        assert all(height < 30 for height in one["tall"]), one["tall"]  # px: a line of source is one line
    shut, opened = (max(one["texts"] for one in found if one["open"] == state) for state in (False, True))
    assert opened > shut + 200


def test_its_own_policy_holds_and_refuses_nothing_of_it(whole: str, tmp_path: Path) -> None:
    """As it is: no complaint of the browser's. With a script and a picture from elsewhere in it: both are refused."""
    page = tmp_path / "page.html"
    page.write_text(whole, encoding="utf-8")
    assert "CONSOLE" not in browse(page, "--enable-logging=stderr").stderr
    added = "<script>document.title = 'ran'</script><img src='https://example.invalid/a.png'>"
    page.write_text(whole.replace("</body>", f"{added}</body>"), encoding="utf-8")
    done = browse(page, "--enable-logging=stderr")
    assert "<title>ran</title>" not in done.stdout
    assert done.stderr.count("Content Security Policy") >= 2
