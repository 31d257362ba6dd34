"""What the options of a group of parameters may be, and the learning rate's factor that one of them names."""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from muon.matrices import row_blocks
from muon.polynomials import schedule

AdjustLR: TypeAlias = (
    Literal["original", "match_rms_adamw", "spectral_unclamped"] | Callable[[tuple[int, int]], float] | None
)
WeightDecayMode: TypeAlias = Literal["decoupled", "cautious"]


def lr_factor(adjust_lr_fn: AdjustLR, rows: int, cols: int) -> float:
    """Factor of the learning rate of a (rows, cols) matrix."""
    if callable(adjust_lr_fn):
        return adjust_lr_fn((rows, cols))
    if adjust_lr_fn == "match_rms_adamw":
        return 0.2 * math.sqrt(max(rows, cols))
    ratio = rows / max(cols, 1)
    return math.sqrt(ratio if adjust_lr_fn == "spectral_unclamped" else max(1.0, ratio))


def check_options(group: dict[str, Any]) -> None:
    """Raises a ValueError that names the option, its value and what is allowed."""
    lr = group["lr"]
    if isinstance(lr, Tensor) and lr.numel() != 1:
        raise ValueError("Tensor lr must be 1-element")
    if not lr >= 0.0:
        raise ValueError(f"Learning rate should be >= 0 but is: {lr}")
    for name in ("momentum", "weight_decay", "eps", "adamw_eps"):
        if not group[name] >= 0.0:
            raise ValueError(f"{name.replace('_', ' ')} should be >= 0 but is: {group[name]}")
    if len(group["betas"]) != 2:
        raise ValueError(f"betas should be two numbers but are: {group['betas']}")
    for index, beta in enumerate(group["betas"]):
        if not 0.0 <= beta < 1.0:
            raise ValueError(f"betas[{index}] should be in [0, 1) but is: {beta}")
    if group["algorithm"] not in ("muon", "adamw"):
        raise ValueError(f"algorithm should be 'muon' or 'adamw' but is: {group['algorithm']!r}")
    if group["matrix"] not in (None, "batch", "flatten", "transposed"):
        raise ValueError(f"matrix should be None, 'batch', 'flatten' or 'transposed' but is: {group['matrix']!r}")
    if group["weight_decay_mode"] not in ("decoupled", "cautious"):
        mode = group["weight_decay_mode"]
        raise ValueError(f"weight_decay_mode should be 'decoupled' or 'cautious' but is: {mode!r}")
    if group["neuron_norm"] is not None and not 0.0 <= group["neuron_norm"] < 1.0:
        raise ValueError(f"neuron_norm should be None or in [0, 1) but is: {group['neuron_norm']}")
    dtype = group["momentum_dtype"]
    if dtype not in (None, torch.float16, torch.bfloat16, torch.float32, torch.float64):
        raise ValueError(f"momentum_dtype should be None, float16, bfloat16, float32 or float64 but is: {dtype!r}")
    if group["workspace"] is not None and not group["workspace"] > 0:
        raise ValueError(f"workspace should be None or a positive number of bytes but is: {group['workspace']}")
    split = group["split"]
    sizes = split if isinstance(split, Iterable) else () if split is None else (split,)
    if not all(isinstance(size, int) for size in sizes):
        raise ValueError(f"split should be None, a number of blocks or their sizes but is: {split!r}")
    adjust_lr_fn = group["adjust_lr_fn"]
    names = (None, "original", "match_rms_adamw", "spectral_unclamped")
    if not callable(adjust_lr_fn) and adjust_lr_fn not in names:
        raise ValueError(f"Adjust learning rate function {adjust_lr_fn} is not supported: use one of {names[1:]}")
    schedule(group["ns_coefficients"], group["ns_steps"])


def check_parameters(group: dict[str, Any]) -> None:
    """Raises a ValueError that names a parameter of a Muon group that is no matrix, or that ``split`` doesn't fit."""
    if group["algorithm"] != "muon":
        return
    names: Sequence[str] = group.get("param_names") or [f"number {i}" for i in range(len(group["params"]))]
    for name, p in zip(names, group["params"], strict=True):
        if getattr(p, "_is_flat_param", False) or getattr(p, "_fsdp_flattened", False):
            raise ValueError(
                f"Muon needs matrices but FullyShardedDataParallel has flattened the parameter {name}: shard the model "
                "with torch.distributed.fsdp.fully_shard instead."
            )
        if p.ndim < 2:
            raise ValueError(
                f"Muon only supports 2D parameters whereas we found a parameter with size: {p.size()} (parameter "
                f"{name}; 3D to 5D are supported too). Put it into a group with algorithm='adamw'."
            )
        row_blocks(torch.empty(p.shape, device="meta"), group["matrix"], group["split"])
