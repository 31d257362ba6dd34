"""A key/value cache for generation, and the operator `attention::decode` that attends to it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .backends import HAS_TRITON

torch.library.define(
    "attention::decode",
    "(Tensor q, Tensor k, Tensor v, Tensor lengths, float scale, SymInt? window_left, str backend) -> Tensor",
)


class KVCache:
    """The keys and values of the tokens so far, of one layer; made by `SelfAttention.new_cache`.

    Attributes:
        k: (B, max_length, Hkv, D), of which sequence b has filled the first `lengths[b]`.
        v: (B, max_length, Hkv, D), likewise.
        lengths: int32 (B,), on the device. It may be lowered in place to drop a sequence's last tokens: prompts of
            different lengths are padded on the right, read together, and then their lengths are put here.

    Appending more than fits raises a ValueError. Nothing is read from the device for that: the host counts what was
    appended, which is never less than the longest length, and looks at `lengths` only when that count doesn't fit. When
    a CUDA graph is replayed, where the host counts nothing, a device-side assertion of torch's indexing fails instead.
    """

    def __init__(
        self, batch_size: int, max_length: int, heads: int, head_dim: int, device: torch.device, dtype: torch.dtype
    ) -> None:
        unit = 16 // dtype.itemsize  # rows start at multiples of 16 bytes, as the kernels want them
        shape = (2, batch_size, heads, max_length, -(-head_dim // unit) * unit)  # a head's keys lie together
        self.k, self.v = torch.zeros(shape, dtype=dtype, device=device)[..., :head_dim].transpose(2, 3).unbind()
        self.lengths = torch.zeros(batch_size, dtype=torch.int32, device=device)
        self.longest = 0  # the host's upper bound on lengths

    def positions(self, batch_size: int, seqlen: int) -> Tensor:
        """Where the next `seqlen` tokens of each sequence go, (B, seqlen). Raises a ValueError if they don't fit."""
        capacity = self.k.shape[1]
        if batch_size != self.lengths.shape[0]:
            raise ValueError(f"the batch size is {batch_size} but the cache's is {self.lengths.shape[0]}")
        if self.longest + seqlen > capacity:
            self.longest = int(self.lengths.max())
            if self.longest + seqlen > capacity:
                raise ValueError(
                    f"the cache holds {capacity} tokens a sequence: {seqlen} more after {self.longest} don't fit"
                )
        return self.lengths[:, None] + torch.arange(seqlen, device=self.lengths.device)

    def append(self, k: Tensor, v: Tensor) -> None:
        """Put k and v (B, S, Hkv, D) behind what each sequence has."""
        batch, seqlen, *_ = k.shape
        where = torch.arange(batch, device=k.device)[:, None], self.positions(batch, seqlen)
        self.k[where] = k.detach().to(self.k.dtype)
        self.v[where] = v.detach().to(self.v.dtype)
        self.lengths += seqlen
        self.longest += seqlen

    def attend(self, q: Tensor, scale: float, window_left: int | None) -> Tensor:
        """Attention of the last S tokens' queries (B, S, Hq, D) with what each sequence has: (B, S, Hq, D)."""
        backend = "triton" if q.device.type == "cuda" and HAS_TRITON else "torch"
        out = torch.ops.attention.decode(q.to(self.k.dtype), self.k, self.v, self.lengths, scale, window_left, backend)
        result: Tensor = out.to(q.dtype)
        return result

    def reset(self) -> None:
        """Forget everything: the next tokens are a prompt again, which is read by `flash_attention`."""
        self.lengths.zero_()
        self.longest = 0

    def reorder(self, sequences: Tensor) -> None:
        """Sequence b goes on from what sequence `sequences[b]` has, as a beam search wants it."""
        self.k.copy_(self.k[sequences])
        self.v.copy_(self.v[sequences])
        self.lengths.copy_(self.lengths[sequences])


def dense_decode(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, scale: float, window_left: int | None) -> Tensor:
    """Causal attention of the last Sq tokens of each sequence, in plain torch: (B, Sq, Hq, Dv).

    q is (B, Sq, Hq, D), k (B, L, Hkv, D), v (B, L, Hkv, Dv). Sequence b has `lengths[b]` tokens, new ones included, so
    query i sits at lengths[b] - Sq + i; it sees the keys up to there, from `window_left` before it on.
    """
    batch, seqlen, heads_q, _ = q.shape
    heads_k = k.shape[2]
    position = lengths[:, None] - seqlen + torch.arange(seqlen, device=q.device)  # (B, Sq)
    keys = torch.arange(k.shape[1], device=q.device)
    visible = keys <= position[..., None]  # (B, Sq, L)
    if window_left is not None:
        visible &= keys >= position[..., None] - window_left
    hidden = ~visible[:, None, :, None]  # (B, 1, Sq, 1, L)
    unused = (keys >= lengths[:, None])[:, :, None, None]  # may be anything; 0 · NaN would be NaN
    dtype = torch.promote_types(q.dtype, torch.float32)
    rows = q.to(dtype).unflatten(2, (heads_k, -1)).permute(0, 2, 1, 3, 4)  # (B, Hkv, Sq, Hq / Hkv, D)
    scores = torch.einsum("bhsgd,bjhd->bhsgj", rows, k.to(dtype)) * scale
    weights = scores.masked_fill_(hidden, -torch.inf).softmax(-1)
    weights = weights.masked_fill_(hidden, 0)  # a row without keys, where softmax gives NaN
    out = torch.einsum("bhsgj,bjhd->bshgd", weights, v.to(dtype).masked_fill(unused, 0))
    return out.reshape(batch, seqlen, heads_q, v.shape[3]).to(q.dtype)


@torch.library.impl("attention::decode", "CompositeExplicitAutograd")
def _decode(
    q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, scale: float, window_left: int | None, backend: str
) -> Tensor:
    if backend == "triton":
        from .kernels.decode import decode

        return decode(q, k, v, lengths, scale, window_left)
    longest = int(lengths.max()) if lengths.numel() else 0
    with torch.autocast(q.device.type, enabled=False):
        return dense_decode(q, k[:, :longest], v[:, :longest], lengths, scale, window_left)


def _decode_fake(
    q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, scale: float, window_left: int | None, backend: str
) -> Tensor:
    return q.new_empty((*q.shape[:3], v.shape[3]))


def _refuse_gradient(ctx: Any, grad: Tensor) -> None:
    raise NotImplementedError("attention to a KV cache has no gradient: it is for generation, not for training")


torch.library.register_fake("attention::decode", _decode_fake)
torch.library.register_autograd("attention::decode", _refuse_gradient)
