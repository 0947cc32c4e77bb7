# Copied by mla-codegen from mla_codegen/runtime/warmup.py. Do not edit: `mla-codegen build` writes it anew.
"""Compile every kernel of a build ahead of the first request.

Triton compiles a kernel when it first meets a kind of arguments: element types, pointers on 16 bytes or not, what is
left out. `warmup` makes one small call of each kernel and kind that a server will make, many at a time (most of a
compilation runs outside of Python's lock), so that no request waits for the compiler. `count_compilations` counts.
"""

import itertools
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import triton

from . import validate
from .arguments import RUN, arguments
from .builds import INDEX, Build, full_device
from .calls import Dispatcher
from .formats import KV_FORMATS
from .launch import ON_AMD, RANGE

PAGES = ("table", "list", "rows")  # ways to give the pages of paged KV
Progress = Callable[[int, int, str], None]


def show(done: int, total: int, kernel: str) -> None:
    """The progress that is shown where none else is asked for: one line on stderr."""
    end = "\n" if done == total else ""
    print(f"\rwarmup {done}/{total} {kernel:<40}", end=end, file=sys.stderr, flush=True)


@dataclass(frozen=True)
class Call:
    """One small call: a kernel, and a kind of arguments."""

    build: Build
    kernel: str
    splits: int | None
    kv: str
    index: torch.dtype
    scaled: bool
    visible: bool
    rows: int  # query rows: kernels that merge any number of splits have one stage 2 for few and one for many
    large: bool  # a KV pool that AMD's 32-bit offsets do not reach over
    pages: str = ""  # how paged KV is given, see `PAGES`
    number: torch.dtype = torch.int32  # of page numbers and lengths
    sink: bool = False  # an attention sink, of sparse KV

    def run(self, device: torch.device, pool: torch.Tensor | None) -> None:
        """Query rows over one KV row, which for a large call lies in `pool`; paged KV is one page."""
        build, row = self.build, self.build.latent + self.build.rope
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            dtype, width = KV_FORMATS[self.kv].element.dtype, build.widths[self.kv]
            size = width * dtype.itemsize * (build.page_size or 1)
            memory = pool if pool is not None and self.large else torch.empty(size, dtype=torch.uint8, device=device)
            kv = memory[:size].zero_().view(dtype).view(-1, width)
            rows = self.rows
            q = torch.zeros((rows, build.heads, row), dtype=build.q, device=device)
            indices = lens = None
            if build.page_size is not None:
                kv = kv.view(-1, build.page_size, width)
            if build.page_size is not None and build.topk is None:
                indices = torch.zeros((1, 1), dtype=self.number, device=device)
                lens = None if self.pages == "rows" else torch.ones(1, dtype=self.number, device=device)
                if self.pages != "table":
                    indices = indices.view(1)
            given: dict[str, Any] = {
                "q": q,
                "kv": kv,
                "qo_indptr": torch.tensor([0, rows], dtype=self.index, device=device),
                "kv_indptr": None if self.pages == "table" else torch.tensor([0, 1], dtype=self.index, device=device),
                "kv_indices": indices,
                "kv_lens": lens,
                "kv_visible": torch.ones(rows, dtype=torch.int32, device=device) if self.visible else None,
                "indices": torch.zeros((rows, build.topk or 0), dtype=torch.int32, device=device),
                "topk_lens": torch.ones(rows, dtype=torch.int32, device=device) if self.visible else None,
                "attn_sink": torch.ones(build.heads, dtype=torch.float32, device=device) if self.sink else None,
                "kv_scale": torch.ones(1, dtype=torch.float32, device=device) if self.scaled else None,
                "sm_scale": 1.0,
                "out": torch.empty((rows, build.heads, build.latent), dtype=build.out, device=device),
                "lse": torch.empty((rows, build.heads), dtype=torch.float32, device=device),
                "splits": self.splits,
                "workspace": None,
            }
            layout = "sparse" if build.topk else "ragged" if build.page_size is None else "paged"
            features = [layout] + ["requests"] * (build.topk is None) + ["any_splits"] * (self.splits is not None)
            build.kernel(self.kernel).run(*[given[one.name] for one in arguments(RUN, features)])


