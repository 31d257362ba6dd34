"""One token of generation with a cache of keys and values, beside torch's SDPA, in a CUDA graph on random data.

    python -m benchmarks.decode --csv docs/decode.csv         # the shapes of docs/performance.md
    python -m benchmarks.decode --shapes 16,8192,32,8,128     # batch, length, query heads, key heads, head width

Every sequence is as long as the cache. What bounds it is reading the keys and values once: the rate is their bytes over
the time, to be held against that of a copy, which is measured too (bytes read and written).
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

import attention  # noqa: F401  (registers the operator)
from benchmarks.common import setting, write_csv

SHAPES = [
    "16,8192,32,8,128",
    "1,8192,32,8,128",
    "1,65536,32,8,128",
    "64,2048,32,8,128",
    "16,8192,32,32,64",
    "8,8192,16,2,256",
]
WARM_UP = 3


def variants(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, group: int) -> dict[str, Callable[[], Tensor]]:
    """q (B, 1, Hq, D), k and v (B, S, Hkv, D), which lie in memory as (B, Hkv, S, D)."""
    scale = q.shape[3] ** -0.5

    def ours() -> Tensor:
        return torch.ops.attention.decode(q, k, v, lengths, scale, None, "triton")

    def sdpa() -> Tensor:
        return F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), enable_gqa=group > 1)

    return {"triton": ours, "sdpa": sdpa, "copy": lambda: k.clone()}


def capture(function: Callable[[], Tensor]) -> torch.cuda.CUDAGraph:
    """So that Python's time doesn't count."""
    for _ in range(WARM_UP):
        function()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        function()
    return graph


def milliseconds(graph: torch.cuda.CUDAGraph) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    graph.replay()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)


def measure(batch: int, length: int, heads_q: int, heads_k: int, width: int, repeats: int) -> list[dict]:
    torch.manual_seed(0)
    q = torch.randn(batch, 1, heads_q, width, device="cuda", dtype=torch.bfloat16)
    shape = (batch, heads_k, length, width)
    k, v = (torch.randn(shape, device="cuda", dtype=torch.bfloat16).transpose(1, 2) for _ in "kv")
    lengths = torch.full((batch,), length, device="cuda", dtype=torch.int32)
    functions = variants(q, k, v, lengths, heads_q // heads_k)
    difference = (functions["triton"]() - functions["sdpa"]().transpose(1, 2)).abs().max().item()
    assert difference < 0.02, f"ours and SDPA's differ by {difference}"
    graphs = {name: capture(function) for name, function in functions.items()}
    flush = torch.empty(2**26, device="cuda", dtype=torch.int32)  # writing it empties the L2 cache
    times: dict[str, list[float]] = {name: [] for name in graphs}
    for _ in range(repeats):
        for name, graph in graphs.items():
            flush.zero_()
            times[name].append(milliseconds(graph))
    rows = []
    for name, measured in times.items():
        ms = statistics.median(measured)
        moved = 2 * k.numel() * k.element_size()  # both read k and v, or k is read and written
        rows.append(
            {
                "batch": batch, "length": length, "heads_q": heads_q, "heads_k": heads_k, "width": width,
                "variant": name, "ms": round(ms, 4), "gb_per_s": round(moved / ms / 1e6),
            }
        )  # fmt: skip
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=SHAPES, metavar="B,S,HQ,HK,D")
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--csv", metavar="PATH", help="write every number there")
    arguments = parser.parse_args()
    made_by = setting("decode")
    print("# {gpu}, torch {torch}, triton {triton}, bfloat16: `{command}`".format(**made_by))
    print("| B, S, Hq, Hkv, D | ms, GB/s |")
    rows = []
    for shape in arguments.shapes:
        found = measure(*map(int, shape.split(",")), repeats=arguments.repeats)
        cells = [f"{row['variant']} {row['ms']:.4f}, {row['gb_per_s']}" for row in found]
        print(f"| {shape.replace(',', ', ')} | " + " | ".join(cells) + " |", flush=True)
        rows += found
    if arguments.csv:
        write_csv(arguments.csv, rows, made_by)


if __name__ == "__main__":
    main()
