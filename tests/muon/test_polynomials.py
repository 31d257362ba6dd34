import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from muon.polynomials import CONVERGING_TAIL, KELLER_JORDAN, PRESETS, output_range, schedule


def evaluate(steps, s: torch.Tensor) -> torch.Tensor:
    for a, b, c in steps:
        s = a * s + b * s**3 + c * s**5
    return s


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("ns_steps", range(10))
def test_presets_of_any_length_stay_inside_their_proved_range(name, ns_steps):
    steps = schedule(name, ns_steps)
    low, high = output_range(steps)
    values = evaluate(steps, torch.logspace(-9, math.log10(1.01), 400_001, dtype=torch.float64))
    assert low == 0 and high < 2
    assert values.min() > 0 and values.max() <= high + 1e-12
    # The bound is attained, not just valid.
    assert values.max() > high - 1e-4


def test_converged_reaches_one_to_a_thousandth():
    s = torch.logspace(-3, math.log10(1.01), 10_001, dtype=torch.float64)
    assert (evaluate(schedule("converged", 5), s) - 1).abs().max() < 1e-3


def test_lengths():
    assert schedule("keller_jordan", 3) == (KELLER_JORDAN,) * 3
    assert schedule(KELLER_JORDAN, 4) == (KELLER_JORDAN,) * 4
    assert schedule("quintic", 2) == PRESETS["quintic"][:2]
    assert schedule("polar_express", 7) == (*PRESETS["polar_express"], CONVERGING_TAIL, CONVERGING_TAIL)
    assert len(schedule("converged", 1)) == len(PRESETS["converged"])
    assert schedule([KELLER_JORDAN, CONVERGING_TAIL, CONVERGING_TAIL], 9) == (KELLER_JORDAN, *(CONVERGING_TAIL,) * 2)
    assert schedule([KELLER_JORDAN], 5) == (KELLER_JORDAN,)


@pytest.mark.parametrize("ns_steps", [6, 7, 8])
@pytest.mark.parametrize("name", ["quintic", "polar_express"])
def test_going_on_with_the_tail_beats_repeating_the_last_step(name, ns_steps):
    s = torch.logspace(-3, math.log10(1.01), 10_001, dtype=torch.float64)
    preset = PRESETS[name]
    repeated = (*preset, *(preset[-1],) * (ns_steps - 5))
    tail, other = ((evaluate(steps, s) - 1).square().mean() for steps in (schedule(name, ns_steps), repeated))
    assert tail < other


@pytest.mark.parametrize(("name", "ns_steps"), [("quintic", 4), ("polar_express", 3), ("polar_express", 4)])
def test_the_first_steps_are_never_worse_than_the_last_ones(name, ns_steps):
    """In the sense in which the schedules are made: the smallest singular value ends largest."""
    s = torch.logspace(-3, math.log10(1.01), 10_001, dtype=torch.float64)
    first, last = evaluate(schedule(name, ns_steps), s), evaluate(PRESETS[name][-ns_steps:], s)
    assert first.min() > last.min() and (first.min() - 1).abs() < (last.min() - 1).abs()


def test_sources_are_reproduced():
    """Polar Express' first step on its own scale, and the converging tail's three conditions at 1."""
    a, b, c = PRESETS["polar_express"][0]
    assert (a * 1.02, b * 1.02**3, c * 1.02**5) == pytest.approx(
        (8.156554524902461, -22.48329292557795, 15.878769915207462)
    )
    a, b, c = CONVERGING_TAIL
    assert (a + b + c, a + 3 * b + 5 * c, 6 * b + 20 * c) == (1, 0, 0)


triples = st.tuples(st.floats(0.5, 9), st.floats(-25, 5), st.floats(-3, 18))


@settings(max_examples=200)
@given(st.lists(triples, min_size=1, max_size=3))
def test_range_contains_what_a_fine_grid_finds(steps):
    low, high = output_range(steps)
    values = evaluate(steps, torch.linspace(0, 1.01, 20_001, dtype=torch.float64))
    slack = 1e-9 * max(1.0, abs(low), abs(high))
    assert low - slack <= values.min() and values.max() <= high + slack


@settings(max_examples=200)
@given(st.lists(triples, min_size=1, max_size=3))
def test_whatever_is_accepted_keeps_the_sign_and_stays_under_two(steps):
    try:
        accepted = schedule(steps, 5)
    except ValueError:
        return
    values = evaluate(accepted, torch.linspace(0, 1.01, 20_001, dtype=torch.float64))
    assert values.min() >= 0 and values.max() < 2


@pytest.mark.parametrize(
    ("coefficients", "ns_steps", "message"),
    [
        ("polar", 5, "names no preset: 'polar'"),
        (KELLER_JORDAN, 100, "between 0 and 99 but is: 100"),
        (KELLER_JORDAN, -1, "between 0 and 99 but is: -1"),
        ((1.0, 2.0), 5, "sequence of such triples"),
        (None, 5, "sequence of such triples; found: None"),
        ((triple for triple in [KELLER_JORDAN]), 5, "sequence of such triples; found: <generator"),
        ((1.0, float("nan"), 0.0), 5, "finite"),
        ((1.5, -2.0, 0.0), 5, r"turn updates around.*\[-0.5456, 0.5\]"),  # negative beyond sqrt(0.75)
        ((3.0, 0.0, 0.0), 5, "blow updates up"),
        ((0.0, 0.0, 0.0), 5, "turn updates around"),
        ((1.0, -4.0, 4.0), 1, r"turn updates around.*\[0, "),  # s (1 - 2 s²)²: nothing is left of sqrt(0.5)
    ],
)
def test_bad_coefficients_are_named(coefficients, ns_steps, message):
    with pytest.raises(ValueError, match=message):
        schedule(coefficients, ns_steps)
