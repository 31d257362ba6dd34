import copy
import io
import math
import pickle

import pytest
import torch
from helpers.newton_schulz import SPECTRA, error, plain_newton_schulz, spectrum, truth
from hypothesis import given, settings
from hypothesis import strategies as st

from muon import Muon, orthogonalize
from muon.newton_schulz import iterate
from muon.optimizer import multiplies_bfloat16
from muon.polynomials import KELLER_JORDAN, schedule

SHAPES = [(8, 8), (8, 24), (24, 8), (16, 24), (1, 5), (5, 1)]


def parameters(shapes=SHAPES, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_() for shape in shapes]


def set_gradients(params, seed, scale=1.0):
    generator = torch.Generator().manual_seed(seed)
    for p in params:
        p.grad = (scale * torch.randn(p.shape, generator=generator, dtype=torch.float64)).to(p.dtype)


def train(optimizer, params, steps=5, start=0):
    for step in range(start, start + steps):
        set_gradients(params, seed=100 + step)
        optimizer.step()
    return [p.detach().clone() for p in params]


@pytest.mark.parametrize("group", ["world", True, 2])
def test_a_distributed_group_is_a_process_group(group):
    with pytest.raises(TypeError, match=r"distributed_group must be a torch\.distributed\.ProcessGroup .*, got"):
        Muon(parameters(), distributed_group=group)


def test_a_distributed_group_is_the_optimizers():
    with pytest.raises(ValueError, match="distributed_group is an option of the optimizer, not of a group"):
        Muon([{"params": parameters(), "distributed_group": None}])


options = st.fixed_dictionaries(
    {
        "lr": st.sampled_from([0.0, 1e-3, 0.02]),
        "weight_decay": st.sampled_from([0.0, 0.1]),
        "momentum": st.sampled_from([0.0, 0.9, 0.95]),
        "nesterov": st.booleans(),
        "ns_coefficients": st.sampled_from([KELLER_JORDAN, (2.0, -1.5, 0.5)]),
        "ns_steps": st.integers(1, 6),
        "adjust_lr_fn": st.sampled_from([None, "original", "match_rms_adamw"]),
    }
)


