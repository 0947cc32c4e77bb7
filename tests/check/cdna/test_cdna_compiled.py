"""Kernels of the shipped specs as the compiler makes them: right, clean, refused where they were tampered with."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from plant import BARRIER, LAX, WAIT, faults, launches_of, planted, without_nops
from typer.testing import CliRunner

from mla_codegen.check.cdna import code_object, listing
from mla_codegen.check.cdna.call import Launch
from mla_codegen.check.cdna.dynamic import CountJob, count
from mla_codegen.check.compiled import NotCompiled, verify_compiled
from mla_codegen.cli.common import load_plans
from mla_codegen.cli.main import app
from mla_codegen.inspect.plans import subjects_of
from mla_codegen.plan.resolve import KernelPlan, Plan
from mla_codegen.publish.write import build

SPECS = Path(__file__).parents[3] / "specs"
# One of each form: 16-bit products, one fp8 number, the transposing reads of gfx950.
KERNELS = [("mi300", "bf16"), ("mi300", "fp8_e4m3fn"), ("mi355x", "fp8_e4m3fn")]


def plan_of(spec: str) -> Plan:
    (plan,) = load_plans([SPECS / f"{spec}.yaml"], Path("generated"))
    return plan


def kernel_of(plan: Plan, kv: str) -> KernelPlan:
    (kernel,) = plan.serving([(256, 1024)], kv)
    return kernel


@pytest.fixture(scope="module", params=KERNELS, ids=lambda one: " ".join(one))
def launch(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Launch]:
    spec, kv = request.param
    plan = plan_of(spec)
    yield launches_of(plan, kernel_of(plan, kv), plan.target.name, str(tmp_path_factory.mktemp("planted")))[0]


def test_kernels_of_a_spec_are_right() -> None:
    results = verify_compiled([plan_of("mi300"), plan_of("mi355x")], shapes=[(64, 1024)], kv="bf16", quick=True)
    assert [(one.spec, one.on, one.failure) for one in results] == [
        ("mi300", "gfx942, executed", ""), ("mi355x", "gfx950, executed", ""),
    ]  # fmt: skip
    assert all(0 < one.error < 3e-3 for one in results)


def test_specs_that_are_not_for_amd_are_refused() -> None:
    with pytest.raises(NotCompiled, match=r"h200.yaml is for sm_90; code can be executed for gfx942, gfx950"):
        verify_compiled([plan_of("mi300"), plan_of("h200")])


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["h200.yaml"], "code can be executed for gfx942, gfx950\n  fix: leave --compiled out"),
        (["mi300.yaml", "--device", "cuda"], "leave submissions and --device cuda out"),
    ],
)
def test_command_line_refuses(arguments: list[str], said: str) -> None:
    spec, *rest = arguments
    shown = CliRunner().invoke(app, ["verify", str(SPECS / spec), "--compiled", *rest])
    assert shown.exit_code == 2
    assert said in shown.output


def test_command_line_verifies_and_counts() -> None:
    chosen = [str(SPECS / "mi300.yaml"), "--shape", "256x1024", "--kv", "bf16", "--json"]
    shown = CliRunner().invoke(app, ["verify", *chosen, "--compiled", "--quick"])
    assert shown.exit_code == 0
    (result,) = json.loads(shown.stdout)
    assert result["passed"]
    assert result["on"] == "gfx942, executed"
    shown = CliRunner().invoke(app, ["inspect", *chosen, "--run"])
    (counted,) = [one["per_64_rows_run"] for one in json.loads(shown.stdout)["kernels"] if "per_64_rows_run" in one]
    assert counted["kv_reads"] == 1
    assert counted["instructions"]["matrix"] == 108


def test_a_launch_is_what_inspect_compiles(launch: Launch) -> None:
    """What families say of their stages is what a launch specialises: `inspect` counts the binary that runs."""
    plan = plan_of({"gfx942": "mi300", "gfx950": "mi355x"}[launch.compiled.job.arch])
    kernel = kernel_of(plan, "fp8_e4m3fn" if "fp8" in launch.compiled.job.signature["kv"] else "bf16")
    said = subjects_of([(plan, [kernel])])
    assert launch.compiled.job.as_dict() in [one.case.job.as_dict() for one in said]


def test_most_planted_faults_are_reported(launch: Launch) -> None:
    """A share of all, spread over the kernel: docs/amd.md has the numbers of all of them."""
    counts, clean = launch.again()
    assert not clean
    seen: dict[str, list[bool]] = {WAIT: [], LAX: [], BARRIER: []}
    met: Counter[str] = Counter()
    for fault in faults(launch.executable, list(counts.executed)):
        met[fault[0]] += 1
        if met[fault[0]] % (2 if fault[0] == BARRIER else 9):
            continue
        with planted(launch.executable, *fault):
            _, findings = launch.again()
        seen[fault[0]].append(bool(findings))
    for what, least in ((BARRIER, 0.75), (WAIT, 0.75), (LAX, 0.6)):
        assert len(seen[what]) >= 3, what
        assert sum(seen[what]) >= least * len(seen[what]), what
    assert not launch.again()[1]  # what was planted is gone


def test_every_removed_s_nop_is_reported(launch: Launch) -> None:
    found = [reported for reported, _ in without_nops(launch, every=8)]
    assert found
    assert all(found)


def test_text_that_is_not_the_code_is_refused(launch: Launch) -> None:
    code = launch.executable.code
    asm = launch.compiled.asm

    def matched(text: str) -> None:
        listing.match(code.code, *listing.parse(text, code.name))

    matched(asm)
    lines = asm.splitlines()
    at = next(n for n, line in enumerate(lines) if "v_mfma" in line)
    for changed in (
        [*lines[:at], *lines[at + 1 :]],  # an instruction less
        [*lines[:at], lines[at], *lines[at:]],  # one more
        [*lines[:at], lines[at].replace("v_mfma", "s_mov_b32 s0, s1 ;"), *lines[at + 1 :]],
        [*lines[:at], "\tv_fma_f32 v0, v1, v2, v3", *lines[at + 1 :]],  # of the same length
    ):
        with pytest.raises(listing.Mismatch):
            matched("\n".join(changed))
    branch = next(n for n, line in enumerate(lines) if "s_cbranch" in line)
    (label,) = {line.split()[1] for line in [lines[branch]]}
    other = next(line.strip().rstrip(":") for line in lines if line.startswith(".LBB") and not line.startswith(label))
    with pytest.raises(listing.Mismatch, match="its label is at"):
        matched("\n".join([*lines[:branch], lines[branch].replace(label, other.split(":")[0]), *lines[branch + 1 :]]))


def test_a_code_object_says_what_a_launch_needs(launch: Launch) -> None:
    code = launch.executable.code
    assert code.arch == launch.compiled.job.arch
    assert code.name == launch.kernel
    pointers = [one for one in code.arguments if one.kind == "global_buffer"]
    assert len(pointers) >= sum(kind.startswith("*") for kind in launch.compiled.job.signature.values())
    assert code.denormals
    assert set(code.user_sgprs) == {"kernarg_segment_ptr", "preload"}
    with pytest.raises(code_object.CodeObjectError, match="no ELF file"):
        code_object.read(b"\0" + launch.compiled.binary)
    other = bytearray(launch.compiled.binary)
    other[0x30] = 0x2C  # gfx900
    with pytest.raises(code_object.CodeObjectError, match="machine 0x2c is none of gfx942, gfx950"):
        code_object.read(bytes(other))


def test_counts_of_a_kernel(tmp_path: Path) -> None:
    """Each KV byte is read once; instructions are those that `inspect` counts in the hot loop's text."""
    plan = plan_of("mi300")
    build([plan], tmp_path / "counted_mi300")
    got = count(CountJob(str(tmp_path), "mi300", kernel_of(plan, "bf16"), "gfx942"))
    assert got.kv_bytes == 64 * 576 * 2
    assert got.kv_reads == 1
    # K . q needs 576, P . V 512 products a head and row, of 16 x 16 x 16 in an instruction; four waves share them
    assert got.instructions["matrix"] >= 16 * 64 * (576 + 512) / 16**3 / 4
    assert got.lds_cycles >= got.lds_least > 0
    assert got.lds_written_bytes >= got.kv_bytes
    assert 0 < got.waits < got.instructions["wait"] + 1
