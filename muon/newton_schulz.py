"""Newton-Schulz orthogonalisation of a batch of matrices, by matrix products alone.

An odd polynomial of a matrix X = U S Vᵀ acts on its singular values only: a X + b XXᵀX + c (XXᵀ)²X = U p(S) Vᵀ. A few
such steps push every singular value towards 1, and the result towards U Vᵀ, the closest semi-orthogonal matrix.

Both iterations below are written over the operations of ``MatrixOperations``: plain torch here, Triton in
``muon.kernels.operations``. They work on batches X (batch, n, m) with n <= m, scaled to Frobenius norm 1.
"""

import importlib.util
import os
from collections.abc import Sequence
from functools import cache
from typing import Literal, Protocol, TypeAlias

import torch
from torch import Tensor
from torch.nn import Parameter

from muon.matrices import SMALLEST_EPS, normalize
from muon.polynomials import KELLER_JORDAN, Coefficients, Triple, schedule

Method: TypeAlias = Literal["auto", "standard", "gram"]
Backend: TypeAlias = Literal["auto", "torch", "triton"]
Iteration: TypeAlias = Literal["standard", "gram", "small"]


# Bytes that a step may hold beside parameters, gradients and state, unless told otherwise; more layers than that allows
# go through it one part after the other.
DEFAULT_WORKSPACE = 2**31


class MatrixOperations(Protocol):
    """What an iteration is made of. Each operation rounds once, after its epilogue."""

    def allocate(self, batch: int, n: int, m: int, like: Tensor, dtype: torch.dtype) -> Tensor:
        """A (batch, n', m') tensor with n' >= n and m' >= m, zero where it is padding."""
        ...

    def normalize(self, G: Tensor, X: Tensor, eps: float) -> None:
        """X = each matrix of G (batch, rows, cols) over its norm, transposed if it is tall."""
        ...

    def gram(self, X: Tensor) -> Tensor:
        """X Xᵀ, (batch, n, n)."""
        ...

    def symmetric(self, A: Tensor, B: Tensor, alpha: float, *terms: tuple[float, Tensor]) -> Tensor:
        """alpha A B + Σ beta C over the terms (beta, C), all symmetric (batch, n, n), A and B commuting."""
        ...

    def update(self, B: Tensor, X: Tensor, a: float, out: Tensor | None = None) -> Tensor:
        """a X + B X, (batch, n, m), for B (batch, n, n), in ``out`` if that is given."""
        ...


class TorchOperations:
    """The operations in plain torch, batched."""

    def allocate(self, batch: int, n: int, m: int, like: Tensor, dtype: torch.dtype) -> Tensor:
        return like.new_empty(batch, n, m, dtype=dtype)

    def normalize(self, G: Tensor, X: Tensor, eps: float) -> None:
        normalize(G.clone(), X, eps)

    def gram(self, X: Tensor) -> Tensor:
        return X @ X.mT

    def symmetric(self, A: Tensor, B: Tensor, alpha: float, *terms: tuple[float, Tensor]) -> Tensor:
        (beta, C), *rest = terms
        product = torch.baddbmm(C, A, B, beta=beta, alpha=alpha)
        for beta, C in rest:
            product = product.add_(C, alpha=beta)
        return product

    def update(self, B: Tensor, X: Tensor, a: float, out: Tensor | None = None) -> Tensor:
        return torch.baddbmm(X, B, X, beta=a, out=out)


def standard_iteration(X: Tensor, steps: Sequence[Triple], ops: MatrixOperations, out: Tensor | None = None) -> Tensor:
    """U p(S) Vᵀ, three products a step: A = XXᵀ, B = bA + cA², X ← aX + BX."""
    for left, (a, b, c) in zip(reversed(range(len(steps))), steps, strict=True):
        A = ops.gram(X)
        B = ops.symmetric(A, A, c, (b, A))
        X = ops.update(B, X, a, None if left else out)
    return X


def gram_iteration(X: Tensor, steps: Sequence[Triple], ops: MatrixOperations, out: Tensor | None = None) -> Tensor:
    """U p(S) Vᵀ, iterating on the small Gram matrix R = XXᵀ and touching X only at restarts.

    With Z = bR + cR² a step is X ← (Z + aI) X, hence R ← (Z + aI) R (Z + aI), and the factors collect in a polynomial
    of R, kept as Q + qI so that the identity is never rounded. Rounding errors of R grow as small singular values
    do, so X and R are formed anew before the growth since the last time would pass ``RESTART_GROWTH``.

    Source: Dao-AILab/gram-newton-schulz, https://github.com/Dao-AILab/gram-newton-schulz
    """
    found = segments(steps)
    for left, segment in zip(reversed(range(len(found))), found, strict=True):
        R = ops.gram(X)
        Q, q = _gram_segment(R, segment, ops)
        X = ops.update(Q, X, q, None if left else out)
    return X


