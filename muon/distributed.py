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

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from muon.dtensors import is_dtensor, local
from muon.exchange import Run, overlapped
from muon.layout import Cut, Deal, Layout, layout_of_mesh
from muon.matrices import (
    MatrixMode,
    Split,
    Tensors,
    check_shapes,
)
from muon.newton_schulz import DEFAULT_WORKSPACE, Iteration, uses_triton
from muon.polynomials import Triple

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

    from muon.segments import Segments

MOST_DEALS = 16  # and plans, for each group of parameters


class Engine:
    """What an optimizer keeps from step to step to run over many ranks: layouts, process groups, deals and plans.

    ``group``: ranks that have the same plain parameters and gradients, or None if they are nobody else's business.
    """

    def __init__(self, group: "ProcessGroup | None" = None) -> None:
        self.group = group
        self.groups = 1
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
        groups: int,
        dtype_of: Callable[[Iteration, Tensor], torch.dtype],
        lr: float | Tensor,
        weight_decay: float,
        momentum: float,
        **options: Any,
    ) -> None:
        """Update parameters of one layout and their states, in place; every rank of the layout takes part.

        ``planned``: by ``muon.shared_plan`` if all ranks hold the whole of everything and its kernels can have it,
        which depends on nothing but what is the same on all ranks; by ``muon.sharded_plan`` if its kernels can have
        what this rank holds. ``groups``: those of the optimizer, of which this step is one's.
        """
        self.groups = groups
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
        self._keep(self.deals, key, found)
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
        self._keep(self.plans, key, plan)
        return plan

    def _keep(self, recent: dict[object, Any], key: object, value: Any) -> None:
        """The latest comes last. A step of many groups must not evict what the next one begins with."""
        recent[key] = value
        if len(recent) > MOST_DEALS * self.groups:
            del recent[next(iter(recent))]

    def _buffer(self, plan: "Segments") -> Tensor:
        """Bytes, at least as many as the plan needs. What others have recorded with a smaller one is void."""
        if len(self.buffers.get(plan.device, ())) < plan.buffer_bytes:
            for other in self.plans.values():
                if other is not None and other.device == plan.device:
                    other.forget()
            self.buffers.pop(plan.device, None)  # before there are two
            self.buffers[plan.device] = torch.empty(plan.buffer_bytes, dtype=torch.uint8, device=plan.device)
        return self.buffers[plan.device]

    def _pool(self, device: torch.device) -> Any:
        """Memory of a graph recorded before on this device: none runs while another does, so all may use the same."""
        plans = (plan for plan in self.plans.values() if plan is not None and plan.device == device)
        return next((plan.graphs[0].pool() for plan in plans if plan.graphs), None)


def _groups(mesh: "DeviceMesh") -> "list[ProcessGroup]":
    return [mesh.get_group(d) for d in range(mesh.ndim) if mesh.size(d) > 1]


def _is_capturing(param: Tensor) -> bool:
    return param.is_cuda and torch.cuda.is_current_stream_capturing()


def _can_plan(tensors: Sequence[Tensors]) -> bool:
    """Whether kernels can have them: all on one GPU, in dtypes that they take."""
    if not all(uses_triton("auto", whole.param) for whole in tensors):
        return False
    from muon.plan import suits_once_contiguous

    device = tensors[0].param.device
    return all(whole.param.device == device and suits_once_contiguous(whole) for whole in tensors)


def _make_plan(
    tensors: Sequence[Tensors], shapes: Sequence[Sequence[int]], layout: Layout, cut: Cut, **options: Any
) -> "Segments | None":
    if len(layout.shards) == 1:
        from muon.shared_plan import plan_shared

        return plan_shared(tensors, shapes, layout, cut, **options)
    from muon.sharded_plan import plan_sharded

    return plan_sharded(tensors, shapes, layout, cut, **options)


def _are_whole(param: Tensor, layout: Layout, matrix: MatrixMode) -> bool:
    """Whether no mesh dimension cuts a matrix: experts, sharded by experts."""
    is_batch = param.ndim <= 3 if matrix is None else matrix != "flatten"
    return all(is_batch and dim % param.ndim < param.ndim - 2 for _, dim, _ in layout.cuts)
