"""The CDNA3 family: Gluon kernels for gfx942, fp8 and bf16 KV.

64 KiB of LDS hold one tile, and there is no transposing read: V is transposed in registers. Its matrix units multiply
e4m3fnuz, for which the bytes of e4m3fn pass at half their value.
"""

from mla_codegen.plan.families.amd_gluon import AmdGluon, Form
from mla_codegen.plan.families.request import Request

FP8 = Form("fp8", 64, {16: 4, 32: 8}, 1, frozenset(), 4)
FP8_EXACT = Form("fp8_exact", 64, {16: 4}, 2, frozenset({16}), 4)
BF16 = Form("bf16", 32, {16: 4, 32: 8}, 0, frozenset(), 4, packed_in_lds=False)


class Cdna3(AmdGluon):
    """gfx942."""

    name = "cdna3"
    always = AmdGluon.always | {"packed_fp8"}
    taken_as = "fp8_e4m3fnuz"
    transposes = False

    def form_of(self, request: Request) -> Form | str:
        """The form that serves, or why there is none."""
        if request.kv not in ("fp8_e4m3fn", "fp8_e4m3fnuz", "bf16"):
            return f"its products are of fp8 and bf16 KV, not of {request.kv}"
        form = BF16 if request.kv == "bf16" else FP8 if "fp8_mma" in request.options else FP8_EXACT
        asked = request.knobs.resolved["block_n"].value
        if asked not in (None, form.block_n):
            return f"block_n is {form.block_n} in it for {request.kv} KV, not {asked}"
        return form
