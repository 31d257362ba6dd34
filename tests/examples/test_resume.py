"""A run that is killed at any moment and resumed ends as one that was left alone, to the bit."""

import csv
import dataclasses
import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.commands import complaint
from hypothesis import given, settings
from hypothesis import strategies as st
from tqdm import tqdm

from examples import sample, train
from examples.gpt import checkpoint, cli
from examples.gpt.presets import PRESETS

TIMES = {"seconds", "tokens_per_second", "ms_per_step", "optimizer_ms", "mfu"}
SIZE = ["--layers", "1", "--width", "16", "--heads", "2", "--context", "16", "--batch", "4", "--device", "cpu"]
RUNS = {
    "muon": ["--steps", "14", "--checkpoint-every", "3", *SIZE],
    # Everything that keeps a state of its own: dropout, the scaler, QK-clip; a checkpoint at every step.
    "all": [
        "--preset", "shakespeare-char", "--steps", "9", "--checkpoint-every", "1", *SIZE, "--no-compile",
        "--dtype", "float16", "--qk-clip", "0.01", "--batch-tokens", "128",
    ],
    "adamw": ["--optimizer", "adamw", "--schedule", "cosine", "--steps", "14", "--checkpoint-every", "4", *SIZE],
}  # fmt: skip


needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="kills a process that it forked")


@pytest.fixture(scope="module", autouse=True)
def rows_and_validations_come_often():
    """And nothing takes time that isn't tested here."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("cpu", "shakespeare-char"):
            often = dataclasses.replace(PRESETS[name], log_every=2, eval_every=4, eval_batches=2)
            patch.setitem(PRESETS, name, often)
        patch.setattr(train, "plot", lambda *_: None)
        # tqdm's lock is shared with forked processes: one that is killed would keep it.
        patch.setattr(tqdm, "_lock", threading.RLock(), raising=False)
        patch.setattr(tqdm, "monitor_interval", 0)
        yield


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "text.txt"
    path.write_text("".join(f"def square_{i}(x):\n    return x * x + {i}\n\n" for i in range(100)))
    return path


def run_with(name: str, text: Path, out: Path) -> list[str]:
    return [*RUNS[name], "--data", str(text), "--out", str(out)]


def events(argv: list[str], at: Callable[[int], None]) -> int:
    """Train, and call `at` with the number of every function's call and return, Python's and C's."""
    count = 0

    def profile(*_: object) -> None:
        nonlocal count
        count += 1
        at(count)

    sys.setprofile(profile)
    try:
        train.main(argv)
    finally:
        sys.setprofile(None)
    return count


def in_a_fork(run: Callable[[], object]) -> int:
    """The exit code of a process that runs it, silently; negative for the signal that ended it."""
    child = os.fork()
    if child == 0:
        try:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            os.dup2(1, 2)
            run()
            os._exit(0)
        finally:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def result(out: Path) -> dict[str, Any]:
    """Everything that a run leaves, apart from times."""
    last, best = (checkpoint.read(out / name) for name in ("last.pt", "best.pt"))
    del last["about"], best["about"], last["seconds"]
    with (out / "metrics.csv").open(newline="") as file:
        metrics = list(csv.DictReader(file))
    for row in [*last["rows"], *metrics]:
        for name in TIMES:
            del row[name]
    return {"last": last, "best": best, "metrics": metrics, "sample": (out / "sample.txt").read_text()}


def assert_same(first: Any, second: Any, where: str = "") -> None:
    assert type(first) is type(second), where
    if isinstance(first, torch.Tensor):
        assert torch.equal(first, second), where
    elif isinstance(first, dict):
        assert first.keys() == second.keys(), where
        for name in first:
            assert_same(first[name], second[name], f"{where}/{name}")
    elif isinstance(first, list):
        assert len(first) == len(second), where
        for i, pair in enumerate(zip(first, second, strict=True)):
            assert_same(*pair, f"{where}/{i}")
    else:
        assert first == second, where


@pytest.fixture(scope="module")
def whole(text: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[dict[str, Any], int]]:
    """What each run leaves if it is left alone, and how many events it has."""
    runs = {}
    for name in RUNS:
        out = tmp_path_factory.mktemp(name)
        train.main(run_with(name, text, out))  # the first one imports things
        runs[name] = result(out), events(run_with(name, text, out), lambda _: None)
    return runs


