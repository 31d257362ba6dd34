"""GPT in the spirit of nanoGPT (https://github.com/karpathy/nanoGPT): rotary positions, RMSNorm, squared ReLU.

Letters in shapes: B batch, S sequence, H heads, D head width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor, nn

from attention import SelfAttention, flash_attention
from attention.cache import KVCache


class Attention(SelfAttention):
    """`attention.SelfAttention` on our FlashAttention or on torch's own ("sdpa"), with dropout of the weights.

    Logits for QK-clip count in training only: validation must not change the next step.
    """

    def __init__(self, width: int, heads: int, kernel: str, dropout: float = 0.0, **options: bool) -> None:
        if kernel == "sdpa" and options.get("max_logits"):
            raise ValueError("torch's attention doesn't tell its largest logits: QK-clip needs attention='flash'")
        super().__init__(width, heads, **options)
        self.kernel, self.dropout = kernel, dropout

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        dropout_p = self.dropout if self.training else 0.0
        if self.kernel == "sdpa":
            q, k, v = (x.transpose(1, 2) for x in (q, k, v))  # (B, S, H, D) to (B, H, S, D)
            return F.scaled_dot_product_attention(q, k, v, dropout_p=dropout_p, is_causal=True).transpose(1, 2)
        if not (self.keeps_max_logits and self.training):
            return flash_attention(q, k, v, causal=True, dropout_p=dropout_p)
        out, max_logits = flash_attention(q, k, v, causal=True, dropout_p=dropout_p, return_max_logits=True)
        self.update_max_logits(max_logits)
        return out


def norm(x: Tensor) -> Tensor:
    """RMSNorm without a gain: the matrix that follows can learn one."""
    return F.rms_norm(x, (x.size(-1),))


class MLP(nn.Module):
    """Four times as wide inside; squared ReLU (So et al. 2021, https://arxiv.org/abs/2109.08668)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.relu(self.up(x)).square())


class Block(nn.Module):
    def __init__(self, width: int, heads: int, attention: str, qk_clip: bool) -> None:
        super().__init__()
        self.attention = Attention(width, heads, attention, qk_norm=not qk_clip, max_logits=qk_clip)
        self.mlp = MLP(width)
        # A block starts as the identity: what it adds to the residual stream is zero.
        nn.init.zeros_(self.attention.out.weight)
        nn.init.zeros_(self.mlp.down.weight)

    def forward(self, x: Tensor, cache: KVCache | None = None) -> Tensor:
        x = x + self.attention(norm(x), cache)
        return x + self.mlp(norm(x))


class GPT(nn.Module):
    """Tokens (B, S) to logits (B, S, V), or to the mean cross-entropy in nats when targets (B, S) are given.

    Attention logits are bounded by QK-norm, or with `qk_clip` by `muon.QKClip`, which finds the layers' largest ones.
    """

    def __init__(
        self,
        *,
        layers: int,
        heads: int,
        width: int,
        context: int,
        vocab_size: int,
        attention: str = "flash",
        qk_clip: bool = False,
    ) -> None:
        super().__init__()
        self.context = context
        self.embedding = nn.Embedding(vocab_size, width)
        self.blocks = nn.ModuleList(Block(width, heads, attention, qk_clip) for _ in range(layers))
        nn.init.normal_(self.embedding.weight, std=0.02)  # small: it is the head too, and the loss starts near log V

    def forward(self, tokens: Tensor, targets: Tensor | None = None, caches: Sequence[KVCache] | None = None) -> Tensor:
        x = norm(self.embedding(tokens))  # (B, S, width)
        for block, cache in zip(self.blocks, caches or [None] * len(self.blocks), strict=True):
            x = block(x, cache)
        logits = F.linear(norm(x), self.embedding.weight)  # (B, S, V)
        if targets is None:
            return logits
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())
