"""The learning rate's schedule: a pure function of the step that multiplies the rate of every group."""

from __future__ import annotations


def warmup_stable_decay(step: int, steps: int, warmup: int, decay: int) -> float:
    """Linear warm-up over `warmup` steps, then 1, then linearly to 0 over the last `decay` steps.

    Zero is reached at `step == steps`, one past the last, so every step learns something. As in Hägele et al. 2024,
    https://arxiv.org/abs/2405.18392.

    >>> [warmup_stable_decay(step, 8, warmup=2, decay=4) for step in range(9)]
    [0.5, 1.0, 1.0, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0]
    """
    return max(0.0, min(1.0, (step + 1) / max(1, warmup), (steps - step) / max(1, decay)))
