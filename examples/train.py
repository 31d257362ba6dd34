"""Train a GPT with Muon and FlashAttention.

    python -m examples.train                           # two minutes on a laptop's CPU
    python -m examples.train --optimizer adamw         # the same with AdamW
    python -m examples.train --data my.txt --out runs/mine
    torchrun --nproc-per-node 2 -m examples.train      # on two processes, each with half of every batch

Writes metrics.csv, loss.png, sample.txt, model.pt and config.json into the run's folder.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import math
import platform
import shlex
import signal
import sys
import time
from argparse import BooleanOptionalAction, Namespace
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR, LRScheduler
from tqdm import tqdm

from attention.functional import MAX_HEAD_DIM
from examples.gpt import checkpoint, data
from examples.gpt.cli import ArgumentParser, UserError, path, pick_device, positive_float, positive_int, run, seed
from examples.gpt.logging import COLUMNS, Metrics, Row, plot
from examples.gpt.model import GPT
from examples.gpt.presets import PRESETS, Preset
from examples.gpt.ranks import ALONE, Ranks, started
from examples.gpt.schedule import warmup_stable_decay
from muon import Muon, param_groups

PROMPT = "def "
SAMPLE_LENGTH = 500  # tokens
BAR = "{desc} {percentage:3.0f}%|{bar}| {n}/{total} [{elapsed}<{remaining}{postfix}]"


def parse_arguments(argv: Sequence[str] | None) -> Namespace:
    parser = ArgumentParser(
        prog="python -m examples.train",
        usage="%(prog)s [options]",
        description="Train a GPT with Muon and FlashAttention.",
    )
    add = parser.add_argument
    add("--preset", metavar="NAME", default="cpu", choices=PRESETS, help="cpu (default) or gpt2-124m")
    add("--data", metavar="PATH", type=path, help="text file or folder; default: the Python library")
    add("--out", metavar="FOLDER", type=path, help="for the run's files; default: runs/<preset>")
    add("--optimizer", metavar="NAME", default="muon", choices=("muon", "adamw"), help="muon (default) or adamw")
    add("--attention", metavar="NAME", default="flash", choices=("flash", "sdpa"), help="flash (default) or sdpa")
    add("--steps", metavar="N", type=positive_int, help="training steps")
    add("--batch", metavar="N", type=positive_int, help="sequences in a step")
    add("--context", metavar="N", type=positive_int, help="tokens in a sequence")
    add("--layers", metavar="N", type=positive_int, help="blocks of the model")
    add("--width", metavar="N", type=positive_int, help="width of the model")
    add("--heads", metavar="N", type=positive_int, help="attention heads; must divide the width")
    add("--lr", metavar="X", type=positive_float, help="learning rate of the hidden matrices")
    add("--embedding-lr", metavar="X", type=positive_float, help="AdamW's for the rest")
    add("--seed", metavar="N", type=seed, default=0, help="of the weights and the data's order")
    add("--device", metavar="NAME", default="auto", help="cpu, cuda, cuda:1, mps; default: what is there")
    add("--compile", action=BooleanOptionalAction, help="use torch.compile")
    return parser.parse_args(argv)


def preset_with_options(args: Namespace) -> Preset:
    """The preset, with what was given on the command line in its place."""
    preset = PRESETS[args.preset]
    names = ("steps", "batch", "context", "layers", "heads", "width", "embedding_lr", "compile")
    given = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    if args.lr is not None:
        given[f"{args.optimizer}_lr"] = args.lr
    if "steps" in given:  # the schedule keeps its proportions
        given["warmup"] = round(preset.warmup * given["steps"] / preset.steps)
        given["decay"] = round(preset.decay * given["steps"] / preset.steps)
    preset = dataclasses.replace(preset, **given)
    if preset.width % (2 * preset.heads) != 0:
        raise UserError(f"--width {preset.width} is not an even multiple of --heads {preset.heads}; change either")
    if args.attention == "flash" and preset.width // preset.heads > MAX_HEAD_DIM:
        heads = f"--heads {preset.heads} of --width {preset.width}"
        raise UserError(f"{heads} are wider than {MAX_HEAD_DIM}, FlashAttention's limit; use more or --attention sdpa")
    return preset


def start_run(out: Path, args: Namespace, preset: Preset, device: torch.device, ranks: Ranks) -> Metrics:
    """The run's folder and its first two files: if it can't be written to, that shows before the training."""
    if not ranks.is_first:
        return Metrics(None)
    try:
        out.mkdir(parents=True, exist_ok=True)
        write_config(out / "config.json", args, preset, device)
        return Metrics(out / "metrics.csv")
    except OSError as error:
        raise UserError(f"cannot write to --out {out}: {error.filename}: {error.strerror}") from error


def model_shape(preset: Preset, attention: str) -> dict[str, Any]:
    """GPT's arguments."""
    names = ("layers", "heads", "width", "context", "vocab_size")
    return {name: getattr(preset, name) for name in names} | {"attention": attention}


