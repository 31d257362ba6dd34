"""The benchmark's own arithmetic, on a model that a CPU runs in no time."""

import csv
import dataclasses
import math
from pathlib import Path

import pytest
import torch

from benchmarks import gpt2_124m
from examples.gpt import data
from examples.gpt.presets import PRESETS


def test_every_variant_is_timed_and_written_down(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    step = gpt2_124m.train.train_step
    text = tmp_path / "text"
    text.write_text("def f(x):\n    return x\n" * 100)
    small = dataclasses.replace(PRESETS["cpu"], layers=1, heads=2, width=16, context=16, batch=4)
    corpus = data.load(str(text), small.context)
    batches = []
    monkeypatch.setattr(
        gpt2_124m.train, "train_step", lambda *a, **k: batches.append((len(a[3][0]), k["micro_batch"])) or step(*a, **k)
    )
    rows = gpt2_124m.measure(small, corpus, torch.device("cpu"), tokens=[4 * 16, 12 * 16], rounds=3, steps=4)
    assert [(row["optimizer"], row["attention"]) for row in rows] == gpt2_124m.VARIANTS * 2
    assert [row["tokens_per_step"] for row in rows] == [64] * 4 + [192] * 4
    # Each variant: 4 steps of warm-up; then 3 rounds of 4 steps of one batch, and of 1 step of three batches.
    assert sorted(batches) == [(4, 4)] * 4 * 16 + [(12, 4)] * 4 * 3
    for row in rows:
        assert 0 < row["step_ms_lowest"] <= row["step_ms"] <= row["step_ms_highest"]
        assert row["tokens_per_second"] * row["step_ms"] == pytest.approx(1e3 * row["tokens_per_step"])
        assert row["mfu"] is None  # nobody knows this device's peak
        assert row["optimizer_ms"] > 0
        assert row["loss"] < math.log(256)
    assert len(gpt2_124m.table(rows).splitlines()) == 2 + len(rows)
    gpt2_124m.write_csv(tmp_path / "out.csv", rows, {"gpu": "none"})
    with (tmp_path / "out.csv").open(newline="") as file:
        written = list(csv.DictReader(file))
    assert [float(row["step_ms"]) for row in written] == [row["step_ms"] for row in rows]
