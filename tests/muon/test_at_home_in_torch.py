"""Muon with what torch puts around an optimizer: checkpoints, schedulers, scalers, averages, edited groups."""

import copy
import io

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.optim import lr_scheduler
from torch.optim.swa_utils import SWALR, AveragedModel, get_ema_multi_avg_fn

from muon import Muon, orthogonalize, param_groups

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


class Model(nn.Module):
    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(12, 8)
        self.up, self.down = nn.Linear(8, 16, bias=False), nn.Linear(16, 8)
        self.norm = nn.LayerNorm(8)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        return self.norm(x + self.down(self.up(x).relu())) @ self.embed.weight.mT


def build(seed: int = 0, **muon) -> tuple[Model, Muon]:
    model = Model(seed)
    groups = param_groups(model, muon={"lr": 0.02, **muon}, adamw={"lr": 0.003, "betas": (0.8, 0.95)})
    assert [group["algorithm"] for group in groups] == ["muon", "adamw"]
    return model, Muon(groups)


def loss_of(model: nn.Module, seed: int) -> torch.Tensor:
    tokens = torch.randint(12, (6, 5), generator=torch.Generator().manual_seed(seed))
    return nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.roll(1, 1).flatten())


def train(model: nn.Module, optimizer: torch.optim.Optimizer, seeds=range(3)) -> None:
    for seed in seeds:
        optimizer.zero_grad()
        loss_of(model, seed).backward()
        optimizer.step()


def assert_same(a: nn.Module, b: nn.Module) -> None:
    for (name, p), q in zip(a.named_parameters(), b.parameters(), strict=True):
        assert torch.equal(p, q), name


# Checkpoints exchanged with torch.optim.Muon


def gradients(params, seed):
    generator = torch.Generator().manual_seed(seed)
    for p in params:
        p.grad = torch.randn(p.shape, generator=generator, dtype=p.dtype)


def steps(optimizer, params, seeds):
    for seed in seeds:
        gradients(params, seed)
        optimizer.step()


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize(("first", "second"), [(Muon, torch.optim.Muon), (torch.optim.Muon, Muon)])
def test_a_run_moves_between_torchs_muon_and_ours(monkeypatch, first, second, dtype):
    """With the same orthogonalisation the rest is the same: to float64's rounding, or bfloat16's."""
    monkeypatch.setattr("torch.optim._muon._zeropower_via_newtonschulz", orthogonalize)
    start = [torch.randn(8, 24, dtype=dtype), torch.randn(24, 8, dtype=dtype)]

    def copies():
        return [p.clone().requires_grad_() for p in start]

    def groups(params):
        return [{"params": params[:1], "lr": 0.05, "nesterov": False}, {"params": params[1:], "weight_decay": 0.3}]

    stayed, moved = copies(), copies()
    staying, moving = second(groups(stayed)), first(groups(moved))
    steps(staying, stayed, range(3))
    steps(moving, moved, range(3))
    file = io.BytesIO()
    torch.save(moving.state_dict(), file)
    file.seek(0)
    arrived = second([{"params": moved[:1]}, {"params": moved[1:]}], lr=9.0)
    arrived.load_state_dict(torch.load(file, weights_only=True))
    steps(staying, stayed, range(3, 6))
    steps(arrived, moved, range(3, 6))
    assert [group["lr"] for group in arrived.param_groups] == [0.05, 1e-3]
    for p, q in zip(moved, stayed, strict=True):
        tolerance = 1e-12 if dtype == torch.float64 else 3 * 6 * torch.finfo(dtype).eps * q.abs().max().item()
        torch.testing.assert_close(p, q, rtol=0, atol=tolerance)
        assert arrived.state[p].keys() == {"momentum_buffer"} and arrived.state[p]["momentum_buffer"].dtype == dtype


# torch.distributed.checkpoint, in one process


