"""What a comparison of optimizers is made of: runs, the best of a sweep, and the moment a loss is reached."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

LABELS = {"muon": "Muon", "adamw": "AdamW"}
FIRST_SEED = 0  # the sweep's own


@dataclass(frozen=True)
class Point:
    """One validation of a run."""

    step: float
    seconds: float  # of training
    tokens: float
    loss: float


@dataclass(frozen=True)
class Run:
    optimizer: str
    lr: float
    seed: int
    points: list[Point]  # the last is the end of the run; its loss is infinite if the run diverged
    optimizer_ms: float  # median time of its step

    @property
    def final(self) -> float:
        return self.points[-1].loss


def without_warm_up(rows: Sequence[dict[str, float]]) -> list[float]:
    """The seconds of every row of a run, with the steps of the first charged at the median rate of all others.

    A process's first steps compile kernels and record graphs, and which run they fall into is chance. So no run pays
    for its first steps more than for the rest.
    """
    if len(rows) < 2:
        return [row["seconds"] for row in rows]
    usual = statistics.median(row["ms_per_step"] for row in rows[1:]) / 1e3
    excess = rows[0]["seconds"] - rows[0]["step"] * usual
    return [row["seconds"] - excess for row in rows]


def swept(runs: Sequence[Run]) -> list[Run]:
    """The sweep: one run for each learning rate, in their order."""
    return sorted((run for run in runs if run.seed == FIRST_SEED), key=lambda run: run.lr)


def best_lr(runs: Sequence[Run], target: float | None = None) -> float:
    """The learning rate in the sweep that reaches the target first; without one, or if none does, the one with the
    lowest final loss."""

    def merit(run: Run) -> tuple[float, float]:
        return 0.0 if target is None else crossing(run.points, target)[0], run.final

    return min(swept(runs), key=merit).lr


def edge(runs: Sequence[Run], target: float | None = None) -> str | None:
    """`"larger"` or `"smaller"` if the sweep has to go on that way, None if its best point lies inside."""
    lrs = [run.lr for run in swept(runs)]
    if all(math.isinf(run.final) for run in swept(runs)):
        return "smaller"
    best = best_lr(runs, target)
    return "larger" if best == lrs[-1] else "smaller" if best == lrs[0] else None


def next_lr(runs: Sequence[Run], direction: str) -> float:
    """The next point of the geometric grid."""
    lrs = [run.lr for run in swept(runs)]
    if direction == "larger":
        return rounded(lrs[-1] * (lrs[-1] / lrs[-2] if len(lrs) > 1 else 2))
    return rounded(lrs[0] / (lrs[1] / lrs[0] if len(lrs) > 1 else 2))


def rounded(lr: float) -> float:
    """To four digits, so that it reads well in names and commands."""
    return float(f"{lr:.4g}")


def mean_curve(runs: Sequence[Run]) -> list[Point]:
    """Runs validate at the same steps; seconds and loss are averaged at each."""
    return [
        Point(
            moment[0].step,
            statistics.fmean(point.seconds for point in moment),
            moment[0].tokens,
            statistics.fmean(point.loss for point in moment),
        )
        for moment in zip(*(run.points for run in runs), strict=False)
    ]


def crossing(points: Sequence[Point], loss: float) -> tuple[float, float]:
    """Steps and seconds until `loss` is reached first, on the line between two validations; infinite if it never is.

    >>> crossing([Point(100, 10.0, 0, 3.0), Point(200, 20.0, 0, 2.0)], 2.25)
    (175.0, 17.5)
    """
    for i, point in enumerate(points):
        if point.loss > loss:
            continue
        if i == 0:
            return point.step, point.seconds
        before = points[i - 1]
        part = (before.loss - loss) / (before.loss - point.loss) if math.isfinite(before.loss) else 1.0
        return (
            before.step + part * (point.step - before.step),
            before.seconds + part * (point.seconds - before.seconds),
        )
    return math.inf, math.inf


def draw(by_name: dict[str, list[Run]], best: dict[str, list[Run]], path: Path) -> None:
    """The sweeps, and the losses at the best points against steps and seconds: mean, and from lowest to highest."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (sweeps, *panels) = plt.subplots(1, 3, figsize=(13, 4), layout="constrained")
    for (name, runs), color in zip(by_name.items(), ("C0", "C1"), strict=True):
        finite = [run for run in swept(runs) if math.isfinite(run.final)]
        sweeps.plot([run.lr for run in finite], [run.final for run in finite], "o-", color=color, label=LABELS[name])
        sweeps.plot([run.lr for run in best[name]], [run.final for run in best[name]], "o", color=color, alpha=0.4)
        curve = mean_curve(best[name])
        moments = list(zip(*(run.points for run in best[name]), strict=False))
        low, high = ([pick(point.loss for point in moment) for moment in moments] for pick in (min, max))
        for panel, x in zip(panels, ("step", "seconds"), strict=True):
            xs = [getattr(point, x) for point in curve]
            label = f"{LABELS[name]}, {best[name][0].lr:g}"
            panel.plot(xs, [point.loss for point in curve], color=color, label=label)
            panel.fill_between(xs, low, high, color=color, alpha=0.2)
            panel.set_xlabel({"step": "steps", "seconds": "seconds of training"}[x])
    rates = sorted({run.lr for some in by_name.values() for run in some})
    sweeps.set(xscale="log", xlabel="learning rate of the hidden matrices", ylabel="final validation loss")
    sweeps.set_xticks(rates, [f"{lr:g}" for lr in rates], rotation=45)
    sweeps.set_xticks([], minor=True)
    start = max(run.points[len(run.points) // 5].loss for some in best.values() for run in some)
    low = min(point.loss for some in best.values() for run in some for point in run.points)
    if math.isfinite(start):  # the first fifth, where the loss falls steeply, would flatten the rest
        for panel in panels:
            panel.set_ylim(low - 0.05 * (start - low), start)
            panel.axhline(statistics.fmean(run.final for run in best["adamw"]), color="C1", linestyle=":")
    panels[0].set_ylabel("validation loss, nats a token")
    for panel in (sweeps, *panels):
        panel.grid(alpha=0.3)
        panel.legend()
    figure.savefig(path, dpi=110)
    plt.close(figure)
