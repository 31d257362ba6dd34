"""QKClip against a loop over heads in float64, on two ranks, and in a training whose logits explode without it."""

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from helpers.layers import DenseSelfAttention
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from attention import SelfAttention
from muon import Muon, QKClip, param_groups

ROOT = Path(__file__).parents[2]
logits = st.sampled_from([-math.inf, -7.0, 0.0, 1e-3, 1.0, 99.0, 100.0, 101.0, 250.0, 1e6, math.inf, math.nan])


class Layer(nn.Module):
    """What QKClip needs to know of an attention layer, and nothing else."""

    def __init__(self, heads_q, heads_k, dtype=torch.float32):
        super().__init__()
        self.query = nn.Parameter(torch.randn(heads_q, 4, 6, dtype=dtype))
        self.key = nn.Parameter(torch.randn(heads_k, 4, 6, dtype=dtype))
        self.max_logits = None

    def qk_weights(self):
        return self.query.detach(), self.key.detach()


def optimizer_of(model):
    """One whose steps do nothing by themselves: no parameter has a gradient."""
    return torch.optim.SGD(model.parameters(), lr=1.0)


def expected(layer, max_logits, threshold, alpha):
    """Query and key in float64 after a clip, head by head."""
    query, key = layer.query.detach().double(), layer.key.detach().double()
    gammas = [threshold / s if threshold < s < math.inf else 1.0 for s in max_logits]
    group = len(query) // len(key)
    for head_k in range(len(key)):
        heads = range(head_k * group, (head_k + 1) * group)
        gamma = min(gammas[head] for head in heads)
        for head in heads:
            query[head] *= gamma**alpha
        key[head_k] *= gamma ** (1 - alpha)
    return query, key


