"""Learning-rate schedules: pure functions of the step, from 0 to 1 and back to 0, that multiply every group's rate."""

from __future__ import annotations

import math


def warmup_stable_decay(step: int, steps: int, warmup: int, decay: int) -> float:
    """Linear warm-up over `warmup` steps, then 1, then linearly to 0 over the last `decay` steps.

    Zero is reached at `step == steps`, one past the last, so every step learns something. As in Hägele et al. 2024,
    https://arxiv.org/abs/2405.18392.

    >>> [warmup_stable_decay(step, 8, warmup=2, decay=4) for step in range(9)]
    [0.5, 1.0, 1.0, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0]
    """
    return max(0.0, min(1.0, (step + 1) / max(1, warmup), (steps - step) / max(1, decay)))


def warmup_cosine(step: int, steps: int, warmup: int) -> float:
    """Linear warm-up over `warmup` steps, then half a cosine down to 0 at `step == steps`.

    As in Loshchilov and Hutter 2017, https://arxiv.org/abs/1608.03983.

    >>> [round(warmup_cosine(step, 6, warmup=2), 3) for step in range(7)]
    [0.5, 1.0, 1.0, 0.854, 0.5, 0.146, 0.0]
    """
    if step < warmup:
        return (step + 1) / warmup
    return (1 + math.cos(math.pi * min(1.0, (step - warmup) / max(1, steps - warmup)))) / 2
