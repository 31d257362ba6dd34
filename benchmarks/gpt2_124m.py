"""Training steps of the gpt2-124m preset: Muon or fused AdamW, our FlashAttention or torch's SDPA.

    python -m benchmarks.gpt2_124m --tokens 32768 524288 --csv docs/gpt2_124m.csv

A step of more tokens than the preset's batch has adds up the gradients of several batches, as examples.train does.
Everything runs in one process on the same batches, through the functions of examples.train. Each variant is compiled
and warmed up; then they take turns, so that a drift of the clocks touches all alike. A step's time is the median over
the rounds, each timed from one idle device to the next, batches included.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import setting, write_csv
from examples import train
from examples.gpt import data
from examples.gpt.cli import ArgumentParser, UserError, positive_int, run
from examples.gpt.measure import milliseconds
from examples.gpt.model import GPT
from examples.gpt.presets import PRESETS, Preset
from examples.gpt.ranks import ALONE, Ranks
from examples.gpt.speed import flops_per_token, peak_flops

VARIANTS = [("muon", "flash"), ("adamw", "flash"), ("muon", "sdpa"), ("adamw", "sdpa")]
BASELINE = ("adamw", "sdpa")


class Trainer:
    """One variant: its model, its optimizer, and the step it is at."""

    def __init__(
        self,
        preset: Preset,
        optimizer: str,
        attention: str,
        corpus: data.Data,
        device: torch.device,
        ranks: Ranks = ALONE,
    ) -> None:
        torch.manual_seed(0)
        self.before = allocated(device)
        self.preset, self.corpus, self.device, self.ranks = preset, corpus, device, ranks
        self.variant = (optimizer, attention)
        model = GPT(**train.model_shape(preset, attention)).to(device)
        self.model = ranks.wrap(torch.compile(model) if preset.compile else model)
        self.optimizer = train.make_optimizer(model, preset, optimizer, ranks)
        self.scheduler = train.make_scheduler(self.optimizer, preset)
        self.flops_per_token = flops_per_token(model, preset.layers, preset.width, preset.context)
        self.step = 0
        self.round_ms: dict[int, list[float]] = {}  # by tokens a step, as all that follows
        self.peak_bytes: dict[int, int] = {}
        self.losses: dict[int, torch.Tensor] = {}

    def batch(self, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        context = self.preset.context
        batch = data.training_batch(self.corpus.train, tokens // context, context, seed=0, step=self.step)
        return data.to_device(self.ranks.part(batch), self.device)

    def train(self, tokens: int, steps: int) -> None:
        preset = self.preset
        for _ in range(steps):
            self.losses[tokens] = train.train_step(
                self.model, self.optimizer, self.scheduler, self.batch(tokens), preset.dtype, micro_batch=preset.batch
            )
            self.step += 1

    def warm_up(self, tokens: int, steps: int) -> None:
        """Compile, create the optimizer's state, and see how much memory stays allocated."""
        self.train(tokens, steps)
        self.resident_bytes = allocated(self.device) - self.before

    def time_round(self, tokens: int, steps: int) -> None:
        others = allocated(self.device) - self.resident_bytes
        reset_peak(self.device)
        round_ms = milliseconds(self.device, lambda: self.train(tokens, steps)) / steps
        self.round_ms.setdefault(tokens, []).append(round_ms)
        self.peak_bytes[tokens] = max(self.peak_bytes.get(tokens, 0), peak(self.device) - others)

    def optimizer_ms(self, steps: int) -> float:
        """On the gradients of one batch, again and again."""
        batch = self.batch(self.preset.batch * self.preset.context)
        train.forward(self.model, batch, self.preset.dtype).backward()
        self.optimizer.step()
        total = milliseconds(self.device, lambda: [self.optimizer.step() for _ in range(steps)])
        self.optimizer.zero_grad()
        return total / steps

    def results(self, steps: int) -> list[dict[str, Any]]:
        optimizer_ms = self.optimizer_ms(steps)
        return [self.result(tokens) | {"optimizer_ms": optimizer_ms} for tokens in self.round_ms]

    def result(self, tokens: int) -> dict[str, Any]:
        step_ms = statistics.median(self.round_ms[tokens])
        tokens_per_second = 1e3 * tokens / step_ms
        peak_rate = peak_flops(self.device)
        return {
            "tokens_per_step": tokens,
            "optimizer": self.variant[0],
            "attention": self.variant[1],
            "step_ms": step_ms,  # median over the rounds
            "step_ms_lowest": min(self.round_ms[tokens]),
            "step_ms_highest": max(self.round_ms[tokens]),
            "tokens_per_second": tokens_per_second,
            "mfu": tokens_per_second * self.flops_per_token / peak_rate if peak_rate else None,
            "peak_memory_gib": self.peak_bytes[tokens] / 2**30,  # of the allocations of this variant alone
            "loss": self.losses[tokens].item(),  # after the last step, to see that it learns
        }


