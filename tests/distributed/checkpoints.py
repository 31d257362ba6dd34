"""The model whose checkpoints travel between numbers of ranks."""

from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from models import SHAPES, Bag, gradients, make_optimizer, parameters
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

from muon import Muon

UNTRAINED = ("wide", "experts")  # the first frozen, the second without a gradient
OPTIONS = {"neuron_norm": 0.9, "momentum_dtype": torch.float32}


def saved_model() -> Bag:
    shapes = {name: shape for name, shape in SHAPES.items() if 0 not in shape}
    model = Bag(parameters(shapes, torch.float64))
    model.get_parameter(UNTRAINED[0]).requires_grad_(False)
    return model


def optimizer_of_saved(model: Bag) -> Muon:
    return make_optimizer(dict(model.named_parameters()), **OPTIONS)


def train_saved(model: Bag, optimizer: Muon, steps, place=lambda name, grad: grad) -> None:
    params = dict(model.named_parameters())
    for step in steps:
        shapes = {name: tuple(p.shape) for name, p in params.items()}
        for name, grad in gradients(shapes, step).items():
            params[name].grad = None if name in UNTRAINED else place(name, grad.double())
        optimizer.step()


def load_checkpoint(model: Bag, optimizer: Muon, folder: Path, group: dist.ProcessGroup | None = None) -> None:
    state = {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer)}
    # A parameter that has had no gradient has no state in the file.
    planner = DefaultLoadPlanner(allow_partial_load=True)
    dcp.load(state, checkpoint_id=folder, process_group=group, planner=planner)
    model.load_state_dict(state["model"])
    set_optimizer_state_dict(model, optimizer, state["optimizer"])
