"""What is no tensor, no number or no dictionary is a TypeError that names the argument, in every way to call."""

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

from steps import SMALL, built

from mla_codegen.check.reference import in_pages, make_case

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PACKAGE = "validate_build"
SIZES = {"heads": 2, "latent": 64, "rope": 32}

NO_TENSORS: dict[str, Callable[[torch.Tensor], Any]] = {
    "a list": lambda one: one.tolist(),
    "a numpy.ndarray": lambda one: one.float().cpu().numpy() if one.is_floating_point() else one.cpu().numpy(),
    "None": lambda one: None,
    "0.5": lambda one: 0.5,
    "'text'": lambda one: "text",
    "on meta": lambda one: one.to("meta"),
    "layout sparse_coo": lambda one: one.float().to_sparse() if one.is_floating_point() else one.to_sparse(),
    "layout nested": lambda one: torch.nested.nested_tensor([one, one]),
}
NO_NUMBERS = ["0.1", None, float("nan"), float("inf"), 1e39, 10**400, torch.tensor(0.1), [0.1], np.array(0.1), True, 1j]
REQUIRED = {"q", "kv", "qo_indptr"}


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """The modules of a package with ragged KV and pages of 16."""
    folder = tmp_path_factory.mktemp("validate")
    paged = {**SMALL, "kv": {"layout": "paged", "page_size": 16}}
    return SimpleNamespace(
        **{
            name: SimpleNamespace(
                dispatch=sys.modules[f"{PACKAGE}_{name}.dispatch"],
                op=importlib.import_module(f"{PACKAGE}_{name}.op").mla_decode,
                runtime=f"{PACKAGE}_{name}.runtime",
            )
            for name, spec in (("ragged", SMALL), ("pages", paged))
            if built(spec, folder, f"{PACKAGE}_{name}")
        }
    )


def right(form: str) -> dict[str, Any]:
    """Arguments of a right call: KV ragged, or as a table or a list of pages."""
    case = make_case([40, 3], kv_dtype="bf16", **SIZES).to(DEVICE)
    common = {
        "q": case.q, "qo_indptr": case.qo_indptr, "sm_scale": 0.1, "kv_scale": torch.ones(1, device=DEVICE),
        "kv_visible": torch.full((2,), 2, dtype=torch.int32, device=DEVICE),
        "out": torch.empty(2, 2, 64, dtype=torch.bfloat16, device=DEVICE), "lse": torch.empty(2, 2, device=DEVICE),
        "workspace": torch.empty(1 << 16, dtype=torch.uint8, device=DEVICE),
    }  # fmt: skip
    if form == "ragged":
        return {**common, "kv": case.kv, "kv_indptr": case.kv_indptr}
    pages = in_pages(case, 16).to(DEVICE)
    common |= {"kv": pages.kv, "kv_lens": pages.kv_lens}
    if form == "table":
        return {**common, "block_table": pages.block_table}
    return {**common, "kv_indptr": pages.kv_indptr, "kv_indices": pages.kv_indices}


TENSORS = [
    (form, name) for form in ("ragged", "table", "list") for name, value in right(form).items()
    if isinstance(value, torch.Tensor)
]  # fmt: skip


@pytest.mark.parametrize("kind", NO_TENSORS)
@pytest.mark.parametrize("way", ["dispatch", "op"])
def test_no_tensor(package: SimpleNamespace, way: str, kind: str) -> None:
    """Each argument in turn. None is what some of them may be."""
    for form, name in TENSORS:
        given = right(form)
        if kind == "None" and name not in REQUIRED:
            continue
        given[name] = NO_TENSORS[kind](given[name])
        module = package.ragged if form == "ragged" else package.pages
        call = module.op if way == "op" else module.dispatch.mla_decode
        with pytest.raises(TypeError, match=rf"\b{name} is .*{kind}(?!\w).*; it must be"):
            call(**given)


