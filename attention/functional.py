"""The public functions: they validate, document, pick a backend and call one operator."""

from __future__ import annotations

import importlib.util
import os
from typing import Literal

import torch
from torch import Tensor
from torch.autograd import forward_ad

from . import ops  # noqa: F401  (registers the operators)

Backend = Literal["auto", "triton", "hopper", "torch"]

BACKENDS = ("auto", "triton", "hopper", "torch")
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
MAX_HEAD_DIM = 256
HAS_TRITON = importlib.util.find_spec("triton") is not None


def flash_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    scale: float | None = None,
    window: tuple[int, int] | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    dropout_p: float = 0.0,
    return_lse: bool = False,
    return_max_logits: bool = False,
    deterministic: bool = False,
    backend: Backend = "auto",
) -> Tensor | tuple[Tensor, ...]:
    """Exact attention in memory linear in the length: softmax(scale q kᵀ + mask) v, with gradients.

    Query i sees key j when j <= i + Sk - Sq if `causal` (the last query sees every key), always otherwise. A query that
    sees no key gives 0, an lse of -inf and zero gradients. Head h of q attends with head h // (Hq / Hkv) of k and v.

    Args:
        q: (B, Sq, Hq, D) in float16, bfloat16 or float32, with any strides; D is at most 256.
        k: (B, Sk, Hkv, D) in q's dtype; Hq is a multiple of Hkv.
        v: (B, Sk, Hkv, Dv) in q's dtype; Dv is at most 256 and need not equal D.
        causal: hide the keys behind each query, aligned at the bottom right.
        scale: factor on the logits; any float, 1 / sqrt(D) by default.
        window, softcap, sinks, alibi_slopes, dropout_p, return_max_logits: not supported yet.
        return_lse: also return log Σ_j exp(scale q·k_j) as float32 (B, Hq, Sq), differentiable.
        deterministic: ask for bitwise repeatable gradients. They always are so far.
        backend: "triton" runs Triton's kernels, "torch" the same tiles in plain torch, "auto" Triton on a GPU that has
            it and torch elsewhere.

    Returns:
        out (B, Sq, Hq, Dv) in q's dtype (under autocast, in the autocast dtype), or (out, lse).

    Raises:
        TypeError, ValueError: naming the argument, its value and what is allowed.
        NotImplementedError: naming an option that isn't supported yet; also when a second derivative is asked for.

    Example:
        >>> import torch
        >>> from attention import flash_attention
        >>> q = torch.randn(2, 128, 8, 64, requires_grad=True)
        >>> k, v = torch.randn(2, 2, 128, 2, 64)
        >>> flash_attention(q, k, v, causal=True).sum().backward()

    Source: FlashAttention-2 (arXiv:2307.08691, https://github.com/Dao-AILab/flash-attention).
    """
    _refuse_unsupported(
        window=window is not None,
        softcap=softcap is not None,
        sinks=sinks is not None,
        alibi_slopes=alibi_slopes is not None,
        dropout_p=dropout_p != 0.0,
        return_max_logits=return_max_logits,
    )
    _refuse_forward_mode(q, k, v)
    q, k, v = _autocast(q, k, v)
    _check_tensors(q, k, v)
    if scale is None:
        scale = q.shape[3] ** -0.5
    out, lse = torch.ops.attention.forward(q, k, v, float(scale), 0 if causal else None, _pick_backend(backend, q))
    return (out, lse) if return_lse else out


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """`torch.nn.functional.scaled_dot_product_attention` on this package's kernels: softmax(scale q kᵀ + mask) v.

    Query i sees key j when j <= i if `is_causal`: the mask is aligned at the top left, unlike `flash_attention`'s.

    Args:
        query: (B, Hq, Sq, D) in float16, bfloat16 or float32, with any strides.
        key: (B, Hkv, Sk, D); Hkv equals Hq, or divides it if `enable_gqa`.
        value: (B, Hkv, Sk, Dv).
        attn_mask, dropout_p: not supported yet.
        is_causal: hide the keys behind each query.
        scale: factor on the logits, 1 / sqrt(D) by default.
        enable_gqa: let several heads of the query share one of key and value.

    Returns:
        (B, Hq, Sq, Dv), in memory as (B, Sq, Hq, Dv).

    Raises:
        ValueError, TypeError, NotImplementedError: as `flash_attention`; also for a mask with `is_causal=True`.

    Example:
        >>> import torch
        >>> from attention import scaled_dot_product_attention
        >>> q, k, v = torch.randn(3, 2, 8, 128, 64)
        >>> scaled_dot_product_attention(q, k, v, is_causal=True).shape
        torch.Size([2, 8, 128, 64])

    Source: https://docs.pytorch.org/docs/stable/generated/torch.nn.functional.scaled_dot_product_attention.html
    """
    if attn_mask is not None and is_causal:
        raise ValueError("attn_mask is given and is_causal=True: give one or the other")
    _refuse_unsupported(attn_mask=attn_mask is not None, dropout_p=dropout_p != 0.0)
    _refuse_forward_mode(query, key, value)
    query, key, value = _autocast(query, key, value)
    q, k, v = (_swap_heads(x, name) for x, name in ((query, "query"), (key, "key"), (value, "value")))
    _check_tensors(q, k, v, names=("query", "key", "value"))
    if not enable_gqa and q.shape[2] != k.shape[2]:
        raise ValueError(
            f"query has {q.shape[2]} heads and key {k.shape[2]}: they must be equal unless enable_gqa=True"
        )
    if scale is None:
        scale = q.shape[3] ** -0.5
    window_right = q.shape[1] - k.shape[1] if is_causal else None  # counted from the bottom-right diagonal
    out, _ = torch.ops.attention.forward(q, k, v, float(scale), window_right, _pick_backend("auto", q))
    result: Tensor = out.transpose(1, 2)
    return result


