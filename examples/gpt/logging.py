"""Where a run's numbers go: metrics.csv as they come, loss.png at the end."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

COLUMNS = (
    "step",
    "tokens",
    "seconds",  # of training; validation is not counted
    "train_loss",  # nats a token, averaged over the steps since the last row
    "val_loss",  # nats a token; empty where nothing was validated
    "val_bits_per_byte",
    "learning_rate",  # of the hidden matrices
    "tokens_per_second",
    "ms_per_step",
)
Row = dict[str, Any]


class Metrics:
    """The rows so far; each is in the file, if there is one, as soon as it is added."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.rows: list[Row] = []
        if path is None:
            return
        with path.open("w", newline="") as file:
            csv.writer(file).writerow(COLUMNS)

    def add(self, row: Row) -> None:
        self.rows.append(row)
        if self.path is None:
            return
        with self.path.open("a", newline="") as file:
            csv.DictWriter(file, COLUMNS).writerow(row)


def plot(rows: list[Row], title: str, path: Path) -> None:
    """The loss curve against steps and against seconds."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(1, 2, figsize=(10, 4), sharey=True, layout="constrained")
    validated = [row for row in rows if row["val_loss"] is not None]
    for panel, x in zip(panels, ("step", "seconds"), strict=True):
        panel.plot([row[x] for row in rows], [row["train_loss"] for row in rows], label="training", alpha=0.6)
        panel.plot([row[x] for row in validated], [row["val_loss"] for row in validated], "o-", label="validation")
        panel.set_xlabel(x)
        panel.grid(alpha=0.3)
    panels[0].set_ylabel("loss, nats a token")
    panels[0].legend()
    figure.suptitle(title)
    figure.savefig(path, dpi=120)
    plt.close(figure)
