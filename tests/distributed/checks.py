"""What every rank of one spawn checks, by name; the tests ask for the outcomes."""

import math
import os
import re
import signal
import traceback
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from checkpoints import load_checkpoint, optimizer_of_saved, saved_model, train_saved
from helpers.allocations import Allocations
from helpers.pages import ROOT
from models import SHAPES, Bag, gradients, make_optimizer, parameters, train
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import Parameter
from torch.nn.parallel import DistributedDataParallel

from attention import SelfAttention
from benchmarks import distributed_step, distributed_training
from benchmarks.distributed_model import elements_of_a_reduction, elements_sent
from examples.gpt import data
from examples.gpt.presets import PRESETS
from examples.gpt.ranks import Ranks
from muon import Muon, QKClip, exchange, layout
from muon import optimizer as optimizer_module
from muon.rounding import join

CHECKS: dict[str, Callable[[int], None]] = {}
STEPS = 3
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "everything": {
        "neuron_norm": 0.9,
        "weight_decay_mode": "cautious",
        "maximize": True,
        "workspace": 1,  # a matrix a rank in each bucket
        "adjust_lr_fn": "match_rms_adamw",
    },
    "momentum alone": {"nesterov": False, "neuron_norm": 0.9, "lr": torch.tensor(0.03)},
}


def check(function: Callable[[int], None]) -> Callable[[int], None]:
    CHECKS[function.__name__] = function
    return function


def run_checks(rank: int, names: Sequence[str]) -> list[str]:
    """The names of those that passed, up to the first that failed, with what went wrong after it."""
    optimizer_module.multiplies_bfloat16 = lambda: False  # the same arithmetic on every processor
    passed: list[str] = []
    for name in names:
        try:
            CHECKS[name](rank)
        except Exception as error:
            return [*passed, f"{name}: {error}\n{traceback.format_exc()}"]
        passed.append(name)
    return passed


def whole(tensor: torch.Tensor) -> torch.Tensor:
    if not isinstance(tensor, DTensor):
        return tensor
    wide = tensor.to(torch.int32) if tensor.dtype == torch.int16 else tensor  # which gloo doesn't gather
    return wide.full_tensor().to(tensor.dtype)


def alone(dtype: torch.dtype = torch.float32, steps=range(STEPS), **options):
    """The same training by one process."""
    params = {name: Parameter(tensor) for name, tensor in parameters(SHAPES, dtype).items()}
    optimizer = make_optimizer(params, **options)
    train(params, optimizer, steps)
    return params, optimizer


def assert_close(found: torch.Tensor, expected: torch.Tensor, name: str) -> None:
    """Bitwise but for the order of sums inside products of matrices, which may round to the next bfloat16 in a step."""
    rtol = STEPS * 2**-7 if expected.dtype == torch.bfloat16 else 2e-5
    torch.testing.assert_close(found, expected, rtol=rtol, atol=2e-6, msg=lambda text: f"{name}: {text}")


def assert_same(params, optimizer, dtype: torch.dtype = torch.float32, **options) -> None:
    expected, reference = alone(dtype, **options)
    for name, p in expected.items():
        found, state = params[name].detach(), optimizer.state[params[name]]
        assert_close(whole(found), p.detach(), name)
        if "remainder" in state:
            exact = join(p.detach(), reference.state[p]["remainder"])
            assert_close(join(whole(found), whole(state["remainder"])), exact, f"{name}, exactly")
        for key, value in reference.state[p].items():
            assert whole(state[key]).shape == value.shape and state[key].dtype == value.dtype, (name, key)
            if key != "remainder":
                assert_close(whole(state[key]), value, f"{name}, {key}")


def assert_trains_the_same(make: Callable[[], dict[str, torch.Tensor]], place, group=None) -> None:
    for options in OPTIONS.values():
        params = make()
        optimizer = make_optimizer(params, group, **options)
        train(params, optimizer, range(STEPS), place(params))
        assert_same(params, optimizer, **options)
    for options in ({"bf16_remainder": True}, {"momentum_dtype": torch.float32}):
        params = make(torch.bfloat16)
        optimizer = make_optimizer(params, group, **options)
        train(params, optimizer, range(STEPS), place(params))
        assert_same(params, optimizer, torch.bfloat16, **options)


