"""The step of the groups that AdamW takes: torch's own, with what Muon groups have on top."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from muon.dtensors import gradient, local
from muon.matrices import opposed
from muon.rounding import join, remainder_of, split_off


def adamw_step(group: dict[str, Any], params: list[Tensor], states: Sequence[dict[str, Any]]) -> None:
    """One step of parameters with gradients, in place; their states are made where they are missing."""
    exact: list[Tensor] = []  # the parameters, or with remainders the float32 numbers that they stand for
    grads: list[Tensor] = []
    for p, state in zip(params, states, strict=True):
        assert p.grad is not None
        if p.grad.is_sparse:
            raise RuntimeError("AdamW does not support sparse gradients")
        remainder = remainder_of(p, state, group)
        exact.append(p if remainder is None else join(p, remainder))
        grads.append(gradient(p) if remainder is None else gradient(p).to(torch.float32))
        if "step" not in state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=step_device(p, group))
        for name in ("exp_avg", "exp_avg_sq"):
            if name not in state:
                state[name] = torch.zeros_like(exact[-1], memory_format=torch.preserve_format)
            state[name] = state[name].to(exact[-1].dtype)
    weight_decay = group["weight_decay"]
    if group["weight_decay_mode"] == "cautious":
        _decay_cautiously(group, exact, grads, [state["exp_avg"] for state in states])
        weight_decay = 0.0
    adamw(
        [local(value) for value in exact],  # element by element, it matters to nobody who has the rest of a tensor
        [local(grad) for grad in grads],
        [local(state["exp_avg"]) for state in states],
        [local(state["exp_avg_sq"]) for state in states],
        [],
        [state["step"] for state in states],
        foreach=group["foreach"],
        fused=group["foreach"] is None and all(map(_is_fusible, params)),
        capturable=group["capturable"],
        has_complex=any(map(torch.is_complex, params)),
        amsgrad=False,
        beta1=group["betas"][0],
        beta2=group["betas"][1],
        lr=group["lr"],
        weight_decay=weight_decay,
        eps=group["adamw_eps"],
        maximize=group["maximize"],
    )
    for p, value, state in zip(params, exact, states, strict=True):
        if value is not p:
            split_off(value, p, state["remainder"])


def _decay_cautiously(group: dict[str, Any], params: list[Tensor], grads: list[Tensor], exp_avgs: list[Tensor]) -> None:
    """AdamW's update has the sign of its first moment, which this looks ahead to."""
    decay = 1 - number(group["lr"]) * group["weight_decay"]
    for p, grad, exp_avg in zip(params, grads, exp_avgs, strict=True):
        update = exp_avg.lerp(-grad if group["maximize"] else grad, 1 - group["betas"][0])
        p.copy_(torch.where(opposed(update, p), p, p * decay))


def step_device(p: Tensor, group: dict[str, Any]) -> torch.device:
    """Where the number of steps is kept."""
    on_device = group["capturable"] or (group["foreach"] is None and _is_fusible(p))
    return p.device if on_device else torch.device("cpu")


def _is_fusible(p: Tensor) -> bool:
    return p.device.type in ("cpu", "cuda") and p.is_floating_point()


def number(lr: float | Tensor) -> float | Tensor:
    """A learning rate as a number, or as it is where reading it would wait for a GPU."""
    if isinstance(lr, Tensor) and lr.device.type != "cpu":
        return lr.detach().reshape(())
    return float(lr)
