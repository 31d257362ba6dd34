"""Train a GPT with Muon and FlashAttention.

    python -m examples.train                           # two minutes on a laptop's CPU
    python -m examples.train --optimizer adamw         # the same with AdamW
    python -m examples.train --data my.txt --out runs/mine
    python -m examples.train --resume --out runs/mine  # goes on where it was stopped
    torchrun --nproc-per-node 2 -m examples.train      # on two processes, each with half of every step's batch

Writes config.json, metrics.csv, last.pt, best.pt, loss.png and sample.txt into the run's folder.
"""

from __future__ import annotations

import dataclasses
import json
import math
import shlex
import signal
import statistics
import time
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.amp import GradScaler

from examples.gpt import checkpoint, data, options
from examples.gpt.checkpoint import State
from examples.gpt.cli import UserError, pick_device, run
from examples.gpt.generate import generate
from examples.gpt.logging import Metrics, Row, Tracker, plot, progress_bar, show
from examples.gpt.presets import MODELS, Preset
from examples.gpt.ranks import Ranks, started
from examples.gpt.record import config, describe
from examples.gpt.speed import Speedometer
from examples.gpt.step import forward, make_optimizer, make_scheduler, model_shape, train_step, validate
from muon import QKClip

__all__ = ["forward", "main", "make_optimizer", "make_scheduler", "model_shape", "train_step", "validate"]

SAMPLE_LENGTH = 500  # tokens
Save = Callable[[str, dict[str, Any]], None]  # a checkpoint's name and content


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """The whole run; returns its summary."""
    args, preset, saved = options.parse(argv)
    with started() as ranks:
        return train_on(ranks, argv, args, preset, saved)


def train_on(
    ranks: Ranks, argv: Sequence[str] | None, args: Namespace, preset: Preset, saved: dict[str, Any] | None
) -> dict[str, Any]:
    """This process's part of the run."""
    device = pick_device(args.device)
    corpus = data.load(args.data, preset.context, preset.tokenizer)
    preset = dataclasses.replace(preset, vocab_size=max(preset.vocab_size, corpus.tokenizer.vocab_size))
    torch.manual_seed(args.seed)
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high")  # TF32
    model = MODELS[preset.architecture](**model_shape(preset, args.attention)).to(device)
    state = make_state(model, preset, args.optimizer, device, ranks)
    torch.manual_seed(args.seed + ranks.rank)  # for dropout, of which every process has its own
    about = saved["about"] if saved else about_run(argv, args, preset, corpus, device, ranks)
    if saved:
        go_on(state, saved, corpus, args.out, ranks)
    with checkpoint.locked(args.out) if ranks.is_first else nullcontext():
        metrics = start_run(args, about, state, ranks)
        describe(preset, model, state.optimizer, corpus, device, ranks)

        def save(name: str, content: dict[str, Any]) -> None:
            if ranks.is_first:
                checkpoint.write(args.out / name, {"about": about} | content)

        compiled = ranks.wrap(torch.compile(model) if preset.compile else model)
        train(state, compiled, corpus, preset, metrics, save, seed=args.seed, ranks=ranks)
        save("last.pt", state.state_dict(ranks))
        metrics.finish()
        return end_run(args, about, preset, state, corpus) if ranks.is_first else {}


def make_state(model: nn.Module, preset: Preset, optimizer_name: str, device: torch.device, ranks: Ranks) -> State:
    optimizer = make_optimizer(model, preset, optimizer_name, ranks)
    scaler = GradScaler(device.type, enabled=preset.dtype == "float16")
    loss_sum, clipped_heads = torch.zeros((), device=device), torch.zeros((), dtype=torch.int64, device=device)
    qk_clip = None
    if preset.qk_clip is not None:
        qk_clip = QKClip(model, optimizer, preset.qk_clip)
        optimizer.register_step_post_hook(lambda *_: clipped_heads.add_(qk_clip.num_clipped))
    scheduler = make_scheduler(optimizer, preset)
    return State(model, optimizer, scheduler, scaler, qk_clip, device, loss_sum, clipped_heads)


def about_run(
    argv: Sequence[str] | None, args: Namespace, preset: Preset, corpus: data.Data, device: torch.device, ranks: Ranks
) -> dict[str, Any]:
    """What a checkpoint tells of the run, and config.json: the model, its tokenizer, and how it came about."""
    return {
        "architecture": preset.architecture,
        "shape": model_shape(preset, args.attention),
        "tokenizer": corpus.tokenizer.state(),
        "prompt": default_prompt(args.data, corpus.tokenizer.state()),
    } | config(argv, args, preset, corpus, device, ranks)


