"""SelfAttention: the attention layer of a transformer on `flash_attention`."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .functional import flash_attention

ROTARY_BASE = 10000.0
RMS_EPS = 1e-6


class SelfAttention(nn.Module):
    """Multi-head self-attention: project to queries, keys and values, attend, project back.

    Args:
        embed_dim: width E of the input and the output.
        num_heads: query heads Hq; each is D = embed_dim / num_heads wide.
        num_kv_heads: key and value heads Hkv, a divisor of Hq; Hq by default. Fewer is grouped-query attention.
        causal: a position sees itself and what is before it.
        window: not supported yet.
        qk_norm: divide each query and key head by its root mean square, times a learnable gain (arXiv:2302.05442).
        rotary: rotate queries and keys by their position (arXiv:2104.09864), first half with second half, base 10000.
        bias: give the two projections a bias.
        max_logits: not supported yet.
        device, dtype: of the parameters, as in `torch.nn.Linear`.

    Attributes:
        qkv: the fused projection; its weight's rows are Hq·D of the queries, Hkv·D of the keys and Hkv·D of the values.
        out: the projection back.

    Raises:
        ValueError: sizes that don't divide; an odd head width with `rotary`.

    Example:
        >>> import torch
        >>> from attention import SelfAttention
        >>> layer = SelfAttention(embed_dim=256, num_heads=8, num_kv_heads=2, qk_norm=True)
        >>> layer(torch.randn(2, 100, 256)).shape
        torch.Size([2, 100, 256])
    """

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
        if window is not None or max_logits:
            raise NotImplementedError(f"{'max_logits' if window is None else 'window'} is not supported yet")
        if num_heads < 1 or embed_dim % num_heads:
            raise ValueError(f"embed_dim must be a multiple of num_heads, got {embed_dim} and {num_heads}")
        if num_kv_heads < 1 or num_heads % num_kv_heads:
            raise ValueError(f"num_heads must be a multiple of num_kv_heads, got {num_heads} and {num_kv_heads}")
        if rotary and embed_dim // num_heads % 2:
            raise ValueError(f"rotary needs an even head width, got embed_dim / num_heads = {embed_dim // num_heads}")
        self.embed_dim, self.num_heads, self.num_kv_heads = embed_dim, num_heads, num_kv_heads
        self.head_dim = embed_dim // num_heads
        self.causal, self.rotary = causal, rotary
        rows = (num_heads + 2 * num_kv_heads) * self.head_dim
        self.qkv = nn.Linear(embed_dim, rows, bias=bias, device=device, dtype=dtype)
        self.out = nn.Linear(embed_dim, embed_dim, bias=bias, device=device, dtype=dtype)
        self.q_norm = nn.RMSNorm(self.head_dim, RMS_EPS, device=device, dtype=dtype) if qk_norm else None
        self.k_norm = nn.RMSNorm(self.head_dim, RMS_EPS, device=device, dtype=dtype) if qk_norm else None

    def forward(self, x: Tensor) -> Tensor:
        """x (B, S, E) to (B, S, E)."""
        batch, seqlen, _ = x.shape
        heads = (self.num_heads, self.num_kv_heads, self.num_kv_heads)
        qkv = self.qkv(x).view(batch, seqlen, sum(heads), self.head_dim)
        q, k, v = torch.split(qkv, list(heads), dim=2)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = rms_norm(q, self.q_norm.weight), rms_norm(k, self.k_norm.weight)
        if self.rotary:
            cos, sin = rotary_angles(torch.arange(seqlen, device=x.device), self.head_dim)
            q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        out: Tensor = self.out(self.attend(q, k, v).reshape(batch, seqlen, self.embed_dim))
        return out

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q (B, S, Hq, D), k and v (B, S, Hkv, D) to (B, S, Hq, D). A subclass may put another attention here."""
        out = flash_attention(q, k, v, causal=self.causal)
        assert isinstance(out, Tensor)
        return out

    def qk_weights(self) -> tuple[Tensor, Tensor]:
        """The rows of the fused weight that make queries (Hq, D, E) and keys (Hkv, D, E), as views to write to."""
        rows_q, rows_k = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        query, key, _ = torch.split(self.qkv.weight.detach(), [rows_q, rows_k, rows_k])
        return (
            query.view(self.num_heads, self.head_dim, self.embed_dim),
            key.view(self.num_kv_heads, self.head_dim, self.embed_dim),
        )


def rms_norm(x: Tensor, gain: Tensor) -> Tensor:
    """x over its root mean square along the last dimension, times gain, in x's dtype."""
    return nn.functional.rms_norm(x, x.shape[-1:], gain.to(x.dtype), RMS_EPS)


def rotary_angles(positions: Tensor, head_dim: int) -> tuple[Tensor, Tensor]:
    """cos and sin, float32 (S, 1, head_dim / 2), of position · 10000^(-2i / head_dim).

    Computed where it is used, never stored: no length is too long, and a layer moved to bfloat16 keeps exact angles.
    """
    exponents = torch.arange(0, head_dim, 2, device=positions.device) / head_dim
    angles = positions[:, None, None] * ROTARY_BASE**-exponents
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates the pairs (x_i, x_{i + D/2}) of x (B, S, H, D) in float32; the result has x's dtype."""
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)
