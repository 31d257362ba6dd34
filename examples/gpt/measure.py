"""How a measurement is timed, and what it writes beside its figures."""

from __future__ import annotations

import csv
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from examples.gpt.cli import UserError
from examples.gpt.record import commit, device_name, version


def milliseconds(device: torch.device, work: Callable[[], object]) -> float:
    """From one idle device to the next."""
    synchronize(device)
    start = time.perf_counter()
    work()
    synchronize(device)
    return 1e3 * (time.perf_counter() - start)


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def setting(module: str, argv: Sequence[str] | None, device: torch.device) -> dict[str, Any]:
    """The device, the versions and the command: the last columns of every CSV."""
    name = device_name(device)
    return {
        "device": name if device.type == "cuda" else f"{device.type}, {name}",
        "torch": torch.__version__,
        "triton": version("triton"),
        "commit": commit(),
        "command": shlex.join(["python", "-m", module, *(sys.argv[1:] if argv is None else argv)]),
    }


def writable(path: Path) -> None:
    """If a file can't be written, that shows before the measurement."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.open("a").close()
    except OSError as error:
        raise UserError(f"cannot write to {error.filename}: {error.strerror}") from error


def write_csv(path: Path, rows: Sequence[dict[str, Any]], setting: dict[str, Any]) -> None:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, [*rows[0], *setting])
        writer.writeheader()
        writer.writerows(row | setting for row in rows)


def read_csv(path: Path, needed: str) -> list[dict[str, str]]:
    """The rows of a CSV that has the column `needed`."""
    try:
        with path.open(newline="") as file:
            rows = list(csv.DictReader(file))
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read {path}: {error}") from error
    if not rows or needed not in rows[0]:
        raise foreign(path)
    return rows


def foreign(path: Path) -> UserError:
    return UserError(f"{path} is not a CSV that this command wrote")


def source(path: Path, row: dict[str, str]) -> str:
    """The line under a table: where its numbers come from."""
    return f"{path.name}: {row['device']}, torch {row['torch']}, Triton {row['triton']}: `{row['command']}`"
