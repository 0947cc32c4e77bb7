"""The last step: winners into the spec file, after the plan has agreed that the new text says what was measured."""

import difflib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mla_codegen.measure.tune.edit import EditError, Tuned, edit
from mla_codegen.measure.tune.search import Found
from mla_codegen.measure.tune.settings import needed
from mla_codegen.measure.tune.space import as_candidate, bare
from mla_codegen.plan.resolve import PlanError, make_plan
from mla_codegen.publish.files import replace_file
from mla_codegen.render.templates import render_kernel
from mla_codegen.spec.errors import SpecError
from mla_codegen.spec.load import parse_spec


class ApplyError(Exception):
    """The winners could not be written; `str()` says why, and what the shapes should say."""


def tuned_shapes(founds: Sequence[Found]) -> list[Tuned]:
    """What each shape with a winner needs to say."""
    by_shape: dict[tuple[int, ...], dict[str, Any]] = {}
    for found in founds:
        if found.improved:
            shape = found.space.shape
            by_shape.setdefault(shape.call, {})[found.space.kv] = needed(found.space, found.winner)
    return [Tuned(batch, kv_len, per_kv, *q_len) for (batch, kv_len, *q_len), per_kv in by_shape.items()]


def new_text(path: Path, founds: Sequence[Found], where: str, day: str) -> tuple[str, str]:
    """(the spec's text as it is, and with the winners). Raises ApplyError.

    The file is read anew: whoever edited it while the search ran keeps the edit, unless it contradicts the winners.
    """
    winners = tuned_shapes(founds)
    text = path.read_bytes().decode("utf-8-sig")
    if not winners:
        return text, text
    try:
        before = parse_spec(text, str(path)).spec
        changed = edit(text, winners, list(before.dtypes.kv), where, day)
        after = parse_spec(changed, str(path)).spec
        kernels = make_plan(after, "").kernels
        old = {kernel.name: bare(kernel) for kernel in make_plan(before, "").kernels}
    except (SpecError, PlanError, EditError) as error:
        raise ApplyError(_by_hand(path, str(error), winners)) from error
    want = {(str(found.space.kv), *found.space.shape.call): found.winner.source for found in founds if found.improved}
    for kernel in kernels:
        wanted = want.get((kernel.kv, *kernel.call))
        right = bare(kernel) == old[kernel.name] if wanted is None else render_kernel(as_candidate(kernel)) == wanted
        if not right:
            reason = f"{kernel.name} would not be the kernel that it should be (has the file changed, or an anchor?)"
            raise ApplyError(_by_hand(path, reason, winners))
    return text, changed


def _by_hand(path: Path, reason: str, winners: list[Tuned]) -> str:
    lines = [f"{path} is left as it is: {reason}", "  fix: write by hand"]
    for winner in winners:
        lines += [f"    {winner.shape}, {kv}: {settings}" for kv, settings in winner.per_kv.items()]
    return "\n".join(lines)


def diff(path: Path, text: str, changed: str) -> str:
    """A unified diff of the two."""
    lines = (text.splitlines(keepends=True), changed.splitlines(keepends=True))
    return "".join(difflib.unified_diff(*lines, f"{path}", f"{path} (tuned)"))


def write(path: Path, text: str) -> None:
    """Atomically, with the file's own permissions; of a link, what it leads to."""
    replace_file(path.resolve(), text)
