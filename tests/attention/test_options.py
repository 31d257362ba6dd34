"""Every option of the attention in every combination, against float64; what NaN and inf reach; dropout's numbers."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from attention import flash_attention, flash_attention_varlen, scaled_dot_product_attention
from attention.ops import attend
from attention.philox import kept, philox
from attention.reference import Options, dense
from tests.attention.checks import LAYOUTS, assert_right, check, tensor

pytest.importorskip("triton", reason="needs Triton")
# NaN and inf are what some tests are about, and numpy, which interprets the kernels, remarks on them.
pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning:triton"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:numpy"),
]
both_backends = pytest.mark.parametrize("backend", ["torch", "triton"])


@pytest.fixture(autouse=True)
def outputs_start_as_nan():
    """What a kernel doesn't write stays NaN."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def draw_window(data):
    side = st.sampled_from([-1, 0, 3, 40])
    return data.draw(st.sampled_from([None, (data.draw(side), data.draw(side))]))


def cumulative(lengths):
    return torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32)


def draw_case(data, dtypes, max_length):
    """Arguments of `check` with each option on or off."""
    dtype = data.draw(st.sampled_from(dtypes))
    heads_k, group = data.draw(st.integers(1, 2)), data.draw(st.integers(1, 2))
    width, width_v = data.draw(st.sampled_from([8, 13, 24])), data.draw(st.sampled_from([8, 17]))
    packed = data.draw(st.booleans())
    batch = data.draw(st.integers(1, 3 if packed else 2))
    # The backward starts from the rounded output. With a few numbers in 16 bits, of which plain torch by chance rounds
    # none, that would show.
    least = 0 if dtype == torch.float32 else 50
    lengths = st.integers(0, max_length // batch)
    kind = data.draw(st.sampled_from(["none", "none", "bool", "float"])) if not packed else "none"
    options = {"scale": data.draw(st.sampled_from([None, 0.5, -0.3, 0.0])), "window": draw_window(data)}
    options["causal"] = data.draw(st.booleans())
    torch.manual_seed(data.draw(st.integers(0, 99)))
    if packed:
        lengths_q, lengths_k = ([data.draw(lengths) for _ in range(batch)] for _ in "qk")
        lengths_q[0], lengths_k[0] = lengths_q[0] + least, lengths_k[0] + least
        options["cu_seqlens"] = cumulative(lengths_q), cumulative(lengths_k)
        sizes_q, sizes_k = (1, sum(lengths_q) + 3), (1, sum(lengths_k) + 3)
    else:
        sizes_q, sizes_k = (batch, data.draw(lengths) + least), (batch, data.draw(lengths) + least)
    layout = data.draw(st.sampled_from(LAYOUTS))
    q = tensor((*sizes_q, heads_k * group, width), layout, dtype)
    k, v = (tensor((*sizes_k, heads_k, w), layout, dtype) for w in (width, width_v))
    if packed:
        q, k, v = q[0], k[0], v[0]
    heads = heads_k * group
    if data.draw(st.booleans()):
        options["softcap"] = data.draw(st.sampled_from([1.0, 30.0]))
    if data.draw(st.booleans()):
        options["sinks"] = torch.randn(heads)
    if data.draw(st.booleans()):
        options["alibi_slopes"] = torch.rand(*data.draw(st.sampled_from([(), (batch,)])), heads)
    if data.draw(st.booleans()):
        options["dropout_p"] = data.draw(st.sampled_from([0.1, 0.7]))
    if kind != "none":
        full = (batch, heads, sizes_q[1], sizes_k[1])
        shape = [data.draw(st.sampled_from([1, size])) for size in full]
        mask = torch.randn(shape)
        options["mask"] = mask > 0 if kind == "bool" else mask.masked_fill(mask > 1, -torch.inf)
    return (q, k, v, torch.randn(*q.shape[:-1], width_v, dtype=dtype)), options


@settings(max_examples=60)
@given(data=st.data())
def test_torch_backend(data):
    inputs, options = draw_case(data, [torch.float32, torch.bfloat16, torch.float16], 600)
    check(*inputs, **options, backend="torch")


@settings(max_examples=30)
@given(data=st.data())
def test_triton_backend(data):
    inputs, options = draw_case(data, [torch.float32, torch.float16], 80)
    check(*inputs, **options, backend="triton")


@both_backends
def test_window_is_flash_attentions(backend):
    """Spelled out once: left and right of the query's own key, which counts, aligned at the bottom right."""
    q, k, v = (torch.zeros(1, length, 1, 8) for length in (4, 6, 6))
    v[0, :, 0] = torch.eye(6, 8)
    out = flash_attention(q, k, v, window=(2, 1), backend=backend)[0, :, 0, :6]
    expected = torch.tensor([[1, 1, 1, 1, 0, 0], [0, 1, 1, 1, 1, 0], [0, 0, 1, 1, 1, 1], [0, 0, 0, 1, 1, 1]])
    torch.testing.assert_close(out, expected / expected.sum(1, keepdim=True))


@both_backends
@pytest.mark.parametrize("mask_shape", [(2, 4, 40, 50), (1, 1, 1, 50)])
def test_gradient_of_a_mask_under_dropout(backend, mask_shape):
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, length, heads, 8) for length, heads in ((40, 4), (50, 2), (50, 2)))
    check(q, k, v, torch.randn_like(q), mask=torch.randn(mask_shape), dropout_p=0.4, backend=backend)


