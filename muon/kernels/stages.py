"""What surrounds the iteration, in Triton: one launch for all matrices of a bucket, every pass at memory speed.

Matrices are reached through two tables with one row each: int64 addresses of parameter, gradient, momentum, second
moment of the neurons and remainder, and whether the matrix is tall; and float32 momentum weight, decay and scale. Both
lie in device memory, so that a recorded CUDA graph sees today's. A tall matrix is transposed on its way into the
(batch, n, m) tensor X and out of it. Sources are contiguous (rows, cols) matrices; X may be padded.

Torch twins: ``muon.matrices.pack`` and ``muon.matrices.apply``.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from muon import matrices, rounding

PARAM: tl.constexpr = tl.constexpr(0)
GRAD: tl.constexpr = tl.constexpr(1)
MOMENTUM: tl.constexpr = tl.constexpr(2)
SECOND_MOMENT: tl.constexpr = tl.constexpr(3)
REMAINDER: tl.constexpr = tl.constexpr(4)
IS_TALL: tl.constexpr = tl.constexpr(5)
COLUMNS: tl.constexpr = tl.constexpr(6)

WEIGHT: tl.constexpr = tl.constexpr(0)
DECAY: tl.constexpr = tl.constexpr(1)
SCALE: tl.constexpr = tl.constexpr(2)
SCALARS: tl.constexpr = tl.constexpr(3)

NEURON_EPS: tl.constexpr = tl.constexpr(matrices.NEURON_EPS)
HALF: tl.constexpr = tl.constexpr(rounding.HALF)
UPPER: tl.constexpr = tl.constexpr(rounding.UPPER)
NAN: tl.constexpr = tl.constexpr(rounding.NAN)

ALIGNMENT = 16  # elements: 16 bytes at least, and what Triton specialises sizes on
CHUNK = 4096  # elements of a matrix that a program of the momentum kernel takes
TILE = 64
DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


@triton.jit
def _address(table_ptr, matrix, COLUMN: tl.constexpr, ALIGNED: tl.constexpr, dtype: tl.constexpr):
    ptr = tl.load(table_ptr + matrix * COLUMNS + COLUMN).to(tl.pointer_type(dtype))
    return tl.multiple_of(ptr, 16) if ALIGNED else ptr


@triton.jit
def _scalar(scalar_ptr, matrix, COLUMN: tl.constexpr):
    return tl.load(scalar_ptr + matrix * SCALARS + COLUMN)


@triton.jit
def _tile(table_ptr, n, m, TILE: tl.constexpr):
    """This program's matrix, and its (TILE, TILE) tile: first row and column, offsets, and which of them lie in it."""
    num_pid_m = tl.cdiv(m, TILE)
    matrix = tl.program_id(0) // (tl.cdiv(n, TILE) * num_pid_m)
    pid_n = tl.program_id(0) // num_pid_m % tl.cdiv(n, TILE)
    pid_m = tl.program_id(0) % num_pid_m
    is_tall = tl.load(table_ptr + matrix * COLUMNS + IS_TALL) != 0
    row, col = tl.where(is_tall, pid_m, pid_n) * TILE, tl.where(is_tall, pid_n, pid_m) * TILE
    rows, cols = tl.where(is_tall, m, n), tl.where(is_tall, n, m)
    offs = tl.arange(0, TILE)
    mask = (row + offs < rows)[:, None] & (col + offs < cols)[None, :]
    tile = (row.to(tl.int64) * cols + col) + offs[:, None] * cols + offs[None, :]
    return matrix, is_tall, row, col, tile, mask


@triton.jit
def _look_ahead(grad, momentum, weight, NESTEROV: tl.constexpr):
    return grad + weight * (momentum - grad) if NESTEROV else momentum


