"""The operators `attention::forward` and `attention::backward`: what torch.compile, autograd and export see.

Both take q, k and v as (B, S, H, D) in any strides, or packed (total, H, D) with `cu_seqlens`, the fields of
`attention.reference.Options` one by one, and the name of a backend that can run them; "auto" is the faster of "hopper"
and "triton", one choice for the forward and one for the backward. Only inputs, out and lse are kept
for the backward. Outputs that nobody asked for (max_logits, the sinks' and the mask's gradients) are empty.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .backends import backward_runs_on_hopper, runs_on_hopper
from .packed import backward_packed, forward_packed
from .reference import Options, tiled_backward, tiled_forward

# As the fields of Options, without first_batch.
_OPTIONS = (
    "float scale, SymInt? window_left, SymInt? window_right, float? softcap, float dropout_p, Tensor? sinks, "
    "Tensor? slopes, Tensor? mask, Tensor? seed, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, "
    "SymInt max_seqlen_q, SymInt max_seqlen_k, bool deterministic"
)
_NUM_OPTIONS = _OPTIONS.count(",") + 1
_TENSOR_OPTIONS = slice(Options._fields.index("sinks"), Options._fields.index("max_seqlen_q"))

torch.library.define(
    "attention::forward",
    f"(Tensor q, Tensor k, Tensor v, {_OPTIONS}, bool with_max_logits, str backend) "
    "-> (Tensor out, Tensor lse, Tensor max_logits)",
)
torch.library.define(
    "attention::backward",
    "(Tensor grad_out, Tensor? grad_lse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, "
    f"{_OPTIONS}, bool with_mask, str backend) -> (Tensor dq, Tensor dk, Tensor dv, Tensor dsinks, Tensor dmask)",
)


def attend(
    q: Tensor, k: Tensor, v: Tensor, options: Options, *, with_max_logits: bool, backend: str
) -> tuple[Tensor, Tensor, Tensor]:
    """out, lse and max_logits (empty unless asked for) by the operator, differentiable."""
    result: tuple[Tensor, Tensor, Tensor] = torch.ops.attention.forward(
        q, k, v, *options[:_NUM_OPTIONS], with_max_logits, backend
    )
    return result


@torch.library.impl("attention::forward", "CompositeExplicitAutograd")
def _forward(q: Tensor, k: Tensor, v: Tensor, *arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    *fields, with_max_logits, backend = arguments
    options = Options(*fields)
    if backend != "torch":
        if runs_on_hopper(backend, q, v, options, with_max_logits):
            from .kernels.hopper_forward import forward
        else:
            from .kernels.forward import forward
        return forward(q, k, v, options, with_max_logits)
    with torch.autocast(q.device.type, enabled=False):
        if options.cu_seqlens_q is None:
            return tiled_forward(q, k, v, options, with_max_logits)
        return forward_packed(tiled_forward, q, k, v, options, with_max_logits)


@torch.library.impl("attention::backward", "CompositeExplicitAutograd")
def _backward(grad_out: Tensor, grad_lse: Tensor | None, *arguments: Any) -> tuple[Tensor, ...]:
    q, k, v, out, lse, *fields, with_mask, backend = arguments
    saved = (q, k, v, out, lse, Options(*fields))
    if backend != "torch":
        if backward_runs_on_hopper(backend, *saved[:3], saved[-1]):
            from .kernels import hopper_backward

            return hopper_backward.backward(grad_out, grad_lse, *saved, with_mask)
        from .kernels.backward import backward

        return backward(grad_out, grad_lse, *saved, with_mask)
    with torch.autocast(q.device.type, enabled=False):
        if saved[-1].cu_seqlens_q is None:
            return tiled_backward(grad_out, grad_lse, *saved, with_mask)
        return backward_packed(tiled_backward, grad_out, grad_lse, *saved, with_mask)


def _forward_fake(q: Tensor, k: Tensor, v: Tensor, *arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    *batch, seqlen_q, heads_q, _ = q.shape
    lse = q.new_empty((*batch, heads_q, seqlen_q), dtype=torch.float32)
    with_max_logits = arguments[-2]
    return q.new_empty((*batch, seqlen_q, heads_q, v.shape[-1])), lse, lse.new_empty(heads_q if with_max_logits else 0)


def _backward_fake(grad_out: Tensor, grad_lse: Tensor | None, *arguments: Any) -> tuple[Tensor, ...]:
    q, k, v, _, lse, *fields, with_mask, _ = arguments
    options = Options(*fields)
    dsinks = lse.new_empty(0) if options.sinks is None else options.sinks.new_empty(options.sinks.shape)
    dmask = lse.new_empty(options.mask.shape if options.mask is not None and with_mask else 0)
    return *(x.new_empty(x.shape) for x in (q, k, v)), dsinks, dmask


def _forward_with_autograd(keyset: Any, *inputs: Any) -> tuple[Tensor, Tensor, Tensor]:
    """What `torch.library.register_autograd` would do, which asks the schema for all of an operator's arguments once
    for each of them, at every call: as long as the kernels' launches take."""
    if torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in inputs):
        return FlashAttention.apply(*inputs, keyset)  # type: ignore[no-untyped-call, no-any-return]
    return _forward_below_autograd(keyset, *inputs)


def _forward_below_autograd(keyset: Any, *inputs: Any) -> tuple[Tensor, Tensor, Tensor]:
    with torch._C._AutoDispatchBelowAutograd():
        below = keyset & torch._C._after_autograd_keyset
        return torch.ops.attention.forward.default.redispatch(below, *inputs)  # type: ignore[no-any-return]


