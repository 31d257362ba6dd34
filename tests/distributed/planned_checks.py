"""What every rank checks of ``muon.shared_plan`` on Triton's interpreter; ``test_planned.py`` asks for the outcomes.

The reference is one process's plan: the same kernels on the same matrices, so that every bit is the same.
"""

import traceback
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from models import gradients, make_optimizer, parameters
from torch.nn import Parameter

from muon import distributed, segments, shared_plan
from muon import optimizer as optimizer_module

CHECKS: dict[str, Callable[[int], None]] = {}
STEPS = 3
SHAPES = {
    "wide": (6, 20),
    "wide2": (6, 20),
    "tall": (20, 6),
    "square": (16, 32),  # aligned
    "alone": (9, 7),  # fewer matrices than ranks
    "qkv": (18, 6),
    "blocks": (13, 6),
    "experts": (4, 4, 6),
    "conv": (6, 3, 2, 2),
    "stored": (6, 10),  # (in, out)
    "empty": (0, 4),
}
FEW = {name: SHAPES[name] for name in ("wide", "wide2", "tall", "square")}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "everything": {
        "neuron_norm": 0.9,
        "weight_decay_mode": "cautious",
        "maximize": True,
        "adjust_lr_fn": "match_rms_adamw",
        "workspace": 20_000,  # several buckets of the same sides
    },
    "momentum alone": {"nesterov": False, "momentum_dtype": torch.float32},
}


def check(function: Callable[[int], None]) -> Callable[[int], None]:
    CHECKS[function.__name__] = function
    return function


def run_checks(rank: int, names: Sequence[str]) -> list[str]:
    """The names of those that passed, up to the first that failed, with what went wrong after it."""
    optimizer_module.uses_triton = distributed.uses_triton = lambda _, p: p.dtype != torch.float64
    passed: list[str] = []
    for name in names:
        try:
            CHECKS[name](rank)
        except Exception as error:
            return [*passed, f"{name}: {error}\n{traceback.format_exc()}"]
        passed.append(name)
    return passed


def make(group=None, dtype=torch.float32, shapes=SHAPES, **options):
    params = {name: Parameter(tensor) for name, tensor in parameters(shapes, dtype).items()}
    return params, make_optimizer(params, group, ns_steps=1, **options)


def train(params, optimizer, change: Callable[[int, dict[str, torch.Tensor]], None] = lambda step, grads: None) -> None:
    """Every step has another learning rate, and gradients at other addresses."""
    for step in range(STEPS):
        grads = gradients({name: tuple(p.shape) for name, p in params.items()}, step)
        grads = {name: grad.to(params[name].dtype) for name, grad in grads.items()}
        change(step, grads)
        for group in optimizer.param_groups:
            group["lr"] = 0.1 / (step + 1)
        for name, p in params.items():
            p.grad = grads.get(name)
        optimizer.step()


def assert_same_as_alone(params, optimizer, change=lambda step, grads: None, **options) -> None:
    """Parameters and state, after the first rank has trained the same way by itself and told the others."""
    told = [None]
    if dist.get_rank() == 0:
        others, reference = make(**options)
        train(others, reference, change)
        told = [({name: p.detach() for name, p in others.items()}, reference.state_dict()["state"])]
    dist.broadcast_object_list(told)
    others, states = told[0]
    for name, p in others.items():
        assert torch.equal(params[name], p), name
    state = optimizer.state_dict()["state"]
    assert state.keys() == states.keys()
    for index, values in states.items():
        assert state[index].keys() == values.keys()
        for key, value in values.items():
            assert torch.equal(state[index][key], value), (index, key)


@contextmanager
def counted(where, name: str):
    """The calls of a collective."""
    calls = []
    original = getattr(where, name)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(where, name, lambda *args, **kwargs: calls.append(args) or original(*args, **kwargs))
        yield calls


@check
def ranks_share_the_work_of_one(rank: int) -> None:
    for options in OPTIONS.values():
        # NorMuon's kernels take no neurons that are columns.
        shapes = {name: s for name, s in SHAPES.items() if name != "stored" or "neuron_norm" not in options}
        params, optimizer = make(dist.group.WORLD, shapes=shapes, **options)
        train(params, optimizer)
        engine = optimizer._engine
        assert engine.plans and all(engine.plans.values()) and not engine.deals
        assert_same_as_alone(params, optimizer, shapes=shapes, **options)


@check
def parameters_with_a_remainder(rank: int) -> None:
    options = {"dtype": torch.bfloat16, "bf16_remainder": True, "momentum_dtype": torch.float32, "shapes": FEW}
    params, optimizer = make(dist.group.WORLD, **options)
    train(params, optimizer)
    assert_same_as_alone(params, optimizer, **options)


