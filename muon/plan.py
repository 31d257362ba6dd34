"""The Muon step of one group of parameters on a GPU: planned once, then replayed as one CUDA graph.

A step is three stages for each bucket: pack (momentum, norm, cast, transposition), iterate, apply. What changes from
step to step - addresses, learning rate, momentum, weight decay - lies in two small tables in device memory; the rest is
recorded on the second step, so that a step costs Python two copies and one launch however many layers there are.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from muon.kernels import stages
from muon.matrices import MatrixMode, Split, buckets
from muon.newton_schulz import iterate, operations, pick_dtype, pick_iteration
from muon.polynomials import Triple

# What a bucket holds at most; more layers than fit become more buckets. With 24 layers of width 2048 the graph keeps
# 4.5 GiB (docs/performance.md): X twice, the square matrices, and what buckets of other sides don't reuse.
MOST_ELEMENTS = 2**28


class PlannedBucket(NamedTuple):
    """Some rows of the tables, whose matrices have the same sides and dtypes."""

    start: int
    stop: int
    sides: tuple[int, int]
    param_dtype: torch.dtype
    grad_dtype: torch.dtype
    momentum_dtype: torch.dtype


class Plan:
    """The step of these parameters, gradients and momentums, and of others of the same shapes and dtypes.

    All of them are on one device and suit the kernels (see ``suits``).
    """

    def __init__(
        self,
        params: Sequence[Tensor],
        grads: Sequence[Tensor],
        momentums: Sequence[Tensor],
        steps: Sequence[Triple],
        lr_factor: Callable[[int, int], float],
        *,
        nesterov: bool,
        maximize: bool,
        eps: float,
        matrix: MatrixMode,
        split: Split,
    ) -> None:
        self.steps, self.nesterov, self.maximize, self.eps = steps, nesterov, maximize, eps
        self.device = params[0].device
        self.buckets: list[PlannedBucket] = []
        owners: list[int] = []  # of each row: the parameter's index,
        places: list[list[int]] = []  # where the matrix begins in parameter, gradient and momentum, and if it is tall,
        factors: list[float] = []  # and the factor of its learning rate
        for bucket in buckets(params, grads, momentums, matrix, split, MOST_ELEMENTS):
            start = len(owners)
            for block in bucket.blocks:
                first = (block.param.data_ptr() - params[block.index].data_ptr()) // block.param.element_size()
                # Rows split out of a batch leave gaps between its matrices.
                apart = block.rows * block.cols if block.param.is_contiguous() else block.param.stride(-3)
                for i in range(first, first + block.count * apart, apart):
                    owners.append(block.index)
                    places.append([*(i * tensor.element_size() for tensor in block.tensors), int(block.is_tall)])
                    factors.append(lr_factor(block.rows, block.cols))
            dtypes = (tensor.dtype for tensor in bucket.blocks[0].tensors)
            self.buckets.append(PlannedBucket(start, len(owners), bucket.sides, *dtypes))
        self.owners = torch.tensor(owners, dtype=torch.int64, device="cpu")
        self.places = torch.tensor(places, dtype=torch.int64, device="cpu").view(-1, 4)
        self.factors = torch.tensor(factors, dtype=torch.float64, device="cpu")
        self.table = torch.empty(self.places.shape, dtype=torch.int64, device=self.device)
        self.scalars = torch.empty(len(owners), 3, dtype=torch.float32, device=self.device)
        self.aligned: bool | None = None
        self.graph: torch.cuda.CUDAGraph | None = None

    def step(
        self,
        params: Sequence[Tensor],
        grads: Sequence[Tensor],
        momentums: Sequence[Tensor],
        *,
        lr: float,
        weight_decay: float,
        momentum: float,
    ) -> None:
        """Update parameters and momentums in place."""
        pointers = [[tensor.data_ptr() for tensor in tensors] for tensors in (params, grads, momentums)]
        addresses = torch.tensor(pointers, device="cpu")  # torch's default device and dtype may be others
        table = self.places.clone()
        table[:, :3] += addresses.mT[self.owners]
        scalars = torch.empty(self.scalars.shape, dtype=torch.float32, device="cpu")
        scalars[:, 0] = momentum
        scalars[:, 1] = 1 - lr * weight_decay
        scalars[:, 2] = -lr * self.factors
        aligned = bool((table[:, :3] % 16 == 0).all())
        with torch.cuda.device_of(self.table):
            self._upload(table, scalars)
            if self.table.is_cuda and aligned == self.aligned:
                self._replay()
            else:  # the first step compiles the kernels
                self.aligned, self.graph = aligned, None
                self._run()

    def _upload(self, table: Tensor, scalars: Tensor) -> None:
        for target, source in ((self.table, table), (self.scalars, scalars)):
            target.copy_(source.pin_memory() if target.is_cuda else source, non_blocking=True)

    def _replay(self) -> None:
        if self.graph is None:
            self.graph = torch.cuda.CUDAGraph()
            stream = torch.cuda.Stream(self.device)  # torch's default would be on the device that recorded first
            with torch.cuda.graph(self.graph, stream=stream, capture_error_mode="thread_local"):
                self._run()
        self.graph.replay()

    def _run(self) -> None:
        ops = operations(use_triton=True)
        for start, stop, sides, param_dtype, grad_dtype, momentum_dtype in self.buckets:
            table, scalars = self.table[start:stop], self.scalars[start:stop]
            aligned = bool(self.aligned) and all(side % stages.ALIGNMENT == 0 for side in sides)
            iteration = pick_iteration("auto", self.steps, *sides, None, use_triton=self.device.type == "cuda")
            X = ops.allocate(stop - start, *sides, table, pick_dtype(iteration, param_dtype, self.device))
            stages.pack(
                table, scalars, X, sides, grad_dtype, momentum_dtype,
                aligned=aligned, nesterov=self.nesterov, maximize=self.maximize, eps=self.eps,
            )  # fmt: skip
            X = iterate(X, self.steps, iteration, ops)
            stages.apply(table, scalars, X, sides, param_dtype, aligned=aligned)


def suits(*tensors: Tensor) -> bool:
    """Whether the kernels can reach these: plain, contiguous, of a 16-bit or 32-bit dtype.

    A subclass, such as a DTensor, may have its elements elsewhere.
    """
    return all(
        type(tensor) in (Tensor, Parameter) and tensor.is_contiguous() and tensor.dtype in stages.DTYPES
        for tensor in tensors
    )
