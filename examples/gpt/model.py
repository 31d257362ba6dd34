"""GPT in the spirit of nanoGPT (https://github.com/karpathy/nanoGPT): rotary positions, RMSNorm, squared ReLU.

Letters in shapes: B batch, S sequence, H heads, D head width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attention import SelfAttention


class SDPASelfAttention(SelfAttention):
    """The same layer on torch's own attention: `attend` is all there is to swap."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))  # (B, S, H, D) to (B, H, S, D)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


ATTENTION = {"flash": SelfAttention, "sdpa": SDPASelfAttention}


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
    def __init__(self, width: int, heads: int, attention: str) -> None:
        super().__init__()
        self.attention = ATTENTION[attention](width, heads, qk_norm=True)
        self.mlp = MLP(width)
        # A block starts as the identity: what it adds to the residual stream is zero.
        nn.init.zeros_(self.attention.out.weight)
        nn.init.zeros_(self.mlp.down.weight)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(norm(x))
        return x + self.mlp(norm(x))


class GPT(nn.Module):
    """Tokens (B, S) to logits (B, S, V), or to the mean cross-entropy in nats when targets (B, S) are given."""

    def __init__(
        self, *, layers: int, heads: int, width: int, context: int, vocab_size: int, attention: str = "flash"
    ) -> None:
        super().__init__()
        self.context = context
        self.embedding = nn.Embedding(vocab_size, width)
        self.blocks = nn.ModuleList(Block(width, heads, attention) for _ in range(layers))
        nn.init.normal_(self.embedding.weight, std=0.02)  # small: it is the head too, and the loss starts near log V

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        x = norm(self.embedding(tokens))  # (B, S, width)
        for block in self.blocks:
            x = block(x)
        logits = F.linear(norm(x), self.embedding.weight)  # (B, S, V)
        if targets is None:
            return logits
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())

    @torch.no_grad()
    def generate(
        self,
        tokens: Tensor,
        length: int,
        *,
        temperature: float = 1.0,
        top_k: int | None = None,
        generator: torch.Generator | None = None,
    ) -> Iterator[Tensor]:
        """Yield `length` new tokens (B, 1), one at a time, after the prompt (B, S). Temperature 0 is greedy."""
        for _ in range(length):
            tokens = tokens[:, -self.context :]
            token = sample(self(tokens)[:, -1].float(), temperature, top_k, generator)
            tokens = torch.cat([tokens, token], dim=1)
            yield token


def sample(logits: Tensor, temperature: float, top_k: int | None, generator: torch.Generator | None) -> Tensor:
    """Draw one token (B, 1) from logits (B, V)."""
    if temperature == 0:
        return logits.argmax(dim=-1, keepdim=True)
    if top_k is not None:
        kth = logits.topk(min(top_k, logits.size(-1))).values[:, -1:]
        logits = logits.masked_fill(logits < kth, -torch.inf)
    temperature = min(max(temperature, 1e-30), 1e30)  # further out float32 has only 0 and infinity
    logits = (logits - logits.amax(dim=-1, keepdim=True)) / temperature  # at most 0: nothing to overflow
    return torch.multinomial(F.softmax(logits, dim=-1), 1, generator=generator)
