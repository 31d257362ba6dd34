"""FlashAttention backward in two passes that recompute the weights from q, k and lse (arXiv:2205.14135, 2307.08691).

With P = exp(scale q kᵀ - lse), dP = dO vᵀ and delta_i = Σ_d dO_id O_id - dlse_i:
    dS = P ∘ (dP - delta),   dq = scale dS k,   dk = scale dSᵀ q,   dv = Pᵀ dO.
The first pass owns queries, writes delta and dq; the second owns keys, writes dk and dv and sums over the query heads
of its group. Nobody adds to anybody else's result, so a repeated backward is bitwise the same.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from .common import LOG2_E, SIZES, describe, exponential, interpreted, load_tile, loadable, on_device_of, store_tile
from .tiles import Tile, choose_tiles, padded_widths


@triton.jit
def _grad_q_tile(
    dq, q, do, unit_lse, delta, k_desc, v_desc, batch, head_k, start_m, start_n, seqlen_k, shift, unit_scale,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr, BOUND_RIGHT: tl.constexpr, MASKED: tl.constexpr, EXP2: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Adds one tile of keys to the queries' gradient."""
    k = load_tile(k_desc, batch, head_k, start_n, seqlen_k, BLOCK_N, D, BLOCK_D, UPCAST)
    v = load_tile(v_desc, batch, head_k, start_n, seqlen_k, BLOCK_N, DV, BLOCK_DV, UPCAST)
    scores = tl.dot(q, tl.trans(k), input_precision="ieee")  # (BLOCK_M, BLOCK_N)
    p = exponential(scores * unit_scale - unit_lse[:, None], EXP2)
    if MASKED:
        offs_n = start_n + tl.arange(0, BLOCK_N)
        visible = offs_n[None, :] < seqlen_k
        if BOUND_RIGHT:
            offs_m = start_m + tl.arange(0, BLOCK_M)
            visible = visible & (offs_n[None, :] <= offs_m[:, None] + shift)
        p = tl.where(visible, p, 0.0)
    dp = tl.dot(do, tl.trans(v), input_precision="ieee")  # (BLOCK_M, BLOCK_N)
    ds = p * (dp - delta[:, None])
    return tl.dot(ds.to(k.dtype), k, dq, input_precision="ieee")


