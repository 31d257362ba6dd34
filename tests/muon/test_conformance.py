"""What torch asks of every optimizer, over torch's own OptimizerInfo: Muon alone, and Muon with AdamW groups.

The properties are those of torch's test/test_optim.py, which the wheel lacks; their inputs are the wheel's.
"""

import copy
import inspect
import io
import os
import pickle

import pytest
import torch
from hypothesis import settings
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from muon import Muon


class Mixed(Muon):
    """Matrices to Muon, everything else to AdamW, from one flat list."""

    def __init__(self, params, **options) -> None:
        super().__init__(params if isinstance(params, torch.Tensor) else by_kind(list(params)), **options)


def by_kind(params):
    if any(isinstance(p, dict) for p in params):
        return params
    groups = {"muon": [], "adamw": []}
    for p in params:
        groups["muon" if (p[1] if isinstance(p, tuple) else p).ndim > 1 else "adamw"].append(p)
    return [{"params": found, "algorithm": name} for name, found in groups.items() if found]


USED = ("OptimizerInfo", "OptimizerInput", "ErrorOptimizerInput", "OptimizerErrorEnum", "optim_db",
        "_get_optim_inputs_including_global_cliquey_kwargs")  # fmt: skip


@pytest.fixture(scope="module")
def torch_testing():
    """torch's OptimizerInfo and what belongs to it. Importing it changes the process's settings: they are put back."""
    environment, profile = dict(os.environ), settings.get_current_profile_name()
    name = "torch.testing._internal.common_optimizers"
    module = pytest.importorskip(name, reason="torch's testing helpers need expecttest", exc_type=ImportError)
    settings.load_profile(profile)
    for key in set(os.environ) - set(environment):
        del os.environ[key]
    vars(torch.backends)["__allow_nonbracketed_mutation_flag"] = True
    missing = [name for name in USED if not hasattr(module, name)]
    if missing:
        pytest.skip(reason=f"this torch's testing helpers have no {missing}")
    return module


def inputs_of_torch(torch_testing, errors=False):
    """(inputs or error inputs) of torch.optim.Muon, none if this torch has none."""
    for info in torch_testing.optim_db:
        if info.optim_cls is torch.optim.Muon:
            return info.optim_error_inputs_func("cpu", torch.float32) if errors else info.optim_inputs_func("cpu")
    return []


@pytest.fixture(scope="module", params=[Muon, Mixed])
def info(request, torch_testing):
    options = inspect.signature(Muon).parameters
    OptimizerInput, ErrorInput = torch_testing.OptimizerInput, torch_testing.ErrorOptimizerInput

    def inputs(device, dtype=None):
        ours = {
            "maximize": {"maximize": True, "weight_decay": 0.0},
            "no weight decay": {"weight_decay": 0.0},
            "no Nesterov": {"nesterov": False, "momentum": 0.0},
            "match_rms_adamw": {"adjust_lr_fn": "match_rms_adamw", "lr": torch.tensor(0.01)},
            "preset": {"ns_coefficients": "polar_express"},
            "betas": {"betas": (0.8, 0.9), "adamw_eps": 1e-6},
        }
        newer = {"neuron_norm": 0.95, "weight_decay_mode": "cautious", "momentum_dtype": torch.float64, "workspace": 1}
        ours |= {name: {name: value} for name, value in newer.items() if name in options}
        return inputs_of_torch(torch_testing) + [OptimizerInput(None, kwargs, desc) for desc, kwargs in ours.items()]

    def error_inputs(device, dtype):
        theirs = inputs_of_torch(torch_testing, errors=True)
        kept = [
            case for case in theirs if case.optimizer_error_input.desc != "only support 2D parameters"
        ]  # we take 3-D
        vector = OptimizerInput([{"params": [torch.zeros(3)]}], {}, "a vector")
        return [*kept, ErrorInput(vector, error_type=ValueError, error_regex="Muon only supports 2D parameters")]

    about = dict(
        optim_inputs_func=inputs,
        optim_error_inputs_func=error_inputs,
        supported_impls=tuple(name for name in ("foreach",) if name in options),
        not_og_supported_flags=("maximize", "foreach", "capturable"),
        supports_complex=False,
        has_capturable_arg="capturable" in options,
    )
    known = inspect.signature(torch_testing.OptimizerInfo).parameters
    return torch_testing.OptimizerInfo(request.param, **{name: about[name] for name in known if name in about})


