"""Specs that load, specs that do not, and what is said of them."""

import json
import os
import random
import string
import sys
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from mla_codegen.catalog.optimizations import OPTIMIZATIONS
from mla_codegen.catalog.targets import TARGETS
from mla_codegen.spec.errors import Problem, SpecError, UnknownName, did_you_mean
from mla_codegen.spec.load import apply_optimizations, load_spec, parse_spec, spec_name

TOP = {"target", "model", "dtypes", "defaults", "shapes"}
BROKEN = Path(__file__).parent / "broken_specs"
SHIPPED = Path(__file__).parents[2] / "specs"
VALID = (SHIPPED / "mi300.yaml").read_text()
RENEW = os.environ.get("RENEW") == "1"  # RENEW=1 pytest tests/spec/test_spec.py rewrites the expected messages


def message(text: str) -> str:
    with pytest.raises(SpecError) as caught:
        parse_spec(text, "test.yaml")
    return str(caught.value)


@pytest.mark.parametrize("path", sorted(SHIPPED.glob("*.yaml")), ids=lambda path: path.stem)
def test_shipped_specs_load(path: Path) -> None:
    loaded = load_spec(path)
    assert loaded.spec.name == path.stem
    assert loaded.file == str(path)
    assert loaded.spec.shapes


@pytest.mark.parametrize("name", sorted(path.stem for path in BROKEN.glob("*.yaml")))
def test_broken_spec_says(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(BROKEN)
    with pytest.raises(SpecError) as caught:
        load_spec(f"{name}.yaml")
    expected = BROKEN / f"{name}.expected"
    if RENEW:
        expected.write_text(f"{caught.value}\n", encoding="utf-8")
    assert f"{caught.value}\n" == expected.read_text(encoding="utf-8")


def test_every_expected_message_has_its_spec() -> None:
    assert {path.stem for path in BROKEN.glob("*.expected")} == {path.stem for path in BROKEN.glob("*.yaml")}


def test_anchors_aliases_and_merge_keys_work() -> None:
    text = """\
target: sm_90
defaults: {optimizations: &fast [exp2, fast_rcp]}
shapes:
  - &base {batch: 4, kv_len: 1024, splits: 8, per_kv: {bf16: &tile {block_n: 32}}}
  - {<<: *base, batch: 8}
  - {<<: [{batch: 16, splits: 2}, *base], optimizations: *fast}
"""
    shapes = parse_spec(text, "test.yaml").spec.shapes
    assert [(shape.batch, shape.kv_len, shape.splits) for shape in shapes] == [
        (4, 1024, 8),
        (8, 1024, 8),
        (16, 1024, 2),
    ]
    assert shapes[2].per_kv["bf16"].block_n == 32
    assert shapes[2].optimizations == ["exp2", "fast_rcp"]


def test_json_is_a_spec_too() -> None:
    assert parse_spec('{"target": "sm_90", "shapes": [{"batch": 4, "kv_len": 1024}]}', "a.yaml").spec.target == "sm_90"


def test_later_problems_get_places() -> None:
    loaded = parse_spec(VALID, "mi300.yaml")
    error = loaded.error(
        [
            Problem(("shapes", 1, "block_n"), "inherited, so that the shape is the place"),
            Problem(("shapes", 0, "splits"), "too many", allowed="fewer", fix="splits: 2", at_key=True),
            Problem(("defaults", "per_kv", "bf16", "block_n"), "too big"),
        ]
    )
    lines = VALID.splitlines()
    block_n, shape = (next(i for i, line in enumerate(lines) if word in line) for word in ("bf16: {", "batch: 4,"))
    assert str(error).splitlines() == [
        f"mi300.yaml:{block_n + 1}:{lines[block_n].index('32') + 1}: too big",
        f"mi300.yaml:{shape + 1}:{lines[shape].index('splits') + 1}: too many",
        "  allowed: fewer",
        "  fix: splits: 2",
        f"mi300.yaml:{shape + 2}:5: inherited, so that the shape is the place",
    ]
    assert len(error.places) == len(error.problems) == 3


@pytest.mark.parametrize(
    ("file", "name"), [("specs/mi300.yaml", "mi300"), ("mi300-x.yaml", "mi300_x"), ("a b.v2.yml", "a_b_v2"), ("X", "X")]
)
def test_a_spec_is_named_by_its_file(file: str, name: str) -> None:
    assert spec_name(file) == name


@pytest.mark.parametrize(
    ("file", "reason"),
    [
        ("300mi.yaml", "begins with a digit"),
        ("class.yaml", "is taken by Python"),
        ("mi#300.yaml", "other characters"),
        ("größe.yaml", "other characters"),
    ],
)
def test_a_file_name_that_is_no_package_name(file: str, reason: str) -> None:
    with pytest.raises(SpecError) as caught:
        parse_spec(VALID, file)
    assert reason in str(caught.value)
    fix = str(caught.value).rsplit("rename the file, to ", 1)[1].removesuffix(" say")
    assert spec_name(fix)


def test_layers_of_optimizations() -> None:
    assert apply_optimizations(["a", "b"], None) == ["a", "b"]
    assert apply_optimizations(["a", "b"], []) == []
    assert apply_optimizations(["a", "b"], ["c"]) == ["c"]
    assert apply_optimizations(["a", "b"], ["-a", "+c", "+b"]) == ["b", "c"]


def test_a_shape_may_remove_what_one_kv_type_alone_inherits() -> None:
    text = """\
target: sm_90
dtypes: {kv: [fp8_e4m3fn, bf16]}
defaults:
  optimizations: [exp2]
  per_kv: {fp8_e4m3fn: {optimizations: [+packed_fp8]}}
shapes:
  - {batch: 4, kv_len: 1024, optimizations: [-packed_fp8]}
  - {batch: 8, kv_len: 1024, per_kv: {bf16: {optimizations: [-packed_fp8]}}}
"""
    assert message(text).splitlines()[0] == "test.yaml:8:62: `-packed_fp8` removes what is not inherited here"
    assert message(text).count("test.yaml:") == 1


def test_did_you_mean_a_beginning() -> None:
    assert did_you_mean("fp8", ["bf16", "fp8_e4m3fn"]) == "did you mean `fp8_e4m3fn`?"
    assert did_you_mean("SM_90", TARGETS) == "did you mean `sm_90`?"
    assert did_you_mean("q", TARGETS) == ""


def test_unknown_name_reads_like_a_spec_error() -> None:
    assert str(UnknownName("target", "gfx94", ["gfx942", "sm_90"])).splitlines() == [
        "unknown target `gfx94`",
        "  allowed: gfx942, sm_90",
        "  fix: did you mean `gfx942`?",
    ]


def test_a_deep_stack_is_no_traceback() -> None:
    def deeper(levels: int) -> str:
        return deeper(levels - 1) if levels else message("target: " + "[" * 5000)

    assert "nested more than 20 levels deep" in deeper(sys.getrecursionlimit() // 2)


WORDS = [
    "sm_90",
    "target",
    "shapes",
    "batch",
    "kv_len",
    "0",
    "4",
    "1e3",
    "yes",
    "null",
    "[",
    "]",
    "{",
    "}",
    ":",
    ",",
    "- ",
]
WORDS += [
    "\t",
    "\n",
    "\n  ",
    "*a",
    "&a ",
    "<<: *a",
    "!!int ",
    "'",
    '"',
    "|",
    ">",
    "#",
    "%",
    "\x00",
    "é",
    "\ud800",
    "---\n",
]
words = st.sampled_from(WORDS)


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_mutations_raise_nothing_but_spec_errors(data: st.DataObject) -> None:
    text = VALID
    for _ in range(data.draw(st.integers(1, 6))):
        at = data.draw(st.integers(0, len(text)))
        cut = data.draw(st.integers(0, 12))
        text = text[:at] + data.draw(st.one_of(words, st.text(max_size=4))) + text[at + cut :]
    loads_or_tells(text)


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=200))
def test_bytes_raise_nothing_but_spec_errors(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    path = tmp_path_factory.getbasetemp() / "bytes.yaml"
    path.write_bytes(content)
    with pytest.raises(SpecError):
        load_spec(path)


scalars = st.one_of(
    st.none(), st.booleans(), st.integers(-3, 300), st.floats(allow_nan=False), st.sampled_from(sorted(OPTIMIZATIONS)),
    st.sampled_from(["bf16", "fp8_e4m3fn", "sm_90", "auto", "+exp2", "-exp2", ""]),
)  # fmt: skip
KEYS = ["target", "name", "model", "dtypes", "defaults", "shapes", "kv", "q", "batch", "kv_len", "splits", "per_kv"]
KEYS += ["bf16", "optimizations", "waves_per_eu", "family", "block_n", "qk_rope_head_dim", "x"]
keys = st.sampled_from(KEYS)
trees = st.recursive(scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=5))


