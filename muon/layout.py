"""Where ranks hold what of each matrix, who orthogonalises it, and which matrices go together: all by shapes alone."""

import itertools
import math
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from muon.matrices import MatrixMode, Split, Tensors, row_blocks
from muon.newton_schulz import Iteration, memory, pick_iteration, uses_triton
from muon.polynomials import Triple

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh


class Layout:
    """Where the ranks of a mesh hold what of a parameter.

    ``cuts`` are mesh dimensions as (dimension of the mesh, of the tensor, split factor), in the order of the mesh. A
    shard group's ranks and a replica group's are numbered in the order of their coordinates, which is that of ranks.
    """

    def __init__(self, sizes: Sequence[int], coordinate: Sequence[int], cuts: Sequence[tuple[int, int, int]]) -> None:
        self.sizes, self.cuts = tuple(sizes), tuple(cuts)
        cut = {cut[0] for cut in cuts}
        self.shards = list(itertools.product(*(range(n) if d in cut else (0,) for d, n in enumerate(sizes))))
        replicas = list(itertools.product(*((0,) if d in cut else range(n) for d, n in enumerate(sizes))))
        self.shard = self.shards.index(tuple(c if d in cut else 0 for d, c in enumerate(coordinate)))
        self.replica = replicas.index(tuple(0 if d in cut else c for d, c in enumerate(coordinate)))
        self.replicas = len(replicas)
        self.shard_group: ProcessGroup | None = None
        self.replica_group: ProcessGroup | None = None

    @property
    def stages(self) -> int:
        """Of a bucket's step, and so buckets that are under way at the same time: replicas take one more."""
        return 4 if self.replicas > 1 else 3

    def held(self, shape: Sequence[int], dim: int, shard: int) -> Sequence[int]:
        """Indices along a dimension that a shard has, in ascending order."""
        indices: Sequence[int] = range(shape[dim])
        for mesh_dim, cut_dim, factor in self.cuts:
            if cut_dim % len(shape) == dim:
                part = (self.shards[shard][mesh_dim], self.sizes[mesh_dim])
                pieces = [_chunk(_chunk(indices, i, factor), *part) for i in range(factor)]
                indices = pieces[0] if factor == 1 else list(itertools.chain(*pieces))
        return indices


