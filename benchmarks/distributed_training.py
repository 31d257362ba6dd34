"""Training of the gpt2-124m preset on all GPUs that torchrun starts, and on the first of them alone.

    torchrun --nproc-per-node 2 -m benchmarks.distributed_training --csv docs/distributed_training.csv

Both take the same steps on the same batches, Muon with our FlashAttention, through the functions of examples.train:
all GPUs share a batch and Muon's work under DistributedDataParallel, one takes it in parts. After a warm-up they take
turns; a row is a turn: milliseconds a step, from one idle device to the next, and the loss of the last step.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.common import setting, write_csv
from benchmarks.gpt2_124m import Trainer
from examples.gpt import data
from examples.gpt.cli import ArgumentParser, UserError, positive_int, run
from examples.gpt.presets import PRESETS, Preset
from examples.gpt.ranks import ALONE, Ranks, started

TOKENS_A_TURN = 655_360  # or one step


def measure(
    preset: Preset, corpus: data.Data, device: torch.device, ranks: Ranks, tokens: Sequence[int], rounds: int
) -> Iterator[dict[str, Any]]:
    """The first process's figures, as they come."""
    trainers = [Trainer(preset, "muon", "flash", corpus, device, some) for some in (ALONE, ranks)]
    for trainer in taking_turns(trainers, ranks):
        trainer.warm_up(tokens[0], steps_of_a_turn(tokens[0]))
    for number in tokens:
        for _ in range(rounds):
            for trainer in taking_turns(trainers, ranks):
                trainer.time_round(number, steps_of_a_turn(number))
                yield row(trainer, number)


def taking_turns(trainers: Sequence[Trainer], ranks: Ranks) -> Iterator[Trainer]:
    """Those that this process has a part in; all wait for the first process when it trains alone."""
    for trainer in trainers:
        dist.all_reduce(torch.zeros((), device="cpu"))
        if trainer.ranks.size > 1 or ranks.is_first:
            yield trainer


def steps_of_a_turn(tokens: int) -> int:
    return max(1, TOKENS_A_TURN // tokens)


def row(trainer: Trainer, tokens: int) -> dict[str, Any]:
    step_ms = trainer.round_ms[tokens][-1]
    return {
        "tokens_per_step": tokens,
        "gpus": trainer.ranks.size,
        "step": trainer.step,
        "step_ms": step_ms,
        "tokens_per_second": 1e3 * tokens / step_ms,
        "loss": trainer.ranks.mean(trainer.losses[tokens]).item(),
    }


def medians(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """A row for each number of tokens a step and of GPUs, and how many times one GPU's speed that is."""
    turns: dict[tuple[int, int], list[dict[str, Any]]] = {}
    for row in rows:
        turns.setdefault((int(row["tokens_per_step"]), int(row["gpus"])), []).append(row)
    speeds = {key: statistics.median(float(row["tokens_per_second"]) for row in some) for key, some in turns.items()}
    return [
        {
            "tokens_per_step": tokens,
            "gpus": gpus,
            "step_ms": statistics.median(float(row["step_ms"]) for row in some),
            "tokens_per_second": speeds[tokens, gpus],
            "times_one": speeds[tokens, gpus] / speeds[tokens, 1],
            "losses": ", ".join(f"{float(row['loss']):.4f}" for row in some),
        }
        for (tokens, gpus), some in turns.items()
    ]


def main(argv: Sequence[str] | None = None) -> None:
    parser = ArgumentParser(
        prog="torchrun -m benchmarks.distributed_training", description="Time training on many GPUs."
    )
    parser.add_argument("--csv", metavar="PATH", type=Path, help="also write the figures there")
    parser.add_argument("--tokens", metavar="N", type=positive_int, nargs="+", default=[65_536, 524_288], help="a step")
    parser.add_argument("--rounds", metavar="N", type=positive_int, default=5, help="turns that each takes")
    args = parser.parse_args(argv)
    if not torch.cuda.is_available():
        raise UserError("this benchmark needs CUDA GPUs")
    preset = PRESETS["gpt2-124m"]
    torch.set_float32_matmul_precision("high")
    with started() as ranks:
        if ranks.size == 1:
            raise UserError("this benchmark is for torchrun --nproc-per-node 2 or more")
        corpus = data.load(None, preset.context)
        rows = []
        for row in measure(preset, corpus, torch.device("cuda"), ranks, args.tokens, args.rounds):
            rows.append(row)
            if args.csv and ranks.is_first:
                write_csv(args.csv, rows, setting("distributed_training", argv))
        for row in medians(rows):
            print(
                "{tokens_per_step:9,} tokens a step, {gpus} GPUs: {step_ms:8.2f} ms, {tokens_per_second:11,.0f} "
                "tokens/s, {times_one:.3f} times one, losses {losses}".format(**row)
            )


if __name__ == "__main__":
    run(main)
