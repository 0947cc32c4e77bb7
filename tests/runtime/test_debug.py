"""Debug mode: what is wrong with the values of a call, and memory that is written and read as two things."""

import importlib
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

from steps import SMALL, built

from mla_codegen.check.reference import in_pages, make_case
from mla_codegen.runtime import debug

PACKAGE = "debug_build"
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SIZES = {"heads": 2, "latent": 64, "rope": 32}
LENS = [40, 3, 20]


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """Ragged KV, pages of 16 and of 1; debug mode is on, on a GPU too."""
    folder = tmp_path_factory.mktemp("debug")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(debug.VARIABLE, "1")
        for name, size in (("ragged", None), ("table", 16), ("rows", 1)):
            built(SMALL | ({"kv": {"layout": "paged", "page_size": size}} if size else {}), folder, f"{PACKAGE}_{name}")
    decode = {name: sys.modules[f"{PACKAGE}_{name}.dispatch"].mla_decode for name in ("ragged", "table", "rows")}
    return SimpleNamespace(folder=folder, **decode, list=decode["table"])


def right(form: str) -> dict[str, Any]:
    """Arguments of a right call over LENS, its first query row of no request."""
    case = make_case(LENS, q_lens=[2, 1, 1], **SIZES).to(DEVICE)
    common = {"q": torch.cat([case.q[:1], case.q]), "qo_indptr": case.qo_indptr + 1, "sm_scale": case.sm_scale}
    if form == "ragged":
        return {**common, "kv": case.kv, "kv_indptr": case.kv_indptr}
    pages = in_pages(case, 1 if form == "rows" else 16).to(DEVICE)
    common["kv"] = pages.kv
    if form == "table":
        return {**common, "block_table": pages.block_table, "kv_lens": pages.kv_lens}
    lens = {} if form == "rows" else {"kv_lens": pages.kv_lens}
    return {**common, "kv_indptr": pages.kv_indptr, "kv_indices": pages.kv_indices, **lens}


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def changed(tensor: torch.Tensor, at: Any, value: int) -> torch.Tensor:
    tensor = tensor.clone()
    tensor[at] = value
    return tensor


