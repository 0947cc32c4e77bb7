"""Plan -> formatted source. Jinja places what the plan says; black has the last word on layout."""

import hashlib
import re
import traceback
from functools import cache
from pathlib import Path

import black
import jinja2

from mla_codegen.catalog.releases import RELEASES
from mla_codegen.plan.resolve import KernelPlan, Plan
from mla_codegen.render.formatting import format_text, wrap_arguments
from mla_codegen.render.releases import named_for
from mla_codegen.runtime.tables import VERSION

PACKAGE = Path(__file__).parents[1]


def template_folder() -> Path:
    """The templates: beside the package in a checkout, inside it when installed."""
    inside = PACKAGE / "templates"
    return inside if inside.is_dir() else PACKAGE.parent / "templates"


def _gluon(text: str) -> str:
    """A step of plain Triton in Gluon's names."""
    return re.sub(r"\btl\.", "gl.", text).replace("triton.jit", "gluon.jit")


@cache
def environment() -> jinja2.Environment:
    found = jinja2.Environment(
        loader=jinja2.FileSystemLoader(template_folder()),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,
        finalize=_placed,
    )
    found.filters["gluon"] = _gluon
    return found


NOTHING = "\0"  # stands for an empty text until its line, if it has one to itself, is taken out


def _placed(value: object) -> str:
    """A text as it is placed: what a macro wrote ends where its call ends, and an empty text leaves no empty line."""
    return str(value).removesuffix("\n") or NOTHING


def _without_nothing(text: str) -> str:
    return re.sub(rf"^[ \t]*{NOTHING}\n", "", text, flags=re.MULTILINE).replace(NOTHING, "")


class RenderError(Exception):
    """A template that failed, with its name and line, or output that is not Python."""


def render_kernel(kernel: KernelPlan) -> str:
    """The kernel's file."""
    return render_kernels([kernel])[0]


def render_kernels(kernels: list[KernelPlan]) -> list[str]:
    """The files of many kernels."""
    names = [f"{kernel.family}/kernel.py.jinja" for kernel in kernels]
    texts = [_kernel_text(name, kernel) for name, kernel in zip(names, kernels, strict=True)]
    return [format_source(text, name) for name, text in zip(names, texts, strict=True)]


def _kernel_text(name: str, kernel: KernelPlan) -> str:
    text = _text(name, k=kernel, f=kernel.details)
    return named_for(RELEASES[kernel.triton], text) if kernel.triton else text


def render_tables(plan: Plan) -> str:
    """`__init__.py` of a spec's folder: what the dispatcher looks up."""
    return _render("tables.py.jinja", plan=plan, version=VERSION)


def render_dispatch(tables: list[dict[str, str]], package: str) -> str:
    """`dispatch.py` over all builds of a folder; `tables` have name and summary."""
    return _render("dispatch.py.jinja", tables=tables, package=package)


def render_op(package: str) -> str:
    """`op.py`: the operators of torch.library."""
    return _render("op.py.jinja", package=package)


def render_part(name: str, **context: object) -> str:
    """A template that becomes part of a file."""
    return _render(name, **context)


def template_hashes() -> dict[str, str]:
    """SHA-256 of every template, by path."""
    folder = template_folder()
    paths = sorted(folder.rglob("*.jinja"))
    return {path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}


def _render(name: str, **context: object) -> str:
    return format_source(_text(name, **context), name)


def _text(name: str, **context: object) -> str:
    try:
        return wrap_arguments(_without_nothing(environment().get_template(name).render(**context)))
    except jinja2.TemplateSyntaxError as error:
        raise RenderError(f"templates/{error.name}:{error.lineno}: {error.message}") from error
    except (jinja2.TemplateError, TypeError) as error:
        raise RenderError(f"templates/{_place(error, name)}: {error}") from error


def _place(error: Exception, name: str) -> str:
    """Template and line that an error came from: the innermost of those it went through."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if frame.filename.endswith(".jinja"):
            return f"{Path(frame.filename).relative_to(template_folder()).as_posix()}:{frame.lineno}"
    return name


def format_source(text: str, name: str) -> str:
    """`text` as black writes it."""
    try:
        return format_text(text)
    except black.InvalidInput as error:
        raise RenderError(f"templates/{name} rendered something that is not Python: {error}") from error