def _refuse_unsupported(**given: bool) -> None:
    for name, is_given in given.items():
        if is_given:
            raise NotImplementedError(f"{name} is not supported yet")


def _refuse_forward_mode(*tensors: Tensor) -> None:
    """torch would leave an operator's missing forward-mode derivative out, as if it were zero."""
    if torch.compiler.is_compiling():
        return
    if any(forward_ad.unpack_dual(tensor).tangent is not None for tensor in tensors):
        raise NotImplementedError("flash_attention has no forward-mode derivative (jvp): use reverse mode (backward)")


def _autocast(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    device = q.device.type
    if not torch.is_autocast_enabled(device):
        return q, k, v
    dtype = torch.get_autocast_dtype(device)
    return q.to(dtype), k.to(dtype), v.to(dtype)


def _swap_heads(x: Tensor, name: str) -> Tensor:
    if x.dim() != 4:
        raise ValueError(f"{name} must have the 4 dimensions (B, H, S, D), got shape {tuple(x.shape)}")
    return x.transpose(1, 2)


def _check_tensors(q: Tensor, k: Tensor, v: Tensor, names: tuple[str, str, str] = ("q", "k", "v")) -> None:
    """Raises unless q (B, Sq, Hq, D), k (B, Sk, Hkv, D) and v (B, Sk, Hkv, Dv) go together."""
    name_q, name_k, name_v = names
    for name, x in zip(names, (q, k, v), strict=True):
        if x.dim() != 4:
            raise ValueError(f"{name} must have the 4 dimensions (B, S, H, D), got shape {tuple(x.shape)}")
        if x.dtype not in DTYPES:
            raise TypeError(f"{name} must be float16, bfloat16 or float32, got {x.dtype}")
        if x.dtype != q.dtype:
            raise TypeError(f"{name} is {x.dtype} but {name_q} is {q.dtype}: they must be equal")
        if x.device != q.device:
            raise ValueError(f"{name} is on {x.device} but {name_q} is on {q.device}: they must be on one device")
        if x.shape[0] != q.shape[0]:
            raise ValueError(f"{name} has batch size {x.shape[0]} but {name_q} has {q.shape[0]}: they must be equal")
        if not 1 <= x.shape[3] <= MAX_HEAD_DIM:
            raise ValueError(f"{name}'s head dimension must be from 1 to {MAX_HEAD_DIM}, got {x.shape[3]}")
    if k.shape[1] != v.shape[1]:
        raise ValueError(f"{name_k} has length {k.shape[1]} but {name_v} has {v.shape[1]}: they must be equal")
    if k.shape[2] != v.shape[2]:
        raise ValueError(f"{name_k} has {k.shape[2]} heads but {name_v} has {v.shape[2]}: they must be equal")
    if k.shape[3] != q.shape[3]:
        raise ValueError(
            f"{name_k}'s head dimension is {k.shape[3]} but {name_q}'s is {q.shape[3]}: they must be equal"
        )
    if k.shape[2] < 1 or q.shape[2] % k.shape[2]:
        raise ValueError(f"{name_q}'s {q.shape[2]} heads must be a multiple of {name_k}'s {k.shape[2]}")


def _pick_backend(backend: str, q: Tensor) -> str:
    """The backend that runs: "triton" or "torch"."""
    if backend not in BACKENDS:
        raise ValueError(f"backend must be one of {', '.join(BACKENDS)}, got {backend!r}")
    if backend == "hopper":
        raise NotImplementedError("backend='hopper' is not written yet: use 'triton', which runs on Hopper too")
    if backend == "auto":
        return "triton" if q.device.type == "cuda" and HAS_TRITON else "torch"
    if backend == "triton" and not HAS_TRITON:
        raise ValueError("backend='triton' needs the package triton, which is not installed: use 'auto' or 'torch'")
    if backend == "triton" and q.device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        raise ValueError(f"backend='triton' needs tensors on a GPU, got {q.device}: use 'auto' or 'torch'")
    return backend
