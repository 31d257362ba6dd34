"""The Hopper backward against float64: every width and mask, grouped heads, lengths that no tile divides, strides."""

import pytest
import torch

from attention import flash_attention_varlen
from attention.backends import backward_runs_on_hopper
from attention.packed import forward_packed
from attention.reference import Options, dense
from tests.attention.checks import assert_right, grad, tensor

BF16, FP16 = torch.bfloat16, torch.float16
CAUSAL, FULL = (None, 0), (None, None)
# Lengths of queries and keys: equal ones; sequences without queries, without keys, without either; a key, a query each.
PACKED = [
    ([300, 1, 64, 700, 129], [300, 1, 64, 700, 129]),
    ([300, 0, 40, 0, 1, 500], [200, 90, 0, 0, 300, 450]),
    ([1, 2], [1, 2]),
    ([17] * 40, [130] * 40),
    ([128] * 9, [256] * 9),
]


@pytest.fixture(autouse=True)
def hopper():
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip(reason="the kernel is Hopper's")


def check(q, k, v, grad_out, window, grad_lse=None, sinks=None, scale=None, **fields):
    """Compares with float64, and returns the gradients."""
    width = q.shape[-1]
    options = Options(width**-0.5 if scale is None else scale, *window, sinks=sinks, **fields)
    truth, plain = (gradients(q, k, v, grad_out, grad_lse, options, dtype) for dtype in (torch.float64, q.dtype))
    ours = run(q, k, v, grad_out, truth.pop("out"), truth.pop("lse"), options, grad_lse)
    assert_right(ours, plain, truth)
    return ours


def run(q, k, v, grad_out, out, lse, options, grad_lse=None):
    """The gradients. The memory of the results is full of NaN beforehand. The third run is a relaunch."""
    from attention.kernels import hopper_backward

    assert backward_runs_on_hopper("hopper", q, k, v, options)
    out, lse = out.to(q.dtype), lse.float()
    for _ in range(3):
        poison = [torch.full((2, *x.shape), torch.nan, device="cuda", dtype=torch.float32) for x in (q, k, v)]
        del poison
        dq, dk, dv, dsinks, _ = hopper_backward.backward(grad_out, grad_lse, q, k, v, out, lse, options, False)
    return {"dq": dq, "dk": dk, "dv": dv} | ({} if options.sinks is None else {"dsinks": dsinks})


def gradients(q, k, v, grad_out, grad_lse, options, dtype):
    leaves = {"q": q, "k": k, "v": v} | ({} if options.sinks is None else {"sinks": options.sinks})
    leaves = {name: x.detach().to(dtype).requires_grad_() for name, x in leaves.items()}
    options = options._replace(sinks=leaves.get("sinks"))
    tensors = (leaves["q"], leaves["k"], leaves["v"], options)
    out, lse, _ = dense(*tensors) if options.cu_seqlens_q is None else forward_packed(dense, *tensors)
    loss = (out * grad_out.to(dtype)).sum()
    if grad_lse is not None:
        loss = loss + (lse * grad_lse.to(dtype)).masked_fill(lse == -torch.inf, 0).sum()
    grads = torch.autograd.grad(loss, list(leaves.values()))
    results = {f"d{name}": x for name, x in zip(leaves, grads, strict=True)}
    return results | ({"out": out.detach(), "lse": lse.detach()} if dtype == torch.float64 else {})


def inputs(batch, seqlen_q, seqlen_k, heads_q, heads_k, width, dtype=BF16, layout="contiguous"):
    torch.manual_seed(0)
    shapes = [(batch, seqlen_q, heads_q, width)] + [(batch, seqlen_k, heads_k, width)] * 2
    return [tensor(shape, layout, dtype, "cuda") for shape in [*shapes, shapes[0]]]


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("window", [CAUSAL, FULL, (100, 0), (70, 33)])
@pytest.mark.parametrize("width", [64, 128, 256])
def test_masks(width, window, dtype):
    check(*inputs(2, 700, 700, 4, 2, width, dtype), window)


@pytest.mark.parametrize("window", [CAUSAL, FULL])
@pytest.mark.parametrize("seqlen_k", [64, 127, 300, 1000])
@pytest.mark.parametrize("seqlen_q", [1, 63, 129, 1000])
@pytest.mark.parametrize("width", [64, 128, 256])
def test_odd_lengths(width, seqlen_q, seqlen_k, window):
    check(*inputs(2, seqlen_q, seqlen_k, 6, 2, width), window)


