"""What to compile, as plain data: one record that names a kernel, a target and how its arguments look.

A job is what the rest of this package passes around, hashes for the cache and sends to the compiler's process as JSON,
so it holds text, numbers and nothing live: no tensors, no Triton objects, no Triton import.
"""

from __future__ import annotations

import ast
import hashlib
import json
import re
from collections.abc import Mapping, Set
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from mla_codegen.runtime.formats import ELEMENTS

Value = bool | int | float | str | None

AMD_ARCHES = ("gfx942", "gfx950")
NVIDIA_ARCHES = ("sm_80", "sm_90", "sm_120")
ARCHES = AMD_ARCHES + NVIDIA_ARCHES

_SCALARS = frozenset(["i1", "i8", "i16", "i32", "i64", "u1", "u8", "u16", "u32", "u64", "fp16", "bf16", "fp32", "fp64"])
_ELEMENTS = _SCALARS | {"fp8e4b15", *(element.mangled for element in ELEMENTS.values())}
_DESCRIPTOR = re.compile(r"tensordesc<(\w+)\[([\d, ]+)\](?:,\s*(.+))?>$")


class JobError(ValueError):
    """A job that no compiler could take; the message names the field, the value and what is allowed."""


@dataclass(frozen=True)
class CompileJob:
    """One kernel to compile for one target.

    path        the Python file that holds the kernel (`@triton.jit` or `@gluon.jit`)
    kernel      its name in that file
    arch        gfx942, gfx950, sm_80, sm_90 or sm_120
    signature   argument name -> type: `*bf16`, `*fp8e4nv`, `i32`, `fp32`, `constexpr`, or a tensor descriptor (TMA),
                `tensordesc<fp8e4nv[64, 512]>` in Triton, with the shared-memory layout behind the block in Gluon:
                `tensordesc<fp8e4nv[64, 512],NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=2)>`.
                Arguments that `constexprs` names may be left out. An argument passed as None is a constexpr None.
    constexprs  argument name -> value; a string that starts with `=` is an expression of the file's own module
                (`"=tl.float8e4nv"`)
    options     compiler options: num_warps, num_stages, waves_per_eu, maxnreg, ...
    divisible   names of arguments known to be divisible by 16 (pointers: aligned to 16 bytes); without it no load is
                vectorised
    source      the file's text where it is not on disk (yet); `path` then only gives the name
    within_2gb  names of pointers whose tensors are under 2 GiB: a launch on AMD knows that and uses buffer
                instructions, so a binary compiled without it can differ from the one that runs. No effect on NVIDIA
    """

    path: str
    kernel: str
    arch: str
    signature: Mapping[str, str]
    constexprs: Mapping[str, Value] = field(default_factory=dict)
    options: Mapping[str, Value] = field(default_factory=dict)
    divisible: Set[str] = frozenset()
    source: str | None = None
    within_2gb: Set[str] = frozenset()

    def __post_init__(self) -> None:
        object.__setattr__(self, "path", str(self.path))
        object.__setattr__(self, "divisible", frozenset(self.divisible))
        object.__setattr__(self, "within_2gb", frozenset(self.within_2gb))
        object.__setattr__(self, "signature", {**self.signature, **dict.fromkeys(self.constexprs, "constexpr")})
        if self.arch not in ARCHES:
            raise JobError(f"arch {self.arch!r}: known are {', '.join(ARCHES)}")
        for name, kind in self.signature.items():
            _check_type(self.kernel, name, kind)
            if kind == "constexpr" and name not in self.constexprs:
                raise JobError(f"{self.kernel}: argument {name} is a constexpr without a value; add it to constexprs")
        for field_name in ("divisible", "within_2gb"):
            unknown = sorted(getattr(self, field_name) - set(self.signature))
            if unknown:
                raise JobError(f"{self.kernel}: {field_name} names {', '.join(unknown)}, which the signature lacks")

    def __hash__(self) -> int:
        return hash(self.canonical())

    @property
    def vendor(self) -> str:
        """`amd` or `nvidia`."""
        return "amd" if self.arch.startswith("gfx") else "nvidia"

    @property
    def num_warps(self) -> int:
        """Warps (waves) of a program: the option, or Triton's default of 4."""
        return int(self.options.get("num_warps") or 4)

    def text(self) -> str:
        """The source that will be compiled. Raises JobError when the file cannot be read."""
        if self.source is not None:
            return self.source
        try:
            return Path(self.path).read_text(encoding="utf-8")
        except OSError as error:
            raise JobError(f"{self.path}: cannot be read ({error.strerror})") from error

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready fields, the sets sorted."""
        fields = asdict(self)
        fields.update(divisible=sorted(self.divisible), within_2gb=sorted(self.within_2gb))
        return fields

    def canonical(self) -> str:
        """One text for one meaning: sorted JSON of everything but the path's folder."""
        fields = self.as_dict()
        fields["path"] = Path(self.path).name
        return json.dumps(fields, sort_keys=True)

    def digest(self) -> str:
        """SHA-256 of the job, the file's text and the text of the sibling modules that it imports."""
        content = hashlib.sha256(self.canonical().encode())
        for text in (self.text(), *_sibling_texts(Path(self.path), self.text())):
            content.update(b"\0" + text.encode())
        return content.hexdigest()


def _check_type(kernel: str, name: str, kind: str) -> None:
    if kind == "constexpr" or kind in _SCALARS:
        return
    if kind.startswith("*") and kind.lstrip("*").removeprefix("k") in _ELEMENTS:
        return
    match = _DESCRIPTOR.match(kind)
    if match and match[1] in _ELEMENTS:
        return
    raise JobError(
        f"{kernel}: argument {name} has type {kind!r}; write a scalar (i32, fp32), a pointer (*bf16, *fp8e4nv), "
        "constexpr, or tensordesc<TYPE[ROWS, COLUMNS]> (Gluon: tensordesc<TYPE[ROWS, COLUMNS],NVMMASharedLayout(...)>)"
    )


def _sibling_texts(path: Path, text: str, seen: set[Path] | None = None) -> list[str]:
    """Texts of the modules beside `path` that it imports, theirs included, each once."""
    seen = {path.resolve()} if seen is None else seen
    try:
        tree = ast.parse(text)
    except SyntaxError:
        return []
    names: list[str] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            base = "../" * max(node.level - 1, 0) + (node.module or "").replace(".", "/")
            names += [base, *(f"{base}/{alias.name}".lstrip("/") for alias in node.names)]
        elif isinstance(node, ast.Import):
            names += [alias.name.replace(".", "/") for alias in node.names]
    texts = []
    for name in names:
        sibling = (path.parent / f"{name}.py").resolve()
        if name and sibling not in seen and sibling.is_file():
            seen.add(sibling)
            texts.append(sibling.read_text(encoding="utf-8"))
            texts += _sibling_texts(sibling, texts[-1], seen)
    return texts
