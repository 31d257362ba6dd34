"""The Muon step of one group of parameters on a GPU: planned once, then replayed as one CUDA graph.

A step is three stages for each bucket: pack (momentum, norm, cast, transposition), iterate, apply. What changes from
step to step - addresses, learning rate, momentum, weight decay - lies in two small tables in device memory; the rest is
recorded on the second step, so that a step costs Python two copies and one launch however many layers there are.

While a caller records a graph of his own, and with ``capturable``, the stages run as they are and nothing is recorded
here. In a caller's graph all that changes from replay to replay is the learning rate, if it is a tensor.
"""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from muon.kernels import stages
from muon.matrices import SMALLEST_EPS, Block, MatrixMode, Split, Tensors, buckets
from muon.newton_schulz import DEFAULT_WORKSPACE, Iteration, iterate, memory, operations, pick_dtype, pick_iteration
from muon.polynomials import Triple

STEP_FIRST = "before Muon is captured in a CUDA graph, take a step like it with capturable=True outside of one"


class PlannedBucket(NamedTuple):
    """Some rows of the tables, whose matrices have the same sides and dtypes."""

    start: int
    stop: int
    sides: tuple[int, int]
    param_dtype: torch.dtype
    grad_dtype: torch.dtype
    momentum_dtype: torch.dtype
    has_remainder: bool
    iteration: Iteration
    dtype: torch.dtype


class Tables:
    """What the kernels of a step read about each matrix, one row each, in device memory; see ``muon.kernels.stages``.

    Attributes:
        owners: of each row the index of its parameter,
        places: where the matrix begins in each of the parameter's tensors, in bytes, and whether it is tall,
        factors: and the factor of its learning rate.
    """

    def __init__(
        self, owners: Sequence[int], places: Sequence[Sequence[int]], factors: Sequence[float], device: torch.device
    ) -> None:
        self.device = device
        self.owners = torch.tensor(owners, dtype=torch.int64, device="cpu")
        self.places = torch.tensor(places, dtype=torch.int64, device="cpu").view(-1, len(Tensors._fields) + 1)
        self.table = torch.empty(self.places.shape, dtype=torch.int64, device=device)
        self.scalars = torch.empty(len(owners), 3, dtype=torch.float32, device=device)
        self._set_factors(factors)

    def _set_factors(self, factors: Sequence[float]) -> None:
        self.factors = torch.tensor(factors, dtype=torch.float64, device="cpu")
        self.device_factors = self.factors.to(self.device)

    def _addresses(self, tensors: Sequence[Tensors]) -> Tensor:
        wholes = [[0 if tensor is None else tensor.data_ptr() for tensor in whole] for whole in tensors]
        table = self.places.clone()
        table[:, : len(Tensors._fields)] += torch.tensor(wholes, device="cpu")[self.owners]
        return table

    def _set_scalars(self, lr: float | Tensor, weight_decay: float, momentum: float, on_device: bool) -> None:
        if not on_device:
            scalars = torch.empty(self.scalars.shape, dtype=torch.float32, device="cpu")
            scalars[:, 0] = momentum
            scalars[:, 1] = 1 - lr * weight_decay
            scalars[:, 2] = -lr * self.factors
            self._copy(scalars, self.scalars)
            return
        rate = lr if isinstance(lr, Tensor) else torch.full((), lr, dtype=torch.float64, device=self.device)
        rate = rate.to(self.device, torch.float64)
        self.scalars[:, 0].fill_(momentum)
        self.scalars[:, 1].copy_(1 - rate * weight_decay)
        self.scalars[:, 2].copy_(-rate * self.device_factors)

    def _copy(self, source: Tensor, target: Tensor) -> None:
        target.copy_(source.pin_memory() if target.is_cuda else source, non_blocking=True)


