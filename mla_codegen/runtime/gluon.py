"""Which Triton the Gluon kernels are written for: Gluon changes with every release."""

NEEDED = "3.6"


def mismatch() -> str | None:
    """What is wrong with the Triton at hand, and how to mend it; None if it is the one."""
    import triton

    if triton.__version__.split(".")[:2] == NEEDED.split("."):
        return None
    return (
        f"Gluon kernels here are written for triton {NEEDED}, found {triton.__version__}: install triton {NEEDED}, or "
        "build kernels of the portable family (`family: triton` in the spec's defaults, or a spec for `portable`)"
    )
