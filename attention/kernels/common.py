"""What the forward and the backward kernels share."""

from __future__ import annotations

import contextlib

import torch
import triton
import triton.language as tl
from triton.runtime.interpreter import InterpretedFunction
from triton.tools.tensor_descriptor import TensorDescriptor

# 16-bit kernels keep logits in units of ln 2 (EXP2), where the exponential is one instruction. In fp32 the rounding of
# that change of unit would be the largest error there is, so fp32 keeps natural logits.
LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)

# A new length or number of heads must not compile a new kernel.
SIZES = ["heads_q", "heads_k", "group", "seqlen_q", "seqlen_k", "window_right", "num_tiles"]


@triton.jit
def load_tile(desc, batch, start, head, ROWS: tl.constexpr, WIDTH: tl.constexpr, UPCAST: tl.constexpr):
    """Positions start, start + 1, ... of one head; what is past the last position or the head's width reads as zero."""
    tile = desc.load([batch, head, start, 0]).reshape(ROWS, WIDTH)
    if UPCAST:
        tile = tile.to(tl.float32)
    return tile  # (ROWS, WIDTH)


@triton.jit
def store_tile(ptr, tile, start, length, stride_s, ROWS: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Writes the rows and columns of the tile that lie inside a (length, D) matrix with contiguous rows."""
    offs_s = tl.arange(0, ROWS)
    offs_d = tl.arange(0, BLOCK_D)
    ptrs = ptr + tl.cast(start, tl.int64) * stride_s + offs_s[:, None] * stride_s + offs_d[None, :]
    mask = offs_s[:, None] < length - start
    if BLOCK_D != D:
        mask = mask & (offs_d[None, :] < D)
    tl.store(ptrs, tile.to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def exponential(x, EXP2: tl.constexpr):
    return tl.exp2(x) if EXP2 else tl.exp(x)


def loadable(x: torch.Tensor) -> torch.Tensor:
    """x (B, S, H, D), or a copy that descriptors can read: contiguous rows that start at multiples of 16 bytes."""
    unit = 16 // x.element_size()
    *strides, stride_d = x.stride()
    if stride_d == 1 and all(s > 0 and s % unit == 0 for s in strides) and x.data_ptr() % 16 == 0:
        return x
    *sizes, width = x.shape
    copy = x.new_empty((*sizes, -(-width // unit) * unit))[..., :width]
    return copy.copy_(x)


def describe(x: torch.Tensor, rows: int, width: int) -> TensorDescriptor:
    """x (B, S, H, D) in tiles of `rows` positions of one head, `width` wide."""
    # As (B, H, S, D): Triton folds a reshape into the load, and so leaves the tile in shared memory, only if the sides
    # that the reshape drops come first.
    x = x.transpose(1, 2)
    return TensorDescriptor(x, x.shape, x.stride(), [1, 1, rows, width])


def interpreted(kernel: object) -> bool:
    """Whether Triton runs this kernel in its interpreter (TRITON_INTERPRET=1)."""
    return isinstance(kernel, InterpretedFunction)


def on_device_of(x: torch.Tensor) -> contextlib.AbstractContextManager[object]:
    """Makes x's GPU current where it isn't: Triton launches on the current one."""
    if x.is_cuda and x.device.index != torch.cuda.current_device():
        return torch.cuda.device(x.device)
    return contextlib.nullcontext()
