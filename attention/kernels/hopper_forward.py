"""FlashAttention forward for Hopper in Gluon: warp-specialised, persistent (arXiv:2407.08608).

A program has several roles. One warp copies tiles of queries, keys and values into rings in shared memory. Each of
GROUPS groups of four warps owns 64 queries. A group issues the scores of the next tile of keys and, before it waits for
them, the product of the last tile's probabilities with its values; the softmax runs while the tensor cores still
multiply. The groups take turns at issuing (ping-pong), so that one's softmax is hidden behind the others' products.

The portable twin is ``forward.py``; the torch twin is ``attention.reference.tiled_forward``.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from .common import LN_2, LOG2_E, key_tiles, locate

# Names that Triton 3.6 has otherwise than its successors.
load = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
store = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global
barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier

ROWS = gl.constexpr(64)  # queries of a group of four warps


@gluon.jit
def _turn(count):
    """The number of this program's tile in round `count`: every second round goes backwards, which evens out a list
    whose work decreases."""
    programs = gl.num_programs(0)
    pid = gl.program_id(0)
    return count * programs + (programs - 1 - pid if count & 1 else pid)


@gluon.jit
def _place(t, sizes, cu_q_ptr, cu_k_ptr, BLOCK_M: gl.constexpr):
    """Which queries tile t is of. The heads of a section, whose keys and values fit into L2, go together.

    Under a causal mask the last queries see the most. They go first in every second section, the last one included,
    and last in the others, so that no program gets the longer tiles of every section.
    """
    heads_q, group, seqlen_q, seqlen_k, num_m, section, num_heads = sizes
    number = t // (section * num_m)
    first_head = number * section
    heads = gl.minimum(section, num_heads - first_head)
    rest = t - first_head * num_m
    m = rest // heads
    is_descending = (gl.cdiv(num_heads, section) - number) & 1
    start_m = (num_m - 1 - m if is_descending else m) * BLOCK_M
    batch_head = first_head + rest % heads
    batch = batch_head // heads_q
    head = batch_head % heads_q
    first_q, length_q = locate(cu_q_ptr, batch, seqlen_q)
    first_k, length_k = locate(cu_k_ptr, batch, seqlen_k)
    entry = 0 if cu_q_ptr is not None else batch
    return entry, batch, head, head // group, start_m, first_q, length_q, first_k, length_k


@gluon.jit
def _walk(start_m, length_q, length_k, window, limit, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr,
          BOUND_LEFT: gl.constexpr, BOUND_RIGHT: gl.constexpr):  # fmt: skip
    """The tile of keys to begin with, at most `limit`, and how many follow to its left: masked, seen by all these
    queries, masked again. Queries without keys get one tile, all of it masked."""
    window_left, window_right = window
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
def _copy(
    q_desc, k_desc, v_desc, q_tiles, k_ring, v_ring, q_full, q_empty, k_full, k_empty, v_full, v_empty,
    sizes, window, num_tiles, cu_q_ptr, cu_k_ptr,
    GROUPS: gl.constexpr, STAGES: gl.constexpr, BOUND_LEFT: gl.constexpr, BOUND_RIGHT: gl.constexpr,
):  # fmt: skip
    BLOCK_M: gl.constexpr = GROUPS * ROWS
    BLOCK_N: gl.constexpr = k_desc.block_type.shape[2]
    step = 0
    done = 0
    for count in range(gl.cdiv(num_tiles, gl.num_programs(0))):
        t = _turn(count)
        if t < num_tiles:
            entry, batch, head, head_k, start_m, first_q, length_q, first_k, length_k = _place(
                t, sizes, cu_q_ptr, cu_k_ptr, BLOCK_M
            )
            if start_m < length_q:
                last, right, full, left = _walk(
                    start_m, length_q, length_k, window, 2**24, BLOCK_M, BLOCK_N, BOUND_LEFT, BOUND_RIGHT
                )
                for g in gl.static_range(GROUPS):
                    mbarrier.wait(q_empty.index(g), (done & 1) ^ 1)
                    mbarrier.expect(q_full.index(g), q_desc.block_type.nbytes)
                    load(q_desc, [entry, head, first_q + start_m + g * ROWS, 0], q_full.index(g), q_tiles.index(g))
                for i in range(1 + right + full + left):
                    stage = step % STAGES
                    parity = (step // STAGES & 1) ^ 1
                    place = [entry, head_k, first_k + (last - i) * BLOCK_N, 0]
                    mbarrier.wait(k_empty.index(stage), parity)
                    mbarrier.expect(k_full.index(stage), k_desc.block_type.nbytes)
                    load(k_desc, place, k_full.index(stage), k_ring.index(stage))
                    mbarrier.wait(v_empty.index(stage), parity)
                    mbarrier.expect(v_full.index(stage), v_desc.block_type.nbytes)
                    load(v_desc, place, v_full.index(stage), v_ring.index(stage))
                    step += 1
                done += 1


@gluon.jit
def _hide_if_greater(s, a, b):
    """-inf where a > b. In one piece of assembler, since the compiler would do all comparisons ahead of all selections
    and, short of predicates, pack and unpack them, which doubles the work of a masked tile."""
    return gl.inline_asm_elementwise(
        "{ .reg .pred p; setp.gt.s32 p, $2, $3; selp.f32 $0, 0fFF800000, $1, p; }", "=f,f,r,r", [s, a, b],
        dtype=gl.float32, is_pure=True, pack=1,
    )  # fmt: skip


@gluon.jit
def _softmax(s, row_max, row_sum, rows, start_n, limits, scale, tanh_scale, BOUND_LEFT: gl.constexpr,
             MASKED: gl.constexpr):  # fmt: skip
    """Probabilities to this tile's maximum so far, that maximum and sum, and by how much what came before shrinks."""
    layout: gl.constexpr = s.type.layout
    if tanh_scale is not None:
        s = 1.0 - 2.0 / (gl.exp2(s * (tanh_scale * (2.0 * LOG2_E))) + 1.0)
    if MASKED:
        left, right = limits
        keys = start_n + gl.arange(0, s.type.shape[1], gl.SliceLayout(0, layout))
        s = _hide_if_greater(s, keys[None, :], right[:, None])
        if BOUND_LEFT:
            s = _hide_if_greater(s, left[:, None], keys[None, :])
    new_max = gl.maximum(row_max, gl.max(s, 1) * scale)
    anchor = gl.where(new_max == -float("inf"), 0.0, new_max) if MASKED else new_max
    p = gl.exp2(s * scale - anchor[:, None])
    rescale = gl.exp2(row_max - anchor)
    return p, new_max, row_sum * rescale + gl.sum(p, 1), rescale


