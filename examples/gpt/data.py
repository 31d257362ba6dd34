"""Bytes to train on, and batches that depend on the seed and the step alone.

The embedded corpus is the source of the running Python's own standard library (without its tests): about 9 MB of
code and documentation that every machine already has. It differs a little between Python versions, so losses compare
within one version.
"""

from __future__ import annotations

import codecs
import sysconfig
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from examples.gpt.cli import UserError

INSTALLED = {"site-packages", "dist-packages"}  # not the standard library
TABLES_AND_TESTS = {"encodings", "pydoc_data", "test", "tests", "idlelib", "lib2to3", "turtledemo", "ensurepip"}


@dataclass
class Data:
    """Tokens to train on and to validate on; here a token is a byte."""

    name: str
    train: np.ndarray
    val: np.ndarray


def load(path: str | Path | None, context: int) -> Data:
    """A text file, a folder of text files, or (None) the embedded corpus; the last tenth is for validation.

    Files are joined in an order that looks random but depends only on their names, so that the last tenth is a fair
    sample of a folder; no byte is in both parts.
    """
    try:
        name, text = read(path)
    except OSError as error:
        raise UserError(f"cannot read {error.filename}: {error.strerror}") from error
    if len(text) < 10 * (context + 2):
        needed = 10 * (context + 2)
        raise UserError(f"{name} has only {len(text):,} bytes; --context {context} needs at least {needed:,}")
    tokens = np.frombuffer(text, dtype=np.uint8)
    border = len(tokens) - len(tokens) // 10
    return Data(name, train=tokens[:border], val=tokens[border:])


def read(path: str | Path | None) -> tuple[str, bytes]:
    """The corpus's name and all of its bytes."""
    if path is None:
        root, skipped = Path(sysconfig.get_paths()["stdlib"]), INSTALLED | TABLES_AND_TESTS
        files = [file for file in root.rglob("*.py") if not skipped & set(file.relative_to(root).parts)]
        if not files:
            raise UserError("this Python comes without its library's sources; give a text file or folder with --data")
        return f"Python's standard library ({len(files)} files)", join(root, files)
    root = Path(path)
    if root.is_dir():
        files = [file for file in root.rglob("*") if file.is_file() and not hidden(file.relative_to(root))]
        text = join(root, files)
        if not text:
            raise UserError(f"no text files were found in --data {path} (hidden and binary ones are left out)")
        return f"{path} ({len(files)} files)", text
    if not root.is_file():
        raise UserError(f"--data {path} is neither a file nor a folder; leave it out to train on the embedded corpus")
    text = root.read_bytes()
    if not is_text(text):
        raise UserError(f"--data {path} is not a text file")
    return str(path), text


def join(root: Path, files: list[Path]) -> bytes:
    files = sorted(files, key=lambda file: shuffled(file.relative_to(root).as_posix()))
    return b"\n".join(text for text in (file.read_bytes() for file in files) if is_text(text))


def shuffled(name: str) -> tuple[int, str]:
    return zlib.crc32(name.encode()), name


def hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)


def is_text(content: bytes) -> bool:
    return b"\0" not in content


def training_batch(tokens: np.ndarray, batch: int, context: int, *, seed: int, step: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets, (batch, context) each, from random places: a pure function of seed and step."""
    starts = np.random.default_rng((seed, step)).integers(len(tokens) - context, size=batch)
    return windows(tokens, starts, context)


def validation_batches(tokens: np.ndarray, batch: int, context: int, count: int) -> Iterator[tuple[Tensor, Tensor]]:
    """`count` batches of windows spread evenly over the tokens: the same ones every time."""
    starts = np.linspace(0, len(tokens) - context - 1, num=count * batch).astype(np.int64)
    for some in starts.reshape(count, batch):
        yield windows(tokens, some, context)


def windows(tokens: np.ndarray, starts: np.ndarray, context: int) -> tuple[Tensor, Tensor]:
    rows = torch.from_numpy(tokens[starts[:, None] + np.arange(context + 1)].astype(np.int64))
    return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


def to_device(tensors: tuple[Tensor, Tensor], device: torch.device) -> tuple[Tensor, Tensor]:
    """On CUDA from pinned memory, so that the copy overlaps the step that is still running."""
    if device.type != "cuda":
        return tensors[0].to(device), tensors[1].to(device)
    return tensors[0].pin_memory().to(device, non_blocking=True), tensors[1].pin_memory().to(device, non_blocking=True)


def encode(text: str) -> Tensor:
    """Text to tokens (S,); bytes of the command line that are no UTF-8 arrive as the bytes they are."""
    return torch.tensor(list(text.encode(errors="surrogateescape")), dtype=torch.int64)


def decode(tokens: Iterable[int]) -> Iterator[str]:
    """Tokens to text as they come; what is no text (control characters among it) shows as U+FFFD.

    Tokens are bytes, so nothing but training keeps a model from starting a character of several bytes and not ending
    it; after a short run it often does.
    """
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    for token in tokens:
        is_text = 32 <= token < 256 or token in (9, 10)  # tab and newline
        yield decoder.decode(bytes([token])) if is_text else "\ufffd"
    yield decoder.decode(b"", final=True)
