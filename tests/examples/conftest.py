from collections.abc import Iterator

import pytest
import torch

from examples import train


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> Iterator[None]:
    """Models this small run faster on one thread, and much faster where the cores have other work."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True, scope="session")
def short_sample() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, "SAMPLE_LENGTH", 40)
        yield
