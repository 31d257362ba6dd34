"""Without a GPU the Triton kernels run in Triton's interpreter, which has to be chosen before any kernel is defined."""

import os
import sys
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

torch.set_num_threads(1)  # the tensors are small: a second thread costs more than it does

sys.path.append(str(Path(__file__).parent))  # for `from helpers...` in the tests

try:
    from hypothesis import Phase, settings

    # The same examples everywhere; shrinking a failure in the interpreter would outlast the patience of CI.
    settings.register_profile(
        "repeatable", derandomize=True, deadline=None, phases=[Phase.explicit, Phase.generate], database=None
    )
    settings.load_profile("repeatable")
except ImportError:  # tests/gpu does without
    pass


@pytest.fixture
def uninitialized_memory_is_nan():
    """Whatever a kernel or operator forgets to write is NaN."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)