@triton.jit
def momentum_kernel(
    table_ptr, scalar_ptr, partial_ptr, update_ptr,
    sign,
    size, chunks,
    HAS_GRAD: tl.constexpr, NESTEROV: tl.constexpr, ALIGNED: tl.constexpr,
    GRAD_DTYPE: tl.constexpr, MOMENTUM_DTYPE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """momentum ← weight momentum + (1 - weight) sign grad, in place; then the update's partial norms, or update itself.

    Without a gradient the momentum is the update and stays as it is.
    A partial norm is (largest magnitude, sum of squares over its square), so that nothing overflows or vanishes.
    """
    matrix = tl.program_id(0) // chunks
    chunk = tl.program_id(0) % chunks
    offs = chunk.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offs < size
    momentum_ptr = _address(table_ptr, matrix, MOMENTUM, ALIGNED, MOMENTUM_DTYPE)
    update = tl.load(momentum_ptr + offs, mask=mask, other=0.0).to(tl.float32)  # (BLOCK,)
    if HAS_GRAD:
        weight = _scalar(scalar_ptr, matrix, WEIGHT)
        grad_ptr = _address(table_ptr, matrix, GRAD, ALIGNED, GRAD_DTYPE)
        grad = sign * tl.load(grad_ptr + offs, mask=mask, other=0.0).to(tl.float32)
        momentum = (update + (1 - weight) * (grad - update)).to(MOMENTUM_DTYPE)
        tl.store(momentum_ptr + offs, momentum, mask=mask)
        update = _look_ahead(grad, momentum.to(tl.float32), weight, NESTEROV)
    if update_ptr is not None:
        update_ptr += matrix.to(tl.int64) * size
        tl.store(update_ptr + offs, update.to(update_ptr.dtype.element_ty), mask=mask)
    if partial_ptr is not None:
        largest = tl.max(tl.abs(update), 0)
        scaled = update / tl.where(largest == 0.0, 1.0, largest)
        partial_ptr += (matrix.to(tl.int64) * chunks + chunk) * 2
        # A maximum passes over NaN, a sum doesn't.
        tl.store(partial_ptr, largest)
        tl.store(partial_ptr + 1, tl.sum(scaled * scaled, 0))


@triton.jit
def norm_kernel(partial_ptr, norm_ptr, chunks, eps, BLOCK: tl.constexpr):
    """Norm of each matrix from its partial norms, as (largest magnitude, the rest), neither ever zero."""
    matrix = tl.program_id(0)
    partial_ptr += matrix.to(tl.int64) * chunks * 2
    offs = tl.arange(0, BLOCK)
    largest = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, chunks, BLOCK):
        mask = start + offs < chunks
        largest = tl.maximum(largest, tl.load(partial_ptr + 2 * (start + offs), mask=mask, other=0.0))
    whole = tl.max(largest, 0)
    whole = tl.where(whole == 0.0, 1.0, whole)
    squares = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, chunks, BLOCK):
        mask = start + offs < chunks
        ratio = tl.load(partial_ptr + 2 * (start + offs), mask=mask, other=0.0) / whole
        squares += ratio * ratio * tl.load(partial_ptr + 2 * (start + offs) + 1, mask=mask, other=0.0)
    tl.store(norm_ptr + 2 * matrix, whole)
    rest = tl.sqrt(tl.sum(squares, 0))
    tl.store(norm_ptr + 2 * matrix + 1, tl.where(rest < eps, eps, rest))


