"""Attention in plain torch, twice: `dense` is the definition, `tiled_forward` and `tiled_backward` are FlashAttention.

The tiled pair computes what the Triton kernels compute, tile by tile, and is what runs on a CPU. It never forms the
Sq × Sk matrix: one tile of scores exists at a time, and the backward recomputes each tile's weights from q, k and the
row's log-sum-exp. Sources: FlashAttention (arXiv:2205.14135) and FlashAttention-2 (arXiv:2307.08691).

Everywhere q is (B, Sq, Hq, D), k (B, Sk, Hkv, D), v (B, Sk, Hkv, Dv), out (B, Sq, Hq, Dv), lse (B, Hq, Sq). Packed
sequences go through `attention.packed`, which calls these for one at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from .philox import kept

LOG2_E = 1.4426950408889634

# Measured on a CPU: smaller tiles pay for their calls, larger ones compute more that a causal mask throws away.
TILE = 256


class Options(NamedTuple):
    """Everything that attention depends on besides q, k and v."""

    scale: float
    window_left: int | None = None  # query i sees key j when j >= i + Sk - Sq - left; None: no bound
    window_right: int | None = None  # ... and j <= i + Sk - Sq + right: 0 is the bottom-right causal mask
    softcap: float | None = None
    dropout_p: float = 0.0
    sinks: Tensor | None = None  # (Hq,)
    slopes: Tensor | None = None  # (B, Hq), float32
    mask: Tensor | None = None  # (B or 1, Hq or 1, Sq or 1, Sk or 1); bool: True is visible; else added, -inf hides
    seed: Tensor | None = None  # (1,), int64, for dropout
    cu_seqlens_q: Tensor | None = None  # (B + 1,), int32: where each packed sequence starts, and where the last ends
    cu_seqlens_k: Tensor | None = None
    max_seqlen_q: int = 0  # of the packed sequences
    max_seqlen_k: int = 0
    deterministic: bool = False  # whether gradients must be the same from run to run, to the bit
    first_batch: int = 0  # number of the first of these sequences among all, for dropout


def dense(q: Tensor, k: Tensor, v: Tensor, options: Options) -> tuple[Tensor, Tensor, Tensor]:
    """out = dropout(softmax(alibi(cap(scale q kᵀ)) + mask)) v, its lse, and each head's largest logit scale q·k.

    In the inputs' dtype, differentiable by autograd. In float64 this is the truth that everything else is measured
    against. It forms the whole Sq × Sk matrix.
    """
    seqlen_q, seqlen_k, heads = q.shape[1], k.shape[1], q.shape[2]
    k, v = (x.repeat_interleave(heads // x.shape[2], 2) for x in (k, v))
    logits = torch.einsum("bihd,bjhd->bhij", q, k) * options.scale
    scores = logits
    rows = torch.arange(seqlen_q, device=q.device)[:, None] + seqlen_k - seqlen_q
    keys = torch.arange(seqlen_k, device=q.device)
    hidden = torch.zeros(seqlen_q, seqlen_k, dtype=torch.bool, device=q.device)
    if options.softcap is not None:
        scores = options.softcap * torch.tanh(scores / options.softcap)
    if options.slopes is not None:
        scores = scores - (options.slopes[..., None, None] * (rows - keys).abs()).to(scores.dtype)
    if options.window_left is not None:
        hidden = hidden | (keys < rows - options.window_left)
    if options.window_right is not None:
        hidden = hidden | (keys > rows + options.window_right)
    if options.mask is not None and options.mask.dtype == torch.bool:
        hidden = hidden | ~options.mask
    elif options.mask is not None:
        hidden = hidden | (options.mask == -torch.inf)
        scores = scores + options.mask.masked_fill(options.mask == -torch.inf, 0).to(scores.dtype)
    keyless = hidden.all(-1, keepdim=True)  # a row that sees no key
    scores = scores.masked_fill(hidden & ~keyless, -torch.inf)
    weights = torch.softmax(scores, -1).masked_fill(keyless, 0)
    lse = torch.logsumexp(scores, -1).masked_fill(keyless[..., 0], -torch.inf)
    if options.sinks is not None:
        with_sink = torch.logaddexp(lse, options.sinks[:, None].to(lse.dtype))
        weights = weights * torch.exp(lse - with_sink)[..., None]
        lse = with_sink
    if options.seed is not None:
        weights = weights * _kept(options, q, slice(0, seqlen_q), slice(0, seqlen_k)) / (1 - options.dropout_p)
    out = torch.einsum("bhij,bjhd->bihd", weights, v)
    visible_logits = logits.detach().masked_fill(hidden, -torch.inf).transpose(0, 1).flatten(1)
    return out, lse, pad(visible_logits, (0, 1), value=-torch.inf).amax(1)


def tiled_forward(q: Tensor, k: Tensor, v: Tensor, options: Options, with_max: bool) -> tuple[Tensor, Tensor, Tensor]:
    """out, lse and, if asked for, each head's largest logit (else empty), by online softmax.

    The state of a row is its largest score m so far, the sum l of exp(s - m) and the sum a of exp(s - m) v. A new tile
    of scores raises m to m', and what was summed before is rescaled by exp(m - m'). In the end out = a / l and
    lse = m + log l.
    """
    heads = k.shape[2]
    qs, ks, vs = _by_key_head(q, heads) * options.scale, _by_key_head(k, heads), _by_key_head(v, heads)
    m = qs.new_full((*qs.shape[:3], 1), -torch.inf)
    l = torch.zeros_like(m)
    a = qs.new_zeros((*qs.shape[:3], v.shape[3]))
    max_logits = qs.new_full((q.shape[2] if with_max else 0,), -torch.inf)
    for rows, keys, masked in visible_tiles(q.shape[1], k.shape[1], options):
        s = _product(qs[:, :, rows], ks[:, 0, keys].mT)
        hidden = _hidden(options, q, k, rows, keys) if masked else None
        if with_max and q.shape[0]:
            top = s if hidden is None else s.masked_fill(hidden, -torch.inf)
            torch.maximum(max_logits, top.amax((2, 3)).view(-1, q.shape[2]).amax(0), out=max_logits)
        s, _ = _score(s, options, q, k, rows, keys)
        if hidden is not None:
            s.masked_fill_(hidden, -torch.inf)
        new_m = torch.maximum(m[:, :, rows], s.amax(-1, keepdim=True))
        anchor = _finite(new_m)
        p = _exp_(s.sub_(anchor))
        rescale = _exp_(m[:, :, rows] - anchor)
        m[:, :, rows] = new_m
        l[:, :, rows].mul_(rescale).add_(p.sum(-1, keepdim=True))
        if options.seed is not None:
            p.mul_(_kept(options, q, rows, keys).view(p.shape))
        v_tile = vs[:, 0, keys]
        if hidden is not None:
            v_tile = _mark(p, hidden, v_tile[:, None], of_rows=False)[:, 0]
        a[:, :, rows].mul_(rescale).add_(_product(p, v_tile))
    if options.sinks is not None:
        sink = options.sinks.to(m.dtype).repeat(q.shape[0]).view(*m.shape[:2], 1, 1)
        new_m = torch.maximum(m, sink)
        rescale = _exp_(m - _finite(new_m))
        l, a, m = l * rescale + _exp_(sink - _finite(new_m)), a * rescale, new_m
    out = a / (l.masked_fill(l == 0, 1) * (1 - options.dropout_p))
    return _by_position(out, q), (m + l.log()).view(q.shape[0], q.shape[2], q.shape[1]), max_logits


def tiled_backward(
    grad_out: Tensor,
    grad_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    options: Options,
    with_mask: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v, the sinks and, if `with_mask`, the mask (else empty). With P = exp(s - lse), dP = dO vᵀ and
    delta_i = Σ_d dO_id O_id - dlse_i:

    dS = P ∘ (dP - delta),  dq = scale dS k,  dk = scale dSᵀ q,  dv = Pᵀ dO.

    Dropout Z makes it dP = Z ∘ dO vᵀ and dv = (Z ∘ P)ᵀ dO; a softcap multiplies dS by 1 - tanh² before dq and dk.
    """
    heads = k.shape[2]
    qs, ks, vs = _by_key_head(q, heads) * options.scale, _by_key_head(k, heads), _by_key_head(v, heads)
    dos = _by_key_head(grad_out, heads)
    delta = (dos * _by_key_head(out, heads)).sum(-1, keepdim=True)
    if grad_lse is not None:
        delta -= grad_lse.reshape(delta.shape)
    lse_column = lse.reshape(delta.shape)
    dq, dk, dv = torch.zeros_like(qs), torch.zeros_like(ks[:, 0]), torch.zeros_like(vs[:, 0])
    dmask = qs.new_zeros(options.mask.shape if options.mask is not None and with_mask else (0,))
    for rows, keys, masked in visible_tiles(q.shape[1], k.shape[1], options):
        q_tile, do_tile, k_tile, v_tile = qs[:, :, rows], dos[:, :, rows], ks[:, 0, keys], vs[:, 0, keys]
        s, cap_slope = _score(_product(q_tile, k_tile.mT), options, q, k, rows, keys)
        p = _exp_(s.sub_(lse_column[:, :, rows]))
        dp = _product(do_tile, v_tile.mT)
        kept_p = p
        if options.seed is not None:
            keep = _kept(options, q, rows, keys).view(p.shape) / (1 - options.dropout_p)
            dp, kept_p = dp * keep, p * keep
        ds = dp.sub_(delta[:, :, rows]).mul_(p)
        if masked:  # also where a row without keys has lse = -inf and so p = inf
            hidden = _hidden(options, q, k, rows, keys)
            kept_p, ds = kept_p.masked_fill_(hidden, 0), ds.masked_fill_(hidden, 0)
        if with_mask:
            _add_mask_gradient(dmask, ds.view(q.shape[0], q.shape[2], *ds.shape[2:]), rows, keys)
        if cap_slope is not None:
            ds.mul_(cap_slope.masked_fill_(hidden, 0) if masked else cap_slope)
        if masked:
            do_tile = _mark(kept_p, hidden, do_tile, of_rows=True)
            k_tile = _mark(ds, hidden, k_tile[:, None], of_rows=False)[:, 0]
            q_tile = _mark(ds, hidden, q_tile, of_rows=True)
        dv[:, keys].baddbmm_(kept_p.flatten(1, 2).mT, do_tile.flatten(1, 2))
        dq[:, :, rows].add_(_product(ds, k_tile))
        dk[:, keys].baddbmm_(ds.flatten(1, 2).mT, q_tile.flatten(1, 2))
    grads = (_by_position(dq * options.scale, q), _by_position(dk[:, None], k), _by_position(dv[:, None], v))
    return *grads, sink_gradient(options.sinks, lse, delta.view(lse.shape)), dmask