def as_param(params):
    """A gradient distributed as its parameter is."""

    def place(name: str, grad: torch.Tensor) -> torch.Tensor:
        p = params[name]
        return distribute_tensor(grad, p.device_mesh, p.placements, src_data_rank=None)

    return place


def as_it_is(params):
    return lambda name, grad: grad


def sharded(mesh: DeviceMesh):
    def make(dtype: torch.dtype = torch.float32):
        return dict(fully_shard(Bag(parameters(SHAPES, dtype)), mesh=mesh).named_parameters())

    return make


def placed(mesh: DeviceMesh, placements_of):
    def make(dtype: torch.dtype = torch.float32):
        return {
            name: Parameter(distribute_tensor(tensor, mesh, placements_of(tensor), src_data_rank=None))
            for name, tensor in parameters(SHAPES, dtype).items()
        }

    return make


@check
def groups_of_several_dimensions(rank: int) -> None:
    """Of the whole world, of some of its ranks, and of a mesh that isn't the whole world."""
    halves = torch.arange(4).view(2, 2, 1)
    stage = halves[rank // 2 : rank // 2 + 1]
    for mesh, dims, members in ((halves[:, :, 0], [0, 1], 4), (halves, [1, 2], 2), (stage, [0, 1], 2)):
        group = layout._group(SimpleNamespace(mesh=mesh), dims)
        total = torch.tensor(rank)
        dist.all_reduce(total, group=group)
        assert total == (6 if members == 4 else 1 if rank < 2 else 5)


@check
def ddp(rank: int) -> None:
    def make(dtype: torch.dtype = torch.float32):
        return {name: Parameter(tensor) for name, tensor in parameters(SHAPES, dtype).items()}

    assert_trains_the_same(make, as_it_is, dist.group.WORLD)


@check
def fsdp_on_four_ranks(rank: int) -> None:
    assert_trains_the_same(sharded(init_device_mesh("cpu", (4,))), as_param)


@check
def fsdp_on_three_ranks(rank: int) -> None:
    mesh = DeviceMesh("cpu", [0, 1, 2])
    if rank < 3:
        assert_trains_the_same(sharded(mesh), as_param)


@check
def hsdp(rank: int) -> None:
    assert_trains_the_same(sharded(init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))), as_param)


@check
def column_parallel(rank: int) -> None:
    assert_trains_the_same(placed(init_device_mesh("cpu", (4,)), lambda tensor: [Shard(0)]), as_param)


@check
def row_parallel(rank: int) -> None:
    mesh = init_device_mesh("cpu", (4,))
    assert_trains_the_same(placed(mesh, lambda tensor: [Shard(tensor.ndim - 1)]), as_param)


@check
def two_ways_at_once(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2))
    assert_trains_the_same(placed(mesh, lambda tensor: [Shard(0), Shard(tensor.ndim - 1)]), as_param)


@check
def replicated_on_a_mesh(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2))
    assert_trains_the_same(placed(mesh, lambda tensor: [Replicate(), Replicate()]), as_param)


@check
def sharded_experts_of_replicas(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2))
    assert_trains_the_same(placed(mesh, lambda tensor: [Shard(0), Replicate()]), as_param)


@check
def data_parallel_model(rank: int) -> None:
    """A model and its gradients as DistributedDataParallel has them, on each rank's part of the batch."""
    model, reference = network(), network()
    parallel = DistributedDataParallel(model)
    inputs = torch.randn(8, 12, generator=torch.Generator().manual_seed(1))
    optimizers = Muon(matrices(model), lr=0.05, distributed_group=dist.group.WORLD), Muon(matrices(reference), lr=0.05)
    for _ in range(STEPS):
        step(parallel, optimizers[0], inputs.chunk(4)[rank])
        step(reference, optimizers[1], inputs)
    for found, expected in zip(model.parameters(), reference.parameters(), strict=True):
        assert_close(found, expected, "weight")
    state, expected = (optimizer.state_dict()["state"] for optimizer in optimizers)
    assert state.keys() == expected.keys()
    for index in state:
        assert_close(state[index]["momentum_buffer"], expected[index]["momentum_buffer"], "momentum")


