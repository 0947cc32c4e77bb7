"""The hot loop is found by the graph of the code, whatever the order of its blocks, in both assemblies."""

from pathlib import Path

import pytest

from mla_codegen.inspect import amd, nvidia
from mla_codegen.inspect.describe import count
from mla_codegen.inspect.listing import (
    Flow,
    Instruction,
    Label,
    ListingError,
    build_blocks,
    hot_loop,
    loop_instructions,
    natural_loops,
)

DATA = Path(__file__).parent / "data"


def toy(text):
    """Items of a toy assembly: `name:` is a label, `jump L` and `maybe L` are branches, `end` ends."""
    for number, line in enumerate(text.strip().splitlines(), 1):
        line = line.strip()
        if line.endswith(":"):
            yield Label(line[:-1], number)
        else:
            opcode, _, operands = line.partition(" ")
            yield Instruction(number, opcode, operands)


def toy_flow(instruction):
    targets = (instruction.operands,)
    return {"jump": Flow(targets, False), "maybe": Flow(targets), "end": Flow((), False)}.get(instruction.opcode)


def hot(text):
    blocks = build_blocks(toy(text), toy_flow)
    loop = hot_loop(blocks, lambda instruction: instruction.opcode == "mma")
    return loop and [instruction.line for instruction in loop_instructions(blocks, loop)]


def test_straight_code_has_no_hot_loop():
    assert hot("mma\nmma\nend") is None


def test_a_loop_without_products_is_not_hot():
    assert hot("a:\nadd\nmaybe a\nmma\nend") is None


def test_peeled_products_before_and_behind_are_not_counted():
    assert hot("mma\nmma\nmma\nloop:\nmma\nmaybe loop\nmma\nmma\nend") == [5, 6]


def test_a_block_placed_behind_the_end_belongs_to_the_loop():
    text = "loop:\nmma\nmaybe wait\nback:\nmaybe loop\nend\nwait:\nspin\nmaybe wait\njump back"
    assert hot(text) == [2, 3, 5, 8, 9, 10]


def test_the_inner_loop_with_most_products_wins_over_the_outer_one():
    text = "outer:\nmma\ninner:\nmma\nmma\nmaybe inner\nmaybe outer\nend"
    assert hot(text) == [4, 5, 6]


def test_an_outer_loop_wins_when_the_inner_one_only_waits():
    text = "outer:\nmma\ninner:\nspin\nmaybe inner\nmma\nmaybe outer\nend"
    assert hot(text) == [2, 4, 5, 6, 7]


def test_both_sides_of_a_branch_inside_the_loop_are_counted_once():
    text = "loop:\nmaybe else\nmma\njump join\nelse:\nmul\njoin:\nmaybe loop\nend"
    assert hot(text) == [2, 3, 4, 6, 8]


def test_code_that_nothing_reaches_makes_no_loop():
    assert hot("end\ndead:\nmma\nmaybe dead\nend") is None


def test_two_back_edges_to_one_header_are_one_loop():
    blocks = build_blocks(toy("loop:\nmma\nmaybe loop\nadd\nmaybe loop\nend"), toy_flow)
    assert len(natural_loops(blocks)) == 1


def test_gcn_loop_of_a_real_kernel():
    blocks = build_blocks(amd.items((DATA / "gfx942_fold.s").read_text(), "fold"), amd.flow)
    loop = hot_loop(blocks, lambda instruction: amd.kind(instruction) == "matrix")
    assert blocks[loop.header].label == ".LBB0_7"
    counts = count(loop_instructions(blocks, loop), "amd")
    assert {name: value for name, value in counts.items() if value} == {
        "matrix": 5,
        "transcendental": 8,
        "valu": 21,
        "conversion": 4,
        "select": 4,
        "vector": 29,
        "move": 8,
        "other_valu": 13,
        "shuffle": 2,
        "lds_read": 10,
        "lds_write": 1,
        "global_load": 1,
        "wait": 9,
        "barrier": 2,
        "scalar": 4,
        "total": 71,
    }


def test_sass_loop_of_a_real_kernel_takes_in_the_wait_behind_the_end():
    blocks = build_blocks(nvidia.items((DATA / "sm_90_ring.sass").read_text(), "ring"), nvidia.flow)
    loop = hot_loop(blocks, lambda instruction: nvidia.kind(instruction) == "matrix")
    assert blocks[loop.header].label == ".L_x_2"
    counts = count(loop_instructions(blocks, loop), "nvidia")
    assert {name: value for name, value in counts.items() if value} == {
        "matrix": 4,
        "valu": 10,
        "vector": 10,
        "other_valu": 10,
        "async_copy": 1,
        "wait": 4,  # arrive, two tries of the barrier (one behind the end), and the wgmma wait
        "barrier": 4,
        "scalar": 17,
        "total": 40,
    }


def test_a_jump_too_far_for_a_branch_closes_the_loop():
    asm = """k:
	s_nop 0
.LBB0_1:
	v_mfma_f32_16x16x32_fp8_fp8 a[0:3], v[0:1], v[2:3], a[0:3]
	s_cbranch_scc0 .LBB0_2
	s_getpc_b64 s[6:7]
.Lpost_getpc0:
	s_add_u32 s6, s6, (.LBB0_1-.Lpost_getpc0)&4294967295
	s_addc_u32 s7, s7, (.LBB0_1-.Lpost_getpc0)>>32
	s_setpc_b64 s[6:7]
.LBB0_2:
	s_endpgm
.Lfunc_end0:
"""
    blocks = build_blocks(amd.items(asm, "k"), amd.flow)
    loop = hot_loop(blocks, lambda instruction: amd.kind(instruction) == "matrix")
    assert blocks[loop.header].label == ".LBB0_1"
    assert len(loop_instructions(blocks, loop)) == 6


@pytest.mark.parametrize("parser", [amd, nvidia])
def test_a_listing_without_the_kernel_says_so(parser):
    with pytest.raises(ListingError, match="other"):
        list(parser.items((DATA / "gfx942_fold.s").read_text(), "other"))