def sink_gradient(sinks: Tensor | None, lse: Tensor, delta: Tensor) -> Tensor:
    """-Σ exp(sink - lse) delta over batch and positions, of lse and delta (B, Hq, Sq) or (Hq, total); empty without
    sinks. A row whose lse is -inf has no sink to speak of."""
    if sinks is None:
        return lse.new_empty(0)
    share = torch.exp(sinks.to(lse.dtype)[:, None] - lse)
    grad = torch.where(lse == -torch.inf, 0, -share * delta).sum(-1)
    return (grad.sum(0) if grad.dim() == 2 else grad).to(sinks.dtype)


def visible_tiles(seqlen_q: int, seqlen_k: int, options: Options) -> Iterator[tuple[slice, slice, bool]]:
    """The rows and the keys of each tile that the window leaves something of, and whether anything in it is hidden."""
    left = seqlen_q + seqlen_k if options.window_left is None else options.window_left
    right = seqlen_q + seqlen_k if options.window_right is None else options.window_right
    shift = seqlen_k - seqlen_q
    for row in range(0, seqlen_q, TILE):
        end_row = min(row + TILE, seqlen_q)
        first_key = max(0, row + shift - left) // TILE * TILE
        for key in range(first_key, min(seqlen_k, end_row + shift + right), TILE):
            end_key = min(key + TILE, seqlen_k, end_row + shift + right)
            if end_key <= row + shift - left:
                continue
            inside = end_row - 1 + shift - left <= key and end_key - 1 <= row + shift + right
            yield slice(row, end_row), slice(key, end_key), options.mask is not None or not inside


