"""Profiles of a small model on the CPU, and traces of a GPU as torch.profiler writes them."""

import csv
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.commands import complaint
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from examples import profile
from examples.gpt import roofline, trace
from examples.gpt.roofline import Ceilings
from examples.profile import KINDS, Row, rows_of

LAYERS, WIDTH, CONTEXT, BATCH = 2, 32, 32, 4
CEILINGS = Ceilings(flops=1e12, bandwidth=1e11)  # they meet at 10 operations a byte


def options(folder: Path, *more: str) -> list[str]:
    size = ["--layers", str(LAYERS), "--width", str(WIDTH), "--heads", "2", "--context", str(CONTEXT)]
    text = folder / "text.txt"
    text.write_text("".join(f"def square_{i}(x):\n    return x * x + {i}\n\n" for i in range(500)))
    return [
        "--csv", str(folder / "profile.csv"), "--profiled", "2",
        "--data", str(text), "--device", "cpu", *size, "--batch", str(BATCH), *more,
    ]  # fmt: skip


def read(folder: Path) -> list[dict[str, str]]:
    with (folder / "profile.csv").open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.fixture
def ceilings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roofline, "measure", lambda *_: CEILINGS)


@pytest.mark.usefixtures("ceilings")
@pytest.mark.parametrize("more", [[], ["--attention", "sdpa", "--optimizer", "adamw"], ["--batch", "2", "--clip", "1"]])
def test_a_step_has_the_operations_that_it_must_have(tmp_path: Path, more: list[str]) -> None:
    """6 operations a weight and token, and each layer's attention; more calls in micro-batches, but no more work."""
    micro_batches = 2 if "--clip" in more else 1
    text = profile.main(options(tmp_path, *more, *["--batch-tokens", str(BATCH * CONTEXT)] * (micro_batches > 1)))
    rows = read(tmp_path)
    flops = {kind: sum(float(row["flops"] or 0) for row in rows if row["kind"] == kind) for kind in KINDS}
    weights = LAYERS * 12 * WIDTH**2 + 256 * WIDTH
    assert flops["matrix products"] == pytest.approx(6 * weights * BATCH * CONTEXT)
    attention = LAYERS * 2 * BATCH * CONTEXT**2 * WIDTH
    assert flops["attention forward"] == pytest.approx(attention)
    assert flops["attention backward"] == pytest.approx(2.5 * attention)
    calls = [float(row["calls"]) for row in rows if row["kind"] == "attention forward"]
    assert calls == [LAYERS * micro_batches]
    assert all(sum(float(row["ms"]) for row in rows if row["kind"] == kind) > 0 for kind in KINDS)
    assert all(
        kind in text for kind in (*KINDS, "idle", "a step without the profiler", "ceilings: 1 TFLOP/s and 100 GB/s")
    )
    assert (tmp_path / "profile.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.usefixtures("ceilings")
def test_a_report_is_what_the_profile_said(tmp_path: Path) -> None:
    text = profile.main(options(tmp_path, "--top", "3"))
    (tmp_path / "profile.png").unlink()
    assert profile.main(["--report", str(tmp_path / "profile.csv"), "--top", "3"]) == text
    assert (tmp_path / "profile.png").exists()
    table = text.split("\n\n")[0].splitlines()
    assert len(table) == 1 + 3
    shown = [float(line.split()[0]) for line in table[1:]]
    assert shown == sorted(shown, reverse=True)


def test_shares_add_up_and_what_is_left_is_idle() -> None:
    rows = [Row("loss", "a", "", 1, 3.0), Row("optimizer", "b", "", 1, 1.0)]
    lines = profile.table(rows, 8.0, CEILINGS, 5).splitlines()
    found = {line.split("  ")[-1].strip(): line.split()[:2] for line in lines if "%" in line}
    assert found["loss"] == ["3.00", "38%"] and found["idle"] == ["4.00", "50%"]
    slowed = profile.table(rows, 2.0, CEILINGS, 5)  # by the profiler
    assert "0.00    0%  idle" in slowed and "  3.00   75%  loss" in slowed


def event(cat: str, name: str, ts: float, dur: float, tid: int = 1, **args: Any) -> dict[str, Any]:
    return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "tid": tid, "args": args}


def arguments(*tensors: tuple[list[int], str]) -> dict[str, Any]:
    return {"Input Dims": [shape for shape, _ in tensors], "Input type": [kind for _, kind in tensors]}


BF16 = "c10::BFloat16"
PRODUCT = arguments(([64, 32], BF16), ([32, 16], BF16))
HEADS = ([2, 8, 4, 16], BF16)


