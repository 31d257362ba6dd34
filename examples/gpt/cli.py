"""What every command of the examples shares: a mistake of the user's is one line on stderr and exit code 2."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

import torch


class UserError(Exception):
    """Something the user can put right; its text says how."""


class ArgumentParser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {message} (--help lists the options)\n")


def run(main: Callable[[Sequence[str] | None], object]) -> None:
    """Run a command's `main`; its mistakes and Ctrl-C end in one line instead of a traceback."""
    sys.stdout.reconfigure(errors="replace")  # not every terminal has every character of a text
    try:
        if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:  # set while importing
            signal.signal(signal.SIGINT, signal.default_int_handler)
        main(None)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        sys.exit(130)
    except BrokenPipeError:  # who reads what we print, as `| head`, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what Python flushes when it ends
        sys.exit(1)
    except OSError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        print(
            "error: out of memory: a smaller --batch (with the same --batch-tokens), --context or --width needs less",
            file=sys.stderr,
        )
        sys.exit(2)


def is_out_of_memory(error: Exception) -> bool:
    """On a CPU torch's is a plain RuntimeError."""
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or "DefaultCPUAllocator" in str(error)


def natural(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 0 up")
    return int(text)


def seed(text: str) -> int:
    value = natural(text)
    if value >= 2**63:
        raise argparse.ArgumentTypeError(f"{text!r} is not below 2**63, as a seed must be")
    return value


def path(text: str) -> Path:
    if not text:
        raise argparse.ArgumentTypeError("the path is empty")
    return Path(text)


def csv_path(text: str) -> Path:
    if Path(text).suffix == ".png":
        raise argparse.ArgumentTypeError(f"{text!r} is where the figure would go; give a name that ends in .csv")
    return path(text)


def positive_int(text: str) -> int:
    if not text.isdecimal() or not 0 < int(text) < 2**31:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0 and below 2**31")
    return int(text)


def positive_float(text: str) -> float:
    value = number(text)
    if value == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return value


def number(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 1e38:  # where float32 ends
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 0 to 1e38")
    return value


def pick_device(name: str) -> torch.device:
    """`auto` is the GPU if there is one. A device must hold numbers that can be read back, which meta does not."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.ones(1, device=device).item()
    except (RuntimeError, AssertionError, ImportError) as error:
        raise UserError(f"--device {name} is not available here; use --device cpu, or leave it out") from error
    return device
