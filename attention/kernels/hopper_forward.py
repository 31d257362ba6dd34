"""FlashAttention's forward for Hopper in Gluon: warp-specialised and persistent (arXiv:2407.08608).

A program has several roles. One warp copies tiles of queries, keys and values into shared memory. GROUPS groups of four
warps own 64 queries each. A group has the scores of the next tile of keys multiplied and, right behind, the product of
the last tile's probabilities with its values; its softmax runs while the tensor cores still multiply. Where the softmax
takes as long as the products (narrow heads), the groups take turns, so that one's softmax hides behind the others'
products. Keys are walked from the last one seen to the first, so that the tiles cut by a causal mask come first.

The portable twin is ``forward.py``; the torch twin is ``attention.reference.tiled_forward``.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    mma_v2,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ..reference import Options
from .common import LN_2, LOG2_E, key_tiles, loadable, locate, on_device_of, pointer
from .hopper_common import arrive, barrier, barriers, describe, hide_if_greater, load, processors, store, write
from .tiles import padded_widths

ROWS = gl.constexpr(64)  # queries of a group of four warps
CAREFUL = gl.constexpr(16)  # keys of a tile of the loop that treats NaN and inf with care
SIZES = [
    "heads_q", "group", "seqlen_q", "seqlen_k", "num_m", "section", "num_heads", "window_left", "window_right",
    "num_tiles",
]  # fmt: skip


class Tile(NamedTuple):
    """One program's share of the scores, and how it is compiled."""

    groups: int  # of 64 queries
    block_n: int  # keys
    stages: int  # of the rings of keys and values
    registers: int  # of a thread of a group
    take_turns: bool


# Keyed by the padded head width; found on an H200.
TILES = {
    64: Tile(3, 128, 3, 160, True),
    128: Tile(2, 128, 2, 240, False),
    256: Tile(2, 64, 2, 240, False),
}
L2_SHARE = 32 * 2**20  # bytes of keys and values that programs running at the same time share in a cache of 50 MB


@gluon.jit
def _rounds(num_tiles):
    """How many tiles this program has."""
    rounds = num_tiles // gl.num_programs(0)
    return rounds + (1 if _tile(rounds) < num_tiles else 0)


@gluon.jit
def _tile(count):
    """This program's tile in a round. Every second one is dealt backwards, which evens out work that decreases."""
    programs = gl.num_programs(0)
    pid = gl.program_id(0)
    return count * programs + (programs - 1 - pid if count & 1 else pid)


@gluon.jit
def _place(t, problem, BLOCK_M: gl.constexpr):
    """Which sequence, head and first query tile t is of. The heads of a section, whose keys and values fit into L2, go together.

    Under a causal mask the last queries see the most. They go first in every second section, the last one included,
    and last in the others, so that no program gets the longer tiles of every section.
    """
    heads_q, _, _, _, num_m, section, num_heads, _, _, _, _ = problem
    number = t // (section * num_m)
    heads = gl.minimum(section, num_heads - number * section)
    rest = t - number * section * num_m
    m = rest // heads
    is_descending = (gl.cdiv(num_heads, section) - number) & 1
    start_m = (num_m - 1 - m if is_descending else m) * BLOCK_M
    batch_head = number * section + rest % heads
    return batch_head // heads_q, batch_head % heads_q, start_m


@gluon.jit
def _locate_both(batch, problem):
    """Where the queries and the keys of a sequence start, and how many they are."""
    first_q, length_q = locate(problem[9], batch, problem[2])
    first_k, length_k = locate(problem[10], batch, problem[3])
    return first_q, length_q, first_k, length_k


