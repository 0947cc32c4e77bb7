# Copied by mla-codegen from mla_codegen/runtime/calls.py. Do not edit: `mla-codegen build` writes it anew.
"""From a call to the kernel that serves it: checks, choice (see `choice`), launch."""

import warnings
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
import triton

from . import debug, sparse, validate
from .builds import INDEX, NAMES, Build, Layout, Lists, full_device, target_of, words_of
from .launch import current_device
from .layout import layout_of_kv, layout_of_results
from .paged import Pages, guess_kv_len, page_size, pages_of
from .sparse import Listed
from .tables import refuse_other_versions

BYTES = (torch.uint8, torch.int8)  # a view of fp8 as bytes: taken as the spec's fp8
SCALED = (tuple, list)  # how custom_kernel gets KV with its scale
MOST = validate.LARGEST

Key = tuple[Build, str, int, int, int | None, int, int | None]  # what the choice goes by
Splits = tuple[()] | tuple[int]  # what a kernel takes at run time: nothing, or how many


class Dispatcher:
    """The calls of a `generated` package. `build_command` is what an error tells the user to run."""

    def __init__(self, tables: list[ModuleType], build_command: str):
        refuse_other_versions(tables, build_command)
        self.builds = [Build(table) for table in tables]
        self.build_command = build_command
        self._serving: dict[tuple[torch.device, int, int, Layout], Build] = {}
        self._chosen: dict[Key, tuple[Callable[..., None], Splits]] = {}
        self._debug = debug.devices()
        if triton.knobs.runtime.interpret:
            from . import interpreter

            interpreter.correct()

    def custom_kernel(self, data: tuple[Any, ...]) -> torch.Tensor:
        """One decode step over ragged KV in the form (q, kv_data, qo_indptr, kv_indptr, config).

        kv_data   offers one or several forms: "fp8": (kv, scale), "bf16": kv, "fp16": kv; the first that the spec lists
                  is used
        config    sm_scale, and kv_seq_len and q_seq_len, the longest request's, if known (they only help the choice)

        The rest, the result and the errors are those of `mla_decode`.
        """
        try:
            q, kv_data, qo_indptr, kv_indptr, config = data
            build = self._build(q)
            for name in build.forms:
                form = kv_data.get(name)
                if form is not None:
                    break
            else:
                offered = sorted(map(str, kv_data))
                raise ValueError(f"kv_data offers {offered}; {build.spec} was built for {', '.join(build.kv)} KV")
            kv, kv_scale = form if isinstance(form, SCALED) else (form, None)
            if kv_scale is None and (name == "fp8" or (kv.element_size() == 1 and name not in build.records.values())):
                validate.scale_missing(name)
            sm_scale, kv_len = config["sm_scale"], config.get("kv_seq_len")
            return self._decode(  # type: ignore[return-value]
                build, q, kv, qo_indptr, kv_indptr, None, sm_scale, kv_scale, kv_len, config.get("q_seq_len"), None,
                None, False, None, None, False,
            )  # fmt: skip
        except Exception:
            validate.data(data)
            raise

    def mla_decode(
        self,
        q: torch.Tensor,
        kv: torch.Tensor,
        qo_indptr: torch.Tensor | None = None,
        kv_indptr: torch.Tensor | None = None,
        *,
        sm_scale: float,
        kv_scale: torch.Tensor | None = None,
        kv_visible: torch.Tensor | None = None,
        block_table: torch.Tensor | None = None,
        kv_indices: torch.Tensor | None = None,
        kv_lens: torch.Tensor | None = None,
        max_kv_len: int | None = None,
        max_q_len: int | None = None,
        indices: torch.Tensor | None = None,
        topk_lens: torch.Tensor | None = None,
        attn_sink: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        return_lse: bool = False,
        base2: bool = False,
        workspace: torch.Tensor | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Absorbed MLA decode of a ragged batch, its KV ragged too, in pages, or listed for each query row.

        q            [total_q, heads, latent + rope] in the spec's q dtype; any strides but the last, which is 1
        kv           [total_kv, latent + rope] or [total_kv, 1, latent + rope], contiguous, in one of the spec's KV
                     dtypes (fp8 also as a uint8 or int8 view); the first `latent` columns are key and value
        qo_indptr    [batch + 1] int32 or int64: request b has the query rows qo_indptr[b] .. qo_indptr[b + 1]
        kv_indptr    [batch + 1] likewise for KV rows; query row t of q_len sees the first kv_len - q_len + t + 1
        sm_scale     multiplies the scores
        kv_scale     [1] on the device, what 1.0 of the KV stands for; None is 1.0
        kv_visible   [total_q] int32: how many of its request's KV rows each query row sees, in place of the causal rule
        max_kv_len   KV rows of the longest request, if known; it only helps the choice
        max_q_len    query rows of the request that has most, if known, likewise
        out          [total_q, heads, latent] to write into, strides of rows and heads any multiples of 16 bytes
        lse          [total_q, heads] fp32 to write into, any strides: `[heads, total_q]` memory as its transpose
        base2        the LSE is a logarithm to base 2, not a natural one
        workspace    contiguous memory of any type on q's device, from a multiple of 16 bytes on, `workspace_bytes` or
                     more of it: scratch for this call, so that it allocates none. It may hold anything, and does so
                     afterwards; calls that may run at the same time need one each

        Paged KV: kv is [pages, page_size, latent + rope] or that with a 1 before the last; rows of a page lie side by
        side, pages any multiple of 16 bytes apart, by TMA (Hopper kernels) of a row. And, int32 or int64,
        block_table  [batch, pages of the longest request or more], any strides: the numbers of each request's pages
        kv_lens      [batch]: KV rows of each request
        or, instead of a table, what it lists one request after the other:
        kv_indices   [pages of all requests, or more]
        kv_indptr    [batch + 1] over kv_indices. With pages of one row kv may be [rows, latent + rope], kv_lens None

        Sparse KV: kv is a pool of rows, in pages of any size, and none of the ranges and pages above are asked for:
        indices      [total_q, topk] int32 contiguous: the rows of the pool (page * page_size + place in it) that each
                     query row sees, in any order; -1, anywhere, is none
        topk_lens    [total_q] int32: how many entries of each list count, the first ones; None: all
        attn_sink    [heads] fp32: a score that each head sees and that has no value: out is multiplied by
                     e^lse / (e^lse + e^sink), the LSE is what it is without

        Returns out [total_q, heads, latent], with `return_lse` also the LSE [total_q, heads] fp32, its natural
        logarithm. A query row that sees nothing, or that belongs to no request, gives 0 and -inf. No device sync.
        """
        try:
            pages = None
            if indices is not None:
                sparse.refuse_others(
                    kv_indptr=kv_indptr, block_table=block_table, kv_indices=kv_indices, kv_lens=kv_lens,
                    kv_visible=kv_visible,
                )  # fmt: skip
                return self._decode(
                    self._build(q, Lists(indices.shape[-1])), q, kv, None, None, None, sm_scale, kv_scale, None, None,
                    out, lse, return_lse, workspace, None, base2, Listed(indices, topk_lens, attn_sink),
                )  # fmt: skip
            if qo_indptr is None or topk_lens is not None or attn_sink is not None:
                qo_indptr = sparse.without_lists(topk_lens, attn_sink, qo_indptr)
            if kv_indptr is None or block_table is not None or kv_indices is not None or kv_lens is not None:
                pages = pages_of(q, kv, qo_indptr, kv_indptr, block_table, kv_indices, kv_lens)
            return self._decode(
                self._build(q, pages and pages.size), q, kv, qo_indptr, kv_indptr, kv_visible, sm_scale, kv_scale,
                max_kv_len, max_q_len, out, lse, return_lse, workspace, pages, base2,
            )  # fmt: skip
        except Exception:  # whatever it met: arguments of a wrong type come first, the others were said in words
            validate.arguments(
                q, kv, qo_indptr, sm_scale, max_kv_len, max_q_len, kv_indptr=kv_indptr, kv_scale=kv_scale,
                kv_visible=kv_visible, block_table=block_table, kv_indices=kv_indices, kv_lens=kv_lens, out=out,
                lse=lse, workspace=workspace, indices=indices, topk_lens=topk_lens, attn_sink=attn_sink,
            )  # fmt: skip
            if indices is not None and not indices.dim():
                raise ValueError("indices has no dimension; it must be [total_q, topk]") from None
            raise

    def result(self, q: torch.Tensor, kv: Any = None, **given: Any) -> tuple[tuple[int, int, int], torch.dtype]:
        """Shape and dtype of the output of a call of these arguments; without KV and pages, of ragged KV."""
        _, heads, row = q.shape
        heads, row = int(heads), int(row)  # under torch.compile they may be symbols
        layout: Layout = None
        if given.get("indices") is not None:
            layout = Lists(int(given["indices"].shape[-1]))
        elif given.get("block_table") is not None or given.get("kv_indices") is not None:
            layout = page_size(kv)
        build = self._serving.get((q.device, heads, row, layout)) or self._find(q.device, heads, row, layout)
        return (q.shape[0], build.heads, build.latent), build.out

    def serving(self, device: torch.device | str | None = None, heads: int | None = None) -> list[Build]:
        """The builds that serve calls on a device (None: the current GPU), of so many heads or of any.

        Raises ValueError if there are none.
        """
        device = full_device(device)
        models = dict.fromkeys((build.heads, build.latent + build.rope, build.layout) for build in self.builds)
        found: list[Build] = []
        reasons: list[ValueError] = []
        for model in models:
            if heads in (None, model[0]):
                try:
                    build = self._find(device, *model)
                    found += dict.fromkeys((build, build.several))
                except ValueError as reason:
                    reasons.append(reason)
        if reasons and not found:
            raise reasons[0]
        if not found:
            raise ValueError(f"no kernel for {heads} heads; built for {', '.join(str(one) for one, *_ in models)}")
        return found

    def _build(self, q: torch.Tensor, layout: Layout = None) -> Build:
        if q.dim() != 3:
            raise ValueError(f"q has shape {tuple(q.shape)}; it must be [total_q, heads, latent + rope]")
        _, heads, row = q.shape
        build = self._serving.get((q.device, heads, row, layout))
        if build is None:
            build = self._serving[q.device, heads, row, layout] = self._find(q.device, heads, row, layout)
        return build

    def _find(self, device: torch.device, heads: int, row: int, layout: Layout = None) -> Build:
        """The build for this architecture, model and layout of KV. ValueError: what there is instead."""
        target = target_of(device)
        if target == "cpu" and not triton.knobs.runtime.interpret:
            raise ValueError("q is on the CPU: set TRITON_INTERPRET=1 before triton is imported, or move it to a GPU")
        fitting = [
            build
            for build in self.builds
            if (build.heads, build.latent + build.rope, build.layout) == (heads, row, layout)
        ]
        unfit = {str(build): why for build in fitting if (why := build.unfit(target))}
        candidates = [build for build in fitting if str(build) not in unfit]
        candidates.sort(key=lambda build: build.for_several)
        for build in candidates:
            others = [other for other in candidates if other.for_several and other.takes == build.takes]
            build.several = others[0] if others else build
        for build in candidates:
            if build.target == target:
                return build
        for build in candidates:
            if build.target == "portable":
                for other in fitting:
                    if other.target == target:
                        warnings.warn(f"{other}: {unfit[str(other)]}. Until then slower kernels serve", stacklevel=2)
                return build
        if target == "cpu" and candidates:
            return candidates[0]
        if unfit:
            raise ValueError("; ".join(f"{build}: {why}" for build, why in unfit.items()))
        built = "\n  ".join(str(build) for build in self.builds) or "nothing"
        kv, key = "", ""
        if layout is not None:
            kv = words_of(layout).replace(",", ", KV in" if isinstance(layout, int) else ", KV by")
            said = f"paged, page_size: {layout}" if isinstance(layout, int) else f"sparse, topk: {layout.topk}"
            key = f", `kv: {{layout: {said}}}`"
        elif any(build.layout for build in self.builds):
            kv = ", ragged KV"
        raise ValueError(
            f"no kernel for {heads} heads and rows of {row}{kv} on {target}. Built:\n  {built}\n"
            f"Write a spec with `target: {'portable' if target == 'cpu' else target}`{key} and this model, then run "
            f"`{self.build_command} SPEC`."
        )

    def _decode(
        self,
        build: Build,
        q: torch.Tensor,
        kv: torch.Tensor,
        qo_indptr: Any,  # a tensor, or None where there are lists; kv_indptr likewise
        kv_indptr: Any,
        kv_visible: torch.Tensor | None,
        sm_scale: float,
        kv_scale: torch.Tensor | None,
        kv_len: int | None,
        q_len: int | None,
        out: torch.Tensor | None,
        lse: torch.Tensor | None,
        return_lse: bool,
        workspace: torch.Tensor | None,
        pages: Pages | None,
        base2: bool,
        lists: Listed | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        total_q, heads, _ = q.shape
        rows = kv.shape
        index = q.get_device()  # -1 off the GPU. A number is compared sooner than a torch.device
        usual = kv.is_contiguous()
        if lists is not None:
            batch = total_q
        else:
            if kv_indptr is None or pages is not None:
                if pages is None:
                    raise ValueError("kv_indptr is missing: ragged KV needs it, [batch + 1]")
                kv_indptr = qo_indptr  # `pages` holds what was given, checked
            batch = qo_indptr.numel() - 1
            if total_q > batch:
                build = build.several
        name = NAMES.get(kv.dtype)
        if name not in build.kv:
            name = self._kv_name(build, kv)
        if lists is not None:
            if not sparse.fit(build, name, q, kv, lists, index):
                sparse.check(build, name, q, kv, lists)
        elif (
            q.dtype is not build.q
            or q.stride()[2] != 1
            or rows[-1] != build.widths[name]
            or (not usual and pages is None)
            or (len(rows) != 2 and pages is None and (len(rows) != 3 or rows[1] != 1))
            or kv.get_device() != index
            or qo_indptr.get_device() != index
            or kv_indptr.get_device() != index
            or kv_indptr.numel() != batch + 1
            or qo_indptr.dim() != 1
            or kv_indptr.dim() != 1
            or not qo_indptr.is_contiguous()
            or not kv_indptr.is_contiguous()
            or qo_indptr.dtype not in INDEX
            or kv_indptr.dtype not in INDEX
            or batch < 0
            or (index < 0 and not q.device == kv.device == qo_indptr.device == kv_indptr.device)
        ):
            validate.inputs(build, name, q, kv, qo_indptr, kv_indptr)
        if kv_len is not None and type(kv_len) is not int:
            kv_len = validate.length(kv_len)
        if q_len is not None and type(q_len) is not int:
            q_len = validate.query_length(q_len)
        if type(sm_scale) is not float or not -MOST <= sm_scale <= MOST:
            sm_scale = validate.number("sm_scale", sm_scale)  # a float: an integer would be compiled in
        if kv_scale is not None:
            if not isinstance(kv_scale, torch.Tensor) or kv_scale.numel() != 1 or kv_scale.device != q.device:
                validate.scale(kv_scale, q.device)
            if kv_scale.dtype is not torch.float32:
                kv_scale = kv_scale.to(torch.float32)
        if kv_visible is not None and (
            kv_visible.shape != (total_q,)
            or kv_visible.dtype is not torch.int32
            or not kv_visible.is_contiguous()
            or kv_visible.device != q.device
        ):
            validate.fits("kv_visible", kv_visible, torch.int32, (total_q,), q.device, to_write=False)
        shape = (total_q, heads, build.latent)
        strided = base2
        if out is None:
            out = torch.empty(shape, dtype=build.out, device=q.device)
        elif (
            out.shape != shape
            or out.dtype is not build.out
            or not out.is_contiguous()
            or out.device != q.device
            or out.requires_grad
        ):
            validate.strided("out", out, (build.out,), shape, q.device)
            strided = True
        if lse is None:
            if return_lse:  # else it lies in the scratch
                lse = torch.empty((total_q, heads), dtype=torch.float32, device=q.device)
        elif (
            lse.shape != (total_q, heads)
            or lse.dtype is not torch.float32
            or not lse.is_contiguous()
            or lse.device != q.device
            or lse.requires_grad
        ):
            validate.strided("lse", lse, (torch.float32,), (total_q, heads), q.device)
            strided = True
        if workspace is not None and workspace.device != q.device:  # its size is the kernel's to say
            raise ValueError(f"workspace is on {workspace.device}, q on {q.device}")
        if total_q == 0 or batch == 0:
            out.zero_()
            if lse is not None:
                lse.fill_(float("-inf"))
            return (out, lse) if return_lse else out  # type: ignore[return-value]

        if lists is not None:
            where: tuple[torch.Tensor | None, ...] = lists
            mean = build.topk or 0
        elif pages is None:
            where = (qo_indptr, kv_indptr, kv_visible)
            mean = rows[0] // batch
        else:  # how many of the pool's rows are theirs nobody says
            where = (qo_indptr, pages.indptr, pages.indices, pages.lens, kv_visible)
            mean = guess_kv_len(pages, batch) if kv_len is None else kv_len
        layouts: dict[str, Any] = {}
        if pages is not None and (not usual or pages.column_step != 1):
            layouts["kv_layout"] = layout_of_kv(build, kv, pages.column_step)
        if strided:
            layouts["out_layout"] = layout_of_results(build, out, lse, base2)
        chosen = self._chosen.get((build, name, total_q, mean, kv_len, batch, q_len))
        if chosen is None:
            chosen = self._remember(build, name, total_q, mean, kv_len, batch, q_len)
        run, splits = chosen
        if index >= 0 and index != current_device():
            with torch.cuda.device(index):
                run(q, kv, *where, kv_scale, sm_scale, out, lse, *splits, workspace, **layouts)
        else:
            run(q, kv, *where, kv_scale, sm_scale, out, lse, *splits, workspace, **layouts)
        return (out, lse) if return_lse else out  # type: ignore[return-value]

    def _remember(
        self, build: Build, name: str, total_q: int, mean: int, longest: int | None, batch: int, q_len: int | None
    ) -> tuple[Callable[..., None], Splits]:
        validate.length(longest)
        validate.query_length(q_len)
        kernel, splits = build.choices[name].choose(total_q, mean, longest, batch, q_len)
        if len(self._chosen) >= 65536:  # lengths grow with every step of a server: do not keep them for ever
            self._chosen.clear()
        run = debug.watched(build.kernel(kernel).run, build.page_size, self._debug, build.topk)
        chosen = (run, () if splits is None else (splits,))
        self._chosen[build, name, total_q, mean, longest, batch, q_len] = chosen
        return chosen

    def _kv_name(self, build: Build, kv: torch.Tensor) -> str:
        dtype = kv.dtype
        if kv.element_size() == 1 and kv.shape[-1] in build.records:
            return build.records[kv.shape[-1]]
        if dtype in BYTES and build.fp8:
            return build.fp8
        if build.records and dtype in BYTES:
            made = " or ".join(f"{width} ({name})" for width, name in build.records.items())
            raise ValueError(f"kv has rows of {kv.shape[-1]} bytes; records of {build.spec} have {made}")
        raise TypeError(
            f"kv is {dtype}; {build.spec} was built for {', '.join(build.kv)} KV. Add the dtype to `dtypes: kv` of the "
            f"spec and run `{self.build_command} {build.spec}`."
        )
