"""Publishing a build: what is written, what is drift, what is pruned, and what a crash leaves behind."""

import ast
import importlib
import json
import multiprocessing
import os
import shutil
import time
from collections.abc import Callable
from multiprocessing.synchronize import Event
from pathlib import Path

import pytest
from builds import SHAPES, build, plan_of, spec_of
from filelock import FileLock

from mla_codegen.plan.resolve import Plan, make_plan
from mla_codegen.publish import write
from mla_codegen.publish.write import BuildError, find_drift, fresh_build
from mla_codegen.render import templates
from mla_codegen.runtime import tables as runtime_tables
from mla_codegen.spec.load import load_spec

ROOT = Path(__file__).parents[2]

KERNEL = "small/bf16_b4_kv1024.py"


@pytest.fixture(scope="module")
def plan() -> Plan:
    return plan_of(spec_of())


@pytest.fixture(scope="module")
def fewer() -> Plan:
    """The same spec with one shape less."""
    return plan_of(spec_of(shapes=SHAPES[:1]))


@pytest.fixture
def out(tmp_path: Path, plan: Plan) -> Path:
    build([plan], tmp_path / "generated")
    return tmp_path / "generated"


def tree(folder: Path) -> dict[str, str]:
    return {path.relative_to(folder).as_posix(): path.read_text() for path in folder.rglob("*") if path.is_file()}


def drift(plan: Plan, out: Path) -> dict[str, str]:
    return {one.path: one.kind for one in find_drift(fresh_build([plan], out), out, {plan.name})}


def test_what_is_on_disk_is_what_was_made(out: Path, plan: Plan) -> None:
    assert tree(out) == fresh_build([plan], out)
    assert drift(plan, out) == {}


def test_building_again_writes_nothing(out: Path, plan: Plan) -> None:
    before = {path: path.stat().st_mtime_ns for path in out.rglob("*.py")}
    assert build([plan], out) == ([], [])
    assert {path: path.stat().st_mtime_ns for path in out.rglob("*.py")} == before


def test_only_what_changed_is_written(out: Path, plan: Plan) -> None:
    (out / KERNEL).unlink()
    assert build([plan], out) == ([KERNEL], [])


def test_missing(out: Path, plan: Plan) -> None:
    (out / KERNEL).unlink()
    assert drift(plan, out) == {KERNEL: "missing"}


def test_edited_by_hand(out: Path, plan: Plan) -> None:
    path = out / KERNEL
    path.write_text(path.read_text().replace("num_warps=4", "num_warps=8"))
    (found,) = find_drift(fresh_build([plan], out), out, {plan.name})
    assert (found.kind, found.path) == ("edited", KERNEL)
    assert "num_warps=8" in found.diff
    with pytest.raises(BuildError, match=r"edited by hand.*b4_kv1024\.py\n  fix: .*--force"):
        build([plan], out)
    assert "num_warps=8" in path.read_text()
    build([plan], out, force=True)
    assert drift(plan, out) == {}


def test_changed_since_the_build(out: Path, fewer: Plan) -> None:
    """Another spec than the one that was built: tables and manifest differ, and two kernels are nobody's now."""
    assert drift(fewer, out) == {
        "manifest.json": "changed",
        "small/__init__.py": "changed",
        "small/bf16_b4_kv8192.py": "orphaned",
        "small/fp8_e4m3fn_b4_kv8192.py": "orphaned",
    }


def test_orphans_are_pruned_and_nobody_elses_files(out: Path, fewer: Plan) -> None:
    (out / "small" / "notes.py").write_text("mine")
    (out / "mine.txt").write_text("mine")
    _, removed = build([fewer], out)
    assert removed == ["small/bf16_b4_kv8192.py", "small/fp8_e4m3fn_b4_kv8192.py"]
    left = tree(out)
    assert left["small/notes.py"] == left["mine.txt"] == "mine"
    assert set(left) - {"small/notes.py", "mine.txt"} == set(fresh_build([fewer], out))


def test_one_build_after_the_other_keeps_both(out: Path, plan: Plan) -> None:
    other = plan_of(spec_of("gfx942", shapes=SHAPES[:1]), "amd.yaml")
    build([other], out)
    assert drift(plan, out) == drift(other, out) == {}
    assert set(json.loads((out / "manifest.json").read_text())["builds"]) == {"amd", "small"}
    assert "from . import amd, small" in (out / "dispatch.py").read_text()


def test_the_order_of_builds_does_not_show(tmp_path: Path, plan: Plan) -> None:
    other = plan_of(spec_of("gfx942", shapes=SHAPES[:1]), "amd.yaml")
    for name, order in (("a", [plan, other]), ("b", [other, plan])):
        for one in order:
            build([one], tmp_path / name / "generated")
    build([plan, other], tmp_path / "c" / "generated")
    assert tree(tmp_path / "a") == tree(tmp_path / "b") == tree(tmp_path / "c")