@gluon.jit
def _skip(step, count, turn_count, k_full, k_empty, v_full, v_empty, turns, WHICH: gl.constexpr, GROUPS: gl.constexpr,
          STAGES: gl.constexpr, PINGPONG: gl.constexpr):  # fmt: skip
    """Pass over tiles of keys that none of this group's queries sees, but another group's do."""
    for i in range(count):
        stage = (step + i) % STAGES
        parity = (step + i) // STAGES & 1
        if PINGPONG:
            mbarrier.wait(turns.index(WHICH), (turn_count + i & 1) ^ (1 if WHICH == 0 else 0))
            barrier()
            mbarrier.arrive(turns.index((WHICH + 1) % GROUPS))
        mbarrier.wait(k_full.index(stage), parity)
        mbarrier.wait(v_full.index(stage), parity)
        barrier()
        mbarrier.arrive(k_empty.index(stage))
        mbarrier.arrive(v_empty.index(stage))


@gluon.jit
def write(matrix, values):
    """Values to shared memory, once nobody reads it any more, and visible to the copy engine."""
    barrier()
    matrix.store(values)
    fence_async_shared()
    barrier()


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
def _step(
    p, acc, row_max, row_sum, q, k_ring, v_ring, k_full, k_empty, v_full, v_empty, turns, step, turn_count, rows,
    start_n, limits, scale, tanh_scale,
    WHICH: gl.constexpr, GROUPS: gl.constexpr, STAGES: gl.constexpr, BOUND_LEFT: gl.constexpr, MASKED: gl.constexpr,
    PINGPONG: gl.constexpr,
):  # fmt: skip
    """The scores and the softmax of tile `step` of keys, and the values of the tile before it."""
    stage = step % STAGES
    stage_v = (step - 1) % STAGES
    layout_o: gl.constexpr = acc.type.layout
    BLOCK_N: gl.constexpr = k_ring.shape[3]
    mbarrier.wait(k_full.index(stage), step // STAGES & 1)
    if PINGPONG:
        mbarrier.wait(turns.index(WHICH), (turn_count & 1) ^ (1 if WHICH == 0 else 0))
    k = k_ring.index(stage).reshape([BLOCK_N, k_ring.shape[4]])
    zeros = gl.zeros((ROWS, BLOCK_N), gl.float32, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16]))
    s = warpgroup_mma(q, k.permute((1, 0)), zeros, use_acc=False, is_async=True)
    mbarrier.wait(v_full.index(stage_v), (step - 1) // STAGES & 1)
    p_now = _unpack(p, v_ring.dtype, gl.DotOperandLayout(0, layout_o, 2))
    acc = warpgroup_mma(p_now, v_ring.index(stage_v).reshape([BLOCK_N, v_ring.shape[4]]), acc, is_async=True)
    if PINGPONG:
        barrier()
        mbarrier.arrive(turns.index((WHICH + 1) % GROUPS))
    s = warpgroup_mma_wait(1, deps=[s])
    barrier()
    mbarrier.arrive(k_empty.index(stage))
    new_p, row_max, row_sum, rescale = _softmax(s, row_max, row_sum, rows, start_n, limits, scale, tanh_scale, BOUND_LEFT, MASKED)
    acc = warpgroup_mma_wait(0, deps=[acc])
    barrier()
    mbarrier.arrive(v_empty.index(stage_v))
    acc = acc * gl.convert_layout(rescale, gl.SliceLayout(1, layout_o))[:, None]
    return _pack(new_p, v_ring.dtype), acc, row_max, row_sum


@gluon.jit
def _attend(
    out_desc, q_tiles, k_ring, v_ring, out_tile, q_full, q_empty, k_full, k_empty, v_full, v_empty, turns,
    out_ptr, lse_ptr, max_logits_ptr, sinks_ptr, sizes, window, num_tiles, cu_q_ptr, cu_k_ptr, scale, softcap,
    WHICH: gl.constexpr, GROUPS: gl.constexpr, STAGES: gl.constexpr, DV: gl.constexpr,
    BOUND_LEFT: gl.constexpr, BOUND_RIGHT: gl.constexpr, PINGPONG: gl.constexpr, SHARE_OUT: gl.constexpr,
):  # fmt: skip
    """The queries of group WHICH of each of the program's tiles."""
    BLOCK_M: gl.constexpr = GROUPS * ROWS
    BLOCK_N: gl.constexpr = k_ring.shape[3]
    BLOCK_D: gl.constexpr = k_ring.shape[4]
    BLOCK_DV: gl.constexpr = v_ring.shape[4]
    layout_s: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    layout_o: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_DV, 16])
    layout_p: gl.constexpr = gl.DotOperandLayout(0, layout_o, 2)
    heads_q, group, seqlen_q, seqlen_k, num_m, section, num_heads = sizes
    window_left, window_right = window
    unit_scale = (scale if softcap is None else softcap) * LOG2_E
    tanh_scale = None if softcap is None else scale / softcap
    q = q_tiles.index(WHICH).reshape([ROWS, BLOCK_D])
    step = 0
    done = 0
    turn_count = 0
    for count in range(gl.cdiv(num_tiles, gl.num_programs(0))):
        t = _turn(count)
        if t < num_tiles:
            entry, batch, head, head_k, start_m, first_q, length_q, first_k, length_k = _place(
                t, sizes, cu_q_ptr, cu_k_ptr, BLOCK_M
            )
            if start_m < length_q:
                all_last, all_right, all_full, all_left = _walk(
                    start_m, length_q, length_k, window, 2**24, BLOCK_M, BLOCK_N, BOUND_LEFT, BOUND_RIGHT
                )
                row0 = start_m + WHICH * ROWS
                last, right, full, left = _walk(
                    row0, length_q, length_k, window, all_last, ROWS, BLOCK_N, BOUND_LEFT, BOUND_RIGHT
                )
                skipped = all_last - last
                _skip(step, skipped, turn_count, k_full, k_empty, v_full, v_empty, turns, WHICH, GROUPS, STAGES, PINGPONG)
                step += skipped
                turn_count += skipped
                start_n = last * BLOCK_N
                rows = row0 + gl.arange(0, ROWS, gl.SliceLayout(1, layout_s))
                limit_right = gl.full((ROWS,), length_k - 1, gl.int32, gl.SliceLayout(1, layout_s))
                if BOUND_RIGHT:
                    limit_right = gl.minimum(limit_right, rows + (length_k - length_q + window_right))
                limits = (rows + (length_k - length_q - window_left), limit_right)
                row_max = gl.full((ROWS,), -float("inf"), gl.float32, gl.SliceLayout(1, layout_s))
                row_sum = gl.zeros((ROWS,), gl.float32, gl.SliceLayout(1, layout_s))
                acc = gl.zeros((ROWS, BLOCK_DV), gl.float32, layout_o)

                mbarrier.wait(q_full.index(WHICH), done & 1)
                stage = step % STAGES
                mbarrier.wait(k_full.index(stage), step // STAGES & 1)
                k = k_ring.index(stage).reshape([BLOCK_N, BLOCK_D])
                s = warpgroup_mma(
                    q, k.permute((1, 0)), gl.zeros((ROWS, BLOCK_N), gl.float32, layout_s), use_acc=False, is_async=True
                )
                s = warpgroup_mma_wait(0, deps=[s])
                barrier()
                mbarrier.arrive(k_empty.index(stage))
                p, row_max, row_sum, rescale = _softmax(
                    s, row_max, row_sum, rows, start_n, limits, unit_scale, tanh_scale, BOUND_LEFT, True
                )
                p = _pack(p, v_ring.dtype)
                for _ in range(right):
                    step += 1
                    start_n -= BLOCK_N
                    p, acc, row_max, row_sum = _step(
                        p, acc, row_max, row_sum, q, k_ring, v_ring, k_full, k_empty, v_full, v_empty, turns, step,
                        turn_count, rows, start_n, limits, unit_scale, tanh_scale, WHICH, GROUPS, STAGES, BOUND_LEFT, True,
                        PINGPONG,
                    )  # fmt: skip
                    turn_count += 1
                for _ in range(full):
                    step += 1
                    start_n -= BLOCK_N
                    p, acc, row_max, row_sum = _step(
                        p, acc, row_max, row_sum, q, k_ring, v_ring, k_full, k_empty, v_full, v_empty, turns, step,
                        turn_count, rows, start_n, limits, unit_scale, tanh_scale, WHICH, GROUPS, STAGES, BOUND_LEFT, False,
                        PINGPONG,
                    )  # fmt: skip
                    turn_count += 1
                if BOUND_LEFT:
                    for _ in range(left):
                        step += 1
                        start_n -= BLOCK_N
                        p, acc, row_max, row_sum = _step(
                            p, acc, row_max, row_sum, q, k_ring, v_ring, k_full, k_empty, v_full, v_empty, turns, step,
                            turn_count, rows, start_n, limits, unit_scale, tanh_scale, WHICH, GROUPS, STAGES, BOUND_LEFT, True,
                            PINGPONG,
                        )  # fmt: skip
                        turn_count += 1
                if not SHARE_OUT:
                    barrier()
                    mbarrier.arrive(q_empty.index(WHICH))
                stage = step % STAGES
                mbarrier.wait(v_full.index(stage), step // STAGES & 1)
                p_now = _unpack(p, v_ring.dtype, layout_p)
                acc = warpgroup_mma(p_now, v_ring.index(stage).reshape([BLOCK_N, BLOCK_DV]), acc, is_async=True)
                acc = warpgroup_mma_wait(0, deps=[acc])
                barrier()
                mbarrier.arrive(v_empty.index(stage))
                step += 1
                done += 1
                skipped = all_right + all_full + all_left - skipped - right - full - left
                _skip(step, skipped, turn_count, k_full, k_empty, v_full, v_empty, turns, WHICH, GROUPS, STAGES, PINGPONG)
                step += skipped
                turn_count += skipped

                if max_logits_ptr is not None:
                    top = gl.where(rows < length_q, row_max * LN_2, -float("inf"))
                    gl.atomic_max(max_logits_ptr + head, gl.max(top, 0))
                if sinks_ptr is not None:
                    sink = gl.load(sinks_ptr + head) * LOG2_E
                    new_max = gl.maximum(row_max, sink)
                    anchor = gl.where(new_max == -float("inf"), 0.0, new_max)
                    rescale = gl.exp2(row_max - anchor)
                    acc = acc * gl.convert_layout(rescale, gl.SliceLayout(1, layout_o))[:, None]
                    row_sum = row_sum * rescale + gl.exp2(sink - anchor)
                    row_max = new_max
                row_sum = gl.where(row_sum == 0.0, 1.0, row_sum)
                out = acc * gl.convert_layout(1.0 / row_sum, gl.SliceLayout(1, layout_o))[:, None]
                lse = (row_max + gl.log2(row_sum)) * LN_2
                head_lse = gl.cast(head, gl.int64) if cu_q_ptr is not None else gl.cast(batch, gl.int64) * heads_q + head
                gl.store(lse_ptr + head_lse * seqlen_q + first_q + rows, lse, mask=rows < length_q)
                if cu_q_ptr is None or row0 + ROWS <= length_q:  # the copy engine stops at the tensor's last row
                    tma.store_wait(0)
                    write(out_tile.reshape([ROWS, BLOCK_DV]), out.to(out_desc.dtype))
                    store(out_desc, [entry, head, first_q + row0, 0], out_tile)
                    if SHARE_OUT:
                        tma.store_wait(0)
                elif cu_q_ptr is not None:  # and here the next sequence begins
                    offs_m = row0 + gl.arange(0, ROWS, gl.SliceLayout(1, layout_o))
                    offs_d = gl.arange(0, BLOCK_DV, gl.SliceLayout(0, layout_o))
                    base = out_ptr + (gl.cast(first_q, gl.int64) * heads_q + head) * DV
                    ptrs = base + offs_m[:, None].to(gl.int64) * (heads_q * DV) + offs_d[None, :]
                    mask = (offs_m[:, None] < length_q) & (offs_d[None, :] < DV)
                    gl.store(ptrs, out.to(out_desc.dtype), mask=mask)
                if SHARE_OUT:
                    barrier()
                    mbarrier.arrive(q_empty.index(WHICH))
    tma.store_wait(0)


SIZES = ["heads_q", "group", "seqlen_q", "seqlen_k", "num_m", "section", "num_heads", "window_left", "window_right",
         "num_tiles"]  # fmt: skip


@gluon.jit(do_not_specialize=SIZES)
def forward_kernel(
    q_desc, k_desc, v_desc, out_desc, out_ptr, lse_ptr, max_logits_ptr, sinks_ptr, cu_q_ptr, cu_k_ptr,
    heads_q, group, seqlen_q, seqlen_k, num_m, section, num_heads, window_left, window_right, num_tiles, scale, softcap,
    GROUPS: gl.constexpr, STAGES: gl.constexpr, DV: gl.constexpr, BOUND_LEFT: gl.constexpr, BOUND_RIGHT: gl.constexpr,
    PINGPONG: gl.constexpr, SHARE_OUT: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    BLOCK_N: gl.constexpr = k_desc.block_type.shape[2]
    BLOCK_D: gl.constexpr = k_desc.block_type.shape[3]
    BLOCK_DV: gl.constexpr = v_desc.block_type.shape[3]
    q_tiles = gl.allocate_shared_memory(q_desc.dtype, [GROUPS, 1, 1, ROWS, BLOCK_D], q_desc.layout)
    k_ring = gl.allocate_shared_memory(k_desc.dtype, [STAGES, 1, 1, BLOCK_N, BLOCK_D], k_desc.layout)
    v_ring = gl.allocate_shared_memory(v_desc.dtype, [STAGES, 1, 1, BLOCK_N, BLOCK_DV], v_desc.layout)
    if SHARE_OUT:
        out_tiles = q_tiles
    else:
        out_tiles = gl.allocate_shared_memory(out_desc.dtype, [GROUPS, 1, 1, ROWS, BLOCK_DV], out_desc.layout)
    q_full = gl.allocate_shared_memory(gl.int64, [GROUPS, 1], mbarrier.MBarrierLayout())
    q_empty = gl.allocate_shared_memory(gl.int64, [GROUPS, 1], mbarrier.MBarrierLayout())
    turns = gl.allocate_shared_memory(gl.int64, [GROUPS, 1], mbarrier.MBarrierLayout())
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for g in gl.static_range(GROUPS):
        mbarrier.init(q_full.index(g), count=1)
        mbarrier.init(q_empty.index(g), count=1)
        mbarrier.init(turns.index(g), count=1)
    for stage in gl.static_range(STAGES):
        mbarrier.init(k_full.index(stage), count=1)
        mbarrier.init(k_empty.index(stage), count=GROUPS)
        mbarrier.init(v_full.index(stage), count=1)
        mbarrier.init(v_empty.index(stage), count=GROUPS)
    fence_async_shared()
    sizes = (heads_q, group, seqlen_q, seqlen_k, num_m, section, num_heads)
    window = (window_left, window_right)
    if GROUPS == 2:
        gl.warp_specialize(
            [
                (_attend, (
                    out_desc, q_tiles, k_ring, v_ring, out_tiles.index(0), q_full, q_empty, k_full, k_empty, v_full,
                    v_empty, turns, out_ptr, lse_ptr, max_logits_ptr, sinks_ptr, sizes, window, num_tiles, cu_q_ptr,
                    cu_k_ptr, scale, softcap, gl.constexpr(0), GROUPS, STAGES, DV, BOUND_LEFT, BOUND_RIGHT, PINGPONG,
                    SHARE_OUT,
                )),
                (_attend, (
                    out_desc, q_tiles, k_ring, v_ring, out_tiles.index(1), q_full, q_empty, k_full, k_empty, v_full,
                    v_empty, turns, out_ptr, lse_ptr, max_logits_ptr, sinks_ptr, sizes, window, num_tiles, cu_q_ptr,
                    cu_k_ptr, scale, softcap, gl.constexpr(1), GROUPS, STAGES, DV, BOUND_LEFT, BOUND_RIGHT, PINGPONG,
                    SHARE_OUT,
                )),
                (_copy, (
                    q_desc, k_desc, v_desc, q_tiles, k_ring, v_ring, q_full, q_empty, k_full, k_empty, v_full, v_empty,
                    sizes, window, num_tiles, cu_q_ptr, cu_k_ptr, GROUPS, STAGES, BOUND_LEFT, BOUND_RIGHT,
                )),
            ],
            [4, 1],
            [REGISTERS, 24],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (_attend, (
                    out_desc, q_tiles, k_ring, v_ring, out_tiles.index(0), q_full, q_empty, k_full, k_empty, v_full,
                    v_empty, turns, out_ptr, lse_ptr, max_logits_ptr, sinks_ptr, sizes, window, num_tiles, cu_q_ptr,
                    cu_k_ptr, scale, softcap, gl.constexpr(0), GROUPS, STAGES, DV, BOUND_LEFT, BOUND_RIGHT, PINGPONG,
                    SHARE_OUT,
                )),
                (_attend, (
                    out_desc, q_tiles, k_ring, v_ring, out_tiles.index(1), q_full, q_empty, k_full, k_empty, v_full,
                    v_empty, turns, out_ptr, lse_ptr, max_logits_ptr, sinks_ptr, sizes, window, num_tiles, cu_q_ptr,
                    cu_k_ptr, scale, softcap, gl.constexpr(1), GROUPS, STAGES, DV, BOUND_LEFT, BOUND_RIGHT, PINGPONG,
                    SHARE_OUT,
                )),
                (_attend, (
                    out_desc, q_tiles, k_ring, v_ring, out_tiles.index(2), q_full, q_empty, k_full, k_empty, v_full,
                    v_empty, turns, out_ptr, lse_ptr, max_logits_ptr, sinks_ptr, sizes, window, num_tiles, cu_q_ptr,
                    cu_k_ptr, scale, softcap, gl.constexpr(2), GROUPS, STAGES, DV, BOUND_LEFT, BOUND_RIGHT, PINGPONG,
                    SHARE_OUT,
                )),
                (_copy, (
                    q_desc, k_desc, v_desc, q_tiles, k_ring, v_ring, q_full, q_empty, k_full, k_empty, v_full, v_empty,
                    sizes, window, num_tiles, cu_q_ptr, cu_k_ptr, GROUPS, STAGES, BOUND_LEFT, BOUND_RIGHT,
                )),
            ],
            [4, 4, 1],
            [REGISTERS, REGISTERS, 24],
        )  # fmt: skip
