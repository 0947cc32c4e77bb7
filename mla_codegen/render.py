"""Plan -> formatted source. Jinja places what the plan says; black has the last word on layout."""

import hashlib
from functools import cache, lru_cache
from pathlib import Path

import black
import jinja2

from .plan import KernelPlan, Plan

PACKAGE = Path(__file__).parent
MODE = black.Mode(line_length=120, target_versions={black.TargetVersion.PY310}, magic_trailing_comma=False)


def template_folder() -> Path:
    """The templates: beside the package in a checkout, inside it when installed."""
    inside = PACKAGE / "templates"
    return inside if inside.is_dir() else PACKAGE.parent / "templates"


@cache
def environment() -> jinja2.Environment:
    return jinja2.Environment(
        loader=jinja2.FileSystemLoader(template_folder()),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,
    )


class RenderError(Exception):
    """A template that failed, with its name and line, or output that is not Python."""


def render_kernel(kernel: KernelPlan) -> str:
    """The kernel's file."""
    return _render(f"{kernel.family}/kernel.py.jinja", k=kernel, f=kernel.details)


def render_tables(plan: Plan) -> str:
    """`__init__.py` of a spec's folder: what the dispatcher looks up."""
    return _render("tables.py.jinja", plan=plan)


def render_dispatch(tables: list[dict[str, str]], package: str) -> str:
    """`dispatch.py` over all builds of a folder; `tables` have name and summary."""
    return _render("dispatch.py.jinja", tables=tables, package=package)


def template_hashes() -> dict[str, str]:
    """SHA-256 of every template, by path."""
    folder = template_folder()
    paths = sorted(folder.rglob("*.jinja"))
    return {path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}


def _render(name: str, **context: object) -> str:
    try:
        text = environment().get_template(name).render(**context)
    except jinja2.TemplateSyntaxError as error:
        raise RenderError(f"templates/{error.name}:{error.lineno}: {error.message}") from error
    except jinja2.UndefinedError as error:
        raise RenderError(f"templates/{name}: {error.message}") from error
    return format_source(text, name)


def format_source(text: str, name: str) -> str:
    """`text` as black writes it. Top-level blocks are formatted one by one, since shapes share most of them."""
    blocks = text.split("\n\n\n")
    try:
        formatted = [_format_block(block.strip("\n") + "\n").rstrip("\n") for block in blocks if block.strip()]
    except black.InvalidInput as error:
        raise RenderError(f"templates/{name} rendered something that is not Python: {error}") from error
    return "\n\n\n".join(formatted) + "\n"


@lru_cache(maxsize=4096)
def _format_block(block: str) -> str:
    return black.format_str(block, mode=MODE)
