"""FlashAttention's backward for Hopper: its tiles, its memory and its launches.

`prepare_kernel` makes what is read of each query, `grad_kernel` the gradients, `finish_kernel` puts those of queries in
order, and `repair_kernel` computes again what NaN and inf have spoiled.

The portable twin is ``backward.py``; the torch twin is `attention.reference.tiled_backward`.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import NamedTuple

import torch
import triton
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ..reference import Options, sink_gradient
from .common import loadable, on_device_of, pointer
from .hopper_backward_careful import repair_kernel
from .hopper_backward_ends import finish_kernel, prepare_kernel
from .hopper_backward_kernel import grad_kernel
from .hopper_backward_schedule import TASK
from .hopper_common import L2_SHARE, OVERLAPPING, describe, padded_width, processors
from .relaunch import Launch, Relaunches, kind


class Tile(NamedTuple):
    """One program's share of the scores, and how many tiles of queries are in shared memory at once."""

    block_m: int  # queries
    block_n: int  # keys
    stages: int


TILES = {64: Tile(128, 128, 2), 128: Tile(64, 128, 2), 256: Tile(64, 64, 2)}  # by padded head width
SOFTCAP_TILES = TILES | {64: Tile(64, 128, 2)}  # short of registers, the assembler would serialise wgmma


