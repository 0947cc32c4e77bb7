"""From a compiled kernel to its report: parse, find the hot loop, count."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from mla_codegen.inspect import amd, hazards, nvidia
from mla_codegen.inspect.compile import Compiled
from mla_codegen.inspect.listing import Instruction, build_blocks, hot_loop, loop_instructions
from mla_codegen.inspect.occupancy import occupancy
from mla_codegen.inspect.report import HotLoop, Report, complete


def describe(compiled: Compiled, *, tile_rows: int | None = None, matrix_per_tile: int | None = None) -> Report:
    """The report of one compiled kernel.

    tile_rows        KV rows of one tile (BLOCK_N): gives counts per KV row
    matrix_per_tile  matrix instructions that one wave needs for a tile, where known: tells by how much the compiler
                     unrolled the loop; without it a turn of the loop is taken to be one tile
    """
    parser = amd if compiled.job.vendor == "amd" else nvidia
    kernel = compiled.metadata["name"]
    text = compiled.asm if compiled.job.vendor == "amd" else compiled.sass
    if compiled.job.vendor == "amd":
        found = amd.resources(compiled.asm)
    else:
        found = nvidia.resources(compiled.resources, compiled.log, compiled.sass, kernel)
    blocks = build_blocks(parser.items(text, kernel), parser.flow)
    everything = [instruction for block in blocks for instruction in block.instructions]
    loop = hot_loop(blocks, lambda instruction: parser.kind(instruction) == "matrix")
    notes = list(compiled.notes)
    hot = None
    if loop is None:
        notes.append("no loop multiplies matrices: there is no hot loop to count")
    else:
        inside = loop_instructions(blocks, loop)
        header = blocks[loop.header]
        hot = HotLoop(
            label=header.label,
            lines=(min(i.line for i in inside), max(i.line for i in inside)),
            blocks=len(loop.body),
            counts=count(inside, compiled.job.vendor),
            matrix=dict(Counter(parser.matrix_name(i) for i in inside if parser.kind(i) == "matrix")),
            opcodes=dict(parser.count_families(inside)),
            lds_read_bytes=sum(parser.lds_bytes(i) for i in inside if parser.kind(i) == "lds_read"),
            lds_write_bytes=sum(parser.lds_bytes(i) for i in inside if parser.kind(i) in ("lds_write", "shuffle")),
            operand_bytes=sum(map(nvidia.operand_bytes, inside)) // 4,
        )
        hot, unroll_notes = _with_rows(hot, tile_rows, matrix_per_tile)
        notes += unroll_notes
    return Report(
        kernel=kernel,
        path=compiled.job.path,
        arch=compiled.job.arch,
        triton=compiled.triton,
        seconds=compiled.seconds,
        lds_bytes=compiled.metadata["shared"],
        num_warps=compiled.metadata["num_warps"],
        occupancy=occupancy(
            compiled.job.arch, found["registers"], compiled.metadata["shared"], compiled.metadata["num_warps"]
        ),
        totals=count(everything, compiled.job.vendor),
        opcodes=dict(parser.count_families(everything)),
        hot=hot,
        hazards=tuple(hazards.find(text, kernel, compiled.job.arch)) if compiled.job.vendor == "amd" else (),
        notes=tuple(notes),
        cached=compiled.cached,
        **found,
    )


def count(instructions: list[Instruction], vendor: str) -> dict[str, int]:
    """Instructions by class; `vendor` is amd or nvidia."""
    parser = amd if vendor == "amd" else nvidia
    return complete(Counter(map(parser.kind, instructions)))


def _with_rows(hot: HotLoop, tile_rows: int | None, matrix_per_tile: int | None) -> tuple[HotLoop, list[str]]:
    tiles, notes = 1, []
    if matrix_per_tile:
        tiles = max(1, round(hot.counts["matrix"] / matrix_per_tile))
        if tiles * matrix_per_tile != hot.counts["matrix"]:
            notes.append(
                f"loop {hot.label} has {hot.counts['matrix']} matrix instructions where a tile needs "
                f"{matrix_per_tile}: taken as {tiles} tile(s) a turn"
            )
    return replace(hot, tiles=tiles, rows=tile_rows * tiles if tile_rows else None), notes
