"""A step by the kernels, planned and replayed, against the same step in plain torch."""

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from muon import Muon
from muon.matrices import Tensors, buckets
from muon.optimizer import muon
from muon.options import lr_factor
from muon.polynomials import KELLER_JORDAN, schedule
from muon.rounding import join

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


def by_parameter(*columns):
    return [Tensors(*row) for row in zip(*columns, strict=True)]


DEFAULTS = {"nesterov": True, "maximize": False, "eps": 1e-7, "matrix": None, "split": None, "neuron_norm": None}
DEFAULTS |= {"workspace": None}


def plan_for(*columns, ns_steps=0, cautious=False, **options):
    """A plan's step, to be called with tensors such as it was made for."""
    steps = schedule(KELLER_JORDAN, ns_steps)
    options = {**DEFAULTS, **options, "cautious": cautious}
    plan = Plan(by_parameter(*columns), steps, lambda rows, cols: lr_factor(None, rows, cols), **options)
    return lambda *columns, **scalars: plan.step(by_parameter(*columns), **scalars)


def twin_step(*columns, ns_steps=0, cautious=False, **options):
    mode = "cautious" if cautious else "decoupled"
    options = {**DEFAULTS, **options, "ns_coefficients": KELLER_JORDAN, "ns_steps": ns_steps, "weight_decay_mode": mode}
    muon(by_parameter(*columns), adjust_lr_fn=None, foreach=None, **options)


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
    plan_for(*ours, nesterov=nesterov, maximize=maximize)(*ours, **scalars)
    twin_step(*theirs, **scalars, nesterov=nesterov, maximize=maximize)
    eps = 4 * torch.finfo(dtype).eps
    for a, b in zip(ours[0], theirs[0], strict=True):
        torch.testing.assert_close(a, b, rtol=eps, atol=eps + BETWEEN)
    for a, b in zip(ours[2], theirs[2], strict=True):
        torch.testing.assert_close(a, b, rtol=eps, atol=eps * scale)
    for a, b in zip(ours[1], theirs[1], strict=True):
        assert torch.equal(a, b)  # gradients are never changed


@settings(max_examples=12)
@given(
    n=st.integers(1, 70),
    m=st.integers(70, 140),
    cautious=st.booleans(),
    neuron_norm=st.sampled_from([None, 0.0, 0.9]),
    remainder=st.booleans(),
    split=st.booleans(),
)
@example(64, 128, True, 0.9, True, False)  # aligned, whole tiles
@example(9, 130, True, 0.9, True, True)
@example(1, 70, False, 0.9, False, False)
def test_variants_of_apply(n, m, cautious, neuron_norm, remainder, split):
    shapes = [(m, n), (m, n), (2, m, n)] if split else [(n, m), (m, n), (2, n, m)]
    options = {"cautious": cautious, "neuron_norm": neuron_norm, "split": (m - m // 3, m // 3) if split else None}

    def build():
        params, grads, momentums = tensors(shapes)
        moments = [randn((*shape[:-1], 1), 7).square() for shape in shapes]
        remainders = [(1e4 * randn(shape, 8)).to(torch.int16) for shape in shapes]
        if remainder:
            params, grads = [p.bfloat16() for p in params], [g.bfloat16() for g in grads]
        none = [None] * len(shapes)
        return (
            params, grads, momentums, none if neuron_norm is None else moments, remainders if remainder else none,
        )  # fmt: skip

    ours, theirs = build(), build()
    scalars = {"lr": 0.5, "weight_decay": 0.2, "momentum": 0.9}
    plan_for(*ours, **options)(*ours, **scalars)
    twin_step(*theirs, **scalars, **options)
    for p, q, r, s in zip(ours[0], theirs[0], ours[4], theirs[4], strict=True):
        a, b = (join(p, r), join(q, s)) if remainder else (p, q)
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6 + BETWEEN)
    for a, b in zip(ours[3], theirs[3], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5 + BETWEEN, atol=1e-9)


def test_a_learning_rate_on_the_device_is_the_same_step():
    shapes = [(20, 40), (40, 20)]
    ours, theirs = tensors(shapes), tensors(shapes)
    scalars = {"weight_decay": 0.3, "momentum": 0.9}
    plan = plan_for(*ours)
    for lr in (0.5, 0.25):
        plan(*ours, lr=torch.tensor(lr, device=DEVICE), **scalars)
        twin_step(*theirs, lr=lr, **scalars)
    for capturable in (True, False):
        plan(*ours, lr=0.125, **scalars, capturable=capturable)
        twin_step(*theirs, lr=torch.tensor(0.125, device=DEVICE), **scalars)
    for a, b in zip(ours[0], theirs[0], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5 + 10 * BETWEEN)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 3.4e38, 0.0])
