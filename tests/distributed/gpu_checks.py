"""What ranks check on GPUs of their own."""

from functools import partial

import torch
import torch.distributed as dist
from models import Bag, gradients, parameters
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from muon import Muon
from muon.rounding import join

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
    if not isinstance(tensor, DTensor):
        return tensor
    wide = tensor.to(torch.int32) if tensor.dtype == torch.int16 else tensor  # which NCCL doesn't gather
    return wide.full_tensor().to(tensor.dtype)


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


LAYERS = {f"{kind}{i}": shape for i in range(7) for kind, shape in (("up", (2048, 512)), ("down", (512, 2048)))}
LAYERS |= {f"square{i}": (512, 512) for i in range(7)} | SHAPES
LAYER_OPTIONS = {
    "plain": {},
    "many buckets": {"workspace": 2**26},
    "everything": {"neuron_norm": 0.9, "weight_decay_mode": "cautious", "maximize": True, "nesterov": False},
    "bfloat16": {"dtype": torch.bfloat16, "bf16_remainder": True, "momentum_dtype": torch.float32},
    "tensor": {"tensor_lr": True},
}


def layers_trained(dtype=torch.float32, group=None, tensor_lr=False, place=lambda tensor: tensor, **options):
    """Steps that change all that a recorded graph must not hold fast, and a gradient that comes and goes."""
    torch.manual_seed(0)
    start = {name: (torch.randn(shape, device="cuda") / 8).bfloat16() for name, shape in LAYERS.items()}
    params = {name: place(tensor.to(dtype, copy=True)) for name, tensor in start.items()}
    optimizer = Muon(params.values(), distributed_group=group, **options)
    kept = []  # gradients, so that none gets the address of another
    for step in range(8):
        for name, p in params.items():
            grad = place(torch.randn(p.shape, device="cuda").bfloat16().to(dtype))
            p.grad = None if name == "up3" and step % 4 == 3 else grad
        kept.append([p.grad for p in params.values()])
        lr = 0.05 / (step + 1)
        lr = torch.tensor(lr, device="cuda") if tensor_lr else lr
        optimizer.param_groups[0].update(lr=lr, weight_decay=0.1 * step, momentum=0.9 + 0.01 * step)
        optimizer.step()
    states = {name: optimizer.state[p] for name, p in params.items()}
    exact = {
        name: join(whole(p), whole(states[name]["remainder"])) if "remainder" in states[name] else whole(p)
        for name, p in params.items()
    }
    return {name: p.double() - start[name].double() for name, p in exact.items()}, params, optimizer


def replayed_steps(rank: int) -> None:
    """The planned step of all ranks: as exact as one GPU's, the same to the bit on all, and so is the momentum."""
    torch.cuda.set_device(rank)
    for name, options in LAYER_OPTIONS.items():
        narrower = ("dtype", "bf16_remainder", "momentum_dtype", "workspace")
        truth, _, _ = layers_trained(torch.float64, **{k: v for k, v in options.items() if k not in narrower})
        alone, _, reference = layers_trained(**options)
        found, params, optimizer = layers_trained(group=dist.group.WORLD, **options)
        plans = list(optimizer._engine.plans.values())
        assert len(plans) == 2 and all(plan.graphs for plan in plans) and not optimizer._engine.deals, name
        if name == "many buckets":
            assert all(len(plan.buckets) > len({bucket.sides for bucket in plan.buckets}) for plan in plans)
        most = 2 * distance(alone, truth) + 1e-6
        assert distance(found, truth) <= most, (name, distance(found, truth), most)
        for (key, p), q in zip(params.items(), reference.param_groups[0]["params"], strict=True):
            momentum = optimizer.state[p]["momentum_buffer"]
            assert torch.equal(momentum, reference.state[q]["momentum_buffer"]), (name, key)
            for tensor in (p, momentum):
                first = tensor.clone()
                dist.broadcast(first, 0)
                assert torch.equal(tensor, first), (name, key)


def replayed_steps_of_shards(rank: int) -> None:
    """Sharded by rows, by columns, and with replicas, against one GPU's."""
    torch.cuda.set_device(rank)
    ranks = dist.get_world_size()
    layouts = [((ranks,), (Shard(0),)), ((ranks,), (Shard(1),))]
    layouts += [((2, ranks // 2), (Replicate(), Shard(0)))] * (ranks > 2 and ranks % 2 == 0)
    for name, options in LAYER_OPTIONS.items():
        narrower = ("dtype", "bf16_remainder", "momentum_dtype", "workspace")
        options = {k: v for k, v in options.items() if k != "neuron_norm"}  # which isn't planned
        truth, _, _ = layers_trained(torch.float64, **{k: v for k, v in options.items() if k not in narrower})
        alone, _, reference = layers_trained(**options)
        most = 2 * distance(alone, truth) + 1e-6
        for shape, placements in layouts:
            mesh = init_device_mesh("cuda", shape)
            found, params, optimizer = layers_trained(place=partial(distributed, mesh, placements), **options)
            plans = list(optimizer._engine.plans.values())
            assert len(plans) == 2 and all(plan.graphs for plan in plans) and not optimizer._engine.deals, name
            assert distance(found, truth) <= most, (name, shape, placements, distance(found, truth), most)
            for (key, p), q in zip(params.items(), reference.param_groups[0]["params"], strict=True):
                momentum = whole(optimizer.state[p]["momentum_buffer"])
                assert torch.equal(momentum, reference.state[q]["momentum_buffer"]), (name, key)


def distributed(mesh, placements, tensor):
    return distribute_tensor(tensor, mesh, placements, src_data_rank=None)


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
