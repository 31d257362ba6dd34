"""Who owns what: by shapes and the number of ranks alone, and evenly."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks import distributed_model
from muon.layout import Cut, Deal, Layout, deal, matrices_of
from muon.matrices import Tensors
from muon.newton_schulz import DEFAULT_WORKSPACE
from muon.polynomials import schedule

GPT2 = [((2304, 768), 3), ((768, 768), None), ((3072, 768), None), ((768, 3072), None)] * 12  # shape, split


def mesh(replicas: int, shards: int, rank: int = 0, dim: int = 0) -> Layout:
    return Layout([replicas, shards], divmod(rank, shards), [(1, dim, 1)] if shards > 1 else [])


def matrices(layout: Layout, shapes, matrix=None):
    found = []
    for index, (shape, split) in enumerate(shapes):
        held = [len(layout.held(shape, d, layout.shard)) for d in range(len(shape))]
        found += matrices_of(index, shape, layout, matrix, split, held)
    return found


def loads(replicas: int, shards: int, shapes) -> list[int]:
    """Of all ranks, the groups of ``param_groups``, which are dealt one after the other, summed."""
    layout, total = mesh(replicas, shards), [0] * (replicas * shards)
    for split in {split for _, split in shapes}:
        group = matrices(layout, [entry for entry in shapes if entry[1] == split])
        flat = [load for row in deal(group, replicas, shards) for load in row]
        total = [a + b for a, b in zip(total, flat, strict=True)]
    return total


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_gpt2_is_within_15_percent_of_even(ranks):
    for replicas in {1, ranks, 2 if ranks % 2 == 0 else 1}:
        found = loads(replicas, ranks // replicas, GPT2)
        assert max(found) <= 1.15 * sum(found) / ranks, found


def test_48_equal_matrices_on_3_ranks_are_even():
    assert len(set(loads(3, 1, [((64, 32), None)] * 48))) == 1


def test_experts_count_as_single_matrices():
    assert len(set(loads(3, 1, [((12, 8, 8), None)]))) == 1


sides = st.integers(1, 40)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.lists(st.tuples(st.tuples(sides, sides), st.none()), min_size=1, max_size=30), st.integers(1, 7))
def test_nobody_has_more_than_its_share_and_one_matrix(shapes, ranks):
    found = loads(ranks, 1, shapes)
    assert max(found) <= sum(found) / ranks + max(min(a, b) ** 2 * max(a, b) for (a, b), _ in shapes)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.data())
def test_every_rank_chooses_the_same_owners_and_regions_cover_each_matrix_once(data):
    replicas, shards = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 5))
    dims = data.draw(st.integers(2, 4))
    shape = tuple(data.draw(st.lists(st.integers(1, 9), min_size=dims, max_size=dims)))
    mode = data.draw(st.sampled_from([None, "batch", "flatten", "transposed"]))
    cut = data.draw(st.integers(0, dims - 1))
    owners = []
    for rank in range(replicas * shards):
        found = matrices(mesh(replicas, shards, rank, cut), [(shape, None)], mode)
        deal(found, replicas, shards)
        owners.append([matrix.owner for matrix in found])
    assert all(other == owners[0] for other in owners)
    for matrix in found:
        count = torch.zeros(matrix.rows, matrix.cols)
        for region in matrix.regions:
            assert count[region.of(count)].shape == region.shape
            count[region.of(count)] += 1
        assert (count == 1).all()


def test_whole_matrices_stay_where_they_are():
    found = matrices(mesh(2, 2), [((5, 4, 6), None)])
    deal(found, 2, 2)
    assert [matrix.owner[1] for matrix in found] == [0, 0, 0, 1, 1]
    assert {matrix.owner[0] for matrix in found} == {0, 1}  # replicas share the work


@pytest.mark.parametrize(("replicas", "shards"), [(8, 1), (1, 8), (2, 4), (1, 64)])
def test_large_matrices_keep_every_rank_busy(replicas, shards):
    """Of matrices that fill the workspace each rank still has one in each bucket."""
    layout, ranks = mesh(replicas, shards), replicas * shards
    p = torch.empty(4096 // shards, 14336, device="meta")
    tensors, shapes = [Tensors(p, p, p)] * (2 * ranks), [(4096, 14336)] * (2 * ranks)
    cut = Cut(schedule("keller_jordan", 5), None, None, DEFAULT_WORKSPACE, lambda *_: torch.bfloat16)
    found = Deal(tensors, shapes, layout, cut)
    assert [len(bucket.matrices) for bucket in found.buckets] == [ranks, ranks]
    for bucket in found.buckets:
        assert len({matrix.owner for matrix in bucket.matrices}) == ranks


def test_strided_shards():
    """Sharded by the second dimension of the mesh first, as ``fully_shard`` does after tensor parallelism."""
    layout = Layout([2, 2], [0, 1], [(0, 0, 2), (1, 0, 1)])
    assert [list(layout.held((8, 3), 0, shard)) for shard in range(4)] == [[0, 1], [4, 5], [2, 3], [6, 7]]


def test_the_simulation():
    """One rank alone sends nothing; work goes down with ranks; DDP sends half of a reduction, FSDP a share of one."""
    table = distributed_model.rows(distributed_model.DOCS / "newton_schulz.csv")
    for row in table:
        assert row["sent_mb"] <= row["reduction_mb"]
        assert row["step_overlapped_ms"] <= row["step_apart_ms"]
        if row["ranks"] == 1:
            assert row["sent_mb"] == row["communicate_ms"] == 0
        elif row["layout"] == "DDP":
            assert row["sent_mb"] == pytest.approx(row["reduction_mb"] / 2)
    busy = {(row["model"], row["ranks"], row["layout"]): row["orthogonalize_ms"] for row in table}
    for model in distributed_model.MODELS:
        assert busy[model, 8, "DDP"] == pytest.approx(busy[model, 1, "DDP"] / 8)