@pytest.mark.parametrize("window", [CAUSAL, FULL])
@pytest.mark.parametrize("seqlen_q", [1, 129])
@pytest.mark.parametrize("width", [64, 128, 256])
def test_one_key(width, seqlen_q, window):
    """Its weight is 1 whatever q and k are: their gradients are 0, and plain torch's exactly so. Ours are scores'
    gradients dO v - delta, the same D products added up twice in float32, in different orders."""
    q, k, v, grad_out = inputs(2, seqlen_q, 1, 6, 2, width)
    options = Options(width**-0.5, *window)
    truth, plain = (gradients(q, k, v, grad_out, None, options, dtype) for dtype in (torch.float64, q.dtype))
    ours = run(q, k, v, grad_out, truth["out"], truth["lse"], options)
    assert_right(ours, plain, {"dv": truth["dv"]})
    products = grad_out.double().abs() * v.double().abs().repeat_interleave(3, 2)
    ds = 2 * width * 2**-24 * products.sum(-1, keepdim=True)
    assert (ours["dq"].double().abs() <= options.scale * ds * k.double().abs().repeat_interleave(3, 2)).all()
    bound = options.scale * (ds * q.double().abs()).sum(1, keepdim=True).unflatten(2, (2, 3)).sum(3)
    assert (ours["dk"].double().abs() <= bound).all()


@pytest.mark.parametrize("width", [40, 72, 96, 136, 192])
def test_padded_widths(width):
    check(*inputs(2, 300, 405, 4, 2, width), CAUSAL)


@pytest.mark.parametrize("width", [64, 128, 256])
def test_more_tiles_than_processors(width):
    check(*inputs(4, 1100, 1030, 16, 8, width), CAUSAL)


@pytest.mark.parametrize("layout", ["heads_first", "packed", "width_strided"])
def test_strides(layout):
    q, k, v, grad_out = inputs(2, 300, 400, 4, 2, 64, BF16, layout)
    check(q, k, v, grad_out, CAUSAL)
    check(q, k, v, grad(q.shape, "expanded", BF16, "cuda"), CAUSAL)


def test_sinks_and_a_gradient_of_lse():
    q, k, v, grad_out = inputs(2, 333, 200, 4, 2, 128)
    check(q, k, v, grad_out, CAUSAL, torch.randn(2, 4, 333, device="cuda"), torch.randn(4, device="cuda"))


@pytest.mark.parametrize("scale", [-0.3, 0.0, 1.0])
def test_scales(scale):
    check(*inputs(1, 200, 300, 2, 2, 64, FP16), CAUSAL, scale=scale)


@pytest.mark.parametrize("width", [64, 128, 256])
def test_keys_and_values_get_the_same_from_run_to_run(width):
    arguments = inputs(2, 1024, 1024, 8, 2, width)
    first, second = check(*arguments, CAUSAL), check(*arguments, CAUSAL)
    assert torch.equal(first["dk"], second["dk"])
    assert torch.equal(first["dv"], second["dv"])


@pytest.mark.parametrize("where", range(4))
def test_what_is_not_finite_reaches_exactly_who_sees_it(where):
    """As in the portable kernels."""
    from attention.kernels import backward, hopper_backward

    q, k, v, grad_out = tensors = inputs(1, 300, 300, 4, 2, 64)
    options = Options(0.125, window_right=0)
    out, lse, _ = (x.to(BF16) if x.dim() == 4 else x for x in dense(*(x.float() for x in (q, k, v)), options))
    tensors[where][0, 145, 1, 2] = torch.nan
    saved = (grad_out, None, q, k, v, out, lse, options, False)
    grads, expected = hopper_backward.backward(*saved)[:3], backward.backward(*saved)[:3]
    assert all(not x.isfinite().all() and x.isfinite().any() for x in expected[: 2 if where == 2 else 3])
    for mine, portables in zip(grads, expected, strict=True):
        torch.testing.assert_close(mine, portables, rtol=2**-6, atol=2**-6, equal_nan=True)


def packed_inputs(lengths_q, lengths_k, width, dtype=BF16, rest=70):
    """q, k, v, a gradient, and where the sequences are, for four query and two key heads; `rest` rows behind them."""
    q, k, v, grad_out = inputs(1, sum(lengths_q) + rest, sum(lengths_k) + rest, 4, 2, width, dtype)
    cu_seqlens = (torch.tensor([0, *lengths], device="cuda").cumsum(0).int() for lengths in (lengths_q, lengths_k))
    fields = dict(zip(("cu_seqlens_q", "cu_seqlens_k"), cu_seqlens, strict=True))
    fields |= {"max_seqlen_q": max(lengths_q), "max_seqlen_k": max(lengths_k)}
    return q[0], k[0], v[0], grad_out[0], fields


