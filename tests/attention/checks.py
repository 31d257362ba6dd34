"""Inputs in every memory layout, and the rule for what is right: an error at most twice plain torch's, by float64."""

import torch
from torch import Tensor

from attention import flash_attention
from attention.reference import dense

NAMES = ("out", "lse", "dq", "dk", "dv")
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


def with_gradients(attend, q: Tensor, k: Tensor, v: Tensor, grad_out: Tensor, grad_lse: Tensor) -> dict[str, Tensor]:
    """out, lse and the three gradients of attend(q, k, v) = (out, lse). An lse of -inf gets no gradient."""
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    out, lse = attend(q, k, v)
    grad_lse = grad_lse.to(lse.dtype).masked_fill(lse == -torch.inf, 0)
    grads = torch.autograd.grad((out, lse), (q, k, v), (grad_out.to(out.dtype), grad_lse))
    return dict(zip(NAMES, (out, lse, *grads), strict=True))


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
    q: Tensor, k: Tensor, v: Tensor, grad_out: Tensor, *, causal: bool, backend: str, scale: float | None = None
) -> dict[str, Tensor]:
    """Checks flash_attention's outputs and gradients on these inputs, and returns them."""
    factor = q.shape[3] ** -0.5 if scale is None else scale
    window_right = 0 if causal else None
    grad_lse = torch.randn(q.shape[0], q.shape[2], q.shape[1], device=q.device)

    def ours(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        return flash_attention(q, k, v, causal=causal, scale=scale, return_lse=True, backend=backend)

    def reference(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return dense(q, k, v, factor, window_right)

    result = with_gradients(ours, q, k, v, grad_out, grad_lse)
    assert result["out"].dtype == q.dtype and result["lse"].dtype == torch.float32
    plain = with_gradients(reference, q, k, v, grad_out, grad_lse)
    truth = with_gradients(reference, q.double(), k.double(), v.double(), grad_out.double(), grad_lse.double())
    assert_right(result, plain, truth)
    return result
