"""The build as {path: text}: made in memory, published atomically, compared for drift."""

import difflib
import hashlib
import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from filelock import FileLock

from mla_codegen import __version__
from mla_codegen.plan.resolve import Plan
from mla_codegen.render.templates import (
    PACKAGE,
    render_dispatch,
    render_kernels,
    render_op,
    render_tables,
    template_hashes,
)

MANIFEST = "manifest.json"
HEADER = "# Copied by mla-codegen from mla_codegen/runtime/{name}. Do not edit: `mla-codegen build` writes it anew.\n"
RUNTIME = (
    "__init__.py", "arguments.py", "builds.py", "calls.py", "choice.py", "context_parallel.py", "debug.py", "descriptors.py",
    "formats.py", "gluon.py", "interpreter.py", "launch.py", "op.py", "paged.py", "peer_memory.py", "scratch.py", "splits.py",
    "validate.py", "warmup.py", "workspace.py",
)  # fmt: skip


class BuildError(Exception):
    """Something stands in the way of publishing; `str()` says what and what to do."""


@dataclass(frozen=True)
class Drift:
    """One difference between a fresh build and what is on disk. kind: missing, changed, edited, orphaned."""

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
    built = read_manifest(out).get("builds", {})
    builds = {name: build for name, build in built.items() if (out / name / "__init__.py").exists()}
    files: dict[str, str] = {}
    texts = render_kernels([kernel for plan in plans for kernel in plan.kernels])
    for plan in plans:
        model = plan.spec.model
        mine = {f"{plan.name}/__init__.py": render_tables(plan)}
        for kernel in plan.kernels:
            mine[f"{plan.name}/{kernel.name}.py"] = texts.pop(0)
        files |= mine
        pages = [plan.spec.kv.page_size] * (plan.spec.kv.layout == "paged")
        builds[plan.name] = {
            "spec": plan.spec_file,
            "spec_sha256": _sha(json.dumps(plan.spec.model_dump(mode="json", exclude={"limits"}), sort_keys=True)),
            "summary": f"{plan.target.name} ({', '.join(plan.spec.dtypes.kv)} KV{plan.spec.kv.words})",
            "serves": [plan.target.name, model.num_heads, model.kv_lora_rank + model.qk_rope_head_dim, *pages],
            "files": {path: _sha(text) for path, text in sorted(mine.items())},
        }
    _refuse_twins(builds)
    tables = [{"name": name, "summary": builds[name]["summary"]} for name in sorted(builds)]
    shared = {"__init__.py": '"""Kernels written by mla-codegen; `dispatch` is the way in."""\n'}
    shared["dispatch.py"] = render_dispatch(tables, out.resolve().name)
    shared["op.py"] = render_op(out.resolve().name)
    for name in RUNTIME:
        source = (PACKAGE / "runtime" / name).read_text(encoding="utf-8")
        shared[f"runtime/{name}"] = HEADER.format(name=name) + source
    files |= shared
    files[MANIFEST] = (
        json.dumps(
            {
                "versions": {"mla_codegen": __version__, "black": version("black"), "jinja2": version("jinja2")},
                "templates": template_hashes(),
                "builds": {name: builds[name] for name in sorted(builds)},
                "files": {path: _sha(text) for path, text in sorted(shared.items())},
            },
            indent=2,
        )
        + "\n"
    )
    return files


def _refuse_twins(builds: dict[str, dict]) -> None:
    """Two builds for the same target, heads, row width and page size: the dispatcher could not tell them apart."""
    seen: dict[tuple, str] = {}
    for name, build in sorted(builds.items()):
        key = tuple(build["serves"])
        if key in seen:
            target, heads, row, *page = key
            kv = f"rows of {row}" + (f", pages of {page[0]}" if page else "")
            raise BuildError(
                f"{build['spec']} and {builds[seen[key]]['spec']} both serve {target}, {heads} heads, {kv}\n"
                "  fix: put their shapes into one spec, build them into different folders (--out), or, if one of the\n"
                "  specs is gone, remove its folder of kernels and build again"
            )
        seen[key] = name