def configurations(torch_testing, info):
    found = torch_testing._get_optim_inputs_including_global_cliquey_kwargs("cpu", torch.float32, info)
    assert len(found) >= 6
    return [copy.deepcopy(case.kwargs) for case in found]


class Problem:
    """A weight and, where the optimizer takes one, a bias, with a loss to bring down."""

    def __init__(self, info, seed=0, contiguous=True) -> None:
        generator = torch.Generator().manual_seed(seed)
        shapes = [(10, 5)] if info.optim_cls is Muon else [(10, 5), (10,)]
        self.params = []
        for shape in shapes:
            value = torch.randn(*shape, 2, generator=generator)[..., 0]
            self.params.append((value.contiguous() if contiguous else value).requires_grad_())
        assert contiguous or not self.params[0].is_contiguous()
        self.input = torch.randn(5, generator=generator)

    def loss(self) -> torch.Tensor:
        weight, *bias = self.params
        return (weight.mv(self.input) + sum(bias)).square().sum()

    def closure(self) -> torch.Tensor:
        for p in self.params:
            p.grad = None
        loss = self.loss()
        loss.backward()
        return loss

    def train(self, optimizer, steps=3) -> None:
        for _ in range(steps):
            optimizer.step(self.closure)

    def copy(self) -> "Problem":
        other = copy.copy(self)
        other.params = [p.detach().clone().requires_grad_() for p in self.params]
        return other


def assert_equal(a, b) -> None:
    """Tensors to the bit, anywhere in dicts and lists."""
    if isinstance(a, dict):
        assert a.keys() == b.keys()
        a, b = list(a.values()), list(b.values())
    if isinstance(a, (list, tuple)):
        for x, y in zip(a, b, strict=True):
            assert_equal(x, y)
    elif isinstance(a, torch.Tensor):
        assert a.dtype == b.dtype and torch.equal(a, b)
    else:
        assert type(a) is type(b) and a == b


def went_right(options, before: float, after: float) -> bool:
    return after > before if options.get("maximize") else after < before


def test_bad_input_is_refused_as_torch_refuses_it(torch_testing, info):
    for case in info.optim_error_inputs_func("cpu", torch.float32):
        bad, at_step = case.optimizer_error_input, torch_testing.OptimizerErrorEnum.STEP_ERROR
        params = [torch.zeros(2, 2)] if bad.params is None else bad.params
        expected = pytest.warns if issubclass(case.error_type, Warning) else pytest.raises
        if case.error_on is at_step:
            optimizer = info.optim_cls(params, **bad.kwargs)
            with expected(case.error_type, match=case.error_regex):
                optimizer.step()
        else:
            with expected(case.error_type, match=case.error_regex):
                info.optim_cls(params, **bad.kwargs)


@pytest.mark.parametrize("contiguous", [True, False])
def test_the_loss_goes_the_right_way(torch_testing, info, contiguous):
    for options in configurations(torch_testing, info):
        problem = Problem(info, contiguous=contiguous)
        before = problem.loss().item()
        problem.train(info.optim_cls(problem.params, **options), steps=20)
        assert went_right(options, before, problem.loss().item()), options


def test_the_loss_goes_the_right_way_under_torchs_schedulers(torch_testing, info):
    for options in configurations(torch_testing, info):
        for constructors in info.scheduler_inputs:
            problem = Problem(info)
            optimizer = info.optim_cls(problem.params, **options)
            schedulers = [constructor(optimizer) for constructor in constructors]
            before = problem.loss().item()
            for _ in range(20):
                loss = optimizer.step(problem.closure).detach()
                for scheduler in schedulers:
                    is_plateau = isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau)
                    scheduler.step(loss) if is_plateau else scheduler.step()
            assert went_right(options, before, problem.loss().item()), options


