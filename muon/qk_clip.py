"""QK-clip: attention logits that can't explode, from "Kimi K2" (https://arxiv.org/abs/2507.20534, section 2.1)."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import Optimizer

from muon.dtensors import distributed_like, is_dtensor, local


class QKClip:
    """Scales down, after each step, the queries and keys of attention heads whose largest logit passed a threshold.

    With S the largest logit of a query head since the last step, over all ranks:

        γ = threshold / S if S > threshold, else 1
        W_q ← γ^α W_q,  W_k ← γ^(1 - α) W_k

    so that the same input would reach the threshold exactly. Query heads that share a key head share the smallest γ
    among them: the key's factor acts on all of them, and undoing it in the other queries would make weights grow with
    every clip. Optimizer state is left alone. An infinite or NaN logit clips nothing.

    It works with every module that has an attribute ``max_logits``, float32 (Hq,) or None, and a method
    ``qk_weights()`` that returns views of its weights, query (Hq, D, E) and key (Hkv, D, E), as
    ``attention.SelfAttention(max_logits=True)`` has. If a module has ``qk_biases()``, (Hq, D) and (Hkv, D) or None,
    they are scaled alike. If it has ``reset_max_logits()``, that is called once its logits have been used: a module
    that keeps the largest over several forward passes (accumulating gradients) starts anew then.

    Weights that are DTensors (``fully_shard``, tensor parallelism of whole layers) are scaled shard by shard.

    Nothing waits for the device. With ``torch.distributed`` initialised, one all-reduce serves all layers; every rank
    must have the same ones.

    Args:
        model: the module whose attention layers are found.
        optimizer: any torch optimizer; the clip runs after each of its steps.
        threshold: largest logit allowed.
        alpha: how much of γ goes to the queries, from 0 to 1.

    Attributes:
        num_clipped: int64 tensor, on the device: how many query heads passed the threshold in the last step.
        max_logit: float32 tensor, on the device: the largest logit of all heads that the last step saw, clipped or not;
            -inf before the first.

    Raises:
        ValueError: no such module in the model, or one with QK-norm, whose logits don't depend on the scale of its
            weights; options out of range.

    Example:
        >>> import torch
        >>> from attention import SelfAttention
        >>> from muon import Muon, QKClip
        >>> layer = SelfAttention(embed_dim=64, num_heads=4, max_logits=True)
        >>> optimizer = Muon(layer.parameters(), lr=0.02)
        >>> clip = QKClip(layer, optimizer, threshold=100.0)  # from here on optimizer.step() clips
        >>> clip.remove()  # and from here on no longer

    Source: Kimi Team, "Kimi K2", https://arxiv.org/abs/2507.20534, section 2.1.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer, threshold: float = 100.0, alpha: float = 0.5) -> None:
        if not 0.0 < threshold < math.inf:
            raise ValueError(f"threshold should be a number above 0 but is: {threshold}")
        if not 0.0 <= alpha <= 1.0:
            raise ValueError(f"alpha should be from 0 to 1 but is: {alpha}")
        found = [(n, m) for n, m in model.named_modules() if _is_attention(m)]
        if not found:
            raise ValueError("the model has no module with max_logits and qk_weights(): SelfAttention(max_logits=True)")
        for name, module in found:
            if getattr(module, "qk_norm", False):
                raise ValueError(
                    f"{name or 'the model'} has qk_norm: its logits don't depend on the scale of its weights, and the "
                    "norm's gains bound them already"
                )
        self.modules: list[Any] = [module for _, module in found]
        self.threshold, self.alpha = threshold, alpha
        self.num_clipped = torch.zeros((), dtype=torch.int64)
        self.max_logit = torch.full((), -torch.inf)
        self._hook = optimizer.register_step_post_hook(lambda *_: self.clip())

    def remove(self) -> None:
        """Clip no longer after the optimizer's steps."""
        self._hook.remove()

    def metrics(self) -> dict[str, int | float]:
        """What the last step's clip found, over all layers and ranks, for a logger; see also ``Muon.metrics``.

        Returns:
            ``"clipped_heads"``, how many query heads passed the threshold, and ``"max_logit"``, the largest logit
                before the clip. Reading them waits for the device once, which the clip itself never does.

        Example:
            >>> import torch
            >>> from attention import SelfAttention
            >>> from muon import Muon, QKClip
            >>> layer = SelfAttention(embed_dim=64, num_heads=4, max_logits=True)
            >>> optimizer = Muon(layer.parameters(), lr=0.02)
            >>> clip = QKClip(layer, optimizer, threshold=100.0)
            >>> layer.update_max_logits(torch.tensor([30.0, 250.0, 99.0, 101.0]))  # as a forward pass does
            >>> optimizer.step()
            >>> clip.metrics()
            {'clipped_heads': 2, 'max_logit': 250.0}
        """
        clipped, largest = torch.stack([self.num_clipped.float(), self.max_logit]).tolist()
        return {"clipped_heads": int(clipped), "max_logit": largest}

    @torch.no_grad()
    def clip(self) -> None:
        """Scale the weights by what the modules' logits ask for; the optimizer's steps call this."""
        logits = [_logits(module) for module in self.modules]
        largest = torch.cat([x.to(logits[0].device) for x in logits])
        if dist.is_available() and dist.is_initialized():
            dist.all_reduce(largest, dist.ReduceOp.MAX)
        clipped = (largest > self.threshold) & largest.isfinite()
        gamma = torch.where(clipped, self.threshold / largest, 1.0)
        self.num_clipped, self.max_logit = clipped.sum(), largest.amax()
        for module, x in zip(self.modules, gamma.split([len(x) for x in logits]), strict=True):
            with _writable(module):
                biases = module.qk_biases() if hasattr(module, "qk_biases") else None
                for query, key in (module.qk_weights(), biases) if biases is not None else (module.qk_weights(),):
                    _scale(query, key, x.to(query.device), self.alpha)
            if hasattr(module, "reset_max_logits"):
                module.reset_max_logits()


