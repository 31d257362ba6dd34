"""SelfAttention: the attention layer of a transformer on `flash_attention`."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from .cache import KVCache
from .functional import MAX_HEAD_DIM, autocast_dtype, flash_attention, is_window
from .rotary import rotary_angles, rotate

RMS_EPS = 1e-6


class SelfAttention(nn.Module):
    """Multi-head self-attention: project to queries, keys and values, attend, project back.

    Args:
        embed_dim: width E of the input and the output.
        num_heads: query heads Hq; each is D = embed_dim / num_heads wide, at most 256.
        num_kv_heads: key and value heads Hkv, a divisor of Hq; Hq by default. Fewer is grouped-query attention.
        causal: a position sees itself and what is before it.
        window: (left, right): a position sees that many positions before and after it; -1 is no limit.
        qk_norm: divide each query and key head by its root mean square, times a learnable gain (arXiv:2302.05442).
        rotary: rotate queries and keys by their position (arXiv:2104.09864), first half with second half, base 10000.
        bias: give the two projections a bias.
        max_logits: keep each head's largest logit, for `muon.QKClip`.
        device, dtype: of the parameters, as in `torch.nn.Linear`.

    Attributes:
        qkv: the fused projection; its weight's rows are Hq·D of the queries, Hkv·D of the keys and Hkv·D of the values.
        out: the projection back.
        max_logits: float32 (Hq,), only if asked for: the largest scaled logit that a visible pair reached in the
            forward passes since `reset_max_logits` (several micro-batches make one step), -inf before the first.
            Moving or casting the layer resets it. Tokens that attend to a cache don't count.

    Raises:
        ValueError: sizes that don't divide; a head width above 256, or an odd one with `rotary`; a window below -1.

    Example:
        >>> import torch
        >>> from attention import SelfAttention
        >>> layer = SelfAttention(embed_dim=256, num_heads=8, num_kv_heads=2, qk_norm=True)
        >>> layer(torch.randn(2, 100, 256)).shape
        torch.Size([2, 100, 256])

        Generation reads a prompt once, and then a token at a time:

        >>> cache = layer.new_cache(batch_size=2, max_length=200)
        >>> with torch.no_grad():
        ...     out = layer(torch.randn(2, 100, 256), cache=cache)
        ...     out = layer(torch.randn(2, 1, 256), cache=cache)
        >>> cache.lengths
        tensor([101, 101], dtype=torch.int32)

    Source: Vaswani et al., "Attention Is All You Need", https://arxiv.org/abs/1706.03762; grouped-query heads: Ainslie
    et al., "GQA", https://arxiv.org/abs/2305.13245.
    """

    max_logits: Tensor

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        num_kv_heads: int | None = None,
        *,
        causal: bool = True,
        window: tuple[int, int] | None = None,
        qk_norm: bool = False,
        rotary: bool = True,
        bias: bool = False,
        max_logits: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        if num_heads < 1 or embed_dim % num_heads:
            raise ValueError(f"embed_dim must be a multiple of num_heads, got {embed_dim} and {num_heads}")
        if num_kv_heads < 1 or num_heads % num_kv_heads:
            raise ValueError(f"num_heads must be a multiple of num_kv_heads, got {num_heads} and {num_kv_heads}")
        head_dim = embed_dim // num_heads
        if not 1 <= head_dim <= MAX_HEAD_DIM:
            raise ValueError(
                f"the head width embed_dim / num_heads must be from 1 to {MAX_HEAD_DIM}, "
                f"got {embed_dim} / {num_heads} = {head_dim}"
            )
        if rotary and head_dim % 2:
            raise ValueError(f"rotary needs an even head width, got embed_dim / num_heads = {head_dim}")
        if window is not None and not is_window(window):
            raise ValueError(f"window must be two numbers of positions from -1 (no limit) up, got {window}")
        self.embed_dim, self.num_heads, self.num_kv_heads = embed_dim, num_heads, num_kv_heads
        self.head_dim = head_dim
        self.causal, self.window, self.rotary, self.qk_norm = causal, window, rotary, qk_norm
        rows = (num_heads + 2 * num_kv_heads) * self.head_dim
        self.qkv = nn.Linear(embed_dim, rows, bias=bias, device=device, dtype=dtype)
        self.out = nn.Linear(embed_dim, embed_dim, bias=bias, device=device, dtype=dtype)
        self.q_norm = nn.RMSNorm(self.head_dim, RMS_EPS, device=device, dtype=dtype) if qk_norm else None
        self.k_norm = nn.RMSNorm(self.head_dim, RMS_EPS, device=device, dtype=dtype) if qk_norm else None
        self.keeps_max_logits = max_logits
        if max_logits:
            start = torch.full((num_heads,), -torch.inf, dtype=torch.float32, device=device)
            self.register_buffer("max_logits", start, persistent=False)

    def forward(self, x: Tensor, cache: KVCache | None = None) -> Tensor:
        """x (B, S, E) to (B, S, E). With a cache, x are the tokens after those that the cache has; they are added."""
        batch, seqlen, _ = x.shape
        heads = (self.num_heads, self.num_kv_heads, self.num_kv_heads)
        qkv = self.qkv(x).view(batch, seqlen, sum(heads), self.head_dim)
        q, k, v = torch.split(qkv, list(heads), dim=2)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = rms_norm(q, self.q_norm.weight), rms_norm(k, self.k_norm.weight)
        if self.rotary:
            positions = torch.arange(seqlen, device=x.device) if cache is None else cache.positions(batch, seqlen)
            cos, sin = rotary_angles(positions, self.head_dim)
            q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        out: Tensor = self.out(self._attend(q, k, v, cache).reshape(batch, seqlen, self.embed_dim))
        return out

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, cache: KVCache | None) -> Tensor:
        if cache is None:
            return self.attend(q, k, v)
        is_empty = cache.longest == 0
        cache.append(k, v)
        if is_empty:  # a prompt, which needs nothing from the cache
            return self.attend(q, k, v)
        window_left = self.window[0] if self.window is not None and self.window[0] >= 0 else None
        return cache.attend(q, self.head_dim**-0.5, window_left)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q (B, S, Hq, D), k and v (B, S, Hkv, D) to (B, S, Hq, D). A subclass may put another attention here; if
        `keeps_max_logits`, it hands its heads' largest logits to `update_max_logits`."""
        if not self.keeps_max_logits:
            out = flash_attention(q, k, v, causal=self.causal, window=self.window)
        else:
            out, max_logits = flash_attention(q, k, v, causal=self.causal, window=self.window, return_max_logits=True)
            self.update_max_logits(max_logits)
        assert isinstance(out, Tensor)
        return out

    def update_max_logits(self, max_logits: Tensor) -> None:
        """Takes what a forward pass found, (Hq,), into `max_logits`: in place, so that a CUDA graph finds it again."""
        self.max_logits.copy_(torch.maximum(self.max_logits, max_logits.detach()))

    def reset_max_logits(self) -> None:
        """Starts `max_logits` anew."""
        self.max_logits.fill_(-torch.inf)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> SelfAttention:
        """torch moves and casts a module by this: the logits stay float32, and `to_empty` leaves no garbage there."""
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if self.keeps_max_logits:
            self.max_logits = torch.full_like(self.max_logits, -torch.inf, dtype=torch.float32)
        return self

    def new_cache(self, batch_size: int, max_length: int) -> KVCache:
        """An empty cache for `batch_size` sequences of up to `max_length` tokens, in the dtype of keys and values.

        Raises a ValueError unless the layer is causal: otherwise a token would change what those before it have seen.
        """
        if not self.causal:
            raise ValueError("a layer with causal=False can't use a cache: every token sees the ones after it")
        weight = self.qkv.weight
        dtype = autocast_dtype(weight.device) or weight.dtype
        return KVCache(batch_size, max_length, self.num_kv_heads, self.head_dim, weight.device, dtype)

    def qk_weights(self) -> tuple[Tensor, Tensor]:
        """The rows of the fused weight that make queries (Hq, D, E) and keys (Hkv, D, E), as views to write to."""
        query, key = self._rows_of_queries_and_keys(self.qkv.weight)
        return query.unflatten(0, (self.num_heads, -1)), key.unflatten(0, (self.num_kv_heads, -1))

    def qk_biases(self) -> tuple[Tensor, Tensor] | None:
        """The same of the bias, (Hq, D) and (Hkv, D), if there is one."""
        if self.qkv.bias is None:
            return None
        query, key = self._rows_of_queries_and_keys(self.qkv.bias)
        return query.unflatten(0, (self.num_heads, -1)), key.unflatten(0, (self.num_kv_heads, -1))

    def _rows_of_queries_and_keys(self, fused: Tensor) -> tuple[Tensor, ...]:
        rows_q, rows_k = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        return torch.split(fused.detach(), [rows_q, rows_k, rows_k])[:2]


def rms_norm(x: Tensor, gain: Tensor) -> Tensor:
    """x over its root mean square along the last dimension, times gain, in x's dtype."""
    return nn.functional.rms_norm(x, x.shape[-1:], gain.to(x.dtype), RMS_EPS)
