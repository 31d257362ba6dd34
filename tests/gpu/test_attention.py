"""flash_attention on a GPU: every head width and dtype against float64, compiled, captured and repeated."""

import gc

import pytest
import torch

from attention import SelfAttention, flash_attention, flash_attention_varlen, scaled_dot_product_attention
from attention.philox import draw_seed, kept
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


CU_Q, CU_K = [0, 300, 300, 1000, 1037, 1900], [0, 200, 260, 900, 900, 1800]  # an empty sequence, one without keys
COMBINATIONS = [
    {"causal": True, "window": (200, 0)},
    {"causal": True, "softcap": 2.0, "sinks": True},
    {"window": (100, 37), "alibi_slopes": True},
    {"dropout_p": 0.2},
    {"cu_seqlens": True, "causal": True},
    {"cu_seqlens": True, "window": (100, 10), "softcap": 2.0, "sinks": True},
    {"causal": True, "window": (300, 0), "softcap": 2.0, "sinks": True, "alibi_slopes": True, "dropout_p": 0.2},
    {"cu_seqlens": True, "causal": True, "alibi_slopes": True, "dropout_p": 0.5},
    {"mask": "float"},
    {"mask": "bool", "softcap": 2.0},
]
SOME_WIDTHS = [(BF16, 256, COMBINATIONS[5]), (FP16, 64, COMBINATIONS[6]), (FP32, 64, COMBINATIONS[6])]


def combined(dtype, width, names):
    """Inputs and options of `check`: grouped heads, lengths that no tile divides, values of another width."""
    heads = 4
    q, k, v, grad_out = inputs(1 if "cu_seqlens" in names else 2, 1901, 1803, heads, 2, width, max(width - 8, 1), dtype)
    options = dict(names)
    if "cu_seqlens" in names:
        q, k, v, grad_out = q[0], k[0], v[0], grad_out[0]
        options["cu_seqlens"] = tuple(torch.tensor(cu, dtype=torch.int32, device="cuda") for cu in (CU_Q, CU_K))
    if "sinks" in names:
        options["sinks"] = torch.randn(heads, device="cuda")
    if "alibi_slopes" in names:
        options["alibi_slopes"] = torch.rand(heads, device="cuda") / 10
    if names.get("mask") == "bool":
        options["mask"] = torch.rand(2, 1, 1, 1803, device="cuda") < 0.7
    if names.get("mask") == "float":
        options["mask"] = torch.randn(1, heads, 1901, 1803, device="cuda").mT.contiguous().mT
        options["mask"][options["mask"] > 1] = -torch.inf
    return (q, k, v, grad_out), options


@pytest.mark.parametrize(
    ("dtype", "width", "names"), [(BF16, width, names) for width in (64, 128) for names in COMBINATIONS] + SOME_WIDTHS
)
def test_options(dtype, width, names):
    tensors, options = combined(dtype, width, names)
    check(*tensors, **options, backend="triton")


def test_gradient_of_sinks():
    """In bfloat16, over heads enough for plain torch's error to say something."""
    check(
        *inputs(1, 500, 500, 64, 64, 64, 64, BF16), causal=True, sinks=torch.randn(64, device="cuda"), backend="triton"
    )


@pytest.mark.parametrize("shape", [(1, 1, 1, 500), (2, 4, 400, 1), (2, 1, 400, 500)])
def test_gradient_of_a_broadcast_mask(shape):
    mask = torch.randn(shape, device="cuda")
    check(*inputs(2, 400, 500, 4, 2, 64, 64, FP32), mask=mask, backend="triton")


def test_max_logits_at_scale_zero():
    """Queries without keys keep -inf, and 0 · -inf must not become NaN; the interpreter's maximum ignores NaN."""
    q, k, v, _ = inputs(1, 150, 5, 2, 2, 64, 64, BF16)
    _, largest = flash_attention(q, k, v, causal=True, scale=0.0, softcap=5.0, return_max_logits=True)
    assert torch.equal(largest, torch.zeros_like(largest))


@pytest.mark.parametrize("width", [64, 128])
def test_max_logits_change_nothing_else(width):
    q, k, v, _ = inputs(2, 1000, 1000, 4, 2, width, width, BF16)
    alone = flash_attention(q, k, v, causal=True)
    assert torch.equal(flash_attention(q, k, v, causal=True, return_max_logits=True)[0], alone)