Change = Callable[[dict[str, Any]], dict[str, Any]]
WRONG: dict[str, tuple[str, Change, str]] = {
    "queries begin below 0": ("ragged", lambda c: {"qo_indptr": ints(-1, 3, 4, 5)}, "qo_indptr begins at -1"),
    "queries fall": (
        "ragged", lambda c: {"qo_indptr": ints(1, 4, 3, 5)}, "qo_indptr falls at request 1: from 4 to 3",
    ),
    "queries past the end": (
        "ragged", lambda c: {"qo_indptr": ints(1, 3, 4, 6)}, "qo_indptr ends at 6; q has 5 query rows",
    ),
    "queries past the end, paged": ("table", lambda c: {"qo_indptr": ints(1, 3, 4, 1 << 30)}, "qo_indptr ends at 107"),
    "KV falls": (
        "ragged", lambda c: {"kv_indptr": ints(0, 40, 30, 50)},
        "kv_indptr gives request 1 the rows 40 to 30; it must not fall",
    ),
    "KV below 0": ("ragged", lambda c: {"kv_indptr": ints(-3, 40, 43, 63)}, "request 0 the rows -3 to 40; .* negative"),
    "KV past the end": (
        "ragged", lambda c: {"kv_indptr": ints(0, 40, 43, 70)}, "request 2 the rows 43 to 70; kv has 69 rows",
    ),
    "KV far past the end": (
        "ragged", lambda c: {"kv_indptr": ints(0, 40, 43, 2**31 - 1)}, "43 to 2147483647; kv has 69 rows",
    ),
    "KV in int64": (
        "ragged", lambda c: {"kv_indptr": ints(0, 40, 43, 0).long() + torch.tensor([0, 0, 0, 1 << 40], device=DEVICE)},
        "43 to 1099511627776; kv has 69 rows",
    ),
    "visible below 0": (
        "ragged", lambda c: {"kv_visible": ints(-9, 3, 0, -1, 2)}, "kv_visible of query row 3 is -1; it must not be",
    ),
    "lengths below 0": ("table", lambda c: {"kv_lens": ints(40, -1, 20)}, "kv_lens of request 1 is -1; it must not be"),
    "a table too short": (
        "table", lambda c: {"kv_lens": ints(40, 3, 100)}, r"is 100, which takes 7 pages of 16; block_table has \d for",
    ),
    "a page below 0": (
        "table", lambda c: {"block_table": changed(c["block_table"], (0, 2), -1)}, "request 0 page -1 at 2; kv has",
    ),
    "a page past the pool": (
        "table", lambda c: {"block_table": changed(c["block_table"], (2, 1), 999)}, "request 2 page 999 at 1; kv has",
    ),
    "a list too short": (
        "list", lambda c: {"kv_lens": ints(40, 17, 20)}, "request 1 is 17, which takes 2 pages of 16; kv_indices has 1",
    ),
    "a listed page past the pool": (
        "list", lambda c: {"kv_indices": changed(c["kv_indices"], 3, 999)}, "kv_indices gives request 1 page 999 at 0",
    ),
    "a list's ranges fall": ("list", lambda c: {"kv_indptr": ints(0, 3, 1, 6)}, "the entries 3 to 1; it must not fall"),
    "a list's ranges past its end": (
        "list", lambda c: {"kv_indptr": ints(0, 3, 4, 60)}, r"the entries 4 to 60; kv_indices has \d+ entries",
    ),
    "rows past the pool": (
        "rows", lambda c: {"kv_indices": changed(c["kv_indices"], 41, 10**6)}, "request 1 page 1000000 at 1; kv has",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_wrong_values(package: SimpleNamespace, name: str) -> None:
    form, change, message = WRONG[name]
    given = right(form)
    with pytest.raises(ValueError, match=message):
        getattr(package, form)(**{**given, **change(given)})


NOT_READ: dict[str, tuple[str, Change]] = {
    "as it is": ("ragged", lambda c: {}),
    "as it is, paged": ("table", lambda c: {}),
    "as it is, listed": ("list", lambda c: {}),
    "as it is, pages of one row": ("rows", lambda c: {}),
    "ranges of requests without query rows": (
        "ragged", lambda c: {"qo_indptr": ints(0, 4, 5, 5), "kv_indptr": ints(3, 43, 46, -7)},
    ),
    "lengths of requests without query rows": (
        "table", lambda c: {"qo_indptr": ints(0, 4, 5, 5), "kv_lens": ints(40, 3, 10**6)},
    ),
    "entries behind the last page": ("table", lambda c: {"block_table": changed(c["block_table"], (1, 1), -1)}),
    "kv_visible of rows of no request": ("ragged", lambda c: {"kv_visible": ints(-9, 3, 0, 1, 2)}),
    "kv_visible over the length": ("ragged", lambda c: {"kv_visible": ints(0, 2**31 - 1, 10**6, 4, 21)}),
}  # fmt: skip


@pytest.mark.parametrize("name", NOT_READ)
def test_what_is_not_read_may_hold_anything(package: SimpleNamespace, name: str) -> None:
    """More in kv_visible than there is means all: it is cut to the length."""
    form, change = NOT_READ[name]
    given = right(form)
    out = getattr(package, form)(**{**given, **change(given)})
    assert torch.isfinite(out).all()


def memory(elements: int) -> torch.Tensor:
    return torch.zeros(elements, dtype=torch.bfloat16, device=DEVICE)


def test_overlap(package: SimpleNamespace) -> None:
    """out, lse and workspace lie apart from each other and from all that is read."""
    given = right("ragged")
    rows, out_size = given["q"].shape[0], given["q"].shape[0] * 2 * 64
    pool = memory(1 << 15)
    out, lse = pool[:out_size].view(rows, 2, 64), pool[out_size : out_size + rows * 4].view(torch.float32).view(rows, 2)
    wanted = package.ragged(**given)
    assert torch.equal(package.ragged(**given, out=out, lse=lse, workspace=pool[-4096:]), wanted)  # side by side
    q = pool[: given["q"].numel()].view_as(given["q"])
    q.copy_(given["q"])
    kv = pool[8192 : 8192 + given["kv"].numel()].view_as(given["kv"])
    kv.copy_(given["kv"])
    indptr = pool[-8:].view(torch.int32)
    indptr.copy_(given["qo_indptr"])
    for changes, message in (
        ({"q": q, "out": out}, "out and q overlap"),
        ({"kv": kv, "out": pool[8192 + 63 * 96 :][:out_size].view_as(out)}, "out and kv overlap"),
        ({"qo_indptr": indptr, "workspace": pool[-4096:]}, "workspace and qo_indptr overlap"),
        (
            {"out": out, "lse": pool[out_size - 2 :][: rows * 4].view(torch.float32).view(rows, 2)},
            "out and lse overlap",
        ),
        ({"lse": lse, "workspace": pool[: 1 << 14]}, "lse and workspace overlap"),
        ({"q": q, "lse": q[1].view(-1)[: rows * 4].view(torch.float32).view(rows, 2)}, "lse and q overlap"),
    ):
        with pytest.raises(ValueError, match=f"{message} in memory; what a call writes must lie apart"):
            package.ragged(**{**given, **changes})


def test_between_the_rows_of_q(package: SimpleNamespace) -> None:
    """q may lie strided around what is written: its rows count, not what is between them."""
    given = right("ragged")
    heads_first = memory(2 * 4096).view(2, 4096)
    q = heads_first[:, : 5 * 96].view(2, 5, 96).transpose(0, 1)
    q.copy_(given["q"])
    between = heads_first[0, 512 : 512 + 5 * 2 * 64].view(5, 2, 64)
    assert torch.equal(package.ragged(**{**given, "q": q, "out": between}), package.ragged(**given))
    with pytest.raises(ValueError, match="out and q overlap"):
        package.ragged(**{**given, "q": q, "out": heads_first[0, 472 : 472 + 5 * 2 * 64].view(5, 2, 64)})
    both = memory(5 * 2 * 224).view(5, 2, 224)  # a gap behind each row, too small for anything
    both[..., :96] = given["q"]
    with pytest.raises(ValueError, match="out and q overlap"):
        package.ragged(**{**given, "q": both[..., :96], "out": both.view(-1)[100:740].view(5, 2, 64)})


@pytest.mark.parametrize(("setting", "on"), [(None, ("cpu",)), ("", ("cpu",)), ("0", ()), ("1", ("cpu", "cuda"))])
def test_the_variable(monkeypatch: pytest.MonkeyPatch, setting: str | None, on: tuple[str, ...]) -> None:
    if setting is None:
        monkeypatch.delenv(debug.VARIABLE, raising=False)
    else:
        monkeypatch.setenv(debug.VARIABLE, setting)
    assert debug.devices() == on
    seen: list[Any] = []
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(debug, "check", lambda *given: seen.append("checked"))
    for device in ("cpu", "cuda"):
        q = SimpleNamespace(device=SimpleNamespace(type=device))
        debug.watched(lambda *given: seen.append("run"), None, on)(q)
        assert seen == ["checked", "run"][device not in on :]
        seen.clear()


def test_nothing_is_checked_while_a_graph_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    monkeypatch.setattr(debug, "check", lambda *_: pytest.fail("a check would wait for the device"))
    q = SimpleNamespace(device=SimpleNamespace(type="cuda"))
    seen: list[Any] = []
    debug.watched(lambda *given: seen.append(given), None, ("cpu", "cuda"))(q)
    assert seen == [(q,)]


@pytest.mark.skipif(DEVICE != "cpu", reason="of Triton's interpreter")
def test_python_lives_on(package: SimpleNamespace) -> None:
    """A read far past the KV in a process of its own: an error, and with MLA_CODEGEN_DEBUG=0 the end of the process."""
    script = f"""
import torch
from {PACKAGE}_ragged.dispatch import mla_decode
q, kv = torch.zeros(1, 2, 96, dtype=torch.bfloat16), torch.zeros(4, 96, dtype=torch.bfloat16)
ends = torch.tensor([0, 1], dtype=torch.int32)
far = torch.tensor([1 << 40, (1 << 40) + 4])
try:
    mla_decode(q, kv, ends, far, sm_scale=1.0)
except ValueError as error:
    print(error)
"""
    ended = {}
    for setting in ("", "0"):
        variables = {**os.environ, "PYTHONPATH": str(package.folder), "TRITON_INTERPRET": "1", debug.VARIABLE: setting}
        command = [sys.executable, "-c", script]
        ended[setting] = subprocess.run(command, env=variables, capture_output=True, text=True, check=False)
    assert "the rows 1099511627776 to 1099511627780; kv has 4 rows" in ended[""].stdout
    assert ended[""].returncode == 0
    assert ended["0"].returncode < 0


def test_the_operators_are_checked(package: SimpleNamespace) -> None:
    op = importlib.import_module(f"{PACKAGE}_ragged.op").mla_decode
    given = right("ragged")
    with pytest.raises(ValueError, match="43 to 70; kv has 69 rows"):
        op(**{**given, "kv_indptr": ints(0, 40, 43, 70)})
