"""Compare Muon with AdamW fairly.

    python -m examples.compare                                    # the cpu preset: half an hour on two cores
    python -m examples.compare --preset gpt2-124m --data my.txt --seeds 3 --target 3.0
    python -m examples.compare --report docs/results/cpu.csv      # the table and the figure again, no training

Both optimizers get the same data in the same order, batch, schedule, seeds and AdamW for everything that is no hidden
matrix. Each gets a sweep of learning rates; if a best one is at an edge of its sweep, there is no verdict. The best
ones are run with several seeds, of which the sweep's is the first. The best one has the lowest final loss or, with
--target, reaches it in the fewest steps. Runs that are finished are not repeated, so the same command continues a
comparison that was stopped.

Losses are compared at the end of the run, where the learning rate has come down. A loss is reached where the mean
curve over the seeds crosses it, on the line between two validations; in brackets, where the single seeds do. Seconds
are of training alone, without validation; the steps before the first row of a run's metrics are charged at the median
rate of its other steps, because they compile. The optimizer's milliseconds are the median over a run's rows.
"""

from __future__ import annotations

import contextlib
import csv
import json
import math
import statistics
from argparse import Namespace
from collections.abc import Iterable, Sequence
from itertools import groupby, takewhile
from pathlib import Path
from typing import Any

from examples import train
from examples.gpt import options
from examples.gpt.cli import ArgumentParser, UserError, csv_path, path, pick_device, positive_float, positive_int, run
from examples.gpt.measure import foreign, read_csv, setting, source, writable, write_csv
from examples.gpt.sweep import (
    FIRST_SEED,
    LABELS,
    Point,
    Run,
    best_lr,
    crossing,
    draw,
    edge,
    mean_curve,
    next_lr,
    swept,
    without_warm_up,
)

COLUMNS = ("step", "tokens", "seconds", "val_loss", "ms_per_step", "optimizer_ms")  # of a run's metrics.csv
OURS = ("--optimizer", "--lr", "--seed", "--out", "--resume")  # options of examples.train that this command sets itself