# The product of the steps' slopes at 0 that one Gram matrix may serve. In float16 a Gram matrix that serves 60
# (Quintic's first three steps) diverges on matrices of low rank; 48 restarts Polar Express and Quintic before their
# third step, Keller Jordan's before its fourth (docs/lab-notes.md).
RESTART_GROWTH = 48.0


# Restarts are cheap in the portable kernel for small matrices, and small matrices need them more. Hopper's adds the
# first segment's shift to a G that was never rounded, and is as accurate with RESTART_GROWTH.
SMALL_RESTART_GROWTH = 20.0
LARGEST_SMALL_SIDE = 128


def segments(steps: Sequence[Triple], most_growth: float = RESTART_GROWTH) -> list[list[Triple]]:
    """The steps cut where the Gram iteration restarts."""
    found: list[list[Triple]] = []
    growth = float("inf")
    for triple in steps:
        growth *= triple[0]
        if growth > most_growth:
            found.append([])
            growth = triple[0]
        found[-1].append(triple)
    return found


def _gram_segment(R: Tensor, steps: Sequence[Triple], ops: MatrixOperations) -> tuple[Tensor, float]:
    """(Q, q) with Q + qI = the product of the steps' factors (Z + aI)."""
    Q, q = R, 1.0
    for index, (a, b, c) in enumerate(steps):
        Z = ops.symmetric(R, R, c, (b, R))
        Q = ops.symmetric(Q, Z, 1.0, (a, Q), (q, Z)) if index else Z
        q *= a
        if index < len(steps) - 1:
            RZ = ops.symmetric(R, Z, 1.0, (a, R))
            R = ops.symmetric(Z, RZ, 1.0, (a, RZ))
    return Q, q


@torch.no_grad()
def orthogonalize(
    G: Tensor,
    ns_coefficients: Coefficients = KELLER_JORDAN,
    ns_steps: int = 5,
    eps: float = 1e-7,
    *,
    method: Method = "auto",
    dtype: torch.dtype | None = None,
    backend: Backend = "auto",
) -> Tensor:
    """The (nearly) closest semi-orthogonal matrix of each matrix in ``G``, by Newton-Schulz.

    With the singular value decomposition G = U S Vᵀ, returns U p(S / ‖G‖) Vᵀ: ‖G‖ is the Frobenius norm and p the
    schedule of odd polynomials that ``ns_coefficients`` and ``ns_steps`` name (see ``muon.polynomials.schedule``).
    A zero matrix gives zero. The scale of ``G`` doesn't matter. A NaN spoils its own matrix only. The result carries no
    gradient.

    Args:
        G: (..., rows, cols), any floating dtype, any strides, also of size 0.
        ns_coefficients: a triple (a, b, c) for every step, a preset's name, or a sequence of triples, one a step.
        ns_steps: number of steps.
        eps: smallest norm to divide by, after ``G`` has been divided by its largest magnitude.
        method: ``"standard"`` multiplies X at every step; ``"gram"`` iterates on the smaller XXᵀ, cheaper the longer
            the matrix; ``"auto"`` is the cheaper one with Triton and ``"standard"`` without.
        dtype: of the iteration. Default: float64 for float64 input; otherwise on a CPU float32, elsewhere bfloat16 for
            ``"standard"`` and float16 for ``"gram"``, which bfloat16 is too coarse for.
        backend: ``"triton"`` (GPU), ``"torch"`` (anywhere), or ``"auto"``: Triton for CUDA tensors where installed,
            except in float64.

    Returns:
        (..., rows, cols) in the dtype of ``G``.

    Raises:
        TypeError: ``G`` or ``dtype`` is not a real floating dtype.
        ValueError: ``G`` has fewer than two dimensions; a negative ``eps``; an unknown method or backend; a backend
            that can't run here, or not in this dtype; bad coefficients.

    Example:
        >>> import torch
        >>> from muon import orthogonalize
        >>> O = orthogonalize(torch.randn(3, 64, 32), "converged")
        >>> torch.allclose(O.mT @ O, torch.eye(32).expand(3, 32, 32), atol=1e-3)
        True

    Source: Keller Jordan et al., https://kellerjordan.github.io/posts/muon/
    """
    if not G.is_floating_point():
        raise TypeError(f"G should have a real floating dtype but has: {G.dtype}")
    if G.ndim < 2:
        raise ValueError(f"G should have at least 2 dimensions, (..., rows, cols), but has shape: {tuple(G.shape)}")
    if method not in ("auto", "standard", "gram"):
        raise ValueError(f"method should be 'auto', 'standard' or 'gram' but is: {method!r}")
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise TypeError(f"dtype should be a real floating dtype but is: {dtype!r}")
    if not eps >= 0.0:
        raise ValueError(f"eps should be >= 0 but is: {eps}")
    eps = max(eps, SMALLEST_EPS)
    steps = schedule(ns_coefficients, ns_steps)
    use_triton = uses_triton(backend, G, dtype)
    if G.numel() == 0:
        return G.clone()

    rows, cols = G.shape[-2:]
    flat = G.resolve_neg().reshape(-1, rows, cols)  # kernels see the memory as it is
    batch, n, m = len(flat), min(rows, cols), max(rows, cols)
    iteration = pick_iteration(method, steps, n, m, dtype, use_triton)
    dtype = dtype or pick_dtype(iteration, G.dtype, G.device)
    if iteration == "small":
        return _small_iteration(flat, steps, dtype, eps).reshape(G.shape)
    ops = operations(use_triton)
    X = ops.allocate(batch, n, m, G, dtype)
    ops.normalize(flat, X, eps)
    X = iterate(X, steps, iteration, ops)[:, :n, :m]
    return (X.mT if rows > cols else X).to(G.dtype).reshape(G.shape)


