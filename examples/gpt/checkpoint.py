"""A trained model in one file that `torch.load(..., weights_only=True)` reads."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from examples.gpt.cli import UserError
from examples.gpt.model import GPT


def save(path: Path, model: GPT, shape: dict[str, Any], step: int) -> None:
    """Write aside and rename, so that the file is always whole."""
    aside = path.with_suffix(".tmp")
    torch.save({"shape": shape, "step": step, "model": model.state_dict()}, aside)
    os.replace(aside, path)


def load(path: Path, device: torch.device) -> GPT:
    """The model as saved, on `device`."""
    if not path.is_file():
        raise UserError(f"there is no {path}; train one first: python -m examples.train --out {path.parent}")
    try:
        saved = torch.load(path, map_location=device, weights_only=True)
        model = GPT(**saved["shape"])
        model.load_state_dict(saved["model"])
    except Exception as error:  # whatever a truncated or foreign file makes torch.load raise
        raise UserError(f"{path} is not a model that examples.train saved; train it again") from error
    return model.to(device)