def make_optimizer(model: nn.Module, preset: Preset, name: str, ranks: Ranks = ALONE) -> torch.optim.Optimizer:
    """The hidden matrices go to Muon or to AdamW; everything else to the same AdamW in both cases.

    Several processes share Muon's work. Queries, keys and values share one weight but are three matrices to Muon.
    """
    lr = preset.muon_lr if name == "muon" else preset.adamw_lr
    matrices = {"lr": lr, "weight_decay": preset.weight_decay}
    rest = {"lr": preset.embedding_lr, "weight_decay": 0.0, "betas": (0.9, 0.95)}
    groups = param_groups(model, muon=matrices, adamw=rest, overrides={"*.qkv.weight": {"split": 3}})
    if name == "muon":
        return Muon(groups, distributed_group=ranks.group)
    plain = [{key: group[key] for key in ("params", "lr", "weight_decay")} for group in groups]
    return torch.optim.AdamW(plain, betas=(0.9, 0.95), fused=True)


def make_scheduler(optimizer: torch.optim.Optimizer, preset: Preset) -> LambdaLR:
    """One multiplier for the learning rates of all groups."""
    return LambdaLR(optimizer, lambda step: warmup_stable_decay(step, preset.steps, preset.warmup, preset.decay))


def train_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, scheduler: LRScheduler, batch: tuple[Tensor, Tensor], dtype: str
) -> Tensor:
    """One step on inputs and targets (B, S); the loss stays on the device, so that a GPU never waits for Python."""
    loss = forward(model, batch, dtype)
    loss.backward()
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()
    return loss.detach()


def forward(model: nn.Module, batch: tuple[Tensor, Tensor], dtype: str) -> Tensor:
    inputs, targets = batch
    with torch.autocast(inputs.device.type, dtype=torch.bfloat16, enabled=dtype == "bfloat16"):
        return model(inputs, targets)


@torch.no_grad()
def validate(model: nn.Module, tokens: Any, preset: Preset, device: torch.device, ranks: Ranks = ALONE) -> float:
    """Mean loss in nats a token over the same batches every time."""
    batches = data.validation_batches(tokens, preset.batch, preset.context, preset.eval_batches)
    losses = [forward(model, data.to_device(ranks.part(batch), device), preset.dtype) for batch in batches]
    return ranks.mean(torch.stack(losses).mean()).item()


