"""Times candidate tiles for each of attention's three kernels and prints the best, to be copied into tiles.py by hand.

    python -m benchmarks.tune_attention              # about a minute on one GPU
    python -m benchmarks.tune_attention --widths 64  # only the heads of this width

A forward counts 4·B·H·S²·D operations (half of it when causal), dq 1.5 and dk with dv 2 times that: three and four
products for two. Every candidate is compared with the first of its list, which differs only by rounding.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from unittest import mock

import torch
import triton
from torch import Tensor
from triton.testing import do_bench

from attention.kernels import backward, forward
from attention.kernels.tiles import HOPPER_16BIT, Tile, Tiles
from attention.reference import Options

SHAPES = {64: [(16, 1024, 32), (4, 4096, 32)], 128: [(4, 4096, 16)], 256: [(4, 4096, 8)]}  # width: batch, length, heads
OPERATIONS = {"forward": 1.0, "backward_q": 1.5, "backward_kv": 2.0}

# None of these spills on Hopper. The tiles that are in use are timed beside them.
CANDIDATES = {
    64: {
        "forward": [
            (64, 128, 4, 2), (64, 128, 4, 3), (128, 64, 4, 3), (128, 128, 8, 3), (64, 64, 4, 3), (64, 128, 4, 3, True),
        ],
        "backward_q": [(128, 64, 8, 3), (128, 128, 8, 2), (64, 128, 4, 3), (64, 64, 4, 3), (64, 64, 4, 3, True)],
        "backward_kv": [
            (64, 128, 8, 3), (64, 128, 8, 3, True), (64, 128, 8, 2, True),
            (64, 64, 4, 3), (64, 64, 4, 3, True), (32, 64, 4, 4),
        ],
    },
    128: {
        "forward": [(128, 128, 8, 2), (128, 64, 8, 3), (64, 128, 4, 2), (64, 64, 4, 3), (128, 128, 8, 2, True)],
        "backward_q": [
            (128, 64, 8, 3), (128, 64, 8, 2), (128, 128, 8, 2), (64, 128, 4, 2), (64, 64, 4, 2), (128, 64, 8, 3, True),
        ],
        "backward_kv": [
            (64, 128, 8, 2), (64, 128, 8, 2, True), (64, 64, 4, 2, True),
            (32, 128, 8, 3), (32, 128, 8, 3, True), (32, 64, 4, 3),
        ],
    },
    256: {
        "forward": [(128, 64, 8, 2), (128, 32, 8, 3), (64, 64, 4, 2), (64, 32, 4, 3)],
        "backward_q": [(64, 64, 8, 2), (64, 32, 8, 2), (128, 32, 8, 2), (64, 32, 4, 2)],
        "backward_kv": [(32, 64, 8, 2, True), (32, 64, 8, 3, True), (32, 64, 8, 2), (16, 64, 8, 3), (64, 64, 8, 2)],
    },
}  # fmt: skip
Case = tuple[int, str, bool, Tile]  # head width, kernel, causal, tile


def cases(widths: list[int]) -> Iterator[tuple[int, str, bool, list[Tile]]]:
    """Head width, kernel, causal, and the tiles to compare, the current one first."""
    for width in widths:
        for kernel in Tiles._fields:
            for causal in (True, False):
                current = getattr(HOPPER_16BIT[width], kernel)
                tiles = [current, *(Tile(*sizes) for sizes in CANDIDATES[width][kernel])]
                if not causal:  # then there is one loop anyway
                    tiles = [tile._replace(one_loop=False) for tile in tiles]
                yield width, kernel, causal, list(dict.fromkeys(tiles))


class Problem:
    """Random inputs of one shape, and the three kernels on them."""

    def __init__(self, batch: int, seqlen: int, heads: int, width: int, causal: bool) -> None:
        torch.manual_seed(0)
        shape = (batch, seqlen, heads, width)
        self.q, self.k, self.v, self.do = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(4))
        self.options = Options(width**-0.5, window_right=0 if causal else None)
        self.operations = 4 * batch * heads * seqlen**2 * width * (0.5 if causal else 1.0)
        self.out, self.lse = self.do, torch.zeros(batch, heads, seqlen, device="cuda")
        self.delta = self.lse

    def solve(self) -> Problem:
        self.out, self.lse = self.forward()
        self.delta = self.backward_q()[1]
        return self

    def forward(self) -> tuple[Tensor, Tensor]:
        return forward.forward(self.q, self.k, self.v, self.options, False)[:2]

    def backward_q(self) -> tuple[Tensor, Tensor]:
        saved = (self.q, self.k, self.v, self.out, self.lse)
        return backward.grad_q(self.do, None, *saved, self.options)

    def backward_kv(self) -> tuple[Tensor, Tensor]:
        return backward.grad_kv(self.do, self.q, self.k, self.v, self.lse, self.delta, self.options)


@contextmanager
def in_use(tile: Tile) -> Iterator[None]:
    with (
        mock.patch.object(forward, "choose_tiles", lambda q, v: Tiles(tile, tile, tile)),
        mock.patch.object(backward, "choose_tiles", lambda q, v: Tiles(tile, tile, tile)),
    ):
        yield


def compile_case(case: Case) -> str | None:
    """Fills Triton's cache on disk; sizes don't matter to it."""
    width, kernel, causal, tile = case
    try:
        problem = Problem(1, 256, 2, width, causal)
        with in_use(tile):
            getattr(problem, kernel)()
        torch.cuda.synchronize()
    except Exception as error:
        return f"{kernel} {width} {name(tile)}: {str(error).splitlines()[0]}"
    return None


def compile_all(widths: list[int]) -> None:
    todo = [(width, kernel, causal, tile) for width, kernel, causal, tiles in cases(widths) for tile in tiles]
    workers = min(12, os.cpu_count() or 1)
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        for failure in filter(None, pool.map(compile_case, todo)):
            print("# can't run", failure)


def name(tile: Tile) -> str:
    return f"{tile.block_m}x{tile.block_n} {tile.num_warps}w {tile.num_stages}s" + " one_loop" * tile.one_loop


def tune(problem: Problem, kernel: str, tiles: list[Tile]) -> list[tuple[float, str]]:
    """TFLOP/s and name of every candidate, fastest first; the current tile is marked with a star."""
    run = getattr(problem, kernel)
    expected: Tensor | None = None
    results = []
    for tile in tiles:
        try:
            with in_use(tile):
                first = run()[0].float()
                milliseconds = do_bench(run, warmup=5, rep=15, return_mode="median")
        except Exception:  # compile_all has told
            continue
        expected = first if expected is None else expected
        error = (first - expected).abs().max().item() / expected.abs().max().item()
        speed = problem.operations * OPERATIONS[kernel] / milliseconds / 1e9
        label = name(tile) + "*" * (tile == tiles[0]) + (f" WRONG by {error:.1e}" if not error < 0.02 else "")
        results.append((speed, label))
    return sorted(results, reverse=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--widths", nargs="+", type=int, default=list(SHAPES), choices=list(SHAPES))
    parser.add_argument("--all", action="store_true", help="print every candidate, not only the best three")
    arguments = parser.parse_args()
    print(
        f"# {torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}, bfloat16; * current"
    )
    compile_all(arguments.widths)
    for width, kernel, causal, tiles in cases(arguments.widths):
        for batch, seqlen, heads in SHAPES[width]:
            problem = Problem(batch, seqlen, heads, width, causal).solve()
            best = tune(problem, kernel, tiles)[: None if arguments.all else 3]
            row = f"{kernel:11} {batch},{seqlen},{heads},{width} {'causal' if causal else 'full  '}"
            print(row, "|", " | ".join(f"{speed:.0f} {label}" for speed, label in best), flush=True)


if __name__ == "__main__":
    main()
