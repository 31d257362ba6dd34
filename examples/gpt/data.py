"""Tokens to train on, and batches that depend on the seed and the step alone.

Where the training stands in its data is therefore the step, also after a resume. Nothing big is read as a whole: files
of tokens and of bytes are mapped into memory, and batches take their windows from there.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from examples.gpt import corpus, shards
from examples.gpt.cli import UserError
from examples.gpt.shards import Joined, Tokens
from examples.gpt.tokens import GPT2, NAMES, Bytes, Tokenizer, from_state

IN_MEMORY = 2**28  # bytes of text that may be held in memory


@dataclass
class Data:
    """Tokens to train on and to validate on."""

    name: str
    train: Tokens
    val: Tokens
    tokenizer: Tokenizer
    bytes_per_token: float | None  # of text, in the part for validation; None where it is unknown


def load(path: str | Path | None, context: int, tokenizer: str | None = None) -> Data:
    """What `--data` names, in parts to train on and to validate on.

    path: None (the embedded corpus), a text file, a folder of text, a nanoGPT .bin file or a folder with train.bin and
    val.bin, shards of llm.c or modded-nanogpt, or what examples.prepare wrote. Text is made tokens of here; no byte of
    it is in both parts, and the last tenth, a fair sample of a folder, is for validation.
    tokenizer: "bytes" (default for text), "chars" or "gpt2" (default for tokens that don't say what they are).

    >>> data = load(None, context=128)
    >>> inputs, targets = training_batch(data.train, batch=8, context=128, seed=0, step=0)
    """
    path = None if path is None else Path(path)
    if tokenizer not in (None, *NAMES):
        raise UserError(f"there is no tokenizer {tokenizer!r}; the choices are {', '.join(NAMES)}")
    try:
        found = find_tokens(path)
        data = load_text(path, tokenizer or "bytes") if found is None else load_tokens(path, *found, tokenizer)
    except OSError as error:
        raise UserError(f"cannot read {error.filename}: {error.strerror}") from error
    check_length(data, context, is_text=found is None)
    return data


def find_tokens(path: Path | None) -> tuple[list[Path], list[Path]] | None:
    if path is not None and path.is_dir():
        return shards.token_files(path)
    return ([path], []) if path is not None and path.is_file() and path.suffix == ".bin" else None


def check_length(data: Data, context: int, *, is_text: bool) -> None:
    size, needed = len(data.train) + len(data.val), 10 * (context + 2)
    unit = "bytes" if data.tokenizer.name == "bytes" else "tokens"
    if is_text and size < needed:
        raise UserError(f"{data.name} has only {size:,} {unit}; --context {context} needs at least {needed:,}")
    for tokens, use in ((data.train, "train"), (data.val, "validate")):
        if len(tokens) < context + 2:
            few = f"{data.name} has only {len(tokens):,} {unit} to {use} on"
            raise UserError(f"{few}; --context {context} needs at least {context + 2:,}")


def load_text(path: Path | None, tokenizer: str) -> Data:
    text = corpus.find(path)
    size = sum(file.stat().st_size for file in text.files)
    if tokenizer == "bytes":
        joined = join_bytes(text.files, size)
        return Data(text.name, *cut(joined, len(joined) - len(joined) // 10), Bytes(), bytes_per_token=1.0)
    if size > IN_MEMORY:
        command = f"python -m examples.prepare --data {shlex.quote(str(path))} --tokenizer {tokenizer} --out FOLDER"
        raise UserError(f"{text.name} has {size:,} bytes; make tokens of it once ({command}) and give --data FOLDER")
    train, val = corpus.split(text, 0.1, tokenizer)
    made = corpus.make_tokenizer(tokenizer, [*train, *val])
    with tqdm(total=size, desc="tokenizing", unit="B", unit_scale=True, leave=False, delay=1) as bar:
        parts = [np.concatenate(list(corpus.encode(part, made, bar.update))) for part in (train, val)]
    return Data(text.name, *parts, made, corpus.count_bytes(val) / max(len(parts[1]), 1))


def join_bytes(files: list[Path], size: int) -> Tokens:
    """The files with a newline between two of them."""
    if len(files) == 1:
        return shards.mapped(files[0], "u1")
    if size <= IN_MEMORY:
        return np.frombuffer(b"\n".join(file.read_bytes() for file in files), np.uint8)
    newline = np.frombuffer(b"\n", np.uint8)
    return Joined([part for file in files for part in (newline, shards.FileBytes(file))][1:])


def load_tokens(path: Path, train: list[Path], val: list[Path], tokenizer: str | None) -> Data:
    """Files of tokens; without one for validation the last tenth is for it."""
    folder = path if path.is_dir() else path.parent
    notes = shards.read_notes(folder)
    made = from_state(notes["tokenizer"]) if notes else foreign_tokenizer(folder, tokenizer)
    if tokenizer not in (None, made.name):
        raise UserError(
            f"{path} has {made.name} tokens, not {tokenizer}; leave --tokenizer out, or give the text itself"
        )
    whole = {part: open_all(files, made) for part, files in (("train", train), ("val", val))}
    name = f"{path} ({len(train) + len(val)} files of tokens: {made.name})" if path.is_dir() else str(path)
    bytes_per_token = 1.0 if made.name == "bytes" else None
    if path.is_file() or not val:
        return Data(name, *cut(whole["train"], len(whole["train"]) * 9 // 10), made, bytes_per_token)
    if notes:
        check_complete(folder, whole, notes)
        bytes_per_token = notes["val"]["bytes"] / notes["val"]["tokens"]
    return Data(name, whole["train"], whole["val"], made, bytes_per_token)


def foreign_tokenizer(folder: Path, name: str | None) -> Tokenizer:
    """GPT-2's, unless something else was said: files of tokens don't say what they are."""
    if name == "bytes":
        return Bytes()
    if name == "chars" or (name is None and (folder / "meta.pkl").exists()):
        text = folder / "input.txt"
        source = text if text.exists() else "TEXT"
        raise UserError(
            f"the characters of {folder} are unknown here (nothing is unpickled, so meta.pkl is not read); "
            f"train on the text itself: --data {source} --tokenizer chars"
        )
    return GPT2()


def open_all(files: list[Path], tokenizer: Tokenizer) -> Tokens:
    opened = [shards.open_tokens(file, tokenizer.vocab_size) for file in files]
    return opened[0] if len(opened) == 1 else Joined(opened)


def check_complete(folder: Path, whole: dict[str, Tokens], notes: dict) -> None:
    for part, tokens in whole.items():
        if len(tokens) != notes[part]["tokens"]:
            expected = f"{folder / shards.NOTES} promises {notes[part]['tokens']:,}"
            rebuild = shards.REBUILD.replace("gpt2", notes["tokenizer"]["name"])
            raise UserError(f"the {part} shards in {folder} have {len(tokens):,} tokens, {expected}; {rebuild}")


def cut(tokens: Tokens, border: int) -> tuple[Tokens, Tokens]:
    return tokens.cut(border) if isinstance(tokens, Joined) else (tokens[:border], tokens[border:])


def training_batch(tokens: Tokens, batch: int, context: int, *, seed: int, step: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets, (batch, context) each, from random places: a pure function of seed and step."""
    starts = np.random.default_rng((seed, step)).integers(len(tokens) - context, size=batch)
    return windows(tokens, starts, context)


def validation_batches(tokens: Tokens, batch: int, context: int, count: int) -> Iterator[tuple[Tensor, Tensor]]:
    """`count` batches of windows spread evenly over the tokens: the same ones every time."""
    starts = np.linspace(0, len(tokens) - context - 1, num=count * batch).astype(np.int64)
    for some in starts.reshape(count, batch):
        yield windows(tokens, some, context)


def windows(tokens: Tokens, starts: np.ndarray, context: int) -> tuple[Tensor, Tensor]:
    rows = np.stack([tokens[start : start + context + 1] for start in starts.tolist()])
    tensor = torch.from_numpy(rows.astype(np.int64))
    return tensor[:, :-1].contiguous(), tensor[:, 1:].contiguous()


def to_device(tensors: tuple[Tensor, Tensor], device: torch.device) -> tuple[Tensor, Tensor]:
    """On CUDA from pinned memory, so that the copy overlaps the step that is still running."""
    if device.type != "cuda":
        return tensors[0].to(device), tensors[1].to(device)
    return tensors[0].pin_memory().to(device, non_blocking=True), tensors[1].pin_memory().to(device, non_blocking=True)


def encode(text: str) -> Tensor:
    """Text to tokens of bytes, (S,)."""
    return Bytes().encode(text)


def decode(tokens: Iterable[int]) -> Iterator[str]:
    """Tokens of bytes to text as they come."""
    return Bytes().decode(tokens)
