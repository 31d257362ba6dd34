"""The Muon step over many ranks: who orthogonalises what, how shards of a matrix meet there and how they go back.

A ``Layout`` says how the parameters of one mesh lie on its ranks: ranks that hold different shards form a shard group,
ranks that hold the same shard a replica group. Each matrix has one owner in the whole mesh, which depends on shapes and
the size of the mesh alone. For each bucket of matrices of equal sides

1. every rank updates the momentum of its shards; shards of the updates go to the owners, by all-to-all in each shard
   group, unless a rank holds the matrices whole;
2. the owners orthogonalise them, in one batch on each rank;
3. shards of the result go back by all-to-all, and to the other replicas by all-gather; each rank applies its own.

Successive buckets overlap: while the matrices of one are orthogonalised, those of others are on their way. Which
collectives run in which order follows from the parameters that have a gradient on every rank, which the ranks agree on
first (``Engine.agreed``).

Sources of the idea: Moonlight's distributed Muon (https://arxiv.org/abs/2502.16982), Essential AI's layer sharding
(https://essential.ai/blog/infra), microsoft/dion (https://github.com/microsoft/dion).
"""

import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from muon.dtensors import is_dtensor, local
from muon.layout import Bucket, Cut, Deal, Layout, Matrix, layout_of_mesh, wire_dtype
from muon.matrices import (
    SMALLEST_EPS,
    MatrixMode,
    Split,
    Tensors,
    add_update,
    check_shapes,
    even_out,
    follow_second_moment,
    neuron_ratio,
)
from muon.newton_schulz import DEFAULT_WORKSPACE, Iteration, iterate, operations, uses_triton
from muon.polynomials import Triple

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

    from muon.segments import Segments

# torch 2.13 has renamed it.
all_gather: Any = getattr(dist, "all_gather_single", None) or getattr(dist, "all_gather_into_tensor", None)

MOST_DEALS = 16