@pytest.mark.parametrize("way", ["dispatch", "op"])
@pytest.mark.parametrize("form", ["ragged", "table", "list"])
def test_the_right_call_is_right(package: SimpleNamespace, way: str, form: str) -> None:
    """What the tests above change one thing of."""
    module = package.ragged if form == "ragged" else package.pages
    (module.op if way == "op" else module.dispatch.mla_decode)(**right(form))


@pytest.mark.parametrize("value", NO_NUMBERS, ids=str)
@pytest.mark.parametrize("way", ["dispatch", "op", "custom_kernel"])
def test_no_number(package: SimpleNamespace, way: str, value: Any) -> None:
    given = {**right("ragged"), "sm_scale": value}
    with pytest.raises(TypeError, match=r"sm_scale.* is .*; it must be a finite fp32 number that the host knows"):
        if way == "op":
            package.ragged.op(**given)
        elif way == "dispatch":
            package.ragged.dispatch.mla_decode(**given)
        else:
            package.ragged.dispatch.custom_kernel(data_of(given, config={"sm_scale": value}))


@pytest.mark.parametrize("value", [5.0, "5", torch.tensor(5), True, [5]], ids=str)
@pytest.mark.parametrize("way", ["dispatch", "op", "custom_kernel"])
def test_no_length(package: SimpleNamespace, way: str, value: Any) -> None:
    given = {**right("ragged"), "max_kv_len": value}
    with pytest.raises(TypeError, match=r"max_kv_len .* is .*; it must be an int that the host knows"):
        if way == "op":
            package.ragged.op(**given)
        elif way == "dispatch":
            package.ragged.dispatch.mla_decode(**given)
        else:
            package.ragged.dispatch.custom_kernel(data_of(given, config={"sm_scale": 1.0, "kv_seq_len": value}))


def data_of(given: dict[str, Any], **changes: Any) -> tuple[Any, ...]:
    parts = {
        "q": given["q"], "kv_data": {"bf16": given["kv"]}, "qo_indptr": given["qo_indptr"],
        "kv_indptr": given["kv_indptr"], "config": {"sm_scale": 1.0}, **changes,
    }  # fmt: skip
    return tuple(parts.values())


def test_parts_of_data(package: SimpleNamespace) -> None:
    given = right("ragged")
    kernel, kv, scale = package.ragged.dispatch.custom_kernel, given["kv"], given["kv_scale"]
    kernel(data_of(given))
    for name in ("q", "qo_indptr", "kv_indptr"):
        for kind, make in NO_TENSORS.items():
            with pytest.raises(TypeError, match=rf"{name} is .*{kind}(?!\w).*; it must be"):
                kernel(data_of(given, **{name: make(given[name])}))
    for kind, make in NO_TENSORS.items():
        if kind not in ("None", "a list"):  # None is no form, a list one of (kv, scale)
            with pytest.raises(TypeError, match=rf"\['bf16'\] is .*{kind}(?!\w).*; it must be"):
                kernel(data_of(given, kv_data={"bf16": make(kv)}))
        if kind != "None":
            with pytest.raises(TypeError, match=rf"the scale of kv_data\['bf16'\] is .*{kind}(?!\w).*; it must be"):
                kernel(data_of(given, kv_data={"bf16": (kv, make(scale))}))
        with pytest.raises(TypeError, match=rf"the KV of kv_data\['bf16'\] is .*{kind}(?!\w).*; it must be"):
            kernel(data_of(given, kv_data={"bf16": (make(kv), scale)}))
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"kv_data": [("bf16", kv)]}, r"kv_data is a list; it must be a dict, such as \{\"fp8\": \(kv, scale\)\}"),
        ({"kv_data": kv}, "kv_data is a Tensor; it must be a dict"),
        ({"kv_data": None}, "kv_data is None; it must be a dict"),
        ({"kv_data": {"bf16": (kv,)}}, r"kv_data\['bf16'\] has 1 parts; it must be \(kv, scale\)"),
        ({"kv_data": {"bf16": (kv, scale, scale)}}, r"kv_data\['bf16'\] has 3 parts"),
        ({"config": None}, "config is None; it must be a dict"),
        ({"config": 0.1}, "config is 0.1; it must be a dict"),
        ({"config": [0.1]}, "config is a list; it must be a dict"),
        ({"config": {}}, r"config has \[\]; it must have sm_scale"),
        ({"config": {"batch_size": 2}}, r"config has \['batch_size'\]; it must have sm_scale"),
    ]
    for changes, message in wrong:
        with pytest.raises(TypeError, match=message):
            kernel(data_of(given, **changes))
    for data in (None, 5, given["q"], {}):
        with pytest.raises(TypeError, match=r"data is .*; it must be \(q, kv_data, qo_indptr, kv_indptr, config\)"):
            kernel(data)
    with pytest.raises(ValueError, match="data has 4 parts"):
        kernel(data_of(given)[:4])


