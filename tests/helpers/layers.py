"""An attention layer in plain torch, of any dtype: the truth in float64."""

import torch
from torch import Tensor

from attention import SelfAttention


class DenseSelfAttention(SelfAttention):
    """The same layer by the definition of attention, mask and all."""

    def visible(self, seqlen: int) -> Tensor:
        """Which key (column) each query (row) sees."""
        distance = torch.arange(seqlen)[:, None] - torch.arange(seqlen)  # how far the key lies behind the query
        left, right = self.window or (-1, -1)
        visible = torch.ones(seqlen, seqlen, dtype=torch.bool)
        if left >= 0:
            visible &= distance <= left
        if right >= 0:
            visible &= distance >= -right
        return visible & (distance >= 0) if self.causal else visible

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        group = self.num_heads // self.num_kv_heads
        k, v = k.repeat_interleave(group, 2), v.repeat_interleave(group, 2)
        logits = torch.einsum("bihd,bjhd->bhij", q, k) * self.head_dim**-0.5
        logits = logits.masked_fill(~self.visible(q.shape[1]), -torch.inf)
        if self.keeps_max_logits:
            self.update_max_logits(logits.detach().amax((0, 2, 3)))
        return torch.einsum("bhij,bjhd->bihd", logits.softmax(-1), v)
