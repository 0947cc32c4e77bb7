"""Hard numbers in plain Triton and in the Hopper family, every way to decode KV, every form of kernel.

The rules, and what holds kernels to them, are in `hard_numbers`; the CDNA families' tests use the same.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
from emulated import Emulated
from hard_numbers import far_heads, hold_non_finite, hold_ones, hold_sinks
from harness import BF16, EXACT, MODES, PORTABLE_FP8, Builder, Got, Mode, check, make_spec
from pages import run as run_paged

from mla_codegen.check.reference import Case, in_pages, make_case
from mla_codegen.check.verify import emulated

each_mode = pytest.mark.parametrize("mode", MODES, ids=str)
SMALL = {"heads": 4, "latent": 64, "rope": 32}
SMALL_HOPPER = {"heads": 4, "latent": 128, "rope": 32}


@dataclass(frozen=True)
class Form:
    """A kernel of the Hopper family: the end of its name, splits if it takes them at run time, rows of a page."""

    kv: str
    part: str
    splits: int | None = None
    page_size: int | None = None

    def __str__(self) -> str:
        paged = f"-pages of {self.page_size}" if self.page_size else ""
        return f"{self.kv}-{self.part}{paged}"

    @property
    def lse_bound(self) -> float:
        return 5e-3 if self.kv.startswith("fp8") else 1e-4


FORMS = [
    Form(kv, *form)
    for kv in ("fp8_e4m3fn", "bf16")
    for form in (
        ("b2_kv256",), ("any_direct",), ("any", 3), ("balanced",), ("any_direct", None, 16), ("balanced", None, 64),
    )
]  # fmt: skip
DIRECT = [form for form in FORMS if form.part == "any_direct" and not form.page_size]
each_form = pytest.mark.parametrize("form", FORMS, ids=str)
Hopper = Callable[..., Callable[[Case], Got]]


@pytest.fixture(scope="module")
def hopper(tmp_path_factory: pytest.TempPathFactory) -> Hopper:
    """`run(case)` of a form in the emulator; the kernels of a spec are built once."""
    folder = tmp_path_factory.mktemp("hard_numbers")
    built: dict[str, Emulated] = {}

    def build(form: Form, **model: int) -> Callable[[Case], Got]:
        key = f"{form.kv} {form.page_size} {model}"
        if key not in built:
            spec = make_spec("sm_90", kv=[form.kv], optimizations=["exp2"], **model)
            spec["defaults"] = {"family": "hopper", "optimizations": ["exp2"]}
            spec["shapes"] = [{"batch": 2, "kv_len": 256, "splits": 3}]
            if form.page_size:
                spec["kv"] = {"layout": "paged", "page_size": form.page_size}
            built[key] = Emulated(spec, folder, f"hard_numbers_{len(built)}")
        kernels = built[key]
        if not form.page_size:
            return lambda case: kernels.run(form.part, case, form.splits)
        kernel = kernels.kernel(form.part)
        module = emulated(str(kernels.folder), f"{kernels.package}.{kernels.plan.name}.{kernel.name}")
        return lambda case: run_paged(module, kernel, in_pages(case, form.page_size), "table", form.splits)

    return build


@each_mode
@pytest.mark.parametrize("splits", [None, 3], ids=["direct", "splits"])
def test_what_is_not_finite_stays_where_it_is_read(build: Builder, mode: Mode, splits: int | None) -> None:
    kernels = build(mode.spec(**SMALL))
    name = kernels.general(direct=splits is None)
    hold_non_finite(lambda case: kernels.run(name, case, splits), mode.kv, 32, **SMALL)


@each_form
def test_what_is_not_finite_on_hopper(hopper: Hopper, form: Form) -> None:
    hold_non_finite(hopper(form, **SMALL_HOPPER), form.kv, 64, **SMALL_HOPPER)


@pytest.mark.parametrize("mode", [BF16, PORTABLE_FP8], ids=str)
def test_what_is_not_finite_in_pages(build: Builder, mode: Mode) -> None:
    kernels = build(mode.spec(**SMALL) | {"kv": {"layout": "paged", "page_size": 16}})
    kernel = kernels.plan.general(mode.kv)[0]
    module = kernels.module(kernel.name)
    hold_non_finite(lambda case: run_paged(module, kernel, in_pages(case, 16).to(kernels.device)), mode.kv, 32, **SMALL)


@pytest.mark.parametrize("mode", [BF16, PORTABLE_FP8], ids=str)
def test_what_is_not_finite_with_every_tile_masked(build: Builder, mode: Mode) -> None:
    """Without a peeled tail, and with exp in place of exp2."""
    spec = mode.spec(**SMALL)
    spec["defaults"]["optimizations"] = list(mode.options)
    kernels = build(spec)
    hold_non_finite(lambda case: kernels.run(kernels.shaped.name, case), mode.kv, 32, **SMALL)


@each_mode
def test_ones_come_out_as_ones(build: Builder, mode: Mode) -> None:
    kernels = build(mode.spec())
    hold_ones(lambda case: kernels.run(kernels.general(direct=True), case), mode.kv)
    hold_ones(lambda case: kernels.run(kernels.general(direct=False), case, 2), mode.kv)


@each_form
def test_ones_on_hopper(hopper: Hopper, form: Form) -> None:
    hold_ones(hopper(form), form.kv)


@each_mode
def test_sinks(build: Builder, mode: Mode) -> None:
    """fp8 weights end 12 nats below the largest, so a sink may lie no higher, and all but the nearest lose digits."""
    kernels = build(mode.spec())
    mma = "fp8_mma" in mode.options
    hold_sinks(
        lambda case: kernels.run(kernels.general(direct=True), case), mode.kv,
        8e-2 if mma else 2 * EXACT, mode.lse_bound, most=8.0 if mma else 18.0,
    )  # fmt: skip


@pytest.mark.parametrize("form", DIRECT, ids=str)
def test_sinks_on_hopper(hopper: Hopper, form: Form) -> None:
    hold_sinks(hopper(form), form.kv, 2 * EXACT, form.lse_bound)


def test_sinks_without_exp2(build: Builder) -> None:
    """The weights' shift in natural units."""
    kernels = build(PORTABLE_FP8.spec() | {"defaults": {"block_n": 32, "optimizations": ["packed_fp8"]}})
    hold_sinks(
        lambda case: kernels.run(kernels.general(direct=True), case), PORTABLE_FP8.kv, 2 * EXACT, PORTABLE_FP8.lse_bound
    )