@settings(max_examples=100, deadline=None)
@given(st.dictionaries(keys, trees, max_size=6))
def test_any_tree_raises_nothing_but_spec_errors(tree: dict[str, object]) -> None:
    loads_or_tells(yaml.safe_dump(tree))


def loads_or_tells(text: str) -> None:
    try:
        parse_spec(text, "test.yaml")
    except SpecError as error:
        lines = (
            text.count("\n") + text.count("\r") + text.count("\x85") + text.count("\u2028") + text.count("\u2029") + 2
        )
        assert error.problems
        for place in error.places:
            assert place is not None and 1 <= place[0] <= lines and place[1] >= 1
        assert all(line.isprintable() for line in str(error).splitlines())


@st.composite
def specs(draw: st.DrawFn) -> dict[str, object]:
    target = TARGETS[draw(st.sampled_from(sorted(TARGETS)))]
    names = [option.name for option in OPTIMIZATIONS.values() if option.refused_on(target) is None]
    listed = draw(st.lists(st.sampled_from(names), unique=True))
    kv = draw(st.lists(st.sampled_from(["bf16", "fp16", "fp8_e4m3fn", "fp8_e4m3fnuz"]), unique=True, min_size=1))
    knobs = {
        "splits": st.one_of(st.just("auto"), st.integers(1, 1024)),
        "block_n": st.sampled_from([16, 32, 64, 128, 256]),
        "block_h": st.sampled_from([16, 32, 64, 128]),
        "num_warps": st.sampled_from([1, 2, 4, 8, 16]),
        "num_stages": st.integers(1, 8),
        "family": st.sampled_from(target.families),
    }
    if target.waves_per_eu:
        knobs["waves_per_eu"] = st.integers(0, 8)
    layer = st.fixed_dictionaries({}, optional=knobs)
    changes = [f"+{name}" for name in names if name not in listed] + [f"-{name}" for name in listed]
    shape = st.fixed_dictionaries(
        {"batch": st.integers(1, 65536), "kv_len": st.integers(1, 16_777_216)},
        optional=knobs
        | {
            "per_kv": st.dictionaries(st.sampled_from(kv), layer),
            "optimizations": st.lists(st.sampled_from(names), unique=True)
            | st.lists(st.sampled_from(changes), unique=True),
        },
    )
    shapes = draw(st.lists(shape, min_size=1, max_size=5, unique_by=lambda item: (item["batch"], item["kv_len"])))
    return {
        "target": target.name,
        "model": {
            "num_heads": draw(st.integers(1, 128)),
            "kv_lora_rank": draw(st.sampled_from([64, 128, 256, 512, 1024])),
            "qk_rope_head_dim": draw(st.sampled_from([32, 64, 128, 256])),
        },
        "dtypes": {
            "q": draw(st.sampled_from(["bf16", "fp16"])),
            "kv": kv,
            "out": draw(st.sampled_from(["bf16", "fp16"])),
        },
        "defaults": draw(layer)
        | {"optimizations": listed, "per_kv": draw(st.dictionaries(st.sampled_from(kv), layer))},
        "shapes": shapes,
    }


