"""FlashAttention backward in two passes that recompute the weights from q, k and lse (arXiv:2205.14135, 2307.08691).

With P = exp(scale q kᵀ - lse), dP = dO vᵀ and delta_i = Σ_d dO_id O_id - dlse_i:
    dS = P ∘ (dP - delta),   dq = scale dS k,   dk = scale dSᵀ q,   dv = Pᵀ dO.
The first pass owns queries, writes delta and dq; the second owns keys, writes dk and dv and sums over the query heads
of its group. Nobody adds to anybody else's result, so a repeated backward is bitwise the same.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .common import LOG2_E, SIZES, exponential, interpreted, load_tile, on_device_of, store_tile
from .tiles import choose_tiles, padded_width


@triton.jit
def _grad_q_tile(
    dq, q, do, unit_lse, delta, k_ptr, v_ptr, stride_ks, stride_kd, stride_vs, stride_vd, start_m, start_n, seqlen_k,
    shift, unit_scale, D: tl.constexpr, DV: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BOUND_RIGHT: tl.constexpr, MASKED: tl.constexpr,
    EXP2: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Adds one tile of keys to the queries' gradient."""
    k = load_tile(k_ptr, start_n, seqlen_k, stride_ks, stride_kd, BLOCK_N, D, BLOCK_D, MASKED, UPCAST)
    v = load_tile(v_ptr, start_n, seqlen_k, stride_vs, stride_vd, BLOCK_N, DV, BLOCK_DV, MASKED, UPCAST)
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
    dk, dv, k, v, q_ptr, do_ptr, lse_ptr, delta_ptr, stride_qh, stride_qs, stride_qd, stride_doh, stride_dos,
    stride_dod, head, start_m, start_n, seqlen_q, shift, unit_scale, D: tl.constexpr, DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, MASKED: tl.constexpr,
    EXP2: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Adds one tile of a head's queries to the keys' and values' gradients. Scores are computed transposed, so that pᵀ
    and dsᵀ enter their products as they are (Triton miscompiles transposing them, flash-linear-attention #640)."""
    head = tl.cast(head, tl.int64)
    offs_m = start_m + tl.arange(0, BLOCK_M)
    q = load_tile(q_ptr + head * stride_qh, start_m, seqlen_q, stride_qs, stride_qd, BLOCK_M, D, BLOCK_D, True, UPCAST)
    do_ptr += head * stride_doh
    do = load_tile(do_ptr, start_m, seqlen_q, stride_dos, stride_dod, BLOCK_M, DV, BLOCK_DV, True, UPCAST)
    # Queries past the end read as zeros, gradient included, and so add nothing.
    row = head * seqlen_q
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
    q_ptr, k_ptr, v_ptr, out_ptr, do_ptr, lse_ptr, dlse_ptr, delta_ptr, dq_ptr,
    stride_qb, stride_qs, stride_qh, stride_qd,
    stride_kb, stride_ks, stride_kh, stride_kd,
    stride_vb, stride_vs, stride_vh, stride_vd,
    stride_dob, stride_dos, stride_doh, stride_dod,
    heads_q, group, seqlen_q, seqlen_k, window_right, num_tiles, scale,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr, BOUND_RIGHT: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    EXP2: tl.constexpr = q_ptr.dtype.element_ty != tl.float32
    pid = tl.program_id(0)
    start_m = (num_tiles - 1 - pid % num_tiles) * BLOCK_M
    batch_head = pid // num_tiles
    batch = tl.cast(batch_head // heads_q, tl.int64)
    head = tl.cast(batch_head % heads_q, tl.int64)
    q_ptr += batch * stride_qb + head * stride_qh
    k_ptr += batch * stride_kb + head // group * stride_kh
    v_ptr += batch * stride_vb + head // group * stride_vh
    do_ptr += batch * stride_dob + head * stride_doh
    out_ptr += (batch * seqlen_q * heads_q + head) * DV
    dq_ptr += (batch * seqlen_q * heads_q + head) * D
    row = (batch * heads_q + head) * seqlen_q

    # As in the forward kernel.
    shift = seqlen_k - seqlen_q + window_right
    full_end = seqlen_k
    end = seqlen_k
    if BOUND_RIGHT:
        full_end = tl.minimum(seqlen_k, start_m + shift + 1)
        end = tl.minimum(seqlen_k, tl.minimum(start_m + BLOCK_M, seqlen_q) + shift)
    full_end = tl.maximum(full_end, 0) // BLOCK_N * BLOCK_N

    offs_m = start_m + tl.arange(0, BLOCK_M)
    mask_m = offs_m < seqlen_q
    do = load_tile(do_ptr, start_m, seqlen_q, stride_dos, stride_dod, BLOCK_M, DV, BLOCK_DV, True, UPCAST)
    out = load_tile(out_ptr, start_m, seqlen_q, heads_q * DV, 1, BLOCK_M, DV, BLOCK_DV, True, UPCAST)
    delta = tl.sum(out.to(tl.float32) * do.to(tl.float32), 1)
    if dlse_ptr is not None:
        delta -= tl.load(dlse_ptr + row + offs_m, mask=mask_m, other=0.0)
    tl.store(delta_ptr + row + offs_m, delta, mask=mask_m)

    q = load_tile(q_ptr, start_m, seqlen_q, stride_qs, stride_qd, BLOCK_M, D, BLOCK_D, True, UPCAST)
    unit_lse = tl.load(lse_ptr + row + offs_m, mask=mask_m, other=0.0) * (LOG2_E if EXP2 else 1.0)
    unit_scale = scale * (LOG2_E if EXP2 else 1.0)
    dq = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    for start_n in tl.range(0, full_end, BLOCK_N):
        dq = _grad_q_tile(
            dq, q, do, unit_lse, delta, k_ptr, v_ptr, stride_ks, stride_kd, stride_vs, stride_vd, start_m, start_n,
            seqlen_k, shift, unit_scale, D, DV, BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_DV, BOUND_RIGHT, False, EXP2, UPCAST,
        )  # fmt: skip
    for start_n in tl.range(full_end, end, BLOCK_N):
        dq = _grad_q_tile(
            dq, q, do, unit_lse, delta, k_ptr, v_ptr, stride_ks, stride_kd, stride_vs, stride_vd, start_m, start_n,
            seqlen_k, shift, unit_scale, D, DV, BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_DV, BOUND_RIGHT, True, EXP2, UPCAST,
        )  # fmt: skip
    store_tile(dq_ptr, dq * scale, start_m, seqlen_q, heads_q * D, BLOCK_M, D, BLOCK_D)


@triton.jit(do_not_specialize=SIZES)
def _grad_kv_kernel(
    q_ptr, k_ptr, v_ptr, do_ptr, lse_ptr, delta_ptr, dk_ptr, dv_ptr,
    stride_qb, stride_qs, stride_qh, stride_qd,
    stride_kb, stride_ks, stride_kh, stride_kd,
    stride_vb, stride_vs, stride_vh, stride_vd,
    stride_dob, stride_dos, stride_doh, stride_dod,
    heads_k, group, seqlen_q, seqlen_k, window_right, num_tiles, scale,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr, BOUND_RIGHT: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    EXP2: tl.constexpr = q_ptr.dtype.element_ty != tl.float32
    # With both accumulators this wide a second loop would spill: the masked one does everything.
    ONE_LOOP: tl.constexpr = BOUND_RIGHT and BLOCK_D + BLOCK_DV > 256
    # Under a causal mask the first keys are seen by the most queries: they go first.
    pid = tl.program_id(0)
    start_n = pid % num_tiles * BLOCK_N
    batch_head = pid // num_tiles
    batch = tl.cast(batch_head // heads_k, tl.int64)
    head = tl.cast(batch_head % heads_k, tl.int64)
    q_ptr += batch * stride_qb + head * group * stride_qh
    do_ptr += batch * stride_dob + head * group * stride_doh
    k_ptr += batch * stride_kb + head * stride_kh
    v_ptr += batch * stride_vb + head * stride_vh
    lse_ptr += (batch * heads_k + head) * group * seqlen_q
    delta_ptr += (batch * heads_k + head) * group * seqlen_q
    dk_ptr += (batch * seqlen_k * heads_k + head) * D
    dv_ptr += (batch * seqlen_k * heads_k + head) * DV

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
    k = load_tile(k_ptr, start_n, seqlen_k, stride_ks, stride_kd, BLOCK_N, D, BLOCK_D, True, UPCAST)
    v = load_tile(v_ptr, start_n, seqlen_k, stride_vs, stride_vd, BLOCK_N, DV, BLOCK_DV, True, UPCAST)
    unit_scale = scale * (LOG2_E if EXP2 else 1.0)
    dk = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    dv = tl.zeros((BLOCK_N, BLOCK_DV), tl.float32)
    # One loop runs over the tiles of all query heads, so that it stays pipelined from one head to the next.
    masked = (full_start - start) // BLOCK_M
    for i in tl.range(0, group * masked):
        dk, dv = _grad_kv_tile(
            dk, dv, k, v, q_ptr, do_ptr, lse_ptr, delta_ptr, stride_qh, stride_qs, stride_qd, stride_doh, stride_dos,
            stride_dod, i // masked, start + i % masked * BLOCK_M, start_n, seqlen_q, shift, unit_scale,
            D, DV, BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_DV, BOUND_RIGHT, EXP2, UPCAST,
        )  # fmt: skip
    if not ONE_LOOP:
        full = tl.cdiv(seqlen_q - full_start, BLOCK_M)
        for i in tl.range(0, group * full):
            dk, dv = _grad_kv_tile(
                dk, dv, k, v, q_ptr, do_ptr, lse_ptr, delta_ptr, stride_qh, stride_qs, stride_qd, stride_doh,
                stride_dos, stride_dod, i // full, full_start + i % full * BLOCK_M, start_n, seqlen_q, shift,
                unit_scale, D, DV, BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_DV, False, EXP2, UPCAST,
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
    batch, seqlen_q, heads_q, head_dim = q.shape
    seqlen_k, heads_k, head_dim_v = v.shape[1:]
    dq = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    dk = torch.empty(k.shape, dtype=k.dtype, device=q.device)
    dv = torch.empty(v.shape, dtype=v.dtype, device=q.device)
    delta = torch.empty(lse.shape, dtype=torch.float32, device=q.device)
    out, lse = out.contiguous(), lse.contiguous()
    grad_lse = None if grad_lse is None else grad_lse.contiguous()
    tiles = choose_tiles(q, v)
    strides = (*q.stride(), *k.stride(), *v.stride(), *grad_out.stride())
    shape = {"D": head_dim, "DV": head_dim_v, "BLOCK_D": padded_width(head_dim), "BLOCK_DV": padded_width(head_dim_v)}
    options = {"BOUND_RIGHT": window_right is not None, "UPCAST": interpreted(_grad_q_kernel), "enable_fp_fusion": True}
    with on_device_of(q):
        if dq.numel() > 0:
            tile = tiles.backward_q
            num_tiles = triton.cdiv(seqlen_q, tile.block_m)
            _grad_q_kernel[(num_tiles * batch * heads_q,)](
                q, k, v, out, grad_out, lse, grad_lse, delta, dq, *strides,
                heads_q, heads_q // heads_k, seqlen_q, seqlen_k, window_right or 0, num_tiles, scale,
                BLOCK_M=tile.block_m, BLOCK_N=tile.block_n, num_warps=tile.num_warps, num_stages=tile.num_stages,
                **shape, **options,
            )  # fmt: skip
        if dk.numel() > 0:
            tile = tiles.backward_kv
            num_tiles = triton.cdiv(seqlen_k, tile.block_n)
            _grad_kv_kernel[(num_tiles * batch * heads_k,)](
                q, k, v, grad_out, lse, delta, dk, dv, *strides,
                heads_k, heads_q // heads_k, seqlen_q, seqlen_k, window_right or 0, num_tiles, scale,
                BLOCK_M=tile.block_m, BLOCK_N=tile.block_n, num_warps=tile.num_warps, num_stages=tile.num_stages,
                **shape, **options,
            )  # fmt: skip
    return dq, dk, dv
