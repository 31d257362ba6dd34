"""What the forward and the backward kernels share."""

from __future__ import annotations

import contextlib
import functools

import torch
import triton
import triton.language as tl
from triton.runtime.interpreter import InterpretedFunction
from triton.tools.tensor_descriptor import TensorDescriptor

from ..philox import ROUNDS

# 16-bit kernels keep logits in units of ln 2 (EXP2), where the exponential is one instruction. In fp32 the rounding of
# that change of unit would be the largest error there is, so fp32 keeps natural logits.
LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)

# A new length or number of heads must not compile a new kernel.
SIZES = [
    "heads_q", "heads_k", "group", "seqlen_q", "seqlen_k", "window_left", "window_right", "num_tiles", "drop_below",
]  # fmt: skip
PHILOX_ROUNDS = tl.constexpr(ROUNDS)
# Tiles of the loops that treat NaN and inf with care are small, so that they need no more registers than the others.
SAFE_BLOCK = tl.constexpr(16)


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


@triton.jit
def locate(cu_seqlens_ptr, batch, seqlen):
    """Where a sequence starts in its tensor's batch entry, and how long it is: packed ones have `cu_seqlens`."""
    if cu_seqlens_ptr is not None:
        first = tl.load(cu_seqlens_ptr + batch)
        length = tl.load(cu_seqlens_ptr + batch + 1) - first
    else:
        first = 0
        length = seqlen
    return first, length


@triton.jit
def key_tiles(start_m, length_q, length_k, shift_left, shift_right, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
              BOUND_LEFT: tl.constexpr, BOUND_RIGHT: tl.constexpr, MASK_ALL: tl.constexpr):  # fmt: skip
    """Where the tiles of keys begin and end that some of these queries see, and between them those that all see."""
    begin = 0
    full_begin = 0
    full_end = length_k
    end = length_k
    if BOUND_RIGHT:
        full_end = tl.minimum(length_k, start_m + shift_right + 1)
        end = tl.minimum(length_k, tl.minimum(start_m + BLOCK_M, length_q) + shift_right)
    full_end = tl.maximum(full_end, 0) // BLOCK_N * BLOCK_N
    if BOUND_LEFT:
        begin = tl.maximum(start_m + shift_left, 0) // BLOCK_N * BLOCK_N
        full_begin = tl.minimum(start_m + BLOCK_M, length_q) - 1 + shift_left
        full_begin = tl.cdiv(tl.maximum(full_begin, 0), BLOCK_N) * BLOCK_N
        full_end = tl.maximum(full_end, begin)
        full_begin = tl.minimum(full_begin, full_end)
    if MASK_ALL:
        full_begin = begin
        full_end = begin
    return begin, full_begin, full_end, end


