"""A user's mistake is one line on stderr that says what to do, and exit code 2."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def command(module: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", module, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=120
    )


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("examples.train", "--data", "nowhere"), "nowhere is neither a file nor a folder"),
        (("examples.train", "--preset", "gpt5"), "choose from"),
        (("examples.train", "--steps", "0"), "not a whole number above 0"),
        (("examples.train", "--lr", "fast"), "not a number"),
        (("examples.train", "--optimiser", "muon"), "--help"),
        (("examples.train", "--device", "cuda:99"), "--device cpu"),
        (("examples.train", "--heads", "3"), "--heads 3"),
        (("examples.train", "--data", "{empty}"), "0 bytes"),
        (("examples.train", "--data", "{empty}", "--out", "{empty}/run"), "empty"),
        (("examples.sample", "--run", "nowhere"), "python -m examples.train"),
        (("examples.sample", "--prompt", ""), "--prompt"),
    ],
)
def test_a_mistake_is_one_line(arguments: tuple[str, ...], says: str, tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.touch()
    result = command(*(argument.format(empty=empty) for argument in arguments))
    assert result.returncode == 2
    assert result.stdout == ""
    assert len(result.stderr.splitlines()) == 1
    assert result.stderr.startswith("error: ")
    assert says in result.stderr


@pytest.mark.parametrize("module", ["examples.train", "examples.sample"])
def test_help_fits_a_screen(module: str) -> None:
    lines = command(module, "--help").stdout.splitlines()
    assert 5 < len(lines) <= 24
    assert max(map(len, lines)) <= 80
