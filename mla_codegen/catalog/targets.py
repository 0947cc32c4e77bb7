"""What is known of each target: element types, shared memory, compute units, XCDs.

Everything that varies by architecture is here or in a template folder, never in an `if` elsewhere.
"""

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Target:
    """One GPU architecture, or `portable`: whatever Triton runs on, the interpreter included.

    name              what `target:` in a spec says, and what a device reports (gfx942, sm_90, ...)
    shared_bytes      LDS / shared memory that one program may use
    compute_units     CUs / SMs of the part the numbers stand for; the split rule fills them
    xcds              chiplets that programs are dealt over in turn (1: none)
    fp8_mma           fp8 formats that the matrix units multiply
    fp8_convert       fp8 formats that the hardware converts to 16 bit; others are decoded with integer operations
    reciprocal        template of an approximate 1/x in fp32; None: none that every GPU has
    pair_decode       assembly that turns two fp8 in 16 bits into f16 exists for this target
    waves_per_eu      the compiler takes an occupancy hint
    families          template folders that serve it, best first
    gpus              names of its GPUs, which a spec may say in the target's place
    """

    name: str
    title: str
    vendor: str
    shared_bytes: int
    compute_units: int
    xcds: int = 1
    fp8_mma: frozenset[str] = frozenset()
    fp8_convert: frozenset[str] = frozenset()
    reciprocal: str | None = None
    pair_decode: bool = False
    waves_per_eu: bool = False
    families: tuple[str, ...] = ("triton",)
    gpus: tuple[str, ...] = ()


AMD_RCP = "steps/reciprocal_amd.py.jinja"
NVIDIA_RCP = "steps/reciprocal_nvidia.py.jinja"
OCP = frozenset({"fp8_e4m3fn"})
FNUZ = frozenset({"fp8_e4m3fnuz"})

_ALL = (
    Target(
        "gfx942", "AMD Instinct MI300X", "amd", 65536, 304, xcds=8, fp8_mma=FNUZ, fp8_convert=FNUZ,
        reciprocal=AMD_RCP, waves_per_eu=True, families=("cdna3", "triton"),
        gpus=("MI300X", "MI300A", "MI325X", "MI308X"),
    ),
    Target(
        "gfx950", "AMD Instinct MI355X", "amd", 163840, 256, xcds=8, fp8_mma=OCP, fp8_convert=OCP,
        reciprocal=AMD_RCP, waves_per_eu=True, families=("cdna4", "triton"),
        gpus=("MI350X", "MI355X"),
    ),
    Target("sm_80", "NVIDIA A100", "nvidia", 166912, 108, reciprocal=NVIDIA_RCP, gpus=("A100", "A800", "A30")),
    Target(
        "sm_89", "NVIDIA L40S", "nvidia", 101376, 142, fp8_mma=OCP, fp8_convert=OCP, reciprocal=NVIDIA_RCP,
        pair_decode=True, gpus=("L40S", "L40", "L20", "L4", "RTX 4090", "RTX 4080", "RTX 6000 Ada"),
    ),
    Target(
        "sm_90", "NVIDIA H200", "nvidia", 232448, 132, fp8_mma=OCP, fp8_convert=OCP, reciprocal=NVIDIA_RCP,
        pair_decode=True, families=("hopper", "hopper_sparse", "triton"),
        gpus=("H100", "H200", "GH200", "H800", "H20"),
    ),
    Target(
        "sm_100", "NVIDIA B200", "nvidia", 232448, 148, fp8_mma=OCP, fp8_convert=OCP, reciprocal=NVIDIA_RCP,
        pair_decode=True, gpus=("B200", "GB200", "B100"),
    ),
    Target(
        "sm_120", "NVIDIA RTX PRO 6000", "nvidia", 101376, 188, fp8_mma=OCP, fp8_convert=OCP, reciprocal=NVIDIA_RCP,
        pair_decode=True, gpus=("RTX PRO 6000", "RTX 5090", "RTX 5080"),
    ),
    Target("portable", "any GPU, and the interpreter", "any", 98304, 128),  # fits sm_89 whole, gfx942 with a tile less
)  # fmt: skip

TARGETS: dict[str, Target] = {target.name: target for target in _ALL}

# GPUs of architectures that have no target: their names are near to others', and `portable` serves them.
WITHOUT_TARGET = {
    "sm_70": ("V100",),
    "sm_75": ("T4", "RTX 2080"),
    "sm_86": ("A10", "A10G", "A16", "A2", "A40", "A6000", "RTX 3080", "RTX 3090"),
    "sm_103": ("B300", "GB300"),
    "sm_121": ("GB10",),
    "gfx908": ("MI100",),
    "gfx90a": ("MI210", "MI250", "MI250X"),
    "gfx1100": ("RX 7900 XTX",),
    "gfx1201": ("RX 9070 XT",),
}


def _key(name: str) -> str:
    """A name as it is compared: without case, blanks, `_` and `-`, and without a maker's words before a GPU's."""
    words = re.sub(r"[\s_-]+", " ", name.strip().lower()).split()
    while words and words[0] in ("nvidia", "amd", "instinct", "geforce", "tesla", "radeon"):
        words.pop(0)
    return "".join(words).removeprefix("rtx")


_BY_KEY = {_key(name): target for target in _ALL for name in (target.name, *target.gpus)}
_OTHERS = {_key(name): arch for arch, names in WITHOUT_TARGET.items() for name in (arch, *names)}


def find_target(name: str) -> Target | None:
    """The target of this name, or of a GPU of this name, however it is spelled (H100, NVIDIA H100, sm90)."""
    return _BY_KEY.get(_key(name))


def architecture_without_target(name: str) -> str | None:
    """The architecture of a GPU that has no target; None for a GPU that has one, and for what is no GPU's name."""
    return _OTHERS.get(_key(name))
