"""SelfAttention: shapes, rotary embedding, the fused weight's views, and attention by another function."""

import copy

import pytest
import torch
from helpers.layers import DenseSelfAttention
from hypothesis import given, settings
from hypothesis import strategies as st

from attention import SelfAttention, flash_attention
from attention.rotary import rotary_angles, rotate
from tests.attention.checks import assert_right


def supported(**option):
    try:
        flash_attention(*torch.randn(3, 1, 2, 1, 8), **option)
    except NotImplementedError:
        return False
    return True


needs_window = pytest.mark.skipif(not supported(window=(1, 0)), reason="needs flash_attention(window=...)")
needs_max_logits = pytest.mark.skipif(
    not supported(return_max_logits=True), reason="needs flash_attention(return_max_logits=True)"
)
flash_if_supported = pytest.mark.parametrize(
    "layer_class", [DenseSelfAttention, pytest.param(SelfAttention, marks=needs_max_logits)]
)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"qk_norm": True},
        {"causal": False},
        {"rotary": False, "bias": True},
        pytest.param({"window": (5, 0)}, marks=needs_window),
        pytest.param({"window": (5, 3)}, marks=needs_window),  # causal: nothing to the right all the same
        pytest.param({"window": (-1, 3), "causal": False}, marks=needs_window),
        pytest.param({"window": (2, -1), "causal": False}, marks=needs_window),
        pytest.param({"window": (3, 0), "max_logits": True}, marks=[needs_window, needs_max_logits]),
    ],
)
def test_swapping_the_attention_changes_nothing(options):
    torch.manual_seed(0)
    ours = SelfAttention(48, 6, 2, **options)
    dense = DenseSelfAttention(48, 6, 2, **options)
    dense.load_state_dict(ours.state_dict())
    x = torch.randn(2, 37, 48)
    torch.testing.assert_close(ours(x), dense(x))
    ours(x).square().sum().backward()
    dense(x).square().sum().backward()
    for parameter, other in zip(ours.parameters(), dense.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, other.grad)


def test_causal_layer_does_not_look_ahead():
    layer = SelfAttention(32, 4)
    x = torch.randn(1, 20, 32)
    y = x.clone()
    y[:, 12:] = 0
    torch.testing.assert_close(layer(x)[:, :12], layer(y)[:, :12])
    assert not torch.allclose(layer(x)[:, 12:], layer(y)[:, 12:])


def test_rotary_logits_depend_on_the_distance_only():
    q, k = torch.randn(2, 1, 1, 1, 16, dtype=torch.float64)

    def logit(i, j):
        rotated = [rotate(x, *rotary_angles(torch.tensor([position]), 16)) for x, position in ((q, i), (k, j))]
        return (rotated[0] * rotated[1]).sum()

    torch.testing.assert_close(logit(5, 3), logit(105, 103), rtol=1e-4, atol=1e-4)
    assert abs(logit(5, 3) - logit(5, 4)) > 1e-3


def test_rotary_is_a_rotation_in_the_complex_plane():
    x = torch.randn(2, 7, 3, 16)
    angles = torch.arange(7.0)[:, None, None] * 10000.0 ** -(torch.arange(8) / 8)
    turned = torch.complex(x[..., :8], x[..., 8:]) * torch.polar(torch.ones_like(angles), angles)
    expected = torch.cat((turned.real, turned.imag), -1)
    torch.testing.assert_close(rotate(x, *rotary_angles(torch.arange(7), 16)), expected)


@pytest.mark.parametrize("positions", [torch.arange(9), torch.tensor([[0, 3], [70_000, 5]]), torch.arange(0)])
def test_rotary_operator(positions):
    torch.library.opcheck(torch.ops.attention.rotary_angles, (positions, 6))
    angles = positions.double()[..., None, None] * 10000.0 ** -(torch.arange(3).double() / 3)
    for ours, truth in zip(rotary_angles(positions, 6), (angles.cos(), angles.sin()), strict=True):
        assert ours.dtype == torch.float32 and ours.shape == truth.shape
        assert ((ours - truth).abs() <= 1e-6 + angles * 2**-22).all()  # of a large angle float32 drops the last bits


def test_rotary_operator_under_vmap():
    positions = torch.randint(0, 99, (4, 2, 3))
    batched = torch.vmap(lambda p: rotary_angles(p, 8), in_dims=1)(positions)
    for ours, expected in zip(batched, rotary_angles(positions.transpose(0, 1), 8), strict=True):
        assert torch.equal(ours, expected)


