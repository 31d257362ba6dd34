"""Checks and times the tiles of the Hopper backward, each against the portable backward and SDPA's cuDNN.

    python -m benchmarks.tune_hopper_backward --widths 64 128

Every variant is first checked in a process of its own, against float64 on small shapes, so that one that hangs costs
seconds. Then all that passed are timed, interleaved, and one line is printed a shape and variant: TFLOP/s, its error
against the portable backward, whether dk and dv are the same from run to run.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import triton
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from triton.testing import do_bench

from attention.kernels import backward, forward, hopper_backward
from attention.kernels.hopper_backward import Tile
from attention.reference import Options, dense

CANDIDATES = {
    64: [Tile(128, 128, 2), Tile(64, 128, 2), Tile(64, 128, 3)],
    128: [Tile(64, 128, 2)],
    256: [Tile(64, 64, 2)],
}
# Batch, length, heads, causal.
SHAPES = {
    64: [(4, 4096, 32, True), (4, 4096, 32, False), (16, 1024, 32, True), (1, 16384, 32, True)],
    128: [(4, 4096, 16, True), (4, 4096, 16, False), (16, 1024, 16, True), (1, 16384, 16, True)],
    256: [(4, 4096, 8, True), (4, 4096, 8, False), (16, 1024, 8, True)],
}
# Batch, queries, keys, heads of queries, heads of keys, window.
SMALL = [
    (2, 256, 256, 2, 2, (None, 0)),
    (2, 256, 256, 2, 2, (None, None)),
    (1, 200, 333, 4, 2, (None, 0)),
    (1, 333, 200, 4, 1, (None, 0)),
    (2, 130, 257, 2, 1, (None, None)),
    (1, 513, 513, 2, 1, (64, 0)),
    (1, 300, 400, 2, 2, (32, 32)),
    (1, 1, 1, 1, 1, (None, None)),
    (3, 600, 500, 32, 16, (None, 0)),  # more tiles than processors
    (2, 700, 700, 24, 24, (None, None)),
]
LIMIT = 60.0  # seconds for a launch, compilation included


@contextmanager
def watched(what: str) -> Iterator[None]:
    """Ends the process if the block doesn't end in time."""

    def give_up() -> None:
        print(f"HANGS {what}", flush=True)
        os._exit(3)

    timer = threading.Timer(LIMIT, give_up)
    timer.start()
    yield
    torch.cuda.synchronize()
    timer.cancel()


def gradients(q: Tensor, k: Tensor, v: Tensor, do: Tensor, options: Options) -> tuple[Tensor, ...]:
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    out, lse, _ = dense(*leaves, options)
    return *torch.autograd.grad(out, leaves, do), out.detach(), lse.detach()


def backward_with(tile: Tile, do: Tensor, q: Tensor, *saved: Any) -> tuple[Tensor, ...]:
    with mock.patch.dict(hopper_backward.TILES, {hopper_backward.padded_width(q.shape[3]): tile}):
        return hopper_backward.backward(do, None, q, *saved, False)


def check_small(width: int, tile: Tile) -> list[str]:
    """What is wrong with a tile, and the greatest ratio of its errors to plain torch's."""
    faults, worst = [], 0.0
    for dtype, cases in ((torch.bfloat16, SMALL), (torch.float16, SMALL[1:2])):
        for batch, seqlen_q, seqlen_k, heads_q, heads_k, window in cases:
            what = f"{tuple(tile)} {dtype} {batch},{seqlen_q},{seqlen_k},{heads_q},{heads_k},{width} {window}"
            torch.manual_seed(0)
            q, do = (torch.randn(batch, seqlen_q, heads_q, width, device="cuda", dtype=dtype) for _ in range(2))
            k, v = (torch.randn(batch, seqlen_k, heads_k, width, device="cuda", dtype=dtype) for _ in range(2))
            options = Options(width**-0.5, window_left=window[0], window_right=window[1])
            *truth, out, lse = gradients(*(x.double() for x in (q, k, v, do)), options)
            torchs = gradients(q, k, v, do, options)[:3]
            with watched(what):
                ours = backward_with(tile, do, q, k, v, out.to(dtype), lse.float(), options)[:3]
            for name, mine, theirs, true in zip(("dq", "dk", "dv"), ours, torchs, truth, strict=True):
                error, allowed = (mine - true).abs().max().item(), (theirs - true).abs().max().item()
                worst = max(worst, error / (allowed + 1e-6))
                if not error <= 2 * allowed + 1e-6:
                    faults.append(f"{what}: {name} off by {error:.1e}, torch by {allowed:.1e}")
    return [*faults, f"{width} {tuple(tile)} worst error {worst:.2f} of torch's"]


def child(width: int, tile: Tile) -> None:
    lines = check_small(width, tile)
    print("\n".join(lines), flush=True)
    sys.exit(len(lines) > 1)


