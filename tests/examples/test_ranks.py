"""Training on two processes that torchrun starts, killed and resumed, against one that was left alone."""

import csv
import os
import subprocess
import sys
from pathlib import Path

import pytest

from examples import train
from examples.gpt.cli import UserError

ROOT = Path(__file__).parents[2]
SIZE = [
    "--layers",
    "2",
    "--width",
    "32",
    "--heads",
    "2",
    "--context",
    "32",
    "--batch",
    "4",
    "--batch-tokens",
    "512",
    "--checkpoint-every",
    "5",
    "--steps",
    "12",
    "--device",
    "cpu",
]


def torchrun(*arguments: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *arguments]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)


DIES = """
import os
from examples import train

def batch_or_die(*args, step, **options):
    return os._exit(1) if step == 7 else original(*args, step=step, **options)

original, train.data.training_batch = train.data.training_batch, batch_or_die
train.main()
"""


def test_two_processes_train_to_the_loss_curve_of_one(tmp_path: Path) -> None:
    """Each of them with two micro-batches a step, where the one has four; step 7 is the third since a checkpoint."""
    text = tmp_path / "text.txt"
    text.write_text("".join(f"def cube_{i}(x):\n    return x * x * x + {i}\n\n" for i in range(400)))
    train.main([*SIZE, "--data", str(text), "--out", str(tmp_path / "one")])
    (tmp_path / "dies.py").write_text(DIES)
    killed = torchrun(str(tmp_path / "dies.py"), *SIZE, "--data", str(text), "--out", str(tmp_path / "two"))
    assert killed.returncode != 0
    assert {path.name for path in (tmp_path / "two").iterdir()} == {"config.json", "last.pt", "metrics.csv"}
    two = torchrun("-m", "examples.train", "--resume", "--out", str(tmp_path / "two"))
    assert two.returncode == 0, two.stderr
    assert two.stdout.count("validation loss") == 1  # only the first speaks
    files = [{path.name for path in (tmp_path / name).iterdir()} for name in ("one", "two")]
    assert files[0] == files[1]
    curves = [list(csv.DictReader((tmp_path / name / "metrics.csv").open(newline=""))) for name in ("one", "two")]
    assert len(curves[0]) == len(curves[1]) > 0
    for expected, found in zip(*curves, strict=True):
        for name in ("step", "tokens", "train_loss", "val_loss", "learning_rate"):
            assert float(found[name] or 0) == pytest.approx(float(expected[name] or 0), rel=1e-4), name


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--batch", "3"], "--batch 3 is not a multiple of the 2 processes"),
        (["--batch-tokens", "384"], "--batch-tokens 384 is not a multiple of --context 128 times 2 processes"),
    ],
)
def test_a_batch_that_cannot_be_shared_is_refused(
    options: list[str], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UserError, match=says):
        train.main([*options, "--out", str(tmp_path)])


def test_a_run_is_resumed_on_as_many_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train.main([*SIZE, "--out", str(tmp_path)])
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UserError, match=r"started on 1 process\(es\)"):
        train.main(["--resume", "--out", str(tmp_path)])
