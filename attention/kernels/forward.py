"""FlashAttention forward: a program a tile of queries, online softmax over tiles of keys (arXiv:2307.08691)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..reference import Options
from .common import (
    LN_2,
    LOG2_E,
    SAFE_BLOCK,
    SIZES,
    describe,
    exponential,
    finite_rows,
    head_of_mask,
    kept,
    key_tiles,
    load_tile,
    loadable,
    locate,
    not_finite,
    on_device_of,
    pointer,
    score,
    soften,
    store_tile,
)
from .launch import compiled_with, shared_arguments
from .tiles import choose_tiles, padded_widths


@triton.jit
def _attend(
    acc, row_max, row_sum, top, q, k_desc, v_desc, entry, head_k, start_m, start_n, first_k, rules, slope,
    head_mask, tanh_scale, dropout,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr, BOUND_LEFT: tl.constexpr, BOUND_RIGHT: tl.constexpr, MASKED: tl.constexpr,
    SAFE: tl.constexpr, TRACK_TOP: tl.constexpr, EXP2: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Folds one tile of keys into the running maximum, sum and weighted values."""
    length_k = rules[1]
    unit_scale = rules[4]
    k = load_tile(k_desc, entry, head_k, first_k + start_n, first_k + length_k, BLOCK_N, D, BLOCK_D, UPCAST)
    dots = tl.dot(q, tl.trans(k), input_precision="ieee")  # (BLOCK_M, BLOCK_N)
    offs_m = start_m + tl.arange(0, BLOCK_M)
    offs_n = start_n + tl.arange(0, BLOCK_N)
    x = soften(dots, tanh_scale, EXP2)
    scores, visible = score(
        x, offs_m[:, None], offs_n[None, :], rules, slope, head_mask, BOUND_LEFT, BOUND_RIGHT, False, True, MASKED,
        EXP2,
    )  # fmt: skip
    if MASKED:
        scores = tl.where(visible, scores, -float("inf"))
        new_max = tl.maximum(row_max, tl.max(scores, 1))
        # A row that has seen no key yet keeps -inf as its maximum; -inf - -inf would be NaN.
        anchor = tl.where(new_max == -float("inf"), 0.0, new_max)
    else:
        # unit_scale >= 0, so the maximum commutes with it and the exponent is one multiply-add an element.
        new_max = tl.maximum(row_max, tl.max(x, 1) * unit_scale if slope is None else tl.max(scores, 1))
        anchor = new_max
    p = exponential(scores - anchor[:, None], EXP2)
    if TRACK_TOP:
        top = tl.maximum(top, tl.max(tl.where(visible, dots, -float("inf")) if MASKED else dots, 1))
    rescale = exponential(row_max - anchor, EXP2)
    row_sum = row_sum * rescale + tl.sum(p, 1)
    if dropout is not None:
        p *= kept(dropout[0], dropout[1], dropout[2], start_m, start_n, BLOCK_M, BLOCK_N)
    v = load_tile(v_desc, entry, head_k, first_k + start_n, first_k + length_k, BLOCK_N, DV, BLOCK_DV, UPCAST)
    if SAFE:
        v, spoiled = finite_rows(v)
        p = tl.where(visible & spoiled[None, :], float("nan"), p)
    acc = tl.dot(p.to(v.dtype), v, acc * rescale[:, None], input_precision="ieee")
    return acc, new_max, row_sum, top


