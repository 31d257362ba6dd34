"""QKClip on a GPU: it never waits for the device, and the compiled layer's logits reach it."""

import pytest
import torch
import torch.nn.functional as F
from helpers.layers import DenseSelfAttention

from attention import SelfAttention, flash_attention
from muon import QKClip


def supported(**option):
    try:
        flash_attention(*torch.randn(3, 1, 2, 1, 8), **option)
    except NotImplementedError:
        return False
    return True


@pytest.mark.skipif(not supported(return_max_logits=True), reason="needs flash_attention(return_max_logits=True)")
@pytest.mark.parametrize("mode", [None, "default", "reduce-overhead"])
def test_clipping_in_training_without_waiting(mode):
    torch.manual_seed(0)
    layer = SelfAttention(128, 4, 2, max_logits=True, device="cuda")
    dense = DenseSelfAttention(128, 4, 2, max_logits=True)
    with torch.no_grad():
        layer.qkv.weight.mul_(10)
    step = layer if mode is None else torch.compile(layer, fullgraph=True, mode=mode)
    optimizer = torch.optim.SGD(layer.parameters(), lr=1e-3)
    clip = QKClip(layer, optimizer, threshold=5.0)
    # A gradient that a CUDA graph made is gone with the next forward pass, so that the second micro-batch could not be
    # added to it (https://github.com/pytorch/pytorch/issues/169545): they are summed in memory outside of the graphs.
    for parameter in layer.parameters():
        parameter.grad = torch.zeros_like(parameter)
    x, clipped = torch.randn(2, 64, 128, device="cuda"), 0
    for i in range(12):
        torch.cuda.set_sync_debug_mode("error" if i > 5 else "default")
        for micro_batch in x.split(1):
            F.mse_loss(step(micro_batch), micro_batch.roll(1, 1)).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        clipped = clipped + clip.num_clipped
    torch.cuda.set_sync_debug_mode("default")
    assert clipped.item() >= 4
    dense.load_state_dict(layer.state_dict())
    dense(x.cpu())
    assert dense.max_logits.max() <= 5.0 * 1.01  # the step before the last clip moved them no further
