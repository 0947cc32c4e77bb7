"""Wait states that AMD's hardware leaves to software: each rule at its bound, on every path, and in planted faults."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
from builds import plan_of

from mla_codegen.inspect import Case, Compiled, compile_jobs, hazards, inspect_cases
from mla_codegen.inspect.hazards import Hazard
from mla_codegen.inspect.plans import subjects_of
from mla_codegen.inspect.table import as_dict, violations

DATA = Path(__file__).parent / "data"


def listing(*lines: str) -> str:
    """A kernel of these lines; those that end in a colon are labels."""
    body = "\n".join(line if line.endswith(":") else f"\t{line}" for line in lines)
    return f"stage1:\n{body}\n\ts_endpgm\n.Lfunc_end0:\n"


def find(*lines: str, arch: str = "gfx942") -> list[Hazard]:
    return hazards.find(listing(*lines), "stage1", arch)


MFMA = "v_mfma_f32_16x16x16_bf16 v[0:3], v[4:5], v[6:7], v[0:3]"
WIDE = "v_mfma_f32_32x32x16_fp8_fp8 v[0:15], v[20:21], v[22:23], v[0:15]"
SCALED = "v_mfma_scale_f32_16x16x128_f8f6f4 v[0:3], v[8:15], v[16:23], v[0:3], v30, v31 op_sel_hi:[0,0,0]"
SMALL = "v_mfma_f32_4x4x4_16b_bf16 v[0:3], v[4:5], v[6:7], v[0:3]"
FP4 = SCALED + " cbsz:4 blgp:4"

# (first, second, wait states on gfx942, on gfx950); None: not an instruction of that target
PAIRS = [
    ("v_perm_b32 v4, v40, v41, s4", MFMA, 2, 2),
    ("v_perm_b32 v0, v40, v41, s4", MFMA, 2, 2),
    ("v_accvgpr_write_b32 a1, v9", "v_mfma_f32_16x16x16_bf16 a[0:3], v[4:5], v[6:7], a[0:3]", 2, 2),
    ("v_mov_b32_e32 v31, 1.0", SCALED, None, 2),
    ("v_cmpx_lt_f32_e32 vcc, v40, v41", MFMA, 4, 4),
    (MFMA, "v_mfma_f32_16x16x16_bf16 v[50:53], v[2:3], v[6:7], 0", 7, 8),
    (MFMA, "v_mfma_f32_16x16x16_bf16 v[2:5], v[40:41], v[42:43], v[2:5]", 5, 6),
    (MFMA, MFMA, 0, 0),
    (SMALL, "v_mfma_f32_16x16x16_bf16 v[50:53], v[2:3], v[6:7], 0", 5, 5),
    (SMALL, SMALL, 2, 2),
    (MFMA, "v_mul_f32_e32 v9, v3, v3", 7, 8),
    (MFMA, "v_mov_b32_e32 v3, 0", 7, 8),
    (MFMA, "ds_write_b32 v9, v3", 7, 8),
    (MFMA, "global_store_dwordx4 v[50:51], v[0:3], off", 7, 8),
    (MFMA, "buffer_store_dwordx4 v[0:3], v9, s[8:11], 0 offen", 7, 8),
    ("v_mfma_f32_16x16x16_bf16 a[0:3], v[4:5], v[6:7], a[0:3]", "v_accvgpr_read_b32 v9, a3", 7, 8),
    (WIDE, "v_mul_f32_e32 v40, v3, v40", 11, 12),
    ("v_smfmac_f32_16x16x32_bf16 v[0:3], v[4:5], v[6:9], v10", "v_mul_f32_e32 v40, v3, v40", 7, 8),
    (SCALED, "v_mul_f32_e32 v40, v3, v40", None, 12),
    (FP4, "v_mul_f32_e32 v40, v3, v40", None, 8),
    ("v_mfma_f32_16x16x16_bf16 v[0:3], v[4:5], v[6:7], v[8:11]", "v_mov_b32_e32 v9, 0", 3, 3),
    ("v_mfma_f32_16x16x16_bf16 v[0:3], v[4:5], v[6:7], v[8:11]", "v_mov_b32_e32 v5, 0", 0, 0),
    ("v_readfirstlane_b32 s8, v1", "buffer_load_dword v2, v3, s[8:11], 0 offen", 5, 5),
    ("v_readfirstlane_b32 s5, v1", "v_readlane_b32 s6, v2, s5", 4, 4),
    ("v_div_scale_f32 v0, vcc, v1, v2, v1", "v_div_fmas_f32 v3, v4, v5, v6", 4, 4),
    ("v_cmp_lt_f32_e32 vcc, v1, v2", "v_cndmask_b32_e32 v3, v4, v5, vcc", 2, 2),
    ("v_add_co_u32_e32 v0, vcc, v1, v2", "v_addc_co_u32_e32 v3, vcc, v4, v5, vcc", 2, 2),
    ("v_cmp_lt_f32_e64 s[4:5], v1, v2", "v_cndmask_b32_e64 v3, v4, v5, s[4:5]", 2, 2),
    ("v_mov_b32_e32 v1, v2", "v_mov_b32_dpp v3, v1 row_shl:1 row_mask:0xf bank_mask:0xf", 2, 2),
    ("v_mov_b32_e32 v1, v2", "v_permlane32_swap_b32_e32 v0, v1", None, 2),
    ("v_mov_b32_e32 v1, v2", "v_readfirstlane_b32 s0, v1", 1, 1),
    ("v_cmpx_lt_f32_e32 vcc, v40, v41", "v_mov_b32_dpp v3, v1 row_shl:1", 5, 5),
    ("v_cmpx_lt_f32_e32 vcc, v40, v41", "v_readfirstlane_b32 s0, v1", 4, 4),
    ("v_exp_f32_e32 v1, v1", "v_mul_f32_e32 v2, v1, v3", 1, 1),
    ("v_exp_f32_e32 v1, v1", "v_exp_f32_e32 v2, v1", 0, 0),
    ("v_or_b32_sdwa v1, v2, v3 dst_sel:WORD_1 dst_unused:UNUSED_PRESERVE", "v_mul_f32_e32 v2, v1, v3", 1, 1),
    ("v_cvt_pk_fp8_f32 v1, v2, v3 op_sel:[0,0,1]", "v_mul_f32_e32 v2, v1, v3", 1, 1),
    ("global_store_dwordx4 v[0:1], v[2:5], off", "v_mov_b32_e32 v5, 0", 2, 2),
    ("global_store_dwordx2 v[0:1], v[2:3], off", "v_mov_b32_e32 v3, 0", 0, 0),
    ("buffer_store_dwordx4 v[2:5], v0, s[8:11], 0 offen", MFMA, 2, 2),
    ("buffer_store_dwordx4 v[2:5], v0, s[8:11], s3 offen", "v_mov_b32_e32 v5, 0", 0, 0),
    ("s_mov_b32 m0, s3", "buffer_load_dword v4, s[8:11], 0 offen lds", 1, 1),
    (MFMA, "ds_read_b128 v[0:3], v9", 7, 8),
    (MFMA, "buffer_load_dwordx4 v[0:3], v9, s[8:11], 0 offen", 7, 8),
    (MFMA, "buffer_load_dword v9, s[8:11], 0 offen lds", 0, 0),
    ("v_mfma_f32_16x16x16_bf16 v[0:3], v[4:5], v[6:7], v[8:11]", "ds_read_b64 v[10:11], v40", 3, 3),
]
CASES = [
    (a, b, wait, arch)
    for a, b, *waits in PAIRS
    for arch, wait in zip(("gfx942", "gfx950"), waits, strict=True)
    if wait is not None
]


@pytest.mark.parametrize(("first", "second", "wait", "arch"), CASES)
def test_each_pair_at_its_bound(first: str, second: str, wait: int, arch: str) -> None:
    """Found with one wait state too few, however they are made up; not found with as many as are asked."""
    fillers = [[f"s_nop {wait - 2}"], ["s_mov_b32 s90, 0"] * (wait - 1), ["s_waitcnt vmcnt(0)", f"s_nop {wait - 3}"]]
    for filler in fillers if wait > 2 else fillers[1:2]:
        (found,) = find(first, *filler, second, arch=arch) if wait else [None]
        assert found is None or (found.wanted, found.there) == (wait, wait - 1)
    assert not find(first, *(["s_nop 0"] * wait), second, arch=arch)


def test_a_register_written_again_counts_no_more() -> None:
    again = ["v_mfma_f32_32x32x8_bf16 v[0:15], v[20:21], v[22:23], 0", "v_mov_b32_e32 v3, 0"]
    (found,) = find(*again, "v_mul_f32_e32 v50, v3, v3")
    assert found.rule == "a matrix result overwritten by a vector, LDS or memory instruction"
    _, found = find(*again, "v_mul_f32_e32 v50, v4, v4")
    assert (found.rule[:20], found.wanted, found.there) == ("a matrix result read", 11, 1)


PERM = "v_perm_b32 v4, v40, v41, s4"
PATHS = {
    "over a branch": ["s_cbranch_scc1 .LBB0_1", "s_nop 4", ".LBB0_1:", MFMA],
    "into a branch": ["s_cbranch_scc1 .LBB0_2", "s_nop 4", "s_endpgm", ".LBB0_2:", MFMA],
    "by a far jump": ["s_add_u32 s4, s4, (.LBB0_9-.Lpost_getpc0)&4294967295", "s_setpc_b64 s[4:5]", ".LBB0_9:", MFMA],
}


@pytest.mark.parametrize("path", PATHS)
def test_along_the_shortest_path(path: str) -> None:
    second = PATHS[path]
    wide = [WIDE, *second[:-1], "v_mul_f32_e32 v50, v3, v3"]
    assert [one.rule for one in find(*wide)] == ["a matrix result read by a vector, LDS or memory instruction"]
    if path == "by a far jump":
        assert not find(PERM, *second)  # two instructions lie between
    else:
        (found,) = find(PERM, *second)
        assert (found.first.opcode, found.there, found.wanted) == ("v_perm_b32", 1, 2)


def test_over_the_back_edge_of_a_loop() -> None:
    loop = ["s_nop 7", ".LBB0_1:", MFMA, "s_nop 7", "s_add_i32 s0, s0, 1", PERM, "s_cbranch_scc1 .LBB0_1"]
    (found,) = find(*loop)
    assert found.first.line > found.second.line
    assert not find(*loop[:-1], "s_nop 0", loop[-1])


def test_a_loop_without_an_end_ends() -> None:
    assert not find(".LBB0_1:", "s_cbranch_scc1 .LBB0_1", "s_cbranch_vccz .LBB0_1", MFMA)


def test_an_unknown_matrix_instruction_is_reported() -> None:
    (found,) = find("v_mfma_f64_16x16x4_f64 v[0:7], v[8:9], v[10:11], v[0:7]")
    assert found.rule == "a matrix instruction that the rules do not know"


def test_the_text_says_where_and_how_far() -> None:
    (found,) = find(PERM, MFMA)
    assert str(found) == (
        f"a vector result read by a matrix instruction: line 2 `{PERM}` then line 3 `{MFMA}`, "
        "0 wait states between them of 2"
    )


@pytest.mark.parametrize(("kv", "count"), [("bf16", 2), ("fp8", 3)])
def test_what_inline_assembly_did(kv: str, count: int) -> None:
    """Stretches of the cdna3 kernels as they were compiled when v_perm_b32 was inline assembly."""
    found = hazards.find((DATA / f"gfx942_assembly_{kv}.s").read_text(encoding="utf-8"), "stage1", "gfx942")
    assert len(found) == count
    assert all("v_perm_b32" in (one.first.opcode, one.second.opcode) for one in found)


def case_of(target: str, kv: str) -> Case:
    """Stage 1 of the target's Gluon family."""
    spec = {"target": target, "dtypes": {"kv": [kv]}, "defaults": {"optimizations": ["exp2", "fp8_mma"]}}
    plan = plan_of({**spec, "shapes": [{"batch": 64, "kv_len": 1024, "splits": 4}]})
    (subject,) = (one for one in subjects_of([(plan, plan.kernels[:1])]) if one.stage.kernel == "stage1")
    return subject.case


