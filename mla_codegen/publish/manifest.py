"""The manifest of a generated folder: which builds are in it, and which files are ours."""

import json
from pathlib import Path, PurePosixPath
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, ValidationError

MANIFEST = "manifest.json"


class BuildError(Exception):
    """Something stands in the way of publishing; `str()` says what and what to do."""


def _inside(path: str) -> str:
    if PurePosixPath(path).is_absolute() or not set(PurePosixPath(path).parts).isdisjoint({"..", ""}) or not path:
        raise ValueError(f"{path!r} is no path inside of the folder")
    return path


def _identifier(name: str) -> str:
    if not name.isidentifier():
        raise ValueError(f"{name!r} is no name of a build")
    return name


Files = dict[Annotated[str, AfterValidator(_inside)], str]  # path -> SHA-256


class _Build(BaseModel):
    model_config = ConfigDict(strict=True)
    spec: str
    summary: str
    serves: list[str | int]
    files: Files
    tables: int = 0  # their version; builds of before there was one have none


class _Manifest(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")
    versions: dict[str, str] = {}
    templates: dict[str, str] = {}
    builds: dict[Annotated[str, AfterValidator(_identifier)], _Build] = {}
    files: Files = {}
    publishing: Files = {}  # what a build was about to write that has not come to its end


def read_manifest(out: Path) -> dict:
    """The manifest of `out`, or {} if nothing was built there. Raises BuildError if it is none of ours."""
    path = out / MANIFEST
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
        _Manifest.model_validate(manifest)
    except FileNotFoundError:
        return {}
    except NotADirectoryError as error:
        raise BuildError(f"{out} is a file; the kernels need a folder\n  fix: name another with --out") from error
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "the whole"
        raise _unreadable(path, f"it is not what mla-codegen writes: {where}: {first['msg']}") from error
    except (OSError, ValueError, RecursionError) as error:
        raise _unreadable(path, getattr(error, "strerror", None) or str(error)) from error
    return manifest


def _unreadable(path: Path, reason: str) -> BuildError:
    return BuildError(
        f"{path} cannot be read: {reason}\n"
        "  fix: if the folder is mla-codegen's, remove the manifest and build all specs again; else name another folder"
    )


def listed(manifest: dict, names: set[str] | None = None) -> dict[str, str]:
    """{path: sha256} of what the manifest says is ours: shared files, and those of builds `names` (all if None)."""
    files = dict(manifest.get("files", {}))
    for name, build in manifest.get("builds", {}).items():
        if names is None or name in names:
            files |= build["files"]
    return files
