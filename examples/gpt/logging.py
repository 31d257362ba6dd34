"""Where a run's numbers go: metrics.csv and the screen as they come, a tracker if asked for, loss.png at the end."""

from __future__ import annotations

import csv
import importlib
from pathlib import Path
from typing import Any

from tqdm import tqdm

from examples.gpt.cli import UserError

COLUMNS = (
    "step",
    "tokens",
    "seconds",  # of training; validation and checkpoints are not counted
    "train_loss",  # nats a token, averaged over the steps since the last row
    "val_loss",  # nats a token; empty where nothing was validated
    "val_bits_per_byte",
    "learning_rate",  # of the hidden matrices
    "tokens_per_second",
    "ms_per_step",
    "optimizer_ms",  # of these; on a GPU in its own time
    "mfu",  # model FLOPs utilisation; empty where the device's peak is unknown
    "clipped_heads",  # by QK-clip, over all layers and the steps since the last row; empty without
)
TRACKERS = ("tensorboard", "wandb", "trackio")
BAR = "{desc} {percentage:3.0f}%|{bar}| {n}/{total} [{elapsed}<{remaining}{postfix}]"
Row = dict[str, Any]


class Metrics:
    """metrics.csv, in which a row is as soon as it is added, and the tracker. Without a folder neither."""

    def __init__(self, out: Path | None) -> None:
        self.path = out / "metrics.csv" if out else None
        self.tracker: Tracker | None = None

    def start(self, rows: list[Row]) -> None:
        """With the rows of a checkpoint, or none: what a killed run wrote after it is written again."""
        if self.path is not None:
            with self.path.open("w", newline="") as file:
                writer = csv.DictWriter(file, COLUMNS)
                writer.writeheader()
                writer.writerows(rows)

    def add(self, row: Row) -> None:
        if self.path is not None:
            with self.path.open("a", newline="") as file:
                csv.DictWriter(file, COLUMNS).writerow(row)
        if self.tracker is not None:
            self.tracker.log(row)

    def finish(self) -> None:
        if self.tracker is not None:
            self.tracker.finish()


class Tracker:
    """TensorBoard, Weights & Biases, or trackio, which speaks as Weights & Biases does."""

    def __init__(self, name: str, out: Path, config: dict[str, Any], first_step: int) -> None:
        self.name = name
        if name == "tensorboard":
            writer = imported(name, "torch.utils.tensorboard").SummaryWriter
            self.writer = writer(str(out / "tensorboard"), purge_step=first_step)
            return
        self.module = imported(name, name)
        run = f"{out.name}-{config['run']}"  # resumed, the run of that name goes on
        which = {"id": run} if name == "wandb" else {}
        self.module.init(project="muon-triton", name=run, config=config, resume="allow", **which)

    def log(self, row: Row) -> None:
        numbers = {name: value for name, value in row.items() if name != "step" and value is not None}
        if self.name != "tensorboard":
            self.module.log(numbers, step=row["step"])
            return
        for name, value in numbers.items():
            self.writer.add_scalar(name, value, row["step"])

    def finish(self) -> None:
        if self.name == "tensorboard":
            self.writer.close()
        else:
            self.module.finish()


def imported(package: str, module: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise UserError(f"--log {package} needs a package: pip install {package}") from error


def progress_bar(steps: int, done: int, *, hidden: bool) -> tqdm:
    return tqdm(total=steps, initial=done, desc="training", dynamic_ncols=True, bar_format=BAR, disable=hidden)


def show(row: Row, bar: tqdm) -> None:
    """Move the bar on; a row with a validation loss also gets a line that stays."""
    speed = f"{row['tokens_per_second']:,.0f} tokens/s, MFU {percent(row['mfu'])}"
    bar.set_postfix_str(f"loss {row['train_loss']:.3f}, {speed}", refresh=False)
    bar.update(row["step"] - bar.n)
    if row["val_loss"] is not None:
        left = (bar.total - row["step"]) * row["ms_per_step"] / 1e3
        line = (
            "step {step:5d}  validation {val_loss:.4f}  training {train_loss:.4f}  lr {learning_rate:.2e}  "
            "{ms_per_step:.1f} ms/step".format(**row)
        )
        bar.write(f"{line}  {speed}  {duration(row['seconds'])}, {duration(left)} left")


def percent(share: float | None) -> str:
    return "n/a" if share is None else f"{share:.1%}"


def duration(seconds: float) -> str:
    return tqdm.format_interval(seconds)


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
