import sysconfig
import tracemalloc
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from examples.gpt import corpus, data, shards
from examples.gpt.cli import UserError

GIB = 2**30


def test_embedded_corpus_is_python_and_the_same_every_time() -> None:
    first = data.load(None, context=128)
    again = data.load(None, context=128)
    assert len(first.train) + len(first.val) > 2_000_000
    assert bytes(first.train).count(b"def ") > 10_000
    assert np.array_equal(first.train, again.train)
    assert np.array_equal(first.val, again.val)


def test_embedded_corpus_is_joined_as_ever() -> None:
    """The published losses are of exactly these bytes."""
    root = Path(sysconfig.get_paths()["stdlib"])
    skipped = corpus.INSTALLED | corpus.TABLES_AND_TESTS
    names = [file.relative_to(root).as_posix() for file in root.rglob("*.py")]
    names = [name for name in names if not skipped & set(name.split("/"))]
    names.sort(key=lambda name: (zlib.crc32(name.encode()), name))
    text = b"\n".join((root / name).read_bytes() for name in names)
    loaded = data.load(None, context=128)
    assert len(loaded.val) == len(text) // 10
    assert bytes(loaded.train) + bytes(loaded.val) == text


def test_the_last_tenth_is_for_validation(tmp_path: Path) -> None:
    text = bytes(range(1, 251)) * 10
    (tmp_path / "text").write_bytes(text)
    loaded = data.load(str(tmp_path / "text"), context=8)
    assert bytes(loaded.train) + bytes(loaded.val) == text
    assert len(loaded.val) == 250
    assert (loaded.tokenizer.name, loaded.bytes_per_token) == ("bytes", 1.0)


def test_a_folder_is_all_of_its_text_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "text" / "deep").mkdir(parents=True)
    (tmp_path / "text" / "deep" / "a.txt").write_text("a" * 300)
    (tmp_path / "text" / "b.md").write_text("b" * 300)
    (tmp_path / "text" / ".hidden").write_text("c" * 300)
    (tmp_path / "text" / "picture").write_bytes(b"\0d" * 300)
    (tmp_path / "elsewhere").write_text("e" * 300)
    (tmp_path / "text" / "link").symlink_to(tmp_path / "elsewhere")
    loaded = data.load(str(tmp_path / "text"), context=8)
    text = bytes(loaded.train) + bytes(loaded.val)
    assert sorted(text) == sorted(b"a" * 300 + b"b" * 300 + b"\n")

    monkeypatch.setattr(data, "IN_MEMORY", 0)  # then nothing of it is held
    mapped = data.load(str(tmp_path / "text"), context=8)
    assert isinstance(mapped.train, shards.Joined)
    assert bytes(mapped.train[:]) + bytes(mapped.val[:]) == text
    assert len(mapped.val) == len(loaded.val)


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


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.lists(st.integers(0, 7), max_size=6), st.data())
def test_joined_parts_are_as_one(sizes: list[int], drawn: st.DataObject) -> None:
    whole = np.arange(sum(sizes), dtype=np.uint16)
    joined = shards.Joined(np.split(whole, np.cumsum(sizes)[:-1]) if sizes else [])
    place = st.integers(0, len(whole))
    border, start, stop = drawn.draw(place), drawn.draw(place), drawn.draw(place)
    assert len(joined) == len(whole)
    assert np.array_equal(joined[start:stop], whole[start:stop])
    first, last = joined.cut(border)
    assert (len(first), len(last)) == (border, len(whole) - border)
    assert np.array_equal(first[start:stop], whole[:border][start:stop])
    assert np.array_equal(last[start:stop], whole[border:][start:stop])


def test_batches_of_joined_parts_cross_their_borders() -> None:
    whole = np.arange(1000, dtype=np.uint16)
    joined = shards.Joined(np.split(whole, [1, 10, 11, 500]))
    for step in range(5):
        of_whole, of_joined = (data.training_batch(some, 8, 100, seed=0, step=step) for some in (whole, joined))
        assert torch.equal(of_whole[0], of_joined[0]) and torch.equal(of_whole[1], of_joined[1])
    pairs = zip(*(data.validation_batches(some, 8, 100, count=2) for some in (whole, joined)), strict=True)
    assert all(torch.equal(a[1], b[1]) for a, b in pairs)


