"""What every rank checks of ``muon.sharded_plan`` on Triton's interpreter; ``test_sharded_plan.py`` asks for outcomes.

The reference is one process's plan: the same kernels on the same matrices, so that every bit is the same.
"""

import gc
import traceback
from collections.abc import Callable, Sequence
from copy import deepcopy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from models import gradients, make_optimizer, parameters
from planned_checks import FEW, STEPS
from planned_checks import SHAPES as ALL
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import Parameter

from muon import distributed, segments, sharded_plan
from muon import optimizer as optimizer_module
from muon.newton_schulz import memory

CHECKS: dict[str, Callable[[int], None]] = {}
SHAPES = {name: shape for name, shape in ALL.items() if name != "stored"}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "many buckets": {"workspace": 20_000, "weight_decay_mode": "cautious", "adjust_lr_fn": "match_rms_adamw"},
    "momentum alone": {"nesterov": False, "maximize": True},
}
NARROW = {"dtype": torch.bfloat16, "bf16_remainder": True, "momentum_dtype": torch.float32}


def check(function: Callable[[int], None]) -> Callable[[int], None]:
    CHECKS[function.__name__] = function
    return function


def run_checks(rank: int, names: Sequence[str]) -> list[str]:
    """The names of those that passed, up to the first that failed, with what went wrong after it."""
    optimizer_module.uses_triton = distributed.uses_triton = lambda _, p: p.dtype != torch.float64
    optimizer_module.multiplies_bfloat16 = lambda: False
    passed: list[str] = []
    for name in names:
        try:
            CHECKS[name](rank)
        except Exception as error:
            return [*passed, f"{name}: {error}\n{traceback.format_exc()}"]
        passed.append(name)
    return passed


def trained(place, dtype=torch.float32, shapes=SHAPES, change=lambda step, grads: None, **options):
    """Every step has another learning rate, momentum and weight decay, and gradients at other addresses."""
    params = {name: Parameter(place(tensor)) for name, tensor in parameters(shapes, dtype).items()}
    optimizer = make_optimizer(params, ns_steps=1, **options)
    for step in range(STEPS):
        grads = {name: place(grad) for name, grad in gradients(shapes, step, dtype).items()}
        change(step, grads)
        for group in optimizer.param_groups:
            group.update(lr=0.1 / (step + 1), momentum=0.9 + 0.01 * step, weight_decay=0.1 * step)
        for name, p in params.items():
            p.grad = grads.get(name)
        optimizer.step()
    return params, optimizer