def interruptible(steps: int) -> Iterator[int]:
    """Count steps; Ctrl-C lets the one under way finish and then ends the loop. A second Ctrl-C stops at once."""
    stop = False

    def request_stop(*_: object) -> None:
        nonlocal stop
        stop = True
        signal.signal(signal.SIGINT, previous)

    previous = signal.signal(signal.SIGINT, request_stop)
    try:
        for step in range(steps):
            if stop:
                return
            yield step
    finally:
        signal.signal(signal.SIGINT, previous)


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    corpus: data.Data,
    preset: Preset,
    metrics: Metrics,
    *,
    seed: int,
    device: torch.device,
    ranks: Ranks,
) -> int:
    """Train `model`, which returns its loss; every number goes to `metrics`. Returns the steps done.

    Several processes end at once on Ctrl-C, since each would finish another step. A loss that is not finite ends it
    with a UserError.
    """
    scheduler = make_scheduler(optimizer, preset)
    done = logged = 0
    seconds, start = 0.0, time.perf_counter()
    loss_sum = torch.zeros((), device=device)  # since the last row
    hidden = not ranks.is_first
    with tqdm(total=preset.steps, desc="training", dynamic_ncols=True, bar_format=BAR, disable=hidden) as bar:
        for step in interruptible(preset.steps) if ranks.size == 1 else range(preset.steps):
            learning_rate = scheduler.get_last_lr()[0]
            batch = data.training_batch(corpus.train, preset.batch, preset.context, seed=seed, step=step)
            batch = data.to_device(ranks.part(batch), device)
            loss_sum += train_step(model, optimizer, scheduler, batch, preset.dtype)
            done = step + 1
            validates = done % preset.eval_every == 0 or done == preset.steps
            if not validates and done % preset.log_every != 0:
                continue

            train_loss = ranks.mean(loss_sum).item() / (done - logged)  # waits for the device, for the clock's sake
            passed = time.perf_counter() - start
            seconds += passed
            val_loss = validate(model, corpus.val, preset, device, ranks) if validates else None
            check_finite(train_loss, done)
            check_finite(val_loss or 0.0, done)
            row = {
                "step": done,
                "tokens": done * preset.batch * preset.context,
                "seconds": seconds,
                "train_loss": train_loss,
                "val_loss": val_loss,
                "val_bits_per_byte": val_loss / math.log(2) if validates else None,  # a token is a byte
                "learning_rate": learning_rate,
                "tokens_per_second": (done - logged) * preset.batch * preset.context / passed,
                "ms_per_step": 1e3 * passed / (done - logged),
            }
            metrics.add(row)
            show(row, bar, done - logged)
            logged = done
            loss_sum.zero_()
            start = time.perf_counter()
    check_finite(ranks.mean(loss_sum).item(), done)  # steps since the last row, if Ctrl-C ended the loop
    return done


def check_finite(loss: float, step: int) -> None:
    """A model whose loss overflowed never recovers."""
    if not math.isfinite(loss):
        raise UserError(f"the loss is {loss} at step {step}: the training diverged; lower --lr (or --embedding-lr)")


def show(row: Row, bar: tqdm, steps: int) -> None:
    """Move the bar on; a row with a validation loss also gets a line that stays."""
    bar.set_postfix_str(f"loss {row['train_loss']:.3f}, {row['tokens_per_second']:,.0f} tokens/s", refresh=False)
    bar.update(steps)
    if row["val_loss"] is not None:
        bar.write(
            "step {step:5d}  validation {val_loss:.4f}  training {train_loss:.4f}  lr {learning_rate:.2e}  "
            "{ms_per_step:.1f} ms/step  {seconds:.0f} s".format(**row)
        )


def write_sample(model: GPT, path: Path, seed: int, device: torch.device) -> str:
    """Text that the model makes up after PROMPT; after a short run with U+FFFD where its bytes are no UTF-8."""
    generator = torch.Generator(device).manual_seed(seed)
    prompt = data.encode(PROMPT)[None].to(device)
    tokens = (token.item() for token in model.generate(prompt, SAMPLE_LENGTH, temperature=0.8, generator=generator))
    text = PROMPT + "".join(data.decode(tokens))
    path.write_text(text, encoding="utf-8")
    return text


