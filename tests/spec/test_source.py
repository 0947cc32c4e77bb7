"""Reading spec files: what is refused before it is parsed, and where things are."""

import time
from pathlib import Path

import pytest

from mla_codegen.spec.errors import SpecError
from mla_codegen.spec.load import parse_spec
from mla_codegen.spec.source import MAX_BYTES, parse_source, read_source
from mla_codegen.spec.tree import TreeBuilder

BROKEN = Path(__file__).parent / "broken_specs"


def refusal(path: str | Path) -> str:
    with pytest.raises(SpecError) as caught:
        read_source(path)
    return str(caught.value)


def test_places_of_values_and_keys() -> None:
    text = "target: sm_90\nmodel:\n  num_heads: 16\nshapes:\n- {batch: 4, kv_len: 1024}\n- batch: 8\n  kv_len: 'é'\n"
    source = parse_source(text, "a.yaml")
    assert source.data == {
        "target": "sm_90",
        "model": {"num_heads": 16},
        "shapes": [{"batch": 4, "kv_len": 1024}, {"batch": 8, "kv_len": "é"}],
    }
    assert source.place(("target",)) == (1, 9)
    assert source.place(("target",), at_key=True) == (1, 1)
    assert source.place(("model", "num_heads")) == (3, 14)
    assert source.place(("shapes", 0)) == (5, 3)
    assert source.place(("shapes", 0, "kv_len"), at_key=True) == (5, 14)
    assert source.place(("shapes", 1, "kv_len")) == (7, 11)


def test_the_place_of_what_is_absent_is_what_is_around_it() -> None:
    source = parse_source("target: sm_90\nshapes:\n- {batch: 4}\n", "a.yaml")
    assert source.place(("shapes", 0, "kv_len", "deeper"), at_key=True) == (3, 3)
    assert source.place(("shapes", 7)) == (3, 1)
    assert source.place(("nothing",), at_key=True) == (1, 1)


def test_columns_count_characters_not_bytes() -> None:
    source = parse_source("{größe: ü, batch: 4}\n", "a.yaml")
    assert source.place(("batch",), at_key=True) == (1, 12)


def test_an_alias_has_its_own_place_and_its_parts_have_the_anchors() -> None:
    source = parse_source("a: &x {b: 1}\nc: *x\nd: {<<: *x, e: 2}\n", "a.yaml")
    assert source.place(("c",)) == (2, 4)
    assert source.place(("c", "b")) == (1, 11)
    assert source.place(("d", "b"), at_key=True) == (1, 8)
    assert source.data["d"] == {"e": 2, "b": 1}


def test_a_byte_order_mark_and_other_line_ends_are_fine(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_bytes("\ufefftarget: sm_90\r\nmodel:\r\n  num_heads: 16\r\n".encode())
    source = read_source(path)
    assert source.place(("target",), at_key=True) == (1, 1)
    assert source.place(("model", "num_heads")) == (3, 14)


NUMBERS = [("16", 16), ("-3", -3), ("+5", 5), ("0", 0), ("1.5", 1.5), (".5", 0.5)]
WORDS = [("true", True), ("No", False), ("~", None), ("'16'", "16"), ('""', ""), ("1e3x", "1e3x"), ("1e999", "1e999")]
WORDS += [(text, text) for text in ("2026-01-01", "0x", "1_", "-", "=", "0b2", "_1", ".", "e3")]


@pytest.mark.parametrize(("text", "value"), NUMBERS + WORDS)
def test_how_scalars_are_read(text: str, value: object) -> None:
    builder = TreeBuilder(f"[{text}]")
    node = builder.document()
    assert node is not None
    assert node.value == [value] and isinstance(node.children[0].value, type(value))
    assert not builder.flaws


ODD = {"010": 8, "0o17": 15, "0x1F": 31, "0b101": 5, "1:30": 90, "-1:30": -90, "08": 8, "1_024": 1024, "1e3": 1000}
ODD |= {"2.5e-1": 0.25, "-0x10": -16}


@pytest.mark.parametrize(("text", "number"), ODD.items())
def test_odd_numbers_are_read_and_refused(text: str, number: float) -> None:
    builder = TreeBuilder(f"[{text}]")
    node = builder.document()
    assert node is not None and node.value == [number]
    [(problem, place)] = builder.flaws
    assert problem.fix.split(",")[0] == f"write {number}" and place == (1, 2)


def test_a_missing_file_suggests_its_neighbour(tmp_path: Path) -> None:
    (tmp_path / "mi300.yaml").write_text("")
    assert refusal(tmp_path / "m300.yaml").endswith("m300.yaml: no such file\n  fix: did you mean `mi300.yaml`?")
    assert refusal(tmp_path / "none" / "a.yaml").endswith("a.yaml: no such file")


def test_a_directory_names_its_specs(tmp_path: Path) -> None:
    assert refusal(tmp_path).endswith("this is a directory, not a spec")
    (tmp_path / "mi300.yaml").write_text("")
    assert refusal(tmp_path).endswith("fix: name one of its files: mi300.yaml")


def test_an_unreadable_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied")  # simulated, because root reads everything

    monkeypatch.setattr(Path, "open", refuse)
    assert refusal(tmp_path / "a.yaml").endswith("a.yaml: cannot be read: permission denied")


def test_file_names_that_the_system_refuses(tmp_path: Path) -> None:
    assert "cannot be read" in refusal("a\x00b.yaml")
    assert "cannot be read: file name too long" in refusal("a" * 5000)
    loop = tmp_path / "loop.yaml"
    loop.symlink_to(loop)
    assert "cannot be read: too many levels of symbolic links" in refusal(loop)
    (tmp_path / "file").write_text("")
    assert "cannot be read: not a directory" in refusal(tmp_path / "file" / "a.yaml")


def test_a_large_file_is_refused_unread(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_bytes(b"x" * 10_000_000)
    start = time.process_time()
    message = f"{path}: the file is larger than 50,000 bytes, the most that a spec may have"
    assert refusal(path).splitlines()[0] == message
    assert time.process_time() - start < 0.5
    path.write_bytes(b"#" * (MAX_BYTES + 1))
    assert "larger than" in refusal(path)
    path.write_bytes(b"#" * MAX_BYTES)
    assert "only comments" in refusal(path)


def test_an_endless_file_is_refused() -> None:
    assert "larger than" in refusal("/dev/zero")


JUNK = {
    "letters": "a" * MAX_BYTES,
    "brackets": "[" * MAX_BYTES,
    "dashes": "- " * (MAX_BYTES // 2),
    "colons": ":" * MAX_BYTES,
    "flow list": "[" + "1," * (MAX_BYTES // 2 - 1),
    "keys": "".join(f"k{i}: 1\n" for i in range(4_000)),
    "digits": "a: " + "9" * (MAX_BYTES - 3),
    "base 60": "a: " + "1:" * (MAX_BYTES // 2 - 3) + "1",
    "groups": "a: " + "1_" * (MAX_BYTES // 2 - 3),
    "documents": "---\n" * (MAX_BYTES // 4),
    "aliases": "- &a x\n" + "- *a\n" * 8_000,
    "shapes": "target: sm_90\nshapes:\n" + "- {bach: 1, kv_len: yes}\n" * 1_900,
}


@pytest.mark.parametrize("kind", JUNK)
def test_the_largest_junk_is_answered_soon(kind: str) -> None:
    start = time.process_time()
    with pytest.raises(SpecError):
        parse_spec(JUNK[kind], "a.yaml")
    assert time.process_time() - start < 5  # about one second where nothing else runs