def parse_arguments(argv: Sequence[str] | None) -> tuple[Namespace, list[str]]:
    """This command's options, and those of examples.train for every run."""
    parser = ArgumentParser(
        prog="python -m examples.compare",
        usage="%(prog)s [options] [options of examples.train]",
        description="Compare Muon with AdamW: a sweep of learning rates, then seeds.",
        epilog="All other options go to every run of examples.train: --preset, --data, --steps...",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--muon-lrs", metavar="X", type=positive_float, nargs="+", help="Muon's sweep; default: preset / 2, 1, 2")
    add("--adamw-lrs", metavar="X", type=positive_float, nargs="+", help="AdamW's sweep; default: the same")
    add("--extend", metavar="N", type=positive_int, default=0, help="points more if the best is at an edge")
    add("--seeds", metavar="N", type=positive_int, default=3, help="runs at each best point (3)")
    add("--target", metavar="X", type=positive_float, help="a loss: which reaches it in fewer steps?")
    add("--out", metavar="FOLDER", type=path, default=Path("runs/compare"), help="for all runs (runs/compare)")
    add("--csv", metavar="PATH", type=csv_path, help="default: compare.csv in --out; the figure is beside")
    add("--report", metavar="PATH", type=path, help="table and figure of such a CSV, without training")
    args, rest = parser.parse_known_args(argv)
    for option in rest:
        if option.split("=")[0] in OURS:
            parser.error(f"{option} is what is compared; give --muon-lrs, --adamw-lrs or --seeds")
    _, preset, _ = options.parse(rest)
    if preset.checkpoint_every is None:
        rest += ["--checkpoint-every", str(preset.steps)]  # a stopped run starts anew
    args.lrs = {
        "muon": args.muon_lrs or [preset.muon_lr * factor for factor in (0.5, 1, 2)],
        "adamw": args.adamw_lrs or [preset.adamw_lr * factor for factor in (0.5, 1, 2)],
    }
    return args, rest


def sweep(optimizer: str, args: Namespace, rest: list[str]) -> list[Run]:
    runs = [trained(optimizer, lr, FIRST_SEED, args.out, rest) for lr in sorted(set(args.lrs[optimizer]))]
    for _ in range(args.extend):
        direction = edge(runs, args.target)
        if direction is not None:
            runs.append(trained(optimizer, next_lr(runs, direction), FIRST_SEED, args.out, rest))
    return runs


def trained(optimizer: str, lr: float, seed: int, folder: Path, rest: list[str]) -> Run:
    """The run with these three and otherwise the same options, from its folder if it was finished before."""
    out = folder / f"{optimizer}-{lr:g}-seed{seed}"
    command = [*rest, "--optimizer", optimizer, "--lr", str(lr), "--seed", str(seed)]
    record = out / "finished.json"
    if not record.exists():
        diverged = train_quietly(command, out)
        record.write_text(json.dumps({"options": command, "diverged": diverged}, indent=2) + "\n")
    try:
        found = json.loads(record.read_text())
    except ValueError as error:  # cut off when the machine stopped
        raise UserError(f"{record} is damaged; remove {out}") from error
    if found["options"] != command:
        raise UserError(f"{out} is of a comparison with other options; choose another --out or remove it")
    rows = read_metrics(out / "metrics.csv")
    points = to_points(rows, found["diverged"])
    ended = f"validation {points[-1].loss:.4f}, {points[-1].seconds:.0f} s of training"
    print(f"{LABELS[optimizer]:5s}  learning rate {lr:<8g}  seed {seed}  {ended}", flush=True)
    optimizer_ms = [row["optimizer_ms"] for row in rows if "optimizer_ms" in row]
    return Run(optimizer, lr, seed, points, statistics.median(optimizer_ms) if optimizer_ms else math.inf)


def train_quietly(command: list[str], out: Path) -> bool:
    """Train; what it prints goes into log.txt, its progress bar stays. Returns whether the run diverged."""
    writable(out / "log.txt")
    with (out / "log.txt").open("w") as log:
        try:
            with contextlib.redirect_stdout(log):
                train.main([*command, "--out", str(out)])
        except UserError as error:
            if "diverged" not in str(error):
                raise
            return True
    for checkpoint in out.glob("*.pt"):  # of a hundred runs they would fill the disk
        checkpoint.unlink()
    _, preset, _ = options.parse(command)
    rows = read_metrics(out / "metrics.csv")
    if not rows or rows[-1]["step"] < preset.steps:
        raise KeyboardInterrupt  # in train.py Ctrl-C ends a run early and keeps what it has
    return False


def read_metrics(path: Path) -> list[dict[str, float]]:
    with path.open(newline="") as file:
        return [{key: float(row[key]) for key in COLUMNS if row[key]} for row in csv.DictReader(file)]


def to_points(rows: Sequence[dict[str, float]], diverged: bool) -> list[Point]:
    points = [
        Point(row["step"], seconds, row["tokens"], row["val_loss"])
        for row, seconds in zip(rows, without_warm_up(rows), strict=True)
        if "val_loss" in row
    ]
    return [*points, Point(math.inf, math.inf, math.inf, math.inf)] if diverged else points


def to_rows(runs: Iterable[Run]) -> list[dict[str, Any]]:
    return [
        {"optimizer": run.optimizer, "learning_rate": run.lr, "seed": run.seed, "step": point.step}
        | {"tokens": point.tokens, "seconds": round(point.seconds, 4), "val_loss": point.loss}
        | {"optimizer_ms": run.optimizer_ms}
        for run in runs
        for point in run.points
    ]


def from_rows(rows: Sequence[dict[str, str]]) -> list[Run]:
    def name(row: dict[str, str]) -> tuple[str, float, int, float]:
        return row["optimizer"], float(row["learning_rate"]), int(row["seed"]), float(row["optimizer_ms"])

    def point(row: dict[str, str]) -> Point:
        return Point(*(float(row[column]) for column in ("step", "seconds", "tokens", "val_loss")))

    return [Run(*named[:3], [point(row) for row in some], named[3]) for named, some in groupby(rows, name)]


def report(csv_path: Path, target: float | None = None) -> tuple[str, str | None]:
    """Draws the figure beside the CSV; returns the result in markdown, and why there is no verdict, if so."""
    rows = read_csv(csv_path, "val_loss")
    try:
        runs = from_rows(rows)
        target = target or float(rows[0]["target"] or 0) or None
        by_name = {name: [run for run in runs if run.optimizer == name] for name in LABELS}
        if not all(by_name.values()):
            raise ValueError(by_name)
    except (KeyError, TypeError, ValueError) as error:
        raise foreign(csv_path) from error
    best = {name: [run for run in some if run.lr == best_lr(some, target)] for name, some in by_name.items()}
    draw(by_name, best, csv_path.with_suffix(".png"))
    measure = "final loss" if target is None else f"steps to {target:g}"
    lines = [f"- {LABELS[name]}, {measure} by learning rate: {sweep_line(by_name[name], target)}" for name in LABELS]
    undecided = edges(by_name, target)
    if undecided is None:
        lines += ["", *table(best, target), "", verdict(best) if target is None else reached(best, target)]
        lines += [] if target is None else ["", on_the_way(best, target)]
    return "\n".join([*lines, "", source(csv_path, rows[0])]), undecided


def sweep_line(runs: Sequence[Run], target: float | None) -> str:
    def found(run: Run) -> str:
        if math.isinf(run.final):
            return "diverged"
        if target is None:
            return f"{run.final:.4f}"
        steps = crossing(run.points, target)[0]
        return "never" if math.isinf(steps) else f"{steps:,.0f}"

    best = best_lr(runs, target)
    points = {run.lr: f"{run.lr:g}: {found(run)}" for run in swept(runs)}
    return ", ".join(f"**{point}**" if lr == best else point for lr, point in points.items())


def edges(by_name: dict[str, list[Run]], target: float | None) -> str | None:
    """Why there can be no verdict yet, if so."""
    everyone = [run for runs in by_name.values() for run in runs]
    if target is not None and all(math.isinf(crossing(run.points, target)[0]) for run in everyone):
        return f"no verdict: no run reaches {target:g}"
    for name, runs in by_name.items():
        direction = edge(runs, target)
        best = best_lr(runs, target)
        if direction is not None:
            found = f"{LABELS[name]}'s best learning rate, {best:g}, is at the edge of its sweep"
            further = f"add {next_lr(runs, direction):g} to --{name}-lrs, or a larger --extend"
            return f"no verdict: {found}, and a {direction} one may be better; {further}"
        diverged = [run for run in runs if run.lr == best and math.isinf(run.final)]
        if diverged:
            found = f"{LABELS[name]}'s best learning rate, {diverged[0].lr:g}, diverged with seed {diverged[0].seed}"
            return f"no verdict: {found}; leave it out of --{name}-lrs"
    return None


def table(best: dict[str, list[Run]], target: float | None) -> list[str]:
    """One row an optimizer, at its best learning rate: mean (lowest-highest) over the seeds."""
    loss = statistics.fmean(run.final for run in best["adamw"]) if target is None else target
    heading = ["optimizer", "learning rate", "seeds", "final loss", "lowest"]
    heading += [f"{what} to {loss:.4f}" for what in ("steps", "seconds")]
    heading += ["optimizer, ms", "tokens/s"]
    lines = ["| " + " | ".join(heading) + " |", "|---" * len(heading) + "|"]
    for name, runs in best.items():
        cells = [LABELS[name], f"{runs[0].lr:g}", str(len(runs))]
        finals, lowest = [run.final for run in runs], [min(point.loss for point in run.points) for run in runs]
        cells += [spread(statistics.fmean(some), some, ".4f", "diverged") for some in (finals, lowest)]
        mean, seeds = crossing(mean_curve(runs), loss), [crossing(run.points, loss) for run in runs]
        cells.append(spread(mean[0], [steps for steps, _ in seeds], ",.0f", "never"))
        cells.append(spread(mean[1], [seconds for _, seconds in seeds], ",.1f", "never"))
        ends = [run.points[-1] for run in runs if math.isfinite(run.final)]
        speed = sum(end.tokens for end in ends) / sum(end.seconds for end in ends)
        optimizer_ms = statistics.median(run.optimizer_ms for run in runs)
        lines.append("| " + " | ".join([*cells, f"{optimizer_ms:.2f}", f"{speed:,.0f}"]) + " |")
    return lines


def spread(mean: float, values: Sequence[float], style: str, infinite: str) -> str:
    """`1.61 (1.60-1.62)`: the mean, and from the lowest to the highest seed."""
    middle, low, high = (
        infinite if math.isinf(value) else format(value, style) for value in (mean, min(values), max(values))
    )
    return middle if len(values) == 1 else f"{middle} ({low}-{high})"


def reached(best: dict[str, list[Run]], loss: float) -> str:
    muon, adamw = (crossing(mean_curve(best[name]), loss) for name in ("muon", "adamw"))
    if math.isinf(muon[0]) or math.isinf(adamw[0]):
        return f"Not both reach {loss:g}."
    if any(mean_curve(runs)[0].loss <= loss for runs in best.values()):
        return f"Not both are above {loss:g} at their first validation: how many steps it takes can't be told."
    steps, seconds = muon[0] / adamw[0], muon[1] / adamw[1]
    return f"To {loss:g} Muon needs {steps:.2f} of AdamW's steps and {seconds:.2f} of its seconds."


def on_the_way(best: dict[str, list[Run]], loss: float) -> str:
    """Muon's share of AdamW's steps to every loss at which AdamW validated, unless Muon's first is lower already."""
    muon, adamw = (mean_curve(best[name]) for name in ("muon", "adamw"))
    shares = [
        f"{point.loss:.4f}: {crossing(muon, point.loss)[0] / point.step:.2f}"
        for point in takewhile(lambda point: point.loss > loss, adamw)
        if muon[0].loss > point.loss and math.isfinite(crossing(muon, point.loss)[0])
    ]
    return f"On the way, to a loss of {', '.join(shares)}." if shares else ""


def verdict(best: dict[str, list[Run]]) -> str:
    finals = {name: [run.final for run in runs] for name, runs in best.items()}
    mean = {name: statistics.fmean(losses) for name, losses in finals.items()}
    first, second = sorted(LABELS, key=mean.__getitem__)
    apart = max(finals[first]) < min(finals[second])
    ended = f"{LABELS[first]} ends at {mean[first]:.4f}, {LABELS[second]} at {mean[second]:.4f}"
    if not apart:
        ended += "; their seeds overlap, so neither wins"
    elif len(finals[first]) == 1:
        ended += "; one seed each, so their spread is unknown"
    muon, adamw = (crossing(mean_curve(best[name]), mean["adamw"]) for name in ("muon", "adamw"))
    if math.isinf(muon[0]):
        return f"{ended}. Muon never reaches AdamW's final loss."
    return (
        f"{ended}. Muon reaches AdamW's final loss with {muon[0] / adamw[0]:.2f} of its steps "
        f"and {muon[1] / adamw[1]:.2f} of its seconds."
    )


def main(argv: Sequence[str] | None = None) -> str:
    """The whole comparison; returns its result in markdown. A UserError if there is no verdict."""
    args, rest = parse_arguments(argv)
    csv_path = args.report or args.csv or args.out / "compare.csv"
    if args.report is None:
        compare(args, rest, csv_path, argv)
    text, undecided = report(csv_path, args.target)
    print(f"\n{text}")
    if undecided is not None:
        raise UserError(undecided)
    return text


def compare(args: Namespace, rest: list[str], csv_path: Path, argv: Sequence[str] | None) -> None:
    """Sweep and, if both best points lie inside, run the seeds; all goes into the CSV."""
    writable(csv_path)
    sweeps = {name: sweep(name, args, rest) for name in LABELS}
    runs = [run for some in sweeps.values() for run in some]
    if edges(sweeps, args.target) is None:
        for name, some in sweeps.items():
            seeds = range(FIRST_SEED + 1, FIRST_SEED + args.seeds)
            runs += [trained(name, best_lr(some, args.target), seed, args.out, rest) for seed in seeds]
    device = pick_device(options.parse(rest)[0].device)
    write_csv(csv_path, to_rows(runs), {"target": args.target} | setting("examples.compare", argv, device))


if __name__ == "__main__":
    run(main)