def test_a_group_with_almost_no_learning_rate_stays(torch_testing, info):
    for options in configurations(torch_testing, info):
        problem, other = Problem(info), torch.randn(2, 3, requires_grad=True)
        old, before = other.detach().clone(), problem.loss().item()
        groups = [{"params": [p], "algorithm": "muon" if p.ndim > 1 else "adamw"} for p in problem.params]
        optimizer = Muon([*({"lr": 1e-3, **options, **group} for group in groups), {"params": [other]}], lr=1e-28)
        for _ in range(10):
            problem.closure()
            other.grad = torch.rand_like(other)
            optimizer.step()
        assert went_right(options, before, problem.loss().item()) and torch.equal(other, old)


def test_weight_decay_of_one_group_only(info):
    problem = Problem(info)
    old = [p.detach().clone() for p in problem.params]
    optimizer = info.optim_cls(problem.params, lr=0.1, weight_decay=0.5)
    optimizer.param_groups[-1]["weight_decay"] = 0.0
    for p in problem.params:
        p.grad = torch.zeros_like(p)
    optimizer.step()
    for group, before in zip(optimizer.param_groups, old, strict=True):
        torch.testing.assert_close(group["params"][0].detach(), before * (1 - 0.1 * group["weight_decay"]))


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_a_tensor_learning_rate_is_the_same_number(torch_testing, info, shape):
    for options in configurations(torch_testing, info):
        problem = Problem(info)
        twin, lr = problem.copy(), 2.0**-6
        tensor = torch.full(shape, lr)
        ours = info.optim_cls(problem.params, **{**options, "lr": tensor})
        theirs = info.optim_cls(twin.params, **{**options, "lr": lr})
        for optimizer, trained in ((ours, problem), (theirs, twin)):
            scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
            for _ in range(5):
                optimizer.step(trained.closure)
                scheduler.step()
        assert all(isinstance(group["lr"], torch.Tensor) for group in ours.param_groups)
        for a, b in zip(problem.params, twin.params, strict=True):
            torch.testing.assert_close(a, b)


def test_without_gradients_a_step_does_nothing(torch_testing, info):
    for options in configurations(torch_testing, info):
        problem = Problem(info)
        old = [p.detach().clone() for p in problem.params]
        optimizer = info.optim_cls(problem.params, **options)
        assert optimizer.step(lambda: 1) == 1 and not optimizer.state
        assert_equal([p.detach() for p in problem.params], old)


def test_zero_gradients_and_no_weight_decay_change_nothing(torch_testing, info):
    for options in configurations(torch_testing, info):
        problem = Problem(info)
        old = [p.detach().clone() for p in problem.params]
        for p in problem.params:
            p.grad = torch.zeros_like(p)
        info.optim_cls(problem.params, **{**options, "weight_decay": 0.0}).step()
        assert_equal([p.detach() for p in problem.params], old)


def test_every_parameter_with_a_gradient_has_state_after_a_step(torch_testing, info):
    for options in configurations(torch_testing, info):
        problem = Problem(info)
        optimizer = info.optim_cls(problem.params, **options)
        problem.train(optimizer, steps=1)
        assert list(optimizer.state) == problem.params and all(optimizer.state.values())


def test_it_can_be_printed(torch_testing, info):
    for options in configurations(torch_testing, info):
        assert "momentum: " in repr(info.optim_cls(Problem(info).params, **options))


def resumed(info, options, problem, state):
    other = problem.copy()
    optimizer = info.optim_cls(other.params, **options)
    optimizer.load_state_dict(state)
    return other, optimizer


