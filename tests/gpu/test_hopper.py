"""backend="hopper" against float64: widths, masks and options, lengths that no tile divides, strides, NaN and inf."""

import contextlib

import pytest
import torch

from attention import flash_attention, flash_attention_varlen, scaled_dot_product_attention
from attention.packed import forward_packed
from attention.reference import Options, dense
from tests.attention.checks import assert_right, check, tensor

BF16, FP16 = torch.bfloat16, torch.float16
WIDTHS = [64, 128, 256]  # one for each entry of the kernel's table
LENGTHS = [1, 63, 64, 65, 127, 129, 193, 517, 1000]
CAUSAL, FULL, WINDOW, LEFT = (-1, 0), (-1, -1), (100, 37), (100, -1)  # the windows that say the same
CU_Q, CU_K = [0, 300, 300, 1000, 1037, 1900], [0, 200, 260, 900, 900, 1800]  # an empty sequence, one without keys


@pytest.fixture(autouse=True)
def hopper():
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip(reason="needs a GPU of capability 9.0")


@contextlib.contextmanager
def memory_is_nan():
    """What a kernel doesn't write is NaN."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def inputs(batch, seqlen_q, seqlen_k, heads_q, heads_k, width, width_v, dtype, layout="contiguous"):
    """q, k, v and an incoming gradient."""
    torch.manual_seed(0)
    shapes = (
        (batch, seqlen_q, heads_q, width),
        (batch, seqlen_k, heads_k, width),
        (batch, seqlen_k, heads_k, width_v),
        (batch, seqlen_q, heads_q, width_v),
    )
    return [tensor(shape, layout, dtype, "cuda") for shape in shapes]


def cumulative(*starts):
    return tuple(torch.tensor(cu, dtype=torch.int32, device="cuda") for cu in starts)


def forward(q, k, v, window, cu_seqlens=None, with_max_logits=False, backend="hopper", **options):
    """(out, lse) and, if asked for, max_logits."""
    attend, lengths = flash_attention, ()
    if cu_seqlens is not None:
        attend, lengths = flash_attention_varlen, (*cu_seqlens, *(int(cu.diff().max()) for cu in cu_seqlens))
    options |= {"return_lse": True, "return_max_logits": with_max_logits, "backend": backend}
    return attend(q, k, v, *lengths, window=window, **options)


def check_forward(q, k, v, window, cu_seqlens=None, scale=None, softcap=None, sinks=None):
    """Compares out, lse and, where the kernel has them, the largest logits."""
    with_max_logits = softcap is None
    names = ("out", "lse", "max_logits")[: 2 + with_max_logits]
    options = {"scale": scale, "softcap": softcap, "sinks": sinks}
    with memory_is_nan():  # the third run is a relaunch
        first, _, ours = (forward(q, k, v, window, cu_seqlens, with_max_logits, **options) for _ in range(3))
    torch.testing.assert_close(ours, first, rtol=0, atol=0, equal_nan=True)
    assert ours[0].dtype == q.dtype and ours[1].dtype == torch.float32
    left, right = (None if side == -1 else side for side in window)
    options = Options(q.shape[-1] ** -0.5 if scale is None else scale, left, right, softcap, sinks=sinks)

    def reference(dtype):
        tensors = [x.to(dtype) for x in (q, k, v)]
        if cu_seqlens is None:
            return dense(*tensors, options)
        packed = options._replace(cu_seqlens_q=cu_seqlens[0], cu_seqlens_k=cu_seqlens[1])
        return forward_packed(dense, *tensors, packed)

    result, plain, truth = (
        dict(zip(names, values, strict=False)) for values in (ours, reference(q.dtype), reference(torch.float64))
    )
    assert_right(result, plain, truth)
    return ours


@pytest.fixture(params=range(2), ids=["longest", "shorter"])
def every_tile(request, monkeypatch):
    """Each that a width has, whatever the length."""
    from attention.kernels import hopper_forward

    assert sorted(hopper_forward.TILES) == WIDTHS
    tiles = {width: tiles[request.param :][:1] or tiles[:1] for width, tiles in hopper_forward.TILES.items()}
    monkeypatch.setattr(hopper_forward, "TILES", tiles)


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("window", [CAUSAL, FULL, WINDOW])
@pytest.mark.parametrize("width", WIDTHS)
def test_masks(width, window, dtype, every_tile):
    q, k, v, _ = inputs(2, 517, 1000, 4, 2, width, width, dtype)
    check_forward(q, k, v, window)
    check_forward(k.repeat_interleave(2, 2), q[:, :, :2], q[:, :, 2:], window)  # more queries than keys


@pytest.mark.parametrize("seqlen_q", LENGTHS)
@pytest.mark.parametrize("window", [CAUSAL, FULL])
@pytest.mark.parametrize("width", WIDTHS)
def test_odd_lengths(width, window, seqlen_q, every_tile):
    for seqlen_k in LENGTHS:
        q, k, v, _ = inputs(2, seqlen_q, seqlen_k, 6, 2, width, width, BF16)
        check_forward(q, k, v, window)


@pytest.mark.parametrize("window", [LEFT, (0, 0), (0, 300), (300, 0), (1, 1), (700, 700), (2**30, 2**30), (2**40, 0)])
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(700, 700), (300, 517), (517, 300)])
def test_windows(seqlen_q, seqlen_k, window):
    q, k, v, _ = inputs(2, seqlen_q, seqlen_k, 2, 1, 64, 64, BF16)
    check_forward(q, k, v, tuple(min(side, 2**30) for side in window))
    ours, portable = (forward(q, k, v, window, with_max_logits=True, backend=name) for name in ("hopper", "triton"))
    torch.testing.assert_close(ours, portable, rtol=0.02, atol=0.02)


# Columns of values that aren't multiples of 8 make rows that the copy engine can't write.
OTHER_WIDTHS = [(40, 40), (72, 72), (96, 96), (192, 192), (64, 128), (128, 64), (192, 128), (64, 256), (256, 64)]
OTHER_WIDTHS += [(100, 60), (20, 13)]


@pytest.mark.parametrize("layout", ["contiguous", "packed"])  # "packed" starts its rows at odd addresses
@pytest.mark.parametrize(("width", "width_v"), OTHER_WIDTHS)
def test_other_widths(width, width_v, layout):
    q, k, v, _ = inputs(2, 301, 405, 4, 2, width, width_v, BF16, layout)
    check_forward(q, k, v, CAUSAL)


@pytest.mark.parametrize("backend", ["auto", "hopper"])
def test_other_widths_packed(backend):
    q, k, v, _ = inputs(1, 1901, 1803, 4, 2, 100, 60, BF16)
    out, lse = forward(q[0], k[0], v[0], CAUSAL, cumulative(CU_Q, CU_K), backend=backend)
    expected, expected_lse = forward(q[0], k[0], v[0], CAUSAL, cumulative(CU_Q, CU_K), backend="triton")
    torch.testing.assert_close(out, expected, rtol=0.02, atol=0.02)
    torch.testing.assert_close(lse, expected_lse, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("layout", ["heads_first", "packed", "width_strided"])
def test_strides(layout):
    q, k, v, _ = inputs(2, 300, 400, 4, 2, 64, 64, BF16, layout)
    check_forward(q, k, v, CAUSAL)
    check_forward(q[:, 1::2], k[:, ::3], v[:, ::3], CAUSAL)


def test_expanded():
    """Strides of 0, which the copy engine doesn't take, in the batch, the heads and the positions."""
    q, k, v, _ = inputs(2, 300, 400, 4, 4, 64, 64, BF16)
    check_forward(q[:1].expand_as(q), k[:, :, :1].expand_as(k), v[:, :1].expand_as(v), CAUSAL)


