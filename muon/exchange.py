"""The step of one bucket over many ranks, from Python: momentum, to the owners, iteration, back, to replicas, apply.

It is for CPUs and for what recorded plans can't have; ``muon.sharded_plan`` sends the same messages in the same order.
"""

import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from muon.layout import Bucket, Layout, Matrix, wire_dtype
from muon.matrices import (
    SMALLEST_EPS,
    Tensors,
    add_update,
    even_out,
    follow_second_moment,
    neuron_ratio,
)
from muon.newton_schulz import iterate, operations, uses_triton
from muon.polynomials import Triple

# torch 2.13 has renamed it.
all_gather: Any = getattr(dist, "all_gather_single", None) or getattr(dist, "all_gather_into_tensor", None)


def overlapped(tasks: Iterable[Iterator[None]]) -> None:
    """Run all of them to their ends, a new one beginning whenever those under way have got a stage further."""
    under_way: deque[Iterator[None]] = deque()
    for task in tasks:
        under_way.append(task)
        _advance(under_way)
    while under_way:
        _advance(under_way)


def _advance(tasks: deque[Iterator[None]]) -> None:
    """Each by a stage, the oldest last: what the newest sends is on its way while an older one computes."""
    done = object()
    if [next(task, done) for task in reversed(tasks)][-1] is done:
        tasks.popleft()


def is_even(sizes: Sequence[int]) -> bool:
    """Whether an all-gather, which pads, would gather at most twice what there is."""
    return max(sizes) * len(sizes) <= 2 * sum(sizes)


def wait(works: Iterable[Any]) -> None:
    """Let the stream wait for collectives."""
    for work in works:
        if work is not None:
            work.wait()