def test_remainders_of_special_values(value):
    def build():
        params = [torch.full((16, 16), value, device=DEVICE).bfloat16()]
        remainders = [torch.zeros(16, 16, dtype=torch.int16, device=DEVICE)]
        return params, [torch.zeros_like(params[0])], [torch.zeros(16, 16, device=DEVICE)], [None], remainders

    ours, theirs = build(), build()
    plan_for(*ours)(*ours, lr=0.5, weight_decay=1e-4, momentum=0.9)
    twin_step(*theirs, lr=0.5, weight_decay=1e-4, momentum=0.9)
    torch.testing.assert_close(
        join(ours[0][0], ours[4][0]), join(theirs[0][0], theirs[4][0]), rtol=1e-6, atol=0, equal_nan=True
    )


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
    plan_for(*ours, split=split)(*ours, **scalars)
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
        plan(*ours, **scalars)
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
        plan(*ours, lr=0.5, weight_decay=0.0, momentum=0.9)
        twin_step(*theirs, lr=0.5, weight_decay=0.0, momentum=0.9)
        torch.testing.assert_close(ours[0][0], theirs[0][0], rtol=1e-5, atol=1e-5 + BETWEEN)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_bad_gradient_spoils_its_own_matrix(bad):
    params, grads, momentums = tensors([(20, 30)] * 3)
    grads[1][3, 4] = bad
    plan_for(params, grads, momentums)(params, grads, momentums, lr=0.1, weight_decay=0.0, momentum=0.9)
    assert params[0].isfinite().all() and params[2].isfinite().all() and params[1].isnan().all()


@pytest.mark.parametrize("eps", [1e-7, 0.0])
def test_zeros_change_nothing(eps):
    params, grads, momentums = tensors([(20, 30)] * 2)
    before = [p.clone() for p in params]
    for tensor in grads + momentums:
        tensor.zero_()
    plan = plan_for(params, grads, momentums, ns_steps=2, eps=eps)
    plan(params, grads, momentums, lr=0.1, weight_decay=0.0, momentum=0.9)
    assert all(torch.equal(p, q) for p, q in zip(params, before, strict=True))


@pytest.mark.parametrize(
    ("shapes", "together"),  # matrices that no cut along the first dimension separates
    [([(8, 16)] * 7 + [(16, 8)], 1), ([(7, 8, 16), (16, 8)], 1), ([(2, 5, 16, 8), (3, 3, 8, 16)], 5)],
)
@pytest.mark.parametrize("most", [1, 3, 100])
def test_buckets_are_bounded_and_lose_nothing(shapes, together, most):
    params, grads, momentums = tensors(shapes)
    found = buckets(by_parameter(params, grads, momentums), "batch", None, lambda *_: most)
    assert all(bucket.batch <= max(most, together) for bucket in found)
    pieces = [block.tensors.param.flatten() for bucket in found for block in bucket.blocks]
    assert torch.equal(torch.cat(pieces).sort().values, torch.cat([p.flatten() for p in params]).sort().values)


@pytest.mark.parametrize("layout", ["transposed", "double"])
def test_what_does_not_suit(layout):
    p = randn((20, 30), 0)
    other = p.mT if layout == "transposed" else p.double()
    assert suits(Tensors(p, p, p)) and suits(Tensors(torch.nn.Parameter(p), p, p))
    assert not suits(Tensors(p, p, other)) and not suits(Tensors(other, p, p))


def test_state_of_other_dtypes_does_not_suit():
    """A checkpoint brings it, of a float64 run for example; kernels take second moments for float32."""
    p = randn((20, 30), 0).bfloat16()
    rows, remainder = randn((20, 1), 1), torch.zeros_like(p, dtype=torch.int16)
    assert suits(Tensors(p, p, p, rows, remainder))
    assert not suits(Tensors(p, p, p, rows.double(), remainder))
    assert not suits(Tensors(p, p, p, rows.bfloat16(), remainder))
    assert not suits(Tensors(p, p, p, rows, remainder.int()))


def test_what_is_to_be_negated_when_read_does_not_suit():
    """As the imaginary part of a conjugate is: its memory holds the negative."""
    p = randn((20, 30), 0)
    assert not suits(Tensors(p, torch._neg_view(p), p))


def test_a_subclass_does_not_suit():
    """A DTensor's own address is 0; its elements lie elsewhere."""

    class Elsewhere(torch.Tensor):
        pass

    p = randn((20, 30), 0)
    assert not suits(Tensors(p.as_subclass(Elsewhere), p, p))


@pytest.fixture
def planning(monkeypatch):
    """In the interpreter the optimizer is made to plan as it does on a GPU; returns what plain torch was given."""
    monkeypatch.setattr("muon.optimizer.uses_triton", lambda _, p: p.dtype != torch.float64)
    given_to_torch = []
    monkeypatch.setattr("muon.optimizer.muon", lambda tensors, **_: given_to_torch.extend(t.param for t in tensors))
    return given_to_torch