@check
def tensor_parallel_and_sharded_model(rank: int) -> None:
    """Column- and row-parallel layers, then ``fully_shard``, whose placements are strided."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    model, reference = network(), network()
    parallelize_module(model, mesh["tensor"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    fully_shard(model, mesh=mesh["data"])
    placements = [str(p.placements) for p in model.parameters()]
    assert any("StridedShard" in text for text in placements), placements
    inputs = torch.randn(8, 12, generator=torch.Generator().manual_seed(1))
    optimizers = [Muon(matrices(m), lr=0.05, neuron_norm=0.9) for m in (model, reference)]
    for _ in range(STEPS):
        step(model, optimizers[0], inputs.chunk(2)[mesh.get_coordinate()[0]])
        step(reference, optimizers[1], inputs)
    for found, expected in zip(model.parameters(), reference.parameters(), strict=True):
        assert_close(whole(found), expected, "weight")


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(12, 16, bias=False), nn.GELU(), nn.Linear(16, 8, bias=False))


def matrices(model: nn.Module) -> list[dict[str, Any]]:
    first, second = model.parameters()
    return [{"params": [first], "split": (6, 10)}, {"params": [second]}]


def step(model: nn.Module, optimizer: Muon, inputs: torch.Tensor) -> None:
    model(inputs).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


@check
def gradients_that_some_ranks_lack(rank: int) -> None:
    """A gradient that is None on one rank updates nobody; afterwards all go on as if that step had not been."""
    mesh = init_device_mesh("cpu", (2, 2))
    makes = [
        (dist.group.WORLD, lambda: {name: Parameter(tensor) for name, tensor in parameters(SHAPES).items()}, as_it_is),
        (None, sharded(init_device_mesh("cpu", (4,))), as_param),
        (None, placed(mesh, lambda tensor: [Replicate(), Shard(0)]), as_param),
    ]
    missing = {"wide": 2, "qkv": 0, "column": 3, "gates": 1}
    expected = {name: Parameter(tensor) for name, tensor in parameters(SHAPES).items()}
    reference = make_optimizer(expected)
    for turn in range(3):
        for name, grad in gradients(SHAPES, turn).items():
            expected[name].grad = None if turn == 1 and name in missing else grad
        reference.step()
    for group, make, place in makes:
        params = make()
        optimizer = make_optimizer(params, group)
        for turn in range(3):
            for name, grad in gradients(SHAPES, turn).items():
                is_missing = turn == 1 and missing.get(name) == rank
                params[name].grad = None if is_missing else place(params)(name, grad)
            optimizer.step()
        for name, p in expected.items():
            assert_close(whole(params[name].detach()), p.detach(), name)


@check
def gradients_of_adamw_that_a_rank_lacks(rank: int) -> None:
    """Replicas went apart: a rank with a gradient updated its bias, one without didn't."""
    weight, bias = Parameter(torch.eye(4)), Parameter(torch.zeros(4))
    groups = [{"params": [weight]}, {"params": [bias], "algorithm": "adamw"}]
    optimizer = Muon(groups, lr=0.1, distributed_group=dist.group.WORLD)
    weight.grad, bias.grad = torch.ones(4, 4), None if rank == 1 else torch.ones(4)
    optimizer.step()
    assert not bias.any()
    bias.grad = torch.ones(4)
    optimizer.step()
    assert bias.all()


@check
def gradients_that_all_ranks_lack(rank: int) -> None:
    params = sharded(init_device_mesh("cpu", (4,)))()
    optimizer = make_optimizer(params)
    before = {name: whole(p.detach()).clone() for name, p in params.items()}
    optimizer.step()
    assert not optimizer.state
    for name, p in params.items():
        assert torch.equal(whole(p.detach()), before[name])


@check
def partial_gradients(rank: int) -> None:
    """Gradients that are yet to be summed, as those of replicated parameters may be."""
    mesh = init_device_mesh("cpu", (4,))
    params = placed(mesh, lambda tensor: [Replicate()])()
    optimizer = make_optimizer(params)

    def part(name: str, grad: torch.Tensor) -> torch.Tensor:
        return DTensor.from_local(grad / 4, mesh, [Partial()], run_check=False)

    train(params, optimizer, range(STEPS), part)
    assert_same(params, optimizer)