def test_a_message_is_alone(package: SimpleNamespace) -> None:
    """No traceback of what was met first stands before it."""
    with pytest.raises(TypeError) as caught:
        package.ragged.dispatch.mla_decode(**{**right("ragged"), "q": [1.0]})
    assert caught.value.__suppress_context__


def test_the_error_of_a_kernel_comes_through(package: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("out of memory")

    dispatcher = package.ragged.dispatch.DISPATCHER
    monkeypatch.setattr(dispatcher, "_chosen", {})
    monkeypatch.setattr(dispatcher.builds[0], "kernel", lambda name: SimpleNamespace(run=fail))
    with pytest.raises(RuntimeError, match="out of memory"):
        dispatcher.mla_decode(**right("ragged"))


WRONG_WARMUPS: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"indices": torch.int32}, TypeError, "indices is .*; it must be a tuple of torch.int32, torch.int64"),
    ({"indices": (torch.float32,)}, ValueError, "indices has torch.float32; it may have torch.int32, torch.int64"),
    ({"scaled": True}, TypeError, "scaled is True; it must be a tuple of True, False"),
    ({"scaled": (1,)}, ValueError, "scaled has 1; it may have True, False"),
    ({"visible": False}, TypeError, "visible is False; it must be a tuple"),
    ({"pages": "table"}, TypeError, "pages is 'table'; it must be a tuple of table, list, rows"),
    ({"pages": ("tables",)}, ValueError, "pages has 'tables'"),
    ({"numbers": ("int32",)}, ValueError, "numbers has 'int32'"),
    ({"threads": 0}, ValueError, "threads is 0; it must be at least 1"),
    ({"threads": 2.0}, TypeError, "threads is 2.0; it must be an int"),
    ({"progress": True}, TypeError, "progress is True; it must be a function"),
    ({"device": "gpu"}, ValueError, "device is 'gpu'; it must be a torch.device"),
    ({"device": [0]}, TypeError, r"device is \[0\]; it must be a torch.device"),
    ({"device": "meta"}, ValueError, "no kernels for the device meta"),
    ({"device": "cuda:99"}, ValueError, r"no kernels for the device cuda:99: torch sees \d GPUs"),
]


@pytest.mark.parametrize(("changes", "kind", "message"), WRONG_WARMUPS)
def test_warmup(package: SimpleNamespace, changes: dict[str, Any], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        package.ragged.dispatch.warmup(**{"progress": None, **changes})


def test_workspace_bytes(package: SimpleNamespace) -> None:
    ask = package.ragged.dispatch.workspace_bytes
    assert ask(np.int64(4), device=DEVICE) == ask(4, heads=2, device=DEVICE) > 0
    for value in ("4", 4.0, None, torch.tensor(4), True):
        with pytest.raises(TypeError, match=r"total_q is .*; it must be an int"):
            ask(value, device=DEVICE)
    for value in ("2", 2.0, torch.tensor(2)):
        with pytest.raises(TypeError, match=r"heads is .*; it must be an int"):
            ask(4, heads=value, device=DEVICE)
    for device in ("meta", "cuda:99"):
        with pytest.raises(ValueError, match=f"no kernels for the device {device}"):
            ask(4, device=device)
