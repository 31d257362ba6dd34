"""The online softmax of Hopper's forward."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .common import LOG2_E
from .hopper_common import hide_if_greater


@gluon.jit
def softmax(
    s, row_max, row_sum, start_n, limits, scales, BOUND_LEFT: gl.constexpr, MASKED: gl.constexpr, APART: gl.constexpr
):
    """Probabilities relative to the maximum so far, that maximum, the sum, and how much what came before shrinks.

    APART: the sum is in the parts of `sums_of_threads`.
    """
    layout: gl.constexpr = s.type.layout
    scale, tanh_scale = scales
    if tanh_scale is not None:
        s = 1.0 - 2.0 / (gl.exp2(s * (tanh_scale * (2.0 * LOG2_E))) + 1.0)
    if MASKED:
        left, right = limits
        keys = start_n + gl.arange(0, s.type.shape[1], gl.SliceLayout(0, layout))
        s = hide_if_greater(s, keys[None, :], right[:, None])
        if BOUND_LEFT:
            s = hide_if_greater(s, left[:, None], keys[None, :])
    new_max = gl.maximum(row_max, gl.max(s, 1) * scale)
    anchor = gl.where(new_max == -float("inf"), 0.0, new_max) if MASKED else new_max  # -inf - -inf would be NaN
    p = gl.exp2(s * scale - anchor[:, None])
    rescale = gl.exp2(row_max - anchor)
    if APART:
        parts = sums_of_threads(p)
        row_sum = row_sum * gl.convert_layout(rescale, gl.SliceLayout(1, parts.type.layout))[:, None] + parts
    else:
        row_sum = row_sum * rescale + gl.sum(p, 1)
    return p, new_max, row_sum, rescale


@gluon.jit
def sums_of_threads(p):
    """(rows, 4): of each row what each of its four threads has, which takes no exchange between them."""
    return gl.sum(gl.sum(p.reshape([p.shape[0], p.shape[1] // 8, 4, 2]), 3), 1)


@gluon.jit
def count_sink(acc, row_max, row_sum, sinks_ptr, head):
    """The sink joins the softmax at its end."""
    if sinks_ptr is not None:
        sink = gl.load(sinks_ptr + head) * LOG2_E
        new_max = gl.maximum(row_max, sink)
        anchor = gl.where(new_max == -float("inf"), 0.0, new_max)
        rescale = gl.exp2(row_max - anchor)
        acc = acc * gl.convert_layout(rescale, gl.SliceLayout(1, acc.type.layout))[:, None]
        row_sum = row_sum * rescale + gl.exp2(sink - anchor)
        row_max = new_max
    return acc, row_max, row_sum


@gluon.jit
def pack(p, dtype: gl.constexpr):
    """Probabilities as 16-bit pairs in 32-bit words: a loop that carried single ones would take them apart and together
    again in every round."""
    low, high = p.reshape([p.shape[0], p.shape[1] // 2, 2]).split()
    kind: gl.constexpr = "bf16x2" if dtype == gl.bfloat16 else "f16x2"
    return gl.inline_asm_elementwise(
        "cvt.rn." + kind + ".f32 $0, $2, $1;", "=r,r,r", [low, high], dtype=gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def unpack(words, dtype: gl.constexpr, layout: gl.constexpr):
    """They again, as the left side of a product."""
    low, high = gl.inline_asm_elementwise(
        "mov.b32 {$0, $1}, $2;", "=h,=h,r", [words], dtype=(gl.int16, gl.int16), is_pure=True, pack=1
    )
    pairs = gl.join(low.to(dtype, bitcast=True), high.to(dtype, bitcast=True))
    return gl.convert_layout(pairs.reshape([words.shape[0], words.shape[1] * 2]), layout)