def step_with(optimizer, params, *present):
    """A step with these gradients; returns its plan, the latest."""
    for i, p in enumerate(params):
        p.grad = randn(p.shape, i, p.dtype) if i in present else None
    optimizer.step()
    return [*optimizer._plans[0, params[0].device].values()][-1]


def test_optimizer_replans_when_something_changes(planning):
    params = [p.requires_grad_() for p in tensors([(8, 16), (16, 8)])[0]]
    optimizer = Muon(params, ns_steps=1)
    first = step_with(optimizer, params, 0, 1)
    assert step_with(optimizer, params, 0, 1) is first
    second = step_with(optimizer, params, 0)
    assert second is not first
    optimizer.param_groups[0]["lr"] = 0.5
    assert step_with(optimizer, params, 0) is second
    optimizer.param_groups[0]["ns_steps"] = 2
    assert step_with(optimizer, params, 0) is not second
    assert planning == []


def test_every_function_for_the_factor_has_a_plan_of_its_own(planning):
    """A function that nobody holds any longer gives its address, and so its repr, to the next one."""
    params = [p.requires_grad_() for p in tensors([(8, 16)])[0]]
    optimizer = Muon(params, ns_steps=1)
    for factor in range(1, 7):
        optimizer.param_groups[0]["adjust_lr_fn"] = lambda shape, factor=factor: factor
        assert step_with(optimizer, params, 0).factors.item() == factor


def test_state_of_another_shape_is_refused(planning):
    """The kernels would write past its end."""
    params = [p.requires_grad_() for p in tensors([(2, 8, 16)])[0]]
    optimizer = Muon(params, ns_steps=1, matrix="flatten", neuron_norm=0.9)
    step_with(optimizer, params, 0)
    optimizer.param_groups[0]["matrix"] = "batch"
    with pytest.raises(ValueError, match="neuron_second_moment should have shape"):
        step_with(optimizer, params, 0)


def test_gradients_that_are_present_by_turns_keep_their_plans(planning):
    """They used to record a graph at every step."""
    params = [p.requires_grad_() for p in tensors([(8, 16), (16, 8)])[0]]
    optimizer = Muon(params, ns_steps=1)
    found = [step_with(optimizer, params, *present) for present in ((0, 1), (0,), (1,)) * 3]
    assert found[:3] == found[3:6] == found[6:]
    for ns_steps in range(1, 7):
        optimizer.param_groups[0]["ns_steps"] = ns_steps
        step_with(optimizer, params, 0)
    assert len(optimizer._plans[0, params[0].device]) == 3


def test_what_the_kernels_cannot_reach_leaves_the_rest_of_its_group_planned(planning):
    """One float64 or transposed parameter used to send its whole group to plain torch."""
    params = [randn((8, 16), 0), randn((16, 8), 1).mT, randn((8, 16), 2, torch.float64), randn((16, 8), 3)]
    params = [p.requires_grad_() for p in params]
    optimizer = Muon(params, ns_steps=1)
    plan = step_with(optimizer, params, 0, 1, 2, 3)
    assert len(plan.owners) == 2
    assert planning[0] is params[1] and planning[1] is params[2] and len(planning) == 2


@pytest.mark.parametrize(
    "options",
    [
        {"neuron_norm": 0.9, "weight_decay_mode": "cautious"},
        {"momentum_dtype": torch.float32, "bf16_remainder": True},
        {"workspace": 20_000},
        {"capturable": True, "maximize": True},
    ],
)
def test_the_optimizer_is_the_same_planned(options, monkeypatch):
    dtype = torch.bfloat16 if "bf16_remainder" in options else torch.float32

    def run(planned):
        monkeypatch.setattr("muon.optimizer.uses_triton", lambda *_: planned)
        params = [p.requires_grad_() for p in tensors([(20, 40), (40, 20), (3, 20, 40)], dtype)[0]]
        optimizer = Muon(params, lr=0.1, **options)
        for step in range(2):
            for i, p in enumerate(params):
                p.grad = randn(p.shape, 10 * step + i, dtype)
            optimizer.step()
        assert bool(optimizer._plans) == planned
        return params, optimizer

    (ours, a), (theirs, b) = run(True), run(False)
    for p, q in zip(ours, theirs, strict=True):
        torch.testing.assert_close(p, q, rtol=4 * torch.finfo(dtype).eps, atol=1e-4 + 10 * BETWEEN)
        assert a.state[p].keys() == b.state[q].keys()
        for name, value in a.state[p].items():
            if name != "remainder":
                torch.testing.assert_close(value, b.state[q][name], rtol=1e-3 + BETWEEN, atol=1e-6)
