"""Real compilations of small kernels for targets that are not here, and planted faults that must be caught.

All of them run in one batch of processes, so that the compilers' start-up is paid side by side.
"""

import gzip
import io
import json
import time
from dataclasses import replace
from pathlib import Path

import pytest
from isa_kernels import GLUON, TRITON

from mla_codegen.inspect import Case, CompileJob, Failed, JobError, Workload, amd, compile_jobs, inspect_cases, table
from mla_codegen.inspect import compile as compile_module
from mla_codegen.inspect.compile import cache_dir, cache_key

FOLD = {"q": "*bf16", "out": "*fp32", "count": "i32"}
PRODUCT = {"q": "*bf16", "k": "*bf16", "out": "*fp32", "count": "i32"}
DESCRIPTOR = "tensordesc<bf16[64, 64],NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)>"


def job(kernel, arch, signature, constexprs=None, *, source=TRITON, **options):
    pointers = {name for name, kind in signature.items() if kind.startswith("*")}
    return CompileJob("kernels.py", kernel, arch, signature, constexprs or {}, options, pointers, source)


def fold(arch, element, tl_type):
    """The loop kernel; `scale` is None, so the kernel is specialised without it."""
    return job("fold", arch, {**FOLD, "k": f"*{element}"}, {"TYPE": f"=tl.{tl_type}", "scale": None}, num_warps=4)


WORK = Workload(batch=8, kv_len=1024, splits=2, programs=16, kv_row_bytes=64)
CASES = {
    "gfx942": Case("gfx942", fold("gfx942", "fp8e4b8", "float8e4b8"), 32, 5, {"vgpr_spills": 0}, WORK),
    "gfx950": Case("gfx950", fold("gfx950", "fp8e4nv", "float8e4nv"), 32, None, {"vgpr_spills": 0}, WORK),
    "sm_90": Case("sm_90", fold("sm_90", "bf16", "bfloat16"), 32, None, {"vgpr_spills": 0}, WORK),
    "spills": Case(
        "spills", job("crowded", "gfx942", PRODUCT, num_warps=1, waves_per_eu=8), 32, None, {"vgpr_spills": 0}
    ),
    "software fp8": Case(
        "software fp8", job("decode", "gfx942", {"x": "*fp8e4nv", "y": "*fp32"}), limits={"cndmask_total": 20}
    ),
    "hardware fp8": Case(
        "hardware fp8", job("decode", "gfx950", {"x": "*fp8e4nv", "y": "*fp32"}), limits={"cndmask_total": 20}
    ),
    "lds": Case(
        "lds", job("wide", "gfx942", PRODUCT, num_warps=4, num_stages=3), 256, None, {"lds_bytes": 65536}, WORK
    ),
    "aborts": Case("aborts", job("aborts", "sm_90", {"x": "*fp32"})),
    "descriptor": Case(
        "descriptor",
        job("ring", "sm_90", {"desc": DESCRIPTOR, "q": "*bf16", "out": "*fp32", "count": "i32"}, source=GLUON),
        64,
    ),
}


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MLA_CODEGEN_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        patch.setenv("TRITON_INTERPRET", "1")  # other tests' setting: must not reach the compiler
        yield


@pytest.fixture(scope="module")
def rows(cache):
    seen = []
    found = inspect_cases(
        list(CASES.values()),
        parallel=2,
        timeout_s=120,
        progress=lambda done, total, outcome: seen.append((done, total)),
    )
    assert seen == [(number, len(CASES)) for number in range(1, len(CASES) + 1)]
    return dict(zip(CASES, found, strict=True))


@pytest.mark.parametrize("name", ["gfx942", "gfx950", "sm_90"])
def test_a_kernel_is_compiled_and_counted_without_a_gpu(rows, name):
    row = rows[name]
    assert row.ok, table.violations([row])
    report = row.report
    assert report.registers > 0
    assert report.code_bytes > 0
    assert report.seconds > 0
    assert report.occupancy.programs >= 1
    assert report.hot.rows == 32
    assert 0 < report.hot.counts["matrix"] <= report.totals["matrix"]
    assert report.hot.counts["transcendental"] >= 4
    assert report.hot.counts["scratch"] == 0
    assert any("task" in note for note in report.notes)  # the stand-in for a module that is not here
    assert row.prediction.seconds > 0


