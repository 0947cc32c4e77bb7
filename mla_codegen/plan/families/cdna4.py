"""The CDNA4 family: Gluon kernels for gfx950, fp8 (e4m3fn) and bf16 KV.

LDS has a transposing read, which V comes through, and the scaled MMA multiplies 128 fp8 numbers deep: enough to
multiply q and the weights as two fp8 numbers each.
"""

from typing import Any

from mla_codegen.plan.families import amd_gluon
from mla_codegen.plan.families.amd_gluon import Details, Form
from mla_codegen.plan.families.request import Request, Resources
from mla_codegen.plan.families.stages import Stage
from mla_codegen.spec.errors import Problem

NAME = "cdna4"
GLUON = True
ALWAYS = amd_gluon.ALWAYS
NEVER = amd_gluon.NEVER | {"packed_fp8": "V comes through the transposing read of LDS, which moves single bytes"}
KNOBS: frozenset[str] = frozenset()

FP8 = Form("fp8", 128, {16: 8, 32: 8}, 2, frozenset({32}), 16, side_by_side=True)
FP8_TILE64 = Form("fp8_tile64", 64, {16: 4, 32: 8}, 1, frozenset(), 16)
BF16 = Form("bf16", 64, {16: 4, 32: 8}, 0, frozenset(), 0)


def refuse(request: Request) -> str | None:
    """Why the family cannot serve, or None."""
    return amd_gluon.refuse(request, form_of(request))


def resources(request: Request) -> Resources | list[Problem]:
    """Tile and launch numbers, or what stands in their way."""
    return amd_gluon.resources(request, _form(request))


def details(request: Request) -> Details:
    """The rest of what the templates place."""
    return amd_gluon.details(request, _form(request), taken_as="fp8_e4m3fn", transposes=True)


def stages(kernel: Any) -> list[Stage]:
    """The kernels in the file of a `KernelPlan`."""
    return amd_gluon.stages(kernel)


def form_of(request: Request) -> Form | str:
    """The form that serves, or why there is none."""
    if request.kv not in ("fp8_e4m3fn", "bf16"):
        return f"its products are of fp8_e4m3fn and bf16 KV, not of {request.kv}"
    form = BF16 if request.kv == "bf16" else FP8_TILE64 if "fp8_mma" in request.options else FP8
    asked = request.knobs.resolved["block_n"].value
    if asked not in (None, form.block_n):
        why = "" if not request.is_fp8 else f" {'with' if 'fp8_mma' in request.options else 'without'} fp8_mma"
        return f"block_n is {form.block_n} in it for {request.kv} KV{why}, not {asked}"
    return form


def _form(request: Request) -> Form:
    form = form_of(request)
    assert isinstance(form, Form)
    return form
