"""Shared memory (LDS) of a stage-1 program, as the compiler will allocate it."""

from .targets import Target


def shared_bytes(
    target: Target,
    *,
    block_n: int,
    block_h: int,
    row_bytes: int,
    latent: int,
    num_warps: int,
    num_stages: int,
    compute_bytes: int,
) -> int:
    """Bytes of shared memory of the portable family's stage 1: an upper bound, within a few KB of the compiler's own.

    The pipelined KV tiles dominate. AMD keeps one tile less than num_stages (the next one waits in registers).
    """
    tile = block_n * row_bytes
    tiles = max(1, num_stages - 1) if target.vendor == "amd" else num_stages
    return tile * tiles
