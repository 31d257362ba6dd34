"""How fast a run is: model FLOPs utilisation, and the optimizer's share of a step."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import nn

from examples.gpt.presets import Preset

# Dense bfloat16 FLOP/s by a part of the device's name, from NVIDIA's data sheets; the first that fits counts.
PEAK_FLOPS = {
    "H100 PCIe": 756e12, "H100": 989e12, "H200": 989e12, "B200": 2250e12, "A100": 312e12, "RTX 4090": 165e12,
}  # fmt: skip


def flops_per_token(model: nn.Module, layers: int, width: int, context: int) -> float:
    """Of forward and backward: 6 a weight in a product, and 12 · layers · width · context in the attention.

    As PaLM (https://arxiv.org/abs/2204.02311, appendix B) and nanoGPT count: causal attention as if it were full. The
    tied embedding counts as the head that it is; learned positions multiply nothing.
    """
    weights = sum(p.numel() for name, p in model.named_parameters() if "position" not in name)
    return 6 * weights + 12 * layers * width * context


def peak_flops(device: torch.device) -> float | None:
    """None where the device is not in the table."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    return next((peak for part, peak in PEAK_FLOPS.items() if part in name), None)


class OptimizerClock:
    """How long the optimizer's steps take; on a GPU by events in its queue, so that nothing waits."""

    def __init__(self, optimizer: torch.optim.Optimizer, device: torch.device) -> None:
        self.on_gpu = device.type == "cuda"
        self.started: Any = None
        self.steps: list[tuple[Any, Any]] = []  # since the last reading
        optimizer.register_step_pre_hook(self._start)
        optimizer.register_step_post_hook(self._stop)

    def _start(self, *_: object) -> None:
        self.started = self._now()

    def _stop(self, *_: object) -> None:
        self.steps.append((self.started, self._now()))

    def _now(self) -> Any:
        if not self.on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def read(self) -> float | None:
        """Mean milliseconds since the last reading; waits for the device."""
        if not self.steps:
            return None
        if self.on_gpu:
            self.steps[-1][1].synchronize()
            times = [start.elapsed_time(end) for start, end in self.steps]
        else:
            times = [1e3 * (end - start) for start, end in self.steps]
        self.steps = []
        return sum(times) / len(times)


class Speedometer:
    """Both of a run, for the rows of metrics.csv."""

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, preset: Preset, device: torch.device, processes: int
    ) -> None:
        self.clock = OptimizerClock(optimizer, device)
        self.flops = flops_per_token(model, preset.layers, preset.width, preset.context)
        peak = peak_flops(device)
        self.peak = None if peak is None else peak * processes

    def read(self, tokens_per_second: float) -> dict[str, float | None]:
        mfu = None if self.peak is None else tokens_per_second * self.flops / self.peak
        return {"optimizer_ms": self.clock.read(), "mfu": mfu}