def whole(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def assert_same_as_alone(params, optimizer, **options) -> None:
    """Parameters and state, bit by bit, after the first rank has trained the same way by itself and told the others."""
    told = [None]
    if dist.get_rank() == 0:
        others, reference = trained(lambda tensor: tensor, **options)
        told = [{name: (p.detach(), reference.state[p]) for name, p in others.items()}]
    dist.broadcast_object_list(told)
    for name, (expected, state) in told[0].items():
        assert torch.equal(whole(params[name].detach()), expected), name
        assert optimizer.state[params[name]].keys() == state.keys()
        for key, value in state.items():
            found = optimizer.state[params[name]][key]
            found = whole(found.to(torch.int32)).to(torch.int16) if found.dtype == torch.int16 else whole(found)
            assert torch.equal(found, value), (name, key)


def on(mesh: DeviceMesh, *placements):
    return lambda tensor: distribute_tensor(tensor, mesh, placements, src_data_rank=None)


def plans_of(optimizer):
    return list(optimizer._engine.plans.values())


def assert_planned(optimizer) -> None:
    assert plans_of(optimizer) and all(plans_of(optimizer)) and not optimizer._engine.deals


@check
def rows_on_four_ranks(rank: int) -> None:
    place = on(init_device_mesh("cpu", (4,)), Shard(0))
    for options in OPTIONS.values():
        params, optimizer = trained(place, **options)
        assert_planned(optimizer)
        assert_same_as_alone(params, optimizer, **options)
    params, optimizer = trained(place, shapes=FEW, **NARROW)
    assert_planned(optimizer)
    assert_same_as_alone(params, optimizer, shapes=FEW, **NARROW)


@check
def rows_on_two_ranks_and_their_replicas(rank: int) -> None:
    place = on(init_device_mesh("cpu", (2, 2)), Replicate(), Shard(0))
    for options in OPTIONS.values():
        params, optimizer = trained(place, **options)
        assert_planned(optimizer)
        assert_same_as_alone(params, optimizer, **options)


@check
def columns(rank: int) -> None:
    shapes = {name: shape for name, shape in SHAPES.items() if len(shape) == 2}
    for mesh, placements in (((4,), (Shard(1),)), ((2, 2), (Shard(0), Shard(1))), ((2, 2), (Shard(1), Replicate()))):
        params, optimizer = trained(on(init_device_mesh("cpu", mesh), *placements), shapes=shapes)
        assert_planned(optimizer)
        assert_same_as_alone(params, optimizer, shapes=shapes)


@check
def experts_by_experts(rank: int) -> None:
    """With replicas, nothing goes to the owners, or back to the shards."""
    shapes = {"experts": (6, 4, 6), "others": (5, 4, 6)}
    params, optimizer = trained(on(init_device_mesh("cpu", (2, 2)), Replicate(), Shard(0)), shapes=shapes)
    assert_planned(optimizer)
    assert not any(bucket.is_exchanged for plan in plans_of(optimizer) for bucket in plan.buckets)
    assert_same_as_alone(params, optimizer, shapes=shapes)


@check
def shares_that_differ(rank: int) -> None:
    """One matrix between two replicas: padded, it would be sent twice."""
    shapes = {"alone": (9, 7)}
    place = on(DeviceMesh("cpu", [[0, 1], [2, 3]]), Replicate(), Shard(0))
    params, optimizer = trained(place, shapes=shapes)
    assert_planned(optimizer)
    assert_same_as_alone(params, optimizer, shapes=shapes)


@check
def a_rank_that_replays_beside_one_that_does_not(rank: int) -> None:
    """The messages and their order are the same."""
    for mesh, placements in (((4,), (Shard(0),)), ((2, 2), (Replicate(), Shard(0)))):
        foreach = False if rank == 1 else None
        params, optimizer = trained(on(init_device_mesh("cpu", mesh), *placements), foreach=foreach)
        assert bool(optimizer._engine.plans) == (rank != 1)
        expected, _ = trained(lambda tensor: tensor)
        for name, p in expected.items():
            torch.testing.assert_close(whole(params[name].detach()), p.detach(), rtol=2e-5, atol=2e-6)


@check
def a_buffer_within_the_workspace(rank: int) -> None:
    """Together with what the iteration needs; a bucket's messages lie where those of one that has ended lay."""
    shapes = {f"matrix{i}": (16, 16) for i in range(40)}
    for sizes, placements in (((4,), (Shard(0),)), ((2, 2), (Replicate(), Shard(0)))):
        place = on(init_device_mesh("cpu", sizes), *placements)
        for workspace in (40_000, None):
            params, optimizer = trained(place, shapes=shapes, workspace=workspace)
            (plan,) = plans_of(optimizer)
            assert (len(plan.buckets) > plan.layout.stages) == (workspace is not None)
            own = max(len(bucket.own) for bucket in plan.buckets)
            buffer = optimizer._engine.buffers[torch.device("cpu")]
            assert len(buffer) == plan.buffer_bytes == min(plan.layout.stages, len(plan.buckets)) * plan._slot_bytes()
            assert workspace is None or len(buffer) + own * memory("standard", 16, 16, torch.float32) <= workspace
            assert_same_as_alone(params, optimizer, shapes=shapes)


@check
def gradients_that_come_and_go(rank: int) -> None:
    def missing(step, grads):
        if step % 2:
            del grads["wide2"], grads["tall"]

    params, optimizer = trained(on(init_device_mesh("cpu", (4,)), Shard(0)), shapes=FEW, change=missing)
    assert len(plans_of(optimizer)) == 2
    assert_same_as_alone(params, optimizer, shapes=FEW, change=missing)


@check
def a_gradient_laid_out_otherwise_on_one_rank(rank: int) -> None:
    def otherwise(step, grads):
        if rank == 1 and isinstance(grads["tall"], DTensor):
            grad = grads["tall"]
            columns = grad.to_local().mT.contiguous().mT
            size = {"shape": grad.shape, "stride": grad.stride()}
            grads["tall"] = DTensor.from_local(columns, grad.device_mesh, grad.placements, run_check=False, **size)

    params, optimizer = trained(on(init_device_mesh("cpu", (4,)), Shard(0)), shapes=FEW, change=otherwise)
    assert (params["tall"].grad.to_local().stride() == (1, 5)) == (rank == 1)
    assert_planned(optimizer)
    assert_same_as_alone(params, optimizer, shapes=FEW)


@check
def state_that_was_loaded_lies_elsewhere(rank: int) -> None:
    params, optimizer = trained(on(init_device_mesh("cpu", (4,)), Shard(0)), shapes=FEW)
    others, reference = trained(lambda tensor: tensor, shapes=FEW)
    for some in (optimizer, reference):
        some.load_state_dict(deepcopy(some.state_dict()))
        some.step()  # on the last gradients
    assert_planned(optimizer)
    for name, p in others.items():
        assert torch.equal(whole(params[name].detach()), p.detach()), name


@check
def parameters_without_elements(rank: int) -> None:
    """Alone in their group they leave no bucket."""
    shapes = {"empty": (0, 4)}
    params, optimizer = trained(on(init_device_mesh("cpu", (4,)), Shard(0)), shapes=shapes)
    assert_same_as_alone(params, optimizer, shapes=shapes)


@check
def as_many_plans_as_groups(rank: int) -> None:
    """Each is made once, however many groups a step goes through."""
    original, made = distributed._make_plan, []
    shapes = {name: SHAPES[name] for name in ("qkv", "blocks", "wide")}  # each in its group
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(distributed, "MOST_DEALS", 1)
        patch.setattr(distributed, "_make_plan", lambda *args, **kwargs: made.append(1) or original(*args, **kwargs))
        trained(on(init_device_mesh("cpu", (4,)), Shard(0)), shapes=shapes)
    assert len(made) == len(shapes)


@check
def a_buffer_that_a_second_group_makes_larger(rank: int) -> None:
    """Nothing holds on to the smaller one."""
    original, seen = distributed.Engine._buffer, []

    def watched(engine, plan):
        buffer = original(engine, plan)
        seen.append(StorageWeakRef(buffer.untyped_storage()))
        gc.collect()  # the interpreter leaves cycles
        assert all(ref.cdata == seen[-1].cdata or ref.expired() for ref in seen)
        return buffer

    shapes = {"qkv": (18, 6), "tall": (64, 32)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(distributed.Engine, "_buffer", watched)
        params, optimizer = trained(on(init_device_mesh("cpu", (4,)), Shard(0)), shapes=shapes)
    assert seen[0].cdata != seen[1].cdata
    assert_same_as_alone(params, optimizer, shapes=shapes)


@check
def segments_that_are_recorded(rank: int) -> None:
    """In the place of graphs the segments themselves, after the first step; those that launch nothing have none."""
    original = sharded_plan.ShardedPlan._run

    def run_and_record(plan):
        original(plan)
        if not plan.graphs:
            plan._record(None)

    place = on(init_device_mesh("cpu", (4,)), Shard(0))
    for shapes in (FEW, {"alone": (3, 7)}):  # of which the last rank has nothing, and all but one own nothing
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(segments, "record", lambda run, *_: SimpleNamespace(replay=run, pool=lambda: None))
            patch.setattr(sharded_plan.ShardedPlan, "_run", run_and_record)
            params, optimizer = trained(place, shapes=shapes)
        (plan,) = plans_of(optimizer)
        has_parts = any(p.to_local().numel() for p in params.values())
        assert len(plan.graphs) == sum(2 * has_parts + bool(bucket.own) for bucket in plan.buckets)
        assert_same_as_alone(params, optimizer, shapes=shapes)


@check
def what_kernels_cannot_have_is_not_planned(rank: int) -> None:
    """NorMuon's norms, neurons that are columns."""
    place = on(init_device_mesh("cpu", (4,)), Shard(0))
    for shapes, options in ((FEW, {"neuron_norm": 0.9}), ({"stored": (6, 10)}, {})):
        _, optimizer = trained(place, shapes=shapes, **options)
        assert plans_of(optimizer) == [None] and optimizer._engine.deals
