"""Publishing a build: what is written, what is drift, what is pruned, and what a crash leaves behind."""

import json
import multiprocessing
import os
import shutil
import time
from multiprocessing.synchronize import Event
from pathlib import Path

import pytest
from builds import SHAPES, build, plan_of, spec_of
from filelock import FileLock

from mla_codegen.plan.resolve import Plan
from mla_codegen.publish import write
from mla_codegen.publish.write import BuildError, find_drift, fresh_build

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
    assert set(manifest["versions"]) == {"mla_codegen", "black", "jinja2"}
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
    with pytest.raises(BuildError, match="cannot"):
        build([plan], tmp_path / "generated")
    assert (tmp_path / "generated").read_text() == "mine"


def test_a_manifest_that_is_not_json(out: Path, plan: Plan) -> None:
    (out / "manifest.json").write_text("{")
    with pytest.raises(BuildError, match=r"manifest\.json cannot be read .*\n  fix: remove it"):
        build([plan], out)