def passes(width: int, tile: Tile) -> bool:
    command = [sys.executable, "-m", "benchmarks.tune_hopper_backward", "--child", str(width)]
    command += [str(x) for x in tile]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    except subprocess.TimeoutExpired:
        print(f"# {width} {tuple(tile)} HANGS", flush=True)
        return False
    lines = done.stdout.splitlines()[-6:] + (done.stderr.splitlines()[-3:] if done.returncode else [])
    print("\n".join(f"# {line}" for line in lines), flush=True)
    return done.returncode == 0


def contenders(width: int, tiles: list[Tile], shape: tuple[int, int, int, bool]) -> dict[str, Callable[[], object]]:
    batch, seqlen, heads, causal = shape
    torch.manual_seed(0)
    q, k, v, do = (torch.randn(batch, seqlen, heads, width, device="cuda", dtype=torch.bfloat16) for _ in range(4))
    options = Options(width**-0.5, window_right=0 if causal else None)
    out, lse, _ = forward.forward(q, k, v, options, False)
    saved = (q, k, v, out, lse, options)
    runs: dict[str, Callable[[], object]] = {"portable": lambda: backward.backward(do, None, *saved, False)}
    for tile in tiles:
        runs[name(tile)] = lambda tile=tile: backward_with(tile, do, *saved)  # type: ignore[misc]
    leaves = [x.detach().transpose(1, 2).requires_grad_() for x in (q, k, v)]
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        theirs = scaled_dot_product_attention(*leaves, is_causal=causal)
    grad = do.transpose(1, 2)
    runs["cudnn"] = lambda: torch.autograd.grad(theirs, leaves, grad, retain_graph=True)
    return runs


def name(tile: Tile) -> str:
    return "x".join(map(str, tile))


def time_shape(width: int, tiles: list[Tile], shape: tuple[int, int, int, bool], rounds: int) -> None:
    batch, seqlen, heads, causal = shape
    runs = contenders(width, tiles, shape)
    operations = 10 * batch * heads * seqlen**2 * width * (0.5 if causal else 1.0)
    expected = runs["portable"]()
    notes = {}
    for tile in tiles:
        with watched(f"{name(tile)} {shape}"):
            first, second = runs[name(tile)](), runs[name(tile)]()
        errors = [
            ((x.float() - y.float()).norm() / y.float().norm()).item()
            for x, y in zip(first[:3], expected[:3], strict=True)  # type: ignore[index]
        ]
        same = all(torch.equal(x, y) for x, y in zip(first[1:3], second[1:3], strict=True))  # type: ignore[index]
        notes[name(tile)] = f"off by {max(errors):.1e} " + ("same" if same else "NOT THE SAME twice")
    times: dict[str, list[float]] = {key: [] for key in runs}
    for _ in range(rounds):
        for key, run in runs.items():
            times[key].append(do_bench(run, warmup=20, rep=60, return_mode="median"))
    label = f"{batch},{seqlen},{heads},{width} {'causal' if causal else 'full'}"
    for key, values in times.items():
        milliseconds = statistics.median(values)
        print(
            f"{label:24} {key:14} {milliseconds:7.3f} ms {operations / milliseconds / 1e9:5.0f} {notes.get(key, '')}",
            flush=True,
        )


def profile(width: int, tile: Tile, shape: tuple[int, int, int, bool]) -> None:
    """Microseconds of each kernel."""
    run = contenders(width, [tile], shape)[name(tile)]
    run()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        for _ in range(5):
            run()
        torch.cuda.synchronize()
    rows = [f"{event.key[:24]} {event.device_time:.0f}" for event in profiler.key_averages()]
    print(f"# {name(tile)} {shape}:", ", ".join(rows), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--widths", nargs="+", type=int, default=list(SHAPES), choices=list(SHAPES))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--no-check", action="store_true")
    parser.add_argument("--run", type=int, metavar="WIDTH", help="only run the first tile, for a profiler")
    parser.add_argument("--child", nargs=4, type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        child(arguments.child[0], Tile(*arguments.child[1:]))
    if arguments.run:
        run = contenders(arguments.run, CANDIDATES[arguments.run][:1], SHAPES[arguments.run][0])
        run[name(CANDIDATES[arguments.run][0])]()
        torch.cuda.synchronize()
        return
    print(f"# {torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}, bfloat16")
    cases = [(width, tile) for width in arguments.widths for tile in CANDIDATES[width]]
    if not arguments.no_check:
        with ThreadPoolExecutor(8) as pool:
            passed = dict(zip(cases, pool.map(lambda case: passes(*case), cases), strict=True))
    for width in arguments.widths:
        tiles = [tile for tile in CANDIDATES[width] if arguments.no_check or passed[width, tile]]
        for i, shape in enumerate(SHAPES[width]):
            try:
                time_shape(width, tiles, shape, arguments.rounds)
                if i == 0 and tiles:
                    profile(width, tiles[0], shape)
            except Exception as error:
                print(f"# {width} {shape}: {str(error).splitlines()[0]}", flush=True)


if __name__ == "__main__":
    main()