def test_dropout_keeps_what_its_twin_says():
    """With equal weights and the unit vectors as values, the output shows each pair, bit by bit."""
    q, k = torch.zeros(2, 333, 2, 64, device="cuda", dtype=BF16), torch.zeros(2, 128, 2, 64, device="cuda", dtype=BF16)
    v = torch.eye(128, device="cuda", dtype=BF16)[None, :, None].expand(2, 128, 2, 128)
    torch.manual_seed(3)
    seed = draw_seed(q.device)
    torch.manual_seed(3)
    out = flash_attention(q, k, v, dropout_p=0.3)
    heads = torch.arange(4, device="cuda").view(2, 2)
    assert torch.equal(out.transpose(1, 2) > 0, kept(seed, 0.3, heads, slice(0, 333), slice(0, 128)))


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize("where", ["q", "k", "v", "do"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_reaches_exactly_who_sees_it(where, value, width, packed):
    """One number in row 500 of the input, causally masked; packed, in a sequence from 300 to 700."""
    names = ("q", "k", "v", "do")
    tensors = dict(zip(names, inputs(1, 1000, 1000, 2, 2, width, width, BF16), strict=True))
    position = torch.arange(1000, device="cuda")
    cu_seqlens = torch.tensor([0, 300, 700, 1000], dtype=torch.int32, device="cuda")
    same = torch.bucketize(position, cu_seqlens, right=True) if packed else torch.zeros_like(position)
    visible = (position <= position[:, None]) & (same == same[:, None])

    def run():
        q, k, v, do = (tensors[name].clone() for name in names)
        leaves = [x.requires_grad_() for x in (q, k, v)]
        if packed:
            out = flash_attention_varlen(q[0], k[0], v[0], cu_seqlens, cu_seqlens, 400, 400, causal=True)[None]
        else:
            out = flash_attention(q, k, v, causal=True)
        return out, *torch.autograd.grad(out, leaves, do)

    clean = run()
    tensors[where][:, 500, :, 3] = value
    queries = visible[:, 500] if where in ("k", "v") else position == 500
    keys, nothing = visible[queries].any(0), torch.zeros_like(queries)
    reached = {"v": (queries, queries, keys, nothing), "do": (nothing, queries, keys, keys)}
    expected = reached.get(where, (queries, queries, keys, keys))
    for name, spoiled, x, before in zip(("out", "dq", "dk", "dv"), expected, run(), clean, strict=True):
        seen = ~x.isfinite().all(-1).all(-1)[0]
        if where == "k" and value == float("inf"):  # a logit of -inf is a weight of 0
            assert not (seen & ~spoiled).any(), name
            continue
        assert torch.equal(seen, spoiled), name
        rounding = 4 * torch.finfo(BF16).eps
        torch.testing.assert_close(x[:, ~spoiled], before[:, ~spoiled], rtol=rounding, atol=rounding)


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


def assert_repeatable(leaves, out, grad_out, times):
    first = torch.autograd.grad(out, leaves, grad_out, retain_graph=True)
    for _ in range(times):
        again = torch.autograd.grad(out, leaves, grad_out, retain_graph=True)
        assert all(torch.equal(x, y) for x, y in zip(first, again, strict=True))


@pytest.mark.parametrize("width", [64, 128, 256])
def test_repeated_backward_is_bitwise_equal(width):
    *tensors, grad_out = inputs(4, 1024, 1024, 8, 4, width, width, BF16)
    leaves = [x.requires_grad_() for x in tensors]
    assert_repeatable(leaves, flash_attention(*leaves, causal=True, deterministic=True), grad_out, 100)


@pytest.mark.parametrize("names", [COMBINATIONS[5], COMBINATIONS[6], COMBINATIONS[8]])
def test_repeated_backward_with_options_is_bitwise_equal(names):
    (*tensors, grad_out), options = combined(BF16, 128, names)
    leaves = [x.requires_grad_() for x in tensors]
    leaves += [options[name].requires_grad_() for name in ("sinks", "mask") if name in options]
    if "cu_seqlens" in options:
        lengths = (*options.pop("cu_seqlens"), 863, 900)
        out = flash_attention_varlen(*leaves[:3], *lengths, **options, return_max_logits=True, deterministic=True)[0]
    elif "mask" in options:
        out = scaled_dot_product_attention(
            *(x.transpose(1, 2) for x in leaves[:3]), options["mask"], enable_gqa=True
        ).transpose(1, 2)
    else:
        out = flash_attention(*leaves[:3], **options, return_max_logits=True, deterministic=True)[0]
    assert_repeatable(leaves, out, grad_out, 100)


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
        out = flash_attention(q, k, v, causal=True, deterministic=True)
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


def test_cuda_graph_draws_anew():
    """Each replay drops other weights, in the backward the same as in the forward."""
    q, k, v, _ = inputs(1, 300, 300, 2, 2, 64, 56, BF16)
    v = torch.zeros_like(v).requires_grad_()

    def step():
        return torch.autograd.grad(flash_attention(q, k, v, dropout_p=0.2).sum(), v)[0]

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    graph.replay()
    first = captured.clone()
    graph.replay()
    assert not torch.equal(captured, first) and first.isfinite().all()


def peak_memory(length, heads, width):
    """Bytes beside the inputs and the incoming gradient, forward and backward."""
    q, k, v, grad_out = inputs(1, length, length, heads, heads, width, width, BF16)
    for x in (q, k, v):
        x.requires_grad_()
    gc.collect()  # what other tests left behind would be subtracted if it were collected meanwhile
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    torch.autograd.grad(flash_attention(q, k, v, causal=True), (q, k, v), grad_out)
    return torch.cuda.max_memory_allocated() - before


def test_memory_is_linear_in_the_length():
    peak_memory(64, 4, 64)  # what a process allocates once, such as the 32 MiB of cuBLAS
    assert peak_memory(16384, 4, 64) <= 2.1 * peak_memory(8192, 4, 64)
    assert peak_memory(65536, 16, 128) < 4e9


def test_offsets_beyond_32_bits():
    """The last head of a tensor of more than 2^31 elements."""
    heads, length, width = 2**12, 2**12 + 64, 128
    q = torch.empty(1, length, heads, width, device="cuda", dtype=BF16)
    q[:, :, -1] = torch.randn(1, length, width, device="cuda", dtype=BF16)
    last = q[:, :, -1:]
    expected = flash_attention(*(last.contiguous(),) * 3)
    torch.testing.assert_close(flash_attention(last, last, last), expected, rtol=0, atol=0)
    tail = q[:, -64:, -1:]
    expected = flash_attention(*(x.contiguous() for x in (tail, last, last)))  # few queries go to other kernels
    torch.testing.assert_close(flash_attention(tail, last, last), expected, rtol=0, atol=0)


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
