"""Source as HTML: classes for the page's style sheet, a numbered span for each line, nothing else."""

from functools import cache
from typing import Any

from markupsafe import Markup
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import PythonLexer, YamlLexer
from pygments.token import STANDARD_TYPES, Token

# The classes that the style sheet has colours for; what it has none for needs no span.
SHOWN = (
    Token.Keyword, Token.Comment, Token.String, Token.Number, Token.Name.Decorator, Token.Name.Function,
    Token.Name.Class, Token.Name.Builtin, Token.Name.Tag, Token.Operator.Word,
)  # fmt: skip


@cache
def _merged(kind: Any) -> Any:
    """The shown kind that a token is of, or plain text."""
    return next((shown for shown in SHOWN if kind in shown), Token)


class _Merging:
    """A lexer whose neighbouring tokens of one colour are one token: a third of the page's bytes."""

    def __init__(self, lexer: Any):
        self.lexer = lexer

    def get_tokens(self, text: str) -> Any:
        held, words = None, ""
        for kind, word in self.lexer.get_tokens(text):
            kind = _merged(kind)
            if kind is held or not word.strip():
                words += word
                continue
            if words:
                yield held or Token, words
            held, words = kind, word
        yield held or Token, words


def classes() -> set[str]:
    """The class names that highlighted source may have."""
    return {STANDARD_TYPES[kind] for kind in SHOWN}


def python(text: str, anchor: str) -> Markup:
    """A Python file, its lines `anchor-1`, `anchor-2`, ..."""
    return _lines(PythonLexer(), text, anchor)


def yaml(text: str, anchor: str) -> Markup:
    """A YAML file, likewise."""
    return _lines(YamlLexer(), text, anchor)


def _lines(lexer: Any, text: str, anchor: str) -> Markup:
    marked = highlight(text, _Merging(lexer), HtmlFormatter(nowrap=True)).splitlines()
    # Each line is a block of its own, so that the style sheet can number it: no line ends.
    return Markup("".join(f'<span id="{anchor}-{number}">{line}</span>' for number, line in enumerate(marked, 1)))
