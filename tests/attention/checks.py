"""Inputs in every memory layout, and the rule for what is right: an error at most twice plain torch's, by float64."""

import torch
from torch import Tensor

from attention import flash_attention, flash_attention_varlen
from attention.ops import attend
from attention.packed import forward_packed
from attention.philox import draw_seed
from attention.reference import Options, dense

LAYOUTS = ("contiguous", "heads_first", "packed", "width_strided")


def tensor(shape: tuple[int, ...], layout: str, dtype: torch.dtype, device: str = "cpu") -> Tensor:
    """Standard normal (B, S, H, D) with the strides that `layout` names."""
    batch, seqlen, heads, width = shape
    if layout == "contiguous":
        return torch.randn(shape, dtype=dtype, device=device)
    if layout == "heads_first":
        return torch.randn(batch, heads, seqlen, width, dtype=dtype, device=device).transpose(1, 2)
    if layout == "packed":
        return torch.randn(batch, seqlen, 3, heads, width + 1, dtype=dtype, device=device)[:, :, 1, :, 1:]
    assert layout == "width_strided"
    return torch.randn(batch, heads, width, seqlen, dtype=dtype, device=device).permute(0, 3, 1, 2)


def grad(shape: tuple[int, ...], layout: str, dtype: torch.dtype, device: str = "cpu") -> Tensor:
    """An incoming gradient; "expanded" is what `.sum(dim)` makes."""
    if layout == "expanded":
        return torch.randn((*shape[:2], 1, 1), dtype=dtype, device=device).expand(shape)
    return tensor(shape, layout, dtype, device)


def with_gradients(attend, inputs: dict[str, Tensor], grad_out: Tensor, grad_lse: Tensor) -> dict[str, Tensor]:
    """What attend(**inputs) = (out, lse, max_logits) gives, and the inputs' gradients. An lse of -inf gets none."""
    inputs = {name: x.detach().requires_grad_() for name, x in inputs.items()}
    out, lse, max_logits = attend(**inputs)
    grad_lse = grad_lse.to(lse.dtype).masked_fill(lse == -torch.inf, 0)
    grads = torch.autograd.grad(
        (out, lse), list(inputs.values()), (grad_out.to(out.dtype), grad_lse), allow_unused=True, materialize_grads=True
    )
    results = {"out": out, "lse": lse, "max_logits": max_logits}
    return results | {f"d{name}": grad for name, grad in zip(inputs, grads, strict=True)}


def assert_right(result: dict[str, Tensor], plain: dict[str, Tensor], truth: dict[str, Tensor]) -> None:
    """Finite and infinite where the truth is; elsewhere at most twice plain torch's error, and a rounding of fp32."""
    for name, expected in truth.items():
        value, yardstick = result[name].double(), plain[name].double()
        finite = expected.isfinite()
        assert torch.equal(value[~finite], expected[~finite]), f"{name}: wrong where the truth is not finite"
        if not finite.any():
            continue
        error = (value - expected)[finite].abs().max().item()
        allowed = 2 * (yardstick - expected)[finite].abs().max().item()
        allowed += 1e-6 * max(1.0, expected[finite].abs().max().item())
        assert error <= allowed, f"{name}: error {error:.2e}, allowed {allowed:.2e}"


def check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    grad_out: Tensor,
    *,
    backend: str,
    causal: bool = False,
    scale: float | None = None,
    window: tuple[int, int] | None = None,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    cu_seqlens: tuple[Tensor, Tensor] | None = None,
    mask: Tensor | None = None,
    **options,
) -> dict[str, Tensor]:
    """Checks the outputs and gradients of flash_attention, or of flash_attention_varlen given cu_seqlens of queries and
    keys, and returns them. A mask, which only scaled_dot_product_attention has, goes to the operator."""
    grad_lse = torch.randn(*q.shape[:-3], q.shape[-2], q.shape[-3], device=q.device)
    lengths: tuple = ()
    if cu_seqlens is not None:
        lengths = (*cu_seqlens, *(int(cu.diff().max()) if len(cu) > 1 else 0 for cu in cu_seqlens))
    attention = flash_attention if cu_seqlens is None else flash_attention_varlen
    torch.manual_seed(7)
    seed = draw_seed(q.device) if options.get("dropout_p") else None
    left, right = (None if side == -1 else side for side in window or (-1, -1))
    slopes = alibi_slopes
    if slopes is not None:
        slopes = slopes.expand(q.shape[0] if cu_seqlens is None else len(cu_seqlens[0]) - 1, q.shape[-2])

    def all_options(sinks: Tensor | None, mask: Tensor | None) -> Options:
        factor = q.shape[-1] ** -0.5 if scale is None else scale
        right_or_causal = 0 if causal else right
        return Options(factor, left, right_or_causal, sinks=sinks, slopes=slopes, mask=mask, seed=seed, **options)

    def ours(
        q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = sinks, mask: Tensor | None = mask
    ) -> tuple[Tensor, ...]:
        if mask is not None:
            return attend(q, k, v, all_options(sinks, mask), with_max_logits=True, backend=backend)
        torch.manual_seed(7)
        asked = {"causal": causal, "scale": scale, "window": window, "sinks": sinks, "alibi_slopes": alibi_slopes}
        asked |= {"return_lse": True, "return_max_logits": True, "backend": backend}
        return attention(q, k, v, *lengths, **asked, **options)

    def reference(
        q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = sinks, mask: Tensor | None = mask
    ) -> tuple[Tensor, ...]:
        same = all_options(sinks, mask)
        if cu_seqlens is None:
            return dense(q, k, v, same)
        return forward_packed(dense, q, k, v, same._replace(cu_seqlens_q=cu_seqlens[0], cu_seqlens_k=cu_seqlens[1]))

    inputs = {"q": q, "k": k, "v": v}
    for name, x in (("sinks", sinks), ("mask", mask)):
        # In 16 bits each gradient is a sum of roundings; how exact plain torch is in a few such sums is luck.
        if x is not None and x.is_floating_point() and (q.dtype == torch.float32 or x.numel() >= 32):
            inputs[name] = x
    result = with_gradients(ours, inputs, grad_out, grad_lse)
    assert result["out"].dtype == q.dtype and result["lse"].dtype == torch.float32
    assert not result["max_logits"].requires_grad
    plain = with_gradients(reference, inputs, grad_out, grad_lse)
    truth = with_gradients(reference, {name: x.double() for name, x in inputs.items()}, grad_out, grad_lse)
    assert_right(result, plain, truth)
    return result
