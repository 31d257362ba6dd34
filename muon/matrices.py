"""A parameter seen as batches of matrices, and matrices of equal shape gathered into buckets."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor

from muon.rounding import join, split_off

MatrixMode: TypeAlias = Literal["batch", "flatten", "transposed"] | None
Split: TypeAlias = int | Sequence[int] | None

SMALLEST_EPS = 1e-30  # 0 would divide zeros by 0; once its largest magnitude is 1, the norm of all else is at least 1
NEURON_EPS = 1e-10  # of NorMuon's two divisions, as in its authors' code


class Tensors(NamedTuple):
    """What a step reads and writes of one parameter, or of some of its matrices."""

    param: Tensor
    grad: Tensor
    momentum: Tensor
    neuron_second_moment: Tensor | None = None  # one number a row, of size 1 along ``column_dims``
    remainder: Tensor | None = None  # what rounding to bfloat16 left of the parameter, see ``muon.rounding``

    def map(self, function: Callable[[Tensor], Tensor]) -> "Tensors":
        return Tensors(*(None if tensor is None else function(tensor) for tensor in self))  # type: ignore[arg-type]


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


def column_dims(tensor: Tensor, matrix: MatrixMode = None) -> list[int]:
    """The dimensions along which a row of a matrix lies."""
    if matrix == "transposed":
        return [tensor.ndim - 2]
    return [tensor.ndim - 1] if _is_batch(tensor, matrix) else list(range(1, tensor.ndim))


def shape_of_rows(tensor: Tensor, matrix: MatrixMode = None) -> tuple[int, ...]:
    """The shape of one number for each row of each matrix, which broadcasts with the tensor."""
    cols = column_dims(tensor, matrix)
    return tuple(min(size, 1) if d in cols else size for d, size in enumerate(tensor.shape))


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
    """Matrices (count, rows, cols) of the ``index``-th parameter."""

    index: int
    tensors: Tensors
    count: int
    rows: int
    cols: int

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

    @property
    def param(self) -> Tensor:
        """One of the parameters; all have its dtype and device."""
        return self.blocks[0].tensors.param


def buckets(
    tensors: Sequence[Tensors],
    matrix: MatrixMode = None,
    split: Split = None,
    most: Callable[[int, int, Tensor], int] | None = None,
    together: bool = True,
) -> list[Bucket]:
    """The matrices of all parameters, by their sides, dtypes and device; those without elements are left out.

    Of (n, m) matrices of a parameter a bucket holds at most ``most(n, m, parameter)``, but at least one, and those of
    one parameter only unless they may go ``together``.
    """
    found: dict[tuple[object, ...], list[Bucket]] = {}
    for index, whole in enumerate(tensors):
        for part, (count, rows, cols) in _row_blocks_of_all(whole, matrix, split):
            if part.param.numel() == 0:
                continue
            n, m = min(rows, cols), max(rows, cols)
            limit = max(1, most(n, m, part.param)) if most else None
            dtypes = tuple(None if tensor is None else tensor.dtype for tensor in part)
            same = found.setdefault((n, m, part.param.device, dtypes, None if together else index), [])
            for block in _pieces(Block(index, part, count, rows, cols), limit or count):
                if not same or (limit and same[-1].batch + block.count > limit):
                    same.append(Bucket((n, m)))
                same[-1].blocks.append(block)
    return [bucket for same in found.values() for bucket in same]


def _row_blocks_of_all(
    whole: Tensors, matrix: MatrixMode, split: Split
) -> Iterator[tuple[Tensors, tuple[int, int, int]]]:
    """``row_blocks`` of the parameter, and the same rows of its gradient and state."""
    check_shapes(whole, matrix)
    of_param = row_blocks(whole.param, matrix, split)
    others = [None if tensor is None else row_blocks(tensor, matrix, split) for tensor in whole[1:]]
    for i, (view, shape) in enumerate(of_param):
        yield Tensors(view, *(blocks and blocks[i][0] for blocks in others)), shape  # type: ignore[arg-type]


def check_shapes(whole: Tensors, matrix: MatrixMode) -> None:
    """Kernels would read and write past the end of state that a checkpoint, or another ``matrix``, made smaller."""
    for name, tensor in zip(Tensors._fields, whole, strict=True):
        if tensor is None:
            continue
        shape = shape_of_rows(whole.param, matrix) if name == "neuron_second_moment" else tuple(whole.param.shape)
        if tuple(tensor.shape) != shape:
            raise ValueError(
                f"{name} should have shape {shape} for a {tuple(whole.param.shape)} parameter with "
                f"matrix={matrix!r} but has {tuple(tensor.shape)}: its checkpoint, or the group's matrix, was another"
            )


def _pieces(block: Block, most: int) -> list[Block]:
    """The block cut along its first dimension into blocks of at most ``most`` matrices, as far as it can be."""
    if block.count <= most:
        return [block]
    length = len(block.tensors.param)
    step = max(1, most * length // block.count)
    pieces = []
    for start in range(0, length, step):
        piece = block.tensors.map(lambda tensor, start=start: tensor[start : start + step])  # type: ignore[misc]
        count = len(piece.param) * block.count // length
        pieces.append(Block(block.index, piece, count, block.rows, block.cols))
    return pieces


def pack(bucket: Bucket, X: Tensor, weight: float, *, nesterov: bool, maximize: bool, eps: float) -> None:
    """Update the momentum, and write the updates over their norms to X (batch, n', m'), tall ones transposed.

    momentum ← weight momentum + (1 - weight) grad; the update is the momentum or, with Nesterov,
    weight momentum + (1 - weight) grad of the new momentum.
    """
    momentums = [block.tensors.momentum for block in bucket.blocks]
    grads = [block.tensors.grad.to(block.tensors.momentum.dtype) for block in bucket.blocks]
    if maximize:
        grads = list(torch._foreach_neg(grads))
    torch._foreach_lerp_(momentums, grads, 1 - weight)
    updates = torch._foreach_lerp(grads, momentums, weight) if nesterov else momentums
    wide = []
    for update, block in zip(updates, bucket.blocks, strict=True):
        matrices = update.reshape(block.count, block.rows, block.cols)
        wide.append(matrices.mT if block.is_tall else matrices)
    normalize(torch.cat(wide), X, eps)


def apply(
    bucket: Bucket,
    X: Tensor,
    decay: float | Tensor,
    scales: Mapping[bool, float | Tensor],
    *,
    cautious: bool = False,
    neuron_norm: float | None = None,
) -> None:
    """param ← decay param + scale X, for each matrix of the bucket and of X (batch, n', m'); tall ones have a scale.

    ``cautious``: what the update pushes away from 0 doesn't decay. ``neuron_norm``: the update is evened out by rows,
    after second moment ← neuron_norm second moment + (1 - neuron_norm) mean square of each row.
    """
    n, m = bucket.sides
    for block, part in zip(bucket.blocks, X[:, :n, :m].split([block.count for block in bucket.blocks]), strict=True):
        second_moment = block.tensors.neuron_second_moment
        update = part.mT.contiguous() if block.is_tall else part  # which adds up faster
        if second_moment is not None and neuron_norm is not None:
            second_moment = second_moment.view(block.count, block.rows, 1)
            follow_second_moment(update, second_moment, neuron_norm)
            update = normalize_neurons(update, second_moment)
        update = update.reshape(block.tensors.param.shape)
        add_update(block.tensors, update, decay, scales[block.is_tall], cautious=cautious)


def add_update(
    tensors: Tensors, update: Tensor, decay: float | Tensor, scale: float | Tensor, *, cautious: bool
) -> None:
    """param ← decay param + scale update, element by element; see ``apply``."""
    param, remainder = tensors.param, tensors.remainder
    exact = param if remainder is None else join(param, remainder)
    if cautious:
        exact.copy_(torch.where(opposed(update, exact), exact, exact * decay))
    else:
        exact.mul_(decay)
    if isinstance(scale, Tensor):
        exact.add_(update * scale)
    else:
        exact.add_(update, alpha=scale)
    if remainder is not None:
        split_off(exact, param, remainder)


def opposed(update: Tensor, param: Tensor) -> Tensor:
    """Where subtracting the update moves the parameter away from 0: they differ in sign, and neither is 0."""
    return update.sign() * param.sign() < 0


def normalize_neurons(update: Tensor, second_moment: Tensor) -> Tensor:
    """The update (batch, rows, cols) with each row over the root of its second moment, and its norm as before."""
    return even_out(update, second_moment).mul_(neuron_ratio(update, second_moment))


def follow_second_moment(update: Tensor, second_moment: Tensor, beta: float) -> None:
    """second moment (..., rows, 1) ← beta second moment + (1 - beta) mean square of each row of the update."""
    second_moment.lerp_(update.to(second_moment.dtype).square().mean(-1, keepdim=True), 1 - beta)


def even_out(update: Tensor, second_moment: Tensor) -> Tensor:
    """Each row of the update over the root of its second moment."""
    return update.to(second_moment.dtype) / (second_moment.sqrt() + NEURON_EPS)


def neuron_ratio(update: Tensor, second_moment: Tensor) -> Tensor:
    """What gives the update its norm back once it is even, (..., 1, 1)."""
    wholes = (update.to(second_moment.dtype), even_out(update, second_moment))
    norm, new_norm = (torch.linalg.vector_norm(matrix, dim=(-2, -1), keepdim=True) for matrix in wholes)
    ratio: Tensor = norm / (new_norm + NEURON_EPS)
    return ratio


def normalize(G: Tensor, X: Tensor, eps: float) -> None:
    """X (batch, n', m') = each matrix of G (batch, rows, cols) over its Frobenius norm, transposed if it is tall.

    The norm is taken in at least float32, after the largest magnitude has been divided out, so that squares neither
    overflow nor vanish. G is overwritten: memory of its own would cost a CPU more than the arithmetic does.
    """
    wide = G.mT if G.shape[1] > G.shape[2] else G
    largest = torch.maximum(wide.amax(dim=(-2, -1), keepdim=True), -wide.amin(dim=(-2, -1), keepdim=True))
    scaled = wide.to(torch.promote_types(G.dtype, torch.float32)).div_(largest.masked_fill(largest == 0, 1))
    norm = torch.linalg.vector_norm(scaled, dim=(-2, -1), keepdim=True)
    X[:, : wide.shape[1], : wide.shape[2]].copy_(scaled.div_(norm.clamp(min=eps)))