def gpu_trace() -> list[dict[str, Any]]:
    """A compiled step: an operator, a fused kernel, attention of two kernels, and the optimizer's graph of two."""
    host = [
        event("cpu_op", "CompiledFunction", 0, 100, **arguments(([64, 32], BF16))),
        event("cpu_op", "aten::mm", 10, 20, **PRODUCT),
        event("cuda_runtime", "cudaLaunchKernel", 15, 5, correlation=1),
        event("cpu_op", "aten::sum", 35, 1, **{"External id": 77}, **arguments(([64], "float"))),
        event("cuda_driver", "cuLaunchKernelEx", 37, 2, correlation=9),
        event("cpu_op", "triton_poi_fused_add_0", 40, 10, **arguments(([64], "float"), ([64], BF16), ([], "Scalar"))),
        event("cuda_driver", "cuLaunchKernelEx", 42, 5, correlation=2),
        event("cpu_op", "attention::backward", 0, 30, tid=2, **arguments(*[HEADS] * 2)),
        event("cpu_op", "aten::zeros", 1, 8, tid=2, **arguments(([2, 8], "float"))),
        event("cuda_runtime", "cudaLaunchKernel", 2, 5, tid=2, correlation=3),
        event("cuda_driver", "cuLaunchKernelEx", 12, 5, tid=2, correlation=4),
        event("user_annotation", "Optimizer.step#Muon.step", 200, 50),
        event("cuda_runtime", "cudaGraphLaunch", 210, 5, correlation=5),
        event("cuda_runtime", "cudaLaunchKernel", 260, 5, correlation=6),
        event("cuda_driver", "cuLaunchKernelEx", 95, 1, correlation=7),
        event("gpu_user_annotation", "Optimizer.step#Muon.step", 700, 50),
        {"ph": "M", "name": "process_name", "ts": 0, "args": {}},
    ]
    device = [
        event("kernel", "nvjet_tst_128x64", 500, 1000, correlation=1),
        event("kernel", "triton_poi_fused_add_0", 600, 2000, correlation=2),
        event("kernel", "void at::fill<float>(int)", 610, 100, correlation=3),
        event("kernel", "backward_kernel", 620, 3000, correlation=4),
        event("kernel", "gram_kernel", 700, 4000, correlation=5),
        event("kernel", "update_kernel", 710, 5000, correlation=5),
        event("kernel", "void at::reduce_kernel<4>(int)", 715, 50, correlation=8, **{"External id": 77}),
        event("kernel", "triton_red_1", 716, 40, correlation=9),
        event("gpu_memcpy", "Memcpy HtoD", 720, 300, correlation=6),
        event("kernel", "void at::softmax_nll_loss<float, 4>(int)", 730, 70, correlation=7),
    ]
    return host + device


def test_kernels_go_to_who_launched_them() -> None:
    rows = {row.operator: row for row in rows_of(trace.read(gpu_trace()), steps=2)}
    assert {name: (row.kind, row.ms, row.calls) for name, row in rows.items()} == {
        "mm": ("matrix products", 0.5, 0.5),
        "triton_poi_fused_add_0": ("norms, element-wise, rest", 1.0, 0.5),
        "attention::backward": ("attention backward", 1.55, 0.5),
        "gram_kernel": ("optimizer", 2.0, 0.5),
        "update_kernel": ("optimizer", 2.5, 0.5),
        "sum": ("norms, element-wise, rest", 0.025, 0.5),
        "triton_red_1": ("norms, element-wise, rest", 0.02, 0.5),
        "Memcpy HtoD": ("norms, element-wise, rest", 0.15, 0.5),
        "at::softmax_nll_loss": ("loss", 0.035, 0.5),
    }
    assert (rows["mm"].flops, rows["mm"].bytes) == (64 * 32 * 16, 64 * 32 + 32 * 16 + 64 * 16)  # half of a step's
    assert (rows["triton_poi_fused_add_0"].flops, rows["triton_poi_fused_add_0"].bytes) == (None, 64 * (4 + 2) / 2)
    assert (rows["triton_red_1"].shapes, rows["triton_red_1"].bytes) == ("", None)  # CompiledFunction's are not its own
    assert rows["gram_kernel"].flops is rows["gram_kernel"].bytes is None
    assert rows["mm"].shapes == "64x32 32x16" and rows["at::softmax_nll_loss"].shapes == ""


def test_time_on_a_cpu_is_without_that_of_what_is_called() -> None:
    events = [
        event("cpu_op", "aten::linear", 0, 100),
        event("cpu_op", "aten::mm", 10, 60, **arguments(([4, 4], "float"), ([4, 4], "float"))),
        event("cpu_op", "aten::empty", 20, 5),
        event("cpu_op", "aten::mm", 80, 20, **arguments(([4, 4], "float"), ([4, 4], "float"))),
        event("cpu_op", "aten::mul", 100, 7),  # starts as the first one ends
        event("cpu_op", "aten::mul", 50, 30, tid=2),
    ]
    rows = {row.operator: row for row in rows_of(trace.read(events), steps=1)}
    assert {name: pytest.approx(1e3 * row.ms) for name, row in rows.items()} == {
        "linear": 20, "mm": 75, "empty": 5, "mul": 37,
    }  # fmt: skip
    assert rows["mm"].calls == 2 and rows["mm"].flops == 2 * 2 * 4**3