def test_a_check_of_one_spec_does_not_see_anothers_orphans(out: Path, plan: Plan) -> None:
    other = plan_of(spec_of("gfx942", shapes=SHAPES), "amd.yaml")
    build([other], out)
    less = plan_of(spec_of("gfx942", shapes=SHAPES[:1]), "amd.yaml")
    assert "orphaned" in drift(less, out).values()
    assert drift(plan, out) == {}


def test_specs_that_no_call_could_tell_apart_are_refused(out: Path) -> None:
    twin = plan_of(spec_of(), "twin.yaml")
    before = tree(out)
    with pytest.raises(BuildError, match=r"twin\.yaml and small\.yaml both serve portable, 16 heads"):
        build([twin], out)
    assert tree(out) == before


def test_the_manifest_names_hashes_and_versions_and_no_place_or_time(out: Path) -> None:
    manifest = json.loads((out / "manifest.json").read_text())
    assert set(manifest["versions"]) == {"mla_codegen", "black"}  # black is pinned; other numbers change no byte
    for path, digest in write.listed(manifest).items():
        assert write._sha((out / path).read_text()) == digest
    text = "".join(tree(out).values())
    assert str(out.parent) not in text
    assert time.strftime("%Y-%m-%d") not in text


@pytest.mark.parametrize("then", ["same", "back"])
@pytest.mark.parametrize("writes", [0, 1, 5])
def test_a_crash_leaves_whole_files_and_the_next_build_repairs(
    out: Path, plan: Plan, monkeypatch: pytest.MonkeyPatch, writes: int, then: str
) -> None:
    changed = plan_of(spec_of(shapes=SHAPES[:1], defaults={"block_n": 16, "optimizations": ["packed_fp8"]}))
    before, wanted = tree(out), fresh_build([changed], out)
    replace, done = os.replace, []

    def crash(source: str, target: str) -> None:
        if len(done) == writes:
            raise KeyboardInterrupt
        done.append(target)
        replace(source, target)

    monkeypatch.setattr(os, "replace", crash)
    with pytest.raises(KeyboardInterrupt):
        build([changed], out)
    left = tree(out)
    assert set(left) == set(before)  # no temporary file stays
    manifest = json.loads(left.pop("manifest.json"))
    assert all(text in (before[path], wanted.get(path)) for path, text in left.items())
    assert manifest.pop("publishing", {}).keys() <= wanted.keys()  # what the crashed build was about to write
    assert manifest == json.loads(before["manifest.json"])
    monkeypatch.undo()
    build([changed if then == "same" else plan], out)
    assert tree(out) == (wanted if then == "same" else before)


def test_a_build_whose_folder_was_removed_is_forgotten(out: Path, plan: Plan) -> None:
    renamed = plan_of(spec_of(), "renamed.yaml")
    with pytest.raises(BuildError, match="both serve"):
        build([renamed], out)
    shutil.rmtree(out / "small")
    build([renamed], out)
    assert "from . import renamed\n" in (out / "dispatch.py").read_text()
    assert set(json.loads((out / "manifest.json").read_text())["builds"]) == {"renamed"}


def _hold(lock: str, held: Event, seconds: float) -> None:
    with FileLock(lock):
        held.set()
        time.sleep(seconds)


def test_a_build_waits_for_another(out: Path, plan: Plan) -> None:
    context = multiprocessing.get_context("spawn")
    held = context.Event()
    holder = context.Process(target=_hold, args=(str(out.parent / ".generated.lock"), held, 0.5))
    holder.start()
    assert held.wait(60)
    started = time.perf_counter()
    build([plan], out)
    assert time.perf_counter() - started > 0.2
    holder.join()


def test_a_folder_that_cannot_be_written(tmp_path: Path, plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "mkdir", refuse)  # a read-only mode would not stop root
    with pytest.raises(BuildError, match=r"cannot write to .*generated: Permission denied"):
        build([plan], tmp_path / "generated")


def test_a_file_where_the_folder_should_be(tmp_path: Path, plan: Plan) -> None:
    (tmp_path / "generated").write_text("mine")
    with pytest.raises(BuildError, match="generated is a file; the kernels need a folder"):
        build([plan], tmp_path / "generated")
    assert (tmp_path / "generated").read_text() == "mine"


