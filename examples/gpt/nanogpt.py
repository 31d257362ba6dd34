"""nanoGPT's model, for comparisons with its results: https://github.com/karpathy/nanoGPT/blob/master/model.py.

GPT-2 without biases: LayerNorm, GELU, learned positions, dropout, and a head tied to the embedding. Its initialisation,
too: a standard deviation of 0.02, and of 0.02 / sqrt(2 · layers) for what a block adds to the residual stream.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attention.cache import KVCache
from examples.gpt.model import Attention


class Block(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float, attention: str, qk_clip: bool) -> None:
        super().__init__()
        self.norm_1 = nn.LayerNorm(width, bias=False)
        self.attention = Attention(width, heads, attention, dropout, rotary=False, max_logits=qk_clip)
        self.norm_2 = nn.LayerNorm(width, bias=False)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, cache: KVCache | None = None) -> Tensor:
        x = x + self.dropout(self.attention(self.norm_1(x), cache))
        return x + self.dropout(self.down(F.gelu(self.up(self.norm_2(x)))))


class NanoGPT(nn.Module):
    """Tokens (B, S) to logits (B, S, V), or to the mean cross-entropy in nats when targets (B, S) are given."""

    def __init__(
        self,
        *,
        layers: int,
        heads: int,
        width: int,
        context: int,
        vocab_size: int,
        dropout: float = 0.0,
        attention: str = "flash",
        qk_clip: bool = False,
    ) -> None:
        super().__init__()
        self.context = context
        self.embedding = nn.Embedding(vocab_size, width)
        self.position_embedding = nn.Embedding(context, width)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(width, heads, dropout, attention, qk_clip) for _ in range(layers))
        self.norm = nn.LayerNorm(width, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                is_projection = name.endswith(("attention.out.weight", "down.weight"))
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * layers) if is_projection else 0.02)

    def forward(self, tokens: Tensor, targets: Tensor | None = None, caches: Sequence[KVCache] | None = None) -> Tensor:
        start = caches[0].longest if caches else 0
        positions = torch.arange(start, start + tokens.size(1), device=tokens.device)
        x = self.dropout(self.embedding(tokens) + self.position_embedding(positions))  # (B, S, width)
        for block, cache in zip(self.blocks, caches or [None] * len(self.blocks), strict=True):
            x = block(x, cache)
        logits = F.linear(self.norm(x), self.embedding.weight)  # (B, S, V)
        if targets is None:
            return logits
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())