@pytest.mark.parametrize("options", [{}, {"flatten_optimizer_state_dict": True}, {"full_state_dict": True}], ids=str)
@pytest.mark.parametrize("stepped", [False, True])
def test_a_distributed_checkpoint_resumes_to_the_bit(tmp_path, options, stepped):
    options = StateDictOptions(**options)
    muon = {"split": 2, "ns_coefficients": ((2.0, -1.5, 0.5), (1.5, -0.5, 0.0))}
    model, optimizer = build(**muon)
    train(model, optimizer)
    for group in optimizer.param_groups:
        group["lr"] *= 0.5
    state = {"model": get_model_state_dict(model), "optim": get_optimizer_state_dict(model, optimizer, options=options)}
    dcp.save(state, checkpoint_id=tmp_path, no_dist=True)

    other, second = build(seed=1)
    second.param_groups[0].update(muon)  # torch loads into options of the same structure
    if stepped:  # what is loaded into has state already, or torch makes some by a step with zero gradients
        train(other, second, range(1))
    before = [p.detach().clone() for p in other.parameters()]
    state = {"model": get_model_state_dict(other), "optim": get_optimizer_state_dict(other, second, options=options)}
    assert all(torch.equal(p, old) for p, old in zip(other.parameters(), before, strict=True))
    dcp.load(state, checkpoint_id=tmp_path, no_dist=True)
    set_model_state_dict(other, state["model"])
    set_optimizer_state_dict(other, second, state["optim"], options=options)
    assert [(group["algorithm"], group["lr"]) for group in second.param_groups] == [("muon", 0.01), ("adamw", 0.0015)]
    train(model, optimizer, range(3, 6))
    train(other, second, range(3, 6))
    assert_same(model, other)


def test_a_distributed_checkpoint_of_the_plain_state_dict_resumes_to_the_bit(tmp_path):
    model, optimizer = build()
    train(model, optimizer)
    dcp.save({"model": model.state_dict(), "optim": optimizer.state_dict()}, checkpoint_id=tmp_path, no_dist=True)
    other, second = build(seed=1)
    train(other, second, range(1))
    state = {"model": other.state_dict(), "optim": second.state_dict()}
    dcp.load(state, checkpoint_id=tmp_path, no_dist=True)
    other.load_state_dict(state["model"])
    second.load_state_dict(state["optim"])
    train(model, optimizer, range(3, 6))
    train(other, second, range(3, 6))
    assert_same(model, other)


@pytest.mark.parametrize("distributed", [False, True])
def test_a_function_of_the_shape_stays_out_of_checkpoints(tmp_path, distributed):
    """As LambdaLR's does: a file with it would need weights_only=False, and a run that still has the function."""
    model, optimizer = build(adjust_lr_fn=lambda shape: 0.5 * max(shape) ** 0.5)
    train(model, optimizer)
    other, second = build(seed=1, adjust_lr_fn=optimizer.param_groups[0]["adjust_lr_fn"])
    other.load_state_dict(model.state_dict())
    if distributed:
        dcp.save({"optim": get_optimizer_state_dict(model, optimizer)}, checkpoint_id=tmp_path, no_dist=True)
        state = {"optim": get_optimizer_state_dict(other, second)}
        dcp.load(state, checkpoint_id=tmp_path, no_dist=True)
        set_optimizer_state_dict(other, second, state["optim"])
    else:
        torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
        second.load_state_dict(torch.load(tmp_path / "optimizer.pt", weights_only=True))
    train(model, optimizer, range(3, 5))
    train(other, second, range(3, 5))
    assert_same(model, other)


def test_a_load_that_fails_leaves_no_hooks_behind():
    _, optimizer = build()
    state = optimizer.state_dict()
    with pytest.raises(ValueError, match="different number of parameter groups"):
        optimizer.load_state_dict({**state, "param_groups": state["param_groups"][:1]})
    assert not optimizer._optimizer_load_state_dict_pre_hooks and not optimizer._optimizer_load_state_dict_post_hooks


