"""GPT in the spirit of nanoGPT (https://github.com/karpathy/nanoGPT): rotary positions, RMSNorm, squared ReLU.

Letters in shapes: B batch, S sequence, H heads, D head width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attention import SelfAttention
from attention.cache import KVCache


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
    def __init__(self, width: int, heads: int, attention: str, qk_clip: bool) -> None:
        super().__init__()
        self.attention = ATTENTION[attention](width, heads, qk_norm=not qk_clip, max_logits=qk_clip)
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
        if qk_clip and attention == "sdpa":
            raise ValueError("torch's attention doesn't tell its largest logits: QK-clip needs attention='flash'")
        self.context = context
        self.embedding = nn.Embedding(vocab_size, width)
        self.blocks = nn.ModuleList(Block(width, heads, attention, qk_clip) for _ in range(layers))
        nn.init.normal_(self.embedding.weight, std=0.02)  # small: it is the head too, and the loss starts near log V

    def forward(
        self, tokens: Tensor, targets: Tensor | None = None, caches: Sequence[KVCache | None] | None = None
    ) -> Tensor:
        x = norm(self.embedding(tokens))  # (B, S, width)
        for block, cache in zip(self.blocks, caches or [None] * len(self.blocks), strict=True):
            x = block(x, cache)
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
        top_p: float = 1.0,
        generator: torch.Generator | None = None,
    ) -> Iterator[Tensor]:
        """Yield `length` new tokens (B, 1), one at a time, after the prompt (B, S). Temperature 0 is greedy.

        The caches keep what was read until the context is full. From then on the context slides, and with it every
        token's position and past: all of it is read again for each new token.
        """
        caches = [block.attention.new_cache(len(tokens), self.context) for block in self.blocks]
        new = tokens  # what the caches don't have yet
        for _ in range(length):
            is_full = tokens.size(1) > self.context
            logits = self(tokens[:, -self.context :]) if is_full else self(new, caches=caches)
            new = sample(logits[:, -1].float(), temperature, top_k, top_p, generator)
            tokens = torch.cat([tokens, new], dim=1)
            yield new


def sample(
    logits: Tensor, temperature: float, top_k: int | None, top_p: float, generator: torch.Generator | None
) -> Tensor:
    """Draw one token (B, 1) from logits (B, V): among the `top_k` likeliest, and among the fewest likeliest whose
    probabilities add up to `top_p` (Holtzman et al. 2019, https://arxiv.org/abs/1904.09751)."""
    if temperature == 0:
        return logits.argmax(dim=-1, keepdim=True)
    temperature = min(max(temperature, 1e-30), 1e30)  # further out float32 has only 0 and infinity
    logits = (logits - logits.amax(dim=-1, keepdim=True)) / temperature  # at most 0: nothing to overflow
    if top_k is not None:
        kth = logits.topk(min(top_k, logits.size(-1))).values[:, -1:]
        logits = logits.masked_fill(logits < kth, -torch.inf)
    probabilities = F.softmax(logits, dim=-1)
    if top_p < 1:
        descending = probabilities.sort(dim=-1, descending=True).values
        before = descending.cumsum(dim=-1) - descending  # what the likelier ones add up to
        least = descending.masked_fill(before >= top_p, torch.inf).amin(dim=-1, keepdim=True)
        probabilities = probabilities.masked_fill(probabilities < least, 0)
    return torch.multinomial(probabilities, 1, generator=generator)