@dataclass
class Run:
    """One step of one bucket."""

    bucket: Bucket
    layout: Layout
    tensors: Sequence[Tensors]
    lr_factor: Callable[[int, int], float]
    lr: float | Tensor
    weight_decay: float
    momentum: float
    nesterov: bool
    eps: float
    maximize: bool
    cautious: bool
    neuron_norm: float | None

    def stages(self, steps: Sequence[Triple]) -> Iterator[None]:
        """A step in as many stages as its layout has; between them its collectives are under way."""
        bucket, layout = self.bucket, self.layout
        self._update_momentum()
        updates, sent = self._to_owners(self._updates())
        evens = self._evens_owners()
        moments, moments_sent = self._to_owners(self._moments(), width=1) if evens else (None, None)
        yield
        wait([sent, moments_sent])
        X = self._orthogonalized(updates, steps)
        del updates
        mine, sent = self._from_owners(X, None)
        rows, rows_sent = self._from_owners(self._evened(X, moments), 2) if moments is not None else (None, None)
        del X, moments
        yield
        wait([sent, rows_sent])
        parts, sent = self._to_replicas(mine, None)
        row_parts, rows_sent = self._to_replicas(rows, 2) if rows is not None else ([], [])
        del mine, rows
        if layout.replica_group is not None:
            yield
        wait([*sent, *rows_sent])
        for replica, matrices in enumerate(bucket.of_replica):
            numbers = self._shares(matrices, row_parts[replica], 2) if row_parts else itertools.repeat(None)
            found = zip(matrices, self._shares(matrices, parts[replica], None), numbers, strict=False)
            for matrix, update, number in found:
                if matrix.regions[layout.shard].shape[0]:
                    self._apply(matrix, update, number)

    def _evens_owners(self) -> bool:
        """NorMuon divides by the norms of whole rows and matrices, which only an owner sees."""
        return self.neuron_norm is not None and self.bucket.is_exchanged

    def _update_momentum(self) -> None:
        fresh = [self.tensors[index] for index in self.bucket.fresh]
        grads = [self._direction(whole.grad, whole.momentum) for whole in fresh]
        if fresh:
            torch._foreach_lerp_([whole.momentum for whole in fresh], grads, 1 - self.momentum)

    def _direction(self, grad: Tensor, momentum: Tensor) -> Tensor:
        grad = grad.to(momentum.dtype)
        return -grad if self.maximize else grad

    def _updates(self) -> list[Tensor]:
        """This rank's part of each matrix whose owner is in its shard group."""
        momentums, grads = [], []
        for matrix in self.bucket.mine:
            whole = self.tensors[matrix.index]
            if matrix.regions[self.layout.shard].numel():
                momentums.append(matrix.part(whole.momentum))
                grads.append(self._direction(matrix.part(whole.grad), whole.momentum))
        return list(torch._foreach_lerp(grads, momentums, self.momentum)) if self.nesterov and grads else momentums

    def _moments(self) -> list[Tensor]:
        shard, found = self.layout.shard, []
        for matrix in self.bucket.mine:
            moment = self.tensors[matrix.index].neuron_second_moment
            if moment is not None and matrix.regions[shard].numel(1):
                found.append(matrix.part(moment))
        return found

    def _empty(self, size: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(size, dtype=dtype, device=self.tensors[self.bucket.matrices[0].index].param.device)

    def _to_owners(self, parts: Sequence[Tensor], width: int | None = None) -> tuple[Tensor, Any]:
        """What the owners' matrices consist of."""
        whole = self.tensors[self.bucket.matrices[0].index]
        dtype = wire_dtype(whole) if width is None else torch.promote_types(whole.param.dtype, torch.float32)
        sent = torch.cat([part.reshape(-1) for part in parts]).to(dtype) if parts else self._empty(0, dtype)
        return self._exchange(sent, *self.bucket.counts(self.layout, width))

    def _exchange(self, sent: Tensor, to: list[int], by: list[int]) -> tuple[Tensor, Any]:
        if not self.bucket.is_exchanged:
            return sent, None
        received = self._empty(sum(by), sent.dtype)
        work = dist.all_to_all_single(received, sent, by, to, group=self.layout.shard_group, async_op=True)
        return received, work

    def _orthogonalized(self, updates: Tensor, steps: Sequence[Triple]) -> Tensor | None:
        """(matrices of this rank, n, m) of what was received."""
        (n, m), own = self.bucket.sides, self.bucket.own
        if not own:
            return None
        G = updates.new_empty(len(own), n, m)
        self._fill([matrix.oriented(wide) for matrix, wide in zip(own, G, strict=True)], updates, None)
        ops = operations(uses_triton("auto", G))
        X = ops.allocate(len(own), n, m, G, self.bucket.dtype)
        ops.normalize(G, X, max(self.eps, SMALLEST_EPS))
        del G
        return iterate(X, steps, self.bucket.iteration, ops)[:, :n, :m]

    def _fill(self, matrices: Sequence[Tensor], received: Tensor, width: int | None) -> None:
        start = 0
        for shard in self.bucket.sources(self.layout):
            for matrix, target in zip(self.bucket.own, matrices, strict=True):
                region = matrix.regions[shard]
                stop = start + region.numel(width)
                if stop > start:
                    target[region.of(target, width)] = received[start:stop].view(
                        region.shape[0], width or region.shape[1]
                    )
                start = stop

    def _evened(self, X: Tensor | None, moments: Tensor) -> Tensor | None:
        """For each row of this rank's matrices the new second moment, and what keeps the matrix's norm, (., m, 2)."""
        own, m = self.bucket.own, self.bucket.sides[1]
        if X is None or self.neuron_norm is None:
            return None
        table = moments.new_zeros(len(own), m, 2)
        self._fill([rows[:, :1] for rows in table], moments, 1)
        for matrix, wide, rows in zip(own, X, table, strict=True):
            second_moment, update = rows[: matrix.rows, :1], matrix.oriented(wide)
            follow_second_moment(update, second_moment, self.neuron_norm)
            rows[: matrix.rows, 1:] = neuron_ratio(update, second_moment)
        return table

    def _from_owners(self, own: Tensor | None, width: int | None) -> tuple[Tensor, Any]:
        """This rank's part of each matrix whose owner is in its shard group."""
        dtype = self.bucket.dtype if width is None else torch.promote_types(self._param_dtype(), torch.float32)
        parts = []
        for shard in self.bucket.sources(self.layout):
            for matrix, whole in zip(self.bucket.own, () if own is None else own, strict=True):
                region = matrix.regions[shard]
                if region.numel(width):
                    target = matrix.oriented(whole) if width is None else whole
                    parts.append(target[region.of(target, width)].reshape(-1))
        sent = torch.cat(parts) if parts else self._empty(0, dtype)
        to, by = self.bucket.counts(self.layout, width)
        return self._exchange(sent, by, to)

    def _param_dtype(self) -> torch.dtype:
        return self.tensors[self.bucket.matrices[0].index].param.dtype

    def _to_replicas(self, mine: Tensor, width: int | None) -> tuple[list[Tensor], list[Any]]:
        """Of each replica the parts that its ranks have made, this shard's.

        Where shares are about equal by one all-gather, which pads them; otherwise by one broadcast from each replica.
        """
        group, shard = self.layout.replica_group, self.layout.shard
        if group is None:
            return [mine], []
        sizes = [sum(m.regions[shard].numel(width) for m in matrices) for matrices in self.bucket.of_replica]
        largest = max(sizes)
        if is_even(sizes):
            padded = self._empty(largest, mine.dtype)
            padded[: len(mine)] = mine
            gathered = self._empty(largest * len(sizes), mine.dtype)
            work = all_gather(gathered, padded, group=group, async_op=True)
            return [row[:size] for row, size in zip(gathered.view(len(sizes), -1), sizes, strict=True)], [work]
        parts = [mine if r == self.layout.replica else self._empty(n, mine.dtype) for r, n in enumerate(sizes)]
        works = [
            dist.broadcast(part, group=group, group_src=r, async_op=True) for r, part in enumerate(parts) if sizes[r]
        ]
        return parts, works

    def _shares(self, matrices: Sequence[Matrix], parts: Tensor, width: int | None) -> Iterator[Tensor]:
        start = 0
        for matrix in matrices:
            region = matrix.regions[self.layout.shard]
            stop = start + region.numel(width)
            yield parts[start:stop].view(region.shape[0], width or region.shape[1])
            start = stop

    def _apply(self, matrix: Matrix, update: Tensor, numbers: Tensor | None) -> None:
        tensors = self.tensors[matrix.index].map(matrix.part)
        moment = tensors.neuron_second_moment
        if moment is not None and self.neuron_norm is not None:
            rows = moment.view(len(update), 1)
            if numbers is None:
                follow_second_moment(update, rows, self.neuron_norm)
                ratio = neuron_ratio(update, rows)
            else:
                rows.copy_(numbers[:, :1])
                ratio = numbers[:, 1:]
            update = even_out(update, rows).mul_(ratio)
        rate = self.lr.to(update.device) if isinstance(self.lr, Tensor) else self.lr
        scale = -rate * self.lr_factor(matrix.rows, matrix.cols)
        decay = 1 - rate * self.weight_decay
        add_update(tensors, update.reshape(tensors.param.shape), decay, scale, cautious=self.cautious)
