"""A step by the kernels, planned and replayed, against the same step in plain torch."""

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from muon import Muon
from muon.matrices import buckets
from muon.optimizer import lr_factor, muon
from muon.polynomials import KELLER_JORDAN, schedule

pytest.importorskip("triton", reason="kernels need triton, which is for Linux only")

from muon.plan import Plan, suits

pytestmark = pytest.mark.usefixtures("uninitialized_memory_is_nan")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def randn(shape, seed, dtype=torch.float32, scale=1.0):
    generator = torch.Generator().manual_seed(seed)
    return (scale * torch.randn(shape, generator=generator, dtype=torch.float64)).to(DEVICE, dtype)


def tensors(shapes, dtype=torch.float32, scale=1.0, seed=0):
    """Parameters, gradients and momentums of these shapes, the same on every call."""
    return [
        [randn(shape, seed + 10 * i + kind, dtype, scale if kind else 1.0) for i, shape in enumerate(shapes)]
        for kind in range(3)
    ]


def plan_for(params, grads, momentums, ns_steps=0, nesterov=True, maximize=False, split=None):
    steps = schedule(KELLER_JORDAN, ns_steps)
    options = {"nesterov": nesterov, "maximize": maximize, "eps": 1e-7, "matrix": None, "split": split}
    return Plan(params, grads, momentums, steps, lambda rows, cols: lr_factor(None, rows, cols), **options)


def twin_step(
    params, grads, momentums, lr, weight_decay, momentum, ns_steps=0, nesterov=True, maximize=False, split=None
):
    muon(
        params, grads, momentums, lr=lr, weight_decay=weight_decay, momentum=momentum, nesterov=nesterov,
        ns_coefficients=KELLER_JORDAN, eps=1e-7, ns_steps=ns_steps, adjust_lr_fn=None, matrix=None, split=split,
        maximize=maximize,
    )  # fmt: skip


# Without Newton-Schulz steps a step is pack and apply alone, and the kernels agree with torch to rounding. (On a GPU
# what lies between them is bfloat16, here float32.)
BETWEEN = 2**-8 if DEVICE == "cuda" else 1e-6


@settings(max_examples=15)
@given(
    n=st.integers(1, 70),
    m=st.integers(70, 140),
    dtype=st.sampled_from([torch.float32, torch.float16]),
    momentum=st.sampled_from([0.0, 0.95]),
    nesterov=st.booleans(),
    maximize=st.booleans(),
    scale=st.sampled_from([1.0, 1e-30, 1e30]),
)
@example(64, 128, torch.float32, 0.95, True, False, 1.0)  # aligned, whole tiles
@example(65, 129, torch.float32, 0.95, False, True, 1e30)
def test_pack_and_apply(n, m, dtype, momentum, nesterov, maximize, scale):
    scale = 1.0 if dtype == torch.float16 else scale
    shapes = [(n, m), (m, n), (2, n, m)]
    ours, theirs = tensors(shapes, dtype, scale), tensors(shapes, dtype, scale)
    scalars = {"lr": 0.5, "weight_decay": 0.2, "momentum": momentum}
    plan_for(*ours, nesterov=nesterov, maximize=maximize).step(*ours, **scalars)
    twin_step(*theirs, **scalars, nesterov=nesterov, maximize=maximize)
    eps = 4 * torch.finfo(dtype).eps
    for a, b in zip(ours[0], theirs[0], strict=True):
        torch.testing.assert_close(a, b, rtol=eps, atol=eps + BETWEEN)
    for a, b in zip(ours[2], theirs[2], strict=True):
        torch.testing.assert_close(a, b, rtol=eps, atol=eps * scale)
    for a, b in zip(ours[1], theirs[1], strict=True):
        assert torch.equal(a, b)  # gradients are never changed


@pytest.mark.parametrize(
    ("shapes", "split"),
    [
        ([(60, 20), (60, 20)], (20, 20, 20)),
        ([(60, 20), (2, 60, 20)], 3),
        ([(6, 2, 3, 3), (18, 6)], None),
        ([(3, 12, 20), (12, 20)], (4, 8)),  # rows split out of a batch leave gaps
    ],
)
def test_blocks_of_rows_batches_and_convolutions_are_reached(shapes, split):
    ours, theirs = tensors(shapes), tensors(shapes)
    scalars = {"lr": 0.5, "weight_decay": 0.2, "momentum": 0.9}
    plan_for(*ours, split=split).step(*ours, **scalars)
    twin_step(*theirs, **scalars, split=split)
    for a, b in zip(ours[0], theirs[0], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5 + BETWEEN)


