"""Tile sizes by head width, dtype and GPU: the only place where a kernel's configuration is chosen."""

from __future__ import annotations

from typing import NamedTuple

import torch

from .common import has_bulk_copies


class Tile(NamedTuple):
    """One program's share of the scores, and how it is compiled."""

    block_m: int  # queries
    block_n: int  # keys
    num_warps: int
    num_stages: int
    one_loop: bool = False  # mask every tile when causal, instead of only those on the diagonal in a loop of their own


class Tiles(NamedTuple):
    """The three kernels' tiles for one head width."""

    forward: Tile
    backward_q: Tile  # a program owns block_m queries and walks over the keys
    backward_kv: Tile  # a program owns block_n keys and walks over the queries


# Keyed by the padded head width; found by benchmarks/tune_attention.py on an H200. None of these spills:
# tests/attention/test_compile_sm90.py compiles them all.
HOPPER_16BIT = {
    32: Tiles(Tile(128, 64, 4, 3), Tile(64, 64, 4, 3), Tile(64, 64, 4, 3)),
    64: Tiles(Tile(64, 128, 4, 2), Tile(64, 64, 4, 3), Tile(64, 64, 4, 3)),
    128: Tiles(Tile(64, 64, 4, 3), Tile(128, 64, 8, 3), Tile(64, 64, 4, 2, one_loop=True)),
    256: Tiles(Tile(128, 64, 8, 2), Tile(128, 32, 8, 2), Tile(32, 64, 8, 3, one_loop=True)),
}

# Fits the 99 KB of shared memory of consumer cards.
PORTABLE_16BIT = {
    32: Tiles(Tile(128, 64, 4, 2), Tile(64, 64, 4, 2), Tile(64, 64, 4, 2)),
    64: Tiles(Tile(128, 64, 4, 2), Tile(64, 64, 4, 2), Tile(64, 64, 4, 2)),
    128: Tiles(Tile(64, 64, 4, 2), Tile(64, 32, 4, 2), Tile(32, 64, 4, 2)),
    256: Tiles(Tile(64, 32, 4, 1), Tile(32, 32, 4, 1), Tile(32, 32, 4, 1)),
}

# fp32 products are exact (no tf32), so they run on the ordinary cores and the tiles have to stay small.
ANY_32BIT = {
    32: Tiles(Tile(64, 32, 8, 2), Tile(32, 32, 4, 1), Tile(32, 32, 4, 1)),
    64: Tiles(Tile(64, 32, 8, 2), Tile(32, 32, 8, 1), Tile(32, 32, 8, 1)),
    128: Tiles(Tile(32, 16, 8, 1), Tile(16, 16, 8, 1), Tile(16, 32, 8, 1)),
    256: Tiles(Tile(16, 16, 4, 1), Tile(16, 16, 8, 1), Tile(16, 16, 8, 1)),
}


def padded_widths(head_dim: int, head_dim_v: int) -> tuple[int, int]:
    """The powers of two, at least 16, that the heads of q and k and those of v are padded to in registers."""
    width, width_v = (max(16, 1 << (size - 1).bit_length()) for size in (head_dim, head_dim_v))
    # Rows of fewer than 64 16-bit numbers have a layout of their own in shared memory. Where k's and v's layouts differ
    # and their tiles take turns in one buffer, the assembler of CUDA 12.8, which comes with Triton 3.6, computes v's
    # wgmma descriptors from a register that was never set: wrong values or an illegal access. So they don't differ.
    return max(width, min(width_v, 64)), max(width_v, min(width, 64))


def choose_tiles(q: torch.Tensor, v: torch.Tensor) -> Tiles:
    """The tiles for these queries and values."""
    width = max(32, *padded_widths(q.shape[-1], v.shape[-1]))
    if q.dtype == torch.float32:
        return ANY_32BIT[width]
    return (HOPPER_16BIT if has_bulk_copies(q.device) else PORTABLE_16BIT)[width]
