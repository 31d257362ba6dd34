"""Let a trained model write.

python -m examples.sample --run runs/cpu --prompt "def "
"""

from __future__ import annotations

from argparse import ArgumentTypeError
from collections.abc import Sequence
from itertools import chain
from pathlib import Path

import torch

from examples.gpt import checkpoint
from examples.gpt.cli import ArgumentParser, UserError, number, path, pick_device, positive_int, run, seed
from examples.gpt.generate import generate


def share(text: str) -> float:
    value = number(text)
    if not 0 < value <= 1:
        raise ArgumentTypeError(f"{text!r} is not a number above 0 and up to 1")
    return value


def main(argv: Sequence[str] | None = None) -> None:
    parser = ArgumentParser(
        prog="python -m examples.sample", usage="%(prog)s [options]", description="Let a trained model write."
    )
    add = parser.add_argument
    add("--run", metavar="FOLDER", type=path, default=Path("runs/cpu"), help="a run of examples.train")
    add("--prompt", metavar="TEXT", help="what it carries on from; default: 'def ' or a new line")
    add("--length", metavar="N", type=positive_int, default=500, help="tokens to write")
    add("--temperature", metavar="X", type=number, default=0.8, help="0 always takes the likeliest")
    add("--top-k", metavar="N", type=positive_int, help="choose among the N likeliest only")
    add("--top-p", metavar="X", type=share, default=1.0, help="among the likeliest that make up this share")
    add("--seed", metavar="N", type=seed, default=0, help="another seed, another text")
    add("--device", metavar="NAME", default="auto", help="cpu, cuda, cuda:1, mps; default: what is there")
    args = parser.parse_args(argv)
    if args.prompt == "":
        raise UserError('--prompt is empty; give at least one character, such as --prompt "def "')

    device = pick_device(args.device)
    model, tokenizer, default_prompt = checkpoint.load(args.run, device)
    generator = torch.Generator(device).manual_seed(args.seed)
    prompt = tokenizer.encode(args.prompt or default_prompt)
    tokens = generate(
        model,
        prompt[None].to(device),
        args.length,
        temperature=args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        generator=generator,
    )
    for text in tokenizer.decode(chain(prompt.tolist(), (token.item() for token in tokens))):
        print(text, end="", flush=True)
    print()


if __name__ == "__main__":
    run(main)
