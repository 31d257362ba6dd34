"""Gradient of an additive mask: a program owns a tile of the mask and sums dS over everything it is broadcast along.

No other program writes there, so a repeated backward is bitwise the same, and memory is that of the mask.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..reference import Options
from .common import LOG2_E, SIZES, describe, exponential, head_of_mask, kept, load_tile, on_device_of, score, soften
from .launch import compiled_with, shared_arguments
from .tiles import choose_tiles, padded_widths


@triton.jit
def _scores_gradient(
    q_desc, k_desc, v_desc, do_desc, lse_ptr, delta_ptr, slopes_ptr, mask, batch, head, head_k, heads_q, start_m,
    start_n, bounds, unit_scale, tanh_scale, dropout,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr, BOUND_LEFT: tl.constexpr, BOUND_RIGHT: tl.constexpr, EXP2: tl.constexpr,
    UPCAST: tl.constexpr,
):  # fmt: skip
    """dS of one tile of one head, before the softcap's factor; 0 for hidden pairs."""
    seqlen_q, seqlen_k, shift_left, shift_right = bounds
    unit: tl.constexpr = LOG2_E if EXP2 else 1.0
    batch_head = batch * heads_q + head
    slope = None if slopes_ptr is None else tl.load(slopes_ptr + batch_head) * unit
    head_mask = None if mask is None else head_of_mask(mask, batch, head)
    rules = (seqlen_q, seqlen_k, shift_left, shift_right, unit_scale)
    offs_m = start_m + tl.arange(0, BLOCK_M)
    offs_n = start_n + tl.arange(0, BLOCK_N)
    row = tl.cast(batch_head, tl.int64) * seqlen_q
    unit_lse = tl.load(lse_ptr + row + offs_m, mask=offs_m < seqlen_q, other=0.0) * unit
    delta = tl.load(delta_ptr + row + offs_m, mask=offs_m < seqlen_q, other=0.0)
    q = load_tile(q_desc, batch, head, start_m, seqlen_q, BLOCK_M, D, BLOCK_D, UPCAST)
    k = load_tile(k_desc, batch, head_k, start_n, seqlen_k, BLOCK_N, D, BLOCK_D, UPCAST)
    x = soften(tl.dot(q, tl.trans(k), input_precision="ieee"), tanh_scale, EXP2)  # (BLOCK_M, BLOCK_N)
    scores, visible = score(
        x, offs_m[:, None], offs_n[None, :], rules, slope, head_mask, BOUND_LEFT, BOUND_RIGHT, True, True, True, EXP2
    )  # fmt: skip
    do = load_tile(do_desc, batch, head, start_m, seqlen_q, BLOCK_M, DV, BLOCK_DV, UPCAST)
    v = load_tile(v_desc, batch, head_k, start_n, seqlen_k, BLOCK_N, DV, BLOCK_DV, UPCAST)
    dp = tl.dot(do, tl.trans(v), input_precision="ieee")  # (BLOCK_M, BLOCK_N)
    if dropout is not None:
        seed, drop_below, keep_scale = dropout
        dp *= kept(seed, drop_below, batch_head, start_m, start_n, BLOCK_M, BLOCK_N) * keep_scale
    ds = exponential(scores - unit_lse[:, None], EXP2) * (dp - delta[:, None])
    return tl.where(visible, ds, 0.0)