def backward(
    grad_out: torch.Tensor,
    grad_lse: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    options: Options,
    with_mask: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of q, k, v, the sinks and a mask, of which there is none, none of the inputs empty.

    For what `attention.backends.backward_runs_on_hopper` says."""
    if options.cu_seqlens_q is not None:
        grad_out, q, k, v, out = (x[None] for x in (grad_out, q, k, v, out))
    grad_out, q, k, v, out = (loadable(x) for x in (grad_out, q, k, v, out))
    lse = lse.contiguous()
    grad_lse, cu_q, cu_k = (
        None if x is None else x.contiguous() for x in (grad_lse, options.cu_seqlens_q, options.cu_seqlens_k)
    )
    batch, seqlen_q, heads_q, width = q.shape
    block_d = padded_width(width)
    tile = (TILES if options.softcap is None else SOFTCAP_TILES)[block_d]
    tiles_q, tiles_k = _count_tiles(seqlen_q, tile.block_m, cu_q), _count_tiles(k.shape[1], tile.block_n, cu_k)
    tasks = None
    if cu_q is not None:
        tasks = torch.empty((1 + tiles_k) * int(TASK.value), dtype=torch.int32, device=q.device)
    rows = batch * heads_q
    unit_lse = lse.new_empty(rows, tiles_q * tile.block_m)
    padded_delta = torch.empty_like(unit_lse)
    delta = torch.empty_like(lse, dtype=torch.float32)
    sums = lse.new_empty(rows * tiles_q * tile.block_m * block_d)
    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    redo = None
    if cu_q is not None or options.window_left is not None or options.window_right is not None:
        redo = torch.empty(1, dtype=torch.int32, device=q.device)
    inputs = (grad_out, grad_lse, q, k, v, out, lse, cu_q, cu_k)
    tensors = (*inputs, unit_lse, padded_delta, delta, sums, dq, dk, dv, redo, tasks)
    key = (
        q.device, tile, options.scale, options.window_left, options.window_right, options.softcap,
        options.max_seqlen_q, options.max_seqlen_k, *map(kind, inputs),
    )  # fmt: skip
    with on_device_of(q):
        RELAUNCHES.launch(key, tensors, functools.partial(_plan, options, tile))
    dsinks = sink_gradient(options.sinks, lse, delta)
    if cu_q is not None:
        dq, dk, dv = dq[0], dk[0], dv[0]
    return dq, dk, dv, dsinks, lse.new_empty(0)


RELAUNCHES = Relaunches()


def _count_tiles(length: int, block: int, cu_seqlens: torch.Tensor | None) -> int:
    """How many tiles hold so many positions, or, packed, at most."""
    return -(-length // block) if cu_seqlens is None else length // block + len(cu_seqlens) - 1


def _plan(
    options: Options,
    tile: Tile,
    grad_out: torch.Tensor,
    grad_lse: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    cu_q: torch.Tensor | None,
    cu_k: torch.Tensor | None,
    unit_lse: torch.Tensor,
    padded_delta: torch.Tensor,
    delta: torch.Tensor,
    sums: torch.Tensor,
    dq: torch.Tensor,
    dk: torch.Tensor,
    dv: torch.Tensor,
    redo: torch.Tensor | None,
    tasks: torch.Tensor | None,
) -> Iterator[Launch]:
    """The backward's launches."""
    batch, seqlen_q, heads_q, width = q.shape
    seqlen_k, heads_k = k.shape[1:3]
    block_d = padded_width(width)
    packed = cu_q is not None
    sequences, longest_q, longest_k = batch, seqlen_q, seqlen_k
    if cu_q is not None:
        sequences, longest_q, longest_k = len(cu_q) - 1, options.max_seqlen_q, options.max_seqlen_k
    tiles_q, tiles_k = _count_tiles(seqlen_q, tile.block_m, cu_q), _count_tiles(seqlen_k, tile.block_n, cu_k)
    tiles = triton.cdiv(longest_q, tile.block_m)  # of the longest sequence
    heads = batch * heads_k
    group = heads_q // heads_k
    section = max(1, L2_SHARE // (8 * group * longest_q * block_d))  # of q, its gradient and sums of dq in fp32
    widths = {"D": width, "BLOCK_M": tile.block_m, "BLOCK_D": block_d}
    bounds = {"BOUND_LEFT": options.window_left is not None, "BOUND_RIGHT": options.window_right is not None}
    left, right = options.window_left or 0, options.window_right or 0
    shift = 0 if packed else seqlen_k - seqlen_q
    yield Launch(
        prepare_kernel, sequences * heads_q * tiles,
        (
            pointer(out), pointer(grad_out), lse, grad_lse, unit_lse, padded_delta, delta, sums, redo, tasks, cu_q,
            cu_k, (dq, dk, dv), heads_q, seqlen_q, tiles, tiles_q, heads_k, seqlen_k,
        ),
        {"BLOCK_N": tile.block_n, **widths},
    )  # fmt: skip
    yield Launch(
        grad_kernel, min(heads * tiles_k, processors(q.device)),
        (
            describe(q, tile.block_m, block_d), describe(k, tile.block_n, block_d),
            describe(v, tile.block_n, block_d), describe(grad_out, tile.block_m, block_d),
            describe_rows(unit_lse, tile.block_m), describe_rows(padded_delta, tile.block_m),
            describe(dk, tile.block_n, block_d), describe(dv, tile.block_n, block_d),
            *((dk, dv) if packed else (None, None)), sums, redo, tasks, heads_k, group, seqlen_q, seqlen_k,
            shift - left, shift + right, tiles_q, tiles_k, section, heads, options.scale, options.softcap,
        ),
        {
            "D": block_d, "WIDTH": width if packed else block_d, "BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n,
            "STAGES": tile.stages, "num_warps": 8, **bounds, **OVERLAPPING,
        },
    )  # fmt: skip
    yield Launch(
        finish_kernel, sequences * heads_q * tiles,
        (sums, dq, redo, cu_q, heads_q, seqlen_q, tiles, tiles_q, options.scale),
        {**widths, **OVERLAPPING},
    )  # fmt: skip
    if redo is not None:
        yield Launch(
            repair_kernel, 4 * processors(q.device),
            (
                pointer(q), pointer(k), pointer(v), pointer(grad_out), lse, delta, dq, dk, dv, redo, cu_q, cu_k,
                heads_q, group, seqlen_q, seqlen_k, longest_q, longest_k, left, right, sequences * heads_q,
                options.scale, options.softcap,
            ),
            {"D": width, "BLOCK_D": block_d, **bounds, **OVERLAPPING},
        )  # fmt: skip


def describe_rows(x: torch.Tensor, width: int) -> TensorDescriptor:
    """x (rows, length), contiguous, 32 bits an element, in pieces of one row."""
    return TensorDescriptor(x, list(x.shape), list(x.stride()), [1, width], _layout(width))


@functools.cache
def _layout(width: int) -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout.get_default_for([1, width], gl.float32)