@contextmanager
def _writable(module: nn.Module) -> Iterator[None]:
    """Rows of a DTensor aren't views of it: ones stand in for it, and it is multiplied by what becomes of them.

    Each rank multiplies its own shard; nothing is sent.
    """
    owners = [(m._parameters, n, p) for m in module.modules() for n, p in m._parameters.items() if is_dtensor(p)]
    ones = [torch.ones(p.shape, device=local(p).device) for _, _, p in owners]  # type: ignore[union-attr, arg-type]
    try:
        for (owner, name, _), factors in zip(owners, ones, strict=True):
            owner[name] = Parameter(factors, requires_grad=False)
        yield
    finally:
        for owner, name, p in owners:
            owner[name] = p
    for (_, _, p), factors in zip(owners, ones, strict=True):
        if p is not None:
            local(p).mul_(local(distributed_like(factors, p)))


def _is_attention(module: nn.Module) -> bool:
    """A wrapper, such as torch.compile's, hands on the attributes of the layer inside, but isn't of its class."""
    return hasattr(module, "max_logits") and hasattr(type(module), "qk_weights")


def _logits(module: Any) -> Tensor:
    """The module's largest logits; -inf where it has had no forward pass."""
    if module.max_logits is None:
        with _writable(module):
            query = module.qk_weights()[0]
            return torch.full((query.shape[0],), -torch.inf, device=query.device)
    logits: Tensor = module.max_logits.float()
    return logits


def _scale(query: Tensor, key: Tensor, gamma: Tensor, alpha: float) -> None:
    """Scales query (Hq, ...) and key (Hkv, ...), in place, by the smallest gamma (Hq,) of each key head's group."""
    gamma = gamma.view(key.shape[0], -1).amin(1)
    group = query.shape[0] // key.shape[0]
    key.mul_((gamma ** (1 - alpha)).view(-1, *(1,) * (key.dim() - 1)))
    query.mul_((gamma**alpha).repeat_interleave(group).view(-1, *(1,) * (query.dim() - 1)))
