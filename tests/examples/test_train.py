"""Small models trained in this process, and what a run leaves behind."""

import csv
import json
import math
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from examples import sample, train
from examples.gpt.cli import UserError
from examples.gpt.logging import COLUMNS
from examples.gpt.options import parse
from examples.gpt.presets import PRESETS
from examples.gpt.schedule import warmup_stable_decay

UNTRAINED = math.log(256)
FILES = {"best.pt", "config.json", "last.pt", "loss.png", "metrics.csv", "sample.txt"}


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "text.txt"
    path.write_text("".join(f"def square_{i}(x):\n    return x * x + {i}\n\n" for i in range(2000)))
    return path


def options(text: Path, out: Path, *more: str) -> list[str]:
    size = ["--layers", "2", "--width", "32", "--heads", "2", "--context", "32", "--batch", "8", "--steps", "60"]
    return ["--data", str(text), "--out", str(out), "--device", "cpu", *size, *more]


def read_metrics(out: Path) -> list[dict[str, float | None]]:
    with (out / "metrics.csv").open(newline="") as file:
        return [{key: float(value) if value else None for key, value in row.items()} for row in csv.DictReader(file)]


@pytest.mark.parametrize("optimizer", ["muon", "adamw"])
@pytest.mark.parametrize("attention", ["flash", "sdpa"])
def test_the_loss_falls(text: Path, tmp_path: Path, optimizer: str, attention: str) -> None:
    choice = ("--optimizer", optimizer, "--attention", attention)
    summary = train.main(options(text, tmp_path / "run", *choice))
    frozen = train.main(options(text, tmp_path / "frozen", *choice, "--lr", "1e-12"))
    assert frozen["val_loss"] < UNTRAINED - 1  # embedding and head alone learn which bytes are frequent
    assert summary["val_loss"] < frozen["val_loss"] - 0.3  # the hidden matrices learn more
    losses = [row["train_loss"] for row in read_metrics(tmp_path / "run")]
    assert losses[-1] < losses[0] - 1


@pytest.fixture(scope="module")
def finished(text: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    out = tmp_path_factory.mktemp("finished")
    return out, train.main(options(text, out))


def test_the_files_of_a_run_agree(finished: tuple[Path, dict[str, Any]]) -> None:
    out, summary = finished
    assert {file.name for file in out.iterdir()} == FILES
    rows = read_metrics(out)
    assert tuple(rows[0]) == COLUMNS
    assert [row["step"] for row in rows] == [10, 20, 30, 40, 50, 60]
    assert all(row["tokens"] == row["step"] * 8 * 32 for row in rows)
    assert all(math.isfinite(value) for row in rows for value in row.values() if value is not None)
    cpu = PRESETS["cpu"]
    warmup, decay = round(cpu.warmup * 60 / cpu.steps), round(cpu.decay * 60 / cpu.steps)
    rates = [cpu.muon_lr * warmup_stable_decay(step, 60, warmup, decay) for step in (9, 19, 29, 39, 49, 59)]
    assert [row["learning_rate"] for row in rows] == pytest.approx(rates)
    last = rows[-1]
    assert last["val_loss"] == summary["val_loss"]
    assert last["val_bits_per_byte"] == pytest.approx(summary["val_loss"] / math.log(2))
    assert last["tokens"] / last["seconds"] == pytest.approx(summary["tokens_per_second"])
    durations = [row["ms_per_step"] * 10 / 1e3 for row in rows]
    assert sum(durations) == pytest.approx(last["seconds"])
    assert (out / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert (out / "sample.txt").read_text().startswith("\n")
    assert json.loads((out / "config.json").read_text())["versions"]["torch"] == torch.__version__


def test_the_final_model_has_the_final_loss(finished: tuple[Path, dict[str, Any]], text: Path) -> None:
    out, summary = finished
    _, preset, _ = parse(options(text, out))
    model, _, _ = train.checkpoint.load(out, torch.device("cpu"))
    corpus = train.data.load(str(text), preset.context)
    loss = train.validate(model, corpus.val, preset, torch.device("cpu"))
    assert loss == pytest.approx(summary["val_loss"], abs=1e-5)


def test_the_same_seed_gives_the_same_run(finished: tuple[Path, dict[str, Any]], text: Path, tmp_path: Path) -> None:
    summary = train.main(options(text, tmp_path / "same"))
    other = train.main(options(text, tmp_path / "other", "--seed", "1"))
    assert summary["val_loss"] == pytest.approx(finished[1]["val_loss"], abs=1e-5)
    assert abs(other["val_loss"] - summary["val_loss"]) > 1e-4


def test_sample_writes_what_the_model_says(
    finished: tuple[Path, dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    out, _ = finished
    say = ["--run", str(out), "--prompt", "def ", "--length", "40", "--device", "cpu"]
    texts = []
    for more in (["--seed", "1"], ["--seed", "1"], ["--seed", "2"], ["--temperature", "0"], ["--top-k", "1"]):
        sample.main([*say, *more])
        texts.append(capsys.readouterr().out)
    same, again, other, greedy, likeliest = texts
    assert all(text.startswith("def ") and len(text) > 20 for text in texts)
    assert same == again != other
    assert greedy == likeliest


def test_sample_takes_a_prompt_that_is_no_text(
    finished: tuple[Path, dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    sample.main(["--run", str(finished[0]), "--prompt", "a\udcff", "--length", "3", "--device", "cpu"])
    assert capsys.readouterr().out.startswith("a\ufffd")


@pytest.mark.parametrize("optimizer", ["muon", "adamw"])
def test_a_loss_that_is_not_finite_stops_the_run(text: Path, tmp_path: Path, optimizer: str) -> None:
    with pytest.raises(UserError, match=r"step 10.* lower --lr"):
        train.main(options(text, tmp_path, "--optimizer", optimizer, "--lr", "1e30"))
    assert {file.name for file in tmp_path.iterdir()} == {"config.json", "metrics.csv"}
    assert read_metrics(tmp_path) == []


@pytest.mark.parametrize("steps", [3, 25])
def test_ctrl_c_keeps_what_was_learned(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], steps: int
) -> None:
    def batch_and_interrupt(*args: Any, **kwargs: Any) -> Any:
        if kwargs["step"] == steps - 1:
            os.kill(os.getpid(), signal.SIGINT)
        return original(*args, **kwargs)

    original = train.data.training_batch
    monkeypatch.setattr(train.data, "training_batch", batch_and_interrupt)
    before = signal.getsignal(signal.SIGINT)
    train.main(options(text, tmp_path))
    printed = capsys.readouterr().out
    assert f"stopped after {steps} of 60 steps; to go on: python -m examples.train --resume --out {tmp_path}" in printed
    assert torch.load(tmp_path / "last.pt", weights_only=True)["step"] == steps
    assert [row["step"] for row in read_metrics(tmp_path)] == list(range(10, steps, 10))
    assert {file.name for file in tmp_path.iterdir()} == FILES - {"best.pt"}  # which takes a validation
    assert signal.getsignal(signal.SIGINT) is before


@pytest.fixture
def listens_to_ctrl_c():
    """A process that a shell has put into the background inherits a SIGINT that is ignored."""
    inherited = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, inherited)


@pytest.mark.usefixtures("listens_to_ctrl_c")
def test_a_second_ctrl_c_stops_at_once() -> None:
    steps = train.interruptible(range(10))
    assert next(steps) == 0
    os.kill(os.getpid(), signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)
    assert list(steps) == []
