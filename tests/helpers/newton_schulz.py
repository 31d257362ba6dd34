"""What several tests of the orthogonalisation share."""

import torch
from torch import Tensor

from muon.polynomials import schedule


def truth(G: Tensor, ns_coefficients, ns_steps: int = 5) -> Tensor:
    """U p(S / ‖G‖) Vᵀ in float64, from the singular value decomposition."""
    G = G.double()
    largest = G.abs().amax((-2, -1), keepdim=True)
    U, S, Vh = torch.linalg.svd(G / largest.masked_fill(largest == 0, 1), full_matrices=False)
    norm = S.norm(dim=-1, keepdim=True)
    S = S / norm.masked_fill(norm == 0, 1)
    for a, b, c in schedule(ns_coefficients, ns_steps):
        S = a * S + b * S**3 + c * S**5
    return U * S[..., None, :] @ Vh


def spectrum(name: str, batch: int, rows: int, cols: int, generator: torch.Generator, device="cpu") -> Tensor:
    """A float64 batch of matrices with singular values of the named kind."""
    n = min(rows, cols)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64, device=device)

    if name == "gaussian":
        return randn(batch, rows, cols)
    if name == "low rank":
        rank = max(1, n // 8)
        return randn(batch, rows, rank) @ randn(batch, rank, cols)
    U = torch.linalg.qr(randn(batch, rows, n)).Q
    V = torch.linalg.qr(randn(batch, cols, n)).Q
    if name == "log-spaced":
        S = torch.logspace(0, -6, n, dtype=torch.float64, device=device).expand(batch, n)
    else:  # near-orthogonal
        S = 1 + 0.05 * randn(batch, n)
    return U * S[:, None] @ V.mT


SPECTRA = ("gaussian", "log-spaced", "low rank", "near-orthogonal")


def plain_newton_schulz(G: Tensor, steps, dtype: torch.dtype) -> Tensor:
    """The iteration as one would write it in torch, everything after the norm in ``dtype``: the error to beat."""
    X = G.mT if G.shape[-2] > G.shape[-1] else G
    largest = X.abs().amax((-2, -1), keepdim=True)
    X = X / largest.masked_fill(largest == 0, 1)
    X = (X / X.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-7)).to(dtype)
    for a, b, c in steps:
        A = X @ X.mT
        X = a * X + (b * A + c * A @ A) @ X
    return X.mT if G.shape[-2] > G.shape[-1] else X


def error(result: Tensor, expected: Tensor) -> float:
    """Frobenius norm of the difference, relative to the expected; NaN if any entry is."""
    norm = torch.linalg.vector_norm(expected.double())
    return float(torch.linalg.vector_norm(result.double() - expected.double()) / norm.clamp(min=1e-300))
