from pathlib import Path

import numpy as np
import pytest
import torch

from examples.gpt import data
from examples.gpt.cli import UserError


def test_embedded_corpus_is_python_and_the_same_every_time() -> None:
    corpus = data.load(None, context=128)
    again = data.load(None, context=128)
    assert len(corpus.train) + len(corpus.val) > 2_000_000
    assert bytes(corpus.train).count(b"def ") > 10_000
    assert np.array_equal(corpus.train, again.train)
    assert np.array_equal(corpus.val, again.val)


def test_the_last_tenth_is_for_validation(tmp_path: Path) -> None:
    text = bytes(range(1, 251)) * 10
    (tmp_path / "text").write_bytes(text)
    corpus = data.load(str(tmp_path / "text"), context=8)
    assert bytes(corpus.train) + bytes(corpus.val) == text
    assert len(corpus.val) == 250


def test_a_folder_is_all_of_its_text_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "a.txt").write_text("a" * 300)
    (tmp_path / "b.md").write_text("b" * 300)
    (tmp_path / ".hidden").write_text("c" * 300)
    (tmp_path / "picture").write_bytes(b"\0d" * 300)
    corpus = data.load(str(tmp_path), context=8)
    text = bytes(corpus.train) + bytes(corpus.val)
    assert sorted(text) == sorted(b"a" * 300 + b"b" * 300 + b"\n")


def test_batches_depend_on_seed_and_step_alone() -> None:
    tokens = np.arange(10_000, dtype=np.uint16)
    inputs, targets = data.training_batch(tokens, 4, 16, seed=1, step=7)
    again, _ = data.training_batch(tokens, 4, 16, seed=1, step=7)
    other_step, _ = data.training_batch(tokens, 4, 16, seed=1, step=8)
    other_seed, _ = data.training_batch(tokens, 4, 16, seed=2, step=7)
    assert inputs.shape == targets.shape == (4, 16)
    assert torch.equal(inputs + 1, targets)
    assert torch.equal(inputs, again)
    assert not torch.equal(inputs, other_step)
    assert not torch.equal(inputs, other_seed)


def test_training_reaches_the_first_and_the_last_token() -> None:
    tokens = np.arange(10, dtype=np.uint8)
    batches = [data.training_batch(tokens, 8, 4, seed=0, step=step) for step in range(20)]
    assert min(inputs.min() for inputs, _ in batches) == 0
    assert max(targets.max() for _, targets in batches) == 9


def test_validation_spans_the_tokens_and_never_changes() -> None:
    tokens = np.arange(1000, dtype=np.uint16)
    first = list(data.validation_batches(tokens, 4, 16, count=3))
    second = list(data.validation_batches(tokens, 4, 16, count=3))
    assert [inputs.shape for inputs, _ in first] == [(4, 16)] * 3
    assert first[0][0][0, 0] == 0
    assert first[-1][1][-1, -1] == 999
    assert all(torch.equal(a[0], b[0]) for a, b in zip(first, second, strict=True))


def test_text_survives_encoding_in_pieces() -> None:
    text = "def f():\n    return 'αβ→😀'\n"
    assert "".join(data.decode(data.encode(text).tolist())) == text
    assert data.encode("a\udcff").tolist() == [97, 255]  # how Python hands over a byte that is no UTF-8
    assert "".join(data.decode([65, 50_000, 66, 27, 67, 10])) == "A\ufffdB\ufffdC\n"


@pytest.mark.parametrize(
    ("content", "complaint"),
    [(None, "neither a file nor a folder"), (b"", "only 0 bytes"), (b"a\0b" * 99, "not a text")],
)
def test_bad_data_says_so(tmp_path: Path, content: bytes | None, complaint: str) -> None:
    path = tmp_path / "text"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UserError, match=complaint):
        data.load(str(path), context=8)
