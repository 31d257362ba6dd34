"""What every benchmark writes beside its figures."""

import csv
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import triton


def setting(name: str, argv: Sequence[str] | None = None) -> dict[str, Any]:
    """The device, the versions and the command of this run of ``benchmarks.<name>``."""
    return {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "command": shlex.join(["python", "-m", f"benchmarks.{name}", *(sys.argv[1:] if argv is None else argv)]),
    }


def write_csv(path: str | Path, rows: Sequence[dict[str, Any]], setting: dict[str, Any]) -> None:
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, [*rows[0], *setting])
        writer.writeheader()
        writer.writerows(row | setting for row in rows)
