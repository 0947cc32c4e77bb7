"""Call a rendered kernel file on a CPU: its own host code runs, and what it launches is compiled and executed.

Every launch is specialised by its arguments as Triton would on an AMD GPU (`inspect.worker.launch_of`), compiled for
the target in a process of its own, and run by `machine.Kernel`. Grids, arguments and options are those of the file.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from mla_codegen.catalog.releases import installed_triton
from mla_codegen.check.cdna.findings import Finding
from mla_codegen.check.cdna.machine import Counts, Kernel, Pointer
from mla_codegen.inspect import hazards
from mla_codegen.inspect.compile import Compiled, Failed, compile_jobs
from mla_codegen.inspect.excerpt import excerpt
from mla_codegen.inspect.job import CompileJob
from mla_codegen.inspect.worker import launch_of

_SCALARS = {"i32": "<i", "i64": "<q", "u32": "<I", "u64": "<Q", "fp32": "<f", "fp64": "<d", "i1": "<?"}


class DoesNotCompile(RuntimeError):
    """The compiler gave nothing for a launch; the message has its reason."""


@dataclass(frozen=True)
class Launch:
    """What one launch was and did."""

    kernel: str
    programs: int
    compiled: Compiled
    executable: Kernel
    arguments: tuple[Pointer | bytes, ...]
    counts: Counts
    findings: tuple[Finding, ...]

    def again(self, **how: Any) -> tuple[Counts, list[Finding]]:
        """The same launch once more, on what its arguments' memory holds now. Arguments: see `Kernel.launch`."""
        made = self.compiled.metadata
        return self.executable.launch(self.programs, made["num_warps"], made["shared"], self.arguments, **how)


@dataclass
class Session:
    """Launches of rendered files for one target.

    arch      gfx942 or gfx950
    before    argument -> bytes by which its pointer lies before the array that is given: as if that were a part of
              an array of many GiB. It is then compiled as a tensor of 2 GiB and more
    count     arguments of which reads are counted
    traffic   count bytes and bank conflicts of LDS
    launches  those that were made
    """

    arch: str
    before: Mapping[str, int] = field(default_factory=dict)
    count: frozenset[str] = frozenset()
    traffic: bool = False
    timeout_s: float = 600.0
    launches: list[Launch] = field(default_factory=list)
    _kernels: dict[CompileJob, tuple[Compiled, Kernel]] = field(default_factory=dict)

    @property
    def findings(self) -> list[str]:
        """All faults of all launches, each once; those between instructions too close on any path with them."""
        found: dict[str, None] = {}
        for launch in self.launches:
            for one in launch.findings:
                found[f"{launch.kernel}: {one}"] = None
        for compiled, _ in self._kernels.values():
            name = compiled.metadata["name"]
            for hazard in hazards.find(compiled.asm, name, self.arch):
                found[f"{name}: {hazard}"] = None
        return list(found)

    @contextmanager
    def of(self, module: ModuleType) -> Iterator[None]:
        """Within, kernels of `module` that its `run` launches are compiled and executed here."""
        from triton.runtime.jit import JITFunction

        assert module.__file__ is not None
        text = Path(module.__file__).read_text(encoding="utf-8")

        def run(function: Any, *args: Any, **options: Any) -> None:
            (programs, *others) = options.pop("grid")
            options.pop("warmup", None)
            if any(size != 1 for size in others):
                raise ValueError(f"{function.__name__}: a grid of more than one dimension")
            self._launch(function, text, int(programs), args, options)

        original = JITFunction.run
        JITFunction.run = run
        try:
            yield
        finally:
            JITFunction.run = original

    def _launch(self, function: Any, text: str, programs: int, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        name = function.__name__
        fields = launch_of(function, args, options)
        fields["within_2gb"] = [one for one in fields["within_2gb"] if one not in self.before]
        job = CompileJob(f"{name}.py", name, self.arch, source=excerpt(text, name), **fields)
        compiled, kernel = self._kernel(job)
        given = {**dict(zip(function.arg_names, args, strict=False)), **options}
        kinds = ((one, job.signature[one]) for one in function.arg_names if job.signature[one] != "constexpr")
        arguments = [self._argument(one, kind, given[one]) for one, kind in kinds]
        counts, findings = kernel.launch(
            programs, compiled.metadata["num_warps"], compiled.metadata["shared"], arguments, count_traffic=self.traffic
        )
        self.launches.append(Launch(name, programs, compiled, kernel, tuple(arguments), counts, tuple(findings)))

    def _kernel(self, job: CompileJob) -> tuple[Compiled, Kernel]:
        if job not in self._kernels:
            (outcome,) = compile_jobs([job], parallel=1, timeout_s=self.timeout_s, triton=installed_triton())
            if isinstance(outcome, Failed):
                raise DoesNotCompile(f"{job.kernel} for {job.arch}: {outcome.reason}")
            self._kernels[job] = outcome, Kernel(outcome.asm, outcome.binary)
        return self._kernels[job]

    def _argument(self, name: str, kind: str, value: Any) -> Pointer | bytes:
        if not kind.startswith("*"):
            return struct.pack(_SCALARS[kind], value)
        return Pointer(name, memory_of(value), self.before.get(name, 0), name in self.count)


def memory_of(tensor: Any) -> Any:
    """The bytes of a CPU tensor from its first element to its last, as a numpy array that shares them."""
    import torch

    if tensor.numel() == 0:
        return np.zeros(0, np.uint8)
    span = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.as_strided((span,), (1,)).view(torch.uint8).numpy()
