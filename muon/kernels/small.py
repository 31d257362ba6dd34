"""The whole Gram iteration of a small matrix, n <= 128, in one program: one launch for a batch.

The Gram iteration touches X (n, m) only where a segment begins or ends. A program walks over the columns of G twice for
the norm, then once for each Gram matrix and once for the result; each walk makes X anew from G, so that nothing but the
result is ever written, and all walks but the first find G in the L2 cache. The rest happens on (n, n) matrices in
registers.

Torch twin: ``muon.newton_schulz.gram_iteration`` after ``muon.matrices.normalize``.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from muon.kernels import hopper_small
from muon.kernels.stages import ALIGNMENT, DTYPES
from muon.newton_schulz import RESTART_GROWTH, SMALL_RESTART_GROWTH, segments
from muon.polynomials import Triple

BLOCK_M = 64
NUM_WARPS = {16: 1, 32: 4, 64: 4, 128: 8}  # no spills; with Triton 3.6 up to 68 bytes of a few tall or float32 ones


@triton.jit
def _columns(desc, batch, start, IS_TALL: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr):
    """Columns start, start + 1, ... of a matrix, or rows of a tall one, as a (BLOCK_N, BLOCK_M) tile; zero outside."""
    if IS_TALL:
        return tl.trans(desc.load([batch, start, 0]).reshape(BLOCK_M, BLOCK_N)).to(tl.float32)
    else:
        return desc.load([batch, 0, start]).reshape(BLOCK_N, BLOCK_M).to(tl.float32)


@triton.jit
def _product(x, y, acc):
    return tl.dot(x, y, acc, input_precision="ieee").to(x.dtype)


@triton.jit
def small_kernel(
    g_desc, out_desc, coefficients,
    m, eps,
    IS_TALL: tl.constexpr, NORMALIZE: tl.constexpr, STEPS: tl.constexpr, RESTARTS: tl.constexpr,
    COMPUTE_DTYPE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """out = U p(S / ‖G‖) Vᵀ; coefficients a, b, c of each step in turn; bit i of RESTARTS: step i begins a segment."""
    batch = tl.program_id(0)
    whole = 1.0
    rest = 1.0
    if NORMALIZE:
        largest = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
        for start in range(0, m, BLOCK_M):
            largest = tl.maximum(largest, tl.abs(_columns(g_desc, batch, start, IS_TALL, BLOCK_N, BLOCK_M)))
        whole = tl.max(largest)
        whole = tl.where(whole == 0.0, 1.0, whole)
        squares = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
        for start in range(0, m, BLOCK_M):
            x = _columns(g_desc, batch, start, IS_TALL, BLOCK_N, BLOCK_M) / whole
            squares += x * x
        rest = tl.sqrt(tl.sum(squares))
        rest = tl.where(rest < eps, eps, rest)

    factors = ()  # of the segments that are done: X = Π (factor + shift I) G / ‖G‖
    shifts = ()
    q = tl.zeros((BLOCK_N, BLOCK_N), COMPUTE_DTYPE)
    r = q
    shift = 1.0
    for i in tl.static_range(STEPS + 1):
        if i == STEPS or (RESTARTS >> i) & 1:
            if i > 0:
                # Triton can't unpack a tuple into a new one.
                factors = factors + (q,)  # type: ignore[assignment]  # noqa: RUF005
                shifts = shifts + (shift,)  # type: ignore[assignment]  # noqa: RUF005
            gram = tl.zeros((BLOCK_N, BLOCK_N), tl.float32)
            for start in range(0, m, BLOCK_M):
                x = (_columns(g_desc, batch, start, IS_TALL, BLOCK_N, BLOCK_M) / whole / rest).to(COMPUTE_DTYPE)
                for s in tl.static_range(len(factors)):
                    x = _product(factors[s], x, shifts[s] * x.to(tl.float32))  # (BLOCK_N, BLOCK_M)
                if i < STEPS:
                    gram = tl.dot(x, tl.trans(x), gram, input_precision="ieee")
                elif IS_TALL:
                    out_desc.store([batch, start, 0], tl.trans(x).to(out_desc.dtype).reshape(1, BLOCK_M, BLOCK_N))
                else:
                    out_desc.store([batch, 0, start], x.to(out_desc.dtype).reshape(1, BLOCK_N, BLOCK_M))
            r = gram.to(COMPUTE_DTYPE)
        if i < STEPS:
            a, b, c = coefficients[3 * i], coefficients[3 * i + 1], coefficients[3 * i + 2]
            z = tl.dot(r, r, input_precision="ieee")
            z = (c * z + b * r.to(tl.float32)).to(COMPUTE_DTYPE)
            if (RESTARTS >> i) & 1:
                q = z
                shift = a
            else:
                q = _product(q, z, a * q.to(tl.float32) + shift * z.to(tl.float32))
                shift *= a
            if i + 1 < STEPS and not (RESTARTS >> (i + 1)) & 1:
                rz = _product(r, z, a * r.to(tl.float32))
                r = _product(z, rz, a * rz.to(tl.float32))


def orthogonalize_small(G: Tensor, steps: Sequence[Triple], dtype: torch.dtype, eps: float | None) -> Tensor:
    """U p(S / ‖G‖) Vᵀ of G (batch, rows, cols), the shorter side at most 128, in its dtype; products take ``dtype``.

    Without ``eps`` G has been divided by its norm already.
    """
    G = _describable(G)
    batch, rows, cols = G.shape
    is_hoppers = hopper_small.suits(G, dtype)
    found = segments(steps, RESTART_GROWTH if is_hoppers else SMALL_RESTART_GROWTH)
    restarts = sum(1 << sum(map(len, found[:i])) for i in range(len(found)))
    out = _empty(G)
    coefficients = tuple(value for triple in steps for value in triple)
    if is_hoppers:
        hopper_small.orthogonalize_small(G, out, coefficients, restarts, eps)
        return out
    is_tall = rows > cols
    block_n = max(16, triton.next_power_of_2(min(rows, cols)))
    block = [1, BLOCK_M, block_n] if is_tall else [1, block_n, BLOCK_M]
    g_desc, out_desc = (TensorDescriptor(tensor, tensor.shape, tensor.stride(), block) for tensor in (G, out))
    with torch.cuda.device_of(G):
        small_kernel[(batch,)](
            g_desc, out_desc, coefficients, max(rows, cols), eps or 0.0,
            IS_TALL=is_tall, NORMALIZE=eps is not None, STEPS=len(steps), RESTARTS=restarts,
            COMPUTE_DTYPE=DTYPES[dtype], BLOCK_N=block_n, BLOCK_M=BLOCK_M, num_warps=NUM_WARPS[block_n],
        )  # fmt: skip
    return out


def _describable(G: Tensor) -> Tensor:
    """G, or a copy of it that a descriptor can read: rows apart, each beginning on a whole 16-byte unit."""
    strides = [stride * G.element_size() for stride in G.stride()[:2]]
    if G.stride(2) == 1 and G.data_ptr() % 16 == 0 and all(s > 0 and s % 16 == 0 for s in strides):
        return G
    return _empty(G).copy_(G)


def _empty(G: Tensor) -> Tensor:
    """Like G, with rows that begin on whole 16-byte units."""
    batch, rows, cols = G.shape
    return G.new_empty(batch, rows, -(-cols // ALIGNMENT) * ALIGNMENT)[:, :, :cols]
