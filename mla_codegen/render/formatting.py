"""black, piece by piece: the files of a build share most pieces, and black takes about a millisecond a line."""

import multiprocessing
import os

import black

MODE = black.Mode(line_length=120, target_versions={black.TargetVersion.PY310}, magic_trailing_comma=False)
FEW = 16  # pieces that are not worth a process

_formatted: dict[str, str] = {}


def format_text(text: str) -> str:
    """`text` as black writes it. Raises black.InvalidInput if it is not Python."""
    try:
        return "".join(_format_piece(piece) + gap for piece, gap in split(text))
    except black.InvalidInput:  # not Python, or a piece that is none by itself, such as an `else`
        return black.format_str(text, mode=MODE)


def format_ahead(texts: list[str]) -> None:
    """Format what the texts are made of once each, on all cores, for `format_text` to put together."""
    missing = sorted({piece for text in texts for piece, _ in split(text)} - _formatted.keys(), key=len, reverse=True)
    workers = min(4, os.cpu_count() or 1)
    if len(missing) < FEW or workers < 2 or "fork" not in multiprocessing.get_all_start_methods():
        return
    with multiprocessing.get_context("fork").Pool(workers) as pool:
        for piece, formatted in zip(missing, pool.imap(_try_format, missing, chunksize=8), strict=True):
            if formatted is not None:
                _formatted[piece] = formatted


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


def _try_format(piece: str) -> str | None:
    try:
        return _format(piece)
    except black.InvalidInput:
        return None  # `format_text` meets it again


def _format(piece: str) -> str:
    """Of a function's body: formatted at its own depth, under as many `if`s, which are taken off again."""
    depth = (len(piece) - len(piece.lstrip(" "))) // 4
    above = "".join(f"{' ' * 4 * level}if _:\n" for level in range(depth))
    lines = black.format_str(f"{above}{piece}\n", mode=MODE).splitlines()
    return "\n".join(lines[depth:]).strip("\n")  # black parts a `def` from an `if`
