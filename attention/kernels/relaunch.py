"""Launches that are done again on other tensors, without all that precedes a first launch.

A launch consists of a compiled kernel, a grid, sizes and descriptors. They are the same for all tensors of the same
dtypes, shapes, strides and alignment; only addresses differ. Triton looks for the compiled kernel at every launch, by
everything that it may depend on, and we would work out the rest. Here both are kept, by a key.

Triton's hooks around a launch see it as ever. What its debugging would compile anew, a kept launch doesn't ask for.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, NamedTuple

from torch import Tensor
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

MOST = 128  # keys; packed batches may bring a new one each
Tensors = Sequence[Tensor | None]
Fill = Callable[[Tensors], Any]


class Launch(NamedTuple):
    """`kernel[programs,](*arguments, **constants)`"""

    kernel: Any
    programs: int
    arguments: tuple[Any, ...]
    constants: dict[str, Any]  # with the launch's options


class Relaunches:
    """What was launched, by a key from which all of the launches' arguments but the tensors follow.

    So the key has the `kind` of every tensor that a caller brings; the others are new, and their shapes follow from it.
    Constants of modules are taken as constant.
    """

    def __init__(self) -> None:
        self._kept: dict[Hashable, list[_Kept] | None] = {}

    def launch(self, key: Hashable, tensors: Tensors, plan: Callable[..., Iterable[Launch]]) -> None:
        """Launches what `plan(*tensors)` lists, on the current device. Of a key seen twice before it isn't asked again.

        It makes arguments of these very tensors, not of views of them.
        """
        kept = self._kept.get(key)
        if kept is not None:
            for known in kept:
                known.launch(tensors)
        elif key in self._kept:  # worth keeping, which takes longer than a launch
            self._kept[key] = _keep(tensors, plan)
        else:
            if len(self._kept) >= MOST:
                self._kept.clear()
            for one in plan(*tensors):
                one.kernel[(one.programs,)](*one.arguments, **one.constants)
            self._kept[key] = None


def _keep(tensors: Tensors, plan: Callable[..., Iterable[Launch]]) -> list[_Kept] | None:
    """Launches, and returns what is to be kept, if the kernels are compiled and not interpreted."""
    # Two arguments may be one tensor now and two the next time.
    distinct = [None if x is None else x.detach() for x in tensors]
    slots = {id(x): slot for slot, x in enumerate(distinct) if x is not None}
    kept, are_compiled = [], True
    for one in plan(*distinct):
        compiled = one.kernel[(one.programs,)](*one.arguments, **one.constants)
        if hasattr(compiled, "result"):  # it was compiled in the background
            compiled = compiled.result()
        if compiled is None:
            are_compiled = False
        else:
            kept.append(_Kept(one, compiled, slots))
    return kept if are_compiled else None


class _Kept:
    """A launch without its tensors."""

    def __init__(self, one: Launch, compiled: Any, slots: dict[int, int]) -> None:
        self._run = compiled[(one.programs, 1, 1)]
        rest = one.kernel.arg_names[len(one.arguments) :]
        arguments = [*one.arguments, *(one.constants[name] for name in rest)]
        self._arguments, fills = _apart(arguments, slots)
        self._fills = [(place, fill) for place, fill in enumerate(fills) if fill is not None]

    def launch(self, tensors: Tensors) -> None:
        arguments = self._arguments.copy()
        for place, fill in self._fills:
            arguments[place] = fill(tensors)
        self._run(*arguments)


def _apart(arguments: Sequence[Any], slots: dict[int, int]) -> tuple[list[Any], list[Fill | None]]:
    """What is the same for all tensors, and how to make the others, which are None in it."""
    fills = [_fill(argument, slots) for argument in arguments]
    return [None if fill else argument for argument, fill in zip(arguments, fills, strict=True)], fills


def _fill(argument: Any, slots: dict[int, int]) -> Fill | None:
    """How to make an argument like this from other tensors; None if it is the same for all."""
    if isinstance(argument, Tensor):
        return operator.itemgetter(slots[id(argument)])
    if isinstance(argument, TensorDescriptor):
        return _fill_descriptor(argument, slots[id(argument.base)])
    if isinstance(argument, tuple):
        pairs = list(zip(*_apart(argument, slots), strict=True))
        return lambda tensors: tuple(same if fill is None else fill(tensors) for same, fill in pairs)
    return None


def _fill_descriptor(descriptor: TensorDescriptor, slot: int) -> Fill:
    fields = vars(descriptor) | {"base": None}

    def fill(tensors: Tensors) -> TensorDescriptor:
        again = object.__new__(TensorDescriptor)  # what its constructor checks was checked the first time
        again.__dict__.update(fields, base=tensors[slot])
        return again

    return fill


def kind(x: Tensor | None) -> Hashable:
    """What launches may depend on of a tensor: all but its address, of which the alignment counts."""
    return None if x is None else (x.dtype, x.shape, x.stride(), x.data_ptr() % 16)