@pytest.mark.parametrize("mode", [BF16, PORTABLE_FP8], ids=str)
@pytest.mark.parametrize("splits", [None, 2], ids=["direct", "splits"])
def test_heads_far_apart(build: Builder, mode: Mode, splits: int | None) -> None:
    """As `bmm(...).transpose(0, 1)` leaves them: head times stride is past 2^31."""
    kernels = build(mode.spec(**SMALL))
    case = make_case([40, 5], kv_dtype=mode.kv, **SMALL).to(kernels.device)
    far = replace(case, q=far_heads(case.q))
    check(kernels.run(kernels.general(splits is None), far, splits), case.to("cpu"), latent=64)


@pytest.mark.parametrize("form", DIRECT, ids=str)
def test_heads_far_apart_on_hopper(hopper: Hopper, form: Form) -> None:
    case = make_case([40, 5], kv_dtype=form.kv, **SMALL_HOPPER)
    far = replace(case, q=far_heads(case.q))
    check(hopper(form, **SMALL_HOPPER)(far), case, latent=128, lse_bound=form.lse_bound)


@pytest.mark.parametrize("form", [form for form in DIRECT if form.kv.startswith("fp8")], ids=str)
def test_a_head_of_subnormals(hopper: Hopper, form: Form) -> None:
    """q whose largest number would make its scale infinite: scores of 0, not NaN."""
    case = make_case([40, 5], kv_dtype=form.kv, **SMALL_HOPPER)
    case.q[:, 1] *= 2.0**-130
    case.q[0, 2] = 2.0**-133
    assert case.q[:, 1].abs().max() > 0
    check(hopper(form, **SMALL_HOPPER)(case), case, latent=128, lse_bound=form.lse_bound)