def read_manifest(out: Path) -> dict:
    """The manifest of `out`, or {} if nothing was built there."""
    path = out / MANIFEST
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise BuildError(f"{path} cannot be read ({error}).\n  fix: remove it and build all specs again") from error


def listed(manifest: dict, names: set[str] | None = None) -> dict[str, str]:
    """{path: sha256} of what the manifest says is ours: shared files, and those of builds `names` (all if None)."""
    files = dict(manifest.get("files", {}))
    for name, build in manifest.get("builds", {}).items():
        if names is None or name in names:
            files |= build["files"]
    return files


def find_drift(files: dict[str, str], out: Path, names: set[str]) -> list[Drift]:
    """How `out` differs from the fresh build `files` of the specs `names`."""
    manifest = read_manifest(out)
    old = listed(manifest, names)
    interrupted = manifest.get("publishing", {})
    drifts = []
    for path, text in sorted(files.items()):
        have = _read(out / path)
        if have == text:
            continue
        ours = (old.get(path), interrupted.get(path))
        by_hand = path in old and have is not None and _sha(have) not in ours
        kind = "missing" if have is None else "edited" if by_hand else "changed"
        drifts.append(Drift(kind, path, _diff(path, have or "", text)))
    for path in sorted(set(old) - set(files)):
        if (out / path).exists():
            drifts.append(Drift("orphaned", path, ""))
    return drifts


def build(plans: list[Plan], out: Path, *, force: bool = False) -> tuple[dict[str, str], list[str], list[str]]:
    """Build `plans` into `out`: (all files, written, removed). One build at a time: others wait.

    Raises BuildError if a file of ours was edited by hand, unless `force`, or if `out` cannot be written.
    """
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
        out.mkdir(parents=True, exist_ok=True)
        with FileLock(out.parent / f".{out.name}.lock"):
            yield
    except OSError as error:
        raise BuildError(f"cannot write to {out}: {error.strerror or error}") from error


def _publish(files: dict[str, str], out: Path, names: set[str], force: bool) -> tuple[list[str], list[str]]:
    drifts = find_drift(files, out, names)
    edited = [drift.path for drift in drifts if drift.kind == "edited" and drift.path != MANIFEST]
    if edited and not force:
        raise BuildError(
            f"edited by hand since the last build: {', '.join(str(out / path) for path in edited)}\n"
            "  fix: move the change into a template or the spec, or build with --force to overwrite it"
        )
    written = [drift.path for drift in drifts if drift.kind != "orphaned"]
    removed = [drift.path for drift in drifts if drift.kind == "orphaned"]
    if written and (out / MANIFEST).exists():  # so that a build after an interrupted one knows the files for ours
        intent = {**read_manifest(out), "publishing": {path: _sha(files[path]) for path in written}}
        _write(out / MANIFEST, json.dumps(intent, indent=2) + "\n")
    for path in sorted(written, key=lambda path: path == MANIFEST):
        _write(out / path, files[path])
    if written and MANIFEST not in written:
        _write(out / MANIFEST, files[MANIFEST])
    for path in removed:
        (out / path).unlink()
        if not any((out / path).parent.iterdir()):
            (out / path).parent.rmdir()
    return written, removed


def _write(path: Path, text: str) -> None:
    """Atomically: a reader sees the old file or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8", newline="\n") as file:
            file.write(text)
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def _read(path: Path) -> str | None:
    try:
        return path.read_bytes().decode("utf-8", errors="replace")
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
        return None


def _sha(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _diff(path: str, have: str, want: str) -> str:
    lines = difflib.unified_diff(
        have.splitlines(keepends=True), want.splitlines(keepends=True), f"{path} (on disk)", f"{path} (fresh build)"
    )
    return "".join(lines)