BUILD = {"spec": "a.yaml", "summary": "", "serves": ["portable", 16, 576], "files": {}}
BROKEN = {
    "nothing": "", "no JSON": "{", "a list": "[]", "a number": "1", "null": "null", "too deep": "[" * 100_000,
    "binary": "\x00\udcff", "someone's": '{"name": "app", "icons": []}', "builds in a list": '{"builds": []}',
    "a build that is none": '{"builds": {"a": 1}}', "a build without files": '{"builds": {"a": {"spec": "a.yaml"}}}',
    "files without hashes": '{"files": ["op.py"]}', "hashes that are none": '{"files": {"op.py": 1}}',
    "files elsewhere": '{"files": {"../op.py": ""}}', "files anywhere": '{"files": {"/etc/op.py": ""}}',
    "a build elsewhere": json.dumps({"builds": {"../a": BUILD}}), "publishing": '{"publishing": []}',
    "a build that serves a list": json.dumps({"builds": {"a": {**BUILD, "serves": [["portable"]]}}}),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_a_manifest_that_is_none_of_ours(out: Path, plan: Plan, name: str) -> None:
    (out / "manifest.json").write_text(BROKEN[name], encoding="utf-8", errors="surrogateescape")
    before = {path: path.read_bytes() for path in out.rglob("*.py")}
    for act in (lambda: build([plan], out, force=True), lambda: drift(plan, out)):
        with pytest.raises(BuildError, match=r"manifest\.json cannot be read: .*\n  fix: "):
            act()
    assert {path: path.read_bytes() for path in out.rglob("*.py")} == before


def test_files_of_others_are_not_replaced(tmp_path: Path, plan: Plan) -> None:
    """Of every kind that a build writes; all are named, and nothing is written."""
    out = tmp_path / "generated"
    theirs = ["op.py", "__init__.py", "runtime/calls.py", KERNEL]
    for path in theirs:
        (out / path).parent.mkdir(parents=True, exist_ok=True)
        (out / path).write_text("mine")
    assert {path for path, kind in drift(plan, out).items() if kind == "foreign"} == set(theirs)
    with pytest.raises(BuildError, match="not mla-codegen's") as refused:
        build([plan], out)
    assert all(str(out / path) in str(refused.value) for path in theirs)
    assert tree(out) == dict.fromkeys(theirs, "mine")
    build([plan], out, force=True)
    assert tree(out) == fresh_build([plan], out)


def test_a_file_that_came_where_a_new_kernel_goes(out: Path, plan: Plan, fewer: Plan) -> None:
    build([fewer], out)
    (out / "small/bf16_b4_kv8192.py").write_text("mine")
    with pytest.raises(BuildError, match=r"in the way.*small/bf16_b4_kv8192\.py"):
        build([plan], out)
    assert (out / "small/bf16_b4_kv8192.py").read_text() == "mine"


def make_folder(path: Path) -> None:
    path.mkdir()


def make_file(path: Path) -> None:
    path.write_text("mine")


def make_dangling(path: Path) -> None:
    path.symlink_to("nowhere")


def make_loop(path: Path) -> None:
    path.symlink_to(path)


@pytest.mark.parametrize(
    ("place", "make", "says"),
    [("op.py", make_folder, "op.py is no file"), ("small", make_file, "small is no folder")]
    + [("runtime", make_file, "runtime is no folder"), ("runtime", make_loop, "runtime is no folder")]
    + [
        (place, make, "is no file")
        for place in ("dispatch.py", KERNEL)
        for make in (make_dangling, make_loop, os.mkfifo)
    ],
)
def test_what_is_no_file_where_one_goes(
    out: Path, plan: Plan, place: str, make: Callable[[Path], None], says: str
) -> None:
    """For `build`, with --force too, and for `check`."""
    path = out / place
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    make(path)
    for act in (lambda: build([plan], out, force=True), lambda: drift(plan, out)):
        with pytest.raises(BuildError, match=rf"{says}, where one of the build belongs\n  fix: move it away"):
            act()


def test_a_file_that_cannot_be_read(out: Path, plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path) -> bytes:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "read_bytes", refuse)  # a mode would not stop root
    with pytest.raises(BuildError, match=r"__init__\.py cannot be read: Permission denied"):
        find_drift({"__init__.py": ""}, out, {plan.name})


