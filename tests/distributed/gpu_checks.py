"""What ranks check on GPUs of their own."""

import torch
import torch.distributed as dist
from models import Bag, gradients, parameters
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from muon import Muon

SHAPES = {
    "square": (256, 256),
    "another": (256, 256),
    "wide": (192, 768),
    "tall": (1025, 256),  # rows that no number of ranks divides
    "small": (24, 200),
    "row": (1, 300),
}
STEPS = 3


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def trained(params, optimizer, place=lambda p, grad: grad):
    """How far the parameters have moved, in float64."""
    start = parameters(SHAPES)
    for step in range(STEPS):
        for name, grad in gradients(SHAPES, step).items():
            params[name].grad = place(params[name], grad.to(params[name].device, params[name].dtype))
        optimizer.step()
    return {name: whole(p.detach()).double().cpu() - start[name].double() for name, p in params.items()}


def distance(found, expected):
    """The largest over the matrices, relative to how far they moved."""
    return max(float((found[name] - moved).norm() / moved.norm()) for name, moved in expected.items())


def against_float64(rank: int) -> None:
    """At most twice the error of torch.optim.Muon on one GPU."""
    torch.cuda.set_device(rank)
    ranks, options = dist.get_world_size(), {"lr": 0.05}
    exact = dict(Bag(parameters(SHAPES, torch.float64)).named_parameters())
    truth = trained(exact, Muon(exact.values(), **options))
    plain = dict(Bag(parameters(SHAPES)).cuda().named_parameters())
    most = 2 * distance(trained(plain, torch.optim.Muon(plain.values(), **options)), truth) + 1e-6

    same = dict(Bag(parameters(SHAPES)).cuda().named_parameters())
    error = distance(trained(same, Muon(same.values(), distributed_group=dist.group.WORLD, **options)), truth)
    assert error <= most, ("DDP", error, most)

    shapes = [(ranks,)] + ([(2, ranks // 2)] if ranks % 2 == 0 and ranks > 2 else [])
    for shape in shapes:
        mesh = init_device_mesh("cuda", shape, mesh_dim_names=("replicas", "shards")[-len(shape) :])
        for options in ({"lr": 0.05}, {"lr": 0.05, "workspace": 1}):
            parts = dict(fully_shard(Bag(parameters(SHAPES)).cuda(), mesh=mesh).named_parameters())
            found = trained(
                parts,
                Muon(parts.values(), **options),
                lambda p, grad: distribute_tensor(grad, p.device_mesh, p.placements, src_data_rank=None),
            )
            error = distance(found, truth)
            assert error <= most, (shape, options, error, most)
