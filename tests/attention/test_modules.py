"""SelfAttention: shapes, rotary embedding, the fused weight's views, and attention by another function."""

import pytest
import torch
import torch.nn.functional as F

from attention import SelfAttention, flash_attention
from attention.modules import rotary_angles, rotate


class DenseSelfAttention(SelfAttention):
    def attend(self, q, k, v):
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=self.causal, enable_gqa=True).transpose(1, 2)


@pytest.mark.parametrize("options", [{}, {"qk_norm": True}, {"causal": False}, {"rotary": False, "bias": True}])
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
    ],
)
def test_errors(arguments, options, message):
    with pytest.raises(ValueError, match=message):
        SelfAttention(*arguments, **options)


@pytest.mark.parametrize("option", [{"window": (3, 0)}, {"max_logits": True}])
def test_unsupported_options_say_so(option):
    with pytest.raises(NotImplementedError, match=next(iter(option))):
        SelfAttention(32, 2, **option)
