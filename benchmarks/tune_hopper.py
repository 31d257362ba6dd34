"""Checks and times the tiles of Hopper's kernels, each against the portable kernels and SDPA's cuDNN.

    python -m benchmarks.tune_hopper forward --widths 64 128
    python -m benchmarks.tune_hopper backward

Every tile is first checked in a process of its own, against float64 on small shapes, so that one that hangs costs
seconds; one whose kernel spills is rejected too. Then all that passed are timed, interleaved, and one line is printed a
shape and variant: TFLOP/s, its error against the portable kernel, and whether it is the same from run to run (dq isn't,
and isn't looked at). The best are copied into TILES of attention/kernels/hopper_*.py by hand.
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

from attention.kernels import backward, forward, hopper_backward, hopper_backward_kernel, hopper_common, hopper_forward
from attention.reference import Options, dense

Tile = hopper_forward.Tile | hopper_backward.Tile
# The tiles in use come first.
CANDIDATES: dict[str, dict[int, list[Tile]]] = {
    "forward": {
        64: [
            hopper_forward.Tile(*sizes)
            for sizes in [
                (3, 128, 3, 160, True),
                (4, 64, 6, 112, False),
                (2, 128, 3, 240, True),
                (3, 128, 2, 160, True),
                (3, 64, 4, 160, True),
            ]
        ],
        128: [
            hopper_forward.Tile(*sizes)
            for sizes in [
                (2, 128, 2, 240, False),
                (2, 128, 2, 240, True),
                (2, 64, 4, 240, False),
                (3, 64, 2, 160, False),
            ]
        ],
        256: [hopper_forward.Tile(*sizes) for sizes in [(2, 64, 2, 240, False), (2, 64, 2, 240, True)]],
    },
    "backward": {
        64: [hopper_backward.Tile(*sizes) for sizes in [(128, 128, 2), (64, 128, 2), (64, 128, 3)]],
        128: [hopper_backward.Tile(64, 128, 2)],
        256: [hopper_backward.Tile(64, 64, 2)],
    },
}
KERNELS = {"forward": hopper_forward.forward_kernel, "backward": hopper_backward_kernel.grad_kernel}
SPILLED_BYTES = 128  # what is kept over the loop may wait in memory, which costs nothing
Shape = tuple[int, int, int, bool]  # batch, length, heads, causal
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


def run_with(tile: Tile, do: Tensor, q: Tensor, k: Tensor, v: Tensor, *saved: Any) -> tuple[Tensor, ...]:
    """Out of the forward, or dq, dk, dv of the backward; `saved` is out, lse and options."""
    block_d = hopper_common.padded_width(q.shape[3])
    if isinstance(tile, hopper_forward.Tile):
        with mock.patch.dict(hopper_forward.TILES, {block_d: [tile]}):
            return hopper_forward.forward(q, k, v, saved[-1], False)[:1]
    with mock.patch.dict(hopper_backward.TILES, {block_d: tile}):
        return hopper_backward.backward(do, None, q, k, v, *saved, False)[:3]


def check_small(which: str, width: int, tile: Tile) -> list[str]:
    """What is wrong with a tile, and the greatest ratio of its errors to plain torch's."""
    faults, worst = [], 0.0
    names = ("out",) if which == "forward" else ("dq", "dk", "dv")
    for dtype, cases in ((torch.bfloat16, SMALL), (torch.float16, SMALL[1:2])):
        for batch, seqlen_q, seqlen_k, heads_q, heads_k, window in cases:
            what = f"{tuple(tile)} {dtype} {batch},{seqlen_q},{seqlen_k},{heads_q},{heads_k},{width} {window}"
            torch.manual_seed(0)
            q, do = (torch.randn(batch, seqlen_q, heads_q, width, device="cuda", dtype=dtype) for _ in range(2))
            k, v = (torch.randn(batch, seqlen_k, heads_k, width, device="cuda", dtype=dtype) for _ in range(2))
            options = Options(width**-0.5, window_left=window[0], window_right=window[1])
            *true_grads, out, lse = gradients(*(x.double() for x in (q, k, v, do)), options)
            *torch_grads, torch_out, _ = gradients(q, k, v, do, options)
            truth, torchs = ((out,), (torch_out,)) if which == "forward" else (true_grads, torch_grads)
            with watched(what):
                ours = run_with(tile, do, q, k, v, out.to(dtype), lse.float(), options)
            for name, mine, theirs, true in zip(names, ours, torchs, truth, strict=True):
                error, allowed = (mine - true).abs().max().item(), (theirs - true).abs().max().item()
                worst = max(worst, error / (allowed + 1e-6))
                if not error <= 2 * allowed + 1e-6:
                    faults.append(f"{what}: {name} off by {error:.1e}, torch by {allowed:.1e}")
    compiled = KERNELS[which].device_caches[torch.cuda.current_device()][0].values()
    spilled = 4 * max(kernel.n_spills for kernel in compiled)
    if spilled > SPILLED_BYTES:
        faults.append(f"{tuple(tile)} spills {spilled} bytes")
    return [*faults, f"{which} {width} {tuple(tile)} worst error {worst:.2f} of torch's, {spilled} bytes spilled"]


