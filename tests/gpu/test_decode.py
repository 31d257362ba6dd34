"""Generation on a GPU: the decode kernels against float64, captured, compiled, and without waiting for the device."""

import pytest
import torch

from attention import SelfAttention
from tests.attention.test_decode import check_decode, operands

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


@pytest.fixture
def no_waiting():
    """Whatever makes the host wait for the device is an error."""
    torch.cuda.set_sync_debug_mode("error")
    yield
    torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("window_left", [None, 700])
@pytest.mark.parametrize("group", [1, 4, 7])
@pytest.mark.parametrize("width", [32, 64, 80, 128, 192, 256])
def test_head_widths(width, group, window_left):
    torch.manual_seed(0)
    tensors = operands(4, 1, 3000, 2, group, width, width, BF16, device="cuda")
    check_decode(*tensors, [3000, 1, 1777, 64], window_left)


@pytest.mark.parametrize("dtype", [FP16, FP32])
@pytest.mark.parametrize("width", [64, 128, 256])
def test_dtypes(width, dtype):
    torch.manual_seed(0)
    check_decode(*operands(3, 2, 1000, 2, 4, width, width, dtype, device="cuda"), [1000, 2, 517], window_left=300)


@pytest.mark.parametrize("seqlen", [1, 2, 5, 16, 40])
@pytest.mark.parametrize("group", [1, 5, 8])
def test_several_tokens(group, seqlen):
    torch.manual_seed(0)
    for window_left in (None, 10):
        tensors = operands(3, seqlen, 700, 2, group, 64, 64, BF16, device="cuda")
        check_decode(*tensors, [700, seqlen, 333], window_left)


@pytest.mark.parametrize(("width", "width_v"), [(40, 24), (24, 40), (17, 9), (192, 128), (16, 256), (1, 1)])
@pytest.mark.parametrize("layout", ["contiguous", "packed"])  # "packed" starts its rows at odd addresses
def test_odd_widths(width, width_v, layout):
    torch.manual_seed(0)
    check_decode(*operands(2, 1, 500, 2, 3, width, width_v, BF16, layout, device="cuda"), [500, 129])


@pytest.mark.parametrize("batch", [1, 16, 300])
def test_batches(batch):
    """From many splits a sequence to one."""
    torch.manual_seed(0)
    lengths = torch.randint(1, 2001, (batch,)).tolist()
    check_decode(*operands(batch, 1, 2000, 8, 1, 16, 16, BF16, device="cuda"), lengths)


def test_zero_sizes():
    for batch, seqlen, capacity in ((0, 1, 8), (2, 0, 8), (2, 1, 0), (2, 1, 8)):
        check_decode(*operands(batch, seqlen, capacity, 2, 2, 64, 64, BF16, device="cuda"), [0] * batch)


def test_repeated_steps_are_bitwise_equal():
    q, k, v = operands(4, 1, 4000, 2, 4, 128, 128, BF16, device="cuda")
    lengths = torch.tensor([4000, 31, 2048, 1], dtype=torch.int32, device="cuda")
    results = [torch.ops.attention.decode(q, k, v, lengths, 0.1, None, "triton") for _ in range(50)]
    assert all(torch.equal(x, results[0]) for x in results)


def test_offsets_beyond_32_bits():
    """The last key head of a cache of more than 2^31 elements."""
    heads, capacity = 2**10, 2**14 + 64
    k = torch.empty(1, heads, capacity, 128, device="cuda", dtype=BF16).transpose(1, 2)
    k[:, :, -1] = torch.randn(capacity, 128, device="cuda")
    q = torch.randn(1, 1, heads, 128, device="cuda", dtype=BF16)
    last = [x[:, :, -1:].contiguous() for x in (q, k)]
    lengths = torch.tensor([capacity], dtype=torch.int32, device="cuda")
    k[:, :, :-1] = 0
    out = torch.ops.attention.decode(q, k, k, lengths, 0.1, None, "triton")[:, :, -1:]
    alone = torch.ops.attention.decode(last[0], last[1], last[1], lengths, 0.1, None, "triton")
    torch.testing.assert_close(out, alone, rtol=0.02, atol=1e-3)  # split differently


def generate(step, x, cache):
    with torch.no_grad():
        return torch.cat([step(token, cache) for token in x.split(1, 1)], 1)


def make(dtype=BF16, **options):
    torch.manual_seed(0)
    layer = SelfAttention(256, 4, 2, device="cuda", dtype=dtype, **options)
    x = torch.randn(3, 120, 256, device="cuda", dtype=dtype)
    cache = layer.new_cache(3, 120)
    with torch.no_grad():
        layer(x[:, :100], cache=cache)
    return layer, x, cache


def test_a_step_never_waits_for_the_device(no_waiting):
    layer, x, cache = make()
    generate(layer, x[:, 100:], cache)


def test_steps_equal_recomputation():
    """In bfloat16 no farther from float32 than twice what the layer without a cache is."""
    layer, x, cache = make()
    result = generate(layer, x[:, 100:], cache)
    with torch.no_grad():
        plain, truth = layer(x)[:, 100:], layer.float()(x.float())[:, 100:]
    assert (result - truth).abs().max() <= 2 * (plain - truth).abs().max() + 1e-6


def test_a_captured_step():
    layer, x, cache = make()
    expected = generate(layer, x[:, 100:], cache)
    cache.lengths.fill_(100)
    token = torch.empty_like(x[:, :1])
    with torch.no_grad():
        graph = torch.cuda.CUDAGraph()
        cache.longest = 100
        with torch.cuda.graph(graph):  # what it is captured with has run above
            out = layer(token, cache=cache)
    assert cache.lengths.tolist() == [100] * 3  # capturing runs nothing

    def step(new, _):
        token.copy_(new)
        graph.replay()
        return out.clone()

    assert torch.equal(generate(step, x[:, 100:], cache), expected)
    assert cache.lengths.tolist() == [120] * 3


def test_compiled_steps():
    layer, x, cache = make(FP32)
    expected = generate(layer, x[:, 100:], cache)
    cache.lengths.fill_(100)
    cache.longest = 100
    compiled = torch.compile(layer, fullgraph=True)
    torch.testing.assert_close(generate(compiled, x[:, 100:], cache), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_other_than_the_current_device():
    layer = SelfAttention(256, 4, 2, device="cuda:1", dtype=BF16)
    x = torch.randn(3, 20, 256, device="cuda:1", dtype=BF16)
    assert generate(layer, x, layer.new_cache(3, 20)).isfinite().all()
