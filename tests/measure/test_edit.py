"""Winners in the spec's text: only the shapes' lines change, comments and order stay, and the plan agrees."""

import difflib
import stat
from pathlib import Path

import pytest
import yaml
from tune_fakes import SPEC, FakeMachine, search, space

from mla_codegen.measure.tune.apply import ApplyError, diff, new_text, tuned_shapes, write
from mla_codegen.measure.tune.edit import EditError, Tuned, edit
from mla_codegen.measure.tune.search import Found
from mla_codegen.plan.resolve import make_plan
from mla_codegen.spec.load import load_spec, parse_spec

KVS = ["fp8_e4m3fn", "bf16"]
WHERE, DAY = "NVIDIA H200, triton 3.6.0", "2026-11-30"

BLOCKS = """# head
target:   sm_80   # odd   spacing
dtypes: { kv: [fp8_e4m3fn, bf16] }
defaults:
    optimizations:   [exp2, packed_fp8]
shapes:   # the shapes
-   batch: 4
    # in between
    kv_len: 1024   # short
    splits: 16     # by hand
# before the second

-   batch: 64
    kv_len: 8192
    optimizations:
    - exp2
    - packed_fp8
    per_kv:
        bf16:
            splits: 3   # three

# the end
"""


def changed(text: str, *winners: Tuned, day: str = DAY) -> tuple[str, list[str]]:
    """The new text, and its changed lines as a diff shows them."""
    new = edit(text, list(winners), KVS, WHERE, day)
    lines = difflib.unified_diff(text.splitlines(), new.splitlines(), n=0, lineterm="")
    return new, [line for line in lines if not line.startswith(("---", "+++", "@@"))]


def test_one_line_a_shape() -> None:
    new, lines = changed(SPEC, Tuned(4, 8192, {"fp8_e4m3fn": {"splits": 8}, "bf16": {"splits": 8}}))
    assert lines == [
        "+# tuned fp8_e4m3fn on NVIDIA H200, triton 3.6.0 (2026-11-30): 4x8192",
        "+# tuned bf16 on NVIDIA H200, triton 3.6.0 (2026-11-30): 4x8192",
        "-  - {batch: 4, kv_len: 8192, splits: 16}  # long",
        "+  - {batch: 4, kv_len: 8192, splits: 8}   # long",
    ]
    assert yaml.safe_load(new)["shapes"][0] == {"batch": 4, "kv_len": 8192, "splits": 8}


def test_dtypes_that_differ() -> None:
    per_kv = {"fp8_e4m3fn": {"splits": 8, "num_stages": 3}, "bf16": {"splits": 32}}
    new, lines = changed(SPEC, Tuned(4, 8192, per_kv))
    want = "{batch: 4, kv_len: 8192, splits: 8, per_kv: {fp8_e4m3fn: {num_stages: 3}, bf16: {splits: 32}}}"
    assert lines[-1] == f"+  - {want} # long"
    again, lines = changed(new, Tuned(4, 8192, {"bf16": {"splits": 4}}), day="2026-12-01")
    assert "bf16: {splits: 4}" in again and "splits: 8, per_kv" in again
    assert "+# tuned bf16 on NVIDIA H200, triton 3.6.0 (2026-12-01): 4x8192" in lines
    both = Tuned(4, 8192, {"fp8_e4m3fn": {"splits": 2, "num_stages": 2}, "bf16": {"splits": 2, "num_stages": 2}})
    last, _ = changed(again, both)
    assert "{batch: 4, kv_len: 8192, splits: 2, num_stages: 2}" in last  # what all dtypes say, none says alone
    assert [line for line in last.splitlines() if "tuned" in line] == [
        "# tuned fp8_e4m3fn on NVIDIA H200, triton 3.6.0 (2026-11-30): 4x8192",
        "# tuned bf16 on NVIDIA H200, triton 3.6.0 (2026-11-30): 4x8192",
    ]


def test_notes_of_other_shapes_stay() -> None:
    new, _ = changed(SPEC, Tuned(4, 8192, {"bf16": {"splits": 8}}), Tuned(64, 1024, {"bf16": {"splits": 2}}))
    newer, lines = changed(new, Tuned(4, 8192, {"bf16": {"splits": 4}}), day="2027-01-01")
    assert [line for line in lines if "tuned" in line] == [
        "-# tuned bf16 on NVIDIA H200, triton 3.6.0 (2026-11-30): 4x8192 64x1024",
        "+# tuned bf16 on NVIDIA H200, triton 3.6.0 (2026-11-30): 64x1024",
        "+# tuned bf16 on NVIDIA H200, triton 3.6.0 (2027-01-01): 4x8192",
    ]
    assert newer.index("# tuned") > newer.index("bf16: {block_n: 32}")


