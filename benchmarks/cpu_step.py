"""Milliseconds of an optimizer step on a CPU, for the GPT of ``make train``.

    python -m benchmarks.cpu_step --csv docs/cpu_step.csv

The optimizers take turns in one process, on random gradients; the median over the rounds counts. All of them update the
same parameters: hidden matrices by Muon (of AdamW alone, by AdamW) and the rest by fused AdamW.
"""

import argparse
import platform
import shlex
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks.common import write_csv
from examples.gpt.model import GPT
from examples.gpt.presets import PRESETS
from examples.train import make_optimizer, model_shape
from muon import Muon, param_groups

PRESET = PRESETS["cpu"]
Step = Callable[[], object]


def ours(model: GPT, **options: object) -> Step:
    return Muon(param_groups(model), lr=1e-3, **options).step


def the_examples(model: GPT) -> Step:
    return make_optimizer(model, PRESET, "muon").step


def torch_muon_and_adamw(model: GPT, qkv_apart: bool = False) -> Step:
    hidden, rest = ([p for _, p in group["named"]] for group in split(model))
    if qkv_apart:
        hidden = [part for name, p in split(model)[0]["named"] for part in (thirds(p) if "qkv" in name else [p])]
    muon, adamw = torch.optim.Muon(hidden, lr=1e-3), torch.optim.AdamW(rest, lr=1e-3, fused=True)
    return lambda: (muon.step(), adamw.step())


def thirds(fused: torch.nn.Parameter) -> list[torch.nn.Parameter]:
    """Its q, k and v as parameters of their own, which torch.optim.Muon needs."""
    parts = [torch.nn.Parameter(rows.clone()) for rows in fused.detach().chunk(3)]
    for part, rows in zip(parts, fused.grad.chunk(3), strict=True):
        part.grad = rows.clone()
    return parts


def split(model: GPT) -> list[dict[str, list[tuple[str, torch.nn.Parameter]]]]:
    return [{"named": group["params"]} for group in param_groups(model)]


OPTIMIZERS: dict[str, Callable[[GPT], Step]] = {
    "muon": ours,
    "muon, q, k and v apart (the example)": the_examples,
    "muon, NorMuon and cautious decay": lambda model: ours(model, neuron_norm=0.95, weight_decay_mode="cautious"),
    "torch.optim.Muon and fused AdamW": torch_muon_and_adamw,
    "torch.optim.Muon, q, k and v apart, and fused AdamW": lambda model: torch_muon_and_adamw(model, qkv_apart=True),
    "fused AdamW alone": lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True).step,
}


def make_step(build: Callable[[GPT], Step]) -> Step:
    torch.manual_seed(0)
    model = GPT(**model_shape(PRESET, "sdpa"))
    for p in model.parameters():
        p.grad = torch.randn_like(p)
    step = build(model)
    step()
    return step


def measure(rounds: int) -> list[dict[str, object]]:
    steps = {name: make_step(build) for name, build in OPTIMIZERS.items()}
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds):
        for name, step in steps.items():
            start = time.perf_counter()
            step()
            times[name].append(1e3 * (time.perf_counter() - start))
    return [{"optimizer": name, "ms": statistics.median(found)} for name, found in times.items()]


def cpu_name() -> str:
    """As Linux knows it."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return next((line.split(": ")[1] for line in lines if line.startswith("model name")), platform.processor())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--csv", metavar="PATH", help="write every number there")
    args = parser.parse_args()
    made_by = {
        "cpu": cpu_name(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "command": shlex.join(["python", "-m", "benchmarks.cpu_step", *sys.argv[1:]]),
    }
    rows = measure(args.rounds)
    print("| optimizer | ms a step |\n|---|---|")
    for row in rows:
        print("| {optimizer} | {ms:.2f} |".format(**row))
    print("{cpu}, {threads} threads, torch {torch}: `{command}`".format(**made_by))
    if args.csv:
        write_csv(args.csv, rows, made_by)


if __name__ == "__main__":
    main()