@settings(max_examples=100, deadline=None, derandomize=True)
@given(data=st.data(), alpha=st.sampled_from([0.0, 0.3, 0.5, 1.0]), threshold=st.sampled_from([100.0, 0.5]))
def test_against_a_loop_over_heads(data, alpha, threshold):
    torch.manual_seed(0)
    layers = []
    for _ in range(data.draw(st.integers(1, 3))):
        heads_k, group = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 3))
        layers.append(Layer(heads_k * group, heads_k))
    drawn = [data.draw(st.lists(logits, min_size=len(x.query), max_size=len(x.query))) for x in layers]
    truth = [expected(layer, x, threshold, alpha) for layer, x in zip(layers, drawn, strict=True)]
    model = nn.Sequential(nn.Linear(3, 3), *layers)
    optimizer = optimizer_of(model)
    clip = QKClip(model, optimizer, threshold, alpha)
    for layer, x in zip(layers, drawn, strict=True):
        layer.max_logits = torch.tensor(x)
    optimizer.step()
    for layer, x, (query, key) in zip(layers, drawn, truth, strict=True):
        torch.testing.assert_close(layer.query.double(), query, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(layer.key.double(), key, rtol=1e-6, atol=1e-6)
        assert torch.equal(layer.max_logits.nan_to_num(), torch.tensor(x).nan_to_num())
    seen = torch.tensor([s for x in drawn for s in x]).tolist()  # rounded to float32
    found = clip.metrics()
    assert found["clipped_heads"] == clip.num_clipped.item() == sum(threshold < s < math.inf for s in seen)
    has_nan = any(map(math.isnan, seen))
    assert math.isnan(found["max_logit"]) if has_nan else found["max_logit"] == max(seen)


def test_a_compiled_layer_is_clipped_once():
    """torch.compile's wrapper has the attributes of what it wraps: both were found, and clipped."""
    layer = Layer(2, 2)
    model = nn.ModuleList([torch.compile(layer, backend="eager")])
    before = layer.query.detach().clone()
    optimizer = optimizer_of(model)
    clip = QKClip(model, optimizer, threshold=100.0)
    layer.max_logits = torch.tensor([400.0, 1.0])
    optimizer.step()
    torch.testing.assert_close(layer.query[0], before[0] / 2)
    assert clip.num_clipped == 1


def test_what_is_under_the_threshold_stays_to_the_bit():
    for dtype in (torch.float32, torch.bfloat16):
        layer = Layer(4, 2, dtype)
        before = [x.clone() for x in layer.qk_weights()]
        optimizer = optimizer_of(layer)
        QKClip(layer, optimizer)
        optimizer.step()  # no forward pass yet
        layer.max_logits = torch.tensor([100.0, -1e9, -math.inf, 400.0])
        optimizer.step()
        query, key = layer.qk_weights()
        assert query[:2].equal(before[0][:2]) and key[0].equal(before[1][0])
        torch.testing.assert_close(query[2:], before[0][2:] / 2)
        torch.testing.assert_close(key[1], before[1][1] / 2)


@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("options", [{}, {"bias": True}, {"dtype": torch.float64}])
def test_the_same_input_then_reaches_the_threshold(options, alpha):
    torch.manual_seed(0)
    layer = DenseSelfAttention(48, 6, 2, max_logits=True, **options)
    with torch.no_grad():
        if layer.qkv.bias is not None:
            layer.qkv.bias.normal_(std=3)
        layer.qk_weights()[0][:3].mul_(30)  # the second group stays under the threshold
    x = torch.randn(2, 9, 48, dtype=layer.qkv.weight.dtype)
    layer(x)
    before, threshold = layer.max_logits.clone(), layer.max_logits[:3].amax().item() / 3
    assert before[3:].amax() < threshold
    optimizer = optimizer_of(layer)
    QKClip(layer, optimizer, threshold, alpha)
    optimizer.step()
    assert layer.max_logits.equal(torch.full((6,), -torch.inf))
    layer(x)
    factor = torch.tensor([1 / 3] * 3 + [1.0] * 3)  # the whole group follows its largest head
    torch.testing.assert_close(layer.max_logits, before * factor, rtol=1e-5, atol=1e-5)


def test_micro_batches_count_together():
    torch.manual_seed(0)
    layer = DenseSelfAttention(32, 2, max_logits=True)
    large, small = 100 * torch.randn(1, 5, 32), torch.randn(1, 5, 32)
    optimizer = optimizer_of(layer)
    clip = QKClip(layer, optimizer, threshold=20.0)
    for x in (large, small):
        layer(x).sum().backward()
    optimizer.zero_grad()
    assert clip.metrics() == {"clipped_heads": 0, "max_logit": -math.inf}
    reached = layer.max_logits.max().item()
    optimizer.step()
    assert clip.metrics() == {"clipped_heads": 2, "max_logit": reached}
    layer(large)
    torch.testing.assert_close(layer.max_logits, torch.full((2,), 20.0))


def test_momentum_is_left_alone_and_the_hook_can_be_removed():
    torch.manual_seed(0)
    layer, other = (SelfAttention(32, 2, max_logits=True) for _ in range(2))
    other.load_state_dict(layer.state_dict())
    states = []
    for module, clips in ((layer, True), (other, False)):
        optimizer = Muon(module.parameters(), lr=0.0)
        clip = QKClip(module, optimizer, threshold=1.0)
        if not clips:
            clip.remove()
        for parameter in module.parameters():
            parameter.grad = torch.ones_like(parameter)
        module.update_max_logits(torch.full((2,), 4.0))
        optimizer.step()
        states.append(optimizer.state[module.qkv.weight]["momentum_buffer"])
    assert states[0].equal(states[1])
    torch.testing.assert_close(layer.qkv.weight[:64], other.qkv.weight[:64] / 2)
    assert layer.qkv.weight[64:].equal(other.qkv.weight[64:])


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        (nn.Linear(3, 3), {}, r"no module with max_logits and qk_weights\(\): SelfAttention\(max_logits=True\)"),
        (SelfAttention(32, 2), {}, "no module with max_logits"),
        (nn.Sequential(SelfAttention(32, 2, qk_norm=True, max_logits=True)), {}, "0 has qk_norm: its logits don't"),
        (Layer(2, 2), {"threshold": 0.0}, "threshold should be a number above 0 but is: 0.0"),
        (Layer(2, 2), {"threshold": math.nan}, "threshold should be a number above 0 but is: nan"),
        (Layer(2, 2), {"alpha": 1.5}, "alpha should be from 0 to 1 but is: 1.5"),
    ],
)
def test_errors(model, options, message):
    with pytest.raises(ValueError, match=message):
        QKClip(model, optimizer_of(model), **options)


