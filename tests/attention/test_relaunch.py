"""Launches done again: the arguments that a kernel gets are those of a first launch on the same tensors."""

import gc

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton", reason="kernels need triton, which is for Linux only")

from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from attention.kernels import relaunch
from attention.kernels.hopper_common import describe
from attention.kernels.relaunch import Launch, Relaunches, kind

TENSORS = 4


class Kernel:
    """Notes what it and what it was compiled to are launched with."""

    def __init__(self, number):
        self.arg_names = [f"a{i}" for i in range(number)] + ["BLOCK"]
        self.launched = []

    def __getitem__(self, grid):
        def launch(*arguments, BLOCK, num_warps):
            self.launched.append((grid[0], [*arguments, BLOCK]))
            return self.compiled

        return launch

    @property
    def compiled(self):
        kernel = self

        class Compiled:
            def __getitem__(self, grid):
                return lambda *arguments: kernel.launched.append((grid[0], list(arguments)))

        return Compiled()


def tensors(seed, same=()):
    """Of one kind; those in `same` are one tensor."""
    generator = torch.Generator().manual_seed(seed)
    made = [torch.randn(2, 64, 3, 64, generator=generator).bfloat16() for _ in range(TENSORS)]
    return [made[same[0]] if i in same else x for i, x in enumerate(made)]


def comparable(argument):
    if isinstance(argument, torch.Tensor):
        return argument.data_ptr(), tuple(argument.shape)
    if isinstance(argument, TensorDescriptor):
        return {name: comparable(value) for name, value in vars(argument).items()}
    return tuple(map(comparable, argument)) if isinstance(argument, tuple) else argument


def number_of_tensors():
    return sum(issubclass(type(x), torch.Tensor) for x in gc.get_objects())


SLOT = st.integers(0, TENSORS - 1)
ARGUMENT = st.one_of(
    SLOT.map(lambda slot: lambda x: x[slot]),
    SLOT.map(lambda slot: lambda x: describe(x[slot], 64, 64)),
    SLOT.map(lambda slot: lambda x: (x[slot], 5, 6, 7)),
    st.tuples(SLOT, SLOT).map(lambda two: lambda x: (x[two[0]], None, (2, x[two[1]]), 5)),
    st.sampled_from([None, 3, 0.5, True]).map(lambda value: lambda x: value),
)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.lists(ARGUMENT, min_size=1, max_size=8), st.sets(SLOT), st.sets(SLOT))
def test_a_kernel_gets_what_a_first_launch_would_give_it(arguments, same_first, same_then):
    kernel, plans = Kernel(len(arguments)), []

    def plan(*x):
        plans.append(x)
        yield Launch(kernel, 7, tuple(make(x) for make in arguments), {"BLOCK": 64, "num_warps": 4})

    relaunches = Relaunches()
    for seed, same in enumerate((same_first, same_first, same_then, set())):
        given_now = tensors(seed, sorted(same))
        relaunches.launch("key", given_now, plan)
        programs, launched = kernel.launched[-1]
        expected = [make(given_now) for make in arguments] + [64]
        assert programs == 7 and list(map(comparable, launched)) == list(map(comparable, expected))
    assert len(plans) == 2 and len(kernel.launched) == 4


def test_optional_tensors_stay_none():
    kernel = Kernel(2)
    relaunches = Relaunches()
    for seed in range(4):
        x, *_ = tensors(seed)
        relaunches.launch("key", (None, x), lambda *y: [Launch(kernel, 1, y, {"BLOCK": 1, "num_warps": 4})])
        assert list(map(comparable, kernel.launched[-1][1])) == [None, comparable(x), 1]


def test_no_tensor_is_kept():
    kernel, relaunches = Kernel(3), Relaunches()

    def plan(x):
        yield Launch(kernel, 1, (x, describe(x, 64, 64), (x, 1)), {"BLOCK": 1, "num_warps": 4})

    gc.collect()
    before = number_of_tensors()
    for _ in range(4):
        relaunches.launch("key", tensors(0)[:1], plan)
        kernel.launched.clear()
        gc.collect()
        assert number_of_tensors() == before


def test_an_interpreted_kernel_is_launched_anew():
    relaunches, launched = Relaunches(), []

    class Interpreted:
        def __getitem__(self, grid):
            return lambda *arguments, **constants: launched.append((grid, arguments, constants))

    x = tensors(0)[0]
    for _ in range(4):
        relaunches.launch("key", (x,), lambda x: [Launch(Interpreted(), 3, (x, 5), {"num_warps": 4})])
    assert [(grid, comparable(arguments), constants) for grid, arguments, constants in launched] == 4 * [
        ((3,), (comparable(x), 5), {"num_warps": 4})
    ]


def test_the_number_of_keys_is_bounded(monkeypatch):
    monkeypatch.setattr(relaunch, "MOST", 3)
    kernel, relaunches = Kernel(1), Relaunches()
    for key in range(8):
        for _ in range(3):
            relaunches.launch(key, tensors(0)[:1], lambda x: [Launch(kernel, 1, (x,), {"BLOCK": 1, "num_warps": 4})])
        assert len(relaunches._kept) <= 3


def test_a_tensors_kind_is_what_launches_depend_on():
    x = torch.zeros(1 + 64 * 6, dtype=torch.bfloat16)
    one, other = x[:-1].view(1, 64, 1, 6), torch.ones(1, 64, 1, 6, dtype=torch.bfloat16)
    assert kind(one) == kind(other) and kind(None) is None
    different = [
        one.half(),
        one[:, 1:],
        one.transpose(1, 2),
        x[1:].view(1, 64, 1, 6),
        None,
    ]
    assert len({kind(one), *map(kind, different)}) == 6
