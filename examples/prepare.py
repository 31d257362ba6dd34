"""Make tokens of text once, as shards that training maps into memory.

    python -m examples.prepare --data my.txt --tokenizer gpt2 --out data/mine
    python -m examples.prepare --data /usr/lib/python3 --include '*.py' '*.h' --tokenizer bytes --out data/code
    python -m examples.train --data data/mine

The shards are llm.c's (see examples/gpt/shards.py); tokens.json beside them has the tokenizer and what there is of
bytes and tokens. The text is read piece by piece, so a folder may be larger than memory.
"""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import shutil
from argparse import ArgumentTypeError, Namespace
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tqdm import tqdm

from examples.gpt import corpus, shards
from examples.gpt.cli import ArgumentParser, UserError, number, path, positive_int, run
from examples.gpt.corpus import Corpus, Span
from examples.gpt.tokens import NAMES, Tokenizer


def share(text: str) -> float:
    value = number(text)
    if not 0 < value < 1:
        raise ArgumentTypeError(f"{text!r} is not a number between 0 and 1")
    return value


def parse_arguments(argv: Sequence[str] | None) -> Namespace:
    parser = ArgumentParser(
        prog="python -m examples.prepare",
        usage="%(prog)s --out FOLDER [options]",
        description="Make tokens of text once, as shards to train on.",
    )
    add = parser.add_argument
    add("--data", metavar="PATH", type=path, help="text file or folder; default: the Python library")
    add("--include", metavar="GLOB", nargs="+", default=[], help="a folder's files to take, such as '*.py' '*.h'")
    add("--tokenizer", metavar="NAME", default="gpt2", choices=NAMES, help="gpt2 (default), bytes or chars")
    add("--out", metavar="FOLDER", type=path, required=True, help="for the shards; must be new or empty")
    add("--shard-tokens", metavar="N", type=positive_int, default=10**8, help="tokens in a shard; default: 100 million")
    add("--val-fraction", metavar="X", type=share, default=0.1, help="share to validate on; default: 0.1")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Write the shards; returns what tokens.json says."""
    args = parse_arguments(argv)
    try:
        return prepare(args)
    except OSError as error:
        raise UserError(f"cannot read or write {error.filename or args.out}: {error.strerror}") from error


def prepare(args: Namespace) -> dict[str, Any]:
    check_paths(args)
    text = without_duplicates(corpus.find(args.data, args.include))
    train, val = corpus.split(text, args.val_fraction, args.tokenizer)
    if min(corpus.count_bytes(train), corpus.count_bytes(val)) <= 0:
        raise UserError(f"{text.name} is too short for --val-fraction {args.val_fraction:g}: a part of it is empty")
    with bar("reading", [*train, *val], disable=args.tokenizer != "chars") as progress:
        tokenizer = corpus.make_tokenizer(args.tokenizer, [*train, *val], progress)
    notes: dict[str, Any] = {"tokenizer": tokenizer.state(), "source": text.name}
    with written_aside(args.out) as folder, bar("tokenizing", [*train, *val]) as progress:
        for part, spans in (("train", train), ("val", val)):
            notes[part] = write(spans, tokenizer, folder, part, args.shard_tokens, progress)
        (folder / shards.NOTES).write_text(json.dumps(notes, indent=2) + "\n", encoding="utf-8")
    report(notes, args.out)
    return notes


def check_paths(args: Namespace) -> None:
    """What would fail after minutes of work, or take what is there away."""
    if args.include and not (args.data and args.data.is_dir()):
        raise UserError("--include chooses among the files of a folder; give one with --data, or leave it out")
    if args.out.exists() and not (args.out.is_dir() and not any(args.out.iterdir())):
        raise UserError(f"--out {args.out} is not an empty folder; give a new one, or remove it first")


def without_duplicates(text: Corpus) -> Corpus:
    """Of files with the same content only the first."""
    sizes = Counter(file.stat().st_size for file in text.files)
    seen = set()
    kept = []
    for file in text.files:
        if sizes[file.stat().st_size] > 1:
            key = digest(file)
            if key in seen:
                continue
            seen.add(key)
        kept.append(file)
    left_out = len(text.files) - len(kept)
    return Corpus(text.name + f", {left_out} exact duplicates left out" * (left_out > 0), kept)


def digest(file: Path) -> bytes:
    content = hashlib.sha256()
    with file.open("rb") as opened:
        while block := opened.read(corpus.PIECE):
            content.update(block)
    return content.digest()


@contextmanager
def bar(name: str, spans: Sequence[Span], disable: bool = False) -> Iterator[Callable[[int], object]]:
    """A progress bar in bytes."""
    total = sum(span.stop - span.start for span in spans)
    with tqdm(total=total, desc=name, unit="B", unit_scale=True, dynamic_ncols=True, disable=disable) as shown:
        yield shown.update


@contextmanager
def written_aside(out: Path) -> Iterator[Path]:
    """A folder that takes `out`'s place when all went well, so that `out` is always whole."""
    out = Path(os.path.realpath(out))  # a link stays one
    aside = out.with_name(f".{out.name}.partial")
    shutil.rmtree(aside, ignore_errors=True)  # of a run that was killed
    aside.mkdir(parents=True)
    try:
        yield aside
        if out.exists():
            out.rmdir()
        aside.rename(out)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def write(
    spans: list[Span], tokenizer: Tokenizer, folder: Path, part: str, size: int, progress: Callable[[int], object]
) -> dict[str, int]:
    """A part's shards; returns how much is in them."""
    count = total = 0
    for tokens in shards.lots(corpus.encode(spans, tokenizer, progress), size):
        shards.write_shard(folder / f"tokens_{part}_{count:06d}.bin", tokens)
        count += 1
        total += len(tokens)
    return {"bytes": corpus.count_bytes(spans), "tokens": total, "shards": count}


def report(notes: dict[str, Any], out: Path) -> None:
    print(f"data       {notes['source']}")
    for part, name in (("train", "training"), ("val", "validation")):
        some = notes[part]
        print(f"{name:10} {some['bytes']:,} bytes, {some['tokens']:,} tokens, {some['shards']} shards")
    print(f"{out}: train with {shlex.join(['python', '-m', 'examples.train', '--data', str(out)])}")


if __name__ == "__main__":
    run(main)
