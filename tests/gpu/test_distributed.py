"""Muon over several GPUs, through NCCL; on CPUs tests/distributed has everything else."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).parents[1] / "distributed"))

GPUS = torch.cuda.device_count()


@pytest.mark.skipif(GPUS < 2, reason="needs at least two GPUs")
@pytest.mark.parametrize("backend", ["nccl", "cpu:gloo,cuda:nccl"])
def test_many_gpus_are_as_exact_as_one(backend):
    from gpu_checks import against_float64
    from ranks import run_on_ranks

    run_on_ranks(against_float64, min(GPUS, 4), seconds=200.0, backend=backend)


@pytest.mark.skipif(GPUS < 2, reason="needs at least two GPUs")
@pytest.mark.parametrize("check", ["replayed_steps", "replayed_steps_of_shards"])
def test_steps_that_are_replayed(check):
    import gpu_checks
    from ranks import run_on_ranks

    run_on_ranks(getattr(gpu_checks, check), min(GPUS, 4), seconds=400.0, backend="cpu:gloo,cuda:nccl")