@triton.jit(do_not_specialize=[*SIZES, "batches", "heads", "mask_heads", "tiles_m", "tiles_n"])
def _grad_mask_kernel(
    q_desc, k_desc, v_desc, do_desc, lse_ptr, delta_ptr, dmask_ptr, slopes_ptr, mask, seed_ptr, cu_q_ptr, cu_k_ptr,
    heads_q, group, seqlen_q, seqlen_k, window_left, window_right, batches, heads, mask_heads, tiles_m, tiles_n,
    drop_below, keep_scale, scale, softcap,
    ONE_ROW: tl.constexpr, ONE_COLUMN: tl.constexpr, EXP2: tl.constexpr,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr, BOUND_LEFT: tl.constexpr, BOUND_RIGHT: tl.constexpr, ONE_LOOP: tl.constexpr,
    UPCAST: tl.constexpr,
):  # fmt: skip
    # `batches` and `heads` in a row share an entry of the mask; so do all its rows (ONE_ROW) or columns.
    own_m = 1 if ONE_ROW else tiles_m
    own_n = 1 if ONE_COLUMN else tiles_n
    loop_m = tiles_m if ONE_ROW else 1
    loop_n = tiles_n if ONE_COLUMN else 1
    pid = tl.program_id(0)
    own_start_m = pid // own_n % own_m * BLOCK_M
    own_start_n = pid % own_n * BLOCK_N
    entry = pid // (own_m * own_n)
    first_batch = entry // mask_heads * batches
    first_head = entry % mask_heads * heads

    bounds = (seqlen_q, seqlen_k, seqlen_k - seqlen_q - window_left, seqlen_k - seqlen_q + window_right)
    unit_scale = (scale if softcap is None else softcap) * (LOG2_E if EXP2 else 1.0)
    tanh_scale = None if softcap is None else scale / softcap
    dropout = None if seed_ptr is None else (tl.load(seed_ptr), drop_below, keep_scale)
    dmask = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for i in tl.range(0, batches * heads * loop_m * loop_n):
        start_n = own_start_n + i % loop_n * BLOCK_N
        start_m = own_start_m + i // loop_n % loop_m * BLOCK_M
        head = first_head + i // (loop_n * loop_m) % heads
        batch = first_batch + i // (loop_n * loop_m) // heads
        dmask += _scores_gradient(
            q_desc, k_desc, v_desc, do_desc, lse_ptr, delta_ptr, slopes_ptr, mask, batch, head, head // group, heads_q,
            start_m, start_n, bounds, unit_scale, tanh_scale, dropout,
            D, DV, BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_DV, BOUND_LEFT, BOUND_RIGHT, EXP2, UPCAST,
        )  # fmt: skip
    rows = 1 if ONE_ROW else seqlen_q
    columns = 1 if ONE_COLUMN else seqlen_k
    offs_m = own_start_m + tl.arange(0, BLOCK_M)[:, None]
    offs_n = own_start_n + tl.arange(0, BLOCK_N)[None, :]
    if ONE_ROW:
        dmask = tl.sum(dmask, 0, keep_dims=True)
        offs_m = tl.zeros((1, 1), tl.int32)
    if ONE_COLUMN:
        dmask = tl.sum(dmask, 1, keep_dims=True)
        offs_n = tl.zeros((1, 1), tl.int32)
    ptrs = dmask_ptr + tl.cast(entry, tl.int64) * rows * columns + offs_m.to(tl.int64) * columns + offs_n
    tl.store(ptrs, dmask, mask=(offs_m < rows) & (offs_n < columns))


def grad_mask(
    grad_out: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    lse: torch.Tensor,
    delta: torch.Tensor,
    options: Options,
) -> torch.Tensor:
    """The mask's gradient in float32, of loadable tensors."""
    assert options.mask is not None
    batch, seqlen_q, heads_q, head_dim = q.shape
    seqlen_k = v.shape[1]
    entries, mask_heads, rows, columns = options.mask.shape
    dmask = torch.empty(options.mask.shape, dtype=torch.float32, device=q.device)
    block_d, block_dv = padded_widths(head_dim, v.shape[3])
    tile = choose_tiles(q, v).backward_q._replace(num_stages=1)
    tiles_m, tiles_n = triton.cdiv(seqlen_q, tile.block_m), triton.cdiv(seqlen_k, tile.block_n)
    programs = entries * mask_heads * (tiles_m if rows > 1 else 1) * (tiles_n if columns > 1 else 1)
    with on_device_of(q):
        _grad_mask_kernel[(programs,)](
            describe(q, tile.block_m, block_d),
            describe(k, tile.block_n, block_d),
            describe(v, tile.block_n, block_dv),
            describe(grad_out, tile.block_m, block_dv),
            lse, delta, dmask, **shared_arguments(q, v, options),
            heads_q=heads_q, batches=batch // entries, heads=heads_q // mask_heads, mask_heads=mask_heads,
            tiles_m=tiles_m, tiles_n=tiles_n, scale=options.scale, ONE_ROW=rows == 1, ONE_COLUMN=columns == 1,
            EXP2=q.dtype != torch.float32, **compiled_with(tile, options),
        )  # fmt: skip
    return dmask
