"""The learning rate's schedule: a pure function of the step that multiplies the rate of every group."""

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


def cosine(step: int, steps: int, warmup: int, final: float) -> float:
    """Linear warm-up over `warmup` steps, then along half a cosine from 1 to `final`.

    As nanoGPT does it, https://github.com/karpathy/nanoGPT/blob/master/train.py; from Loshchilov & Hutter 2016,
    https://arxiv.org/abs/1608.03983.

    >>> [round(cosine(step, 6, warmup=2, final=0.1), 3) for step in range(7)]
    [0.333, 0.667, 1.0, 0.868, 0.55, 0.232, 0.1]
    """
    if step < warmup:
        return (step + 1) / (warmup + 1)
    way = min(1.0, (step - warmup) / max(1, steps - warmup))
    return final + (1 - final) * 0.5 * (1 + math.cos(math.pi * way))
