"""The public functions: they validate, document, pick a backend and call one operator."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.autograd import forward_ad

from . import ops
from .backends import Backend, pick_backend
from .philox import draw_seed
from .reference import Options

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
MAX_HEAD_DIM = 256


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
    Options apply in this order: softcap, ALiBi, masks, sinks, dropout.

    Args:
        q: (B, Sq, Hq, D) in float16, bfloat16 or float32, with any strides; D is at most 256.
        k: (B, Sk, Hkv, D) in q's dtype; Hq is a multiple of Hkv.
        v: (B, Sk, Hkv, Dv) in q's dtype; Dv is at most 256 and need not equal D.
        causal: hide the keys behind each query, aligned at the bottom right.
        scale: factor on the logits; any float, 1 / sqrt(D) by default.
        window: (left, right): query i sees keys from i + Sk - Sq - left to i + Sk - Sq + right; -1 is no bound.
        softcap: replace each logit s by softcap · tanh(s / softcap); above 0.
        sinks: (Hq,), a logit for each head that takes its share of the softmax and has no value; differentiable.
        alibi_slopes: (Hq,) or (B, Hq), float32: slope · |i + Sk - Sq - j| is subtracted from the logit. No gradient.
        dropout_p: drop each weight with this probability in [0, 1) and divide the others by 1 - dropout_p. The seed
            comes from torch's generator of q's device; which weights go depends on it, the batch, the head, i and j.
        return_lse: also return log Σ_j exp(logit_j), the sink counted, as float32 (B, Hq, Sq), differentiable.
        return_max_logits: also return each head's largest scale q·k that a query sees over batch and positions, before
            the softcap, as float32 (Hq,), without gradient; -inf where no query sees a key.
        deterministic: ask for gradients that are the same from run to run, to the bit, as also
            torch.use_deterministic_algorithms does. They always are except from Hopper's kernels, which add up the
            queries' gradients in no fixed order.
        backend: "triton" runs the portable Triton kernels, "hopper" the ones for Hopper GPUs (16 bits an element; not
            alibi_slopes, dropout, masks, nor max_logits under a softcap), "torch" the same tiles in plain torch; "auto"
            the fastest of them that can run this.

    Returns:
        out (B, Sq, Hq, Dv) in q's dtype (under autocast, in the autocast dtype), or a tuple of out and what was asked
        for, in the order lse, max_logits.

    Raises:
        TypeError, ValueError: naming the argument, its value and what is allowed.
        NotImplementedError: when a second or a forward-mode derivative is asked for.

    Example:
        >>> import torch
        >>> from attention import flash_attention
        >>> q = torch.randn(2, 128, 8, 64, requires_grad=True)
        >>> k, v = torch.randn(2, 2, 128, 2, 64)
        >>> flash_attention(q, k, v, causal=True, window=(31, 0)).sum().backward()

    Source: FlashAttention-2 (arXiv:2307.08691, https://github.com/Dao-AILab/flash-attention); ALiBi (arXiv:2108.12409);
    softcap as in Gemma 2 (arXiv:2408.00118); sinks as in gpt-oss (arXiv:2508.10925).
    """
    _check_types({"q": q, "k": k, "v": v}, {"sinks": sinks, "alibi_slopes": alibi_slopes})
    _refuse_forward_mode(q, k, v, sinks)
    q, k, v = _autocast(q, k, v)
    _check_tensors(q, k, v)
    options = _options(q, causal, scale, window, softcap, sinks, alibi_slopes, dropout_p, q.shape[0])
    return _attend(q, k, v, options, deterministic, return_lse, return_max_logits, backend)