def test_a_state_dict_resumes_to_the_bit(torch_testing, info):
    for options in configurations(torch_testing, info):
        problem = Problem(info)
        optimizer = info.optim_cls(problem.params, **options)
        problem.train(optimizer)
        saved = copy.deepcopy(optimizer.state_dict())
        other, second = resumed(info, options, problem, copy.deepcopy(saved))
        assert_equal(optimizer.state_dict(), saved)  # loading took nothing from it
        for _ in range(3):
            problem.train(optimizer, steps=1)
            other.train(second, steps=1)
            assert_equal(problem.params, other.params)
        assert_equal(optimizer.state_dict(), second.state_dict())
        second.param_groups.extend(second.param_groups)  # torch's issue 36831
        assert_equal(optimizer.state_dict()["param_groups"][-1], second.state_dict()["param_groups"][-1])


def test_a_state_dict_survives_a_file_that_may_hold_weights_only(torch_testing, info):
    for options in configurations(torch_testing, info):
        problem = Problem(info)
        optimizer = info.optim_cls([(f"p{i}", p) for i, p in enumerate(problem.params)], **options)
        problem.train(optimizer)
        file = io.BytesIO()
        torch.save(optimizer.state_dict(), file)
        file.seek(0)
        assert_equal(torch.load(file, weights_only=True), optimizer.state_dict())


def test_a_state_dict_from_before_an_option_existed_loads(torch_testing, info):
    for options in configurations(torch_testing, info):
        problem = Problem(info)
        optimizer = info.optim_cls(problem.params, **options)
        problem.train(optimizer)
        state = copy.deepcopy(optimizer.state_dict())
        for group in state["param_groups"]:
            for flag in info.not_og_supported_flags:
                group.pop(flag, None)
        optimizer.load_state_dict(state)
        problem.train(optimizer)


def test_a_step_that_is_a_number_loads(torch_testing, info):
    """As AdamW wrote it before torch 1.12, and as others' checkpoints have it."""
    for options in configurations(torch_testing, info):
        problem = Problem(info)
        optimizer = info.optim_cls(problem.params, **options)
        problem.train(optimizer)
        state = copy.deepcopy(optimizer.state_dict())
        for one in state["state"].values():
            if "step" in one:
                one["step"] = one["step"].item()
        other, second = resumed(info, options, problem, state)
        problem.train(optimizer)
        other.train(second)
        assert_equal(problem.params, other.params)


@pytest.mark.parametrize("saved_named", [True, False])
@pytest.mark.parametrize("loaded_named", [True, False])
def test_named_and_unnamed_state_dicts_load_into_each_other(info, saved_named, loaded_named):
    def build(problem, named):
        params = [(f"p{i}", p) for i, p in enumerate(problem.params)] if named else problem.params
        return info.optim_cls(params)

    problem = Problem(info)
    optimizer = build(problem, saved_named)
    problem.train(optimizer)
    other = problem.copy()
    second = build(other, loaded_named)
    second.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    problem.train(optimizer)
    other.train(second)
    assert_equal(problem.params, other.params)
    names = [group.get("param_names") for group in second.state_dict()["param_groups"]]
    expected = [[f"p{i}"] for i in range(len(problem.params))] if saved_named or loaded_named else [None] * len(names)
    assert names == expected


def test_named_state_dicts_load_in_another_order_through_a_hook(info):
    """The recipe of torch's documentation: a hook puts the saved ids into the order of the names."""
    names = ["a", "b", "c"]

    def build(order):
        values = {name: torch.full((4, 3), float(i + 1)).requires_grad_() for i, name in enumerate(names)}
        for i, name in enumerate(names):
            values[name].grad = torch.eye(4, 3) * (i + 1)
        return values, info.optim_cls([(name, values[name]) for name in order])

    def by_name(optimizer, state):
        group, saved = optimizer.param_groups[0], state["param_groups"][0]
        ids = dict(zip(saved["param_names"], saved["params"], strict=True))
        return {**state, "param_groups": [{**saved, "params": [ids[name] for name in group["param_names"]],
                                           "param_names": group["param_names"]}]}  # fmt: skip

    values, optimizer = build(names)
    optimizer.step()
    others, second = build(names[::-1])
    second.register_load_state_dict_pre_hook(by_name)
    second.load_state_dict(optimizer.state_dict())
    for name in names:
        assert_equal(second.state[others[name]]["momentum_buffer"], optimizer.state[values[name]]["momentum_buffer"])


