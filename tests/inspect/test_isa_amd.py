"""What GCN assembly says of a kernel: kinds of instructions, LDS traffic, registers and spills."""

from collections import Counter
from pathlib import Path

import pytest

from mla_codegen.inspect import amd
from mla_codegen.inspect.listing import Instruction, ListingError

DATA = Path(__file__).parent / "data"


@pytest.mark.parametrize(
    ("line", "kind"),
    [
        ("v_mfma_f32_16x16x32_fp8_fp8 a[0:3], v[0:1], v[2:3], 0", "matrix"),
        ("v_mfma_scale_f32_16x16x128_f8f6f4 v[0:3], v[4:11], v[12:19], v[0:3], v20, v21", "matrix"),
        ("v_exp_f32_e32 v1, v1", "transcendental"),
        ("v_rcp_f32_e32 v1, v1", "transcendental"),
        ("v_cvt_pk_fp8_f32 v1, v2, v3", "conversion"),
        ("v_cvt_scalef32_pk_fp8_f32 v1, v2, v3, 1.0", "conversion"),
        ("v_cndmask_b32_e64 v0, v1, v2, s[0:1]", "select"),
        ("v_perm_b32 v0, v1, v2, s4", "permute"),
        ("v_permlane32_swap_b32_e32 v0, v1", "permute"),
        ("v_mov_b32_dpp v0, v1 row_shl:1", "move"),
        ("v_accvgpr_read_b32 v0, a1", "move"),
        ("v_readfirstlane_b32 s0, v1", "move"),
        ("v_pk_mul_f32 v[0:1], v[0:1], v[2:3]", "other_valu"),
        ("v_expand_b32 v0, v1", "other_valu"),
        ("ds_read_b64_tr_b8 v[0:1], v2", "lds_read"),
        ("ds_write2_b64 v0, v[1:2], v[3:4] offset1:1", "lds_write"),
        ("ds_bpermute_b32 v0, v1, v2", "shuffle"),
        ("global_load_dwordx4 v[0:3], v[4:5], off", "global_load"),
        ("buffer_load_dwordx4 v[0:3], v4, s[8:11], 0 offen", "global_load"),
        ("buffer_load_dword v4, s[8:11], 0 offen lds", "async_copy"),
        ("buffer_load_dwordx4 v4, s[8:11], s3 offen sc0 lds", "async_copy"),
        ("global_load_lds_dwordx4 v[4:5], off", "async_copy"),
        ("buffer_load_dword v1, off, s[0:3], 0 offset:12", "scratch"),
        ("scratch_store_dwordx2 off, v[0:1], off offset:16", "scratch"),
        ("global_store_dwordx4 v[0:1], v[2:5], off", "global_store"),
        ("global_atomic_add_f32 v0, v1, s[0:1]", "global_store"),
        ("s_waitcnt vmcnt(0)", "wait"),
        ("s_barrier ", "barrier"),
        ("s_nop 1", "scalar"),
        ("s_add_i32 s0, s0, 1", "scalar"),
    ],
)
def test_kind(line, kind):
    opcode, _, operands = line.partition(" ")
    assert amd.kind(Instruction(1, opcode, operands)) == kind


@pytest.mark.parametrize(
    ("opcode", "size"),
    [
        ("ds_read_b128", 1024),
        ("ds_read2_b64", 1024),
        ("ds_read2st64_b32", 512),
        ("ds_read_b64_tr_b8", 512),
        ("ds_read_u8", 256),
        ("ds_read_u8_d16_hi", 256),
        ("ds_write_b32", 256),
        ("v_mov_b32", 0),
    ],
)
def test_lds_bytes_of_a_wave(opcode, size):
    assert amd.lds_bytes(Instruction(1, opcode, "")) == size


def test_resources():
    asm = (DATA / "gfx942_fold.s").read_text()
    assert amd.resources(asm) == {
        "registers": 52,
        "agprs": 12,
        "sgprs": 20,
        "vgpr_spills": 0,
        "sgpr_spills": 0,
        "scratch_bytes": 0,
        "code_bytes": 1828,
    }
    assert amd.llvm_occupancy(asm) == 8


def test_spills_show_in_metadata_and_in_the_loop():
    asm = (DATA / "gfx942_crowded.s").read_text()
    found = amd.resources(asm)
    assert found["vgpr_spills"] == 1097
    assert found["scratch_bytes"] == 736
    kinds = Counter(amd.kind(item) for item in amd.items(asm, "crowded") if isinstance(item, Instruction))
    assert kinds["scratch"] > 0


def test_missing_metadata_is_named():
    with pytest.raises(ListingError, match="vgpr_count"):
        amd.resources("k:\n\ts_endpgm\n")


def test_items_end_with_the_function():
    asm = "k:\n\ts_nop 0\n.Lfunc_end0:\n\tv_exp_f32_e32 v0, v0\n"
    assert [item.opcode for item in amd.items(asm, "k")] == ["s_nop"]