def child(which: str, width: int, number: int) -> None:
    lines = check_small(which, width, CANDIDATES[which][width][number])
    print("\n".join(lines), flush=True)
    sys.exit(len(lines) > 1)


def passes(which: str, width: int, number: int) -> bool:
    command = [sys.executable, "-m", "benchmarks.tune_hopper", which, "--child", str(width), str(number)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    except subprocess.TimeoutExpired:
        print(f"# {which} {width} {tuple(CANDIDATES[which][width][number])} HANGS", flush=True)
        return False
    lines = done.stdout.splitlines()[-6:] + (done.stderr.splitlines()[-3:] if done.returncode else [])
    print("\n".join(f"# {line}" for line in lines), flush=True)
    return done.returncode == 0


def contenders(which: str, width: int, tiles: list[Tile], shape: Shape) -> dict[str, Callable[[], Any]]:
    batch, seqlen, heads, causal = shape
    torch.manual_seed(0)
    q, k, v, do = (torch.randn(batch, seqlen, heads, width, device="cuda", dtype=torch.bfloat16) for _ in range(4))
    options = Options(width**-0.5, window_right=0 if causal else None)
    out, lse, _ = forward.forward(q, k, v, options, False)
    saved = (q, k, v, out, lse, options)
    runs: dict[str, Callable[[], Any]] = {"portable": lambda: backward.backward(do, None, *saved, False)[:3]}
    if which == "forward":
        runs["portable"] = lambda: forward.forward(q, k, v, options, False)[:1]
    for tile in tiles:
        runs[name(tile)] = lambda tile=tile: run_with(tile, do, *saved)  # type: ignore[misc]
    leaves = [x.detach().transpose(1, 2).requires_grad_(which == "backward") for x in (q, k, v)]

    def theirs() -> Tensor:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return scaled_dot_product_attention(*leaves, is_causal=causal)

    runs["cudnn"] = theirs
    if which == "backward":
        their_out, grad = theirs(), do.transpose(1, 2)
        runs["cudnn"] = lambda: torch.autograd.grad(their_out, leaves, grad, retain_graph=True)
    return runs


def name(tile: Tile) -> str:
    return "x".join(map(str, tile))


def time_shape(which: str, width: int, tiles: list[Tile], shape: Shape, rounds: int) -> None:
    batch, seqlen, heads, causal = shape
    runs = contenders(which, width, tiles, shape)
    operations = (4 if which == "forward" else 10) * batch * heads * seqlen**2 * width * (0.5 if causal else 1.0)
    expected = runs["portable"]()
    notes = {}
    for tile in tiles:
        with watched(f"{name(tile)} {shape}"):
            first, second = runs[name(tile)](), runs[name(tile)]()
        errors = [
            ((x.float() - y.float()).norm() / y.float().norm()).item() for x, y in zip(first, expected, strict=True)
        ]
        ordered = slice(1, 3) if which == "backward" else slice(0, 1)
        same = all(torch.equal(x, y) for x, y in zip(first[ordered], second[ordered], strict=True))
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


def profile(which: str, width: int, tile: Tile, shape: Shape) -> None:
    """Microseconds of each kernel."""
    run = contenders(which, width, [tile], shape)[name(tile)]
    run()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        for _ in range(5):
            run()
        torch.cuda.synchronize()
    rows = [f"{event.key[:24]} {event.device_time:.0f}" for event in profiler.key_averages()]
    print(f"# {name(tile)} {shape}:", ", ".join(rows), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("which", choices=list(CANDIDATES))
    parser.add_argument("--widths", nargs="+", type=int, default=list(SHAPES), choices=list(SHAPES))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--no-check", action="store_true")
    parser.add_argument("--run", type=int, metavar="WIDTH", help="only run the first tile, for a profiler")
    parser.add_argument("--child", nargs=2, type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    which, candidates = arguments.which, CANDIDATES[arguments.which]
    if arguments.child:
        child(which, *arguments.child)
    if arguments.run:
        tile = candidates[arguments.run][0]
        contenders(which, arguments.run, [tile], SHAPES[arguments.run][0])[name(tile)]()
        torch.cuda.synchronize()
        return
    print(f"# {torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}, bfloat16")
    cases = [(which, width, number) for width in arguments.widths for number in range(len(candidates[width]))]
    passed = dict.fromkeys(cases, True)
    if not arguments.no_check:
        with ThreadPoolExecutor(8) as pool:
            passed = dict(zip(cases, pool.map(lambda case: passes(*case), cases), strict=True))
    for width in arguments.widths:
        tiles = [tile for number, tile in enumerate(candidates[width]) if passed[which, width, number]]
        for i, shape in enumerate(SHAPES[width]):
            try:
                time_shape(which, width, tiles, shape, arguments.rounds)
                if i == 0 and tiles:
                    profile(which, width, tiles[0], shape)
            except Exception as error:
                print(f"# {width} {shape}: {str(error).splitlines()[0]}", flush=True)


if __name__ == "__main__":
    main()