class FlashAttention(torch.autograd.Function):
    """`attention::forward` and its derivative; profiles and anomaly traces have this name."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
        *inputs, keyset = arguments
        output = _forward_below_autograd(keyset, *inputs)
        _save_for_backward(ctx, inputs, output)
        return output

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        return *_differentiate(ctx, *grads), None


def _save_for_backward(ctx: Any, inputs: list[Any], output: tuple[Tensor, Tensor, Tensor]) -> None:
    q, k, v, *fields, _, ctx.backend = inputs
    out, lse, max_logits = output
    tensors = fields[_TENSOR_OPTIONS]
    fields[_TENSOR_OPTIONS] = [None] * len(tensors)
    ctx.options = Options(*fields)
    ctx.save_for_backward(q, k, v, out, lse, *tensors)
    ctx.mark_non_differentiable(max_logits)
    ctx.set_materialize_grads(False)


def _differentiate(
    ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None, _grad_max_logits: Tensor | None
) -> tuple[Tensor | None, ...]:
    q, k, v, out, lse, *tensors = ctx.saved_tensors
    fields = list(ctx.options[:_NUM_OPTIONS])
    fields[_TENSOR_OPTIONS] = tensors
    if grad_out is None:
        grad_out = torch.zeros_like(out)
    needs_sinks, _, needs_mask = ctx.needs_input_grad[3:][_TENSOR_OPTIONS][:3]
    dq, dk, dv, dsinks, dmask = torch.ops.attention.backward(
        grad_out, grad_lse, q, k, v, out, lse, *fields, needs_mask, ctx.backend
    )
    grads: list[Tensor | None] = [None] * _NUM_OPTIONS
    mask = Options(*fields).mask
    grads[_TENSOR_OPTIONS] = [
        dsinks if needs_sinks else None, None, dmask.to(mask.dtype) if needs_mask and mask is not None else None,
        None, None, None,
    ]  # fmt: skip
    return dq, dk, dv, *grads, None, None


def _refuse_second_order(ctx: Any, *grads: Tensor) -> None:
    raise NotImplementedError("flash_attention has first-order gradients only; its backward can't be differentiated")


def _forward_vmap(info: Any, in_dims: tuple[int | None, ...], *arguments: Any) -> tuple[Any, Any]:
    *fields, with_max_logits, _ = arguments[3:]
    options = Options(*fields)
    foldable = options.mask is None and options.slopes is None and in_dims[3 + _TENSOR_OPTIONS.start] is None
    if not foldable or options.seed is not None or options.cu_seqlens_q is not None or with_max_logits:
        return _one_by_one(torch.ops.attention.forward, info, in_dims, arguments)
    out, lse, max_logits = torch.ops.attention.forward(*_fold(info, in_dims, arguments, 3))
    return (*_unfold(info, in_dims, arguments, out, lse), max_logits), (0, 0, None)


def _backward_vmap(info: Any, in_dims: tuple[int | None, ...], *arguments: Any) -> tuple[Any, Any]:
    options = Options(*arguments[7:-2])
    tensors = (options.sinks, options.slopes, options.mask, options.seed, options.cu_seqlens_q)
    if any(x is not None for x in tensors):
        return _one_by_one(torch.ops.attention.backward, info, in_dims, arguments)
    *grads, dsinks, dmask = torch.ops.attention.backward(*_fold(info, in_dims, arguments, 7))
    return (*_unfold(info, in_dims, arguments, *grads), dsinks, dmask), (0, 0, 0, None, None)


def _fold(info: Any, in_dims: tuple[int | None, ...], arguments: tuple[Any, ...], count: int) -> list[Any]:
    """The first `count` arguments with the mapped dimension in their batch, and the others as they are."""
    folded = list(arguments)
    for i, (x, dim) in enumerate(zip(arguments[:count], in_dims[:count], strict=True)):
        if x is not None:
            x = x.expand(info.batch_size, *x.shape) if dim is None else x.movedim(dim, 0)
            folded[i] = x.flatten(0, 1)
    return folded


def _unfold(
    info: Any, in_dims: tuple[int | None, ...], arguments: tuple[Any, ...], *tensors: Tensor
) -> tuple[Tensor, ...]:
    """The results, with the mapped dimension and the first argument's batch (B, ...) apart again."""
    batch = arguments[0].shape[1 if in_dims[0] == 0 else 0]
    return tuple(x.unflatten(0, (info.batch_size, batch)) for x in tensors)


def _one_by_one(
    operator: Any, info: Any, in_dims: tuple[int | None, ...], arguments: tuple[Any, ...]
) -> tuple[Any, Any]:
    """For what the members of a batch don't share (random numbers, a head's maximum, sums over the batch)."""
    mapped = list(zip(arguments, in_dims, strict=True))
    if info.batch_size == 0:  # a member of zeros tells what the results would look like
        mapped = [(x if dim is None else _append_zeros(x, dim), dim) for x, dim in mapped]
    results = [
        operator(*(x if dim is None else x.select(dim, i) for x, dim in mapped)) for i in range(max(info.batch_size, 1))
    ]
    stacked = tuple(torch.stack(tensors)[: info.batch_size] for tensors in zip(*results, strict=True))
    return stacked, (0,) * len(stacked)


def _append_zeros(x: Tensor, dim: int) -> Tensor:
    return torch.cat((x, x.new_zeros((*x.shape[:dim], 1, *x.shape[dim + 1 :]))), dim)


torch.library.register_fake("attention::forward", _forward_fake)
torch.library.register_fake("attention::backward", _backward_fake)
_LIBRARY = torch.library.Library("attention", "FRAGMENT")
_LIBRARY.impl("forward", _forward_with_autograd, "Autograd", with_keyset=True)
torch.library.register_autograd("attention::backward", _refuse_second_order)
torch.library.register_vmap("attention::forward", _forward_vmap)
torch.library.register_vmap("attention::backward", _backward_vmap)
