"""The CDNA4 family: Gluon kernels for gfx950, fp8 (e4m3fn) and bf16 KV.

LDS has a transposing read, which V comes through, and the scaled MMA multiplies 128 fp8 numbers deep: enough to
multiply q as two fp8 numbers.
"""

from mla_codegen.plan.families.amd_gluon import AmdGluon, Form
from mla_codegen.plan.families.request import Request

FP8 = Form("fp8", 128, {16: 8, 32: 8}, 2, frozenset({32}), 16, side_by_side=True)
FP8_TILE64 = Form("fp8_tile64", 64, {16: 4, 32: 8}, 1, frozenset(), 16)
BF16 = Form("bf16", 64, {16: 4, 32: 8}, 0, frozenset(), 0)


class Cdna4(AmdGluon):
    """gfx950."""

    name = "cdna4"
    never = AmdGluon.never | {"packed_fp8": "V comes through the transposing read of LDS, which moves single bytes"}
    taken_as = "fp8_e4m3fn"
    transposes = True

    def form_of(self, request: Request) -> Form | str:
        """The form that serves, or why there is none."""
        if request.kv not in ("fp8_e4m3fn", "bf16"):
            return f"its products are of fp8_e4m3fn and bf16 KV, not of {request.kv}"
        form = BF16 if request.kv == "bf16" else FP8_TILE64 if "fp8_mma" in request.options else FP8
        asked = request.knobs.resolved["block_n"].value
        if asked not in (None, form.block_n):
            why = "" if not request.format.fp8 else f" {'with' if 'fp8_mma' in request.options else 'without'} fp8_mma"
            return f"block_n is {form.block_n} in it for {request.kv} KV{why}, not {asked}"
        return form
