"""The Muon step of sharded parameters on GPUs: planned once, then replayed as CUDA graphs between collectives.

The stages, messages and their order are those of ``muon.exchange.Run``, so that a rank may replay while another
runs them from Python. Of each bucket there are three segments:

    A  momentum of what this rank holds; its parts of the updates, to be sent to the owners
    B  the matrices that it owns, from all their parts: norm, iteration, and their parts again, to be sent back
    C  apply this rank's parts

Parts lie one after the other, each as its parameter's rows do. What a bucket sends and receives lies in one of as many
slots of the buffer as there are stages, since a bucket ends before the one that comes so many later begins; or in as
many as there are buckets, where those are fewer.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from muon.exchange import all_gather, is_even, overlapped, wait
from muon.kernels import stages
from muon.layout import Bucket, Cut, Deal, Layout, Matrix, wire_dtype
from muon.matrices import Tensors
from muon.newton_schulz import iterate, operations
from muon.plan import has_aligned_rows
from muon.polynomials import Triple
from muon.segments import Segments, place_of, round_up


class Parts(NamedTuple):
    """Of successive matrices this rank's parts, of the same shape, and where they lie: in the tables, in a message."""

    rows: range
    shape: tuple[int, int]
    start: int

    @property
    def stop(self) -> int:
        return self.start + len(self.rows) * self.shape[0] * self.shape[1]

    def of(self, message: Tensor) -> Tensor:
        """(parts, rows, cols)"""
        return message[self.start : self.stop].view(-1, *self.shape)


class Messages(NamedTuple):
    """What a bucket sends and receives, elements one after the other."""

    to_owners: Tensor
    at_owner: Tensor
    from_owner: Tensor
    mine: Tensor
    by_replica: list[Tensor]  # each replica's part of the work, this rank's shard of it
    gathered: Tensor | None  # all of them, padded; None: each is broadcast


