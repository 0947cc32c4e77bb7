"""Limits name what broke, and a limit that does not exist is refused."""

from dataclasses import replace

import pytest

from mla_codegen.inspect import Broken, HotLoop, LimitError, Report, check, limit_names, validate
from mla_codegen.inspect.occupancy import occupancy
from mla_codegen.inspect.report import complete

HOT = HotLoop(
    label=".LBB0_2",
    lines=(10, 99),
    blocks=1,
    counts=complete({"matrix": 68, "transcendental": 10, "other_valu": 400, "select": 8, "lds_read": 64}),
    matrix={"v_mfma_f32_16x16x32_fp8_fp8": 68},
    opcodes={},
    lds_read_bytes=1024,
    lds_write_bytes=0,
    tiles=2,
    rows=128,
)
REPORT = Report(
    kernel="stage1",
    path="stage1.py",
    arch="gfx942",
    triton="3.6.0",
    seconds=1.0,
    code_bytes=6784,
    registers=210,
    agprs=0,
    sgprs=25,
    vgpr_spills=3,
    sgpr_spills=0,
    scratch_bytes=16,
    lds_bytes=37888,
    num_warps=4,
    occupancy=occupancy("gfx942", 210, 37888, 4),
    totals=complete({"matrix": 68, "select": 250}),
    opcodes={},
    hot=HOT,
)


def broken(limits):
    return [(one.limit, one.value) for one in check(REPORT, limits)]


def test_kept_limits_say_nothing():
    loop = {"matrix": 34, "transcendental": 5, "valu": 200, "lds_read": 32}
    assert broken({"registers": 256, "lds_bytes": 65536, "hot_loop_per_64_rows": loop}) == []


@pytest.mark.parametrize(
    ("limits", "expected"),
    [
        ({"vgpr_spills": 0}, [("vgpr_spills", 3)]),
        ({"scratch_bytes": 0}, [("scratch_bytes", 16)]),
        ({"lds_bytes": 32768}, [("lds_bytes", 37888)]),
        ({"registers": 128}, [("registers", 210)]),
        ({"cndmask_total": 200}, [("cndmask_total", 250)]),
        ({"select_total": 200}, [("select_total", 250)]),
        ({"resident_programs_at_least": 2}, [("resident_programs_at_least", 1)]),
        ({"hot_loop_per_64_rows": {"matrix": 33}}, [("hot_loop_per_64_rows.matrix", 34)]),
        ({"hot_loop_per_64_rows": {"valu": 199, "matrix": 34}}, [("hot_loop_per_64_rows.valu", 200)]),
        ({"hot_loop_per_tile": {"vector": 203}}, [("hot_loop_per_tile.vector", 204)]),
    ],
)
def test_what_breaks_is_named_with_its_value(limits, expected):
    assert broken(limits) == expected


def test_a_message_says_row_limit_value_and_bound():
    assert str(check(REPORT, {"vgpr_spills": 0}, row="64x8192")[0]) == "64x8192: vgpr_spills is 3, at most 0 allowed"
    few = check(REPORT, {"resident_programs_at_least": 2})[0]
    assert str(few) == "stage1: resident_programs_at_least is 1, at least 2 allowed"


def test_hot_loop_limits_break_where_there_is_no_hot_loop():
    none = replace(REPORT, hot=None)
    found = check(none, {"hot_loop_per_64_rows": {"matrix": 34}})
    assert found == [Broken("stage1", "hot_loop_per_64_rows.matrix", None, 34)]
    assert "no hot loop" in str(found[0])


def test_counts_per_row_need_the_tile():
    unknown = replace(REPORT, hot=replace(HOT, rows=None))
    with pytest.raises(ValueError, match="tile_rows"):
        check(unknown, {"hot_loop_per_64_rows": {"matrix": 34}})


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({"vgpr_spill": 0}, "did you mean vgpr_spills"),
        ({"hot_loop_per_64_rows": {"mfma": 3, "transcendentals": 5}}, "'mfma' is no limit"),
        ({"hot_loop_per_64_rows": {"transcendentals": 5}}, "did you mean transcendental"),
        ({"hot_loop_per_64_rows": 5}, "takes a table"),
        ({"registers": "many"}, "registers is 'many'"),
        ({"registers": True}, "registers is True"),
        ({"registers": float("nan")}, "0 or more"),
        ({"registers": -1}, "0 or more"),
    ],
)
def test_what_is_no_limit_is_refused(limits, message):
    with pytest.raises(LimitError, match=message):
        validate(limits)
    with pytest.raises(LimitError, match=message):
        check(REPORT, limits)


def test_every_listed_name_can_be_checked():
    for name in limit_names():
        value = {"matrix": 10**9} if name.startswith("hot_loop") else (0 if name.endswith("at_least") else 10**9)
        assert check(REPORT, {name: value}) == []
