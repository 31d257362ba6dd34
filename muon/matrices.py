"""A parameter seen as batches of matrices, and matrices of equal shape gathered into buckets."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

import torch
from torch import Tensor

MatrixMode: TypeAlias = Literal["batch", "flatten", "transposed"] | None
Split: TypeAlias = int | Sequence[int] | None


def matrix_shape(tensor: Tensor, matrix: MatrixMode = None) -> tuple[int, int, int]:
    """(number of matrices, rows, cols) of a tensor with at least two dimensions.

    ``"batch"``: the last two dimensions are a matrix, those before count matrices (the default for 2-D and 3-D).
    ``"flatten"``: one matrix, (first dimension, everything else) (the default for convolutions, 4-D and 5-D).
    ``"transposed"``: as ``"batch"``, of matrices that are stored (in, out) while everybody else's are (out, in).
    """
    if matrix == "transposed":
        return matrix_shape(tensor.mT, "batch")
    if _is_batch(tensor, matrix):
        return math.prod(tensor.shape[:-2]), tensor.shape[-2], tensor.shape[-1]
    return 1, tensor.shape[0], math.prod(tensor.shape[1:])


def _is_batch(tensor: Tensor, matrix: MatrixMode) -> bool:
    return tensor.ndim <= 3 if matrix is None else matrix == "batch"


def row_blocks(
    tensor: Tensor, matrix: MatrixMode = None, split: Split = None
) -> list[tuple[Tensor, tuple[int, int, int]]]:
    """The blocks of rows that are matrices of their own, each as a view of ``tensor`` with its matrix shape.

    Without ``split`` that is the whole tensor. ``split=k`` cuts the rows into k equal blocks, which come as one view
    with one more leading dimension; ``split=(r0, r1, ...)`` cuts them into blocks of these sizes.

    Raises:
        ValueError: the rows cannot be split so.
    """
    if matrix == "transposed":
        return row_blocks(tensor.mT, "batch", split)
    count, rows, cols = matrix_shape(tensor, matrix)
    if split is None:
        return [(tensor, (count, rows, cols))]
    row_dim = tensor.ndim - 2 if _is_batch(tensor, matrix) else 0
    if isinstance(split, int):
        if split < 1 or rows % split:
            raise ValueError(f"split={split} should divide the {rows} rows of a {tuple(tensor.shape)} parameter")
        return [(tensor.unflatten(row_dim, (split, rows // split)), (count * split, rows // split, cols))]
    if sum(split) != rows or min(split) < 1:
        raise ValueError(
            f"split={tuple(split)} should be positive and sum to the {rows} rows of a {tuple(tensor.shape)} parameter"
        )
    return [(block, (count, size, cols)) for block, size in zip(tensor.split(list(split), row_dim), split, strict=True)]


@dataclass(frozen=True)
class Block:
    """Matrices (count, rows, cols) of one parameter, the ``index``-th, with their gradient and momentum."""

    index: int
    param: Tensor
    grad: Tensor
    momentum: Tensor
    count: int
    rows: int
    cols: int

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.param, self.grad, self.momentum

    @property
    def is_tall(self) -> bool:
        return self.rows > self.cols


class Bucket:
    """Matrices that go through the iteration together: the same sides (n, m), n <= m, wide or tall."""

    def __init__(self, sides: tuple[int, int]) -> None:
        self.sides = sides
        self.blocks: list[Block] = []

    @property
    def batch(self) -> int:
        return sum(block.count for block in self.blocks)


def buckets(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    momentums: Sequence[Tensor],
    matrix: MatrixMode = None,
    split: Split = None,
    most_elements: int | None = None,
) -> list[Bucket]:
    """The matrices of all parameters, by their sides, dtypes and device; those without elements are left out.

    A bucket holds one matrix, or as many as have no more than ``most_elements``.
    """
    found: dict[tuple[object, ...], list[Bucket]] = {}
    for index, triple in enumerate(zip(params, grads, momentums, strict=True)):
        for views in zip(*(row_blocks(tensor, matrix, split) for tensor in triple), strict=True):
            (param, (count, rows, cols)), (grad, _), (momentum, _) = views
            if param.numel() == 0:
                continue
            sides = (min(rows, cols), max(rows, cols))
            key = (sides, param.device, param.dtype, grad.dtype, momentum.dtype)
            most = max(1, most_elements // (rows * cols)) if most_elements else count
            for block in _pieces(Block(index, param, grad, momentum, count, rows, cols), most):
                open_buckets = found.setdefault(key, [Bucket(sides)])
                if most_elements and open_buckets[-1].batch + block.count > most:
                    open_buckets.append(Bucket(sides))
                open_buckets[-1].blocks.append(block)
    return [bucket for same in found.values() for bucket in same]


def _pieces(block: Block, most: int) -> list[Block]:
    """The block cut along its first dimension into blocks of at most ``most`` matrices, as far as it can be."""
    if block.count <= most:
        return [block]
    length = len(block.param)
    step = max(1, most * length // block.count)
    pieces = []
    for start in range(0, length, step):
        param, grad, momentum = (tensor[start : start + step] for tensor in block.tensors)
        count = len(param) * block.count // length
        pieces.append(replace(block, param=param, grad=grad, momentum=momentum, count=count))
    return pieces


def pack(bucket: Bucket, X: Tensor, weight: float, *, nesterov: bool, maximize: bool, eps: float) -> None:
    """Update the momentum, and write the updates over their norms to X (batch, n', m'), tall ones transposed.

    momentum ← weight momentum + (1 - weight) grad; the update is the momentum or, with Nesterov,
    weight momentum + (1 - weight) grad of the new momentum.
    """
    momentums = [block.momentum for block in bucket.blocks]
    grads = [block.grad.to(block.momentum.dtype) for block in bucket.blocks]
    if maximize:
        grads = list(torch._foreach_neg(grads))
    torch._foreach_lerp_(momentums, grads, 1 - weight)
    updates = torch._foreach_lerp(grads, momentums, weight) if nesterov else momentums
    wide = []
    for update, block in zip(updates, bucket.blocks, strict=True):
        matrices = update.reshape(block.count, block.rows, block.cols)
        wide.append(matrices.mT if block.is_tall else matrices)
    normalize(torch.cat(wide), X, eps)


def apply(bucket: Bucket, X: Tensor, decay: float, scale_wide: float, scale_tall: float) -> None:
    """param ← decay param + scale X, for each matrix of the bucket and of X (batch, n', m')."""
    n, m = bucket.sides
    torch._foreach_mul_([block.param for block in bucket.blocks], decay)
    parts = X[:, :n, :m].split([block.count for block in bucket.blocks])
    for block, part in zip(bucket.blocks, parts, strict=True):
        update = (part.mT if block.is_tall else part).reshape(block.param.shape)
        block.param.add_(update, alpha=scale_tall if block.is_tall else scale_wide)


def normalize(G: Tensor, X: Tensor, eps: float) -> None:
    """X (batch, n', m') = each matrix of G (batch, rows, cols) over its Frobenius norm, transposed if it is tall.

    The norm is taken in at least float32, after the largest magnitude has been divided out, so that squares neither
    overflow nor vanish.
    """
    wide = G.mT if G.shape[1] > G.shape[2] else G
    largest = wide.abs().amax(dim=(-2, -1), keepdim=True)
    scaled = wide.to(torch.promote_types(G.dtype, torch.float32)) / largest.masked_fill(largest == 0, 1)
    norm = torch.linalg.vector_norm(scaled, dim=(-2, -1), keepdim=True)
    X[:, : wide.shape[1], : wide.shape[2]].copy_(scaled.div_(norm.clamp(min=eps)))