def test_shakespeare_is_cut_as_nanogpt_does(tmp_path: Path) -> None:
    """Its 1,115,394 characters are 1,003,854 to train on and 111,540 to validate on, of 65 kinds."""
    letters = "".join(map(chr, range(32, 32 + 64))) + "\n"
    text = (letters * 17_160)[:1_115_394]
    (tmp_path / "input.txt").write_text(text)
    loaded = data.load(tmp_path / "input.txt", 256, "chars")
    assert (len(loaded.train), len(loaded.val)) == (1_003_854, 111_540)
    assert loaded.tokenizer.vocab_size == 65
    assert "".join(loaded.tokenizer.decode(loaded.val.tolist())) == text[1_003_854:]
    assert loaded.bytes_per_token == 1.0


def test_characters_of_several_bytes_stay_whole(tmp_path: Path) -> None:
    text = "aé€😀" * 1001
    (tmp_path / "text").write_text(text, encoding="utf-8")
    loaded = data.load(tmp_path / "text", 64, "chars")
    assert "".join(loaded.tokenizer.decode([*loaded.train, *loaded.val])) == text
    assert abs(len(loaded.val) - 400) <= 4
    assert loaded.bytes_per_token == pytest.approx(2.5, abs=0.01)


def write(file: Path, tokens: np.ndarray, header: tuple[int, ...] = ()) -> None:
    file.parent.mkdir(exist_ok=True)
    start = np.zeros(256 if header else 0, "<i4")
    start[: len(header)] = header
    file.write_bytes(start.tobytes() + tokens.astype("<u2").tobytes())


def write_shard(file: Path, tokens: np.ndarray) -> None:
    write(file, tokens, (20240520, 1, len(tokens)))


def test_nanogpt_files_are_mapped(tmp_path: Path) -> None:
    write(tmp_path / "train.bin", np.arange(500))
    write(tmp_path / "val.bin", np.arange(100, 150))
    loaded = data.load(tmp_path, 16)
    assert isinstance(loaded.train, np.memmap) and isinstance(loaded.val, np.memmap)
    assert np.array_equal(loaded.train, np.arange(500)) and np.array_equal(loaded.val, np.arange(100, 150))
    assert (loaded.tokenizer.name, loaded.bytes_per_token) == ("gpt2", None)

    alone = data.load(tmp_path / "train.bin", 16, "gpt2")
    assert np.array_equal(alone.train, np.arange(450)) and np.array_equal(alone.val, np.arange(450, 500))


@pytest.mark.parametrize("name", ["fineweb_{}_{:06d}.bin", "tiny_shakespeare_{}.bin"])
def test_shards_are_joined_in_order(tmp_path: Path, name: str) -> None:
    parts = [name.format("train", number) for number in range(3)]
    for number, part in enumerate(dict.fromkeys(parts)):
        write_shard(tmp_path / part, np.arange(100) + 100 * number)
    write_shard(tmp_path / name.format("val", 0), np.arange(1000, 1050))
    loaded = data.load(tmp_path, 16)
    assert np.array_equal(loaded.train[:], np.arange(100 * len(set(parts))))
    assert np.array_equal(loaded.val[:], np.arange(1000, 1050))
    assert loaded.tokenizer.name == "gpt2"


def test_without_a_validation_shard_the_last_tenth_is_for_it(tmp_path: Path) -> None:
    for number in range(4):
        write_shard(tmp_path / f"x_train_{number}.bin", np.arange(60) + 60 * number)
    for path in (tmp_path, tmp_path / "x_train_3.bin"):
        loaded = data.load(path, 4, "bytes")
        whole = np.arange(240) if path.is_dir() else np.arange(180, 240)
        assert np.array_equal(np.concatenate([loaded.train[:], loaded.val[:]]), whole)
        assert len(loaded.val) == len(whole) // 10
        assert loaded.bytes_per_token == 1.0


def sparse(file: Path, start: bytes, size: int) -> None:
    with file.open("wb") as opened:
        opened.write(start)
        opened.truncate(size)


def test_more_than_fits_into_memory(tmp_path: Path) -> None:
    """64 GiB of text and 15 GiB of shards, most of it holes in the files; Python's own memory stays small."""
    sparse(tmp_path / "text", b"a" * corpus.PIECE, 64 * GIB)
    count = 2**31 - 1
    header = np.array([20240520, 1, count], "<i4").tobytes()
    for number in range(4):
        sparse(tmp_path / f"x_train_{number}.bin", header, 1024 + 2 * count)
    tracemalloc.start()
    text, tokens = data.load(tmp_path / "text", 128), data.load(tmp_path, 128)
    for loaded in (text, tokens):
        data.training_batch(loaded.train, 8, 128, seed=0, step=0)
        list(data.validation_batches(loaded.val, 8, 128, count=2))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(text.train) + len(text.val) == 64 * GIB
    assert len(tokens.train) + len(tokens.val) == 4 * count
    assert peak < 16 * 2**20


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


TOKENS = np.arange(100)


