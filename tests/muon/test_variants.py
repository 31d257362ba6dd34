"""Options of Muon beyond torch.optim.Muon's, in plain torch: against the same step written out in float64."""

import math

import pytest
import torch
from helpers.newton_schulz import truth
from hypothesis import example, given
from hypothesis import strategies as st

from muon import Muon
from muon.polynomials import KELLER_JORDAN
from muon.rounding import join, split_off

ALGORITHMS = ["muon", "adamw"]


def parameter(shape, seed=0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()


def gradient(shape, seed, dtype=torch.float64):
    return parameter(shape, 1000 + seed, dtype).detach()


def train(optimizer, params, steps=3):
    for step in range(steps):
        for i, p in enumerate(params):
            p.grad = gradient(p.shape, 10 * step + i, p.dtype)
        optimizer.step()
    return [p.detach().clone() for p in params]


def factor(rows, cols):
    return math.sqrt(max(1, rows / cols))


# Weight decay.


def test_cautious_decay_of_muon_by_hand():
    p = parameter((6, 4))
    with torch.no_grad():
        p[0, 0] = 0.0
    before = p.detach().clone()
    p.grad = gradient((6, 4), 0)
    p.grad[1] = 0.0  # what doesn't move decays
    Muon([p], lr=0.1, weight_decay=0.5, momentum=0.0, weight_decay_mode="cautious").step()
    update = truth(p.grad, KELLER_JORDAN)
    update[1] = 0.0  # to the bit
    decays = (update * before >= 0).double()
    assert 0 < decays.mean() < 1
    expected = before - 0.1 * (factor(6, 4) * update + 0.5 * decays * before)
    torch.testing.assert_close(p.detach(), expected)


@pytest.mark.parametrize("maximize", [False, True])
@pytest.mark.parametrize("foreach", [None, False, True])
def test_cautious_decay_of_adamw_by_hand(foreach, maximize):
    p = parameter((5,))
    options = {"lr": 0.1, "weight_decay": 0.5, "weight_decay_mode": "cautious", "betas": (0.8, 0.9)}
    optimizer = Muon([{"params": [p], "algorithm": "adamw", "maximize": maximize, "foreach": foreach, **options}])
    expected, m, v = p.detach().clone(), torch.zeros(5, dtype=torch.float64), torch.zeros(5, dtype=torch.float64)
    kept = 0
    for step in range(1, 5):
        p.grad = gradient((5,), step)
        optimizer.step()
        g = -p.grad if maximize else p.grad
        m, v = 0.8 * m + 0.2 * g, 0.9 * v + 0.1 * g * g
        update = m / (1 - 0.8**step) / ((v / (1 - 0.9**step)).sqrt() + 1e-8)
        kept += int((update * expected < 0).sum())
        expected = expected - 0.1 * (update + 0.5 * (update * expected >= 0) * expected)
    assert 0 < kept < 20
    torch.testing.assert_close(p.detach(), expected)


# NorMuon.


@pytest.mark.parametrize(
    ("shape", "options", "blocks"),
    [
        ((6, 4), {}, lambda t: [t]),
        ((4, 6), {}, lambda t: [t]),
        ((3, 6, 4), {}, lambda t: list(t)),
        ((12, 4), {"split": (4, 8)}, lambda t: list(t.split([4, 8]))),
        ((2, 12, 4), {"split": 2}, lambda t: [b for e in t for b in e.split(6)]),
        ((6, 2, 3, 3), {}, lambda t: [t.flatten(1)]),
        ((2, 3, 6, 4), {"matrix": "batch"}, lambda t: list(t.flatten(0, 1))),
    ],
)
def test_neuron_norm_by_hand(shape, options, blocks):
    p = parameter(shape)
    optimizer = Muon([p], lr=0.1, weight_decay=0.5, momentum=0.0, neuron_norm=0.9, **options)
    expected = [block.clone() for block in blocks(p.detach())]
    moments = [torch.zeros(len(block), 1, dtype=torch.float64) for block in expected]
    for step in range(3):
        p.grad = gradient(shape, step)
        optimizer.step()
        for i, block in enumerate(blocks(p.grad)):
            update = truth(block, KELLER_JORDAN)
            moments[i] = 0.9 * moments[i] + 0.1 * update.square().mean(1, keepdim=True)
            even = update / moments[i].sqrt()
            even = even * update.norm() / even.norm()
            expected[i] = (1 - 0.1 * 0.5) * expected[i] - 0.1 * factor(*block.shape) * even
    for result, block in zip(blocks(p.detach()), expected, strict=True):
        torch.testing.assert_close(result, block, rtol=1e-7, atol=1e-8)
    moment = optimizer.state[p]["neuron_second_moment"]
    assert moment.ndim == p.ndim and torch.broadcast_shapes(moment.shape, p.shape) == p.shape
    assert moment.numel() == sum(len(block) for block in expected)


def test_neuron_norm_of_zeros_is_zero():
    p = parameter((6, 4))
    before = p.detach().clone()
    optimizer = Muon([p], weight_decay=0.0, neuron_norm=0.9)
    for _ in range(2):
        p.grad = torch.zeros_like(p)
        optimizer.step()
    assert torch.equal(p, before) and optimizer.state[p]["neuron_second_moment"].count_nonzero() == 0


# bfloat16 and its remainder.


def nearest_bfloat16(x):
    """Of the two bfloat16 around a float32 the nearer one; of equally near ones that farther from 0."""
    lower = (x.view(torch.int32) & -0x10000).view(torch.float32)
    upper = ((x.view(torch.int32) & -0x10000) + 0x10000).view(torch.float32)
    return torch.where((x.double() - lower.double()).abs() < (upper.double() - x.double()).abs(), lower, upper)


@given(bits=st.lists(st.integers(-(2**31), 2**31 - 1), min_size=1, max_size=20))
@example([0x3F808000, 0x3F818000, 0x3F807FFF, 0x3F808001, -1, 0x7F7FFFFF, 0x7F800000, 0x7FFFFFFF, 0, -(2**31), 1])
def test_every_float32_is_a_bfloat16_and_its_remainder(bits):
    x = torch.tensor(bits, dtype=torch.int32).view(torch.float32)
    param, remainder = torch.empty(len(bits), dtype=torch.bfloat16), torch.empty(len(bits), dtype=torch.int16)
    split_off(x, param, remainder)
    again = join(param, remainder)
    assert torch.equal(again.isnan(), x.isnan()) and torch.equal(param.isnan(), x.isnan())
    assert torch.equal(again[~x.isnan()].view(torch.int32), x[~x.isnan()].view(torch.int32))
    finite = x.abs() < 3e38
    assert torch.equal(param[finite].float(), nearest_bfloat16(x[finite]))


def gradient_of(weight, seed):
    """Depends on the weights, as a gradient does, and on nothing but their bfloat16 values."""
    return (weight.float().tanh() + gradient(weight.shape, seed, torch.float32)).bfloat16()


@pytest.mark.parametrize("options", [{}, {"weight_decay_mode": "cautious"}, {"neuron_norm": 0.9}])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_bfloat16_with_a_remainder_is_float32_to_the_bit(algorithm, options):
    ours, theirs = parameter((12, 8), dtype=torch.bfloat16), parameter((12, 8), dtype=torch.bfloat16)
    theirs = theirs.detach().float().requires_grad_()
    group = {"algorithm": algorithm, "lr": 1e-3, "momentum_dtype": torch.float32, **options}
    a = Muon([{"params": [ours], "bf16_remainder": True, **group}])
    b = Muon([{"params": [theirs], **group}])
    for step in range(20):
        ours.grad = gradient_of(ours.detach(), step)
        theirs.grad = gradient_of(nearest_bfloat16(theirs.detach()), step).float()
        a.step()
        b.step()
        assert torch.equal(ours.float(), nearest_bfloat16(theirs.detach()))
    assert torch.equal(join(ours.detach(), a.state[ours]["remainder"]), theirs.detach())


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_small_updates_are_lost_without_a_remainder(algorithm):
    moved = []
    for keep in (False, True):
        p = torch.ones(8, 8, dtype=torch.bfloat16, requires_grad=True)
        lr = 1e-3 if algorithm == "muon" else 3e-4
        optimizer = Muon([{"params": [p], "algorithm": algorithm, "lr": lr, "weight_decay": 0.0, "momentum": 0.0}])
        optimizer.param_groups[0]["bf16_remainder"] = keep
        for _ in range(30):
            p.grad = torch.eye(8, dtype=torch.bfloat16) if algorithm == "muon" else torch.ones_like(p)
            optimizer.step()
        moved.append(float((1 - p.detach().diagonal()).float().mean()))
    assert moved[0] == 0 and moved[1] > 5e-3


def test_float32_parameters_need_no_remainder():
    p = parameter((4, 4), dtype=torch.float32)
    optimizer = Muon([p], bf16_remainder=True)
    train(optimizer, [p])
    assert "remainder" not in optimizer.state[p]


# Dtypes of the state.


def every_state():
    params = [parameter((6, 4), dtype=torch.bfloat16), parameter((5,), 1, torch.bfloat16)]
    options = {"momentum_dtype": torch.float32, "neuron_norm": 0.9, "bf16_remainder": True}
    return params, Muon([{"params": params[:1], **options}, {"params": params[1:], "algorithm": "adamw", **options}])


def test_all_state_survives_a_checkpoint_to_the_bit():
    params, optimizer = every_state()
    train(optimizer, params, steps=2)
    others, other = every_state()
    other.load_state_dict(optimizer.state_dict())
    for p, q in zip(params, others, strict=True):
        q.data.copy_(p.data)
        assert other.state[q].keys() == optimizer.state[p].keys()
        for name, value in optimizer.state[p].items():
            assert other.state[q][name].dtype == value.dtype and torch.equal(other.state[q][name], value)
    for p, q in zip(train(optimizer, params), train(other, others), strict=True):
        assert torch.equal(p, q)


def test_what_a_pre_hook_hands_on_is_what_is_loaded():
    params, optimizer = every_state()
    train(optimizer, params, steps=1)
    others, other = every_state()
    seen = []

    def only_double_the_momentum(_, state_dict):
        state = {i: dict(values) for i, values in state_dict["state"].items()}
        state[0]["momentum_buffer"] = 2 * state[0]["momentum_buffer"]
        return {**state_dict, "state": state}

    other.register_load_state_dict_pre_hook(only_double_the_momentum)
    other.register_load_state_dict_post_hook(lambda o: seen.append(o.state[others[0]]["momentum_buffer"].dtype))
    other.load_state_dict(optimizer.state_dict())
    momentum = other.state[others[0]]["momentum_buffer"]
    assert torch.equal(momentum, 2 * optimizer.state[params[0]]["momentum_buffer"]) and momentum.dtype == torch.float32
    assert seen == [torch.float32]
    other.load_state_dict(optimizer.state_dict())
    assert len(other._optimizer_load_state_dict_pre_hooks) == len(other._optimizer_load_state_dict_post_hooks) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_momentum_takes_the_dtype_it_is_told_also_from_a_checkpoint(dtype):
    p, q = parameter((6, 4), dtype=torch.float32), parameter((6, 4), dtype=torch.float32)
    first, second = Muon([p]), Muon([q], momentum_dtype=dtype)
    train(first, [p], steps=1)
    state = first.state_dict()
    del state["param_groups"][0]["momentum_dtype"]  # as from torch.optim.Muon
    second.load_state_dict(state)
    train(second, [q], steps=1)
    assert second.state[q]["momentum_buffer"].dtype == dtype


def test_steps_are_not_counted_twice_by_who_loaded_the_same_state():
    p, q = parameter((5,)), parameter((5,))
    first, second = (Muon([{"params": [r], "algorithm": "adamw"}]) for r in (p, q))
    train(first, [p], steps=1)
    second.load_state_dict(first.state_dict())
    train(second, [q], steps=1)
    assert first.state[p]["step"] == 1 and second.state[q]["step"] == 2


# How the step runs.


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_one_tensor_at_a_time_is_the_same(algorithm, monkeypatch):
    from muon.newton_schulz import iterate

    batches = []

    def recording(X, *args):
        batches.append(len(X))
        return iterate(X, *args)

    monkeypatch.setattr("muon.optimizer.iterate", recording)
    results = []
    for foreach in (None, True, False):
        params = [parameter((8, 6), i) for i in range(3)] + [parameter((2, 8, 6), 3)]
        results.append(train(Muon([{"params": params, "algorithm": algorithm, "foreach": foreach}]), params, steps=2))
    for others in results[1:]:
        for a, b in zip(results[0], others, strict=True):
            torch.testing.assert_close(a, b)
    assert batches == ([5, 5, 5, 5, 1, 1, 1, 2, 1, 1, 1, 2] if algorithm == "muon" else [])


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("workspace", 0),
        ("workspace", -1),
        ("neuron_norm", 1.0),
        ("neuron_norm", -0.1),
        ("momentum_dtype", torch.int32),
        ("momentum_dtype", "float32"),
        ("momentum_dtype", torch.float8_e4m3fn),
        ("weight_decay_mode", None),
    ],
)
def test_bad_options_are_named(name, value):
    with pytest.raises(ValueError, match=f"{name} should be .* but is: {value!r}"):
        Muon([parameter((4, 4))], **{name: value})