def flash_attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
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
    """`flash_attention` of B sequences packed one behind the other, each attending to itself alone.

    Sequence b's queries are rows cu_seqlens_q[b] to cu_seqlens_q[b + 1] - 1, its keys those of cu_seqlens_k; `causal`
    and `window` line up at its own bottom right. Sequences may be empty. Rows past the last give 0 and zero gradients.

    Args:
        q: (total_q, Hq, D) in float16, bfloat16 or float32, with any strides; D is at most 256.
        k: (total_k, Hkv, D) in q's dtype; Hq is a multiple of Hkv.
        v: (total_k, Hkv, Dv) in q's dtype.
        cu_seqlens_q, cu_seqlens_k: (B + 1,), int32 on q's device: 0 and the running sums of the lengths. On a GPU the
            values are not checked, which would make the host wait for the device.
        max_seqlen_q, max_seqlen_k: no sequence may be longer.
        alibi_slopes: (Hq,) or (B, Hq).
        causal, scale, window, softcap, sinks, dropout_p, return_lse, return_max_logits, deterministic, backend: as in
            `flash_attention`.

    Returns:
        out (total_q, Hq, Dv), or a tuple of out and what was asked for: lse (Hq, total_q), max_logits (Hq,).

    Raises:
        TypeError, ValueError, NotImplementedError: as `flash_attention`.

    Example:
        >>> import torch
        >>> from attention import flash_attention_varlen
        >>> q, k, v = torch.randn(3, 100, 8, 64)
        >>> cu_seqlens = torch.tensor([0, 30, 100], dtype=torch.int32)
        >>> flash_attention_varlen(q, k, v, cu_seqlens, cu_seqlens, 70, 70, causal=True).shape
        torch.Size([100, 8, 64])

    Source: FlashAttention's flash_attn_varlen_func (https://github.com/Dao-AILab/flash-attention).
    """
    needed = {"q": q, "k": k, "v": v, "cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k}
    _check_types(needed, {"sinks": sinks, "alibi_slopes": alibi_slopes})
    _refuse_forward_mode(q, k, v, sinks)
    q, k, v = _autocast(q, k, v)
    _check_tensors(q, k, v, packed=True)
    for name, x in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
        if x.dtype != torch.int32:
            raise TypeError(f"{name} must be int32, got {x.dtype}")
        if x.dim() != 1 or x.shape[0] < 1 or x.shape != cu_seqlens_q.shape:
            alike = f", as cu_seqlens_q {tuple(cu_seqlens_q.shape)}" if x is not cu_seqlens_q else ""
            raise ValueError(f"{name} must have shape (B + 1,){alike}, got {tuple(x.shape)}")
        _check_device(name, x, q, "q")
    for name, length in (("max_seqlen_q", max_seqlen_q), ("max_seqlen_k", max_seqlen_k)):
        if not isinstance(length, (int, torch.SymInt)):
            raise TypeError(f"{name} must be an int, got {length!r}")
        if length < 0:
            raise ValueError(f"{name} must be at least 0, got {length}")
    num_sequences = cu_seqlens_q.shape[0] - 1
    options = _options(q, causal, scale, window, softcap, sinks, alibi_slopes, dropout_p, num_sequences)._replace(
        cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k
    )
    return _attend(q, k, v, options, deterministic, return_lse, return_max_logits, backend)


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
        attn_mask: broadcastable to (B, Hq, Sq, Sk), with any strides. bool: True is seen; float16, bfloat16 or float32:
            added to the logits, -inf hides; differentiable.
        dropout_p: drop each weight with this probability in [0, 1), and divide the others by 1 - dropout_p.
        is_causal: hide the keys behind each query.
        scale: factor on the logits, 1 / sqrt(D) by default.
        enable_gqa: let several heads of the query share one of key and value.

    Returns:
        (B, Hq, Sq, Dv), in memory as (B, Sq, Hq, Dv). A query that sees no key gives 0.

    Raises:
        ValueError, TypeError, NotImplementedError: as `flash_attention`; also for a mask with `is_causal=True`.

    Example:
        >>> import torch
        >>> from attention import scaled_dot_product_attention
        >>> q, k, v = torch.randn(3, 2, 8, 128, 64)
        >>> scaled_dot_product_attention(q, k, v, torch.rand(128, 128) < 0.5).shape
        torch.Size([2, 8, 128, 64])

    Source: https://docs.pytorch.org/docs/stable/generated/torch.nn.functional.scaled_dot_product_attention.html
    """
    if attn_mask is not None and is_causal:
        raise ValueError("attn_mask is given and is_causal=True: give one or the other")
    _check_types({"query": query, "key": key, "value": value}, {"attn_mask": attn_mask})
    _refuse_forward_mode(query, key, value, attn_mask)
    query, key, value = _autocast(query, key, value)
    q, k, v = (_swap_heads(x, name) for x, name in ((query, "query"), (key, "key"), (value, "value")))
    _check_tensors(q, k, v, names=("query", "key", "value"))
    if not enable_gqa and q.shape[2] != k.shape[2]:
        raise ValueError(
            f"query has {q.shape[2]} heads and key {k.shape[2]}: they must be equal unless enable_gqa=True"
        )
    options = _options(q, False, scale, None, None, None, None, dropout_p, q.shape[0])._replace(
        window_right=q.shape[1] - k.shape[1] if is_causal else None,  # counted from the bottom-right diagonal
        mask=None if attn_mask is None else _check_mask(attn_mask, q, k),
    )
    out = _attend(q, k, v, options, False, False, False, "auto")
    assert isinstance(out, Tensor)
    return out.transpose(1, 2)


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    options: Options,
    deterministic: bool,
    return_lse: bool,
    return_max_logits: bool,
    backend: str,
) -> Tensor | tuple[Tensor, ...]:
    options = options._replace(deterministic=deterministic or torch.are_deterministic_algorithms_enabled())
    backend = pick_backend(backend, q, options, return_max_logits)
    out, lse, max_logits = ops.attend(q, k, v, options, with_max_logits=return_max_logits, backend=backend)
    asked_for = (lse,) * return_lse + (max_logits,) * return_max_logits
    return (out, *asked_for) if asked_for else out


def _options(
    q: Tensor,
    causal: bool,
    scale: float | None,
    window: Sequence[int] | None,
    softcap: float | None,
    sinks: Tensor | None,
    alibi_slopes: Tensor | None,
    dropout_p: float,
    batch: int,
) -> Options:
    """Checks what `flash_attention` was asked for and draws the seed of the dropout."""
    heads = q.shape[-2]
    left, right = _check_window(window)
    if causal:
        right = 0
    if softcap is not None and not 0 < softcap < float("inf"):
        raise ValueError(f"softcap must be above 0 and finite, got {softcap}")
    if not 0 <= dropout_p < 1:
        raise ValueError(f"dropout_p must be in [0, 1), got {dropout_p}")
    if sinks is not None:
        _check_per_head("sinks", sinks, q, [(heads,)])
        sinks = sinks.float()
    if alibi_slopes is not None:
        _check_per_head("alibi_slopes", alibi_slopes, q, [(heads,), (batch, heads)])
        if alibi_slopes.requires_grad and torch.is_grad_enabled():
            raise ValueError("alibi_slopes requires a gradient, but has none: pass alibi_slopes.detach()")
        alibi_slopes = alibi_slopes.float().expand(batch, heads)
    return Options(
        scale=float(q.shape[-1] ** -0.5 if scale is None else scale),
        window_left=left,
        window_right=right,
        softcap=None if softcap is None else float(softcap),
        dropout_p=float(dropout_p),
        sinks=sinks,
        slopes=alibi_slopes,
        seed=draw_seed(q.device) if dropout_p > 0 else None,
    )


def _check_window(window: Sequence[int] | None) -> tuple[int | None, int | None]:
    """(left, right) with None for no bound."""
    if window is None:
        return None, None
    if not is_window(window):
        raise ValueError(f"window must be (left, right), each at least 0, or -1 for no bound, got {window}")
    left, right = (None if side == -1 else min(side, 2**30) for side in window)  # positions are 32-bit
    return left, right


def is_window(window: object) -> bool:
    """Whether it is two whole numbers from -1 up; torch.export has symbols for them."""
    numbers = (int, torch.SymInt)
    return (
        isinstance(window, (tuple, list))
        and len(window) == 2
        and all(isinstance(side, numbers) and side >= -1 for side in window)
    )


def _check_per_head(name: str, x: Tensor, q: Tensor, shapes: list[tuple[int, ...]]) -> None:
    if not x.is_floating_point():
        raise TypeError(f"{name} must be a floating-point tensor, got {x.dtype}")
    if tuple(x.shape) not in shapes:
        raise ValueError(f"{name} must have shape {' or '.join(map(str, shapes))}, got {tuple(x.shape)}")
    _check_device(name, x, q, "q")


def _check_mask(mask: Tensor, q: Tensor, k: Tensor) -> Tensor:
    """The mask with 4 dimensions, each of full size or 1."""
    if mask.dtype not in (torch.bool, *DTYPES):
        raise TypeError(f"attn_mask must be bool, float16, bfloat16 or float32, got {mask.dtype}")
    _check_device("attn_mask", mask, q, "query")
    full = (q.shape[0], q.shape[2], q.shape[1], k.shape[1])
    sizes = (1,) * (4 - mask.dim()) + tuple(mask.shape)
    if len(sizes) != 4 or any(size not in (1, most) for size, most in zip(sizes, full, strict=True)):
        raise ValueError(f"attn_mask must be broadcastable to {full}, got shape {tuple(mask.shape)}")
    return mask.reshape(sizes) if mask.dim() < 4 else mask


def _check_types(needed: Mapping[str, object], optional: Mapping[str, object]) -> None:
    """Raises unless all are tensors; those that are optional may be None."""
    for name, x in (*needed.items(), *optional.items()):
        if not isinstance(x, Tensor) and not (x is None and name in optional):
            raise TypeError(f"{name} must be a tensor, got {type(x).__name__}")


def _refuse_forward_mode(*tensors: Tensor | None) -> None:
    """torch would leave an operator's missing forward-mode derivative out, as if it were zero."""
    if torch.compiler.is_compiling():
        return
    if any(x is not None and forward_ad.unpack_dual(x).tangent is not None for x in tensors):
        raise NotImplementedError("flash_attention has no forward-mode derivative (jvp): use reverse mode (backward)")


def _autocast(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    dtype = autocast_dtype(q.device)
    return (q, k, v) if dtype is None else (q.to(dtype), k.to(dtype), v.to(dtype))


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """What autocast computes in, if it is on. A meta device doesn't know of it.

    torch's own question whether a device does, `is_autocast_available`, can't be compiled before torch 2.12.
    """
    if device.type == "meta" or not torch.is_autocast_enabled(device.type):
        return None
    return torch.get_autocast_dtype(device.type)


def _swap_heads(x: Tensor, name: str) -> Tensor:
    if x.dim() != 4:
        raise ValueError(f"{name} must have the 4 dimensions (B, H, S, D), got shape {tuple(x.shape)}")
    return x.transpose(1, 2)


def _check_tensors(
    q: Tensor, k: Tensor, v: Tensor, names: tuple[str, str, str] = ("q", "k", "v"), packed: bool = False
) -> None:
    """Raises unless q (B, Sq, Hq, D), k (B, Sk, Hkv, D) and v (B, Sk, Hkv, Dv) go together; `packed` has no B."""
    name_q, name_k, name_v = names
    rank, layout = (3, "(total, H, D)") if packed else (4, "(B, S, H, D)")
    for name, x in zip(names, (q, k, v), strict=True):
        if x.dim() != rank:
            raise ValueError(f"{name} must have the {rank} dimensions {layout}, got shape {tuple(x.shape)}")
        if x.dtype not in DTYPES:
            raise TypeError(f"{name} must be float16, bfloat16 or float32, got {x.dtype}")
        if x.dtype != q.dtype:
            raise TypeError(f"{name} is {x.dtype} but {name_q} is {q.dtype}: they must be equal")
        _check_device(name, x, q, name_q)
        if not packed and x.shape[0] != q.shape[0]:
            raise ValueError(f"{name} has batch size {x.shape[0]} but {name_q} has {q.shape[0]}: they must be equal")
        if not 1 <= x.shape[-1] <= MAX_HEAD_DIM:
            raise ValueError(f"{name}'s head dimension must be from 1 to {MAX_HEAD_DIM}, got {x.shape[-1]}")
    if k.shape[-3] != v.shape[-3]:
        raise ValueError(f"{name_k} has length {k.shape[-3]} but {name_v} has {v.shape[-3]}: they must be equal")
    heads_q, heads_k = q.shape[-2], k.shape[-2]
    if heads_k != v.shape[-2]:
        raise ValueError(f"{name_k} has {heads_k} heads but {name_v} has {v.shape[-2]}: they must be equal")
    if k.shape[-1] != q.shape[-1]:
        raise ValueError(
            f"{name_k}'s head dimension is {k.shape[-1]} but {name_q}'s is {q.shape[-1]}: they must be equal"
        )
    if heads_k < 1 or heads_q % heads_k:
        raise ValueError(f"{name_q}'s {heads_q} heads must be a multiple of {name_k}'s {heads_k}")


def _check_device(name: str, x: Tensor, q: Tensor, name_q: str) -> None:
    if x.device != q.device:
        raise ValueError(f"{name} is on {x.device} but {name_q} is on {q.device}: they must be on one device")
