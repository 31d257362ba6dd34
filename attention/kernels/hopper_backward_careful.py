"""NaN and inf in values that not all of a tile see: Hopper's backward once more, slowly, if any came out.

0 · NaN is NaN, so hidden values reach what doesn't see them. The Gluon kernel only notes that; in it, this code would
cost registers. It is made of the parts with which the portable kernels do such a tile again.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .backward import _grad_kv_tile, _grad_q_tile
from .common import LOG2_E, SAFE_BLOCK, key_tiles, load_tile, query_tiles, store_tile
from .hopper_common import await_previous

BLOCK = tl.constexpr(64)  # queries or keys of a tile
SIZES = ["heads_q", "group", "seqlen_q", "seqlen_k", "window_left", "window_right", "batch_heads"]


@triton.jit
def _repair_q(
    tile, q_rows, k_rows, v_rows, do_rows, lse_ptr, delta_ptr, dq_ptr, heads_q, group, shape, scale,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BOUND_LEFT: tl.constexpr, BOUND_RIGHT: tl.constexpr,
):  # fmt: skip
    """dq of one tile of queries."""
    seqlen_q, seqlen_k, shift_left, shift_right = shape
    num_tiles = tl.cdiv(seqlen_q, BLOCK)
    start_m = tile % num_tiles * BLOCK
    batch_head = tile // num_tiles
    batch = batch_head // heads_q
    head = batch_head % heads_q
    begin, _, _, end = key_tiles(
        start_m, seqlen_q, seqlen_k, shift_left, shift_right, BLOCK, SAFE_BLOCK, BOUND_LEFT, BOUND_RIGHT, True
    )  # fmt: skip
    rules = (seqlen_q, seqlen_k, shift_left, shift_right, scale * LOG2_E)
    offs_m = start_m + tl.arange(0, BLOCK)
    row = tl.cast(batch_head, tl.int64) * seqlen_q
    unit_lse = tl.load(lse_ptr + row + offs_m, mask=offs_m < seqlen_q, other=0.0) * LOG2_E
    delta = tl.load(delta_ptr + row + offs_m, mask=offs_m < seqlen_q, other=0.0)
    q = load_tile(q_rows, batch, head, start_m, seqlen_q, BLOCK, D, BLOCK_D, False)
    do = load_tile(do_rows, batch, head, start_m, seqlen_q, BLOCK, D, BLOCK_D, False)
    dq = tl.zeros((BLOCK, BLOCK_D), tl.float32)
    for start_n in tl.range(begin, end, SAFE_BLOCK, num_stages=1):
        dq = _grad_q_tile(
            dq, q, do, unit_lse, delta, k_rows, v_rows, batch, head // group, start_m, start_n, 0, rules, None, None,
            None, None, D, D, BLOCK, SAFE_BLOCK, BLOCK_D, BLOCK_D, BOUND_LEFT, BOUND_RIGHT, True, True, True, False,
        )  # fmt: skip
    dq_ptr += (tl.cast(batch, tl.int64) * seqlen_q * heads_q + head) * D
    store_tile(dq_ptr, dq * scale, start_m, seqlen_q, heads_q * D, BLOCK, D, BLOCK_D)


@triton.jit
def _repair_kv(
    tile, q_rows, k_rows, v_rows, do_rows, lse_ptr, delta_ptr, dk_ptr, dv_ptr, heads_q, group, shape, scale,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BOUND_LEFT: tl.constexpr, BOUND_RIGHT: tl.constexpr,
):  # fmt: skip
    """dk and dv of one tile of keys."""
    seqlen_q, seqlen_k, shift_left, shift_right = shape
    heads_k = heads_q // group
    num_tiles = tl.cdiv(seqlen_k, BLOCK)
    start_n = tile % num_tiles * BLOCK
    batch = tile // num_tiles // heads_k
    head = tile // num_tiles % heads_k
    begin, _, _, end = query_tiles(
        start_n, seqlen_q, seqlen_k, shift_left, shift_right, SAFE_BLOCK, BLOCK, BOUND_LEFT, BOUND_RIGHT, True, False
    )  # fmt: skip
    rules = (seqlen_q, seqlen_k, shift_left, shift_right, scale * LOG2_E)
    k = load_tile(k_rows, batch, head, start_n, seqlen_k, BLOCK, D, BLOCK_D, False)
    v = load_tile(v_rows, batch, head, start_n, seqlen_k, BLOCK, D, BLOCK_D, False)
    dk = tl.zeros((BLOCK, BLOCK_D), tl.float32)
    dv = tl.zeros((BLOCK, BLOCK_D), tl.float32)
    every = (end - begin) // SAFE_BLOCK
    for i in tl.range(0, group * every, num_stages=1):
        dk, dv = _grad_kv_tile(
            dk, dv, k, v, q_rows, do_rows, lse_ptr, delta_ptr, batch, head * group + i // every, heads_q,
            begin + i % every * SAFE_BLOCK, start_n, 0, seqlen_q, rules, None, None, batch, None, None,
            D, D, SAFE_BLOCK, BLOCK, BLOCK_D, BLOCK_D, BOUND_LEFT, BOUND_RIGHT, False, True, True, True, False,
        )  # fmt: skip
    row = tl.cast(batch, tl.int64) * seqlen_k * heads_k + head
    store_tile(dk_ptr + row * D, dk * scale, start_n, seqlen_k, heads_k * D, BLOCK, D, BLOCK_D)
    store_tile(dv_ptr + row * D, dv, start_n, seqlen_k, heads_k * D, BLOCK, D, BLOCK_D)


@triton.jit(do_not_specialize=SIZES)
def repair_kernel(
    q_rows, k_rows, v_rows, do_rows, lse_ptr, delta_ptr, dq_ptr, dk_ptr, dv_ptr, redo_ptr,
    heads_q, group, seqlen_q, seqlen_k, window_left, window_right, batch_heads, scale,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BOUND_LEFT: tl.constexpr, BOUND_RIGHT: tl.constexpr,
):  # fmt: skip
    """dq, dk and dv by as many programs as there are, or nothing if `redo` is 0."""
    await_previous()
    if tl.load(redo_ptr) != 0:
        shift = seqlen_k - seqlen_q
        shape = (seqlen_q, seqlen_k, shift - window_left, shift + window_right)
        tiles_q = batch_heads * tl.cdiv(seqlen_q, BLOCK)
        tiles_k = batch_heads // group * tl.cdiv(seqlen_k, BLOCK)
        for tile in tl.range(tl.program_id(0), tiles_q, tl.num_programs(0)):
            _repair_q(
                tile, q_rows, k_rows, v_rows, do_rows, lse_ptr, delta_ptr, dq_ptr, heads_q, group, shape, scale,
                D, BLOCK_D, BOUND_LEFT, BOUND_RIGHT,
            )  # fmt: skip
        for tile in tl.range(tl.program_id(0), tiles_k, tl.num_programs(0)):
            _repair_kv(
                tile, q_rows, k_rows, v_rows, do_rows, lse_ptr, delta_ptr, dk_ptr, dv_ptr, heads_q, group, shape, scale,
                D, BLOCK_D, BOUND_LEFT, BOUND_RIGHT,
            )  # fmt: skip
