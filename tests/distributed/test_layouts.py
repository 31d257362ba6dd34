"""Every layout trains as one process does: parameters, state, with and without the options.

Starting processes and importing torch costs seconds, so all checks run in one spawn of four ranks.
"""

import os
import signal
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

if not dist.is_available() or not dist.is_gloo_available():
    pytest.skip(reason="this torch is built without gloo", allow_module_level=True)

from checkpoints import load_checkpoint, optimizer_of_saved, saved_model, train_saved
from checks import CHECKS, die_in_a_step, run_checks
from ranks import RankError, run_on_ranks

from muon import Muon


@pytest.fixture(scope="module")
def shared_folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("distributed")


@pytest.fixture(scope="module")
def outcomes(shared_folder) -> list[list[str]]:
    os.environ["MUON_TEST_FOLDER"] = str(shared_folder)
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


def test_a_checkpoint_of_three_ranks_goes_on_in_one_process(outcomes, shared_folder):
    """Trained by two, three and no other ranks in turn, against one process that trained all the way."""
    expected = saved_model()
    reference = optimizer_of_saved(expected)
    train_saved(expected, reference, range(5))
    model = saved_model()
    optimizer = optimizer_of_saved(model)
    load_checkpoint(model, optimizer, shared_folder / "three")
    before = expected.get_parameter("experts"), model.get_parameter("experts")
    assert torch.equal(*before)
    train_saved(model, optimizer, range(4, 5))
    for (name, found), p in zip(model.named_parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(found, p, msg=lambda text, name=name: f"{name}: {text}")
        for key, value in reference.state[p].items():
            torch.testing.assert_close(optimizer.state[found][key], value)


def test_a_killed_rank_ends_the_others_with_an_error():
    with pytest.raises(RankError, match="Connection") as error:
        run_on_ranks(die_in_a_step, 3)
    assert error.value.codes == [1, -signal.SIGKILL, 1]
    assert not error.value.late
