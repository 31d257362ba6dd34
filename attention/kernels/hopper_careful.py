"""What is left to do after Hopper's forward, in a kernel of its own: its code would slow the forward's, even unused.

NaN and inf in values that not all queries of a tile see: 0 · NaN is NaN, so hidden values reach rows that don't see
them. The forward's groups mark such rows with an lse of NaN and note whether they had any; here such tiles are done
once more, slowly. Then each head's largest logit, of the queries' largest ones, and rows past the last packed sequence.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mma_v2

from .common import LN_2, LOG2_E
from .hopper_common import await_previous
from .hopper_schedule import SIZES, count_rounds, key_limits, locate_both, place_of_tile, tile_of_round, walk
from .hopper_softmax import count_sink, softmax

ROWS = gl.constexpr(64)  # queries of a group of four warps
CAREFUL = gl.constexpr(16)  # keys at a time
PIECES = gl.constexpr(16)  # of PIECE queries whose largest logits are read at once, lest a head wait for memory often
PIECE = gl.constexpr(1024)


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
def store_rows(out_ptr, out, entry, head, first_q, row0, length_q, heads_q, seqlen_q, DV: gl.constexpr):
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
    """A group's result before the division, its maxima and sums, in small pieces: a value that isn't finite counts as 0
    where it isn't seen and as NaN where it is."""
    PART: gl.constexpr = 64  # of the head's width, because of the registers
    left_side: gl.constexpr = gl.DotOperandLayout(0, layout, 2)
    right_side: gl.constexpr = gl.DotOperandLayout(1, layout, 2)
    first_q, length_q, first_k, length_k = lengths
    _, group, _, _, _, _, _, _, _, _, _ = problem
    head_k = head // group
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
        p, row_max, row_sum, rescale = softmax(s, row_max, row_sum, start_n, limits, scales, BOUND_LEFT, True, False)
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
def _repair_tile(
    place, lengths, problem, q_rows, k_rows, v_rows, out_ptr, lse_ptr, sinks_ptr, scales,
    D: gl.constexpr, DV: gl.constexpr, BLOCK_D: gl.constexpr, BLOCK_DV: gl.constexpr, BOUND_LEFT: gl.constexpr,
    BOUND_RIGHT: gl.constexpr,
):  # fmt: skip
    """A group's queries of a tile once more, with care, if an lse of NaN marks any of them."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [4, 1], [16, 8])
    batch, head, row0 = place
    first_q, length_q, _, length_k = lengths
    heads_q, _, seqlen_q, _, _, _, _, _, _, cu_q_ptr, _ = problem
    entry = 0 if cu_q_ptr is not None else batch
    rows = row0 + gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    lse_ptr += (gl.cast(entry, gl.int64) * heads_q + head) * seqlen_q + first_q
    lse = gl.load(lse_ptr + rows, mask=rows < length_q, other=0.0)
    if gl.max((lse != lse).to(gl.int32), 0) != 0:
        last, right, full, left = walk(row0, length_q, length_k, problem, 2**24, ROWS, CAREFUL, BOUND_LEFT, BOUND_RIGHT)
        limits = key_limits(rows, length_q, length_k, problem, BOUND_RIGHT)
        acc, row_max, row_sum = _attend_carefully(
            entry, head, row0, lengths, problem, q_rows, k_rows, v_rows, limits,
            (last - right - full - left) * CAREFUL, (last + 1) * CAREFUL, scales,
            D, DV, BLOCK_D, BLOCK_DV, BOUND_LEFT, layout,
        )  # fmt: skip
        acc, row_max, row_sum = count_sink(acc, row_max, row_sum, sinks_ptr, head)
        row_sum = gl.where(row_sum == 0.0, 1.0, row_sum)
        gl.store(lse_ptr + rows, (row_max + gl.log2(row_sum)) * LN_2, mask=rows < length_q)
        store_rows(out_ptr, acc / row_sum[:, None], entry, head, first_q, row0, length_q, heads_q, seqlen_q, DV)


@gluon.jit
def _largest_of_head(peaks_ptr, max_logits_ptr, head, problem):
    """The largest of all queries' largest logits (entries, heads, positions) of one head."""
    layout: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [1, 4], [1, 0])
    heads_q, _, seqlen_q, _, _, _, num_heads, _, _, cu_q_ptr, _ = problem
    entries = num_heads // heads_q
    length = seqlen_q
    if cu_q_ptr is not None:
        length = gl.load(cu_q_ptr + entries)  # nobody wrote what is behind the last sequence
        entries = 1
    pieces = gl.cdiv(length, PIECE)  # of an entry
    number = gl.arange(0, PIECES, gl.SliceLayout(1, layout))
    offs_s = gl.arange(0, PIECE, gl.SliceLayout(0, layout))
    largest = gl.full((PIECE,), -float("inf"), gl.float32, gl.SliceLayout(0, layout))
    for first in range(0, entries * pieces, PIECES):
        entry = (first + number) // pieces
        rest = gl.where(entry < entries, length - (first + number) % pieces * PIECE, 0)
        ptr = peaks_ptr + ((entry.to(gl.int64) * heads_q + head) * seqlen_q + (first + number) % pieces * PIECE)
        peaks = gl.load(ptr[:, None] + offs_s[None, :], mask=offs_s[None, :] < rest[:, None], other=-float("inf"))
        largest = gl.maximum(largest, gl.max(peaks, 0))
    gl.store(max_logits_ptr + head, gl.max(largest, 0))


