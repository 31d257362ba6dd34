"""Tokenizers: bytes, characters, or GPT-2's byte pairs.

Each has a `name`, a `vocab_size`, `encode` and `decode`, and a `state()` from which `from_state` makes it again.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Iterator
from functools import cached_property
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from examples.gpt.cli import UserError

NAMES = ("bytes", "chars", "gpt2")
CONTROL = dict.fromkeys((code for code in range(32) if chr(code) not in "\t\n"), "\ufffd")  # for str.translate


class Tokenizer(Protocol):
    name: str
    vocab_size: int
    separator: tuple[int, ...]  # tokens between two documents

    def encode(self, text: str) -> Tensor:
        """Text to tokens (S,), int64; bytes that are no UTF-8 come as the surrogates that Python makes of them."""

    def decode(self, tokens: Iterable[int]) -> Iterator[str]:
        """Tokens to text as they come; control characters and what is no text show as U+FFFD."""

    def state(self) -> dict[str, Any]:
        """What `from_state` needs, fit for JSON."""


class Bytes:
    """A token is a byte of UTF-8."""

    name = "bytes"
    vocab_size = 256
    separator = (ord("\n"),)

    def encode(self, text: str) -> Tensor:
        return torch.from_numpy(np.frombuffer(text.encode(errors="surrogateescape"), np.uint8).astype(np.int64))

    def decode(self, tokens: Iterable[int]) -> Iterator[str]:
        """Nothing but training keeps a model from starting a character of several bytes and not ending it."""
        decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        for token in tokens:
            is_text = 32 <= token < 256 or token in (9, 10)  # tab and newline
            yield decoder.decode(bytes([token])) if is_text else "\ufffd"
        yield decoder.decode(b"", final=True)

    def state(self) -> dict[str, Any]:
        return {"name": self.name}


class Characters:
    """A token is a character of a text, in the order of Unicode: what nanoGPT does with Shakespeare."""

    name = "chars"

    def __init__(self, characters: Iterable[str]) -> None:
        self.characters = "".join(sorted(set(characters)))
        self.vocab_size = len(self.characters)
        self.separator = tuple(self.encode("\n").tolist()) if "\n" in self.characters else ()

    @cached_property
    def token_of(self) -> np.ndarray:
        """Each code point's token, -1 where it has none."""
        table = np.full(0x110000, -1, np.int64)
        table[code_points(self.characters)] = np.arange(self.vocab_size)
        return table

    def encode(self, text: str) -> Tensor:
        tokens = self.token_of[code_points(text)]
        if (tokens < 0).any():
            unknown = text[int((tokens < 0).argmax())]
            raise UserError(f"the character {unknown!a} is none of the {self.vocab_size} that the model was given")
        return torch.from_numpy(tokens)

    def decode(self, tokens: Iterable[int]) -> Iterator[str]:
        for token in tokens:
            yield self.characters[token].translate(CONTROL) if 0 <= token < self.vocab_size else "\ufffd"

    def state(self) -> dict[str, Any]:
        return {"name": self.name, "characters": self.characters}


def code_points(text: str) -> np.ndarray:
    return np.frombuffer(text.encode("utf-32-le", errors="surrogatepass"), np.dtype("<u4"))


class GPT2:
    """GPT-2's byte pairs. tiktoken is loaded where text is first encoded or decoded: training on shards needs none."""

    name = "gpt2"
    vocab_size = 50257
    separator = (50256,)  # <|endoftext|>

    @cached_property
    def encoding(self) -> Any:
        try:
            import tiktoken
        except ImportError as error:
            raise UserError("the gpt2 tokenizer needs tiktoken: pip install tiktoken (or take bytes, chars)") from error
        try:
            return tiktoken.get_encoding("gpt2")
        except (OSError, ValueError) as error:  # what requests and a wrong hash raise
            raise UserError(
                "tiktoken could not load GPT-2's vocabulary, which it downloads once: run it where there is a network, "
                "or set TIKTOKEN_CACHE_DIR to a folder that has it (or take bytes, chars)"
            ) from error

    def encode(self, text: str) -> Tensor:
        valid = text.encode(errors="surrogateescape").decode(errors="replace")
        return torch.tensor(self.encoding.encode_ordinary(valid), dtype=torch.int64)

    def decode(self, tokens: Iterable[int]) -> Iterator[str]:
        decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        for token in tokens:  # a model's vocabulary may be padded
            known = 0 <= token < self.vocab_size
            text = decoder.decode(self.encoding.decode_single_token_bytes(token)) if known else "\ufffd"
            yield text.translate(CONTROL)
        yield decoder.decode(b"", final=True)

    def state(self) -> dict[str, Any]:
        return {"name": self.name}


def from_state(state: dict[str, Any]) -> Tokenizer:
    """The tokenizer whose `state()` this is."""
    match state:
        case {"name": "bytes"}:
            return Bytes()
        case {"name": "gpt2"}:
            return GPT2()
        case {"name": "chars", "characters": str(characters)}:
            return Characters(characters)
    raise UserError(f"a tokenizer {str(state)[:60]!r} is unknown; the known ones are {', '.join(NAMES)}")