def describe(
    preset: Preset, model: GPT, optimizer: torch.optim.Optimizer, corpus: data.Data, device: torch.device, ranks: Ranks
) -> None:
    """What is about to be trained, on what, with what."""
    size = f"{preset.layers} layers of width {preset.width}, {preset.heads} heads, vocabulary {preset.vocab_size:,}"
    tokens = preset.batch * preset.context
    processes = f"{ranks.size} processes, " * (ranks.size > 1)
    print(f"device     {device} ({processes}{device_name(device)}), torch {torch.__version__}, {preset.dtype}")
    print(f"data       {corpus.name}: {len(corpus.train):,} bytes to train on, {len(corpus.val):,} to validate on")
    print(f"model      {count(model.parameters())}, {size}{', compiled' * preset.compile}")
    print(f"training   {preset.steps:,} steps of {preset.batch} x {preset.context} = {tokens:,} tokens")
    for group in optimizer.param_groups:
        algorithm = {"muon": "Muon", "adamw": "AdamW"}[group.get("algorithm", "adamw")]
        tensors = group["params"]
        print(f"optimizer  {algorithm}: {len(tensors)} tensors, {count(tensors)}, learning rate {group['lr']:g}")


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"{torch.get_num_threads()} threads"


def count(parameters: Iterable[Tensor]) -> str:
    return f"{sum(p.numel() for p in parameters) / 1e6:.2f} M parameters"


def write_config(path: Path, args: Namespace, preset: Preset, device: torch.device) -> None:
    """All that it takes to run this again."""
    config = {
        "command": shlex.join(["python", "-m", "examples.train", *(sys.argv[1:])]),
        "options": {name: str(value) if isinstance(value, Path) else value for name, value in vars(args).items()},
        "preset": dataclasses.asdict(preset),
        "device": f"{device} ({device_name(device)})",
        "versions": {"python": platform.python_version(), "torch": torch.__version__, "triton": triton_version()},
    }
    path.write_text(json.dumps(config, indent=2) + "\n")


def triton_version() -> str | None:
    try:
        return importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        return None


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """The whole run; returns its summary."""
    args = parse_arguments(argv)
    preset = preset_with_options(args)
    with started(preset.batch) as ranks:
        return train_on(ranks, args, preset)


def train_on(ranks: Ranks, args: Namespace, preset: Preset) -> dict[str, Any]:
    """This process's part of the run."""
    device = pick_device(args.device)
    corpus = data.load(args.data, preset.context)
    out = args.out or Path("runs") / args.preset
    metrics = start_run(out, args, preset, device, ranks)
    torch.manual_seed(args.seed)
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high")  # TF32
    shape = model_shape(preset, args.attention)
    model = GPT(**shape).to(device)
    optimizer = make_optimizer(model, preset, args.optimizer, ranks)
    describe(preset, model, optimizer, corpus, device, ranks)

    compiled = torch.compile(model) if preset.compile else model
    wrapped = ranks.wrap(compiled)
    done = train(wrapped, optimizer, corpus, preset, metrics, seed=args.seed, device=device, ranks=ranks)
    if not ranks.is_first:
        return {}

    checkpoint.save(out / "model.pt", model, shape, done)
    plot(metrics.rows, f"{args.preset}, {args.optimizer}, {args.attention} attention", out / "loss.png")
    print(f"\n{write_sample(model, out / 'sample.txt', args.seed, device)}\n")
    if done < preset.steps:
        print(f"stopped after {done} of {preset.steps} steps; what was learned so far is kept")
    summary = summarize(metrics.rows, out)
    report(summary)
    return summary


def summarize(rows: list[Row], out: Path) -> dict[str, Any]:
    """The last validation, and the speed over the whole run."""
    validated = [row for row in rows if row["val_loss"] is not None] or [dict.fromkeys(COLUMNS)]
    losses = {name: validated[-1][name] for name in ("val_loss", "val_bits_per_byte")}
    tokens, seconds = (rows[-1]["tokens"], rows[-1]["seconds"]) if rows else (0, 0.0)
    return losses | {"seconds": seconds, "tokens_per_second": tokens / seconds if rows else 0.0, "out": str(out)}


def report(summary: dict[str, Any]) -> None:
    if summary["val_loss"] is not None:
        print("validation loss {val_loss:.4f} nats a token, {val_bits_per_byte:.4f} bits per byte".format(**summary))
    print("{seconds:.1f} s of training, {tokens_per_second:,.0f} tokens/s".format(**summary))
    print(f"{summary['out']}: {', '.join(sorted(file.name for file in Path(summary['out']).iterdir()))}")


if __name__ == "__main__":
    run(main)
