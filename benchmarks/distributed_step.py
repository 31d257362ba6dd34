"""Milliseconds of Muon's step over the ranks that torchrun starts: the work shared, sharded, or done by all.

    torchrun --nproc-per-node 8 -m benchmarks.distributed_step --csv distributed_step.csv

Layouts take turns on random gradients; a step lasts from one barrier until the slowest rank's device is idle, and the
median over the rounds counts. "alone" is every rank doing everything, as without `distributed_group`, and "torch" the
same with torch.optim.Muon, which is all that it can do under DistributedDataParallel. Then a profile of one step of
each layout says for how long the first rank's GPU sent, and for how much of it it computed at the same time.
"""

import argparse
import statistics
import time

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_tensor

from benchmarks.common import setting, write_csv
from benchmarks.optimizer_step import GPT2_124M, WIDTH_2048
from muon import Muon

MODELS = {  # shapes of a layer, layers, dtype
    "GPT-2 124M, float32": (GPT2_124M, 12, torch.float32),
    "24 layers of width 2048, bfloat16": (WIDTH_2048, 24, torch.bfloat16),
}
STEPS = 5


def make_optimizer(
    layout: str, shapes: list[tuple[int, int]], dtype: torch.dtype, device: torch.device
) -> torch.optim.Optimizer:
    """With random parameters, the same on all ranks, and gradients."""
    torch.manual_seed(0)
    model = nn.ParameterList(torch.randn(shape, device=device, dtype=dtype) for shape in shapes)
    group = dist.group.WORLD if layout == "DDP" else None
    if layout in ("FSDP", "HSDP"):
        ranks = dist.get_world_size()
        shape, names = ((ranks,), ("shards",)) if layout == "FSDP" else ((2, ranks // 2), ("replicas", "shards"))
        fully_shard(model, mesh=init_device_mesh(device.type, shape, mesh_dim_names=names))
    for p in model.parameters():
        p.grad = gradient(p)
    if layout == "torch":
        return torch.optim.Muon(model.parameters(), lr=1e-3)
    return Muon(model.parameters(), lr=1e-3, distributed_group=group)


def gradient(p: Tensor) -> Tensor:
    whole = torch.randn(p.shape, device=p.device, dtype=p.dtype)
    if not hasattr(p, "device_mesh"):
        return whole
    return distribute_tensor(whole, p.device_mesh, p.placements, src_data_rank=None)


def milliseconds(optimizer: torch.optim.Optimizer, device: torch.device) -> float:
    """Of a step on the slowest rank."""
    synchronize(device)
    dist.barrier()
    start = time.perf_counter()
    for _ in range(STEPS):
        optimizer.step()
    synchronize(device)
    passed = torch.tensor(1e3 * (time.perf_counter() - start) / STEPS, device=device)
    dist.all_reduce(passed, dist.ReduceOp.MAX)
    return passed.item()


def overlap(optimizer: torch.optim.Optimizer) -> tuple[float, float]:
    """Milliseconds of a step in which this rank's GPU sends, and in which it sends and computes."""
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profiler:
        optimizer.step()
        torch.cuda.synchronize()
    events = [event for event in profiler.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    spans: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
    for event in events:
        spans["nccl" in event.name].append((event.time_range.start, event.time_range.end))
    sending, computing = (merged(spans[is_nccl]) for is_nccl in (True, False))
    both = sum(max(min(a[1], b[1]) - max(a[0], b[0]), 0.0) for a in sending for b in computing)
    return sum(end - start for start, end in sending) / 1e3, both / 1e3


def merged(spans: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """The same time in spans that don't overlap."""
    result: list[tuple[float, float]] = []
    for start, end in sorted(spans):
        if result and start <= result[-1][1]:
            result[-1] = (result[-1][0], max(end, result[-1][1]))
        else:
            result.append((start, end))
    return result


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def measure(
    model: str, shapes: list[tuple[int, int]], dtype: torch.dtype, device: torch.device, rounds: int
) -> list[dict[str, object]]:
    ranks = dist.get_world_size()
    layouts = ["torch", "alone", "DDP", "FSDP"] + ["HSDP"] * (ranks > 2 and ranks % 2 == 0)
    optimizers = {layout: make_optimizer(layout, shapes, dtype, device) for layout in layouts}
    for optimizer in optimizers.values():
        for _ in range(3):  # compile, record
            optimizer.step()
    times: dict[str, list[float]] = {layout: [] for layout in layouts}
    for _ in range(rounds):
        for layout, optimizer in optimizers.items():
            times[layout].append(milliseconds(optimizer, device))
    medians = {layout: statistics.median(found) for layout, found in times.items()}
    rows: list[dict[str, object]] = []
    for layout, ms in medians.items():
        sending, both = overlap(optimizers[layout]) if device.type == "cuda" else (0.0, 0.0)
        row = {"model": model, "layout": layout, "ranks": ranks, "ms": ms, "of_alone": ms / medians["alone"]}
        rows.append(row | {"lowest_ms": min(times[layout]), "sending_ms": sending, "overlapped_ms": both})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--csv", help="write the figures there")
    parser.add_argument("--rounds", type=int, default=9)
    args = parser.parse_args()
    dist.init_process_group("cpu:gloo,cuda:nccl")
    torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())
    device, rows = torch.device("cuda"), []
    for model, (layer, layers, dtype) in MODELS.items():
        rows += measure(model, layer * layers, dtype, device, args.rounds)
    if dist.get_rank() == 0:
        for row in rows:
            print(
                "{model:36} {layout:6} {ranks:4} ranks  {ms:8.2f} ms, lowest {lowest_ms:8.2f}, "
                "sending {sending_ms:6.2f}, of it overlapped {overlapped_ms:6.2f}".format(**row)
            )
        if args.csv:
            write_csv(args.csv, rows, setting("distributed_step"))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
