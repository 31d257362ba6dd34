"""Several processes that torchrun starts: each trains on its part of every batch, and the first one writes."""

from __future__ import annotations

import contextlib
import gc
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel


@dataclass(frozen=True)
class Ranks:
    """This process's number and how many there are."""

    rank: int = 0
    size: int = 1

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    @property
    def group(self) -> dist.ProcessGroup | None:
        return dist.group.WORLD if self.size > 1 else None

    def part(self, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """This process's sequences of inputs and targets, (batch, context) each."""
        inputs, targets = (tensor.chunk(self.size)[self.rank] for tensor in batch)
        return inputs, targets

    def wrap(self, model: nn.Module) -> nn.Module:
        """The model, with gradients that are the mean over all processes."""
        return DistributedDataParallel(model, gradient_as_bucket_view=True) if self.size > 1 else model

    def gather(self, value: Any) -> list[Any]:
        """Every process's, on all of them, whatever it is."""
        values = [value]
        if self.size > 1:
            values = [None] * self.size
            dist.all_gather_object(values, value)
        return values

    def mean(self, value: Tensor) -> Tensor:
        """Over all processes."""
        if self.size > 1:
            value = value.clone()
            dist.all_reduce(value)
        return value / self.size


ALONE = Ranks()


def number_of_processes() -> int:
    """That torchrun has started."""
    return int(os.environ.get("WORLD_SIZE", "1"))


@contextlib.contextmanager
def started() -> Iterator[Ranks]:
    """The processes, connected while it lasts; all but the first print nothing."""
    size = number_of_processes()
    if size == 1:
        yield ALONE
        return
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
    ranks = Ranks(dist.get_rank(), size)
    with contextlib.ExitStack() as stack:
        if not ranks.is_first:
            stack.enter_context(contextlib.redirect_stdout(stack.enter_context(open(os.devnull, "w"))))
        yield ranks
        sys.stdout.flush()
    dist.barrier()  # nobody leaves while another still writes
    dist.destroy_process_group()
    if not ranks.is_first:  # and has nothing to write: the group's threads may outlive Python, which then aborts
        os._exit(0)
    gc.collect()  # what still holds those threads
