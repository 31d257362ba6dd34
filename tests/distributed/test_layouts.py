"""Every layout trains as one process does: parameters, state, with and without the options.

Starting processes and importing torch costs seconds, so all checks run in one spawn of four ranks.
"""

import pytest
import torch
import torch.distributed as dist

if not dist.is_available() or not dist.is_gloo_available():
    pytest.skip("this torch is built without gloo", allow_module_level=True)

from checks import CHECKS, run_checks
from ranks import run_on_ranks

from muon import Muon


@pytest.fixture(scope="module")
def outcomes() -> list[list[str]]:
    return run_on_ranks(run_checks, 4, list(CHECKS))


@pytest.mark.parametrize("name", CHECKS)
def test_it(outcomes, name):
    """A check that fails keeps the later ones from running, since its ranks may be out of step."""
    for passed in outcomes:
        assert name in passed, passed[-1]


@pytest.mark.parametrize("attribute", ["_is_flat_param", "_fsdp_flattened"])
def test_flat_parameters_of_the_first_fsdp_are_refused(attribute):
    flat = torch.nn.Parameter(torch.randn(12))
    setattr(flat, attribute, True)
    with pytest.raises(ValueError, match="fully_shard"):
        Muon([flat])
