"""tiktoken's part that the example uses, with GPT-2's words but a token for each different one."""

from __future__ import annotations

import re

# GPT-2's own pattern (openai/gpt-2 src/encoder.py) with what the standard library has in the place of \p{L} and \p{N}
WORDS = re.compile(r"'s|'t|'re|'ve|'m|'ll|'d| ?[^\W\d_]+| ?\d+| ?(?:_|[^\s\w])+|\s+(?!\S)|\s+")


class Encoding:
    def __init__(self) -> None:
        self.words: list[bytes] = []
        self.tokens: dict[bytes, int] = {}

    def encode_ordinary(self, text: str) -> list[int]:
        return [self.token(word.encode()) for word in WORDS.findall(text)]

    def token(self, word: bytes) -> int:
        if word not in self.tokens:
            self.tokens[word] = len(self.words)
            self.words.append(word)
        return self.tokens[word]

    def decode_single_token_bytes(self, token: int) -> bytes:
        return b"<|endoftext|>" if token == 50256 else self.words[token]


ENCODING = Encoding()


def get_encoding(name: str) -> Encoding:
    assert name == "gpt2"
    return ENCODING