@pytest.mark.parametrize("window", [CAUSAL, FULL, (70, 33)])
@pytest.mark.parametrize("width", [64, 128, 256])
def test_packed(width, window):
    for lengths in PACKED:
        *tensors, fields = packed_inputs(*lengths, width)
        check(*tensors, window, **fields)


def test_packed_lengths_at_random():
    """More tiles than processors."""
    generator = torch.Generator().manual_seed(0)
    for number in (1, 3, 60, 200):
        lengths = [torch.randint(0, 40_000 // number, (number,), generator=generator).clamp(0, 2000) for _ in range(2)]
        lengths = [(x + 1).tolist() for x in lengths]
        *tensors, fields = packed_inputs(*lengths, 128)
        check(*tensors, CAUSAL, **fields)


@pytest.mark.parametrize("width", [40, 72, 192])
def test_packed_padded_widths(width):
    """And lengths that are only a bound."""
    *tensors, fields = packed_inputs(*PACKED[1], width, FP16)
    grads = check(*tensors, CAUSAL, **fields | {"max_seqlen_q": 5000, "max_seqlen_k": 3000})
    for gradient, lengths in zip(grads.values(), (PACKED[1][0], PACKED[1][1], PACKED[1][1]), strict=True):
        assert gradient[sum(lengths) :].eq(0).all()


@pytest.mark.parametrize("softcap", [None, 2.0])
def test_packed_sinks_and_a_gradient_of_lse(softcap):
    for lengths in PACKED[:2]:
        *tensors, fields = packed_inputs(*lengths, 64)
        grad_lse = torch.randn(4, tensors[0].shape[0], device="cuda")
        check(*tensors, (70, 33), grad_lse, torch.randn(4, device="cuda"), **fields, softcap=softcap)


@pytest.mark.parametrize("window", [CAUSAL, FULL, (70, 33)])
@pytest.mark.parametrize("width", [64, 128, 256])
def test_softcap(width, window):
    for softcap, scale in ((2.0, None), (30.0, 1.0), (0.5, -0.3)):
        check(*inputs(2, 500, 429, 4, 2, width), window, scale=scale, softcap=softcap)


@pytest.mark.parametrize("width", [64, 128, 256])
def test_packed_softcap(width):
    for lengths in PACKED[:2]:
        *tensors, fields = packed_inputs(*lengths, width)
        check(*tensors, CAUSAL, **fields, softcap=2.0)


@pytest.mark.parametrize("width", [64, 128, 256])
def test_packed_keys_and_values_get_the_same_from_run_to_run(width):
    *tensors, fields = packed_inputs(*PACKED[0], width)
    first, second = (check(*tensors, CAUSAL, **fields) for _ in range(2))
    assert torch.equal(first["dk"], second["dk"])
    assert torch.equal(first["dv"], second["dv"])


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("where", range(4))
def test_what_is_not_finite_stays_in_its_sequence(where, softcap):
    """As in the portable kernels: NaN in the second of three sequences, and in the rows past the end."""
    from attention.kernels import backward, hopper_backward

    *tensors, fields = packed_inputs([300, 200, 250], [300, 200, 250], 128)
    options = Options(0.09, window_right=0, softcap=softcap, **fields)
    q, k, v, grad_out = tensors
    out, lse, _ = forward_packed(dense, q.float(), k.float(), v.float(), options)
    tensors[where][345, 1, 2] = torch.nan
    tensors[where][750:] = torch.inf
    saved = (grad_out, None, q, k, v, out.to(BF16), lse, options, False)
    grads, expected = hopper_backward.backward(*saved)[:3], backward.backward(*saved)[:3]
    assert all(not x.isfinite().all() and x.isfinite().any() for x in expected[: 2 if where == 2 else 3])
    for mine, portables in zip(grads, expected, strict=True):
        torch.testing.assert_close(mine, portables, rtol=2**-6, atol=2**-6, equal_nan=True)


def test_packed_without_work():
    """Through the public function, which finds who runs what: no sequence, none with queries, none with keys."""
    for lengths_q, lengths_k in (([], []), ([0, 0], [3, 200]), ([200, 3], [0, 0])):
        q, k, v = (torch.randn(300, 2, 64, device="cuda", dtype=BF16, requires_grad=True) for _ in range(3))
        cu_seqlens = [torch.tensor([0, *x], device="cuda").cumsum(0).int() for x in (lengths_q, lengths_k)]
        longest = [max(x, default=0) for x in (lengths_q, lengths_k)]
        out = flash_attention_varlen(q, k, v, *cu_seqlens, *longest, causal=True)
        out.sum().backward()
        assert all(x.grad.eq(0).all() for x in (q, k, v))