def allocated(device: torch.device) -> int:
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def peak(device: torch.device) -> int:
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0


def reset_peak(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def measure(
    preset: Preset, corpus: data.Data, device: torch.device, *, tokens: Sequence[int], rounds: int, steps: int
) -> list[dict[str, Any]]:
    """A row for each number of tokens a step and each of VARIANTS; `steps` are of one batch, of larger ones fewer."""
    trainers = []
    for optimizer, attention in VARIANTS:
        print(f"compiling and warming up {optimizer} + {attention}", file=sys.stderr, flush=True)
        trainers.append(Trainer(preset, optimizer, attention, corpus, device))
        trainers[-1].warm_up(preset.batch * preset.context, steps)
    for number in tokens:
        for _ in range(rounds):
            for trainer in trainers:
                trainer.time_round(number, max(1, steps * preset.batch * preset.context // number))
            trainers = trainers[1:] + trainers[:1]  # another one goes first
    rows = [row for trainer in trainers for row in trainer.results(steps)]
    return sorted(rows, key=lambda row: (row["tokens_per_step"], VARIANTS.index((row["optimizer"], row["attention"]))))


def table(rows: list[dict[str, Any]]) -> str:
    """In markdown, with every speed relative to BASELINE's at as many tokens a step."""
    baselines = {
        row["tokens_per_step"]: row["tokens_per_second"]
        for row in rows
        if (row["optimizer"], row["attention"]) == BASELINE
    }
    lines = [
        "| tokens a step | optimizer | attention | ms a step (range) | tokens/s | of adamw + sdpa | MFU "
        "| optimizer ms | peak GiB | loss |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    line = (
        "| {tokens_per_step:,} | {optimizer} | {attention} "
        "| {step_ms:.2f} ({step_ms_lowest:.2f}-{step_ms_highest:.2f}) "
        "| {tokens_per_second:,.0f} | {relative:.3f} | {mfu} | {optimizer_ms:.2f} | {peak_memory_gib:.1f} "
        "| {loss:.3f} |"
    )
    for row in rows:
        relative = row["tokens_per_second"] / baselines[row["tokens_per_step"]]
        mfu = "" if row["mfu"] is None else f"{row['mfu']:.1%}"
        lines.append(line.format(**row | {"relative": relative, "mfu": mfu}))
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> None:
    parser = ArgumentParser(prog="python -m benchmarks.gpt2_124m", description="Time training steps of gpt2-124m.")
    add = parser.add_argument
    add("--csv", metavar="PATH", type=Path, help="also write the table there")
    preset = PRESETS["gpt2-124m"]
    batch = preset.batch * preset.context
    add("--tokens", metavar="N", type=positive_int, nargs="+", default=[batch], help=f"a step, multiples of {batch}")
    add("--rounds", metavar="N", type=positive_int, default=10, help="turns that each variant takes")
    add("--steps", metavar="N", type=positive_int, default=10, help=f"steps of {batch} tokens in a turn")
    args = parser.parse_args(argv)
    if any(tokens % batch for tokens in args.tokens):
        parser.error(f"--tokens takes multiples of {batch}")
    if not torch.cuda.is_available():
        raise UserError("this benchmark needs a CUDA GPU")

    device = torch.device("cuda")
    torch.set_float32_matmul_precision("high")
    corpus = data.load(None, preset.context)
    rows = measure(preset, corpus, device, tokens=args.tokens, rounds=args.rounds, steps=args.steps)
    made_by = setting("gpt2_124m", argv)
    print(f"\n{table(rows)}\n")
    print("{gpu}, torch {torch}, triton {triton}: `{command}`".format(**made_by))
    print(
        f"{preset.layers} layers of width {preset.width}, {preset.heads} heads, {preset.batch} x {preset.context} "
        f"tokens a batch, {preset.dtype}, torch.compile, vocabulary {preset.vocab_size:,}; the tokens are bytes, "
        "because GPT-2's tokeniser is not on the machine"
    )
    if args.csv:
        write_csv(args.csv, rows, made_by)


if __name__ == "__main__":
    run(main)
