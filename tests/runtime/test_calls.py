"""From a call to its kernel: the choice, what reaches the kernel, and what a wrong call is told. No kernel runs."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import triton
from builds import plan_of, spec_of, tables

from mla_codegen.runtime import calls
from mla_codegen.runtime.splits import choose_splits
from mla_codegen.runtime.tables import Shaped

pytestmark = pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="calls here are made on the CPU")

SHAPES = [{"batch": b, "kv_len": n, "splits": 2} for b, n in ((4, 1024), (4, 8192), (8, 1000), (8, 1500))]


@pytest.fixture(scope="module")
def modules(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Tables of builds by name: portable and gfx942 of one model, sm_90 of another."""
    amd = spec_of("gfx942", defaults={"optimizations": ["packed_fp8"]}, shapes=SHAPES)
    other = spec_of("sm_90", model={"num_heads": 40}, shapes=SHAPES)
    plans = [plan_of(spec_of(shapes=SHAPES), "any.yaml"), plan_of(amd, "amd.yaml"), plan_of(other, "other.yaml")]
    found = tables(plans, tmp_path_factory.mktemp("calls"), "calls_package")
    return {plan.name: module for plan, module in zip(plans, found, strict=True)}


class Recorded(calls.Dispatcher):
    """A dispatcher whose kernels note (name, arguments) and write zeros."""

    def __init__(self, *tables: Any):
        super().__init__(list(tables), "mla-codegen build")
        self.seen: list[tuple[str, tuple[Any, ...]]] = []
        for build in self.builds:
            build.kernel = lambda name, build=build: SimpleNamespace(run=self.note(f"{build.target}:{name}"))

    def note(self, name: str) -> Any:
        def run(*arguments: Any) -> None:
            self.seen.append((name, arguments))
            arguments[7].zero_()

        return run

    @property
    def last(self) -> str:
        return self.seen[-1][0].split(":")[1]


@pytest.fixture
def dispatcher(modules: dict[str, Any]) -> Recorded:
    return Recorded(modules["any"])


def call(rows: int = 4, kv_rows: int = 64, *, heads: int = 16, **changes: Any) -> dict[str, Any]:
    """Arguments of `mla_decode`, all right but for `changes`."""
    indptr = torch.arange(rows + 1, dtype=torch.int32)
    arguments = {
        "q": torch.zeros(rows, heads, 576, dtype=torch.bfloat16),
        "kv": torch.zeros(kv_rows, 576, dtype=torch.bfloat16),
        "qo_indptr": indptr,
        "kv_indptr": indptr.clamp(max=kv_rows),
        "sm_scale": 0.1,
    }
    return {**arguments, **changes}


# Shapes: 4 rows x 1024 and 8192, 8 rows x 1000 and 1500 (which meet at their geometric mean, 1224.7).
CHOICES = [
    (4, 1024, "b4_kv1024"), (4, 512, "b4_kv1024"), (4, 511, "any"), (4, 2047, "b4_kv1024"), (4, 2048, "any"),
    (4, 4095, "any"), (4, 4096, "b4_kv8192"), (4, 16383, "b4_kv8192"), (4, 16384, "any"),
    (8, 1224, "b8_kv1000"), (8, 1225, "b8_kv1500"), (8, 499, "any"), (8, 3000, "any"), (5, 1024, "any"),
    (4, 0, "any_direct"), (4, 20, "any_direct"), (4096, 1024, "any_direct"),
]  # fmt: skip


@pytest.mark.parametrize(("rows", "kv_len", "kernel"), CHOICES)
def test_choice(dispatcher: Recorded, rows: int, kv_len: int, kernel: str) -> None:
    dispatcher.mla_decode(**call(rows), max_kv_len=kv_len)
    assert dispatcher.last == f"bf16_{kernel}"


