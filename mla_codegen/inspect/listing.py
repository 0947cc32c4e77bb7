"""Assembly as a graph: instructions in basic blocks, natural loops, and the one loop that matters.

Both assemblers' texts come down to the same three kinds of lines: labels, instructions, and branches to labels. The
parsers for GCN and SASS turn their text into `Item`s; what follows from them is here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field


class ListingError(ValueError):
    """Assembly that lacks what a parser needs; says what was looked for."""


@dataclass(frozen=True)
class Instruction:
    """One instruction of a wave / warp. `line` counts from 1 in the assembly text; `guard` is its predicate or ''."""

    line: int
    opcode: str
    operands: str
    guard: str = ""


@dataclass(frozen=True)
class Flow:
    """Where control may go after an instruction: labels it may jump to, and whether the next one may follow."""

    targets: tuple[str, ...] = ()
    falls_through: bool = True


@dataclass(frozen=True)
class Label:
    """A label and its line in the assembly text."""

    name: str
    line: int


Item = Instruction | Label


@dataclass
class Block:
    """A basic block: entered at its first instruction, left after its last."""

    label: str
    line: int
    instructions: list[Instruction] = field(default_factory=list)
    successors: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Loop:
    """A natural loop: its header block and every block that reaches the header's back edge without leaving."""

    header: int
    body: frozenset[int]


def build_blocks(items: Iterable[Item], flow: Callable[[Instruction], Flow | None]) -> list[Block]:
    """Cut a listing into basic blocks. `flow` says where an instruction goes, None for one that just falls through."""
    blocks = [Block("entry", 1)]
    exits: list[tuple[list[str], bool]] = []
    index: dict[str, int] = {}

    def close(targets: Sequence[str], falls: bool) -> None:
        exits.append((list(targets), falls))

    for item in items:
        if isinstance(item, Label):
            if blocks[-1].instructions:
                close([], True)
                blocks.append(Block(item.name, item.line))
            else:  # behind a branch, or a second label of the same place
                blocks[-1].label, blocks[-1].line = item.name, item.line
            index[item.name] = len(blocks) - 1
            continue
        blocks[-1].instructions.append(item)
        target = flow(item)
        if target is not None:
            close(target.targets, target.falls_through)
            blocks.append(Block(f"line {item.line + 1}", item.line + 1))
    close([], False)
    for number, (block, (targets, falls)) in enumerate(zip(blocks, exits, strict=True)):
        successors = [index[name] for name in targets if name in index]
        if falls and number + 1 < len(blocks):
            successors.append(number + 1)
        block.successors = sorted(set(successors))
    return blocks


def natural_loops(blocks: Sequence[Block]) -> list[Loop]:
    """All natural loops, those with a common header joined, in the order of their headers.

    Code that no path from the entry reaches takes no part. An edge into the middle of a cycle (irreducible flow, which
    neither compiler is known to emit) makes no loop.
    """
    order = _reverse_postorder(blocks)
    dominators = _dominators(blocks, order)
    predecessors: dict[int, list[int]] = {number: [] for number in order}
    for number in order:
        for successor in blocks[number].successors:
            predecessors[successor].append(number)
    bodies: dict[int, set[int]] = {}
    for number in order:
        for header in blocks[number].successors:
            if header in dominators[number]:
                body = bodies.setdefault(header, {header})
                stack = [number]
                while stack:
                    inside = stack.pop()
                    if inside not in body:
                        body.add(inside)
                        stack += predecessors[inside]
    return [Loop(header, frozenset(body)) for header, body in sorted(bodies.items())]


def hot_loop(blocks: Sequence[Block], is_matrix: Callable[[Instruction], bool]) -> Loop | None:
    """The loop with the most matrix instructions of its own (not counting those of loops inside it).

    On equal counts the smaller loop. None where no loop multiplies matrices.
    """
    loops = natural_loops(blocks)
    matrix = [sum(map(is_matrix, block.instructions)) for block in blocks]

    def own(loop: Loop) -> int:
        inner = {number for other in loops if other.body < loop.body for number in other.body}
        return sum(matrix[number] for number in loop.body - inner)

    best = max(loops, key=lambda loop: (own(loop), -len(loop.body)), default=None)
    return best if best is not None and own(best) else None


def loop_instructions(blocks: Sequence[Block], loop: Loop) -> list[Instruction]:
    """The loop's instructions in listing order, each once: both sides of a branch, and inner loops as if run once."""
    return [instruction for number in sorted(loop.body) for instruction in blocks[number].instructions]


def _reverse_postorder(blocks: Sequence[Block]) -> list[int]:
    seen, order = {0}, []
    stack = [(0, iter(blocks[0].successors))]
    while stack:
        number, successors = stack[-1]
        for successor in successors:
            if successor not in seen:
                seen.add(successor)
                stack.append((successor, iter(blocks[successor].successors)))
                break
        else:
            order.append(number)
            stack.pop()
    return order[::-1]


def _dominators(blocks: Sequence[Block], order: Sequence[int]) -> dict[int, set[int]]:
    """Block -> the blocks on every path from the entry to it, itself included."""
    reachable = set(order)
    predecessors: dict[int, list[int]] = {number: [] for number in order}
    for number in order:
        for successor in blocks[number].successors:
            predecessors[successor].append(number)
    dominators = {number: set(reachable) for number in order}
    dominators[0] = {0}
    changed = True
    while changed:
        changed = False
        for number in order:
            if number == 0:
                continue
            new = set.intersection(*(dominators[before] for before in predecessors[number])) | {number}
            if new != dominators[number]:
                dominators[number], changed = new, True
    return dominators
