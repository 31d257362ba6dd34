"""flash_attention on a GPU: every head width and dtype against float64, compiled, captured and repeated."""

import pytest
import torch

from attention import SelfAttention, flash_attention, scaled_dot_product_attention
from tests.attention.checks import check, grad, tensor

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def inputs(batch, seqlen_q, seqlen_k, heads_q, heads_k, width, width_v, dtype, layout="contiguous"):
    torch.manual_seed(0)
    shapes = (
        (batch, seqlen_q, heads_q, width),
        (batch, seqlen_k, heads_k, width),
        (batch, seqlen_k, heads_k, width_v),
        (batch, seqlen_q, heads_q, width_v),
    )
    return [tensor(shape, layout, dtype, "cuda") for shape in shapes]


@pytest.mark.parametrize("width", [16, 32, 64, 80, 96, 128, 192, 256])
def test_head_widths(width):
    check(*inputs(2, 1024, 1024, 4, 2, width, width, BF16), causal=True, backend="triton")


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("width", [64, 128])
def test_float16(width, causal):
    check(*inputs(2, 1024, 1024, 4, 2, width, width, FP16), causal=causal, backend="triton")


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("width", [64, 128, 256])
def test_long(width, causal):
    check(*inputs(1, 4096, 4096, 2, 2, width, width, BF16), causal=causal, backend="triton")


@pytest.mark.parametrize("seqlen_k", [1, 64, 127, 300, 1000])
@pytest.mark.parametrize("seqlen_q", [1, 63, 129, 1000])
@pytest.mark.parametrize("width", [64, 128])
def test_odd_lengths(width, seqlen_q, seqlen_k):
    check(*inputs(2, seqlen_q, seqlen_k, 6, 2, width, width, BF16), causal=True, backend="triton")


@pytest.mark.parametrize(("width", "width_v"), [(64, 128), (192, 128), (16, 256), (1, 1)])
def test_values_of_another_width(width, width_v):
    check(*inputs(2, 300, 300, 2, 1, width, width_v, BF16), causal=True, backend="triton")


ODD_WIDTHS = [(40, 24), (24, 40), (17, 9), (33, 20), (100, 60), (5, 70), (72, 72), (88, 40), (13, 13)]


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("layout", ["contiguous", "packed"])  # "packed" starts its rows at odd addresses
@pytest.mark.parametrize(("width", "width_v"), ODD_WIDTHS)
def test_odd_widths(width, width_v, layout, causal):
    check(*inputs(2, 301, 405, 4, 2, width, width_v, BF16, layout), causal=causal, backend="triton")


@pytest.mark.parametrize(("width", "width_v"), ODD_WIDTHS)
def test_odd_widths_in_float16(width, width_v):
    check(*inputs(1, 129, 65, 2, 1, width, width_v, FP16), causal=True, backend="triton")


@pytest.mark.parametrize("layout", ["heads_first", "packed", "width_strided"])
def test_strides(layout):
    q, k, v, grad_out = inputs(2, 300, 400, 4, 2, 64, 64, BF16, layout)
    check(q, k, v, grad_out, causal=True, backend="triton")
    check(q, k, v, grad(q.shape, "expanded", BF16, "cuda"), causal=True, backend="triton")


@pytest.mark.parametrize("width", [32, 64, 128, 256])
def test_float32(width):
    check(*inputs(1, 200, 300, 4, 2, width, width, FP32), causal=True, backend="triton")


@pytest.mark.parametrize("scale", [-0.3, 0.0, 1.0])
def test_scales(scale):
    check(*inputs(1, 200, 300, 2, 2, 64, 64, FP16), causal=True, backend="triton", scale=scale)


def test_zero_sizes():
    for batch, seqlen_q, seqlen_k in ((0, 4, 4), (2, 0, 4), (2, 4, 0)):
        check(*inputs(batch, seqlen_q, seqlen_k, 2, 2, 64, 64, BF16), causal=True, backend="triton")


def test_torch_backend():
    check(*inputs(2, 700, 600, 4, 2, 64, 64, BF16), causal=True, backend="torch")


