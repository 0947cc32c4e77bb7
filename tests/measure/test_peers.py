"""The comparison with other libraries: what they are given, what is timed, and what is said of it."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import peer_kernels
import peer_report
import peers
import pytest
import torch
from bench_fakes import FakeDevice
from peer_fakes import HEADS, LATENT, LENS, ROPE, TRITON, define
from peer_kernels import PAGE, PEERS, Missing, Peer, load, paged, prepare
from peer_timing import Job, Run, least, measure

from mla_codegen.check.reference import Case, reference, relative_l2
from mla_codegen.measure.workload import Workload, make_inputs
from mla_codegen.plan.resolve import make_plan
from mla_codegen.spec.load import load_spec

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")
NAMES = {(peer.name, kv): peer for peer in PEERS for kv in peer.prepare}


def work(kv: str, batch: int = len(LENS), kv_len: int = 64, q_len: int = 1) -> Workload:
    return Workload(HEADS, LATENT, ROPE, "bf16", "bf16", kv, batch, kv_len, q_len)


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with the peers' files; their operators are defined for CPU tensors."""
    folder = tmp_path_factory.mktemp("libraries")
    defined = define()
    (folder / "triton_decode_attention.py").write_text(TRITON)
    for peer in PEERS:
        for file in peer.files.values():
            (folder / file).touch()
    before = set(sys.modules)
    yield folder
    for name in set(sys.modules) - before:
        if name.partition(".")[0] == "vllm":
            del sys.modules[name]
    peer_kernels._loaded.clear()
    del defined