@pytest.mark.parametrize("width", WIDTHS)
def test_more_tiles_than_processors(width):
    q, k, v, _ = inputs(4, 1100, 1030, 16, 8, width, width, BF16)
    check_forward(q, k, v, CAUSAL)


OPTION_CASES = [
    (BF16, 64, CAUSAL, {"sinks"}),
    (FP16, 128, FULL, {"sinks"}),
    (BF16, 64, CAUSAL, {"sinks", "softcap"}),
    (BF16, 128, FULL, {"softcap"}),
    (FP16, 256, WINDOW, {"softcap"}),
    (BF16, 64, CAUSAL, {"cu_seqlens"}),
    (BF16, 128, FULL, {"cu_seqlens"}),
    (FP16, 128, WINDOW, {"cu_seqlens", "sinks"}),
    (BF16, 256, CAUSAL, {"cu_seqlens", "sinks", "softcap"}),
]


@pytest.mark.parametrize(("dtype", "width", "window", "names"), OPTION_CASES)
def test_options(dtype, width, window, names, every_tile):
    """Packed, there is a row past the last sequence on either side."""
    packed = "cu_seqlens" in names
    q, k, v, _ = inputs(1 if packed else 2, 1901, 1801, 4, 2, width, width, dtype)
    if packed:
        q, k, v = q[0], k[0], v[0]
    options = {"softcap": 2.0} if "softcap" in names else {}
    if "sinks" in names:
        options["sinks"] = torch.tensor([-30.0, -3.0, 0.5, 20.0], device="cuda")
    out, lse, *_ = check_forward(q, k, v, window, cumulative(CU_Q, CU_K) if packed else None, **options)
    if packed:
        assert (out[1900:] == 0).all() and (lse[:, 1900:] == -torch.inf).all()


