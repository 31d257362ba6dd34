"""What is told of a run: to trackers, as MFU, and of the optimizer's time."""

import dataclasses
import json
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from examples import train
from examples.gpt import record, speed
from examples.gpt.cli import UserError
from examples.gpt.logging import TRACKERS, Tracker
from examples.gpt.model import GPT
from examples.gpt.nanogpt import NanoGPT
from examples.gpt.presets import PRESETS
from examples.gpt.step import model_shape

ROW = {"step": 20, "train_loss": 2.5, "val_loss": None, "tokens": 400}


class Recorder:
    """Stands in for the trackers' packages."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: self.calls.append((name, args, kwargs))


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_rows_go_to_the_tracker(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder()
    monkeypatch.setitem(sys.modules, name, recorder)
    tracker = Tracker(name, tmp_path / "mine", {"run": "1234"}, first_step=0)
    tracker.log(ROW)
    tracker.finish()
    (init, _, options), logged, finished = recorder.calls
    assert (init, options["name"], options["resume"]) == ("init", "mine-1234", "allow")
    assert logged == ("log", ({"train_loss": 2.5, "tokens": 400},), {"step": 20})
    assert finished[0] == "finish"


def test_rows_go_to_tensorboard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder()
    folders = []

    def writer(folder: str, **options: Any) -> Recorder:
        folders.append((folder, options))
        return recorder

    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", SimpleNamespace(SummaryWriter=writer))
    tracker = Tracker("tensorboard", tmp_path, {}, first_step=7)
    tracker.log(ROW)
    tracker.finish()
    assert folders == [(str(tmp_path / "tensorboard"), {"purge_step": 7})]
    assert recorder.calls == [
        ("add_scalar", ("train_loss", 2.5, 20), {}),
        ("add_scalar", ("tokens", 400, 20), {}),
        ("close", (), {}),
    ]


@pytest.mark.parametrize("name", TRACKERS)
def test_a_tracker_that_is_not_installed_is_one_line(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (name, "torch.utils.tensorboard"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(UserError, match=f"pip install {name}"):
        train.main(["--log", name, "--out", str(tmp_path), "--device", "cpu", "--steps", "1"])


def test_flops_are_those_of_the_products() -> None:
    """Against torch's own count: 2 FLOPs a multiplication, forward and twice that backward, attention in full."""
    from torch.utils.flop_counter import FlopCounterMode

    model = GPT(layers=2, heads=2, width=32, context=64, vocab_size=128, attention="sdpa")
    tokens = torch.zeros(1, 64, dtype=torch.int64)
    matrices = [p for p in model.parameters() if p.dim() == 2]
    with FlopCounterMode(display=False) as counter, torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        model(tokens, tokens)
    assert 6 * sum(p.numel() for p in matrices) < speed.flops_per_token(model, 2, 32, 64)
    assert speed.flops_per_token(model, 2, 32, 64) * 64 == pytest.approx(3 * counter.get_total_flops(), rel=0.02)


def test_learned_positions_multiply_nothing() -> None:
    model = NanoGPT(layers=1, heads=2, width=16, context=8, vocab_size=32)
    weights = sum(p.numel() for p in model.parameters()) - 8 * 16
    assert speed.flops_per_token(model, 1, 16, 8) == 6 * weights + 12 * 16 * 8


@pytest.mark.parametrize(
    ("name", "peak"),
    [("NVIDIA H200", 989e12), ("NVIDIA H100 PCIe", 756e12), ("NVIDIA A100-SXM4-80GB", 312e12), ("X", None)],
)
def test_peaks(name: str, peak: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: name)
    assert speed.peak_flops(torch.device("cuda")) == peak
    assert speed.peak_flops(torch.device("cpu")) is None


def test_mfu_is_a_share_of_all_processes_peaks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speed, "peak_flops", lambda _: 1e9)
    preset = dataclasses.replace(PRESETS["cpu"], layers=1, width=16, heads=2, context=8)
    model = GPT(**model_shape(preset, "flash"))
    optimizer = torch.optim.SGD(model.parameters())
    speedometer = speed.Speedometer(model, optimizer, preset, torch.device("cpu"), processes=4)
    mfu = speedometer.read(1000.0)["mfu"]
    assert mfu == pytest.approx(1000 * speed.flops_per_token(model, 1, 16, 8) / 4e9)


def test_the_optimizers_milliseconds() -> None:
    layer = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(layer.parameters())
    clock = speed.OptimizerClock(optimizer, torch.device("cpu"))
    assert clock.read() is None
    optimizer.step(lambda: time.sleep(0.02))
    optimizer.step(lambda: time.sleep(0.04))
    assert 29 < clock.read() < 200
    assert clock.read() is None


def test_the_commit_is_known_or_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert record.commit() is None


def test_config_says_how_to_run_it_again(tmp_path: Path) -> None:
    options = ["--device", "cpu", "--steps", "1", "--layers", "1", "--width", "16", "--heads", "2", "--context", "8"]
    train.main([*options, "--batch", "2", "--out", str(tmp_path)])
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["command"].startswith("python -m examples.train --device cpu --steps 1")
    assert config["options"]["out"] == str(tmp_path)
    assert config["preset"]["width"] == 16
    assert {"python", "torch", "triton", "numpy"} == set(config["versions"])
    assert config["commit"] is None or len(config["commit"].rstrip("+")) == 40