@both_backends
def test_a_window_may_pass_32_bits(backend):
    q = torch.randn(1, 20, 1, 8)
    out = flash_attention(q, q, q, window=(2**40, 2**31 - 1), backend=backend)
    torch.testing.assert_close(out, flash_attention(q, q, q, backend=backend))


@both_backends
@pytest.mark.parametrize("scale", [1000.0, -1000.0])
def test_huge_logits_with_options(backend, scale):
    """Their gradients are as inexact as an lse of 1e4 in float32, but finite."""
    torch.manual_seed(0)
    options = Options(scale, 20, 0, sinks=torch.randn(2), slopes=torch.rand(1, 2))
    inputs = [x.requires_grad_() for x in torch.randn(3, 1, 40, 2, 16)]
    ours = attend(*inputs, options, with_max_logits=True, backend=backend)
    truth, plain = (dense(*(x.to(dtype) for x in inputs), options) for dtype in (torch.float64, torch.float32))
    assert_right(*(dict(zip(("out", "lse", "max_logits"), x, strict=True)) for x in (ours, plain, truth)))
    assert all(grad.isfinite().all() for grad in torch.autograd.grad(ours[0].sum(), inputs))


@both_backends
def test_rows_past_the_last_sequence(backend):
    """They may hold anything, and give 0, an lse of -inf and zero gradients."""
    torch.manual_seed(0)
    cu_seqlens = cumulative([5, 0, 20])
    q, k, v = (torch.randn(31, heads, 8) for heads in (4, 2, 2))
    clean = flash_attention_varlen(q, k, v, cu_seqlens, cu_seqlens, 20, 20, return_lse=True, backend=backend)
    for x in (q, k, v):
        x[25:] = torch.nan
        x.requires_grad_()
    out, lse = flash_attention_varlen(q, k, v, cu_seqlens, cu_seqlens, 20, 20, return_lse=True, backend=backend)
    torch.testing.assert_close(out, clean[0])
    torch.testing.assert_close(lse[:, :25], clean[1][:, :25])
    assert out[25:].eq(0).all() and lse[:, 25:].eq(-torch.inf).all()
    out.backward(torch.where(torch.arange(31)[:, None, None] < 25, torch.ones_like(out), torch.nan))
    for x in (q, k, v):
        assert x.grad.isfinite().all() and x.grad[25:].eq(0).all()


@both_backends
def test_max_logits_of_short_sequences_beside_a_long_one(backend):
    """Most programs of a short sequence have no queries at all; one that is empty has no maximum."""
    q, k = torch.randn(2, 133, 2, 8)
    cu_seqlens = cumulative([130, 0, 3])
    asked = {"causal": True, "return_max_logits": True, "backend": backend}
    _, largest = flash_attention_varlen(q, k, k, cu_seqlens, cu_seqlens, 130, 130, **asked)
    ones = [
        flash_attention(q[None, rows], k[None, rows], k[None, rows], **asked)[1]
        for rows in (slice(130), slice(130, 133))
    ]
    torch.testing.assert_close(largest, torch.maximum(*ones))
    _, nothing = flash_attention_varlen(q, k, k, *(cumulative([0, 0]),) * 2, 130, 130, **asked)
    assert nothing.tolist() == [-torch.inf] * 2


@both_backends
def test_strided_cu_seqlens(backend):
    """A column of a table of lengths, for example."""
    torch.manual_seed(0)
    cu_seqlens = cumulative([4, 6])
    column = torch.stack([cu_seqlens, torch.full_like(cu_seqlens, 3)], 1)[:, 0]
    results = []
    for cu in (cu_seqlens, column):
        x = torch.randn(10, 2, 8, generator=torch.Generator().manual_seed(0)).requires_grad_()
        out = flash_attention_varlen(x, x, x, cu, cu, 6, 6, causal=True, backend=backend)
        results.append((out, *torch.autograd.grad(out.square().sum(), x)))
    torch.testing.assert_close(results[1], results[0], rtol=0, atol=0)


