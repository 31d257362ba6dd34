"""A parameter seen as batches of matrices, and matrices of equal shape gathered into buckets."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

import torch
from torch import Tensor

MatrixMode: TypeAlias = Literal["batch", "flatten"] | None
Split: TypeAlias = int | Sequence[int] | None


def matrix_shape(tensor: Tensor, matrix: MatrixMode = None) -> tuple[int, int, int]:
    """(number of matrices, rows, cols) of a tensor with at least two dimensions.

    ``"batch"``: the last two dimensions are a matrix, those before count matrices (the default for 2-D and 3-D).
    ``"flatten"``: one matrix, (first dimension, everything else) (the default for convolutions, 4-D and 5-D).
    """
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


@dataclass
class Bucket:
    """Matrices that go through the iteration together: the same sides, lying or standing."""

    shape: tuple[int, int]  # (shorter side, longer side)
    blocks: list[tuple[Tensor, Tensor, tuple[int, int, int]]] = field(default_factory=list)  # target, source, shape

    def gather(self) -> Tensor:
        """All sources as one (batch, n, m) tensor, tall matrices transposed."""
        return torch.cat([_lying(source.reshape(shape)) for _, source, shape in self.blocks])

    def scatter(self, stacked: Tensor) -> list[Tensor]:
        """The inverse of gather: a view of ``stacked`` for each block, shaped like its target."""
        parts = stacked.split([shape[0] for _, _, shape in self.blocks])
        return [
            (part.mT if rows > cols else part).reshape(target.shape)
            for part, (target, _, (_, rows, cols)) in zip(parts, self.blocks, strict=True)
        ]


def _lying(matrices: Tensor) -> Tensor:
    return matrices.mT if matrices.shape[-2] > matrices.shape[-1] else matrices


def buckets(
    targets: Sequence[Tensor], sources: Sequence[Tensor], matrix: MatrixMode = None, split: Split = None
) -> list[Bucket]:
    """Blocks of all (target, source) pairs, by the sides of their matrices, dtype and device."""
    found: dict[tuple[object, ...], Bucket] = {}
    for target, source in zip(targets, sources, strict=True):
        pairs = zip(row_blocks(target, matrix, split), row_blocks(source, matrix, split), strict=True)
        for (target_block, shape), (source_block, _) in pairs:
            _, rows, cols = shape
            sides = (min(rows, cols), max(rows, cols))
            bucket = found.setdefault((sides, source.dtype, source.device), Bucket(sides))
            bucket.blocks.append((target_block, source_block, shape))
    return list(found.values())
