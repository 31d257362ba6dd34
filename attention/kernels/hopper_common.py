"""What the Gluon kernels for Hopper share."""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_wait

from .common import interpreted, load_tile

# Names that Triton 3.6 has otherwise than its successors.
load = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
store = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global
barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier

INTERPRETED = tl.constexpr(interpreted(load_tile))
# How to launch a kernel that may start while the one before it in the stream ends, and so begins with `await_previous`.
OVERLAPPING = {"launch_pdl": True}
L2_SHARE = 2**25  # bytes that programs running at the same time may share in a cache of 50 MB


@triton.jit
def await_previous():
    """Waits until the kernel launched before this one has ended and its results can be seen.

    Every program of an `OVERLAPPING` kernel comes here before it touches memory, even if it then does nothing: the
    kernel after it relies on all that came before.
    """
    if not INTERPRETED:
        gdc_wait()


@gluon.jit
def barriers(NUMBER: gl.constexpr, COUNT: gl.constexpr):
    """Barriers, each of which COUNT arrivals complete."""
    all_barriers = gl.allocate_shared_memory(gl.int64, [NUMBER, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(NUMBER):
        mbarrier.init(all_barriers.index(i), count=COUNT)
    return all_barriers


@gluon.jit
def arrive(a_barrier):
    """All warps of this role have come this far."""
    barrier()
    mbarrier.arrive(a_barrier)


@gluon.jit
def write(matrix, values):
    """Values to shared memory, once nobody reads it any more, and visible to the copy engine."""
    barrier()
    matrix.store(values)
    fence_async_shared()
    barrier()


@gluon.jit
def hide_if_greater(x, a, b):
    """-inf where a > b. In one piece of assembler, since the compiler would do all comparisons ahead of all selections
    and, short of predicates, pack and unpack them, which doubles the work of a masked tile."""
    return gl.inline_asm_elementwise(
        "{ .reg .pred p; setp.gt.s32 p, $2, $3; selp.f32 $0, 0fFF800000, $1, p; }", "=f,f,r,r", [x, a, b],
        dtype=gl.float32, is_pure=True, pack=1,
    )  # fmt: skip


def describe(x: torch.Tensor, rows: int, width: int) -> TensorDescriptor:
    """x (B, S, H, D), loadable, in tiles of `rows` positions of one head, `width` wide, as (B, H, S, D)."""
    batch, seqlen, heads, head_dim = x.shape
    stride_b, stride_s, stride_h, _ = x.stride()
    layout = _layout(rows, width)
    return TensorDescriptor(
        x, [batch, heads, seqlen, head_dim], [stride_b, stride_h, stride_s, 1], [1, 1, rows, width], layout
    )


@functools.cache
def _layout(rows: int, width: int) -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout.get_default_for([1, 1, rows, width], gl.float16)  # the same for bfloat16


@functools.cache
def processors(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def padded_width(width: int) -> int:
    """What a head's width is padded to in shared memory."""
    return 64 if width <= 64 else 128 if width <= 128 else 256
