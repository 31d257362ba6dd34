"""Which keys a program of Hopper's backward works on, in which order, and which queries see them.

Tiles of keys are dealt out in rounds. Packed sequences differ too much in length for that: the tiles of their keys are
listed, and each program takes the next one when it is done with its last.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .common import locate
from .hopper_common import barrier

# Numbers in memory for each tile of keys of packed sequences. In front are how many there are, and how many are taken.
TASK = tl.constexpr(8)


@gluon.jit
def place_of_tile(t, problem):
    """Which keys tile t is of: batch entry, head and number of the tile, packed that of its task.

    The heads of a section, whose queries and gradients fit into L2, go together.
    Under a causal mask the first keys are seen by the most queries. They go first in every second section, the last one
    included, and last in the others, so that no program gets the longer tiles of every section.
    """
    heads_k, _, _, _, _, _, _, tiles_k, section, heads = problem
    number = t // (section * tiles_k)
    first = number * section
    width = gl.minimum(section, heads - first)
    rest = t - first * tiles_k
    n = rest // width
    is_descending = (gl.cdiv(heads, section) - number) & 1
    n = gl.where(is_descending == 1, n, tiles_k - 1 - n)
    batch_head = first + rest % width
    return batch_head // heads_k, batch_head % heads_k, n


@gluon.jit
def locate_tile(t, problem, tasks_ptr, BLOCK_N: gl.constexpr):
    """Batch entry, head and first key of tile t; where its sequence's queries, keys and padded tiles of queries begin;
    and the problem that this sequence is."""
    batch, head, n = place_of_tile(t, problem)
    if tasks_ptr is None:
        return batch, head, n * BLOCK_N, 0, 0, 0, problem
    else:
        heads_k, group, _, _, shift_left, shift_right, tiles_q, tiles_k, section, heads = problem
        start_n, first_q, length_q, first_k, length_k, first_tile = task_of_tile(tasks_ptr, n)
        shift = length_k - length_q
        shifts = (shift + shift_left, shift + shift_right)
        sequence = (heads_k, group, length_q, length_k, shifts[0], shifts[1], tiles_q, tiles_k, section, heads)
        return batch, head, start_n, first_q, first_k, first_tile, sequence


@gluon.jit
def count_steps(start_n, problem, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BOUND_LEFT: gl.constexpr,
                BOUND_RIGHT: gl.constexpr):  # fmt: skip
    """The first tile of queries that sees these keys; how many follow, itself included; after how many begin those that
    need no mask, and how many they are. Key j is seen by queries from j - shift_right to j - shift_left."""
    _, _, seqlen_q, seqlen_k, shift_left, shift_right, _, _, _, _ = problem
    end = gl.cdiv(seqlen_q, BLOCK_M)
    begin = 0
    full_begin = 0
    full_end = end
    if BOUND_RIGHT:
        begin = gl.minimum(gl.maximum(start_n - shift_right, 0) // BLOCK_M, end - 1)
        full_begin = gl.cdiv(gl.maximum(start_n + BLOCK_N - 1 - shift_right, 0), BLOCK_M)
    if BOUND_LEFT:
        last = gl.maximum(gl.minimum(start_n + BLOCK_N, seqlen_k) - shift_left, 0)
        end = gl.minimum(end, gl.cdiv(last, BLOCK_M))
        full_end = gl.minimum(end, gl.maximum(start_n - shift_left + 1, 0) // BLOCK_M)
    end = gl.maximum(end, begin + 1)  # whoever sees nothing still writes its zeros
    # Keys past the end are masked, lest their weights overflow.
    full_end = gl.where(start_n + BLOCK_N > seqlen_k, begin, gl.maximum(full_end, begin))
    full_begin = gl.maximum(gl.minimum(full_begin, full_end), begin)
    return begin, end - begin, full_begin - begin, full_end - full_begin


@triton.jit
def list_tasks(tasks_ptr, cu_q_ptr, cu_k_ptr, batch, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Lists the tiles of keys of sequence `program_id`, if there is one, behind those of sequences with more queries:
    the longest tasks go first. Keys without queries are no task."""
    AT_ONCE: tl.constexpr = 128
    b = tl.program_id(0)
    if b < batch:
        first_q, length_q = locate(cu_q_ptr, b, 0)
        first_k, length_k = locate(cu_k_ptr, b, 0)
        ahead = 0
        total = 0
        for start in range(0, batch, AT_ONCE):
            offs_b = start + tl.arange(0, AT_ONCE)
            mask_b = offs_b < batch
            lengths_q = tl.load(cu_q_ptr + offs_b + 1, mask=mask_b, other=0)
            lengths_q -= tl.load(cu_q_ptr + offs_b, mask=mask_b, other=0)
            lengths_k = tl.load(cu_k_ptr + offs_b + 1, mask=mask_b, other=0)
            lengths_k -= tl.load(cu_k_ptr + offs_b, mask=mask_b, other=0)
            tiles = tl.where(lengths_q > 0, tl.cdiv(lengths_k, BLOCK_N), 0)
            is_ahead = (lengths_q > length_q) | ((lengths_q == length_q) & (offs_b < b))
            ahead += tl.sum(tl.where(is_ahead, tiles, 0), 0)
            total += tl.sum(tiles, 0)
        if b == 0:
            tl.store(tasks_ptr, total)
            tl.store(tasks_ptr + 1, 0)
        number = tl.where(length_q > 0, tl.cdiv(length_k, BLOCK_N), 0)
        for start in range(0, number, AT_ONCE):
            offs_n = start + tl.arange(0, AT_ONCE)
            mask_n = offs_n < number
            task = tasks_ptr + (1 + ahead + offs_n) * TASK
            tl.store(task, offs_n * BLOCK_N, mask=mask_n)
            tl.store(task + 1, first_q, mask=mask_n)
            tl.store(task + 2, length_q, mask=mask_n)
            tl.store(task + 3, first_k, mask=mask_n)
            tl.store(task + 4, length_k, mask=mask_n)
            tl.store(task + 5, first_q // BLOCK_M + b, mask=mask_n)  # sequences are padded to whole tiles of queries


@gluon.jit
def task_of_tile(tasks_ptr, n):
    """Of a tile of keys: its first key, counted from its sequence's; where that sequence's queries begin and how many
    they are; the same of its keys; where its padded tiles of queries begin."""
    task = tasks_ptr + (1 + n) * TASK
    return (
        gl.load(task), gl.load(task + 1), gl.load(task + 2), gl.load(task + 3), gl.load(task + 4), gl.load(task + 5)
    )  # fmt: skip


@gluon.jit
def take_tile(tasks_ptr):
    """The next tile that nobody works on, for a role of one warp. One lane asks, and tells the others."""
    ask: gl.constexpr = (
        "{ .reg .pred p; .reg .b32 lane, old; mov.u32 lane, %laneid; setp.eq.u32 p, lane, 0; mov.b32 old, 0; "
        "@p atom.global.add.u32 old, [$1], 1; shfl.sync.idx.b32 $0, old, 0, 31, 0xffffffff; }"
    )
    address = (tasks_ptr + 1).to(gl.int64, bitcast=True)
    return gl.inline_asm_elementwise(ask, "=r,l", [address], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def note_tile(record, count, t):
    """Writes the number of the program's tile `count` where its other role finds it, over that of two tiles ago."""
    record.index(count & 1).store(gl.full([1], t, gl.int32, gl.BlockedLayout([1], [32], [1], [0])))
    barrier()


@gluon.jit
def noted_tile(record, count):
    """What was noted, for a role of eight warps."""
    return gl.max(record.index(count & 1).load(gl.BlockedLayout([1], [32], [8], [0])), 0)
