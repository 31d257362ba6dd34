"""The Muon step of parameters that all ranks have whole, on GPUs: planned once, then replayed as CUDA graphs.

Every rank orthogonalises its share of the matrices and all gather the results (see ``muon.distributed``). A collective
is not recorded; what lies between two of them is, as a segment. Of each bucket there are two: (A) pack and iterate what
this rank owns, into its part of the gathered tensor; (B) apply what all ranks have made; and there is one for all
buckets, (M) the momentum of what others own. With G for a bucket's gather, which runs on a stream of its own:

    A0 G0  A1 G1  wait for G0, B0  A2 G2  wait for G1, B1  ...  M  wait for the last G, its B

So a bucket's gather hides behind the next bucket's iteration, and the last one behind M. Bucket i gathers into half
i % 2 of one buffer: A2, and so G2, come after B0 on the stream.
"""

import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from muon.exchange import all_gather, is_even, wait
from muon.kernels import stages
from muon.layout import Cut, Layout, Matrix, alike, deal, matrices_of_all
from muon.matrices import Tensors
from muon.newton_schulz import Iteration, iterate, memory, operations, pick_dtype, pick_iteration
from muon.plan import has_aligned_rows
from muon.polynomials import Triple
from muon.segments import Segments, place_of, round_up


class SharedBucket(NamedTuple):
    """Matrices of the same sides and dtypes, of which each rank orthogonalises some, in one batch."""

    of_replica: list[list[Matrix]]
    param_dtype: torch.dtype
    grad_dtype: torch.dtype
    momentum_dtype: torch.dtype
    has_remainder: bool
    iteration: Iteration
    dtype: torch.dtype  # of the iteration
    start: int = 0  # row of the tables

    @property
    def matrices(self) -> list[Matrix]:
        return [matrix for some in self.of_replica for matrix in some]

    @property
    def sides(self) -> tuple[int, int]:
        return self.matrices[0].sides

    @property
    def rows(self) -> list[range]:
        """Of the tables, each replica's."""
        starts = itertools.accumulate(map(len, self.of_replica), initial=self.start)
        return [range(start, stop) for start, stop in itertools.pairwise(starts)]

    @property
    def gathered_shape(self) -> torch.Size:
        """(replicas, the most matrices that one has, n, m)."""
        return torch.Size((len(self.of_replica), max(map(len, self.of_replica)), *self.sides))

    @property
    def gathered_bytes(self) -> int:
        return round_up(self.gathered_shape.numel() * self.dtype.itemsize)

    @property
    def is_even(self) -> bool:
        return is_even([len(matrices) for matrices in self.of_replica])


class SharedPlan(Segments):
    """The step of these parameters, gradients and states, and of others of the same shapes and dtypes."""

    def __init__(
        self,
        tensors: Sequence[Tensors],
        buckets: Sequence[SharedBucket],
        layout: Layout,
        steps: Sequence[Triple],
        *,
        neuron_norm: float | None,
        **options: Any,
    ) -> None:
        self.buckets, self.layout, self.steps, self.neuron_norm = buckets, layout, steps, neuron_norm
        self.halves = min(2, len(buckets))
        matrices = [matrix for bucket in buckets for matrix in bucket.matrices]
        places = [[*place_of(matrix, tensors[matrix.index]), _is_stored_tall(matrix)] for matrix in matrices]
        super().__init__(tensors, matrices, places, **options)

    def forget(self) -> None:
        super().forget()
        self.gathered: list[Tensor] = []

    @property
    def buffer_bytes(self) -> int:
        """Two halves, of which the only bucket needs one."""
        return self.halves * max(bucket.gathered_bytes for bucket in self.buckets)

    def _segments(self, buffer: Tensor) -> list[Callable[[], None] | None]:
        """A of each bucket, B of each bucket, M."""
        halves = buffer[: self.buffer_bytes].view(self.halves, -1)
        self.gathered = [_gathered(bucket, halves[i % self.halves]) for i, bucket in enumerate(self.buckets)]
        filled = list(zip(self.buckets, self.gathered, strict=True))
        iterations = [partial(self._orthogonalize, *each) if self._own(each[0]) else None for each in filled]
        applications = [partial(self._apply, *each) for each in filled]
        others = any(self._others(bucket) for bucket in self.buckets)
        return [*iterations, *applications, self._follow_others if others else None]

    def _run(self) -> None:
        count = len(self.buckets)
        iterations, applications = self.segments[:count], self.segments[count : 2 * count]
        works: list[list[Any]] = []
        for i, bucket in enumerate(self.buckets):
            iterations[i]()
            works.append(self._gather(bucket, self.gathered[i]))
            if i:
                wait(works[i - 1])
                applications[i - 1]()
        self.segments[-1]()
        wait(works[-1])
        applications[-1]()

    def _gather(self, bucket: SharedBucket, gathered: Tensor) -> list[Any]:
        """What this rank sends lies where it belongs already."""
        group = self.layout.replica_group
        if bucket.is_even:
            mine = gathered[self.layout.replica]
            return [all_gather(gathered.flatten(), mine.flatten(), group=group, async_op=True)]
        parts = [X[: len(some)].flatten() for X, some in zip(gathered, bucket.of_replica, strict=True)]
        return [
            dist.broadcast(part, group=group, group_src=r, async_op=True) for r, part in enumerate(parts) if len(part)
        ]

    def _own(self, bucket: SharedBucket) -> range:
        return bucket.rows[self.layout.replica]

    def _others(self, bucket: SharedBucket) -> list[range]:
        rows, own = bucket.rows, self._own(bucket)
        return [span for span in (range(rows[0].start, own.start), range(own.stop, rows[-1].stop)) if span]

    def _is_aligned(self, bucket: SharedBucket) -> bool:
        return bool(self.aligned) and has_aligned_rows(bucket.sides)

    def _orthogonalize(self, bucket: SharedBucket, gathered: Tensor) -> None:
        (n, m), own, ops = bucket.sides, self._own(bucket), operations(use_triton=True)
        table, scalars = self._rows(own)
        X = ops.allocate(len(own), n, m, table, bucket.dtype)
        stages.pack(
            table, scalars, X, bucket.sides, bucket.grad_dtype, bucket.momentum_dtype,
            aligned=self._is_aligned(bucket),
            nesterov=self.nesterov, maximize=self.maximize, eps=self.eps,
        )  # fmt: skip
        mine = gathered[self.layout.replica, : len(own)]
        made = iterate(X, self.steps, bucket.iteration, ops, out=mine if mine.shape == X.shape else None)
        if made is not mine:
            mine.copy_(made[:, :n, :m])

    def _apply(self, bucket: SharedBucket, gathered: Tensor) -> None:
        for rows, X in zip(bucket.rows, gathered, strict=True):
            if rows:
                stages.apply(
                    *self._rows(rows), X[: len(rows)], bucket.sides, bucket.param_dtype,
                    aligned=self._is_aligned(bucket), cautious=self.cautious,
                    neuron_norm=self.neuron_norm, has_remainder=bucket.has_remainder,
                )  # fmt: skip

    def _follow_others(self) -> None:
        for bucket in self.buckets:
            for rows in self._others(bucket):
                stages.update_momentum(
                    *self._rows(rows), bucket.sides, bucket.grad_dtype, bucket.momentum_dtype,
                    aligned=self._is_aligned(bucket), nesterov=self.nesterov, maximize=self.maximize,
                )  # fmt: skip