def test_a_plan_serves_other_tensors_and_other_scalars():
    shapes = [(20, 40), (40, 20)]
    first = tensors(shapes)
    plan = plan_for(*first, ns_steps=2)
    for step in range(4):  # on a GPU the second is recorded and the others replay
        ours, theirs = tensors(shapes, seed=100 * step), tensors(shapes, seed=100 * step)
        scalars = {"lr": 0.1 * (step + 1), "weight_decay": 0.1 * step, "momentum": 0.2 * step}
        plan.step(*ours, **scalars)
        twin_step(*theirs, **scalars, ns_steps=2)
        for a, b in zip(ours[0] + ours[2], theirs[0] + theirs[2], strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5 + 10 * BETWEEN)


def test_an_unaligned_gradient_is_read_right_after_aligned_ones():
    shapes = [(32, 64)]
    plan = plan_for(*tensors(shapes))
    for offset in (0, 0, 0, 1, 1, 1, 0):  # on a GPU: run, record, replay, then the same again
        ours, theirs = tensors(shapes), tensors(shapes)
        storage = torch.empty(32 * 64 + 1, device=DEVICE)
        ours[1] = [storage[offset : offset + 32 * 64].view(32, 64).copy_(theirs[1][0])]
        plan.step(*ours, lr=0.5, weight_decay=0.0, momentum=0.9)
        twin_step(*theirs, lr=0.5, weight_decay=0.0, momentum=0.9)
        torch.testing.assert_close(ours[0][0], theirs[0][0], rtol=1e-5, atol=1e-5 + BETWEEN)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_bad_gradient_spoils_its_own_matrix(bad):
    params, grads, momentums = tensors([(20, 30)] * 3)
    grads[1][3, 4] = bad
    plan_for(params, grads, momentums).step(params, grads, momentums, lr=0.1, weight_decay=0.0, momentum=0.9)
    assert params[0].isfinite().all() and params[2].isfinite().all() and params[1].isnan().all()


def test_zeros_change_nothing():
    params, grads, momentums = tensors([(20, 30)] * 2)
    before = [p.clone() for p in params]
    for tensor in grads + momentums:
        tensor.zero_()
    plan = plan_for(params, grads, momentums, ns_steps=2)
    plan.step(params, grads, momentums, lr=0.1, weight_decay=0.0, momentum=0.9)
    assert all(torch.equal(p, q) for p, q in zip(params, before, strict=True))


@pytest.mark.parametrize(
    ("shapes", "together"),  # matrices that no cut along the first dimension separates
    [([(8, 16)] * 7 + [(16, 8)], 1), ([(7, 8, 16), (16, 8)], 1), ([(2, 5, 16, 8), (3, 3, 8, 16)], 5)],
)
@pytest.mark.parametrize("most", [1, 3, 100])
def test_buckets_are_bounded_and_lose_nothing(shapes, together, most):
    params, grads, momentums = tensors(shapes)
    found = buckets(params, grads, momentums, "batch", None, most * 8 * 16)
    assert all(bucket.batch <= max(most, together) for bucket in found)
    pieces = [block.param.flatten() for bucket in found for block in bucket.blocks]
    assert torch.equal(torch.cat(pieces).sort().values, torch.cat([p.flatten() for p in params]).sort().values)


@pytest.mark.parametrize("layout", ["transposed", "double"])
def test_what_does_not_suit(layout):
    p = randn((20, 30), 0)
    assert suits(p) and suits(torch.nn.Parameter(p))
    assert not suits(p, p.mT if layout == "transposed" else p.double())


def test_a_subclass_does_not_suit():
    """A DTensor's own address is 0; its elements lie elsewhere."""

    class Elsewhere(torch.Tensor):
        pass

    assert not suits(randn((20, 30), 0).as_subclass(Elsewhere))


def test_optimizer_replans_when_something_changes(monkeypatch):
    """In the interpreter the optimizer is made to plan as it does on a GPU."""
    monkeypatch.setattr("muon.optimizer.uses_triton", lambda *_: True)
    if DEVICE == "cpu":
        monkeypatch.setattr("muon.optimizer.operations", lambda _: pytest.fail("not planned"))
    params = [p.requires_grad_() for p in tensors([(8, 16), (16, 8)])[0]]
    optimizer = Muon(params, ns_steps=1)

    def step_with(*present):
        for i, p in enumerate(params):
            p.grad = randn(p.shape, i) if i in present else None
        optimizer.step()
        return optimizer._plans[0][1]

    first = step_with(0, 1)
    assert step_with(0, 1) is first
    second = step_with(0)
    assert second is not first
    optimizer.param_groups[0]["lr"] = 0.5
    assert step_with(0) is second
    optimizer.param_groups[0]["ns_steps"] = 2
    assert step_with(0) is not second
