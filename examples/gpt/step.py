"""One step of training: the optimizer and its schedule, forward, backward, update; and validation."""

from __future__ import annotations

import contextlib
import warnings
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from examples.gpt import data
from examples.gpt.presets import Preset
from examples.gpt.ranks import ALONE, Ranks
from examples.gpt.schedule import cosine, warmup_stable_decay
from muon import Muon, param_groups


def model_shape(preset: Preset, attention: str) -> dict[str, Any]:
    """The model's arguments."""
    names = ("layers", "heads", "width", "context", "vocab_size")
    shape = {name: getattr(preset, name) for name in names}
    shape |= {"attention": attention, "qk_clip": preset.qk_clip is not None}
    return shape | {"dropout": preset.dropout} if preset.architecture == "nanogpt" else shape


def make_optimizer(model: nn.Module, preset: Preset, name: str, ranks: Ranks = ALONE) -> torch.optim.Optimizer:
    """The hidden matrices go to Muon or to AdamW; everything else to the same AdamW in both cases.

    Several processes share Muon's work. Queries, keys and values share one weight but are three matrices to Muon.
    """
    lr = preset.muon_lr if name == "muon" else preset.adamw_lr
    betas = (0.9, preset.beta2)
    matrices = {"lr": lr, "weight_decay": preset.weight_decay}
    rest = {"lr": preset.embedding_lr, "weight_decay": 0.0, "betas": betas}
    overrides = {"*.qkv.weight": {"split": 3}, "*embedding.weight": {"weight_decay": preset.embedding_decay}}
    groups = param_groups(model, muon=matrices, adamw=rest, overrides=overrides)
    if name == "muon":
        return Muon(groups, distributed_group=ranks.group)
    plain = [{key: group[key] for key in ("params", "lr", "weight_decay")} for group in groups]
    return torch.optim.AdamW(plain, betas=betas, fused=True)


def make_scheduler(optimizer: torch.optim.Optimizer, preset: Preset) -> LambdaLR:
    """One multiplier for the learning rates of all groups."""
    # It steps also where the scaler has skipped the very first step of the optimizer, which torch would warn of.
    warnings.filterwarnings("ignore", message="Detected call of `lr_scheduler.step")
    if preset.schedule == "cosine":
        return LambdaLR(optimizer, lambda step: cosine(step, preset.steps, preset.warmup, preset.final))
    return LambdaLR(optimizer, lambda step: warmup_stable_decay(step, preset.steps, preset.warmup, preset.decay))


def train_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scheduler: LRScheduler,
    batch: tuple[Tensor, Tensor],
    dtype: str,
    *,
    micro_batch: int | None = None,
    clip: float = 0.0,
    scaler: GradScaler | None = None,
) -> Tensor:
    """One step on inputs and targets (B, S), `micro_batch` sequences at a time, which changes rounding alone.

    Gradients longer than `clip`, if that is not 0, are shortened to it. Returns the mean loss, which stays on the
    device, so that a GPU never waits for Python.
    """
    scaler = scaler or GradScaler(enabled=False)
    inputs, targets = batch
    size = micro_batch or len(inputs)
    parts = list(zip(inputs.split(size), targets.split(size), strict=True))
    loss = torch.zeros((), device=inputs.device)
    for number, part in enumerate(parts, start=1):
        with contextlib.nullcontext() if number == len(parts) else without_sending(model):
            part_of_loss = forward(model, part, dtype) * (len(part[0]) / len(inputs))
            scaler.scale(part_of_loss).backward()
        loss += part_of_loss.detach()
    if clip:
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), clip)
    scaler.step(optimizer)
    scaler.update()
    scheduler.step()
    optimizer.zero_grad()
    return loss


def without_sending(model: nn.Module) -> contextlib.AbstractContextManager[None]:
    """Gradients of several processes are averaged once a step, not with every micro-batch."""
    return model.no_sync() if hasattr(model, "no_sync") else contextlib.nullcontext()


def forward(model: nn.Module, batch: tuple[Tensor, Tensor], dtype: str) -> Tensor:
    inputs, targets = batch
    with torch.autocast(inputs.device.type, dtype=getattr(torch, dtype), enabled=dtype != "float32"):
        return model(inputs, targets)


@torch.no_grad()
def validate(model: nn.Module, tokens: Any, preset: Preset, device: torch.device, ranks: Ranks = ALONE) -> float:
    """Mean loss in nats a token over the same batches every time, without dropout."""
    model.eval()
    batches = data.validation_batches(tokens, preset.batch, preset.context, preset.eval_batches)
    losses = [forward(model, data.to_device(ranks.part(batch), device), preset.dtype) for batch in batches]
    model.train()
    return ranks.mean(torch.stack(losses).mean()).item()
