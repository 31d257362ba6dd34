"""What the tests train: parameters of many shapes, whose gradients depend on the step alone."""

import torch
from torch import Tensor, nn

from muon import Muon


def parameters(shapes: dict[str, tuple[int, ...]], dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()}


def gradients(shapes: dict[str, tuple[int, ...]], step: int, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()}


class Bag(nn.Module):
    """Parameters by name."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        super().__init__()
        for name, tensor in tensors.items():
            self.register_parameter(name, nn.Parameter(tensor.clone()))


SHAPES = {
    "square": (12, 12),
    "wide": (6, 20),
    "tall": (21, 5),  # rows that 2, 4 ranks don't divide
    "row": (1, 9),
    "column": (7, 1),
    "small": (2, 8),  # fewer rows than ranks
    "qkv": (18, 6),
    "blocks": (13, 6),
    "experts": (5, 4, 6),
    "gates": (3, 8, 4),
    "conv": (6, 3, 2, 2),
    "stored": (6, 10),  # (in, out)
    "empty": (0, 4),
    "vector": (5,),
}


def make_optimizer(params: dict[str, Tensor], group=None, lr=0.1, **options) -> Muon:
    special = {
        "qkv": {"split": 3},
        "blocks": {"split": (4, 9)},
        "gates": {"split": 2},
        "stored": {"matrix": "transposed"},
    }
    groups = [{"params": [p], **special[name]} for name, p in params.items() if name in special]
    groups += [{"params": [p for name, p in params.items() if name not in special and p.ndim > 1]}]
    groups += [{"params": [p for p in params.values() if p.ndim < 2], "algorithm": "adamw"}]
    groups = [group for group in groups if group["params"]]
    return Muon(groups, lr=lr, distributed_group=group, **options)


def train(params: dict[str, Tensor], optimizer: Muon, steps, place=lambda name, grad: grad) -> None:
    """``place`` makes of a whole gradient what the parameter's is."""
    for step in steps:
        shapes = {name: tuple(p.shape) for name, p in params.items()}
        for name, grad in gradients(shapes, step).items():
            params[name].grad = place(name, grad.to(params[name].dtype))
        optimizer.step()
