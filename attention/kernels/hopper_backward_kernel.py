"""FlashAttention's backward for Hopper in Gluon: warp-specialised, one pass over the keys with five products.

A program owns a tile of keys. One warp copies tiles of queries and of their gradient into rings in shared memory; two
groups of four warps compute, for the tile of queries at hand (arXiv:2407.08608, and `backward` for the formulas),
    Pᵀ = exp(scale k qᵀ - lse),   dPᵀ = v dOᵀ,   dSᵀ = Pᵀ ∘ (dPᵀ - delta),
    dv += Pᵀ dO,   dk += dSᵀ q,   dq += dS k.
Transposed, Pᵀ and dSᵀ come out in the registers from which the next products read them. The next tile's scores are
multiplied while this one's exponentials, its gradient of scores and its share of dq are on their way. Shares of dq are
added up in memory in fp32, in the order in which the threads hold them, and put in order by a last kernel.

Packed sequences are dealt out by their tiles of keys, of which the first kernel makes a list.

`hopper_backward` launches it, between the kernels of `hopper_backward_ends`.
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

from .common import LOG2_E
from .hopper_backward_schedule import count_steps, locate_tile, note_tile, noted_tile, take_tile
from .hopper_common import await_previous, barrier, barriers, load, store
from .hopper_schedule import count_rounds, tile_of_round

SIZES = [
    "heads_k", "group", "seqlen_q", "seqlen_k", "shift_left", "shift_right", "tiles_q", "tiles_k", "section", "heads",
]  # fmt: skip


@gluon.jit
def _copy_tile(
    t, count, step, q_desc, k_desc, v_desc, do_desc, lse_desc, delta_desc, shared, signals, problem, tasks,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, BOUND_LEFT: gl.constexpr,
    BOUND_RIGHT: gl.constexpr,
):  # fmt: skip
    """Copies what tile t needs; returns the number of steps so far and, of packed sequences, the next tile."""
    q_ring, do_ring, lse_ring, delta_ring, k_tile, v_tile, _, _, _ = shared
    kv_full, kv_empty, q_full, do_full, empty = signals
    heads_k, group, _, _, _, _, _, _, _, _ = problem
    tasks_ptr, record = tasks
    batch, head, start_n, first_q, first_k, first_tile, sequence = locate_tile(t, problem, tasks_ptr, BLOCK_N)
    begin, tiles, _, _ = count_steps(start_n, sequence, BLOCK_M, BLOCK_N, BOUND_LEFT, BOUND_RIGHT)
    following = t
    for i in range(group * tiles):
        if tasks_ptr is not None:  # noqa: SIM102 (known to the compiler)
            if i == group * tiles - 1:
                following = take_tile(tasks_ptr)
        head_q = head * group + i // tiles
        start_m = (begin + i % tiles) * BLOCK_M
        q_place = [batch, head_q, first_q + start_m, 0]
        row_place = [batch * heads_k * group + head_q, first_tile * BLOCK_M + start_m]
        stage = step % STAGES
        mbarrier.wait(empty.index(stage), (step // STAGES & 1) ^ 1)
        mbarrier.expect(q_full.index(stage), q_desc.block_type.nbytes + lse_desc.block_type.nbytes)
        load(q_desc, q_place, q_full.index(stage), q_ring.index(stage))
        load(lse_desc, row_place, q_full.index(stage), lse_ring.index(stage))
        if i == 0:
            mbarrier.wait(kv_empty, (count & 1) ^ 1)
            if tasks_ptr is not None:
                note_tile(record, count, t)
            mbarrier.expect(kv_full, k_desc.block_type.nbytes + v_desc.block_type.nbytes)
            load(k_desc, [batch, head, first_k + start_n, 0], kv_full, k_tile.index(0))
            load(v_desc, [batch, head, first_k + start_n, 0], kv_full, v_tile.index(0))
        mbarrier.expect(do_full.index(stage), do_desc.block_type.nbytes + delta_desc.block_type.nbytes)
        load(do_desc, q_place, do_full.index(stage), do_ring.index(stage))
        load(delta_desc, row_place, do_full.index(stage), delta_ring.index(stage))
        step += 1
    return step, following


@gluon.jit
def _copy(
    q_desc, k_desc, v_desc, do_desc, lse_desc, delta_desc, shared, signals, problem, tasks,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, BOUND_LEFT: gl.constexpr,
    BOUND_RIGHT: gl.constexpr,
):  # fmt: skip
    """The copying role. Tiles are dealt out beforehand, packed ones while it works: their lengths would be uneven."""
    q_ring = shared[0]
    kv_full, kv_empty, q_full, _, empty = signals
    _, _, seqlen_q, _, _, _, _, tiles_k, _, heads = problem
    tasks_ptr, record = tasks
    step = 0
    count = 0
    if tasks_ptr is None:
        for number in range(count_rounds(heads * tiles_k, gl.program_id(0), gl.num_programs(0))):
            step, _ = _copy_tile(
                tile_of_round(number, gl.program_id(0), gl.num_programs(0)), number, step,
                q_desc, k_desc, v_desc, do_desc, lse_desc, delta_desc, shared, signals, problem, tasks,
                BLOCK_M, BLOCK_N, STAGES, BOUND_LEFT, BOUND_RIGHT,
            )  # fmt: skip
    else:
        t = take_tile(tasks_ptr)
        while t < heads * tiles_k:
            step, t = _copy_tile(
                t, count, step, q_desc, k_desc, v_desc, do_desc, lse_desc, delta_desc, shared, signals, problem, tasks,
                BLOCK_M, BLOCK_N, STAGES, BOUND_LEFT, BOUND_RIGHT,
            )  # fmt: skip
            count += 1
    # The scores after the last are multiplied too, of zeros. A program without any must not leave a copy behind.
    if tasks_ptr is None or step > 0:
        stage = step % STAGES
        mbarrier.wait(empty.index(stage), (step // STAGES & 1) ^ 1)
        mbarrier.expect(q_full.index(stage), q_desc.block_type.nbytes)
        load(q_desc, [0, 0, seqlen_q, 0], q_full.index(stage), q_ring.index(stage))
    if tasks_ptr is not None:  # only now, since the last tile ends with these scores
        mbarrier.wait(kv_empty, (count & 1) ^ 1)
        note_tile(record, count, -1)
        mbarrier.arrive(kv_full)


@gluon.jit
def _hidden(x):
    """x, of which the compiler no longer knows where it is from."""
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _add_dq(dq_ptr, place, dq, BLOCK_M: gl.constexpr, D: gl.constexpr):
    """Adds dq (BLOCK_M, D) to a tile in memory, whose order makes of a thread's registers groups of 16 bytes."""
    address = (dq_ptr + place.to(gl.int64) * (BLOCK_M * D)).to(gl.int64, bitcast=True)
    # Hides the sum, of which the compiler would keep eight variants with invariant terms in registers.
    address = gl.inline_asm_elementwise("mov.b64 $0, $1;", "=l,l", [address], dtype=gl.int64, is_pure=True, pack=1)
    dq_ptr = gl.multiple_of(address.to(dq_ptr.dtype, bitcast=True), 16)
    # Rows: warp, half, lane; columns: register, lane, pair.
    parts = dq.reshape([BLOCK_M // 16, 2, 8, D // 8, 4, 2]).permute((0, 3, 2, 4, 1, 5))
    flat = parts.reshape([BLOCK_M * D])
    offs = gl.arange(0, BLOCK_M * D, layout=flat.type.layout)
    gl.atomic_add(dq_ptr + offs, flat, sem="relaxed")


@gluon.jit
def _zero_if_less(p, a, b):
    """p, but 0 where a < b. In one piece of assembler, since the compiler would do all comparisons ahead of all
    selections and, short of predicates, pack and unpack them, which doubles the work of a masked tile."""
    return gl.inline_asm_elementwise(
        "{ .reg .pred p; setp.lt.s32 p, $2, $3; selp.f32 $0, 0f00000000, $1, p; }", "=f,f,r,r", [p, a, b],
        dtype=gl.float32, is_pure=True, pack=1,
    )  # fmt: skip


@gluon.jit
def _without_hidden(p, start_m, start_n, problem, BOUND_LEFT: gl.constexpr, BOUND_RIGHT: gl.constexpr):
    """p (BLOCK_N, BLOCK_M), but 0 where a query doesn't see a key."""
    _, _, _, seqlen_k, shift_left, shift_right, _, _, _, _ = problem
    layout: gl.constexpr = p.type.layout
    offs_n = start_n + gl.arange(0, p.shape[0], gl.SliceLayout(1, layout))
    offs_m = start_m + gl.arange(0, p.shape[1], gl.SliceLayout(0, layout))[None, :]
    first = gl.where(offs_n < seqlen_k, offs_n - shift_right if BOUND_RIGHT else 0, 2**30)
    p = _zero_if_less(p, offs_m, first[:, None])
    if BOUND_LEFT:
        p = _zero_if_less(p, (offs_n - shift_left)[:, None], offs_m)
    return p


@gluon.jit
def _step(
    i, s, dk, dv, shared, signals, problem, dq_ptr, place, start_m, start_n, masked, scales,
    D: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
    S_LAYOUT: gl.constexpr, DK_LAYOUT: gl.constexpr, DQ_LAYOUT: gl.constexpr,
    BOUND_LEFT: gl.constexpr, BOUND_RIGHT: gl.constexpr, WIDE: gl.constexpr,
):  # fmt: skip
    """Adds a tile of queries, whose scores are s, to dk, dv and dq; returns the scores of the next tile, dk and dv."""
    q_ring, do_ring, lse_ring, delta_ring, k_tile, v_tile, p_tile, ds_tile, _ = shared
    _, _, q_full, do_full, empty = signals
    stage = i % STAGES
    columns: gl.constexpr = gl.SliceLayout(0, S_LAYOUT)
    operand: gl.constexpr = gl.DotOperandLayout(0, DK_LAYOUT, 2)
    q = q_ring.index(stage).reshape([BLOCK_M, D])
    do = do_ring.index(stage).reshape([BLOCK_M, D])
    # An index that is always 0, lest the assembler keep every address in registers over the loop and spill them.
    k = k_tile.index(i >> 30).reshape([BLOCK_N, D])
    v = v_tile.index(i >> 30).reshape([BLOCK_N, D])
    p_tile = p_tile.index(i >> 30)
    ds_tile = ds_tile.index(i >> 30)

    mbarrier.wait(do_full.index(stage), i // STAGES & 1, deps=[do_ring])
    zeros = gl.zeros((BLOCK_N, BLOCK_M), gl.float32, S_LAYOUT)
    dp = warpgroup_mma(v, do.permute((1, 0)), zeros, use_acc=False, is_async=True)

    lse = lse_ring.index(stage).reshape([BLOCK_M]).load(columns)
    unit_scale, tanh_scale = scales
    if tanh_scale is not None:
        s = 1.0 - 2.0 / (gl.exp2(s * (tanh_scale * (2.0 * LOG2_E))) + 1.0)  # the tanh
    p = gl.exp2(s * unit_scale - lse[None, :])
    if masked:
        p = _without_hidden(p, start_m, start_n, problem, BOUND_LEFT, BOUND_RIGHT)
    zeros = gl.zeros((BLOCK_M, D), gl.float32, DQ_LAYOUT)
    if WIDE:
        p_tile.store(p.to(q_ring.dtype))
        if tanh_scale is not None:
            p = p * (1.0 - s * s)
        dp = warpgroup_mma_wait(0, deps=[dp])
        delta = delta_ring.index(stage).reshape([BLOCK_M]).load(columns)
        ds_tile.store((p * (dp - delta[None, :])).to(q_ring.dtype))
        fence_async_shared()
        barrier()
        dq = warpgroup_mma(ds_tile.permute((1, 0)), k, zeros, use_acc=False, is_async=True)
        dv = warpgroup_mma(p_tile, do, dv, is_async=True)
        dk = warpgroup_mma(ds_tile, q, dk, is_async=True)
    else:
        p_operand = gl.convert_layout(p.to(q_ring.dtype), operand)
        if tanh_scale is not None:  # what follows only needs the weights times the derivative of the softcap
            p = p * (1.0 - s * s)
        dv = warpgroup_mma(p_operand, do, dv, is_async=True)
        dp = warpgroup_mma_wait(1, deps=[dp])
        delta = delta_ring.index(stage).reshape([BLOCK_M]).load(columns)
        ds = (p * (dp - delta[None, :])).to(q_ring.dtype)
        ds_operand = gl.convert_layout(ds, operand)
        ds_tile.store(ds)
        fence_async_shared()
        barrier()
        dq = warpgroup_mma(ds_tile.permute((1, 0)), k, zeros, use_acc=False, is_async=True)
        # An operand in registers is named where it is waited for, so that it stays there as long.
        dv, p_operand = warpgroup_mma_wait(1, deps=[dv, p_operand])
        dk = warpgroup_mma(ds_operand, q, dk, is_async=True)

    next_stage = (i + 1) % STAGES
    mbarrier.wait(q_full.index(next_stage), (i + 1) // STAGES & 1, deps=[q_ring])
    zeros = gl.zeros((BLOCK_N, BLOCK_M), gl.float32, S_LAYOUT)
    next_q = q_ring.index(next_stage).reshape([BLOCK_M, D]).permute((1, 0))
    next_s = warpgroup_mma(k, next_q, zeros, use_acc=False, is_async=True)

    # dq is added up in memory, which takes as long as two products, while the others are multiplied.
    if WIDE:
        dq = warpgroup_mma_wait(3, deps=[dq])
        _add_dq(dq_ptr, place, dq, BLOCK_M, D)
        dk, dv = warpgroup_mma_wait(1, deps=[dk, dv])
    else:
        dq = warpgroup_mma_wait(2, deps=[dq])
        _add_dq(dq_ptr, place, dq, BLOCK_M, D)
        dk, ds_operand = warpgroup_mma_wait(1, deps=[dk, ds_operand])
    barrier()  # every warp is done with this tile, and with dS
    mbarrier.arrive(empty.index(stage))
    barrier()  # else the compiler puts one behind the next scores
    # The assembler can't leave a product on its way from one iteration to the next.
    next_s = warpgroup_mma_wait(0, deps=[next_s])
    return next_s, dk, dv


@gluon.jit
def _store_rows(ptr, tile, head, first, length, heads_k, WIDTH: gl.constexpr):
    """The first rows of a tile in shared memory, `length` or all of them, to the positions from `first` on."""
    NUMBER: gl.constexpr = tile.shape[0]
    D: gl.constexpr = tile.shape[1]
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [8, 1], [1, 0])
    offs_n = gl.arange(0, NUMBER, gl.SliceLayout(1, layout))
    offs_d = gl.arange(0, D, gl.SliceLayout(0, layout))
    ptr += (gl.cast(first, gl.int64) * heads_k + head) * WIDTH
    mask = (offs_n[:, None] < length) & (offs_d[None, :] < WIDTH)
    gl.store(ptr + offs_n[:, None].to(gl.int64) * (heads_k * WIDTH) + offs_d[None, :], tile.load(layout), mask=mask)


@gluon.jit
def _number(count, tasks):
    """The program's tile number `count`."""
    tasks_ptr, record = tasks
    if tasks_ptr is None:
        return tile_of_round(count, gl.program_id(0), gl.num_programs(0))
    else:
        return noted_tile(record, count)


@gluon.jit
def _multiply_tile(
    count, step, dk_desc, dv_desc, dk_ptr, dv_ptr, dq_ptr, redo_ptr, shared, signals, problem, tasks, scale, softcap,
    D: gl.constexpr, WIDTH: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
    BOUND_LEFT: gl.constexpr, BOUND_RIGHT: gl.constexpr,
):  # fmt: skip
    """The gradients of one tile of keys, and its share of dq; returns the number of steps so far."""
    # Two groups of four warps share the keys, or, of only 64 keys, the queries and the width.
    WIDE: gl.constexpr = BLOCK_N == 64
    WARPS: gl.constexpr = [4, 2] if WIDE else [8, 1]
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout(
        [3, 0], warps_per_cta=WARPS, instr_shape=[16, BLOCK_M // 2 if WIDE else BLOCK_M, 16]
    )
    DK_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout(
        [3, 0], warps_per_cta=WARPS, instr_shape=[16, D // 2 if WIDE else D, 16]
    )
    DQ_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout(
        [3, 0], warps_per_cta=[BLOCK_M // 16, 128 // BLOCK_M], instr_shape=[16, D * BLOCK_M // 128, 16]
    )
    q_ring, _, _, _, k_tile, v_tile, _, _, results = shared
    kv_full, kv_empty, q_full, _, _ = signals
    heads_k, group, _, _, _, _, tiles_q, _, _, _ = problem
    tasks_ptr = tasks[0]
    batch, head, start_n, _, _, first_tile, sequence = locate_tile(_number(count, tasks), problem, tasks_ptr, BLOCK_N)
    begin, tiles, before, full = count_steps(start_n, sequence, BLOCK_M, BLOCK_N, BOUND_LEFT, BOUND_RIGHT)
    mbarrier.wait(kv_full, count & 1, deps=[k_tile, v_tile])
    stage = step % STAGES
    mbarrier.wait(q_full.index(stage), step // STAGES & 1, deps=[q_ring])
    k = k_tile.index(0).reshape([BLOCK_N, D])
    q = q_ring.index(stage).reshape([BLOCK_M, D])
    s = gl.zeros((BLOCK_N, BLOCK_M), gl.float32, S_LAYOUT)
    s = warpgroup_mma(k, q.permute((1, 0)), s, use_acc=False)
    dk = gl.zeros((BLOCK_N, D), gl.float32, DK_LAYOUT)
    dv = gl.zeros((BLOCK_N, D), gl.float32, DK_LAYOUT)
    # The place of a tile is counted on, without a division, in the heads' tiles of dq and in one head's.
    place = (batch * heads_k + head) * group * tiles_q + first_tile + begin
    tile = 0
    for _ in range(group * tiles):
        scales = (scale * LOG2_E, None) if softcap is None else (softcap * LOG2_E, scale / softcap)
        is_masked = (tile < before) | (tile >= before + full)
        s, dk, dv = _step(
            step, s, dk, dv, shared, signals, sequence, dq_ptr, place, (begin + tile) * BLOCK_M, start_n,
            is_masked, scales, D, BLOCK_M, BLOCK_N, STAGES, S_LAYOUT, DK_LAYOUT, DQ_LAYOUT, BOUND_LEFT,
            BOUND_RIGHT, WIDE,
        )  # fmt: skip
        step += 1
        tile += 1
        place += gl.where(tile == tiles, tiles_q - tiles + 1, 1)
        tile = gl.where(tile == tiles, 0, tile)
    tma.store_wait(0)  # the last results have left
    barrier()
    if not WIDE:
        mbarrier.arrive(kv_empty)
    # Computed again rather than kept in registers over the loop.
    t = _number(_hidden(count), tasks)
    batch, head, start_n, _, first_k, _, sequence = locate_tile(t, problem, tasks_ptr, BLOCK_N)
    dk_tile = k_tile.index(0) if WIDE else results.index(0)
    dv_tile = v_tile.index(0) if WIDE else results.index(1)
    dk_tile.reshape([BLOCK_N, D]).store((dk * scale).to(dk_desc.dtype))
    dv_tile.reshape([BLOCK_N, D]).store(dv.to(dv_desc.dtype))
    fence_async_shared()
    barrier()
    if tasks_ptr is None or start_n + BLOCK_N <= sequence[3]:  # the copy engine stops at the tensor's last row
        store(dk_desc, [batch, head, first_k + start_n, 0], dk_tile)
        store(dv_desc, [batch, head, first_k + start_n, 0], dv_tile)
    elif tasks_ptr is not None:  # and here another sequence begins
        first, length = first_k + start_n, sequence[3] - start_n
        _store_rows(dk_ptr, dk_tile.reshape([BLOCK_N, D]), head, first, length, heads_k, WIDTH)
        _store_rows(dv_ptr, dv_tile.reshape([BLOCK_N, D]), head, first, length, heads_k, WIDTH)
    if WIDE:
        tma.store_wait(0)
        barrier()
        mbarrier.arrive(kv_empty)
    if redo_ptr is not None:
        # What spoils dv, an incoming gradient that isn't finite, spoils dk too.
        spoiled = gl.sum(dk * 0.0, 1) != 0.0
        nowhere = gl.zeros((BLOCK_N,), gl.int32, gl.SliceLayout(1, DK_LAYOUT))
        gl.store(redo_ptr + nowhere, nowhere + 1, mask=spoiled)
    return step


@gluon.jit
def _multiply(
    dk_desc, dv_desc, dk_ptr, dv_ptr, dq_ptr, redo_ptr, shared, signals, problem, tasks, scale, softcap,
    D: gl.constexpr, WIDTH: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
    BOUND_LEFT: gl.constexpr, BOUND_RIGHT: gl.constexpr,
):  # fmt: skip
    """The multiplying role."""
    kv_full = signals[0]
    _, _, _, _, _, _, _, tiles_k, _, heads = problem
    tasks_ptr, record = tasks
    step = 0
    if tasks_ptr is None:
        for count in range(count_rounds(heads * tiles_k, gl.program_id(0), gl.num_programs(0))):
            step = _multiply_tile(
                count, step, dk_desc, dv_desc, dk_ptr, dv_ptr, dq_ptr, redo_ptr, shared, signals, problem, tasks, scale,
                softcap, D, WIDTH, BLOCK_M, BLOCK_N, STAGES, BOUND_LEFT, BOUND_RIGHT,
            )  # fmt: skip
    else:
        done = 0
        mbarrier.wait(kv_full, 0)
        while noted_tile(record, done) >= 0:
            step = _multiply_tile(
                done, step, dk_desc, dv_desc, dk_ptr, dv_ptr, dq_ptr, redo_ptr, shared, signals, problem, tasks, scale,
                softcap, D, WIDTH, BLOCK_M, BLOCK_N, STAGES, BOUND_LEFT, BOUND_RIGHT,
            )  # fmt: skip
            done += 1
            mbarrier.wait(kv_full, done & 1)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=SIZES)
def grad_kernel(
    q_desc, k_desc, v_desc, do_desc, lse_desc, delta_desc, dk_desc, dv_desc, dk_ptr, dv_ptr, dq_ptr, redo_ptr,
    tasks_ptr, heads_k, group, seqlen_q, seqlen_k, shift_left, shift_right, tiles_q, tiles_k, section, heads, scale,
    softcap,
    D: gl.constexpr, WIDTH: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
    BOUND_LEFT: gl.constexpr, BOUND_RIGHT: gl.constexpr,
):  # fmt: skip
    """dk, dv and the sums of dq, as many as there are processors at once."""
    dtype: gl.constexpr = q_desc.dtype
    q_ring = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, BLOCK_M, D], q_desc.layout)
    do_ring = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, BLOCK_M, D], do_desc.layout)
    k_tile = gl.allocate_shared_memory(dtype, [1, 1, 1, BLOCK_N, D], k_desc.layout)
    v_tile = gl.allocate_shared_memory(dtype, [1, 1, 1, BLOCK_N, D], v_desc.layout)
    lse_ring = gl.allocate_shared_memory(gl.float32, [STAGES, 1, BLOCK_M], lse_desc.layout)
    delta_ring = gl.allocate_shared_memory(gl.float32, [STAGES, 1, BLOCK_M], delta_desc.layout)
    DS_LAYOUT: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    ds_tile = gl.allocate_shared_memory(dtype, [1, BLOCK_N, BLOCK_M], DS_LAYOUT)
    # Weights go through memory and results through that of the keys, where there are 64 keys; else not so.
    if BLOCK_N == 64:
        p_tile = gl.allocate_shared_memory(dtype, [1, BLOCK_N, BLOCK_M], DS_LAYOUT)
        results = k_tile
    else:
        p_tile = ds_tile
        results = gl.allocate_shared_memory(dtype, [2, 1, 1, BLOCK_N, D], dk_desc.layout)
    kv_full = barriers(1, 1).index(0)
    kv_empty = barriers(1, 1).index(0)
    q_full = barriers(STAGES, 1)
    do_full = barriers(STAGES, 1)
    empty = barriers(STAGES, 1)
    fence_async_shared()
    await_previous()
    tasks = (tasks_ptr, None)
    if tasks_ptr is not None:
        tiles_k = gl.load(tasks_ptr)
        tasks = (tasks_ptr, gl.allocate_shared_memory(gl.int32, [2, 1], gl.SwizzledSharedLayout(1, 1, 1, [0])))
    shared = (q_ring, do_ring, lse_ring, delta_ring, k_tile, v_tile, p_tile, ds_tile, results)
    signals = (kv_full, kv_empty, q_full, do_full, empty)
    problem = (
        heads_k, group, seqlen_q, seqlen_k, shift_left, shift_right, tiles_q, tiles_k, section, heads
    )  # fmt: skip
    gl.warp_specialize(
        [
            (_multiply, (
                dk_desc, dv_desc, dk_ptr, dv_ptr, dq_ptr, redo_ptr, shared, signals, problem, tasks, scale, softcap, D,
                WIDTH, BLOCK_M, BLOCK_N, STAGES, BOUND_LEFT, BOUND_RIGHT,
            )),
            (_copy, (
                q_desc, k_desc, v_desc, do_desc, lse_desc, delta_desc, shared, signals, problem, tasks, BLOCK_M,
                BLOCK_N, STAGES, BOUND_LEFT, BOUND_RIGHT,
            )),
        ],
        [1],  # warps of the copying role; the other has the kernel's
        [24],  # their registers
    )  # fmt: skip
