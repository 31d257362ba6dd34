"""Attention in plain torch, twice: `dense` is the definition, `tiled_forward` and `tiled_backward` are FlashAttention.

The tiled pair computes what the Triton kernels compute, tile by tile, and is what runs on a CPU. It never forms the
Sq × Sk matrix: one tile of scores exists at a time, and the backward recomputes each tile's weights from q, k and the
row's log-sum-exp. Sources: FlashAttention (arXiv:2205.14135) and FlashAttention-2 (arXiv:2307.08691).

Everywhere q is (B, Sq, Hq, D), k (B, Sk, Hkv, D), v (B, Sk, Hkv, Dv), out (B, Sq, Hq, Dv), lse (B, Hq, Sq), and with
`window_right=r` query i sees key j when j <= i + Sk - Sq + r: 0 is the bottom-right causal mask, None is no mask.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

LOG2_E = 1.4426950408889634

# Measured on a CPU: smaller tiles pay for their calls, larger ones compute more that a causal mask throws away.
TILE = 256


def dense(q: Tensor, k: Tensor, v: Tensor, scale: float, window_right: int | None = None) -> tuple[Tensor, Tensor]:
    """out = softmax(scale q kᵀ + mask) v and its lse, in the inputs' dtype, differentiable by autograd.

    In float64 this is the truth that everything else is measured against. It forms the whole Sq × Sk matrix.
    """
    group = q.shape[2] // k.shape[2]
    k, v = k.repeat_interleave(group, 2), v.repeat_interleave(group, 2)
    scores = torch.einsum("bihd,bjhd->bhij", q, k) * scale
    rows, keys = torch.arange(q.shape[1], device=q.device), torch.arange(k.shape[1], device=q.device)
    last_key = rows + k.shape[1] - q.shape[1] + window_right if window_right is not None else rows * 0 + k.shape[1]
    hidden = keys > last_key[:, None]
    keyless = hidden.all(-1, keepdim=True)  # a row that sees no key
    scores = scores.masked_fill(hidden & ~keyless, -torch.inf)
    weights = torch.softmax(scores, -1).masked_fill(keyless, 0)
    lse = torch.logsumexp(scores, -1).masked_fill(keyless[:, 0], -torch.inf)
    return torch.einsum("bhij,bjhd->bihd", weights, v), lse


def tiled_forward(
    q: Tensor, k: Tensor, v: Tensor, scale: float, window_right: int | None = None
) -> tuple[Tensor, Tensor]:
    """out and lse by online softmax.

    The state of a row is its largest score m so far, the sum l of exp(s - m) and the sum a of exp(s - m) v. A new tile
    of scores raises m to m', and what was summed before is rescaled by exp(m - m'). In the end out = a / l and
    lse = m + log l.
    """
    heads = k.shape[2]
    qs, ks, vs = _by_key_head(q, heads) * scale, _by_key_head(k, heads), _by_key_head(v, heads)
    m = qs.new_full((*qs.shape[:3], 1), -torch.inf)
    l = torch.zeros_like(m)
    a = qs.new_zeros((*qs.shape[:3], v.shape[3]))
    for rows, keys, diagonal in visible_tiles(q.shape[1], k.shape[1], window_right):
        s = _product(qs[:, :, rows], ks[:, 0, keys].mT)
        if diagonal is not None:  # pairs right of it are hidden; tril_ first, because NaN - inf would still be NaN
            s.tril_(diagonal).add_(s.new_full(s.shape[2:], -torch.inf).triu_(diagonal + 1))
        new_m = torch.maximum(m[:, :, rows], s.amax(-1, keepdim=True))
        # A row that has seen no key yet keeps m = -inf; -inf - -inf would be NaN.
        anchor = new_m.masked_fill(new_m == -torch.inf, 0)
        p = _exp_(s.sub_(anchor))
        rescale = _exp_(m[:, :, rows] - anchor)
        m[:, :, rows] = new_m
        l[:, :, rows].mul_(rescale).add_(p.sum(-1, keepdim=True))
        a[:, :, rows].mul_(rescale).add_(_product(p, vs[:, 0, keys]))
    out = a / l.masked_fill(l == 0, 1)
    return _by_position(out, q), (m + l.log()).view(q.shape[0], q.shape[2], q.shape[1])


def tiled_backward(
    grad_out: Tensor,
    grad_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    scale: float,
    window_right: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v. With P = exp(s - lse), dP = dO vᵀ and delta_i = Σ_d dO_id O_id - dlse_i:

    dS = P ∘ (dP - delta),  dq = scale dS k,  dk = scale dSᵀ q,  dv = Pᵀ dO.
    """
    heads = k.shape[2]
    qs, ks, vs = _by_key_head(q, heads) * scale, _by_key_head(k, heads), _by_key_head(v, heads)
    dos = _by_key_head(grad_out, heads)
    delta = (dos * _by_key_head(out, heads)).sum(-1, keepdim=True)
    if grad_lse is not None:
        delta -= grad_lse.reshape(delta.shape)
    lse = lse.reshape(delta.shape)
    dq, dk, dv = torch.zeros_like(qs), torch.zeros_like(ks[:, 0]), torch.zeros_like(vs[:, 0])
    for rows, keys, diagonal in visible_tiles(q.shape[1], k.shape[1], window_right):
        q_tile, do_tile, k_tile, v_tile = qs[:, :, rows], dos[:, :, rows], ks[:, 0, keys], vs[:, 0, keys]
        p = _exp_(_product(q_tile, k_tile.mT).sub_(lse[:, :, rows]))
        if diagonal is not None:
            p.tril_(diagonal)  # also where a row without keys has lse = -inf and so p = inf
        dv[:, keys].baddbmm_(p.flatten(1, 2).mT, do_tile.flatten(1, 2))
        ds = _product(do_tile, v_tile.mT).sub_(delta[:, :, rows]).mul_(p)
        dq[:, :, rows].add_(_product(ds, k_tile))
        dk[:, keys].baddbmm_(ds.flatten(1, 2).mT, q_tile.flatten(1, 2))
    return _by_position(dq * scale, q), _by_position(dk[:, None], k), _by_position(dv[:, None], v)


def visible_tiles(seqlen_q: int, seqlen_k: int, window_right: int | None) -> Iterator[tuple[slice, slice, int | None]]:
    """The rows and the keys of each tile that the mask leaves something of, and the last diagonal of the tile that is
    visible (column <= row + diagonal), or None where all of them are."""
    shift = seqlen_k if window_right is None else seqlen_k - seqlen_q + window_right
    for row in range(0, seqlen_q, TILE):
        end_row = min(row + TILE, seqlen_q)
        for key in range(0, min(seqlen_k, end_row + shift), TILE):
            end_key = min(key + TILE, seqlen_k, end_row + shift)
            diagonal = row + shift - key
            yield slice(row, end_row), slice(key, end_key), None if end_key - key <= diagonal + 1 else diagonal


def _exp_(x: Tensor) -> Tensor:
    """exp in place, through exp2: torch's exp is several times slower on a CPU, and far slower where it underflows."""
    return x.mul_(LOG2_E).exp2_()


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