def test_packed_without_sequences_or_tokens():
    q, k, v, _ = inputs(1, 200, 200, 2, 2, 64, 64, BF16)
    for cu in ([0, 0], [0, 0, 0, 0], [0, 1], [0, 0, 200]):
        check_forward(q[0], k[0], v[0], CAUSAL, cumulative(cu, cu))
    for rows_q, rows_k in ((0, 200), (200, 0), (0, 0)):
        cu_seqlens = cumulative([0, rows_q], [0, rows_k])
        check_forward(q[0, :rows_q], k[0, :rows_k], v[0, :rows_k], CAUSAL, cu_seqlens)


def test_rows_past_the_last_sequence_are_cleared():
    q, k, v, _ = inputs(1, 900, 500, 34, 2, 64, 64, BF16)  # a row of all heads is more than a program clears at once
    out, lse, *_ = check_forward(q[0], k[0], v[0], CAUSAL, cumulative([0, 100, 380], [0, 200, 500]))
    assert (out[380:] == 0).all() and (lse[:, 380:] == -torch.inf).all()


def test_zero_sizes():
    for batch, seqlen_q, seqlen_k in ((0, 4, 4), (2, 0, 4), (2, 4, 0)):
        q, k, v, _ = inputs(batch, seqlen_q, seqlen_k, 2, 2, 64, 64, BF16)
        check_forward(q, k, v, CAUSAL)


def test_longest_sequences_may_be_overstated():
    q, k, v, _ = inputs(1, 1900, 1800, 4, 2, 64, 64, BF16)
    q, k, v = q[0], k[0], v[0]
    cu_seqlens = cumulative(CU_Q, CU_K)
    ours = flash_attention_varlen(q, k, v, *cu_seqlens, 5000, 5000, causal=True, return_lse=True, backend="hopper")
    for x, y in zip(ours, forward(q, k, v, CAUSAL, cu_seqlens), strict=True):
        assert torch.equal(x, y)


@pytest.mark.parametrize("window", [CAUSAL, FULL])
@pytest.mark.parametrize("scale", [-0.3, 0.0, 1.0])
def test_scales(scale, window):
    q, k, v, _ = inputs(1, 200, 150, 2, 2, 64, 64, FP16)
    largest = check_forward(q, k, v, window, scale=scale)[2]
    assert scale != 0 or torch.equal(largest, torch.zeros_like(largest))


@pytest.mark.parametrize("scale", [-0.3, 0.0])
def test_scales_with_softcap(scale):
    q, k, v, _ = inputs(1, 200, 300, 4, 2, 64, 64, BF16)
    check_forward(q, k, v, CAUSAL, scale=scale, softcap=2.0, sinks=torch.randn(4, device="cuda"))


@pytest.mark.parametrize("window", [CAUSAL, FULL, WINDOW])
@pytest.mark.parametrize("width", [64, 128])
def test_huge_logits(width, window):
    """Logits up to 1e7, of either sign; those of some queries are all far below zero."""
    q, k, v, _ = inputs(2, 300, 400, 4, 2, width, width, BF16)
    k[..., 0] = 1
    q[:, ::2, :, 0] = -1000
    check_forward(1000 * q, 10 * k, v, window)


@pytest.mark.parametrize("width", WIDTHS)
def test_max_logits_change_nothing_else(width):
    q, k, v, _ = inputs(2, 1000, 1000, 4, 2, width, width, BF16)
    *both, _ = forward(q, k, v, CAUSAL, with_max_logits=True)
    for x, y in zip(both, forward(q, k, v, CAUSAL), strict=True):
        assert torch.equal(x, y)