def test_block_style_and_comments_inside() -> None:
    winner = Tuned(4, 1024, {"fp8_e4m3fn": {"splits": 8}, "bf16": {"splits": 8, "num_warps": 8}})
    other = Tuned(64, 8192, {"fp8_e4m3fn": {"splits": 9, "num_stages": 3}, "bf16": {"splits": 8}})
    new, lines = changed(BLOCKS, winner, other)
    assert [line for line in lines if "tuned" not in line] == [
        "-    splits: 16     # by hand",
        "+    splits: 8      # by hand",
        "+    per_kv: {bf16: {num_warps: 8}}",
        "+    splits: 9",
        "-            splits: 3   # three",
        "+            splits: 8   # three",
        "+        fp8_e4m3fn: {num_stages: 3}",
    ]
    assert yaml.safe_load(new)["shapes"][1]["per_kv"]["fp8_e4m3fn"] == {"num_stages": 3}


def test_line_endings_stay() -> None:
    new, _ = changed(BLOCKS.replace("\n", "\r\n"), Tuned(4, 1024, {"bf16": {"splits": 8}}))
    assert new.count("\n") == new.count("\r\n") == BLOCKS.count("\n") + 2


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("shapes: [{batch: 4, kv_len: 8}, {batch: 5, kv_len: 8}]\n", "no list with a line"),
        ("x: &a {batch: 4, kv_len: 8}\nshapes:\n  - *a\n", "another place, under an anchor"),
        ("x: &a {kv_len: 8}\nshapes:\n  - <<: *a\n    batch: 4\n", "not written out"),
        ("x: &a {splits: 8}\nshapes:\n  - <<: *a\n    batch: 4\n    kv_len: 8\n", "mean nothing without others"),
        ("shapes:\n  - {batch: 4, kv_len: 9}\n", "not written out"),
    ],
)
def test_what_cannot_be_edited_by_lines(text: str, why: str) -> None:
    with pytest.raises(EditError, match=why):
        edit(text, [Tuned(4, 8, {"bf16": {"splits": 2}})], KVS, WHERE, DAY)


def founds(tmp_path: Path, text: str = SPEC) -> list[Found]:
    """Searches of both shapes in both dtypes."""
    return [
        search(FakeMachine(), tmp_path / "store", trials=16, where=space(kv, index, text)).run()
        for kv in KVS
        for index in (0, 1)
    ]


def test_the_written_spec_gives_the_kernels_that_were_measured(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(SPEC)
    path.chmod(0o640)
    found = founds(tmp_path)
    text, new = new_text(path, found, WHERE, DAY)
    assert text == SPEC and path.read_text() == SPEC
    shown = diff(path, text, new)
    assert shown.startswith(f"--- {path}\n+++ {path} (tuned)\n") and "# a spec of the tests" not in shown
    write(path, new)
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    assert list(tmp_path.glob(".mine*")) == []
    plan = make_plan(load_spec(path).spec, str(path))
    for one in found:
        assert one.improved
        (kernel,) = [
            k
            for k in plan.shaped(one.space.kv)
            if (k.batch, k.kv_len) == (one.space.shape.batch, one.space.shape.kv_len)
        ]
        won = one.winner.kernel
        for name in ("splits", "block_n", "num_warps", "num_stages", "family"):
            assert getattr(kernel, name) == getattr(won, name)
    unchanged = [line for line in SPEC.splitlines() if not line.startswith("  - {")]
    assert [line for line in new.splitlines() if not line.startswith(("  - {", "# tuned"))] == unchanged


def test_tuning_again_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(SPEC)
    write(path, new_text(path, founds(tmp_path), WHERE, DAY)[1])
    best = path.read_text()
    again = founds(tmp_path, best)
    kept = [found for found in again if not found.improved]
    text, new = new_text(path, kept, WHERE, "2027-01-01")
    assert text == new == best and tuned_shapes(kept) == []


def test_a_file_that_changed_meanwhile(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    found = founds(tmp_path)
    path.write_text(SPEC.replace("# a spec of the tests", "# edited"))
    assert "# edited" in new_text(path, found, WHERE, DAY)[1]
    path.write_text(SPEC.replace("[exp2, packed_fp8]", "[packed_fp8]"))
    with pytest.raises(ApplyError, match="would not be the kernel"):
        new_text(path, found, WHERE, DAY)
    path.write_text(SPEC.replace("kv_len: 8192", "kv_len: 4096"))
    with pytest.raises(ApplyError, match=r"not written out[\s\S]*write by hand\n    4x8192, fp8_e4m3fn: "):
        new_text(path, found, WHERE, DAY)
    path.write_text("target: [")
    with pytest.raises(ApplyError, match="left as it is"):
        new_text(path, found, WHERE, DAY)
    assert path.read_text() == "target: ["
    assert parse_spec(SPEC, "x.yaml").spec.shapes
