"""The operations of Newton-Schulz on Triton's kernels: which kernel multiplies what."""

import math

import torch
from torch import Tensor

from muon.kernels import hopper, products, stages
from muon.matrices import normalize

# Measured on an H200 (docs/lab-notes.md): the warp-specialised kernels win where epilogues are a large part, which is
# in short products, and where both groups of warps find work on every multiprocessor.
LONGEST_HOPPER_SYMMETRIC = 2048
LONGEST_HOPPER_UPDATE = 1024


class TritonOperations:
    """``muon.newton_schulz.MatrixOperations`` on Triton's kernels."""

    def allocate(self, batch: int, n: int, m: int, like: Tensor, dtype: torch.dtype) -> Tensor:
        padded_n, padded_m = _round_up(n), _round_up(m)
        new = like.new_empty if (n, m) == (padded_n, padded_m) else like.new_zeros
        return new((batch, padded_n, padded_m), dtype=dtype)

    def normalize(self, G: Tensor, X: Tensor, eps: float) -> None:
        if G.is_contiguous() and G.dtype in stages.DTYPES:
            stages.normalize(G, X, eps)
        else:
            normalize(G.clone(), X, eps)

    def gram(self, X: Tensor) -> Tensor:
        return self.symmetric(X, X, 1.0)

    def symmetric(self, A: Tensor, B: Tensor, alpha: float, *terms: tuple[float, Tensor]) -> Tensor:
        batch, n, _ = A.shape
        if n <= LONGEST_HOPPER_SYMMETRIC and hopper.symmetric_tiles(batch, n) > 2 * _hopper_processors(A):
            return hopper.symmetric_product(A, B, alpha, *terms)
        return products.symmetric_product(A, B, alpha, *terms)

    def update(self, B: Tensor, X: Tensor, a: float, out: Tensor | None = None) -> Tensor:
        batch, n, m = X.shape
        if n <= LONGEST_HOPPER_UPDATE and hopper.tiles(batch, n, m) > 4 * _hopper_processors(X):
            return hopper.update(B, X, a, out)
        return products.update(B, X, a, out)


def _round_up(size: int) -> int:
    return -(-size // stages.ALIGNMENT) * stages.ALIGNMENT


def _hopper_processors(tensor: Tensor) -> float:
    """Multiprocessors that can run ``hopper.py`` on this tensor; infinitely many, so that none is busy, if none can."""
    suits = tensor.is_cuda and tensor.element_size() == 2 and hopper.is_hopper(tensor.device)
    return hopper.processors(tensor.device) if suits else math.inf
