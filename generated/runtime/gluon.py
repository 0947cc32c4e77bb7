# Copied by mla-codegen from mla_codegen/runtime/gluon.py. Do not edit: `mla-codegen build` writes it anew.
"""Whether the Triton at hand is the one that Gluon kernels were rendered for: Gluon changes with every release."""


def mismatch(release: str, spec: str) -> str | None:
    """What is wrong with the Triton at hand, and how to mend it; None if it is of the `release` (3.6) of the kernels.

    spec   the file that the kernels were built from, for the command
    """
    import triton

    found = ".".join(triton.__version__.split(".")[:2])
    if found == release:
        return None
    return (
        f"its kernels are Gluon of triton {release}, and this is triton {triton.__version__}: run "
        f"`mla-codegen build {spec} --triton {found}`, or install triton {release}"
    )