@pytest.mark.parametrize(
    ("header", "tokens", "complaint"),
    [
        ((20240801, 7, 100), TOKENS, "does not start with llm.c's magic number 20240520 but with 20240801"),
        ((), TOKENS, "magic number"),
        ((), TOKENS[:0], "but as it is empty"),
        ((20240520, 2, 100), TOKENS, "is of version 2, not of version 1"),
        ((20240520, 1, 101), TOKENS, "has 1,224 bytes, but its header promises 101 tokens, 1,226 bytes: it is cut off"),
        ((20240520, 1, 99), TOKENS, "promises 99 tokens"),
        ((20240520, 1, -1), TOKENS, "promises -1 tokens"),
        ((20240520, 1, 100), TOKENS + 50_200, "has a token 50299, beyond a vocabulary of 50,257"),
    ],
)
def test_a_wrong_shard_is_named(tmp_path: Path, header: tuple[int, ...], tokens: np.ndarray, complaint: str) -> None:
    write_shard(tmp_path / "x_train_0.bin", TOKENS)
    write(tmp_path / "x_train_1.bin", tokens, header)
    refuses(tmp_path, complaint, "x_train_1.bin", "python -m examples.prepare --data")


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"abc", "has 3 bytes, an odd number"),
        (np.array([20240520, 1, 0], "<i4").tobytes(), "has 12 bytes and ends inside its header of 1,024"),
        (np.array([20240520], "<i4").tobytes(), "ends inside its header"),
        (b"\xff" * 800, "has a token 65535, beyond"),
    ],
)
def test_a_wrong_file_of_nanogpts_is_named(tmp_path: Path, content: bytes, complaint: str) -> None:
    (tmp_path / "train.bin").write_bytes(content)
    refuses(tmp_path, complaint, "train.bin", "python -m examples.prepare --data")
    refuses(tmp_path / "train.bin", complaint, "train.bin", "python -m examples.prepare --data")


def refuses(path: Path, *says: str, tokenizer: str | None = None, context: int = 8) -> None:
    with pytest.raises(UserError) as error:
        data.load(path, context, tokenizer)
    assert len(str(error.value).splitlines()) == 1
    for some in says:
        assert some in str(error.value)


def test_other_mistakes_with_files_of_tokens(tmp_path: Path) -> None:
    write(tmp_path / "bpe" / "train.bin", TOKENS + 256)
    refuses(tmp_path / "bpe", "a token 355, beyond a vocabulary of 256", tokenizer="bytes")
    refuses(tmp_path / "bpe", "has only 10 tokens to validate on", "--context 16", "at least 18", context=16)
    refuses(tmp_path / "bpe", "no tokenizer 'bits'; the choices are bytes, chars, gpt2", tokenizer="bits")

    write_shard(tmp_path / "half" / "x_val_0.bin", TOKENS)
    refuses(tmp_path / "half", "x_val_0.bin", "none to train on")

    write(tmp_path / "characters" / "train.bin", TOKENS)
    refuses(tmp_path / "characters", "--data TEXT --tokenizer chars", tokenizer="chars")
    (tmp_path / "characters" / "meta.pkl").write_bytes(b"cos\nsystem\n(S'touch unpickled'\ntR.")
    (tmp_path / "characters" / "input.txt").write_text("text")
    refuses(tmp_path / "characters", "nothing is unpickled", "input.txt --tokenizer chars")

    for content in ("", "[]", "{}", '{"tokenizer": 1, "train": {"bytes": 1, "tokens": 1}}'):
        (tmp_path / "bpe" / "tokens.json").write_text(content)
        refuses(tmp_path / "bpe", "tokens.json is damaged", "python -m examples.prepare")


def test_both_ends_of_a_long_file_are_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards, "CHECKED", 10)
    for place in (0, 9, 90, 99):
        write(tmp_path / "train.bin", np.where(place == TOKENS, 60_000, 0))
        refuses(tmp_path, "has a token 60000")


def test_much_text_is_to_be_prepared_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data, "IN_MEMORY", 999)
    (tmp_path / "text").write_text("a" * 1000)
    refuses(tmp_path / "text", "has 1,000 bytes", f"--data {tmp_path / 'text'} --tokenizer chars", tokenizer="chars")
    assert data.load(tmp_path / "text", 8).tokenizer.name == "bytes"  # mapped


def test_what_cannot_be_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "text").write_text("a" * 1000)

    def refuse(*_: object) -> bool:
        raise PermissionError(13, "Permission denied", "text")

    monkeypatch.setattr(corpus, "is_text", refuse)
    refuses(tmp_path / "text", "cannot read text: Permission denied")