def test_a_checkpoint_of_torch_optim_muon_through_torch_distributed_checkpoint(tmp_path):
    model = nn.Sequential(nn.Linear(8, 16, bias=False), nn.Linear(16, 8, bias=False))
    theirs = torch.optim.Muon(model.parameters(), lr=0.02)
    gradients(model.parameters(), 0)
    theirs.step()
    expected = [theirs.state[p]["momentum_buffer"] for p in model.parameters()]
    theirs.zero_grad()
    dcp.save({"optim": get_optimizer_state_dict(model, theirs)}, checkpoint_id=tmp_path, no_dist=True)
    ours = Muon(model.parameters(), lr=9.0)
    state = {"optim": get_optimizer_state_dict(model, ours)}
    partial = DefaultLoadPlanner(allow_partial_load=True)  # it lacks the options that are ours alone
    dcp.load(state, checkpoint_id=tmp_path, no_dist=True, planner=partial)
    set_optimizer_state_dict(model, ours, state["optim"])
    assert ours.param_groups[0]["lr"] == 0.02 and ours.param_groups[0]["algorithm"] == "muon"
    for p, momentum in zip(model.parameters(), expected, strict=True):
        assert torch.equal(ours.state[p]["momentum_buffer"], momentum)


# Schedulers over Muon and AdamW groups


def learning_rates(optimizer):
    return [float(group["lr"]) for group in optimizer.param_groups]


def test_a_schedule_scales_every_group_by_its_own_learning_rate():
    model, optimizer = build()
    factors = [1.0, 0.5, 0.25]
    scheduler = lr_scheduler.LambdaLR(optimizer, lambda step: factors[min(step, 2)])
    for factor in factors:
        assert learning_rates(optimizer) == [0.02 * factor, 0.003 * factor]
        train(model, optimizer, range(1))
        scheduler.step()


def test_a_schedule_a_group():
    _, optimizer = build()
    lr_scheduler.LambdaLR(optimizer, [lambda step: 0.5, lambda step: 1.0])
    assert learning_rates(optimizer) == [0.01, 0.003]


@pytest.mark.parametrize("scheduler", ["OneCycleLR", "CyclicLR"])
def test_cycling_momentum_moves_muons_momentum_and_leaves_adamws_betas(scheduler):
    model, optimizer = build()
    twin = Model()
    hidden = [twin.up.weight, twin.down.weight]
    rest = [p for p in twin.parameters() if not any(p is q for q in hidden)]
    alone = Muon(hidden, lr=0.02), torch.optim.AdamW(rest, lr=0.003, betas=(0.8, 0.95), weight_decay=0.1, fused=True)

    def schedulers(optimizer, *lrs, **options):
        if scheduler == "OneCycleLR":
            return lr_scheduler.OneCycleLR(optimizer, max_lr=list(lrs), total_steps=8, **options)
        low = [lr / 10 for lr in lrs]
        return lr_scheduler.CyclicLR(optimizer, base_lr=low, max_lr=list(lrs), step_size_up=3, **options)

    both = [schedulers(optimizer, 0.1, 0.01)]
    apart = [schedulers(alone[0], 0.1), schedulers(alone[1], 0.01, cycle_momentum=False)]
    momentums = []
    for seed in range(7):
        train(model, optimizer, [seed])
        twin.zero_grad()
        loss_of(twin, seed).backward()
        for one in alone:
            one.step()
        for one in (*both, *apart):
            one.step()
        momentums.append(optimizer.param_groups[0]["momentum"])
        assert optimizer.param_groups[1]["betas"] == (0.8, 0.95)
        assert momentums[-1] == alone[0].param_groups[0]["momentum"]
    assert len(set(momentums)) > 3
    assert_same(model, twin)


def test_reduce_on_plateau_and_minima_a_group():
    _, optimizer = build()
    scheduler = lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.1, patience=0, min_lr=[0.01, 0.0])
    for _ in range(3):
        scheduler.step(1.0)
    assert learning_rates(optimizer) == pytest.approx([0.01, 0.003 * 0.1**2])