def test_hooks_around_a_step_run_in_torchs_order(info):
    problem, calls = Problem(info), []
    optimizer = info.optim_cls(problem.params)

    def note(what):
        return lambda optimizer, args, kwargs: calls.append(what)

    handles = [
        register_optimizer_step_pre_hook(note("every optimizer's, before")),
        register_optimizer_step_post_hook(note("every optimizer's, after")),
        optimizer.register_step_pre_hook(note("before")),
        optimizer.register_step_post_hook(note("after")),
    ]
    expected = ["every optimizer's, before", "before", "after", "every optimizer's, after"]
    problem.train(optimizer, steps=2)
    for handle in handles:
        handle.remove()
    problem.train(optimizer, steps=1)
    assert calls == 2 * expected


def test_hooks_around_state_dict(info):
    optimizer = info.optim_cls(Problem(info).params)
    optimizer.register_state_dict_pre_hook(lambda optimizer: optimizer.state.update(before=1))
    assert optimizer.state_dict()["state"]["before"] == 1
    optimizer.register_state_dict_post_hook(lambda optimizer, state: {**state, "after": "before" in state["state"]})
    assert optimizer.state_dict()["after"] is True


def test_hooks_around_load_state_dict(info):
    """A hook that returns another state dict is heeded, by torch and by what we do after it."""
    problem, loaded = Problem(info), []
    optimizer = info.optim_cls([p.bfloat16().detach().requires_grad_() for p in problem.params])
    for p in (p for group in optimizer.param_groups for p in group["params"]):
        p.grad = torch.ones_like(p)
    optimizer.step()
    state = copy.deepcopy(optimizer.state_dict())

    def widen(optimizer, state):
        state = copy.deepcopy(state)
        state["param_groups"][0]["lr"] = 0.003
        state["state"][0]["momentum_buffer"] = state["state"][0]["momentum_buffer"].float()
        return state

    def overwritten(optimizer, state):
        state["param_groups"][0]["lr"] = 9.0

    optimizer.register_load_state_dict_pre_hook(widen)
    optimizer.register_load_state_dict_pre_hook(overwritten, prepend=True)

    def note(optimizer):
        first = optimizer.param_groups[0]["params"][0]
        loaded.extend([optimizer.param_groups[0]["lr"], optimizer.state[first]["momentum_buffer"].dtype])

    optimizer.register_load_state_dict_post_hook(note)
    optimizer.load_state_dict(state)
    assert loaded == [0.003, torch.float32] and optimizer.param_groups[0]["lr"] == 0.003
    first = optimizer.param_groups[0]["params"][0]
    assert optimizer.state[first]["momentum_buffer"].dtype == torch.float32
    optimizer.step()


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda optimizer: pickle.loads(pickle.dumps(optimizer))])
def test_a_copy_goes_on_as_the_original_does(torch_testing, info, duplicate):
    for options in configurations(torch_testing, info):
        problem = Problem(info)
        optimizer = info.optim_cls(problem.params, **options)
        problem.train(optimizer)
        second, other = duplicate(optimizer), problem.copy()
        assert {name for name in vars(optimizer) if name[0] != "_"} == {name for name in vars(second) if name[0] != "_"}
        other.params = [p for group in second.param_groups for p in group["params"]]
        problem.train(optimizer)
        other.train(second)
        assert_equal(problem.params, other.params)
        for one in (optimizer, second):
            one.add_param_group({"params": [torch.zeros(2, 2)]})
        assert_equal(
            {**second.param_groups[-1], "differentiable": False},
            {**optimizer.param_groups[-1], "differentiable": False},
        )


def test_a_group_may_come_later(info):
    problem, late = Problem(info), torch.randn(6, 4, requires_grad=True)
    optimizer = info.optim_cls(problem.params, lr=0.02)
    problem.train(optimizer)
    optimizer.add_param_group({"params": late, "weight_decay": 0.0})
    assert optimizer.param_groups[-1]["lr"] == 0.02
    late.grad = torch.randn_like(late)
    alone = late.detach().clone().requires_grad_()
    alone.grad = late.grad.clone()
    problem.train(optimizer, steps=1)
    Muon([alone], lr=0.02, weight_decay=0.0).step()
    torch.testing.assert_close(late, alone)