def _score(s: Tensor, options: Options, q: Tensor, k: Tensor, rows: slice, keys: slice) -> tuple[Tensor, Tensor | None]:
    """What the softmax sees of a tile of logits (N, G, rows, keys), and the softcap's derivative if there is one."""
    cap_slope = None
    if options.softcap is not None:
        tanh = torch.tanh(s / options.softcap)
        s, cap_slope = tanh * options.softcap, 1 - tanh * tanh
    if options.slopes is not None:
        i, j = _positions(q, k, rows, keys)
        s = s - options.slopes.to(s.dtype).reshape(*s.shape[:2], 1, 1) * (i - j).abs()
    if options.mask is not None and options.mask.dtype != torch.bool:
        s = s + _mask_tile(options.mask, q, rows, keys).view(s.shape)
    return s, cap_slope


def _hidden(options: Options, q: Tensor, k: Tensor, rows: slice, keys: slice) -> Tensor:
    """The pairs of a tile that don't see each other, broadcastable to (N, G, rows, keys)."""
    i, j = _positions(q, k, rows, keys)
    hidden = torch.zeros(len(i), len(j), dtype=torch.bool, device=q.device)
    if options.window_left is not None:
        hidden = hidden | (j < i - options.window_left)
    if options.window_right is not None:
        hidden = hidden | (j > i + options.window_right)
    if options.mask is not None:
        mask = _mask_tile(options.mask, q, rows, keys)
        mask = ~mask if mask.dtype == torch.bool else mask == -torch.inf
        hidden = hidden | mask.view(-1, q.shape[2] // k.shape[2], *mask.shape[2:])
    return hidden


def _positions(q: Tensor, k: Tensor, rows: slice, keys: slice) -> tuple[Tensor, Tensor]:
    """Each query's position among the keys, (rows, 1), and the keys' (keys,)."""
    i = torch.arange(rows.start, rows.stop, device=q.device)[:, None] + k.shape[1] - q.shape[1]
    return i, torch.arange(keys.start, keys.stop, device=q.device)


def _mask_tile(mask: Tensor, q: Tensor, rows: slice, keys: slice) -> Tensor:
    """(B, Hq, rows, keys), contiguous."""
    mask = mask[:, :, rows if mask.shape[2] > 1 else slice(None), keys if mask.shape[3] > 1 else slice(None)]
    return mask.expand(q.shape[0], q.shape[2], rows.stop - rows.start, keys.stop - keys.start).contiguous()


def _add_mask_gradient(dmask: Tensor, ds: Tensor, rows: slice, keys: slice) -> None:
    tile = dmask[:, :, rows if dmask.shape[2] > 1 else slice(None), keys if dmask.shape[3] > 1 else slice(None)]
    tile += ds.sum_to_size(tile.shape)


def _kept(options: Options, q: Tensor, rows: slice, keys: slice) -> Tensor:
    """What dropout keeps of a tile, (B, Hq, rows, keys)."""
    assert options.seed is not None
    heads = torch.arange(q.shape[0] * q.shape[2], device=q.device).view(q.shape[0], q.shape[2])
    return kept(options.seed, options.dropout_p, heads + options.first_batch * q.shape[2], rows, keys)


def _mark(weights: Tensor, hidden: Tensor, x: Tensor, of_rows: bool) -> Tensor:
    """x, whose rows are the queries or the keys of the tile, with 0 for what isn't finite; pairs that see such a row
    become NaN. Else 0 · NaN would carry it to those that don't."""
    finite = x.isfinite()
    spoiled = ~finite.all(-1)
    weights.masked_fill_((spoiled[..., None] if of_rows else spoiled[..., None, :]) & ~hidden, torch.nan)
    return torch.where(finite, x, 0)


def _exp_(x: Tensor) -> Tensor:
    """exp in place, through exp2: torch's exp is several times slower on a CPU, and far slower where it underflows."""
    return x.mul_(LOG2_E).exp2_()


def _finite(m: Tensor) -> Tensor:
    """A row that has seen no key has m = -inf; -inf - -inf would be NaN."""
    return m.masked_fill(m == -torch.inf, 0)


def _product(x: Tensor, y: Tensor) -> Tensor:
    """(N, G, rows, K) times (N, K, columns): the G query heads of a group share their key head's matrix."""
    return torch.bmm(x.flatten(1, 2), y).view(*x.shape[:3], y.shape[2])


def _by_key_head(x: Tensor, heads_k: int) -> Tensor:
    """(B, S, H, D) to (B·Hkv, H / Hkv, S, D), contiguous, in fp32 or better."""
    batch, seqlen, heads, width = x.shape
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    return x.transpose(1, 2).reshape(batch * heads_k, heads // heads_k, seqlen, width).contiguous()


def _by_position(x: Tensor, like: Tensor) -> Tensor:
    """The way back, to the batch, positions, heads and dtype of `like`."""
    batch, seqlen, heads, _ = like.shape
    x = x.view(batch, heads, seqlen, x.shape[-1]).transpose(1, 2)
    return x.to(like.dtype).clone(memory_format=torch.contiguous_format)