def test_schedulers_in_a_row_resume_with_the_optimizer():
    def schedule(optimizer):
        warmup, decay = (
            lr_scheduler.LinearLR(optimizer, 0.1, total_iters=2),
            lr_scheduler.CosineAnnealingLR(optimizer, 6),
        )
        return lr_scheduler.SequentialLR(optimizer, [warmup, decay], milestones=[2])

    model, optimizer = build()
    scheduler = schedule(optimizer)
    for seed in range(3):
        train(model, optimizer, [seed])
        scheduler.step()
    other, second = build(seed=1)
    follower = schedule(second)
    other.load_state_dict(model.state_dict())
    second.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    follower.load_state_dict(scheduler.state_dict())
    for seed in range(3, 6):
        train(model, optimizer, [seed])
        train(other, second, [seed])
        scheduler.step()
        follower.step()
        assert learning_rates(optimizer) == learning_rates(second)
    assert_same(model, other)


def test_averages_of_the_weights():
    model, optimizer = build()
    averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    expected = [p.detach().clone() for p in model.parameters()]
    scheduler = SWALR(optimizer, swa_lr=[0.002, 0.0003], anneal_epochs=2)
    for step in range(4):
        train(model, optimizer, [step])
        averaged.update_parameters(model)
        scheduler.step()
        for mean, p in zip(expected, model.parameters(), strict=True):
            mean.copy_(p.detach() if step == 0 else 0.5 * mean + 0.5 * p.detach())
    for mean, p in zip(expected, averaged.parameters(), strict=True):
        torch.testing.assert_close(mean, p.detach())
    assert learning_rates(optimizer) == pytest.approx([0.002, 0.0003])


# Groups edited between steps


def test_options_edited_between_steps_hold_from_the_next_step_on():
    edits = [{"lr": 0.05}, {"weight_decay": 0.0}, {"split": 2}, {"ns_steps": 3}, {"nesterov": False}, {"split": None},
             {"ns_coefficients": "polar_express", "ns_steps": 5}, {"adjust_lr_fn": "match_rms_adamw"}]  # fmt: skip
    model, optimizer = build()
    for seed, edit in enumerate(edits):
        optimizer.param_groups[0].update(edit)
        twin = Model()
        twin.load_state_dict(model.state_dict())
        hidden = [twin.up.weight, twin.down.weight]
        options = {
            name: optimizer.param_groups[0][name] for name in ("lr", "weight_decay", "split", "ns_steps", "nesterov")
        }
        options |= {name: optimizer.param_groups[0][name] for name in ("ns_coefficients", "adjust_lr_fn")}
        fresh = Muon(hidden, **options)  # built with the options from the start, and given the momentum
        for p, q in zip(hidden, (model.up.weight, model.down.weight), strict=True):
            if q in optimizer.state:
                fresh.state[p]["momentum_buffer"] = optimizer.state[q]["momentum_buffer"].clone()
        loss_of(twin, seed).backward()
        fresh.step()
        train(model, optimizer, [seed])
        assert torch.equal(model.up.weight, twin.up.weight) and torch.equal(model.down.weight, twin.down.weight), edit


def test_frozen_layers_stay_and_thawed_ones_take_up_their_momentum():
    model, optimizer = build()
    train(model, optimizer, [0])
    momentum = optimizer.state[model.up.weight]["momentum_buffer"].clone()
    model.up.requires_grad_(False)
    old = model.up.weight.detach().clone()
    train(model, optimizer, [1])
    assert torch.equal(model.up.weight, old)
    model.up.requires_grad_(True)
    loss_of(model, 2).backward()
    gradient = model.up.weight.grad.clone()
    optimizer.step()
    assert not torch.equal(model.up.weight, old)
    torch.testing.assert_close(optimizer.state[model.up.weight]["momentum_buffer"], 0.95 * momentum + 0.05 * gradient)


