"""Draws the figures of docs/attention.md and prints the numbers that the page quotes.

    python -m docs.draw.attention

A few seconds on any CPU.
"""

from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import torch
from matplotlib.colors import ListedColormap
from torch import Tensor

from docs.draw.common import folder_argument, save

TILE = 4  # keys in a tile of the small example
NOTHING, PART, ALL = 0, 1, 2  # what a mask leaves of a tile
COLORS = ListedColormap(["white", "#f4a259", "#5b8e7d"])


def masks(length: int) -> dict[str, np.ndarray]:
    """Which query (row) sees which key (column)."""
    query, key = np.arange(length)[:, None], np.arange(length)[None, :]
    fewer = query[: length // 2] + length // 2  # the last half of the queries alone
    return {
        "no mask": np.ones((length, length), bool),
        "causal": key <= query,
        "causal, half the queries": key <= fewer,
        "causal, window of a quarter": (key <= query) & (key >= query - length // 4),
    }


def tiles(mask: np.ndarray, side: int) -> np.ndarray:
    """What the mask leaves of each tile of side × side pairs."""
    rows, keys = mask.shape[0] // side, mask.shape[1] // side
    share = mask.reshape(rows, side, keys, side).mean((1, 3))
    return np.where(share == 1, ALL, np.where(share > 0, PART, NOTHING))


def draw_tiles(folder: Path, length: int = 128, side: int = 16) -> None:
    found = masks(length)
    figure, axes = plt.subplots(1, len(found), figsize=(10, 2.9), layout="constrained")
    print(f"{length} keys, tiles of {side} × {side}: computed without a mask, with one, skipped")
    for panel, (name, mask) in zip(axes, found.items(), strict=True):
        grid = tiles(mask, side)
        panel.pcolormesh(grid, cmap=COLORS, vmin=NOTHING, vmax=ALL, edgecolors="grey", linewidth=0.5)
        for row, states in enumerate(grid):  # the order in which the row's program visits its tiles
            for turn, key in enumerate(np.flatnonzero(states != NOTHING)):
                panel.text(key + 0.5, row + 0.5, str(turn + 1), ha="center", va="center", fontsize=6)
        panel.set(title=name, xlabel="tiles of keys", xticks=[], yticks=[], aspect="equal")
        panel.invert_yaxis()
        counts = [int((grid == state).sum()) for state in (ALL, PART, NOTHING)]
        print(f"  {name:28} {counts[0]:3} {counts[1]:3} {counts[2]:3}")
    axes[0].set_ylabel("tiles of queries, one program a row")
    save(figure, folder, "attention_tiles.svg")


def example() -> tuple[Tensor, Tensor]:
    """The scores of one query against 16 keys and the keys' values, 16 × 2, float64."""
    torch.manual_seed(0)
    q, k, v = torch.randn(8).double(), torch.randn(16, 8).double(), torch.randn(16, 2).double()
    return k @ q / 8**0.5, v


def draw_online_softmax(folder: Path) -> None:
    scores, v = example()
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3), layout="constrained", width_ratios=(2, 1))
    m, l, a = -torch.inf, 0.0, torch.zeros(2).double()
    shares: list[float] = []  # what each tile so far contributes to l
    print("tile   m after  rescaled by  l after  a after")
    for start in range(0, len(scores), TILE):
        tile, index = slice(start, start + TILE), start // TILE
        new_m = max(m, scores[tile].max().item())
        rescale = float(np.exp(m - new_m))
        weights = (scores[tile] - new_m).exp()
        l, a, m = l * rescale + weights.sum().item(), a * rescale + weights @ v[tile], new_m
        shares = [share * rescale for share in shares] + [weights.sum().item()]
        print(f"{index + 1:4}  {m:8.3f}  {rescale:11.3f}  {l:7.3f}  {a[0]:.3f} {a[1]:.3f}")
        left.bar(range(start, start + TILE), scores[tile].numpy(), color=f"C{index}")
        left.plot((start - 0.5, start + TILE - 0.5), (m, m), color="black", label=None if index else "m")
        bottoms = np.cumsum([0.0, *shares[:-1]])
        right.bar([index] * len(shares), shares, bottom=bottoms, color=[f"C{i}" for i in range(len(shares))])
    out = a / l
    print(f"out = a / l = {out[0]:.3f} {out[1]:.3f}, lse = m + log l = {m + np.log(l):.3f}")
    torch.testing.assert_close(out, scores.softmax(0) @ v)
    left.axhline(0, color="grey", linewidth=0.8)
    left.set(title="scores of one query, and its running maximum m", xlabel="key, in tiles of 4")
    left.legend()
    right.set(title="running sum l of exp(score - m)", xlabel="tiles seen", xticks=range(4), xticklabels="1234")
    save(figure, folder, "attention_online_softmax.svg")


def main() -> None:
    folder = folder_argument(__doc__)
    draw_tiles(folder)
    draw_online_softmax(folder)


if __name__ == "__main__":
    main()
