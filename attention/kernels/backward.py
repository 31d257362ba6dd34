"""FlashAttention backward in two passes that recompute the weights from q, k and lse (arXiv:2205.14135, 2307.08691).

With P = exp(scale q kᵀ - lse), dP = dO vᵀ and delta_i = Σ_d dO_id O_id - dlse_i:
    dS = P ∘ (dP - delta),   dq = scale dS k,   dk = scale dSᵀ q,   dv = Pᵀ dO.
Dropout Z makes it dP = Z ∘ dO vᵀ and dv = (Z ∘ P)ᵀ dO; a softcap multiplies dS by 1 - tanh².
The first pass owns queries, writes delta and dq; the second owns keys, writes dk and dv and sums over the query heads
of its group. Nobody adds to anybody else's result, so a repeated backward is bitwise the same.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..reference import Options, sink_gradient
from .common import (
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
    query_tiles,
    score,
    soften,
    store_tile,
)
from .launch import compiled_with, shared_arguments
from .mask_gradient import grad_mask
from .tiles import choose_tiles, padded_widths


@triton.jit
def _grad_q_tile(
    dq, q, do, unit_lse, delta, k_desc, v_desc, entry, head_k, start_m, start_n, first_k, rules, slope, head_mask,
    tanh_scale, dropout, D: tl.constexpr, DV: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BOUND_LEFT: tl.constexpr, BOUND_RIGHT: tl.constexpr,
    MASKED: tl.constexpr, SAFE: tl.constexpr, EXP2: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Adds one tile of keys to the queries' gradient."""
    end_k = first_k + rules[1]
    k = load_tile(k_desc, entry, head_k, first_k + start_n, end_k, BLOCK_N, D, BLOCK_D, UPCAST)
    v = load_tile(v_desc, entry, head_k, first_k + start_n, end_k, BLOCK_N, DV, BLOCK_DV, UPCAST)
    offs_m = start_m + tl.arange(0, BLOCK_M)
    offs_n = start_n + tl.arange(0, BLOCK_N)
    x = soften(tl.dot(q, tl.trans(k), input_precision="ieee"), tanh_scale, EXP2)  # (BLOCK_M, BLOCK_N)
    scores, visible = score(
        x, offs_m[:, None], offs_n[None, :], rules, slope, head_mask, BOUND_LEFT, BOUND_RIGHT, False, True, MASKED,
        EXP2,
    )  # fmt: skip
    p = exponential(scores - unit_lse[:, None], EXP2)
    if MASKED:
        p = tl.where(visible, p, 0.0)
    dp = tl.dot(do, tl.trans(v), input_precision="ieee")  # (BLOCK_M, BLOCK_N)
    if dropout is not None:
        dp *= kept(dropout[0], dropout[1], dropout[2], start_m, start_n, BLOCK_M, BLOCK_N) * dropout[3]
    ds = p * (dp - delta[:, None])
    if tanh_scale is not None:
        ds *= 1.0 - x * x
    if SAFE:
        k, spoiled = finite_rows(k)
        ds = tl.where(visible, tl.where(spoiled[None, :], float("nan"), ds), 0.0)
    return tl.dot(ds.to(k.dtype), k, dq, input_precision="ieee")


