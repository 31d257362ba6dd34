"""What an operator has to do at least, what the device can do at most, and which of the two binds.

Williams, Waterman and Patterson 2009, https://doi.org/10.1145/1498765.1498785: an operator of F operations on B bytes
takes at least max(F / peak, B / bandwidth); below F / B = peak / bandwidth it is memory that binds.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from examples.gpt.measure import milliseconds

TYPE_BYTES = {"float": 4, "c10::BFloat16": 2, "c10::Half": 2, "double": 8, "long int": 8, "long": 8, "int": 4}
TYPE_BYTES |= {"bool": 1, "unsigned char": 1, "signed char": 1}
MATMUL = {"aten::mm": 0, "aten::bmm": 0, "aten::addmm": 1, "aten::baddbmm": 1}  # where the two factors begin
ATTENTION = re.compile(r"attention::(forward|backward)$|aten::_(scaled_dot_product|flash|efficient|cudnn)\w*attention")
# Their result is as large as their largest argument.
ELEMENTWISE = re.compile(
    r"aten::(add|sub|mul|div|neg|pow|relu|square|rsqrt|sqrt|clamp_min|clone|where|threshold_backward|gelu|silu"
    r"|_log_softmax|_fused_rms_norm|native_layer_norm|native_dropout)(_backward|_backward_data)?$"
)

WRITTEN_ONLY = {"aten::copy_", "aten::fill_", "aten::zero_"}


@dataclass(frozen=True)
class Ceilings:
    flops: float  # operations a second of a large matrix product
    bandwidth: float  # bytes a second of a large copy, read and written


def measure(device: torch.device, dtype: torch.dtype) -> Ceilings:
    """On the spot, on random data; the best of ten."""
    n, elements = (8192, 2**28) if device.type == "cuda" else (512, 2**25)
    a, b = torch.randn(2, n, n, device=device).to(dtype)
    source, target = torch.randn(elements, device=device), torch.empty(elements, device=device)
    product_ms = [milliseconds(device, lambda: a @ b) for _ in range(12)][2:]
    copy_ms = [milliseconds(device, lambda: target.copy_(source)) for _ in range(12)][2:]
    return Ceilings(2e3 * n**3 / min(product_ms), 2e3 * source.nbytes / min(copy_ms))


def is_backward(name: str) -> bool:
    return "backward" in name


def cost(name: str, shapes: Sequence[list[int]], types: Sequence[str]) -> tuple[float | None, float | None]:
    """Operations and bytes of one call, each None if it isn't known.

    A product of matrices (m, k) and (k, n) is 2mkn operations; causal attention half of 4·B·H·S²·D forward and 2.5
    times that backward, where the scores are computed again; nothing else is counted. Bytes are every argument once and
    the result once: what a kernel with an unlimited cache would move.
    """
    if any(shape and kind not in TYPE_BYTES for shape, kind in zip(shapes, types, strict=True)):
        return None, None  # a list of tensors, of types that the trace doesn't tell
    sizes = [
        math.prod(shape) * TYPE_BYTES[kind] for shape, kind in zip(shapes, types, strict=True) if kind in TYPE_BYTES
    ]
    if not sizes:
        return None, None
    if name in MATMUL:
        first = MATMUL[name]
        a, b = shapes[first], shapes[first + 1]
        result = math.prod(a[:-1]) * b[-1] * TYPE_BYTES[types[first]]
        return 2.0 * math.prod(a) * b[-1], sum(sizes[: first + 2]) + result
    if ATTENTION.match(name):
        q = shapes[0]  # or the gradient of the output, which is as large
        sequence = q[1] if name.startswith("attention::") else q[2]  # (B, S, H, D), or torch's (B, H, S, D)
        forward = 2.0 * math.prod(q) * sequence
        return (2.5 * forward, sum(sizes) + 3 * sizes[0]) if is_backward(name) else (forward, sum(sizes) + sizes[0])
    if name.startswith("triton_") or name in WRITTEN_ONLY:  # the results are among the arguments
        return None, sum(sizes)
    if name.endswith("_"):
        return None, sum(sizes) + sizes[0]
    return None, sum(sizes) + max(sizes) if ELEMENTWISE.match(name) else None


def floor_ms(flops: float | None, bytes_: float | None, ceilings: Ceilings) -> float | None:
    """The least time that the device needs, None if neither is known."""
    known = [1e3 * flops / ceilings.flops] if flops is not None else []
    known += [1e3 * bytes_ / ceilings.bandwidth] if bytes_ is not None else []
    return max(known, default=None)


def binds(ms: float, flops: float | None, bytes_: float | None, ceilings: Ceilings) -> str:
    """`compute`, `memory`, or `neither` where the time is more than twice what both would need; else `unknown`."""
    floor = floor_ms(flops, bytes_, ceilings)
    if floor is None:
        return "unknown"
    if floor < ms / 2:
        return "neither"
    return "compute" if floor_ms(flops, None, ceilings) == floor else "memory"


def draw(rows: Sequence[Any], ceilings: Ceilings, title: str, path: Path) -> None:
    """Operators under the roof, as large as the time they take; and the bytes a second of those that are only moved."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (roof, rates) = plt.subplots(1, 2, figsize=(13, 5), layout="constrained")
    total = sum(row.ms for row in rows)
    kinds = sorted({row.kind for row in rows})
    ridge = ceilings.flops / ceilings.bandwidth
    xs = [ridge / 1e3, ridge, ridge * 1e2]
    roof.plot(xs, [min(ceilings.flops, ceilings.bandwidth * x) for x in xs], "k-", linewidth=1)
    for color, kind in enumerate(kinds):
        for panel, known in ((roof, True), (rates, False)):
            shown = [row for row in rows if row.kind == kind and row.bytes and row.ms > total / 1e3]
            dots = [row for row in shown if (row.flops is not None) == known]
            seconds = [row.ms / 1e3 for row in dots]
            x = [row.flops / row.bytes if known else row.ms for row in dots]
            y = [(row.flops if known else row.bytes) / time for row, time in zip(dots, seconds, strict=True)]
            areas = [2000 * row.ms / total for row in dots]
            panel.scatter(x, y, s=areas, color=f"C{color}", alpha=0.6, label=kind if dots else None)
            for row, *place in zip(dots, x, y, strict=True):
                if row.ms > total / 50 and not known:
                    panel.annotate(row.operator[:40], place, fontsize=7)
    rates.axhline(ceilings.bandwidth, color="black", linewidth=1)
    roof.set(xscale="log", yscale="log", xlabel="operations a byte", ylabel="operations a second")
    rates.set(xscale="log", yscale="log", xlabel="ms a step", ylabel="bytes a second, operations unknown")
    for panel in (roof, rates):
        panel.grid(alpha=0.3)
        for handle in panel.legend().legend_handles:
            handle.set_sizes([40])
    figure.suptitle(f"{title}; area: time; lines: a large matrix product and a large copy")
    figure.savefig(path, dpi=110)
    plt.close(figure)
