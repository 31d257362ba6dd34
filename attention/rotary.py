"""Rotary positions (arXiv:2104.09864), and the operator `attention::rotary_angles` that computes their angles."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

ROTARY_BASE = 10000.0

torch.library.define("attention::rotary_angles", "(Tensor positions, SymInt head_dim) -> (Tensor cos, Tensor sin)")


def rotary_angles(positions: Tensor, head_dim: int) -> tuple[Tensor, Tensor]:
    """cos and sin, float32 (..., S, 1, head_dim / 2), of position · 10000^(-2i / head_dim) for positions (..., S).

    Computed where it is used, never stored: no length is too long, and a layer moved to bfloat16 keeps exact angles.
    An operator, because a compiler can't look into it: it would compute the power, the cosine and the sine anew for
    every element that is rotated. So it calls this, and once for all layers that have the same positions.
    """
    angles: tuple[Tensor, Tensor] = torch.ops.attention.rotary_angles(positions, head_dim)
    return angles


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates the pairs (x_i, x_{i + D/2}) of x (B, S, H, D) in float32; the result has x's dtype."""
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


@torch.library.impl("attention::rotary_angles", "CompositeExplicitAutograd")
def _rotary_angles(positions: Tensor, head_dim: int) -> tuple[Tensor, Tensor]:
    exponents = torch.arange(0, -head_dim, -2, dtype=torch.float32, device=positions.device) / head_dim
    angles = positions[..., None, None] * ROTARY_BASE**exponents
    return angles.cos(), angles.sin()


def _rotary_angles_fake(positions: Tensor, head_dim: int) -> tuple[Tensor, Tensor]:
    shape = (*positions.shape, 1, head_dim // 2)
    return positions.new_empty(shape, dtype=torch.float32), positions.new_empty(shape, dtype=torch.float32)


def _rotary_angles_vmap(
    info: Any, in_dims: tuple[int | None, ...], positions: Tensor, head_dim: int
) -> tuple[tuple[Tensor, Tensor], tuple[int, int]]:
    assert in_dims[0] is not None
    return rotary_angles(positions.movedim(in_dims[0], 0), head_dim), (0, 0)


torch.library.register_fake("attention::rotary_angles", _rotary_angles_fake)
torch.library.register_vmap("attention::rotary_angles", _rotary_angles_vmap)