def test_qk_weights_are_views_of_the_rows_that_make_queries_and_keys():
    torch.manual_seed(0)
    layer = SelfAttention(48, 6, 2, rotary=False)
    query, key = layer.qk_weights()
    assert query.shape == (6, 8, 48) and key.shape == (2, 8, 48)
    seen = {}
    layer.attend = lambda q, k, v: seen.update(q=q, k=k, v=v) or flash_attention(q, k, v)
    x = torch.randn(1, 5, 48)
    layer(x)
    before = dict(seen)
    query[4] *= 2
    key[1] *= 3
    layer(x)
    torch.testing.assert_close(seen["q"][:, :, 4], 2 * before["q"][:, :, 4])
    torch.testing.assert_close(seen["q"][:, :, :4], before["q"][:, :, :4])
    torch.testing.assert_close(seen["k"][:, :, 1], 3 * before["k"][:, :, 1])
    torch.testing.assert_close(seen["k"][:, :, 0], before["k"][:, :, 0])
    torch.testing.assert_close(seen["v"], before["v"])


def test_qk_norm_bounds_the_logits():
    layer = SelfAttention(32, 2, qk_norm=True)
    seen = {}
    layer.attend = lambda q, k, v: seen.update(q=q, k=k) or flash_attention(q, k, v)
    layer(1e3 * torch.randn(1, 9, 32))
    torch.testing.assert_close(seen["q"].square().mean(-1), torch.ones(1, 9, 2))
    torch.testing.assert_close(seen["k"].square().mean(-1), torch.ones(1, 9, 2))


def test_low_precision_and_autocast():
    x = torch.randn(1, 9, 32)
    layer = SelfAttention(32, 2, qk_norm=True, dtype=torch.bfloat16)
    assert layer(x.bfloat16()).dtype == torch.bfloat16
    layer = SelfAttention(32, 2, qk_norm=True)
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(x).dtype == torch.bfloat16


def test_empty_sequences():
    assert SelfAttention(32, 2)(torch.randn(2, 0, 32)).shape == (2, 0, 32)
    assert SelfAttention(32, 2)(torch.randn(0, 5, 32)).shape == (0, 5, 32)


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ((30, 4), {}, "embed_dim must be a multiple of num_heads, got 30 and 4"),
        ((32, 4, 3), {}, "num_heads must be a multiple of num_kv_heads, got 4 and 3"),
        ((12, 4), {}, "rotary needs an even head width, got embed_dim / num_heads = 3"),
        ((1032, 4), {}, "the head width embed_dim / num_heads must be from 1 to 256, got 1032 / 4 = 258"),
        ((0, 4), {}, "the head width embed_dim / num_heads must be from 1 to 256, got 0 / 4 = 0"),
    ],
)
def test_errors(arguments, options, message):
    with pytest.raises(ValueError, match=message):
        SelfAttention(*arguments, **options)


@pytest.mark.parametrize("window", [(3,), (-2, 0), 3, (3, None), (2.5, 0)])
def test_a_window_is_two_numbers_of_positions(window):
    with pytest.raises(ValueError, match="window must be two numbers of positions from -1"):
        SelfAttention(32, 2, window=window)