def default_prompt(path: Path | None, tokenizer: dict[str, Any]) -> str:
    """What a sample carries on from: a function in Python's library, a new line in any other text."""
    if path is None:
        return "def "
    characters = tokenizer.get("characters", "\n")
    return "\n" if "\n" in characters else characters[0]


def go_on(state: State, saved: dict[str, Any], corpus: data.Data, out: Path, ranks: Ranks) -> None:
    """Put the run where the checkpoint was written."""
    before, now = saved["about"]["data"], {"train": len(corpus.train), "val": len(corpus.val)}
    if any(before[part] != now[part] for part in now):
        sizes = " then, ".join(f"{size['train']:,} + {size['val']:,} tokens" for size in (before, now))
        raise UserError(f"the data has changed since the run in {out} was started: {sizes} now")
    try:
        state.load_state_dict(saved, ranks)
    except (KeyError, IndexError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise checkpoint.damaged(out / "last.pt") from error


def start_run(args: Namespace, about: dict[str, Any], state: State, ranks: Ranks) -> Metrics:
    """The run's first files: if its folder can't be written to, that shows before the training."""
    if not ranks.is_first:
        return Metrics(None)
    out, metrics = args.out, Metrics(args.out)
    try:
        metrics.start(state.rows)
        if not args.resume:
            (out / "config.json").write_text(json.dumps(about, indent=2) + "\n")
            for name in ("last.pt", "best.pt"):  # another run's
                (out / name).unlink(missing_ok=True)
    except OSError as error:
        raise UserError(f"cannot write to --out {out}: {error.filename}: {error.strerror}") from error
    if args.log:
        metrics.tracker = Tracker(args.log, out, about, first_step=state.step + 1)
    return metrics


def train(
    state: State,
    model: nn.Module,
    corpus: data.Data,
    preset: Preset,
    metrics: Metrics,
    save: Save,
    *,
    seed: int,
    ranks: Ranks,
) -> None:
    """Train `model`, which is `state.model`, compiled and shared; every number goes to `metrics`.

    Several processes end at once on Ctrl-C, since each would finish another step. A loss that is not finite ends it
    with a UserError.
    """
    speedometer = Speedometer(state.model, state.optimizer, preset, state.device, ranks.size)
    save_every = preset.checkpoint_every or preset.eval_every
    steps = range(state.step, preset.steps)
    with progress_bar(preset.steps, state.step, hidden=not ranks.is_first) as bar:
        start = time.perf_counter()
        for step in interruptible(steps) if ranks.size == 1 else steps:
            learning_rate = state.scheduler.get_last_lr()[0]
            batch = data.training_batch(corpus.train, preset.sequences, preset.context, seed=seed, step=step)
            batch = data.to_device(ranks.part(batch), state.device)
            state.loss_sum += train_step(
                model, state.optimizer, state.scheduler, batch, preset.dtype,
                micro_batch=preset.batch, clip=preset.clip, scaler=state.scaler,
            )  # fmt: skip
            state.step = step + 1
            validates = state.step % preset.eval_every == 0 or state.step == preset.steps
            logs = validates or state.step % preset.log_every == 0
            saves = state.step % save_every == 0
            if not (logs or saves):
                continue

            loss_sum = ranks.mean(state.loss_sum).item()  # waits for the device, for the clock's sake
            check_finite(loss_sum, state.step)
            state.seconds += time.perf_counter() - start
            if logs:
                val_loss = validate(model, corpus.val, preset, state.device, ranks) if validates else None
                check_finite(val_loss or 0.0, state.step)
                row = make_row(state, loss_sum, val_loss, preset, corpus.bytes_per_token)
                row |= {"learning_rate": learning_rate} | speedometer.read(row["tokens_per_second"])
                add_row(state, row, metrics)
                show(row, bar)
                keep_best(state, val_loss, save)
            if saves:
                save("last.pt", state.state_dict(ranks))
            start = time.perf_counter()
    check_finite(ranks.mean(state.loss_sum).item(), state.step)  # steps since the last row, if Ctrl-C ended the loop
    state.seconds += time.perf_counter() - start


def make_row(
    state: State, loss_sum: float, val_loss: float | None, preset: Preset, bytes_per_token: float | None
) -> Row:
    """Of the steps since the last row."""
    last = state.rows[-1] if state.rows else {"step": 0, "seconds": 0.0}
    steps, seconds = state.step - last["step"], state.seconds - last["seconds"]
    tokens = preset.sequences * preset.context
    has_bits = val_loss is not None and bytes_per_token is not None
    return {
        "step": state.step,
        "tokens": state.step * tokens,
        "seconds": state.seconds,
        "train_loss": loss_sum / steps,
        "val_loss": val_loss,
        "val_bits_per_byte": val_loss / math.log(2) / bytes_per_token if has_bits else None,
        "tokens_per_second": steps * tokens / seconds,
        "ms_per_step": 1e3 * seconds / steps,
        "clipped_heads": int(state.clipped_heads) if state.qk_clip else None,
    }


def add_row(state: State, row: Row, metrics: Metrics) -> None:
    """The sums start anew."""
    state.rows.append(row)
    metrics.add(row)
    state.loss_sum.zero_()
    state.clipped_heads.zero_()


def keep_best(state: State, val_loss: float | None, save: Save) -> None:
    if val_loss is not None and val_loss < state.best_val_loss:
        state.best_val_loss = val_loss
        save("best.pt", {"model": state.model.state_dict(), "step": state.step, "val_loss": val_loss})


def interruptible(steps: Iterable[int]) -> Iterator[int]:
    """Yield steps; Ctrl-C lets the one under way finish and then ends the loop. A second Ctrl-C stops at once."""
    stop = False

    def request_stop(*_: object) -> None:
        nonlocal stop
        stop = True
        signal.signal(signal.SIGINT, previous)

    previous = signal.signal(signal.SIGINT, request_stop)
    try:
        for step in steps:
            if stop:
                return
            yield step
    finally:
        signal.signal(signal.SIGINT, previous)


def check_finite(loss: float, step: int) -> None:
    """A model whose loss overflowed never recovers."""
    if not math.isfinite(loss):
        raise UserError(f"the loss is {loss} at step {step}: the training diverged; lower --lr (or --embedding-lr)")


def end_run(args: Namespace, about: dict[str, Any], preset: Preset, state: State, corpus: data.Data) -> dict[str, Any]:
    """The figure, a sample, and a summary."""
    out = args.out
    plot(state.rows, f"{args.preset}, {args.optimizer}, {args.attention} attention", out / "loss.png")
    print(f"\n{write_sample(state, corpus, about['prompt'], out / 'sample.txt', args.seed)}\n")
    if state.step < preset.steps:
        command = shlex.join(["python", "-m", "examples.train", "--resume", "--out", str(out)])
        print(f"stopped after {state.step} of {preset.steps} steps; to go on: {command}")
    summary = summarize(state.rows, out)
    report(summary)
    return summary


def write_sample(state: State, corpus: data.Data, prompt: str, path: Path, seed: int) -> str:
    """Text that the model makes up after the prompt; after a short run with U+FFFD where its bytes are no UTF-8."""
    generator = torch.Generator(state.device).manual_seed(seed)
    try:
        start = corpus.tokenizer.encode(prompt)[None].to(state.device)
        new = generate(state.model.eval(), start, SAMPLE_LENGTH, temperature=0.8, generator=generator)
        text = prompt + "".join(corpus.tokenizer.decode(token.item() for token in new))
    except UserError as error:  # trained on GPT-2's tokens, without its vocabulary
        return f"no sample: {error}"
    path.write_text(text, encoding="utf-8")
    return text


def summarize(rows: list[Row], out: Path) -> dict[str, Any]:
    """The last and the best validation, and the speed over the whole run."""
    validated = [row for row in rows if row["val_loss"] is not None]
    last = validated[-1] if validated else {"val_loss": None, "val_bits_per_byte": None}
    end = rows[-1] if rows else {"tokens": 0, "seconds": 0.0}
    optimizer_ms = [row["optimizer_ms"] for row in rows if row["optimizer_ms"] is not None]
    return {
        "val_loss": last["val_loss"],
        "val_bits_per_byte": last["val_bits_per_byte"],
        "best_val_loss": min((row["val_loss"] for row in validated), default=None),
        "seconds": end["seconds"],
        "tokens_per_second": end["tokens"] / end["seconds"] if rows else 0.0,
        "optimizer_ms": statistics.median(optimizer_ms) if optimizer_ms else None,
        "out": str(out),
    }


def report(summary: dict[str, Any]) -> None:
    if summary["val_loss"] is not None:
        bits = summary["val_bits_per_byte"]
        per_byte = "" if bits is None else f", {bits:.4f} bits per byte"
        print("validation loss {val_loss:.4f} nats a token{} (best {best_val_loss:.4f})".format(per_byte, **summary))
    print("{seconds:.1f} s of training, {tokens_per_second:,.0f} tokens/s".format(**summary))
    print(f"{summary['out']}: {', '.join(sorted(file.name for file in Path(summary['out']).iterdir()))}")


if __name__ == "__main__":
    run(main)