@triton.jit(do_not_specialize=SIZES)
def _forward_kernel(
    q_desc, k_desc, v_desc, k_rows, v_rows, out_ptr, lse_ptr, max_logits_ptr, sinks_ptr,
    slopes_ptr, mask, seed_ptr, cu_q_ptr, cu_k_ptr,
    heads_q, group, seqlen_q, seqlen_k, window_left, window_right, num_tiles, drop_below, keep_scale, scale, softcap,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr, BOUND_LEFT: tl.constexpr, BOUND_RIGHT: tl.constexpr, ONE_LOOP: tl.constexpr,
    UPCAST: tl.constexpr,
):  # fmt: skip
    EXP2: tl.constexpr = out_ptr.dtype.element_ty != tl.float32
    VARLEN: tl.constexpr = cu_q_ptr is not None
    BENT: tl.constexpr = softcap is not None or slopes_ptr is not None or mask is not None
    TRACK_TOP: tl.constexpr = BENT and max_logits_ptr is not None
    MASK_ALL: tl.constexpr = ONE_LOOP or mask is not None
    # Neighbouring programs share a head's keys in L2; under a causal mask the longest rows go first.
    pid = tl.program_id(0)
    start_m = (num_tiles - 1 - pid % num_tiles) * BLOCK_M
    batch_head = pid // num_tiles
    batch = batch_head // heads_q
    head = batch_head % heads_q
    head_k = head // group
    place = head * (tl.num_programs(0) // heads_q) + batch * num_tiles + pid % num_tiles  # heads first
    first_q, length_q = locate(cu_q_ptr, batch, seqlen_q)
    first_k, length_k = locate(cu_k_ptr, batch, seqlen_k)
    if VARLEN:
        if start_m >= length_q:
            if max_logits_ptr is not None:
                tl.store(max_logits_ptr + place, -float("inf"))
            return
        entry = 0
        out_ptr += (tl.cast(first_q, tl.int64) * heads_q + head) * DV
        lse_ptr += tl.cast(head, tl.int64) * seqlen_q + first_q
    else:
        entry = batch
        out_ptr += (tl.cast(batch, tl.int64) * seqlen_q * heads_q + head) * DV
        lse_ptr += tl.cast(batch_head, tl.int64) * seqlen_q

    # Query i sees key j when i + shift_left <= j <= i + shift_right.
    shift_left = length_k - length_q - window_left
    shift_right = length_k - length_q + window_right
    begin, full_begin, full_end, end = key_tiles(
        start_m, length_q, length_k, shift_left, shift_right, BLOCK_M, BLOCK_N, BOUND_LEFT, BOUND_RIGHT, MASK_ALL
    )  # fmt: skip
    unit: tl.constexpr = LOG2_E if EXP2 else 1.0
    unit_scale = (scale if softcap is None else softcap) * unit
    tanh_scale = None if softcap is None else scale / softcap
    slope = None if slopes_ptr is None else tl.load(slopes_ptr + batch_head) * unit
    head_mask = None if mask is None else head_of_mask(mask, batch, head)
    rules = (length_q, length_k, shift_left, shift_right, unit_scale)
    dropout = None if seed_ptr is None else (tl.load(seed_ptr), drop_below, batch_head)

    offs_m = start_m + tl.arange(0, BLOCK_M)
    mask_m = offs_m < length_q
    q = load_tile(q_desc, entry, head, first_q + start_m, first_q + length_q, BLOCK_M, D, BLOCK_D, UPCAST)
    acc = tl.zeros((BLOCK_M, BLOCK_DV), tl.float32)
    row_max = tl.full((BLOCK_M,), -float("inf"), tl.float32)
    row_sum = tl.zeros((BLOCK_M,), tl.float32)
    top = tl.full((BLOCK_M,), -float("inf"), tl.float32)
    if BOUND_LEFT and not MASK_ALL:
        for start_n in tl.range(begin, full_begin, BLOCK_N):
            acc, row_max, row_sum, top = _attend(
                acc, row_max, row_sum, top, q, k_desc, v_desc, entry, head_k, start_m, start_n, first_k, rules,
                slope, head_mask, tanh_scale, dropout, D, DV, BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_DV, BOUND_LEFT,
                BOUND_RIGHT, True, False, TRACK_TOP, EXP2, UPCAST,
            )  # fmt: skip
    if not MASK_ALL:
        for start_n in tl.range(full_begin, full_end, BLOCK_N):
            acc, row_max, row_sum, top = _attend(
                acc, row_max, row_sum, top, q, k_desc, v_desc, entry, head_k, start_m, start_n, first_k, rules,
                slope, head_mask, tanh_scale, dropout, D, DV, BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_DV, BOUND_LEFT,
                BOUND_RIGHT, False, False, TRACK_TOP, EXP2, UPCAST,
            )  # fmt: skip
    for start_n in tl.range(full_end, end, BLOCK_N):
        acc, row_max, row_sum, top = _attend(
            acc, row_max, row_sum, top, q, k_desc, v_desc, entry, head_k, start_m, start_n, first_k, rules,
            slope, head_mask, tanh_scale, dropout, D, DV, BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_DV, BOUND_LEFT,
            BOUND_RIGHT, True, False, TRACK_TOP, EXP2, UPCAST,
        )  # fmt: skip
    if BOUND_LEFT or BOUND_RIGHT or VARLEN or mask is not None:  # noqa: SIM102 (known to the compiler)
        # 0 · NaN is NaN: a value that isn't finite has reached rows that don't see it. Once more, with care.
        if not_finite(acc, mask_m):
            acc = tl.zeros((BLOCK_M, BLOCK_DV), tl.float32)
            row_max = tl.full((BLOCK_M,), -float("inf"), tl.float32)
            row_sum = tl.zeros((BLOCK_M,), tl.float32)
            for start_n in tl.range(begin, end, SAFE_BLOCK, num_stages=1):
                acc, row_max, row_sum, top = _attend(
                    acc, row_max, row_sum, top, q, k_rows, v_rows, entry, head_k, start_m, start_n, first_k, rules,
                    slope, head_mask, tanh_scale, dropout, D, DV, BLOCK_M, SAFE_BLOCK, BLOCK_D, BLOCK_DV, BOUND_LEFT,
                    BOUND_RIGHT, True, True, False, EXP2, UPCAST,
                )  # fmt: skip

    if max_logits_ptr is not None:
        if TRACK_TOP:  # noqa: SIM108
            top = tl.where(top == -float("inf"), top, top * scale)  # the scale may be 0
        else:
            top = row_max * (LN_2 if EXP2 else 1.0)
        tl.store(max_logits_ptr + place, tl.max(tl.where(mask_m, top, -float("inf")), 0))
    if sinks_ptr is not None:
        sink = tl.load(sinks_ptr + head) * unit
        new_max = tl.maximum(row_max, sink)
        anchor = tl.where(new_max == -float("inf"), 0.0, new_max)
        rescale = exponential(row_max - anchor, EXP2)
        acc *= rescale[:, None]
        row_sum = row_sum * rescale + exponential(sink - anchor, EXP2)
        row_max = new_max
    # A row without keys has row_max = -inf, row_sum = 0 and acc = 0: its output is 0 and its lse -inf.
    row_sum = tl.where(row_sum == 0.0, 1.0, row_sum)
    acc = acc / row_sum[:, None]
    if dropout is not None:
        acc *= keep_scale
    store_tile(out_ptr, acc, start_m, length_q, heads_q * DV, BLOCK_M, DV, BLOCK_DV)
    lse = (row_max + tl.log2(row_sum)) * LN_2 if EXP2 else row_max + tl.log(row_sum)
    tl.store(lse_ptr + offs_m, lse, mask=mask_m)


def forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: Options, with_max_logits: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """out, lse and max_logits. The twin of `attention.reference.tiled_forward`, packed sequences included."""
    packed = options.cu_seqlens_q is not None
    *batch, seqlen_q, heads_q, head_dim = q.shape
    seqlen_k, _, head_dim_v = v.shape[-3:]
    allocate = torch.zeros if packed else torch.empty  # nobody writes the rows past the last sequence
    out = allocate((*batch, seqlen_q, heads_q, head_dim_v), dtype=q.dtype, device=q.device)
    lse = torch.empty((*batch, heads_q, seqlen_q), dtype=torch.float32, device=q.device)
    shape = (heads_q if with_max_logits else 0,)
    if out.numel() == 0 or seqlen_k == 0:
        return out.zero_(), _lse_without_keys(lse, options), lse.new_full(shape, -torch.inf)
    longest, entries = seqlen_q, q.shape[0]
    if packed:
        assert options.cu_seqlens_q is not None
        longest, entries = options.max_seqlen_q, options.cu_seqlens_q.shape[0] - 1
        lse.fill_(-torch.inf)
        q, k, v = q[None], k[None], v[None]
    tile = choose_tiles(q, v).forward
    num_tiles = triton.cdiv(longest, tile.block_m)
    if num_tiles * entries == 0:
        return out, lse, lse.new_full(shape, -torch.inf)
    # One number a program, not one a head by atomics, which would make each program wait for memory.
    peaks = lse.new_empty((heads_q, entries * num_tiles)) if with_max_logits else None
    block_d, block_dv = padded_widths(head_dim, head_dim_v)
    scale = options.scale
    if scale < 0:
        q, scale = -q, -scale  # the kernel takes the maximum of the logits before it scales them
    q, k, v = loadable(q), loadable(k), loadable(v)
    with on_device_of(q):
        _forward_kernel[(num_tiles * entries * heads_q,)](
            describe(q, tile.block_m, block_d),
            describe(k, tile.block_n, block_d),
            describe(v, tile.block_n, block_dv),
            pointer(k), pointer(v), out, lse, peaks,
            None if options.sinks is None else options.sinks.contiguous(),
            **shared_arguments(q, v, options),
            heads_q=heads_q, num_tiles=num_tiles, scale=scale, **compiled_with(tile, options),
        )  # fmt: skip
    return out, lse, lse.new_empty(shape) if peaks is None else peaks.amax(1)


def _lse_without_keys(lse: torch.Tensor, options: Options) -> torch.Tensor:
    """What is left when there is no key at all: the sink."""
    lse.fill_(-torch.inf)
    if options.sinks is None:
        return lse
    sinks = options.sinks[:, None].expand(lse.shape)
    if options.cu_seqlens_q is None:
        return sinks.contiguous()
    positions = torch.arange(lse.shape[-1], device=lse.device)
    return torch.where(positions < options.cu_seqlens_q[-1], sinks, lse)