def test_defaults_changed_after_construction_hold_for_later_groups(info):
    optimizer = info.optim_cls(Problem(info).params)
    optimizer.defaults["momentum"] = 0.5
    optimizer.add_param_group({"params": torch.zeros(2, 2)})
    assert [group["momentum"] for group in optimizer.param_groups][-1] == 0.5
    assert optimizer.param_groups[0]["momentum"] == 0.95


def test_dtypes_may_be_mixed_in_a_group(info):
    dtypes = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
    params = [torch.ones(shape, dtype=dtype).requires_grad_() for dtype in dtypes for shape in ((4, 3), (4,))]
    if info.optim_cls is Muon:
        params = params[::2]
    optimizer = info.optim_cls(params, lr=0.1)
    for _ in range(2):
        for p in params:
            p.grad = torch.eye(4, 3).to(p.dtype) if p.ndim == 2 else torch.ones_like(p)
        optimizer.step()
    for p in params:
        expected = params[0] if p.ndim == 2 else params[1]
        torch.testing.assert_close(p, expected.to(p.dtype), rtol=0.02, atol=0.02)


def test_complex_parameters_are_refused_in_muon_groups_and_train_in_adamw_groups():
    weight = torch.randn(4, 3, dtype=torch.complex64, requires_grad=True)
    ours, theirs = weight.detach().clone().requires_grad_(), weight.detach().clone().requires_grad_()
    ours.grad = theirs.grad = torch.randn_like(weight)
    Muon([{"params": [ours], "algorithm": "adamw"}], lr=0.1).step()
    torch.optim.AdamW([theirs], lr=0.1, weight_decay=0.1).step()
    torch.testing.assert_close(ours, theirs)
    with pytest.raises(RuntimeError, match="Muon does not support complex parameters"):
        optimizer = Muon([ours])
        optimizer.step()


def test_foreach_on_and_off_agree(torch_testing, info):
    if "foreach" not in info.supported_impls:
        pytest.skip(reason="Muon has no foreach option")
    for case in info.optim_inputs_func("cpu"):
        if isinstance(case.kwargs.get("lr"), torch.Tensor):
            continue  # torch refuses it for AdamW with foreach=True
        problem = Problem(info)
        twin = problem.copy()
        for trained, foreach in ((problem, True), (twin, False)):
            trained.train(info.optim_cls(trained.params, foreach=foreach, **case.kwargs), steps=7)
        for a, b in zip(problem.params, twin.params, strict=True):
            torch.testing.assert_close(a, b)


def test_gradients_are_cleared_as_by_any_optimizer(info):
    problem = Problem(info)
    optimizer = info.optim_cls(problem.params)
    problem.closure()
    optimizer.zero_grad(set_to_none=False)
    assert all(not p.grad.any() for p in problem.params)
    optimizer.zero_grad()
    assert all(p.grad is None for p in problem.params)


def test_a_module_with_every_kind_of_parameter_resumes():
    """The checks above use one weight and one bias; here a model with shapes of all kinds, through a file."""

    def build():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 6))
        return model, Mixed(model.named_parameters(), lr=0.02)

    def train(model, optimizer, seed):
        images = torch.randn(3, 1, 8, 8, generator=torch.Generator().manual_seed(seed))
        optimizer.zero_grad()
        model(images).square().mean().backward()
        optimizer.step()

    model, optimizer = build()
    train(model, optimizer, 1)
    file = io.BytesIO()
    torch.save((model.state_dict(), optimizer.state_dict()), file)
    file.seek(0)
    other, second = build()
    weights, state = torch.load(file, weights_only=True)
    other.load_state_dict(weights)
    second.load_state_dict(state)
    for seed in (2, 3):
        train(model, optimizer, seed)
        train(other, second, seed)
    assert_equal(dict(model.state_dict()), dict(other.state_dict()))
