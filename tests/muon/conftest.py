import pytest


@pytest.fixture(autouse=True)
def no_bfloat16_processor(monkeypatch):
    """The same here on every processor: the optimizer's step on a CPU iterates in float32, unless a test asks."""
    monkeypatch.setattr("muon.optimizer.multiplies_bfloat16", lambda: False)


@pytest.fixture(params=[False, True], ids=["float32 products", "bfloat16 products"])
def any_processor(request, monkeypatch, no_bfloat16_processor):
    """Both kinds of processor: whether it multiplies bfloat16 natively."""
    monkeypatch.setattr("muon.optimizer.multiplies_bfloat16", lambda: request.param)
    return request.param
