"""Checkpoints: last.pt, from which a run goes on bit for bit, and best.pt, the model with the lowest validation loss.

Both say what the model is (`about`) and have its weights; last.pt also has everything else that changes in training.
`torch.load(..., weights_only=True)` reads them.
"""

from __future__ import annotations

import math
import os
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from examples.gpt import tokens
from examples.gpt.cli import UserError
from examples.gpt.presets import MODELS
from examples.gpt.ranks import Ranks
from muon import QKClip

FORMAT = 1


@dataclass
class State:
    """All that changes while a model trains. The position in the data is the step."""

    model: nn.Module
    optimizer: Optimizer
    scheduler: LRScheduler
    scaler: GradScaler
    qk_clip: QKClip | None
    device: torch.device
    loss_sum: Tensor  # since the last row, on the device
    clipped_heads: Tensor  # likewise
    step: int = 0
    seconds: float = 0.0  # of training; validation and checkpoints aren't counted
    best_val_loss: float = math.inf
    rows: list[dict[str, Any]] = field(default_factory=list)  # of metrics.csv

    def state_dict(self, ranks: Ranks) -> dict[str, Any]:
        """Every process must call it: random numbers and losses are its own."""
        own = {"loss_sum": self.loss_sum.cpu(), "random": random_state(self.device)}
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.scheduler.state_dict(),
            "scaler": self.scaler.state_dict(),
            "max_logits": self.max_logits(),
            "clipped_heads": self.clipped_heads,
            "step": self.step,
            "seconds": self.seconds,
            "best_val_loss": self.best_val_loss,
            "rows": self.rows,
            "processes": ranks.gather(own),
        }

    def load_state_dict(self, saved: dict[str, Any], ranks: Ranks) -> None:
        self.model.load_state_dict(saved["model"])
        self.optimizer.load_state_dict(saved["optimizer"])
        self.scheduler.load_state_dict(saved["scheduler"])
        self.scaler.load_state_dict(saved["scaler"])
        for logits, saved_logits in zip(self.max_logits(), saved["max_logits"], strict=True):
            logits.copy_(saved_logits)
        self.clipped_heads.copy_(saved["clipped_heads"])
        self.step, self.seconds = saved["step"], saved["seconds"]
        self.best_val_loss, self.rows = saved["best_val_loss"], saved["rows"]
        own = saved["processes"][ranks.rank]
        self.loss_sum.copy_(own["loss_sum"])
        set_random_state(own["random"], self.device)

    def max_logits(self) -> list[Tensor]:
        """Not yet used where the scaler skipped the last step."""
        return [module.max_logits for module in self.qk_clip.modules] if self.qk_clip else []


def random_state(device: torch.device) -> list[Tensor]:
    """Of torch's generators; dropout draws from the device's."""
    on_gpu = [torch.cuda.get_rng_state(device)] if device.type == "cuda" else []
    return [torch.get_rng_state(), *on_gpu]


def set_random_state(state: list[Tensor], device: torch.device) -> None:
    torch.set_rng_state(state[0])
    if device.type == "cuda":
        torch.cuda.set_rng_state(state[1], device)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """The folder, made if need be, is this run's alone: two would write over each other's files."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder, os.O_RDONLY) if os.name == "posix" else None
    except OSError as error:
        raise UserError(f"cannot write to --out {folder}: {error.filename}: {error.strerror}") from error
    if descriptor is None:
        yield
        return
    try:
        lock(descriptor, folder)
        yield
    finally:
        os.close(descriptor)


def lock(descriptor: int, folder: Path) -> None:
    """Until the process ends, or the descriptor is closed."""
    import fcntl

    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise UserError(f"another run is writing to {folder}; wait for it, or give another --out") from error
    except OSError:
        pass  # not every file system has locks


def write(path: Path, content: dict[str, Any]) -> None:
    """Write aside and rename: the file is always whole, whenever the process or the machine stops."""
    aside = path.with_suffix(".tmp")
    try:
        with aside.open("wb") as file:
            torch.save(content | {"format": FORMAT}, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, path)
        sync_folder(path.parent)
    except (OSError, RuntimeError) as error:  # torch's own where a write came up short
        raise UserError(f"cannot write {path}: {error}; what was there before is still whole") from error


def sync_folder(folder: Path) -> None:
    """So that the new name outlives a power cut, too."""
    if os.name != "posix":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read(path: Path) -> dict[str, Any]:
    """What `write` wrote, on the CPU."""
    try:
        saved = torch.load(path, map_location="cpu", weights_only=True)
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error
    except Exception as error:  # whatever a truncated or foreign file makes torch.load raise
        raise damaged(path) from error
    if not isinstance(saved, dict) or not {"format", "about", "model"} <= saved.keys():
        raise damaged(path)
    if saved["format"] != FORMAT:
        formats = f"has format {saved['format']}, and this version of examples.train reads {FORMAT}"
        raise UserError(f"{path} {formats}: use the version that wrote it")
    return saved


def damaged(path: Path) -> UserError:
    return UserError(f"{path} is damaged, or not a checkpoint of this version of examples.train")


def read_last(out: Path) -> dict[str, Any]:
    """What --resume goes on from."""
    if not (out / "last.pt").is_file():
        raise UserError(f"there is no {out / 'last.pt'} to resume from; start without --resume, or give another --out")
    return read(out / "last.pt")


def load(run: Path, device: torch.device) -> tuple[nn.Module, Any, str]:
    """A run's best model, or its last where nothing was validated yet; its tokenizer; and a prompt to begin with."""
    path = next((run / name for name in ("best.pt", "last.pt") if (run / name).is_file()), None)
    if path is None:
        command = shlex.join(["python", "-m", "examples.train", "--out", str(run)])
        raise UserError(f"there is no best.pt or last.pt in {run}; train first: {command}")
    saved = read(path)
    try:
        about = saved["about"]
        model = MODELS[about["architecture"]](**about["shape"])
        model.load_state_dict(saved["model"])
        tokenizer, prompt = tokens.from_state(about["tokenizer"]), about["prompt"]
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise damaged(path) from error
    return model.to(device).eval(), tokenizer, prompt
