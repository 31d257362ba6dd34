"""Text token by token from a model that keeps the keys and values of what it has read."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@torch.no_grad()
def generate(
    model: nn.Module,
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
    caches = [block.attention.new_cache(len(tokens), model.context) for block in model.blocks]
    new = tokens  # what the caches don't have yet
    for _ in range(length):
        is_full = tokens.size(1) > model.context
        logits = model(tokens[:, -model.context :]) if is_full else model(new, caches=caches)
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
        least = descending.masked_fill(before >= max(top_p, 1e-30), torch.inf).amin(dim=-1, keepdim=True)
        probabilities = probabilities.masked_fill(probabilities < least, 0)
    return torch.multinomial(probabilities, 1, generator=generator)
