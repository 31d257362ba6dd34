"""Attention of a few new queries with a long cache of keys, which are split among programs (flash-decoding).

Reading the keys and values is the whole cost, and one program a head would leave most of a GPU idle: so each sequence's
visible keys are shared out evenly among `num_splits` programs, and a second kernel joins their results by their
log-sum-exps. The query heads that share a key head, times the new tokens, are the rows of one product, so every key is
read once. Source: https://crfm.stanford.edu/2023/10/12/flashdecoding.html.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl

from .common import LOG2_E, exponential, has_bulk_copies, interpreted, loadable, on_device_of
from .tiles import padded_widths

# A new batch, length, window or number of heads must not compile a new kernel.
SIZES = [
    "stride_qb", "stride_qs", "stride_qh", "stride_kb", "stride_ks", "stride_kh", "stride_vb", "stride_vs", "stride_vh",
    "batch_size", "heads_k", "group", "seqlen_q", "window_left", "num_splits", "num_rows",
]  # fmt: skip

# (keys in a tile, warps, stages) by the padded head width: some 64 KB a program of keys and values under way.
TILES_16BIT = {16: (128, 4, 3), 32: (128, 4, 3), 64: (128, 4, 3), 128: (64, 4, 3), 256: (32, 4, 3)}
TILES_32BIT = {16: (64, 4, 2), 32: (64, 4, 2), 64: (32, 4, 2), 128: (16, 4, 2), 256: (16, 8, 2)}
ROWS_16BIT, ROWS_32BIT = 64, 16  # of a tile of queries, at most

PROGRAMS_PER_SM = 16  # enough that the last ones to run are a small part of all
SHORTEST_SPLIT = 128  # keys: with fewer, the partial results would be worth reckoning with
SPLITS_AT_ONCE = 16


@triton.jit(do_not_specialize=SIZES)
def _decode_kernel(
    q_ptr, k_ptr, v_ptr, lengths_ptr, out_ptr, lse_ptr,
    stride_qb, stride_qs, stride_qh, stride_kb, stride_ks, stride_kh, stride_vb, stride_vs, stride_vh,
    batch_size, heads_k, group, seqlen_q, window_left, num_splits, scale,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr, WINDOWED: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    EXP2: tl.constexpr = q_ptr.dtype.element_ty != tl.float32
    num_tiles = tl.cdiv(seqlen_q * group, BLOCK_M)
    pid = tl.program_id(0)
    split = pid % num_splits
    tile = pid // num_splits % num_tiles
    batch_head = pid // (num_splits * num_tiles)
    batch = tl.cast(batch_head // heads_k, tl.int64)
    head_k = tl.cast(batch_head % heads_k, tl.int64)

    # A row is a token and one of its heads in this group.
    offs_m = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    token = offs_m // group
    head = head_k * group + offs_m % group
    mask_m = token < seqlen_q

    # The new tokens are the last ones of their sequence; keys from start up to end are what this tile's rows see.
    first = tl.load(lengths_ptr + batch) - seqlen_q
    position = first + token
    end = first + tl.minimum((tile * BLOCK_M + BLOCK_M - 1) // group, seqlen_q - 1) + 1
    start = 0
    if WINDOWED:
        start = tl.maximum(first + tile * BLOCK_M // group - window_left, 0)
    share = tl.cdiv(tl.cdiv(tl.maximum(end - start, 0), num_splits), BLOCK_N) * BLOCK_N
    start += split * share
    end = tl.minimum(end, start + share)

    # Strides come in units of 16 bytes, which tells the compiler that it may load as much at once.
    unit: tl.constexpr = 128 // q_ptr.dtype.element_ty.primitive_bitwidth
    offs_d = tl.arange(0, BLOCK_D)
    offs_dv = tl.arange(0, BLOCK_DV)
    q_rows = batch * stride_qb + tl.cast(token, tl.int64) * stride_qs + head * stride_qh
    q = tl.load(
        q_ptr + (q_rows * unit)[:, None] + offs_d[None, :], mask=mask_m[:, None] & (offs_d[None, :] < D), other=0.0
    )  # (BLOCK_M, BLOCK_D)
    if UPCAST:
        q = q.to(tl.float32)
    k_ptr += (batch * stride_kb + head_k * stride_kh) * unit
    v_ptr += (batch * stride_vb + head_k * stride_vh) * unit

    unit_scale = scale * (LOG2_E if EXP2 else 1.0)
    acc = tl.zeros((BLOCK_M, BLOCK_DV), tl.float32)
    row_max = tl.full((BLOCK_M,), -float("inf"), tl.float32)
    row_sum = tl.zeros((BLOCK_M,), tl.float32)
    for start_n in tl.range(start, end, BLOCK_N):
        offs_n = start_n + tl.arange(0, BLOCK_N)
        mask_n = offs_n[:, None] < end  # what lies behind the end may be anything, NaN among it
        rows = tl.cast(offs_n, tl.int64)
        k_ptrs = k_ptr + (rows * stride_ks * unit)[:, None] + offs_d[None, :]
        k = tl.load(k_ptrs, mask=mask_n & (offs_d[None, :] < D), other=0.0)  # (BLOCK_N, BLOCK_D)
        v_ptrs = v_ptr + (rows * stride_vs * unit)[:, None] + offs_dv[None, :]
        v = tl.load(v_ptrs, mask=mask_n & (offs_dv[None, :] < DV), other=0.0)  # (BLOCK_N, BLOCK_DV)
        if UPCAST:
            k = k.to(tl.float32)
            v = v.to(tl.float32)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * unit_scale  # (BLOCK_M, BLOCK_N)
        visible = (offs_n[None, :] < end) & (offs_n[None, :] <= position[:, None])
        if WINDOWED:
            visible = visible & (offs_n[None, :] >= position[:, None] - window_left)
        scores = tl.where(visible, scores, -float("inf"))
        new_max = tl.maximum(row_max, tl.max(scores, 1))
        # A row that has seen no key yet keeps -inf as its maximum; -inf - -inf would be NaN.
        anchor = tl.where(new_max == -float("inf"), 0.0, new_max)
        p = exponential(scores - anchor[:, None], EXP2)
        rescale = exponential(row_max - anchor, EXP2)
        acc = tl.dot(p.to(v.dtype), v, acc * rescale[:, None], input_precision="ieee")
        row_sum = row_sum * rescale + tl.sum(p, 1)
        row_max = new_max

    divisor = tl.where(row_sum == 0.0, 1.0, row_sum)  # a row without keys gives 0 and -inf
    row = ((split * batch_size + batch) * seqlen_q + token) * (heads_k * group) + head
    out_ptrs = out_ptr + (row * DV)[:, None] + offs_dv[None, :]
    out = (acc / divisor[:, None]).to(out_ptr.dtype.element_ty)
    tl.store(out_ptrs, out, mask=mask_m[:, None] & (offs_dv[None, :] < DV))
    if lse_ptr is not None:
        lse = row_max + (tl.log2(divisor) if EXP2 else tl.log(divisor))  # in units of ln 2 where EXP2
        tl.store(lse_ptr + row, lse, mask=mask_m)


@triton.jit(do_not_specialize=SIZES)
def _combine_kernel(
    partial_ptr, lse_ptr, out_ptr, num_rows, num_splits,
    DV: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_S: tl.constexpr, EXP2: tl.constexpr,
):  # fmt: skip
    """One row of the output: the splits' results weighted by their shares of the softmax's denominator."""
    row = tl.cast(tl.program_id(0), tl.int64)
    offs_dv = tl.arange(0, BLOCK_DV)
    mask_dv = offs_dv < DV
    acc = tl.zeros((BLOCK_DV,), tl.float32)
    total_max = tl.full((1,), -float("inf"), tl.float32)
    total = tl.zeros((1,), tl.float32)
    for start_s in tl.range(0, num_splits, BLOCK_S):
        offs_s = start_s + tl.arange(0, BLOCK_S)
        mask_s = offs_s < num_splits
        offs_row = tl.cast(offs_s, tl.int64) * num_rows + row
        lse = tl.load(lse_ptr + offs_row, mask=mask_s, other=-float("inf"))
        partial_ptrs = partial_ptr + (offs_row * DV)[:, None] + offs_dv[None, :]
        partial = tl.load(partial_ptrs, mask=mask_s[:, None] & mask_dv[None, :], other=0.0)  # (BLOCK_S, BLOCK_DV)
        new_max = tl.maximum(total_max, tl.max(lse, 0))
        anchor = tl.where(new_max == -float("inf"), 0.0, new_max)
        weight = exponential(lse - anchor, EXP2)
        rescale = exponential(total_max - anchor, EXP2)
        acc = acc * rescale + tl.sum(partial * weight[:, None], 0)
        total = total * rescale + tl.sum(weight, 0)
        total_max = new_max
    out = acc / tl.where(total == 0.0, 1.0, total)
    tl.store(out_ptr + row * DV + offs_dv, out.to(out_ptr.dtype.element_ty), mask=mask_dv)


def decode(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: torch.Tensor, scale: float, window_left: int | None
) -> torch.Tensor:
    """Output (B, Sq, Hq, Dv). The twin of `attention.cache.dense_decode`."""
    batch, seqlen_q, heads_q, head_dim = q.shape
    capacity, heads_k, head_dim_v = v.shape[1:]
    out = torch.empty((batch, seqlen_q, heads_q, head_dim_v), dtype=q.dtype, device=q.device)
    if out.numel() == 0 or capacity == 0:
        return out.zero_()
    group = heads_q // heads_k
    tile = choose_tile(q.dtype, head_dim, head_dim_v, seqlen_q * group, q.device)
    num_tiles = triton.cdiv(seqlen_q * group, tile["BLOCK_M"])
    visible = capacity if window_left is None else min(capacity, window_left + seqlen_q)
    num_splits = choose_splits(batch * heads_k * num_tiles, visible, q.device)
    rows = out.numel() // head_dim_v
    partial, lse = out, None
    if num_splits > 1:
        partial = torch.empty((num_splits, *out.shape), dtype=torch.float32, device=q.device)
        lse = torch.empty((num_splits, rows), dtype=torch.float32, device=q.device)
    q, k, v = (loadable(x) for x in (q, k, v))
    with on_device_of(q):
        _decode_kernel[(num_splits * num_tiles * batch * heads_k,)](
            q, k, v, lengths.contiguous(), partial, lse, *_strides(q), *_strides(k), *_strides(v),
            batch, heads_k, group, seqlen_q, window_left or 0, num_splits, scale,
            D=head_dim, DV=head_dim_v, WINDOWED=window_left is not None, UPCAST=interpreted(_decode_kernel),
            enable_fp_fusion=True, **tile,
        )  # fmt: skip
        if lse is not None:
            _combine_kernel[(rows,)](
                partial, lse, out, rows, num_splits, DV=head_dim_v, BLOCK_DV=tile["BLOCK_DV"], BLOCK_S=SPLITS_AT_ONCE,
                EXP2=q.dtype != torch.float32, num_warps=2, enable_fp_fusion=True,
            )  # fmt: skip
    return out


def choose_tile(dtype: torch.dtype, head_dim: int, head_dim_v: int, rows: int, device: torch.device) -> dict[str, Any]:
    """What the kernel is compiled with, for `rows` query heads times tokens that share a key head."""
    block_d, block_dv = padded_widths(head_dim, head_dim_v)
    most, tiles = (ROWS_32BIT, TILES_32BIT) if dtype == torch.float32 else (ROWS_16BIT, TILES_16BIT)
    block_n, num_warps, num_stages = tiles[max(block_d, block_dv)]
    return {
        "BLOCK_M": min(max(16, triton.next_power_of_2(rows)), most),
        "BLOCK_N": block_n,
        "BLOCK_D": block_d,
        "BLOCK_DV": block_dv,
        "num_warps": num_warps,
        "num_stages": num_stages if has_bulk_copies(device) else 2,  # consumer cards have 99 KB of shared memory
    }


def choose_splits(programs: int, visible: int, device: torch.device) -> int:
    """Among how many programs a tile's `visible` keys are shared out, of which there are `programs` tiles."""
    wanted = -(-PROGRAMS_PER_SM * multiprocessors(device) // programs)
    return max(1, min(wanted, visible // SHORTEST_SPLIT))


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """132, Hopper's, where there is no GPU to ask."""
    return int(torch.cuda.get_device_properties(device).multi_processor_count) if device.type == "cuda" else 132


def _strides(x: torch.Tensor) -> tuple[int, int, int]:
    """Of batch, position and head, in units of 16 bytes."""
    unit = 16 // x.element_size()
    return x.stride(0) // unit, x.stride(1) // unit, x.stride(2) // unit