@check
def plain_and_sharded_parameters_in_one_group(rank: int) -> None:
    mesh = init_device_mesh("cpu", (4,))
    split, plain = placed(mesh, lambda tensor: [Shard(0)])(), parameters(SHAPES)
    params = {name: Parameter(plain[name]) if i % 2 else p for i, (name, p) in enumerate(split.items())}
    assert isinstance(params["row"], DTensor) != isinstance(params["tall"], DTensor)

    def place(name: str, grad: torch.Tensor) -> torch.Tensor:
        return as_param(params)(name, grad) if isinstance(params[name], DTensor) else grad

    groups = [{"params": [params["wide"], params["tall"]]}]
    groups += [{"params": [params["row"], params["column"]], "algorithm": "adamw", "bf16_remainder": True}]
    expected = {name: Parameter(tensor) for name, tensor in plain.items()}
    alike = [{"params": [expected["wide"], expected["tall"]]}]
    alike += [{"params": [expected["row"], expected["column"]], "algorithm": "adamw"}]
    optimizers = Muon(groups, lr=0.1, distributed_group=dist.group.WORLD), Muon(alike, lr=0.1)
    train(params, optimizers[0], range(STEPS), place)
    train(expected, optimizers[1], range(STEPS))
    for name, p in expected.items():
        assert_close(whole(params[name].detach()), p.detach(), name)


@check
def mesh_whose_ranks_descend(rank: int) -> None:
    params = placed(DeviceMesh("cpu", [3, 2, 1, 0]), lambda tensor: [Shard(0)])()
    with pytest.raises(NotImplementedError, match="ascend"):
        train(params, make_optimizer(params), range(1), as_param(params))


@check
def metrics(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
    params = sharded(mesh)()
    for group in (None, dist.group.WORLD):
        optimizer = make_optimizer(params, group, neuron_norm=0.9)
        train(params, optimizer, range(2), as_param(params) if group is None else as_it_is(params))
        _, reference = alone(steps=range(2), neuron_norm=0.9)
        found, expected = optimizer.metrics(), reference.metrics()
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            assert math.isclose(found[name], value, rel_tol=1e-4, abs_tol=1e-6), (name, found[name], value)
        params = {name: Parameter(tensor) for name, tensor in parameters(SHAPES).items()}


@check
def qk_clip(rank: int) -> None:
    """Fused weights and biases, sharded across heads, against the same layer on one process."""
    torch.manual_seed(0)
    reference = SelfAttention(48, 6, 2, bias=True, max_logits=True)
    with torch.no_grad():
        reference.qkv.bias.normal_()
    state = {name: tensor.clone() for name, tensor in reference.state_dict().items()}
    hsdp = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
    logits = torch.tensor([50.0, 150.0, -1.0, 99.0, 1e4, math.inf])
    for mesh in (None, init_device_mesh("cpu", (4,)), hsdp):
        layer = SelfAttention(48, 6, 2, bias=True, max_logits=True)
        layer.load_state_dict(state)
        if mesh is None:
            reference = layer
        else:
            fully_shard(layer, mesh=mesh)
        optimizer = torch.optim.SGD(layer.parameters(), lr=1.0)
        clip = QKClip(layer, optimizer)
        optimizer.step()  # before any forward pass
        layer.max_logits = logits.clone() if rank == 2 else torch.full_like(logits, -math.inf)
        optimizer.step()
        assert clip.num_clipped == 2
        for (name, found), expected in zip(layer.named_parameters(), reference.parameters(), strict=True):
            assert_close(whole(found.detach()), expected.detach(), name)
        assert not torch.equal(whole(layer.qkv.weight.detach()), state["qkv.weight"])


@check
def checkpoints(rank: int) -> None:
    """Saved by two ranks, loaded by three; the test loads what they save into one process."""
    folder = shared_folder()
    for ranks, load, save, steps in ((2, None, "two", range(2)), (3, "two", "three", range(2, 4))):
        group = dist.new_group(range(ranks))
        mesh = DeviceMesh("cpu", list(range(ranks)))
        if rank < ranks:
            model = saved_model()
            fully_shard(model, mesh=mesh)
            optimizer = optimizer_of_saved(model)
            if load:
                load_checkpoint(model, optimizer, folder / load, group)
            train_saved(model, optimizer, steps, as_param(dict(model.named_parameters())))
            state = {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer)}
            dcp.save(state, checkpoint_id=folder / save, process_group=group)
        dist.barrier()