class ShardedPlan(Segments):
    """The step of these local tensors of parameters, and of others of the same shapes and dtypes."""

    def __init__(
        self,
        tensors: Sequence[Tensors],
        buckets: Sequence[Bucket],
        layout: Layout,
        steps: Sequence[Triple],
        **options: Any,
    ) -> None:
        self.layout, self.steps, self.buckets = layout, steps, buckets
        self.slots = min(layout.stages, len(buckets))
        self.counts = [bucket.counts(layout, None) for bucket in buckets]
        self.wholes = [tensors[bucket.matrices[0].index].map(_described) for bucket in buckets]
        held: list[Matrix] = []
        self.parts: list[list[list[Parts]]] = []  # of each bucket, by the replica that makes them
        for bucket in buckets:
            self.parts.append([])
            for matrices in bucket.of_replica:
                some = [matrix for matrix in matrices if math.prod(self._shape(matrix))]
                self.parts[-1].append(_runs([self._shape(matrix) for matrix in some], len(held)))
                held += some
        places = [[*place_of(matrix, tensors[matrix.index]), 0] for matrix in held]
        super().__init__(tensors, held, places, **options)

    def forget(self) -> None:
        super().forget()
        self.messages: list[Messages] = []

    def _shape(self, matrix: Matrix) -> tuple[int, int]:
        return matrix.regions[self.layout.shard].shape

    @property
    def buffer_bytes(self) -> int:
        return self.slots * self._slot_bytes()

    def _slot_bytes(self) -> int:
        """Never 0, so that a rank which has no part in anything has slots too."""
        return max(round_up(1), *(sum(self._bytes(i)) for i in range(len(self.buckets))))

    def _bytes(self, i: int) -> tuple[int, int, int]:
        """Of a bucket's parts here, of the matrices that this rank owns, of what the replicas have made."""
        bucket, wire = self.buckets[i], wire_dtype(self.wholes[i])
        itemsize = max(wire.itemsize, bucket.dtype.itemsize)
        sizes = self._sizes(i)
        is_alone = self.layout.replica_group is None
        mine = sizes[self.layout.replica] if is_alone else max(sizes)
        own = sum(matrix.rows * matrix.cols for matrix in bucket.own) if bucket.is_exchanged else 0
        gathered = 0 if is_alone else max(sizes) * len(sizes) if is_even(sizes) else sum(sizes)
        return tuple(round_up(numel * itemsize) for numel in (mine, own, gathered))  # type: ignore[return-value]

    def _sizes(self, i: int) -> list[int]:
        """Elements of this rank's parts of what each replica makes."""
        return [parts[-1].stop if parts else 0 for parts in self.parts[i]]

    def _segments(self, buffer: Tensor) -> list[Callable[[], None] | None]:
        """A of each bucket, B of each, C of each."""
        slots = buffer[: self.buffer_bytes].view(self.slots, -1)
        count = len(self.buckets)
        self.messages = [self._messages(i, slots[i % len(slots)]) for i in range(count)]
        holds = [any(self.parts[i]) for i in range(count)]
        return [
            *(partial(self._update_momentum, i) if holds[i] else None for i in range(count)),
            *(partial(self._orthogonalize, i) if self.buckets[i].own else None for i in range(count)),
            *(partial(self._apply, i) if holds[i] else None for i in range(count)),
        ]

    def _messages(self, i: int, slot: Tensor) -> Messages:
        """The parts that were sent to owners make room for those that come back, and so do the owners' matrices."""
        bucket, wire = self.buckets[i], wire_dtype(self.wholes[i])
        here, own, gathered = slot[: sum(self._bytes(i))].split(self._bytes(i))
        sizes, replica = self._sizes(i), self.layout.replica
        own_size = sum(matrix.rows * matrix.cols for matrix in bucket.own)
        if not bucket.is_exchanged:
            own, own_size = here, sizes[replica]
        mine = here.view(bucket.dtype)
        messages = (
            here.view(wire)[: sizes[replica]],
            own.view(wire)[:own_size],
            own.view(bucket.dtype)[:own_size],
            mine[: sizes[replica]],
        )
        if self.layout.replica_group is None:
            return Messages(*messages, [messages[-1]], None)
        if is_even(sizes):
            whole = gathered.view(bucket.dtype)[: max(sizes) * len(sizes)]
            return Messages(*messages[:3], mine[: max(sizes)], list(whole.view(len(sizes), -1)), whole)
        by_replica = list(gathered.view(bucket.dtype)[: sum(sizes)].split(sizes))
        by_replica[replica] = messages[-1]
        return Messages(*messages, by_replica, None)

    def _run(self) -> None:
        overlapped(self._stages(i) for i in range(len(self.buckets)))

    def _stages(self, i: int) -> Iterator[None]:
        """As ``muon.exchange.Run.stages``."""
        messages, count = self.messages[i], len(self.buckets)
        to, by = self.counts[i]
        self.segments[i]()
        works = self._exchange(i, messages.at_owner, messages.to_owners, by, to)
        yield
        wait(works)
        self.segments[count + i]()
        works = self._exchange(i, messages.mine[: sum(to)], messages.from_owner, to, by)
        yield
        wait(works)
        if self.layout.replica_group is not None:
            works = self._to_replicas(messages)
            yield
            wait(works)
        self.segments[2 * count + i]()

    def _exchange(self, i: int, received: Tensor, sent: Tensor, by: list[int], to: list[int]) -> list[Any]:
        if not self.buckets[i].is_exchanged:
            return []
        return [dist.all_to_all_single(received, sent, by, to, group=self.layout.shard_group, async_op=True)]

    def _to_replicas(self, messages: Messages) -> list[Any]:
        group = self.layout.replica_group
        if messages.gathered is not None:
            return [all_gather(messages.gathered, messages.mine, group=group, async_op=True)]
        return [
            dist.broadcast(part, group=group, group_src=r, async_op=True)
            for r, part in enumerate(messages.by_replica)
            if len(part)
        ]

    def _is_aligned(self, parts: Parts) -> bool:
        return bool(self.aligned) and has_aligned_rows(parts.shape)

    def _update_momentum(self, i: int) -> None:
        whole = self.wholes[i]
        for replica, some in enumerate(self.parts[i]):
            for parts in some:
                sent = parts.of(self.messages[i].to_owners) if replica == self.layout.replica else None
                stages.update_momentum(
                    *self._rows(parts.rows), parts.shape, whole.grad.dtype, whole.momentum.dtype,
                    aligned=self._is_aligned(parts), nesterov=self.nesterov, maximize=self.maximize, update=sent,
                )  # fmt: skip

    def _orthogonalize(self, i: int) -> None:
        """Wide matrices first. Before and after, each lies as its parameter does, so that rows are copied in one."""
        bucket, messages, ops = self.buckets[i], self.messages[i], operations(use_triton=True)
        (n, m), own = bucket.sides, bucket.own
        X = ops.allocate(len(own), n, m, messages.at_owner, bucket.dtype)
        wide, tall = ([k for k, matrix in enumerate(own) if matrix.is_tall == is_tall] for is_tall in (False, True))
        for kind, part in ((wide, X[: len(wide)]), (tall, X[len(wide) :])):
            if kind:
                G = messages.at_owner.new_empty(len(kind), own[kind[0]].rows, own[kind[0]].cols)
                torch._foreach_copy_(*self._pairs(bucket, dict(zip(kind, G, strict=True)), messages.at_owner))
                ops.normalize(G, part, self.eps)
        X = iterate(X, self.steps, bucket.iteration, ops)
        made = dict(zip(wide, X[: len(wide), :n, :m], strict=True))
        if tall:
            made |= zip(tall, stages.transposed(X[len(wide) :], n, m), strict=True)
        regions, sent = self._pairs(bucket, made, messages.from_owner)
        torch._foreach_copy_(sent, regions)

    def _pairs(self, bucket: Bucket, wholes: dict[int, Tensor], message: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """The regions of these of this rank's matrices, and where each lies in a message from or to the shards."""
        regions, pieces, start = [], [], 0
        for shard in bucket.sources(self.layout):
            for k, matrix in enumerate(bucket.own):
                region = matrix.regions[shard]
                stop = start + region.numel()
                if k in wholes and stop > start:
                    regions.append(wholes[k][region.of(wholes[k])])
                    pieces.append(message[start:stop].view(region.shape))
                start = stop
        return regions, pieces

    def _apply(self, i: int) -> None:
        whole = self.wholes[i]
        for some, made in zip(self.parts[i], self.messages[i].by_replica, strict=True):
            for parts in some:
                stages.apply(
                    *self._rows(parts.rows), parts.of(made), parts.shape, whole.param.dtype,
                    aligned=self._is_aligned(parts), cautious=self.cautious, has_remainder=whole.remainder is not None,
                )  # fmt: skip


def plan_sharded(
    tensors: Sequence[Tensors], shapes: Sequence[Sequence[int]], layout: Layout, cut: Cut, **options: Any
) -> ShardedPlan | None:
    """None where ``muon.exchange.Run`` has to: NorMuon's norms, columns for rows, shards in stripes, no element."""
    if options.pop("neuron_norm") is not None or cut.matrix == "transposed":
        return None
    buckets = Deal(tensors, shapes, layout, cut).buckets
    regions = (region for bucket in buckets for matrix in bucket.matrices for region in matrix.regions)
    if not all(isinstance(index, slice) for region in regions for index in (region.rows, region.cols)):
        return None
    return ShardedPlan(tensors, buckets, layout, cut.steps, **options) if buckets else None


def _runs(shapes: Sequence[tuple[int, int]], first_row: int) -> list[Parts]:
    """Successive parts of one shape together."""
    found: list[Parts] = []
    for shape, same in itertools.groupby(shapes):
        row = found[-1].rows.stop if found else first_row
        found.append(Parts(range(row, row + len(list(same))), shape, found[-1].stop if found else 0))
    return found


def _described(tensor: Tensor) -> Tensor:
    """Its dtype, without its elements."""
    return tensor.new_empty(0)
