"""`mla-codegen inspect`, whole: small specs compiled for three targets, faults planted, limits held."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from typer.testing import CliRunner

from mla_codegen.cli.main import app
from mla_codegen.inspect import capture_job
from mla_codegen.inspect import plans as inspection
from mla_codegen.plan.families import FAMILIES
from mla_codegen.plan.resolve import make_plan
from mla_codegen.publish.write import fresh_build
from mla_codegen.render.templates import PACKAGE, render_kernel
from mla_codegen.spec.load import parse_spec

SMALL = """\
target: {target}
model: {{num_heads: 16, kv_lora_rank: 64, qk_rope_head_dim: 32}}
dtypes: {{kv: [{kv}]}}
defaults: {{family: triton, block_n: 32, optimizations: [{options}]}}
shapes:
  - {{batch: 4, kv_len: 1024, splits: 2}}
  - {{batch: 8, kv_len: 512, splits: 2}}
"""
OPTIONS = "exp2, fast_rcp, peeled_tail, direct_out"
AMD = OPTIONS + ", xcd_remap, fp8_mma"
QUADS = AMD + ", packed_fp8"


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Compiled once for all tests here, and nowhere else."""
    return tmp_path_factory.mktemp("cache")


Inspect = Callable[..., Result]


@pytest.fixture
def inspect(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Inspect:
    monkeypatch.setenv("MLA_CODEGEN_CACHE_DIR", str(cache))

    def invoke(specs: dict[str, str], *args: str) -> Result:
        for name, text in specs.items():
            (tmp_path / f"{name}.yaml").write_text(text)
        paths = [str(tmp_path / f"{name}.yaml") for name in specs]
        return CliRunner().invoke(app, ["inspect", *paths, *args])

    return invoke


def small(target: str, kv: str = "fp8_e4m3fn", options: str = OPTIONS, limits: str = "") -> str:
    text = SMALL.format(target=target, kv=kv, options=options)
    return text + (f"limits: {limits}\n" if limits else "")


def test_three_targets_in_one_run(inspect: Inspect) -> None:
    limits = "{vgpr_spills: 0, scratch_bytes: 0, hot_loop_per_64_rows: {matrix: 64}}"
    specs = {
        "a": small("gfx942", options=QUADS, limits=limits),
        "b": small("gfx950", options=AMD, limits=limits),
        "c": small("sm_90", limits=limits),
    }
    done = inspect(specs, "--shape", "4x1024", "--json")
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert {kernel["report"]["arch"] for kernel in found["kernels"]} == {"gfx942", "gfx950", "sm_90"}
    made = [(kernel["spec"], kernel["stage"], kernel["kv_over_2gib"]) for kernel in found["kernels"]]
    assert made == [
        *(("a", "stage1", False), ("a", "stage1", True), ("a", "stage2", False)),
        *(("b", "stage1", False), ("b", "stage1", True), ("b", "stage2", False)),
        *(("c", "stage1", False), ("c", "stage2", False)),
    ]
    for kernel in found["kernels"]:
        hot = kernel["report"]["hot"]
        assert (hot is not None) == (kernel["stage"] == "stage1")
        assert kernel["limits"].keys() >= {"vgpr_spills", "scratch_bytes"}
        assert ("hot_loop_per_64_rows" in kernel["limits"]) == (hot is not None)
        assert hot is None or (hot["rows"] == 32 and hot["counts"]["matrix"] > 0)
    assert [(call["spec"], call["batch"], call["kv_len"]) for call in found["calls"]] == [
        (name, 4, 1024) for name in specs
    ]
    assert all(call["model"]["predicted_us"] > 0 for call in found["calls"])


def test_equal_kernels_share_a_row(inspect: Inspect) -> None:
    done = inspect({"c": small("sm_90")}, "--json")
    found = json.loads(done.stdout)
    files = {(kernel["stage"], *map(Path, kernel["files"])) for kernel in found["kernels"]}
    alike = (Path("c/fp8_e4m3fn_b4_kv1024.py"), Path("c/fp8_e4m3fn_b8_kv512.py"))
    run_time, direct = Path("c/fp8_e4m3fn_any.py"), Path("c/fp8_e4m3fn_any_direct.py")
    assert files == {
        *(("stage1", *alike), ("stage2", *alike)),
        *(("stage1", run_time), ("stage2", run_time), ("stage1", direct)),
    }
    assert [(call["batch"], call["kv_len"]) for call in found["calls"]] == [(4, 1024), (8, 512)]


def test_tables_for_people(inspect: Inspect) -> None:
    done = inspect({"a": small("gfx942", options=QUADS)}, "--shape", "4x1024")
    assert done.exit_code == 0, done.output
    words = ("Registers, memory", "Hot loop", "Model (published rates", "a/fp8_e4m3fn_b4_kv1024:stage2")
    assert all(word in done.output for word in words)
    assert "a.yaml has no `limits:`; its kernels were only compiled" in done.output
    assert "3 kernels, triton 3." in done.output and "all compile, no limit broken, no hazard" in done.output


def test_fp8_decoded_in_software_is_caught(inspect: Inspect, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = {"a": small("gfx942", options=QUADS, limits="{cndmask_total: 200}")}
    assert inspect(spec, "--check", "--shape", "4x1024").exit_code == 0
    real = inspection.render_kernel
    monkeypatch.setattr(
        inspection, "render_kernel", lambda kernel: real(kernel).replace("tl.float8e4b8", "tl.float8e4nv")
    )
    done = inspect(spec, "--check", "--shape", "4x1024")
    assert done.exit_code == 1
    assert "stage1: cndmask_total is" in done.output and "at most 200 allowed" in done.output


def test_shared_memory_over_the_limit_is_caught(inspect: Inspect) -> None:
    limits = "{lds_bytes: 65536, per_kv: {fp8_e4m3fn: {lds_bytes: 1024}}}"
    done = inspect({"c": small("sm_90", limits=limits)}, "--check", "--shape", "4x1024")
    assert done.exit_code == 1
    assert "c/fp8_e4m3fn_b4_kv1024:stage1: lds_bytes is" in done.output and "at most 1024 allowed" in done.output
    assert "Hot loop" not in done.output


def test_a_kernel_that_does_not_compile_is_one_row(inspect: Inspect, monkeypatch: pytest.MonkeyPatch) -> None:
    real = inspection.render_kernel
    monkeypatch.setattr(
        inspection, "render_kernel", lambda kernel: real(kernel).replace("tl.dot(weights,", "tl.no_such_thing(weights,")
    )
    done = inspect({"c": small("sm_90")}, "--json", "--shape", "4x1024")
    assert done.exit_code == 1
    first, second = json.loads(done.stdout)["kernels"]
    assert first["report"] is None and "no_such_thing" in first["failure"]["reason"] + first["failure"]["tail"]
    assert second["ok"] and second["stage"] == "stage2"


@pytest.mark.parametrize(
    ("spec", "args", "said"),
    [
        (small("sm_90"), ["--shape", "64"], "write BATCHxKV_LEN"),
        (small("sm_90"), ["--shape", "0x64"], "write BATCHxKV_LEN"),
        (small("sm_90"), ["--kv", "bf16"], "has no bf16 KV; it has fp8_e4m3fn"),
        (small("sm_90"), ["--against", "theirs"], "FILE.py:KERNEL"),
        (small("sm_90"), ["--triton", "newest"], "unknown Triton release `newest`"),
        (small("sm_89"), [], "sm_89 cannot be inspected; what can: gfx942"),
        (small("sm_90", limits="{vgpr_spill: 0}"), [], "did you mean `vgpr_spills`?"),
    ],
)
def test_bad_input(inspect: Inspect, spec: str, args: list[str], said: str) -> None:
    done = inspect({"c": spec}, *args)
    assert done.exit_code == 2, done.output
    assert said in done.output


def test_beside_another_kernel(inspect: Inspect, tmp_path: Path) -> None:
    plan = make_plan(parse_spec(small("sm_90"), "c.yaml").spec, "c.yaml")
    args = ["--check", "--against", f"{callable_file(plan.kernels[0], tmp_path)}:stage1", "--shape", "4x1024"]
    done = inspect({"c": small("sm_90")}, *args)
    assert done.exit_code == 0, done.output
    assert "c/fp8_e4m3fn_b4_kv1024:stage1 against stage1 sm_90 4x1024" in done.output
    row = next(line for line in done.output.splitlines() if "registers (AGPRs included)" in line)
    assert row.split("│")[-2].strip() == "1.00"  # it is the same kernel


def callable_file(kernel: Any, folder: Path) -> Path:
    """A rendered file with a `custom_kernel` of its own, by which its launches can be watched, in a package."""
    form = 'kv_data["fp8"]' if kernel.kv.startswith("fp8") else '(kv_data["bf16"], None)'
    splits = "" if kernel.splits else ", 3"
    call = f"run(q, kv, qo_indptr, kv_indptr, None, scale, config['sm_scale'], out, lse{splits})"
    text = render_kernel(kernel) + (
        f"\n\nimport torch\n\n\ndef custom_kernel(data):\n"
        f"    q, kv_data, qo_indptr, kv_indptr, config = data\n"
        f"    kv, scale = {form}\n"
        f"    kv = kv.view(-1, {kernel.row})\n"
        f"    out = torch.empty(q.shape[0], {kernel.heads}, {kernel.latent}, dtype=torch.bfloat16)\n"
        f"    lse = torch.empty(q.shape[0], {kernel.heads}, dtype=torch.float32)\n"
        f"    {call}\n"
    )
    scratch = (PACKAGE / "runtime" / "scratch.py").read_text()
    path = folder / "package" / "kernels" / "rendered.py"
    for name, content in (("kernels/rendered", text), ("runtime/scratch", scratch)):
        file = folder / "package" / f"{name}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(content)
        (file.parent / "__init__.py").touch()
    (folder / "package" / "__init__.py").touch()
    return path


@pytest.mark.parametrize(
    ("target", "family", "kv", "options", "which", "stage"),
    [
        ("gfx942", "triton", "fp8_e4m3fn", QUADS, "any", "stage1"),
        ("gfx942", "triton", "fp8_e4m3fn", QUADS, "any", "stage2"),
        ("gfx950", "triton", "fp8_e4m3fn", AMD, "b4_kv1024", "stage1"),
        ("gfx950", "triton", "bf16", OPTIONS, "any_direct", "stage1"),
        ("gfx942", "cdna3", "fp8_e4m3fn", QUADS, "any", "stage1"),
        ("gfx950", "cdna4", "bf16", OPTIONS, "b4_kv1024", "stage1"),
    ],
)
def test_stages_are_what_run_launches(
    target: str, family: str, kv: str, options: str, which: str, stage: str, tmp_path: Path
) -> None:
    """Types, constants, alignment and compiler options that the inspection assumes are those of the real launch."""
    text = small(target, kv, options).replace("family: triton, block_n: 32", f"family: {family}")
    text = text.replace("kv_lora_rank: 64, qk_rope_head_dim: 32", "kv_lora_rank: 256, qk_rope_head_dim: 64")
    plan = make_plan(parse_spec(text, "x.yaml").spec, "x.yaml")
    kernel = next(kernel for kernel in plan.kernels if kernel.name == f"{kv}_{which}")
    path = callable_file(kernel, tmp_path)
    assumed = next(one for one in FAMILIES[family].stages(kernel) if one.kernel == stage)
    job = capture_job(str(path), stage, target, batch=2, kv_len=64, heads=16, width=320)
    assert {name: kind for name, kind in job.signature.items() if kind != "constexpr"} == assumed.signature
    assert job.constexprs == assumed.constants
    assert job.options == assumed.options
    assert job.divisible == assumed.divisible
    assert job.within_2gb == assumed.pointers


def test_limits_change_no_generated_file(tmp_path: Path) -> None:
    plain = make_plan(parse_spec(small("sm_90"), "x.yaml").spec, "x.yaml")
    bound = make_plan(parse_spec(small("sm_90", limits="{vgpr_spills: 0}"), "x.yaml").spec, "x.yaml")
    assert fresh_build([plain], tmp_path) == fresh_build([bound], tmp_path)


def test_limits_of_one_kv_type_go_first() -> None:
    text = """{lds_bytes: 65536, hot_loop_per_64_rows: {matrix: 36, valu: 240}, resident_programs_at_least: 2,
        per_kv: {fp8_e4m3fn: {lds_bytes: 40000, hot_loop_per_64_rows: {valu: 100}}}}"""
    limits = parse_spec(small("sm_90", "fp8_e4m3fn, bf16", limits=text), "x.yaml").spec.limits
    assert limits.of("bf16") == {
        "lds_bytes": 65536, "hot_loop_per_64_rows": {"matrix": 36, "valu": 240}, "resident_programs_at_least": 2,
    }  # fmt: skip
    assert limits.of("fp8_e4m3fn")["hot_loop_per_64_rows"] == {"matrix": 36, "valu": 100}
    assert limits.of("fp8_e4m3fn", stage_2=True) == {"lds_bytes": 40000}