@gluon.jit
def _walk(start_m, length_q, length_k, problem, limit, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr,
          BOUND_LEFT: gl.constexpr, BOUND_RIGHT: gl.constexpr):  # fmt: skip
    """The tile of keys to begin with, at most `limit`, and how many follow to its left: masked, seen by all these
    queries, masked again. Queries without keys get one tile, all of it masked."""
    _, _, _, _, _, _, _, window_left, window_right, _, _ = problem
    shift_left = length_k - length_q - window_left
    shift_right = length_k - length_q + window_right
    begin, full_begin, full_end, end = key_tiles(
        start_m, length_q, length_k, shift_left, shift_right, BLOCK_M, BLOCK_N, BOUND_LEFT, BOUND_RIGHT, False
    )  # fmt: skip
    if start_m >= length_q:
        end = begin
    begin, full_begin, full_end = gl.minimum(begin // BLOCK_N, limit), full_begin // BLOCK_N, full_end // BLOCK_N
    last = gl.minimum(gl.maximum((end + BLOCK_N - 1) // BLOCK_N - 1, begin), limit)
    right = gl.maximum(last - full_end, 0)
    full = gl.maximum(gl.minimum(last, full_end) - full_begin, 0)
    left = gl.maximum(gl.minimum(last, full_begin) - begin, 0)
    return last, right, full, left


@gluon.jit
def _note(record, values):
    """Five numbers to shared memory, where the groups find them when their queries are there."""
    for i in gl.static_range(5):
        record.index(i).store(gl.full([1], values[i], gl.int32, gl.BlockedLayout([1], [32], [1], [0])))


@gluon.jit
def _recall(record, q_full, done):
    mbarrier.wait(q_full, done & 1)
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    return (
        gl.max(record.index(0).load(layout), 0), gl.max(record.index(1).load(layout), 0),
        gl.max(record.index(2).load(layout), 0), gl.max(record.index(3).load(layout), 0),
        gl.max(record.index(4).load(layout), 0),
    )  # fmt: skip


@gluon.jit
def _copy(
    q_desc, k_desc, v_desc, shared, record, problem, num_tiles,
    GROUPS: gl.constexpr, STAGES: gl.constexpr, BOUND_LEFT: gl.constexpr, BOUND_RIGHT: gl.constexpr,
):  # fmt: skip
    """Finds the program's tiles one after the other, tells the groups about them and copies what they need."""
    q_tiles, k_ring, v_ring, _, q_full, q_empty, k_full, k_empty, v_full, v_empty, _ = shared
    BLOCK_M: gl.constexpr = GROUPS * ROWS
    BLOCK_N: gl.constexpr = k_desc.block_type.shape[2]
    step = 0
    done = 0
    for count in range(_rounds(num_tiles)):
        batch, head, start_m = _place(_tile(count), problem, BLOCK_M)
        first_q, length_q, first_k, length_k = _locate_both(batch, problem)
        if start_m < length_q:
            entry = 0 if problem[9] is not None else batch
            last, right, full, left = _walk(
                start_m, length_q, length_k, problem, 2**24, BLOCK_M, BLOCK_N, BOUND_LEFT, BOUND_RIGHT
            )
            for g in gl.static_range(GROUPS):
                mbarrier.wait(q_empty.index(g), (done & 1) ^ 1)
            _note(record, (batch, head, start_m, last, 1 + right + full + left))
            for g in gl.static_range(GROUPS):
                mbarrier.expect(q_full.index(g), q_desc.block_type.nbytes)
                load(q_desc, [entry, head, first_q + start_m + g * ROWS, 0], q_full.index(g), q_tiles.index(g))
            for i in range(1 + right + full + left):
                stage = step % STAGES
                parity = (step // STAGES & 1) ^ 1
                place = [entry, head // problem[1], first_k + (last - i) * BLOCK_N, 0]
                mbarrier.wait(k_empty.index(stage), parity)
                mbarrier.expect(k_full.index(stage), k_desc.block_type.nbytes)
                load(k_desc, place, k_full.index(stage), k_ring.index(stage))
                mbarrier.wait(v_empty.index(stage), parity)
                mbarrier.expect(v_full.index(stage), v_desc.block_type.nbytes)
                load(v_desc, place, v_full.index(stage), v_ring.index(stage))
                step += 1
            done += 1
    for g in gl.static_range(GROUPS):
        mbarrier.wait(q_empty.index(g), (done & 1) ^ 1)
    _note(record, (0, 0, -1, 0, 0))
    barrier()
    for g in gl.static_range(GROUPS):
        mbarrier.arrive(q_full.index(g))


@gluon.jit
def _halves(x):
    return x.reshape([x.shape[0], 2, x.shape[1] // 2]).permute((0, 2, 1)).split()


@gluon.jit
def _row_max(x):
    """The largest of each row. A thread's part is folded twice first: one long chain would wait for every step."""
    rows: gl.constexpr = gl.SliceLayout(1, x.type.layout)
    for _ in gl.static_range(2 if x.shape[1] >= 64 else 0):
        first, second = _halves(x)
        x = gl.maximum(first, second)
    return gl.convert_layout(gl.max(x, 1), rows)


@gluon.jit
def _row_sum(x):
    """The sum of each row, likewise."""
    rows: gl.constexpr = gl.SliceLayout(1, x.type.layout)
    for _ in gl.static_range(2 if x.shape[1] >= 64 else 0):
        first, second = _halves(x)
        x = first + second
    return gl.convert_layout(gl.sum(x, 1), rows)


@gluon.jit
def _softmax(s, row_max, row_sum, start_n, limits, scales, BOUND_LEFT: gl.constexpr, MASKED: gl.constexpr):
    """Probabilities relative to the maximum so far, that maximum, the sum, and how much what came before shrinks."""
    layout: gl.constexpr = s.type.layout
    scale, tanh_scale = scales
    if tanh_scale is not None:
        s = 1.0 - 2.0 / (gl.exp2(s * (tanh_scale * (2.0 * LOG2_E))) + 1.0)
    if MASKED:
        left, right = limits
        keys = start_n + gl.arange(0, s.type.shape[1], gl.SliceLayout(0, layout))
        s = hide_if_greater(s, keys[None, :], right[:, None])
        if BOUND_LEFT:
            s = hide_if_greater(s, left[:, None], keys[None, :])
    new_max = gl.maximum(row_max, _row_max(s) * scale)
    anchor = gl.where(new_max == -float("inf"), 0.0, new_max) if MASKED else new_max  # -inf - -inf would be NaN
    p = gl.exp2(s * scale - anchor[:, None])
    rescale = gl.exp2(row_max - anchor)
    return p, new_max, row_sum * rescale + _row_sum(p), rescale


@gluon.jit
def _pack(p, dtype: gl.constexpr):
    """Probabilities as 16-bit pairs in 32-bit words: a loop that carried single ones would take them apart and together
    again in every round."""
    low, high = p.reshape([p.shape[0], p.shape[1] // 2, 2]).split()
    kind: gl.constexpr = "bf16x2" if dtype == gl.bfloat16 else "f16x2"
    return gl.inline_asm_elementwise(
        "cvt.rn." + kind + ".f32 $0, $2, $1;", "=r,r,r", [low, high], dtype=gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def _unpack(words, dtype: gl.constexpr, layout: gl.constexpr):
    """They again, as the left side of a product."""
    low, high = gl.inline_asm_elementwise(
        "mov.b32 {$0, $1}, $2;", "=h,=h,r", [words], dtype=(gl.int16, gl.int16), is_pure=True, pack=1
    )
    pairs = gl.join(low.to(dtype, bitcast=True), high.to(dtype, bitcast=True))
    return gl.convert_layout(pairs.reshape([words.shape[0], words.shape[1] * 2]), layout)


@gluon.jit
def _multiply_keys(q, shared, step, STAGES: gl.constexpr):
    """Begins the scores of tile `step` of keys."""
    k_ring, k_full = shared[1], shared[6]
    BLOCK_N: gl.constexpr = k_ring.shape[3]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    mbarrier.wait(k_full.index(step % STAGES), step // STAGES & 1)
    k = k_ring.index(step % STAGES).reshape([BLOCK_N, k_ring.shape[4]])
    nothing = gl.zeros((ROWS, BLOCK_N), gl.float32, layout)
    return warpgroup_mma(q, k.permute((1, 0)), nothing, use_acc=False, is_async=True)


@gluon.jit
def _multiply_values(p, acc, shared, step, STAGES: gl.constexpr):
    """Begins to add the values of tile `step` of keys."""
    v_ring, v_full = shared[2], shared[8]
    mbarrier.wait(v_full.index(step % STAGES), step // STAGES & 1)
    v = v_ring.index(step % STAGES).reshape([v_ring.shape[3], v_ring.shape[4]])
    left = _unpack(p, v_ring.dtype, gl.DotOperandLayout(0, acc.type.layout, 2))
    return warpgroup_mma(left, v, acc, is_async=True)


@gluon.jit
def _await_turn(shared, turn, WHICH: gl.constexpr, TAKE_TURNS: gl.constexpr):
    if TAKE_TURNS:
        mbarrier.wait(shared[10].index(WHICH), (turn & 1) ^ (1 if WHICH == 0 else 0))


@gluon.jit
def _end_turn(shared, WHICH: gl.constexpr, GROUPS: gl.constexpr, TAKE_TURNS: gl.constexpr):
    if TAKE_TURNS:
        arrive(shared[10].index((WHICH + 1) % GROUPS))


@gluon.jit
def _step(
    p, acc, row_max, row_sum, q, shared, step, turn, start_n, limits, scales,
    WHICH: gl.constexpr, GROUPS: gl.constexpr, STAGES: gl.constexpr, TAKE_TURNS: gl.constexpr,
    BOUND_LEFT: gl.constexpr, MASKED: gl.constexpr,
):  # fmt: skip
    """The scores and the softmax of tile `step` of keys, and the values of the tile before it."""
    k_empty, v_empty = shared[7], shared[9]
    _await_turn(shared, turn, WHICH, TAKE_TURNS)
    s = _multiply_keys(q, shared, step, STAGES)
    acc = _multiply_values(p, acc, shared, step - 1, STAGES)
    _end_turn(shared, WHICH, GROUPS, TAKE_TURNS)
    s = warpgroup_mma_wait(1, deps=[s])
    arrive(k_empty.index(step % STAGES))
    p_next, row_max, row_sum, rescale = _softmax(s, row_max, row_sum, start_n, limits, scales, BOUND_LEFT, MASKED)
    acc = warpgroup_mma_wait(0, deps=[acc])
    arrive(v_empty.index((step - 1) % STAGES))
    acc = acc * gl.convert_layout(rescale, gl.SliceLayout(1, acc.type.layout))[:, None]
    return _pack(p_next, shared[2].dtype), acc, row_max, row_sum


@gluon.jit
def _skip(shared, step, turn, count, WHICH: gl.constexpr, GROUPS: gl.constexpr, STAGES: gl.constexpr,
          TAKE_TURNS: gl.constexpr):  # fmt: skip
    """Passes over tiles of keys that none of this group's queries sees, but another group's do."""
    for i in range(count):
        stage = (step + i) % STAGES
        parity = (step + i) // STAGES & 1
        _await_turn(shared, turn + i, WHICH, TAKE_TURNS)
        _end_turn(shared, WHICH, GROUPS, TAKE_TURNS)
        mbarrier.wait(shared[6].index(stage), parity)
        arrive(shared[7].index(stage))
        mbarrier.wait(shared[8].index(stage), parity)
        arrive(shared[9].index(stage))
    return step + count, turn + count


@gluon.jit
def _limits(rows, length_q, length_k, problem, BOUND_RIGHT: gl.constexpr):
    """Query i sees key j when left_i <= j <= right_i."""
    window_left, window_right = problem[7], problem[8]
    right = gl.full(rows.shape, length_k - 1, gl.int32, rows.type.layout)
    if BOUND_RIGHT:
        right = gl.minimum(right, rows + (length_k - length_q + window_right))
    return rows + (length_k - length_q - window_left), right


@gluon.jit
def _count_sink(acc, row_max, row_sum, sinks_ptr, head):
    """The sink joins the softmax at its end."""
    if sinks_ptr is not None:
        sink = gl.load(sinks_ptr + head) * LOG2_E
        new_max = gl.maximum(row_max, sink)
        anchor = gl.where(new_max == -float("inf"), 0.0, new_max)
        rescale = gl.exp2(row_max - anchor)
        acc = acc * gl.convert_layout(rescale, gl.SliceLayout(1, acc.type.layout))[:, None]
        row_sum = row_sum * rescale + gl.exp2(sink - anchor)
        row_max = new_max
    return acc, row_max, row_sum


@gluon.jit
def _load_rows(rows, entry, head, start, length, first_d, D: gl.constexpr, NUMBER: gl.constexpr, WIDTH: gl.constexpr):
    """NUMBER positions of what `pointer` returned, zeros behind the last one."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    unit: gl.constexpr = 8  # 16 bytes
    ptr = rows[0] + gl.cast(entry, gl.int64) * rows[1] * unit + gl.cast(head, gl.int64) * rows[2] * unit
    offs_s = gl.arange(0, NUMBER, gl.SliceLayout(1, layout))
    offs_d = first_d + gl.arange(0, WIDTH, gl.SliceLayout(0, layout))
    offsets = (start + offs_s)[:, None].to(gl.int64) * (gl.cast(rows[3], gl.int64) * unit) + offs_d[None, :]
    mask = (offs_s[:, None] < length - start) & (offs_d[None, :] < D)
    return gl.load(ptr + offsets, mask=mask, other=0.0)


@gluon.jit
def _store_rows(out_ptr, out, entry, head, first_q, row0, length_q, heads_q, seqlen_q, DV: gl.constexpr):
    layout: gl.constexpr = out.type.layout
    offs_m = row0 + gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    offs_d = gl.arange(0, out.shape[1], gl.SliceLayout(0, layout))
    ptr = out_ptr + ((gl.cast(entry, gl.int64) * seqlen_q + first_q) * heads_q + head) * DV
    offsets = offs_m[:, None].to(gl.int64) * (heads_q * DV) + offs_d[None, :]
    mask = (offs_m[:, None] < length_q) & (offs_d[None, :] < DV)
    gl.store(ptr + offsets, out.to(out_ptr.dtype.element_ty), mask=mask)


@gluon.jit
def _attend_carefully(
    entry, head, row0, lengths, problem, q_rows, k_rows, v_rows, limits, begin, end, scales,
    D: gl.constexpr, DV: gl.constexpr, BLOCK_D: gl.constexpr, BLOCK_DV: gl.constexpr, BOUND_LEFT: gl.constexpr,
    layout: gl.constexpr,
):  # fmt: skip
    """A group's softmax, maxima and sums, in small pieces: a value that isn't finite counts as 0 where it isn't seen and
    as NaN where it is."""
    PART: gl.constexpr = 64  # of the head's width, because of the registers
    left_side: gl.constexpr = gl.DotOperandLayout(0, layout, 2)
    right_side: gl.constexpr = gl.DotOperandLayout(1, layout, 2)
    first_q, length_q, first_k, length_k = lengths
    head_k = head // problem[1]
    left, right = limits
    row_max = gl.full((ROWS,), -float("inf"), gl.float32, gl.SliceLayout(1, layout))
    row_sum = gl.zeros((ROWS,), gl.float32, gl.SliceLayout(1, layout))
    acc = gl.zeros((ROWS, BLOCK_DV), gl.float32, layout)
    for start_n in range(begin, end, CAREFUL):
        s = gl.zeros((ROWS, CAREFUL), gl.float32, layout)
        for d in gl.static_range(0, BLOCK_D, PART):
            q = _load_rows(q_rows, entry, head, first_q + row0, first_q + length_q, d, D, ROWS, PART)
            k = _load_rows(k_rows, entry, head_k, first_k + start_n, first_k + length_k, d, D, CAREFUL, PART)
            k_turned = gl.convert_layout(k.permute((1, 0)), right_side)
            s = mma_v2(gl.convert_layout(q, left_side), k_turned, s)
        p, row_max, row_sum, rescale = _softmax(s, row_max, row_sum, start_n, limits, scales, BOUND_LEFT, True)
        v = _load_rows(v_rows, entry, head_k, first_k + start_n, first_k + length_k, 0, DV, CAREFUL, BLOCK_DV)
        is_finite = gl.abs(v.to(gl.float32)) < float("inf")
        spoiled = gl.convert_layout(gl.min(is_finite.to(gl.int32), 1), gl.SliceLayout(0, layout)) == 0
        keys = start_n + gl.arange(0, CAREFUL, gl.SliceLayout(0, layout))
        sees_spoiled = (keys[None, :] <= right[:, None]) & spoiled[None, :]
        if BOUND_LEFT:
            sees_spoiled = sees_spoiled & (keys[None, :] >= left[:, None])
        p = gl.convert_layout(gl.where(sees_spoiled, float("nan"), p).to(v.dtype), left_side)
        acc = mma_v2(p, gl.convert_layout(gl.where(is_finite, v, 0.0), right_side), acc * rescale[:, None])
    return acc, row_max, row_sum


@gluon.jit
def _repair(
    place, lengths, problem, q_rows, k_rows, v_rows, out_ptr, lse_ptr, sinks_ptr, scales,
    WHICH: gl.constexpr, D: gl.constexpr, DV: gl.constexpr, BLOCK_D: gl.constexpr, BLOCK_DV: gl.constexpr,
    BLOCK_N: gl.constexpr, BOUND_LEFT: gl.constexpr, BOUND_RIGHT: gl.constexpr,
):  # fmt: skip
    """This group's queries of a tile once more, with care, if an lse of NaN marks any of them."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [4, 1], [16, 8])
    batch, head, start_m = place
    first_q, length_q, first_k, length_k = lengths
    heads_q, seqlen_q, cu_q_ptr = problem[0], problem[2], problem[9]
    entry = 0 if cu_q_ptr is not None else batch
    row0 = start_m + WHICH * ROWS
    rows = row0 + gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    lse_ptr += (gl.cast(entry, gl.int64) * heads_q + head) * seqlen_q + first_q
    lse = gl.load(lse_ptr + rows, mask=rows < length_q, other=0.0)
    if gl.max((lse != lse).to(gl.int32), 0) != 0:
        last, right, full, left = _walk(
            row0, length_q, length_k, problem, 2**24, ROWS, BLOCK_N, BOUND_LEFT, BOUND_RIGHT
        )
        limits = _limits(rows, length_q, length_k, problem, BOUND_RIGHT)
        acc, row_max, row_sum = _attend_carefully(
            entry, head, row0, lengths, problem, q_rows, k_rows, v_rows, limits,
            (last - right - full - left) * BLOCK_N, (last + 1) * BLOCK_N, scales,
            D, DV, BLOCK_D, BLOCK_DV, BOUND_LEFT, layout,
        )  # fmt: skip
        acc, row_max, row_sum = _count_sink(acc, row_max, row_sum, sinks_ptr, head)
        row_sum = gl.where(row_sum == 0.0, 1.0, row_sum)
        gl.store(lse_ptr + rows, (row_max + gl.log2(row_sum)) * LN_2, mask=rows < length_q)
        _store_rows(out_ptr, acc / row_sum[:, None], entry, head, first_q, row0, length_q, heads_q, seqlen_q, DV)


@gluon.jit
def _await_writes(x):
    """Until the copy engine's writes are in memory; `tma.store_wait` returns when it has read what it writes."""
    return gl.inline_asm_elementwise(
        "cp.async.bulk.wait_group 0; mov.b32 $0, $1;", "=r,r", [x], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def _attend_tile(
    place, lengths, step, turn, shared, problem, scales, max_logits_ptr,
    WHICH: gl.constexpr, GROUPS: gl.constexpr, STAGES: gl.constexpr, TAKE_TURNS: gl.constexpr,
    BOUND_LEFT: gl.constexpr, BOUND_RIGHT: gl.constexpr, FREE_Q: gl.constexpr,
):  # fmt: skip
    """The result of this group's queries of one tile, before the division, and their maxima and sums."""
    q_tiles, k_ring, v_ring, _, q_full, q_empty, k_full, k_empty, v_full, v_empty, _ = shared
    batch, head, start_m, all_last, number = place
    _, length_q, _, length_k = lengths
    BLOCK_N: gl.constexpr = k_ring.shape[3]
    BLOCK_D: gl.constexpr = k_ring.shape[4]
    BLOCK_DV: gl.constexpr = v_ring.shape[4]
    rows_s: gl.constexpr = gl.SliceLayout(1, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16]))
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_DV, 16])
    row0 = start_m + WHICH * ROWS
    last, right, full, left = _walk(
        row0, length_q, length_k, problem, all_last, ROWS, BLOCK_N, BOUND_LEFT, BOUND_RIGHT
    )
    step, turn = _skip(shared, step, turn, all_last - last, WHICH, GROUPS, STAGES, TAKE_TURNS)

    rows = row0 + gl.arange(0, ROWS, rows_s)
    limits = _limits(rows, length_q, length_k, problem, BOUND_RIGHT)
    row_max = gl.full((ROWS,), -float("inf"), gl.float32, rows_s)
    row_sum = gl.zeros((ROWS,), gl.float32, rows_s)
    acc = gl.zeros((ROWS, BLOCK_DV), gl.float32, layout)

    q = q_tiles.index(WHICH).reshape([ROWS, BLOCK_D])
    s = warpgroup_mma_wait(0, deps=[_multiply_keys(q, shared, step, STAGES)])
    arrive(k_empty.index(step % STAGES))
    start_n = last * BLOCK_N
    p, row_max, row_sum, _ = _softmax(s, row_max, row_sum, start_n, limits, scales, BOUND_LEFT, True)
    p = _pack(p, v_ring.dtype)
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
    acc = warpgroup_mma_wait(0, deps=[_multiply_values(p, acc, shared, step, STAGES)])
    arrive(v_empty.index(step % STAGES))
    skipped = number - (all_last - last) - (1 + right + full + left)
    step, turn = _skip(shared, step + 1, turn, skipped, WHICH, GROUPS, STAGES, TAKE_TURNS)

    if FREE_Q:
        arrive(q_empty.index(WHICH))
    if max_logits_ptr is not None:
        peak = gl.max(gl.where(rows < length_q, row_max * LN_2, -float("inf")), 0)
        first = (batch * problem[0] + head) * problem[4] * GROUPS
        gl.store(max_logits_ptr + first + row0 // ROWS, peak)
    return acc, row_max, row_sum, rows, step, turn


@gluon.jit
def _attend(
    out_desc, out_ptr, lse_ptr, shared, record, problem, num_tiles, q_rows, k_rows, v_rows, scales, sinks_ptr, max_logits_ptr,
    GROUPS: gl.constexpr, STAGES: gl.constexpr, TAKE_TURNS: gl.constexpr, D: gl.constexpr, DV: gl.constexpr,
    BOUND_LEFT: gl.constexpr, BOUND_RIGHT: gl.constexpr, OUT_OVER_Q: gl.constexpr, WHICH: gl.constexpr,
):  # fmt: skip
    """The queries of group WHICH of all of the program's tiles."""
    k_ring, v_ring, out_tile = shared[1], shared[2], shared[3].index(WHICH)
    q_full, q_empty = shared[4].index(WHICH), shared[5].index(WHICH)
    heads_q, seqlen_q, cu_q_ptr = problem[0], problem[2], problem[9]
    BLOCK_N: gl.constexpr = k_ring.shape[3]
    BLOCK_DV: gl.constexpr = v_ring.shape[4]
    rows_s: gl.constexpr = gl.SliceLayout(1, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16]))
    spoiled = gl.zeros((ROWS,), gl.int32, rows_s)
    step = 0
    turn = 0
    done = 0
    place = _recall(record, q_full, done)
    while place[2] >= 0:
        batch, head, start_m, _, _ = place
        lengths = _locate_both(batch, problem)
        first_q, length_q, _, _ = lengths
        acc, row_max, row_sum, rows, step, turn = _attend_tile(
            place, lengths, step, turn, shared, problem, scales, max_logits_ptr,
            WHICH, GROUPS, STAGES, TAKE_TURNS, BOUND_LEFT, BOUND_RIGHT, not OUT_OVER_Q,
        )  # fmt: skip
        acc, row_max, row_sum = _count_sink(acc, row_max, row_sum, sinks_ptr, head)
        # A row without keys has row_max = -inf, row_sum = 0 and acc = 0: its output is 0 and its lse -inf.
        row_sum = gl.where(row_sum == 0.0, 1.0, row_sum)
        lse = (row_max + gl.log2(row_sum)) * LN_2
        layout: gl.constexpr = acc.type.layout
        if BOUND_LEFT or BOUND_RIGHT or cu_q_ptr is not None:
            # 0 · NaN is NaN: a value that isn't finite may have reached rows that don't see it.
            is_spoiled = (gl.convert_layout(_row_sum(acc * 0.0), rows_s) != 0.0) & (rows < length_q)
            lse = gl.where(is_spoiled, float("nan"), lse)
            spoiled = spoiled | is_spoiled.to(gl.int32)
        out = acc * gl.convert_layout(1.0 / row_sum, gl.SliceLayout(1, layout))[:, None]
        row0 = start_m + WHICH * ROWS
        entry = 0 if cu_q_ptr is not None else batch
        first_lse = (gl.cast(entry, gl.int64) * heads_q + head) * seqlen_q + first_q
        gl.store(lse_ptr + first_lse + rows, lse, mask=rows < length_q)
        if cu_q_ptr is None or row0 + ROWS <= length_q:  # the copy engine stops at the tensor's last row
            tma.store_wait(0)
            write(out_tile.reshape([ROWS, BLOCK_DV]), out.to(out_desc.dtype))
            store(out_desc, [entry, head, first_q + row0, 0], out_tile)
            if OUT_OVER_Q:
                tma.store_wait(0)
        elif cu_q_ptr is not None:  # and here another sequence begins
            _store_rows(out_ptr, out, entry, head, first_q, row0, length_q, heads_q, seqlen_q, DV)
        if OUT_OVER_Q:
            arrive(q_empty)
        done += 1
        place = _recall(record, q_full, done)
    tma.store_wait(0)
    if BOUND_LEFT or BOUND_RIGHT or cu_q_ptr is not None:  # noqa: SIM102 (known to the compiler)
        if gl.max(_await_writes(spoiled), 0) != 0:
            barrier()
            for count in range(_rounds(num_tiles)):
                spot = _place(_tile(count), problem, GROUPS * ROWS)
                lengths = _locate_both(spot[0], problem)
                if spot[2] < lengths[1]:
                    _repair(
                        spot, lengths, problem, q_rows, k_rows, v_rows, out_ptr, lse_ptr, sinks_ptr, scales,
                        WHICH, D, DV, k_ring.shape[4], BLOCK_DV, BLOCK_N, BOUND_LEFT, BOUND_RIGHT,
                    )  # fmt: skip


@gluon.jit(do_not_specialize=SIZES)
def forward_kernel(
    q_desc, k_desc, v_desc, out_desc, q_rows, k_rows, v_rows, out_ptr, lse_ptr, max_logits_ptr, sinks_ptr, cu_q_ptr,
    cu_k_ptr, heads_q, group, seqlen_q, seqlen_k, num_m, section, num_heads, window_left, window_right, num_tiles, scale, softcap,
    D: gl.constexpr, DV: gl.constexpr, GROUPS: gl.constexpr, STAGES: gl.constexpr, TAKE_TURNS: gl.constexpr,
    REGISTERS: gl.constexpr, BOUND_LEFT: gl.constexpr, BOUND_RIGHT: gl.constexpr, OUT_OVER_Q: gl.constexpr,
):  # fmt: skip
    BLOCK_N: gl.constexpr = k_desc.block_type.shape[2]
    BLOCK_D: gl.constexpr = k_desc.block_type.shape[3]
    BLOCK_DV: gl.constexpr = v_desc.block_type.shape[3]
    q_tiles = gl.allocate_shared_memory(q_desc.dtype, [GROUPS, 1, 1, ROWS, BLOCK_D], q_desc.layout)
    k_ring = gl.allocate_shared_memory(k_desc.dtype, [STAGES, 1, 1, BLOCK_N, BLOCK_D], k_desc.layout)
    v_ring = gl.allocate_shared_memory(v_desc.dtype, [STAGES, 1, 1, BLOCK_N, BLOCK_DV], v_desc.layout)
    if OUT_OVER_Q:
        out_tiles = q_tiles
    else:
        out_tiles = gl.allocate_shared_memory(out_desc.dtype, [GROUPS, 1, 1, ROWS, BLOCK_DV], out_desc.layout)
    shared = (
        q_tiles, k_ring, v_ring, out_tiles, barriers(GROUPS, 1), barriers(GROUPS, 1), barriers(STAGES, 1),
        barriers(STAGES, GROUPS), barriers(STAGES, 1), barriers(STAGES, GROUPS), barriers(GROUPS, 1),
    )  # fmt: skip
    record = gl.allocate_shared_memory(gl.int32, [5, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    fence_async_shared()
    problem = (
        heads_q, group, seqlen_q, seqlen_k, num_m, section, num_heads, window_left, window_right, cu_q_ptr, cu_k_ptr
    )  # fmt: skip
    unit_scale = (scale if softcap is None else softcap) * LOG2_E
    scales = (unit_scale, None if softcap is None else scale / softcap)
    if GROUPS == 2:
        gl.warp_specialize(
            [
                (_attend, (
                    out_desc, out_ptr, lse_ptr, shared, record, problem, num_tiles, q_rows, k_rows, v_rows, scales,
                    sinks_ptr, max_logits_ptr, GROUPS, STAGES, TAKE_TURNS, D, DV, BOUND_LEFT, BOUND_RIGHT, OUT_OVER_Q, gl.constexpr(0),
                )),
                (_attend, (
                    out_desc, out_ptr, lse_ptr, shared, record, problem, num_tiles, q_rows, k_rows, v_rows, scales,
                    sinks_ptr, max_logits_ptr, GROUPS, STAGES, TAKE_TURNS, D, DV, BOUND_LEFT, BOUND_RIGHT, OUT_OVER_Q, gl.constexpr(1),
                )),
                (_copy, (
                    q_desc, k_desc, v_desc, shared, record, problem, num_tiles, GROUPS, STAGES, BOUND_LEFT, BOUND_RIGHT,
                )),
            ],
            [4, 1],
            [REGISTERS, 24],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (_attend, (
                    out_desc, out_ptr, lse_ptr, shared, record, problem, num_tiles, q_rows, k_rows, v_rows, scales,
                    sinks_ptr, max_logits_ptr, GROUPS, STAGES, TAKE_TURNS, D, DV, BOUND_LEFT, BOUND_RIGHT, OUT_OVER_Q, gl.constexpr(0),
                )),
                (_attend, (
                    out_desc, out_ptr, lse_ptr, shared, record, problem, num_tiles, q_rows, k_rows, v_rows, scales,
                    sinks_ptr, max_logits_ptr, GROUPS, STAGES, TAKE_TURNS, D, DV, BOUND_LEFT, BOUND_RIGHT, OUT_OVER_Q, gl.constexpr(1),
                )),
                (_attend, (
                    out_desc, out_ptr, lse_ptr, shared, record, problem, num_tiles, q_rows, k_rows, v_rows, scales,
                    sinks_ptr, max_logits_ptr, GROUPS, STAGES, TAKE_TURNS, D, DV, BOUND_LEFT, BOUND_RIGHT, OUT_OVER_Q, gl.constexpr(2),
                )),
                (_copy, (
                    q_desc, k_desc, v_desc, shared, record, problem, num_tiles, GROUPS, STAGES, BOUND_LEFT, BOUND_RIGHT,
                )),
            ],
            [4, 4, 1],
            [REGISTERS, REGISTERS, 24],
        )  # fmt: skip


def _section(num_heads: int, group: int, bytes_of_keys: int) -> int:
    """How many heads go together, so that their keys and values stay in L2: an even number of equal sections, or one."""
    fitting = max(1, L2_SHARE // bytes_of_keys) * group
    number = triton.cdiv(num_heads, fitting)
    return triton.cdiv(num_heads, number + number % 2 if number > 1 else 1)


def forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: Options, with_max_logits: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """out, lse and max_logits, for what `attention.backends.why_not_hopper` has nothing against."""
    packed = options.cu_seqlens_q is not None
    *batch, seqlen_q, heads_q, head_dim = q.shape
    seqlen_k, heads_k, head_dim_v = v.shape[-3:]
    allocate = torch.zeros if packed else torch.empty  # nobody writes the rows past the last sequence
    out = allocate((*batch, seqlen_q, heads_q, head_dim_v), dtype=q.dtype, device=q.device)
    lse = torch.empty((*batch, heads_q, seqlen_q), dtype=torch.float32, device=q.device)
    longest, entries = seqlen_q, q.shape[0]
    result = out
    if packed:
        assert options.cu_seqlens_q is not None and options.cu_seqlens_k is not None
        longest, entries = options.max_seqlen_q, options.cu_seqlens_q.shape[0] - 1
        lse.fill_(-torch.inf)
        q, k, v, out = q[None], k[None], v[None], out[None]
    block_d, block_dv = (max(64, width) for width in padded_widths(head_dim, head_dim_v))
    tile = TILES[max(block_d, block_dv)]
    num_m = triton.cdiv(longest, tile.groups * int(ROWS.value))
    num_heads = entries * heads_q
    peaks = None
    if with_max_logits:
        shape = (entries, heads_q, num_m * tile.groups)
        peaks = lse.new_full(shape, -torch.inf) if packed else lse.new_empty(shape)
    scale = options.scale
    if scale <= 0:  # the kernel takes the maximum of the logits before it scales them, and 0 · -inf is NaN
        q, scale = (-q, -scale) if scale < 0 else (q * 0, 1.0)
    q, k, v = loadable(q), loadable(k), loadable(v)
    with on_device_of(q):
        forward_kernel[(min(num_m * num_heads, processors(q.device)),)](
            describe(q, int(ROWS.value), block_d), describe(k, tile.block_n, block_d),
            describe(v, tile.block_n, block_dv), describe(out, int(ROWS.value), block_dv),
            pointer(q), pointer(k), pointer(v), out, lse, peaks,
            None if options.sinks is None else options.sinks.contiguous(),
            None if options.cu_seqlens_q is None else options.cu_seqlens_q.contiguous(),
            None if options.cu_seqlens_k is None else options.cu_seqlens_k.contiguous(),
            heads_q, heads_q // heads_k, seqlen_q, seqlen_k, num_m,
            _section(num_heads, heads_q // heads_k, 2 * seqlen_k * (head_dim + head_dim_v)), num_heads,
            options.window_left or 0, options.window_right or 0, num_m * num_heads, scale, options.softcap,
            D=head_dim, DV=head_dim_v, GROUPS=tile.groups, STAGES=tile.stages, TAKE_TURNS=tile.take_turns,
            REGISTERS=tile.registers, BOUND_LEFT=options.window_left is not None,
            BOUND_RIGHT=options.window_right is not None, OUT_OVER_Q=min(block_d, block_dv) == 256, num_warps=4,
        )  # fmt: skip
    return result, lse, lse.new_empty(0) if peaks is None else peaks.amax((0, 2))
