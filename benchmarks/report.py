"""Writes the tables of docs/performance.md, docs/results.md and README.md from docs/*.csv, and draws the figures.

    python -m benchmarks.report

Each table stands between two markers that name its block; everything else in the pages is written by hand.
"""

import csv
import re
from collections.abc import Callable
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from benchmarks.report_attention import in_python, ratios, short

DOCS = Path(__file__).parent.parent / "docs"
Row = dict[str, str]

# Column of the CSV file, heading, format of a number (none: text as it is).
TABLES: dict[str, list[tuple[str, str, str]]] = {
    "gpt2_124m": [
        ("tokens_per_step", "tokens a step", ",.0f"),
        ("optimizer", "optimizer", ""),
        ("attention", "attention", ""),
        ("step_ms", "ms a step", ".2f"),
        ("tokens_per_second", "tokens/s", ",.0f"),
        ("mfu", "MFU", ".1%"),
        ("optimizer_ms", "optimizer, ms", ".2f"),
        ("peak_memory_gib", "peak GiB", ".1f"),
    ],
    "newton_schulz": [
        ("shape", "batch × rows × cols", ""),
        ("ours_ms", "ours, ms", ".3f"),
        ("compiled_bmm_ms", "compiled bmm", ".3f"),
        ("torch_optim_muon_ms", "torch.optim.Muon", ".2f"),
        ("speedup", "times the faster of them", ".2f"),
        ("floor_ms", "floor, ms", ".3f"),
        ("copy_ms", "copy in and out, ms", ".3f"),
    ],
    "optimizer_step": [
        ("model", "hidden matrices of", ""),
        ("optimizer", "optimizer", ""),
        ("ms", "ms a step", ".2f"),
        ("python_ms", "of it Python", ".2f"),
        ("launches", "launches", ""),
        ("extra_mib", "extra MiB", ".0f"),
    ],
    "distributed_step": [
        ("model", "hidden matrices of", ""),
        ("layout", "layout", ""),
        ("ranks", "GPUs", ""),
        ("ms", "ms a step", ".2f"),
        ("of_alone", "of alone", ".2f"),
        ("sending_ms", "sending, ms", ".2f"),
        ("overlapped_ms", "of it while computing", ".2f"),
    ],
    "attention": [
        ("shape", "B, S, H, D", ""),
        ("mask", "mask", ""),
        ("by ours", "ours, forward / backward", ""),
        ("by ours_max", "with max_logits", ""),
        ("by triton", "portable", ""),
        ("by sdpa_flash", "SDPA flash-2", ""),
        ("by flex", "FlexAttention", ""),
        ("by sdpa_cudnn", "SDPA cuDNN", ""),
        ("by flash_attention_4", "FlashAttention-4", ""),
    ],
    "decode": [
        ("shape", "B, S, Hq, Hkv, D", ""),
        ("by triton", "ours, ms (GB/s)", ""),
        ("by sdpa", "SDPA", ""),
        ("by copy", "copying the keys", ""),
    ],
}
# Where a row is one variant, what of it goes into the table's cell.
CELLS: dict[str, Callable[[Row], str]] = {
    "attention": lambda row: f"{float(row['forward_tflops']):.0f} / {float(row['backward_tflops']):.0f}",
    "decode": lambda row: f"{float(row['ms']):.3f} ({float(row['gb_per_s']):,.0f})",
}
KEYS = {
    "attention": ("batch", "seqlen", "heads", "width"),
    "decode": ("batch", "length", "heads_q", "heads_k", "width"),
}
# What isn't one table of one file.
BLOCKS: dict[str, Callable[[Path], str]] = {
    "attention_ratios": lambda figures: ratios(rows_of("attention"), figures / "attention.png"),
    "attention_python": lambda figures: in_python(rows_of("attention")),
    "attention_short": lambda figures: short(rows_of("attention")),
    "optimizer_step_short": lambda figures: steps_beside_each_other(rows_of("optimizer_step")),
    "newton_schulz_short": lambda figures: some_shapes(rows_of("newton_schulz")),
}


