"""The whole Gram iteration of a small matrix, n <= 128, in one program: one launch for a batch.

The Gram iteration touches X (n, m) only where a segment begins or ends, so a program walks over X's columns once for
each of two norms, once for the first Gram matrix and once after each segment; all walks but the first find X in the L2
cache. Everything between happens on (n, n) matrices in registers.

Torch twin: ``muon.newton_schulz.gram_iteration`` after ``muon.matrices.normalize``.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from muon.polynomials import Triple

BLOCK_M = 64
DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


@triton.jit
def _columns(ptr, start, n, m, stride_n, stride_m, BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr):
    """Pointers to columns start, start + 1, ... of an (n, m) matrix, and which of them lie in it."""
    offs_n = tl.arange(0, BLOCK_N)
    offs_m = start + tl.arange(0, BLOCK_M)
    ptrs = ptr + offs_n.to(tl.int64)[:, None] * stride_n + offs_m.to(tl.int64)[None, :] * stride_m
    return ptrs, (offs_n < n)[:, None] & (offs_m < m)[None, :]


@triton.jit
def _product(x, y, acc):
    return tl.dot(x, y, acc, input_precision="ieee")


@triton.jit
def small_kernel(
    g_ptr, out_ptr, coefficients,
    n, m, eps,
    stride_gb, stride_gn, stride_gm, stride_ob, stride_on, stride_om,
    NORMALIZE: tl.constexpr, STEPS: tl.constexpr, RESTARTS: tl.constexpr, COMPUTE_DTYPE: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """out = U p(S / ‖G‖) Vᵀ; coefficients a, b, c of each step in turn; bit i of RESTARTS: step i begins a segment."""
    batch = tl.program_id(0).to(tl.int64)
    g_ptr += batch * stride_gb
    out_ptr += batch * stride_ob

    whole = 1.0
    rest = 1.0
    if NORMALIZE:
        largest = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
        for start in range(0, m, BLOCK_M):
            ptrs, mask = _columns(g_ptr, start, n, m, stride_gn, stride_gm, BLOCK_N, BLOCK_M)
            largest = tl.maximum(largest, tl.abs(tl.load(ptrs, mask=mask, other=0.0).to(tl.float32)))
        whole = tl.max(largest)
        whole = tl.where(whole == 0.0, 1.0, whole)
        squares = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
        for start in range(0, m, BLOCK_M):
            ptrs, mask = _columns(g_ptr, start, n, m, stride_gn, stride_gm, BLOCK_N, BLOCK_M)
            x = tl.load(ptrs, mask=mask, other=0.0).to(tl.float32) / whole
            squares += x * x
        rest = tl.sqrt(tl.sum(squares))
        rest = tl.where(rest < eps, eps, rest)

    # X ← (q + shift I) X is to be done when the segment ends; before the first it is done already, by the norm.
    q = tl.zeros((BLOCK_N, BLOCK_N), COMPUTE_DTYPE)
    r = q
    shift = 1.0
    for i in tl.static_range(STEPS + 1):
        if i == STEPS or (RESTARTS >> i) & 1:
            gram = tl.zeros((BLOCK_N, BLOCK_N), tl.float32)
            for start in range(0, m, BLOCK_M):
                out_ptrs, mask = _columns(out_ptr, start, n, m, stride_on, stride_om, BLOCK_N, BLOCK_M)
                if (RESTARTS & ((1 << i) - 1)) <= 1:  # X is not in out yet, it is G over its norm
                    ptrs, mask = _columns(g_ptr, start, n, m, stride_gn, stride_gm, BLOCK_N, BLOCK_M)
                    x = (tl.load(ptrs, mask=mask, other=0.0).to(tl.float32) / whole / rest).to(COMPUTE_DTYPE)
                else:
                    x = tl.load(out_ptrs, mask=mask, other=0.0).to(COMPUTE_DTYPE)  # (BLOCK_N, BLOCK_M)
                if i > 0:
                    x = _product(q, x, shift * x.to(tl.float32)).to(out_ptr.dtype.element_ty)
                    tl.store(out_ptrs, x, mask=mask)
                    x = x.to(COMPUTE_DTYPE)
                if i < STEPS:
                    gram = _product(x, tl.trans(x), gram)
            tl.debug_barrier()  # other threads read these columns back
            r = gram.to(COMPUTE_DTYPE)
        if i < STEPS:
            a, b, c = coefficients[3 * i], coefficients[3 * i + 1], coefficients[3 * i + 2]
            zero = tl.zeros((BLOCK_N, BLOCK_N), tl.float32)
            z = (c * _product(r, r, zero) + b * r.to(tl.float32)).to(COMPUTE_DTYPE)
            if (RESTARTS >> i) & 1:
                q = z
                shift = a
            else:
                q = _product(q, z, a * q.to(tl.float32) + shift * z.to(tl.float32)).to(COMPUTE_DTYPE)
                shift *= a
            if i + 1 < STEPS and not (RESTARTS >> (i + 1)) & 1:
                rz = _product(r, z, a * r.to(tl.float32)).to(COMPUTE_DTYPE)
                r = _product(z, rz, a * rz.to(tl.float32)).to(COMPUTE_DTYPE)


def orthogonalize_small(
    G: Tensor, segments: Sequence[Sequence[Triple]], dtype: torch.dtype, eps: float | None
) -> Tensor:
    """U p(S / ‖G‖) Vᵀ of G (batch, n, m), n <= 128, any strides, in G's dtype; products take operands of ``dtype``.

    Without ``eps`` G has been divided by its norm already.
    """
    batch, n, m = G.shape
    steps = [triple for segment in segments for triple in segment]
    restarts = sum(1 << sum(map(len, segments[:i])) for i in range(len(segments)))
    out = torch.empty(batch, n, m, dtype=G.dtype, device=G.device)
    coefficients = tuple(value for triple in steps for value in triple)
    block_n = max(16, triton.next_power_of_2(n))
    with torch.cuda.device_of(G):
        small_kernel[(batch,)](
            G, out, coefficients, n, m, eps or 0.0, *G.stride(), *out.stride(),
            NORMALIZE=eps is not None, STEPS=len(steps), RESTARTS=restarts, COMPUTE_DTYPE=DTYPES[dtype],
            BLOCK_N=block_n, BLOCK_M=BLOCK_M, num_warps=4 if block_n <= 64 else 8,
        )  # fmt: skip
    return out
