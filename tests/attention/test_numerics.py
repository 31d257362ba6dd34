"""flash_attention against float64, in value and gradient, over shapes, dtypes, strides, masks and both backends."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from attention import flash_attention, reference, scaled_dot_product_attention
from attention.reference import Options, dense, tiled_backward, tiled_forward
from tests.attention.checks import LAYOUTS, assert_right, check, grad, tensor

pytest.importorskip("triton", reason="needs Triton")

# Shrinking a failure would take longer than the whole suite; the failing example is small as it is.
PHASES = (Phase.explicit, Phase.generate)
layouts = st.sampled_from(LAYOUTS)
# Times the usual 1 / sqrt(D). With larger logits fp32's error is that of the lse it saves, not of the computation.
scales = st.sampled_from([1.0, 1.0, 0.0, -1.0, 2.0])


@pytest.fixture(autouse=True)
def outputs_start_as_nan():
    """What a kernel doesn't write stays NaN."""
    torch.use_deterministic_algorithms(True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    yield
    torch.use_deterministic_algorithms(False)


def draw_inputs(data, dtypes, max_batch, max_length, widths):
    dtype = data.draw(st.sampled_from(dtypes))
    batch = data.draw(st.integers(1, max_batch))
    heads_k, group = data.draw(st.integers(1, 2)), data.draw(st.integers(1, 3))
    seqlen_q, seqlen_k = data.draw(st.integers(0, max_length)), data.draw(st.integers(0, max_length))
    if data.draw(st.booleans()):
        seqlen_k = seqlen_q
    width, width_v = data.draw(widths), data.draw(widths)
    torch.manual_seed(data.draw(st.integers(0, 99)))
    q = tensor((batch, seqlen_q, heads_k * group, width), data.draw(layouts), dtype)
    k = tensor((batch, seqlen_k, heads_k, width), data.draw(layouts), dtype)
    v = tensor((batch, seqlen_k, heads_k, width_v), data.draw(layouts), dtype)
    grad_out = grad((*q.shape[:3], width_v), data.draw(st.sampled_from(("expanded", *LAYOUTS))), dtype)
    return q, k, v, grad_out


@settings(max_examples=40, deadline=None, derandomize=True, phases=PHASES)
@given(data=st.data(), causal=st.booleans(), scale=scales)
def test_torch_backend(data, causal, scale):
    dtypes = [torch.float32, torch.bfloat16, torch.float16]
    inputs = draw_inputs(data, dtypes, max_batch=3, max_length=520, widths=st.integers(1, 80))
    check(*inputs, causal=causal, scale=scale * inputs[0].shape[3] ** -0.5, backend="torch")


# The interpreter truncates where it stores bfloat16, so that dtype is checked in tests/gpu.
@settings(max_examples=15, deadline=None, derandomize=True, phases=PHASES)
@given(data=st.data(), causal=st.booleans(), scale=scales)
def test_triton_backend(data, causal, scale):
    dtypes = [torch.float32, torch.float16]
    inputs = draw_inputs(data, dtypes, max_batch=1, max_length=90, widths=st.integers(1, 40))
    check(*inputs, causal=causal, scale=scale * inputs[0].shape[3] ** -0.5, backend="triton")


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("width", "width_v"), [(64, 64), (128, 128), (256, 256), (16, 256), (129, 1)])
def test_head_widths(backend, dtype, width, width_v):
    torch.manual_seed(0)
    q, k, v = (tensor((1, 34, 2, w), "contiguous", dtype) for w in (width, width, width_v))
    check(q, k, v, torch.randn_like(v), causal=True, backend=backend)


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("seqlen_k", [63, 64, 65, 127, 128, 129])
@pytest.mark.parametrize("seqlen_q", [63, 65, 129])
def test_lengths_around_tile_edges(backend, seqlen_q, seqlen_k):
    torch.manual_seed(0)
    q, k, v = (tensor((1, length, 1, 32), "contiguous", torch.float16) for length in (seqlen_q, seqlen_k, seqlen_k))
    check(q, k, v, torch.randn_like(q), causal=True, backend=backend)


