"""What is known of each target: element types, shared memory, compute units, XCDs.

Everything that varies by architecture is here or in a template folder, never in an `if` elsewhere.
"""

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


AMD_RCP = "steps/reciprocal_amd.py.jinja"
NVIDIA_RCP = "steps/reciprocal_nvidia.py.jinja"
OCP = frozenset({"fp8_e4m3fn"})
FNUZ = frozenset({"fp8_e4m3fnuz"})

_ALL = (
    Target(
        "gfx942", "AMD Instinct MI300X", "amd", 65536, 304, xcds=8, fp8_mma=FNUZ, fp8_convert=FNUZ,
        reciprocal=AMD_RCP, waves_per_eu=True, families=("cdna3", "triton"),
    ),
    Target(
        "gfx950", "AMD Instinct MI355X", "amd", 163840, 256, xcds=8, fp8_mma=OCP, fp8_convert=OCP,
        reciprocal=AMD_RCP, waves_per_eu=True, families=("cdna4", "triton"),
    ),
    Target("sm_80", "NVIDIA A100", "nvidia", 166912, 108, reciprocal=NVIDIA_RCP),
    Target(
        "sm_89", "NVIDIA L40S", "nvidia", 101376, 142, fp8_mma=OCP, fp8_convert=OCP, reciprocal=NVIDIA_RCP,
        pair_decode=True,
    ),
    Target(
        "sm_90", "NVIDIA H200", "nvidia", 232448, 132, fp8_mma=OCP, fp8_convert=OCP, reciprocal=NVIDIA_RCP,
        pair_decode=True, families=("hopper", "triton"),
    ),
    Target(
        "sm_100", "NVIDIA B200", "nvidia", 232448, 148, fp8_mma=OCP, fp8_convert=OCP, reciprocal=NVIDIA_RCP,
        pair_decode=True,
    ),
    Target(
        "sm_120", "NVIDIA RTX PRO 6000", "nvidia", 101376, 188, fp8_mma=OCP, fp8_convert=OCP, reciprocal=NVIDIA_RCP,
        pair_decode=True,
    ),
    Target("portable", "any GPU, and the interpreter", "any", 98304, 128),  # fits sm_89 whole, gfx942 with a tile less
)  # fmt: skip

TARGETS: dict[str, Target] = {target.name: target for target in _ALL}