class Plan(Tables):
    """The step of these parameters, gradients and states, and of others of the same shapes and dtypes.

    All of them are on one device and suit the kernels (see ``suits``).
    """

    def __init__(
        self,
        tensors: Sequence[Tensors],
        steps: Sequence[Triple],
        lr_factor: Callable[[int, int], float],
        *,
        nesterov: bool,
        maximize: bool,
        eps: float,
        matrix: MatrixMode,
        split: Split,
        cautious: bool = False,
        neuron_norm: float | None = None,
        workspace: int | None = None,
    ) -> None:
        self.steps, self.nesterov, self.maximize, self.eps = steps, nesterov, maximize, max(eps, SMALLEST_EPS)
        self.cautious, self.neuron_norm = cautious, neuron_norm
        self.lr_factor = lr_factor
        self.device = tensors[0].param.device
        self.buckets: list[PlannedBucket] = []
        owners: list[int] = []
        places: list[list[int]] = []
        factors: list[float] = []
        for bucket in buckets(tensors, matrix, split, self._most(workspace or DEFAULT_WORKSPACE)):
            start = len(owners)
            for block in bucket.blocks:
                owners += [block.index] * block.count
                places += _places(block, tensors[block.index])
                factors += [self.lr_factor(block.rows, block.cols)] * block.count
            param, grad, momentum, _, remainder = bucket.blocks[0].tensors
            iteration = self._iteration(*bucket.sides)
            self.buckets.append(
                PlannedBucket(
                    start, len(owners), bucket.sides, param.dtype, grad.dtype, momentum.dtype, remainder is not None,
                    iteration, pick_dtype(iteration, param.dtype, self.device),
                )
            )  # fmt: skip
        super().__init__(owners, places, factors, self.device)
        self.aligned: bool | None = None
        self.graph: torch.cuda.CUDAGraph | None = None
        self.spare: Tensor | None = None  # pinned memory for the addresses that a caller's graph will upload,
        self.captured: list[Tensor] = []  # and for those that callers' graphs do upload, whenever they are replayed

    def _iteration(self, n: int, m: int) -> Iteration:
        return pick_iteration("auto", self.steps, n, m, None, use_triton=self.device.type == "cuda")

    def _most(self, workspace: int) -> Callable[[int, int, Tensor], int]:
        def most(n: int, m: int, param: Tensor) -> int:
            iteration = self._iteration(n, m)
            return workspace // memory(iteration, n, m, pick_dtype(iteration, param.dtype, self.device))

        return most

    def step(
        self,
        tensors: Sequence[Tensors],
        *,
        lr: float | Tensor,
        weight_decay: float,
        momentum: float,
        capturable: bool = False,
        pool: Any = None,
    ) -> None:
        """Update parameters and states in place.

        ``lr`` may be a tensor on the device, which is then not read by the host. ``pool`` is the memory of another
        plan's graph, for this one's to share: they never run at the same time.

        Raises:
            RuntimeError: in a caller's capture without a ``capturable`` step before.
        """
        capturing = self.table.is_cuda and torch.cuda.is_current_stream_capturing()
        table = self._addresses(tensors)
        aligned = are_aligned(table)
        with torch.cuda.device_of(self.table):
            self._upload(table, capturing, capturable)
            self._set_scalars(lr, weight_decay, momentum, on_device=capturable or isinstance(lr, Tensor))
            if capturable or capturing:
                self._run(aligned)
            elif self.table.is_cuda and aligned == self.aligned:
                self._replay(pool)
            else:  # the first step compiles the kernels
                self.aligned, self.graph = aligned, None
                self._run(aligned)

    def _upload(self, table: Tensor, capturing: bool, capturable: bool) -> None:
        if not capturing:
            self._copy(table, self.table)
            if capturable and self.table.is_cuda and self.spare is None:
                self.spare = torch.empty(table.shape, dtype=table.dtype, device="cpu", pin_memory=True)
            return
        if self.spare is None:
            raise RuntimeError(STEP_FIRST)
        self.captured.append(self.spare.copy_(table))
        self.table.copy_(self.spare, non_blocking=True)
        self.spare = None

    def _replay(self, pool: Any) -> None:
        if self.graph is None:
            self.graph = record(lambda: self._run(bool(self.aligned)), self.device, pool)
        self.graph.replay()

    def _run(self, aligned: bool) -> None:
        for bucket in self.buckets:
            self._run_bucket(bucket, aligned and has_aligned_rows(bucket.sides))

    def _run_bucket(self, bucket: PlannedBucket, aligned: bool) -> None:
        ops = operations(use_triton=True)
        table, scalars = self.table[bucket.start : bucket.stop], self.scalars[bucket.start : bucket.stop]
        X = ops.allocate(len(table), *bucket.sides, table, bucket.dtype)
        stages.pack(
            table, scalars, X, bucket.sides, bucket.grad_dtype, bucket.momentum_dtype,
            aligned=aligned, nesterov=self.nesterov, maximize=self.maximize, eps=self.eps,
        )  # fmt: skip
        X = iterate(X, self.steps, bucket.iteration, ops)
        stages.apply(
            table, scalars, X, bucket.sides, bucket.param_dtype,
            aligned=aligned, cautious=self.cautious, neuron_norm=self.neuron_norm, has_remainder=bucket.has_remainder,
        )  # fmt: skip


