"""Files of tokens: nanoGPT's .bin (bare uint16), and the shards of llm.c and modded-nanogpt.

A shard is a header of 256 int32 (20240520, 1, the number of tokens, zeros) and then uint16 tokens
(karpathy/llm.c dev/data/data_common.py, KellerJordan/modded-nanogpt). All of them are mapped into memory, never read
as a whole.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from examples.gpt.cli import UserError

MAGIC, VERSION = 20240520, 1
HEADER = 1024  # bytes
NOTES = "tokens.json"  # beside the shards of examples.prepare
REBUILD = "rebuild it: python -m examples.prepare --data TEXT --tokenizer gpt2 --out FOLDER"
CHECKED = 2**18  # tokens at either end of a file whose range is looked at


class Joined:
    """Arrays (or files) one after another, none of them copied; a slice is an array."""

    def __init__(self, parts: Sequence[Any], start: int = 0, stop: int | None = None) -> None:
        self.parts = [part for part in parts if len(part)]
        self.ends = np.cumsum([0, *(len(part) for part in self.parts)])[1:]
        self.start = start
        self.stop = sum(map(len, self.parts)) if stop is None else stop

    def __len__(self) -> int:
        return self.stop - self.start

    def __getitem__(self, wanted: slice) -> np.ndarray:
        start, stop, _ = wanted.indices(len(self))
        start, stop = start + self.start, stop + self.start
        found = []
        while start < stop:
            index = int(np.searchsorted(self.ends, start, side="right"))
            part, end = self.parts[index], int(self.ends[index])
            begin = end - len(part)
            found.append(part[start - begin : stop - begin])
            start = end
        return found[0] if len(found) == 1 else np.concatenate(found or [self.empty()])

    def empty(self) -> np.ndarray:
        return self.parts[0][:0] if self.parts else np.empty(0, np.uint16)

    def cut(self, border: int) -> tuple[Joined, Joined]:
        middle = self.start + border
        return Joined(self.parts, self.start, middle), Joined(self.parts, middle, self.stop)


Tokens = np.ndarray | Joined


class FileBytes:
    """A file's bytes, read when they are asked for: a folder may have more files than can be mapped."""

    def __init__(self, file: Path) -> None:
        self.file, self.size = file, file.stat().st_size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, wanted: slice) -> np.ndarray:
        start, stop, _ = wanted.indices(self.size)
        return np.fromfile(self.file, np.uint8, count=stop - start, offset=start)


def mapped(file: Path, dtype: str, offset: int = 0) -> np.ndarray:
    """What is in the file, without reading it."""
    if file.stat().st_size == offset:  # nothing can't be mapped
        return np.empty(0, dtype)
    return np.memmap(file, dtype, mode="r", offset=offset)


def open_tokens(file: Path, vocab_size: int) -> np.ndarray:
    """The tokens of a shard or, unless its name is a shard's, of a file without a header."""
    start = np.fromfile(file, "<i4", count=3)
    size = file.stat().st_size
    has_header = len(start) > 0 and start[0] == MAGIC
    if not has_header and ("_train_" in file.name or "_val_" in file.name):
        found = f"with {start[0]}" if len(start) else "as it is empty"
        raise UserError(f"{file} does not start with llm.c's magic number {MAGIC} but {found}; {REBUILD}")
    if has_header:
        check_header(file, start, size)
    elif size % 2:
        raise UserError(f"{file} has {size:,} bytes, an odd number, so it is no file of uint16 tokens; {REBUILD}")
    tokens = mapped(file, "<u2", HEADER if has_header else 0)
    check_range(file, tokens, vocab_size)
    return tokens


def check_header(file: Path, start: np.ndarray, size: int) -> None:
    if size < HEADER:
        raise UserError(f"{file} has {size:,} bytes and ends inside its header of {HEADER:,}; {REBUILD}")
    _, version, count = start.tolist()
    if version != VERSION:
        raise UserError(f"{file} is of version {version}, not of version {VERSION} (uint16 tokens); {REBUILD}")
    if count < 0 or size != HEADER + 2 * count:
        expected = f"its header promises {count:,} tokens, {HEADER + 2 * count:,} bytes"
        raise UserError(f"{file} has {size:,} bytes, but {expected}: it is cut off or damaged; {REBUILD}")


def check_range(file: Path, tokens: np.ndarray, vocab_size: int) -> None:
    largest = max(part.max(initial=0) for part in (tokens[:CHECKED], tokens[-CHECKED:]))
    if largest >= vocab_size:
        raise UserError(f"{file} has a token {largest}, beyond a vocabulary of {vocab_size:,}; {REBUILD}")


def token_files(path: Path) -> tuple[list[Path], list[Path]] | None:
    """A folder's files to train on and to validate on; None if it has no files of tokens."""
    names = {"train": ("train.bin", "*_train_*.bin", "*_train.bin"), "val": ("val.bin", "*_val_*.bin", "*_val.bin")}
    found = {part: {file for name in some for file in path.glob(name)} for part, some in names.items()}
    train, val = sorted(found["train"]), sorted(found["val"])
    if val and not train:
        raise UserError(f"--data {path} has tokens to validate on ({val[0].name}) but none to train on (*_train_*.bin)")
    return (train, val) if train else None


def read_notes(folder: Path) -> dict[str, Any] | None:
    """What examples.prepare wrote about its shards, if they are its."""
    file = folder / NOTES
    if not file.exists():
        return None
    try:
        notes = json.loads(file.read_text(encoding="utf-8"))
        counts = [notes[part][unit] for part in ("train", "val") for unit in ("bytes", "tokens")]
        if not isinstance(notes["tokenizer"], dict) or min(counts) < 1:
            raise ValueError(counts)
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{file} is damaged; {REBUILD}") from error
    return notes


def lots(pieces: Iterable[np.ndarray], size: int) -> Iterator[np.ndarray]:
    """The same tokens in arrays of `size`, the last one of what is left."""
    held: list[np.ndarray] = []
    count = 0
    for piece in pieces:
        while count + len(piece) >= size:
            first, piece = np.split(piece, [size - count])
            yield np.concatenate([*held, first])
            held, count = [], 0
        held.append(piece)
        count += len(piece)
    if count:
        yield np.concatenate(held)


def write_shard(file: Path, tokens: np.ndarray) -> None:
    header = np.zeros(256, "<i4")
    header[:3] = MAGIC, VERSION, len(tokens)
    with file.open("wb") as opened:
        opened.write(header.tobytes())
        opened.write(tokens.astype("<u2").tobytes())
