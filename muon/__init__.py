"""Muon for PyTorch: the optimizer, its orthogonalisation, and the routing of a model's parameters."""

from muon.newton_schulz import orthogonalize
from muon.optimizer import Muon
from muon.polynomials import PRESETS
from muon.qk_clip import QKClip
from muon.routing import param_groups

__all__ = ["PRESETS", "Muon", "QKClip", "orthogonalize", "param_groups"]