@triton.jit
def _grad_kv_tile(
    dk, dv, k, v, q_desc, do_desc, lse_ptr, delta_ptr, batch, head, heads_q, start_m, start_n, seqlen_q, shift,
    unit_scale, D: tl.constexpr, DV: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, MASKED: tl.constexpr, EXP2: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Adds one tile of a head's queries to the keys' and values' gradients. Scores are computed transposed, so that pᵀ
    and dsᵀ enter their products as they are (Triton miscompiles transposing them, flash-linear-attention #640)."""
    offs_m = start_m + tl.arange(0, BLOCK_M)
    # Queries past the end read as zeros, gradient included, and so add nothing.
    q = load_tile(q_desc, batch, head, start_m, seqlen_q, BLOCK_M, D, BLOCK_D, UPCAST)
    do = load_tile(do_desc, batch, head, start_m, seqlen_q, BLOCK_M, DV, BLOCK_DV, UPCAST)
    row = tl.cast(batch * heads_q + head, tl.int64) * seqlen_q
    unit_lse = tl.load(lse_ptr + row + offs_m, mask=offs_m < seqlen_q, other=0.0) * (LOG2_E if EXP2 else 1.0)
    delta = tl.load(delta_ptr + row + offs_m, mask=offs_m < seqlen_q, other=0.0)
    scores_t = tl.dot(k, tl.trans(q), input_precision="ieee")  # (BLOCK_N, BLOCK_M)
    p_t = exponential(scores_t * unit_scale - unit_lse[None, :], EXP2)
    if MASKED:
        offs_n = start_n + tl.arange(0, BLOCK_N)
        p_t = tl.where(offs_n[:, None] <= offs_m[None, :] + shift, p_t, 0.0)
    dv = tl.dot(p_t.to(do.dtype), do, dv, input_precision="ieee")
    dp_t = tl.dot(v, tl.trans(do), input_precision="ieee")  # (BLOCK_N, BLOCK_M)
    ds_t = p_t * (dp_t - delta[None, :])
    dk = tl.dot(ds_t.to(q.dtype), q, dk, input_precision="ieee")
    return dk, dv


@triton.jit(do_not_specialize=SIZES)
def _grad_q_kernel(
    q_desc, k_desc, v_desc, out_desc, do_desc, lse_ptr, dlse_ptr, delta_ptr, dq_ptr,
    heads_q, group, seqlen_q, seqlen_k, window_right, num_tiles, scale,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr, BOUND_RIGHT: tl.constexpr, ONE_LOOP: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    EXP2: tl.constexpr = dq_ptr.dtype.element_ty != tl.float32
    pid = tl.program_id(0)
    start_m = (num_tiles - 1 - pid % num_tiles) * BLOCK_M
    batch_head = pid // num_tiles
    batch = batch_head // heads_q
    head = batch_head % heads_q
    head_k = head // group
    dq_ptr += (tl.cast(batch, tl.int64) * seqlen_q * heads_q + head) * D
    row = tl.cast(batch_head, tl.int64) * seqlen_q

    # As in the forward kernel.
    shift = seqlen_k - seqlen_q + window_right
    full_end = seqlen_k
    end = seqlen_k
    if BOUND_RIGHT:
        full_end = tl.minimum(seqlen_k, start_m + shift + 1)
        end = tl.minimum(seqlen_k, tl.minimum(start_m + BLOCK_M, seqlen_q) + shift)
    full_end = 0 if ONE_LOOP else tl.maximum(full_end, 0) // BLOCK_N * BLOCK_N

    offs_m = start_m + tl.arange(0, BLOCK_M)
    mask_m = offs_m < seqlen_q
    do = load_tile(do_desc, batch, head, start_m, seqlen_q, BLOCK_M, DV, BLOCK_DV, UPCAST)
    out = load_tile(out_desc, batch, head, start_m, seqlen_q, BLOCK_M, DV, BLOCK_DV, UPCAST)
    delta = tl.sum(out.to(tl.float32) * do.to(tl.float32), 1)
    if dlse_ptr is not None:
        delta -= tl.load(dlse_ptr + row + offs_m, mask=mask_m, other=0.0)
    tl.store(delta_ptr + row + offs_m, delta, mask=mask_m)

    q = load_tile(q_desc, batch, head, start_m, seqlen_q, BLOCK_M, D, BLOCK_D, UPCAST)
    unit_lse = tl.load(lse_ptr + row + offs_m, mask=mask_m, other=0.0) * (LOG2_E if EXP2 else 1.0)
    unit_scale = scale * (LOG2_E if EXP2 else 1.0)
    dq = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    if not ONE_LOOP:
        for start_n in tl.range(0, full_end, BLOCK_N):
            dq = _grad_q_tile(
                dq, q, do, unit_lse, delta, k_desc, v_desc, batch, head_k, start_m, start_n, seqlen_k, shift,
                unit_scale, D, DV, BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_DV, BOUND_RIGHT, False, EXP2, UPCAST,
            )  # fmt: skip
    for start_n in tl.range(full_end, end, BLOCK_N):
        dq = _grad_q_tile(
            dq, q, do, unit_lse, delta, k_desc, v_desc, batch, head_k, start_m, start_n, seqlen_k, shift, unit_scale,
            D, DV, BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_DV, BOUND_RIGHT, True, EXP2, UPCAST,
        )  # fmt: skip
    store_tile(dq_ptr, dq * scale, start_m, seqlen_q, heads_q * D, BLOCK_M, D, BLOCK_D)


@triton.jit(do_not_specialize=SIZES)
def _grad_kv_kernel(
    q_desc, k_desc, v_desc, do_desc, lse_ptr, delta_ptr, dk_ptr, dv_ptr,
    heads_k, group, seqlen_q, seqlen_k, window_right, num_tiles, scale,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr, BOUND_RIGHT: tl.constexpr, ONE_LOOP: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    EXP2: tl.constexpr = dk_ptr.dtype.element_ty != tl.float32
    # Under a causal mask the first keys are seen by the most queries: they go first.
    pid = tl.program_id(0)
    start_n = pid % num_tiles * BLOCK_N
    batch_head = pid // num_tiles
    batch = batch_head // heads_k
    head = batch_head % heads_k
    first_head = head * group
    heads_q = heads_k * group
    row = tl.cast(batch, tl.int64) * seqlen_k * heads_k + head
    dk_ptr += row * D
    dv_ptr += row * DV

    # Key j is seen by queries from j - shift on: the tile by none before start, by every query from full_start on.
    shift = seqlen_k - seqlen_q + window_right
    start = 0
    full_start = 0
    if BOUND_RIGHT:
        start = tl.maximum(start_n - shift, 0) // BLOCK_M * BLOCK_M
        full_start = tl.maximum(start_n + BLOCK_N - 1 - shift + BLOCK_M - 1, 0) // BLOCK_M * BLOCK_M
        end = tl.cdiv(seqlen_q, BLOCK_M) * BLOCK_M
        full_start = end if ONE_LOOP else tl.minimum(full_start, end)

    # Keys past the end only spoil their own rows, which are not stored.
    k = load_tile(k_desc, batch, head, start_n, seqlen_k, BLOCK_N, D, BLOCK_D, UPCAST)
    v = load_tile(v_desc, batch, head, start_n, seqlen_k, BLOCK_N, DV, BLOCK_DV, UPCAST)
    unit_scale = scale * (LOG2_E if EXP2 else 1.0)
    dk = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    dv = tl.zeros((BLOCK_N, BLOCK_DV), tl.float32)
    # One loop runs over the tiles of all query heads, so that it stays pipelined from one head to the next.
    masked = (full_start - start) // BLOCK_M
    for i in tl.range(0, group * masked):
        dk, dv = _grad_kv_tile(
            dk, dv, k, v, q_desc, do_desc, lse_ptr, delta_ptr, batch, first_head + i // masked, heads_q,
            start + i % masked * BLOCK_M, start_n, seqlen_q, shift, unit_scale,
            D, DV, BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_DV, BOUND_RIGHT, EXP2, UPCAST,
        )  # fmt: skip
    if not ONE_LOOP:
        full = tl.cdiv(seqlen_q - full_start, BLOCK_M)
        for i in tl.range(0, group * full):
            dk, dv = _grad_kv_tile(
                dk, dv, k, v, q_desc, do_desc, lse_ptr, delta_ptr, batch, first_head + i // full, heads_q,
                full_start + i % full * BLOCK_M, start_n, seqlen_q, shift, unit_scale,
                D, DV, BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_DV, False, EXP2, UPCAST,
            )  # fmt: skip
    store_tile(dk_ptr, dk * scale, start_n, seqlen_k, heads_k * D, BLOCK_N, D, BLOCK_D)
    store_tile(dv_ptr, dv, start_n, seqlen_k, heads_k * DV, BLOCK_N, DV, BLOCK_DV)


def backward(
    grad_out: torch.Tensor,
    grad_lse: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    scale: float,
    window_right: int | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of q, k and v, contiguous. The twin of `attention.reference.tiled_backward`."""
    if grad_out.numel() == 0 or k.numel() == 0:
        dq, dk, dv = (torch.zeros(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
        return dq, dk, dv
    lse = lse.contiguous()
    grad_lse = None if grad_lse is None else grad_lse.contiguous()
    grad_out, q, k, v, out = (loadable(x) for x in (grad_out, q, k, v, out))
    dq, delta = grad_q(grad_out, grad_lse, q, k, v, out, lse, scale, window_right)
    dk, dv = grad_kv(grad_out, q, k, v, lse, delta, scale, window_right)
    return dq, dk, dv


def grad_q(
    grad_out: torch.Tensor,
    grad_lse: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    scale: float,
    window_right: int | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The first pass: dq and delta, of loadable tensors."""
    batch, seqlen_q, heads_q, head_dim = q.shape
    seqlen_k, heads_k, head_dim_v = v.shape[1:]
    dq = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    delta = torch.empty(lse.shape, dtype=torch.float32, device=q.device)
    block_d, block_dv = padded_widths(head_dim, head_dim_v)
    tile = choose_tiles(q, v).backward_q
    num_tiles = triton.cdiv(seqlen_q, tile.block_m)
    with on_device_of(q):
        _grad_q_kernel[(num_tiles * batch * heads_q,)](
            describe(q, tile.block_m, block_d),
            describe(k, tile.block_n, block_d),
            describe(v, tile.block_n, block_dv),
            describe(out, tile.block_m, block_dv),
            describe(grad_out, tile.block_m, block_dv),
            lse, grad_lse, delta, dq,
            heads_q, heads_q // heads_k, seqlen_q, seqlen_k, window_right or 0, num_tiles, scale,
            D=head_dim, DV=head_dim_v, BLOCK_D=block_d, BLOCK_DV=block_dv, **_options(tile, window_right),
        )  # fmt: skip
    return dq, delta


def grad_kv(
    grad_out: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    lse: torch.Tensor,
    delta: torch.Tensor,
    scale: float,
    window_right: int | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The second pass: dk and dv, of loadable tensors."""
    batch, seqlen_q, heads_q, head_dim = q.shape
    seqlen_k, heads_k, head_dim_v = v.shape[1:]
    dk = torch.empty(k.shape, dtype=k.dtype, device=q.device)
    dv = torch.empty(v.shape, dtype=v.dtype, device=q.device)
    block_d, block_dv = padded_widths(head_dim, head_dim_v)
    tile = choose_tiles(q, v).backward_kv
    num_tiles = triton.cdiv(seqlen_k, tile.block_n)
    with on_device_of(q):
        _grad_kv_kernel[(num_tiles * batch * heads_k,)](
            describe(q, tile.block_m, block_d),
            describe(k, tile.block_n, block_d),
            describe(v, tile.block_n, block_dv),
            describe(grad_out, tile.block_m, block_dv),
            lse, delta, dk, dv,
            heads_k, heads_q // heads_k, seqlen_q, seqlen_k, window_right or 0, num_tiles, scale,
            D=head_dim, DV=head_dim_v, BLOCK_D=block_d, BLOCK_DV=block_dv, **_options(tile, window_right),
        )  # fmt: skip
    return dk, dv


def _options(tile: Tile, window_right: int | None) -> dict[str, Any]:
    """What both passes are compiled with."""
    causal = window_right is not None
    return {
        "BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n, "num_warps": tile.num_warps, "num_stages": tile.num_stages,
        "BOUND_RIGHT": causal, "ONE_LOOP": causal and tile.one_loop, "UPCAST": interpreted(_grad_q_kernel),
        "enable_fp_fusion": True,
    }  # fmt: skip
