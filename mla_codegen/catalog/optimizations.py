"""The micro-optimisations that a spec may name: what each means, where it exists and what it needs.

Legality lives here alone, as functions that return a reason: validation raises it, `explain` prints it.
"""

from collections.abc import Callable
from dataclasses import dataclass

from mla_codegen.catalog.targets import Target


@dataclass(frozen=True)
class Optimization:
    """One named option. `refused_on(target)` says why a target lacks it, or None where it exists.

    fp8_only: it concerns fp8 KV; for other element types of the same spec it simply does not apply.
    """

    name: str
    meaning: str
    needs: str
    refused_on: Callable[[Target], str | None]
    fp8_only: bool = False


def _everywhere(target: Target) -> str | None:
    return None


def _reciprocal(target: Target) -> str | None:
    return None if target.reciprocal else f"{target.name} kernels hold no instruction of one vendor"


def _xcds(target: Target) -> str | None:
    return None if target.xcds > 1 else f"{target.name} has one die; the remap needs several XCDs (gfx942, gfx950)"


def _fp8_mma(target: Target) -> str | None:
    return None if target.fp8_mma else f"{target.name} has no fp8 matrix instructions that a kernel may rely on"


_ALL = (
    Optimization(
        "exp2",
        "Softmax in base 2: log2(e) is multiplied into the score scale once, so each weight is one exp2 instruction.",
        "nothing",
        _everywhere,
    ),
    Optimization(
        "fast_rcp",
        "Divides by the softmax sum with the hardware's approximate reciprocal (v_rcp_f32, rcp.approx; 1 ulp) "
        "instead of an IEEE division.",
        "AMD or NVIDIA; `portable` keeps the division",
        _reciprocal,
    ),
    Optimization(
        "xcd_remap",
        "Renumbers programs so that neighbours run on one XCD and share its L2: the hardware deals program ids to "
        "the XCDs in turn.",
        "a target with several XCDs (gfx942, gfx950)",
        _xcds,
    ),
    Optimization(
        "streaming_loads",
        "Reads KV with the .cg cache modifier: every row is read once, so it need not displace what L1 holds.",
        "nothing",
        _everywhere,
    ),
    Optimization(
        "peeled_tail",
        "Runs whole tiles without any mask and handles the last, partial tile after the loop.",
        "nothing",
        _everywhere,
    ),
    Optimization(
        "direct_out",
        "With one split stage 1 writes the output itself: no scratch, no stage 2.",
        "splits: 1 (with more splits it does not apply)",
        _everywhere,
    ),
    Optimization(
        "fp8_mma",
        "Rounds q and the softmax weights to fp8 and multiplies in fp8 (error 2e-2 to 3e-2). Without it q keeps its "
        "precision (error about 2e-3): fp8 KV is widened to f16 exactly, or q is two fp8 numbers and the weights are "
        "bf16.",
        "fp8 KV and fp8 matrix instructions (gfx942, gfx950, sm_89 and newer)",
        _fp8_mma,
        fp8_only=True,
    ),
    Optimization(
        "packed_fp8",
        "Reads fp8 rows as words of 16 bits (or of 32 bits with fp8_mma) and splits the columns in registers, so that "
        "V is never moved byte by byte. Columns 2i and 2i+1 (4i .. 4i+3) feed separate accumulators.",
        "fp8 KV",
        _everywhere,
        fp8_only=True,
    ),
)

OPTIMIZATIONS: dict[str, Optimization] = {option.name: option for option in _ALL}

OPT_IN = {"fp8_mma"}  # trades accuracy for speed, so that it is for the user to ask
