"""The build as {path: text}: made in memory, published atomically, compared for drift."""

import difflib
import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from pathlib import Path

from filelock import FileLock

from mla_codegen import __version__
from mla_codegen.plan.resolve import Plan
from mla_codegen.publish.files import replace_file
from mla_codegen.publish.manifest import MANIFEST, BuildError, listed, read_manifest
from mla_codegen.publish.names import package_flaw, spec_flaw
from mla_codegen.render.templates import (
    PACKAGE,
    render_dispatch,
    render_kernels,
    render_op,
    render_tables,
    template_hashes,
)
from mla_codegen.runtime.tables import VERSION

HEADER = "# Copied by mla-codegen from mla_codegen/runtime/{name}. Do not edit: `mla-codegen build` writes it anew.\n"
RUNTIME = (
    "__init__.py", "arguments.py", "builds.py", "calls.py", "choice.py", "context_parallel.py", "debug.py",
    "descriptors.py", "formats.py", "gluon.py", "interpreter.py", "launch.py", "layout.py", "merge.py", "op.py",
    "paged.py", "peer_memory.py", "records.py", "scratch.py", "sparse.py", "splits.py", "tables.py", "validate.py",
    "warmup.py", "workspace.py",
)  # fmt: skip


@dataclass(frozen=True)
class Drift:
    """One difference between a fresh build and what is on disk.

    kind   missing, changed; edited: by hand; foreign: never written by us; orphaned: ours, and no longer needed;
           outdated: another spec's tables, of a version that the runtime of the fresh build does not read
    """

    kind: str
    path: str
    diff: str


def spec_name(spec: Path, out: Path) -> str:
    """The spec's path as generated files name it: relative to the folder that holds `out`, or else its bare name."""
    try:
        return spec.resolve().relative_to(out.resolve().parent).as_posix()
    except ValueError:
        return spec.name


def fresh_build(plans: list[Plan], out: Path) -> dict[str, str]:
    """All files that `out` should hold after building `plans`, builds of other specs that it has already included."""
    refuse_names(plans, out)
    builds = _others(out)
    files: dict[str, str] = {}
    texts = render_kernels([kernel for plan in plans for kernel in plan.kernels])
    for plan in plans:
        model = plan.spec.model
        mine = {f"{plan.name}/__init__.py": render_tables(plan)}
        for kernel in plan.kernels:
            mine[f"{plan.name}/{kernel.name}.py"] = texts.pop(0)
        files |= mine
        kv = plan.spec.kv
        layouts: dict[str, list] = {"ragged": [], "paged": [kv.page_size], "sparse": [f"lists of {kv.topk}"]}
        row = model.kv_lora_rank + model.qk_rope_head_dim
        tokens = ["several query tokens"] * plan.for_several_tokens
        builds[plan.name] = {
            "spec": plan.spec_file,
            "spec_sha256": _sha(json.dumps(plan.spec.model_dump(mode="json", exclude={"limits"}), sort_keys=True)),
            "summary": f"{plan.target.name} ({', '.join(plan.spec.dtypes.kv)} KV{plan.spec.kv.words})",
            "serves": [plan.target.name, model.num_heads, row, *layouts[kv.layout], *tokens],
            "tables": VERSION,
            "files": {path: _sha(text) for path, text in sorted(mine.items())},
        }
    _refuse_duplicates(builds)
    tables = [{"name": name, "summary": builds[name]["summary"]} for name in sorted(builds)]
    shared = _shared(tables, out.resolve().name)
    files |= shared
    files[MANIFEST] = (
        json.dumps(
            {
                "versions": {"mla_codegen": __version__, "black": version("black")},
                "templates": template_hashes(),
                "builds": {name: builds[name] for name in sorted(builds)},
                "files": {path: _sha(text) for path, text in sorted(shared.items())},
            },
            indent=2,
        )
        + "\n"
    )
    return files