def are_aligned(table: Tensor) -> bool:
    """Whether all addresses are multiples of 16 bytes, as wide loads and stores need."""
    return bool((table[:, : len(Tensors._fields)] % 16 == 0).all())


def has_aligned_rows(sides: tuple[int, int]) -> bool:
    return all(side % stages.ALIGNMENT == 0 for side in sides)


def record(run: Callable[[], None], device: torch.device, pool: Any) -> torch.cuda.CUDAGraph:
    """A graph of what ``run`` launches, whose kernels are compiled, and that holds on to no memory of the pool."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool, stream=_recording_stream(device), capture_error_mode="thread_local"):
        run()
    return graph


@cache
def _recording_stream(device: torch.device) -> torch.cuda.Stream:
    """Always the same one: graphs of one pool share the memory only of the stream that they were recorded on.

    torch's default would be on the device that recorded first.
    """
    return torch.cuda.Stream(device)


def _places(block: Block, whole: Tensors) -> list[list[int]]:
    """For each matrix of a block the bytes from each whole tensor's start to where the matrix begins; if it is tall."""
    starts = []
    for view, tensor in zip(block.tensors, whole, strict=True):
        if view is None or tensor is None:
            starts.append([0] * block.count)
            continue
        # Rows split out of a batch leave gaps between its matrices.
        apart = view.numel() // block.count if view.is_contiguous() else view.stride(-3)
        first = view.data_ptr() - tensor.data_ptr()
        starts.append([first + i * apart * view.element_size() for i in range(block.count)])
    return [[*place, int(block.is_tall)] for place in zip(*starts, strict=True)]


def suits(tensors: Tensors) -> bool:
    """Whether the kernels can reach these: plain, contiguous, of the dtypes that they take, on one device."""
    return suits_once_contiguous(tensors) and all(tensor is None or is_as_stored(tensor) for tensor in tensors)


def is_as_stored(tensor: Tensor) -> bool:
    """Whether memory holds the elements in their order, and not their negatives."""
    return tensor.is_contiguous() and not tensor.is_neg()


def suits_once_contiguous(tensors: Tensors) -> bool:
    """Whether the kernels can reach contiguous copies of these.

    A subclass, such as a DTensor, may have its elements elsewhere.
    """
    device = tensors.param.device
    for tensor in tensors:
        if tensor is not None and (type(tensor) not in (Tensor, Parameter) or tensor.device != device):
            return False
    second_moment, remainder = tensors.neuron_second_moment, tensors.remainder
    return (
        tensors.param.dtype in stages.DTYPES
        and tensors.grad.dtype in stages.DTYPES
        and tensors.momentum.dtype in stages.DTYPES
        and (second_moment is None or second_moment.dtype == torch.float32)
        and (remainder is None or remainder.dtype == torch.int16)
    )