@pytest.mark.parametrize(("rows", "kv_len"), [(5, 1024), (1, 300), (30, 5000)])
def test_general_kernels_get_the_split_rules_count(dispatcher: Recorded, rows: int, kv_len: int) -> None:
    dispatcher.mla_decode(**call(rows), max_kv_len=kv_len)
    general = dispatcher.builds[0].choices["bf16"].general
    tiles = -(-kv_len // general.block_n)
    assert dispatcher.seen[0][1][9] == choose_splits(
        rows, tiles * general.block_n, general.units, general.resident, general.block_n
    )


def test_without_a_length_the_mean_decides(dispatcher: Recorded) -> None:
    dispatcher.mla_decode(**call(4, 4 * 1024))
    assert dispatcher.last == "bf16_b4_kv1024"


def test_the_choice_is_remembered(dispatcher: Recorded, monkeypatch: pytest.MonkeyPatch) -> None:
    dispatcher.mla_decode(**call(), max_kv_len=1024)
    monkeypatch.setattr(Shaped, "choose", lambda *_: pytest.fail("chosen again"))
    dispatcher.mla_decode(**call(), max_kv_len=1024)
    assert len(dispatcher.seen) == 2


def test_what_is_remembered_is_bounded(dispatcher: Recorded) -> None:
    entry = (SimpleNamespace(run=None), None)
    dispatcher._chosen.update({(0, "bf16", 0, length): entry for length in range(65536)})
    dispatcher.mla_decode(**call(), max_kv_len=1024)
    assert len(dispatcher._chosen) == 1


@pytest.mark.parametrize(("options", "wanted"), [({}, [(4, 16, 512)]), ({"return_lse": True}, [(4, 16, 512), (4, 16)])])
def test_a_call_allocates_what_it_returns_and_nothing_else(
    dispatcher: Recorded, monkeypatch: pytest.MonkeyPatch, options: dict[str, bool], wanted: list[Any]
) -> None:
    arguments = call()
    sizes: list[Any] = []
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *args, **kwargs: sizes.append(args[0]) or empty(*args, **kwargs))
    dispatcher.mla_decode(**arguments, **options)
    assert sizes == wanted


def test_a_scale_is_always_a_float(dispatcher: Recorded) -> None:
    """Triton would compile an integer in, one kernel for each."""
    for scale in (1, np.float64(0.5), np.float32(0.5)):
        dispatcher.mla_decode(**call(sm_scale=scale))
        assert type(dispatcher.seen[-1][1][6]) is float


@pytest.mark.parametrize(
    ("offered", "taken"), [(["bf16", "fp8"], "fp8_e4m3fn"), (["fp8"], "fp8_e4m3fn"), (["bf16"], "bf16")]
)
def test_custom_kernel_takes_the_preferred_form(dispatcher: Recorded, offered: list[str], taken: str) -> None:
    given = call()
    scale = torch.tensor([0.5])
    forms = {"fp8": (given["kv"].to(torch.float8_e4m3fn), scale), "bf16": given["kv"]}
    data = {name: forms[name] for name in offered}
    config = {"batch_size": 4, "sm_scale": 0.25, "kv_seq_len": 1024}
    out = dispatcher.custom_kernel((given["q"], data, given["qo_indptr"], given["kv_indptr"], config))
    assert dispatcher.last == f"{taken}_b4_kv1024"
    assert out.shape == (4, 16, 512)
    arguments = dispatcher.seen[0][1]
    assert arguments[5] is (scale if taken != "bf16" else None)
    assert arguments[6] == 0.25


def test_custom_kernel_without_a_form_that_was_built(dispatcher: Recorded) -> None:
    given = call()
    data = (given["q"], {"int8": given["kv"]}, given["qo_indptr"], given["kv_indptr"], {"sm_scale": 1.0})
    with pytest.raises(ValueError, match=r"kv_data offers \['int8'\]; any.yaml was built for fp8_e4m3fn, bf16 KV"):
        dispatcher.custom_kernel(data)


FORGOTTEN = {
    "fp8 alone": lambda kv: {"fp8": kv.to(torch.float8_e4m3fn)},
    "a pair without": lambda kv: {"fp8": (kv.to(torch.float8_e4m3fn), None)},
    "bytes": lambda kv: {"fp8": kv.to(torch.float8_e4m3fn).view(torch.uint8)},
    "bf16 under the name": lambda kv: {"fp8": kv},
    "under another name": lambda kv: {"bf16": kv.to(torch.float8_e4m3fn)},
    "beside another": lambda kv: {"bf16": kv, "fp8": kv.to(torch.float8_e4m3fn)},
}


