"""Which weights dropout keeps: Philox-4x32 counted by position, so that every tiling draws the same numbers.

One call makes the four words of four neighbouring keys. Source: Salmon et al., "Parallel random numbers: as easy as
1, 2, 3" (SC 2011); 7 rounds are the fewest that pass BigCrush. The twin of `attention.kernels.common.kept`.
"""

from __future__ import annotations

import torch
from torch import Tensor

ROUNDS = 7
WORD = 0xFFFFFFFF


def threshold(dropout_p: float) -> int:
    """A weight is kept when the upper 24 bits of its word reach this."""
    return round(dropout_p * 2**24)


def draw_seed(device: torch.device) -> Tensor:
    """A seed from torch's generator of the device, drawn there: nothing waits for it, and a CUDA graph redraws it."""
    return torch.randint(2**63 - 1, (1,), dtype=torch.int64, device=device)


def kept(seed: Tensor, dropout_p: float, heads: Tensor, rows: slice, keys: slice) -> Tensor:
    """Whether each pair of these rows and keys is kept, bool (*heads.shape, rows, keys); heads count b·Hq + h."""
    first = keys.start // 4
    groups = torch.arange(first, (keys.stop + 3) // 4, device=seed.device)
    queries = torch.arange(rows.start, rows.stop, device=seed.device)
    shape = (*heads.shape, len(queries), len(groups))
    counters = [queries[:, None], groups, heads[..., None, None], torch.zeros((), dtype=torch.int64)]
    words = philox(seed, *(counter.to(seed.device).expand(shape) for counter in counters))
    uniform = (torch.stack(words, -1) >> 8).flatten(-2)[..., keys.start - 4 * first : keys.stop - 4 * first]
    return uniform >= threshold(dropout_p)


def philox(seed: Tensor, c0: Tensor, c1: Tensor, c2: Tensor, c3: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Four words of 32 bits from a counter of four and a seed of 64, all kept in int64."""
    key0, key1 = seed & WORD, (seed >> 32) & WORD
    for _ in range(ROUNDS):
        low0, high0 = _multiply(c0, 0xD2511F53)
        low2, high2 = _multiply(c2, 0xCD9E8D57)
        c0, c1, c2, c3 = high2 ^ c1 ^ key0, low2, high0 ^ c3 ^ key1, low0
        key0, key1 = (key0 + 0x9E3779B9) & WORD, (key1 + 0xBB67AE85) & WORD
    return c0, c1, c2, c3


def _multiply(x: Tensor, factor: int) -> tuple[Tensor, Tensor]:
    """The lower and the upper 32 bits; the product wraps around in int64, which doesn't change them."""
    product = x * factor
    return product & WORD, (product >> 32) & WORD
