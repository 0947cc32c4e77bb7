"""black, piece by piece: the files of a build share most pieces, and black takes about a millisecond a line."""

import re
import textwrap

import black

MODE = black.Mode(line_length=120, target_versions={black.TargetVersion.PY310}, magic_trailing_comma=False)

_formatted: dict[str, str] = {}


def format_text(text: str) -> str:
    """`text` as black writes it. Raises black.InvalidInput if it is not Python."""
    try:
        return "".join(_format_piece(piece) + gap for piece, gap in split(text))
    except black.InvalidInput:  # not Python, or a piece that is none by itself, such as an `else`
        return black.format_str(text, mode=MODE)


def split(text: str) -> list[tuple[str, str]]:
    """(piece, line ends behind it): docstrings with what they head, and paragraphs, which blank lines part."""
    pieces: list[tuple[str, str]] = []
    for block in text.split("\n\n\n"):
        rest = block.strip("\n")
        if not rest:
            continue
        if rest.count('"""') >= 2:
            end = rest.index('"""', rest.index('"""') + 3) + 3
            head, rest = rest[:end], rest[end + 1 :]
            pieces.append((head, "\n\n" if rest.startswith("\n") else "\n"))
        pieces += [(part.strip("\n"), "\n\n") for part in rest.split("\n\n") if part.strip()]
        pieces[-1] = (pieces[-1][0], "\n\n\n")
    return [*pieces[:-1], (pieces[-1][0], "\n")] if pieces else []


def _format_piece(piece: str) -> str:
    if piece not in _formatted:
        _formatted[piece] = _format(piece)
    return _formatted[piece]


def _format(piece: str) -> str:
    """Of a function's body: formatted at its own depth, under as many `if`s, which are taken off again."""
    depth = (len(piece) - len(piece.lstrip(" "))) // 4
    above = "".join(f"{' ' * 4 * level}if _:\n" for level in range(depth))
    lines = black.format_str(f"{above}{piece}\n", mode=MODE).splitlines()
    return "\n".join(lines[depth:]).strip("\n")  # black parts a `def` from an `if`


_ARGUMENTS = re.compile(r"( *)(def \w+|stage[12]\[\(.*?,\)\])\((.*)\)(:?)")


def wrap_arguments(text: str) -> str:
    """Signatures and launches that are too long for a line, several arguments a line: black would give each its own.

    They are marked, so that black leaves them as they are.
    """
    return "\n".join(_wrap(line) if len(line) > MODE.line_length else line for line in text.split("\n"))


def _wrap(line: str) -> str:
    match = _ARGUMENTS.fullmatch(line)
    if not match:
        return line
    indent, head, arguments, colon = match.groups()
    inner = indent + "    "
    width = MODE.line_length
    body = textwrap.fill(arguments + ",", width, initial_indent=inner, subsequent_indent=inner, break_long_words=False)
    return f"{indent}{head}(\n{body}\n{indent}){colon}  # fmt: skip"
