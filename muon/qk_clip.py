"""QK-clip: attention logits that can't explode, from "Kimi K2" (https://arxiv.org/abs/2507.20534, section 2.1)."""

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import Optimizer


class QKClip:
    r"""Scales down, after each step, the queries and keys of attention heads whose largest logit passed a threshold.

    With S the largest logit of a query head since the last step, over all ranks:

    .. math::
        \gamma = \text{threshold} / S \text{ if } S > \text{threshold, else } 1, \qquad
        W_q \leftarrow \gamma^\alpha W_q, \quad W_k \leftarrow \gamma^{1 - \alpha} W_k

    so that the same input would reach the threshold exactly. Query heads that share a key head share the smallest γ
    among them: the key's factor acts on all of them, and undoing it in the other queries would make weights grow with
    every clip. Optimizer state is left alone. An infinite or NaN logit clips nothing.

    It works with every module that has an attribute ``max_logits``, float32 (Hq,) or None, and a method
    ``qk_weights()`` that returns views of its weights, query (Hq, D, E) and key (Hkv, D, E), as
    ``attention.SelfAttention(max_logits=True)`` has. If a module has ``qk_biases()``, (Hq, D) and (Hkv, D) or None,
    they are scaled alike. If it has ``reset_max_logits()``, that is called once its logits have been used: a module
    that keeps the largest over several forward passes (accumulating gradients) starts anew then.

    Nothing waits for the device. With ``torch.distributed`` initialised, one all-reduce serves all layers; every rank
    must have the same ones.

    Args:
        model: the module whose attention layers are found.
        optimizer: any torch optimizer; the clip runs after each of its steps.
        threshold: largest logit allowed.
        alpha: how much of γ goes to the queries, from 0 to 1.

    Attributes:
        num_clipped: int64 tensor, on the device: how many query heads passed the threshold in the last step.

    Raises:
        ValueError: no such module in the model, or one with QK-norm, whose logits don't depend on the scale of its
            weights; options out of range.
        NotImplementedError: at the step, for weights that are DTensors.

    Example:
        >>> import torch
        >>> from attention import SelfAttention
        >>> from muon import Muon, QKClip
        >>> layer = SelfAttention(embed_dim=64, num_heads=4, max_logits=True)
        >>> optimizer = Muon(layer.parameters(), lr=0.02)
        >>> clip = QKClip(layer, optimizer, threshold=100.0)  # from here on optimizer.step() clips
        >>> clip.remove()  # and from here on no longer
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
        self._hook = optimizer.register_step_post_hook(lambda *_: self.clip())

    def remove(self) -> None:
        """Clip no longer after the optimizer's steps."""
        self._hook.remove()

    @torch.no_grad()
    def clip(self) -> None:
        """Scale the weights by what the modules' logits ask for; the optimizer's steps call this."""
        weights = [module.qk_weights() for module in self.modules]
        if any(type(query) not in (Tensor, Parameter) for query, _ in weights):
            raise NotImplementedError(
                "QKClip can't scale DTensors yet: what qk_weights() returns are not views of them"
            )
        logits = [_logits(module, query) for module, (query, _) in zip(self.modules, weights, strict=True)]
        largest = torch.cat([x.to(logits[0].device) for x in logits])
        if dist.is_available() and dist.is_initialized():
            dist.all_reduce(largest, dist.ReduceOp.MAX)
        clipped = (largest > self.threshold) & largest.isfinite()
        gamma = torch.where(clipped, self.threshold / largest, 1.0)
        self.num_clipped = clipped.sum()
        for module, pair, x in zip(self.modules, weights, gamma.split([len(x) for x in logits]), strict=True):
            biases = module.qk_biases() if hasattr(module, "qk_biases") else None
            for query, key in (pair, biases) if biases is not None else (pair,):
                _scale(query, key, x.to(query.device), self.alpha)
            if hasattr(module, "reset_max_logits"):
                module.reset_max_logits()


def _is_attention(module: nn.Module) -> bool:
    """A wrapper, such as torch.compile's, hands on the attributes of the layer inside, but isn't of its class."""
    return hasattr(module, "max_logits") and hasattr(type(module), "qk_weights")


def _logits(module: Any, query: Tensor) -> Tensor:
    """The module's largest logits; -inf where it has had no forward pass."""
    if module.max_logits is None:
        return torch.full((query.shape[0],), -torch.inf, device=query.device)
    logits: Tensor = module.max_logits.float()
    return logits


def _scale(query: Tensor, key: Tensor, gamma: Tensor, alpha: float) -> None:
    """Scales query (Hq, ...) and key (Hkv, ...), in place, by the smallest gamma (Hq,) of each key head's group."""
    gamma = gamma.view(key.shape[0], -1).amin(1)
    group = query.shape[0] // key.shape[0]
    key.mul_((gamma ** (1 - alpha)).view(-1, *(1,) * (key.dim() - 1)))
    query.mul_((gamma**alpha).repeat_interleave(group).view(-1, *(1,) * (query.dim() - 1)))
