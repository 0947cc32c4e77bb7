"""What SASS says of a kernel: kinds of instructions, shared-memory traffic, registers and spills."""

from pathlib import Path

import pytest

from mla_codegen.inspect import nvidia
from mla_codegen.inspect.listing import Flow, Instruction, ListingError

DATA = Path(__file__).parent / "data"
USAGE = """
Resource usage:
 Common:
  GLOBAL:0
 Function crowded:
  REG:64 STACK:1520 SHARED:1024 LOCAL:0 CONSTANT[0]:576 TEXTURE:0 SURFACE:0 SAMPLER:0
"""
LOG = "    1520 bytes stack frame, 4168 bytes spill stores, 3152 bytes spill loads\n"


@pytest.mark.parametrize(
    ("opcode", "kind"),
    [
        ("HMMA.16816.F32.BF16", "matrix"),
        ("QGMMA.64x32x32.F32.E4M3.E4M3", "matrix"),
        ("QMMA.16832.F32.E4M3.E4M3", "matrix"),
        ("MUFU.EX2", "transcendental"),
        ("F2FP.F16.E4M3.UNPACK_B", "conversion"),
        ("HADD2.F32", "conversion"),
        ("HADD2", "other_valu"),
        ("FSEL", "select"),
        ("PRMT", "permute"),
        ("SHFL.BFLY", "shuffle"),
        ("LDSM.16.MT88.4", "lds_read"),
        ("LDS.128", "lds_read"),
        ("STS.128", "lds_write"),
        ("LDG.E.128", "global_load"),
        ("STG.E.64", "global_store"),
        ("LDGSTS.E.BYPASS.128", "async_copy"),
        ("UTMALDG.2D", "async_copy"),
        ("LDL.LU", "scratch"),
        ("STL.64", "scratch"),
        ("SYNCS.PHASECHK.TRANS64.TRYWAIT", "wait"),
        ("WARPGROUP.DEPBAR.LE", "wait"),
        ("WARPGROUP.ARRIVE", "barrier"),
        ("BAR.SYNC.DEFER_BLOCKING", "barrier"),
        ("UIADD3", "scalar"),
        ("LDC.64", "scalar"),
        ("IMAD.WIDE", "other_valu"),
        ("CS2R", "move"),
    ],
)
def test_kind(opcode, kind):
    assert nvidia.kind(Instruction(1, opcode, "")) == kind


def test_every_instruction_of_a_real_kernel_is_read():
    text = (DATA / "sm_90_ring.sass").read_text()
    read = [item for item in nvidia.items(text, "ring") if isinstance(item, Instruction)]
    assert len(read) == text.count("/*")
    assert [item.guard for item in read if item.opcode == "UTMALDG.2D"] == ["@UP1"]
    assert nvidia.matrix_name(next(i for i in read if nvidia.kind(i) == "matrix")) == "HGMMA.64x64x16.F32.BF16"


@pytest.mark.parametrize(
    ("guard", "opcode", "operands", "expected"),
    [
        ("", "BRA", "`(.L_x_1)", Flow((".L_x_1",), False)),
        ("@!P0", "BRA", "`(.L_x_1)", Flow((".L_x_1",), True)),
        ("", "BRA.U", "!UP0, `(.L_x_1)", Flow((".L_x_1",), True)),
        ("", "BRA.DIV", "UR4, `(.L_x_1)", Flow((".L_x_1",), True)),
        ("", "EXIT", "", Flow((), False)),
        ("@P1", "EXIT", "", Flow((), True)),
        ("", "BSSY", "B0, `(.L_x_1)", None),
        ("", "FADD", "R0, R1, R2", None),
    ],
)
def test_flow(guard, opcode, operands, expected):
    assert nvidia.flow(Instruction(1, opcode, operands, guard)) == expected


@pytest.mark.parametrize(
    ("opcode", "size"),
    [("LDS", 128), ("LDS.64", 256), ("LDS.U.128", 512), ("LDSM.16.M88.4", 512), ("LDSM.16.MT88", 128), ("FADD", 0)],
)
def test_shared_bytes_of_a_warp(opcode, size):
    assert nvidia.lds_bytes(Instruction(1, opcode, "")) == size


def test_wgmma_reads_its_operands_from_shared_memory():
    both = Instruction(1, "QGMMA.64x32x32.F32.E4M3.E4M3", "R24, gdesc[UR56], RZ, !UPT")
    assert nvidia.operand_bytes(both) == 32 * (64 + 32)
    from_registers = Instruction(1, "HGMMA.64x64x16.F32.BF16", "R24, R4, gdesc[UR8], R24")
    assert nvidia.operand_bytes(from_registers) == 2 * 16 * 64
    assert nvidia.operand_bytes(Instruction(1, "HMMA.16816.F32", "R0, R4, R8, R0")) == 0


def test_resources():
    sass = (DATA / "sm_90_crowded.sass").read_text()
    found = nvidia.resources(USAGE, LOG, sass, "crowded")
    assert found["registers"] == 64
    assert found["scratch_bytes"] == 1520
    assert found["vgpr_spills"] == 4168 // 4
    last = max(int(line.split("*")[1], 16) for line in sass.splitlines() if "/*" in line)
    assert found["code_bytes"] == last + 16


def test_missing_usage_and_log_are_named():
    with pytest.raises(ListingError, match="resource usage of other"):
        nvidia.resources(USAGE, LOG, "", "other")
    with pytest.raises(ListingError, match="spills"):
        nvidia.resources(USAGE, "", "", "crowded")
