"""Other Triton releases, each in a folder of its own, so that a kernel can be compiled under several without touching
the environment that this package runs in."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from mla_codegen.inspect.compile import cache_dir, installed_triton


class VersionError(RuntimeError):
    """A Triton release that could not be had; says what pip said."""


def ensure_triton(version: str) -> Path | None:
    """The folder that holds Triton `version`, installed on first use; None when it is the installed one.

    The folder goes to the front of the compiler process's PYTHONPATH; everything else (torch) stays as installed. Two
    callers at once install twice and keep one.
    """
    if not re.fullmatch(r"\d+(\.\d+)+([abrc.+-]?\w+)*", version):
        raise VersionError(f"{version!r} is no release of Triton; write a version such as 3.6.0")
    if version == installed_triton():
        return None
    target = cache_dir() / "triton" / f"{version}-py{sys.version_info.major}{sys.version_info.minor}"
    if (target / "triton").is_dir():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    part = Path(tempfile.mkdtemp(prefix=f"{version}-", dir=target.parent))
    try:
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
        done = subprocess.run(
            [*pip, "--target", str(part), f"triton=={version}"], capture_output=True, text=True, check=False
        )
        if done.returncode:
            tail = "\n".join((done.stderr or done.stdout).strip().splitlines()[-3:])
            raise VersionError(f"triton {version} could not be installed into {target}:\n{tail}")
        try:
            part.rename(target)
        except OSError:
            if not (target / "triton").is_dir():  # not the other caller's, then a real fault
                raise
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return target
