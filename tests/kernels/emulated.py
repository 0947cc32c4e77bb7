"""Gluon kernels of small specs on a CPU: rendered, published and run by the emulator, one by one."""

import importlib
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from harness import Got, make_plans

from mla_codegen.check import emulate
from mla_codegen.check.reference import Case
from mla_codegen.check.verify import emulated, runtime_of
from mla_codegen.plan.resolve import KernelPlan
from mla_codegen.publish.write import fresh_build, publish


class Emulated:
    """The kernels of one spec. `package` must be a name that nobody else imports."""

    def __init__(self, spec: dict[str, Any], folder: Path, package: str):
        self.plan = make_plans(spec)
        self.folder, self.package = folder / package, package
        self.files = fresh_build([self.plan], self.folder)
        publish(self.files, self.folder, {self.plan.name})
        if str(folder) not in sys.path:
            sys.path.insert(0, str(folder))
        importlib.invalidate_caches()
        self._modules: dict[str, ModuleType] = {}

    def kernel(self, part: str) -> KernelPlan:
        """The plan of the kernel whose name ends so: `any`, `any_direct`, `b2_kv256`, ..."""
        return next(kernel for kernel in self.plan.kernels if kernel.name.endswith(f"_{part}"))

    def module(self, part: str) -> ModuleType:
        kernel = self.kernel(part)
        if kernel.name not in self._modules:
            self._modules[kernel.name] = emulated(str(self.folder), f"{self.package}.{self.plan.name}.{kernel.name}")
        return self._modules[kernel.name]

    def run(self, part: str, case: Case, splits: int | None = None, **options: torch.Tensor | None) -> Got:
        """(out, LSE) of the kernel `part`. `options`: kv_visible, workspace."""
        return launch(self.module(part), self.kernel(part), case, splits, **options)

    def run_changed(self, part: str, old: str, new: str, case: Case, splits: int | None = None) -> Got:
        """The same with a fault planted into the kernel's text: `old`, which must be there, becomes `new`."""
        kernel = self.kernel(part)
        path = f"{self.plan.name}/{kernel.name}.py"
        assert old in self.files[path], f"{path} has no {old!r}"
        name = f"{self.package}.{self.plan.name}.{kernel.name}"
        module = emulate.load(self.files[path].replace(old, new), name, package=runtime_of(name))
        return launch(module, kernel, case, splits)


def launch(
    module: ModuleType,
    kernel: KernelPlan,
    case: Case,
    splits: int | None,
    kv_visible: torch.Tensor | None = None,
    workspace: torch.Tensor | None = None,
) -> Got:
    """(out, LSE) of one call. Both hold NaN before, and count as unwritten."""
    shape = (case.q.shape[0], kernel.heads, kernel.latent)
    out = emulate.poison(torch.empty(shape, dtype=torch.bfloat16))
    lse = emulate.poison(torch.empty(shape[:2], dtype=torch.float32))
    given: dict[str, Any] = {} if splits is None else {"splits": splits}
    module.run(
        q=case.q,
        kv=case.kv,
        qo_indptr=case.qo_indptr,
        kv_indptr=case.kv_indptr,
        kv_visible=kv_visible,
        kv_scale=case.kv_scale,
        sm_scale=case.sm_scale,
        out=out,
        lse=lse,
        workspace=workspace,
        **given,
    )
    assert not emulate.unwritten(out).any() and not emulate.unwritten(lse).any()
    return out, lse
