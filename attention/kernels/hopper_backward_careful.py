"""NaN and inf in values that not all of a tile see: Hopper's backward once more, slowly, if any came out.

0 · NaN is NaN, so hidden values reach what doesn't see them. The Gluon kernel only notes that; in it, this code would
cost registers. It is made of the parts with which the portable kernels do such a tile again.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .backward import _grad_kv_tile, _grad_q_tile
from .common import LOG2_E, SAFE_BLOCK, key_tiles, load_tile, locate, query_tiles, store_tile
from .hopper_common import await_previous

BLOCK = tl.constexpr(64)  # queries or keys of a tile
SIZES = [
    "heads_q", "group", "seqlen_q", "seqlen_k", "longest_q", "longest_k", "window_left", "window_right", "batch_heads",
]  # fmt: skip


@triton.jit
def _sequence(batch, shape, cu_q_ptr, cu_k_ptr, scale, softcap):
    """Where a sequence's queries and keys begin in which batch entry, and the rules of `score`."""
    seqlen_q, seqlen_k, _, _, window_left, window_right = shape
    first_q, length_q = locate(cu_q_ptr, batch, seqlen_q)
    first_k, length_k = locate(cu_k_ptr, batch, seqlen_k)
    entry = batch if cu_q_ptr is None else 0
    shift = length_k - length_q
    unit_scale = (scale if softcap is None else softcap) * LOG2_E
    return first_q, first_k, entry, (length_q, length_k, shift - window_left, shift + window_right, unit_scale)


@triton.jit
def _repair_q(
    tile, q_rows, k_rows, v_rows, do_rows, lse_ptr, delta_ptr, dq_ptr, cu_q_ptr, cu_k_ptr, heads_q, group, shape,
    scale, softcap, D: tl.constexpr, BLOCK_D: tl.constexpr, BOUND_LEFT: tl.constexpr, BOUND_RIGHT: tl.constexpr,
):  # fmt: skip
    """dq of one tile of queries."""
    num_tiles = tl.cdiv(shape[2], BLOCK)
    start_m = tile % num_tiles * BLOCK
    batch_head = tile // num_tiles
    batch = batch_head // heads_q
    head = batch_head % heads_q
    first_q, first_k, entry, rules = _sequence(batch, shape, cu_q_ptr, cu_k_ptr, scale, softcap)
    tanh_scale = None if softcap is None else scale / softcap
    length_q, length_k, shift_left, shift_right, _ = rules
    begin, _, _, end = key_tiles(
        start_m, length_q, length_k, shift_left, shift_right, BLOCK, SAFE_BLOCK, BOUND_LEFT, BOUND_RIGHT, True
    )  # fmt: skip
    if start_m >= length_q:
        end = begin
    offs_m = start_m + tl.arange(0, BLOCK)
    row = tl.cast(entry * heads_q + head, tl.int64) * shape[0] + first_q
    unit_lse = tl.load(lse_ptr + row + offs_m, mask=offs_m < length_q, other=0.0) * LOG2_E
    delta = tl.load(delta_ptr + row + offs_m, mask=offs_m < length_q, other=0.0)
    q = load_tile(q_rows, entry, head, first_q + start_m, first_q + length_q, BLOCK, D, BLOCK_D, False)
    do = load_tile(do_rows, entry, head, first_q + start_m, first_q + length_q, BLOCK, D, BLOCK_D, False)
    dq = tl.zeros((BLOCK, BLOCK_D), tl.float32)
    for start_n in tl.range(begin, end, SAFE_BLOCK, num_stages=1):
        dq = _grad_q_tile(
            dq, q, do, unit_lse, delta, k_rows, v_rows, entry, head // group, start_m, start_n, first_k, rules, None,
            None, tanh_scale, None,
            D, D, BLOCK, SAFE_BLOCK, BLOCK_D, BLOCK_D, BOUND_LEFT, BOUND_RIGHT, True, True, True, False,
        )  # fmt: skip
    dq_ptr += ((tl.cast(entry, tl.int64) * shape[0] + first_q) * heads_q + head) * D
    store_tile(dq_ptr, dq * scale, start_m, length_q, heads_q * D, BLOCK, D, BLOCK_D)


