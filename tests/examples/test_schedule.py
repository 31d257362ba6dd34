import doctest

import pytest

from examples.gpt import schedule
from examples.gpt.schedule import warmup_stable_decay


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
