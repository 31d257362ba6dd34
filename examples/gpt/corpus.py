"""Text to make tokens of: the embedded corpus, a file, or a folder; in parts, and piece by piece.

The embedded corpus is the source of the running Python's own standard library (without its tests): about 9 MB of
code and documentation that every machine already has. It differs a little between Python versions, so losses compare
within one version.
"""

from __future__ import annotations

import codecs
import re
import sysconfig
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import numpy as np

from examples.gpt.cli import UserError
from examples.gpt.tokens import GPT2, Bytes, Characters, Tokenizer

INSTALLED = {"site-packages", "dist-packages"}  # not the standard library
TABLES_AND_TESTS = {"encodings", "pydoc_data", "test", "tests", "idlelib", "lib2to3", "turtledemo", "ensurepip"}

PIECE = 2**20  # bytes to read at a time
# Where white space begins, one of GPT-2's words ends, and the next one does not look back: both sides encode as they do
# together (its pattern is in openai/gpt-2 src/encoder.py).
BETWEEN_WORDS = re.compile(r"(?<=\S)(?=[ \n])")


@dataclass(frozen=True)
class Corpus:
    name: str
    files: list[Path]  # in the order in which they are joined


@dataclass(frozen=True)
class Span:
    """Bytes of a file."""

    file: Path
    start: int
    stop: int


def find(path: Path | None, include: Sequence[str] = ()) -> Corpus:
    """A text file, a folder of text files whose names match one of the patterns, or (None) the embedded corpus."""
    if path is None:
        return embedded()
    if path.is_dir():
        return folder(path, include)
    if not path.is_file():
        raise UserError(f"--data {path} is neither a file nor a folder; leave it out to train on the embedded corpus")
    if not is_text(path):
        raise UserError(f"--data {path} is not a text file")
    return Corpus(str(path), [path])


def embedded() -> Corpus:
    root, skipped = Path(sysconfig.get_paths()["stdlib"]), INSTALLED | TABLES_AND_TESTS
    files = [file for file in root.rglob("*.py") if not skipped & set(file.relative_to(root).parts)]
    if not files:
        raise UserError("this Python comes without its library's sources; give a text file or folder with --data")
    return Corpus(f"Python's standard library ({len(files)} files)", ordered(root, files))


def folder(root: Path, include: Sequence[str]) -> Corpus:
    """Every text file in it that is not hidden; links are not followed."""
    files = [file for file in root.rglob("*") if not file.is_symlink() and file.is_file()]
    files = [file for file in files if not hidden(file.relative_to(root)) and wanted(file, include)]
    files = ordered(root, files)
    if not files:
        raise UserError(f"no text files were found in --data {root} (hidden ones, binary ones and links are left out)")
    return Corpus(f"{root} ({len(files)} files)", files)


def ordered(root: Path, files: Iterable[Path]) -> list[Path]:
    """The text files among them in an order that looks random but depends only on their names: any part is fair."""

    def shuffled(file: Path) -> tuple[int, str]:
        name = file.relative_to(root).as_posix()
        return zlib.crc32(name.encode(errors="surrogateescape")), name

    return [file for file in sorted(files, key=shuffled) if is_text(file)]


def hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)


def wanted(file: Path, include: Sequence[str]) -> bool:
    return not include or any(file.match(pattern) for pattern in include)


def is_text(file: Path) -> bool:
    with file.open("rb") as opened:
        return b"\0" not in opened.read(PIECE)


def split(corpus: Corpus, fraction: float, tokenizer: str) -> tuple[list[Span], list[Span]]:
    """The corpus's parts for training and for validation, which is the last `fraction` of its bytes.

    The border is the one between two files if one is near enough; otherwise it is inside a file, for characters and
    byte pairs where nanoGPT has it.
    """
    spans = [Span(file, 0, file.stat().st_size) for file in corpus.files]
    ends = list(accumulate(span.stop for span in spans))
    size = ends[-1]
    border = size - int(size * fraction) if tokenizer == "bytes" else int(size * (1 - fraction))
    nearest = min(range(len(ends)), key=lambda i: abs(ends[i] - border))
    if nearest + 1 < len(ends) and abs(ends[nearest] - border) <= (size - border) / 2:
        return spans[: nearest + 1], spans[nearest + 1 :]
    index = next((i for i, end in enumerate(ends) if end > border), len(ends) - 1)
    file = spans[index]
    inside = border - (ends[index] - file.stop)
    if tokenizer != "bytes":
        inside = character_start(file.file, inside)
    first, last = Span(file.file, 0, inside), Span(file.file, inside, file.stop)
    return [*spans[:index], first], [last, *spans[index + 1 :]]


def character_start(file: Path, offset: int) -> int:
    """The first place from `offset` on that is not inside a character of UTF-8."""
    with file.open("rb") as opened:
        opened.seek(offset)
        following = opened.read(3)
    inside = (i for i, byte in enumerate(following) if byte & 0xC0 != 0x80)
    return offset + next(inside, len(following))


def count_bytes(spans: Sequence[Span]) -> int:
    """What is between two documents counts as a byte."""
    return sum(span.stop - span.start for span in spans) + len(spans) - 1


def read(span: Span, progress: Callable[[int], object] = lambda _: None) -> Iterator[str]:
    """The text piece by piece, so that every tokenizer makes the same of the pieces as of the whole.

    Bytes that are no UTF-8 become surrogates, as on Python's command line. `progress` is told the bytes read.
    """
    decoder = codecs.getincrementaldecoder("utf-8")(errors="surrogateescape")
    text, left = "", span.stop - span.start
    with span.file.open("rb") as file:
        file.seek(span.start)
        while left and (block := file.read(min(left, PIECE))):
            left -= len(block)
            seen = len(text)
            text += decoder.decode(block, final=left == 0)
            end = last_place_between_words(text, seen)
            yield text[:end]
            text = text[end:]
            progress(len(block))
    yield text


def last_place_between_words(text: str, seen: int) -> int:
    """0 where there is none after the `seen` characters."""
    for start in (max(seen, len(text) - 4096), seen):
        places = [match.start() for match in BETWEEN_WORDS.finditer(text, start)]
        if places:
            return places[-1]
    return 0


def encode(
    spans: Sequence[Span], tokenizer: Tokenizer, progress: Callable[[int], object] = lambda _: None
) -> Iterator[np.ndarray]:
    """The documents' tokens, uint16, piece by piece."""
    for number, span in enumerate(spans):
        if number:
            yield np.array(tokenizer.separator, np.uint16)
        for text in read(span, progress):
            yield tokenizer.encode(text).numpy().astype(np.uint16)


def make_tokenizer(name: str, spans: Sequence[Span], progress: Callable[[int], object] = lambda _: None) -> Tokenizer:
    """The tokenizer of that name; characters are those of the documents and of what is between them."""
    if name != "chars":
        made = {"bytes": Bytes, "gpt2": GPT2}[name]()
        made.encode("")  # if tiktoken is not there, that shows before the text is read
        return made
    characters = {"\n"} if len(spans) > 2 else set()
    for span in spans:
        for text in read(span, progress):
            characters.update(text)
    if len(characters) > 2**16:
        raise UserError(f"the text has {len(characters):,} different characters, more than fit; take bytes or gpt2")
    return Characters(characters)