def largest_logits(layer, x):
    """Each head's largest visible logit, in float64, by the definition."""
    layer, seen = copy.deepcopy(layer).double(), {}
    layer.attend = lambda q, k, v: seen.update(q=q, k=k) or q
    layer(x.double())
    k = seen["k"].repeat_interleave(layer.num_heads // layer.num_kv_heads, 2)
    logits = torch.einsum("bihd,bjhd->bhij", seen["q"], k) * layer.head_dim**-0.5
    return logits.masked_fill(~layer.visible(x.shape[1]), -torch.inf).amax((0, 2, 3))


@flash_if_supported
@pytest.mark.parametrize("options", [{}, {"qk_norm": True}, {"causal": False}])
def test_max_logits_are_the_largest_since_the_reset(layer_class, options):
    torch.manual_seed(0)
    layer = layer_class(48, 6, 2, max_logits=True, **options)
    dense = DenseSelfAttention(48, 6, 2, **options)
    dense.load_state_dict(layer.state_dict())
    assert layer.max_logits.equal(torch.full((6,), -torch.inf))
    batches = torch.randn(3, 2, 9, 48) * torch.tensor([1.0, 5.0, 0.1]).view(-1, 1, 1, 1)
    expected = [largest_logits(dense, x) for x in batches]
    for i, x in enumerate(batches):
        layer(x).sum().backward()
        assert layer.max_logits.dtype == torch.float32 and not layer.max_logits.requires_grad
        so_far = torch.stack(expected[: i + 1]).amax(0).float()
        torch.testing.assert_close(layer.max_logits, so_far, rtol=1e-5, atol=1e-5)
    layer.reset_max_logits()
    layer(batches[2])
    torch.testing.assert_close(layer.max_logits, expected[2].float(), rtol=1e-5, atol=1e-5)


@needs_max_logits
@needs_window
def test_max_logits_see_the_window():
    torch.manual_seed(0)
    layer = SelfAttention(32, 2, window=(1, 0), max_logits=True)
    dense = DenseSelfAttention(32, 2, window=(1, 0))
    dense.load_state_dict(layer.state_dict())
    x = torch.randn(1, 40, 32)
    layer(x)
    torch.testing.assert_close(layer.max_logits, largest_logits(dense, x).float(), rtol=1e-5, atol=1e-5)


def test_max_logits_are_no_part_of_a_checkpoint_and_stay_float32():
    layer = DenseSelfAttention(32, 2, max_logits=True)
    assert layer.state_dict().keys() == SelfAttention(32, 2).state_dict().keys()
    layer(torch.randn(1, 5, 32))
    assert copy.deepcopy(layer).max_logits.equal(layer.max_logits)
    cast = copy.deepcopy(layer).bfloat16()
    assert cast.max_logits.equal(torch.full((2,), -torch.inf)) and cast.max_logits.dtype == torch.float32
    cast(torch.randn(1, 5, 32, dtype=torch.bfloat16))
    assert cast.max_logits.isfinite().all()
    with torch.device("meta"):
        empty = SelfAttention(32, 2, max_logits=True)
    assert empty.to_empty(device="cpu").max_logits.equal(torch.full((2,), -torch.inf))
    assert not hasattr(SelfAttention(32, 2), "max_logits")


@flash_if_supported
def test_max_logits_compile_once(layer_class):
    layer = layer_class(32, 2, max_logits=True)
    graphs = []

    def counting_backend(graph, inputs):
        graphs.append(graph)
        return graph

    compiled = torch.compile(layer, fullgraph=True, backend=counting_backend)
    x = torch.randn(2, 9, 32)
    compiled(x)
    expected = layer.max_logits.clone()
    layer.reset_max_logits()
    compiled(x)
    assert layer.max_logits.equal(expected) and expected.isfinite().all()
    assert len(graphs) == 1


def random_layer(options, seed=0, layer_class=SelfAttention):
    """One whose outputs depend on the positions strongly enough."""
    torch.manual_seed(seed)
    layer = layer_class(48, 6, 2, **options)
    with torch.no_grad():
        layer.qkv.weight.mul_(3)
    return layer


def in_steps(layer, x, steps, cache=None):
    """What the layer says to x (B, S, E) when it is given `steps` tokens at a time."""
    cache = layer.new_cache(x.shape[0], x.shape[1]) if cache is None else cache
    with torch.no_grad():
        return torch.cat([layer(piece, cache=cache) for piece in torch.split(x, steps, dim=1)], 1), cache


def assert_equals_recomputation(layer, x, steps, options):
    """Truth is the layer in float64 without a cache, the yardstick the same in the layer's dtype."""
    dense = DenseSelfAttention(48, 6, 2, **options)
    dense.load_state_dict(layer.state_dict())
    result, cache = in_steps(layer, x, steps)
    with torch.no_grad():
        plain, truth = dense.to(x.dtype)(x), dense.double()(x.double())
    assert_right({"out": result}, {"out": plain}, {"out": truth})
    assert cache.lengths.tolist() == [x.shape[1]] * x.shape[0]


WINDOWED = pytest.param({"window": (4, 0)}, marks=needs_window)


@pytest.mark.parametrize("options", [{}, {"qk_norm": True, "bias": True}, {"rotary": False}, WINDOWED])
@settings(max_examples=12, deadline=None, derandomize=True)
@given(data=st.data())
def test_a_cache_changes_nothing(options, data):
    dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
    steps = data.draw(st.lists(st.integers(1, 30), min_size=1, max_size=6))
    layer = random_layer(options).to(dtype)
    torch.manual_seed(data.draw(st.integers(0, 99)))
    assert_equals_recomputation(layer, torch.randn(2, sum(steps), 48, dtype=dtype), steps, options)


def test_steps_respect_the_window():
    """Without the prompt's help: the first piece is one token."""
    layer = random_layer({"window": (4, 0)}, layer_class=DenseSelfAttention)
    x = torch.randn(2, 20, 48)
    result, _ = in_steps(layer, x, [1] * 8 + [3] * 4)
    with torch.no_grad():
        torch.testing.assert_close(result, layer(x))


def test_prompts_of_different_lengths():
    """Padded on the right and read together, then a token at a time: each sequence gives what it gives alone."""
    layer, lengths = random_layer({}), [7, 3, 12]
    x = torch.randn(3, 20, 48)
    cache = layer.new_cache(3, 17)
    with torch.no_grad():
        layer(x[:, :12], cache=cache)
        cache.lengths.copy_(torch.tensor(lengths))
        for step in range(5):
            tokens = torch.stack([x[b, length + step] for b, length in enumerate(lengths)])[:, None]
            out = layer(tokens, cache=cache)
            for b, length in enumerate(lengths):
                alone = layer(x[b : b + 1, : length + step + 1])[:, -1:]
                torch.testing.assert_close(out[b : b + 1], alone, rtol=1e-5, atol=1e-5)
    assert cache.lengths.tolist() == [12, 8, 17] and cache.lengths.dtype == torch.int32


def test_too_much_for_the_cache():
    layer = random_layer({})
    cache = layer.new_cache(2, 8)
    in_steps(layer, torch.randn(2, 7, 48), [4, 3], cache)
    before = cache.k.clone()
    with pytest.raises(ValueError, match="the cache holds 8 tokens a sequence: 2 more after 7 don't fit"):
        in_steps(layer, torch.randn(2, 2, 48), 2, cache)
    assert cache.k.equal(before) and cache.lengths.tolist() == [7, 7]
    cache.lengths.sub_(3)  # makes room again
    in_steps(layer, torch.randn(2, 4, 48), 4, cache)
    with pytest.raises(ValueError, match="8 tokens a sequence: 1 more after 8"):
        in_steps(layer, torch.randn(2, 1, 48), 1, cache)
    for options in ({}, {"rotary": False}):
        with pytest.raises(ValueError, match="the batch size is 1 but the cache's is 2"):
            in_steps(random_layer(options), torch.randn(1, 1, 48), 1, layer.new_cache(2, 8))
    with pytest.raises(ValueError, match="causal=False can't use a cache"):
        SelfAttention(32, 2, causal=False).new_cache(1, 8)


def test_a_dropped_token_leaves_no_trace():
    layer, x = random_layer({}), torch.randn(1, 9, 48)
    _, cache = in_steps(layer, torch.cat((x[:, :5], torch.full((1, 3, 48), torch.nan)), 1), 8, layer.new_cache(1, 20))
    cache.lengths.fill_(5)
    result, _ = in_steps(layer, x[:, 5:], 1, cache)
    with torch.no_grad():
        torch.testing.assert_close(result, layer(x)[:, 5:])


def test_reset():
    layer, x = random_layer({}), torch.randn(2, 8, 48)
    first, cache = in_steps(layer, x, [5, 3], layer.new_cache(2, 8))
    cache.reset()
    assert in_steps(layer, x, [5, 3], cache)[0].equal(first)


def test_reorder():
    layer, x = random_layer({}), torch.randn(3, 6, 48)
    _, cache = in_steps(layer, x, 6, layer.new_cache(3, 10))
    cache.lengths[1] = 4
    beams = torch.tensor([1, 1, 0])
    cache.reorder(beams)
    assert cache.lengths.tolist() == [4, 4, 6]
    token = torch.randn(3, 1, 48)
    with torch.no_grad():
        out = layer(token, cache=cache)
        for b, (source, length) in enumerate(((1, 4), (1, 4), (0, 6))):
            whole = torch.cat((x[source : source + 1, :length], token[b : b + 1]), 1)
            torch.testing.assert_close(out[b : b + 1], layer(whole)[:, -1:], rtol=1e-5, atol=1e-5)


def test_a_cache_is_not_for_training():
    layer, x = random_layer({}), torch.randn(1, 5, 48)
    cache = layer.new_cache(1, 8)
    layer(x, cache=cache)
    assert not cache.k.requires_grad and not cache.v.requires_grad
    with pytest.raises(NotImplementedError, match="no gradient"):
        layer(x[:, :1], cache=cache).sum().backward()


def test_a_cache_under_autocast():
    layer, x = random_layer({}), torch.randn(2, 9, 48)
    with torch.autocast("cpu", torch.bfloat16):
        result, cache = in_steps(layer, x, [4, 1, 4])
        plain = layer(x)
    assert cache.k.dtype == result.dtype == torch.bfloat16
    dense = DenseSelfAttention(48, 6, 2)
    dense.load_state_dict(layer.state_dict())
    assert_right({"out": result}, {"out": plain}, {"out": dense.double()(x.double())})


def test_compiled_steps():
    """One graph for the prompt and a few for the steps, however many there are."""
    layer, x, graphs = random_layer({}), torch.randn(2, 30, 48), []

    def counting_backend(graph, inputs):
        graphs.append(graph)
        return graph

    compiled = torch.compile(layer, fullgraph=True, backend=counting_backend)
    cache = layer.new_cache(2, 30)
    with torch.no_grad():
        pieces = [compiled(piece, cache=cache) for piece in torch.split(x, [10, *[1] * 20], dim=1)]
        torch.testing.assert_close(torch.cat(pieces, 1), layer(x), rtol=1e-5, atol=1e-5)
    assert len(graphs) <= 3
