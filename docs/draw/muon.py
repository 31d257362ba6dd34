"""Draws the figures of docs/muon-in-ten-minutes.md and prints the numbers that the page quotes.

    python -m docs.draw.muon

Trains the example's small GPT for 60 steps on the CPU to get a real momentum matrix: about half a minute.
"""

import math
import platform
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import torch
from torch import Tensor

from docs.draw.common import folder_argument, save
from examples.gpt import data
from examples.gpt.model import GPT
from examples.gpt.presets import PRESETS as SIZES
from examples.train import make_optimizer, model_shape
from muon import PRESETS, orthogonalize
from muon.newton_schulz import segments
from muon.polynomials import CONVERGING_TAIL, LARGEST_SINGULAR_VALUE, Triple, output_range

WEIGHT = "blocks.1.mlp.up.weight"
SHOWN = ("keller_jordan", "quintic", "polar_express")


def momentum_of_the_example(steps: int) -> Tensor:
    """The momentum of one weight of examples/train.py's `cpu` model after `steps` steps, float64."""
    torch.manual_seed(0)
    size = SIZES["cpu"]
    model = GPT(**model_shape(size, "flash"))
    tokens = data.load(None, size.context).train
    optimizer = make_optimizer(model, size, "muon")
    for step in range(steps):
        model(*data.training_batch(tokens, size.batch, size.context, seed=0, step=step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return optimizer.state[model.get_parameter(WEIGHT)]["momentum_buffer"].double()


def p(steps: tuple[Triple, ...], s: np.ndarray) -> np.ndarray:
    """What the steps make of singular values s."""
    for a, b, c in steps:
        s = a * s + b * s**3 + c * s**5
    return s


def draw_singular_values(M: Tensor, steps: int, folder: Path) -> None:
    before = torch.linalg.svdvals(M / M.norm()).numpy()
    figure, (left, right) = plt.subplots(1, 2, figsize=(8, 3), layout="constrained")
    left.semilogy(before, ".", markersize=3, color="black")
    left.set(title=f"momentum of {WEIGHT}, step {steps}", ylabel="singular value / Frobenius norm", ylim=(1e-4, 2))
    print(
        f"momentum of {WEIGHT}, {M.shape[0]} × {M.shape[1]}, after {steps} steps (Python {platform.python_version()})"
    )
    print(f"  largest / smallest singular value      {before[0] / before[-1]:.0f}")
    print(f"  share of the squared norm in the top 8 {(before[:8] ** 2).sum():.2f}")
    for name in SHOWN:
        after = torch.linalg.svdvals(orthogonalize(M, name)).numpy()
        right.plot(np.sort(after)[::-1], ".", markersize=3, label=name)
        print(f"  after five {name} steps: {after.min():.3f} to {after.max():.3f}")
    right.axhline(1, color="grey", linewidth=0.8)
    right.set(title="after five Newton-Schulz steps", ylim=(0, 1.5))
    right.legend()
    for axes in (left, right):
        axes.set_xlabel("singular value, by size")
    save(figure, folder, "muon_singular_values.svg")


def draw_polynomials(folder: Path) -> None:
    s = np.geomspace(1e-4, LARGEST_SINGULAR_VALUE, 1000)
    figure, axes = plt.subplots(1, 4, figsize=(11, 2.8), sharey=True, layout="constrained")
    print(f"range over singular values in (0, {LARGEST_SINGULAR_VALUE}], and from 0.01 on")
    for panel, (name, steps) in zip(axes, PRESETS.items(), strict=True):
        for count in range(1, len(steps) + 1):
            last = count == len(steps)
            color = plt.cm.Blues(0.25 + 0.5 * count / len(steps))
            panel.semilogx(s, p(steps[:count], s), color="black" if last else color, linewidth=1.5 if last else 0.9)
        low, high = output_range(steps)
        image = p(steps, np.geomspace(0.01, LARGEST_SINGULAR_VALUE, 100_001))
        panel.axhline(1, color="grey", linewidth=0.8)
        panel.set(title=f"{name}, {len(steps)} steps", xlabel="singular value before", ylim=(0, 2))
        print(f"  {name:14} ({low:.0f}, {high:.3f}], from 0.01 on [{image.min():.3f}, {image.max():.3f}]")
    axes[0].set_ylabel("after 1, 2, ... steps")
    save(figure, folder, "muon_polynomials.svg")


def draw_ball(folder: Path) -> None:
    """What a 2 × 2 matrix does to the unit circle, after each step."""
    M = torch.tensor([[1.0, 0.7], [0.2, 0.4]], dtype=torch.float64)
    angles = torch.linspace(0, 2 * math.pi, 200, dtype=torch.float64)
    circle = torch.stack([angles.cos(), angles.sin()])
    figure, axes = plt.subplots(1, 6, figsize=(11, 2.2), sharex=True, sharey=True, layout="constrained")
    print("singular values of the 2 × 2 matrix")
    for count, panel in enumerate(axes):
        X = orthogonalize(M, CONVERGING_TAIL, count)
        panel.plot(*circle.numpy(), color="lightgrey")
        panel.plot(*(X @ circle).numpy(), color="black")
        for column, color in zip(X.T, ("tab:red", "tab:blue"), strict=True):
            panel.annotate("", column.tolist(), (0, 0), arrowprops={"arrowstyle": "->", "color": color})
        panel.set(title="M / ‖M‖" if count == 0 else f"step {count}", xlim=(-1.3, 1.3), ylim=(-1.3, 1.3))
        panel.set_aspect("equal")
        values = ", ".join(f"{s:.3f}" for s in torch.linalg.svdvals(X).tolist())
        print(f"  after {count} steps: {values}")
    print(f"a singular value of 0.01 after five such steps: {p((CONVERGING_TAIL,) * 5, np.array(0.01)):.3f}")
    save(figure, folder, "muon_ball.svg")


def draw_costs(folder: Path) -> None:
    """Operations of the two iterations, symmetric products counted half, in units of n³."""
    ratio = np.linspace(1, 8, 100)
    figure, axes = plt.subplots(figsize=(5, 3), layout="constrained")
    steps = PRESETS["keller_jordan"]
    cuts = [len(segment) for segment in segments(steps)]
    axes.plot(ratio, standard_cost(len(steps), ratio), label="standard")
    axes.plot(ratio, gram_cost(cuts, ratio), label=f"Gram, segments of {' and '.join(map(str, cuts))} steps")
    axes.set(xlabel="longer side / shorter side", ylabel="operations / n³", ylim=(0, None))
    axes.legend()
    save(figure, folder, "muon_costs.svg")
    print("operations in units of n³, five steps: standard, Gram")
    for alpha in (1, 2, 4, 8):
        print(f"  m / n = {alpha}: {standard_cost(5, alpha):.0f}, {gram_cost(cuts, alpha):.0f}")


def standard_cost(steps: int, ratio):
    """Each step: XXᵀ (ratio n³, half of 2 n² m), A² (n³, half of 2 n³), BX (2 ratio n³)."""
    return steps * (3 * ratio + 1)


def gram_cost(segment_lengths: list[int], ratio):
    """Each segment: XXᵀ and QX (3 ratio n³ together); of n³ three in its first step, two in its last, four between."""
    return sum(3 * ratio + 4 * length - 3 for length in segment_lengths)


def main() -> None:
    folder = folder_argument(__doc__)
    steps = 60
    draw_singular_values(momentum_of_the_example(steps), steps, folder)
    draw_polynomials(folder)
    draw_ball(folder)
    draw_costs(folder)


if __name__ == "__main__":
    main()
