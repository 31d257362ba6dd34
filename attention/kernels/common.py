"""What the forward and the backward kernels share."""

from __future__ import annotations

import contextlib
import functools

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
def load_tile(x_desc, batch, head, start, length, ROWS: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
              UPCAST: tl.constexpr):  # fmt: skip
    """Positions start, start + 1, ... of one head of what `describe` returned; past the end it reads as zero."""
    if isinstance(x_desc, tl.tensor_descriptor):
        tile = x_desc.load([batch, head, start, 0]).reshape(ROWS, BLOCK_D)
    else:
        # Strides come in units of 16 bytes, which tells the compiler that it may load as much at once.
        ptr = x_desc[0]
        unit: tl.constexpr = 128 // ptr.dtype.element_ty.primitive_bitwidth
        stride_s = tl.cast(x_desc[3], tl.int64) * unit  # positions may lie any distance apart
        ptr += tl.cast(batch, tl.int64) * x_desc[1] * unit + tl.cast(head, tl.int64) * x_desc[2] * unit
        ptr += start * stride_s
        offs_s = tl.arange(0, ROWS)
        offs_d = tl.arange(0, BLOCK_D)
        mask = (offs_s[:, None] < length - start) & (offs_d[None, :] < D)
        tile = tl.load(ptr + (offs_s[:, None] * stride_s + offs_d[None, :]), mask=mask, other=0.0)
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


def loadable(x: torch.Tensor) -> torch.Tensor:
    """x (B, S, H, D), or a copy that descriptors can read: contiguous rows that start at multiples of 16 bytes."""
    unit = 16 // x.element_size()
    *strides, stride_d = x.stride()
    if stride_d == 1 and all(s > 0 and s % unit == 0 for s in strides) and x.data_ptr() % 16 == 0:
        return x
    *sizes, width = x.shape
    copy = x.new_empty((*sizes, -(-width // unit) * unit))[..., :width]
    return copy.copy_(x)


def describe(x: torch.Tensor, rows: int, width: int) -> TensorDescriptor | tuple[torch.Tensor, int, int, int]:
    """x (B, S, H, D), loadable, in tiles of `rows` positions of one head, `width` wide; for `load_tile`."""
    batch, seqlen, heads, head_dim = x.shape
    stride_b, stride_s, stride_h, _ = x.stride()
    if x.dtype == torch.float32 or not has_bulk_copies(x.device):
        # Products outside the tensor cores want registers, and without a copy engine Triton would turn a descriptor
        # into loads that know nothing of alignment.
        unit = 16 // x.element_size()
        return x, stride_b // unit, stride_h // unit, stride_s // unit
    # As (B, H, S, D): Triton folds a reshape into the load, and so leaves the tile in shared memory, only if the sides
    # that the reshape drops come first.
    return TensorDescriptor(x, [batch, heads, seqlen, head_dim], [stride_b, stride_h, stride_s, 1], [1, 1, rows, width])


@functools.cache
def has_bulk_copies(device: torch.device) -> bool:
    """Whether the copy engine of Hopper and its successors is there, as it is in Triton's interpreter."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device)[0] >= 9


def interpreted(kernel: object) -> bool:
    """Whether Triton runs this kernel in its interpreter (TRITON_INTERPRET=1)."""
    return isinstance(kernel, InterpretedFunction)


def on_device_of(x: torch.Tensor) -> contextlib.AbstractContextManager[object]:
    """Makes x's GPU current where it isn't: Triton launches on the current one."""
    if x.is_cuda and x.device.index != torch.cuda.current_device():
        return torch.cuda.device(x.device)
    return contextlib.nullcontext()