def resumed(argv: list[str], out: Path) -> list[str]:
    """Whoever was killed before the first checkpoint starts again."""
    return ["--resume", "--out", str(out)] if (out / "last.pt").exists() else argv


@needs_fork
@pytest.mark.parametrize("name", RUNS)
def test_a_killed_run_goes_on_bit_for_bit(
    name: str, whole: dict[str, Any], text: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    expected, count = whole[name]

    @settings(max_examples=8)
    @given(st.lists(st.floats(0.02, 0.99), min_size=1, max_size=2))
    def killed_and_resumed(moments: list[float]) -> None:
        """Once, or a second time after resuming, if that run has so many events left."""
        out = tmp_path_factory.mktemp("killed")
        argv = run_with(name, text, out)
        for number, moment in enumerate(moments):
            at = int(moment * count)
            code = in_a_fork(lambda at=at: events(resumed(argv, out), lambda i: kill() if i == at else None))
            assert code == -signal.SIGKILL or (number == 1 and code == 0), code
        train.main(resumed(argv, out))
        assert_same(result(out), expected)

    killed_and_resumed()


@needs_fork
@pytest.mark.parametrize("function", ["fsync", "replace"])
def test_killed_while_a_checkpoint_is_written(
    function: str, whole: dict[str, Any], text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the file is on the disk, and before it takes the old one's place."""
    argv, original, calls = run_with("muon", text, tmp_path), getattr(os, function), iter(range(100))

    def once_or_die(*args: Any) -> None:
        if next(calls) == 3:
            (tmp_path / "last.tmp").write_bytes(b"half")
            kill()
        original(*args)

    monkeypatch.setattr(os, function, once_or_die)
    assert in_a_fork(lambda: train.main(argv)) == -signal.SIGKILL
    monkeypatch.undo()
    assert (tmp_path / "last.pt").exists()
    train.main(["--resume", "--out", str(tmp_path)])
    assert_same(result(tmp_path), whole["muon"][0])


def test_ctrl_c_between_two_rows_goes_on_bit_for_bit(
    whole: dict[str, Any], text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = train.data.training_batch

    def batch_and_interrupt(*args: Any, **kwargs: Any) -> Any:
        if kwargs["step"] == 4:
            os.kill(os.getpid(), signal.SIGINT)
        return original(*args, **kwargs)

    monkeypatch.setattr(train.data, "training_batch", batch_and_interrupt)
    train.main(run_with("all", text, tmp_path))
    assert checkpoint.read(tmp_path / "last.pt")["step"] == 5  # rows are at even steps
    monkeypatch.setattr(train.data, "training_batch", original)
    train.main(["--resume", "--out", str(tmp_path)])
    assert_same(result(tmp_path), whole["all"][0])


def test_a_finished_run_stays_as_it_is(text: Path, whole: dict[str, Any], tmp_path: Path) -> None:
    train.main(run_with("muon", text, tmp_path))
    summary = train.main(["--resume", "--out", str(tmp_path)])
    assert_same(result(tmp_path), whole["muon"][0])
    assert summary["val_loss"] == float(result(tmp_path)["metrics"][-1]["val_loss"])


@pytest.fixture(scope="module")
def finished(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("finished")
    train.main([*run_with("adamw", text, out), "--lr", "0.01"])
    return out


@pytest.mark.parametrize(
    ("option", "says"),
    [
        (["--lr", "0.02"], "--lr 0.02: the run in {out} was started with --lr 0.01"),
        (["--seed", "1"], "--seed 1: the run in {out} was started with --seed 0"),
        (["--preset", "gpt2-124m"], "started with --preset cpu"),
        (["--clip", "1"], "started without --clip"),
        (["--optimizer", "muon"], "started with --optimizer adamw"),
        (["--data", "other.txt"], "--data other.txt"),
        (["--compile"], "--compile"),
    ],
)
def test_other_options_are_named(
    option: list[str],
    says: str,
    finished: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    said = complaint(train.main, ["--resume", "--out", str(finished), *option], monkeypatch, capsys)
    assert says.format(out=finished) in said


def test_the_same_options_may_be_given_again(finished: Path, text: Path) -> None:
    train.main([*run_with("adamw", text, finished), "--lr", "0.01", "--resume"])


def broken(saved: dict[str, Any]) -> dict[str, Any]:
    return saved | {"model": {name: tensor[:1] for name, tensor in saved["model"].items()}}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda path: path.unlink(), "there is no"),
        (lambda path: path.write_bytes(path.read_bytes()[:1000]), "damaged"),
        (lambda path: path.write_bytes(path.read_bytes()[:-1000]), "damaged"),
        (lambda path: path.write_bytes(b""), "damaged"),
        (lambda path: path.write_text("a letter"), "damaged"),
        (lambda path: torch.save(torch.zeros(3), path), "damaged"),
        (lambda path: torch.save({"model": {}}, path), "damaged"),
        (lambda path: torch.save({"model": {}, "about": {}, "format": checkpoint.FORMAT + 1}, path), "format 2"),
        (lambda path: torch.save(PRESETS["cpu"], path), "damaged"),  # code, which is never run
        (lambda path: torch.save(broken(checkpoint.read(path)), path), "damaged"),
        (lambda path: torch.save({"model": {}, "about": {}, "format": checkpoint.FORMAT}, path), "damaged"),
        (lambda path: torch.save({"model": {}, "about": None, "format": checkpoint.FORMAT}, path), "damaged"),
    ],
)
@pytest.mark.parametrize("command", ["train", "sample"])
def test_a_bad_checkpoint_is_one_line(
    command: str,
    change: Callable[[Path], object],
    says: str,
    finished: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = tmp_path / "run"
    out.mkdir()
    saved = torch.load(finished / "last.pt", weights_only=True)
    saved["about"]["options"]["out"] = str(out)
    torch.save(saved, out / "last.pt")
    change(out / "last.pt")
    if command == "train":
        assert says in complaint(train.main, ["--resume", "--out", str(out)], monkeypatch, capsys)
        return
    with pytest.raises(cli.UserError, match=says):
        sample.main(["--run", str(out)])


def test_an_option_that_is_gone_is_one_line(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A preset of another version has other fields."""
    saved = checkpoint.read(finished / "last.pt")
    saved["about"]["preset"]["z_loss"] = 0.1
    torch.save(saved, tmp_path / "last.pt")
    assert "damaged, or not" in complaint(train.main, ["--resume", "--out", str(tmp_path)], monkeypatch, capsys)


def test_a_checkpoint_that_may_not_be_read_is_not_called_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(path: Path, **_: object) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(torch, "load", load)
    with pytest.raises(cli.UserError, match=r"cannot read .*last.pt: Permission denied"):
        checkpoint.read(tmp_path / "last.pt")


def test_two_runs_in_one_folder_are_refused(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """They would mix their checkpoints. The folder is free again as soon as the first run has ended, however it did."""
    with pytest.raises(ZeroDivisionError), checkpoint.locked(tmp_path / "run"):
        assert "another run is writing to" in complaint(
            train.main, run_with("adamw", text, tmp_path / "run"), monkeypatch, capsys
        )
        assert not list((tmp_path / "run").iterdir())
        raise ZeroDivisionError
    with checkpoint.locked(tmp_path / "run"):
        pass


def test_changed_data_is_noticed(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = tmp_path / "copy.txt"
    copy.write_text(text.read_text())
    train.main(run_with("adamw", copy, tmp_path / "run"))
    copy.write_text(text.read_text() + "more\n")
    assert "the data has changed" in complaint(
        train.main, ["--resume", "--out", str(tmp_path / "run")], monkeypatch, capsys
    )


def test_a_new_run_forgets_the_old_one(text: Path, tmp_path: Path) -> None:
    """Or a sample would come from the other run's best model."""
    train.main(run_with("adamw", text, tmp_path))
    with pytest.raises(cli.UserError, match="diverged"):
        train.main([*run_with("muon", text, tmp_path), "--lr", "1e30"])
    assert not (tmp_path / "best.pt").exists()


def test_a_full_disk_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(cli.UserError, match="cannot write"):
        checkpoint.write(tmp_path / "missing" / "last.pt", {})