@both_backends
@pytest.mark.parametrize("sinks", [None, torch.tensor([1.0, -torch.inf])])
def test_nothing_to_see(backend, sinks):
    """No key at all, in a batch, packed, and in a packed sequence: the sink is all there is."""
    q = torch.randn(6, 2, 8)
    sink = torch.tensor([1.0, -torch.inf])[:, None] if sinks is not None else torch.full((2, 1), -torch.inf)
    for total_k, lengths_k in ((0, [0, 0]), (3, [0, 3])):
        k = torch.randn(total_k, 2, 8)
        out, lse = flash_attention_varlen(
            q, k, k, cumulative([4, 1]), cumulative(lengths_k), 4, max(lengths_k), sinks=sinks, return_lse=True,
            backend=backend,
        )  # fmt: skip
        assert out[:4].eq(0).all() and out[5:].eq(0).all()
        assert torch.equal(lse[:, :4], sink.expand(2, 4)) and lse[:, 5].eq(-torch.inf).all()
    sinks = None if sinks is None else sinks.clone().requires_grad_()
    k = q[None, :0]
    out, lse, top = flash_attention(
        q[None], k, k, sinks=sinks, return_lse=True, return_max_logits=True, backend=backend
    )  # fmt: skip
    assert out.eq(0).all() and torch.equal(lse[0], sink.expand(2, 6)) and top.eq(-torch.inf).all()
    if sinks is not None:
        lse[:, 0].sum().backward()
        assert torch.equal(sinks.grad, torch.tensor([6.0, 0.0]))


LENGTH_Q, LENGTH_K = 70, 90
REACH = [("v", torch.nan), ("v", torch.inf), ("k", torch.nan), ("q", torch.nan), ("do", torch.nan), ("do", -torch.inf)]


def visible_pairs(mask_kind):
    """What sees what, and the options that say so."""
    i, j = np.arange(LENGTH_Q)[:, None] + LENGTH_K - LENGTH_Q, np.arange(LENGTH_K)
    if mask_kind == "window":
        return (j <= i) & (j >= i - 25), {"window_left": 25, "window_right": 0, "softcap": 20.0}
    if mask_kind == "mask":
        mask = torch.rand(1, 1, LENGTH_Q, LENGTH_K, generator=torch.Generator().manual_seed(0)) < 0.3
        mask &= torch.from_numpy(abs(i - j) < 20)
        return mask[0, 0].numpy(), {"mask": mask}
    cu_q, cu_k = cumulative([20, 17, 33]), cumulative([40, 3, 47])
    sequence_q = np.searchsorted(cu_q, np.arange(LENGTH_Q), "right")[:, None]
    return sequence_q == np.searchsorted(cu_k, j, "right"), {
        "cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k, "max_seqlen_q": 33, "max_seqlen_k": 47,
    }  # fmt: skip


@both_backends
@pytest.mark.parametrize("mask_kind", ["window", "mask", "packed"])
@pytest.mark.parametrize(("where", "value"), REACH)
def test_what_is_not_finite_reaches_exactly_who_sees_it(backend, mask_kind, where, value):
    """A row of v, k, q or the gradient in which one number isn't finite; the rest must stay as it was without it."""
    visible, options = visible_pairs(mask_kind)
    # In 16 bits Triton reads through descriptors, which don't know where a packed sequence ends.
    dtype = torch.float16 if mask_kind == "packed" else torch.float32
    torch.manual_seed(0)
    shapes = {"q": (LENGTH_Q, 2, 8), "k": (LENGTH_K, 1, 8), "v": (LENGTH_K, 1, 8), "do": (LENGTH_Q, 2, 8)}
    tensors = {name: torch.randn(shape, dtype=dtype) for name, shape in shapes.items()}

    def run():
        q, k, v, do = (x if mask_kind == "packed" else x[None] for x in tensors.values())
        q, k, v = (x.clone().requires_grad_() for x in (q, k, v))
        out, _, _ = attend(q, k, v, Options(0.3, **options), with_max_logits=False, backend=backend)
        grads = torch.autograd.grad(out, (q, k, v), do)
        return [x.detach().reshape(-1, x.shape[-2] * 8) for x in (out, *grads)]

    clean = run()
    row = 45
    tensors[where][row, :, 2] = value
    queries = visible[:, row] if where in "kv" else np.arange(LENGTH_Q) == row
    keys = visible[queries].any(0)
    nothing_q, nothing_k = np.zeros(LENGTH_Q, bool), np.zeros(LENGTH_K, bool)
    expected = {
        "v": (queries, queries, keys, nothing_k),
        "k": (queries, queries, keys, keys),
        "q": (queries, queries, keys, keys),
        "do": (nothing_q, queries, keys, keys),
    }
    assert queries.any() and not queries.all() and not keys.all()
    for name, spoiled, x, before in zip(("out", "dq", "dk", "dv"), expected[where], run(), clean, strict=True):
        assert np.array_equal(~x.isfinite().all(1).numpy(), spoiled), name
        rounding = 4 * torch.finfo(dtype).eps
        torch.testing.assert_close(x[~spoiled], before[~spoiled], rtol=rounding, atol=rounding)


