"""What comes before and after Hopper's backward: what it reads of each query, and the order of its sums of dq."""

from __future__ import annotations

import triton
import triton.language as tl

from .common import LOG2_E, load_tile, locate, store_tile
from .hopper_backward_schedule import list_tasks
from .hopper_common import await_previous


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


@triton.jit
def _clear(ptr, first, end, share, shares):
    """Zeros to elements `first` to `end`, multiples of 8, or to one of several shares of them."""
    AT_ONCE: tl.constexpr = 1024
    end = tl.multiple_of(end, 8)
    for start in range(first + share * AT_ONCE, end, shares * AT_ONCE):
        offs = tl.multiple_of(start, 8) + tl.arange(0, AT_ONCE)
        tl.store(ptr + offs, tl.zeros((AT_ONCE,), ptr.dtype.element_ty), mask=offs < end)


@triton.jit
def _clear_unseen(grads, cu_q_ptr, cu_k_ptr, batch, heads, heads_k, seqlen_q, seqlen_k, D: tl.constexpr):
    """Zeros to what nobody else writes of packed gradients: rows past the last sequence, and keys without queries."""
    dq_ptr, dk_ptr, dv_ptr = grads
    pid, programs = tl.program_id(0), tl.num_programs(0)
    row_q, row_k = tl.cast(heads * D, tl.int64), tl.cast(heads_k * D, tl.int64)
    _clear(dq_ptr, tl.load(cu_q_ptr + batch) * row_q, seqlen_q * row_q, pid, programs)
    first, end = tl.load(cu_k_ptr + batch) * row_k, seqlen_k * row_k
    _clear(dk_ptr, first, end, pid, programs)
    _clear(dv_ptr, first, end, pid, programs)
    if pid < batch:
        _, length_q = locate(cu_q_ptr, pid, 0)
        first_k, length_k = locate(cu_k_ptr, pid, 0)
        if length_q == 0:
            _clear(dk_ptr, first_k * row_k, (first_k + length_k) * row_k, 0, 1)
            _clear(dv_ptr, first_k * row_k, (first_k + length_k) * row_k, 0, 1)


@triton.jit(do_not_specialize=["heads", "seqlen", "tiles", "tiles_q", "heads_k", "seqlen_k"])
def prepare_kernel(out_rows, do_rows, lse_ptr, dlse_ptr, unit_lse_ptr, padded_delta_ptr, delta_ptr, dq_ptr, redo_ptr,
                   tasks_ptr, cu_q_ptr, cu_k_ptr, grads, heads, seqlen, tiles, tiles_q, heads_k, seqlen_k,
                   D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr):  # fmt: skip
    """Rows of a head's delta = Σ dO O - dlse, and of its lse in units of ln 2, padded to whole tiles; dq = 0. Of
    packed sequences the tasks, and zeros where nobody else writes.

    Queries past the end, and those that see no key, get an lse of inf, and so weights of 0.
    """
    if redo_ptr is not None:  # noqa: SIM102 (known to the compiler)
        if tl.program_id(0) == 0:
            tl.store(redo_ptr, 0)
    if tasks_ptr is not None:
        batch = tl.num_programs(0) // (heads * tiles)
        list_tasks(tasks_ptr, cu_q_ptr, cu_k_ptr, batch, BLOCK_M, BLOCK_N)
        _clear_unseen(grads, cu_q_ptr, cu_k_ptr, batch, heads, heads_k, seqlen, seqlen_k, D)
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
    """Scales dq, rounds it and puts it in the usual order, the inverse of that of `hopper_backward_kernel._add_dq`."""
    await_previous()
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