@triton.jit
def _repair_kv(
    tile, q_rows, k_rows, v_rows, do_rows, lse_ptr, delta_ptr, dk_ptr, dv_ptr, cu_q_ptr, cu_k_ptr, heads_q, group,
    shape, scale, softcap, D: tl.constexpr, BLOCK_D: tl.constexpr, BOUND_LEFT: tl.constexpr, BOUND_RIGHT: tl.constexpr,
):  # fmt: skip
    """dk and dv of one tile of keys."""
    heads_k = heads_q // group
    num_tiles = tl.cdiv(shape[3], BLOCK)
    start_n = tile % num_tiles * BLOCK
    batch = tile // num_tiles // heads_k
    head = tile // num_tiles % heads_k
    first_q, first_k, entry, rules = _sequence(batch, shape, cu_q_ptr, cu_k_ptr, scale, softcap)
    tanh_scale = None if softcap is None else scale / softcap
    length_q, length_k, shift_left, shift_right, _ = rules
    begin, _, _, end = query_tiles(
        start_n, length_q, length_k, shift_left, shift_right, SAFE_BLOCK, BLOCK, BOUND_LEFT, BOUND_RIGHT, True, False
    )  # fmt: skip
    if start_n >= length_k:
        end = begin
    k = load_tile(k_rows, entry, head, first_k + start_n, first_k + length_k, BLOCK, D, BLOCK_D, False)
    v = load_tile(v_rows, entry, head, first_k + start_n, first_k + length_k, BLOCK, D, BLOCK_D, False)
    dk = tl.zeros((BLOCK, BLOCK_D), tl.float32)
    dv = tl.zeros((BLOCK, BLOCK_D), tl.float32)
    every = (end - begin) // SAFE_BLOCK
    for i in tl.range(0, group * every, num_stages=1):
        dk, dv = _grad_kv_tile(
            dk, dv, k, v, q_rows, do_rows, lse_ptr, delta_ptr, entry, head * group + i // every, heads_q,
            begin + i % every * SAFE_BLOCK, start_n, first_q, shape[0], rules, None, None, batch, tanh_scale, None,
            D, D, SAFE_BLOCK, BLOCK, BLOCK_D, BLOCK_D, BOUND_LEFT, BOUND_RIGHT, True, True, True, True, False,
        )  # fmt: skip
    row = (tl.cast(entry, tl.int64) * shape[1] + first_k) * heads_k + head
    store_tile(dk_ptr + row * D, dk * scale, start_n, length_k, heads_k * D, BLOCK, D, BLOCK_D)
    store_tile(dv_ptr + row * D, dv, start_n, length_k, heads_k * D, BLOCK, D, BLOCK_D)


@triton.jit(do_not_specialize=SIZES)
def repair_kernel(
    q_rows, k_rows, v_rows, do_rows, lse_ptr, delta_ptr, dq_ptr, dk_ptr, dv_ptr, redo_ptr, cu_q_ptr, cu_k_ptr,
    heads_q, group, seqlen_q, seqlen_k, longest_q, longest_k, window_left, window_right, batch_heads, scale, softcap,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BOUND_LEFT: tl.constexpr, BOUND_RIGHT: tl.constexpr,
):  # fmt: skip
    """dq, dk and dv by as many programs as there are, or nothing if `redo` is 0."""
    await_previous()
    if tl.load(redo_ptr) != 0:
        shape = (seqlen_q, seqlen_k, longest_q, longest_k, window_left, window_right)
        tiles_q = batch_heads * tl.cdiv(longest_q, BLOCK)
        tiles_k = batch_heads // group * tl.cdiv(longest_k, BLOCK)
        for tile in tl.range(tl.program_id(0), tiles_q, tl.num_programs(0)):
            _repair_q(
                tile, q_rows, k_rows, v_rows, do_rows, lse_ptr, delta_ptr, dq_ptr, cu_q_ptr, cu_k_ptr, heads_q, group,
                shape, scale, softcap, D, BLOCK_D, BOUND_LEFT, BOUND_RIGHT,
            )  # fmt: skip
        for tile in tl.range(tl.program_id(0), tiles_k, tl.num_programs(0)):
            _repair_kv(
                tile, q_rows, k_rows, v_rows, do_rows, lse_ptr, delta_ptr, dk_ptr, dv_ptr, cu_q_ptr, cu_k_ptr, heads_q,
                group, shape, scale, softcap, D, BLOCK_D, BOUND_LEFT, BOUND_RIGHT,
            )  # fmt: skip