@pytest.mark.parametrize("name", FORGOTTEN)
def test_a_scale_is_not_forgotten(dispatcher: Recorded, name: str) -> None:
    given = call()
    data = (given["q"], FORGOTTEN[name](given["kv"]), given["qo_indptr"], given["kv_indptr"], {"sm_scale": 1.0})
    with pytest.raises(TypeError, match=r"kv_data\['\w+'\] has no scale, .*give \(kv, scale\)"):
        dispatcher.custom_kernel(data)
    assert not dispatcher.seen


def test_what_needs_no_scale_may_come_as_a_pair(dispatcher: Recorded) -> None:
    given = call()
    for form in (given["kv"], (given["kv"], None), [given["kv"], torch.ones(1)]):
        data = (given["q"], {"bf16": form, "fp8": None}, given["qo_indptr"], given["kv_indptr"], {"sm_scale": 1.0})
        dispatcher.custom_kernel(data)
    assert len(dispatcher.seen) == 3


TARGET_CASES = [("gfx942", "gfx942"), ("sm_80", "portable"), ("cpu", "portable")]


@pytest.mark.parametrize(("device", "target"), TARGET_CASES)
def test_the_devices_own_target_goes_first(
    modules: dict[str, Any], monkeypatch: pytest.MonkeyPatch, device: str, target: str
) -> None:
    monkeypatch.setattr(calls, "target_of", lambda _: device)
    dispatcher = Recorded(*modules.values())
    dispatcher.mla_decode(**call(), max_kv_len=1024)
    assert dispatcher.seen[0][0].startswith(f"{target}:bf16_")


def test_models_are_told_apart_by_their_heads(modules: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "target_of", lambda _: "sm_90")
    dispatcher = Recorded(*modules.values())
    dispatcher.mla_decode(**call(heads=40), max_kv_len=1024)
    dispatcher.mla_decode(**call(heads=16), max_kv_len=1024)
    assert [name for name, _ in dispatcher.seen] == ["sm_90:bf16_b4_kv1024", "portable:bf16_b4_kv1024"]


def test_a_device_that_nothing_was_built_for(modules: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "target_of", lambda _: "sm_80")
    with pytest.raises(ValueError) as error:
        Recorded(modules["amd"]).mla_decode(**call())
    message = str(error.value)
    assert "no kernel for 16 heads and rows of 576 on sm_80" in message
    assert "gfx942: 16 heads, 512+64, fp8_e4m3fn, bf16 (amd.yaml)" in message
    assert "`target: sm_80`" in message
    assert "`mla-codegen build SPEC`" in message


def test_on_a_cpu_without_the_interpreter(dispatcher: Recorded, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "triton", SimpleNamespace(knobs=SimpleNamespace(runtime=SimpleNamespace(interpret=0))))
    with pytest.raises(ValueError, match="set TRITON_INTERPRET=1 before triton is imported"):
        dispatcher.mla_decode(**call())


