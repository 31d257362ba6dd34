import json
import sys
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from examples.gpt import tokens
from examples.gpt.cli import UserError
from tests.examples import fake_tiktoken

properties = settings(max_examples=50, deadline=None, derandomize=True)
shown = st.text(st.characters(min_codepoint=32, exclude_categories=["Cs"]) | st.sampled_from("\t\n"))


@pytest.fixture
def tiktoken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tiktoken", fake_tiktoken)


def round_trip(tokenizer: tokens.Tokenizer, text: str) -> str:
    encoded = tokenizer.encode(text)
    assert encoded.dtype == torch.int64 and encoded.ndim == 1
    assert ((encoded >= 0) & (encoded < tokenizer.vocab_size)).all()
    restored = tokens.from_state(json.loads(json.dumps(tokenizer.state())))
    assert torch.equal(restored.encode(text), encoded)
    return "".join(restored.decode(encoded.tolist()))


@properties
@given(shown)
def test_bytes_keep_text(text: str) -> None:
    assert round_trip(tokens.Bytes(), text) == text
    assert tokens.Bytes().encode(text).tolist() == list(text.encode())


@properties
@given(shown, shown)
def test_characters_keep_text(text: str, more: str) -> None:
    tokenizer = tokens.Characters(text + more)
    assert round_trip(tokenizer, text) == text
    assert tokenizer.vocab_size == len(set(text + more))


@properties
@given(shown)
def test_gpt2_keeps_text(text: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "tiktoken", fake_tiktoken)
        assert round_trip(tokens.GPT2(), text) == text


def test_bytes_that_are_no_text_are_replaced_or_kept() -> None:
    assert tokens.Bytes().encode("a\udcff").tolist() == [97, 255]  # how Python hands over a byte that is no UTF-8
    assert "".join(tokens.Bytes().decode([65, 50_000, 66, 27, 67, 10])) == "A\ufffdB\ufffdC\n"
    assert "".join(tokens.Bytes().decode([0xE2, 0x82])) == "\ufffd"


def test_characters_are_in_nanogpts_order() -> None:
    """sorted(set(text)), as its data/shakespeare_char/prepare.py says."""
    tokenizer = tokens.Characters("hello world")
    assert tokenizer.characters == " dehlorw"
    assert tokenizer.encode("hello").tolist() == [3, 2, 4, 4, 5]
    assert "".join(tokenizer.decode([3, 2, 99, -1])) == "he\ufffd\ufffd"
    assert "".join(tokens.Characters("\x1b").decode([0])) == "\ufffd"  # no terminal should obey it


def test_a_character_that_is_not_in_the_vocabulary_is_named() -> None:
    with pytest.raises(UserError, match=r"character '\\xe9' is none of the 3"):
        tokens.Characters("abc").encode("abé")


@pytest.mark.usefixtures("tiktoken")
def test_gpt2_pads_and_joins_bytes() -> None:
    tokenizer = tokens.GPT2()
    head, tail = fake_tiktoken.ENCODING.token(b"\xe2\x82"), fake_tiktoken.ENCODING.token(b"\xac\x1b")
    assert "".join(tokenizer.decode([head, tail, 50_300])) == "€\ufffd\ufffd"
    assert "".join(tokenizer.decode(tokenizer.separator)) == "<|endoftext|>"
    assert round_trip(tokenizer, "a\udcffb") == "a\ufffdb"


def test_gpt2_without_tiktoken_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tiktoken", None)
    tokenizer = tokens.from_state({"name": "gpt2"})  # that much needs nothing
    assert tokenizer.vocab_size == 50257
    with pytest.raises(UserError, match="pip install tiktoken"):
        tokenizer.encode("a")
    with pytest.raises(UserError, match="pip install tiktoken"):
        list(tokenizer.decode([1]))


def test_gpt2_without_its_files_says_where_they_go(monkeypatch: pytest.MonkeyPatch) -> None:
    def get_encoding(name: str) -> None:
        raise ConnectionError("no network")

    monkeypatch.setitem(sys.modules, "tiktoken", SimpleNamespace(get_encoding=get_encoding))
    with pytest.raises(UserError, match="TIKTOKEN_CACHE_DIR"):
        tokens.GPT2().encode("a")


@pytest.mark.parametrize("state", [{}, {"name": "llama"}, {"name": "chars"}, {"name": "chars", "characters": 3}])
def test_a_foreign_state_is_refused(state: dict) -> None:
    with pytest.raises(UserError, match="the known ones are bytes, chars, gpt2"):
        tokens.from_state(state)
