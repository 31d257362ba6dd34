"""Which backend runs a call."""

from __future__ import annotations

import functools
import importlib.util
import os
from typing import Literal, get_args

import torch
from torch import Tensor

from .reference import Options

Backend = Literal["auto", "triton", "hopper", "torch"]
HAS_TRITON = importlib.util.find_spec("triton") is not None
MIN_HOPPER_QUERIES = 128  # with fewer, the portable kernels' smaller tiles waste less


