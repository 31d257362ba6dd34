"""How much memory operators hold."""

import weakref

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class Allocations(TorchDispatchMode):
    """Counts the bytes of storages that operators return, until they are freed."""

    def __init__(self):
        super().__init__()
        self.now = self.peak = 0
        self.known = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        before = {
            value.untyped_storage()._cdata for value in torch.utils._pytree.tree_leaves((args, kwargs))
            if isinstance(value, torch.Tensor)
        }  # fmt: skip
        results = function(*args, **(kwargs or {}))
        for result in torch.utils._pytree.tree_leaves(results):
            if isinstance(result, torch.Tensor):
                self._count(result.untyped_storage(), before)
        return results

    def _count(self, storage, before):
        key = storage._cdata
        if key in self.known or key in before:
            return
        self.known.add(key)
        self.now += storage.nbytes()
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._free, key, storage.nbytes())

    def _free(self, key, nbytes):
        self.known.remove(key)
        self.now -= nbytes
