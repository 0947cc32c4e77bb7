"""The CDNA3 family: Gluon kernels for gfx942, fp8 and bf16 KV.

64 KiB of LDS hold one tile, and there is no transposing read: V is turned in registers. Its matrix units multiply
e4m3fnuz, for which the bytes of e4m3fn pass at half their value.
"""

from typing import Any

from mla_codegen.plan.families import amd_gluon
from mla_codegen.plan.families.amd_gluon import Details, Form
from mla_codegen.plan.families.request import Request, Resources
from mla_codegen.plan.families.stages import Stage
from mla_codegen.spec.errors import Problem

NAME = "cdna3"
GLUON = True
ALWAYS = amd_gluon.ALWAYS | {"packed_fp8"}
NEVER = amd_gluon.NEVER
KNOBS: frozenset[str] = frozenset()

FP8 = Form("fp8", 64, {16: 4, 32: 8}, 1, frozenset(), 4)
FP8_EXACT = Form("fp8", 64, {16: 4}, 2, frozenset({16}), 4)
BF16 = Form("bf16", 32, {16: 4, 32: 8}, 0, frozenset(), 4)


def refuse(request: Request) -> str | None:
    """Why the family cannot serve, or None."""
    return amd_gluon.refuse(request, form_of(request))


def resources(request: Request) -> Resources | list[Problem]:
    """Tile and launch numbers, or what stands in their way."""
    return amd_gluon.resources(request, _form(request))


def details(request: Request) -> Details:
    """The rest of what the templates place."""
    return amd_gluon.details(request, _form(request), taken_as="fp8_e4m3fnuz", transposes=False)


def stages(kernel: Any) -> list[Stage]:
    """The kernels in the file of a `KernelPlan`."""
    return amd_gluon.stages(kernel)


def form_of(request: Request) -> Form | str:
    """The form that serves, or why there is none."""
    if request.kv == "fp16":
        return "its products are of fp8 and bf16 KV, not of fp16"
    form = BF16 if request.kv == "bf16" else FP8 if "fp8_mma" in request.options else FP8_EXACT
    asked = request.knobs.resolved["block_n"].value
    if asked not in (None, form.block_n):
        return f"block_n is {form.block_n} in it for {request.kv} KV, not {asked}"
    return form


def _form(request: Request) -> Form:
    form = form_of(request)
    assert isinstance(form, Form)
    return form