@triton.jit
def query_tiles(start_n, length_q, length_k, shift_left, shift_right, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
                BOUND_LEFT: tl.constexpr, BOUND_RIGHT: tl.constexpr, MASK_ALL: tl.constexpr,
                RAGGED: tl.constexpr):  # fmt: skip
    """The same for the queries that see these keys. RAGGED: what is behind the last query must be masked."""
    begin = 0
    full_begin = 0
    end = tl.cdiv(length_q, BLOCK_M) * BLOCK_M
    full_end = length_q // BLOCK_M * BLOCK_M if RAGGED else end
    if BOUND_RIGHT:
        begin = tl.maximum(start_n - shift_right, 0) // BLOCK_M * BLOCK_M
        full_begin = tl.maximum(start_n + BLOCK_N - 1 - shift_right + BLOCK_M - 1, 0) // BLOCK_M * BLOCK_M
    if BOUND_LEFT:
        last = tl.maximum(tl.minimum(start_n + BLOCK_N, length_k) - shift_left, 0)
        end = tl.minimum(end, tl.cdiv(last, BLOCK_M) * BLOCK_M)
        full_end = tl.minimum(full_end, tl.maximum(start_n - shift_left + 1, 0) // BLOCK_M * BLOCK_M)
    full_end = tl.maximum(end if MASK_ALL else full_end, begin)
    full_begin = full_end if MASK_ALL else tl.minimum(full_begin, full_end)
    return begin, full_begin, full_end, end


@triton.jit
def soften(dots, tanh_scale, EXP2: tl.constexpr):
    """tanh(dots · tanh_scale) under a softcap, else the products as they are."""
    if tanh_scale is None:
        return dots
    else:
        return tanh(dots * tanh_scale, EXP2)


@triton.jit
def tanh(x, EXP2: tl.constexpr):
    if EXP2:
        return 1.0 - 2.0 / (tl.exp2(x * (2.0 * LOG2_E)) + 1.0)
    else:
        # In fp32 the cancellation in that near 0 would be the largest error there is. Coefficients: Cephes, tanhf.
        z = x * x
        series = (((-5.70498872745e-3 * z + 2.06390887954e-2) * z - 5.37397155531e-2) * z + 1.33314422036e-1) * z
        series = (series - 3.33332819422e-1) * z * x + x
        return tl.where(tl.abs(x) < 0.625, series, 1.0 - tl.div_rn(2.0, tl.exp(2.0 * x) + 1.0))


@triton.jit
def score(x, rows, keys, rules, slope, mask, BOUND_LEFT: tl.constexpr, BOUND_RIGHT: tl.constexpr,
          CHECK_ROWS: tl.constexpr, CHECK_KEYS: tl.constexpr, MASKED: tl.constexpr, EXP2: tl.constexpr):  # fmt: skip
    """The scores that softmax sees, of what `soften` returned, and which pairs are visible (all unless MASKED).

    `rows` and `keys` are the positions, shaped so that they broadcast to the tile, which may lie on its side.
    """
    length_q, length_k, shift_left, shift_right, unit_scale = rules
    scores = x * unit_scale
    if slope is not None:
        scores -= slope * tl.abs(rows + (length_k - length_q) - keys).to(tl.float32)
    visible = keys < length_k if CHECK_KEYS else tl.full((1, 1), 1, tl.int1)
    if MASKED:
        if CHECK_ROWS:
            visible = visible & (rows < length_q)
        if BOUND_RIGHT:
            visible = visible & (keys <= rows + shift_right)
        if BOUND_LEFT:
            visible = visible & (keys >= rows + shift_left)
        if mask is not None:
            mask_ptr, stride_m, stride_n = mask
            inside = (rows < length_q) & (keys < length_k)
            offsets = rows.to(tl.int64) * stride_m + keys.to(tl.int64) * stride_n
            if mask_ptr.dtype.element_ty == tl.uint8:
                visible = visible & (tl.load(mask_ptr + offsets, mask=inside, other=0) != 0)
            else:
                bias = tl.load(mask_ptr + offsets, mask=inside, other=0.0).to(tl.float32)
                scores += bias * (LOG2_E if EXP2 else 1.0)
                visible = visible & (bias != -float("inf"))
    return scores, visible


@triton.jit
def head_of_mask(mask, batch, head):
    """One head of a mask (pointer and four strides), as `score` reads it."""
    return mask[0] + tl.cast(batch, tl.int64) * mask[1] + tl.cast(head, tl.int64) * mask[2], mask[3], mask[4]


@triton.jit
def kept(seed, drop_below, head, start_m, start_n, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """1.0 where dropout keeps a pair, else 0.0. The twin of `attention.philox.kept`: a call serves four keys."""
    rows = start_m + tl.arange(0, BLOCK_M)[:, None]
    groups = start_n // 4 + tl.arange(0, BLOCK_N // 4)[None, :]
    zeros = tl.zeros((BLOCK_M, BLOCK_N // 4), tl.int32)
    words = tl.philox(seed, zeros + rows, zeros + groups, zeros + head, zeros, n_rounds=PHILOX_ROUNDS)
    w0 = (words[0] >> 8).to(tl.int32) >= drop_below
    w1 = (words[1] >> 8).to(tl.int32) >= drop_below
    w2 = (words[2] >> 8).to(tl.int32) >= drop_below
    w3 = (words[3] >> 8).to(tl.int32) >= drop_below
    tile = tl.join(tl.join(w0.to(tl.int8), w2.to(tl.int8)), tl.join(w1.to(tl.int8), w3.to(tl.int8)))
    return tile.reshape(BLOCK_M, BLOCK_N)


@triton.jit
def not_finite(tile, mask_m):
    """Whether NaN or inf is in a row of the tile that counts."""
    return tl.sum(tl.where(mask_m, tl.sum(tile * 0.0, 1), 0.0), 0) != 0.0


@triton.jit
def finite_rows(x):
    """x with 0 for what isn't finite, and which rows had such."""
    finite = tl.abs(x.to(tl.float32)) < float("inf")
    return tl.where(finite, x, 0.0).to(x.dtype), tl.min(finite.to(tl.int32), 1) == 0


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
        return pointer(x)
    # As (B, H, S, D): Triton folds a reshape into the load, and so leaves the tile in shared memory, only if the sides
    # that the reshape drops come first.
    return TensorDescriptor(x, [batch, heads, seqlen, head_dim], [stride_b, stride_h, stride_s, 1], [1, 1, rows, width])


def pointer(x: torch.Tensor) -> tuple[torch.Tensor, int, int, int]:
    """x (B, S, H, D), loadable, in tiles of any size, for `load_tile`: strides in units of 16 bytes."""
    unit = 16 // x.element_size()
    stride_b, stride_s, stride_h, _ = x.stride()
    return x, stride_b // unit, stride_h // unit, stride_s // unit


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