BF16, INT = torch.bfloat16, torch.int32
META = torch.zeros(64, 576, dtype=BF16, device="meta")
WRONG: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "q of two dimensions": ({"q": torch.zeros(4, 576)}, ValueError, r"q has shape \(4, 576\)"),
    "heads": ({"q": torch.zeros(4, 8, 576, dtype=BF16)}, ValueError, "no kernel for 8 heads and rows of 576 on cpu"),
    "q dtype": ({"q": torch.zeros(4, 16, 576)}, TypeError, "q is torch.float32; any.yaml was built for torch.bfloat16"),
    "kv dtype": ({"kv": torch.zeros(64, 576)}, TypeError, "kv is torch.float32; .* Add the dtype to `dtypes: kv`"),
    "kv columns": ({"kv": torch.zeros(64, 512, dtype=BF16)}, ValueError, "rows of 512 columns, q of 576"),
    "kv strides": ({"kv": torch.zeros(64, 640, dtype=BF16)[:, :576]}, ValueError, "its rows must be contiguous"),
    "kv device": ({"kv": META}, TypeError, "kv is on meta, where tensors have no values"),
    "indptr device": ({"kv_indptr": torch.zeros(5, dtype=INT, device="meta")}, TypeError, "kv_indptr is on meta"),
    "indptr dtype": ({"qo_indptr": torch.zeros(5)}, TypeError, "qo_indptr is torch.float32; it must be int32 or int64"),
    "indptr lengths": ({"kv_indptr": torch.zeros(4, dtype=INT)}, ValueError, r"kv_indptr \(4,\); both must be"),
    "indptr strides": ({"qo_indptr": torch.zeros(10, dtype=INT)[::2]}, ValueError, "qo_indptr has strides"),
    "indptr dimensions": (
        {"qo_indptr": torch.zeros(5, 1, dtype=INT), "kv_indptr": torch.zeros(5, 1, dtype=INT)},
        ValueError,
        r"both must be \[batch",
    ),
    "kv heads": ({"kv": torch.zeros(64, 2, 576, dtype=BF16)}, ValueError, r"it must be \[total_kv, 576\]"),
    "kv_scale number": ({"kv_scale": 0.5}, TypeError, r"kv_scale is 0.5; it must be a tensor: torch.tensor\(\[0.5\]\)"),
    "kv_scale size": ({"kv_scale": torch.zeros(2)}, ValueError, "must have one element"),
    "out shape": ({"out": torch.zeros(4, 16, 576, dtype=BF16)}, ValueError, r"out is .*shape \(4, 16, 576\)"),
    "out dtype": ({"out": torch.zeros(4, 16, 512)}, ValueError, "out is torch.float32"),
    "lse dtype": ({"lse": torch.zeros(4, 16, dtype=BF16)}, ValueError, "lse is torch.bfloat16"),
    "kv_visible": ({"kv_visible": torch.zeros(3, dtype=INT)}, ValueError, r"must be contiguous int32 \[4\] on cpu"),
    "kv_visible strides": (
        {"kv_visible": torch.zeros(1, dtype=INT).expand(4)},
        ValueError,
        r"strides \(0,\), on cpu; it must be contiguous int32 \[4\]",
    ),
    "length tensor": (
        {"max_kv_len": torch.tensor(5)},
        TypeError,
        "max_kv_len .* is a Tensor.*an int that the host knows",
    ),
    "length float": ({"max_kv_len": 5.0}, TypeError, "max_kv_len .* is 5.0; it must be an int"),
    "length negative": ({"max_kv_len": -5}, ValueError, "max_kv_len .* is -5; it must not be negative"),
    "out with grad": (
        {"out": torch.zeros(4, 16, 512, dtype=BF16, requires_grad=True)}, ValueError, "out requires grad.*decode only",
    ),
    "lse with grad": ({"lse": torch.zeros(4, 16, requires_grad=True)}, ValueError, "lse requires grad.*decode only"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_call_is_told_what_is_wrong(dispatcher: Recorded, name: str) -> None:
    changes, kind, message = WRONG[name]
    with pytest.raises(kind, match=message):
        dispatcher.mla_decode(**call(**changes))
    assert not dispatcher.seen


def test_ranges_are_not_left_out(dispatcher: Recorded) -> None:
    given = call(4)
    with pytest.raises(TypeError, match="kv_indptr is None; it must be a tensor"):
        dispatcher.custom_kernel((given["q"], {"bf16": given["kv"]}, given["qo_indptr"], None, {"sm_scale": 1.0}))
    assert not dispatcher.seen


def test_no_query_rows(dispatcher: Recorded) -> None:
    out, lse = dispatcher.mla_decode(**call(0), return_lse=True)
    assert (out.shape, lse.shape) == ((0, 16, 512), (0, 16))
    assert not dispatcher.seen


def test_no_requests(dispatcher: Recorded) -> None:
    """Query rows of no request: 0 and -inf, without a kernel."""
    none = torch.zeros(1, dtype=torch.int32)
    out, lse = dispatcher.mla_decode(**call(qo_indptr=none, kv_indptr=none), return_lse=True)
    assert (out == 0).all()
    assert (lse == float("-inf")).all()
    assert not dispatcher.seen