def shared_folder() -> Path:
    """The file store's, which all ranks see."""
    return Path(os.environ["MUON_TEST_FOLDER"])


@check
def bytes_sent(rank: int) -> None:
    """Counted at the collectives, to other ranks, against the model; and never more than a reduction's."""
    even = {"wide": (8, 16), "tall": (16, 8), "other": (8, 16), "last": (16, 8)}
    hsdp = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
    fsdp = init_device_mesh("cpu", (4,))
    makes = [(4, 1, None, dist.group.WORLD), (1, 4, fsdp, None), (2, 2, hsdp, None)]
    for replicas, shards, mesh, group in makes:
        for shapes in (even, {name: shape for name, shape in SHAPES.items() if len(shape) > 1 and shape[0]}):
            model = Bag(parameters(shapes))
            if mesh is not None:
                fully_shard(model, mesh=mesh)
            params = dict(model.named_parameters())
            optimizer = make_optimizer(params, group)
            with counted() as sent:
                train(params, optimizer, range(1), as_it_is(params) if mesh is None else as_param(params))
            elements = sum(math.prod(shape) for shape in shapes.values())
            total = torch.tensor(sent["elements"])
            dist.all_reduce(total)
            assert 0 < total <= 4 * elements_of_a_reduction(elements, 4)
            assert sent["bytes"] <= 2 * len(params)  # a byte in each dimension of the mesh: who has a gradient
            if shapes is even:
                assert sent["elements"] == elements_sent(elements, replicas, shards), (mesh, sent)


@contextmanager
def counted():
    """Elements that this rank sends to others in the optimizer's collectives, and the bytes of its all-reduces."""
    sent = {"elements": 0, "bytes": 0, "exchanges": 0}
    all_to_all, gather, broadcast, reduce = (
        dist.all_to_all_single, exchange.all_gather, dist.broadcast, dist.all_reduce,
    )  # fmt: skip

    def count_exchange(out, given, by, to, group, async_op):
        sent["exchanges"] += 1
        sent["elements"] += sum(to) - to[dist.get_rank(group)]
        return all_to_all(out, given, by, to, group=group, async_op=async_op)

    def count_gather(out, given, group, async_op):
        sent["elements"] += given.numel() * (dist.get_world_size(group) - 1)
        return gather(out, given, group=group, async_op=async_op)

    def count_broadcast(given, group, group_src, async_op):
        if dist.get_rank(group) == group_src:
            sent["elements"] += given.numel() * (dist.get_world_size(group) - 1)
        return broadcast(given, group=group, group_src=group_src, async_op=async_op)

    def count_reduce(given, op, group):
        sent["bytes"] += given.nbytes
        return reduce(given, op, group=group)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "all_to_all_single", count_exchange)
        patch.setattr(exchange, "all_gather", count_gather)
        patch.setattr(dist, "broadcast", count_broadcast)
        patch.setattr(dist, "all_reduce", count_reduce)
        yield sent


@check
def memory_of_the_gather(rank: int) -> None:
    """Bounded by ``workspace``, in which one matrix a rank always has room."""
    shapes = {f"matrix{i}": (32, 48) for i in range(48)}
    one = 48 * 32 * 4
    peaks = {}
    for group, mesh in ((dist.group.WORLD, None), (None, init_device_mesh("cpu", (4,)))):
        for workspace in (None, 4 * 24 * one):
            model = Bag(parameters(shapes))
            if mesh is not None:
                fully_shard(model, mesh=mesh)
            params = dict(model.named_parameters())
            optimizer = make_optimizer(params, group, workspace=workspace, ns_steps=1)
            place = as_it_is(params) if mesh is None else as_param(params)
            train(params, optimizer, range(1), place)
            for name, grad in gradients(shapes, 1).items():
                params[name].grad = place(name, grad)
            with Allocations() as counter:
                optimizer.step()
            peaks[workspace is None] = counter.peak
        assert peaks[False] <= 4 * 24 * one + 4096, (mesh, peaks)
        assert peaks[False] < peaks[True], (mesh, peaks)


