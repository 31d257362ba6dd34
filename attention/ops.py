"""The operators `attention::forward` and `attention::backward`: what torch.compile, autograd and export see.

Both take q, k and v as (B, S, H, D) in any strides, `window_right` as in `attention.reference`, and the name of a backend
that can run them. Only q, k, v, out and lse are kept for the backward.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

torch.library.define(
    "attention::forward",
    "(Tensor q, Tensor k, Tensor v, float scale, SymInt? window_right, str backend) -> (Tensor out, Tensor lse)",
)
torch.library.define(
    "attention::backward",
    "(Tensor grad_out, Tensor? grad_lse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, float scale, "
    "SymInt? window_right, str backend) -> (Tensor dq, Tensor dk, Tensor dv)",
)


@torch.library.impl("attention::forward", "CompositeExplicitAutograd")
def _forward(
    q: Tensor, k: Tensor, v: Tensor, scale: float, window_right: int | None, backend: str
) -> tuple[Tensor, Tensor]:
    if backend == "triton":
        from .kernels.forward import forward

        return forward(q, k, v, scale, window_right)
    from .reference import tiled_forward

    with torch.autocast(q.device.type, enabled=False):
        return tiled_forward(q, k, v, scale, window_right)


@torch.library.impl("attention::backward", "CompositeExplicitAutograd")
def _backward(
    grad_out: Tensor,
    grad_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    scale: float,
    window_right: int | None,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor]:
    if backend == "triton":
        from .kernels.backward import backward

        return backward(grad_out, grad_lse, q, k, v, out, lse, scale, window_right)
    from .reference import tiled_backward

    with torch.autocast(q.device.type, enabled=False):
        return tiled_backward(grad_out, grad_lse, q, k, v, out, lse, scale, window_right)


def _forward_fake(
    q: Tensor, k: Tensor, v: Tensor, scale: float, window_right: int | None, backend: str
) -> tuple[Tensor, Tensor]:
    batch, seqlen_q, heads_q, _ = q.shape
    out = q.new_empty((batch, seqlen_q, heads_q, v.shape[3]))
    return out, q.new_empty((batch, heads_q, seqlen_q), dtype=torch.float32)


def _backward_fake(
    grad_out: Tensor,
    grad_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    scale: float,
    window_right: int | None,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, ctx.scale, ctx.window_right, ctx.backend = inputs
    ctx.save_for_backward(q, k, v, *output)
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> tuple[Tensor | None, ...]:
    q, k, v, out, lse = ctx.saved_tensors
    if grad_out is None:
        grad_out = torch.zeros_like(out)
    grads = torch.ops.attention.backward(
        grad_out, grad_lse, q, k, v, out, lse, ctx.scale, ctx.window_right, ctx.backend
    )
    return *grads, None, None, None


def _refuse_second_order(ctx: Any, *grads: Tensor) -> None:
    raise NotImplementedError("flash_attention has first-order gradients only; its backward can't be differentiated")


torch.library.register_fake("attention::forward", _forward_fake)
torch.library.register_fake("attention::backward", _backward_fake)
torch.library.register_autograd("attention::forward", _differentiate, setup_context=_save_for_backward)
torch.library.register_autograd("attention::backward", _refuse_second_order)