@pytest.mark.parametrize("options", [{"causal": True}, {}, {"window": (50, 3)}])
@pytest.mark.parametrize("one_loop", [True, False])
@pytest.mark.parametrize(("block_m", "block_n"), [(16, 32), (32, 16)])
def test_tiles(monkeypatch, block_m, block_n, one_loop, options):
    """Every kernel with tiles of both shapes, and with both ways to mask them."""
    from attention.kernels import backward, forward
    from attention.kernels.tiles import Tile, Tiles

    tile = Tile(block_m, block_n, 4, 1, one_loop)
    for module in (forward, backward):
        monkeypatch.setattr(module, "choose_tiles", lambda q, v: Tiles(tile, tile, tile))
    torch.manual_seed(0)
    for seqlen_q, seqlen_k in ((70, 70), (33, 80), (80, 33)):
        q, k, v = (torch.randn(1, n, h, w) for n, h, w in ((seqlen_q, 4, 8), (seqlen_k, 2, 8), (seqlen_k, 2, 24)))
        check(q, k, v, torch.randn(1, seqlen_q, 4, 24), **options, backend="triton")


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize(("batch", "seqlen_q", "seqlen_k"), [(0, 4, 4), (2, 0, 4), (2, 4, 0), (2, 0, 0), (1, 1, 1)])
def test_sizes_zero_and_one(backend, batch, seqlen_q, seqlen_k):
    q, k, v = (torch.randn(batch, length, 2, 8) for length in (seqlen_q, seqlen_k, seqlen_k))
    check(q, k, v, torch.randn_like(q), causal=True, backend=backend)


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_rows_without_keys(backend):
    """With fewer keys than queries the first queries see nothing: 0, -inf, and zero gradients."""
    torch.manual_seed(0)
    q, k, v = torch.randn(1, 70, 2, 16), torch.randn(1, 40, 2, 16), torch.randn(1, 40, 2, 16)
    result = check(q, k, v, torch.randn_like(q), causal=True, backend=backend)
    assert result["out"][:, :30].eq(0).all()
    assert result["lse"][:, :, :30].eq(-torch.inf).all()
    assert result["dq"][:, :30].eq(0).all()
    assert result["dq"][:, 31:].ne(0).any()


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("scale", [2500.0, -2500.0])
def test_huge_logits(backend, causal, scale):
    """Logits of 1e4 overflow a softmax that doesn't subtract the maximum."""
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 70, 1, 16)
    check(q, k, v, torch.randn_like(q), causal=causal, scale=scale, backend=backend)


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("masked", ["q", "k", "v"])
def test_gradient_of_one_input(backend, masked):
    tensors = {name: torch.randn(1, 20, 2, 8) for name in "qkv"}
    everything = {name: x.clone().requires_grad_() for name, x in tensors.items()}
    flash_attention(**everything, backend=backend).square().sum().backward()
    tensors[masked].requires_grad_()
    flash_attention(**tensors, backend=backend).square().sum().backward()
    torch.testing.assert_close(tensors[masked].grad, everything[masked].grad, rtol=0, atol=0)


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_gradient_of_the_lse_alone(backend):
    torch.manual_seed(0)
    inputs = [torch.randn(1, 20, 2, 8) for _ in "qkv"]
    ours = [x.clone().requires_grad_() for x in inputs]
    flash_attention(*ours, return_lse=True, backend=backend)[1].sum().backward()
    truth = [x.double().requires_grad_() for x in inputs]
    dense(*truth, Options(8**-0.5))[1].sum().backward()
    for x, y in zip(ours, truth, strict=True):
        torch.testing.assert_close(x.grad, torch.zeros_like(x) if y.grad is None else y.grad.float())


def test_tiled_schedule_passes_gradcheck():
    """In float64, where the schedule itself is all that can be wrong; tiles of 4 make several of them."""
    torch.manual_seed(0)
    options = Options(0.4, 5, 1, softcap=2.0, dropout_p=0.2, slopes=torch.rand(2, 4), seed=torch.tensor([3]))

    class Tiled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, q, k, v, sinks, mask):
            out, lse, _ = tiled_forward(q, k, v, options._replace(sinks=sinks, mask=mask), False)
            ctx.save_for_backward(q, k, v, out, lse, sinks, mask)
            return out, lse

        @staticmethod
        def backward(ctx, grad_out, grad_lse):
            *saved, sinks, mask = ctx.saved_tensors
            return tiled_backward(grad_out, grad_lse, *saved, options._replace(sinks=sinks, mask=mask), True)

    def double(*shape):
        return torch.randn(shape, dtype=torch.float64, requires_grad=True)

    inputs = [double(2, 9, 4, 3), double(2, 10, 2, 3), double(2, 10, 2, 2), double(4), double(2, 1, 9, 10)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reference, "TILE", 4)
        *qkv, sinks, mask = inputs
        expected = dense(*qkv, options._replace(sinks=sinks, mask=mask))[:2]
        torch.testing.assert_close(Tiled.apply(*inputs), expected)
        assert torch.autograd.gradcheck(Tiled.apply, inputs, fast_mode=True)


def test_dense_reference_is_torchs():
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 2, 30, 4, 16, dtype=torch.float64)
    ours = dense(q, k, v, Options(16**-0.5, window_right=0))[0]
    theirs = F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), is_causal=True).transpose(1, 2)
    torch.testing.assert_close(ours, theirs)


@settings(max_examples=25, deadline=None, derandomize=True, phases=PHASES)
@given(data=st.data(), causal=st.booleans(), gqa=st.booleans())
def test_scaled_dot_product_attention_is_torchs(data, causal, gqa):
    """Same signature, layout and top-left mask, whichever of query and key is longer."""
    seqlen_q, seqlen_k = data.draw(st.integers(1, 300)), data.draw(st.integers(1, 300))
    torch.manual_seed(seqlen_q)
    q = torch.randn(2, 4, seqlen_q, 16)
    k, v = torch.randn(2, 2, 2 if gqa else 4, seqlen_k, 16)
    grad_out = torch.randn_like(q)
    options = {"is_causal": causal, "enable_gqa": gqa, "scale": data.draw(st.sampled_from([None, 0.7]))}

    def run(function, q, k, v):
        q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
        out = function(q, k, v, **options)
        grads = torch.autograd.grad(out, (q, k, v), grad_out.to(q.dtype))
        return dict(zip(("out", "dq", "dk", "dv"), (out, *grads), strict=True))

    theirs = F.scaled_dot_product_attention
    truth = run(theirs, q.double(), k.double(), v.double())
    assert_right(run(scaled_dot_product_attention, q, k, v), run(theirs, q, k, v), truth)
