"""What comes before and after Hopper's backward: what it reads of each query, and the order of its sums of dq."""

from __future__ import annotations

import triton
import triton.language as tl

from .common import LOG2_E, load_tile, locate, store_tile
from .hopper_backward_schedule import list_tasks


@triton.jit
def _place_of_queries(cu_q_ptr, heads, seqlen, tiles, tiles_q, BLOCK_M: tl.constexpr):
    """Which queries this program's are: batch entry, head, where their sequence begins and how long it is, where they
    begin in it; and the tile's number among the padded ones, of which a head has `tiles_q`."""
    pid = tl.program_id(0)
    tile = pid % tiles
    batch = pid // tiles // heads
    head = pid // tiles % heads
    first, length = locate(cu_q_ptr, batch, seqlen)
    if cu_q_ptr is None:
        return batch, head, first, length, tile * BLOCK_M, pid
    else:  # each sequence begins behind the last one's whole tiles
        return 0, head, first, length, tile * BLOCK_M, head * tiles_q + first // BLOCK_M + batch + tile


@triton.jit(do_not_specialize=["heads", "seqlen", "tiles", "tiles_q"])
def prepare_kernel(out_rows, do_rows, lse_ptr, dlse_ptr, unit_lse_ptr, padded_delta_ptr, delta_ptr, dq_ptr, redo_ptr,
                   tasks_ptr, cu_q_ptr, cu_k_ptr, heads, seqlen, tiles, tiles_q, D: tl.constexpr,
                   BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr):  # fmt: skip
    """Rows of a head's delta = Σ dO O - dlse, and of its lse in units of ln 2, padded to whole tiles; dq = 0; the tasks
    of packed sequences.

    Queries past the end, and those that see no key, get an lse of inf, and so weights of 0.
    """
    if redo_ptr is not None:  # noqa: SIM102 (known to the compiler)
        if tl.program_id(0) == 0:
            tl.store(redo_ptr, 0)
    if tasks_ptr is not None:
        list_tasks(tasks_ptr, cu_q_ptr, cu_k_ptr, tl.num_programs(0) // (heads * tiles), BLOCK_M, BLOCK_N)
    entry, head, first, length, start_m, number = _place_of_queries(cu_q_ptr, heads, seqlen, tiles, tiles_q, BLOCK_M)
    if cu_q_ptr is not None:  # noqa: SIM102 (known to the compiler)
        if start_m >= length:
            return
    offs_m = start_m + tl.arange(0, BLOCK_M)
    mask_m = offs_m < length
    out = load_tile(out_rows, entry, head, first + start_m, first + length, BLOCK_M, D, BLOCK_D, False)
    do = load_tile(do_rows, entry, head, first + start_m, first + length, BLOCK_M, D, BLOCK_D, False)
    delta = tl.sum(out.to(tl.float32) * do.to(tl.float32), 1)
    row = tl.cast(entry * heads + head, tl.int64) * seqlen + first
    lse = tl.load(lse_ptr + row + offs_m, mask=mask_m, other=float("inf"))
    if dlse_ptr is not None:
        delta -= tl.load(dlse_ptr + row + offs_m, mask=mask_m, other=0.0)
    padded = tl.cast(number, tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    tl.store(unit_lse_ptr + padded, tl.where(lse == -float("inf"), float("inf"), lse * LOG2_E))
    tl.store(padded_delta_ptr + padded, delta)
    tl.store(delta_ptr + row + offs_m, delta, mask=mask_m)
    dq_ptr += tl.cast(number, tl.int64) * (BLOCK_M * BLOCK_D)
    tl.store(dq_ptr + tl.arange(0, BLOCK_M * BLOCK_D), tl.zeros((BLOCK_M * BLOCK_D,), tl.float32))


@triton.jit(do_not_specialize=["heads", "seqlen", "tiles", "tiles_q"])
def finish_kernel(sums_ptr, dq_ptr, redo_ptr, cu_q_ptr, heads, seqlen, tiles, tiles_q, scale, D: tl.constexpr,
                  BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr):  # fmt: skip
    """Scales dq, rounds it and puts it in the usual order, the inverse of that of `hopper_backward._add_dq`."""
    entry, head, first, length, start_m, number = _place_of_queries(cu_q_ptr, heads, seqlen, tiles, tiles_q, BLOCK_M)
    if cu_q_ptr is not None:  # noqa: SIM102 (known to the compiler)
        if start_m >= length:
            return
    sums_ptr += tl.cast(number, tl.int64) * (BLOCK_M * BLOCK_D)
    sums = tl.load(sums_ptr + tl.arange(0, BLOCK_M * BLOCK_D)) * scale
    if redo_ptr is not None:  # noqa: SIM102 (known to the compiler)
        if tl.sum(sums * 0.0, 0) != 0.0:
            tl.store(redo_ptr, 1)
    parts = sums.to(dq_ptr.dtype.element_ty).reshape(BLOCK_M // 16, BLOCK_D // 8, 8, 4, 2, 2)
    dq = parts.permute((0, 4, 2, 1, 3, 5)).reshape(BLOCK_M, BLOCK_D)
    dq_ptr += ((tl.cast(entry, tl.int64) * seqlen + first) * heads + head) * D
    store_tile(dq_ptr, dq, start_m, length, heads * D, BLOCK_M, D, BLOCK_D)