@gluon.jit
def _repair_group(
    number, number_of_groups, problem, num_tiles, q_rows, k_rows, v_rows, out_ptr, lse_ptr, sinks_ptr, scales,
    D: gl.constexpr, DV: gl.constexpr, BLOCK_D: gl.constexpr, BLOCK_DV: gl.constexpr, GROUPS: gl.constexpr,
    BOUND_LEFT: gl.constexpr, BOUND_RIGHT: gl.constexpr,
):  # fmt: skip
    """What one group of one of the forward's programs found spoiled."""
    program, programs = number // GROUPS, number_of_groups // GROUPS
    for count in range(count_rounds(num_tiles, program, programs)):
        batch, head, start_m = place_of_tile(tile_of_round(count, program, programs), problem, GROUPS * ROWS)
        lengths = locate_both(batch, problem)
        if start_m < lengths[1]:
            _repair_tile(
                (batch, head, start_m + number % GROUPS * ROWS), lengths, problem, q_rows, k_rows, v_rows, out_ptr,
                lse_ptr, sinks_ptr, scales, D, DV, BLOCK_D, BLOCK_DV, BOUND_LEFT, BOUND_RIGHT,
            )  # fmt: skip


@gluon.jit
def _clear_rest(out_ptr, lse_ptr, problem, DV: gl.constexpr):
    """Rows past the last packed sequence, which nobody else writes: zeros and an lse of -inf."""
    heads_q, _, seqlen_q, _, _, _, num_heads, _, _, cu_q_ptr, _ = problem
    offs = gl.arange(0, PIECE, gl.BlockedLayout([8], [32], [4], [0]))
    end = gl.load(cu_q_ptr + num_heads // heads_q)
    for row in range(end + gl.program_id(0), seqlen_q, gl.num_programs(0)):
        width = heads_q * DV
        for first in range(0, width, PIECE):
            ptr = out_ptr + gl.cast(row, gl.int64) * width + first + offs
            gl.store(ptr, gl.zeros_like(offs).to(out_ptr.dtype.element_ty), mask=first + offs < width)
        for first in range(0, heads_q, PIECE):
            head = first + offs
            nothing = gl.full([PIECE], -float("inf"), gl.float32, offs.type.layout)
            gl.store(lse_ptr + head.to(gl.int64) * seqlen_q + row, nothing, mask=head < heads_q)


@gluon.jit(do_not_specialize=SIZES)
def finish_kernel(
    q_rows, k_rows, v_rows, out_ptr, lse_ptr, spoiled_ptr, peaks_ptr, max_logits_ptr, sinks_ptr, cu_q_ptr, cu_k_ptr,
    heads_q, group, seqlen_q, seqlen_k, num_m, section, num_heads, window_left, window_right, num_tiles,
    scale, softcap,
    D: gl.constexpr, DV: gl.constexpr, BLOCK_D: gl.constexpr, BLOCK_DV: gl.constexpr, GROUPS: gl.constexpr,
    BOUND_LEFT: gl.constexpr, BOUND_RIGHT: gl.constexpr,
):  # fmt: skip
    """A program a head, if max_logits are asked for, and, if any may be, one for each group's spoiled tiles. All of
    them clear rows past the last sequence."""
    await_previous()
    problem = (
        heads_q, group, seqlen_q, seqlen_k, num_m, section, num_heads, window_left, window_right, cu_q_ptr, cu_k_ptr
    )  # fmt: skip
    if cu_q_ptr is not None:
        _clear_rest(out_ptr, lse_ptr, problem, DV)
    number = gl.program_id(0)
    number_of_groups = gl.num_programs(0)
    if max_logits_ptr is not None:
        if number < heads_q:
            _largest_of_head(peaks_ptr, max_logits_ptr, number, problem)
        number -= heads_q
        number_of_groups -= heads_q
    if spoiled_ptr is not None:  # noqa: SIM102 (known to the compiler)
        if gl.load(spoiled_ptr + number, mask=number >= 0, other=0) != 0:
            scales = ((scale if softcap is None else softcap) * LOG2_E, None if softcap is None else scale / softcap)
            _repair_group(
                number, number_of_groups, problem, num_tiles, q_rows, k_rows, v_rows, out_ptr, lse_ptr, sinks_ptr,
                scales, D, DV, BLOCK_D, BLOCK_DV, GROUPS, BOUND_LEFT, BOUND_RIGHT,
            )  # fmt: skip
