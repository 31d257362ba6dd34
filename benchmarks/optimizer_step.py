"""Milliseconds of a whole optimizer step: ours, torch.optim.Muon and fused AdamW on the same hidden matrices.

    python -m benchmarks.optimizer_step --csv docs/optimizer_step.csv

The optimizers take turns in one process, on random gradients; each is timed from one idle device to the next over
several steps in a row, and the median over the rounds counts. `launches` are CUDA kernels a step.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable

import torch

from benchmarks.common import setting, write_csv
from muon import Muon

GPT2_124M = [(2304, 768), (768, 768), (3072, 768), (768, 3072)]
WIDTH_2048 = [(6144, 2048), (2048, 2048), (8192, 2048), (2048, 8192)]
MODELS = {  # shapes of a layer, layers, dtype
    "GPT-2 124M, float32": (GPT2_124M, 12, torch.float32),
    "GPT-2 124M with q, k, v apart, float32": ([(768, 768)] * 4 + [(3072, 768), (768, 3072)], 12, torch.float32),
    "24 layers of width 2048, bfloat16": (WIDTH_2048, 24, torch.bfloat16),
}
OPTIMIZERS: dict[str, Callable[[list[torch.Tensor]], torch.optim.Optimizer]] = {
    "muon": lambda params: Muon(params, lr=1e-3),
    "torch.optim.Muon": lambda params: torch.optim.Muon(params, lr=1e-3),
    "torch.optim.AdamW, fused": lambda params: torch.optim.AdamW(params, lr=1e-3, fused=True),
}
STEPS = 5


def make_params(shapes: list[tuple[int, int]], layers: int, dtype: torch.dtype) -> list[torch.Tensor]:
    params = [torch.randn(shape, device="cuda", dtype=dtype).requires_grad_() for shape in shapes * layers]
    for p in params:
        p.grad = torch.randn_like(p)
    return params


def step_milliseconds(optimizer: torch.optim.Optimizer) -> tuple[float, float]:
    """Of a step until the device is idle, and until Python is through."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(STEPS):
        optimizer.step()
    python = time.perf_counter() - start
    torch.cuda.synchronize()
    return 1e3 * (time.perf_counter() - start) / STEPS, 1e3 * python / STEPS


def launches(optimizer: torch.optim.Optimizer) -> int:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        optimizer.step()
        torch.cuda.synchronize()
    names = [event.name for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    return sum("Memcpy" not in name and "#" not in name for name in names)  # "#" is in the step's own label


def extra_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Memory of a step beyond parameters, gradients and state, what a recorded graph keeps for itself included."""
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    kept = torch.cuda.memory_reserved() - before
    optimizer.step()
    return max(kept, torch.cuda.max_memory_allocated() - before)


def measure(model: str, rounds: int) -> list[dict[str, object]]:
    shapes, layers, dtype = MODELS[model]
    params = make_params(shapes, layers, dtype)
    optimizers = {name: make(params) for name, make in OPTIMIZERS.items()}
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in optimizers}
    extra = {}
    for name, optimizer in reversed(optimizers.items()):  # warm up; ours last, because only its graph stays
        step_milliseconds(optimizer)
        extra[name] = extra_bytes(optimizer)
    for _ in range(rounds):
        for name, optimizer in optimizers.items():
            times[name].append(step_milliseconds(optimizer))
    return [
        {
            "model": model,
            "optimizer": name,
            "ms": statistics.median(total for total, _ in times[name]),
            "python_ms": statistics.median(python for _, python in times[name]),
            "launches": launches(optimizer),
            "extra_mib": extra[name] / 2**20,
        }
        for name, optimizer in optimizers.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=MODELS, metavar="MODEL")
    parser.add_argument("--csv", metavar="PATH", help="write every number there")
    args = parser.parse_args()
    print(
        "| model | optimizer | ms a step | of it Python | launches | extra MiB |\n|---|---|---|---|---|---|", flush=True
    )
    rows = []
    for model in args.models:
        for row in measure(model, args.rounds):
            rows.append(row)
            print("| {model} | {optimizer} | {ms:.2f} | {python_ms:.2f} | {launches} | {extra_mib:.0f} |".format(**row))
        sys.stdout.flush()
    made_by = setting("optimizer_step")
    print("{gpu}, torch {torch}, triton {triton}: `{command}`".format(**made_by))
    if args.csv:
        write_csv(args.csv, rows, made_by)


if __name__ == "__main__":
    main()
