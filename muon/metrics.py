"""What a step did, computed anew from gradients and state, so that the step itself keeps no account."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from muon.dtensors import full, gradient
from muon.matrices import Block, Tensors, buckets, normalize_neurons
from muon.newton_schulz import orthogonalize


def muon_metrics(
    group: dict[str, Any], tensors: Sequence[Tensors], lr_factor: Callable[[int, int], float]
) -> dict[str, Tensor]:
    """Of the parameters of a Muon group that took part in the last step."""
    device = tensors[0].param.device
    updates, distance, identity = torch.zeros(2, device=device), torch.zeros((), device=device), 0
    for block in _blocks(group, tensors):
        O = _orthogonalized(group, block)
        gram = O.mT @ O if block.is_tall else O @ O.mT
        n = min(block.rows, block.cols)
        distance += (gram - torch.eye(n, device=O.device)).square().sum().to(device)
        identity += block.count * n
        second_moment = block.tensors.neuron_second_moment
        if second_moment is not None:
            O = normalize_neurons(O, second_moment.reshape(block.count, block.rows, 1))
        squares = (O * lr_factor(block.rows, block.cols)).square().sum().to(device)
        updates += torch.stack([squares, torch.full_like(squares, O.numel())])
    return {
        "gradient_norm": _norm([whole.grad for whole in tensors]),
        "momentum_norm": _norm([whole.momentum for whole in tensors]),
        "update_rms": _on(group["lr"], device) * (updates[0] / updates[1].clamp(min=1)).sqrt(),
        "orthogonality_error": (distance / max(identity, 1)).sqrt(),
    }


def _blocks(group: dict[str, Any], tensors: Sequence[Tensors]) -> Iterator[Block]:
    """Of one parameter after the other: one at a time is gathered if it is sharded."""
    for whole in tensors:
        for bucket in buckets([whole.map(full)], group["matrix"], group["split"], together=False):
            yield from bucket.blocks


def _orthogonalized(group: dict[str, Any], block: Block) -> Tensor:
    """(count, rows, cols), in float32: what the step made of gradient and momentum."""
    update = block.tensors.momentum.float()
    if group["nesterov"]:
        grad = block.tensors.grad.float()
        update = (-grad if group["maximize"] else grad).lerp(update, group["momentum"])
    matrices = update.reshape(block.count, block.rows, block.cols)
    return orthogonalize(matrices, group["ns_coefficients"], group["ns_steps"], group["eps"])


def adamw_metrics(
    group: dict[str, Any], params: Sequence[Tensor], states: Sequence[dict[str, Tensor]]
) -> dict[str, Tensor]:
    """Of the parameters of an AdamW group that took part in the last step."""
    device, (beta1, beta2) = params[0].device, group["betas"]
    squares = torch.zeros((), device=device)
    for p, state in zip(params, states, strict=True):
        step = state["step"].to(p.device)
        exp_avg, exp_avg_sq = full(state["exp_avg"]), full(state["exp_avg_sq"])
        first, second = exp_avg / (1 - beta1**step), exp_avg_sq / (1 - beta2**step)
        squares += (first / (second.sqrt() + group["adamw_eps"])).abs().float().square().sum().to(device)
    elements = sum(p.numel() for p in params)
    return {
        "gradient_norm": _norm([gradient(p) for p in params]),
        "momentum_norm": _norm([state["exp_avg"] for state in states]),
        "update_rms": _on(group["lr"], device) * (squares / max(elements, 1)).sqrt(),
    }


def read(metrics: dict[str, Tensor]) -> dict[str, float]:
    """All of them in one transfer."""
    if not metrics:
        return {}
    device = next(iter(metrics.values())).device
    values = torch.stack([value.to(device, torch.float32) for value in metrics.values()]).tolist()
    return dict(zip(metrics, values, strict=True))


def _norm(tensors: Sequence[Tensor]) -> Tensor:
    """Frobenius norm over all of them."""
    device = tensors[0].device
    return _scaled_norm(torch.stack([_scaled_norm(tensor).to(device) for tensor in tensors]))


def _scaled_norm(tensor: Tensor) -> Tensor:
    """In float32, of any finite magnitude: the largest is divided out before squares are taken."""
    magnitudes = full(tensor).abs().float()
    largest = magnitudes.amax() if tensor.numel() else magnitudes.sum()
    norm: Tensor = largest * torch.linalg.vector_norm(magnitudes / largest.masked_fill(largest == 0, 1))
    return norm


def _on(lr: float | Tensor, device: torch.device) -> Tensor:
    rate: Tensor = lr.reshape(()) if isinstance(lr, Tensor) else torch.tensor(lr)
    return rate.to(device, torch.float32)
