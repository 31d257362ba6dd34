import doctest
import itertools

import pytest

from examples.gpt import schedule
from examples.gpt.schedule import cosine, warmup_stable_decay


def test_example_in_the_docstring() -> None:
    assert doctest.testmod(schedule).failed == 0


@pytest.mark.parametrize(("steps", "warmup", "decay"), [(1, 0, 0), (1, 1, 1), (10, 0, 10), (100, 10, 40), (7, 5, 5)])
def test_every_step_learns_and_the_end_is_zero(steps: int, warmup: int, decay: int) -> None:
    rates = [warmup_stable_decay(step, steps, warmup, decay) for step in range(steps + 1)]
    assert all(0 < rate <= 1 for rate in rates[:-1])
    assert rates[-1] == 0


def test_up_along_and_down() -> None:
    rates = [warmup_stable_decay(step, 100, warmup=10, decay=40) for step in range(100)]
    assert rates[0] == 0.1
    assert rates[9:61] == [1.0] * 52
    assert rates[80] == 0.5


def test_cosine_is_nanogpts() -> None:
    """Its get_lr for train_shakespeare_char.py: from 1e-3 to 1e-4, halfway in between."""
    rates = [1e-3 * cosine(step, 5000, warmup=100, final=0.1) for step in range(5001)]
    assert rates[0] == pytest.approx(1e-3 / 101)
    assert rates[99] < rates[100] == 1e-3 == max(rates)
    assert rates[2550] == pytest.approx(5.5e-4)
    assert rates[5000] == pytest.approx(1e-4) == min(rates[100:])
    assert all(later < earlier for earlier, later in itertools.pairwise(rates[100:]))