@triton.jit
def pack_kernel(
    table_ptr, scalar_ptr, norm_ptr, x_ptr,
    sign,
    n, m, stride_xb, stride_xn,
    NESTEROV: tl.constexpr, ALIGNED: tl.constexpr, GRAD_DTYPE: tl.constexpr, MOMENTUM_DTYPE: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """X[matrix] = update / its norm, a (TILE, TILE) tile of it; norms (batch, 2) are (largest magnitude, the rest)."""
    matrix, is_tall, row, col, tile, mask = _tile(table_ptr, n, m, TILE)
    offs = tl.arange(0, TILE)
    update = tl.load(_address(table_ptr, matrix, MOMENTUM, ALIGNED, MOMENTUM_DTYPE) + tile, mask=mask, other=0.0)
    update = update.to(tl.float32)
    if NESTEROV:
        weight = _scalar(scalar_ptr, matrix, WEIGHT)
        grad = tl.load(_address(table_ptr, matrix, GRAD, ALIGNED, GRAD_DTYPE) + tile, mask=mask, other=0.0)
        update = _look_ahead(sign * grad.to(tl.float32), update, weight, NESTEROV)
    x = update / tl.load(norm_ptr + 2 * matrix) / tl.load(norm_ptr + 2 * matrix + 1)
    x = x.to(x_ptr.dtype.element_ty)
    x_ptr += matrix.to(tl.int64) * stride_xb
    if is_tall:
        tl.store(x_ptr + (col + offs)[:, None].to(tl.int64) * stride_xn + (row + offs)[None, :], tl.trans(x),
                 mask=tl.trans(mask))  # fmt: skip
    else:
        tl.store(x_ptr + (row + offs)[:, None].to(tl.int64) * stride_xn + (col + offs)[None, :], x, mask=mask)


@triton.jit
def transpose_kernel(x_ptr, out_ptr, n, m, stride_xb, stride_xn, TILE: tl.constexpr):
    """out (batch, m, n) = Xᵀ of each matrix, a (TILE, TILE) tile of it."""
    num_pid_m = tl.cdiv(m, TILE)
    matrix = (tl.program_id(0) // (tl.cdiv(n, TILE) * num_pid_m)).to(tl.int64)
    offs_n = tl.program_id(0) // num_pid_m % tl.cdiv(n, TILE) * TILE + tl.arange(0, TILE)
    offs_m = tl.program_id(0) % num_pid_m * TILE + tl.arange(0, TILE)
    mask = (offs_n < n)[:, None] & (offs_m < m)[None, :]
    x_ptr += matrix * stride_xb
    x = tl.load(x_ptr + offs_n[:, None].to(tl.int64) * stride_xn + offs_m[None, :], mask=mask)
    out_ptr += matrix * n * m
    tl.store(out_ptr + offs_m[:, None].to(tl.int64) * n + offs_n[None, :], tl.trans(x), mask=tl.trans(mask))


@triton.jit
def neuron_kernel(
    table_ptr, x_ptr, squares_ptr,
    beta2,
    n, m, stride_xb, stride_xn,
    TILE: tl.constexpr,
):  # fmt: skip
    """second moment ← beta2 second moment + (1 - beta2) mean square, for TILE rows of a matrix, all columns.

    The rows are the parameter's: columns of X where the matrix is tall. Their sums of squares go to squares (batch, m).
    """
    num_pid = tl.cdiv(m, TILE)
    matrix = tl.program_id(0) // num_pid
    offs = tl.arange(0, TILE)
    offs_row = tl.program_id(0) % num_pid * TILE + offs
    is_tall = tl.load(table_ptr + matrix * COLUMNS + IS_TALL) != 0
    cols = tl.where(is_tall, n, m)
    mask = offs_row < tl.where(is_tall, m, n)
    x_ptr += matrix.to(tl.int64) * stride_xb
    squares = tl.zeros((TILE,), tl.float32)
    if is_tall:
        for start in range(0, n, TILE):
            x = tl.load(x_ptr + (start + offs)[:, None].to(tl.int64) * stride_xn + offs_row[None, :],
                        mask=(start + offs < n)[:, None] & mask[None, :], other=0.0).to(tl.float32)  # fmt: skip
            squares += tl.sum(x * x, 0)
    else:
        for start in range(0, m, TILE):
            x = tl.load(x_ptr + offs_row[:, None].to(tl.int64) * stride_xn + (start + offs)[None, :],
                        mask=mask[:, None] & (start + offs < m)[None, :], other=0.0).to(tl.float32)  # fmt: skip
            squares += tl.sum(x * x, 1)
    moment_ptr = _address(table_ptr, matrix, SECOND_MOMENT, False, tl.float32) + offs_row
    moment = tl.load(moment_ptr, mask=mask, other=0.0)
    tl.store(moment_ptr, beta2 * moment + (1 - beta2) * (squares / cols), mask=mask)
    tl.store(squares_ptr + matrix.to(tl.int64) * m + offs_row, squares, mask=mask)


@triton.jit
def neuron_norm_kernel(table_ptr, squares_ptr, ratio_ptr, n, m, BLOCK: tl.constexpr):
    """ratio (batch,) = the norm of each matrix before its rows are divided by their roots over that after."""
    matrix = tl.program_id(0)
    rows = tl.where(tl.load(table_ptr + matrix * COLUMNS + IS_TALL) != 0, m, n)
    moment_ptr = _address(table_ptr, matrix, SECOND_MOMENT, False, tl.float32)
    squares_ptr += matrix.to(tl.int64) * m
    offs = tl.arange(0, BLOCK)
    before = tl.zeros((BLOCK,), tl.float32)
    after = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, m, BLOCK):
        mask = start + offs < rows
        squares = tl.load(squares_ptr + start + offs, mask=mask, other=0.0)
        root = tl.sqrt(tl.load(moment_ptr + start + offs, mask=mask, other=0.0)) + NEURON_EPS
        before += squares
        after += squares / root / root
    tl.store(ratio_ptr + matrix, tl.sqrt(tl.sum(before, 0)) / (tl.sqrt(tl.sum(after, 0)) + NEURON_EPS))


@triton.jit
def apply_kernel(
    table_ptr, scalar_ptr, x_ptr, ratio_ptr,
    n, m, stride_xb, stride_xn,
    CAUTIOUS: tl.constexpr, NEURON_NORM: tl.constexpr, HAS_REMAINDER: tl.constexpr,
    ALIGNED: tl.constexpr, PARAM_DTYPE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """param ← decay param + scale X[matrix], a (TILE, TILE) tile of it.

    CAUTIOUS: what the update pushes away from 0 doesn't decay. NEURON_NORM: each row of the update over the root of
    its second moment, times ratio. HAS_REMAINDER: the parameter is bfloat16 and its remainder, see ``muon.rounding``.
    """
    matrix, is_tall, row, col, tile, mask = _tile(table_ptr, n, m, TILE)
    offs = tl.arange(0, TILE)
    x_ptr += matrix.to(tl.int64) * stride_xb
    param_ptr = _address(table_ptr, matrix, PARAM, ALIGNED, PARAM_DTYPE)
    param = tl.load(param_ptr + tile, mask=mask, other=0.0).to(tl.float32)
    if HAS_REMAINDER:
        remainder_ptr = _address(table_ptr, matrix, REMAINDER, ALIGNED, tl.int16)
        remainder = tl.load(remainder_ptr + tile, mask=mask, other=0).to(tl.int32)
        param = (param.to(tl.int32, bitcast=True) + remainder).to(tl.float32, bitcast=True)
    if is_tall:
        x = tl.load(x_ptr + (col + offs)[:, None].to(tl.int64) * stride_xn + (row + offs)[None, :],
                    mask=tl.trans(mask), other=0.0)  # fmt: skip
        x = tl.trans(x)
    else:
        x = tl.load(x_ptr + (row + offs)[:, None].to(tl.int64) * stride_xn + (col + offs)[None, :],
                    mask=mask, other=0.0)  # fmt: skip
    x = x.to(tl.float32)
    if NEURON_NORM:
        moment_ptr = _address(table_ptr, matrix, SECOND_MOMENT, False, tl.float32)
        moment = tl.load(moment_ptr + row + offs, mask=row + offs < tl.where(is_tall, m, n), other=1.0)
        x *= (tl.load(ratio_ptr + matrix) / (tl.sqrt(moment) + NEURON_EPS))[:, None]
    decay = _scalar(scalar_ptr, matrix, DECAY)
    if CAUTIOUS:
        decay = tl.where(((x > 0) & (param < 0)) | ((x < 0) & (param > 0)), 1.0, decay)
    param = decay * param + _scalar(scalar_ptr, matrix, SCALE) * x
    if HAS_REMAINDER:
        bits = tl.where(param != param, NAN, param.to(tl.int32, bitcast=True))
        upper = (bits + HALF) & UPPER
        tl.store(remainder_ptr + tile, (bits - upper).to(tl.int16), mask=mask)
        param = upper.to(tl.float32, bitcast=True)
    tl.store(param_ptr + tile, param.to(PARAM_DTYPE), mask=mask)


def pack(
    table: Tensor,
    scalars: Tensor,
    X: Tensor,
    sides: tuple[int, int],
    grad_dtype: torch.dtype,
    momentum_dtype: torch.dtype,
    *,
    aligned: bool,
    nesterov: bool,
    maximize: bool,
    eps: float,
) -> None:
    """See ``muon.matrices.pack``. ``aligned``: all addresses and row lengths are multiples of 16 bytes."""
    sign = -1.0 if maximize else 1.0
    dtypes = {"GRAD_DTYPE": DTYPES[grad_dtype], "MOMENTUM_DTYPE": DTYPES[momentum_dtype]}
    _pack(table, scalars, X, sides, eps, sign, HAS_GRAD=True, NESTEROV=nesterov, ALIGNED=aligned, **dtypes)


def update_momentum(
    table: Tensor,
    scalars: Tensor,
    sides: tuple[int, int],
    grad_dtype: torch.dtype,
    momentum_dtype: torch.dtype,
    *,
    aligned: bool,
    nesterov: bool,
    maximize: bool,
    update: Tensor | None = None,
) -> None:
    """What ``pack`` does to the momentum, by the same kernel. ``update`` (batch, n m): what it takes the norm of."""
    dtypes = {"GRAD_DTYPE": DTYPES[grad_dtype], "MOMENTUM_DTYPE": DTYPES[momentum_dtype]}
    flags = {"HAS_GRAD": True, "NESTEROV": nesterov, "ALIGNED": aligned, **dtypes}
    _update_momentum(table, scalars, None, update, sides, -1.0 if maximize else 1.0, **flags)


def normalize(G: Tensor, X: Tensor, eps: float) -> None:
    """X (batch, n', m') = each matrix of a contiguous G (batch, rows, cols) over its norm, transposed if it is tall."""
    batch, rows, cols = G.shape
    size = rows * cols * G.element_size()
    first, dtype = G.data_ptr(), DTYPES[G.dtype]
    address = torch.arange(first, first + batch * size, size, device=G.device)
    table = torch.stack([address] * 5 + [torch.full_like(address, rows > cols)], dim=1)
    aligned = first % 16 == 0 and rows % ALIGNMENT == 0 and cols % ALIGNMENT == 0
    sides = (min(rows, cols), max(rows, cols))
    flags = {"HAS_GRAD": False, "NESTEROV": False, "ALIGNED": aligned, "GRAD_DTYPE": dtype, "MOMENTUM_DTYPE": dtype}
    with torch.cuda.device_of(G):
        _pack(table, table, X, sides, eps, 1.0, **flags)


def transposed(X: Tensor, n: int, m: int) -> Tensor:
    """(batch, m, n), contiguous, of X (batch, n', m') without its padding."""
    out = X.new_empty(len(X), m, n)
    with torch.cuda.device_of(X):
        transpose_kernel[(triton.cdiv(n, TILE) * triton.cdiv(m, TILE) * len(X),)](
            X, out, n, m, X.stride(0), X.stride(1), TILE=TILE
        )
    return out


def _pack(
    table: Tensor, scalars: Tensor, X: Tensor, sides: tuple[int, int], eps: float, sign: float, **flags: object
) -> None:
    (n, m), batch = sides, len(table)
    partial = torch.empty(batch, triton.cdiv(n * m, CHUNK), 2, dtype=torch.float32, device=table.device)
    _update_momentum(table, scalars, partial, None, sides, sign, **flags)
    norm = torch.empty(batch, 2, dtype=torch.float32, device=X.device)
    norm_kernel[(batch,)](partial, norm, partial.shape[1], eps, BLOCK=1024)
    del flags["HAS_GRAD"]
    pack_kernel[(triton.cdiv(n, TILE) * triton.cdiv(m, TILE) * batch,)](
        table, scalars, norm, X, sign, n, m, X.stride(0), X.stride(1), TILE=TILE, **flags
    )


def _update_momentum(
    table: Tensor,
    scalars: Tensor,
    partial: Tensor | None,
    update: Tensor | None,
    sides: tuple[int, int],
    sign: float,
    **flags: object,
) -> None:
    size = sides[0] * sides[1]
    chunks = triton.cdiv(size, CHUNK)
    momentum_kernel[(chunks * len(table),)](
        table, scalars, partial, update, sign, size, chunks, BLOCK=CHUNK, num_warps=8, **flags
    )


def apply(
    table: Tensor,
    scalars: Tensor,
    X: Tensor,
    sides: tuple[int, int],
    param_dtype: torch.dtype,
    *,
    aligned: bool,
    cautious: bool = False,
    neuron_norm: float | None = None,
    has_remainder: bool = False,
) -> None:
    """See ``muon.matrices.apply``."""
    (n, m), batch = sides, len(table)
    ratio = X if neuron_norm is None else _normalize_neurons(table, X, sides, neuron_norm)
    apply_kernel[(triton.cdiv(n, TILE) * triton.cdiv(m, TILE) * batch,)](
        table, scalars, X, ratio, n, m, X.stride(0), X.stride(1),
        CAUTIOUS=cautious, NEURON_NORM=neuron_norm is not None, HAS_REMAINDER=has_remainder,
        ALIGNED=aligned, PARAM_DTYPE=DTYPES[param_dtype], TILE=TILE, num_warps=apply_warps(has_remainder),
    )  # fmt: skip


def apply_warps(has_remainder: bool) -> int:
    """On four warps the tile of a remainder beside the rest doesn't fit the registers."""
    return 8 if has_remainder else 4


def _normalize_neurons(table: Tensor, X: Tensor, sides: tuple[int, int], beta2: float) -> Tensor:
    """Update the second moments, and what ``muon.matrices.normalize_neurons`` multiplies a matrix by at the end."""
    (n, m), batch = sides, len(table)
    squares = torch.empty(batch, m, dtype=torch.float32, device=X.device)
    ratio = torch.empty(batch, dtype=torch.float32, device=X.device)
    neuron_kernel[(triton.cdiv(m, TILE) * batch,)](table, X, squares, beta2, n, m, X.stride(0), X.stride(1), TILE=TILE)
    neuron_norm_kernel[(batch,)](table, squares, ratio, n, m, BLOCK=1024)
    return ratio