def _chunk(indices: Sequence[int], part: int, parts: int) -> Sequence[int]:
    """As ``torch.chunk`` cuts, which leaves the last parts shorter or empty."""
    length = -(-len(indices) // parts)
    return indices[part * length : (part + 1) * length]


def layout_of_mesh(mesh: "DeviceMesh", placements: Sequence[Any]) -> Layout:
    sizes = tuple(mesh.mesh.shape)
    ranks = mesh.mesh.flatten().tolist()
    if any(placement.is_partial() for placement in placements):
        raise NotImplementedError(f"Muon can't update a parameter whose placement is partial: {tuple(placements)}")
    if ranks != sorted(ranks):
        raise NotImplementedError(f"Muon needs a mesh whose ranks ascend but has: {mesh.mesh.tolist()}")
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    cuts = [
        (d, placement.dim, getattr(placement, "split_factor", 1))
        for d, placement in enumerate(placements)
        if hasattr(placement, "dim") and sizes[d] > 1
    ]
    layout = Layout(sizes, coordinate, cuts)
    cut = [d for d, _, _ in cuts]
    layout.shard_group = _group(mesh, cut)
    layout.replica_group = _group(mesh, [d for d, size in enumerate(sizes) if d not in cut and size > 1])
    return layout


def _group(mesh: "DeviceMesh", dims: Sequence[int]) -> "ProcessGroup | None":
    """Of the ranks that differ from this one in these dimensions of the mesh."""
    if not dims:
        return None
    if len(dims) == 1:
        return mesh.get_group(dims[0])
    size = math.prod(mesh.mesh.shape[d] for d in dims)
    groups = mesh.mesh.movedim(list(dims), list(range(-len(dims), 0))).reshape(-1, size).tolist()
    if sum(map(len, groups)) == dist.get_world_size():
        return dist.group.WORLD if len(groups) == 1 else dist.new_subgroups_by_enumeration(groups)[0]
    # A mesh of some ranks only, such as a pipeline stage's: the others can't take part, and don't have to if all ranks
    # of the group have been in as many groups so far (torch names it by their number).
    mine = next(group for group in groups if dist.get_rank() in group)
    return dist.new_group(mine, use_local_synchronization=True)  # type: ignore[no-any-return]


class Region(NamedTuple):
    """Rows and columns of a matrix that one shard holds, as an index, and how many."""

    rows: slice | Tensor
    cols: slice | Tensor
    shape: tuple[int, int]

    def of(self, matrix: Tensor, width: int | None = None) -> Any:
        """The index of the region in a (rows, cols) matrix, or of its rows in a table."""
        rows, cols = (x.to(matrix.device) if isinstance(x, Tensor) else x for x in (self.rows, self.cols))
        if width is not None:
            return rows
        return (rows[:, None], cols) if isinstance(rows, Tensor) and isinstance(cols, Tensor) else (rows, cols)

    def numel(self, width: int | None = None) -> int:
        """Elements of the matrix, or of a table of ``width`` numbers a row."""
        return self.shape[0] * (self.shape[1] if width is None else width)


def _region(rows: Sequence[int], cols: Sequence[int]) -> Region:
    return Region(_index(rows), _index(cols), (len(rows), len(cols)))


def _index(indices: Sequence[int]) -> slice | Tensor:
    if not indices:
        return slice(0, 0)
    if indices[-1] - indices[0] == len(indices) - 1:
        return slice(indices[0], indices[-1] + 1)
    return torch.tensor(list(indices), device="cpu")


@dataclass
class Matrix:
    """One matrix of the ``index``-th parameter: who holds what of it, and where this rank's part lies in its shard."""

    index: int
    rows: int
    cols: int
    regions: list[Region]  # of each shard
    place: tuple[Any, ...]  # this rank's part of the local tensor
    is_transposed: bool
    owner: tuple[int, int] = (0, 0)  # its replica and shard

    @property
    def is_tall(self) -> bool:
        return self.rows > self.cols

    @property
    def sides(self) -> tuple[int, int]:
        return min(self.rows, self.cols), max(self.rows, self.cols)

    def holder(self) -> int | None:
        """The shard that holds it whole, if nobody else has even one of its rows."""
        has_rows = [s for s, region in enumerate(self.regions) if region.shape[0]]
        is_whole = len(has_rows) == 1 and self.regions[has_rows[0]].shape == (self.rows, self.cols)
        return has_rows[0] if is_whole else None

    def part(self, tensor: Tensor) -> Tensor:
        """This rank's part of a local tensor, rows first."""
        return (tensor.mT if self.is_transposed else tensor)[self.place]

    def oriented(self, wide: Tensor) -> Tensor:
        """(rows, cols) of the bucket's (n, m)."""
        return wide.mT if self.is_tall else wide


def matrices_of(
    index: int, shape: Sequence[int], layout: Layout, matrix: MatrixMode, split: Split, local_shape: Sequence[int]
) -> list[Matrix]:
    """The matrices of a parameter, cut as ``muon.matrices.row_blocks`` cuts the whole of it."""
    dims = list(range(len(shape)))
    held = [[layout.held(shape, d, s) for d in dims] for s in range(len(layout.shards))]
    if [len(indices) for indices in held[layout.shard]] != list(local_shape):
        raise NotImplementedError(f"Muon can't tell which part of a {tuple(shape)} parameter the ranks hold")
    if matrix == "transposed":
        dims[-2:] = dims[:-3:-1]
    is_batch = len(shape) <= 3 if matrix is None else matrix != "flatten"
    lead, row_dim, col_dims = (dims[:-2], dims[-2], dims[-1:]) if is_batch else ([], dims[0], dims[1:])
    cols = [_flattened([shape[d] for d in col_dims], [own[d] for d in col_dims]) for own in held]
    whole = torch.empty(tuple(shape), device="meta")
    sizes = [rows for _, (_, rows, _) in row_blocks(whole, matrix, split)]
    sizes *= shape[row_dim] // sum(sizes) if sizes and sum(sizes) else 1  # equal blocks come as one view
    found = []
    for at in itertools.product(*(range(shape[d]) for d in lead)):
        has = [all(_contains(own[d], i) for d, i in zip(lead, at, strict=True)) for own in held]
        start = 0
        for size in sizes:
            spans = [_span(own[row_dim], start, start + size) if has[s] else (0, 0) for s, own in enumerate(held)]
            regions = [
                _region([i - start for i in own[row_dim][slice(*span)]], cols[s])
                for s, (own, span) in enumerate(zip(held, spans, strict=True))
            ]
            own, span = held[layout.shard], spans[layout.shard]
            inside = has[layout.shard]
            place = tuple(bisect_left(own[d], i) for d, i in zip(lead, at, strict=True)) if inside else ()
            width = math.prod(shape[d] for d in col_dims)
            found.append(Matrix(index, size, width, regions, (*place, slice(*span)), matrix == "transposed"))
            start += size
    return found


def _flattened(shape: Sequence[int], held: Sequence[Sequence[int]]) -> Sequence[int]:
    """Indices of the flattened dimensions."""
    indices: Sequence[int] = held[0]
    for size, more in zip(shape[1:], held[1:], strict=True):
        indices = [i * size + j for i in indices for j in more]
    return indices


def _contains(indices: Sequence[int], index: int) -> bool:
    at = bisect_left(indices, index)
    return at < len(indices) and indices[at] == index


def _span(indices: Sequence[int], start: int, stop: int) -> tuple[int, int]:
    return bisect_left(indices, start), bisect_left(indices, stop)


def deal(matrices: Sequence[Matrix], replicas: int, shards: int) -> list[list[int]]:
    """Choose the owners: the costliest matrix first, to whoever has least to do; whole matrices stay with a holder.

    Returns each rank's cost, n² m summed, by replica and shard.
    """
    loads = [[0] * shards for _ in range(replicas)]
    for found in sorted(matrices, key=_cost, reverse=True):
        holder = found.holder()
        candidates = range(shards) if holder is None else (holder,)
        _, replica, shard = min((loads[r][s], r, s) for r in range(replicas) for s in candidates)
        found.owner = replica, shard
        loads[replica][shard] += _cost(found)
    return loads


def _cost(matrix: Matrix) -> int:
    n, m = matrix.sides
    return n * n * m


@dataclass
class Bucket:
    """Matrices of equal sides and dtypes that are dealt with together."""

    sides: tuple[int, int]
    iteration: Iteration
    dtype: torch.dtype  # of the iteration
    matrices: list[Matrix] = field(default_factory=list)
    fresh: list[int] = field(default_factory=list)  # parameters that no bucket before has

    def finish(self, layout: Layout, seen: set[int]) -> None:
        """What follows from the matrices, once all are there."""
        self.matrices.sort(key=lambda matrix: matrix.owner)  # stable
        self.fresh = sorted({matrix.index for matrix in self.matrices} - seen)
        seen.update(self.fresh)
        self.of_replica = [[m for m in self.matrices if m.owner[0] == r] for r in range(layout.replicas)]
        self.mine = self.of_replica[layout.replica]  # whose owner is in this rank's shard group
        self.own = [matrix for matrix in self.mine if matrix.owner[1] == layout.shard]
        self.is_exchanged = any(matrix.holder() is None for matrix in self.matrices)

    def counts(self, layout: Layout, width: int | None) -> tuple[list[int], list[int]]:
        """Elements that this rank holds for each owner, and that each shard holds for this one.

        ``width``: of tables of that many numbers a row.
        """
        to = [0] * len(layout.shards)
        for matrix in self.mine:
            to[matrix.owner[1]] += matrix.regions[layout.shard].numel(width)
        return to, [sum(matrix.regions[s].numel(width) for matrix in self.own) for s in range(len(to))]

    def sources(self, layout: Layout) -> Sequence[int]:
        """The shards that send to this rank, or that it sends to."""
        return range(len(layout.shards)) if self.is_exchanged else (layout.shard,)


class Cut(NamedTuple):
    """What decides, beside shapes, into which matrices and buckets parameters are cut.

    ``dtype_of``: that of the iteration of such a parameter.
    """

    steps: Sequence[Triple]
    matrix: MatrixMode
    split: Split
    workspace: int
    dtype_of: Callable[[Iteration, Tensor], torch.dtype]

    def key(self) -> tuple[object, ...]:
        return repr(self.steps), self.matrix, repr(self.split), self.workspace


def matrices_of_all(
    tensors: Sequence[Tensors], shapes: Sequence[Sequence[int]], layout: Layout, cut: Cut
) -> list[Matrix]:
    return [
        found
        for index, (whole, shape) in enumerate(zip(tensors, shapes, strict=True))
        if 0 not in shape
        for found in matrices_of(index, shape, layout, cut.matrix, cut.split, whole.param.shape)
    ]


def alike(matrices: Sequence[Matrix], tensors: Sequence[Tensors]) -> list[list[Matrix]]:
    """Those of equal sides, device and dtypes together."""
    found: dict[object, list[Matrix]] = {}
    for matrix in matrices:
        dtypes = tuple(None if tensor is None else tensor.dtype for tensor in tensors[matrix.index])
        found.setdefault((matrix.sides, tensors[matrix.index].param.device, dtypes), []).append(matrix)
    return list(found.values())


class Deal:
    """The buckets of some parameters of one layout, with their owners."""

    def __init__(
        self,
        tensors: Sequence[Tensors],
        shapes: Sequence[Sequence[int]],
        layout: Layout,
        cut: Cut,
    ) -> None:
        matrices = matrices_of_all(tensors, shapes, layout, cut)
        self.loads = deal(matrices, layout.replicas, len(layout.shards))
        self.buckets: list[Bucket] = []
        for some in alike(matrices, tensors):
            whole = tensors[some[0].index]
            iteration = pick_iteration("auto", cut.steps, *some[0].sides, None, uses_triton("auto", whole.param))
            dtype = cut.dtype_of(iteration, whole.param)
            self.buckets += _buckets(some, whole, layout, iteration, dtype, cut.workspace)
        seen: set[int] = set()
        for bucket in self.buckets:
            bucket.finish(layout, seen)


def _buckets(
    matrices: Sequence[Matrix],
    tensors: Tensors,
    layout: Layout,
    iteration: Iteration,
    dtype: torch.dtype,
    workspace: int,
) -> Iterator[Bucket]:
    """Buckets in which each rank has about as much to do; those under way stay within the workspace together.

    One of them is iterated at a time. Of all of them lie there the matrices that a rank owns, as they came or will be
    sent, its parts of each matrix, and with replicas what those have made of them. A matrix a rank goes in any case, or
    ranks would wait for each other, unless the parts alone take half of the workspace.
    """
    n, m = matrices[0].sides
    if uses_triton("auto", tensors.param):
        itemsize, copies = max(wire_dtype(tensors).itemsize, dtype.itemsize), 1
    else:  # in plain torch the norm takes a copy of the matrices, and one in float32
        itemsize, copies = max(4, tensors.param.dtype.itemsize, tensors.momentum.dtype.itemsize), 3
    largest_part = max(region.numel() for matrix in matrices for region in matrix.regions)
    is_sharded, is_replicated = len(layout.shards) > 1, layout.replicas > 1
    part_bytes = largest_part * (is_sharded * itemsize / layout.replicas + is_replicated * dtype.itemsize)
    message_bytes = is_sharded * n * m * itemsize
    own_bytes = memory(iteration, n, m, dtype) + copies * n * m * itemsize + layout.stages * message_bytes
    turns: dict[tuple[int, int], int] = {}
    ordered = []
    for matrix in matrices:
        turn = turns[matrix.owner] = turns.get(matrix.owner, -1) + 1
        ordered.append((turn, matrix.owner, matrix))
    bucket, first_turn = Bucket((n, m), iteration, dtype), 0
    for turn, _, matrix in sorted(ordered, key=lambda entry: entry[:2]):
        parts = (len(bucket.matrices) + 1) * part_bytes
        needed = (turn - first_turn + 1) * own_bytes + layout.stages * parts
        is_full = parts > workspace / 2 or (turn > first_turn and needed > workspace)
        if bucket.matrices and is_full:
            yield bucket
            bucket, first_turn = Bucket((n, m), iteration, dtype), turn
        bucket.matrices.append(matrix)
    yield bucket


def wire_dtype(tensors: Tensors) -> torch.dtype:
    """That in which an update goes to its owner: on a GPU one of float32 travels as bfloat16."""
    dtype = tensors.momentum.dtype
    return torch.bfloat16 if dtype == torch.float32 and tensors.momentum.device.type != "cpu" else dtype
