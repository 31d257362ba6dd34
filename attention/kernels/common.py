"""What the forward and the backward kernels share."""

from __future__ import annotations

import contextlib

import torch
import triton
import triton.language as tl
from triton.runtime.interpreter import InterpretedFunction

# 16-bit kernels keep logits in units of ln 2 (EXP2), where the exponential is one instruction. In fp32 the rounding of
# that change of unit would be the largest error there is, so fp32 keeps natural logits.
LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)

# A new length or number of heads must not compile a new kernel.
SIZES = ["heads_q", "heads_k", "group", "seqlen_q", "seqlen_k", "window_right", "num_tiles"]


@triton.jit
def load_tile(ptr, start, length, stride_s, stride_d, ROWS: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
              MASK_ROWS: tl.constexpr, UPCAST: tl.constexpr):  # fmt: skip
    """Rows start, start + 1, ... of a (length, D) matrix; what is past its end reads as zero."""
    offs_s = tl.arange(0, ROWS)
    offs_d = tl.arange(0, BLOCK_D)
    # The tile's base is a 64-bit scalar, so that the offsets inside the tile can be 32-bit.
    ptrs = ptr + tl.cast(start, tl.int64) * stride_s + (offs_s[:, None] * stride_s + offs_d[None, :] * stride_d)
    if MASK_ROWS and BLOCK_D != D:
        tile = tl.load(ptrs, mask=(offs_s[:, None] < length - start) & (offs_d[None, :] < D), other=0.0)
    elif MASK_ROWS:
        tile = tl.load(ptrs, mask=offs_s[:, None] < length - start, other=0.0)
    elif BLOCK_D != D:
        tile = tl.load(ptrs, mask=offs_d[None, :] < D, other=0.0)
    else:
        tile = tl.load(ptrs)
    if UPCAST:
        tile = tile.to(tl.float32)
    return tile  # (ROWS, BLOCK_D)


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


def interpreted(kernel: object) -> bool:
    """Whether Triton runs this kernel in its interpreter (TRITON_INTERPRET=1)."""
    return isinstance(kernel, InterpretedFunction)


def on_device_of(x: torch.Tensor) -> contextlib.AbstractContextManager[object]:
    """Makes x's GPU current where it isn't: Triton launches on the current one."""
    if x.is_cuda and x.device.index != torch.cuda.current_device():
        return torch.cuda.device(x.device)
    return contextlib.nullcontext()