def iterate(
    X: Tensor, steps: Sequence[Triple], iteration: Iteration, ops: MatrixOperations, out: Tensor | None = None
) -> Tensor:
    """U p(S) Vᵀ of each matrix of X (batch, n, m), n <= m, of norm 1, in the dtype of X under autocast too.

    In ``out``, as large as X, if the last thing done is a product.
    """
    device = X.device.type
    if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
        with torch.autocast(device, enabled=False):
            return iterate(X, steps, iteration, ops, out)
    if iteration == "small":
        return _small_iteration(X, steps, X.dtype, eps=None)
    return (gram_iteration if iteration == "gram" else standard_iteration)(X, steps, ops, out)


def _small_iteration(G: Tensor, steps: Sequence[Triple], dtype: torch.dtype, eps: float | None) -> Tensor:
    from muon.kernels.small import orthogonalize_small

    return orthogonalize_small(G, steps, dtype, eps)


def pick_iteration(
    method: Method, steps: Sequence[Triple], n: int, m: int, dtype: torch.dtype | None, use_triton: bool
) -> Iteration:
    """The iteration that a method means for (n, m) matrices.

    ``"auto"`` is what does fewer operations, symmetric products counted as half, on Triton's kernels, and the standard
    iteration elsewhere. A Gram iteration of small matrices has a kernel of its own.
    """
    if use_triton and method != "standard" and n <= LARGEST_SMALL_SIDE and steps and dtype in (None, torch.float16):
        return "small"
    if method != "auto":
        return method
    ratio = m / n  # costs are in units of n³ multiply-adds
    standard = len(steps) * (3 * ratio + 1)
    gram = sum(3 * ratio + 4 * len(segment) - 3 for segment in segments(steps))
    return "gram" if use_triton and gram < 0.9 * standard else "standard"


def pick_dtype(iteration: Iteration, dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """The default dtype of an iteration: bfloat16 is too coarse for a Gram matrix."""
    if device.type == "cpu" or dtype == torch.float64:
        return torch.promote_types(dtype, torch.float32)
    return torch.bfloat16 if iteration == "standard" else torch.float16


def memory(iteration: Iteration, n: int, m: int, dtype: torch.dtype) -> int:
    """Bytes that an iteration holds at its height for each (n, m) matrix of a batch, its input included."""
    n, m = (-(-side // 16) * 16 for side in (n, m))  # as padded for the kernels
    square = {"standard": 2, "gram": 7, "small": 0}[iteration]
    return (3 * n * m + square * n * n) * dtype.itemsize


def operations(use_triton: bool) -> MatrixOperations:
    if not use_triton:
        return TorchOperations()
    from muon.kernels.operations import TritonOperations

    return TritonOperations()


def uses_triton(backend: Backend, G: Tensor, dtype: torch.dtype | None = None) -> bool:
    """Whether the backend is Triton's, for this tensor and an iteration in this dtype."""
    if backend not in ("auto", "torch", "triton"):
        raise ValueError(f"backend should be 'auto', 'torch' or 'triton' but is: {backend!r}")
    is_double = (dtype or G.dtype) == torch.float64
    is_plain = type(G) in (Tensor, Parameter)  # a subclass, such as a DTensor, may have its elements elsewhere
    if backend == "triton" and not _has_triton():
        raise ValueError("backend='triton' needs the package triton, which is not installed: use 'torch' or 'auto'")
    if backend == "triton" and not (G.is_cuda or _interpreting()):
        raise ValueError(f"backend='triton' needs a CUDA tensor but G is on: {G.device}")
    if backend == "triton" and not is_plain:
        raise ValueError(f"backend='triton' needs a plain tensor but G is a: {type(G).__name__}")
    if backend == "triton" and is_double:
        raise ValueError("backend='triton' has no float64: use 'torch', or another dtype")
    return backend == "triton" or (backend == "auto" and G.is_cuda and is_plain and not is_double and _has_triton())


@cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def _interpreting() -> bool:
    """Triton's interpreter runs kernels on CPU tensors."""
    return os.environ.get("TRITON_INTERPRET") == "1"
