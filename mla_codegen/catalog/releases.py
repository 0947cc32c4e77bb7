"""Triton releases that kernels can be rendered for, and what each calls differently.

Gluon changes with every release. Templates are written in the names of the newest release; `Release.names` says what an
older one calls the same. Plain Triton kernels are the same text for all.
"""

import re
from dataclasses import dataclass
from importlib import metadata

REFERENCE = "3.6.0"  # what the tests, `generated/` and the golden files of a checkout are for


@dataclass(frozen=True)
class Release:
    """One minor release of Triton.

    name    what `triton:` in a spec and `--triton` say (3.6)
    tried   the version that the kernels were compiled and checked with
    names   the newest release's name -> this one's, of functions (`gl.barrier`) and methods (`.reinterpret`)
    """

    name: str
    tried: str
    names: tuple[tuple[str, str], ...] = ()


BARRIER = (("gl.barrier", "gl.thread_barrier"),)
COPIES = (
    ("async_copy.async_load", "async_copy.async_copy_global_to_shared"),
    ("tma.async_load", "tma.async_copy_global_to_shared"),
)
VIEWS = ((".reinterpret", "._reinterpret"),)

_ALL = (
    Release("3.6", "3.6.0", BARRIER + COPIES + VIEWS),
    Release("3.7", "3.7.1", COPIES + VIEWS),
    Release("3.8", "3.8.0", VIEWS),
    Release("3.9", "3.9.0"),
)
RELEASES: dict[str, Release] = {release.name: release for release in _ALL}


def release_of(version: str) -> Release | None:
    """The release that a version (3.6.0, 3.6, 3.7.1+git1234) belongs to; None if kernels cannot be rendered for it."""
    found = re.match(r"(\d+\.\d+)(?![\d])", version)
    return RELEASES.get(found[1]) if found else None


def installed_triton() -> str:
    """The version of the Triton that this interpreter imports; '' if there is none."""
    try:
        return metadata.version("triton")
    except metadata.PackageNotFoundError:  # torch's builds for AMD bring it under another name
        try:
            import triton
        except ImportError:
            return ""
        return str(triton.__version__)
