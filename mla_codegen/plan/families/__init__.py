"""Template families: which kernels each can make, with which numbers, and what its templates need to know.

A family is a module with NAME, GLUON (its stage 1 is Gluon, which Triton's interpreter does not run), ALWAYS
(optimisations that its kernels have in any case), NEVER (those that they lack, with the reason), KNOBS (settings that
concern it alone), `refuse(request)`, `resources(request)`, `details(request)`, and for a resolved kernel
`stages(kernel)`: what of its file is compiled. Its templates lie in `templates/NAME`.
"""

from typing import Any

from mla_codegen.plan.families import cdna3, cdna4, hopper, triton

FAMILIES: dict[str, Any] = {family.NAME: family for family in (cdna3, cdna4, hopper, triton)}
