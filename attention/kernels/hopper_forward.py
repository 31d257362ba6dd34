"""FlashAttention's forward for Hopper in Gluon: warp-specialised and persistent (arXiv:2407.08608).

A program has several roles. One warp copies tiles of queries, keys and values into shared memory. GROUPS groups of four
warps own 64 queries each. A group has the scores of the next tile of keys multiplied and, right behind, the product of
the last tile's probabilities with its values; its softmax hides behind the others' products (the assembler lets it wait
for its own values first, docs/lab-notes.md). Where the softmax takes as long as the products (narrow heads), three
groups take turns. Keys are walked from the last one seen to the first: the tiles cut by a causal mask come first.

The portable twin is ``forward.py``; the torch twin is ``attention.reference.tiled_forward``.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ..reference import Options
from .common import LN_2, LOG2_E, loadable, on_device_of, pointer
from .hopper_careful import ROWS, finish_kernel, store_rows
from .hopper_common import (
    L2_SHARE,
    OVERLAPPING,
    arrive,
    barrier,
    barriers,
    describe,
    load,
    padded_width,
    processors,
    store,
    write,
)
from .hopper_schedule import (
    SIZES,
    causal_section,
    count_rounds,
    even_section,
    key_limits,
    locate_both,
    place_of_tile,
    tile_of_round,
    walk,
)
from .hopper_softmax import count_sink, pack, softmax, sums_of_threads, unpack
from .relaunch import Launch, Relaunches, kind


class Tile(NamedTuple):
    """One program's share of the scores, and how it is compiled."""

    groups: int  # of 64 queries
    block_n: int  # keys
    stages: int  # of the rings of keys and values
    registers: int  # of a thread of a group
    take_turns: bool

    @property
    def rows(self) -> int:
        return self.groups * int(ROWS.value)

    def tiles_for(self, length: int) -> int:
        """How many hold so many queries."""
        return -(-length // self.rows)


# Keyed by the padded head width, the fastest on long sequences first; found on an H200.
TILES = {
    64: [Tile(3, 128, 3, 160, True), Tile(4, 64, 6, 112, False)],
    128: [Tile(2, 128, 2, 240, False)],
    256: [Tile(2, 64, 2, 240, False)],
}
WORTH = 1.05  # as many rows, those of its last tile without queries included, may a faster tile walk through


def pick_tile(block_d: int, length: int) -> Tile:
    """The fastest for so many queries: thirds of 192 fit 4096 well and 1024 badly."""
    fast, *others = TILES[block_d]
    most = fast.rows * fast.tiles_for(length)
    return next((tile for tile in others if WORTH * tile.rows * tile.tiles_for(length) < most), fast)


@gluon.jit
def _note(record, slot, values):
    """Five numbers to shared memory, where the groups find them when their queries are there."""
    for i in gl.static_range(5):
        record.index(5 * slot + i).store(gl.full([1], values[i], gl.int32, gl.BlockedLayout([1], [32], [1], [0])))


@gluon.jit
def _recall(record, q_full, done, WHICH: gl.constexpr, GROUPS: gl.constexpr, BUFFERS: gl.constexpr):
    """What was noted about the group's next tile, once its queries are there."""
    slot = done % BUFFERS
    mbarrier.wait(q_full.index(slot * GROUPS + WHICH), done // BUFFERS & 1)
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    return (
        gl.max(record.index(5 * slot).load(layout), 0), gl.max(record.index(5 * slot + 1).load(layout), 0),
        gl.max(record.index(5 * slot + 2).load(layout), 0), gl.max(record.index(5 * slot + 3).load(layout), 0),
        gl.max(record.index(5 * slot + 4).load(layout), 0),
    )  # fmt: skip


@gluon.jit
def _await_buffer(q_empty, done, GROUPS: gl.constexpr, BUFFERS: gl.constexpr):
    """A buffer for the queries of all groups; the number of its first part."""
    first = done % BUFFERS * GROUPS
    for g in gl.static_range(GROUPS):
        mbarrier.wait(q_empty.index(first + g), (done // BUFFERS & 1) ^ 1)
    return first


@gluon.jit
def _copy(
    operands, GROUPS: gl.constexpr, BUFFERS: gl.constexpr, STAGES: gl.constexpr, BOUND_LEFT: gl.constexpr,
    BOUND_RIGHT: gl.constexpr,
):  # fmt: skip
    """Finds the program's tiles one after the other, tells the groups about them and copies what they need."""
    q_desc, k_desc, v_desc, shared, record, problem, num_tiles = operands
    q_tiles, k_ring, v_ring, _, q_full, q_empty, k_full, k_empty, v_full, v_empty, _ = shared
    _, group, _, _, _, _, _, _, _, cu_q_ptr, _ = problem
    BLOCK_M: gl.constexpr = GROUPS * ROWS
    BLOCK_N: gl.constexpr = k_desc.block_type.shape[2]
    step = 0
    done = 0
    program, programs = gl.program_id(0), gl.num_programs(0)
    for count in range(count_rounds(num_tiles, program, programs)):
        batch, head, start_m = place_of_tile(tile_of_round(count, program, programs), problem, BLOCK_M)
        first_q, length_q, first_k, length_k = locate_both(batch, problem)
        if start_m < length_q:
            entry = 0 if cu_q_ptr is not None else batch
            last, right, full, left = walk(
                start_m, length_q, length_k, problem, 2**24, BLOCK_M, BLOCK_N, BOUND_LEFT, BOUND_RIGHT
            )
            first = _await_buffer(q_empty, done, GROUPS, BUFFERS)
            _note(record, done % BUFFERS, (batch, head, start_m, last, 1 + right + full + left))
            for g in gl.static_range(GROUPS):
                q_place = [entry, head, first_q + start_m + g * ROWS, 0]
                mbarrier.expect(q_full.index(first + g), q_desc.block_type.nbytes)
                load(q_desc, q_place, q_full.index(first + g), q_tiles.index(first + g))
            for i in range(1 + right + full + left):
                stage = step % STAGES
                parity = (step // STAGES & 1) ^ 1
                place = [entry, head // group, first_k + (last - i) * BLOCK_N, 0]
                mbarrier.wait(k_empty.index(stage), parity)
                mbarrier.expect(k_full.index(stage), k_desc.block_type.nbytes)
                load(k_desc, place, k_full.index(stage), k_ring.index(stage))
                mbarrier.wait(v_empty.index(stage), parity)
                mbarrier.expect(v_full.index(stage), v_desc.block_type.nbytes)
                load(v_desc, place, v_full.index(stage), v_ring.index(stage))
                step += 1
            done += 1
    first = _await_buffer(q_empty, done, GROUPS, BUFFERS)
    _note(record, done % BUFFERS, (0, 0, -1, 0, 0))  # no more
    barrier()
    for g in gl.static_range(GROUPS):
        mbarrier.arrive(q_full.index(first + g))


@gluon.jit
def _multiply_keys(q, shared, step, STAGES: gl.constexpr):
    """Begins the scores of tile `step` of keys."""
    _, k_ring, _, _, _, _, k_full, _, _, _, _ = shared
    BLOCK_N: gl.constexpr = k_ring.shape[3]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    mbarrier.wait(k_full.index(step % STAGES), step // STAGES & 1)
    k = k_ring.index(step % STAGES).reshape([BLOCK_N, k_ring.shape[4]])
    nothing = gl.zeros((ROWS, BLOCK_N), gl.float32, layout)
    return warpgroup_mma(q, k.permute((1, 0)), nothing, use_acc=False, is_async=True)


@gluon.jit
def _multiply_values(p, acc, shared, step, STAGES: gl.constexpr):
    """Begins to add the values of tile `step` of keys."""
    _, _, v_ring, _, _, _, _, _, v_full, _, _ = shared
    mbarrier.wait(v_full.index(step % STAGES), step // STAGES & 1)
    v = v_ring.index(step % STAGES).reshape([v_ring.shape[3], v_ring.shape[4]])
    left = unpack(p, v_ring.dtype, gl.DotOperandLayout(0, acc.type.layout, 2))
    return warpgroup_mma(left, v, acc, is_async=True)


@gluon.jit
def _await_turn(shared, turn, WHICH: gl.constexpr, TAKE_TURNS: gl.constexpr):
    _, _, _, _, _, _, _, _, _, _, turns = shared
    if TAKE_TURNS:
        mbarrier.wait(turns.index(WHICH), (turn & 1) ^ (1 if WHICH == 0 else 0))


@gluon.jit
def _end_turn(shared, WHICH: gl.constexpr, GROUPS: gl.constexpr, TAKE_TURNS: gl.constexpr):
    _, _, _, _, _, _, _, _, _, _, turns = shared
    if TAKE_TURNS:
        arrive(turns.index((WHICH + 1) % GROUPS))


@gluon.jit
def _step(
    p, acc, row_max, row_sum, q, shared, step, turn, start_n, limits, scales,
    WHICH: gl.constexpr, GROUPS: gl.constexpr, STAGES: gl.constexpr, TAKE_TURNS: gl.constexpr,
    BOUND_LEFT: gl.constexpr, MASKED: gl.constexpr,
):  # fmt: skip
    """The scores and the softmax of tile `step` of keys, and the values of the tile before it."""
    _, _, v_ring, _, _, _, _, k_empty, _, v_empty, _ = shared
    _await_turn(shared, turn, WHICH, TAKE_TURNS)
    s = _multiply_keys(q, shared, step, STAGES)
    acc = _multiply_values(p, acc, shared, step - 1, STAGES)
    _end_turn(shared, WHICH, GROUPS, TAKE_TURNS)
    s = warpgroup_mma_wait(1, deps=[s])
    arrive(k_empty.index(step % STAGES))
    p_next, row_max, row_sum, rescale = softmax(
        s, row_max, row_sum, start_n, limits, scales, BOUND_LEFT, MASKED, TAKE_TURNS
    )
    acc = warpgroup_mma_wait(0, deps=[acc])
    arrive(v_empty.index((step - 1) % STAGES))
    acc = acc * gl.convert_layout(rescale, gl.SliceLayout(1, acc.type.layout))[:, None]
    return pack(p_next, v_ring.dtype), acc, row_max, row_sum


@gluon.jit
def _skip(shared, step, turn, count, WHICH: gl.constexpr, GROUPS: gl.constexpr, STAGES: gl.constexpr,
          TAKE_TURNS: gl.constexpr):  # fmt: skip
    """Passes over tiles of keys that none of this group's queries sees, but another group's do."""
    _, _, _, _, _, _, k_full, k_empty, v_full, v_empty, _ = shared
    for i in range(count):
        stage = (step + i) % STAGES
        parity = (step + i) // STAGES & 1
        _await_turn(shared, turn + i, WHICH, TAKE_TURNS)
        _end_turn(shared, WHICH, GROUPS, TAKE_TURNS)
        mbarrier.wait(k_full.index(stage), parity)
        arrive(k_empty.index(stage))
        mbarrier.wait(v_full.index(stage), parity)
        arrive(v_empty.index(stage))
    return step + count, turn + count


@gluon.jit
def _attend_tile(
    place, lengths, buffer, step, turn, shared, problem, scales,
    WHICH: gl.constexpr, GROUPS: gl.constexpr, STAGES: gl.constexpr, TAKE_TURNS: gl.constexpr,
    BOUND_LEFT: gl.constexpr, BOUND_RIGHT: gl.constexpr, FREE_Q: gl.constexpr,
):  # fmt: skip
    """The result of this group's queries of one tile, before the division, and their maxima and sums."""
    q_tiles, k_ring, v_ring, _, _, q_empty, _, k_empty, _, v_empty, _ = shared
    _, _, start_m, all_last, number = place
    _, length_q, _, length_k = lengths
    BLOCK_N: gl.constexpr = k_ring.shape[3]
    BLOCK_D: gl.constexpr = k_ring.shape[4]
    BLOCK_DV: gl.constexpr = v_ring.shape[4]
    layout_s: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    rows_s: gl.constexpr = gl.SliceLayout(1, layout_s)
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_DV, 16])
    row0 = start_m + WHICH * ROWS
    last, right, full, left = walk(row0, length_q, length_k, problem, all_last, ROWS, BLOCK_N, BOUND_LEFT, BOUND_RIGHT)
    step, turn = _skip(shared, step, turn, all_last - last, WHICH, GROUPS, STAGES, TAKE_TURNS)

    rows = row0 + gl.arange(0, ROWS, rows_s)
    limits = key_limits(rows, length_q, length_k, problem, BOUND_RIGHT)
    row_max = gl.full((ROWS,), -float("inf"), gl.float32, rows_s)
    row_sum = gl.zeros((ROWS,), gl.float32, rows_s)
    if TAKE_TURNS:  # where the softmax binds, its four threads add up a row's sums at the end
        row_sum = sums_of_threads(gl.zeros((ROWS, BLOCK_N), gl.float32, layout_s))
    acc = gl.zeros((ROWS, BLOCK_DV), gl.float32, layout)

    q = q_tiles.index(buffer).reshape([ROWS, BLOCK_D])
    s = warpgroup_mma_wait(0, deps=[_multiply_keys(q, shared, step, STAGES)])
    arrive(k_empty.index(step % STAGES))
    start_n = last * BLOCK_N
    p, row_max, row_sum, _ = softmax(s, row_max, row_sum, start_n, limits, scales, BOUND_LEFT, True, TAKE_TURNS)
    p = pack(p, v_ring.dtype)
    for _ in range(right):
        step += 1
        start_n -= BLOCK_N
        p, acc, row_max, row_sum = _step(
            p, acc, row_max, row_sum, q, shared, step, turn, start_n, limits, scales,
            WHICH, GROUPS, STAGES, TAKE_TURNS, BOUND_LEFT, True,
        )  # fmt: skip
        turn += 1
    for _ in range(full):
        step += 1
        start_n -= BLOCK_N
        p, acc, row_max, row_sum = _step(
            p, acc, row_max, row_sum, q, shared, step, turn, start_n, limits, scales,
            WHICH, GROUPS, STAGES, TAKE_TURNS, BOUND_LEFT, False,
        )  # fmt: skip
        turn += 1
    if BOUND_LEFT:
        for _ in range(left):
            step += 1
            start_n -= BLOCK_N
            p, acc, row_max, row_sum = _step(
                p, acc, row_max, row_sum, q, shared, step, turn, start_n, limits, scales,
                WHICH, GROUPS, STAGES, TAKE_TURNS, BOUND_LEFT, True,
            )  # fmt: skip
            turn += 1
    if FREE_Q:
        arrive(q_empty.index(buffer))
    acc = warpgroup_mma_wait(0, deps=[_multiply_values(p, acc, shared, step, STAGES)])
    arrive(v_empty.index(step % STAGES))
    skipped = number - (all_last - last) - (1 + right + full + left)
    if TAKE_TURNS:
        row_sum = gl.convert_layout(gl.sum(row_sum, 1), rows_s)
    step, turn = _skip(shared, step + 1, turn, skipped, WHICH, GROUPS, STAGES, TAKE_TURNS)

    return acc, row_max, row_sum, rows, step, turn


@gluon.jit
def _attend(
    data, GROUPS: gl.constexpr, BUFFERS: gl.constexpr, STAGES: gl.constexpr, TAKE_TURNS: gl.constexpr,
    DV: gl.constexpr, BOUND_LEFT: gl.constexpr, BOUND_RIGHT: gl.constexpr, OUT_OVER_Q: gl.constexpr,
    WHICH: gl.constexpr,
):  # fmt: skip
    """The queries of group WHICH of all of the program's tiles."""
    out_desc, out_ptr, lse_ptr, spoiled_ptr, shared, record, problem, scales, sinks_ptr, max_logits_ptr = data
    k_ring, v_ring, out_tile = shared[1], shared[2], shared[3].index(WHICH)
    q_full, q_empty = shared[4], shared[5]
    heads_q, seqlen_q, cu_q_ptr = problem[0], problem[2], problem[9]
    BLOCK_N: gl.constexpr = k_ring.shape[3]
    BLOCK_DV: gl.constexpr = v_ring.shape[4]
    rows_s: gl.constexpr = gl.SliceLayout(1, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16]))
    spoiled = gl.zeros((ROWS,), gl.int32, rows_s)
    step = 0
    turn = 0
    done = 0
    place = _recall(record, q_full, done, WHICH, GROUPS, BUFFERS)
    while place[2] >= 0:
        batch, head, start_m = place[0], place[1], place[2]
        lengths = locate_both(batch, problem)
        first_q, length_q = lengths[0], lengths[1]
        acc, row_max, row_sum, rows, step, turn = _attend_tile(
            place, lengths, done % BUFFERS * GROUPS + WHICH, step, turn, shared, problem, scales,
            WHICH, GROUPS, STAGES, TAKE_TURNS, BOUND_LEFT, BOUND_RIGHT, not OUT_OVER_Q,
        )  # fmt: skip
        entry = 0 if cu_q_ptr is not None else batch
        first_row = (gl.cast(entry, gl.int64) * heads_q + head) * seqlen_q + first_q
        if max_logits_ptr is not None:
            gl.store(max_logits_ptr + first_row + rows, row_max * LN_2, mask=rows < length_q)
        acc, row_max, row_sum = count_sink(acc, row_max, row_sum, sinks_ptr, head)
        # A row without keys has row_max = -inf, row_sum = 0 and acc = 0: its output is 0 and its lse -inf.
        row_sum = gl.where(row_sum == 0.0, 1.0, row_sum)
        lse = (row_max + gl.log2(row_sum)) * LN_2
        layout: gl.constexpr = acc.type.layout
        if spoiled_ptr is not None:
            # 0 · NaN is NaN: a value that isn't finite may have reached rows that don't see it.
            is_spoiled = (gl.convert_layout(gl.sum(acc * 0.0, 1), rows_s) != 0.0) & (rows < length_q)
            lse = gl.where(is_spoiled, float("nan"), lse)
            spoiled = spoiled | is_spoiled.to(gl.int32)
        out = acc * gl.convert_layout(1.0 / row_sum, gl.SliceLayout(1, layout))[:, None]
        row0 = start_m + WHICH * ROWS
        gl.store(lse_ptr + first_row + rows, lse, mask=rows < length_q)
        if cu_q_ptr is None or row0 + ROWS <= length_q:  # the copy engine stops at the tensor's last row
            tma.store_wait(0)
            write(out_tile.reshape([ROWS, BLOCK_DV]), out.to(out_desc.dtype))
            store(out_desc, [entry, head, first_q + row0, 0], out_tile)
            if OUT_OVER_Q:
                tma.store_wait(0)
        elif cu_q_ptr is not None:  # and here another sequence begins
            store_rows(out_ptr, out, entry, head, first_q, row0, length_q, heads_q, seqlen_q, DV)
        if OUT_OVER_Q:
            arrive(q_empty.index(done % BUFFERS * GROUPS + WHICH))
        done += 1
        place = _recall(record, q_full, done, WHICH, GROUPS, BUFFERS)
    tma.store_wait(0)
    if spoiled_ptr is not None:
        gl.store(spoiled_ptr + gl.program_id(0) * GROUPS + WHICH, gl.max(spoiled, 0))


@gluon.jit(do_not_specialize=SIZES)
def forward_kernel(
    q_desc, k_desc, v_desc, out_desc, out_ptr, lse_ptr, spoiled_ptr, max_logits_ptr, sinks_ptr, cu_q_ptr, cu_k_ptr,
    heads_q, group, seqlen_q, seqlen_k, num_m, section, num_heads, window_left, window_right, num_tiles,
    scale, softcap,
    DV: gl.constexpr, GROUPS: gl.constexpr, STAGES: gl.constexpr, TAKE_TURNS: gl.constexpr, REGISTERS: gl.constexpr,
    BOUND_LEFT: gl.constexpr, BOUND_RIGHT: gl.constexpr, OUT_OVER_Q: gl.constexpr,
):  # fmt: skip
    BLOCK_N: gl.constexpr = k_desc.block_type.shape[2]
    BLOCK_D: gl.constexpr = k_desc.block_type.shape[3]
    BUFFERS: gl.constexpr = 1 if BLOCK_D == 256 else 2  # of queries, so that the next tile's arrive during this one
    BLOCK_DV: gl.constexpr = v_desc.block_type.shape[3]
    q_tiles = gl.allocate_shared_memory(q_desc.dtype, [BUFFERS * GROUPS, 1, 1, ROWS, BLOCK_D], q_desc.layout)
    k_ring = gl.allocate_shared_memory(k_desc.dtype, [STAGES, 1, 1, BLOCK_N, BLOCK_D], k_desc.layout)
    v_ring = gl.allocate_shared_memory(v_desc.dtype, [STAGES, 1, 1, BLOCK_N, BLOCK_DV], v_desc.layout)
    if OUT_OVER_Q:
        out_tiles = q_tiles
    else:
        out_tiles = gl.allocate_shared_memory(out_desc.dtype, [GROUPS, 1, 1, ROWS, BLOCK_DV], out_desc.layout)
    shared = (
        q_tiles, k_ring, v_ring, out_tiles, barriers(BUFFERS * GROUPS, 1), barriers(BUFFERS * GROUPS, 1),
        barriers(STAGES, 1), barriers(STAGES, GROUPS), barriers(STAGES, 1), barriers(STAGES, GROUPS),
        barriers(GROUPS, 1),
    )  # fmt: skip
    record = gl.allocate_shared_memory(gl.int32, [5 * BUFFERS, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    fence_async_shared()
    problem = (
        heads_q, group, seqlen_q, seqlen_k, num_m, section, num_heads, window_left, window_right, cu_q_ptr, cu_k_ptr
    )  # fmt: skip
    scales = ((scale if softcap is None else softcap) * LOG2_E, None if softcap is None else scale / softcap)
    data = (out_desc, out_ptr, lse_ptr, spoiled_ptr, shared, record, problem, scales, sinks_ptr, max_logits_ptr)
    operands = (q_desc, k_desc, v_desc, shared, record, problem, num_tiles)
    # Written out, since Triton takes roles neither from a variable nor from a loop.
    if GROUPS == 2:
        gl.warp_specialize(
            [
                (_attend, (
                    data, GROUPS, BUFFERS, STAGES, TAKE_TURNS, DV, BOUND_LEFT, BOUND_RIGHT, OUT_OVER_Q, gl.constexpr(0)
                )),
                (_attend, (
                    data, GROUPS, BUFFERS, STAGES, TAKE_TURNS, DV, BOUND_LEFT, BOUND_RIGHT, OUT_OVER_Q, gl.constexpr(1)
                )),
                (_copy, (operands, GROUPS, BUFFERS, STAGES, BOUND_LEFT, BOUND_RIGHT)),
            ],
            [4, 1],
            [REGISTERS, 24],
        )  # fmt: skip
    elif GROUPS == 3:
        gl.warp_specialize(
            [
                (_attend, (
                    data, GROUPS, BUFFERS, STAGES, TAKE_TURNS, DV, BOUND_LEFT, BOUND_RIGHT, OUT_OVER_Q, gl.constexpr(0)
                )),
                (_attend, (
                    data, GROUPS, BUFFERS, STAGES, TAKE_TURNS, DV, BOUND_LEFT, BOUND_RIGHT, OUT_OVER_Q, gl.constexpr(1)
                )),
                (_attend, (
                    data, GROUPS, BUFFERS, STAGES, TAKE_TURNS, DV, BOUND_LEFT, BOUND_RIGHT, OUT_OVER_Q, gl.constexpr(2)
                )),
                (_copy, (operands, GROUPS, BUFFERS, STAGES, BOUND_LEFT, BOUND_RIGHT)),
            ],
            [4, 4, 1],
            [REGISTERS, REGISTERS, 24],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (_attend, (
                    data, GROUPS, BUFFERS, STAGES, TAKE_TURNS, DV, BOUND_LEFT, BOUND_RIGHT, OUT_OVER_Q, gl.constexpr(0)
                )),
                (_attend, (
                    data, GROUPS, BUFFERS, STAGES, TAKE_TURNS, DV, BOUND_LEFT, BOUND_RIGHT, OUT_OVER_Q, gl.constexpr(1)
                )),
                (_attend, (
                    data, GROUPS, BUFFERS, STAGES, TAKE_TURNS, DV, BOUND_LEFT, BOUND_RIGHT, OUT_OVER_Q, gl.constexpr(2)
                )),
                (_attend, (
                    data, GROUPS, BUFFERS, STAGES, TAKE_TURNS, DV, BOUND_LEFT, BOUND_RIGHT, OUT_OVER_Q, gl.constexpr(3)
                )),
                (_copy, (operands, GROUPS, BUFFERS, STAGES, BOUND_LEFT, BOUND_RIGHT)),
            ],
            [4, 4, 4, 1],
            [REGISTERS, REGISTERS, REGISTERS, 24],
        )  # fmt: skip


def forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: Options, with_max_logits: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """out, lse and max_logits, for what `attention.backends.why_not_hopper` has nothing against."""
    if v.shape[-1] % 8:  # the copy engine writes rows whose beginnings are multiples of 16 bytes apart
        padded = torch.nn.functional.pad(v, (0, -v.shape[-1] % 8))
        out, lse, max_logits = forward(q, k, padded, options, with_max_logits)
        return out[..., : v.shape[-1]].contiguous(), lse, max_logits
    packed = options.cu_seqlens_q is not None
    *batch, seqlen_q, heads_q, head_dim = q.shape
    head_dim_v = v.shape[-1]
    out = torch.empty((*batch, seqlen_q, heads_q, head_dim_v), dtype=q.dtype, device=q.device)
    lse = torch.empty((*batch, heads_q, seqlen_q), dtype=torch.float32, device=q.device)
    max_logits = lse.new_empty(heads_q if with_max_logits else 0)
    longest, entries = seqlen_q, q.shape[0]
    result = out
    if options.cu_seqlens_q is not None:
        longest, entries = options.max_seqlen_q, options.cu_seqlens_q.shape[0] - 1
        q, k, v, out = q[None], k[None], v[None], out[None]
    if longest * entries == 0:
        return result.zero_(), lse.fill_(-torch.inf), max_logits.fill_(-torch.inf)
    scale = options.scale
    if scale <= 0:  # the kernel takes the maximum of the logits before it scales them, and 0 · -inf is NaN
        q, scale = (-q, -scale) if scale < 0 else (q * 0, 1.0)
    q, k, v = loadable(q), loadable(k), loadable(v)
    cu_seqlens_q, cu_seqlens_k, sinks = (
        None if x is None else x.contiguous() for x in (options.cu_seqlens_q, options.cu_seqlens_k, options.sinks)
    )
    tile = pick_tile(padded_width(max(head_dim, head_dim_v)), longest)
    programs = min(tile.tiles_for(longest) * entries * heads_q, processors(q.device))
    # Each query's largest logit, as its lse; a maximum over a program's would make its warps wait for one another.
    peaks = torch.empty_like(lse) if with_max_logits else None
    spoiled = None
    if packed or options.window_left is not None or options.window_right is not None:
        spoiled = torch.empty(programs * tile.groups, dtype=torch.int32, device=q.device)
    inputs = (q, k, v, sinks, cu_seqlens_q, cu_seqlens_k)
    tensors = (*inputs, out, lse, spoiled, peaks, max_logits if with_max_logits else None)
    key = (
        q.device, tile, longest, scale, options.window_left, options.window_right, options.softcap, with_max_logits,
        *map(kind, inputs),
    )  # fmt: skip
    with on_device_of(q):
        RELAUNCHES.launch(key, tensors, partial(_plan, options, scale, tile, longest))
    return result, lse, max_logits


RELAUNCHES = Relaunches()


def _plan(
    options: Options,
    scale: float,
    tile: Tile,
    longest: int,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sinks: torch.Tensor | None,
    cu_seqlens_q: torch.Tensor | None,
    cu_seqlens_k: torch.Tensor | None,
    out: torch.Tensor,
    lse: torch.Tensor,
    spoiled: torch.Tensor | None,
    peaks: torch.Tensor | None,
    max_logits: torch.Tensor | None,
) -> Iterator[Launch]:
    """The forward's launches."""
    entries, seqlen_q, heads_q, head_dim = q.shape
    _, seqlen_k, heads_k, head_dim_v = v.shape
    if cu_seqlens_q is not None:
        entries = len(cu_seqlens_q) - 1
    num_heads = entries * heads_q
    block_d, block_dv = padded_width(head_dim), padded_width(head_dim_v)
    num_m = tile.tiles_for(longest)
    programs = min(num_m * num_heads, processors(q.device))
    fitting = max(1, L2_SHARE // (2 * seqlen_k * (head_dim + head_dim_v))) * (heads_q // heads_k)
    is_causal = options.window_right is not None and cu_seqlens_q is None
    section = causal_section(num_heads, fitting, num_m, programs) if is_causal else even_section(num_heads, fitting)
    bounds = {"BOUND_LEFT": options.window_left is not None, "BOUND_RIGHT": options.window_right is not None}
    sizes = (
        heads_q, heads_q // heads_k, seqlen_q, seqlen_k, num_m, section, num_heads, options.window_left or 0,
        options.window_right or 0, num_m * num_heads, scale, options.softcap,
    )  # fmt: skip
    yield Launch(
        forward_kernel, programs,
        (
            describe(q, int(ROWS.value), block_d), describe(k, tile.block_n, block_d),
            describe(v, tile.block_n, block_dv), describe(out, int(ROWS.value), block_dv),
            out, lse, spoiled, peaks, sinks, cu_seqlens_q, cu_seqlens_k, *sizes,
        ),
        {
            "DV": head_dim_v, "GROUPS": tile.groups, "STAGES": tile.stages, "TAKE_TURNS": tile.take_turns,
            "REGISTERS": tile.registers, "OUT_OVER_Q": min(block_d, block_dv) == 256, "num_warps": 4, **bounds,
        },
    )  # fmt: skip
    tasks = (0 if max_logits is None else heads_q) + (0 if spoiled is None else len(spoiled))
    if tasks:
        yield Launch(
            finish_kernel, tasks,
            (
                pointer(q), pointer(k), pointer(v), out, lse, spoiled, peaks, max_logits, sinks, cu_seqlens_q,
                cu_seqlens_k, *sizes,
            ),
            {
                "D": head_dim, "DV": head_dim_v, "BLOCK_D": block_d, "BLOCK_DV": block_dv, "GROUPS": tile.groups,
                "num_warps": 4, **bounds, **OVERLAPPING,
            },
        )  # fmt: skip