@check
def a_learning_rate_that_is_a_tensor(rank: int) -> None:
    """As it would be on a GPU: the host doesn't read it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(optimizer_module, "number", lambda lr: torch.tensor(lr, dtype=torch.float64))
        params, optimizer = make(dist.group.WORLD, shapes=FEW)
        train(params, optimizer)
        assert_same_as_alone(params, optimizer, shapes=FEW)


@check
def gradients_that_come_and_go(rank: int) -> None:
    """One that a rank lacks updates nobody; a set that has been there before is planned already."""

    def missing(step, grads):
        if step % 2:
            del grads["wide2"], grads["tall"]

    def missing_here(step, grads):
        if step % 2 and rank == 1:
            del grads["wide2"]
        if step % 2 and rank == 2:
            del grads["tall"]

    params, optimizer = make(dist.group.WORLD, shapes=FEW)
    train(params, optimizer, missing_here)
    assert len(optimizer._engine.plans) == 2
    assert_same_as_alone(params, optimizer, missing, shapes=FEW)


@check
def a_gradient_laid_out_otherwise_on_one_rank(rank: int) -> None:
    """And so its momentum, for good. All ranks send the same as ever."""

    def otherwise(step, grads):
        if rank == 1:
            grads["tall"] = grads["tall"].mT.contiguous().mT
            grads["wide"] = torch._neg_view(-grads["wide"])

    params, optimizer = make(dist.group.WORLD, shapes=FEW)
    train(params, optimizer, otherwise)
    assert (optimizer.state[params["tall"]]["momentum_buffer"].stride() == (1, 20)) == (rank == 1)
    assert params["wide"].grad.is_neg() == (rank == 1)
    assert_same_as_alone(params, optimizer, shapes=FEW)
    assert torch.equal(params["wide"].grad, gradients(FEW, STEPS - 1)["wide"])


@check
def buckets_of_a_small_workspace(rank: int) -> None:
    """Gathers take turns in the two halves of one buffer. Without room for them there is no plan."""
    shapes, matrix = {f"matrix{i}": (16, 16) for i in range(17)}, 4 * 16 * 16
    needed = 2 * 3 * matrix + (3 + 2) * matrix  # both halves of three ranks, and an iteration
    for workspace, gathers in ((None, 1), (2 * needed, 3), (6 * matrix, 6)):
        params, optimizer = make(dist.group.WORLD, shapes=shapes, workspace=workspace)
        with counted(shared_plan, "all_gather") as calls:
            train(params, optimizer)
        assert len(calls) == STEPS * gathers
        assert optimizer._engine.buffers[torch.device("cpu")].numel() == min(gathers, 2) * 3 * -(-6 // gathers) * matrix
        assert_same_as_alone(params, optimizer, shapes=shapes)
    params, optimizer = make(dist.group.WORLD, shapes=shapes, workspace=6 * matrix - 1)
    train(params, optimizer)
    assert optimizer._engine.deals and not any(optimizer._engine.plans.values())


@check
def shares_that_differ(rank: int) -> None:
    """One matrix among three ranks: padded, it would be sent three times."""
    params, optimizer = make(dist.group.WORLD, shapes={"alone": (9, 7)})
    with counted(shared_plan, "all_gather") as gathers, counted(dist, "broadcast") as broadcasts:
        train(params, optimizer)
    assert (len(gathers), len(broadcasts)) == (0, STEPS)
    assert_same_as_alone(params, optimizer, shapes={"alone": (9, 7)})


@check
def segments_that_are_recorded(rank: int) -> None:
    """In the place of graphs the segments themselves, after the first step; those that launch nothing have none."""
    original = shared_plan.SharedPlan._run

    def run_and_record(plan):
        original(plan)
        if not plan.graphs:
            plan._record(None)

    for shapes, graphs in ((FEW, None), ({"alone": (9, 7)}, 2)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(segments, "record", lambda run, *_: SimpleNamespace(replay=run, pool=lambda: None))
            patch.setattr(shared_plan.SharedPlan, "_run", run_and_record)
            params, optimizer = make(dist.group.WORLD, shapes=shapes)
            train(params, optimizer)
        (plan,) = optimizer._engine.plans.values()
        assert len(plan.graphs) == (graphs or sum(bool(plan._own(b)) + 1 for b in plan.buckets) + 1)
        assert_same_as_alone(params, optimizer, shapes=shapes)


@check
def one_parameter_at_a_time_is_not_planned(rank: int) -> None:
    params, optimizer = make(dist.group.WORLD, shapes=FEW, foreach=False)
    train(params, optimizer)
    assert optimizer._engine.deals and not optimizer._engine.plans