def test_scaled_dot_product_attention_is_torchs():
    torch.manual_seed(0)
    q = torch.randn(2, 8, 500, 64, device="cuda", dtype=BF16)
    k, v = torch.randn(2, 2, 8, 700, 64, device="cuda", dtype=BF16)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        theirs = torch.nn.functional.scaled_dot_product_attention(q.float(), k.float(), v.float(), is_causal=True)
    ours = scaled_dot_product_attention(q, k, v, is_causal=True)
    torch.testing.assert_close(ours.float(), theirs, rtol=0, atol=0.02)


@pytest.mark.parametrize("width", [64, 128, 256])
def test_repeated_backward_is_bitwise_equal(width):
    *tensors, grad_out = inputs(4, 1024, 1024, 8, 4, width, width, BF16)
    q, k, v = (x.requires_grad_() for x in tensors)
    out = flash_attention(q, k, v, causal=True)
    first = torch.autograd.grad(out, (q, k, v), grad_out, retain_graph=True)
    for _ in range(20):
        again = torch.autograd.grad(out, (q, k, v), grad_out, retain_graph=True)
        assert all(torch.equal(x, y) for x, y in zip(first, again, strict=True))


def test_compile_fullgraph():
    """Compiled in bfloat16, a layer is no farther from float32 than twice what it is when it isn't compiled."""
    torch.manual_seed(0)
    layer = SelfAttention(256, 4, 2, qk_norm=True, device="cuda")
    compiled = torch.compile(layer, fullgraph=True)

    def run(module, x, enabled):
        with torch.autocast("cuda", BF16, enabled=enabled):
            out = module(x)
        return out, *torch.autograd.grad(out.float().square().mean(), list(layer.parameters()))

    for length in (128, 200, 333):
        x = torch.randn(2, length, 256, device="cuda")
        exact, eager, ours = run(layer, x, False), run(layer, x, True), run(compiled, x, True)
        for truth, yardstick, value in zip(exact, eager, ours, strict=True):
            assert (value - truth).abs().max() <= 2 * (yardstick - truth).abs().max() + 1e-6


def test_cuda_graph():
    *tensors, grad_out = inputs(2, 300, 300, 4, 4, 64, 64, BF16)
    q, k, v = (x.requires_grad_() for x in tensors)

    def step():
        out = flash_attention(q, k, v, causal=True)
        return out, *torch.autograd.grad(out, (q, k, v), grad_out)

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    with torch.no_grad():
        q.mul_(0.5)
    graph.replay()
    for x, y in zip(captured, step(), strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=0)


def test_memory_is_linear_in_the_length():
    def peak(length):
        q, k, v, grad_out = inputs(1, length, length, 4, 4, 64, 64, BF16)
        for x in (q, k, v):
            x.requires_grad_()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        torch.autograd.grad(flash_attention(q, k, v, causal=True), (q, k, v), grad_out)
        return torch.cuda.max_memory_allocated() - before

    assert peak(16384) <= 2.1 * peak(8192)


def test_offsets_beyond_32_bits():
    """The last head of a tensor of more than 2^31 elements."""
    heads, length, width = 2**12, 2**12 + 64, 128
    q = torch.empty(1, length, heads, width, device="cuda", dtype=BF16)
    q[:, :, -1] = torch.randn(1, length, width, device="cuda", dtype=BF16)
    last = q[:, :, -1:]
    expected = flash_attention(*(last.contiguous(),) * 3)
    torch.testing.assert_close(flash_attention(last, last, last), expected, rtol=0, atol=0)
    tail = q[:, -64:, -1:]
    torch.testing.assert_close(flash_attention(tail, last, last), expected[:, -64:], rtol=0, atol=0)


def test_positions_far_apart():
    """In float32 a tile's offsets once wrapped where 33 positions lie 2^26 elements apart: a segmentation fault."""
    length, width, apart = 40, 16, 2**26
    x = torch.empty(length * apart, device="cuda").as_strided((1, length, 1, width), (length * apart, apart, width, 1))
    x.copy_(torch.randn(1, length, 1, width))
    close = x.contiguous()
    assert torch.equal(flash_attention(x, x, x, causal=True), flash_attention(close, close, close, causal=True))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_other_than_the_current_device():
    q = torch.randn(1, 100, 2, 64, device="cuda:1", dtype=BF16, requires_grad=True)
    flash_attention(q, q, q).sum().backward()
    assert q.grad.device == q.device and q.grad.isfinite().all()
