"""What a run is, on the screen and in config.json: all that it takes to understand it, and to run it again."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import platform
import secrets
import shlex
import subprocess
import sys
from argparse import Namespace
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from examples.gpt.data import Data
from examples.gpt.options import as_saved
from examples.gpt.presets import Preset
from examples.gpt.ranks import Ranks


def config(
    argv: Sequence[str] | None, args: Namespace, preset: Preset, corpus: Data, device: torch.device, ranks: Ranks
) -> dict[str, Any]:
    packages = ("torch", "triton", "numpy")
    return {
        "command": shlex.join(["python", "-m", "examples.train", *(sys.argv[1:] if argv is None else argv)]),
        "options": as_saved(args),
        "preset": dataclasses.asdict(preset),
        "data": {"name": corpus.name, "train": len(corpus.train), "val": len(corpus.val)},
        "processes": ranks.size,
        "device": f"{device} ({device_name(device)})",
        "versions": {"python": platform.python_version()} | {name: version(name) for name in packages},
        "commit": commit(),
        "run": secrets.token_hex(4),  # what a tracker knows it by
    }


def version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def commit() -> str | None:
    """Of this code, with a + if it has been changed since; None outside of git."""
    git = ["git", "-C", str(Path(__file__).parent)]
    try:
        head = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
        changes = subprocess.run([*git, "status", "--porcelain", "-uno"], capture_output=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return None
    return head + "+" * bool(changes)


def describe(
    preset: Preset, model: nn.Module, optimizer: torch.optim.Optimizer, corpus: Data, device: torch.device, ranks: Ranks
) -> None:
    """What is about to be trained, on what, with what."""
    size = f"{preset.layers} layers of width {preset.width}, {preset.heads} heads, vocabulary {preset.vocab_size:,}"
    unit = {"bytes": "bytes", "chars": "characters", "gpt2": "tokens"}[corpus.tokenizer.name]
    batch = f"{preset.sequences} x {preset.context} = {preset.sequences * preset.context:,} tokens"
    processes = f"{ranks.size} processes, " * (ranks.size > 1)
    micro_batches = -(-preset.sequences // (ranks.size * preset.batch))
    accumulated = f", in {micro_batches} micro-batches" * (micro_batches > 1)
    print(f"device     {device} ({processes}{device_name(device)}), torch {torch.__version__}, {preset.dtype}")
    print(f"data       {corpus.name}: {len(corpus.train):,} {unit} to train on, {len(corpus.val):,} to validate on")
    print(f"model      {count(model.parameters())}, {size}{', compiled' * preset.compile}")
    print(f"training   {preset.steps:,} steps of {batch}{accumulated}")
    for group in optimizer.param_groups:
        algorithm = {"muon": "Muon", "adamw": "AdamW"}[group.get("algorithm", "adamw")]
        tensors = group["params"]
        lr = group["initial_lr"]
        print(f"optimizer  {algorithm}: {len(tensors)} tensors, {count(tensors)}, learning rate {lr:g}")


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"{torch.get_num_threads()} threads"


def count(parameters: Iterable[Tensor]) -> str:
    return f"{sum(p.numel() for p in parameters) / 1e6:.2f} M parameters"
