"""How Hopper's forward deals its tiles to programs: the kernel's own functions, as plain Python."""

from types import FunctionType, SimpleNamespace

import pytest

pytest.importorskip("triton", reason="kernels need triton, which is for Linux only")

from hypothesis import given, settings
from hypothesis import strategies as st

from attention.kernels.hopper_forward import pick_tile
from attention.kernels.hopper_schedule import (
    TILE_COST,
    causal_section,
    even_section,
    most_work,
    place_of_tile,
    tile_of_round,
)

PROGRAMS = 132  # of an H200
# Heads, of which so many fit into L2, and tiles of queries each.
SHAPES = [(256, 64, 8), (512, 128, 8), (384, 128, 8), (64, 32, 16), (256, 32, 16), (96, 32, 16), (64, 16, 32)]


def plain(function):
    """A function of the kernel on Python's integers."""
    gl = SimpleNamespace(minimum=min, cdiv=lambda a, b: -(-a // b))
    return FunctionType(function.fn.__code__, {"gl": gl})


def work_of_programs(section: int, num_heads: int, num_m: int, programs: int) -> tuple[list[float], set]:
    """What each has, in tiles of keys under a causal mask, and the places that were dealt."""
    problem = (1, 1, 0, 0, num_m, section, num_heads, 0, 0, None, None)
    work, places = [0.0] * programs, []
    for program in range(programs):
        count = 0
        while (t := plain(tile_of_round)(count, program, programs)) < num_heads * num_m:
            batch, _, m = plain(place_of_tile)(t, problem, 1)
            places.append((batch, m))
            work[program] += m + 1 + TILE_COST
            count += 1
    assert len(set(places)) == len(places)
    return work, set(places)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.integers(1, 40), st.integers(1, 40), st.integers(1, 9), st.integers(1, 20))
def test_every_tile_is_dealt_once_and_the_busiest_program_is_known(num_heads, fitting, num_m, programs):
    for section in {even_section(num_heads, fitting), causal_section(num_heads, fitting, num_m, programs)}:
        work, places = work_of_programs(section, num_heads, num_m, programs)
        assert len(places) == num_heads * num_m
        assert most_work(section, num_heads, num_m, programs) == max(work)


@pytest.mark.parametrize(("num_heads", "fitting", "num_m"), SHAPES)
def test_nobody_has_much_more_than_the_others(num_heads, fitting, num_m):
    """With an even number of sections the busiest had 1.014 to 1.07 of the mean in all shapes but the last."""
    section = causal_section(num_heads, fitting, num_m, PROGRAMS)
    work, _ = work_of_programs(section, num_heads, num_m, PROGRAMS)
    assert max(work) <= 1.015 * sum(work) / PROGRAMS
    assert section <= 1.1 * fitting


@pytest.mark.parametrize(("length", "groups"), [(1, 3), (192, 3), (193, 4), (512, 4), (1024, 4), (1100, 3), (4096, 3)])
def test_a_tile_has_few_rows_without_queries(length, groups):
    """At 1024 the sixth tile of 192 queries would have 64; at 4096 it is one of 22."""
    assert pick_tile(64, length).groups == groups