@settings(max_examples=60, deadline=None)
@given(specs(), st.booleans(), st.randoms())
def test_valid_specs_load_whatever_their_order(spec: dict[str, object], flow: bool, rng: random.Random) -> None:
    shuffled = dict(rng.sample(sorted(spec.items()), len(spec)))
    loaded = parse_spec(yaml.safe_dump(shuffled, default_flow_style=flow, sort_keys=False), "test.yaml")
    assert loaded.spec.model_dump(exclude_unset=True, exclude={"name"}) == spec


@settings(max_examples=60, deadline=None)
@given(st.text(alphabet=string.printable, min_size=1, max_size=40).filter(lambda key: key not in TOP))
def test_a_key_of_any_text_is_reported_at_its_place(key: str) -> None:
    text = f"target: sm_90\n{json.dumps(key)}: 1\nshapes: [{{batch: 4, kv_len: 1024}}]\n"
    assert message(text).startswith("test.yaml:2:1: unknown key ")


@pytest.mark.parametrize("spelled", ["3.8", '"3.8"', "'3.8'"])
def test_a_release_of_triton_is_taken_as_it_is_written(spelled: str) -> None:
    """3.8 is a number to YAML, and 3.10 would be 3.1."""
    text = f"target: sm_90\ntriton: {spelled}\nshapes: [{{batch: 4, kv_len: 64}}]\n"
    assert parse_spec(text, "test.yaml").spec.triton == "3.8"


def test_limits_under_one_release_go_before_all_others() -> None:
    limits = """\
limits:
  registers: 168
  vgpr_spills: 0
  per_kv: {bf16: {registers: 160, hot_loop_per_64_rows: {valu: 230, matrix: 68}}}
  per_triton:
    "3.8": {registers: 200, per_kv: {bf16: {hot_loop_per_64_rows: {valu: 250}}}}
    3.9: {vgpr_spills: 2}
"""
    spec = parse_spec(f"target: sm_90\nshapes: [{{batch: 4, kv_len: 64}}]\n{limits}", "test.yaml").spec
    own = {"registers": 160, "vgpr_spills": 0, "hot_loop_per_64_rows": {"valu": 230, "matrix": 68}}
    assert spec.limits.of("bf16") == spec.limits.of("bf16", triton="3.6") == own
    there = {"registers": 200, "vgpr_spills": 0, "hot_loop_per_64_rows": {"valu": 250, "matrix": 68}}
    assert spec.limits.of("bf16", triton="3.8") == there
    assert spec.limits.of("bf16", triton="3.9") == {**own, "vgpr_spills": 2}
    assert spec.limits.of("fp16", triton="3.8") == {"registers": 200, "vgpr_spills": 0}
    assert spec.limits.of("bf16", stage_2=True, triton="3.9") == {"vgpr_spills": 2}
