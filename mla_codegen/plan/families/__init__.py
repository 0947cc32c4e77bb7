"""Template families: a class each (`base`), and their registry. A family's templates lie in `templates/NAME`."""

from mla_codegen.plan.families.base import Family
from mla_codegen.plan.families.cdna3 import Cdna3
from mla_codegen.plan.families.cdna4 import Cdna4
from mla_codegen.plan.families.hopper import Hopper
from mla_codegen.plan.families.hopper_sparse import HopperSparse
from mla_codegen.plan.families.triton import Triton

FAMILIES: dict[str, Family] = {family.name: family for family in (Cdna3(), Cdna4(), Hopper(), HopperSparse(), Triton())}