@settings(max_examples=20)
@given(st.sampled_from(["mm", "addmm", "bmm", "baddbmm"]), st.lists(st.integers(1, 9), min_size=4, max_size=4))
def test_products_cost_what_torch_counts(name: str, sizes: list[int]) -> None:
    b, m, k, n = sizes
    batch = [b] if "bmm" in name else []
    tensors = [torch.ones(*batch, m, k), torch.ones(*batch, k, n)]
    tensors = [torch.ones(*batch, m, n)] * ("add" in name) + tensors
    with FlopCounterMode(display=False) as counter:
        result = getattr(torch, name)(*tensors)
    flops, moved = roofline.cost(f"aten::{name}", [list(x.shape) for x in tensors], ["float"] * len(tensors))
    assert flops == counter.get_total_flops()
    assert moved == sum(x.nbytes for x in (*tensors, result))
    with_out = [*tensors, result]  # compiled code hands the result over, too
    assert (flops, moved) == roofline.cost(
        f"aten::{name}", [list(x.shape) for x in with_out], ["float"] * len(with_out)
    )


def test_attention_costs_half_of_what_torch_counts_without_a_mask() -> None:
    torchs, ours = [2, 3, 8, 16], [2, 8, 3, 16]  # (B, H, S, D) and (B, S, H, D)
    size = 4 * math.prod(ours)
    forward = (sdpa_flop_count(torchs, torchs, torchs) / 2, 4 * size)
    backward = (sdpa_backward_flop_count(torchs, torchs, torchs, torchs) / 2, 8 * size)
    for name, shape in (("aten::_scaled_dot_product_flash_attention", torchs), ("attention::", ours)):
        suffixes = ("forward", "backward") if shape is ours else ("_for_cpu", "_backward")
        assert roofline.cost(name + suffixes[0], [shape] * 3, ["float"] * 3) == forward
        assert roofline.cost(name + suffixes[1], [shape] * 5, ["float"] * 5) == backward


@pytest.mark.parametrize(
    ("name", "arguments", "moved"),
    [
        ("aten::mul", [([8, 4], "float"), ([4], "float")], 4 * (32 + 4 + 32)),
        ("aten::add_", [([8], BF16), ([8], BF16)], 2 * 3 * 8),
        ("aten::copy_", [([8], BF16), ([8], "float")], 8 * (2 + 4)),
        ("aten::zero_", [([8], "double")], 8 * 8),
        ("aten::sum", [([8], "float")], None),
        ("aten::cat", [([[8], [8]], "TensorList"), ([], "Scalar")], None),
        ("aten::empty", [([], "ScalarList")], None),
    ],
)
def test_bytes_are_known_or_none(name: str, arguments: list[tuple[list[int], str]], moved: float | None) -> None:
    assert roofline.cost(name, [shape for shape, _ in arguments], [kind for _, kind in arguments]) == (None, moved)


def test_what_binds() -> None:
    def binds(ms: float, flops: float | None, moved: float | None) -> str:
        return roofline.binds(ms, flops, moved, CEILINGS)

    assert binds(1.5, 1e9, 1e7) == "compute"  # 1 ms of operations, 0.1 ms of bytes
    assert binds(1.5, 1e8, 1e8) == "memory"
    assert binds(1.5, None, 1e8) == "memory"
    assert binds(2.5, 1e9, 1e8) == binds(2.5, None, 1e8) == "neither"
    assert binds(2.5, None, None) == "unknown"
    row = Row("loss", "a", "", 1, 2.5, None, 1e8)
    assert (profile.above(row, CEILINGS), profile.above(Row("loss", "a", ""), CEILINGS)) == ("1.50", "n/a")


def test_ceilings_are_of_this_machine() -> None:
    found = roofline.measure(torch.device("cpu"), torch.float32)
    assert 1e8 < found.flops < 1e14 and 1e8 < found.bandwidth < 1e12
    assert math.isfinite(found.flops / found.bandwidth)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--top", "0"], "not a whole number above 0"),
        (["--preset", "gpt5"], "gpt2-124m"),
        (["--data", "nowhere"], "nowhere"),
        (["--report", "{tmp}/nowhere.csv"], "nowhere.csv"),
        (["--report", "{tmp}/other.csv"], "not a CSV that this command wrote"),
        (["--report", "{tmp}/half.csv"], "not a CSV that this command wrote"),
        (["--csv", "{tmp}/figure.png"], "--csv"),
        (["--csv", "{tmp}/other.csv/x.csv"], "cannot write"),
    ],
)
def test_a_mistake(
    arguments: list[str],
    says: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "other.csv").write_text("a,b\n1,2\n")
    (tmp_path / "half.csv").write_text("operator,ms\nmm,2\n")
    monkeypatch.chdir(tmp_path)
    argv = [argument.format(tmp=tmp_path) for argument in arguments]
    assert says in complaint(profile.main, argv, monkeypatch, capsys)