@pytest.mark.parametrize(("target", "kv"), [("gfx942", "bf16"), ("gfx950", "fp8_e4m3fn")])
def test_every_wait_that_the_compiler_put_is_missed(target: str, kv: str) -> None:
    """No hazard in the kernel as compiled; without an s_nop, any of them, there is one.

    Those between two loads are not for distance: they part a clause, so that it can be repeated after a page fault.
    """
    (outcome,) = compile_jobs([case_of(target, kv).job])
    assert isinstance(outcome, Compiled), outcome.reason
    asm = outcome.asm
    assert not hazards.find(asm, "stage1", target)
    nops = list(re.finditer(r"\n\ts_nop \d+[^\n]*(?!\n\tglobal_load)", asm))
    assert len(nops) >= 5
    for nop in nops:
        assert hazards.find(asm[: nop.start()] + asm[nop.end() :], "stage1", target), asm[: nop.end()].count("\n")


EXTERN = re.compile(r"@tl\.core\.extern\ndef byte_select\(.*?_semantic=_semantic\)\n", re.DOTALL)
ASSEMBLY = """@gluon.jit
def byte_select(high, low, selector: gl.constexpr):
    selector = gl.full_like(high, selector)
    return gl.inline_asm_elementwise("v_perm_b32 $0, $1, $2, $3", "=v,v,v,s", [high, low, selector], gl.uint32, True, 1)
"""


def test_a_kernel_with_assembly_is_not_all_right() -> None:
    """The whole way: compiled with inline assembly beside matrix instructions, described, and told."""
    case = case_of("gfx942", "bf16")
    assert case.job.source is not None
    source, count = EXTERN.subn(ASSEMBLY, case.job.source)
    assert count == 1
    right, wrong = inspect_cases(
        [replace(case, limits={}, job=job) for job in (case.job, replace(case.job, source=source))]
    )
    assert right.ok and right.report is not None and not right.report.hazards
    assert not wrong.ok and wrong.report is not None and wrong.report.hazards
    assert "v_perm_b32" in violations([wrong])[0] and not violations([right])
    assert as_dict(wrong)["report"]["hazards"][0]["first"]["opcode"] == "v_perm_b32"