def test_a_layer_added_and_a_parameter_replaced_in_its_group():
    """Progressive growing adds a group; FSDP2 under Accelerate puts other tensors into the groups that there are."""
    model, optimizer = build()
    train(model, optimizer)
    model.extra = nn.Linear(8, 8)
    optimizer.add_param_group({"params": [("extra.weight", model.extra.weight)], "lr": 0.1})
    optimizer.add_param_group({"params": [("extra.bias", model.extra.bias)], "algorithm": "adamw"})
    assert [group["algorithm"] for group in optimizer.param_groups] == ["muon", "adamw", "muon", "adamw"]
    for p in model.extra.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    assert model.extra.weight in optimizer.state

    replaced = nn.Parameter(torch.randn(32, 8))
    optimizer.param_groups[0]["params"][0] = replaced
    old = replaced.detach().clone()
    replaced.grad = torch.ones_like(replaced)
    optimizer.step()
    assert not torch.equal(replaced, old) and optimizer.state[replaced]["momentum_buffer"].shape == (32, 8)


# Mixed precision, closures


@pytest.mark.parametrize("algorithm", ["muon", "adamw"])
def test_an_overflow_under_a_grad_scaler_leaves_weights_and_state_alone(algorithm):
    weight = torch.randn(4, 6)
    p, q = weight.clone().requires_grad_(), weight.clone().requires_grad_()
    optimizer, twin = (Muon([{"params": [x], "algorithm": algorithm}], lr=0.1) for x in (p, q))
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=1000)
    for step, overflows in enumerate((True, False, True, False)):
        before, state = p.detach().clone(), copy.deepcopy(optimizer.state_dict())
        gradient = torch.randn(4, 6, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        scaler.scale((p * gradient).sum()).backward()
        if overflows:
            p.grad[0, 0] = float("inf")
        else:
            q.grad = gradient
            twin.step()
        scaler.step(optimizer)
        scaler.update()
        if overflows:
            assert torch.equal(p, before)
            for old, new in zip(state["state"].values(), optimizer.state_dict()["state"].values(), strict=True):
                assert all(torch.equal(old[key], new[key]) for key in old)
        torch.testing.assert_close(p, q)
    assert scaler.get_scale() == 2.0


def test_a_closure_sees_gradients_enabled_and_its_loss_comes_back():
    model, optimizer = build()
    found = []

    def closure():
        assert torch.is_grad_enabled()
        optimizer.zero_grad()
        loss = loss_of(model, 0)
        loss.backward()
        found.append(loss)
        return loss

    with torch.no_grad():
        assert optimizer.step(closure) is found[0]
    assert optimizer.step(closure) < found[0]


# Settings of the process


@pytest.mark.parametrize("kernels", [False, True])
@pytest.mark.parametrize("setting", ["bfloat16", "device"])
def test_torchs_default_dtype_and_device_change_nothing(monkeypatch, kernels, setting):
    """With bfloat16 as default the planned step rounded learning rates to it, and 1 - lr * weight_decay became 1."""
    if kernels:
        pytest.importorskip("triton", reason="kernels need triton, which is for Linux only")
        monkeypatch.setattr("muon.optimizer.uses_triton", lambda backend, tensor: True)
    device = "cuda" if kernels and torch.cuda.is_available() else "cpu"
    weights = torch.randn(2, 12, 20, device=device), torch.randn(2, 7, device=device)
    results = []
    for default in ("none", setting):
        params = [weight[0].clone().requires_grad_() for weight in weights]
        for p, weight in zip(params, weights, strict=True):
            p.grad = weight[1].clone()
        with torch.device("meta" if default == "device" else "cpu"):
            torch.set_default_dtype(torch.bfloat16 if default == "bfloat16" else torch.float32)
            try:
                optimizer = Muon([{"params": params[:1]}, {"params": params[1:], "algorithm": "adamw"}], lr=0.02)
                optimizer.step()
                optimizer.step()
            finally:
                torch.set_default_dtype(torch.float32)
        results.append([p.detach() for p in params])
    for result, expected in zip(*results[::-1], strict=True):
        assert torch.equal(result, expected)