class Engine:
    """What an optimizer keeps from step to step to run over many ranks: layouts, process groups, deals and plans.

    ``group``: ranks that have the same plain parameters and gradients, or None if they are nobody else's business.
    """

    def __init__(self, group: "ProcessGroup | None" = None) -> None:
        self.group = group
        self.layouts: dict[object, Layout] = {}
        self.deals: dict[object, Deal] = {}
        self.plans: dict[object, Segments | None] = {}
        self.buffers: dict[torch.device, Tensor] = {}  # in which plans send and receive, one after the other

    def layout(self, param: Tensor) -> Layout | None:
        """Where the ranks hold the parameter; None: this one has it for itself."""
        key: Any = self.group
        if is_dtensor(param):
            key = (param.device_mesh, param.placements)  # type: ignore[attr-defined]
        elif self.group is None:
            return None
        if key not in self.layouts:
            if isinstance(key, tuple):
                self.layouts[key] = layout_of_mesh(*key)
            else:
                layout = Layout([dist.get_world_size(key)], [dist.get_rank(key)], [])
                layout.replica_group = key
                self.layouts[key] = layout
        return self.layouts[key]

    def replicates(self, param: Tensor) -> bool:
        """Whether all ranks of ``group`` have the parameter, and so have to do the same with it."""
        return self.group is not None and not is_dtensor(param)

    def agreed(self, params: Sequence[Tensor]) -> set[int]:
        """The ids of those parameters that have a gradient on every rank that has the parameter.

        One all-reduce of a few bytes for each mesh, or for each dimension of it, and none for parameters that are this
        rank's alone. With a group that has a backend for the CPU no GPU is waited for.
        """
        asked: dict[Any, list[Tensor]] = {}
        for p in params:
            asked.setdefault(p.device_mesh if is_dtensor(p) else self.group, []).append(p)  # type: ignore[attr-defined]
        found = {id(p) for p in asked.pop(None, []) if p.grad is not None}
        for key, some in asked.items():
            present = torch.tensor([p.grad is not None for p in some], dtype=torch.uint8, device="cpu")
            for group in (key,) if key is self.group else _groups(key):
                device = "cpu" if "cpu" in dist.get_backend_config(group) else local(some[0]).device
                present = present.to(device)
                dist.all_reduce(present, dist.ReduceOp.MIN, group=group)
            found.update(id(p) for p, there in zip(some, present.tolist(), strict=True) if there)
        return found

    def divide(
        self, tensors: Sequence[Tensors], matrix: MatrixMode
    ) -> tuple[list[Tensors], dict[Layout, list[Tensors]]]:
        """What this rank can do alone, as local tensors; and by its layout what it can't."""
        alone: list[Tensors] = []
        shared: dict[Layout, list[Tensors]] = {}
        for whole in tensors:
            layout = self.layout(whole.param)
            if layout is None:
                alone.append(whole)
            elif layout.replicas == 1 and _are_whole(whole.param, layout, matrix):
                if local(whole.param).numel():
                    alone.append(whole.map(local))
            else:
                shared.setdefault(layout, []).append(whole)
        return alone, shared

    def step(
        self,
        tensors: Sequence[Tensors],
        layout: Layout,
        steps: Sequence[Triple],
        lr_factor: Callable[[int, int], float],
        *,
        matrix: MatrixMode,
        split: Split,
        workspace: int | None,
        planned: bool,
        dtype_of: Callable[[Iteration, Tensor], torch.dtype],
        lr: float | Tensor,
        weight_decay: float,
        momentum: float,
        **options: Any,
    ) -> None:
        """Update parameters of one layout and their states, in place; every rank of the layout takes part.

        ``planned``: by ``muon.shared_plan`` if all ranks hold the whole of everything and its kernels can have it,
        which depends on nothing but what is the same on all ranks; by ``muon.sharded_plan`` if its kernels can have
        what this rank holds.
        """
        shapes = tuple(whole.param.shape for whole in tensors)
        cut = Cut(steps, matrix, split, workspace or DEFAULT_WORKSPACE, dtype_of)
        scalars: dict[str, Any] = {"lr": lr, "weight_decay": weight_decay, "momentum": momentum}
        parts = [whole.map(local) if is_dtensor(whole.param) else whole for whole in tensors]
        planned = planned and not _is_capturing(parts[0].param)
        plan = self._plan(parts, shapes, layout, cut, **options) if planned else None
        if plan is not None:
            plan.step(parts, self._buffer(plan), lr_factor, **scalars, pool=self._pool(plan.device))
            return
        for whole in tensors:
            check_shapes(whole, matrix)
        buckets = self._deal(parts, shapes, layout, cut).buckets
        overlapped(Run(bucket, layout, parts, lr_factor, **scalars, **options).stages(steps) for bucket in buckets)

    def _deal(self, tensors: Sequence[Tensors], shapes: Sequence[Sequence[int]], layout: Layout, cut: Cut) -> Deal:
        dtypes = tuple(tuple(None if t is None else t.dtype for t in whole) for whole in tensors)
        key = (id(layout), shapes, dtypes, cut.key())
        found = self.deals.pop(key, None) or Deal(tensors, shapes, layout, cut)
        _keep(self.deals, key, found)
        return found

    def _plan(
        self,
        tensors: Sequence[Tensors],
        shapes: Sequence[Sequence[int]],
        layout: Layout,
        cut: Cut,
        **options: Any,
    ) -> "Segments | None":
        described = tuple(
            tuple(None if t is None else (type(t), t.shape, t.dtype, t.device) for t in whole) for whole in tensors
        )
        key = (id(layout), shapes, described, cut.key(), tuple(options.values()))
        if key not in self.plans:
            self.plans[key] = None  # that there can be none is not found out again at every step
            if _can_plan(tensors):
                for whole in tensors:
                    check_shapes(whole, cut.matrix)
                self.plans[key] = _make_plan(tensors, shapes, layout, cut, **options)
        plan = self.plans.pop(key)
        _keep(self.plans, key, plan)
        return plan

    def _buffer(self, plan: "Segments") -> Tensor:
        """Bytes, at least as many as the plan needs. What others have recorded with a smaller one is void."""
        buffer = self.buffers.get(plan.device)
        if buffer is None or len(buffer) < plan.buffer_bytes:
            for other in self.plans.values():
                if other is not None and other.device == plan.device:
                    other.forget()
            buffer = torch.empty(plan.buffer_bytes, dtype=torch.uint8, device=plan.device)
            self.buffers[plan.device] = buffer
        return buffer

    def _pool(self, device: torch.device) -> Any:
        """Memory of a graph recorded before on this device: none runs while another does, so all may use the same."""
        plans = (plan for plan in self.plans.values() if plan is not None and plan.device == device)
        return next((plan.graphs[0].pool() for plan in plans if plan.graphs), None)


