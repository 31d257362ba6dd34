"""The comparison's logic on a trainer whose losses are known beforehand, and once on the real one."""

import csv
import json
import math
import re
from pathlib import Path

import numpy as np
import pytest
from helpers.commands import complaint
from hypothesis import given, settings
from hypothesis import strategies as st

from docs.draw import results
from examples import compare, train
from examples.gpt import logging
from examples.gpt.cli import UserError
from examples.gpt.sweep import Point, Run, crossing, edge, mean_curve, next_lr, without_warm_up

BEST = {"muon": 0.02, "adamw": 4e-3}
FLOOR = {"muon": 1.0, "adamw": 2.0}
STEPS, EVERY, COMPILING = 100, 10, 30.0


def fake_loss(optimizer: str, lr: float, seed: int, step: int) -> float:
    """Falls linearly by 4 from the start to the end; a parabola in log lr; 0.1 more for each seed."""
    return FLOOR[optimizer] + math.log2(lr / BEST[optimizer]) ** 2 + 0.1 * seed + 4 * (1 - step / STEPS)


class FakeTrainer:
    """Writes the metrics that such a run leaves. The first seed's runs take 30 s longer, as if they compiled."""

    def __init__(self) -> None:
        self.commands: list[list[str]] = []
        self.stop_at: int | None = None

    def main(self, argv: list[str]) -> None:
        self.commands.append(argv)
        given = dict(zip(argv[::2], argv[1::2], strict=True))
        optimizer, lr, seed = given["--optimizer"], float(given["--lr"]), int(given["--seed"])
        compiling = COMPILING * (seed == 0)
        seconds_a_step = {"muon": 0.32, "adamw": 0.16}[optimizer]
        out = Path(given["--out"])
        (out / "last.pt").touch()
        with (out / "metrics.csv").open("w", newline="") as file:
            writer = csv.DictWriter(file, logging.COLUMNS)
            writer.writeheader()
            for step in range(EVERY // 2, (STEPS if self.stop_at is None else self.stop_at) + 1, EVERY // 2):
                if lr > 1:
                    raise UserError(f"the loss is nan at step {step}: the training diverged; lower --lr")
                first = compiling * (step == EVERY // 2)
                row = {"step": step, "tokens": 64 * step, "seconds": step * seconds_a_step + compiling}
                row |= {"ms_per_step": 1e3 * seconds_a_step + 1e3 * first / (EVERY // 2)}
                row |= {"optimizer_ms": {"muon": 3.0, "adamw": 1.0}[optimizer] + first}
                if step % EVERY == 0:
                    row["val_loss"] = fake_loss(optimizer, lr, seed, step)
                writer.writerow(row)


@pytest.fixture
def trainer(monkeypatch: pytest.MonkeyPatch) -> FakeTrainer:
    fake = FakeTrainer()
    monkeypatch.setattr(train, "main", fake.main)
    return fake


def options(folder: Path, *more: str) -> list[str]:
    return ["--out", str(folder), *more, "--steps", str(STEPS), "--batch", "4", "--device", "cpu"]


def rates(trainer: FakeTrainer, optimizer: str) -> list[float]:
    return [
        float(argv[argv.index("--lr") + 1])
        for argv in trainer.commands
        if optimizer in argv and argv[argv.index("--seed") + 1] == "0"
    ]


def test_the_table_and_the_verdict(trainer: FakeTrainer, tmp_path: Path) -> None:
    """All numbers follow from `fake_loss`; the 30 s of compiling are in none of them."""
    text = compare.main(options(tmp_path))
    assert rates(trainer, "muon") == [0.01, 0.02, 0.04] and rates(trainer, "adamw") == [0.002, 0.004, 0.008]
    assert len(trainer.commands) == 6 + 2 * 2
    assert "- Muon, final loss by learning rate: 0.01: 2.0000, **0.02: 1.0000**, 0.04: 2.0000\n" in text
    assert "steps to 2.1000 | seconds to 2.1000 |" in text
    losses = "1.1000 (1.0000-1.2000) | 1.1000 (1.0000-1.2000)"
    assert f"| Muon | 0.02 | 3 | {losses} | 75 (72-78) | 24.0 (23.2-24.8) |" in text
    losses = "2.1000 (2.0000-2.2000) | 2.1000 (2.0000-2.2000)"
    assert f"| AdamW | 0.004 | 3 | {losses} | 100 (98-never) | 16.0 (15.6-never) |" in text
    assert re.search(r"\| 3.00 \| 200 \|\n.*\| 1.00 \| 400 \|", text)
    assert "Muon ends at 1.1000, AdamW at 2.1000. Muon reaches AdamW's final loss with 0.75 of its steps" in text
    assert "and 1.50 of its seconds." in text
    assert (tmp_path / "compare.png").read_bytes().startswith(b"\x89PNG")
    assert not list(tmp_path.rglob("*.pt"))


def test_both_optimizers_get_the_same(trainer: FakeTrainer, tmp_path: Path) -> None:
    compare.main(options(tmp_path, "--seeds", "2"))
    shared = set()
    for argv in trainer.commands:
        given = dict(zip(argv[::2], argv[1::2], strict=True))
        assert {given.pop("--optimizer"), given.pop("--lr"), given.pop("--seed"), given.pop("--out")}
        shared.add(tuple(given.items()))
    assert len(shared) == 1
    assert {("--steps", str(STEPS)), ("--batch", "4")} < set(*shared)
    seeds = [argv[argv.index("--seed") + 1] for argv in trainer.commands]
    assert sorted(seeds) == ["0"] * 6 + ["1"] * 2


def test_a_report_is_what_the_comparison_said(trainer: FakeTrainer, tmp_path: Path) -> None:
    text = compare.main(options(tmp_path / "runs", "--csv", str(tmp_path / "docs" / "result.csv"), "--target", "1.5"))
    trained = len(trainer.commands)
    (tmp_path / "docs" / "result.png").unlink()
    assert compare.main(["--report", str(tmp_path / "docs" / "result.csv")]) == text
    assert len(trainer.commands) == trained
    assert "Not both reach 1.5." in text and (tmp_path / "docs" / "result.png").exists()
    with (tmp_path / "docs" / "result.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 10 * STEPS // EVERY
    assert all(row["command"].startswith("python -m examples.compare --out") and row["torch"] for row in rows)


def test_finished_runs_are_not_repeated(trainer: FakeTrainer, tmp_path: Path) -> None:
    text = compare.main(options(tmp_path))
    trained = len(trainer.commands)
    assert compare.main(options(tmp_path)) == text
    assert len(trainer.commands) == trained
    (tmp_path / "adamw-0.004-seed2" / "finished.json").unlink()
    assert compare.main(options(tmp_path)) == text
    assert len(trainer.commands) == trained + 1
    compare.main(options(tmp_path, "--seeds", "4"))
    assert len(trainer.commands) == trained + 3
    with pytest.raises(UserError, match="other options"):
        compare.main([*options(tmp_path), "--context", "64"])


def test_a_run_that_was_stopped_is_repeated(trainer: FakeTrainer, tmp_path: Path) -> None:
    for trainer.stop_at in (50, 0):
        with pytest.raises(KeyboardInterrupt):
            compare.main(options(tmp_path))
    trainer.stop_at = None
    compare.main(options(tmp_path))
    assert rates(trainer, "muon") == [0.01, 0.01, 0.01, 0.02, 0.04]


def test_no_winner_at_an_edge(trainer: FakeTrainer, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = options(tmp_path, "--adamw-lrs", "1e-3", "2e-3")
    expected = "AdamW's best learning rate, 0.002, .* a larger one may be better; add 0.004 to --adamw-lrs"
    with pytest.raises(UserError, match=expected):
        compare.main(small)
    assert len(trainer.commands) == 5  # no seeds for nothing
    printed = capsys.readouterr().out
    assert "0.001: 6.0000, **0.002: 3.0000**" in printed and "reaches" not in printed and "| Muon" not in printed
    with pytest.raises(UserError, match=expected):
        compare.main(["--report", str(tmp_path / "compare.csv")])
    assert "0.71 of its steps" not in compare.main([*small, "--extend", "2"])
    assert rates(trainer, "adamw") == [0.001, 0.002, 0.004, 0.008]


def test_the_sweep_extends_to_smaller_ones_no_further_than_allowed(trainer: FakeTrainer, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"a smaller one may be better; add 0\.04 to --muon-lrs"):
        compare.main(options(tmp_path, "--muon-lrs", "0.32", "0.64", "--extend", "2"))
    assert rates(trainer, "muon") == [0.32, 0.64, 0.16, 0.08]


def test_a_diverged_run_is_a_point(trainer: FakeTrainer, tmp_path: Path) -> None:
    text = compare.main(options(tmp_path, "--muon-lrs", "0.01", "0.02", "2", "--seeds", "1"))
    assert "0.01: 2.0000, **0.02: 1.0000**, 2: diverged" in text
    trained = len(trainer.commands)
    assert compare.main(options(tmp_path, "--muon-lrs", "0.01", "0.02", "2", "--seeds", "1")) == text
    assert len(trainer.commands) == trained
    with pytest.raises(UserError, match="smaller one may be better; add 1 to --muon-lrs"):
        compare.main(options(tmp_path, "--muon-lrs", "2", "4"))


def test_no_winner_where_a_seed_diverged(trainer: FakeTrainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The mean over the seeds is infinite, and whatever is compared with it looks good."""

    def main(argv: list[str]) -> None:
        trainer.main(argv)
        if "adamw" in argv and argv[argv.index("--seed") + 1] == "1":
            raise UserError("the loss is nan at step 100: the training diverged; lower --lr")

    monkeypatch.setattr(train, "main", main)
    with pytest.raises(UserError, match=r"no verdict: AdamW's best learning rate, 0.004, diverged with seed 1"):
        compare.main(options(tmp_path))


def test_a_target_is_what_the_learning_rates_are_picked_for(
    trainer: FakeTrainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A small model on little data overfits, and then the lowest final loss is that of the slowest learning rate."""

    usual = fake_loss

    def loss(optimizer: str, lr: float, seed: int, step: int) -> float:
        return usual(optimizer, lr, seed, step) if step < STEPS else 10 * lr / BEST[optimizer]

    monkeypatch.setitem(globals(), "fake_loss", loss)
    with pytest.raises(UserError, match=r"no verdict: Muon's best learning rate, 0\.01,"):
        compare.main(options(tmp_path))
    text = compare.main(options(tmp_path, "--target", "3"))
    assert "Muon, steps to 3 by learning rate: 0.01: 75, **0.02: 50**, 0.04: 75" in text
    assert "AdamW, steps to 3 by learning rate: 0.002: never, **0.004: 75**, 0.008: never" in text
    assert "To 3 Muon needs 0.68 of AdamW's steps" in text and "ends at" not in text
    assert "steps to 3.0000 | seconds to 3.0000 |" in text
    # The mean curves are 5.1 - 0.04 step and 6.1 - 0.04 step.
    assert "\nOn the way, to a loss of 4.5000: 0.38, 4.1000: 0.50, 3.7000: 0.58, 3.3000: 0.64.\n" in text


def test_no_verdict_about_a_target_that_no_run_reaches(trainer: FakeTrainer, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no verdict: no run reaches 0\.5"):
        compare.main(options(tmp_path, "--target", "0.5"))
    assert len(trainer.commands) == 6


def test_no_share_of_steps_to_a_target_below_the_first_validation(trainer: FakeTrainer, tmp_path: Path) -> None:
    text = compare.main(options(tmp_path, "--target", "5.65"))  # AdamW's first is 5.7, Muon's 4.7
    assert "Not both are above 5.65 at their first validation: how many steps it takes can't be told." in text


def test_seeds_that_overlap_have_no_winner(
    trainer: FakeTrainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(FLOOR, "adamw", 1.15)
    assert "Muon ends at 1.1000, AdamW at 1.2500; their seeds overlap, so neither wins" in compare.main(
        options(tmp_path)
    )
    monkeypatch.setitem(FLOOR, "adamw", 0.5)
    text = compare.main(options(tmp_path / "other"))
    assert "AdamW ends at 0.6000, Muon at 1.1000. Muon never reaches AdamW's final loss." in text
    text = compare.main(options(tmp_path / "third", "--seeds", "1"))
    assert "AdamW ends at 0.5000, Muon at 1.0000; one seed each, so their spread is unknown" in text


def points(steps: list[float], losses: list[float]) -> list[Point]:
    return [Point(step, 2 * step, 8 * step, loss) for step, loss in zip(steps, losses, strict=True)]


@settings(max_examples=50)
@given(st.lists(st.floats(0.01, 10), min_size=2, max_size=8, unique=True), st.floats(0, 1))
def test_crossing_is_the_inverse_of_the_curve(losses: list[float], part: float) -> None:
    losses = sorted(losses, reverse=True)
    steps = [10.0 * (i + 1) for i in range(len(losses))]
    loss = losses[-1] + part * (losses[0] - losses[-1])
    step, seconds = crossing(points(steps, losses), loss)
    assert np.interp(step, steps, losses) == pytest.approx(loss, abs=1e-9)
    assert seconds == pytest.approx(2 * step)
    assert crossing(points(steps, losses), losses[-1] - 1e-6) == (math.inf, math.inf)


def test_crossing_is_the_first() -> None:
    assert crossing(points([10, 20, 30, 40], [3.0, 1.0, 3.0, 0.0]), 2.0) == (15, 30)
    assert crossing(points([10, 20], [math.inf, 1.0]), 1.5) == (20, 40)


def test_mean_curve() -> None:
    runs = [Run("muon", 1.0, seed, points([10, 20], [seed + 1.0, 1.0]), 0) for seed in range(2)]
    assert mean_curve(runs) == points([10, 20], [1.5, 1.0])


def test_edges_of_a_grid_that_is_not_in_order() -> None:
    def runs(losses: dict[float, float]) -> list[Run]:
        return [Run("muon", lr, 0, points([10], [loss]), 0) for lr, loss in losses.items()]

    assert edge(runs({0.4: 2.0, 0.1: 2.0, 0.2: 1.0})) is None
    assert edge(runs({0.4: 1.0, 0.1: 2.0, 0.2: 1.5})) == "larger"
    assert next_lr(runs({0.4: 1.0, 0.1: 2.0, 0.2: 1.5}), "larger") == 0.8
    assert edge(runs({0.1: 1.0})) is not None
    assert edge(runs({0.1: 1.0, 0.2: math.inf})) == "smaller"
    seeds = [*runs({0.1: 1.2, 0.2: 1.0, 0.4: 2.0}), Run("muon", 0.2, 1, points([10], [9.0]), 0)]
    assert edge(seeds) is None  # the sweep decides, not a seed


def test_without_warm_up() -> None:
    rows = [{"step": 5, "seconds": 40.0, "ms_per_step": 8e3}]
    assert without_warm_up(rows) == [40.0]
    rows += [{"step": 10 * i, "seconds": 40.0 + 2 * i, "ms_per_step": 200.0} for i in (1, 2)]
    assert without_warm_up(rows) == pytest.approx([1.0, 3.0, 5.0])


def test_the_real_trainer(tmp_path: Path) -> None:
    """Small, but with all that a run leaves; one learning rate diverges for real."""
    text = tmp_path / "text.txt"
    text.write_text("".join(f"def square_{i}(x):\n    return x * x + {i}\n\n" for i in range(500)))
    size = ["--layers", "1", "--width", "16", "--heads", "2", "--context", "16", "--batch", "4", "--steps", "20"]
    lrs = ["--muon-lrs", "1e-9", "0.02", "1e30", "--adamw-lrs", "1e-9", "0.01", "1e30", "--seeds", "1"]
    command = ["--out", str(tmp_path / "runs"), *lrs, "--data", str(text), "--device", "cpu", *size]
    result = compare.main(command)
    assert result.count("diverged") == 2
    assert re.search(r"\| Muon \| 0.02 \| 1 \| [\d.]+ \| [\d.]+ \| \w+ \| [\w.]+ \| [\d.]+ \| [\d,]+ \|\n", result)
    assert json.loads((tmp_path / "runs" / "muon-0.02-seed0" / "config.json").read_text())["preset"]["muon_lr"] == 0.02
    assert "validation" in (tmp_path / "runs" / "muon-0.02-seed0" / "log.txt").read_text()


def test_a_record_that_is_cut_off_is_named(trainer: FakeTrainer, tmp_path: Path) -> None:
    compare.main(options(tmp_path))
    record = tmp_path / "muon-0.02-seed0" / "finished.json"
    record.write_text("{")
    with pytest.raises(UserError, match=r"finished.json is damaged; remove"):
        compare.main(options(tmp_path))


def test_checkpoints_may_be_asked_for(tmp_path: Path) -> None:
    assert "--checkpoint-every" not in compare.parse_arguments(["--checkpoint-every=5"])[1]
    assert compare.parse_arguments(["--steps", "30"])[1][-2:] == ["--checkpoint-every", "30"]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--lr", "1"], "--muon-lrs"),
        (["--seed=1"], "--seeds"),
        (["--resume"], "--resume"),
        (["--muon-lrs", "fast"], "not a number"),
        (["--muon-lrs"], "--muon-lrs"),
        (["--preset", "gpt5"], "gpt2-124m"),
        (["--data", "nowhere", "--out", "{tmp}/runs"], "nowhere"),
        (["--report", "{tmp}/nowhere.csv"], "nowhere.csv"),
        (["--report", "{tmp}/other.csv"], "not a CSV that this command wrote"),
        (["--report", "{tmp}/metrics.csv"], "not a CSV that this command wrote"),
        (["--report", "{tmp}/half.csv"], "not a CSV that this command wrote"),
        (["--report", "{tmp}/words.csv"], "not a CSV that this command wrote"),
        (["--csv", "{tmp}/figure.png"], "--csv"),
        (["--csv", "{tmp}/other.csv/x.csv"], "cannot write"),
        (["--out", "{tmp}/other.csv"], "cannot write"),
    ],
)
def test_a_mistake(
    arguments: list[str],
    says: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "other.csv").write_text("a,b\n1,2\n")
    (tmp_path / "metrics.csv").write_text("step,val_loss\n1,2\n")  # of a run, not of a comparison
    columns = (
        "optimizer,learning_rate,seed,step,tokens,seconds,val_loss,optimizer_ms,target,device,torch,triton,command"
    )
    (tmp_path / "half.csv").write_text(f"{columns}\nmuon,0.01,0,10,10,1,2.5,1,,cpu,2,3,c\n")  # without AdamW
    (tmp_path / "words.csv").write_text(f"{columns}\nmuon,fast,0,10,10,1,2.5,1,,cpu,2,3,c\n")
    monkeypatch.chdir(tmp_path)
    argv = [argument.format(tmp=tmp_path) for argument in arguments]
    assert says in complaint(compare.main, argv, monkeypatch, capsys)


def test_the_page_of_results_is_filled_from_the_csv_files(trainer: FakeTrainer, tmp_path: Path) -> None:
    text = compare.main(options(tmp_path / "runs", "--csv", str(tmp_path / "results" / "a-b.csv")))
    page = tmp_path / "results.md"
    later = "<!-- c -->\n\nstays\n\n<!-- end -->\n"
    page.write_text(f"# R\n\n<!-- a-b -->\nold\n<!-- end -->\n\n{later}")
    filled = f"# R\n\n<!-- a-b -->\n\n{text}\n\n![a-b](results/a-b.png)\n\n<!-- end -->\n\n{later}"
    for _ in range(2):
        results.fill(page, tmp_path / "results")
        assert page.read_text() == filled