@triton.jit
def _grad_kv_tile(
    dk, dv, k, v, q_desc, do_desc, lse_ptr, delta_ptr, entry, head, heads_q, start_m, start_n, first_q, seqlen_q, rules,
    slopes_ptr, mask, batch, tanh_scale, dropout,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr, BOUND_LEFT: tl.constexpr, BOUND_RIGHT: tl.constexpr, RAGGED: tl.constexpr,
    MASKED: tl.constexpr, SAFE: tl.constexpr, EXP2: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Adds one tile of a head's queries to the keys' and values' gradients. Scores are computed transposed, so that pᵀ
    and dsᵀ enter their products as they are (Triton miscompiles transposing them, flash-linear-attention #640)."""
    length_q = rules[0]
    offs_m = start_m + tl.arange(0, BLOCK_M)
    offs_n = start_n + tl.arange(0, BLOCK_N)
    # Queries past the end read as zeros, gradient included, and so add nothing.
    q = load_tile(q_desc, entry, head, first_q + start_m, first_q + length_q, BLOCK_M, D, BLOCK_D, UPCAST)
    do = load_tile(do_desc, entry, head, first_q + start_m, first_q + length_q, BLOCK_M, DV, BLOCK_DV, UPCAST)
    if SAFE:
        q, spoiled_q = finite_rows(q)
        do, spoiled_do = finite_rows(do)
    row = tl.cast(entry * heads_q + head, tl.int64) * seqlen_q + first_q
    mask_m = offs_m < length_q
    unit: tl.constexpr = LOG2_E if EXP2 else 1.0
    # Queries past the end read as zeros, so a weight of 1 does no harm, and 0 is what an asynchronous copy fills with:
    # any other number costs a quarter of the loop's instructions. A slope could make that weight infinite.
    past: tl.constexpr = 0.0 if slopes_ptr is None and not RAGGED else float("inf")
    unit_lse = tl.load(lse_ptr + row + offs_m, mask=mask_m, other=past) * unit
    delta = tl.load(delta_ptr + row + offs_m, mask=mask_m, other=0.0)
    slope = None if slopes_ptr is None else tl.load(slopes_ptr + batch * heads_q + head) * unit
    head_mask = None if mask is None else head_of_mask(mask, batch, head)
    x = soften(tl.dot(k, tl.trans(q), input_precision="ieee"), tanh_scale, EXP2)  # (BLOCK_N, BLOCK_M)
    # Keys past the end only spoil their own rows.
    scores_t, visible = score(
        x, offs_m[None, :], offs_n[:, None], rules, slope, head_mask, BOUND_LEFT, BOUND_RIGHT, RAGGED, False, MASKED,
        EXP2,
    )  # fmt: skip
    p_t = exponential(scores_t - unit_lse[None, :], EXP2)
    if SAFE:
        p_t = tl.where((spoiled_q | spoiled_do)[None, :], float("nan"), p_t)
    if MASKED:
        p_t = tl.where(visible, p_t, 0.0)
    kept_p_t = p_t
    if dropout is not None:
        keep = kept(dropout[0], dropout[1], batch * heads_q + head, start_m, start_n, BLOCK_M, BLOCK_N)
        keep = tl.trans(keep).to(tl.float32) * dropout[3]
        kept_p_t = p_t * keep
    dv = tl.dot(kept_p_t.to(do.dtype), do, dv, input_precision="ieee")
    dp_t = tl.dot(v, tl.trans(do), input_precision="ieee")  # (BLOCK_N, BLOCK_M)
    if dropout is not None:
        dp_t *= keep
    ds_t = p_t * (dp_t - delta[None, :])
    if tanh_scale is not None:
        ds_t *= 1.0 - x * x
    if SAFE:
        ds_t = tl.where(visible, ds_t, 0.0)
    dk = tl.dot(ds_t.to(q.dtype), q, dk, input_precision="ieee")
    return dk, dv


@triton.jit(do_not_specialize=SIZES)
def _grad_q_kernel(
    q_desc, k_desc, v_desc, out_desc, do_desc, k_rows, v_rows, lse_ptr, dlse_ptr, delta_ptr, dq_ptr,
    slopes_ptr, mask, seed_ptr, cu_q_ptr, cu_k_ptr,
    heads_q, group, seqlen_q, seqlen_k, window_left, window_right, num_tiles, drop_below, keep_scale, scale, softcap,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr, BOUND_LEFT: tl.constexpr, BOUND_RIGHT: tl.constexpr, ONE_LOOP: tl.constexpr,
    UPCAST: tl.constexpr,
):  # fmt: skip
    EXP2: tl.constexpr = dq_ptr.dtype.element_ty != tl.float32
    VARLEN: tl.constexpr = cu_q_ptr is not None
    MASK_ALL: tl.constexpr = ONE_LOOP or mask is not None
    pid = tl.program_id(0)
    start_m = (num_tiles - 1 - pid % num_tiles) * BLOCK_M
    batch_head = pid // num_tiles
    batch = batch_head // heads_q
    head = batch_head % heads_q
    head_k = head // group
    first_q, length_q = locate(cu_q_ptr, batch, seqlen_q)
    first_k, length_k = locate(cu_k_ptr, batch, seqlen_k)
    if VARLEN:
        if start_m >= length_q:
            return
        entry = 0
        dq_ptr += (tl.cast(first_q, tl.int64) * heads_q + head) * D
        row = tl.cast(head, tl.int64) * seqlen_q + first_q
    else:
        entry = batch
        dq_ptr += (tl.cast(batch, tl.int64) * seqlen_q * heads_q + head) * D
        row = tl.cast(batch_head, tl.int64) * seqlen_q

    # As in the forward kernel.
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
    dropout = None if seed_ptr is None else (tl.load(seed_ptr), drop_below, batch_head, keep_scale)

    offs_m = start_m + tl.arange(0, BLOCK_M)
    mask_m = offs_m < length_q
    do = load_tile(do_desc, entry, head, first_q + start_m, first_q + length_q, BLOCK_M, DV, BLOCK_DV, UPCAST)
    out = load_tile(out_desc, entry, head, first_q + start_m, first_q + length_q, BLOCK_M, DV, BLOCK_DV, UPCAST)
    delta = tl.sum(out.to(tl.float32) * do.to(tl.float32), 1)
    if dlse_ptr is not None:
        delta -= tl.load(dlse_ptr + row + offs_m, mask=mask_m, other=0.0)
    tl.store(delta_ptr + row + offs_m, delta, mask=mask_m)

    q = load_tile(q_desc, entry, head, first_q + start_m, first_q + length_q, BLOCK_M, D, BLOCK_D, UPCAST)
    unit_lse = tl.load(lse_ptr + row + offs_m, mask=mask_m, other=0.0) * unit
    dq = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    if BOUND_LEFT and not MASK_ALL:
        for start_n in tl.range(begin, full_begin, BLOCK_N):
            dq = _grad_q_tile(
                dq, q, do, unit_lse, delta, k_desc, v_desc, entry, head_k, start_m, start_n, first_k, rules, slope,
                head_mask, tanh_scale, dropout, D, DV, BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_DV, BOUND_LEFT, BOUND_RIGHT,
                True, False, EXP2, UPCAST,
            )  # fmt: skip
    if not MASK_ALL:
        for start_n in tl.range(full_begin, full_end, BLOCK_N):
            dq = _grad_q_tile(
                dq, q, do, unit_lse, delta, k_desc, v_desc, entry, head_k, start_m, start_n, first_k, rules, slope,
                head_mask, tanh_scale, dropout, D, DV, BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_DV, BOUND_LEFT, BOUND_RIGHT,
                False, False, EXP2, UPCAST,
            )  # fmt: skip
    for start_n in tl.range(full_end, end, BLOCK_N):
        dq = _grad_q_tile(
            dq, q, do, unit_lse, delta, k_desc, v_desc, entry, head_k, start_m, start_n, first_k, rules, slope,
            head_mask, tanh_scale, dropout, D, DV, BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_DV, BOUND_LEFT, BOUND_RIGHT,
            True, False, EXP2, UPCAST,
        )  # fmt: skip
    if BOUND_LEFT or BOUND_RIGHT or VARLEN or mask is not None:  # noqa: SIM102 (known to the compiler)
        if not_finite(dq, mask_m):
            dq = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
            for start_n in tl.range(begin, end, SAFE_BLOCK, num_stages=1):
                dq = _grad_q_tile(
                    dq, q, do, unit_lse, delta, k_rows, v_rows, entry, head_k, start_m, start_n, first_k, rules, slope,
                    head_mask, tanh_scale, dropout, D, DV, BLOCK_M, SAFE_BLOCK, BLOCK_D, BLOCK_DV, BOUND_LEFT,
                    BOUND_RIGHT, True, True, EXP2, UPCAST,
                )  # fmt: skip
    store_tile(dq_ptr, dq * scale, start_m, length_q, heads_q * D, BLOCK_M, D, BLOCK_D)


@triton.jit(do_not_specialize=SIZES)
def _grad_kv_kernel(
    q_desc, k_desc, v_desc, do_desc, q_rows, do_rows, lse_ptr, delta_ptr, dk_ptr, dv_ptr,
    slopes_ptr, mask, seed_ptr, cu_q_ptr, cu_k_ptr,
    heads_k, group, seqlen_q, seqlen_k, window_left, window_right, num_tiles, drop_below, keep_scale, scale, softcap,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr, BOUND_LEFT: tl.constexpr, BOUND_RIGHT: tl.constexpr, ONE_LOOP: tl.constexpr,
    UPCAST: tl.constexpr,
):  # fmt: skip
    EXP2: tl.constexpr = dk_ptr.dtype.element_ty != tl.float32
    VARLEN: tl.constexpr = cu_q_ptr is not None
    MASK_ALL: tl.constexpr = ONE_LOOP or mask is not None
    # Behind a packed sequence's last query is the next one's first; a mask must not be read there.
    RAGGED: tl.constexpr = VARLEN or mask is not None
    MASK_SOME: tl.constexpr = BOUND_LEFT or BOUND_RIGHT or RAGGED
    # Under a causal mask the first keys are seen by the most queries: they go first.
    pid = tl.program_id(0)
    start_n = pid % num_tiles * BLOCK_N
    batch_head = pid // num_tiles
    batch = batch_head // heads_k
    head = batch_head % heads_k
    first_head = head * group
    heads_q = heads_k * group
    first_q, length_q = locate(cu_q_ptr, batch, seqlen_q)
    first_k, length_k = locate(cu_k_ptr, batch, seqlen_k)
    if VARLEN:
        if start_n >= length_k:
            return
        entry = 0
        row = tl.cast(first_k, tl.int64) * heads_k + head
    else:
        entry = batch
        row = tl.cast(batch, tl.int64) * seqlen_k * heads_k + head
    dk_ptr += row * D
    dv_ptr += row * DV

    # Key j is seen by queries from j - shift_right to j - shift_left.
    shift_left = length_k - length_q - window_left
    shift_right = length_k - length_q + window_right
    begin, full_begin, full_end, end = query_tiles(
        start_n, length_q, length_k, shift_left, shift_right, BLOCK_M, BLOCK_N, BOUND_LEFT, BOUND_RIGHT, MASK_ALL,
        RAGGED,
    )  # fmt: skip
    unit_scale = (scale if softcap is None else softcap) * (LOG2_E if EXP2 else 1.0)
    tanh_scale = None if softcap is None else scale / softcap
    rules = (length_q, length_k, shift_left, shift_right, unit_scale)
    dropout = None if seed_ptr is None else (tl.load(seed_ptr), drop_below, 0, keep_scale)

    # Keys past the end only spoil their own rows, which are not stored.
    k = load_tile(k_desc, entry, head, first_k + start_n, first_k + length_k, BLOCK_N, D, BLOCK_D, UPCAST)
    v = load_tile(v_desc, entry, head, first_k + start_n, first_k + length_k, BLOCK_N, DV, BLOCK_DV, UPCAST)
    dk = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    dv = tl.zeros((BLOCK_N, BLOCK_DV), tl.float32)
    # One loop runs over the tiles of all query heads, so that it stays pipelined from one head to the next.
    if MASK_SOME:
        masked = (full_begin - begin) // BLOCK_M
        if BOUND_LEFT or VARLEN:
            masked += tl.maximum(end - full_end, 0) // BLOCK_M
        for i in tl.range(0, group * masked):
            start_m = begin + i % masked * BLOCK_M
            if BOUND_LEFT or VARLEN:
                start_m = tl.where(start_m < full_begin, start_m, start_m + (full_end - full_begin))
            dk, dv = _grad_kv_tile(
                dk, dv, k, v, q_desc, do_desc, lse_ptr, delta_ptr, entry, first_head + i // masked, heads_q, start_m,
                start_n, first_q, seqlen_q, rules, slopes_ptr, mask, batch, tanh_scale, dropout,
                D, DV, BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_DV, BOUND_LEFT, BOUND_RIGHT, RAGGED, True, False, EXP2, UPCAST,
            )  # fmt: skip
    if not MASK_ALL:
        full = (full_end - full_begin) // BLOCK_M
        for i in tl.range(0, group * full):
            dk, dv = _grad_kv_tile(
                dk, dv, k, v, q_desc, do_desc, lse_ptr, delta_ptr, entry, first_head + i // full, heads_q,
                full_begin + i % full * BLOCK_M, start_n, first_q, seqlen_q, rules, slopes_ptr, mask, batch,
                tanh_scale, dropout,
                D, DV, BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_DV, BOUND_LEFT, BOUND_RIGHT, RAGGED, False, False, EXP2, UPCAST,
            )  # fmt: skip
    if MASK_SOME:
        mask_n = start_n + tl.arange(0, BLOCK_N) < length_k
        # What spoils dv, an incoming gradient that isn't finite, spoils dk too.
        if not_finite(dk, mask_n):
            dk = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
            dv = tl.zeros((BLOCK_N, BLOCK_DV), tl.float32)
            every = (end - begin) // SAFE_BLOCK
            for i in tl.range(0, group * every, num_stages=1):
                dk, dv = _grad_kv_tile(
                    dk, dv, k, v, q_rows, do_rows, lse_ptr, delta_ptr, entry, first_head + i // every, heads_q,
                    begin + i % every * SAFE_BLOCK, start_n, first_q, seqlen_q, rules, slopes_ptr, mask, batch,
                    tanh_scale, dropout, D, DV, SAFE_BLOCK, BLOCK_N, BLOCK_D, BLOCK_DV, BOUND_LEFT, BOUND_RIGHT, True,
                    True, True, EXP2, UPCAST,
                )  # fmt: skip
    store_tile(dk_ptr, dk * scale, start_n, length_k, heads_k * D, BLOCK_N, D, BLOCK_D)
    store_tile(dv_ptr, dv, start_n, length_k, heads_k * DV, BLOCK_N, DV, BLOCK_DV)


def backward(
    grad_out: torch.Tensor,
    grad_lse: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    options: Options,
    with_mask: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of q, k, v, the sinks and the mask. The twin of `attention.reference.tiled_backward`, packed sequences
    included."""
    lse = lse.contiguous()
    grad_lse = None if grad_lse is None else grad_lse.contiguous()
    mask = options.mask if with_mask else None
    longest = min(options.max_seqlen_q, options.max_seqlen_k) if options.cu_seqlens_q is not None else 1
    if grad_out.numel() == 0 or k.numel() == 0 or longest == 0:
        dq, dk, dv = (torch.zeros(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
        delta = torch.zeros_like(lse) if grad_lse is None else -grad_lse
        dmask = lse.new_zeros(0 if mask is None else mask.shape)
        return dq, dk, dv, sink_gradient(options.sinks, lse, delta), dmask
    shapes = (q.shape, k.shape, v.shape)
    if options.cu_seqlens_q is not None:
        grad_out, q, k, v, out = (x[None] for x in (grad_out, q, k, v, out))
    grad_out, q, k, v, out = (loadable(x) for x in (grad_out, q, k, v, out))
    dq, delta = grad_q(grad_out, grad_lse, q, k, v, out, lse, options)
    dk, dv = grad_kv(grad_out, q, k, v, lse, delta, options)
    dmask = lse.new_empty(0) if mask is None else grad_mask(grad_out, q, k, v, lse, delta, options)
    dsinks = sink_gradient(options.sinks, lse, delta)
    return dq.view(shapes[0]), dk.view(shapes[1]), dv.view(shapes[2]), dsinks, dmask


def grad_q(
    grad_out: torch.Tensor,
    grad_lse: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    options: Options,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The first pass: dq and delta, of loadable tensors; packed ones are a batch of one."""
    batch, longest, heads_q, head_dim = q.shape
    dq = _like(q, options)
    if options.cu_seqlens_q is not None:
        batch, longest = options.cu_seqlens_q.shape[0] - 1, options.max_seqlen_q
    delta = torch.empty(lse.shape, dtype=torch.float32, device=q.device)
    block_d, block_dv = padded_widths(head_dim, v.shape[3])
    tile = choose_tiles(q, v).backward_q
    num_tiles = triton.cdiv(longest, tile.block_m)
    with on_device_of(q):
        _grad_q_kernel[(num_tiles * batch * heads_q,)](
            describe(q, tile.block_m, block_d),
            describe(k, tile.block_n, block_d),
            describe(v, tile.block_n, block_dv),
            describe(out, tile.block_m, block_dv),
            describe(grad_out, tile.block_m, block_dv),
            pointer(k), pointer(v), lse, grad_lse, delta, dq, **shared_arguments(q, v, options),
            heads_q=heads_q, num_tiles=num_tiles, scale=options.scale, **compiled_with(tile, options),
        )  # fmt: skip
    return dq, delta


def grad_kv(
    grad_out: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    lse: torch.Tensor,
    delta: torch.Tensor,
    options: Options,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The second pass: dk and dv, of loadable tensors."""
    batch, longest, heads_k, head_dim = k.shape
    dk, dv = _like(k, options), _like(v, options)
    if options.cu_seqlens_k is not None:
        batch, longest = options.cu_seqlens_k.shape[0] - 1, options.max_seqlen_k
    block_d, block_dv = padded_widths(head_dim, v.shape[3])
    tile = choose_tiles(q, v).backward_kv
    num_tiles = triton.cdiv(longest, tile.block_n)
    with on_device_of(q):
        _grad_kv_kernel[(num_tiles * batch * heads_k,)](
            describe(q, tile.block_m, block_d),
            describe(k, tile.block_n, block_d),
            describe(v, tile.block_n, block_dv),
            describe(grad_out, tile.block_m, block_dv),
            pointer(q), pointer(grad_out), lse, delta, dk, dv, **shared_arguments(q, v, options),
            heads_k=heads_k, num_tiles=num_tiles, scale=options.scale, **compiled_with(tile, options),
        )  # fmt: skip
    return dk, dv


def _like(x: torch.Tensor, options: Options) -> torch.Tensor:
    """Memory for x's gradient. No program writes the rows past the last packed sequence: they start as zeros."""
    allocate = torch.empty if options.cu_seqlens_q is None else torch.zeros
    return allocate(x.shape, dtype=x.dtype, device=x.device)