@both_backends
@pytest.mark.parametrize("shape", [(1, 1, 40, 50), (2, 1, 1, 50), (40, 50), (2, 4, 40, 1), (4, 1, 50)])
@pytest.mark.parametrize("dtype", [torch.bool, torch.float32])
def test_scaled_dot_product_attention_with_a_mask_is_torchs(monkeypatch, backend, shape, dtype):
    """Broadcast and transposed masks, and the gradient of an additive one."""
    monkeypatch.setattr("attention.functional.pick_backend", lambda *_: backend)
    torch.manual_seed(0)
    q, k, v = torch.randn(2, 4, 40, 8), torch.randn(2, 2, 50, 8), torch.randn(2, 2, 50, 8)
    mask = torch.randn(shape).mT.contiguous().mT if len(shape) > 1 else torch.randn(shape)
    mask = mask > -1 if dtype == torch.bool else mask
    inputs = [q, k, v] if dtype == torch.bool else [q, k, v, mask]

    def run(function, dtype):
        leaves = [x.to(dtype).detach().requires_grad_() for x in inputs]
        out = function(*leaves[:3], leaves[3] if len(leaves) == 4 else mask, enable_gqa=True)
        grads = torch.autograd.grad(out.square().sum(), leaves)
        return dict(zip(("out", "dq", "dk", "dv", "dmask")[: len(grads) + 1], (out, *grads), strict=True))

    theirs = F.scaled_dot_product_attention
    ours = run(scaled_dot_product_attention, torch.float32)
    assert_right(ours, run(theirs, torch.float32), run(theirs, torch.float64))


def test_philox_is_numpys():
    """The same words as numpy's generator of the same name, at its 10 rounds."""
    import attention.philox as module

    seed, counter = 0x0123456789ABCDEF, [5, 6, 7, 8]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "ROUNDS", 10)
        words = philox(torch.tensor(seed), *(torch.tensor(c) for c in counter))
    # Random123's known answer test for philox4x32-10: all zeros and all ones.
    assert [int(w) for w in words] == words_of_random123(seed, counter)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "ROUNDS", 10)
        words = philox(torch.tensor(0), *(torch.tensor(0) for _ in range(4)))
    assert [int(w) for w in words] == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]


def words_of_random123(seed, counter):
    """Philox-4x32-10 in Python's integers."""
    key = [seed & 0xFFFFFFFF, seed >> 32]
    c = list(counter)
    for _ in range(10):
        p0, p1 = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [(p1 >> 32) ^ c[1] ^ key[0], p1 & 0xFFFFFFFF, (p0 >> 32) ^ c[3] ^ key[1], p0 & 0xFFFFFFFF]
        key = [(key[0] + 0x9E3779B9) & 0xFFFFFFFF, (key[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return c


@both_backends
def test_dropout_keeps_what_its_twin_says(backend):
    """With equal weights and the unit vectors as values, the output shows each pair, bit by bit."""
    q, k = torch.zeros(2, 33, 2, 8), torch.zeros(2, 40, 2, 8)
    v = torch.eye(40)[None, :, None].expand(2, 40, 2, 40)
    torch.manual_seed(3)
    out = flash_attention(q, k, v, dropout_p=0.3, backend=backend)
    torch.manual_seed(3)
    seed = torch.randint(2**63 - 1, (1,))
    expected = kept(seed, 0.3, torch.arange(4).view(2, 2), slice(0, 33), slice(0, 40))
    assert torch.equal(out.transpose(1, 2) > 0, expected)
    torch.testing.assert_close(out[out > 0], torch.full_like(out[out > 0], 1 / 40 / 0.7))
    assert not torch.equal(flash_attention(q, k, v, dropout_p=0.3, backend=backend), out)


def test_dropout_is_fair():
    """Kept as often as asked, independently of the neighbours."""
    keep = kept(torch.tensor([11]), 0.25, torch.arange(4), slice(0, 512), slice(4, 516)).double()
    sigma = (0.25 * 0.75 / keep.numel()) ** 0.5
    assert abs(keep.mean() - 0.75) < 4 * sigma
    for dim in range(3):
        product = (keep.narrow(dim, 1, keep.shape[dim] - 1) - 0.75) * (keep.narrow(dim, 0, keep.shape[dim] - 1) - 0.75)
        assert abs(product.mean()) < 4 * 0.25 * 0.75 / product.numel() ** 0.5


def test_no_dropout_draws_nothing():
    before = torch.get_rng_state()
    flash_attention(*torch.zeros(3, 1, 4, 1, 8), dropout_p=0.0)
    assert torch.equal(before, torch.get_rng_state())
