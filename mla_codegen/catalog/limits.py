"""What of a compiled kernel can be limited: names that `limits:` of a spec takes, and classes of instructions."""

# Every instruction has exactly one of these kinds.
VALU_KINDS = ("permute", "move", "other_valu")
VECTOR_KINDS = ("conversion", "select", *VALU_KINDS)
KINDS = (
    "matrix",
    "transcendental",
    *VECTOR_KINDS,
    "shuffle",
    "lds_read",
    "lds_write",
    "global_load",
    "global_store",
    "async_copy",
    "scratch",
    "wait",
    "barrier",
    "scalar",
)
# Sums of kinds: `valu` is vector arithmetic that has no class of its own elsewhere, `vector` is all that runs on the
# vector ALU at its full rate.
SUMS = {"valu": VALU_KINDS, "vector": VECTOR_KINDS, "total": KINDS}
# What reports and limits speak of: the kinds, and their sums.
CLASSES = ("matrix", "transcendental", "valu", "conversion", "select", "vector", *VALU_KINDS, *KINDS[7:], "total")

FIELDS = (
    "registers",
    "agprs",
    "sgprs",
    "vgpr_spills",
    "sgpr_spills",
    "scratch_bytes",
    "lds_bytes",
    "code_bytes",
)
TABLES = ("hot_loop_per_64_rows", "hot_loop_per_tile")
AT_LEAST = {"resident_programs_at_least": "programs", "waves_per_simd_at_least": "waves_per_simd"}
TOTALS = {f"{name}_total": name for name in CLASSES} | {"cndmask_total": "select"}


def limit_names() -> list[str]:
    """Every name that `limits` may use; the two hot-loop tables take the classes of instructions inside."""
    return [*FIELDS, *TABLES, *AT_LEAST, *TOTALS]
