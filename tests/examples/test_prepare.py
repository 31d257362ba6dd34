import json
import shlex
import subprocess
import sys
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from helpers.commands import complaint
from hypothesis import given, settings
from hypothesis import strategies as st

from examples import prepare
from examples.gpt import cli, corpus, data, shards
from examples.gpt.corpus import Span
from examples.gpt.tokens import GPT2, NAMES
from tests.examples import fake_tiktoken

ROOT = Path(__file__).parents[2]

properties = settings(max_examples=60, deadline=None, derandomize=True)
texts = st.text(st.sampled_from("ab 0_'é😀\n\t\x1f\x85"), min_size=1) | st.binary(min_size=1)


@pytest.fixture(autouse=True)
def tiktoken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tiktoken", fake_tiktoken)


def as_bytes(text: str | bytes) -> bytes:
    return text.encode() if isinstance(text, str) else text.replace(b"\0", b"0")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder of 40 files, of 100 to 140 bytes each."""
    for number in range(40):
        file = tmp_path / "text" / f"{number % 7}" / f"{number}.{'py' if number % 2 else 'h'}"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text((f"{number} é" * 100)[: 99 + number])
    return tmp_path / "text"


def run(*arguments: object) -> dict:
    return prepare.main(list(map(str, arguments)))


@properties
@given(texts, st.integers(1, 9))
def test_pieces_of_text_are_the_text(text: str | bytes, size: int) -> None:
    content = as_bytes(text)
    with TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(corpus, "PIECE", size)
        (file := Path(folder, "text")).write_bytes(b"ab" + content + b"c")
        passed = 0

        def progress(count: int) -> None:
            nonlocal passed
            passed += count

        pieces = list(corpus.read(Span(file, 2, 2 + len(content)), progress))
    assert "".join(pieces) == content.decode(errors="surrogateescape")
    assert passed == len(content)


@properties
@given(texts, st.integers(1, 9))
def test_pieces_of_text_have_the_tokens_of_the_text(text: str | bytes, size: int) -> None:
    content = as_bytes(text)
    with TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "tiktoken", fake_tiktoken)
        patch.setattr(corpus, "PIECE", size)
        (file := Path(folder, "text")).write_bytes(content)
        pieces = list(corpus.encode([Span(file, 0, len(content))], GPT2()))
    assert np.concatenate(pieces).tolist() == GPT2().encode(content.decode(errors="surrogateescape")).tolist()


def test_long_text_comes_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corpus, "PIECE", 100)
    (tmp_path / "text").write_text("some words\n" * 1000)
    pieces = list(corpus.read(Span(tmp_path / "text", 0, 11_000)))
    assert len(pieces) > 100
    assert max(map(len, pieces)) < 120


@properties
@given(st.lists(st.integers(0, 9), max_size=9), st.integers(1, 12))
def test_lots_are_of_one_size(sizes: list[int], size: int) -> None:
    whole = np.arange(sum(sizes))
    found = list(shards.lots(np.split(whole, np.cumsum(sizes)[:-1]) if sizes else [], size))
    assert [len(some) for some in found] == [len(some) for some in np.split(whole, range(size, len(whole), size))][
        : len(found)
    ]
    assert np.array_equal(np.concatenate([whole[:0], *found]), whole)


@pytest.mark.parametrize("tokenizer", NAMES)
@pytest.mark.parametrize("many", [False, True])
def test_shards_are_what_is_loaded_from_the_text(folder: Path, tmp_path: Path, tokenizer: str, many: bool) -> None:
    """Only bytes of a folder differ, and only in where the border is: loaded directly, it may be inside a file."""
    (tmp_path / "one").write_text("Is it? 'Tis.\n  é€\n" * 200)
    source = folder if many else tmp_path / "one"
    direct = data.load(source, 16, tokenizer)
    notes = run("--data", source, "--tokenizer", tokenizer, "--out", tmp_path / "out", "--shard-tokens", 700)
    loaded = data.load(tmp_path / "out", 16)
    assert notes["train"]["shards"] == len(list((tmp_path / "out").glob("*_train_*.bin"))) > 1
    assert loaded.tokenizer.state() == direct.tokenizer.state()
    if many and tokenizer == "bytes":
        newline = np.array([10])
        ours = np.concatenate([loaded.train[:], newline, loaded.val[:]])
        assert np.array_equal(ours, np.concatenate([direct.train, direct.val]))
        assert abs(len(loaded.val) - len(direct.val)) < 80
    else:
        assert np.array_equal(loaded.train[:], direct.train)
        assert np.array_equal(loaded.val[:], direct.val)
        assert loaded.bytes_per_token == direct.bytes_per_token
    assert (loaded.bytes_per_token == 1) == (tokenizer == "bytes")


def test_shards_are_llm_cs(tmp_path: Path) -> None:
    """As its dev/data/data_common.py writes them."""
    (tmp_path / "text").write_text("abcdefghij" * 10)
    run("--data", tmp_path / "text", "--tokenizer", "bytes", "--out", tmp_path / "out", "--shard-tokens", 50)
    names = ["tokens.json", "tokens_train_000000.bin", "tokens_train_000001.bin", "tokens_val_000000.bin"]
    assert sorted(file.name for file in (tmp_path / "out").iterdir()) == names
    content = (tmp_path / "out" / names[2]).read_bytes()
    header = np.frombuffer(content[:1024], "<i4")
    assert header[:3].tolist() == [20240520, 1, 40] and not header[3:].any()
    assert np.frombuffer(content[1024:], "<u2").tolist() == list(b"abcdefghij" * 4)


def documents(folder: Path, part: str) -> set[str]:
    tokens = data.load(folder, 16)
    whole = tokens.train if part == "train" else tokens.val
    return set("".join(tokens.tokenizer.decode(whole[:].tolist())).split("<|endoftext|>"))


def test_a_folders_files_are_whole_and_in_one_part(folder: Path, tmp_path: Path) -> None:
    notes = run("--data", folder, "--out", tmp_path / "out", "--val-fraction", 0.25)
    train, val = documents(tmp_path / "out", "train"), documents(tmp_path / "out", "val")
    assert train | val == {file.read_text() for file in folder.rglob("*.*")}
    assert len(train) + len(val) == 40
    assert 8 <= len(val) <= 12
    assert notes["val"]["bytes"] + notes["train"]["bytes"] == sum(f.stat().st_size for f in folder.rglob("*.*")) + 38
    assert notes["tokenizer"] == {"name": "gpt2"}
    assert json.loads((tmp_path / "out" / "tokens.json").read_text()) == notes


def test_a_large_file_among_small_ones_is_cut(tmp_path: Path) -> None:
    for number in range(5):
        (tmp_path / f"{number}").write_text("€" * 10 ** (number + 1))
    for tokenizer, tokens in (("bytes", 333_330 + 4), ("chars", 111_110 + 4)):
        train, val = corpus.split(corpus.find(tmp_path), 0.1, tokenizer)
        assert (train[-1].file, train[-1].stop) == (val[0].file, val[0].start)
        assert len([*train, *val]) == 6
        encoded = [
            np.concatenate(list(corpus.encode(part, corpus.make_tokenizer(tokenizer, [*train, *val]))))
            for part in (train, val)
        ]
        assert sum(map(len, encoded)) == tokens
        assert len(encoded[1]) == pytest.approx(tokens / 10, abs=2)


def test_the_same_text_gives_the_same_shards(folder: Path, tmp_path: Path) -> None:
    for out in ("a", "b"):
        run("--data", folder, "--tokenizer", "chars", "--out", tmp_path / out)
    files = [sorted((tmp_path / out).iterdir()) for out in ("a", "b")]
    assert [file.read_bytes() for file in files[0]] == [file.read_bytes() for file in files[1]]
    more = folder / "another.py"
    more.write_text("x" * 100)
    run("--data", folder, "--out", tmp_path / "c")
    run("--data", folder, "--out", tmp_path / "d", "--include", "[0-9]*")
    assert len(documents(tmp_path / "c", "train") ^ documents(tmp_path / "d", "train")) <= 2  # files keep their places


def test_patterns_choose_files_and_duplicates_and_links_are_left_out(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "copy.py").write_bytes((folder / "1" / "1.py").read_bytes())
    (folder / "other.py").write_text((folder / "1" / "1.py").read_text()[::-1])  # of the same size
    (folder / "link.py").symlink_to(folder / "2" / "2.h")
    (folder / "linked").symlink_to(folder / "1")
    (folder / ".hidden.py").write_text("hidden")
    run("--data", folder, "--out", tmp_path / "py", "--include", "*.py")
    expected = {file.read_text() for file in folder.rglob("*.py") if file.name not in ("link.py", ".hidden.py")}
    found = [documents(tmp_path / "py", part) for part in ("train", "val")]
    assert found[0] | found[1] == expected
    assert sum(map(len, found)) == len(expected) == 21
    assert "(22 files), 1 exact duplicates left out" in capsys.readouterr().out
    assert len(corpus.find(folder, ["*.py", "1/*.h"]).files) == 22 + len(list(folder.glob("1/*.h")))


def test_memory_holds_a_piece_and_a_shard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corpus, "PIECE", 2**14)
    (tmp_path / "text").mkdir()
    for number in range(4):
        (tmp_path / "text" / str(number)).write_text(f"line {number}\n" * 2**17)
    tracemalloc.start()
    notes = run("--data", tmp_path / "text", "--tokenizer", "bytes", "--out", tmp_path / "out", "--shard-tokens", 10**5)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert notes["train"]["bytes"] > 3 * 2**20
    assert peak < 2**20


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_what_fails_leaves_nothing_behind(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: Exception
) -> None:
    (tmp_path / ".out.partial").mkdir()  # of a run that was killed
    (tmp_path / ".out.partial" / "tokens_train_000009.bin").touch()
    original = shards.write_shard

    def write_shard(file: Path, tokens: np.ndarray) -> None:
        original(file, tokens)
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(shards, "write_shard", write_shard)
        with pytest.raises(cli.UserError if isinstance(error, OSError) else KeyboardInterrupt) as raised:
            run("--data", folder, "--out", tmp_path / "out")
    if isinstance(error, OSError):
        assert str(raised.value) == f"cannot read or write {tmp_path / 'out'}: No space left on device"
    assert list(tmp_path.iterdir()) == [folder]
    (tmp_path / "out").mkdir()
    run("--data", folder, "--out", tmp_path / "out")
    assert sorted(file.name for file in (tmp_path / "out").iterdir())[1:] == [
        "tokens_train_000000.bin",
        "tokens_val_000000.bin",
    ]


def test_shards_that_are_not_those_of_the_notes_are_refused(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    run("--data", folder, "--tokenizer", "chars", "--out", out, "--shard-tokens", 1000)
    with pytest.raises(cli.UserError, match="has chars tokens, not gpt2; leave --tokenizer out"):
        data.load(out, 16, "gpt2")
    alone = data.load(out / "tokens_train_000000.bin", 16)
    assert (alone.tokenizer.name, len(alone.train), len(alone.val)) == ("chars", 900, 100)
    (out / "tokens_train_000001.bin").unlink()
    with pytest.raises(
        cli.UserError, match=r"the train shards in .* have [\d,]+ tokens, .*tokens.json promises [\d,]+"
    ):
        data.load(out, 16)


@pytest.mark.parametrize("there", [True, False])
def test_out_may_be_a_link(there: bool, folder: Path, tmp_path: Path) -> None:
    if there:
        (tmp_path / "elsewhere").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    prepare.main(["--data", str(folder), "--out", str(tmp_path / "link"), "--tokenizer", "bytes"])
    assert (tmp_path / "link").is_symlink()
    assert len(data.load(tmp_path / "elsewhere", 16).train) > 0


def test_the_command_to_train_with_can_be_pasted(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prepare.main(["--data", str(folder), "--out", str(tmp_path / "my data"), "--tokenizer", "bytes"])
    assert shlex.split(capsys.readouterr().out)[-1] == str(tmp_path / "my data")


@pytest.fixture
def mistakes(tmp_path: Path) -> Iterator[dict[str, Path]]:
    paths = {name: tmp_path / name for name in ("empty", "binaries", "full", "text", "new")}
    paths["empty"].touch()
    for name in ("binaries", "full"):
        paths[name].mkdir()
        (paths[name] / "picture").write_bytes(b"\0d")
    paths["text"].write_text("text")
    yield paths


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((), "--out"),
        (("--out", ""), "--out"),
        (("--out", "{new}", "--data", "nowhere"), "nowhere is neither a file nor a folder"),
        (("--out", "{new}", "--data", "{binaries}"), "no text files were found"),
        (("--out", "{new}", "--data", "{binaries}/picture"), "is not a text file"),
        (("--out", "{new}", "--data", "{empty}"), "empty is too short for --val-fraction 0.1: a part of it is empty"),
        (("--out", "{new}", "--data", "{text}", "--tokenizer", "bytes"), "a part of it is empty"),
        (("--out", "{new}", "--data", "{text}", "--include", "*"), "--include chooses among the files of a folder"),
        (("--out", "{new}", "--include", "*"), "--include chooses"),
        (("--out", "{new}", "--data", "{binaries}", "--include", "*.txt"), "no text files"),
        (("--out", "{full}"), "full is not an empty folder"),
        (("--out", "{text}"), "text is not an empty folder"),
        (
            ("--out", "{text}/new", "--data", "{text}", "--tokenizer", "bytes", "--val-fraction", "0.5"),
            "cannot read or",
        ),
        (("--out", "{new}", "--tokenizer", "llama"), "chars"),
        (("--out", "{new}", "--shard-tokens", "0"), "above 0"),
        (("--out", "{new}", "--shard-tokens", "2147483648"), "2**31"),
        (("--out", "{new}", "--val-fraction", "1"), "between 0 and 1"),
        (("--out", "{new}", "--val-fraction", "0"), "between 0 and 1"),
    ],
)
def test_a_mistake(
    arguments: tuple[str, ...],
    says: str,
    mistakes: dict[str, Path],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    argv = [argument.format(**mistakes) for argument in arguments]
    assert says in complaint(prepare.main, argv, monkeypatch, capsys)
    assert not mistakes["new"].exists()


def test_too_many_characters_are_refused(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("".join(map(chr, [*range(1, 0xD800), *range(0xE000, 0x14000)])), encoding="utf-8")
    with pytest.raises(cli.UserError, match="79,871 different characters"):
        run("--data", tmp_path / "text", "--tokenizer", "chars", "--out", tmp_path / "out")


def test_without_tiktoken_nothing_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tiktoken", None)
    monkeypatch.setattr(corpus, "read", lambda *_: pytest.fail("read"))
    with pytest.raises(cli.UserError, match="pip install tiktoken"):
        run("--out", tmp_path / "out")


def test_the_command(tmp_path: Path) -> None:
    """A bar in bytes, what was made, and how to train with it."""
    (tmp_path / "text").write_text("some text\n" * 500)
    arguments = ("--data", tmp_path / "text", "--tokenizer", "bytes", "--out", tmp_path / "out")
    line = [sys.executable, "-m", "examples.prepare", *map(str, arguments)]
    result = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0
    assert "5.00k/5.00k" in result.stderr and "B/s" in result.stderr
    assert "training   4,500 bytes, 4,500 tokens, 1 shards" in result.stdout
    assert f"python -m examples.train --data {tmp_path / 'out'}" in result.stdout
