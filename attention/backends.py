"""Which backend runs a call."""

from __future__ import annotations

import importlib.util
import os
from typing import Literal, get_args

import torch
from torch import Tensor

from .reference import Options

Backend = Literal["auto", "triton", "hopper", "torch"]
HAS_TRITON = importlib.util.find_spec("triton") is not None
# Below these the portable kernels' smaller tiles waste less.
MIN_HOPPER_QUERIES = 128
MIN_HOPPER_WIDTH = 33


def pick_backend(backend: str, q: Tensor, options: Options, with_max_logits: bool) -> str:
    """The backend to name to the operator; raises a ValueError if it can't run this."""
    if backend not in get_args(Backend):
        raise ValueError(f"backend must be one of {', '.join(get_args(Backend))}, got {backend!r}")
    if backend == "auto":
        return "auto" if q.device.type == "cuda" and HAS_TRITON else "torch"
    if backend != "torch" and not HAS_TRITON:
        raise ValueError(f"backend={backend!r} needs the package triton, which is not installed: use 'auto' or 'torch'")
    if backend == "triton" and q.device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        raise ValueError(f"backend='triton' needs tensors on a GPU, got {q.device}: use 'auto' or 'torch'")
    if backend == "hopper" and (reason := why_not_hopper(q, options, with_max_logits)):
        raise ValueError(f"backend='hopper' {reason}: use 'auto' or 'triton'")
    return backend


def why_not_hopper(q: Tensor, options: Options, with_max_logits: bool) -> str | None:
    """What the Gluon kernels lack for this, or None."""
    if q.device.type != "cuda" or torch.cuda.get_device_capability(q.device)[0] != 9:
        return f"needs tensors on a Hopper GPU, got {q.device}"
    if q.dtype == torch.float32:
        return f"takes float16 and bfloat16, got {q.dtype}"
    uncovered = {"alibi_slopes": options.slopes, "attn_mask": options.mask, "dropout_p": options.seed}
    for name, value in uncovered.items():
        if value is not None:
            return f"doesn't cover {name}"
    if options.softcap is not None and with_max_logits:
        return "doesn't cover return_max_logits with softcap"
    return None


def runs_on_hopper(backend: str, q: Tensor, v: Tensor, options: Options, with_max_logits: bool) -> bool:
    """Whether the forward of backend "auto", "hopper" or "triton" is the Gluon kernel's; without work, nobody's."""
    if backend == "triton" or q.numel() == 0 or v.numel() == 0:
        return False
    if backend == "hopper":
        return True
    queries = options.max_seqlen_q if options.cu_seqlens_q is not None else q.shape[1]
    is_large = queries >= MIN_HOPPER_QUERIES and max(q.shape[-1], v.shape[-1]) >= MIN_HOPPER_WIDTH
    return is_large and why_not_hopper(q, options, with_max_logits) is None


def backward_runs_on_hopper(backend: str, q: Tensor, k: Tensor, v: Tensor, options: Options) -> bool:
    """The same of the backward, which covers less: it adds up dq in no fixed order, which `deterministic` rules out."""
    if options.deterministic or k.shape != v.shape:
        return False
    if options.cu_seqlens_q is not None and (
        options.cu_seqlens_q.shape[0] == 1 or min(options.max_seqlen_q, options.max_seqlen_k) == 0
    ):
        return False  # without work
    is_wide = q.shape[-1] >= MIN_HOPPER_WIDTH and q.shape[-1] % 8 == 0
    return is_wide and runs_on_hopper(backend, q, v, options, with_max_logits=False)