TWO_RANKS = """
import math
import os
import sys

import torch
import torch.distributed as dist
from torch import nn

from muon import QKClip
from tests.muon.test_qk_clip import Layer, expected, optimizer_of

rank = int(sys.argv[1])
dist.init_process_group("gloo", init_method=f"file://{sys.argv[2]}", rank=rank, world_size=2)
torch.manual_seed(0)
model = nn.Sequential(Layer(4, 2), Layer(2, 2), Layer(2, 1))
seen = [[300.0, 1.0, 2.0, -math.inf], [50.0, 101.0], None], [[1.0, 200.0, 5.0, 400.0], [70.0, 1e4], [500.0, 2.0]]
together = [300.0, 200.0, 5.0, 400.0], [70.0, 1e4], [500.0, 2.0]
truth = [expected(layer, x, 100.0, 0.5) for layer, x in zip(model, together)]
optimizer = optimizer_of(model)
clip = QKClip(model, optimizer)
for layer, x in zip(model, seen[rank]):
    layer.max_logits = None if x is None else torch.tensor(x)
collectives, all_reduce = [], dist.all_reduce
dist.all_reduce = lambda *args, **kwargs: collectives.append(1) or all_reduce(*args, **kwargs)
optimizer.step()
for layer, (query, key) in zip(model, truth):
    torch.testing.assert_close(layer.query.double(), query, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(layer.key.double(), key, rtol=1e-6, atol=1e-6)
assert clip.metrics() == {"clipped_heads": 5, "max_logit": 1e4} and len(collectives) == 1
dist.barrier()
dist.destroy_process_group()
os._exit(0)  # the group's threads now and then outlive Python, which then aborts
"""


def test_two_ranks_clip_by_the_larger_logit(tmp_path):
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}", "OMP_NUM_THREADS": "1"}
    commands = [[sys.executable, "-c", TWO_RANKS, str(rank), str(tmp_path / "store")] for rank in range(2)]
    ranks = [subprocess.Popen(x, cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True) for x in commands]
    try:
        for process in ranks:
            _, errors = process.communicate(timeout=120)
            assert process.returncode == 0, errors
    finally:
        for process in ranks:
            process.kill()


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.attention = DenseSelfAttention(width, 4, 2, max_logits=True)
        self.up = nn.Linear(width, 2 * width, bias=False)
        self.down = nn.Linear(2 * width, width, bias=False)

    def forward(self, x):
        x = x + self.attention(F.rms_norm(x, x.shape[-1:]))
        return x + self.down(F.relu(self.up(F.rms_norm(x, x.shape[-1:]))))


def train(threshold, steps=120):
    """A model that learns to repeat what it has read, at a learning rate that is too large: the largest logit of each
    step, and the losses."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(16, 32), Block(32), Block(32), nn.RMSNorm(32), nn.Linear(32, 16))
    overrides = {"*.qkv.weight": {"split": (32, 16, 16)}, "4.weight": "adamw"}
    muon, adamw = {"lr": 0.1, "weight_decay": 0.0}, {"lr": 3e-3, "weight_decay": 0.0}
    optimizer = Muon(param_groups(model, muon=muon, adamw=adamw, overrides=overrides))
    QKClip(model, optimizer, threshold)
    largest, losses = [], []
    for _ in range(steps):
        tokens = torch.randint(16, (32, 6)).repeat(1, 3)
        loss = F.cross_entropy(model(tokens)[:, 5:-1].flatten(0, 1), tokens[:, 6:].flatten())
        loss.backward()
        largest.append(max(block.attention.max_logits.max().item() for block in model[1:3]))
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return largest, losses


def test_training_stays_near_the_threshold_at_the_same_loss():
    threshold = 30.0
    unclipped, unclipped_losses = train(threshold=1e9)
    clipped, clipped_losses = train(threshold)
    assert max(unclipped) > 10 * threshold
    assert max(clipped) < 1.5 * threshold, "further over it than the logits grow in a step"
    assert sum(clipped[-20:]) / 20 < 1.2 * threshold
    final, unclipped_final = sum(clipped_losses[-20:]), sum(unclipped_losses[-20:])
    assert final < 1.1 * unclipped_final < 0.1 * sum(unclipped_losses[:20])
