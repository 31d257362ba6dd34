"""Which queries and keys a program of Hopper's forward works on, and in which order."""

from __future__ import annotations

import math
from functools import lru_cache

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .common import key_tiles, locate

TILE_COST = 0.5  # of what a tile costs beside its keys, in tiles of keys

# A new length or number of heads must not compile a new kernel.
SIZES = [
    "heads_q", "group", "seqlen_q", "seqlen_k", "num_m", "section", "num_heads", "window_left", "window_right",
    "num_tiles",
]  # fmt: skip


@gluon.jit
def count_rounds(num_tiles, program, programs):
    """How many tiles a program has."""
    number = num_tiles // programs
    return number + (1 if tile_of_round(number, program, programs) < num_tiles else 0)


@gluon.jit
def tile_of_round(count, program, programs):
    """A program's tile in a round. Every second one is dealt backwards, which evens out work that decreases."""
    return count * programs + (programs - 1 - program if count & 1 else program)


@gluon.jit
def place_of_tile(t, problem, BLOCK_M: gl.constexpr):
    """Which sequence, head and first query tile t is of. The heads of a section, whose keys and values fit into L2, go
    together.

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
def locate_both(batch, problem):
    """Where the queries and the keys of a sequence start, and how many they are."""
    _, _, seqlen_q, seqlen_k, _, _, _, _, _, cu_q_ptr, cu_k_ptr = problem
    first_q, length_q = locate(cu_q_ptr, batch, seqlen_q)
    first_k, length_k = locate(cu_k_ptr, batch, seqlen_k)
    return first_q, length_q, first_k, length_k


@gluon.jit
def walk(start_m, length_q, length_k, problem, limit, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr,
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
def key_limits(rows, length_q, length_k, problem, BOUND_RIGHT: gl.constexpr):
    """Query i sees key j when left_i <= j <= right_i."""
    _, _, _, _, _, _, _, window_left, window_right, _, _ = problem
    right = gl.full(rows.shape, length_k - 1, gl.int32, rows.type.layout)
    if BOUND_RIGHT:
        right = gl.minimum(right, rows + (length_k - length_q + window_right))
    return rows + (length_k - length_q - window_left), right


def even_section(num_heads: int, fitting: int) -> int:
    """How many heads go together: all, or in an even number of sections of those whose keys and values fit into L2."""
    number = -(-num_heads // fitting)
    return -(-num_heads // (number + number % 2)) if number > 1 else num_heads


@lru_cache(maxsize=1024)
def causal_section(num_heads: int, fitting: int, num_m: int, programs: int) -> int:
    """That, or about as many heads as fit whose tiles are whole rounds: where even sections leave some programs with a
    tile more than others, these may not."""
    even = even_section(num_heads, fitting)
    heads_of_rounds = programs // math.gcd(programs, num_m)
    whole = max(1, round(fitting / heads_of_rounds)) * heads_of_rounds
    if num_heads <= fitting or whole > 1.1 * fitting:
        return even
    return min((even, whole), key=lambda section: most_work(section, num_heads, num_m, programs))


def most_work(section: int, num_heads: int, num_m: int, programs: int) -> float:
    """What the busiest program has, in tiles of keys, if query tile m sees m + 1 of them: a causal mask."""
    t = torch.arange(num_heads * num_m, device="cpu")
    number = t // (section * num_m)
    m = t % (section * num_m) // (num_heads - number * section).clamp(max=section)
    cost = torch.where((-(-num_heads // section) - number) % 2 == 1, num_m - m, m + 1) + TILE_COST
    turn = t % programs
    program = torch.where(t // programs % 2 == 1, programs - 1 - turn, turn)
    return torch.zeros(programs, device="cpu").index_add_(0, program, cost).max().item()
