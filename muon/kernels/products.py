"""The matrix products of Newton-Schulz in portable Triton: batched, one launch each, epilogues fused.

Matrices live in contiguous (batch, n, m) tensors whose sides are multiples of 16, zero where that is padding, so that
every load is a full aligned vector; padding stays zero through every product. A result known to be symmetric is
computed in the lower triangle of tiles and mirrored.

Torch twin of each: ``muon.newton_schulz.TorchOperations``.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

ALIGNMENT = 16  # elements; what Triton specialises pointers and sizes on


@triton.jit
def symmetric_product_kernel(
    a_ptr, b_ptr, c_ptr, d_ptr, out_ptr,
    alpha, beta, gamma,
    n, k,
    HAS_C: tl.constexpr, HAS_D: tl.constexpr, EVEN_K: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """out = alpha A Bᵀ + beta C + gamma D, known to be symmetric; A, B (batch, n, k), the others (batch, n, n)."""
    # Tile t of the lower triangle, row by row, is (i, j) with i (i + 1) / 2 + j = t.
    t = tl.program_id(0)
    i = ((tl.sqrt(8.0 * t.to(tl.float32) + 1.0) - 1.0) * 0.5).to(tl.int32)
    i = tl.where(i * (i + 1) // 2 > t, i - 1, i)
    i = tl.where((i + 1) * (i + 2) // 2 <= t, i + 1, i)
    j = t - i * (i + 1) // 2
    batch = tl.program_id(1).to(tl.int64)
    row = i.to(tl.int64) * BLOCK_N
    col = j.to(tl.int64) * BLOCK_N

    offs = tl.arange(0, BLOCK_N)
    offs_k = tl.arange(0, BLOCK_K)
    mask_row = offs < n - row
    mask_col = offs < n - col
    a_ptrs = a_ptr + (batch * n + row) * k + offs[:, None] * k + offs_k[None, :]  # (BLOCK_N, BLOCK_K)
    b_ptrs = b_ptr + (batch * n + col) * k + offs[None, :] * k + offs_k[:, None]  # (BLOCK_K, BLOCK_N)
    acc = tl.zeros((BLOCK_N, BLOCK_N), dtype=tl.float32)
    for start in range(0, k, BLOCK_K):
        if EVEN_K:
            a = tl.load(a_ptrs, mask=mask_row[:, None], other=0.0)
            b = tl.load(b_ptrs, mask=mask_col[None, :], other=0.0)
        else:
            mask_k = offs_k < k - start
            a = tl.load(a_ptrs, mask=mask_row[:, None] & mask_k[None, :], other=0.0)
            b = tl.load(b_ptrs, mask=mask_col[None, :] & mask_k[:, None], other=0.0)
        if UPCAST:
            a = a.to(tl.float32)
            b = b.to(tl.float32)
        acc = tl.dot(a, b, acc, input_precision="ieee")
        a_ptrs += BLOCK_K
        b_ptrs += BLOCK_K

    acc *= alpha
    tile = (batch * n + row) * n + col + offs[:, None] * n + offs[None, :]  # (BLOCK_N, BLOCK_N)
    mask = mask_row[:, None] & mask_col[None, :]
    if HAS_C:
        acc += beta * tl.load(c_ptr + tile, mask=mask, other=0.0).to(tl.float32)
    if HAS_D:
        acc += gamma * tl.load(d_ptr + tile, mask=mask, other=0.0).to(tl.float32)
    out = acc.to(out_ptr.dtype.element_ty)
    # Of a tile on the diagonal the lower half counts, so that the result is symmetric to the bit: the iteration
    # multiplies by transposes as if they were the matrices themselves.
    lower = row + offs[:, None] >= col + offs[None, :]
    upper = col + offs[:, None] <= row + offs[None, :]
    tl.store(out_ptr + tile, out, mask=mask & lower)
    mirrored = (batch * n + col) * n + row + offs[:, None] * n + offs[None, :]
    tl.store(out_ptr + mirrored, tl.trans(out), mask=mask_col[:, None] & mask_row[None, :] & upper)


@triton.jit
def update_kernel(
    b_ptr, x_ptr, out_ptr,
    a,
    n, m,
    EVEN_K: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """out = a X + B X; B (batch, n, n), X and out (batch, n, m)."""
    # Groups of GROUP tile rows go through the columns together, so that their tiles of X are read from the L2 cache.
    pid_n, pid_m = tl.swizzle2d(
        tl.program_id(0) // tl.cdiv(m, BLOCK_M), tl.program_id(0) % tl.cdiv(m, BLOCK_M),
        tl.cdiv(n, BLOCK_N), tl.cdiv(m, BLOCK_M), GROUP,
    )  # fmt: skip
    batch = tl.program_id(1).to(tl.int64)
    row = pid_n.to(tl.int64) * BLOCK_N
    col = pid_m.to(tl.int64) * BLOCK_M

    offs_n = tl.arange(0, BLOCK_N)
    offs_m = tl.arange(0, BLOCK_M)
    offs_k = tl.arange(0, BLOCK_K)
    mask_n = offs_n < n - row
    mask_m = offs_m < m - col
    b_ptrs = b_ptr + (batch * n + row) * n + offs_n[:, None] * n + offs_k[None, :]  # (BLOCK_N, BLOCK_K)
    x_ptrs = x_ptr + batch * n * m + col + offs_k[:, None] * m + offs_m[None, :]  # (BLOCK_K, BLOCK_M)
    acc = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
    for start in range(0, n, BLOCK_K):
        if EVEN_K:
            b = tl.load(b_ptrs, mask=mask_n[:, None], other=0.0)
            x = tl.load(x_ptrs, mask=mask_m[None, :], other=0.0)
        else:
            mask_k = offs_k < n - start
            b = tl.load(b_ptrs, mask=mask_n[:, None] & mask_k[None, :], other=0.0)
            x = tl.load(x_ptrs, mask=mask_k[:, None] & mask_m[None, :], other=0.0)
        if UPCAST:
            b = b.to(tl.float32)
            x = x.to(tl.float32)
        acc = tl.dot(b, x, acc, input_precision="ieee")
        b_ptrs += BLOCK_K
        x_ptrs += BLOCK_K * m

    tile = (batch * n + row) * m + col + offs_n[:, None] * m + offs_m[None, :]  # (BLOCK_N, BLOCK_M)
    mask = mask_n[:, None] & mask_m[None, :]
    acc += a * tl.load(x_ptr + tile, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + tile, acc.to(out_ptr.dtype.element_ty), mask=mask)


def _config(n: int, dtype: torch.dtype) -> dict[str, int]:
    """Tile side, depth, warps and stages, as measured on an H200."""
    if dtype == torch.float32:
        return {"BLOCK_N": 64, "BLOCK_K": 32, "num_warps": 4, "num_stages": 2}
    if n <= 64:
        return {"BLOCK_N": 64, "BLOCK_K": 64, "num_warps": 4, "num_stages": 3}
    return {"BLOCK_N": 128, "BLOCK_K": 64, "num_warps": 8, "num_stages": 4}


class TritonOperations:
    """``muon.newton_schulz.MatrixOperations`` on these kernels."""

    def allocate(self, batch: int, n: int, m: int, like: Tensor, dtype: torch.dtype) -> Tensor:
        padded_n, padded_m = _round_up(n), _round_up(m)
        new = like.new_empty if (n, m) == (padded_n, padded_m) else like.new_zeros
        return new((batch, padded_n, padded_m), dtype=dtype)

    def gram(self, X: Tensor) -> Tensor:
        return _symmetric_product(X, X, 1.0)

    def symmetric(self, A: Tensor, B: Tensor, alpha: float, *terms: tuple[float, Tensor]) -> Tensor:
        return _symmetric_product(A, B, alpha, *terms)

    def update(self, B: Tensor, X: Tensor, a: float) -> Tensor:
        batch, n, m = X.shape
        out = torch.empty_like(X)
        config = _config(n, X.dtype)
        tiles = triton.cdiv(n, config["BLOCK_N"]) * triton.cdiv(m, config["BLOCK_N"])
        with torch.cuda.device_of(X):
            update_kernel[(tiles, batch)](
                B, X, out, a, n, m,
                EVEN_K=n % config["BLOCK_K"] == 0, BLOCK_M=config["BLOCK_N"], GROUP=8,
                UPCAST=_interpreted_bf16(X), **config,
            )  # fmt: skip
        return out


def _symmetric_product(A: Tensor, B: Tensor, alpha: float, *terms: tuple[float, Tensor]) -> Tensor:
    batch, n, k = A.shape
    out = A.new_empty(batch, n, n)
    config = _config(n, A.dtype)
    side = triton.cdiv(n, config["BLOCK_N"])
    (beta, C), (gamma, D) = (*terms, (0.0, out), (0.0, out))[:2]
    with torch.cuda.device_of(A):
        symmetric_product_kernel[(side * (side + 1) // 2, batch)](
            A, B, C, D, out, alpha, beta, gamma, n, k,
            HAS_C=len(terms) > 0, HAS_D=len(terms) > 1, EVEN_K=k % config["BLOCK_K"] == 0,
            UPCAST=_interpreted_bf16(A), **config,
        )  # fmt: skip
    return out


def _round_up(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def _interpreted_bf16(tensor: Tensor) -> bool:
    """Triton's interpreter computes bfloat16 products wrongly, so there operands are cast to float32 first."""
    return tensor.dtype == torch.bfloat16 and not tensor.is_cuda