@settings(max_examples=25)
@given(options=options)
def test_is_torch_optim_muon_but_for_the_rounding_of_the_orthogonalisation(options):
    def float32_orthogonalisation(update, ns_coefficients, ns_steps, eps):
        return orthogonalize(update, ns_coefficients, ns_steps, eps)

    ours, theirs = parameters(), parameters()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("torch.optim._muon._zeropower_via_newtonschulz", float32_orthogonalisation)
        result = train(Muon(ours, **options), ours, steps=3)
        expected = train(torch.optim.Muon(theirs, **options), theirs, steps=3)
    for a, b in zip(result, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def test_is_closer_to_the_exact_run_than_torch_optim_muon():
    ours, theirs, exact = parameters(), parameters(), parameters(dtype=torch.float64)
    result = train(Muon(ours, lr=0.02), ours)
    expected = train(torch.optim.Muon(theirs, lr=0.02), theirs)
    best = train(Muon(exact, lr=0.02), exact)
    for a, b, c in zip(result, expected, best, strict=True):
        assert error(a, c) <= error(b, c)
        torch.testing.assert_close(a, b, rtol=0, atol=5e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", SPECTRA)
def test_an_update_is_the_polynomial_of_the_singular_values(kind, dtype, any_processor):
    """With bfloat16 products as precisely as torch.optim.Muon, which always has them, otherwise as plain float32."""
    generator = torch.Generator().manual_seed(0)
    gradients = [spectrum(kind, 1, *shape, generator)[0].to(dtype) for shape in [(24, 24), (48, 120), (120, 48)]]
    updates = []
    for build in (Muon, torch.optim.Muon):
        params = [torch.zeros_like(gradient).requires_grad_() for gradient in gradients]
        for p, gradient in zip(params, gradients, strict=True):
            p.grad = gradient.clone()
        build(params, lr=1.0, momentum=0.0, weight_decay=0.0).step()
        updates.append([-p.detach() for p in params])
    for gradient, ours, theirs in zip(gradients, *updates, strict=True):
        factor = math.sqrt(max(1, gradient.shape[0] / gradient.shape[1]))
        expected = factor * truth(gradient, KELLER_JORDAN)
        steps = schedule(KELLER_JORDAN, 5)
        plain = theirs if any_processor else factor * plain_newton_schulz(gradient.float(), steps, torch.float32)
        rounding = error(expected.to(dtype), expected)
        assert error(ours, expected) <= 2 * error(plain, expected) + rounding + 1e-6


def test_the_dtype_of_the_products(monkeypatch, any_processor):
    used = {}

    def recording(X, *args):
        used[X.shape[2]] = X.dtype
        return iterate(X, *args)

    monkeypatch.setattr("muon.optimizer.iterate", recording)
    dtypes = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
    params = [parameters([(4, 4 + i)], dtype)[0] for i, dtype in enumerate(dtypes)]
    train(Muon(params), params, steps=1)
    fast = torch.bfloat16 if any_processor else torch.float32
    assert [used[4 + i] for i in range(4)] == [torch.float64, fast, torch.float32, fast]


@pytest.mark.parametrize("has_avx512_bf16", [False, True, None])
@pytest.mark.parametrize("has_amx", [False, True, None])
def test_which_processors_multiply_bfloat16(monkeypatch, has_avx512_bf16, has_amx):
    for check, answer in (("_is_avx512_bf16_supported", has_avx512_bf16), ("_is_amx_tile_supported", has_amx)):
        if answer is None:  # another version of torch
            monkeypatch.delattr(f"torch.cpu.{check}", raising=False)
        else:
            monkeypatch.setattr(f"torch.cpu.{check}", lambda answer=answer: answer, raising=False)
    multiplies_bfloat16.cache_clear()
    assert multiplies_bfloat16() == bool(has_avx512_bf16 or has_amx)
    multiplies_bfloat16.cache_clear()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_low_precision_parameters(dtype):
    ours, exact = parameters(dtype=dtype), parameters(dtype=dtype)
    exact = [p.detach().double().requires_grad_() for p in exact]
    optimizer = Muon(ours, lr=0.02)
    set_gradients(ours, seed=1)
    for p, q in zip(ours, exact, strict=True):
        q.grad = p.grad.double()
    optimizer.step()
    Muon(exact, lr=0.02).step()
    for p, q in zip(ours, exact, strict=True):
        assert p.dtype == dtype and optimizer.state[p]["momentum_buffer"].dtype == dtype
        # Three roundings to the parameter's dtype: of the update, of the decay and of the sum.
        assert (p.double() - q).abs().max() <= 3 * torch.finfo(dtype).eps * q.abs().max()


def test_one_step_by_hand():
    (p,) = parameters([(6, 4)], torch.float64)
    before = p.detach().clone()
    optimizer = Muon([p], lr=0.1, weight_decay=0.5, momentum=0.9, adjust_lr_fn="spectral_unclamped")
    set_gradients([p], seed=1)
    optimizer.step()
    momentum = 0.1 * p.grad
    update = 0.1 * p.grad + 0.9 * momentum
    expected = before * (1 - 0.1 * 0.5) - 0.1 * math.sqrt(6 / 4) * truth(update, KELLER_JORDAN)
    torch.testing.assert_close(p.detach(), expected)
    torch.testing.assert_close(optimizer.state[p]["momentum_buffer"], momentum)


@pytest.mark.parametrize("shape", [(64, 2), (2, 64), (40, 1)])
@pytest.mark.parametrize("name", ["original", "match_rms_adamw", "spectral_unclamped"])
def test_the_factor_of_long_matrices(name, shape):
    rows, cols = shape
    ratio = rows / cols
    factors = {"original": max(1, ratio) ** 0.5, "spectral_unclamped": ratio**0.5}
    expected = factors.get(name, 0.2 * max(shape) ** 0.5)
    (p,) = parameters([shape], torch.float64)
    before = p.detach().clone()
    set_gradients([p], seed=1)
    Muon([p], lr=1.0, weight_decay=0.0, momentum=0.0, adjust_lr_fn=name).step()
    torch.testing.assert_close(p.detach() - before, -expected * truth(p.grad, KELLER_JORDAN))


def single_updates(p, blocks, lr_factor=lambda rows, cols: math.sqrt(max(1, rows / cols))):
    """Minus the update of each block of p.grad as a matrix of its own, without momentum."""
    return [-lr_factor(*block.shape) * truth(block, KELLER_JORDAN) for block in blocks]


@pytest.mark.parametrize(
    ("shape", "options", "blocks"),
    [
        ((3, 6, 4), {}, lambda g: list(g)),
        ((3, 6, 4), {"matrix": "flatten"}, lambda g: [g.flatten(1)]),
        ((6, 2, 3, 3), {}, lambda g: [g.flatten(1)]),
        ((2, 3, 6, 4), {"matrix": "batch"}, lambda g: list(g.flatten(0, 1))),
        ((6, 2, 2, 2, 2), {}, lambda g: [g.flatten(1)]),
        ((12, 4), {"split": 3}, lambda g: list(g.split(4))),
        ((12, 4), {"split": (6, 2, 4)}, lambda g: list(g.split([6, 2, 4]))),
        ((2, 12, 4), {"split": (6, 6)}, lambda g: [block for e in g for block in e.split(6)]),
        ((2, 12, 4), {"split": 4}, lambda g: [block for e in g for block in e.split(3)]),
        ((6, 2, 3, 3), {"split": 2}, lambda g: list(g.flatten(1).split(3))),
    ],
)
@pytest.mark.parametrize("memory", ["contiguous", "channels last", "transposed"])
def test_what_a_matrix_is(shape, options, blocks, memory):
    (p,) = parameters([shape], torch.float64)
    p = torch.zeros_like(p)
    if memory == "channels last" and p.ndim == 4:
        p = p.to(memory_format=torch.channels_last)
    elif memory == "transposed":
        p = p.mT.contiguous().mT
    p.requires_grad_()
    set_gradients([p], seed=3)
    Muon([p], lr=1.0, weight_decay=0.0, momentum=0.0, **options).step()
    for result, expected in zip(blocks(p.detach()), single_updates(p, blocks(p.grad)), strict=True):
        torch.testing.assert_close(result, expected)


def test_parameters_of_equal_sides_share_one_iteration(monkeypatch, any_processor):
    batches = []

    def recording(X, *args):
        batches.append(tuple(X.shape))
        return iterate(X, *args)

    monkeypatch.setattr("muon.optimizer.iterate", recording)
    params = parameters([(8, 24), (24, 8), (4, 8, 24), (16, 16), (48, 8), (16, 4, 2, 2)])
    train(Muon(params), params, steps=1)
    assert sorted(batches) == [(1, 8, 48), (2, 16, 16), (6, 8, 24)]


def test_adamw_groups_are_torch_optim_adamw():
    shapes = [(8,), (8, 24), ()]
    ours, theirs = parameters(shapes), parameters(shapes)
    settings = {"lr": 1e-2, "betas": (0.8, 0.95), "weight_decay": 0.2}
    optimizer = Muon([{"params": ours, "algorithm": "adamw", "adamw_eps": 1e-6, **settings}])
    result = train(optimizer, ours)
    expected = train(torch.optim.AdamW(theirs, eps=1e-6, fused=True, **settings), theirs)
    for a, b in zip(result, expected, strict=True):
        assert torch.equal(a, b)


def test_both_algorithms_in_one_object_with_one_scheduler():
    matrices, vectors = parameters(), parameters([(8,), (3,)])
    optimizer = Muon([{"params": matrices, "lr": 0.02}, {"params": vectors, "use_muon": False, "lr": 1e-3}])
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    assert [group["algorithm"] for group in optimizer.param_groups] == ["muon", "adamw"]
    train(optimizer, matrices + vectors, steps=1)
    scheduler.step()
    assert [group["lr"] for group in optimizer.param_groups] == [0.01, 5e-4]


def test_options_are_read_from_the_groups_at_every_step(any_processor):
    ours, theirs = parameters(), parameters()
    optimizer = Muon(ours, lr=0.5, weight_decay=0.9, momentum=0.1)
    optimizer.param_groups[0].update(lr=0.02, weight_decay=0.1, momentum=0.95)
    for a, b in zip(train(optimizer, ours), train(Muon(theirs, lr=0.02), theirs), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("algorithm", ["muon", "adamw"])
def test_maximize_is_minimising_the_negative(algorithm):
    ours, theirs = parameters(), parameters()
    set_gradients(ours, seed=1)
    set_gradients(theirs, seed=1, scale=-1)
    Muon([{"params": ours, "algorithm": algorithm}], maximize=True).step()
    Muon([{"params": theirs, "algorithm": algorithm}]).step()
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b)


def test_tensor_learning_rate(any_processor):
    ours, theirs = parameters(), parameters()
    result = train(Muon(ours, lr=torch.tensor(0.02, dtype=torch.float64)), ours)
    for a, b in zip(result, train(Muon(theirs, lr=0.02), theirs), strict=True):
        assert torch.equal(a, b)


def test_gradients_are_never_changed_and_missing_ones_leave_parameters_alone():
    params = parameters()
    set_gradients(params, seed=1)
    params[1].grad = None
    gradients = [None if p.grad is None else p.grad.clone() for p in params]
    before = params[1].detach().clone()
    optimizer = Muon(params, maximize=True)
    optimizer.step()
    for p, gradient in zip(params, gradients, strict=True):
        assert (p.grad is None) if gradient is None else torch.equal(p.grad, gradient)
    assert torch.equal(params[1], before) and params[1] not in optimizer.state
    assert all("momentum_buffer" in optimizer.state[p] for p in params if p.grad is not None)


def test_a_callable_sees_the_shapes_that_there_are():
    factors = {(6, 4): 2.0, (3, 9): 1.0}
    ours, theirs = parameters([(6, 4), (3, 9)]), parameters([(6, 4), (3, 9)])
    result = train(Muon(ours, adjust_lr_fn=factors.__getitem__), ours)
    expected = train(Muon([{"params": theirs[:1], "lr": 2e-3, "weight_decay": 0.05}, {"params": theirs[1:]}],
                          adjust_lr_fn=lambda shape: 1.0), theirs)  # fmt: skip
    torch.testing.assert_close(result, expected)


@pytest.mark.parametrize(
    ("trained", "then", "message"),
    [
        ("flatten", "batch", r"shape \(2, 4, 1\) for a \(2, 4, 6\).*has \(2, 1, 1\)"),
        ("batch", "transposed", r"shape \(2, 1, 6\) for a \(2, 4, 6\).*has \(2, 4, 1\)"),
    ],
)
def test_state_of_another_shape_is_refused(trained, then, message):
    """Kernels would write past its end."""
    params = parameters([(2, 4, 6)])
    optimizer = Muon(params, neuron_norm=0.9, matrix=trained)
    train(optimizer, params, steps=1)
    optimizer.param_groups[0]["matrix"] = then
    with pytest.raises(ValueError, match=f"neuron_second_moment should have {message}"):
        train(optimizer, params, steps=1)


def test_a_checkpoint_of_another_shape_is_refused_at_the_step():
    small, large = parameters([(1, 6)]), parameters([(4, 6)])
    old, new = Muon(small), Muon(large)
    train(old, small, steps=1)
    new.load_state_dict(old.state_dict())
    with pytest.raises(ValueError, match=r"momentum should have shape \(4, 6\) .* but has \(1, 6\)"):
        train(new, large, steps=1)


@pytest.mark.parametrize("eps", [1e-7, 0.0])
def test_zero_gradients_give_zero_updates(eps, any_processor):
    params = parameters()
    before = [p.detach().clone() for p in params]
    for p in params:
        p.grad = torch.zeros_like(p)
    Muon(params, weight_decay=0.0, eps=eps).step()
    for p, value in zip(params, before, strict=True):
        assert torch.equal(p, value)


@pytest.mark.parametrize("scale", [1e-30, 1e30])
def test_gradients_of_any_magnitude_give_the_same_update(scale, any_processor):
    ours, theirs = parameters(), parameters()
    set_gradients(ours, seed=1, scale=scale)
    set_gradients(theirs, seed=1)
    Muon(ours, lr=0.1).step()
    Muon(theirs, lr=0.1).step()
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def test_one_nan_matrix_does_not_spoil_its_batch(any_processor):
    ours, theirs = parameters([(8, 8)] * 3), parameters([(8, 8)] * 3)
    set_gradients(ours, seed=1)
    set_gradients(theirs, seed=1)
    ours[1].grad[0, 0] = float("nan")
    Muon(ours).step()
    Muon(theirs).step()
    assert torch.equal(ours[0], theirs[0]) and torch.equal(ours[2], theirs[2]) and ours[1].isnan().all()


def test_empty_parameters_are_fine(any_processor):
    params = parameters([(0, 4), (4, 0), (0, 4, 4), (4, 4)])
    train(Muon(params), params, steps=2)
    assert params[3].isfinite().all()


def test_checkpoints_of_torch_optim_muon_load_and_ours_load_there():
    ours, theirs = parameters(), parameters()
    a, b = Muon(ours, lr=0.02), torch.optim.Muon(theirs, lr=0.02)
    train(b, theirs, steps=2)
    train(a, ours, steps=2)
    state_of_torch, state_of_ours = copy.deepcopy(b.state_dict()), copy.deepcopy(a.state_dict())
    resumed_ours, resumed_theirs = parameters(), parameters()
    a, b = Muon(resumed_ours, lr=9.0), torch.optim.Muon(resumed_theirs, lr=9.0)
    a.load_state_dict(state_of_torch)
    b.load_state_dict(state_of_ours)
    assert a.param_groups[0]["lr"] == b.param_groups[0]["lr"] == 0.02
    for result, expected in ((resumed_ours, theirs), (resumed_theirs, ours)):
        for p, q in zip(result, expected, strict=True):
            p.data.copy_(q.data)
    for p, q in zip(train(a, resumed_ours, start=2), train(b, resumed_theirs, start=2), strict=True):
        torch.testing.assert_close(p, q, rtol=0, atol=5e-3)


@pytest.mark.parametrize("state_dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_checkpoint_resumes_to_the_bit_and_state_keeps_its_dtype(state_dtype, any_processor):
    def build():
        matrices, vectors = parameters(), parameters([(8,), (3,)])
        return matrices + vectors, Muon([{"params": matrices}, {"params": vectors, "algorithm": "adamw"}])

    params, optimizer = build()
    train(optimizer, params, steps=2)
    for p in params[: len(SHAPES)]:
        optimizer.state[p]["momentum_buffer"] = optimizer.state[p]["momentum_buffer"].to(state_dtype)
    file = io.BytesIO()
    torch.save({"model": [p.detach() for p in params], "optimizer": optimizer.state_dict()}, file)
    file.seek(0)
    checkpoint = torch.load(file, weights_only=True)
    resumed, other = build()
    other.load_state_dict(checkpoint["optimizer"])
    for p, value in zip(resumed, checkpoint["model"], strict=True):
        p.data.copy_(value)
    for p, q in zip(params, resumed, strict=True):
        for key, value in optimizer.state[p].items():
            assert other.state[q][key].dtype == value.dtype and torch.equal(other.state[q][key], value)
    for p, q in zip(train(optimizer, params, start=2), train(other, resumed, start=2), strict=True):
        assert torch.equal(p, q)


def test_a_checkpoint_of_torch_optim_muon_leaves_the_options_it_lacks_alone():
    """Groups that said "adamw" or split their rows used to lose that, and embeddings went on with Muon."""

    def build():
        return parameters([(8, 8), (12, 4), (5,)])

    p, q, r = build()
    state = torch.optim.Muon([{"params": [p]}, {"params": [q]}]).state_dict()
    state["param_groups"].append({**state["param_groups"][0], "params": [2]})
    optimizer = Muon([{"params": [p]}, {"params": [q], "split": 3}, {"params": [r], "algorithm": "adamw"}])
    optimizer.load_state_dict(state)
    assert [group["algorithm"] for group in optimizer.param_groups] == ["muon", "muon", "adamw"]
    assert [group["split"] for group in optimizer.param_groups] == [None, 3, None]
    train(optimizer, [p, q, r], steps=1)


@pytest.mark.parametrize("saved", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("loaded", [torch.float32, torch.bfloat16])
def test_a_checkpoint_of_another_dtype_trains_on(saved, loaded):
    def build(dtype):
        matrices, vectors = parameters(dtype=dtype), parameters([(8,)], dtype=dtype)
        return matrices + vectors, Muon([{"params": matrices}, {"params": vectors, "algorithm": "adamw"}])

    params, optimizer = build(saved)
    train(optimizer, params, steps=1)
    others, other = build(loaded)
    other.load_state_dict(optimizer.state_dict())
    assert other.state[others[0]]["momentum_buffer"].dtype == saved
    assert all(p.isfinite().all() for p in train(other, others, steps=2, start=1))


def test_one_cycle_schedules_the_momentum_as_for_torch_optim_muon():
    found = []
    for build in (Muon, torch.optim.Muon):
        params = parameters()
        optimizer = build(params)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=6)
        found.append([])
        for step in range(4):
            train(optimizer, params, steps=1, start=step)
            scheduler.step()
            found[-1].append(optimizer.param_groups[0]["momentum"])
    assert found[0] == found[1]


def test_pickle_and_deepcopy():
    params = parameters()
    optimizer = Muon(params, lr=0.02)
    train(optimizer, params, steps=1)
    for other in (pickle.loads(pickle.dumps(optimizer)), copy.deepcopy(optimizer)):
        copied = other.param_groups[0]["params"]
        for p, q in zip(train(other, copied, start=1), train(copy.deepcopy(optimizer), copied, start=1), strict=True):
            assert p.shape == q.shape and p.isfinite().all()


def test_closure_is_called_with_gradients_enabled_and_its_value_returned():
    params = parameters()

    def closure():
        assert torch.is_grad_enabled()
        loss = sum(p.square().sum() for p in params)
        loss.backward()
        return loss

    assert Muon(params).step(closure) > 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": -1.0}, "Learning rate should be >= 0 but is: -1.0"),
        ({"lr": float("nan")}, "Learning rate should be >= 0 but is: nan"),
        ({"lr": torch.tensor([1.0, 2.0])}, "Tensor lr must be 1-element"),
        ({"momentum": -0.1}, "momentum should be >= 0 but is: -0.1"),
        ({"weight_decay": -0.1}, "weight decay should be >= 0 but is: -0.1"),
        ({"adjust_lr_fn": "arbitrary"}, "Adjust learning rate function arbitrary is not supported"),
        ({"ns_steps": 100}, "ns_steps should be an integer between 0 and 99 but is: 100"),
        ({"ns_steps": 2.5}, "ns_steps should be an integer between 0 and 99 but is: 2.5"),
        ({"ns_coefficients": "nonsense"}, "'nonsense'"),
        ({"betas": (0.9,)}, r"betas should be two numbers but are: \(0.9,\)"),
        ({"betas": (0.9, 1.0)}, r"betas\[1\] should be in \[0, 1\) but is: 1.0"),
        ({"matrix": "columns"}, "matrix should be None, 'batch', 'flatten' or 'transposed' but is: 'columns'"),
        ({"split": 5}, r"split=5 should divide the 8 rows of a \(8, 8\) parameter"),
        ({"split": 2.0}, "split should be None, a number of blocks or their sizes but is: 2.0"),
        ({"split": (4, 5)}, r"split=\(4, 5\) should be positive and sum to the 8 rows"),
    ],
)
def test_bad_options_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        Muon(parameters([(8, 8)]), **options)
    optimizer = Muon(parameters([(8, 8)], seed=1))
    with pytest.raises(ValueError, match=message):
        optimizer.add_param_group({"params": parameters([(8, 8)]), **options})
    assert len(optimizer.param_groups) == 1


@pytest.mark.parametrize("shape", [(), (3,)])
def test_vectors_are_refused_by_name(shape):
    named = [("layer.bias", parameters([shape])[0])]
    with pytest.raises(ValueError, match=r"Muon only supports 2D parameters.*layer\.bias.*algorithm='adamw'"):
        Muon(named)
    Muon([{"params": named, "algorithm": "adamw"}])


def test_the_epsilon_of_an_adamw_group_has_its_own_name():
    with pytest.raises(ValueError, match="adamw_eps"):
        Muon([{"params": parameters(), "algorithm": "adamw", "eps": 1e-6}])


def test_a_group_that_raises_leaves_no_trace():
    optimizer = Muon(parameters())
    for bad in ({"betas": 0.9}, {"lr": -1.0}):
        with pytest.raises((TypeError, ValueError)):
            optimizer.add_param_group({"params": parameters(seed=1), **bad})
    assert len(optimizer.param_groups) == 1


def test_a_group_may_change_its_algorithm():
    params = parameters()
    optimizer = Muon(params)
    train(optimizer, params, steps=1)
    optimizer.param_groups[0]["algorithm"] = "adamw"
    assert all(p.isfinite().all() for p in train(optimizer, params, steps=1))


def test_unknown_algorithm():
    with pytest.raises(ValueError, match="algorithm should be 'muon' or 'adamw' but is: 'sgd'"):
        Muon([{"params": parameters(), "algorithm": "sgd"}])


def test_complex_and_sparse_are_refused():
    p = torch.zeros(3, 3, dtype=torch.complex64, requires_grad=True)
    p.grad = torch.zeros_like(p)
    with pytest.raises(RuntimeError, match="Muon does not support complex parameters"):
        Muon([p]).step()
    p = torch.zeros(3, 3, requires_grad=True)
    p.grad = torch.zeros(3, 3).to_sparse()
    with pytest.raises(RuntimeError, match="Muon does not support sparse gradients"):
        Muon([p]).step()
    with pytest.raises(RuntimeError, match="AdamW does not support sparse gradients"):
        Muon([{"params": [p], "algorithm": "adamw"}]).step()
