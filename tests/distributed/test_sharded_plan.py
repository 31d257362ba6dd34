"""The planned step of sharded parameters trains as one process does, to the bit, on Triton's interpreter."""

import pytest
import torch.distributed as dist

if not dist.is_available() or not dist.is_gloo_available():
    pytest.skip(reason="this torch is built without gloo", allow_module_level=True)
pytest.importorskip("triton", reason="kernels need triton, which is for Linux only")

from ranks import run_on_ranks
from sharded_checks import CHECKS, run_checks


@pytest.fixture(scope="module")
def outcomes() -> list[list[str]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")  # also beside a GPU
        return run_on_ranks(run_checks, 4, list(CHECKS), seconds=300.0)


@pytest.mark.parametrize("name", CHECKS)
def test_it(outcomes, name):
    """A check that fails keeps the later ones from running, since its ranks may be out of step."""
    for passed in outcomes:
        assert name in passed, passed[-1]