def test_residency_agrees_with_llvm_where_registers_decide(rows):
    compiled = compile_jobs([CASES["gfx942"].job, CASES["spills"].job])
    for outcome, name in zip(compiled, ("gfx942", "spills"), strict=True):
        by = rows[name].report.occupancy.by
        waves = by["registers"] * rows[name].report.num_warps / 4
        assert min(8, waves) == amd.llvm_occupancy(outcome.asm)


def test_a_spill_is_caught(rows):
    row = rows["spills"]
    assert [one.limit for one in row.broken] == ["vgpr_spills"]
    assert row.report.vgpr_spills > 0
    assert row.report.scratch_bytes > 0
    assert row.report.hot.counts["scratch"] > 0


def test_software_fp8_is_caught_and_hardware_fp8_is_not(rows):
    assert [one.limit for one in rows["software fp8"].broken] == ["cndmask_total"]
    assert rows["hardware fp8"].ok
    assert rows["hardware fp8"].report.totals["select"] == 0


def test_lds_over_the_limit_is_caught(rows):
    row = rows["lds"]
    assert [one.limit for one in row.broken] == ["lds_bytes"]
    assert (row.report.occupancy.programs, row.report.occupancy.limited_by) == (0, "lds")
    assert row.prediction is None
    assert "no program fits" in row.model_note


def test_an_aborting_compiler_is_one_failed_row(rows):
    row = rows["aborts"]
    assert not row.ok
    assert row.report is None
    assert "the compiler" in row.failure.reason
    assert "constraint" in row.failure.tail
    assert rows["sm_90"].ok  # the others went on


def test_a_tensor_descriptor_and_the_wait_inside_the_loop(rows):
    hot = rows["descriptor"].report.hot
    assert hot.matrix == {"HGMMA.64x64x16.F32.BF16": 4}
    assert hot.blocks > 1
    assert hot.counts["async_copy"] == 1
    assert hot.operand_bytes * 4 == 4 * 2 * 16 * (64 + 64)


def test_results_come_from_the_cache_and_follow_the_content(rows, monkeypatch):
    case = CASES["gfx950"]
    again = inspect_cases([case])[0].report
    assert again.cached
    assert not rows["gfx950"].report.cached
    assert replace(again, cached=False) == rows["gfx950"].report
    key = cache_key(case.job, "3.6.0")
    assert key == cache_key(replace(case.job, path="/elsewhere/kernels.py"), "3.6.0")
    assert key != cache_key(case.job, "3.9.0")
    assert key != cache_key(replace(case.job, source=TRITON + "\n# changed"), "3.6.0")
    assert key != cache_key(replace(case.job, divisible=frozenset()), "3.6.0")
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "0")
    assert key != cache_key(case.job, "3.6.0")


def test_a_release_that_was_not_found_is_not_passed_off_as_another(rows):
    failed = compile_jobs([CASES["hardware fp8"].job], triton="0.0.1")[0]
    assert failed.reason.startswith("asked for Triton 0.0.1, compiled by ")


