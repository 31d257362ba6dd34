"""Without a GPU the Triton kernels run in Triton's interpreter, which has to be chosen before any kernel is defined."""

import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
