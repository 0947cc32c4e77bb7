"""What the YAML parser says of text that is not YAML, in other words where its own would mislead."""

import re

import yaml

from mla_codegen.spec.errors import Place, Problem, quoted
from mla_codegen.spec.tree import Flaw

QUOTE = "put the text in single quotes"
INDENT = "indent the keys of one block alike, with spaces; put text that holds `: ` in quotes"
# The parser's words -> what is wrong, and how to mend it
_WORDS = (
    ("mapping values are not allowed", "there cannot be a `:` here", INDENT),
    ("expected ',' or '}'", "a comma or the closing `}` is missing before this", ""),
    ("expected ',' or ']'", "a comma or the closing `]` is missing before this", ""),
    ("expected <block end>", "this does not line up with what stands above it", INDENT),
    ("could not find expected ':'", "a `:` is missing after this key", "write `key: value`"),
    ("sequence entries are not allowed", "a list entry cannot begin here", "begin the list on a line of its own"),
    ("<document start>", "the spec has ended before this", "a bracket is closed once too often?"),
)
_BRACKETS = {"{": "}", "[": "]"}


def syntax_flaw(error: yaml.YAMLError, text: str, open_places: list[Place]) -> Flaw:
    """The parser's `error` in our words. `open_places`: where the collections begin that were open when it struck."""
    if not isinstance(error, yaml.MarkedYAMLError) or error.problem_mark is None:
        return Problem((), f"this is not YAML: {' '.join(str(error).split())}"), (1, 1)
    mark = error.problem_mark
    lines = re.split("\r\n|[\r\n\x85\u2028\u2029]", text)
    line = lines[mark.line] if mark.line < len(lines) else ""
    place = (mark.line + 1, mark.column + 1)
    tab = re.match(r" *\t", line)
    if tab or line[mark.column : mark.column + 1] == "\t":
        at = (mark.line + 1, tab.end() if tab else mark.column + 1)
        return Problem((), "a tab; YAML is indented with spaces alone", fix="replace each tab by spaces"), at
    said = error.problem or ""
    if not any(
        rest.strip() for rest in (line[mark.column :], *lines[mark.line + 1 :])
    ):  # it struck the end of the text
        if "quoted" in (error.context or "") and error.context_mark is not None:
            start = (error.context_mark.line + 1, error.context_mark.column + 1)
            return Problem((), "the quote that opens here is never closed"), start
        for opened in reversed(open_places):
            bracket = lines[opened[0] - 1][opened[1] - 1 : opened[1]]
            if bracket in _BRACKETS:
                return Problem((), f"the `{bracket}` is never closed", fix=f"add `{_BRACKETS[bracket]}`"), opened
    if "cannot start any token" in said:
        what = f"no value can begin with {quoted(line[mark.column : mark.column + 1])}"
        return Problem((), what, fix=QUOTE), place
    if "could not find expected ':'" in said and error.context_mark is not None:
        place = (error.context_mark.line + 1, error.context_mark.column + 1)  # the key
    if "mapping values are not allowed" in said:
        before = next((n for n in range(mark.line - 1, -1, -1) if lines[n].split("#")[0].strip()), None)
        if before is not None and ":" not in lines[before]:
            return Problem((), "there cannot be a `:` here", fix=f"is a `:` missing on line {before + 1}?"), place
    for words, what, fix in _WORDS:
        if words in said:
            if what.startswith("a comma") and error.context_mark is not None and error.context_mark.line < mark.line:
                what += f" (it opens on line {error.context_mark.line + 1})"
            return Problem((), what, fix=fix), place
    fix = QUOTE if isinstance(error, yaml.scanner.ScannerError) else ""
    return Problem((), f"this is not YAML: {said}", fix=fix), place
