"""train.py's command line, and the preset that comes of it."""

from __future__ import annotations

import dataclasses
from argparse import BooleanOptionalAction, Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from attention.functional import MAX_HEAD_DIM
from examples.gpt import checkpoint
from examples.gpt.cli import ArgumentParser, UserError, number, path, positive_float, positive_int, seed
from examples.gpt.logging import TRACKERS
from examples.gpt.presets import PRESETS, Preset
from examples.gpt.ranks import number_of_processes
from examples.gpt.tokens import NAMES

TINY_SHAKESPEARE = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
OVERRIDES = (
    "batch", "batch_tokens", "checkpoint_every", "clip", "compile", "context", "dtype", "embedding_lr", "heads",
    "layers", "qk_clip", "schedule", "steps", "tokenizer", "width",
)  # fmt: skip
FREE = {"out", "resume", "log"}  # may differ when a run is resumed


def make_parser() -> ArgumentParser:
    parser = ArgumentParser(
        prog="python -m examples.train",
        usage="%(prog)s [options]",
        description="Train a GPT with Muon and FlashAttention. What is not given comes from the preset.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--preset", metavar="NAME", default="cpu", choices=PRESETS, help=", ".join(PRESETS))
    add("--data", metavar="PATH", type=path, help="text, folder, token shards; default: Python's library")
    add("--tokenizer", metavar="NAME", choices=NAMES, help="bytes, chars, gpt2; default: the preset's, the data's")
    add("--out", metavar="FOLDER", type=path, help="for the run's files; default: runs/<preset>")
    add("--resume", action="store_true", help="go on with the run in --out, with its options")
    add("--optimizer", metavar="NAME", default="muon", choices=("muon", "adamw"), help="muon (default), adamw")
    add("--attention", metavar="NAME", default="flash", choices=("flash", "sdpa"), help="flash (default), sdpa")
    add("--schedule", metavar="NAME", choices=("wsd", "cosine"), help="wsd (warm-up, stable, decay), cosine")
    add("--dtype", metavar="NAME", choices=("float32", "bfloat16", "float16"), help="float32, bfloat16, float16")
    add("--steps", metavar="N", type=positive_int, help="training steps")
    add("--batch", metavar="N", type=positive_int, help="sequences at once on one process")
    add("--batch-tokens", metavar="N", type=positive_int, help="tokens in a step; default: --batch sequences")
    add("--context", metavar="N", type=positive_int, help="tokens in a sequence")
    add("--layers", metavar="N", type=positive_int, help="blocks of the model")
    add("--width", metavar="N", type=positive_int, help="width of the model")
    add("--heads", metavar="N", type=positive_int, help="attention heads; must divide the width")
    add("--lr", metavar="X", type=positive_float, help="learning rate of the hidden matrices")
    add("--embedding-lr", metavar="X", type=positive_float, help="AdamW's for the rest")
    add("--clip", metavar="X", type=number, help="largest norm of the gradient; 0: any")
    add("--qk-clip", metavar="X", type=positive_float, help="bound attention logits, in QK-norm's place")
    add("--seed", metavar="N", type=seed, default=0, help="of weights, dropout and the data's order")
    add("--device", metavar="NAME", default="auto", help="cpu, cuda, cuda:1, mps; default: what is there")
    add("--compile", action=BooleanOptionalAction, help="use torch.compile")
    add("--checkpoint-every", metavar="N", type=positive_int, help="steps; default: at each validation")
    add("--log", metavar="NAME", choices=TRACKERS, help=f"to {', '.join(TRACKERS)} beside metrics.csv")
    return parser


def parse(argv: Sequence[str] | None) -> tuple[Namespace, Preset, dict[str, Any] | None]:
    """The options; the preset with those of them in place; and the checkpoint to go on from, if any."""
    parser = make_parser()
    args = parser.parse_args(argv)
    args.out = args.out or Path("runs") / args.preset
    if not args.resume:
        return args, preset_with_options(args), None
    saved = checkpoint.read_last(args.out)
    try:
        about = saved["about"]
        parser.set_defaults(**about["options"] | {"out": args.out})
        args = parser.parse_args(argv)
        refuse_other_options(args, about)
        return args, Preset(**about["preset"]), saved
    except (KeyError, TypeError) as error:  # written by something else, or by another version
        raise checkpoint.damaged(args.out / "last.pt") from error


def refuse_other_options(args: Namespace, about: dict[str, Any]) -> None:
    """What isn't given is as it was, so what differs was given."""
    for name, value in as_saved(args).items():
        before = about["options"][name]
        if name not in FREE and value != before:
            option = "--" + name.replace("_", "-")
            was = f"with {option} {before}" if before is not None else f"without {option}"
            raise UserError(f"{option} {value}: the run in {args.out} was started {was}; resume it without {option}")
    if number_of_processes() != about["processes"]:
        raise UserError(f"the run in {args.out} was started on {about['processes']} process(es); resume it on as many")


def as_saved(args: Namespace) -> dict[str, Any]:
    """The options as a checkpoint and config.json keep them."""
    return {name: str(value) if isinstance(value, Path) else value for name, value in vars(args).items()}


def preset_with_options(args: Namespace) -> Preset:
    """The preset, with what was given on the command line in its place."""
    preset = PRESETS[args.preset]
    given = {name: getattr(args, name) for name in OVERRIDES if getattr(args, name) is not None}
    if args.lr is not None:
        given[f"{args.optimizer}_lr"] = args.lr
    if "steps" in given:  # the schedule keeps its proportions
        given["warmup"] = round(preset.warmup * given["steps"] / preset.steps)
        given["decay"] = round(preset.decay * given["steps"] / preset.steps)
    preset = dataclasses.replace(preset, **given)
    check(args, preset)
    return preset


def check(args: Namespace, preset: Preset) -> None:
    """Options that are right by themselves and wrong together."""
    if args.preset == "shakespeare-char" and args.data is None:
        raise UserError(f"--preset shakespeare-char needs --data, a text file such as {TINY_SHAKESPEARE}")
    if preset.width % (2 * preset.heads) != 0:
        raise UserError(f"--width {preset.width} is not an even multiple of --heads {preset.heads}; change either")
    if args.attention == "flash" and preset.width // preset.heads > MAX_HEAD_DIM:
        heads = f"--heads {preset.heads} of --width {preset.width}"
        raise UserError(f"{heads} are wider than {MAX_HEAD_DIM}, FlashAttention's limit; use more or --attention sdpa")
    if args.attention == "sdpa" and preset.qk_clip is not None:
        raise UserError("--qk-clip needs --attention flash: torch's attention doesn't tell its largest logits")
    processes, tokens = number_of_processes(), preset.batch_tokens
    if preset.batch % processes:
        raise UserError(f"--batch {preset.batch} is not a multiple of the {processes} processes; change either")
    if tokens is not None and tokens % (preset.context * processes):
        sequence = f"--context {preset.context}" + f" times {processes} processes" * (processes > 1)
        raise UserError(f"--batch-tokens {tokens} is not a multiple of {sequence}; change either")