def _shared(tables: list[dict[str, str]], package: str) -> dict[str, str]:
    """The files that all builds of a folder have in common."""
    files = {"__init__.py": '"""Kernels written by mla-codegen; `dispatch` is the way in."""\n'}
    files["dispatch.py"] = render_dispatch(tables, package)
    files["op.py"] = render_op(package)
    for name in RUNTIME:
        source = (PACKAGE / "runtime" / name).read_text(encoding="utf-8")
        files[f"runtime/{name}"] = HEADER.format(name=name) + source
    return files


@cache
def _any_package() -> dict[str, str]:
    """What is written for every build, of whatever name."""
    return {**_shared([{"name": "spec", "summary": ""}], "package"), MANIFEST: ""}


def refuse_names(plans: list[Plan], out: Path) -> None:
    """Raise BuildError if `out`, or the name of a plan, cannot be that of a package or of a build in it."""
    if flaw := package_flaw(out, _any_package()):
        raise BuildError(f"{flaw}\n  fix: name another folder with --out")
    for plan in plans:
        if flaw := spec_flaw(plan, _others(out), _any_package(), out):
            raise BuildError(f"{flaw}\n  fix: rename the spec")


def _refuse_duplicates(builds: dict[str, dict]) -> None:
    """Two builds for the same target, heads, row width and page size: the dispatcher could not tell them apart.

    But for one whose shapes all have several query tokens a request, beside one of the same element types.
    """
    seen: dict[tuple, str] = {}
    for name, build in sorted(builds.items()):
        key = tuple(build["serves"])
        if key in seen:
            target, heads, row, *rest = key
            kv = ", ".join([f"rows of {row}", *(f"pages of {one}" if isinstance(one, int) else one for one in rest)])
            raise BuildError(
                f"{build['spec']} and {builds[seen[key]]['spec']} both serve {target}, {heads} heads, {kv}\n"
                "  fix: put their shapes into one spec, build them into different folders (--out), or, if one of the\n"
                "  specs is gone, remove its folder of kernels and build again"
            )
        seen[key] = name


def _others(out: Path) -> dict[str, dict]:
    """The builds that `out` has already, by name. One whose folder was removed is forgotten."""
    built = read_manifest(out).get("builds", {})
    return {name: build for name, build in built.items() if (out / name / "__init__.py").exists()}


def outdated(out: Path, names: set[str]) -> dict[str, str]:
    """{build: spec} of those in `out`, but for `names`, whose tables the runtime of a fresh build would not read."""
    return {
        name: build["spec"]
        for name, build in _others(out).items()
        if name not in names and build.get("tables", 0) != VERSION
    }


def find_drift(files: dict[str, str], out: Path, names: set[str]) -> list[Drift]:
    """How `out` differs from the fresh build `files` of the specs `names`.

    Raises BuildError for what cannot be read.
    """
    manifest = read_manifest(out)
    old, ours = listed(manifest, names), listed(manifest)
    interrupted = manifest.get("publishing", {})
    drifts = []
    for path, text in sorted(files.items()):
        have = _read(out / path)
        if have == text:
            continue
        if have is None:
            kind = "missing"
        elif path not in ours and path not in interrupted and path != MANIFEST:
            kind = "foreign"
        elif path in old and _sha(have) not in (old[path], interrupted.get(path)):
            kind = "edited"
        else:
            kind = "changed"
        drifts.append(Drift(kind, path, _diff(path, have or "", text)))
    drifts += [Drift("orphaned", path, "") for path in sorted(set(old) - set(files)) if (out / path).exists()]
    drifts += [Drift("outdated", f"{name}/__init__.py", "") for name in sorted(outdated(out, names))]
    return drifts


def build(plans: list[Plan], out: Path, *, force: bool = False) -> tuple[dict[str, str], list[str], list[str]]:
    """Build `plans` into `out`: (all files, written, removed). One build at a time: others wait.

    Raises BuildError if a file of ours was edited by hand or one is in the way that is not ours, unless `force`; if
    builds of other specs there are of another version; if `out` cannot be written.
    """
    refuse_names(plans, out)  # before anything is made, the lock's file too
    with _lock(out):
        files = fresh_build(plans, out)
        return files, *_publish(files, out, {plan.name for plan in plans}, force)


