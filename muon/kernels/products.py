"""The matrix products of Newton-Schulz in Triton: batched, one launch each, epilogues fused.

Tiles move through tensor descriptors: on Hopper they are the bulk copy engine's, elsewhere Triton turns them into
ordinary loads and stores. Either way what lies outside a matrix reads as zero and is never written, so every size
works. Descriptors want rows of whole 16-byte units, hence the padded allocation.

A result known to be symmetric is computed in the lower triangle of tiles and mirrored.

Torch twin of each: ``muon.newton_schulz.TorchOperations``. Where Hopper's own kernels are faster: ``hopper.py``.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor


@triton.jit
def _triangle(t):
    """Row and column of the t-th entry of a lower triangle, counted row by row: i (i + 1) / 2 + j = t."""
    i = ((tl.sqrt(8.0 * t.to(tl.float32) + 1.0) - 1.0) * 0.5).to(tl.int32)
    i = tl.where(i * (i + 1) // 2 > t, i - 1, i)
    i = tl.where((i + 1) * (i + 2) // 2 <= t, i + 1, i)
    return i, t - i * (i + 1) // 2


@triton.jit
def triangle_tile(t, side, GROUP: tl.constexpr):
    """The t-th tile of a lower triangle of ``side`` rows, in bands of GROUP rows, a band column by column.

    Programs that run together then share rows and columns, which they find in the L2 cache.
    """
    i, _ = _triangle(t)
    top = i // GROUP * GROUP
    height = tl.minimum(GROUP, side - top)
    rest = t - top * (top + 1) // 2
    in_square = rest < top * height  # left of the band's own triangle
    a, b = _triangle(tl.maximum(rest - top * height, 0))
    return top + tl.where(in_square, rest % height, a), tl.where(in_square, rest // height, top + b)


@triton.jit
def symmetric_product_kernel(
    a_desc, b_desc, c_desc, d_desc, out_desc,
    alpha, beta, gamma,
    n, k,
    TERMS: tl.constexpr, SYMMETRIZE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
    UPCAST: tl.constexpr,
):  # fmt: skip
    """out = alpha A Bᵀ + beta C + gamma D, known to be symmetric; A, B (batch, n, k), the others (batch, n, n).

    C and D count as far as there are TERMS. SYMMETRIZE makes tiles on the diagonal symmetric to the bit; when B is A
    they come out so by themselves.
    """
    side = tl.cdiv(n, BLOCK_N)
    tiles = side * (side + 1) // 2
    batch = tl.program_id(0) // tiles
    i, j = triangle_tile(tl.program_id(0) % tiles, side, GROUP)
    row = i * BLOCK_N
    col = j * BLOCK_N

    acc = tl.zeros((BLOCK_N, BLOCK_N), dtype=tl.float32)
    for start in range(0, k, BLOCK_K):
        a = a_desc.load([batch, row, start]).reshape(BLOCK_N, BLOCK_K)
        b = b_desc.load([batch, col, start]).reshape(BLOCK_N, BLOCK_K)
        if UPCAST:
            a = a.to(tl.float32)
            b = b.to(tl.float32)
        acc = tl.dot(a, tl.trans(b), acc, input_precision="ieee")

    acc *= alpha
    if TERMS >= 1:
        acc += beta * c_desc.load([batch, row, col]).reshape(BLOCK_N, BLOCK_N).to(tl.float32)
    if TERMS >= 2:
        acc += gamma * d_desc.load([batch, row, col]).reshape(BLOCK_N, BLOCK_N).to(tl.float32)
    out = acc.to(out_desc.dtype)
    if row == col:
        if SYMMETRIZE:
            offs = tl.arange(0, BLOCK_N)
            out = tl.where(offs[:, None] >= offs[None, :], out, tl.trans(out))
        out_desc.store([batch, row, col], out.reshape(1, BLOCK_N, BLOCK_N))
    else:
        out_desc.store([batch, row, col], out.reshape(1, BLOCK_N, BLOCK_N))
        out_desc.store([batch, col, row], tl.trans(out).reshape(1, BLOCK_N, BLOCK_N))


@triton.jit
def update_kernel(
    b_desc, x_desc, x_tile_desc, out_desc,
    a,
    n, m,
    BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """out = a X + B X; B (batch, n, n), X and out (batch, n, m)."""
    # GROUP rows of tiles go through the columns together, so that their tiles of X are read from the L2 cache.
    num_pid_n, num_pid_m = tl.cdiv(n, BLOCK_N), tl.cdiv(m, BLOCK_M)
    batch = tl.program_id(0) // (num_pid_n * num_pid_m)
    pid = tl.program_id(0) % (num_pid_n * num_pid_m)
    pid_n, pid_m = tl.swizzle2d(pid // num_pid_m, pid % num_pid_m, num_pid_n, num_pid_m, GROUP)
    row = pid_n * BLOCK_N
    col = pid_m * BLOCK_M

    acc = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
    for start in range(0, n, BLOCK_K):
        b = b_desc.load([batch, row, start]).reshape(BLOCK_N, BLOCK_K)
        x = x_desc.load([batch, start, col]).reshape(BLOCK_K, BLOCK_M)
        if UPCAST:
            b = b.to(tl.float32)
            x = x.to(tl.float32)
        acc = tl.dot(b, x, acc, input_precision="ieee")

    acc += a * x_tile_desc.load([batch, row, col]).reshape(BLOCK_N, BLOCK_M).to(tl.float32)
    out_desc.store([batch, row, col], acc.to(out_desc.dtype).reshape(1, BLOCK_N, BLOCK_M))


class Config(NamedTuple):
    """Rows, columns and depth of a tile, warps and pipeline stages."""

    block_n: int
    block_m: int
    block_k: int
    num_warps: int
    num_stages: int


# Measured on an H200 (docs/lab-notes.md). 128 × 128 on four warps leaves room for two programs an SM, so that one's
# epilogue overlaps the other's products; only an update so large that its reads bind wants a wider tile.
GENERAL = Config(128, 128, 64, 4, 3)
WIDE = Config(128, 256, 64, 8, 3)
FLOAT32 = Config(64, 64, 32, 8, 2)
GROUP = 8


def _symmetric_config(dtype: torch.dtype) -> Config:
    return FLOAT32 if dtype == torch.float32 else GENERAL


def _update_config(dtype: torch.dtype, n: int) -> Config:
    if dtype == torch.float32:
        return FLOAT32
    return WIDE if n > 2048 else GENERAL


def symmetric_product(
    A: Tensor, B: Tensor, alpha: float, *terms: tuple[float, Tensor], config: Config | None = None
) -> Tensor:
    """alpha A Bᵀ + the terms, known to be symmetric; A, B (batch, n, k), the result (batch, n, n)."""
    batch, n, k = A.shape
    out = A.new_empty(batch, n, n)
    block, _, block_k, num_warps, num_stages = config or _symmetric_config(A.dtype)
    side = triton.cdiv(n, block)
    (beta, C), (gamma, D) = (*terms, (0.0, out), (0.0, out))[:2]
    with torch.cuda.device_of(A):
        symmetric_product_kernel[(side * (side + 1) // 2 * batch,)](
            _tiles(A, block, block_k), _tiles(B, block, block_k), *(_tiles(T, block, block) for T in (C, D, out)),
            alpha, beta, gamma, n, k,
            TERMS=len(terms), SYMMETRIZE=A is not B or not A.is_cuda, BLOCK_N=block, BLOCK_K=block_k, GROUP=GROUP,
            UPCAST=_interpreted_bf16(A), num_warps=num_warps, num_stages=num_stages,
        )  # fmt: skip
    return out


def update(B: Tensor, X: Tensor, a: float, out: Tensor | None = None, *, config: Config | None = None) -> Tensor:
    """a X + B X; B (batch, n, n), X (batch, n, m)."""
    batch, n, m = X.shape
    out = torch.empty_like(X) if out is None else out
    block_n, block_m, block_k, num_warps, num_stages = config or _update_config(X.dtype, n)
    with torch.cuda.device_of(X):
        update_kernel[(triton.cdiv(n, block_n) * triton.cdiv(m, block_m) * batch,)](
            _tiles(B, block_n, block_k), _tiles(X, block_k, block_m),
            _tiles(X, block_n, block_m), _tiles(out, block_n, block_m),
            a, n, m,
            BLOCK_N=block_n, BLOCK_M=block_m, BLOCK_K=block_k, GROUP=GROUP, UPCAST=_interpreted_bf16(X),
            num_warps=num_warps, num_stages=num_stages,
        )  # fmt: skip
    return out


def _tiles(tensor: Tensor, rows: int, cols: int) -> TensorDescriptor:
    return TensorDescriptor(tensor, tensor.shape, tensor.stride(), [1, rows, cols])


def _interpreted_bf16(tensor: Tensor) -> bool:
    """Triton's interpreter computes bfloat16 products wrongly, so there operands are cast to float32 first."""
    return tensor.dtype == torch.bfloat16 and not tensor.is_cuda