@pytest.fixture
def loaded(libraries: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder; loading an empty file is left out, and the processor count does not come from a GPU."""
    monkeypatch.setattr(torch.ops, "load_library", lambda path: None)
    card = type("Card", (), {"multi_processor_count": 132})
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: card)
    return libraries


def test_pages_hold_the_rows_of_their_request() -> None:
    case = make_inputs(work("bf16"), CPU, 0, LENS)
    pages = paged(case)
    assert pages.table.shape == (4, 4) and pages.lens.tolist() == LENS and pages.longest == 200
    bounds = case.kv_indptr.tolist()
    for request, length in enumerate(LENS):
        rows = pages.kv[pages.table[request].long()].flatten(0, 1)[:length, 0]
        assert torch.equal(rows, case.kv[bounds[request] : bounds[request + 1]])
    rest = pages.kv[pages.table[0, 1].long(), 70 - PAGE :]
    assert not rest.any()


def test_full_pages_are_not_copied() -> None:
    case = make_inputs(work("fp8_e4m3fn"), CPU, 0, [128, 64])
    pages = paged(case)
    assert pages.kv.data_ptr() == case.kv.data_ptr() and pages.table.tolist() == [[0, 1], [2, 0]]


@pytest.mark.parametrize("q_len", [1, 2])
@pytest.mark.parametrize("name,kv", NAMES)
def test_each_adapter_gives_its_peer_what_attention_needs(loaded: Path, name: str, kv: str, q_len: int) -> None:
    peer = NAMES[name, kv]
    case = make_inputs(work(kv, q_len=q_len), CPU, 0, LENS)
    if q_len > 1 and name == "vLLM Triton":
        with pytest.raises(Missing, match="one query token a request"):
            prepare(peer, loaded, kv, case, paged(case), LATENT)
        return
    want, _ = reference(case, LATENT)
    call = prepare(peer, loaded, kv, case, paged(case), LATENT)
    for _ in range(2):  # what the first call made is kept
        assert relative_l2(call().reshape(want.shape), want) <= peer.bound(kv)


def test_what_is_missing_is_said(tmp_path: Path) -> None:
    with pytest.raises(Missing, match=r"no _flashmla_C\.abi3\.so in"):
        load(tmp_path, "_flashmla_C.abi3.so")
    (tmp_path / "_vllm_fa3_C.abi3.so").write_text("no library")
    with pytest.raises(Missing, match=r"_vllm_fa3_C\.abi3\.so: .*"):
        load(tmp_path, "_vllm_fa3_C.abi3.so")


@pytest.mark.parametrize("longest,splits", [(1, 1), (1024, 2), (3000, 8), (8192, 16), (131072, 256), (1 << 20, 264)])
def test_splits_of_the_triton_kernel(longest: int, splits: int) -> None:
    assert peer_kernels.triton_splits(longest, 132) == splits


def take(device: FakeDevice, us: float, find: Any) -> Any:
    """A `prepare` whose call takes `us` and returns what `find` makes of the case."""

    def ready(data: tuple[Any, ...], case: Case, pages: Any) -> Any:
        result = find(case)
        return lambda: (device.spend(us), result.clone())[1]

    return ready


def right(case: Case) -> torch.Tensor:
    return reference(case, LATENT)[0].bfloat16()


def absent(case: Case) -> torch.Tensor:
    raise Missing("no library in peers")


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    """Two rows, one of them ragged: a peer at twice our time, a wrong one, a missing one."""
    device = FakeDevice()
    given = [("ours", 10.0, right), ("Slow", 20.0, right), ("Half", 1.0, lambda case: right(case) / 2)]
    runs = [Run(name, take(device, us, find), 1e-2) for name, us, find in given] + [
        Run("Absent", take(device, 1.0, absent), 1e-2)
    ]
    asked = [Job(work("bf16")), Job(work("bf16", 4, 84), (70, 65, 1, 200))]
    rows = [measure(job, runs, device, 15, 0) for job in asked]
    return {
        "device": "Fake",
        "torch": "2",
        "triton": "3",
        "read_tb_s": 4.0,
        "rounds": 15,
        "least_us": least(device, 15),
        "rows": rows,
    }


def test_a_row_has_both_conventions_and_holds_errors(found: dict[str, Any]) -> None:
    ours, slow, half, missing = found["rows"][0]["timings"]
    for kind in ("graph", "ten", "eager", "host"):
        assert ours[kind]["median"] == pytest.approx(10.0) and slow[kind]["median"] == pytest.approx(20.0)
    assert ours["right"] and slow["right"] and not half["right"] and half["error"] == pytest.approx(0.5, abs=0.01)
    assert missing["failure"] == "no library in peers" and missing["graph"] is None and not missing["right"]
    assert found["rows"][1]["shape"] == "4x1..200"


def test_a_peer_that_is_right_only_once_is_wrong() -> None:
    device = FakeDevice()
    calls: list[int] = []

    def tires(data: tuple[Any, ...], case: Case, pages: Any) -> Any:
        result = right(case)
        return lambda: (device.spend(1.0), calls.append(1), result.clone() if len(calls) < 20 else result * 0)[2]

    row = measure(Job(work("bf16")), [Run("Tires", tires, 1e-2)], device, 15, 0)
    assert not row["timings"][0]["right"] and row["timings"][0]["error"] == 1.0


def test_means_leave_out_what_is_wrong(found: dict[str, Any]) -> None:
    slow, half, missing = peer_report.means(found)
    assert slow["shapes"] == 2 and slow["graph"] == slow["ten"] == slow["eager"] == pytest.approx(2.0)
    assert half["shapes"] == missing["shapes"] == 0


def test_the_tables(found: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    peer_report.show(found)
    shown = capsys.readouterr().out
    assert "WRONG" in shown and "no library in peers" in shown and "2.00 graph, 2.00 ten, 2.00 eager" in shown
    path = tmp_path / "found.json"
    path.write_text(json.dumps(peers.without_nan(found)))
    text = peer_report.markdown(json.loads(path.read_text()))
    assert "| shape | ours | of read | error | Slow | x | error |" in text
    assert "| 4x64 | 10.0 / 10.0 |" in text and "20.0 / 20.0 | 2.00 |" in text
    assert "| geometric mean |  |  |  |  | 2.00 / 2.00 |  |" in text
    assert "Half" not in text and "Absent" not in text
    page = tmp_path / "page.md"
    page.write_text("# Page\n\n<!-- results -->\n\nNone yet.\n\n<!-- end -->\n\nMore.\n")
    for _ in range(2):
        peer_report.fill(page, text)
        assert page.read_text() == f"# Page\n\n<!-- results -->\n\n{text}\n\n<!-- end -->\n\nMore.\n"
    page.write_text("# Page\n")
    with pytest.raises(ValueError, match="no line"):
        peer_report.fill(page, text)


def test_the_page_has_marks(found: dict[str, Any], tmp_path: Path) -> None:
    page = tmp_path / "peers.md"
    page.write_text((ROOT / "docs" / "peers.md").read_text(encoding="utf-8"), encoding="utf-8")
    peer_report.fill(page, peer_report.markdown(found))
    assert "| geometric mean |" in page.read_text(encoding="utf-8")


def test_what_is_asked() -> None:
    path = ROOT / "specs" / "h200.yaml"
    plan = make_plan(load_spec(path).spec, str(path))
    spec = peers.jobs(plan, [], False, None, 0)
    assert [job.shape for job in spec] == [f"{s.batch}x{s.kv_len}" for s in plan.spec.shapes] * 2
    uneven, equal = peers.jobs(plan, ["ragged"], False, "bf16", 0)
    assert min(uneven.lens) >= 1 and len(uneven.lens) == 64 and not equal.lens
    assert sum(uneven.lens) == equal.workload.batch * equal.workload.kv_len
    assert uneven.workload.kv_bytes == equal.workload.kv_bytes
    assert peers.jobs(plan, ["8x4x64"], False, "bf16", 0)[0].workload.q_len == 4
    more = peers.jobs(plan, ["1x3000"], True, "fp8_e4m3fn", 0)
    assert len({job.shape for job in more}) == len(more) == 21  # 512x131072 is too large


def test_who_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Ours first; a ragged batch is bounded by the kernel that its longest request gets."""
    asked = []

    def fake(plan: Any, folder: str, package: str) -> Any:
        return type("Ours", (), {"call": sorted, "bound": staticmethod(lambda work: asked.append(work.kv_len) or 0.5)})

    monkeypatch.setattr(peers, "ours", fake)
    job = Job(work("bf16", 4, 84), (70, 65, 1, 200))
    found = peers.runs(None, "", "", job, PEERS, tmp_path)
    assert [run.name for run in found] == ["ours", "FlashMLA", "FlashAttention 3", "vLLM Triton"]
    assert asked == [200] and found[0].bound == 0.5
    assert found[0].prepare((3, 1), None, None)() == [1, 3]
    fp8 = peers.runs(None, "", "", Job(work("fp8_e4m3fn")), PEERS, tmp_path)
    assert [(run.name, run.bound) for run in fp8[1:]] == [("FlashMLA", 4e-2), ("vLLM Triton", 6e-3)]


@pytest.mark.parametrize("heads", [8, 128])
def test_other_numbers_of_heads(heads: int) -> None:
    path = ROOT / "specs" / "h200.yaml"
    spec = load_spec(path).spec
    assert peers.with_heads(spec, 16) is spec
    plan = make_plan(peers.with_heads(spec, heads), str(path))
    assert {(kernel.family, kernel.heads) for kernel in plan.kernels} == {("hopper", heads)}


def test_shapes_on_the_command_line() -> None:
    for given in ("64x8192", "64x4x8192", "ragged"):
        assert peers.shape(given) == given
    with pytest.raises(peers.argparse.ArgumentTypeError, match="write BATCHxKV_LEN"):
        peers.shape("64*8192")


def test_peers_are_pickled_for_the_processes_that_compile() -> None:
    import pickle

    assert all(pickle.loads(pickle.dumps(peer)) == peer for peer in PEERS)
    assert isinstance(PEERS[0], Peer)