def test_a_damaged_cache_entry_is_compiled_again(rows):
    case = CASES["hardware fp8"]
    stored = cache_dir() / "isa" / f"{cache_key(case.job, rows['gfx950'].report.triton)}.json.gz"
    whole = stored.read_bytes()
    stored.write_bytes(whole[: len(whole) // 2])
    assert not inspect_cases([case])[0].report.cached
    assert json.loads(gzip.decompress(stored.read_bytes()))["asm"]
    assert [path.name for path in stored.parent.glob(".*")] == []


RECORD = {"triton": "3.6.0", "asm": "s_endpgm", "metadata": {"shared": 1}, "seconds": 0.25, "notes": []}


def test_a_record_that_is_none_of_this_job_s_is_no_record(tmp_path):
    """Damaged, of another job, another program's, or edited: compiled again, never an error."""
    path = tmp_path / "key.json.gz"
    compile_module._write(path, RECORD)
    whole = path.read_bytes()
    assert compile_module._read(path) == RECORD
    sealed = json.loads(gzip.decompress(whole))
    texts = ["", "{", "[]", "{}", "1", "null", '"text"', "[" * 100_000, json.dumps(RECORD)]
    texts += [
        json.dumps({**sealed, "metadata": {}}),
        json.dumps({**sealed, "seal": 1}),
        json.dumps({"seal": sealed["seal"]}),
    ]
    foreign = [gzip.compress(text.encode()) for text in texts] + [gzip.compress(b"\xff"), b"", b"text", whole[:-9]]
    middle = len(whole) // 2
    foreign += [whole[:middle] + bytes([whole[middle] ^ 0xFF]) + whole[middle + 1 :]]
    for content in foreign:
        path.write_bytes(content)
        assert compile_module._read(path) is None, content
    (tmp_path / "other.json.gz").write_bytes(whole)
    assert compile_module._read(tmp_path / "other.json.gz") is None
    path.unlink()
    path.mkdir()
    assert compile_module._read(path) is None
    compile_module._write(path, RECORD)  # the cache is a convenience


def test_a_hang_ends_at_the_time_out_with_all_its_processes(cache, tmp_path):
    pid = tmp_path / "pid"
    source = (
        "import subprocess, time\n"
        "child = subprocess.Popen(['sleep', '600'])\n"
        f"wrote = open({str(pid)!r}, 'w').write(str(child.pid))\n"
        "hang = time.sleep(600)\n"
    )
    start = time.monotonic()
    failed = compile_jobs([job("k", "gfx942", {}, source=source)], timeout_s=3)[0]
    assert time.monotonic() - start < 30
    assert isinstance(failed, Failed)
    assert failed.reason == "the compiler was still running after 3 s"
    child = int(pid.read_text())
    for _ in range(50):
        state = Path(f"/proc/{child}/stat")
        if not state.exists() or state.read_text().split()[2] == "Z":
            break
        time.sleep(0.1)
    else:
        pytest.fail("the compiler's child outlived it")


def test_an_interrupted_batch_leaves_nothing_running(cache):
    hang = job("k", "gfx942", {}, source="import time\nhang = time.sleep(600)\n")
    fails = replace(hang, source=None, path="/nowhere.py")

    def interrupt(done, total, outcome):
        raise KeyboardInterrupt

    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        compile_jobs([hang, fails, hang], parallel=2, timeout_s=60, progress=interrupt)
    assert time.monotonic() - start < 30


def test_a_job_that_does_not_fit_its_file_says_what_is_there(cache):
    half = job("decode", "gfx942", {"x": "*fp8e4nv"})
    outcomes = compile_jobs([half, replace(half, source=None, path="/nowhere.py")], parallel=2)
    assert "lacks ['y']" in outcomes[0].reason
    assert "/nowhere.py: cannot be read" in outcomes[1].reason


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"arch": "gfx90a"}, "known are gfx942"),
        ({"signature": {"x": "*float8"}}, "argument x has type"),
        ({"signature": {"x": "tensordesc<bf16>"}}, "tensordesc<TYPE"),
        ({"signature": {"x": "constexpr"}}, "without a value"),
        ({"divisible": {"z"}}, "which the signature lacks"),
    ],
)
def test_a_job_that_no_compiler_could_take_is_refused(fields, message):
    with pytest.raises(JobError, match=message):
        CompileJob(**{"path": "k.py", "kernel": "k", "arch": "gfx942", "signature": {"x": "i32"}, **fields})


def test_a_sibling_module_is_part_of_the_content(tmp_path):
    (tmp_path / "a.py").write_text("from b import f\n")
    (tmp_path / "b.py").write_text("def f(): return 1\n")
    one = CompileJob(str(tmp_path / "a.py"), "k", "gfx942", {}).digest()
    (tmp_path / "b.py").write_text("def f(): return 2\n")
    assert CompileJob(str(tmp_path / "a.py"), "k", "gfx942", {}).digest() != one


def test_tables_and_json_show_every_row(rows):
    from rich.console import Console

    console = Console(width=200, record=True, file=io.StringIO())
    found = list(rows.values())
    for made in (table.resource_table(found), table.hot_loop_table(found), table.model_table(found)):
        console.print(made)
    console.print(table.versus_table(rows["gfx942"].report, rows["gfx950"].report, names=("mine", "other")))
    text = console.export_text()
    for name in CASES:
        assert name in text
    assert "matrix / 64 KV rows" in text
    assert any("vgpr_spills is" in line for line in table.violations(found))
    data = {entry["label"]: entry for entry in json.loads(table.to_json(found))}
    assert (
        data["gfx942"]["report"]["hot"]["per_64_rows"]["matrix"]
        == 2 * data["gfx942"]["report"]["hot"]["counts"]["matrix"]
    )
    assert data["aborts"]["failure"]["reason"]
    assert data["spills"]["broken"][0]["limit"] == "vgpr_spills"
    assert data["gfx950"]["model"]["predicted_us"] > 0
    assert "source" not in data["gfx942"]["job"]
