"""The arguments that all of attention's kernels are launched with."""

from __future__ import annotations

from typing import Any

import torch

from ..philox import threshold
from ..reference import Options
from .common import interpreted, load_tile
from .tiles import Tile, padded_widths


def shared_arguments(q: torch.Tensor, v: torch.Tensor, options: Options) -> dict[str, Any]:
    """What q (B, Sq, Hq, D), v (B, Sk, Hkv, Dv) and the options are to a kernel.

    An option that is off is None, for which the kernel compiles to nothing.
    """
    dropout = options.seed is not None
    _, seqlen_q, heads_q, head_dim = q.shape
    _, seqlen_k, heads_k, head_dim_v = v.shape
    block_d, block_dv = padded_widths(head_dim, head_dim_v)
    return {
        "group": heads_q // heads_k, "seqlen_q": seqlen_q, "seqlen_k": seqlen_k,
        "D": head_dim, "DV": head_dim_v, "BLOCK_D": block_d, "BLOCK_DV": block_dv,
        "slopes_ptr": None if options.slopes is None else options.slopes.contiguous(),
        "mask": mask_argument(options.mask),
        "seed_ptr": options.seed,
        "cu_q_ptr": None if options.cu_seqlens_q is None else options.cu_seqlens_q.contiguous(),
        "cu_k_ptr": None if options.cu_seqlens_k is None else options.cu_seqlens_k.contiguous(),
        "window_left": options.window_left or 0,
        "window_right": options.window_right or 0,
        "drop_below": threshold(options.dropout_p) if dropout else None,
        "keep_scale": 1 / (1 - options.dropout_p) if dropout else None,
        "softcap": options.softcap,
    }  # fmt: skip


def mask_argument(mask: torch.Tensor | None) -> tuple[Any, ...] | None:
    """A mask (B or 1, Hq or 1, Sq or 1, Sk or 1) as kernels take it: pointer and strides, 0 where it is broadcast."""
    if mask is None:
        return None
    strides = (stride if size > 1 else 0 for stride, size in zip(mask.stride(), mask.shape, strict=True))
    return mask.view(torch.uint8) if mask.dtype == torch.bool else mask, *strides


def compiled_with(tile: Tile, options: Options) -> dict[str, Any]:
    """The constants and the compiler's options of one tile."""
    bounded = options.window_left is not None or options.window_right is not None
    return {
        "BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n, "num_warps": tile.num_warps, "num_stages": tile.num_stages,
        "BOUND_LEFT": options.window_left is not None, "BOUND_RIGHT": options.window_right is not None,
        "ONE_LOOP": bounded and tile.one_loop, "UPCAST": interpreted(load_tile), "enable_fp_fusion": True,
    }  # fmt: skip
