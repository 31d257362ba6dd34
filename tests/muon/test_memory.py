"""What a step holds beside parameters, gradients and state: bounded by ``workspace``, and the same after 1000 steps."""

import gc
import tracemalloc

import pytest
import torch
from helpers.allocations import Allocations

from muon import Muon
from muon.newton_schulz import iterate, memory, operations
from muon.polynomials import schedule


def run(planned, workspace, shapes, monkeypatch, steps=2, **options):
    """The parameters after some steps, and the height of memory during the last."""
    monkeypatch.setattr("muon.optimizer.uses_triton", lambda *_: planned)
    generator = torch.Generator().manual_seed(0)
    params = [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]
    optimizer = Muon(params, lr=0.1, workspace=workspace, **options)
    for step in range(steps):
        for p in params:
            p.grad = torch.randn(p.shape, generator=generator)
        counter = Allocations()
        if step < steps - 1:
            optimizer.step()
        else:
            with counter:
                optimizer.step()
    return [p.detach() for p in params], counter.peak


SHAPES = [(32, 48), (48, 32), (32, 32), (3, 32, 48)]
ONE = 9 * 48 * 32 * 4  # bytes, more than one matrix needs


@pytest.mark.parametrize("options", [{}, {"neuron_norm": 0.9, "weight_decay_mode": "cautious", "maximize": True}])
@pytest.mark.parametrize("planned", [False, True])
def test_workspace_bounds_what_a_step_holds_and_changes_nothing(planned, options, monkeypatch):
    options |= {"ns_steps": 1}
    free, height = run(planned, None, SHAPES, monkeypatch, **options)
    tables = 8 * 1024  # addresses and scalars
    for workspace in (ONE,) if planned else (ONE, 2 * ONE):
        bounded, peak = run(planned, workspace, SHAPES, monkeypatch, **options)
        assert workspace / 4 < peak <= workspace + tables
        for a, b in zip(free, bounded, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    assert height > ONE + tables


@pytest.mark.parametrize("iteration", ["standard", "gram"])
def test_the_memory_of_an_iteration_is_what_is_said(iteration):
    """In plain torch: the interpreter keeps what its last kernel was given. tests/gpu measures the kernels."""
    n, m = 48, 64
    X = torch.randn(3, n, m) / 100
    with Allocations() as counter:
        iterate(X, schedule("polar_express", 5), iteration, operations(use_triton=False))
    held = (counter.peak + X.nbytes) / 3
    assert held <= memory(iteration, n, m, torch.float32) <= 1.5 * held


@pytest.mark.parametrize("options", [{}, {"neuron_norm": 0.9, "weight_decay_mode": "cautious", "bf16_remainder": True}])
def test_two_thousand_steps_hold_no_more_than_a_thousand(options):
    dtype = torch.bfloat16 if options.get("bf16_remainder") else torch.float32
    params = [torch.randn(shape, dtype=dtype, requires_grad=True) for shape in ((4, 8), (8, 4), (8,))]
    optimizer = Muon([{"params": params[:2], **options}, {"params": params[2:], "algorithm": "adamw", **options}])
    for p in params:
        p.grad = torch.randn_like(p)

    def steps(first, last):
        for step in range(first, last):
            for group in optimizer.param_groups:
                group["lr"] = 0.1 / (step + 1)
            optimizer.step()
            if step % 100 == 99:
                gc.collect()  # which empties Python's free lists; after other tests they take long to settle without
        tensors = sum(issubclass(type(item), torch.Tensor) for item in gc.get_objects())
        return tensors, tracemalloc.get_traced_memory()[0]

    tracemalloc.start()
    tensors, traced = steps(0, 1000)
    more_tensors, more_traced = steps(1000, 2000)
    tracemalloc.stop()
    assert more_tensors == tensors
    assert more_traced - traced < 20_000