def rows_of(name: str) -> list[Row]:
    with (DOCS / f"{name}.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def read(name: str) -> list[Row]:
    rows = rows_of(name)
    return beside_each_other(name, rows) if name in CELLS else rows


def beside_each_other(name: str, rows: list[Row]) -> list[Row]:
    """One row a shape and mask, from one row each for every variant."""
    found: dict[tuple[str, str], Row] = {}
    for row in rows:
        shape = ", ".join(row[key] for key in KEYS[name])
        one = found.setdefault((shape, row.get("mask", "")), row | {"shape": shape})
        one[f"by {row['variant']}"] = CELLS[name](row)
    return list(found.values())


def steps_beside_each_other(rows: list[Row]) -> str:
    """For README.md: a row for each model, a column for each optimizer."""
    found: dict[str, dict[str, str]] = {}
    for row in rows:
        found.setdefault(row["model"], {})[row["optimizer"]] = f"{float(row['ms']):.3g}"
    names = {"muon": "`muon.Muon`", "torch.optim.Muon": "`torch.optim.Muon`", "torch.optim.AdamW, fused": "fused AdamW"}
    lines = [f"| | {' | '.join(names.values())} |", "|---" * (len(names) + 1) + "|"]
    lines += [f"| {model} | {' | '.join(by_name[name] for name in names)} |" for model, by_name in found.items()]
    return "\n".join(lines)


def some_shapes(rows: list[Row]) -> str:
    """For README.md: a few of the batches."""
    shapes = ("12 × 768 × 768", "12 × 768 × 3072", "8 × 2048 × 8192", "4 × 4096 × 4096", "4096 × 64 × 768")
    columns = ("ours_ms", "compiled_bmm_ms", "floor_ms")
    lines = ["| batch × rows × cols | `muon.orthogonalize` | batched products, compiled | floor |", "|---|---|---|---|"]
    for row in rows:
        if row["shape"] in shapes:
            lines.append(f"| {row['shape']} | {' | '.join(f'{float(row[column]):.3g}' for column in columns)} |")
    return "\n".join(lines)


def table(name: str, rows: list[Row]) -> str:
    columns = [column for column in TABLES[name] if any(row.get(column[0]) for row in rows)]
    lines = ["| " + " | ".join(heading for _, heading, _ in columns) + " |", "|---" * len(columns) + "|"]
    for row in rows:
        cells = (
            format(float(row[key]), style) if style and row.get(key) else row.get(key, "") for key, _, style in columns
        )
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join([*lines, "", source(name, rows)])


def source(name: str, rows: list[Row]) -> str:
    made_by = "{gpu}, torch {torch}, Triton {triton}".format(**rows[0])
    commands = ", ".join(f"`{command}`" for command in dict.fromkeys(row["command"] for row in rows))
    return f"[{name}.csv]({name}.csv), {made_by}: {commands}"


def block(name: str, figures: Path) -> str:
    return BLOCKS[name](figures) if name in BLOCKS else table(name, read(name))


def draw(rows: list[Row], path: Path) -> None:
    """Times relative to the floor, on a logarithmic axis."""
    figure, axes = plt.subplots(figsize=(9, 4.5))
    labels = {"ours_ms": "ours", "compiled_bmm_ms": "compiled bmm", "torch_optim_muon_ms": "torch.optim.Muon"}
    for offset, (key, label) in enumerate(labels.items()):
        found = [(i, float(row[key]) / float(row["floor_ms"])) for i, row in enumerate(rows) if row[key]]
        axes.bar([i + 0.27 * (offset - 1) for i, _ in found], [value for _, value in found], 0.27, label=label)
    axes.axhline(1, color="black", linewidth=1)
    axes.set_yscale("log")
    axes.set_ylabel("time / floor")
    axes.set_xticks(range(len(rows)), [row["shape"] for row in rows], rotation=30, ha="right", fontsize=8)
    axes.set_title(f"Five Newton-Schulz steps, {rows[0]['gpu']}; the floor is the products at the measured ceiling")
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def fill(page: Path, figures: Path = DOCS) -> None:
    """Blocks of other scripts are left as they are."""
    text = page.read_text()
    for name in re.findall(r"<!-- (\w+) -->\n", text):
        if name in TABLES or name in BLOCKS:
            filled = f"<!-- {name} -->\n\n{block(name, figures)}\n\n<!-- end -->"
            text, count = re.subn(
                f"<!-- {name} -->.*?<!-- end -->", lambda _, filled=filled: filled, text, flags=re.DOTALL
            )
            assert count == 1, f"{page} has {count} places for {name}"
    page.write_text(text)


def main() -> None:
    for page in (DOCS / "performance.md", DOCS / "results.md", DOCS.parent / "README.md"):
        fill(page)
    draw(read("newton_schulz"), DOCS / "newton_schulz.png")


if __name__ == "__main__":
    main()
