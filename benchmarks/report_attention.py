"""What benchmarks/report.py says of docs/attention.csv beyond its numbers: ratios, the ceiling, a figure."""

from pathlib import Path

import matplotlib.pyplot as plt

Row = dict[str, str]
Found = dict[tuple[str, str], dict[str, Row]]  # by shape and mask, then by variant

LABELS = {
    "ours": "ours", "triton": "portable", "sdpa_cudnn": "SDPA cuDNN", "flash_attention_4": "FlashAttention-4",
    "flex": "FlexAttention", "sdpa_flash": "SDPA flash-2",
}  # fmt: skip
PASSES = ("forward", "backward")


def by_shape(rows: list[Row]) -> Found:
    found: Found = {}
    for row in rows:
        shape = ", ".join(row[key] for key in ("batch", "seqlen", "heads", "width"))
        found.setdefault((shape, row["mask"]), {})[row["variant"]] = row
    return {key: variants for key, variants in found.items() if "ours" in variants}


def tflops(row: Row, which: str) -> float:
    return float(row[f"{which}_tflops"])


def ratio(variants: dict[str, Row], other: str, which: str) -> float:
    return tflops(variants["ours"], which) / tflops(variants[other], which)


def bars(row: Row) -> tuple[float, float]:
    """The aim for our forward's and backward's ratio to cuDNN's."""
    if row["seqlen"] == "1024":
        return 1.0, 1.1
    bar = {"64": 1.05, "128": 1.0, "256": 0.9}[row["width"]]
    return bar, bar


def ratios(rows: list[Row], figure: Path) -> str:
    """Tables of ratios, a line about max_logits, and the figure, which is drawn here."""
    found = by_shape(rows)
    if not found:
        return "Not measured yet."
    draw(found, figure)
    parts = [table_of_ratios(found), smallest_to_flex(found), cost_of_max_logits(found)]
    return "\n\n".join([*filter(None, parts), f"![TFLOP/s of every variant]({figure.name})"])


def table_of_ratios(found: Found) -> str:
    lines = [
        "| B, S, H, D | mask | forward to cuDNN's | aim | backward to cuDNN's | aim | of the ceiling |",
        "|---|---|---|---|---|---|---|",
    ]
    for (shape, mask), variants in found.items():
        aims = ["", "", "", ""]
        if "sdpa_cudnn" in variants:
            pairs = zip(PASSES, bars(variants["ours"]), strict=True)
            aims = [
                cell for which, bar in pairs for cell in (f"{ratio(variants, 'sdpa_cudnn', which):.2f}", f"{bar:.2f}")
            ]
        ceiling = float(variants["ours"]["matmul_tflops"])
        share = " / ".join(f"{tflops(variants['ours'], which) / ceiling:.0%}" for which in PASSES)
        lines.append("| " + " | ".join([shape, mask, *aims, share]) + " |")
    ceilings = sorted({float(variants["ours"]["matmul_tflops"]) for variants in found.values()})
    measured = " to ".join(f"{ceiling:.0f}" for ceiling in dict.fromkeys((ceilings[0], ceilings[-1])))
    return "\n".join([*lines, "", f"The ceiling, a product of two 8192 × 8192 matrices, ran at {measured} TFLOP/s."])


def smallest_to_flex(found: Found) -> str:
    """Of each mask, over its shapes."""
    lines = []
    for mask in dict.fromkeys(mask for _, mask in found):
        mine = [(shape, variants) for (shape, of), variants in found.items() if of == mask and "flex" in variants]
        if mine:
            worst = [min((ratio(variants, "flex", which), shape) for shape, variants in mine) for which in PASSES]
            lines.append(f"| {mask} | " + " | ".join(f"{value:.2f} ({shape})" for value, shape in worst) + " |")
    heading = ["| mask | smallest ratio to FlexAttention, forward | backward |", "|---|---|---|"]
    return "\n".join([*heading, *lines]) if lines else ""


def cost_of_max_logits(found: Found) -> str:
    cost, shape, mask = max(
        (float(variants["ours"]["forward_tflops"]) / float(variants["ours_max"]["forward_tflops"]) - 1, shape, mask)
        for (shape, mask), variants in found.items()
    )
    return f"`return_max_logits` costs at most {cost:.1%} of a forward ({shape}, {mask})."


def in_python(rows: list[Row]) -> str:
    """Of the causal shapes of 1024 tokens: how long Python takes to launch what takes the device so long."""
    lines = ["| B, S, H, D | | device, ms | Python, ms |", "|---|---|---|---|"]
    for (shape, mask), variants in by_shape(rows).items():
        if mask == "causal" and " 1024," in shape:
            for name, label in LABELS.items():
                if name in variants:
                    cells = (
                        " / ".join(f"{float(variants[name][f'{which}{suffix}']):.3f}" for which in PASSES)
                        for suffix in ("_ms", "_python_ms")
                    )
                    lines.append(f"| {shape} | {label} | {' | '.join(cells)} |")
    return "\n".join(lines)


def short(rows: list[Row]) -> str:
    """For README.md: forward and backward of the causal shapes of 4096 tokens."""
    found = {
        shape: variants for (shape, mask), variants in by_shape(rows).items() if mask == "causal" and " 4096," in shape
    }
    if not found:
        return ""
    used = {name: label for name, label in LABELS.items() if any(name in variants for variants in found.values())}
    lines = ["and of causal attention in bfloat16, TFLOP/s forward / backward:", ""]
    lines += [f"| batch, length, heads, width | {' | '.join(used.values())} |", "|---" * (len(used) + 1) + "|"]
    for shape, variants in found.items():
        pairs = [
            [f"{tflops(variants[name], which):.0f}" for which in PASSES] if name in variants else [] for name in used
        ]
        lines.append(f"| {shape} | " + " | ".join(" / ".join(pair) for pair in pairs) + " |")
    return "\n".join(lines)


def draw(found: Found, path: Path) -> None:
    """A bar for each variant and shape; the line is the ceiling."""
    figure, panels = plt.subplots(2, 1, figsize=(12, 7), sharex=True, layout="constrained")
    used = [name for name in LABELS if any(name in variants for variants in found.values())]
    bar = 0.85 / len(used)
    for axes, which in zip(panels, PASSES, strict=True):
        for number, name in enumerate(used):
            speeds = [tflops(variants[name], which) if name in variants else 0 for variants in found.values()]
            places = [i + bar * (number - (len(used) - 1) / 2) for i in range(len(found))]
            axes.bar(places, speeds, bar, label=LABELS[name])
        axes.axhline(max(float(variants["ours"]["matmul_tflops"]) for variants in found.values()), color="black")
        axes.set_ylabel(f"{which}, TFLOP/s")
    first = next(iter(found.values()))["ours"]
    panels[0].set_title(f"Attention, {first['gpu']}, bfloat16; the line is a large matrix product")
    panels[0].legend(ncols=len(used), fontsize=8)
    names = [f"{shape}\n{mask}" for shape, mask in found]
    panels[1].set_xticks(range(len(found)), names, rotation=60, ha="right", fontsize=8)
    figure.savefig(path, dpi=110)
    plt.close(figure)