@pytest.mark.parametrize("window", [CAUSAL, FULL])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(("batch", "seqlen"), [(1, 129), (40, 130), (3, 1100), (1, 20000)])
def test_the_largest_logit_is_found_wherever_it_is(batch, seqlen, packed, window):
    """Of all queries of a head one alone likes the keys. Packed, seven rows follow the last sequence."""
    total = batch * seqlen
    k = torch.ones(total + 7, 2, 64, dtype=BF16, device="cuda")
    cu_seqlens = cumulative(range(0, total + 1, seqlen), range(0, total + 1, seqlen)) if packed else None
    for row in (0, total // 2, total - 1):
        q = -torch.ones(total + 7, 6, 64, dtype=BF16, device="cuda")
        q[row] = torch.arange(1, 7, device="cuda")[:, None]
        q[total:] = 100
        tensors = (q, k, k) if packed else (x[:total].unflatten(0, (batch, seqlen)) for x in (q, k, k))
        with memory_is_nan():
            largest = forward(*tensors, window, cu_seqlens, with_max_logits=True)[2]
        torch.testing.assert_close(largest, torch.arange(8.0, 56.0, 8.0, device="cuda"), rtol=1e-6, atol=0)


@pytest.mark.parametrize("window", [CAUSAL, FULL])
def test_the_largest_logit_with_nan_is_the_portable_kernels(window):
    q, k, v, _ = inputs(2, 300, 300, 4, 2, 64, 64, BF16)
    q[0, 5, 0, 3] = k[1, 7, 1, 3] = torch.nan
    ours, portable = (forward(q, k, v, window, with_max_logits=True, backend=name)[2] for name in ("hopper", "triton"))
    torch.testing.assert_close(ours, portable, rtol=1e-5, atol=1e-5)


def test_a_graph_replays_what_it_captured():
    q, k, v, grad = inputs(2, 517, 517, 4, 2, 64, 64, BF16)
    q, k, v = (x.requires_grad_() for x in (q, k, v))

    def run():
        out, largest = flash_attention(q, k, v, causal=True, return_max_logits=True, backend="hopper")
        return out, largest, *torch.autograd.grad(out, (q, k, v), grad)[1:]  # dq isn't the same to the bit

    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run()
    for _ in range(3):
        with torch.no_grad():
            q += 0.5
        graph.replay()
        for replayed, expected in zip(captured, run(), strict=True):
            assert torch.equal(replayed, expected)


ISOLATION = [(width, CAUSAL, False) for width in WIDTHS]
ISOLATION += [(128, WINDOW, False), (64, CAUSAL, True), (128, CAUSAL, True)]


@pytest.mark.parametrize(("width", "window", "packed"), ISOLATION)
@pytest.mark.parametrize("where", ["q", "k", "v"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_reaches_exactly_who_sees_it(where, value, width, window, packed):
    """One number in row 500 of the input; packed, in a sequence from 300 to 700."""
    names = ("q", "k", "v")
    tensors = dict(zip(names, inputs(1, 1000, 1000, 2, 2, width, width, BF16), strict=False))
    position = torch.arange(1000, device="cuda")
    (cu_seqlens,) = cumulative([0, 300, 700, 1000])
    visible = torch.ones(1000, 1000, dtype=torch.bool, device="cuda")
    distance = position - position[:, None]  # how far a key (column) lies ahead of a query (row)
    left, right = window
    if left >= 0:
        visible &= distance >= -left
    if right >= 0:
        visible &= distance <= right
    if packed:
        sequence = torch.bucketize(position, cu_seqlens, right=True)
        visible &= sequence == sequence[:, None]

    def run():
        q, k, v = (tensors[name] for name in names)
        if not packed:
            return forward(q, k, v, window)
        out, lse = forward(q[0], k[0], v[0], window, (cu_seqlens, cu_seqlens))
        return out[None], lse[None]

    before, lse_before = run()
    tensors[where][:, 500, :, 3] = value
    with memory_is_nan():
        out, lse = run()
    spoiled = position == 500 if where == "q" else visible[:, 500]
    seen = ~out.isfinite().all(-1).all(-1)[0]
    rounding = 4 * torch.finfo(BF16).eps
    torch.testing.assert_close(out[:, ~spoiled], before[:, ~spoiled], rtol=rounding, atol=rounding)
    torch.testing.assert_close(lse[..., ~spoiled], lse_before[..., ~spoiled], rtol=1e-5, atol=1e-5)
    if where == "v":  # whose logits are what they were
        torch.testing.assert_close(lse, lse_before, rtol=1e-5, atol=1e-5)
    if where == "v" or value != value:
        assert torch.equal(seen, spoiled)
    # An infinite number makes logits of either sign; the negative ones are a weight of 0.
    assert not (seen & ~spoiled).any()


@pytest.mark.parametrize("width", WIDTHS)
def test_rows_without_keys_stay_clean(width):
    """The first 200 queries see nothing, whatever the keys and values are."""
    q, k, v, _ = inputs(2, 300, 100, 4, 2, width, width, BF16)
    out, lse = forward(q, torch.full_like(k, torch.nan), torch.full_like(v, torch.nan), CAUSAL)
    assert (out[:, :200] == 0).all() and (lse[..., :200] == -torch.inf).all()
    assert out[:, 200:].isnan().all() and lse[..., 200:].isnan().all()
    out, lse = forward(q, k, torch.full_like(v, torch.inf), CAUSAL)
    assert (out[:, :200] == 0).all() and (lse[..., :200] == -torch.inf).all() and lse[..., 200:].isfinite().all()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("width", [64, 128])
def test_rows_past_the_last_sequence_reach_nobody(width, value):
    q, k, v, _ = inputs(1, 1000, 1000, 2, 2, width, width, BF16)
    q, k, v = q[0], k[0], v[0]
    (cu,) = cumulative([0, 300, 930])
    before = forward(q, k, v, CAUSAL, (cu, cu))
    for x in (q, k, v):
        x[930:] = value
    out, lse = forward(q, k, v, CAUSAL, (cu, cu))
    rounding = 4 * torch.finfo(BF16).eps
    torch.testing.assert_close(out, before[0], rtol=rounding, atol=rounding)
    torch.testing.assert_close(lse, before[1], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("window", [CAUSAL, FULL])
@pytest.mark.parametrize("width", [64, 128])
def test_repeated_forward_is_bitwise_equal(width, window, packed):
    q, k, v, _ = inputs(4, 1024, 1024, 8, 4, width, width, BF16)
    cu_seqlens = None
    if packed:
        q, k, v = (x.flatten(0, 1) for x in (q, k, v))
        cu_seqlens = cumulative([0, 700, 701, 2500, 4096], [0, 600, 1000, 2500, 4096])
    first = forward(q, k, v, window, cu_seqlens, with_max_logits=True)
    for _ in range(20):
        again = forward(q, k, v, window, cu_seqlens, with_max_logits=True)
        assert all(torch.equal(x, y) for x, y in zip(first, again, strict=True))


@pytest.mark.parametrize("window", [CAUSAL, FULL])
def test_repeated_forward_of_wide_heads_is_bitwise_equal(window):
    q, k, v, _ = inputs(4, 1024, 1024, 8, 4, 256, 256, BF16)
    first = forward(q, k, v, window, with_max_logits=True)
    for _ in range(20):
        again = forward(q, k, v, window, with_max_logits=True)
        assert all(torch.equal(x, y) for x, y in zip(first, again, strict=True))


GRADIENTS = [(width, width, {"causal": True}) for width in (40, 64, 256)]
GRADIENTS += [(128, 128, {}), (128, 128, {"window": (100, 37)})]
GRADIENTS += [(192, 128, {"causal": True})]  # whose backward is the portable one


@pytest.mark.parametrize("backend", ["hopper", "auto"])
@pytest.mark.parametrize(("width", "width_v", "options"), GRADIENTS)
def test_gradients(width, width_v, options, backend):
    check(*inputs(2, 517, 600, 4, 2, width, width_v, BF16), **options, backend=backend)


@pytest.mark.parametrize("backend", ["hopper", "auto"])
def test_packed_gradients(backend):
    *tensors, grad_out = (x[0] for x in inputs(1, 1901, 1801, 4, 2, 64, 64, BF16))
    check(*tensors, grad_out, causal=True, cu_seqlens=cumulative(CU_Q, CU_K), backend=backend)


@pytest.mark.parametrize("backend", ["hopper", "auto"])
def test_gradient_of_sinks(backend):
    """Over heads enough for plain torch's error to say something."""
    tensors = inputs(1, 500, 500, 64, 64, 64, 64, BF16)
    check(*tensors, causal=True, sinks=torch.randn(64, device="cuda"), backend=backend)


@pytest.mark.parametrize("backend", ["hopper", "auto"])
@pytest.mark.parametrize("width", WIDTHS)
def test_deterministic_gradients_are_bitwise_equal(width, backend):
    *leaves, grad_out = inputs(2, 1024, 1024, 8, 4, width, width, BF16)
    leaves = [x.requires_grad_() for x in leaves]

    def run():
        out = flash_attention(*leaves, causal=True, deterministic=True, backend=backend)
        return out, *torch.autograd.grad(out, leaves, grad_out)

    first = run()
    for _ in range(10):
        assert all(torch.equal(x, y) for x, y in zip(first, run(), strict=True))


def step(leaves, grad_out):
    """out and gradients, the same from run to run."""
    out = flash_attention(*leaves, causal=True, deterministic=True, backend="hopper")
    return out, *torch.autograd.grad(out, leaves, grad_out)


def test_compile_fullgraph():
    """With the second length torch compiles anew, for any length."""

    def attend(q, k, v):
        return flash_attention(q, k, v, causal=True, deterministic=True, backend="hopper", return_lse=True)

    compiled = torch.compile(attend, fullgraph=True)
    for length in (128, 200, 333):
        *leaves, grad_out = inputs(2, length, length, 4, 2, 64, 64, BF16)
        leaves = [x.requires_grad_() for x in leaves]
        (out, lse), (expected, expected_lse) = compiled(*leaves), attend(*leaves)
        assert torch.equal(out, expected) and torch.equal(lse, expected_lse)
        for x, y in zip(*(torch.autograd.grad(o, leaves, grad_out) for o in (out, expected)), strict=True):
            assert torch.equal(x, y)


def test_compiled_hoppers_backward():
    """Both passes on Hopper's kernels, through the compiler, by the rule."""
    compiled = torch.compile(flash_attention, fullgraph=True)
    *leaves, grad_out = inputs(2, 517, 517, 4, 2, 64, 64, BF16)
    truth_leaves = [x.double().requires_grad_() for x in leaves]
    plain_leaves = [x.clone().requires_grad_() for x in leaves]
    leaves = [x.requires_grad_() for x in leaves]
    results = []
    out = compiled(*leaves, causal=True, backend="hopper")
    for one, tensors in ((out, leaves), (None, plain_leaves), (None, truth_leaves)):
        one = dense(*tensors, Options(64**-0.5, None, 0))[0] if one is None else one
        grads = torch.autograd.grad(one, tensors, grad_out.to(one.dtype))
        results.append({"out": one.detach(), **dict(zip(("dq", "dk", "dv"), grads, strict=True))})
    assert_right(*results)


def test_cuda_graph():
    *leaves, grad_out = inputs(2, 300, 300, 4, 4, 64, 64, BF16)
    leaves = [x.requires_grad_() for x in leaves]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step(leaves, grad_out)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step(leaves, grad_out)
    with torch.no_grad():
        leaves[0].mul_(0.5)
    graph.replay()
    for x, y in zip(captured, step(leaves, grad_out), strict=True):
        assert torch.equal(x, y)


@pytest.mark.parametrize(
    ("dtype", "options", "named"),
    [
        (torch.float32, {}, "float32"),
        (BF16, {"alibi_slopes": torch.ones(2)}, "alibi_slopes"),
        (BF16, {"dropout_p": 0.1}, "dropout_p"),
        (BF16, {"softcap": 2.0, "return_max_logits": True}, "return_max_logits with softcap"),
    ],
)
def test_errors_name_what_is_not_covered(dtype, options, named):
    q, k, v, _ = inputs(1, 200, 200, 2, 2, 64, 64, dtype)
    options = {name: x.cuda() if isinstance(x, torch.Tensor) else x for name, x in options.items()}
    with pytest.raises(ValueError, match=f"^backend='hopper' .*{named}.*: use 'auto' or 'triton'$") as caught:
        flash_attention(q, k, v, **options, backend="hopper")
    assert "\n" not in str(caught.value)
    flash_attention(q, k, v, **options)  # "auto" runs it


def test_masks_run_elsewhere():
    """scaled_dot_product_attention, which alone has masks, leaves them to the portable kernels."""
    q, k, v, _ = inputs(2, 200, 200, 2, 2, 64, 64, BF16)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    mask = torch.rand(200, 200, device="cuda") < 0.7
    expected = torch.nn.functional.scaled_dot_product_attention(q.float(), k.float(), v.float(), mask)
    ours = scaled_dot_product_attention(q, k, v, mask)
    torch.testing.assert_close(ours.float(), expected, rtol=0.02, atol=0.02)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_other_than_the_current_device():
    q, k, v, _ = (x.to("cuda:1") for x in inputs(1, 300, 300, 2, 2, 64, 64, BF16))
    with torch.cuda.device(0):
        check_forward(q, k, v, CAUSAL)