def die_in_a_step(rank: int) -> None:
    """The second rank is killed while the others wait for its share."""
    params = {name: Parameter(tensor) for name, tensor in parameters(SHAPES).items()}
    optimizer = make_optimizer(params, dist.group.WORLD)
    train(params, optimizer, range(1))
    if rank == 1:
        exchange.iterate = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    train(params, optimizer, range(1, 3))


@check
def blocks_of_the_docs(rank: int) -> None:
    """Each in a model of its own, which then takes a step."""
    page = (ROOT / "docs" / "distributed.md").read_text()
    blocks = re.findall(r"^```py\n(.*?)^```\n", page, re.MULTILINE | re.DOTALL)
    assert len(blocks) == 2
    for code in blocks:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(8, 16), nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 8))
        model.layers = [model[1], model[2]]
        names = {"model": model}
        exec(compile(code, "distributed.md", "exec"), names)
        names.get("parallel", model)(torch.arange(8)).square().sum().backward()
        before = [whole(p.detach()).clone() for p in model.parameters()]
        names["optimizer"].step()
        assert all(not torch.equal(whole(p.detach()), b) for p, b in zip(model.parameters(), before, strict=True))
        assert len(names["optimizer"]._engine.layouts) == 1


@check
def whole_matrices_send_nothing(rank: int) -> None:
    """Experts sharded by experts, and blocks of a split whose boundaries are those of shards."""
    shapes = {"experts": (8, 4, 6), "heads": (16, 6)}
    params = dict(fully_shard(Bag(parameters(shapes)), mesh=init_device_mesh("cpu", (4,))).named_parameters())
    expected = {name: Parameter(tensor) for name, tensor in parameters(shapes).items()}
    optimizers = [
        Muon([{"params": [p["experts"]]}, {"params": [p["heads"]], "split": 8}], lr=0.1, neuron_norm=0.9)
        for p in (params, expected)
    ]
    with counted() as sent:
        train(params, optimizers[0], range(STEPS), as_param(params))
    assert sent["elements"] == sent["exchanges"] == 0
    train(expected, optimizers[1], range(STEPS))
    for name, p in expected.items():
        assert_close(whole(params[name].detach()), p.detach(), name)


@check
def benchmark_of_a_step(rank: int) -> None:
    rows = distributed_step.measure("small", [(24, 8), (8, 8)], torch.float32, torch.device("cpu"), rounds=2)
    assert [row["layout"] for row in rows] == ["torch", "alone", "DDP", "FSDP", "HSDP"]
    assert all(0 < row["lowest_ms"] <= row["ms"] and row["ranks"] == 4 for row in rows)


@check
def benchmark_of_training(rank: int) -> None:
    """The same steps by all and by one, and so the same losses; the first process has the figures of both."""
    preset = replace(PRESETS["cpu"], layers=1, heads=2, width=16, context=16, batch=4, dtype="float32")
    corpus = data.load(ROOT / "README.md", preset.context)
    ranks = Ranks(rank, 4)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(distributed_training, "TOKENS_A_TURN", 512)
        measured = partial(distributed_training.measure, preset, corpus, torch.device("cpu"), ranks)
        rows = list(measured(tokens=[256, 512], rounds=2))
    if rank:
        assert [row["gpus"] for row in rows] == [4] * 4
        return
    assert [row["gpus"] for row in rows] == [1, 4] * 4
    assert [row["step"] for row in rows] == [4, 4, 6, 6, 7, 7, 8, 8]
    for one, shared in zip(rows[::2], rows[1::2], strict=True):
        assert math.isclose(one["loss"], shared["loss"], rel_tol=1e-4)
    table = distributed_training.medians(rows)
    assert [(row["tokens_per_step"], row["gpus"]) for row in table] == [(256, 1), (256, 4), (512, 1), (512, 4)]
    assert all(row["times_one"] == 1 for row in table[::2])