def _groups(mesh: "DeviceMesh") -> "list[ProcessGroup]":
    return [mesh.get_group(d) for d in range(mesh.ndim) if mesh.size(d) > 1]


def _keep(recent: dict[object, Any], key: object, value: Any) -> None:
    """The latest comes last."""
    recent[key] = value
    if len(recent) > MOST_DEALS:
        del recent[next(iter(recent))]


def _is_capturing(param: Tensor) -> bool:
    return param.is_cuda and torch.cuda.is_current_stream_capturing()


def _can_plan(tensors: Sequence[Tensors]) -> bool:
    """Whether kernels can have them: all on one GPU, in dtypes that they take."""
    if not all(uses_triton("auto", whole.param) for whole in tensors):
        return False
    from muon.plan import suits_once_contiguous

    device = tensors[0].param.device
    return all(whole.param.device == device and suits_once_contiguous(whole) for whole in tensors)


def overlapped(tasks: Iterable[Iterator[None]]) -> None:
    """Run all of them to their ends, a new one beginning whenever those under way have got a stage further."""
    under_way: deque[Iterator[None]] = deque()
    for task in tasks:
        under_way.append(task)
        _advance(under_way)
    while under_way:
        _advance(under_way)


def _make_plan(
    tensors: Sequence[Tensors], shapes: Sequence[Sequence[int]], layout: Layout, cut: Cut, **options: Any
) -> "Segments | None":
    if len(layout.shards) == 1:
        from muon.shared_plan import plan_shared

        return plan_shared(tensors, shapes, layout, cut, **options)
    from muon.sharded_plan import plan_sharded

    return plan_sharded(tensors, shapes, layout, cut, **options)


def _advance(tasks: deque[Iterator[None]]) -> None:
    """Each by a stage, the oldest last: what the newest sends is on its way while an older one computes."""
    done = object()
    if [next(task, done) for task in reversed(tasks)][-1] is done:
        tasks.popleft()


def _are_whole(param: Tensor, layout: Layout, matrix: MatrixMode) -> bool:
    """Whether no mesh dimension cuts a matrix: experts, sharded by experts."""
    is_batch = param.ndim <= 3 if matrix is None else matrix != "flatten"
    return all(is_batch and dim % param.ndim < param.ndim - 2 for _, dim, _ in layout.cuts)


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
        _wait(sent, moments_sent)
        X = self._orthogonalized(updates, steps)
        del updates
        mine, sent = self._from_owners(X, None)
        rows, rows_sent = self._from_owners(self._evened(X, moments), 2) if moments is not None else (None, None)
        del X, moments
        yield
        _wait(sent, rows_sent)
        parts, sent = self._to_replicas(mine, None)
        row_parts, rows_sent = self._to_replicas(rows, 2) if rows is not None else ([], [])
        del mine, rows
        if layout.replica_group is not None:
            yield
        _wait(*sent, *rows_sent)
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
        if largest * len(sizes) <= 2 * sum(sizes):
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


def _wait(*works: Any) -> None:
    for work in works:
        if work is not None:
            work.wait()
