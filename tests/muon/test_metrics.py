"""Muon.metrics() against the same figures taken from what the step did."""

import pytest
import torch
from helpers.newton_schulz import truth

from muon import Muon
from muon.polynomials import KELLER_JORDAN


def parameters(*shapes, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    params = [torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape in shapes]
    for p in params:
        p.grad = torch.randn(p.shape, generator=generator).to(dtype)
    return params


def norm(tensors):
    return float(torch.cat([tensor.double().flatten() for tensor in tensors]).norm())


@pytest.mark.parametrize("lr", [0.1, torch.tensor(0.1)])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"maximize": True},
        {"neuron_norm": 0.9, "adjust_lr_fn": "match_rms_adamw"},
        {"nesterov": False, "maximize": True},
    ],
)
def test_of_a_muon_group(options, lr):
    params = parameters((8, 12), (12, 8), (2, 8, 12))
    optimizer = Muon(params, lr=lr, weight_decay=0.0, **options)
    for step in range(3):
        for p in params:
            p.grad = p.grad.roll(step)
        before = [p.detach().clone() for p in params]
        optimizer.step()
    found = optimizer.metrics()
    assert found["0/gradient_norm"] == pytest.approx(norm([p.grad for p in params]))
    momentums = [optimizer.state[p]["momentum_buffer"] for p in params]
    assert found["0/momentum_norm"] == pytest.approx(norm(momentums))
    steps = [p.detach() - q for p, q in zip(params, before, strict=True)]
    elements = sum(p.numel() for p in params)
    assert found["0/update_rms"] == pytest.approx(norm(steps) / elements**0.5, rel=1e-4)
    distance = identity = 0.0
    for p, momentum in zip(params, momentums, strict=True):
        sign = -1 if options.get("maximize") else 1
        update = (sign * p.grad).lerp(momentum, 0.95) if options.get("nesterov", True) else momentum
        O = truth(update, KELLER_JORDAN).reshape(-1, *p.shape[-2:])
        gram = O.mT @ O if p.shape[-2] > p.shape[-1] else O @ O.mT
        eye = torch.eye(8, dtype=torch.float64).expand_as(gram)
        distance, identity = distance + float((gram - eye).square().sum()), identity + float(eye.square().sum())
    assert found["0/orthogonality_error"] == pytest.approx((distance / identity) ** 0.5, rel=1e-3)


@pytest.mark.parametrize("options", [{}, {"maximize": True, "betas": (0.8, 0.9)}])
def test_of_an_adamw_group(options):
    params = parameters((5,), (3, 4))
    optimizer = Muon([{"params": params, "algorithm": "adamw", "lr": 0.1, "weight_decay": 0.0, **options}])
    for _ in range(3):
        before = [p.detach().clone() for p in params]
        optimizer.step()
    found = optimizer.metrics()
    steps = [p.detach() - q for p, q in zip(params, before, strict=True)]
    assert found["0/update_rms"] == pytest.approx(norm(steps) / 17**0.5, rel=1e-4)
    assert found["0/gradient_norm"] == pytest.approx(norm([p.grad for p in params]))
    assert found["0/momentum_norm"] == pytest.approx(norm([optimizer.state[p]["exp_avg"] for p in params]))


def test_converged_updates_are_orthogonal_and_groups_have_names():
    p, q = parameters((8, 12), (5,))
    groups = [{"params": [p], "name": "hidden", "ns_coefficients": "converged"}, {"params": [q], "use_muon": False}]
    optimizer = Muon(groups)
    optimizer.step()
    found = optimizer.metrics()
    assert found["hidden/orthogonality_error"] < 2e-3
    assert set(found) == {
        "hidden/gradient_norm", "hidden/momentum_norm", "hidden/update_rms", "hidden/orthogonality_error",
        "1/gradient_norm", "1/momentum_norm", "1/update_rms",
    }  # fmt: skip


@pytest.mark.parametrize("scale", [1e-30, 1e30])
def test_norms_of_any_magnitude(scale):
    params = parameters((8, 12), (12, 8), (0, 4))
    for p in params:
        p.grad *= scale
    optimizer = Muon(params)
    optimizer.step()
    assert optimizer.metrics()["0/gradient_norm"] == pytest.approx(norm([p.grad for p in params]))


def test_reading_changes_nothing_and_needs_a_step_with_gradients():
    params = parameters((8, 12), (12, 8))
    optimizer = Muon(params, neuron_norm=0.9)
    assert optimizer.metrics() == {}
    optimizer.step()
    state = {p: {name: value.clone() for name, value in optimizer.state[p].items()} for p in params}
    before = [p.detach().clone() for p in params]
    assert optimizer.metrics() == optimizer.metrics()
    for p, value in zip(params, before, strict=True):
        assert torch.equal(p, value)
        assert all(torch.equal(optimizer.state[p][name], state[p][name]) for name in state[p])
    optimizer.zero_grad()
    assert optimizer.metrics() == {}


def test_a_group_that_has_changed_its_algorithm_has_nothing_to_tell_yet():
    p = torch.nn.Parameter(torch.eye(4))
    p.grad = torch.eye(4)
    optimizer = Muon([p])
    optimizer.step()
    for algorithm in ("adamw", "muon"):
        optimizer.param_groups[0]["algorithm"] = algorithm
        assert bool(optimizer.metrics()) == (algorithm == "muon")


def test_groups_of_one_name_go_by_their_numbers():
    groups = [{"params": [p], "name": name} for p, name in zip(parameters(*[(3, 4)] * 3), "aba", strict=True)]
    optimizer = Muon(groups)
    optimizer.step()
    assert {key.split("/")[0] for key in optimizer.metrics()} == {"0", "b", "2"}