def calls(
    builds: Sequence[Build],
    indices: Sequence[torch.dtype],
    scaled: Sequence[bool] | None,
    visible: Sequence[bool],
    pages: Sequence[str] = PAGES,
    numbers: Sequence[torch.dtype] = (torch.int32,),
    sinks: Sequence[bool] = (False,),
) -> list[Call]:
    """One call for each kernel of `builds` and each kind of arguments."""
    found = []
    for build in builds:
        for kv, choice in build.choices.items():
            scales = (KV_FORMATS[kv].scaled,) if scaled is None else scaled
            pools = (False, True) if ON_AMD else (False,)
            paged = build.page_size is not None and build.topk is None
            ways = [way for way in pages if way != "rows" or build.page_size == 1] if paged else [""]
            kinds = numbers if paged else (torch.int32,)
            ranges, sunk = (indices, (False,)) if build.topk is None else ((torch.int32,), sinks)
            for (kernel, splits, rows), index, scale, seen, large, way, number, sink in itertools.product(
                choice.kernels(), ranges, scales, visible, pools, ways, kinds, sunk
            ):
                found.append(Call(build, kernel, splits, kv, index, scale, seen, rows, large, way, number, sink))
    return found


def warmup(
    dispatcher: Dispatcher,
    device: torch.device | str | None = None,
    *,
    indices: Sequence[torch.dtype] = (torch.int32,),
    scaled: Sequence[bool] | None = None,
    visible: Sequence[bool] = (False,),
    pages: Sequence[str] = PAGES,
    numbers: Sequence[torch.dtype] = (torch.int32,),
    sinks: Sequence[bool] = (False,),
    threads: int | None = None,
    progress: Progress | None = show,
) -> int:
    """Compile the kernels of all builds that serve `device`; afterwards no call of these kinds compiles anything.

    device     where calls will run; None is the current GPU
    indices    dtypes of qo_indptr and kv_indptr that calls will use, both alike
    scaled     whether calls give kv_scale: (True,), (False,) or both; None is with fp8 KV and not with other
    visible    whether calls give kv_visible, or of sparse KV topk_lens, likewise
    pages      how calls give the pages of paged KV: `table` (block_table), `list` (kv_indices with kv_lens), `rows`
               (kv_indices alone, pages of one row)
    numbers    dtypes of block_table, kv_indices and kv_lens that calls will use, all alike
    sinks      whether calls of sparse KV give attn_sink, likewise
    threads    compilations at a time; None is one for each CPU core
    progress   called with (done, of all, kernel) after each; None is silence

    Returns the number of kinds of calls made. Raises what a kernel raises, after the others are through; TypeError or
    ValueError for arguments that are none of these, ValueError if no build serves the device.
    """
    _validate("indices", indices, INDEX)
    _validate("scaled", (False,) if scaled is None else scaled, (True, False))
    _validate("visible", visible, (True, False))
    _validate("sinks", sinks, (True, False))
    _validate("pages", pages, PAGES)
    _validate("numbers", numbers, INDEX)
    if threads is not None and validate.host_int("threads", threads) < 1:
        raise ValueError(f"threads is {threads}; it must be at least 1")
    if progress is not None and not callable(progress):
        raise TypeError(f"progress is {validate.what(progress)}; it must be a function (done, of all, kernel), or None")
    device = full_device(device)
    todo = calls(dispatcher.serving(device), indices, scaled, visible, pages, numbers, sinks)
    if triton.knobs.runtime.interpret:
        threads = 1  # nothing is compiled, and the interpreter runs one kernel at a time
    for call in todo:  # imports take Python's lock: before the threads
        call.build.kernel(call.kernel)
    over_range = any(call.large for call in todo)
    pool_of_kv = torch.empty(RANGE, dtype=torch.uint8, device=device) if over_range else None
    error: BaseException | None = None
    with ThreadPoolExecutor(threads or os.cpu_count()) as pool:
        running = {pool.submit(call.run, device, pool_of_kv): call for call in todo}
        for done, future in enumerate(as_completed(running), start=1):
            error = error or future.exception()
            if progress:
                progress(done, len(todo), running[future].kernel)
    if error:
        raise error
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return len(todo)


def _validate(name: str, given: Sequence[Any], allowed: tuple[Any, ...]) -> None:
    """Several of what is allowed, in a tuple or a list."""
    words = ", ".join(map(str, allowed))
    if not isinstance(given, (tuple, list)):
        raise TypeError(f"{name} is {validate.what(given)}; it must be a tuple of {words}")
    for one in given:
        if not any(type(one) is type(other) and one == other for other in allowed):
            raise ValueError(f"{name} has {one!r}; it may have {words}")


@dataclass
class Compilations:
    """`total` compilations so far, `from_disk` of them read from Triton's cache."""

    total: int = 0
    from_disk: int = 0


@contextmanager
def count_compilations() -> Iterator[Compilations]:
    """Within, count every time that Triton compiles a kernel or loads one from its cache on disk."""
    count = Compilations()
    before = triton.knobs.compilation.listener

    def listener(*args: Any, **kwargs: Any) -> None:
        count.total += 1
        count.from_disk += bool(kwargs.get("cache_hit"))
        if before:
            before(*args, **kwargs)

    triton.knobs.compilation.listener = listener
    try:
        yield count
    finally:
        triton.knobs.compilation.listener = before
