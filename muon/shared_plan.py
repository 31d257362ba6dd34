"""The Muon step of parameters that all ranks have whole, on GPUs: planned once, then replayed as CUDA graphs.

Every rank orthogonalises its share of the matrices and all gather the results (see ``muon.distributed``). A collective
is not recorded; what lies between two of them is, as a segment. Of each bucket there are two: (A) pack and iterate what
this rank owns, into its part of the gathered tensor; (B) apply what all ranks have made; and there is one for all
buckets, (M) the momentum of what others own. With G for a bucket's gather, which runs on a stream of its own:

    A0 G0  A1 G1  wait for G0, B0  A2 G2  wait for G1, B1  ...  M  wait for the last G, its B

So a bucket's gather hides behind the next bucket's iteration, and the last one behind M. Only waits order the streams,
the host never stops. Bucket i gathers into half i % 2 of one buffer: A2, and so G2, come after B0 on the stream. All
segments share the memory of one pool, as no two ever run at the same time.
"""

import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from muon.distributed import all_gather
from muon.kernels import stages
from muon.layout import Layout, Matrix, alike, deal, matrices_of_all
from muon.matrices import SMALLEST_EPS, MatrixMode, Split, Tensors
from muon.newton_schulz import Iteration, iterate, memory, operations, pick_dtype, pick_iteration
from muon.plan import Tables, are_aligned, has_aligned_rows, is_as_stored, record
from muon.polynomials import Triple


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
        """Rounded up to what memory is allocated in."""
        return -(-self.gathered_shape.numel() * self.dtype.itemsize // 512) * 512

    @property
    def is_even(self) -> bool:
        """Whether an all-gather, which pads, would gather at most twice what there is."""
        replicas, most, _, _ = self.gathered_shape
        return replicas * most <= 2 * len(self.matrices)


class SharedPlan(Tables):
    """The step of these parameters, gradients and states, and of others of the same shapes and dtypes."""

    def __init__(
        self,
        tensors: Sequence[Tensors],
        buckets: Sequence[SharedBucket],
        layout: Layout,
        steps: Sequence[Triple],
        *,
        nesterov: bool,
        maximize: bool,
        eps: float,
        cautious: bool,
        neuron_norm: float | None,
    ) -> None:
        self.buckets, self.layout, self.steps = buckets, layout, steps
        self.nesterov, self.maximize, self.eps = nesterov, maximize, max(eps, SMALLEST_EPS)
        self.cautious, self.neuron_norm = cautious, neuron_norm
        self.matrices = [matrix for bucket in buckets for matrix in bucket.matrices]
        self.shapes = sorted({(matrix.rows, matrix.cols) for matrix in self.matrices})
        self.shape_factors: list[float] = []
        owners = [matrix.index for matrix in self.matrices]
        places = [_place(matrix, tensors[matrix.index]) for matrix in self.matrices]
        super().__init__(owners, places, [0.0] * len(owners), tensors[0].param.device)
        self.forget()

    def forget(self) -> None:
        """What was recorded, and with which buffer."""
        self.aligned: bool | None = None
        self.buffer: Tensor | None = None
        self.gathered: list[Tensor] = []
        self.segments: list[Callable[[], None]] = []
        self.graphs: list[torch.cuda.CUDAGraph] = []

    @property
    def gathered_bytes(self) -> int:
        """Of each half of the buffer."""
        return max(bucket.gathered_bytes for bucket in self.buckets)

    def step(
        self,
        tensors: Sequence[Tensors],
        buffer: Tensor,
        lr_factor: Callable[[int, int], float],
        *,
        lr: float | Tensor,
        weight_decay: float,
        momentum: float,
        pool: Any = None,
    ) -> None:
        """Update parameters and states in place; every rank of the layout takes part.

        ``buffer`` (2, bytes, uint8) is where results are gathered, ``pool`` the memory of another plan's graphs.
        """
        are_stored = all(t is None or is_as_stored(t) for whole in tensors for t in whole)
        reached = tensors if are_stored else [whole.map(_as_stored) for whole in tensors]
        table = self._addresses(reached)
        aligned = are_aligned(table)
        with torch.cuda.device_of(self.table):
            self._copy(table, self.table)
            self._follow(lr_factor)
            self._set_scalars(lr, weight_decay, momentum, on_device=isinstance(lr, Tensor))
            if aligned != self.aligned or buffer is not self.buffer:  # this step compiles the kernels
                self._begin(aligned, buffer)
            elif self.table.is_cuda and not self.graphs:
                self._record(pool)
            self._run()
        if not are_stored:
            for whole, copy in zip(tensors, reached, strict=True):
                _copy_back(whole, copy)

    def _follow(self, lr_factor: Callable[[int, int], float]) -> None:
        factors = [lr_factor(*shape) for shape in self.shapes]
        if factors != self.shape_factors:
            of_shape = dict(zip(self.shapes, factors, strict=True))
            self._set_factors([of_shape[matrix.rows, matrix.cols] for matrix in self.matrices])
            self.shape_factors = factors

    def _begin(self, aligned: bool, buffer: Tensor) -> None:
        """Segments to be run as they are: A of each bucket, B of each bucket, M."""
        self.forget()
        self.aligned, self.buffer = aligned, buffer
        self.gathered = [_gathered(bucket, buffer[i % 2]) for i, bucket in enumerate(self.buckets)]
        for step in (self._orthogonalize, self._apply):
            self.segments += [partial(step, bucket, X) for bucket, X in zip(self.buckets, self.gathered, strict=True)]
        self.segments.append(self._follow_others)

    def _record(self, pool: Any) -> None:
        """Put graphs in the place of segments, but for those that launch nothing."""
        count = len(self.buckets)
        launches = [*(bool(self._own(bucket)) for bucket in self.buckets), *[True] * count]
        launches.append(any(self._others(bucket) for bucket in self.buckets))
        for i, launches_any in enumerate(launches):
            if launches_any:
                self.graphs.append(
                    record(self.segments[i], self.device, self.graphs[0].pool() if self.graphs else pool)
                )
            self.segments[i] = self.graphs[-1].replay if launches_any else _nothing

    def _run(self) -> None:
        count = len(self.buckets)
        iterations, applications = self.segments[:count], self.segments[count : 2 * count]
        works: list[list[Any]] = []
        for i, bucket in enumerate(self.buckets):
            iterations[i]()
            works.append(self._gather(bucket, self.gathered[i]))
            if i:
                _wait(works[i - 1])
                applications[i - 1]()
        self.segments[-1]()
        _wait(works[-1])
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

    def _rows(self, rows: range) -> tuple[Tensor, Tensor]:
        return self.table[rows.start : rows.stop], self.scalars[rows.start : rows.stop]

    def _orthogonalize(self, bucket: SharedBucket, gathered: Tensor) -> None:
        (n, m), own, ops = bucket.sides, self._own(bucket), operations(use_triton=True)
        if not own:
            return
        table, scalars = self._rows(own)
        X = ops.allocate(len(own), n, m, table, bucket.dtype)
        stages.pack(
            table, scalars, X, bucket.sides, bucket.grad_dtype, bucket.momentum_dtype,
            aligned=self._is_aligned(bucket),
            nesterov=self.nesterov, maximize=self.maximize, eps=self.eps,
        )  # fmt: skip
        X = iterate(X, self.steps, bucket.iteration, ops)
        gathered[self.layout.replica, : len(own)].copy_(X[:, :n, :m])

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


def _nothing() -> None:
    """An empty graph would come with a warning."""


def _wait(works: Sequence[Any]) -> None:
    for work in works:
        work.wait()


def _as_stored(tensor: Tensor) -> Tensor:
    """What is laid out otherwise, perhaps on this rank alone, changes nothing about what is sent."""
    return tensor if is_as_stored(tensor) else tensor.resolve_neg().contiguous()


def _copy_back(whole: Tensors, copy: Tensors) -> None:
    for name, tensor, used in zip(Tensors._fields, whole, copy, strict=True):
        if tensor is not None and used is not None and used is not tensor and name != "grad":
            tensor.copy_(used)


def _place(matrix: Matrix, whole: Tensors) -> list[int]:
    """The bytes from each tensor's start to where the matrix begins; if it is tall, as it is stored."""
    starts = []
    for tensor in whole:
        part = None if tensor is None else matrix.part(tensor.new_empty(tensor.shape, device="meta"))
        starts.append(0 if part is None else int(part.storage_offset()) * part.element_size())
    is_tall = matrix.rows < matrix.cols if matrix.is_transposed else matrix.is_tall
    return [*starts, int(is_tall)]


def shared_buckets(
    tensors: Sequence[Tensors],
    shapes: Sequence[Sequence[int]],
    layout: Layout,
    steps: Sequence[Triple],
    matrix: MatrixMode,
    split: Split,
    workspace: int,
) -> list[SharedBucket] | None:
    """The matrices, dealt out and cut so that a step stays within the workspace, the most to gather first.

    One matrix a rank goes in any case, unless what is gathered doesn't fit alone: then None.
    """
    matrices = matrices_of_all(tensors, shapes, layout, matrix, split)
    deal(matrices, layout.replicas, len(layout.shards))
    found = []
    for some in alike(matrices, tensors):
        (n, m), whole = some[0].sides, tensors[some[0].index]
        iteration = pick_iteration("auto", steps, n, m, None, use_triton=whole.param.is_cuda)
        dtype = pick_dtype(iteration, whole.param.dtype, whole.param.device)
        gathered = 2 * layout.replicas * n * m * dtype.itemsize  # of one matrix a rank, in both halves
        if gathered > workspace:
            return None
        most = max(1, workspace // (gathered + memory(iteration, n, m, dtype)))
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