def test_an_overflowed_step_of_a_scaler_changes_nothing():
    p = parameter((6, 4), dtype=torch.float32)
    q = parameter((6,), dtype=torch.float32)
    optimizer = Muon([{"params": [p]}, {"params": [q], "algorithm": "adamw"}])
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)

    def step(bad):
        optimizer.zero_grad()
        scaler.scale((p * gradient(p.shape, 0, torch.float32)).sum() + q.sum()).backward()
        if bad:
            p.grad[0, 0] = float("inf")
        scaler.step(optimizer)
        scaler.update()

    step(bad=False)
    torch.testing.assert_close(p.grad, gradient(p.shape, 0, torch.float32))  # unscaled before it was used
    before = [p.detach().clone(), q.detach().clone(), optimizer.state[p]["momentum_buffer"].clone()]
    step(bad=True)
    assert scaler.get_scale() == 2.0
    for a, b in zip(before, [p, q, optimizer.state[p]["momentum_buffer"]], strict=True):
        assert torch.equal(a, b)
    step(bad=False)
    assert not torch.equal(before[0], p)


def test_a_compiled_step_is_the_step_and_compiles_once():
    import torch._dynamo.testing

    compiled = torch._dynamo.testing.CompileCounter()
    params, others = ([parameter((6, 4)), parameter((5,), 1)] for _ in range(2))
    optimizers = [Muon([{"params": [p]}, {"params": [q], "algorithm": "adamw"}]) for p, q in (params, others)]

    @torch.compile(backend=compiled)
    def train_step(params, optimizer):
        loss = sum((p * p).sum() for p in params)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    def eager_step(params, optimizer):
        sum((p * p).sum() for p in params).backward()
        optimizer.step()
        optimizer.zero_grad()

    frames = []
    for step in range(8):
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = 0.1 / (step + 1)
        train_step(params, optimizers[0])
        eager_step(others, optimizers[1])
        frames.append(compiled.frame_count)
    assert frames == [1] * 8  # the loss; the compiler keeps out of the step
    for p, q in zip(params, others, strict=True):
        torch.testing.assert_close(p, q)
    step = torch.compile(optimizers[0].step, backend=compiled)
    for p, q in zip(params, others, strict=True):
        p.grad, q.grad = gradient(p.shape, 0), gradient(p.shape, 0)
    step()
    optimizers[1].step()
    for p, q in zip(params, others, strict=True):
        torch.testing.assert_close(p, q)
