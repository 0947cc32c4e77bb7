"""Each named micro-optimisation on and off, where a target has it: the value stays right, the text holds just that."""

import re
from dataclasses import dataclass

import pytest
from harness import Builder, Kernels, check, code_of, make_plans, make_spec

from mla_codegen.catalog.optimizations import OPTIMIZATIONS
from mla_codegen.check.reference import make_case
from mla_codegen.render.templates import render_kernel

# A sign that the rendered file of a kernel holds, with the option and without it.
AMD, NVIDIA = "llvm.amdgcn.rcp.f32", "rcp.approx.ftz.f32"
SIGNS = {
    "exp2": (r"exp2|LOG2E|LN2|log2", r"tl\.exp\(|tl\.log\("),
    "fast_rcp": (r"reciprocal", r"1\.0 / l "),
    "xcd_remap": (r"remap|XCDS", r"program = tl\.program_id\(0\)"),
    "streaming_loads": (r"cache_modifier=\"\.cg\"", None),
    "peeled_tail": (r"whole", None),
    "direct_out": (r"tl\.store\(out \+ out_at\(at\[:, None\]", r"stage2|partial|SPLITS"),
    "fp8_mma": (r"Q_TOP|weights\.to\(tl\.float8", r"tl\.float16"),
    "packed_fp8": (r"WORD|words", None),
}
FP8_BASE = {"portable": ["packed_fp8"], "gfx942": ["packed_fp8"], "gfx950": [], "sm_80": ["packed_fp8"], "sm_90": []}


@dataclass(frozen=True)
class Switch:
    """One option on one target, and what else is on beside it."""

    option: str
    target: str
    beside: tuple[str, ...] = ()

    def __str__(self) -> str:
        return "-".join([self.option, self.target, *self.beside])


SWITCHES = [
    *(Switch(option, "portable") for option in ("exp2", "peeled_tail", "direct_out", "streaming_loads")),
    *(Switch("fast_rcp", target) for target in ("gfx942", "gfx950", "sm_80", "sm_90")),
    *(Switch("xcd_remap", target) for target in ("gfx942", "gfx950")),
    Switch("streaming_loads", "gfx942", ("fp8_mma", "peeled_tail")),
    Switch("exp2", "gfx942", ("fp8_mma",)),
    Switch("peeled_tail", "gfx942", ("fp8_mma",)),
    Switch("direct_out", "gfx942", ("exp2", "fast_rcp", "xcd_remap", "streaming_loads", "peeled_tail", "fp8_mma")),
    Switch("direct_out", "sm_90", ("exp2", "fast_rcp", "streaming_loads", "peeled_tail", "packed_fp8")),
    *(Switch("fp8_mma", target) for target in ("gfx942", "gfx950", "sm_90")),
    *(Switch("packed_fp8", target) for target in ("gfx950", "sm_90")),
    *(Switch("packed_fp8", target, ("fp8_mma",)) for target in ("gfx950", "sm_90")),
]


def spec(switch: Switch, on: bool) -> dict:
    options = [*FP8_BASE[switch.target], *switch.beside, *([switch.option] if on else [])]
    splits = 1 if switch.option == "direct_out" else 2
    shapes = [{"batch": 3, "kv_len": 64, "splits": splits}]
    return make_spec(switch.target, kv=["fp8_e4m3fn"], optimizations=options, shapes=shapes)


def test_every_option_is_switched_on_every_target_that_differs() -> None:
    assert {switch.option for switch in SWITCHES} == set(OPTIMIZATIONS) == set(SIGNS)


@pytest.mark.parametrize("on", [True, False], ids=["on", "off"])
@pytest.mark.parametrize("switch", SWITCHES, ids=str)
def test_right_with_and_without(build: Builder, switch: Switch, on: bool) -> None:
    kernels: Kernels = build(spec(switch, on))
    kernel = kernels.shaped
    assert (switch.option in kernel.optimizations) is on
    case = make_case([65, 0, 7], kv_dtype="fp8_e4m3fn")
    rounded = kernel.fp8_products
    got = kernels.run(kernel.name, case)
    check(got, case, bound=4e-2 if rounded else 3e-3, lse_bound=0.1 if rounded else 1e-4)


@pytest.mark.parametrize("switch", SWITCHES, ids=str)
def test_the_file_holds_what_was_asked_for_and_nothing_else(switch: Switch) -> None:
    with_option, without = (code_of(render_kernel(make_plans(spec(switch, on)).kernels[0])) for on in (True, False))
    present, absent = SIGNS[switch.option]
    assert re.search(present, with_option)
    assert not re.search(present, without)
    if absent is not None:
        assert re.search(absent, without)
        assert not re.search(absent, with_option)


@pytest.mark.parametrize(
    ("target", "own"), [("gfx942", AMD), ("gfx950", AMD), ("sm_80", NVIDIA), ("sm_90", NVIDIA)], ids=str
)
def test_the_reciprocal_is_the_targets_own(target: str, own: str) -> None:
    text = render_kernel(make_plans(spec(Switch("fast_rcp", target), True)).kernels[0])
    assert [name for name in (AMD, NVIDIA) if name in text] == [own]


def test_streaming_marks_every_load_of_kv_and_no_other(build: Builder) -> None:
    text = code_of(render_kernel(make_plans(spec(Switch("streaming_loads", "portable"), True)).kernels[0]))
    loads = re.findall(r"kv_(?:latent|rope) = tl\.load\([^=]*?(?:=[^=]*?)*?\)\n", text)
    assert loads
    assert text.count("tl.load(tile") == text.count(".cg")
