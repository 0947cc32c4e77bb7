"""The plug-in of vLLM: an entry point of `vllm.general_plugins`, which vLLM calls in each of its processes.

It registers `vllm_backend.MlaCodegenBackend` as the backend CUSTOM, by name: nothing else is imported until a
model asks for it, as with `--attention-backend CUSTOM`.
"""

import logging
import os

from mla_codegen.engines.kernels import VARIABLE

TESTED = ("0.25.1",)  # releases of vLLM; the extra in pyproject.toml names the last
BACKEND = "mla_codegen.engines.vllm_backend.MlaCodegenBackend"

logger = logging.getLogger("vllm.mla_codegen")


def register() -> None:
    """Make this backend vLLM's CUSTOM one, unless another plug-in did and no kernels are named for this one."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    custom = AttentionBackendEnum.CUSTOM
    if custom.is_overridden() and custom.get_path() != BACKEND:
        if not os.environ.get(VARIABLE):
            return
        logger.warning("%s is set: mla-codegen's backend replaces %s as CUSTOM", VARIABLE, custom.get_path())
    register_backend(custom, BACKEND)


def judge(version: str) -> str | None:
    """A warning about a release of vLLM that was not tried, None for one that was.

    RuntimeError for one whose classes may be others: not of a minor release that was tried.
    """
    if version in TESTED:
        return None
    tried = ", ".join(TESTED)
    if any(version.split(".")[:2] == known.split(".")[:2] for known in TESTED):
        return f"vLLM is {version}; mla-codegen's backend was tested with {tried}"
    raise RuntimeError(
        f"vLLM is {version}; mla-codegen's backend was tested with {tried}, and MLA classes change between releases. "
        f"`pip install vllm=={TESTED[-1]}`, or take a newer mla-codegen"
    )
