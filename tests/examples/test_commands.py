"""A user's mistake is one line on stderr that says what to do, and exit code 2."""

import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import nn

from examples import sample, train
from examples.gpt import checkpoint, cli
from examples.gpt.presets import MODELS
from examples.gpt.tokens import Characters

ROOT = Path(__file__).parents[2]


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("examples.train", "--data", "nowhere"), "nowhere is neither a file nor a folder"),
        (("examples.train", "--optimiser", "muon"), "--help"),
        (("examples.sample", "--run", "nowhere"), "python -m examples.train"),
    ],
)
def test_a_mistake_on_the_command_line(arguments: tuple[str, ...], says: str) -> None:
    result = command(*arguments)
    assert result.returncode == 2
    assert result.stdout == ""
    check(result.stderr, says)


def test_a_reader_that_has_seen_enough_ends_the_command_quietly(model: Path) -> None:
    """As `python -m examples.sample | head -1` does."""
    arguments = [sys.executable, "-m", "examples.sample", "--run", str(model), "--length", "100000"]
    with subprocess.Popen(arguments, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout.read(1)
        process.stdout.close()
        assert process.stderr.read() == ""
    assert process.returncode == 1


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (OSError(28, "No space left on device", "runs/cpu/metrics.csv"), "No space left on device: 'runs/cpu/metrics"),
        (MemoryError("Unable to allocate 24.9 GiB for an array"), "out of memory: a smaller --batch"),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 24.9 GiB"), "out of memory: a smaller --batch"),
        (RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory"), "--context"),
    ],
)
def test_what_the_machine_lacks_is_one_line(
    error: Exception, says: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(_: object) -> None:
        raise error

    with pytest.raises(SystemExit) as exit:
        cli.run(fail)
    assert exit.value.code == 2
    check(capsys.readouterr().err, says)


def test_a_fault_of_ours_is_a_traceback() -> None:
    def fail(_: object) -> None:
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")

    with pytest.raises(RuntimeError, match="mat1"):
        cli.run(fail)


@pytest.mark.parametrize(
    ("module", "arguments", "says"),
    [
        (train, ("--preset", "gpt5"), "gpt2-124m"),
        (train, ("--optimizer", "sgd"), "adamw"),
        (train, ("--steps", "0"), "not a whole number above 0"),
        (train, ("--batch", "9" * 20), "not a whole number above 0 and below 2**31"),
        (train, ("--see", "3"), "--see"),  # not short for --seed: a later option could make it mean something else
        (train, ("--seed", "-1"), "--seed"),
        (train, ("--seed", "9" * 23), "--seed"),
        (train, ("--lr", "fast"), "not a number"),
        (train, ("--lr", "0"), "above 0"),
        (train, ("--lr", "1e39"), "1e38"),
        (train, ("--device", "abacus"), "--device cpu"),
        (train, ("--device", "cuda:99"), "--device cpu"),
        (train, ("--device", "meta"), "--device cpu"),
        (train, ("--device", "hpu"), "--device cpu"),
        (train, ("--heads", "3"), "--heads 3"),
        (train, ("--batch-tokens", "1000"), "--batch-tokens 1000 is not a multiple of --context 128"),
        (train, ("--qk-clip", "0"), "above 0"),
        (train, ("--qk-clip", "100", "--attention", "sdpa"), "--qk-clip needs --attention flash"),
        (train, ("--clip", "-1"), "--clip"),
        (train, ("--dtype", "int8"), "float16"),
        (train, ("--preset", "shakespeare-char"), "needs --data"),
        (train, ("--checkpoint-every", "0"), "--checkpoint-every"),
        (train, ("--resume", "--out", "{empty}/run"), "start without --resume"),
        (train, ("--width", "1024", "--heads", "1"), "--heads 1"),
        (train, ("--context", "10000000"), "--context"),
        (train, ("--data", "{empty}"), "0 bytes"),
        (train, ("--data", ""), "--data"),
        (train, ("--data", "{binaries}"), "no text files"),
        (train, ("--out", "{empty}/run"), "--out"),
        (train, ("--out", "{blocked}"), "metrics.csv"),
        (train, ("--out", ""), "--out"),
        (sample, ("--run", ""), "--run"),
        (sample, ("--run", "x" * 300), "File name too long"),
        (sample, ("--prompt", ""), "--prompt"),
        (sample, ("--temperature", "-1"), "--temperature"),
        (sample, ("--top-p", "0"), "not a number above 0 and up to 1"),
        (sample, ("--top-p", "1.5"), "--top-p"),
    ],
)
def test_a_mistake(
    module: ModuleType,
    arguments: tuple[str, ...],
    says: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    paths = {name: tmp_path / name for name in ("empty", "binaries", "blocked")}
    paths["empty"].touch()
    paths["binaries"].mkdir()
    (paths["binaries"] / "picture").write_bytes(b"\0d")
    (paths["blocked"] / "metrics.csv").mkdir(parents=True)
    monkeypatch.setattr(sys, "argv", ["command", *(argument.format(**paths) for argument in arguments)])
    with pytest.raises(SystemExit) as exit:
        cli.run(module.main)
    printed = capsys.readouterr()
    assert exit.value.code == 2
    assert printed.out == ""
    check(printed.err, says)


def check(stderr: str, says: str) -> None:
    assert len(stderr.splitlines()) == 1
    assert stderr.startswith("error: ")
    assert says in stderr


def write(run: Path, capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    sample.main(["--run", str(run), "--prompt", "ab", "--length", "40", *arguments])
    return capsys.readouterr().out


def write_model(architecture: str, run: Path) -> tuple[nn.Module, Characters]:
    """A run's best.pt, of random weights."""
    torch.manual_seed(0)
    tokenizer = Characters("abcdefghijklmnopqrstuvwxyz .,\n")
    shape = {"layers": 2, "heads": 2, "width": 32, "context": 16, "vocab_size": tokenizer.vocab_size}
    model = MODELS[architecture](**shape).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    about = {"architecture": architecture, "shape": shape, "tokenizer": tokenizer.state(), "prompt": "\n"}
    checkpoint.write(run / "best.pt", {"about": about, "model": model.state_dict()})
    return model, tokenizer


@pytest.fixture
def model(tmp_path: Path) -> Path:
    write_model("gpt", tmp_path)
    return tmp_path


@pytest.mark.parametrize("architecture", MODELS)
def test_sample_writes_what_recomputation_gives(
    architecture: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Greedy, the text is the likeliest character after character, without a cache; otherwise it is the seed's."""
    model, tokenizer = write_model(architecture, tmp_path)
    tokens = tokenizer.encode("ab")[None]
    for _ in range(40):
        with torch.no_grad():
            tokens = torch.cat([tokens, model(tokens[:, -16:])[:, -1:].argmax(-1)], dim=1)
    expected = "".join(tokenizer.decode(tokens[0].tolist())) + "\n"
    assert write(tmp_path, capsys, "--temperature", "0") == expected
    assert write(tmp_path, capsys, "--top-k", "1") == write(tmp_path, capsys, "--top-p", "1e-300") == expected
    texts = [write(tmp_path, capsys, "--seed", str(seed)) for seed in (1, 1, 2)]
    assert texts[0] == texts[1] and len({expected, *texts}) == 3
    sample.main(["--run", str(tmp_path), "--length", "1"])
    assert capsys.readouterr().out.startswith("\n")
    with pytest.raises(cli.UserError, match="'Z'"):
        sample.main(["--run", str(tmp_path), "--prompt", "aZ"])


@pytest.mark.parametrize(
    ("module", "most"), [("train", 33), ("sample", 24), ("compare", 24), ("profile", 24), ("prepare", 24)]
)
def test_help_fits_a_screen(module: str, most: int) -> None:
    lines = command(f"examples.{module}", "--help").stdout.splitlines()
    assert 5 < len(lines) <= most
    assert max(map(len, lines)) <= 80