def _gathered(bucket: SharedBucket, half: Tensor) -> Tensor:
    """The beginning of half of a buffer, as what the ranks of a bucket make."""
    shape = bucket.gathered_shape
    return half.view(bucket.dtype)[: shape.numel()].view(shape)


def _is_stored_tall(matrix: Matrix) -> bool:
    return matrix.rows < matrix.cols if matrix.is_transposed else matrix.is_tall


def plan_shared(
    tensors: Sequence[Tensors], shapes: Sequence[Sequence[int]], layout: Layout, cut: Cut, **options: Any
) -> SharedPlan | None:
    """None where the workspace has no room for what is gathered."""
    buckets = shared_buckets(tensors, shapes, layout, cut)
    return SharedPlan(tensors, buckets, layout, cut.steps, **options) if buckets else None


def shared_buckets(
    tensors: Sequence[Tensors],
    shapes: Sequence[Sequence[int]],
    layout: Layout,
    cut: Cut,
) -> list[SharedBucket] | None:
    """The matrices, dealt out and cut so that a step stays within the workspace, the most to gather first.

    One matrix a rank goes in any case, unless what is gathered doesn't fit alone: then None.
    """
    matrices = matrices_of_all(tensors, shapes, layout, cut)
    deal(matrices, layout.replicas, len(layout.shards))
    found = []
    for some in alike(matrices, tensors):
        (n, m), whole = some[0].sides, tensors[some[0].index]
        iteration = pick_iteration("auto", cut.steps, n, m, None, use_triton=whole.param.is_cuda)
        dtype = pick_dtype(iteration, whole.param.dtype, whole.param.device)
        gathered = 2 * layout.replicas * n * m * dtype.itemsize  # of one matrix a rank, in both halves
        if gathered > cut.workspace:
            return None
        most = max(1, cut.workspace // (gathered + memory(iteration, n, m, dtype)))
        dtypes = (whole.param.dtype, whole.grad.dtype, whole.momentum.dtype, whole.remainder is not None)
        pieces = _pieces(some, layout.replicas, most)
        found += [SharedBucket(piece, *dtypes, iteration, dtype) for piece in pieces]
    found.sort(key=lambda bucket: bucket.gathered_bytes, reverse=True)
    starts = itertools.accumulate((len(bucket.matrices) for bucket in found), initial=0)
    return [bucket._replace(start=start) for bucket, start in zip(found, starts, strict=False)]


def _pieces(matrices: Sequence[Matrix], replicas: int, most: int) -> list[list[list[Matrix]]]:
    """The matrices of each replica in turn, cut into about equal pieces of at most ``most`` for each."""
    of_replica = [[found for found in matrices if found.owner[0] == r] for r in range(replicas)]
    longest = max(map(len, of_replica))
    length = -(-longest // -(-longest // most))
    return [[own[start : start + length] for own in of_replica] for start in range(0, longest, length)]
