"""Packed sequences in plain torch, one after another: q (total_q, Hq, D), k, v (total_k, Hkv, ...), lse (Hq, total_q).

Rows past the last sequence give 0, an lse of -inf and zero gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from .reference import Options


def forward_packed(
    attend: Callable[..., tuple[Tensor, Tensor, Tensor]], q: Tensor, k: Tensor, v: Tensor, options: Options, *rest: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """out, lse and max_logits of `attend(q, k, v, options, *rest)`, `attention.reference.dense` or `tiled_forward`."""
    outs, lses, max_logits, end = [], [], [], 0
    for rows, keys, one in _sequences(q, k, options):
        out, lse, top = attend(q[None, rows], k[None, keys], v[None, keys], one, *rest)
        outs.append(out[0])
        lses.append(lse[0])
        max_logits.append(top)
        end = rows.stop
    outs.append(q.new_zeros(q.shape[0] - end, q.shape[1], v.shape[2]))
    dtype = lses[0].dtype if lses else torch.promote_types(q.dtype, torch.float32)
    lses.append(torch.full((q.shape[1], q.shape[0] - end), -torch.inf, dtype=dtype, device=q.device))
    if not max_logits:
        max_logits = [torch.full((q.shape[1],), -torch.inf, dtype=dtype, device=q.device)]
    return torch.cat(outs), torch.cat(lses, 1), torch.stack(max_logits).amax(0)


def backward_packed(
    differentiate: Callable[..., tuple[Tensor, ...]],
    grad_out: Tensor,
    grad_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    options: Options,
    *rest: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The gradients of `attention.reference.tiled_backward`."""
    dq, dk, dv = (torch.zeros(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    dsinks = lse.new_empty(0) if options.sinks is None else torch.zeros_like(options.sinks)
    for rows, keys, one in _sequences(q, k, options):
        grad_lse_one = None if grad_lse is None else grad_lse[None, :, rows]
        inputs = (q[None, rows], k[None, keys], v[None, keys], out[None, rows], lse[None, :, rows])
        grads = differentiate(grad_out[None, rows], grad_lse_one, *inputs, one, *rest)
        dq[rows], dk[keys], dv[keys] = grads[0][0], grads[1][0], grads[2][0]
        dsinks += grads[3]
    return dq, dk, dv, dsinks, lse.new_empty(0)


def _sequences(q: Tensor, k: Tensor, options: Options) -> Iterator[tuple[slice, slice, Options]]:
    """The rows and keys of each sequence, and its options as a batch of one."""
    starts_q, starts_k = _starts("q", options.cu_seqlens_q, len(q)), _starts("k", options.cu_seqlens_k, len(k))
    options = options._replace(cu_seqlens_q=None, cu_seqlens_k=None)
    for i in range(len(starts_q) - 1):
        slopes = None if options.slopes is None else options.slopes[i : i + 1]
        one = options._replace(slopes=slopes, first_batch=i)
        yield slice(starts_q[i], starts_q[i + 1]), slice(starts_k[i], starts_k[i + 1]), one


def _starts(which: str, cu_seqlens: Tensor | None, total: int) -> list[int]:
    """Where the sequences start and the last one ends. Here the host reads them anyway, and so can check them."""
    assert cu_seqlens is not None
    starts: list[int] = cu_seqlens.tolist()
    if starts[0] != 0 or starts[-1] > total or any(stop < start for start, stop in pairwise(starts)):
        raise ValueError(
            f"cu_seqlens_{which} must begin with 0, not decrease and end at most at {total}, the length of {which}, "
            f"got {cu_seqlens}"
        )
    return starts
