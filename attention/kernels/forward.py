"""FlashAttention forward: a program a tile of queries, online softmax over tiles of keys (arXiv:2307.08691)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .common import (
    LN_2,
    LOG2_E,
    SIZES,
    describe,
    exponential,
    interpreted,
    load_tile,
    loadable,
    on_device_of,
    store_tile,
)
from .tiles import choose_tiles, padded_widths


@triton.jit
def _attend(
    acc, row_max, row_sum, q, k_desc, v_desc, batch, head_k, start_m, start_n, seqlen_k, shift, unit_scale,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr, BOUND_RIGHT: tl.constexpr, MASKED: tl.constexpr, EXP2: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Folds one tile of keys into the running maximum, sum and weighted values."""
    k = load_tile(k_desc, batch, head_k, start_n, seqlen_k, BLOCK_N, D, BLOCK_D, UPCAST)
    scores = tl.dot(q, tl.trans(k), input_precision="ieee")  # (BLOCK_M, BLOCK_N)
    if MASKED:
        offs_n = start_n + tl.arange(0, BLOCK_N)
        visible = offs_n[None, :] < seqlen_k
        if BOUND_RIGHT:
            offs_m = start_m + tl.arange(0, BLOCK_M)
            visible = visible & (offs_n[None, :] <= offs_m[:, None] + shift)
        scores = tl.where(visible, scores * unit_scale, -float("inf"))
        new_max = tl.maximum(row_max, tl.max(scores, 1))
        # A row that has seen no key yet keeps -inf as its maximum; -inf - -inf would be NaN.
        anchor = tl.where(new_max == -float("inf"), 0.0, new_max)
        p = exponential(scores - anchor[:, None], EXP2)
    else:
        # unit_scale >= 0, so the maximum commutes with it and the exponent is one multiply-add an element.
        new_max = tl.maximum(row_max, tl.max(scores, 1) * unit_scale)
        anchor = new_max
        p = exponential(scores * unit_scale - anchor[:, None], EXP2)
    rescale = exponential(row_max - anchor, EXP2)
    v = load_tile(v_desc, batch, head_k, start_n, seqlen_k, BLOCK_N, DV, BLOCK_DV, UPCAST)
    acc = tl.dot(p.to(v.dtype), v, acc * rescale[:, None], input_precision="ieee")
    return acc, new_max, row_sum * rescale + tl.sum(p, 1)


@triton.jit(do_not_specialize=SIZES)
def _forward_kernel(
    q_desc, k_desc, v_desc, out_ptr, lse_ptr,
    heads_q, group, seqlen_q, seqlen_k, window_right, num_tiles, scale,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr, BOUND_RIGHT: tl.constexpr, ONE_LOOP: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    EXP2: tl.constexpr = out_ptr.dtype.element_ty != tl.float32
    # Neighbouring programs share a head's keys in L2; under a causal mask the longest rows go first.
    pid = tl.program_id(0)
    start_m = (num_tiles - 1 - pid % num_tiles) * BLOCK_M
    batch_head = pid // num_tiles
    batch = batch_head // heads_q
    head = batch_head % heads_q
    head_k = head // group
    out_ptr += (tl.cast(batch, tl.int64) * seqlen_q * heads_q + head) * DV
    lse_ptr += tl.cast(batch_head, tl.int64) * seqlen_q

    # Query i sees key j when j <= i + shift. Keys before full_end are seen by the whole tile, keys from end on by none.
    shift = seqlen_k - seqlen_q + window_right
    full_end = seqlen_k
    end = seqlen_k
    if BOUND_RIGHT:
        full_end = tl.minimum(seqlen_k, start_m + shift + 1)
        end = tl.minimum(seqlen_k, tl.minimum(start_m + BLOCK_M, seqlen_q) + shift)
    full_end = 0 if ONE_LOOP else tl.maximum(full_end, 0) // BLOCK_N * BLOCK_N

    q = load_tile(q_desc, batch, head, start_m, seqlen_q, BLOCK_M, D, BLOCK_D, UPCAST)
    unit_scale = scale * (LOG2_E if EXP2 else 1.0)
    acc = tl.zeros((BLOCK_M, BLOCK_DV), tl.float32)
    row_max = tl.full((BLOCK_M,), -float("inf"), tl.float32)
    row_sum = tl.zeros((BLOCK_M,), tl.float32)
    if not ONE_LOOP:
        for start_n in tl.range(0, full_end, BLOCK_N):
            acc, row_max, row_sum = _attend(
                acc, row_max, row_sum, q, k_desc, v_desc, batch, head_k, start_m, start_n, seqlen_k, shift, unit_scale,
                D, DV, BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_DV, BOUND_RIGHT, False, EXP2, UPCAST,
            )  # fmt: skip
    for start_n in tl.range(full_end, end, BLOCK_N):
        acc, row_max, row_sum = _attend(
            acc, row_max, row_sum, q, k_desc, v_desc, batch, head_k, start_m, start_n, seqlen_k, shift, unit_scale,
            D, DV, BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_DV, BOUND_RIGHT, True, EXP2, UPCAST,
        )  # fmt: skip

    # A row without keys has row_max = -inf, row_sum = 0 and acc = 0: its output is 0 and its lse -inf.
    row_sum = tl.where(row_sum == 0.0, 1.0, row_sum)
    acc = acc / row_sum[:, None]
    store_tile(out_ptr, acc, start_m, seqlen_q, heads_q * DV, BLOCK_M, DV, BLOCK_DV)
    offs_m = start_m + tl.arange(0, BLOCK_M)
    lse = (row_max + tl.log2(row_sum)) * LN_2 if EXP2 else row_max + tl.log(row_sum)
    tl.store(lse_ptr + offs_m, lse, mask=offs_m < seqlen_q)


def forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, window_right: int | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output (B, Sq, Hq, Dv) and lse (B, Hq, Sq). The twin of `attention.reference.tiled_forward`."""
    batch, seqlen_q, heads_q, head_dim = q.shape
    seqlen_k, heads_k, head_dim_v = v.shape[1:]
    out = torch.empty((batch, seqlen_q, heads_q, head_dim_v), dtype=q.dtype, device=q.device)
    lse = torch.empty((batch, heads_q, seqlen_q), dtype=torch.float32, device=q.device)
    if out.numel() == 0 or seqlen_k == 0:
        return out.zero_(), lse.fill_(-torch.inf)
    tile = choose_tiles(q, v).forward
    num_tiles = triton.cdiv(seqlen_q, tile.block_m)
    block_d, block_dv = padded_widths(head_dim, head_dim_v)
    if scale < 0:
        q, scale = -q, -scale  # the kernel takes the maximum of the logits before it scales them
    with on_device_of(q):
        _forward_kernel[(num_tiles * batch * heads_q,)](
            describe(loadable(q), tile.block_m, block_d),
            describe(loadable(k), tile.block_n, block_d),
            describe(loadable(v), tile.block_n, block_dv),
            out, lse, heads_q, heads_q // heads_k, seqlen_q, seqlen_k, window_right or 0, num_tiles, scale,
            D=head_dim, DV=head_dim_v, BLOCK_D=block_d, BLOCK_DV=block_dv, BLOCK_M=tile.block_m, BLOCK_N=tile.block_n,
            BOUND_RIGHT=window_right is not None, ONE_LOOP=window_right is not None and tile.one_loop,
            UPCAST=interpreted(_forward_kernel), num_warps=tile.num_warps, num_stages=tile.num_stages,
            enable_fp_fusion=True,
        )  # fmt: skip
    return out, lse