def test_a_first_build_that_crashed_is_ours(
    tmp_path: Path, plan: Plan, fewer: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next one, of another spec even, replaces what it left."""
    out, replace = tmp_path / "generated", os.replace

    def crash(source: str, target: Path) -> None:
        if Path(target).name == "op.py":
            raise KeyboardInterrupt
        replace(source, target)

    monkeypatch.setattr(os, "replace", crash)
    with pytest.raises(KeyboardInterrupt):
        build([plan], out)
    monkeypatch.undo()
    changed = plan_of(spec_of(shapes=SHAPES[:1], defaults={"block_n": 16, "optimizations": ["packed_fp8"]}))
    build([changed], out)
    assert (out / KERNEL).read_text() == fresh_build([changed], out)[KERNEL]


@pytest.fixture
def two(tmp_path: Path, plan: Plan, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with two builds, made by another version of the generator; then this version comes."""
    out = tmp_path / "two_versions"
    with monkeypatch.context() as older:
        for module in (write, templates, runtime_tables):
            older.setattr(module, "VERSION", 0)
        build([plan, OTHER], out)
    return out


OTHER = plan_of(spec_of("gfx942", shapes=SHAPES[:1]), "amd.yaml")


def test_half_an_upgrade_is_refused(two: Path, plan: Plan) -> None:
    """With --force too: the other build could not be imported. The command that is named mends it."""
    before = tree(two)
    command = f"mla-codegen build {two.parent}/amd.yaml {two.parent}/small.yaml --out {two}"
    for force in (False, True):
        with pytest.raises(BuildError, match=r"another version of mla-codegen: \S*amd/__init__\.py\n") as refused:
            build([plan], two, force=force)
        assert command in str(refused.value)
    assert tree(two) == before
    build([plan, OTHER], two)
    assert drift(plan, two) == drift(OTHER, two) == {}


def test_a_build_of_before_there_were_versions(two: Path, plan: Plan) -> None:
    manifest = json.loads((two / "manifest.json").read_text())
    for one in manifest["builds"].values():
        del one["tables"]
    (two / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(BuildError, match="another version"):
        build([plan], two)
    shutil.rmtree(two / "amd")  # its spec is gone
    build([plan], two)
    assert drift(plan, two) == {}


def test_drift_says_that_another_build_is_of_another_version(two: Path, plan: Plan) -> None:
    """Even where all files of this build are as they should be."""
    files = fresh_build([plan], two)
    for path, text in files.items():
        (two / path).write_text(text)
    assert drift(plan, two) == {"amd/__init__.py": "outdated"}
    assert "amd.yaml" in write.rebuild_command(files, two)


def test_the_dispatcher_refuses_tables_of_another_version(
    two: Path, plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder that was half copied: in words, with the command, before it looks at anything else of the tables."""
    for path, text in fresh_build([plan], two).items():
        (two / path).write_text(text)
    (two / "amd" / "__init__.py").write_text('SPEC = "amd.yaml"\n')
    monkeypatch.syspath_prepend(str(two.parent))
    with pytest.raises(ImportError, match=r"two_versions\.amd: .*`mla-codegen build amd\.yaml small\.yaml`"):
        importlib.import_module("two_versions.dispatch")


# What the runtime, the tables and the kernels of a build say to one another, as of VERSION: who changes it raises that
# number, so that builds of before are refused instead of failing.
INTERFACE = {
    "version": 4,
    "tables": "BATCH_INVARIANT BLOCKS GENERAL HEADS KV LATENT OUT PAGE_SIZE Q ROPE SHAPES SPEC STRIDED TARGET "
    "TOKEN_SHAPES TOPK TRITON VERSION",
    "general": "balanced balanced_rows block_n direct head_blocks resident split units",
    "from runtime": "descriptors.Tiles descriptors.aligned scratch.carve",
    "run": "q kv qo_indptr kv_indptr kv_visible kv_scale sm_scale out lse [splits] workspace out_layout",
    "scratch": "total_q [splits]",
}


def test_the_version_rises_with_the_interface(tmp_path: Path) -> None:
    plans = [make_plan(load_spec(path).spec, path.name) for path in (ROOT / "specs" / "h200.yaml",)]
    files = fresh_build(plans, tmp_path / "generated")
    tables, imported, runs, scratches = ast.parse(files["h200/__init__.py"]), set(), set(), set()
    general = next(
        node.value for node in tables.body if isinstance(node, ast.Assign) and node.targets[0].id == "GENERAL"
    )
    for path, text in files.items():
        if not path.startswith("h200/") or path.endswith("__init__.py"):
            continue
        for node in ast.parse(text).body:
            if isinstance(node, ast.ImportFrom) and node.level:
                imported |= {f"{node.module.split('.')[-1]}.{alias.name}" for alias in node.names}
            elif isinstance(node, ast.FunctionDef) and node.name in ("run", "scratch"):
                names = [argument.arg for argument in node.args.args]
                (runs if node.name == "run" else scratches).add(" ".join(names).replace(" splits", " [splits]"))
    assert {
        "version": runtime_tables.VERSION,
        "tables": " ".join(sorted(node.targets[0].id for node in tables.body if isinstance(node, ast.Assign))),
        "general": " ".join(sorted({key.arg for record in general.values for key in record.keywords})),
        "from runtime": " ".join(sorted(imported)),
        "run": max(runs, key=len),
        "scratch": max(scratches, key=len),
    } == INTERFACE