def publish(files: dict[str, str], out: Path, names: set[str], *, force: bool = False) -> tuple[list[str], list[str]]:
    """Write those of `files`, a fresh build of the specs `names`, that differ, and remove our orphans."""
    with _lock(out):
        return _publish(files, out, names, force)


@contextmanager
def _lock(out: Path) -> Iterator[None]:
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(out.parent / f".{out.name}.lock"):
            yield
    except OSError as error:
        raise BuildError(f"cannot write to {error.filename or out}: {error.strerror or error}") from error


def _publish(files: dict[str, str], out: Path, names: set[str], force: bool) -> tuple[list[str], list[str]]:
    drifts = find_drift(files, out, names)
    _refuse(drifts, files, out, force)
    written = [drift.path for drift in drifts if drift.kind != "orphaned"]
    removed = [drift.path for drift in drifts if drift.kind == "orphaned"]
    if written:  # so that a build after an interrupted one knows the files for ours
        intent = {**read_manifest(out), "publishing": {path: _sha(files[path]) for path in written}}
        replace_file(out / MANIFEST, json.dumps(intent, indent=2) + "\n")
    for path in sorted(written, key=lambda path: path == MANIFEST):
        replace_file(out / path, files[path])
    if written and MANIFEST not in written:
        replace_file(out / MANIFEST, files[MANIFEST])
    for path in removed:
        (out / path).unlink()
        if not any((out / path).parent.iterdir()):
            (out / path).parent.rmdir()
    return written, removed


def _refuse(drifts: list[Drift], files: dict[str, str], out: Path, force: bool) -> None:
    """Raise what keeps a build from being written."""
    found = {kind: [drift.path for drift in drifts if drift.kind == kind] for kind in ("edited", "foreign", "outdated")}
    if found["outdated"]:
        raise BuildError(
            f"built by another version of mla-codegen: {_joined(out, found['outdated'])}\n"
            "  fix: build all specs of the folder at once, since they share its runtime:\n"
            f"    {rebuild_command(files, out)}\n"
            "  (if a spec is gone, remove its folder of kernels first)"
        )
    if force:
        return
    if found["edited"]:
        raise BuildError(
            f"edited by hand since the last build: {_joined(out, found['edited'])}\n"
            "  fix: move the change into a template or the spec, or build with --force to overwrite it"
        )
    if found["foreign"]:
        raise BuildError(
            f"in the way, and not mla-codegen's by the manifest: {_joined(out, found['foreign'])}\n"
            "  fix: name another folder with --out, or build with --force to overwrite them"
        )


def rebuild_command(files: dict[str, str], out: Path) -> str:
    """What builds all specs of a fresh build anew, those of other builds in its folder included."""
    specs = [build["spec"] for build in json.loads(files[MANIFEST])["builds"].values()]
    return f"mla-codegen build {' '.join(str(out.parent / spec) for spec in specs)} --out {out}"


def _joined(out: Path, paths: list[str]) -> str:
    return ", ".join(str(out / path) for path in paths)


def _read(path: Path) -> str | None:
    """The file's text, None if there is none. BuildError if something else is there, or cannot be read."""
    for place, kind, right in ((path.parent, "folder", path.parent.is_dir()), (path, "file", path.is_file())):
        if os.path.lexists(place) and not right:
            raise BuildError(f"{place} is no {kind}, where one of the build belongs\n  fix: move it away")
    try:
        return path.read_bytes().decode("utf-8", errors="replace")
    except FileNotFoundError:
        return None
    except OSError as error:
        raise BuildError(f"{path} cannot be read: {error.strerror or error}") from None


def _sha(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _diff(path: str, have: str, want: str) -> str:
    lines = difflib.unified_diff(
        have.splitlines(keepends=True), want.splitlines(keepends=True), f"{path} (on disk)", f"{path} (fresh build)"
    )
    return "".join(lines)
